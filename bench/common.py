"""Shared by every benchmark: fair rounds, the machine's description, the result file."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import socket
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

ROUNDS = 7
"""Rounds of every case: enough that two rounds disturbed by another process leave the median."""

_HERE = Path(__file__).parent

_T = TypeVar("_T")

FIO_ENGINES = ("psync", "io_uring")

Json = Mapping[str, "Json"] | list["Json"] | str | int | float | None


def interleaved(
    cases: Mapping[str, Callable[[], object]], rounds: int = ROUNDS
) -> dict[str, float]:
    """Median seconds of each case. The cases take turns, so a slow minute affects all of them."""
    assert rounds >= 5
    for case in cases.values():
        case()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


async def in_flight(count: int, jobs: Iterable[_T], call: Callable[[_T], Awaitable[None]]) -> None:
    """Await `call` for every job, with `count` calls in flight."""
    queue = iter(jobs)

    async def work() -> None:
        for job in queue:
            await call(job)

    await asyncio.gather(*(work() for _ in range(count)))


def fio_s(
    path: Path, kind: str, engine: str, *, block_bytes: int, size_bytes: int, threads: int
) -> float:
    """Seconds that fio needs for its I/O, without its start: direct, over the whole file, which it
    creates if it is missing. `kind` is an fio `rw` without mixes, `engine` is of FIO_ENGINES."""
    # psync has one job per thread, each with an equal part; io_uring has one job with a queue.
    jobs, depth = (threads, 1) if engine == "psync" else (1, 4 * threads)
    part = size_bytes // jobs
    command = [
        *("fio", "--name=bench", f"--filename={path}", f"--rw={kind}", f"--ioengine={engine}"),
        *(f"--bs={block_bytes}", f"--size={part}", f"--offset_increment={part}"),
        *(f"--numjobs={jobs}", f"--iodepth={depth}", "--direct=1", "--thread"),
        *("--group_reporting", "--output-format=json"),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    [job] = json.loads(done.stdout)["jobs"]
    side = job["write" if kind == "write" else "read"]
    assert side["io_bytes"] == size_bytes
    return float(side["io_bytes"] / side["bw_bytes"])


def raw_ping_pong() -> Callable[[], None]:
    """A function that makes one round trip to a child process, which echoes and ends with this
    process."""
    near, far = socket.socketpair()
    if os.fork() == 0:
        near.close()
        while data := far.recv(4096):
            far.send(data)
        os._exit(0)
    far.close()
    message = bytes(60)

    def trip() -> None:
        near.send(message)
        near.recv(4096)

    return trip


def write_result(name: str, results: Json) -> None:
    """Write bench/results/NAME.json: the results, the machine and its load average."""
    report: Json = {
        "benchmark": name,
        "commit": _commit(),
        "machine": _machine(),
        "load_average_1m": round(os.getloadavg()[0], 2),
        "results": results,
    }
    folder = _HERE / "results"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"written: bench/results/{name}.json")


def _machine() -> Json:
    return {
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(_field("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _field(path: str, name: str) -> str:
    """Value of the first line `NAME: VALUE` of a /proc file."""
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown 0"


def _commit() -> str:
    """The measured commit, marked if the working tree differs from it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=_HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "uncommitted"
