"""The S3 tier against plain sockets and against boto3, on one SeaweedFS server, in turns.

The limit of reading is a loop of blocking sockets in threads, one per block in flight: presigned
GETs, received into the slots, without verification. boto3 is used with its defaults: `get_object`,
`read()`, and a copy into the slot; `put_object` of header and payload with its default checksums.
The tier moves the same blocks between the same memory and the same server, in the daemon's batches;
it verifies every block that it gets, and looks up blocks before it puts them. The server runs on
the same cores and limits writing: only this process's CPU time of puts can be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import mmap
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.config
import msgspec
import uvloop

from bench.common import in_flight, write_result
from tests.support.servers.s3 import SeaweedFS
from tierd.backend import (
    HEADER_BYTES,
    BlockHeader,
    GetRequest,
    Outcome,
    PutRequest,
    checksum,
    pack_header,
)
from tierd.types import PAGE_BYTES, SCOPE_BYTES, BlockKey
from tierd_backends.s3 import S3Backend, S3Options

ROUNDS = 5
BATCH_BLOCKS = 32
BATCH_BYTES = 32 << 20
"""The daemon's batch per call; below, its calls in flight."""
READ_CALLS = 4
WRITE_CALLS = 2

TARGETS = {"get of raw": 0.75, "get of boto3": 1.25, "get CPU of boto3": 0.6, "put CPU": 0.6}
"""Targets at 2 MiB blocks. For CPU time lower is better."""

NAMESPACE = hashlib.sha256(b"bench").digest()[:SCOPE_BYTES]


