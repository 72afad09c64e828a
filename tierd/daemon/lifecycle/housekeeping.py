"""What is looked after once a second: leases and hints that end, what former lives have left,
namespaces that nobody uses."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from tierd.clock import Clock
from tierd.daemon.copies.copying import Copies
from tierd.daemon.l2.ending import Endings
from tierd.daemon.l2.incarnations import Incarnations
from tierd.daemon.l2.memory import HostMemory
from tierd.daemon.l3.backup import Backups

HOUSEKEEPING_S: Final = 1.0
"""How often expired leases are looked for; a lease outlives its time by at most this."""

NS: Final = 1_000_000_000


async def keep_house(
    memory: HostMemory,
    incarnations: Incarnations,
    endings: Endings,
    copies: Copies,
    backups: Backups,
    clock: Clock,
    counters: Counter[str],
) -> None:
    """Do it for ever."""
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
