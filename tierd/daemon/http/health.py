"""Whether the daemon's own work goes on: what /healthz and the service manager's watchdog hear.

Two things must: the loop, on which all of this runs, and the threads that compute checksums and
fault memory in, without which nothing is backed up or proven. Storage tiers have no part in it:
one that hangs is its breaker's to deal with, and no reason to lose L2's engines.
"""

from __future__ import annotations

import asyncio
from typing import Final

from tierd.daemon.l2.memory import HostMemory

STUCK_S: Final = 30.0
"""Checksums of a batch take some ms: a thread that is away so long does not come back."""

PROBE_S: Final = 1.0
"""How often the threads are asked for a sign of life, so that it shows that they hang even while
nobody needs them. It costs about 0.1 ms."""


class Health:
    """Judges the daemon that it runs in."""

    def __init__(self, memory: HostMemory, limit_s: float = STUCK_S) -> None:
        """`limit_s` is how long a call off the loop may take."""
        self._memory = memory
        self._limit_s = limit_s

    async def probe(self) -> None:
        """Have the threads show that they live, for ever."""
        while True:
            await self._memory.in_thread(_nothing)
            await asyncio.sleep(min(PROBE_S, self._limit_s / 2))

    @property
    def trouble(self) -> str:
        """What is wrong; empty while all is well."""
        away_s = self._memory.in_thread_s
        if away_s <= self._limit_s:
            return ""
        return f"a thread that computes checksums or faults memory in is away for {away_s:.0f} s"


def _nothing() -> None:
    pass
