"""What the core asks to be done to memory, once it has decided."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tierd.core.l2.space import Space


class NewSegment(NamedTuple):
    """Make a segment of `space` usable, by creating it or filling a decommitted one."""

    space: Space
    segment: int


class DecommitSegment(NamedTuple):
    """Give the memory of a segment of `space` back; its mappings stay valid."""

    space: Space
    segment: int


class Forget(NamedTuple):
    """Blocks have left these slots; take them out of the ledger."""

    space: Space
    slots: list[int]


class Move(NamedTuple):
    """Copy blocks from slot to slot, `pairs` of (from, to), ledger included."""

    space: Space
    pairs: list[tuple[int, int]]


class EndSpace(NamedTuple):
    """`space` is gone, with its segments, which are all decommitted."""

    space: Space


Effect = NewSegment | DecommitSegment | Forget | Move | EndSpace
