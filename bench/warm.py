"""Warming 10,000 blocks from a file tier, against fio on the same disk, and its cost for engines.

Speed: a daemon has the blocks in its tier and none in host memory, and warms them as `tierd warm`
does: once just after its start, when it also has to get memory from the kernel, and once after a
flush of host memory, when the memory is already there. The raw limit is a bare loop of preadv(2),
in turns with the warm: direct I/O with the same number of threads and the same run size, into
shared memory of the same kind, fresh or already there, without verification. The better of fio's
psync and io_uring engines is reported as well: fio reads into the same few pages again and again.

Engines: a client requests prefixes as an engine does, half from host memory and half from the tier,
and copies them out, with a pause that stands for computing; in turns on an idle daemon and while
blocks are being warmed. The mean times of both kinds are reported.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.common import FIO_ENGINES, fio_s, write_result
from tests.support.daemon_process import DaemonProcess
from tests.support.page_engine import chain, content, namespace, parents_of
from tierd.cli.common.operator import Operator
from tierd.client import Client, Handle
from tierd.shared_memory.mapping import SharedMapping
from tierd.types import Namespace
from tierd.wire.messages import Warmth

BLOCK_BYTES = 1 << 20
BLOCKS = 10_000
ROUNDS = 5
THREADS = 4
RUN_BYTES = 1 << 20
"""Bytes of one read, of the tier and of the raw loop."""

RAW_BYTES = 4 << 30
"""Bytes that the raw loop reads: less than all blocks, since the daemon's memory is in use too."""

PER_CALL = 256
IN_FLIGHT = 4
TARGET_RATIO, TARGET_SLOWER = 0.85, 1.05
PREFIX = 16
"""Blocks per load of an engine: 16 MiB."""

PREFIXES = 40
"""Prefixes in host memory, and again in the tier."""

WINDOW_S = 4.0
WINDOWS = 16
COMPUTING_S = 0.05
FRESH, THERE = "a daemon just started", "host memory already there"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", help="folder on the disk to measure; default: temporary")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tierd-bench-", dir=arguments.scratch) as scratch:
        folder = Path(scratch)
        storage = (
            f'[[storage]]\ntype = "file"\nname = "disk"\npath = "{folder / "store"}"\n'
            'capacity = "14GiB"\nreserve_free = "0"\nwrite_policy = "write_through"\n'
            'write_queue = "1GiB"\nfill_from_lower = false\n'
        )
        daemon = DaemonProcess(folder / "daemon", capacity="13GiB", storage=storage)
        with daemon:
            _fill(daemon)
            results = {
                "10,000 blocks of 1 MiB": _speed(daemon, folder),
                "loads of an engine meanwhile": _slower(daemon),
            }
    write_result("warm", results)  # type: ignore[arg-type]


def _space(tag: str = "bench") -> Namespace:
    return namespace(block_bytes=BLOCK_BYTES, model=tag)


def _fill(daemon: DaemonProcess) -> None:
    """Store all blocks that are warmed or loaded in the tier."""
    daemon.wait_tier("disk", "ready")
    client = daemon.client()
    for tag, chains in (("bench", ["warm"]), ("engine", _prefixes())):
        handle = client.register(_space(tag))
        for name in chains:
            hashes = chain(name, BLOCKS if name == "warm" else PREFIX)
            links = list(zip(hashes, parents_of(hashes), strict=True))
            payload = bytearray(content(hashes[0], BLOCK_BYTES))
            for at in range(0, len(links), PER_CALL):
                stored = client.put(handle, [(h, p, payload) for h, p in links[at : at + PER_CALL]])
                assert all(stored)
                daemon.wait_backed_up()
    client.close()


def _prefixes() -> list[str]:
    return [f"engine {number}" for number in range(PREFIXES)]


def _speed(daemon: DaemonProcess, folder: Path) -> dict[str, object]:
    hashes = chain("warm", BLOCKS)
    fio = [_fio(folder)]
    warm: dict[str, list[float]] = {FRESH: [], THERE: []}
    raw: dict[str, list[float]] = {FRESH: [], THERE: []}
    for _ in range(ROUNDS):
        daemon.stop()
        daemon.start()
        daemon.wait_tier("disk", "ready")
        for memory, seconds in warm.items():
            began = time.perf_counter()
            outcomes = _warm(daemon, hashes)
            seconds.append(time.perf_counter() - began)
            assert outcomes == bytes([Warmth.BROUGHT]) * BLOCKS
            if memory == FRESH:
                with Operator(daemon.socket, "bench") as operator:
                    assert [*operator.flush("", host=True, tiers=[], timeout_s=60)][-1]["complete"]
        fio.append(_fio(folder))
        with _shared_memory() as view:
            for seconds in raw.values():
                seconds.append(_raw(folder, view))
    size_gb = BLOCKS * BLOCK_BYTES / 1e9
    report: dict[str, object] = {
        "target": TARGET_RATIO,
        "fio_gb_s_runs": [round(size_gb / each, 2) for each in fio],
    }
    for memory, seconds in warm.items():
        report[memory] = {
            "ratio_to_raw": _ratio(raw[memory], seconds),
            "ratio_to_fio": _ratio(fio, seconds),
            "gb_s_runs": [round(size_gb / each, 2) for each in seconds],
            "raw_gb_s_runs": [round(size_gb / each, 2) for each in raw[memory]],
        }
    print(report, flush=True)
    return report


