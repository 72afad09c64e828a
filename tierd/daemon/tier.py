"""A storage tier as the daemon sees it: a backend, its backup queue, its numbers."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import Final

from tierd.backend import Backend
from tierd.core.host import Space

BATCH_BLOCKS_MAX: Final = 32
BATCH_BYTES_MAX: Final = 32 << 20
"""One call's blocks and bytes: enough for every I/O thread, little enough to keep prefix order."""

READ_BATCHES_MAX: Final = 4
WRITE_BATCHES_MAX: Final = 2
"""Batches in flight a tier: the next one is ready when one ends; more only adds latency."""

CALL_S_MAX: Final = 30.0
"""A storage call that takes longer is given up: far above a batch on a slow network. Without
it a few hung calls would hold their slots, and the tier's concurrency, for ever.
"""


class StorageTier:
    """One entry of `[[storage]]`."""

    def __init__(self, name: str, kind: str, backend: Backend) -> None:
        self.name = name
        self.kind = kind
        self.backend = backend
        self.reads = asyncio.Semaphore(READ_BATCHES_MAX)
        self.counters: Counter[str] = Counter()
        self.queue: deque[tuple[Space, int]] = deque()
        self.queued = asyncio.Event()
        self.writing = 0

    @property
    def idle(self) -> bool:
        """Whether no backup is queued or in flight."""
        return not self.queue and not self.writing

    def enqueue(self, space: Space, slot: int) -> None:
        """Queue one held slot for backup."""
        self.queue.append((space, slot))
        self.queued.set()

    def next_batch(self) -> tuple[Space, list[int]]:
        """Queued slots of one space, within the limits of a batch. The queue must not be empty."""
        space, slot = self.queue.popleft()
        slots = [slot]
        limit = batch_blocks(space)
        while self.queue and self.queue[0][0] is space and len(slots) < limit:
            slots.append(self.queue.popleft()[1])
        return space, slots

    def status(self) -> dict[str, object]:
        """The tier's state for STATUS."""
        stats = self.backend.stats()
        counters = Counter(self.counters)
        counters.update(self.backend.counters)
        return {
            "name": self.name,
            "type": self.kind,
            "state": "ready" if stats.index_complete else "indexing",
            "blocks": stats.blocks,
            "used_bytes": stats.used_bytes,
            "capacity_bytes": stats.capacity_bytes,
            "backup_queue": len(self.queue) + self.writing,
            "counters": dict(sorted(counters.items())),
        }


def batch_blocks(space: Space) -> int:
    """Blocks of `space` that make one batch."""
    return max(1, min(BATCH_BLOCKS_MAX, BATCH_BYTES_MAX // space.slot_bytes))
