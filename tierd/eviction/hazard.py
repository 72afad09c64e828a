"""The default of L2: evicts the leaf with the lowest expected hits per second of residence.

A block's worth is the expected hit rate of its class at its age (`tierd.eviction.reuse`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import ClassVar, Final

from tierd.eviction.policy import NO_ITEM, Policy, PrefixRequest
from tierd.eviction.reuse import KINDS, LEARNED_REQUESTS, Reuse
from tierd.eviction.survival import Tables

HOLDS: Final = 32
"""A value is computed again when the block's age has grown by one part in HOLDS."""


class Hazard(Policy):
    """Places are classes, ranks are last uses in ms; the victim of a class is its oldest leaf.

    That is right where worth falls with age. Worth may rise right after a use, but few blocks
    have that age. Only leaves have an up-to-date place and rank: a block gets them when it
    becomes a leaf, or is used as a leaf.
    """

    name = "hazard"
    places: ClassVar[int] = KINDS

    def __init__(self, capacity: int, reuse: Reuse) -> None:
        super().__init__(capacity)
        self.reuse = reuse
        # By class: the oldest leaf at the last look, its value, and the time until which the
        # value holds. Then the classes that may have another oldest leaf, and the time and the
        # tables of the last look (None: values are recency).
        self._oldest = [NO_ITEM] * KINDS
        self._values = [inf] * KINDS
        self._until_ms = [0] * KINDS
        self._stale: set[int] = set()
        self._now_ms = 0
        self._tables: Tables | None = None

    # --- calls of the index ---------------------------------------------------------

    def use(self, request: PrefixRequest, items: Sequence[int | None]) -> None:
        """Update the leaves among the items; the owner has counted the request in `reuse`."""
        leaves, stale = self.leaves, self._stale
        children = leaves.children
        for block_hash, item in zip(request.hashes, items, strict=True):
            if item is not None and not children[item]:
                kind, last_ms = self.reuse.last_use_or_now(block_hash)
                stale.add(kind)
                leaves.rerank(item, kind, last_ms)

    def taught(self, items: Iterable[int]) -> None:
        for item in items:
            if not self.leaves.children[item]:
                kind, last_ms = self.reuse.last_use_or_now(self.hashes[item])
                self._stale.add(kind)
                self.leaves.rerank(item, kind, last_ms)

    def touch(self, items: Iterable[int]) -> None:
        """Do nothing: a lookup without a request does not predict the next use."""

    def insert(self, item: int, block_hash: bytes) -> None:
        kind, last_ms = self.reuse.last_use_or_now(block_hash)
        self._stale.add(kind)
        self.leaves.put(item, kind, last_ms)

    def expose(self, item: int) -> None:
        leaves = self.leaves
        use = self.reuse.last_use(self.hashes[item])
        if use is not None:
            leaves.place[item], leaves.rank[item] = use
        self._stale.add(leaves.place[item])
        leaves.expose(item)

    def move(self, item: int, target: int) -> None:
        self._stale.add(self.leaves.place[item])
        super().move(item, target)

    # --- worth ----------------------------------------------------------------------

    def victim(self) -> int | None:
        leaves, values, stale = self.leaves, self._values, self._stale
        if leaves.head != NO_ITEM:
            # In the class of the last victim, and used together with it: it has the same worth.
            return leaves.head
        leaves.settle()
        now_ms = self.reuse.now_ms
        tables = None if self.reuse.requests < LEARNED_REQUESTS else self.reuse.survival.tables
        if tables is not self._tables:
            self._tables = tables
            stale.update(range(KINDS))
        elif now_ms != self._now_ms:
            stale.update([kind for kind, until in enumerate(self._until_ms) if until <= now_ms])
        self._now_ms = now_ms
        for kind in stale:
            values[kind] = self._value_of(kind, leaves.peek(kind))
        stale.clear()
        while (lowest := min(values)) < inf:
            kind = values.index(lowest)
            item = leaves.peek(kind)
            if item == self._oldest[kind]:
                return item
            # The former oldest leaf is no longer a leaf, or was used.
            values[kind] = self._value_of(kind, item)
        return None

    def _value_of(self, kind: int, item: int) -> float:
        """Return the value of a class's oldest leaf, and store how long the value holds."""
        self._oldest[kind] = item
        if item == NO_ITEM:
            return inf
        last_ms = self.leaves.rank[item]
        if self._tables is None:
            return float(last_ms)
        age_ms = self._now_ms - last_ms
        self._until_ms[kind] = self._now_ms + age_ms // HOLDS
        return self._tables.value(kind, age_ms)
