"""Which uses of a block count: one per request, and one for all ranks together.

A request asks in chunks, again after a preemption, and again when it stores, but counts once per
block. Uses are collected in a `Reuse` (tierd.eviction.reuse), one for all namespaces whose blocks
have the same hashes: all ranks of an engine then evict the same blocks. This module knows no
slots, tiers or budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

from tierd.eviction.reuse import KNOWN_MAX, Reuse
from tierd.types import Namespace

COUNTED_MAX: Final = 1 << 14
"""Number of latest requests to remember; each takes about 200 bytes. An engine runs a few hundred
at a time. A request that returns after being forgotten counts again."""

KNOWN_RATIO: Final = 2
"""Blocks in a book per block that L2 can hold; a book has at least KNOWN_MAX."""

UNUSED_MAX: Final = 64
"""Books kept of namespaces that have ended: an engine that returns finds its uses again."""


class Uses:
    """The books of all namespaces, and the requests that they have counted."""

    def __init__(self, counted_max: int = COUNTED_MAX) -> None:
        self._books: dict[tuple[object, ...], Reuse] = {}
        self._unused: dict[tuple[object, ...], None] = {}
        self._counted_max = counted_max
        # How many leading blocks of a request have been counted, by book.
        self._counted: dict[tuple[Reuse, int], int] = {}

    def book(self, namespace: Namespace, blocks: int) -> Reuse:
        """Return the book of a namespace's blocks; `blocks` is how many of them L2 can hold."""
        family = namespace.family
        self._unused.pop(family, None)
        book = self._books.get(family)
        if book is None:
            book = self._books[family] = Reuse(max(KNOWN_MAX, KNOWN_RATIO * blocks))
        return book

    def note_unused(self, namespace: Namespace) -> None:
        """Mark the book of a namespace as unused; the oldest unused book goes beyond UNUSED_MAX."""
        self._unused[namespace.family] = None
        if len(self._unused) > UNUSED_MAX:
            oldest = next(iter(self._unused))
            del self._unused[oldest], self._books[oldest]

    def new(self, book: Reuse, hashes: Sequence[bytes], request: int) -> Sequence[bytes]:
        """Return the part of a request's prefix that was not counted before, and count it.

        Request 0 is a new request each time.
        """
        if not request:
            return hashes
        key = book, request
        done = self._counted.pop(key, 0)
        self._counted[key] = max(done, len(hashes))
        if len(self._counted) > self._counted_max:
            # Many at a time: each iteration of a dict steps over the entries deleted before.
            excess = len(self._counted) - self._counted_max * 63 // 64
            for old in list(islice(self._counted, excess)):
                del self._counted[old]
        return hashes[done:]
