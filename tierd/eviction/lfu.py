"""LFU: evicts the leaf with the fewest uses since its insertion; ties by recency."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tierd.eviction.policy import NO_ITEM, Policy, PrefixRequest

_STAMP_BITS: Final = 48


class Lfu(Policy):
    """A reference policy, which forgets the uses of a block when it leaves the index."""

    name = "lfu"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._clock = 0

    def use(self, request: PrefixRequest, items: Sequence[int | None]) -> None:
        self._clock += 1
        rank = self.leaves.rank
        for item in items:
            if item is not None:
                rank[item] = ((rank[item] >> _STAMP_BITS) + 1) << _STAMP_BITS | self._clock

    def touch(self, items: Iterable[int]) -> None:
        self._clock += 1
        rank = self.leaves.rank
        for item in items:
            rank[item] = rank[item] >> _STAMP_BITS << _STAMP_BITS | self._clock

    def insert(self, item: int, block_hash: bytes) -> None:
        self._clock += 1
        self.leaves.put(item, 0, 1 << _STAMP_BITS | self._clock)

    def victim(self) -> int | None:
        self.leaves.settle()
        item = self.leaves.peek(0)
        return None if item == NO_ITEM else item
