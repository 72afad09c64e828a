"""ARC: splits the cache between recency and frequency by the hits that evicted blocks would give.

After Megiddo and Modha, FAST 2003, but only leaves are evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tierd.eviction.policy import NO_ITEM, Ghosts, Policy, PrefixRequest

_ONCE: Final = 0
_AGAIN: Final = 1


class Arc(Policy):
    """A reference policy."""

    name = "arc"
    places = 2

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._clock = 0
        self._count = [0, 0]
        self._target = 0.0
        self._ghosts = (Ghosts(capacity), Ghosts(capacity))

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        self._target = min(self._target, float(capacity))
        for ghosts in self._ghosts:
            ghosts.resize(capacity)

    def use(self, request: PrefixRequest, items: Sequence[int | None]) -> None:
        self._clock += 1
        leaves, count = self.leaves, self._count
        for item in items:
            if item is not None:
                if leaves.place[item] == _ONCE:
                    count[_ONCE] -= 1
                    count[_AGAIN] += 1
                leaves.rerank(item, _AGAIN, self._clock)

    def touch(self, items: Iterable[int]) -> None:
        self._clock += 1
        rank = self.leaves.rank
        for item in items:
            rank[item] = self._clock

    def insert(self, item: int, block_hash: bytes) -> None:
        place = self._adapt(block_hash)
        self._clock += 1
        self._count[place] += 1
        self.leaves.put(item, place, self._clock)

    def _adapt(self, block_hash: bytes) -> int:
        """Return the place for a block; move the target if the block is a ghost."""
        once, again = (ghosts.records for ghosts in self._ghosts)
        if block_hash in once:
            self._target += max(1.0, len(again) / len(once))
            del once[block_hash]
        elif block_hash in again:
            self._target -= max(1.0, len(once) / len(again))
            del again[block_hash]
        else:
            return _ONCE
        self._target = min(max(self._target, 0.0), float(self.capacity))
        return _AGAIN

    def remove(self, item: int, block_hash: bytes, *, evicted: bool) -> None:
        place = self.leaves.place[item]
        self._count[place] -= 1
        if evicted:
            self._ghosts[place].put(block_hash, 1)
        super().remove(item, block_hash, evicted=evicted)

    def victim(self) -> int | None:
        self.leaves.settle()
        first = _ONCE if self._count[_ONCE] > self._target else _AGAIN
        for place in (first, 1 - first):
            item = self.leaves.peek(place)
            if item != NO_ITEM:
                return item
        return None

    def check(self) -> None:
        super().check()
        resident = [i for i, children in enumerate(self.leaves.children) if children >= 0]
        places = [self.leaves.place[item] for item in resident]
        assert self._count == [places.count(_ONCE), places.count(_AGAIN)]
        assert 0 <= self._target <= self.capacity
        for ghosts in self._ghosts:
            ghosts.check(self.capacity)
