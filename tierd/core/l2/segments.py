"""Segments: how much memory all namespaces have, and may have."""

from __future__ import annotations

from typing import Final

from tierd.core.effects import DecommitSegment, Effect, NewSegment
from tierd.core.l2.sharing import segment_bytes
from tierd.core.l2.space import Space

SEGMENT_PAUSE_S: Final = 5
"""After a segment could not be made none is asked for before this has passed: descriptors, or
memory, seldom come back sooner."""


class Segments:
    """Capacity is counted in whole segments, whatever their slots hold: so it is a hard bound."""

    __slots__ = (
        "_allocated_bytes",
        "_bound_bytes",
        "_capacity_bytes",
        "_each",
        "_from_s",
        "_limit",
    )

    def __init__(self, capacity_bytes: int, each_bytes: int | None) -> None:
        """With `each_bytes` the segments of all namespaces are of that size."""
        self._capacity_bytes = self._limit = self._bound_bytes = capacity_bytes
        self._each = each_bytes
        self._allocated_bytes = 0
        self._from_s = 0

    @property
    def capacity_bytes(self) -> int:
        """Most bytes that the arena may ever have."""
        return self._capacity_bytes

    @property
    def limit_bytes(self) -> int:
        """What the arena may have now, at most the capacity."""
        return self._limit

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the segments that hold memory."""
        return self._allocated_bytes

    @property
    def missing_bytes(self) -> int:
        """Bytes of a new segment that are beyond the bound, less its size."""
        return self._allocated_bytes - self._bound_bytes

    def set_capacity(self, capacity_bytes: int) -> None:
        """Have another capacity from now on."""
        self._capacity_bytes = capacity_bytes
        self.set_limit(capacity_bytes)

    def set_limit(self, limit_bytes: int) -> None:
        """Grow no further than this from now on."""
        self._limit = min(limit_bytes, self._capacity_bytes)
        self.lower_bound()

    def lower_bound(self) -> None:
        """What was given back is not taken again beyond the limit.

        While there is more than the limit, what one namespace gives up another may still have.
        """
        self._bound_bytes = max(self._limit, self._allocated_bytes)

    def slots_of_new(self, slot_bytes: int, others: int) -> int:
        """Slots of each segment of a namespace that comes beside so many others."""
        size_bytes = self._each or segment_bytes(self._capacity_bytes, others + 1)
        return max(1, size_bytes // slot_bytes)

    def paused(self, now_s: int) -> bool:
        """Whether one could not be made just now."""
        return self._from_s > now_s

    def may_grow(self, space: Space, now_s: int) -> bool:
        """Whether a segment could be made, were there memory for it: a decommitted one has been."""
        return not space.ended and (self._from_s <= now_s or False in space._live)

    def grow(self, space: Space, now_s: int, effects: list[Effect]) -> bool:
        """Add a segment within the bound."""
        size_bytes = space.segment_bytes
        if not self.may_grow(space, now_s):
            return False
        if self._allocated_bytes + size_bytes > self._bound_bytes:
            return False
        self._allocated_bytes += size_bytes
        if not space._live_segments:
            space._since_s = now_s
        effects.append(NewSegment(space, space._grow()))
        return True

    def adopt(self, space: Space, now_s: int) -> None:
        """The segments of a space are an earlier incarnation's; they may exceed the capacity."""
        self._allocated_bytes += space.memory_bytes
        space._since_s = now_s
        self.lower_bound()

    def decommit(self, space: Space, index: int, effects: list[Effect]) -> None:
        """Take a segment whose slots are all free from a space."""
        space._decommit(index)
        self._allocated_bytes -= space.segment_bytes
        effects.append(DecommitSegment(space, index))

    def lose(self, space: Space, made: int, now_s: int) -> None:
        """A space has no segments but the first `made`; none is asked for again for a while."""
        self._from_s = now_s + SEGMENT_PAUSE_S
        self._allocated_bytes -= sum(space._live[made:]) * space.segment_bytes
        space._lose(made)

    def check(self, allocated_bytes: int) -> None:
        """Assert every invariant; for tests."""
        assert allocated_bytes == self._allocated_bytes
        assert self._limit <= self._capacity_bytes
        assert allocated_bytes <= self._bound_bytes
