"""Room: how slots become free for new blocks, and which segments are given back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from tierd.core.effects import Effect, Move
from tierd.core.hints import Hints
from tierd.core.l2.evictions import EVICTING_SHARE_MAX, Evictions
from tierd.core.l2.segments import Segments
from tierd.core.l2.sharing import by_worth, donors
from tierd.core.l2.space import Space
from tierd.core.reasons import Evicted, NoRoom

EVICT_AHEAD_SHARE: Final = 1 / 128
"""Share of a space's slots kept free in a full arena: an eviction takes 2 us per block, for which
a client then need not wait."""

EVICTING_AHEAD_SHARE: Final = 1 / 32
"""Share kept free if blocks are written to tiers on eviction, or as many slots as the last call
took if that is more: such a slot is free only after the write, and a client that finds no free
slot causes blocks to be dropped unwritten."""


class Room:
    """Frees slots: it grows a space, borrows from other spaces, or evicts, in this order."""

    __slots__ = ("_evictions", "_hints", "_segments", "_spaces")

    def __init__(
        self, spaces: Mapping[bytes, Space], segments: Segments, evictions: Evictions, hints: Hints
    ) -> None:
        self._spaces = spaces
        self._segments = segments
        self._evictions = evictions
        self._hints = hints

    def make(self, space: Space, count: int, worth: float | None, now_s: int) -> list[Effect]:
        """Free up to `count` slots, as far as possible."""
        effects: list[Effect] = []
        while (short := count - len(space._free)) > 0:
            if self._segments.grow(space, now_s, effects):
                continue
            if self._borrow(space, now_s, effects, only_idle=worth is not None):
                continue
            evicted = self._evictions.evict(space, short, Evicted.ROOM, now_s, effects, worth)
            # A warmed block can be tried again when the evicted blocks have been written.
            if evicted and (worth is None or len(space._free) >= count):
                continue
            if space._evicting or not space._chain.keeping or worth is not None:
                break
            # The space has lent memory and has only kept blocks left: pins never stop stores.
            space._chain.unkeep(self._hints.override(space.digest))
        return effects

    def why_none(self, space: Space, now_s: int) -> NoRoom:
        """Return why a namespace has fewer free slots than requested."""
        if self._segments.paused(now_s) and False not in space._live:
            return NoRoom.SEGMENT
        return NoRoom.HELD if space._live_segments else NoRoom.OTHERS

    def make_ahead(self, space: Space, count: int, now_s: int) -> list[Effect]:
        """See HostTier.make_room_ahead."""
        effects: list[Effect] = []
        free = len(space._free) + space.free_soon
        slots = space._live_segments * space.slots_per_segment
        if self._evictions.claims_all:
            ahead = max(int(slots * EVICTING_AHEAD_SHARE), count)
            ahead = min(ahead, int(slots * EVICTING_SHARE_MAX))
        else:
            ahead = min(int(slots * EVICT_AHEAD_SHARE), count)
        few = free <= max(space.slots_per_segment // 4, ahead)
        if few and self._segments.grow(space, now_s, effects):
            return effects
        short = ahead - free - len(space._evicting)
        if short > 0:
            self._evictions.evict(space, short, Evicted.AHEAD, now_s, effects)
        return effects

    def grow_ahead(self, space: Space, now_s: int) -> list[Effect]:
        """See HostTier.grow_ahead."""
        effects: list[Effect] = []
        if len(space._free) + space.free_soon < space.slots_per_segment:
            self._segments.grow(space, now_s, effects)
        return effects

    def shrink(self, now_s: int) -> list[Effect]:
        """See HostTier.shrink."""
        effects: list[Effect] = []
        segments = self._segments
        if segments.allocated_bytes > segments.limit_bytes:
            ranked = by_worth(self._spaces.values(), now_s)
            shrunk = Evicted.SHRUNK
            if not any(self._empty_segment(s, shrunk, now_s, effects) for s in ranked):
                for space in ranked:
                    # The machine's memory comes before the engines' hints.
                    if space._chain.keeping and not space._evicting:
                        space._chain.unkeep(self._hints.override(space.digest))
        segments.lower_bound()
        return effects

    def _borrow(self, space: Space, now_s: int, effects: list[Effect], *, only_idle: bool) -> bool:
        """Decommit enough segments of other spaces for one new segment of this space."""
        if not self._segments.may_grow(space, now_s):
            return False
        missing = self._segments.missing_bytes + space.segment_bytes
        found = list(donors(self._spaces.values(), space, now_s, only_idle=only_idle))
        if sum(most * donor.segment_bytes for donor, most in found) < missing:
            return False
        for donor, most in found:
            for _ in range(most):
                if not self._empty_segment(donor, Evicted.LENT, now_s, effects):
                    break
                missing -= donor.segment_bytes
                if missing <= 0:
                    return True
        return False

    def _empty_segment(self, space: Space, why: Evicted, now_s: int, effects: list[Effect]) -> bool:
        """Decommit a segment: evict as many of the coldest blocks as it has, and move its others.

        Evicting until some segment is empty would cost up to a fifth of the cache. Returns False
        if leases and reservations keep every segment; evicted blocks stay evicted.
        """
        index = _loosest_segment(space)
        if index is None:
            return False
        inside = range(index * space.slots_per_segment, (index + 1) * space.slots_per_segment)
        while True:
            room = [slot for slot in space._free if slot not in inside]
            rest = sorted(set(inside).difference(space._free))
            short = len(rest) - len(room)
            if short <= 0:
                break
            if not self._evictions.evict(space, short, why, now_s, effects):
                return False
            if any(slot in inside for slot in space._evicting):
                return False  # A write is pending; a later call takes this or another segment.
        if rest:
            self.move(space, list(zip(rest, room[-len(rest) :], strict=True)), effects)
        self._segments.decommit(space, index, effects)
        return True

    def move(self, space: Space, pairs: Sequence[tuple[int, int]], effects: list[Effect]) -> None:
        """Move blocks that are not held to free slots."""
        space._move(pairs)
        effects.append(Move(space, list(pairs)))


def _loosest_segment(space: Space) -> int | None:
    """Return the live segment with the fewest blocks and no held or reserved slot."""
    per = space.slots_per_segment
    used = [per] * len(space._live)
    for slot in space._free:
        used[slot // per] -= 1
    reserved = {slot // per for slot in (*space._writing.values(), *space._quarantined)}
    movable = [
        index
        for index, live in enumerate(space._live)
        if live and index not in reserved and not any(space._refs[index * per : (index + 1) * per])
    ]
    return min(movable, key=used.__getitem__, default=None)
