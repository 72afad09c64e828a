"""Housekeeping, once a second: expired leases and hints, former incarnations, unused namespaces,
hanging copies."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from tierd.clock import Clock
from tierd.daemon.copies.processes import CopyProcesses
from tierd.daemon.l2.ending import Endings
from tierd.daemon.l2.incarnations import Incarnations
from tierd.daemon.l2.memory import HostMemory
from tierd.daemon.l3.backup import Backups

HOUSEKEEPING_S: Final = 1.0
"""Interval of housekeeping; a lease ends at most this long after its time."""

NS: Final = 1_000_000_000


async def keep_house(
    memory: HostMemory,
    incarnations: Incarnations,
    endings: Endings,
    copies: CopyProcesses,
    backups: Backups,
    clock: Clock,
    counters: Counter[str],
) -> None:
    """Run until cancelled."""
    host = memory.host
    while True:
        host.pass_time(clock.monotonic_ns() // NS)
        await asyncio.sleep(HOUSEKEEPING_S)
        counters["leases_expired_total"] += host.expire(clock.monotonic_ns())
        while host.expire_hints(clock.monotonic_ns()):
            await asyncio.sleep(0)
        memory.keep_decommitted()
        incarnations.tick()
        await endings.tick()
        memory.manager.flush()
        copies.watch()
        backups.note_capacities()
