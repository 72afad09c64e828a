"""The Redis tier against plain sockets and against redis-py, on one server, in turns.

The limit is a loop of blocking sockets in threads, one per block in flight: SET by sendall from the
slots, GET by recv_into into the slots, without parsing or verification. A second limit also
computes the checksum of every block that it gets, which a tier has to do. The tier moves the same
blocks between the same memory and the same server, in the daemon's batches: it parses every reply,
verifies identity and checksum of every block that it gets, and looks up blocks before it puts them.
redis-py's asyncio client gets plain values, without verifying or copying them.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop
from redis.asyncio import Redis

from bench.common import in_flight, write_result
from tests.support.servers.redis import RedisServer
from tierd.backend import (
    HEADER_BYTES,
    BlockHeader,
    GetRequest,
    PutRequest,
    checksum,
    pack_header,
)
from tierd.cli.common.speed import get_all, put_all
from tierd.shared_memory.mapping import SharedMapping
from tierd.types import PAGE_BYTES, SCOPE_BYTES, BlockKey
from tierd_backends.redis import RedisBackend
from tierd_backends.redis.options import RedisOptions

ROUNDS = 7
CALLS = 4
"""Calls in flight and batches, as in the daemon."""

TARGET_RAW = 0.8
TARGET_REDIS_PY = 2.5
"""Targets of the GET ratios; for redis-py at 2 MiB and 4 in flight."""

NAMESPACE = hashlib.sha256(b"bench").digest()[:SCOPE_BYTES]
PREFIX = "tierd"


class Blocks:
    """Blocks in shared memory, each with room around it for the protocol bytes of a raw reply."""

    def __init__(self, count: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        stride = block_bytes + 2 * PAGE_BYTES
        self._fd = os.memfd_create("tierd-bench", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, count * stride)
        mapping = SharedMapping(self._fd, count * stride)
        while mapping.populate_next():
            pass
        self.hashes = [hashlib.sha256(b"%d" % number).digest() for number in range(count)]
        self.keys = [
            f"{PREFIX}:{NAMESPACE.hex()}:{block_hash.hex()}".encode() for block_hash in self.hashes
        ]
        self.raw = [mapping.view[at : at + stride] for at in range(0, count * stride, stride)]
        self.views = [raw[PAGE_BYTES : PAGE_BYTES + block_bytes] for raw in self.raw]
        self.fill()
        self.sums = [checksum(view) for view in self.views]
        self.headers = [
            pack_header(BlockHeader(BlockKey(NAMESPACE, name), bytes(32), block_bytes, digest))
            for name, digest in zip(self.hashes, self.sums, strict=True)
        ]
        self.puts = [
            PutRequest(name, bytes(32), digest, view, block_bytes)
            for name, digest, view in zip(self.hashes, self.sums, self.views, strict=True)
        ]
        self.gets = [
            GetRequest(name, view, block_bytes)
            for name, view in zip(self.hashes, self.views, strict=True)
        ]
        self.gigabytes = count * block_bytes / 1e9

    def fill(self) -> None:
        """Write the payloads; needed again after raw replies have overwritten them."""
        for number, view in enumerate(self.views):
            piece = hashlib.shake_128(b"%d" % number).digest(PAGE_BYTES)
            view[:] = piece * (self.block_bytes // PAGE_BYTES)

    def close(self) -> None:
        os.close(self._fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="bytes of each case")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--blocks", default="128,2048,16384", help="block sizes in KiB")
    parser.add_argument("--flights", default="1,4,16,32", help="blocks in flight")
    parser.add_argument("--dry", action="store_true", help="write no result")
    given = parser.parse_args()
    results: dict[str, dict[str, object]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="tierd-bench-") as scratch,
        RedisServer(Path(scratch)) as server,
    ):
        for kib in map(int, given.blocks.split(",")):
            blocks = Blocks(max((given.mib << 10) // kib, 1), kib << 10)
            for unix in (True, False):
                for flight in map(int, given.flights.split(",")):
                    label = f"{kib} KiB, {'unix' if unix else 'tcp'}, {flight} in flight"
                    results[label] = measure(server, blocks, unix, flight, given.rounds)
                    show(label, results[label])
            blocks.close()
    if not given.dry:
        write_result("redis", results)  # type: ignore[arg-type]


def measure(
    server: RedisServer, blocks: Blocks, unix: bool, flight: int, rounds: int
) -> dict[str, object]:
    """Medians of every case; the cases take turns."""
    options = msgspec.convert(
        {
            **server.options(unix=unix),
            "connections": flight,
            "prefix": PREFIX,
            "timeout_ms": 5000,
        },
        RedisOptions,
    )
    seconds: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}

    def timed(name: str, case: Callable[[], object]) -> None:
        start, start_cpu = time.perf_counter(), time.process_time()
        case()
        seconds.setdefault(name, []).append(time.perf_counter() - start)
        cpu.setdefault(name, []).append(time.process_time() - start_cpu)

    raw = Raw(server, blocks, unix, flight)
    admin = server.client()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        backend = RedisBackend.from_options(options)
        runner.run(backend.open())
        client = Redis(
            **({"unix_socket_path": str(server.socket_path)} if unix else {"port": server.port}),
            protocol=2,
        )
        for number in range(rounds + 1):
            # The first round warms up.
            admin.flushall(asynchronous=False)
            blocks.fill()
            timed("raw put", raw.put)
            admin.flushall(asynchronous=False)
            timed("tier put", lambda: runner.run(put_all(backend, NAMESPACE, blocks.puts, CALLS)))
            timed("tier get", lambda: runner.run(get_all(backend, NAMESPACE, blocks.gets, CALLS)))
            timed("raw get", raw.get)
            timed("raw get, summed", lambda: raw.get(summed=True))
            timed("redis-py get", lambda: runner.run(plain_get(client, blocks, flight)))
            if not number:
                seconds.clear()
                cpu.clear()
        runner.run(client.aclose())
        runner.run(backend.close())
    admin.close()
    raw.close()
    return report(blocks.gigabytes, seconds, cpu)


def report(
    gigabytes: float, seconds: dict[str, list[float]], cpu: dict[str, list[float]]
) -> dict[str, object]:
    middle = {name: statistics.median(runs) for name, runs in seconds.items()}
    return {
        "put": {"ratio_to_raw": round(middle["raw put"] / middle["tier put"], 3)},
        "get": {
            "ratio_to_raw": round(middle["raw get"] / middle["tier get"], 3),
            "target": TARGET_RAW,
            "ratio_to_raw_summed": round(middle["raw get, summed"] / middle["tier get"], 3),
            "ratio_to_redis_py": round(middle["redis-py get"] / middle["tier get"], 3),
            "target_redis_py": TARGET_REDIS_PY,
        },
        "gb_s": {name: round(gigabytes / each, 2) for name, each in middle.items()},
        "gb_s_runs": {
            name: [round(gigabytes / each, 2) for each in runs] for name, runs in seconds.items()
        },
        "client_cpu_s_per_gb": {
            name: round(statistics.median(runs) / gigabytes, 3) for name, runs in cpu.items()
        },
    }


def show(label: str, rows: dict) -> None:
    speeds, cpu = rows["gb_s"], rows["client_cpu_s_per_gb"]
    print(
        f"{label:>29}: put {speeds['tier put']:5.2f} GB/s, {rows['put']['ratio_to_raw']:.2f} of raw"
        f" | get {speeds['tier get']:5.2f} GB/s, {rows['get']['ratio_to_raw']:.2f} of raw,"
        f" {rows['get']['ratio_to_raw_summed']:.2f} of raw and checksum, "
        f"{rows['get']['ratio_to_redis_py']:.1f} x redis-py"
        f" | CPU s/GB get {cpu['tier get']:.2f} (raw {cpu['raw get']:.2f}, redis-py"
        f" {cpu['redis-py get']:.2f}), put {cpu['tier put']:.2f} (raw {cpu['raw put']:.2f})",
        flush=True,
    )


class Raw:
    """Blocking sockets, one per thread, that know the server's replies in advance."""

    def __init__(self, server: RedisServer, blocks: Blocks, unix: bool, flight: int) -> None:
        self._blocks = blocks
        self._socks = []
        for _ in range(flight):
            if unix:
                sock = socket.socket(socket.AF_UNIX)
                sock.connect(str(server.socket_path))
            else:
                sock = socket.create_connection(("127.0.0.1", server.port))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socks.append(sock)

    def put(self) -> None:
        self._spread(self._put)

    def get(self, *, summed: bool = False) -> None:
        self._spread(self._get_summed if summed else self._get)

    def close(self) -> None:
        for sock in self._socks:
            sock.close()

    def _spread(self, work: Callable[[socket.socket, int], None]) -> None:
        queue = iter(range(len(self._blocks.keys)))

        def serve(sock: socket.socket) -> None:
            for number in queue:
                work(sock, number)

        threads = [threading.Thread(target=serve, args=(sock,)) for sock in self._socks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _put(self, sock: socket.socket, number: int) -> None:
        blocks = self._blocks
        key, size = blocks.keys[number], HEADER_BYTES + blocks.block_bytes
        sock.sendall(
            b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b"
            % (len(key), key, size, blocks.headers[number])
        )
        sock.sendall(blocks.views[number])
        sock.sendall(b"\r\n")
        assert sock.recv(64) == b"+OK\r\n"

    def _get(self, sock: socket.socket, number: int) -> None:
        key = self._blocks.keys[number]
        sock.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
        size = HEADER_BYTES + self._blocks.block_bytes
        left = len(b"$%d\r\n" % size) + size + 2
        # The payload lands where the tier would put it, the reply's head in the page before.
        room = self._blocks.raw[number][PAGE_BYTES - (left - 2 - self._blocks.block_bytes) :]
        got = 0
        while got < left:
            got += sock.recv_into(room[got:left])

    def _get_summed(self, sock: socket.socket, number: int) -> None:
        self._get(sock, number)
        checksum(self._blocks.views[number])


async def plain_get(client: Redis, blocks: Blocks, flight: int) -> None:
    async def get(key: bytes) -> None:
        value = await client.get(key)
        assert value is not None
        assert len(value) == HEADER_BYTES + blocks.block_bytes

    await in_flight(flight, blocks.keys, get)


if __name__ == "__main__":
    main()
