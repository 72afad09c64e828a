"""S3-FIFO: a small queue, from which most blocks are evicted unused, and a main queue.

After Yang et al., SOSP 2023, but only leaves are evicted, and one use beyond the first moves a
block to the main queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tierd.eviction.policy import NO_ITEM, CountedUses, Ghosts, PrefixRequest

_SMALL: Final = 0
_MAIN: Final = 1
SMALL_SHARE: Final = 0.1
GHOST_SHARE: Final = 0.9
USES_MAX: Final = 3


class S3Fifo(CountedUses):
    """A reference policy."""

    name = "s3fifo"
    places = 2

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._clock = 0
        self._small = 0
        self._ghosts = Ghosts(int(capacity * GHOST_SHARE))

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        self._ghosts.resize(int(capacity * GHOST_SHARE))

    def use(self, request: PrefixRequest, items: Sequence[int | None]) -> None:
        uses = self._uses
        for item in items:
            if item is not None and uses[item] < USES_MAX:
                uses[item] += 1

    def touch(self, items: Iterable[int]) -> None:
        """Do nothing: FIFO queues have no recency."""

    def insert(self, item: int, block_hash: bytes) -> None:
        place = _SMALL if self._ghosts.records.pop(block_hash, None) is None else _MAIN
        self._set_uses(item, 0)
        self._clock += 1
        self._small += place == _SMALL
        self.leaves.put(item, place, self._clock)

    def remove(self, item: int, block_hash: bytes, *, evicted: bool) -> None:
        if self.leaves.place[item] == _SMALL:
            self._small -= 1
            if evicted:
                self._ghosts.put(block_hash, 1)
        super().remove(item, block_hash, evicted=evicted)

    def victim(self) -> int | None:
        leaves, uses = self.leaves, self._uses
        leaves.settle()
        while True:
            small, main = leaves.peek(_SMALL), leaves.peek(_MAIN)
            from_small = main == NO_ITEM or self._small >= self.capacity * SMALL_SHARE
            item = small if from_small and small != NO_ITEM else main
            if item == NO_ITEM:
                return None
            if not uses[item]:
                return item
            # Another round in the main queue costs one use.
            if item == small:
                self._small -= 1
                uses[item] = 0
            else:
                uses[item] -= 1
            self._clock += 1
            leaves.rerank(item, _MAIN, self._clock)
            leaves.settle()

    def check(self) -> None:
        super().check()
        resident = [i for i, children in enumerate(self.leaves.children) if children >= 0]
        assert self._small == sum(self.leaves.place[i] == _SMALL for i in resident)
        self._ghosts.check(int(self.capacity * GHOST_SHARE))
