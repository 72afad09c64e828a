"""Counts uses of blocks: a request counts once per block, for all ranks of its engine together.

A request asks in chunks and again after a preemption, but counts once for each block. Uses are
recorded in `Reuse` books (`tierd.eviction.reuse`). Namespaces whose blocks have the same hashes
share one book: the ranks of an engine, which therefore evict alike. Only this module and
`HostTier` change a book. This module knows no slots, tiers or budgets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from tierd.core.l2.space import Space
from tierd.eviction.policy import PrefixRequest
from tierd.eviction.reuse import KNOWN_MAX, SLICE, Reuse
from tierd.types import Namespace

COUNTED_MAX: Final = 1 << 14
"""Requests remembered, the latest ones; each costs about 200 bytes. An engine runs a few hundred
at a time. A request that returns after it was forgotten counts again."""

KNOWN_RATIO: Final = 2
"""Blocks that a book remembers per block that L2 can hold; a book has at least KNOWN_MAX."""

UNUSED_MAX: Final = 64
"""Maximum books kept for namespaces that have ended, in case their engines come back."""


class Uses:
    """The books of all namespaces, and the requests that they have counted."""

    def __init__(self, counted_max: int = COUNTED_MAX) -> None:
        self._books: dict[tuple[object, ...], Reuse] = {}
        self._unused: dict[tuple[object, ...], None] = {}
        self._counted_max = counted_max
        # How many leading blocks of a request have been counted, by book.
        self._counted: dict[tuple[Reuse, int], int] = {}

    def book(self, namespace: Namespace, blocks: int) -> Reuse:
        """Return the book of a namespace; L2 can hold `blocks` of its blocks."""
        family = namespace.family
        self._unused.pop(family, None)
        book = self._books.get(family)
        if book is None:
            book = self._books[family] = Reuse(max(KNOWN_MAX, KNOWN_RATIO * blocks))
        return book

    def note_unused(self, namespace: Namespace) -> None:
        """Note that no namespace uses this one's book now; keep it until UNUSED_MAX are unused."""
        self._unused[namespace.family] = None
        if len(self._unused) > UNUSED_MAX:
            oldest = next(iter(self._unused))
            del self._unused[oldest], self._books[oldest]

    def count(
        self, spaces: Sequence[Space], hashes: Sequence[bytes], request: int, now_s: float
    ) -> Iterator[int]:
        """Count a request's use of a prefix, in the books and in each space's eviction order.

        Yields after each step of less than 0.1 ms how many blocks it handled. Other requests may
        be counted between steps.
        """
        new: dict[Reuse, Sequence[bytes]] = {}
        for space in spaces:
            book = space.reuse
            if book not in new:
                new[book] = self.new(book, hashes, request)
                yield from _count(book, PrefixRequest(new[book], now_s))
        for space in spaces:
            uncounted = new[space.reuse]
            for start in range(0, len(uncounted), SLICE):
                part = uncounted[start : start + SLICE]
                space._chain.use(PrefixRequest(part, now_s))
                yield len(part)

    def new(self, book: Reuse, hashes: Sequence[bytes], request: int) -> Sequence[bytes]:
        """Return the blocks of a request's prefix that are not counted yet, and mark them counted.

        Number 0 is a new request each time.
        """
        if not request:
            return hashes
        key = book, request
        done = self._counted.pop(key, 0)
        self._counted[key] = max(done, len(hashes))
        if len(self._counted) > self._counted_max:
            # Several at once: a dict would step over all earlier deletions each time.
            excess = len(self._counted) - self._counted_max * 63 // 64
            for old in list(islice(self._counted, excess)):
                del self._counted[old]
        return hashes[done:]


def _count(book: Reuse, request: PrefixRequest) -> Iterator[int]:
    if not request.hashes:
        return
    for _ in book.use_slices(request):
        yield SLICE
    yield len(request.hashes) % SLICE
    if book.rebuild_due:
        # A rebuild takes as long as ten slices, so the caller first gets a pause.
        yield SLICE
        book.rebuild()
