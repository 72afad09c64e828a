"""Effects: changes of memory that the core has decided and its caller carries out."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tierd.core.l2.space import Space


class NewSegment(NamedTuple):
    """Create a segment of `space`, or commit memory to a decommitted one."""

    space: Space
    segment: int


class DecommitSegment(NamedTuple):
    """Give the memory of a segment of `space` back to the system; its mappings stay valid."""

    space: Space
    segment: int


class Forget(NamedTuple):
    """Remove the blocks in these slots from the ledger."""

    space: Space
    slots: list[int]


class Move(NamedTuple):
    """Copy blocks between slots, including their ledger entries; `pairs` are (from, to)."""

    space: Space
    pairs: list[tuple[int, int]]


class EndSpace(NamedTuple):
    """Remove `space` and its segments, which are all decommitted."""

    space: Space


Effect = NewSegment | DecommitSegment | Forget | Move | EndSpace
