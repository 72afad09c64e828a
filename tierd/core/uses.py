"""Which use of a block counts: one a request, however often it asks, and one for all ranks.

A request asks in chunks, again after a preemption, and again when it stores. It counts once for
each block. What uses tell is in a `Reuse` (tierd.eviction.reuse), one for all namespaces of an
engine. It refuses to know slots, tiers and budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

from tierd.eviction.policy import Request
from tierd.eviction.reuse import Reuse

COUNTED_MAX: Final = 1 << 14
"""Requests that are remembered, the latest ones; each costs about 200 bytes. An engine runs a
few hundred at a time, and one that comes back later than so many others counts again."""

NS: Final = 1_000_000_000


class Uses:
    """Counts the uses of blocks, for all namespaces."""

    def __init__(self, counted_max: int = COUNTED_MAX) -> None:
        self._books: dict[bytes, Reuse] = {}
        self._leaders: dict[bytes, bytes] = {}
        self._counted_max = counted_max
        # How many leading blocks of a request have been counted.
        self._counted: dict[tuple[bytes, int], int] = {}

    def follow(self, digest: bytes, leader: bytes) -> None:
        """A namespace's blocks are used whenever those of another one, its leader, are: so it is
        with the ranks of one engine, and counting them once is enough."""
        self._leaders[digest] = leader

    def reuse(self, digest: bytes) -> Reuse:
        """What is known of the blocks of a namespace."""
        digest = self._leaders.get(digest, digest)
        book = self._books.get(digest)
        if book is None:
            book = self._books[digest] = Reuse()
        return book

    def use(self, digest: bytes, hashes: Sequence[bytes], request: int, now_ns: int) -> None:
        """A request asks for a prefix in a namespace; 0 is a request of its own each time."""
        done = 0
        if request:
            key = digest, request
            done = self._counted.pop(key, 0)
            self._counted[key] = max(done, len(hashes))
            if len(self._counted) > self._counted_max:
                excess = len(self._counted) - self._counted_max * 63 // 64
                for old in list(islice(self._counted, excess)):
                    del self._counted[old]
        if done < len(hashes):
            self.reuse(digest).use(Request(hashes[done:], now_ns / NS))
