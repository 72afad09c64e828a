"""Whether the daemon's own work progresses: /healthz and the service manager's watchdog ask this.

Two parts must progress: the event loop, on which this code runs, and the worker threads, which
compute checksums and fault memory in, and without which no block is backed up or verified. Storage
tiers are not part of it: the breaker isolates a tier that hangs, and a restart would only lose the
engines' host memory.
"""

from __future__ import annotations

import asyncio
from typing import Final

from tierd.daemon.l2.threads import WorkerThreads

STUCK_S: Final = 30.0
"""Checksums of a batch take milliseconds: a call that takes this long does not return."""

PROBE_S: Final = 1.0
"""Interval of empty calls, which show hanging threads even without work. One costs 0.1 ms."""


class Health:
    """Judges the daemon that it runs in."""

    def __init__(self, threads: WorkerThreads, limit_s: float = STUCK_S) -> None:
        """`limit_s` is the longest time that a call in a thread may take."""
        self._threads = threads
        self._limit_s = limit_s

    async def probe(self) -> None:
        """Make empty calls until cancelled."""
        while True:
            await self._threads.run(_nothing)
            await asyncio.sleep(min(PROBE_S, self._limit_s / 2))

    @property
    def trouble(self) -> str:
        """Description of a hang; empty while the daemon progresses."""
        away_s = self._threads.oldest_s
        if away_s <= self._limit_s:
            return ""
        return f"a thread that computes checksums or faults memory in is away for {away_s:.0f} s"


def _nothing() -> None:
    pass
