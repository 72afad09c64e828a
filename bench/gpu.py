"""Copies between a GPU's pages and pinned slots, each way, against one plain pinned copy.

The limit of each case is cudaMemcpyAsync of the same number of bytes in one piece, in turns with
the case in the same run. The pages of a block lie apart, as layers do, and blocks are in random
order. A second part times an engine's steps alone and during each kind of copy. Without a GPU
nothing is measured or written. Not yet run on a GPU.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from bench.common import Json, interleaved, write_result
from tests.gpu.engine import engine
from tierd.device import cuda
from tierd.device.api import CannotOpenError, Device, DeviceError, Direction
from tierd.device.choice import HostScratch, finish
from tierd.device.plan import NO_BOUNDS, CopyPlan, Strategy, issue
from tierd.shared_memory.exports import PageLayout, Run

ROUND_BYTES = 256 << 20
"""Bytes moved by one timed round: 5 ms of PCIe 5."""

SLOT_BYTES = 2 << 20
"""Size of a block, unless a page is larger."""

PAGES = tuple(1 << shift for shift in (12, 13, 14, 15, 16, 18, 20, 21, 22, 24))
"""Page sizes: 4 KiB to 16 MiB."""

TARGETS = {2 << 20: 0.9, 64 << 10: 0.8}
"""Lowest acceptable ratio of the best strategy to the plain copy, per page size."""

PIECES_MAX = 4096
"""Pieces per call, as in the copier's batches."""

STEPS_S = 3.0
"""How long an engine's steps are timed during each kind of copy."""

Areas = tuple[int, int, HostScratch]
"""Memory of the pages, staging memory, slots."""

Plain = Callable[[int, int, int, Direction, int], None]
"""A copy in one piece: page, slot, size, direction, stream."""


def main() -> None:
    try:
        device = cuda.CudaDevice.find(cuda.visible()[0])
    except CannotOpenError as error:
        print(f"bench gpu: skipped, nothing measured: {error}")
        return
    results: dict[str, Json] = {
        "device": device.name,
        "driver": driver_version(),
        "copies": measure(device, plain_cuda),
        "an engine's steps": disturbance(device, "cuda"),
    }
    write_result("gpu", results)


def driver_version() -> str:
    """The version that the kernel module reports."""
    try:
        with open("/proc/driver/nvidia/version") as file:
            return file.readline().strip()
    except OSError:
        return "unknown"


def plain_cuda(page: int, slot: int, size: int, direction: Direction, stream: int) -> None:
    """One cudaMemcpyAsync."""
    copy = cuda.runtime.memcpyAsync
    if direction is Direction.LOAD:
        copy(page, slot, size, cuda.runtime.memcpyHostToDevice, stream)
    else:
        copy(slot, page, size, cuda.runtime.memcpyDeviceToHost, stream)


def measure(
    device: Device,
    plain: Plain,
    pages: Sequence[int] = PAGES,
    round_bytes: int = ROUND_BYTES,
    rounds: int = 7,
) -> dict[str, Json]:
    """GB/s and ratio of every strategy, direction and page size."""
    told: dict[str, Json] = {}
    stream = device.create_stream(urgent=False)
    with areas_of(device, round_bytes) as areas:
        for page in pages:
            for direction in Direction:
                name = f"{page // 1024} KiB pages, {direction.value}s"
                told[name] = case(device, stream, plain, page, direction, areas, rounds)
                print(f"{name:32} {told[name]}", flush=True)
    return told


@contextlib.contextmanager
def areas_of(device: Device, size_bytes: int) -> Iterator[Areas]:
    """Device memory and pinned host memory."""
    with contextlib.ExitStack() as stack:
        addresses = []
        for _ in range(2):
            addresses.append(device.allocate(size_bytes))
            stack.callback(device.free, addresses[-1])
        host = HostScratch(device, size_bytes)
        stack.callback(host.close)
        yield addresses[0], addresses[1], host


