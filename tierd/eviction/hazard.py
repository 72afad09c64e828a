"""The default of L2: the leaf goes first that promises the fewest hits a second of residence.

A block is worth what its class promises at its age (`tierd.eviction.reuse`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import ClassVar, Final

from tierd.eviction.policy import NO_ITEM, Policy, Request
from tierd.eviction.reuse import KINDS, Reuse

WARM_REQUESTS: Final = 256
"""Requests until which recency orders the blocks: less teaches too little to beat it."""


class Hazard(Policy):
    """Places are classes, ranks the last use in ms; the best leaf of a class is its oldest.

    That holds where worth falls with age. It may rise right after a use, but blocks of that
    age are few. Only leaves have an up-to-date place and rank: a block gets them when it
    becomes one, or is used as one.
    """

    name = "hazard"
    places: ClassVar[int] = KINDS

    def __init__(self, capacity: int, reuse: Reuse) -> None:
        super().__init__(capacity)
        self.reuse = reuse
        # Value of the oldest leaf of each class at this time, for the classes in `_column`,
        # which are few of all; empty if not known; and the classes of which it has changed.
        self._values: list[float] = []
        self._classes_valued: list[int] = []
        self._column: dict[int, int] = {}
        self._stale: set[int] = set()
        # Class and last use of the last victim.
        self._last: tuple[int, int] | None = None

    # --- what the index tells -------------------------------------------------------

    def use(self, request: Request, items: Sequence[int | None]) -> None:
        """The owner has had `reuse` count the request before."""
        children, rerank = self.leaves.children, self.leaves.rerank
        for block_hash, item in zip(request.hashes, items, strict=True):
            if item is not None and not children[item]:
                rerank(item, *self.reuse.last_use_or_now(block_hash))
        self._values = []

    def touch(self, items: Iterable[int]) -> None:
        """Nothing: a look without a request says nothing about the next one."""

    def insert(self, item: int, block_hash: bytes) -> None:
        self.leaves.put(item, *self.reuse.last_use_or_now(block_hash))
        self._values = []

    def expose(self, item: int) -> None:
        leaves = self.leaves
        use = self.reuse.last_use(self.hashes[item])
        if use is None:
            use = leaves.place[item], leaves.rank[item]
        leaves.place[item], leaves.rank[item] = use
        leaves.expose(item)
        if use == self._last:
            # The parent of what has just gone, of the same use: it is worth the same.
            self._stale.discard(use[0])
        else:
            self._stale.add(use[0])

    def remove(self, item: int, block_hash: bytes, *, evicted: bool) -> None:
        leaves = self.leaves
        kind = leaves.place[item]
        self._last = (kind, leaves.rank[item]) if evicted and kind not in self._stale else None
        self._stale.add(kind)
        super().remove(item, block_hash, evicted=evicted)

    def move(self, item: int, target: int) -> None:
        super().move(item, target)
        self._values = []

    # --- worth ----------------------------------------------------------------------

    def victim(self) -> int | None:
        values, stale = self._values, self._stale
        if stale or not values:
            self._last = None
        if not values:
            self.leaves.settle()
            valued = self._classes_valued
            valued[:] = [kind for kind, heap in enumerate(self.leaves.heaps) if heap]
            self._column = {kind: column for column, kind in enumerate(valued)}
            stale.clear()
            values = self._values = [self._value_of_oldest(kind) for kind in valued]
        while stale:
            kind = stale.pop()
            if kind not in self._column:
                self._column[kind] = len(values)
                self._classes_valued.append(kind)
                values.append(inf)
            values[self._column[kind]] = self._value_of_oldest(kind)
        lowest = min(values, default=inf)
        if lowest == inf:
            return None
        return self.leaves.peek(self._classes_valued[values.index(lowest)])

    def set_aside(self, item: int) -> None:
        super().set_aside(item)
        self._stale.add(self.leaves.place[item])

    def _value_of_oldest(self, kind: int) -> float:
        item = self.leaves.peek(kind)
        if item == NO_ITEM:
            return inf
        last_ms = self.leaves.rank[item]
        if self.reuse.requests < WARM_REQUESTS:
            return float(last_ms)
        return self.reuse.survival.value(kind, self.reuse.now_ms - last_ms)
