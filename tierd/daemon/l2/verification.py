"""Verifies adopted blocks, which are served only after their checksums matched.

Blocks of a waiting request come first. All others follow in batches, with pauses for the other work
of the daemon's threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import islice
from typing import Final

from tierd.core.l2.space import Space
from tierd.daemon.l2.memory import HostMemory

log = logging.getLogger("tierd")

BATCH_BYTES_MAX: Final = 32 << 20
"""Bytes per call in a thread, about 5 ms, so that a request's blocks soon get a thread."""

PAUSE_S: Final = 0.01
"""Pause between two batches without a waiting request; they take half of a thread's time."""


class Verification:
    """Verifies the unverified blocks of the arena."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory

    async def verify(self, space: Space, slots: Sequence[int]) -> None:
        """Verify the unverified blocks in these slots, and drop damaged ones.

        Can be cancelled between batches; earlier batches stay verified.
        """
        count = max(1, BATCH_BYTES_MAX // space.slot_bytes)
        for at in range(0, len(slots), count):
            await self._verify_batch(space, slots[at : at + count])

    async def run(self) -> None:
        """Verify all blocks, the coldest first: they are the first to be evicted or written."""
        for space in list(self._memory.host.spaces.values()):
            count = max(1, BATCH_BYTES_MAX // space.slot_bytes)
            while space.unverified:
                await self._verify_batch(space, list(islice(space.unverified, count)))
                await asyncio.sleep(PAUSE_S)

    async def finish(self, budget_s: float) -> None:
        """Verify the rest within `budget_s`: an unverified block cannot be written to a tier."""
        end = asyncio.get_running_loop().time() + budget_s
        for space in list(self._memory.host.spaces.values()):
            while space.unverified and asyncio.get_running_loop().time() < end:
                count = max(1, BATCH_BYTES_MAX // space.slot_bytes)
                await self._verify_batch(space, list(islice(space.unverified, count)))

    async def _verify_batch(self, space: Space, slots: Sequence[int]) -> None:
        slots = [slot for slot in slots if slot in space.unverified]
        rotten = await self._memory.verify(space, slots) if slots else 0
        if rotten:
            self._memory.counters["rotten_blocks_total"] += rotten
            log.error(
                "%d blocks in host memory are dropped: they changed between two incarnations",
                rotten,
            )