class Blocks:
    """Blocks in page-aligned slots, and slots to load them into."""

    def __init__(self, count: int, block_bytes: int) -> None:
        self.count = count
        self.block_bytes = block_bytes
        self.memory = mmap.mmap(-1, count * block_bytes)
        whole = memoryview(self.memory)
        self.views = [whole[at : at + block_bytes] for at in range(0, len(whole), block_bytes)]
        for number, view in enumerate(self.views):
            piece = hashlib.shake_128(b"%d" % number).digest(PAGE_BYTES)
            view[:] = piece * (block_bytes // PAGE_BYTES)
        self.sums = [checksum(view) for view in self.views]
        self.gigabytes = count * block_bytes / 1e9

    def hashes(self, generation: int) -> list[bytes]:
        """Names of the blocks. Each generation has new names, so its blocks are stored again."""
        return [hashlib.sha256(b"%d/%d" % (generation, i)).digest() for i in range(self.count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=128, help="bytes of each case that reads")
    parser.add_argument("--put-mib", type=int, default=32, help="bytes of each case that writes")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--blocks", default="128,2048,16384", help="block sizes in KiB")
    parser.add_argument("--flights", default="1,4,16,32", help="blocks in flight")
    parser.add_argument("--dry", action="store_true", help="write no result")
    given = parser.parse_args()
    results: dict[str, dict[str, object]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="tierd-bench-") as scratch,
        SeaweedFS(Path(scratch)) as server,
    ):
        for kib in map(int, given.blocks.split(",")):
            for flight in map(int, given.flights.split(",")):
                bench = Bench(server, flight, given.rounds)
                label = f"{kib} KiB, {flight} in flight"
                reads = bench.reads(max(1, (given.mib << 10) // kib), kib << 10)
                writes = bench.writes(max(2, (given.put_mib << 10) // kib), kib << 10)
                bench.close()
                results[label] = {"get": reads, "put": writes}
                show(label, reads, writes)
    if not given.dry:
        write_result("s3", results)  # type: ignore[arg-type]


class Bench:
    """The three clients with one bucket, and `flight` blocks in flight."""

    def __init__(self, server: SeaweedFS, flight: int, rounds: int) -> None:
        self.flight = flight
        self.rounds = rounds
        self.bucket = server.make_bucket()
        self.signing = server.client()
        self.boto = boto3.client(
            "s3",
            endpoint_url=server.endpoint,
            region_name=server.region,
            aws_access_key_id=server.access_key,
            aws_secret_access_key=server.secret_key,
            config=botocore.config.Config(max_pool_connections=flight),
        )
        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        options = server.options(self.bucket, connections=flight, timeout_ms=20_000)
        self.backend = S3Backend.from_options(msgspec.convert(options, S3Options))
        self.runner.run(self.backend.open())
        self.seconds: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}

    def close(self) -> None:
        self.runner.run(self.backend.close())
        self.runner.close()
        self.boto.close()
        self.signing.close()

    def timed(self, name: str, case: Callable[[], object]) -> None:
        start, start_cpu = time.perf_counter(), time.process_time()
        case()
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        self.cpu.setdefault(name, []).append(time.process_time() - start_cpu)

    def reads(self, count: int, block_bytes: int) -> dict[str, Any]:
        self.seconds, self.cpu = {}, {}
        blocks = Blocks(count, block_bytes)
        hashes = blocks.hashes(0)
        self.put(blocks, hashes)
        urls = [self.signed("get_object", name_of(each)) for each in hashes]
        raw = [bytearray(HEADER_BYTES + block_bytes + (16 << 10)) for _ in range(self.flight)]
        for number in range(self.rounds + 1):
            self.timed("raw", lambda: in_threads(self.flight, urls, raw, raw_get))
            self.timed("tierd", lambda: self.get(blocks, hashes))
            self.timed("boto3", lambda: self.boto_get(blocks, hashes))
            if not number:
                # Warm up the server and the connections.
                self.seconds, self.cpu = {}, {}
        return self.report(blocks.gigabytes)

    def writes(self, count: int, block_bytes: int) -> dict[str, Any]:
        self.seconds, self.cpu = {}, {}
        blocks = Blocks(count, block_bytes)
        for number in range(self.rounds):
            hashes = blocks.hashes(2 * number + 1)
            self.timed("tierd", lambda hashes=hashes: self.put(blocks, hashes))  # type: ignore[misc]
            hashes = blocks.hashes(2 * number + 2)
            self.timed("boto3", lambda hashes=hashes: self.boto_put(blocks, hashes))  # type: ignore[misc]
        return self.report(blocks.gigabytes)

    def report(self, gigabytes: float) -> dict[str, Any]:
        return {
            name: {
                "gb_s": round(gigabytes / statistics.median(self.seconds[name]), 3),
                "gb_s_runs": [round(gigabytes / each, 3) for each in self.seconds[name]],
                "cpu_s_per_gb": round(statistics.median(self.cpu[name]) / gigabytes, 3),
            }
            for name in self.seconds
        }

    def signed(self, operation: str, name: str) -> str:
        url = self.signing.generate_presigned_url(
            operation, Params={"Bucket": self.bucket, "Key": name}
        )
        assert isinstance(url, str)
        return url

    def put(self, blocks: Blocks, hashes: list[bytes]) -> None:
        requests = [
            PutRequest(each, bytes(32), digest, view, len(view))
            for each, digest, view in zip(hashes, blocks.sums, blocks.views, strict=True)
        ]

        async def call(batch: list[PutRequest]) -> None:
            assert set(await self.backend.put_many(NAMESPACE, batch)) == {Outcome.STORED}

        self.runner.run(in_flight(WRITE_CALLS, batches(requests, blocks.block_bytes), call))

    def get(self, blocks: Blocks, hashes: list[bytes]) -> None:
        requests = [
            GetRequest(each, view, len(view))
            for each, view in zip(hashes, blocks.views, strict=True)
        ]

        async def call(batch: list[GetRequest]) -> None:
            results = await self.backend.get_into(NAMESPACE, batch)
            assert all(result.outcome is Outcome.HIT for result in results)

        self.runner.run(in_flight(READ_CALLS, batches(requests, blocks.block_bytes), call))

    def boto_get(self, blocks: Blocks, hashes: list[bytes]) -> None:
        def work(take: Callable[[], tuple[bytes, memoryview] | None], _: object) -> None:
            while (item := take()) is not None:
                answer = self.boto.get_object(Bucket=self.bucket, Key=name_of(item[0]))
                item[1][:] = answer["Body"].read()[HEADER_BYTES:]

        jobs = list(zip(hashes, blocks.views, strict=True))
        in_threads(self.flight, jobs, [None] * self.flight, work)

    def boto_put(self, blocks: Blocks, hashes: list[bytes]) -> None:
        def work(take: Callable[[], tuple[bytes, bytes, memoryview] | None], _: object) -> None:
            while (item := take()) is not None:
                block_hash, digest, view = item
                header = BlockHeader(BlockKey(NAMESPACE, block_hash), bytes(32), len(view), digest)
                body = b"".join((pack_header(header), view))
                self.boto.put_object(Bucket=self.bucket, Key=name_of(block_hash), Body=body)

        jobs = list(zip(hashes, blocks.sums, blocks.views, strict=True))
        in_threads(self.flight, jobs, [None] * self.flight, work)


def raw_get(take: Callable[[], str | None], buffer: bytearray) -> None:
    """Send GETs one after the other on one plain socket, into one buffer."""
    view = memoryview(buffer)
    sock: socket.socket | None = None
    while (item := take()) is not None:
        url = urlsplit(item)
        if sock is None:
            sock = socket.create_connection((url.hostname, url.port))
        sock.sendall(f"GET {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode())
        got = 0
        while (end := buffer.find(b"\r\n\r\n", 0, got)) < 0:
            got += sock.recv_into(view[got:])
        head = bytes(view[:end])
        assert head.startswith(b"HTTP/1.1 200"), head
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        total = end + 4 + length
        while got < total:
            got += sock.recv_into(view[got:total])
    if sock is not None:
        sock.close()


def in_threads(count: int, jobs: list[Any], extras: list[Any], work: Callable[..., None]) -> None:
    """Run `work` on `count` threads, which take the jobs one by one."""
    queue = iter(jobs)
    lock = threading.Lock()

    def take() -> object:
        with lock:
            return next(queue, None)

    threads = [threading.Thread(target=work, args=(take, extra)) for extra in extras]
    assert len(threads) == count
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert take() is None


def batches(requests: list[Any], block_bytes: int) -> list[list[Any]]:
    size = max(1, min(BATCH_BLOCKS, BATCH_BYTES // block_bytes))
    return [requests[at : at + size] for at in range(0, len(requests), size)]


def name_of(block_hash: bytes) -> str:
    return f"tierd/{NAMESPACE.hex()}/{block_hash.hex()}"


def show(label: str, reads: dict[str, Any], writes: dict[str, Any]) -> None:
    def ratio(rows: dict[str, Any], of: str, field: str) -> float:
        return float(rows["tierd"][field]) / float(rows[of][field])

    for side, rows in (("get", reads), ("put", writes)):
        numbers = ", ".join(
            f"{name} {row['gb_s']:.2f} ({row['cpu_s_per_gb']:.2f})" for name, row in rows.items()
        )
        print(f"{label}: {side} GB/s (CPU s/GB): {numbers}", flush=True)
    reads["ratio_to_raw"] = round(ratio(reads, "raw", "gb_s"), 3)
    reads["ratio_to_boto3"] = round(ratio(reads, "boto3", "gb_s"), 3)
    reads["cpu_ratio_to_boto3"] = round(ratio(reads, "boto3", "cpu_s_per_gb"), 3)
    writes["cpu_ratio_to_boto3"] = round(ratio(writes, "boto3", "cpu_s_per_gb"), 3)
    reads["targets"] = writes["targets"] = TARGETS
    print(
        f"{label}: get {reads['ratio_to_raw']:.2f} of raw, {reads['ratio_to_boto3']:.2f} of boto3 "
        f"at {reads['cpu_ratio_to_boto3']:.2f} of its CPU; put at "
        f"{writes['cpu_ratio_to_boto3']:.2f} of boto3's CPU",
        flush=True,
    )


if __name__ == "__main__":
    main()
