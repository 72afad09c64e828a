"""The file tier against fio on the same disk, in turns.

The limit is the better of fio's psync and io_uring engines, with direct I/O and the same block
size, threads and bytes. The tier moves blocks between its slabs and page-aligned shared memory and
verifies checksums on every read. Reads are measured in stored order, as a prefix is read, and in
random order. Writes are measured into a fresh tier, whose slabs are allocated and written for the
first time, and into a full tier, which evicts; fio likewise lays out its file and overwrites it.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.common import FIO_ENGINES, fio_s, in_flight, write_result
from tierd.backend import GetRequest, Outcome, PutRequest, checksum
from tierd.types import SCOPE_BYTES
from tierd_backends.file import FileBackend, FileOptions
from tierd_backends.file.slab import slab_bytes

ROUNDS = 5
THREADS = 4
CALLS = 4
BATCH = 64
"""Blocks per call, as in a prefetch, with CALLS in flight."""

TARGETS = {"prefix read": 0.85, "random read": 0.85, "overwrite": 0.75, "fresh write": 0.75}
NAMESPACE = hashlib.sha256(b"bench").digest()[:SCOPE_BYTES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", help="folder on the disk to measure; default: temporary")
    parser.add_argument("--mib", type=int, default=1024, help="bytes of each case")
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory(prefix="tierd-bench-", dir=arguments.scratch) as scratch:
        for block_bytes in (2 << 20, 128 << 10):
            count = (arguments.mib << 20) // block_bytes
            label = f"{block_bytes >> 10} KiB"
            results[label] = asyncio.run(measure(Path(scratch), block_bytes, count, label))
    write_result("file", results)  # type: ignore[arg-type]


async def measure(scratch: Path, block_bytes: int, count: int, label: str) -> dict[str, object]:
    memory = memoryview(mmap.mmap(-1, count * block_bytes))
    for at in range(0, len(memory), block_bytes):
        memory[at : at + block_bytes] = random.Random(at).randbytes(1 << 12) * (block_bytes >> 12)
    views = [memory[at : at + block_bytes] for at in range(0, len(memory), block_bytes)]
    sums = [checksum(view) for view in views]
    seconds: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start, start_cpu = time.perf_counter(), time.process_time()
        yield
        seconds.setdefault(name, []).append(time.perf_counter() - start)
        cpu.setdefault(name, []).append(time.process_time() - start_cpu)

    # Capacity for exactly one generation: the second one evicts the first.
    capacity = slab_bytes(count, block_bytes) + (2 << 20)
    for number in range(ROUNDS):
        folder = scratch / f"tier-{number}"
        backend = FileBackend(
            FileOptions(path=str(folder), capacity=capacity, threads=THREADS, reserve_free=0)
        )
        await backend.open()
        for generation, name in enumerate(("fresh write", "overwrite")):
            hashes = [hashlib.sha256(b"%d/%d" % (generation, i)).digest() for i in range(count)]
            with timed(name):
                await put_all(backend, hashes, sums, views)
            for engine in FIO_ENGINES:
                fio(scratch, "write", engine, block_bytes, count, seconds, fresh=not generation)
        held = [i for i, h in enumerate(await backend.contains_many(NAMESPACE, hashes)) if h]
        assert len(held) >= 0.97 * count, f"{len(held)} of {count} blocks held"
        for name, kind in (("prefix read", "read"), ("random read", "randread")):
            with timed(name):
                await get_all(backend, [hashes[i] for i in held], [views[i] for i in held])
            seconds[name][-1] *= count / len(held)
            for engine in FIO_ENGINES:
                fio(scratch, kind, engine, block_bytes, count, seconds)
            random.Random(number).shuffle(held)
        await backend.close()
        for path in [*folder.glob("*/*"), scratch / "fio.data"]:
            path.unlink()
    return report(label, count * block_bytes / 1e9, seconds, cpu)


def report(
    label: str, gigabytes: float, seconds: dict[str, list[float]], cpu: dict[str, list[float]]
) -> dict[str, object]:
    rows: dict[str, object] = {}
    for name, target in TARGETS.items():
        engines = {engine: seconds[f"{engine} {name}"] for engine in FIO_ENGINES}
        engine = min(engines, key=lambda each: statistics.median(engines[each]))
        best = min(min(each) for each in engines.values())
        ours = statistics.median(seconds[name])
        ratio = statistics.median(engines[engine]) / ours
        rows[name] = {
            "ratio_to_fio_median": round(ratio, 3),
            "ratio_of_bests": round(best / min(seconds[name]), 3),
            "ratio_to_fio_best_run": round(best / ours, 3),
            "target": target,
            "gb_s": round(gigabytes / ours, 2),
            "gb_s_runs": [round(gigabytes / each, 2) for each in seconds[name]],
            "fio_engine": engine,
            "fio_gb_s_runs": {
                key: [round(gigabytes / each, 2) for each in runs] for key, runs in engines.items()
            },
            "cpu_s_per_gb": round(statistics.median(cpu[name]) / gigabytes, 3),
        }
        print(
            f"{name:>11} {label:>8} {gigabytes / ours:5.2f} GB/s, {ratio:4.2f} of fio {engine} "
            f"(target {target:.2f}; best/best {best / min(seconds[name]):.2f}, "
            f"median/best {best / ours:.2f})",
            flush=True,
        )
    return rows


async def put_all(
    backend: FileBackend, hashes: list[bytes], sums: list[bytes], views: list[memoryview]
) -> None:
    async def put(at: int) -> None:
        requests = [
            PutRequest(hashes[i], bytes(32), sums[i], views[i], len(views[i]))
            for i in range(at, min(at + BATCH, len(hashes)))
        ]
        outcomes = await backend.put_many(NAMESPACE, requests)
        assert set(outcomes) == {Outcome.STORED}

    await in_flight(CALLS, range(0, len(hashes), BATCH), put)


async def get_all(backend: FileBackend, hashes: list[bytes], views: list[memoryview]) -> None:
    async def get(at: int) -> None:
        requests = [
            GetRequest(hashes[i], views[i], len(views[i]))
            for i in range(at, min(at + BATCH, len(hashes)))
        ]
        results = await backend.get_into(NAMESPACE, requests)
        assert all(result.outcome is Outcome.HIT for result in results)

    await in_flight(CALLS, range(0, len(hashes), BATCH), get)


def fio(
    scratch: Path,
    kind: str,
    engine: str,
    block_bytes: int,
    count: int,
    seconds: dict[str, list[float]],
    fresh: bool = False,
) -> None:
    """Add the time of one fio run to `seconds`."""
    path = scratch / "fio.data"
    name = {
        "read": "prefix read",
        "randread": "random read",
        "write": "fresh write" if fresh else "overwrite",
    }[kind]
    if fresh:
        path.unlink(missing_ok=True)
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, count * block_bytes)
    run_s = fio_s(
        path,
        kind,
        engine,
        block_bytes=block_bytes,
        size_bytes=count * block_bytes,
        threads=THREADS,
    )
    seconds.setdefault(f"{engine} {name}", []).append(run_s)


if __name__ == "__main__":
    main()
