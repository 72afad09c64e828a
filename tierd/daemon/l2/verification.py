"""Blocks of a life before become blocks of this one once their checksums have been seen.

Those that a request asks for come first, while it waits; the others one batch after the other,
behind whatever else the daemon's threads have to do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import islice
from typing import Final

from tierd.core.space import Space
from tierd.daemon.l2.memory import HostMemory

log = logging.getLogger("tierd")

BATCH_BYTES_MAX: Final = 32 << 20
"""One call off the loop: some 5 ms, so that a request's own blocks soon get a thread."""

PAUSE_S: Final = 0.01
"""Between two batches that nobody waits for: they take about half of a thread."""


class Verification:
    """What is still to be proven of the arena."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory

    async def prove(self, space: Space, slots: Sequence[int]) -> None:
        """Verify those of the blocks that are unproven; what is damaged is gone afterwards.

        Can be cancelled between batches, whose blocks are proven then.
        """
        count = max(1, BATCH_BYTES_MAX // space.slot_bytes)
        for at in range(0, len(slots), count):
            await self._prove(space, slots[at : at + count])

    async def run(self) -> None:
        """Prove everything, the coldest first: it is the first to leave L2, or to be written."""
        for space in list(self._memory.host.spaces.values()):
            count = max(1, BATCH_BYTES_MAX // space.slot_bytes)
            while space.unproven:
                await self._prove(space, list(islice(space.unproven, count)))
                await asyncio.sleep(PAUSE_S)

    async def finish(self, budget_s: float) -> None:
        """Prove what is left, for at most so long: what is unproven cannot be written to tiers."""
        end = asyncio.get_running_loop().time() + budget_s
        for space in list(self._memory.host.spaces.values()):
            while space.unproven and asyncio.get_running_loop().time() < end:
                count = max(1, BATCH_BYTES_MAX // space.slot_bytes)
                await self._prove(space, list(islice(space.unproven, count)))

    async def _prove(self, space: Space, slots: Sequence[int]) -> None:
        slots = [slot for slot in slots if slot in space.unproven]
        if not slots:
            return
        self._memory.host.hold(space, slots)
        try:
            sums = await self._memory.checksums([(space, slot) for slot in slots])
            # Another call may have proven some of them meanwhile, and others been dropped.
            same = dict(zip(slots, sums, strict=True))
            rotten = [slot for slot in slots if space.unproven.get(slot, same[slot]) != same[slot]]
            for slot in slots:
                if slot in space.unproven and slot not in rotten:
                    space.checksums[slot] = space.unproven.pop(slot)
            self._memory.drop(space, rotten)
        finally:
            self._memory.let_go(space, slots)
        if rotten:
            self._memory.counters["rotten_blocks_total"] += len(rotten)
            log.error(
                "%d blocks in host memory changed between two lives of the daemon, and are gone",
                len(rotten),
            )