def _ratio(limit_s: list[float], ours_s: list[float]) -> float:
    return round(statistics.median(limit_s) / statistics.median(ours_s), 3)


@contextmanager
def _shared_memory() -> Iterator[memoryview]:
    fd = os.memfd_create("bench")
    try:
        os.ftruncate(fd, RAW_BYTES)
        yield SharedMapping(fd, RAW_BYTES).view
    finally:
        os.close(fd)


def _raw(folder: Path, view: memoryview) -> float:
    """Seconds that the bare loop would take for all blocks, extrapolated from RAW_BYTES."""
    fd = os.open(folder / "fio.data", os.O_RDONLY | os.O_DIRECT)
    starts = deque(range(0, RAW_BYTES, RUN_BYTES))

    def work() -> None:
        with suppress(IndexError):
            while True:
                at = starts.popleft()
                assert os.preadv(fd, [view[at : at + RUN_BYTES]], at) == RUN_BYTES

    began = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        for task in [pool.submit(work) for _ in range(THREADS)]:
            task.result()
    os.close(fd)
    return (time.perf_counter() - began) * BLOCKS * BLOCK_BYTES / RAW_BYTES


def _warm(daemon: DaemonProcess, hashes: Sequence[bytes]) -> bytes:
    """The outcome of each block."""
    answers: dict[int, bytes] = {}
    with Operator(daemon.socket, "bench") as operator:
        handle = operator.register(_space())
        begun: list[int] = []
        for at in range(0, len(hashes), PER_CALL):
            if len(begun) - len(answers) == IN_FLIGHT:
                _answer(operator, answers)
            part = hashes[at : at + PER_CALL]
            begun.append(operator.begin_warm(handle, part, deadline_s=120.0))
        while len(answers) < len(begun):
            _answer(operator, answers)
    return b"".join(answers[call] for call in begun)


def _answer(operator: Operator, answers: dict[int, bytes]) -> None:
    answer = operator.next_warmed(120.0)
    assert answer is not None
    answers[answer.call] = answer.outcomes


def _fio(folder: Path) -> float:
    """Seconds to read the same number of bytes; the better of fio's two engines."""
    return min(
        fio_s(
            folder / "fio.data",
            "read",
            engine,
            block_bytes=BLOCK_BYTES,
            size_bytes=BLOCKS * BLOCK_BYTES,
            threads=THREADS,
        )
        for engine in FIO_ENGINES
    )


# --- the cost for engines --------------------------------------------------------------


def _slower(daemon: DaemonProcess) -> dict[str, object]:
    hashes = chain("warm", BLOCKS)
    times: dict[str, dict[str, list[float]]] = {"quiet": {}, "warming": {}}
    warmed = 0
    for number in range(2 * WINDOWS):
        kind = ("quiet", "warming")[(number + number // 2) % 2]
        daemon.stop()
        daemon.start()
        daemon.wait_tier("disk", "ready")
        client = daemon.client()
        handle = client.register(_space("engine"))
        operator = Operator(daemon.socket, "bench")
        if kind == "warming":
            warm_handle = operator.register(_space())
            for at in range(0, 16 * PER_CALL, PER_CALL):
                operator.begin_warm(warm_handle, hashes[at : at + PER_CALL], deadline_s=WINDOW_S)
        _load_for(client, handle, times[kind])
        if kind == "warming":
            counters = client.status()["counters"]
            assert isinstance(counters, dict)
            answers = [operator.next_warmed(5.0) for _ in range(16)]
            warmed += sum(a.outcomes.count(Warmth.BROUGHT) for a in answers if a is not None)
        operator._sock.close()
        client.close()
    report: dict[str, object] = {"blocks warmed meanwhile": warmed}
    for kind in times["quiet"]:
        quiet, warming = (statistics.mean(times[each][kind]) for each in ("quiet", "warming"))
        report[kind] = {
            "slower": round(warming / quiet, 3),
            "target": TARGET_SLOWER,
            "quiet_ms": round(1e3 * quiet, 2),
            "warming_ms": round(1e3 * warming, 2),
            "quiet_median_ms": round(1e3 * statistics.median(times["quiet"][kind]), 2),
            "warming_median_ms": round(1e3 * statistics.median(times["warming"][kind]), 2),
            "loads": [len(times["quiet"][kind]), len(times["warming"][kind])],
        }
    print(report, flush=True)
    return report


def _load_for(client: Client, handle: Handle, times: dict[str, list[float]]) -> None:
    """Load prefixes as an engine does, for WINDOW_S: alternately from the tier and from memory."""
    names = _prefixes()
    random.shuffle(names)
    end = time.perf_counter() + WINDOW_S
    for name in names:
        hashes = chain(name, PREFIX)
        for kind in ("from the tier", "from host memory"):
            if time.perf_counter() > end:
                return
            time.sleep(COMPUTING_S)
            began = time.perf_counter()
            views = client.get(handle, hashes, 5000)
            for view in views:
                bytes(view)
            times.setdefault(kind, []).append(time.perf_counter() - began)
            assert len(views) == PREFIX


if __name__ == "__main__":
    main()
