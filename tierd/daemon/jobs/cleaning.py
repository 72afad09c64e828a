"""Deletes the blocks that flushes have barred in a tier.

Barred blocks are never served, so this only frees space. A failure is reported, and the blocks are
left to the next flush or scrub, or to the tier's eviction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from tierd.backend import BlockHeader
from tierd.core.l3.epochs import split_scope
from tierd.daemon.l3.tier import StorageTier
from tierd.errors import BackendError
from tierd.types import BlockKey

DELETE_BATCH: Final = 64
"""Blocks deleted per call to a tier: well within a deadline, on an object store too."""

PASSES_MAX: Final = 3
"""Maximum scans of a tier until one is complete and all blocks that it found are deleted."""

RETRY_S: Final = 1.0
"""Pause before another scan."""


class Sweep:
    """Deletes the barred blocks that a scan of one tier finds."""

    def __init__(self, tier: StorageTier, deleted: Callable[[bytes, int], None]) -> None:
        """`deleted` is called for each batch with a namespace's digest and a number of blocks."""
        self.left = 0
        """Blocks that could not be deleted."""
        self.why = ""
        self._tier = tier
        self._deleted = deleted
        self._batches: dict[bytes, list[bytes]] = {}

    async def take(self, key: BlockKey) -> None:
        """Add a block, and delete a full batch."""
        scope, block_hash = key
        batch = self._batches.setdefault(scope, [])
        batch.append(block_hash)
        if len(batch) == DELETE_BATCH:
            await self._delete(scope)

    async def rest(self) -> None:
        """Delete the blocks that make no full batch."""
        for scope in list(self._batches):
            await self._delete(scope)

    async def _delete(self, scope: bytes) -> None:
        hashes = self._batches.pop(scope)
        try:
            count = await self._tier.delete(scope, hashes)
        except BackendError as error:
            self.left += len(hashes)
            self.why = str(error)
        else:
            self._deleted(split_scope(scope)[0], count)


class Cleaning:
    """Deletes all barred blocks of one tier."""

    def __init__(
        self, tier: StorageTier, over: asyncio.Event, deleted: Callable[[bytes, int], None]
    ) -> None:
        """The work ends once `over` is set, because another flush continues it."""
        self.left = 0
        """Blocks that the last scan found but could not delete."""
        self.why = ""
        """Why barred blocks may remain; empty if none do."""
        self._tier = tier
        self._over = over
        self._deleted = deleted

    async def run(self) -> None:
        """Scan and delete until nothing remains, at most PASSES_MAX times."""
        for number in range(PASSES_MAX):
            if number:
                await asyncio.sleep(RETRY_S)
            sweep = Sweep(self._tier, self._deleted)
            unseen = await self._tier.each(self._look, sweep.rest, sweep.take)
            self.left, self.why = sweep.left, unseen or sweep.why
            if not self.why or self._over.is_set():
                return

    async def _look(self, header: BlockHeader) -> None:
        if self._over.is_set():
            raise BackendError("another flush continues the deletions")
