"""Segments: how much memory all namespaces together have, and may have."""

from __future__ import annotations

from typing import Final

from tierd.core.effects import DecommitSegment, Effect, NewSegment
from tierd.core.l2.sharing import segment_bytes
from tierd.core.l2.space import Space

SEGMENT_PAUSE_S: Final = 5
"""Pause after a segment could not be created: file descriptors or memory seldom become
available sooner."""


class Segments:
    """Counts memory in whole segments, used or not, so that the capacity is a hard bound."""

    __slots__ = (
        "_allocated_bytes",
        "_bound_bytes",
        "_capacity_bytes",
        "_each",
        "_from_s",
        "_limit",
    )

    def __init__(self, capacity_bytes: int, each_bytes: int | None) -> None:
        """`each_bytes` fixes the size of all segments; without it, see `sharing`."""
        self._capacity_bytes = self._limit = self._bound_bytes = capacity_bytes
        self._each = each_bytes
        self._allocated_bytes = 0
        self._from_s = 0

    @property
    def capacity_bytes(self) -> int:
        """Upper bound of the arena, in bytes."""
        return self._capacity_bytes

    @property
    def limit_bytes(self) -> int:
        """Current bound of the arena, at most the capacity."""
        return self._limit

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all segments that have memory."""
        return self._allocated_bytes

    @property
    def missing_bytes(self) -> int:
        """Bytes to free for a new segment, not counting its own size; negative if some are left."""
        return self._allocated_bytes - self._bound_bytes

    def set_capacity(self, capacity_bytes: int) -> None:
        """Change the capacity, and reset the limit to it."""
        self._capacity_bytes = capacity_bytes
        self.set_limit(capacity_bytes)

    def set_limit(self, limit_bytes: int) -> None:
        """Set the bound for growth, at most the capacity."""
        self._limit = min(limit_bytes, self._capacity_bytes)
        self.lower_bound()

    def lower_bound(self) -> None:
        """Lower the bound to the allocated bytes, or to the limit if that is more.

        Memory given back beyond the limit is then not taken again. Before this call another
        namespace may take it.
        """
        self._bound_bytes = max(self._limit, self._allocated_bytes)

    def slots_of_new(self, slot_bytes: int, others: int) -> int:
        """Return the slots per segment of a new namespace beside `others` existing ones."""
        size_bytes = self._each or segment_bytes(self._capacity_bytes, others + 1)
        return max(1, size_bytes // slot_bytes)

    def paused(self, now_s: int) -> bool:
        """Whether a segment could not be created within the last SEGMENT_PAUSE_S."""
        return self._from_s > now_s

    def may_grow(self, space: Space, now_s: int) -> bool:
        """Whether a space may get a segment within the bound; a decommitted one can be refilled
        during a pause."""
        return not space.ended and (self._from_s <= now_s or False in space._live)

    def grow(self, space: Space, now_s: int, effects: list[Effect]) -> bool:
        """Add a segment to a space; return False if the bound or a pause forbids it."""
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
        """Count the segments of an adopted space; they may exceed the capacity."""
        self._allocated_bytes += space.memory_bytes
        space._since_s = now_s
        self.lower_bound()

    def decommit(self, space: Space, index: int, effects: list[Effect]) -> None:
        """Decommit a segment of a space; all its slots are free."""
        space._decommit(index)
        self._allocated_bytes -= space.segment_bytes
        effects.append(DecommitSegment(space, index))

    def lose(self, space: Space, made: int, now_s: int) -> None:
        """Remove all segments of a space except the first `made`, and start a pause."""
        self._from_s = now_s + SEGMENT_PAUSE_S
        self._allocated_bytes -= sum(space._live[made:]) * space.segment_bytes
        space._lose(made)

    def check(self, allocated_bytes: int) -> None:
        """Assert every invariant; for tests."""
        assert allocated_bytes == self._allocated_bytes
        assert self._limit <= self._capacity_bytes
        assert allocated_bytes <= self._bound_bytes
