"""Put and get through a real daemon, and page gather and scatter, against memcpy.

The limit of each case is a one-thread copy of the same blocks between private memory and a shared
mapping, in turns with the case in the same run; both sides are populated. A second limit adds the
unavoidable waits for another process (one per get, two per put): a bare ping-pong over a socketpair
between the copies.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from bench.common import interleaved, raw_ping_pong, write_result
from tests.support.blocks import namespace
from tests.support.daemon_process import DaemonProcess
from tierd.client import Client, Handle, copy
from tierd.shared_memory.mapping import SharedMapping
from tierd_connectors.vllm.worker.layout import PageMap, TensorView, blocks_of

ROUND_BYTES = 128 << 20
"""Bytes moved by one timed round: 7 ms of memcpy, far above the clock's resolution."""

CASES = [
    (2 << 20, 16, 0.90),
    (2 << 20, 1, 0.75),
    (128 << 10, 64, 0.85),
    (128 << 10, 16, 0.70),
    (128 << 10, 1, None),
]
NAMES = itertools.count()
"""Block names, never repeated: if an earlier case had used a name often and long ago, L2's policy
would expect no further use and evict the block between its put and its get."""

PAGE_CASES = [(64 << 10, 32, 0.80, 0.75), (32 << 10, 16, None, None)]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tierd-bench-") as scratch:
        results: dict[str, object] = {}
        with DaemonProcess(Path(scratch) / "a", capacity="1GiB", storage="") as daemon:
            for block_bytes, batch, target in CASES:
                results |= put_and_get(daemon, block_bytes, batch, target)
        results |= pages()
        with DaemonProcess(Path(scratch) / "b", capacity="2GiB", storage="") as daemon:
            results["populate"] = stalls(daemon)
    write_result("host", results)  # type: ignore[arg-type]


def put_and_get(
    daemon: DaemonProcess, block_bytes: int, batch: int, target: float | None
) -> dict[str, object]:
    client = daemon.client("bench")
    handle = client.register(namespace(block_bytes, model=f"bench-{block_bytes}"))
    count = ROUND_BYTES // block_bytes
    sources = cut(np.full(count * block_bytes, 7, np.uint8), block_bytes)
    targets = cut(np.full(count * block_bytes, 9, np.uint8), block_bytes)
    order = list(range(count))
    random.Random(0).shuffle(order)

    def fresh() -> list[bytes]:
        return [name() for _ in range(count)]

    def put_all(hashes: list[bytes]) -> None:
        for start in range(0, count, batch):
            part = order[start : start + batch]
            blocks = [(hashes[i], bytes(32), sources[i]) for i in part]
            assert all(client.put(handle, blocks))

    warm(daemon, client, handle, put_all, fresh)
    resident = fresh()
    put_all(resident)
    queue = [fresh() for _ in range(64)]

    def get_all() -> None:
        for start in range(0, count, batch):
            part = order[start : start + batch]
            into = [targets[i] for i in part]
            got = client.get(handle, [resident[i] for i in part], 1000, into)
            assert len(got) == len(part)

    arena = shared(count * block_bytes)
    local = cut(arena.view, block_bytes)
    trip = raw_ping_pong()

    def copies(waits: int, *, out: bool) -> None:
        for start in range(0, count, batch):
            for _ in range(waits):
                trip()
            for i in order[start : start + batch]:
                if out:
                    copy(local[i], sources[i])
                else:
                    copy(targets[i], local[i])

    # Puts evict blocks that the gets need, so puts and gets are measured in separate rounds.
    got = interleaved(
        {
            "memcpy": lambda: copies(0, out=False),
            "memcpy and waits": lambda: copies(1, out=False),
            "get": get_all,
        }
    )
    put = interleaved(
        {
            "memcpy": lambda: copies(0, out=True),
            "memcpy and waits": lambda: copies(2, out=True),
            "put": lambda: put_all(queue.pop()),
        }
    )
    client.close()
    label = f"{block_bytes >> 10} KiB x {batch}"
    return {
        f"{kind}, {label}": report(label, kind, seconds, target)
        for kind, seconds in (("get", got), ("put", put))
    }


def name() -> bytes:
    """The hash of a block that no case has used."""
    return hashlib.sha256(b"%d" % next(NAMES)).digest()


def shared(size_bytes: int) -> SharedMapping:
    """A populated mapping of a memfd, like a client's mapping of the arena."""
    fd = os.memfd_create("bench")
    os.ftruncate(fd, size_bytes)
    mapping = SharedMapping(fd, size_bytes)
    os.close(fd)
    while mapping.populate_next():
        pass
    return mapping


