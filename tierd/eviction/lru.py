"""LRU: evicts the least recently used leaf; no other policy may have fewer hits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tierd.eviction.policy import NO_ITEM, Policy, PrefixRequest


class Lru(Policy):
    """Rank is a stamp that all blocks of a request share; a touch is one list store per item."""

    name = "lru"

    def __init__(self, capacity: int = 0) -> None:
        super().__init__(capacity)
        self._clock = 0

    def use(self, request: PrefixRequest, items: Sequence[int | None]) -> None:
        self.touch(item for item in items if item is not None)

    def touch(self, items: Iterable[int]) -> None:
        self._clock += 1
        rank, now = self.leaves.rank, self._clock
        for item in items:
            rank[item] = now

    def insert(self, item: int, block_hash: bytes) -> None:
        self._clock += 1
        self.leaves.put(item, 0, self._clock)

    def victim(self) -> int | None:
        self.leaves.settle()
        item = self.leaves.peek(0)
        return None if item == NO_ITEM else item
