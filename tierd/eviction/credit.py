"""Recency plus a credit for uses: n uses make a block younger by CREDIT * log2(n) turnovers.

The default of storage tiers. It needs no clock and learns nothing, so it behaves the same after a
restart. A scan evicts only blocks that are used as little as its own. The credit is counted in
insertions of a whole capacity (turnovers), so it has the same effect at every size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log2
from typing import Final

from tierd.eviction.policy import NO_ITEM, CountedUses, Ghosts, PrefixRequest

USES_MAX: Final = 64
GHOST_RATIO: Final = 2
"""Evicted blocks that are remembered per block of capacity."""
CREDIT: Final = 0.5
"""Turnovers (insertions of a whole capacity) that a doubling of the uses is worth."""

_LOG2: Final = [0.0, *(log2(n) for n in range(1, USES_MAX + 1))]


class Credit(CountedUses):
    """Rank is the number of insertions at the last use, plus the credit."""

    name = "credit"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._clock = 0
        self._ghosts = Ghosts(capacity * GHOST_RATIO)
        # Credit in insertions, indexed by the number of uses.
        self._credit = [int(CREDIT * capacity * log) for log in _LOG2]

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        self._ghosts.resize(capacity * GHOST_RATIO)
        self._credit = [int(CREDIT * capacity * log) for log in _LOG2]

    def use(self, request: PrefixRequest, items: Sequence[int | None]) -> None:
        rank, uses, credit, clock = self.leaves.rank, self._uses, self._credit, self._clock
        records = self._ghosts.records
        for block_hash, item in zip(request.hashes, items, strict=True):
            if item is not None:
                count = uses[item]
                if count < USES_MAX:
                    count += 1
                    uses[item] = count
                new = clock + credit[count]
                # A smaller capacity gives less credit, but a rank may only grow.
                if new > rank[item]:
                    rank[item] = new
            elif block_hash in records:
                records[block_hash] = min(records[block_hash] + 1, USES_MAX)

    def touch(self, items: Iterable[int]) -> None:
        rank, uses = self.leaves.rank, self._uses
        for item in items:
            rank[item] = max(rank[item], self._clock + self._credit[uses[item]])

    def insert(self, item: int, block_hash: bytes) -> None:
        count = self._ghosts.records.pop(block_hash, 1)
        self._set_uses(item, count)
        self._clock += 1
        self.leaves.put(item, 0, self._clock + self._credit[count])

    def remove(self, item: int, block_hash: bytes, *, evicted: bool) -> None:
        if evicted:
            self._ghosts.put(block_hash, self._uses[item])
        super().remove(item, block_hash, evicted=evicted)

    def victim(self) -> int | None:
        self.leaves.settle()
        item = self.leaves.peek(0)
        return None if item == NO_ITEM else item

    def check(self) -> None:
        super().check()
        self._ghosts.check(self.capacity * GHOST_RATIO)