def cut(memory: np.ndarray | memoryview, size: int) -> list[memoryview]:
    """Views of consecutive pieces of `size` bytes."""
    whole = memoryview(memory)  # type: ignore[arg-type]  # the stubs know no buffer here
    return [whole[start : start + size] for start in range(0, len(whole), size)]


def report(
    label: str, kind: str, seconds: dict[str, float], target: float | None
) -> dict[str, object]:
    ratio = seconds["memcpy"] / seconds[kind]
    row: dict[str, object] = {
        "ratio_to_memcpy": round(ratio, 3),
        "target": target,
        "gb_s": round(ROUND_BYTES / 1e9 / seconds[kind], 2),
        "memcpy_gb_s": round(ROUND_BYTES / 1e9 / seconds["memcpy"], 2),
    }
    text = f"{kind:>7} {label:<18} {ratio:5.2f} of memcpy"
    if "memcpy and waits" in seconds:
        with_waits = seconds["memcpy and waits"] / seconds[kind]
        row["ratio_to_memcpy_and_waits"] = round(with_waits, 3)
        text += f", {with_waits:5.2f} of memcpy and bare waits"
    print(text if target is None else f"{text}  (target {target:.2f})", flush=True)
    return row


def warm(daemon: DaemonProcess, client: Client, handle: Handle, put_all, fresh) -> None:
    """Fill the namespace's share of the arena once, so that all of it is populated on both
    sides."""
    for _ in range(12):
        put_all(fresh())
    while client.populate():
        pass
    for _ in range(200):
        host = daemon.wait_backed_up()["host"]
        if host["populated_bytes"] >= host["allocated_bytes"]:
            return
        time.sleep(0.02)
    raise RuntimeError("the daemon did not populate its arena")


def pages() -> dict[str, object]:
    """Gather and scatter between (layers, blocks) pages and contiguous slots."""
    results: dict[str, object] = {}
    for page, layers, gather_target, scatter_target in PAGE_CASES:
        blocks = ROUND_BYTES // (page * layers)
        kv = np.full(layers * blocks * page, 3, np.uint8)
        address = kv.ctypes.data
        views = [
            TensorView(address + layer * blocks * page, address, (blocks, page), (page, 1), 1, kv)
            for layer in range(layers)
        ]
        page_map = PageMap(blocks_of(views, blocks), views)
        slots = np.full(layers * blocks * page, 5, np.uint8)
        size = page * layers
        slot_views = cut(slots, size)
        kv_views = cut(kv, size)
        order = list(range(blocks))
        random.Random(1).shuffle(order)

        def memcpy(kv_views=kv_views, slot_views=slot_views, order=order) -> None:
            for i in order:
                copy(slot_views[i], kv_views[i])

        def gather(page_map=page_map, slot_views=slot_views, order=order) -> None:
            page_map.gather_many(order, [slot_views[i] for i in order])

        def scatter(page_map=page_map, slot_views=slot_views, order=order) -> None:
            page_map.scatter_many([slot_views[i] for i in order], order)

        seconds = interleaved({"memcpy": memcpy, "gather": gather, "scatter": scatter})
        label = f"{page >> 10} KiB x {layers} layers"
        for kind, target in (("gather", gather_target), ("scatter", scatter_target)):
            results[f"{kind}, {label}"] = report(label, kind, seconds, target)
    return results


def stalls(daemon: DaemonProcess) -> dict[str, object]:
    """Longest pauses of the daemon's loop and of a thread in this process while segments are
    populated."""
    client = daemon.client("bench")
    handle = client.register(namespace(2 << 20, model="bench-populate"))
    probe = Client(daemon.socket, name="probe", map_segments=False)
    probe.status()
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(0.0005)
            now = time.perf_counter()
            ticks.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    calls: list[float] = []
    block = bytes(2 << 20)
    stored = 0
    while stored < 1 << 30:
        parts = [(name(), bytes(32), block)]
        stored += len(block) * sum(client.put(handle, parts))
        start = time.perf_counter()
        probe.acquire([], [], 10)
        probe.status()
        calls.append(time.perf_counter() - start)
        client.populate(4 << 20)
    stop.set()
    thread.join()
    probe.close()
    client.close()
    result: dict[str, object] = {
        "daemon_call_ms_max": round(max(calls) * 1e3, 2),
        "daemon_call_ms_p50": round(statistics.median(calls) * 1e3, 3),
        "client_thread_pause_ms_max": round(max(ticks) * 1e3, 2),
        "target_ms": 20,
    }
    print("while 1 GiB is populated:", result, flush=True)
    return result


if __name__ == "__main__":
    main()
