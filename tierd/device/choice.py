"""Measures which way of moving blocks is fastest on a device, with memory allocated for the test.

There is no fixed rule: the result depends on the device, its bus and the driver, and for small
pieces the ways differ by a factor of ten.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import time
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from tierd.device.api import Addresses, Device, DeviceError, Direction
from tierd.device.plan import NO_BOUNDS, CopyPlan, Strategy, Way, group_plans, issue
from tierd.shared_memory.exports import PageLayout, Run

SCRATCH_BYTES: Final = 16 << 20
"""Bytes moved per measurement, unless a block is larger: enough to hide the cost of a call."""

_SCRATCH_BLOCKS: Final = 1024
_SCRATCH_PIECES: Final = 65_536
"""Maximum pieces per measurement: more tiny pieces would take seconds, and the device would be
taken for lost."""
_ROUNDS: Final = 3
_BETTER: Final = 1.1
"""Factor by which another way must be faster than DIRECT, which needs no memory and no kernel."""
_LIMIT_S: Final = 5.0
_PAUSE_S: Final = 50e-6

_abandoned: Final[list[contextlib.ExitStack]] = []


class Choice(NamedTuple):
    """The way for each direction, and the measurements as text."""

    ways: dict[Direction, Strategy]
    how: str


class HostScratch:
    """Pinned host memory; the owner closes it after all copies have ended."""

    def __init__(self, device: Device, size_bytes: int) -> None:
        """Raises DeviceError if pinning fails, OSError if there is no memory."""
        self._device = device
        self._map = mmap.mmap(-1, size_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        memory = (ctypes.c_char * size_bytes).from_address(self.address)
        self.view = memoryview(memory)
        self.bytes = np.frombuffer(self.view, np.uint8)
        self.bytes[:: mmap.PAGESIZE] = 0
        try:
            device.pin(self.address, size_bytes)
        except DeviceError:
            self._map.close()
            raise

    def close(self) -> None:
        """Unpin and unmap the memory."""
        self._device.unpin(self.address)
        self._map.close()


def choose(
    device: Device, stream: int, layout: PageLayout, ends: Sequence[int], plan: CopyPlan
) -> Choice:
    """Measure all ways on blocks shaped like the layout's; takes about 0.1 s.

    `ends` are the ends of the layer groups. `plan` is for the real pages, which rule out some
    ways. Raises DeviceError if DIRECT does not move the right bytes.
    """
    count = _block_count(layout)
    with borrowed(device, stream) as stack:
        trial = _Trial(device, stream, compact(layout, count), ends, stack)
        sound = [strategy for strategy in plan.strategies if trial.works(strategy)]
        if Strategy.DIRECT not in sound:
            raise DeviceError(f"copies on {device.name} do not move the right bytes")
        speeds = {way: trial.speed(way) for way in itertools.product(sound, Direction)}
    ways = {direction: _best(speeds, direction) for direction in Direction}
    said = [_said(speeds, ways[direction], direction) for direction in Direction]
    said += [f"{x.value} moves wrong bytes" for x in plan.strategies if x not in sound]
    return Choice(ways, ", ".join(said))


def _best(speeds: dict[Way, float], direction: Direction) -> Strategy:
    found = max(
        (speed, strategy.value, strategy)
        for (strategy, towards), speed in speeds.items()
        if towards is direction
    )
    better = found[0] > _BETTER * speeds[Strategy.DIRECT, direction]
    return found[2] if better else Strategy.DIRECT


def _said(speeds: dict[Way, float], chosen: Strategy, direction: Direction) -> str:
    rest = [
        f"{strategy.value} {speed / 1e9:.1f}"
        for (strategy, towards), speed in speeds.items()
        if towards is direction and strategy is not chosen
    ]
    speed = speeds[chosen, direction]
    return f"{direction.value}s {chosen.value} at {speed / 1e9:.1f} GB/s" + (
        f" ({', '.join(rest)})" if rest else ""
    )


def finish(device: Device, stream: int, limit_s: float = _LIMIT_S) -> None:
    """Wait until a stream has done its work. Raises DeviceError, a sticky one after `limit_s`."""
    event = device.create_event()
    try:
        device.record(event, stream)
        limit = time.monotonic() + limit_s
        while not device.query(event):
            if time.monotonic() > limit:
                raise DeviceError(f"{device.name} is not done after {limit_s:g} s", sticky=True)
            time.sleep(_PAUSE_S)
    finally:
        device.close_event(event)


@contextlib.contextmanager
def borrowed(device: Device, stream: int) -> Iterator[contextlib.ExitStack]:
    """Yield a stack for resources of a stream's copies and close it when the copies are done.

    Raises DeviceError if it cannot find out that they are done. Then nothing is closed: the
    device may still be writing to the memory, and the process has to end.
    """
    stack = contextlib.ExitStack()
    try:
        yield stack
    finally:
        try:
            finish(device, stream)
        except DeviceError:
            _abandoned.append(stack)
            raise
        stack.close()


def compact(layout: PageLayout, count: int) -> PageLayout:
    """Return a layout of `count` blocks of the same shape in one small allocation.

    Runs within one block stride keep their distances; runs further apart move together.
    """
    offsets = [0] * len(layout.runs)
    first: Run | None = None
    row = -1
    for index in sorted(range(len(layout.runs)), key=lambda index: layout.runs[index][:2]):
        run = layout.runs[index]
        if (
            first is None
            or run.export != first.export
            or run.offset + run.length - first.offset > layout.block_stride
        ):
            first = run
            row += 1
        offsets[index] = row * layout.block_stride * count + run.offset - first.offset
    runs = zip(offsets, layout.runs, strict=True)
    return PageLayout(
        tuple(Run(0, offset, run.length) for offset, run in runs), layout.block_stride, count
    )


def _block_count(layout: PageLayout) -> int:
    one = compact(layout, 1)
    reach = max(run.offset + run.length for run in one.runs)
    apart = max(reach, layout.block_stride)
    few = min(_SCRATCH_BLOCKS, _SCRATCH_PIECES // len(layout.runs))
    return max(1, min(SCRATCH_BYTES // apart, layout.block_count, few))


class _Trial:
    """Test blocks in device memory, a pattern to load them from, and slots to store them to."""

    def __init__(
        self,
        device: Device,
        stream: int,
        layout: PageLayout,
        ends: Sequence[int],
        stack: contextlib.ExitStack,
    ) -> None:
        self._device = device
        self._stream = stream
        reach = max(run.offset + run.length for run in layout.runs)
        pages = device.allocate(reach + layout.block_stride * (layout.block_count - 1))
        stack.callback(device.free, pages)
        self._size_bytes = layout.block_count * layout.block_bytes
        self._staging = device.allocate(self._size_bytes)
        stack.callback(device.free, self._staging)
        host = HostScratch(device, 2 * self._size_bytes)
        stack.callback(host.close)
        self._plans = {
            Direction.LOAD: group_plans(layout, [pages], ends),
            Direction.STORE: [CopyPlan(layout, [pages])],
        }
        # Shuffled, so that neighbouring blocks do not merge into one piece.
        count = layout.block_count
        self._blocks = np.random.default_rng(0).permutation(count).astype(np.uint64)
        self._slots = np.arange(count, dtype=np.uint64) * np.uint64(layout.block_bytes)
        self._slots += np.uint64(host.address)
        self._pattern = host.bytes[: self._size_bytes]
        self._pattern[:] = np.frombuffer(np.random.default_rng(0).bytes(self._size_bytes), np.uint8)
        self._stored = host.bytes[self._size_bytes :]
        self._stored_slots = self._slots + np.uint64(self._size_bytes)

    def works(self, strategy: Strategy) -> bool:
        """Whether a way moves the right bytes in both directions."""
        self._stored[:] = 0
        self._move((Strategy.DIRECT, Direction.LOAD), self._stored_slots)
        self._move((strategy, Direction.LOAD), self._slots)
        for way in (Strategy.DIRECT, strategy):
            self._stored[:] = 0
            self._move((way, Direction.STORE), self._stored_slots)
            if not np.array_equal(self._pattern, self._stored):
                return False
        return True

    def speed(self, way: Way) -> float:
        """Return bytes per second of the best of _ROUNDS rounds."""
        slots = self._slots if way[1] is Direction.LOAD else self._stored_slots
        best = float("inf")
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            self._move(way, slots)
            best = min(best, time.perf_counter() - start)
        return self._size_bytes / best

    def _move(self, way: Way, slots: Addresses) -> None:
        for plan in self._plans[way[1]]:
            issue(
                self._device,
                self._stream,
                plan,
                way,
                self._blocks,
                slots,
                NO_BOUNDS,
                self._staging,
            )
        finish(self._device, self._stream)
