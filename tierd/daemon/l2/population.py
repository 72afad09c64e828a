"""Faults new segments in ahead of use, so that no store waits for the kernel to clear pages."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque

from tierd.core.l2.space import Space
from tierd.daemon.l2.threads import WorkerThreads
from tierd.memory.arena import Arena

log = logging.getLogger("tierd")


class Population:
    """The segments that are not faulted in yet, in the order of their creation."""

    def __init__(self, arena: Arena, threads: WorkerThreads, counters: Counter[str]) -> None:
        self._arena = arena
        self._threads = threads
        self._counters = counters
        self._waiting: deque[tuple[Space, int]] = deque()
        self._ready = asyncio.Event()

    def add(self, space: Space, index: int) -> None:
        """Have a segment faulted in."""
        self._waiting.append((space, index))
        self._ready.set()

    async def run(self) -> None:
        """Fault segments in until cancelled."""
        while True:
            await self._ready.wait()
            while self._waiting:
                space, index = self._waiting.popleft()
                if space.ended or index >= len(space.live):
                    continue
                segment = self._arena.segments(space)[index]
                try:
                    more = space.live[index]
                    while more:
                        more = await self._threads.run(segment.mapping.populate_next)
                        if space.ended or not space.live[index]:
                            # Decommitted while the chunk was being faulted in.
                            segment.give_back()
                            more = False
                except OSError as error:
                    self._counters["populate_failed_total"] += 1
                    log.warning("cannot fault in memory ahead of use: %s", error)
            self._ready.clear()
