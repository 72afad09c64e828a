"""Learning from what requests ask for: after the reply, and never for long at a time.

Each ACQUIRE is noted and counted later, in slices between which the loop does other work: as
a use of its blocks, which says what they are worth in L2 and to tiers, and for what an arena
of twice the size would have had. It refuses to know clients.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from tierd.clock import Clock
from tierd.core.host import HostTier, Space
from tierd.daemon.backup import Backups
from tierd.eviction.policy import Request
from tierd.eviction.reuse import SLICE, Reuse

log = logging.getLogger("tierd")

NS: Final = 1_000_000_000

WAITING_MAX: Final = 256
"""Requests that wait to be counted; beyond it the oldest are not. One of 1,000 blocks takes
about 1 ms, in which the loop answers a few others at most."""


class _Asked(NamedTuple):
    """An ACQUIRE: what it asked for, of which namespaces, and when."""

    spaces: list[Space]
    hashes: Sequence[bytes]
    request: int
    now_ns: int


class Learning:
    """What is noted and not yet counted."""

    def __init__(
        self, host: HostTier, backups: Backups, clock: Clock, counters: Counter[str]
    ) -> None:
        self._host = host
        self._backups = backups
        self._clock = clock
        self._counters = counters
        self._waiting: deque[_Asked] = deque()
        self._ready = asyncio.Event()

    def note(self, spaces: Sequence[Space], hashes: Sequence[bytes], request: int) -> None:
        """A request asks for a prefix; returns at once. 0 is a request of its own each time."""
        if len(self._waiting) >= WAITING_MAX:
            self._waiting.popleft()
            self._counters["uses_not_counted_total"] += 1
        unique = list(dict.fromkeys(spaces))
        self._waiting.append(_Asked(unique, hashes, request, self._clock.monotonic_ns()))
        self._ready.set()

    @property
    def busy(self) -> bool:
        """Whether something noted is not counted yet."""
        return bool(self._waiting)

    async def run(self) -> None:
        """Count what is noted, for ever."""
        while True:
            await self._ready.wait()
            while self._waiting:
                asked = self._waiting[0]
                try:
                    await self._count(asked)
                except Exception:  # a bug here costs hits, the daemon's end would cost all
                    self._counters["internal_errors_total"] += 1
                    log.exception("a use was not counted by a bug of ours")
                if self._waiting and self._waiting[0] is asked:
                    self._waiting.popleft()
            self._ready.clear()

    async def _count(self, asked: _Asked) -> None:
        self._count_ghosts(asked)
        new: dict[Reuse, Sequence[bytes]] = {}
        for space in asked.spaces:
            book = space.reuse
            if book not in new:
                new[book] = self._host.uses.new(book, asked.hashes, asked.request)
                await self._use(book, Request(new[book], asked.now_ns / NS))
        for space in asked.spaces:
            hashes = new[space.reuse]
            for start in range(0, len(hashes), SLICE):
                part = hashes[start : start + SLICE]
                space.chain.use(Request(part, asked.now_ns / NS))
                await asyncio.sleep(0)
            for start in range(0, len(asked.hashes), SLICE):
                self._backups.used(space, asked.hashes[start : start + SLICE])
                await asyncio.sleep(0)

    async def _use(self, book: Reuse, request: Request) -> None:
        if not request.hashes:
            return
        for _ in book.use_slices(request):
            await asyncio.sleep(0)
        if book.rebuild_due:
            await asyncio.sleep(0)
            book.rebuild()

    def _count_ghosts(self, asked: _Asked) -> None:
        """Count the blocks that only an arena of twice the size would have had."""
        space, hashes = asked.spaces[0], asked.hashes
        found = list(map(space.chain.items.get, hashes))
        if None in found:
            here = found.index(None)
            self._counters["ghost_blocks_total"] += space.twice(hashes[here:])