def case(
    device: Device,
    stream: int,
    plain: Plain,
    page: int,
    direction: Direction,
    areas: Areas,
    rounds: int,
) -> Json:
    """All strategies of one page size and direction, in turns."""
    memory, _, host = areas
    size = len(host.bytes)

    def plainly() -> None:
        plain(memory, host.address, size, direction, stream)
        finish(device, stream)

    ways: dict[str, Callable[[], None]] = {"plain": plainly}
    for strategy in plan_of(areas, page).strategies:
        ways[strategy.value] = round_of(device, stream, areas, page, (strategy, direction))
    told: dict[str, Json] = {}
    for name, way in list(ways.items()):
        try:
            way()
        except DeviceError as error:
            told[name] = str(error)
            del ways[name]
    seconds = interleaved(ways, rounds)
    best = 0.0
    for name, taken in seconds.items():
        ratio = seconds["plain"] / taken
        told[name] = {"gb_per_s": round(size / taken / 1e9, 2), "ratio": round(ratio, 3)}
        best = max(best, ratio if name != "plain" else 0.0)
    if page in TARGETS:
        told["target"] = TARGETS[page]
        told["met"] = best >= TARGETS[page]
    return told


def disturbance(
    device: Device, kind: str, round_bytes: int = ROUND_BYTES, seconds: float = STEPS_S
) -> dict[str, Json]:
    """Milliseconds per step of an engine during copies, and the copies' throughput meanwhile."""
    told: dict[str, Json] = {}
    stream = device.create_stream(urgent=False)
    with engine(kind) as peer, areas_of(device, round_bytes) as areas:

        def beside(work: Callable[[], object]) -> dict[str, Json]:
            """Step times, and GB/s of the copy rounds done meanwhile."""
            rounds = 0

            def counted() -> None:
                nonlocal rounds
                work()
                rounds += 1

            begin = time.perf_counter()
            p50, p99 = (np.percentile(peer.steps(seconds, counted), [50, 99]) * 1e3).tolist()
            rate = rounds * round_bytes / (time.perf_counter() - begin) / 1e9
            return {"p50_ms": round(p50, 3), "p99_ms": round(p99, 3), "gb_per_s": round(rate, 2)}

        for _ in ("warm", "timed"):
            told["alone"] = {**beside(lambda: time.sleep(0.001)), "gb_per_s": 0.0}
        for page, strategy in ((SLOT_BYTES, Strategy.DIRECT), (4096, Strategy.STAGED)):
            for direction in Direction:
                name = f"{page // 1024} KiB pages, {direction.value}s, {strategy.value}"
                told[name] = beside(round_of(device, stream, areas, page, (strategy, direction)))
    for name, result in told.items():
        print(f"{name:40} {result}")
    return told


def plan_of(areas: Areas, page: int) -> CopyPlan:
    """A plan for blocks of pages of this size that fill the memory; each page of a block is in its
    own row."""
    memory, _, host = areas
    count = len(host.bytes) // max(page, SLOT_BYTES) or 1
    pages = len(host.bytes) // count // page
    runs = tuple(Run(0, run * count * page, page) for run in range(pages))
    return CopyPlan(PageLayout(runs, page, count), [memory])


def round_of(
    device: Device, stream: int, areas: Areas, page: int, way: tuple[Strategy, Direction]
) -> Callable[[], None]:
    """One round: copies all blocks, in calls of as many pieces as the copier uses."""
    _, staging, host = areas
    plan = plan_of(areas, page)
    count = len(host.bytes) // plan.block_bytes
    blocks = np.random.default_rng(0).permutation(count).astype(np.uint64)
    slots = np.arange(count, dtype=np.uint64) * np.uint64(plan.block_bytes)
    slots += np.uint64(host.address)
    step = max(1, PIECES_MAX // plan.run_count)

    def run() -> None:
        for first in range(0, len(blocks), step):
            part = slice(first, first + step)
            issue(device, stream, plan, way, blocks[part], slots[part], NO_BOUNDS, staging)
        finish(device, stream)

    return run


if __name__ == "__main__":
    main()
