"""Computes which pieces of memory to copy for a batch of blocks, for each of three ways.

The pieces of a whole batch are computed at once, in arrays. This module knows neither the meaning
of a block nor when to copy it; `tierd.device.choice` finds the fastest way.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

import numpy as np

from tierd.device.api import Addresses, Device, Direction, Pitched
from tierd.shared_memory.exports import PageLayout, Run

_PITCH_MAX: Final = (1 << 31) - 1
"""Largest distance between rows that CUDA accepts; layers of a large cache are further apart."""


class Strategy(enum.Enum):
    """A way to move blocks."""

    DIRECT = "direct"
    """One piece per run; runs that are adjacent in both pages and slots are merged."""

    PITCHED = "2-D"
    """One piece per block for runs of equal length at equal distances."""

    STAGED = "staged"
    """One piece per block, through device memory that holds the block's runs contiguously."""


Way = tuple[Strategy, Direction]

NO_BOUNDS: Final[Addresses] = np.empty(0, np.uint64)


class CopyPlan:
    """Addresses of an attachment's blocks, or of a byte range within each block."""

    def __init__(
        self, layout: PageLayout, bases: Sequence[int], start: int = 0, end: int | None = None
    ) -> None:
        """`bases` are the addresses of the layout's allocations.

        `start` and `end` bound the range in bytes of a slot; an `end` of None is the block's end.
        """
        runs = _cut(layout.runs, start, layout.block_bytes if end is None else end)
        lengths = np.array([run.length for run in runs], np.uint64)
        self.start = start
        self.block_bytes = int(lengths.sum())
        """Bytes of each block in the range."""
        self._stride = np.uint64(layout.block_stride)
        self._pages = np.array([bases[run.export] + run.offset for run in runs], np.uint64)
        self._slots = np.cumsum(lengths) - lengths + np.uint64(start)
        self._lengths = lengths
        self._stretches = _stretches(self._pages, lengths)

    @property
    def run_count(self) -> int:
        """Runs of each block in the range."""
        return len(self._pages)

    @property
    def strategies(self) -> list[Strategy]:
        """The ways that give different pieces for these pages, DIRECT first."""
        if len(self._pages) == 1:
            return [Strategy.DIRECT]
        if len(self._stretches) == len(self._pages):
            return [Strategy.DIRECT, Strategy.STAGED]
        return list(Strategy)

    def direct(
        self, blocks: Addresses, slots: Addresses, bounds: Addresses
    ) -> tuple[Addresses, Addresses, Addresses]:
        """Return pages, slots and lengths of the pieces of these blocks.

        No piece crosses one of `bounds`, ascending addresses at which stretches of memory begin
        that were each pinned as a whole.
        """
        pages, lengths = self.pages(blocks)
        return merged(pages, _outer(slots, self._slots), lengths, bounds)

    def pages(self, blocks: Addresses) -> tuple[Addresses, Addresses]:
        """Return addresses and lengths of these blocks' runs, in the order of a slot's bytes."""
        pages = _outer(blocks * self._stride, self._pages)
        return pages, np.tile(self._lengths, len(blocks))

    def packed(
        self, staging: int, slots: Addresses, bounds: Addresses
    ) -> tuple[Addresses, Addresses, Addresses]:
        """Return pieces between slots and staging memory, in which the blocks are contiguous."""
        size = np.uint64(self.block_bytes)
        pages = np.arange(len(slots), dtype=np.uint64) * size + np.uint64(staging)
        return merged(
            pages, slots + np.uint64(self.start), np.full(len(slots), size, np.uint64), bounds
        )

    def pitched(self, blocks: Addresses, slots: Addresses) -> list[Pitched]:
        """Return one pitched piece per block and stretch of equally spaced runs."""
        starts = (blocks * self._stride).tolist()
        bases = slots.tolist()
        return [
            Pitched(start + page, pitch, base + slot, width, width, rows)
            for page, pitch, slot, width, rows in (
                (int(self._pages[at]), pitch, int(self._slots[at]), width, rows)
                for at, pitch, width, rows in self._stretches
            )
            for start, base in zip(starts, bases, strict=True)
        ]


def group_plans(layout: PageLayout, bases: Sequence[int], ends: Sequence[int]) -> list[CopyPlan]:
    """Return one plan per layer group; `ends` are the groups' ends in a slot, ascending."""
    starts = [0, *ends[:-1]]
    return [CopyPlan(layout, bases, start, end) for start, end in zip(starts, ends, strict=True)]


def issue(
    device: Device,
    stream: int,
    plan: CopyPlan,
    way: Way,
    blocks: Addresses,
    slots: Addresses,
    bounds: Addresses,
    staging: int,
) -> None:
    """Put the copies of some blocks on a stream; STAGED needs room for all blocks in `staging`.

    Raises DeviceError; then some of the copies may be on the stream.
    """
    strategy, direction = way
    if strategy is Strategy.DIRECT:
        device.copy(*plan.direct(blocks, slots, bounds), direction, stream)
    elif strategy is Strategy.PITCHED:
        device.copy_pitched(plan.pitched(blocks, slots), direction, stream)
    elif direction is Direction.LOAD:
        device.copy(*plan.packed(staging, slots, bounds), direction, stream)
        device.gather(*plan.pages(blocks), staging, direction, stream)
    else:
        device.gather(*plan.pages(blocks), staging, direction, stream)
        device.copy(*plan.packed(staging, slots, bounds), direction, stream)


def merged(
    pages: Addresses, slots: Addresses, lengths: Addresses, bounds: Addresses
) -> tuple[Addresses, Addresses, Addresses]:
    """Merge pieces that are adjacent in pages and slots, but never across one of `bounds`."""
    if len(pages) < 2:
        return pages, slots, lengths
    apart = (pages[1:] != pages[:-1] + lengths[:-1]) | (slots[1:] != slots[:-1] + lengths[:-1])
    if apart.all():
        return pages, slots, lengths
    if len(bounds):
        areas = np.searchsorted(bounds, slots, side="right")
        apart |= areas[1:] != areas[:-1]
    firsts = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return pages[firsts], slots[firsts], np.add.reduceat(lengths, firsts)


def _outer(blocks: Addresses, runs: Addresses) -> Addresses:
    sums: Addresses = np.add.outer(blocks, runs).ravel()
    return sums


def _cut(runs: Sequence[Run], start: int, end: int) -> list[Run]:
    """Return the runs of a byte range of the slot, with adjacent runs merged."""
    cut: list[Run] = []
    at = 0
    for run in runs:
        first, last = max(start - at, 0), min(end - at, run.length)
        at += run.length
        if first >= last:
            continue
        piece = Run(run.export, run.offset + first, last - first)
        if cut and cut[-1].export == run.export and cut[-1].offset + cut[-1].length == piece.offset:
            piece = Run(run.export, cut[-1].offset, cut.pop().length + piece.length)
        cut.append(piece)
    return cut


def _stretches(pages: Addresses, lengths: Addresses) -> list[tuple[int, int, int, int]]:
    """Return stretches of runs with equal length and distance: first run, pitch, width, count."""
    starts, widths = pages.tolist(), lengths.tolist()
    stretches: list[tuple[int, int, int, int]] = []
    at = 0
    while at < len(starts):
        end = at + 1
        pitch = widths[at]
        while end < len(starts) and widths[end] == widths[at]:
            step = starts[end] - starts[end - 1]
            if end == at + 1 and widths[at] <= step <= _PITCH_MAX:
                pitch = step
            elif end == at + 1 or step != pitch:
                break
            end += 1
        stretches.append((at, pitch, widths[at], end - at))
        at = end
    return stretches
