"""Checksums of blocks in host memory, computed in the background in batches.

Waiting blocks are held in host memory by the caller, which gets each back with its checksum. This
module does not know which tiers the bits of a block stand for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from tierd.core.l2.space import Space
from tierd.daemon.l2.memory import HostMemory
from tierd.daemon.l3.renewal import Covers

CHECKSUM_BATCH: Final = 32
"""Blocks per hop to a thread: the checksums of 64 MiB of 2 MiB blocks take about 3 ms."""

CHECKSUM_PAUSE_S: Final = 0.005
"""Pause before a round of checksums. A hop to a thread and back costs about 0.1 ms."""


class PendingChecksum(NamedTuple):
    """A block that is to get a checksum, and the bits of the tiers that wait for it."""

    space: Space
    slot: int
    tiers: int


class Checksums:
    """Blocks that wait for their checksums."""

    def __init__(self, memory: HostMemory, done: Callable[[PendingChecksum], None]) -> None:
        """`done` takes each block once its checksum is known."""
        self._memory = memory
        self._done = done
        self._waiting: deque[PendingChecksum] = deque()
        self._ready = asyncio.Event()
        self._batch: list[PendingChecksum] = []

    @property
    def pending(self) -> Sequence[PendingChecksum]:
        """Blocks that wait, or whose checksum is being computed."""
        return *self._waiting, *self._batch

    @property
    def busy(self) -> bool:
        """Whether any block is pending."""
        return bool(self._waiting or self._batch)

    def add(self, blocks: Iterable[PendingChecksum]) -> None:
        """Queue held blocks. A block that has its checksum by its turn keeps it."""
        self._waiting.extend(blocks)
        if self._waiting:
            self._ready.set()

    def take_out(self, covers: Covers) -> list[PendingChecksum]:
        """Take out the blocks of these namespaces that wait for a tier."""
        waiting, self._waiting = self._waiting, deque()
        taken = []
        for block in waiting:
            if block.tiers and covers(block.space.digest):
                taken.append(block)
            else:
                self._waiting.append(block)
        return taken

    def under_way(self, covers: Covers) -> bool:
        """Whether checksums of these namespaces' blocks are being computed for a tier."""
        return any(block.tiers and covers(block.space.digest) for block in self._batch)

    async def run(self) -> None:
        """Compute missing checksums, forever."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            # No client waits for a checksum: a pause makes one batch of many small commits.
            await asyncio.sleep(CHECKSUM_PAUSE_S)
            while self._waiting:
                count = min(CHECKSUM_BATCH, len(self._waiting))
                self._batch = [self._waiting.popleft() for _ in range(count)]
                await self._compute(self._batch)
                for block in self._batch:
                    self._done(block)
                self._batch = []

    async def _compute(self, batch: Iterable[PendingChecksum]) -> None:
        without = ((b.space, b.slot) for b in batch if b.space.checksums[b.slot] is None)
        missing = list(dict.fromkeys(without))
        by_space: dict[Space, dict[int, bytes]] = {}
        sums = await self._memory.checksums(missing)
        for (space, slot), digest in zip(missing, sums, strict=True):
            by_space.setdefault(space, {})[slot] = digest
        for space, known in by_space.items():
            self._memory.note_checksums(space, known)
