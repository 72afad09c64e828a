"""The shelves of a file tier: one per namespace, and the uses of all their blocks.

Uses count up with each read, write and reported use. They decide which slab is dropped first, and
order the blocks after a restart. They are saved in the slabs' indexes from time to time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from tierd_backends.file.health import DiskHealth
from tierd_backends.file.jobs import FileJob
from tierd_backends.file.shelf import Shelf
from tierd_backends.file.slab import Slab
from tierd_backends.file.threads import DiskThreads

SAVE_USES: Final = 4096
"""Hits between two saves of the uses, one system call per slab. A SIGKILL loses this many hits."""


class Shelves:
    """Belongs to the event loop."""

    def __init__(self, threads: DiskThreads, health: DiskHealth, eviction: str) -> None:
        """`eviction` names the policy that orders evictions within a shelf."""
        self.changing = asyncio.Lock()
        """Held while slabs are added or dropped, and while every slab must stay."""
        # The uses start at the clock, so this run's uses come after the last run's before its index
        # is read. A clock set back only costs that order.
        self.uses = time.time_ns()
        self._by_namespace: dict[bytes, Shelf] = {}
        self._threads = threads
        self._health = health
        self._eviction = eviction
        self._saved_uses = self.uses
        self._saving: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._saving.set_result(None)
        self._closed = False

    def get(self, namespace: bytes) -> Shelf | None:
        """Return a namespace's shelf, None if the tier has none."""
        return self._by_namespace.get(namespace)

    def add(self, namespace: bytes, slot_bytes: int) -> Shelf:
        """Add an empty shelf."""
        assert namespace not in self._by_namespace
        shelf = self._by_namespace[namespace] = Shelf(namespace, slot_bytes, self._eviction)
        return shelf

    def remove(self, shelf: Shelf) -> None:
        """Forget an empty shelf, unless it was removed before."""
        if self._by_namespace.get(shelf.namespace) is shelf:
            del self._by_namespace[shelf.namespace]

    def __iter__(self) -> Iterator[Shelf]:
        return iter(list(self._by_namespace.values()))

    @property
    def indexed(self) -> bool:
        """Whether every block that was on disk at start is known."""
        return all(shelf.indexed for shelf in self)

    def coldest(self, among: Callable[[Shelf, Slab], bool]) -> tuple[Shelf, Slab] | None:
        """Return the unpinned slab that was not used for longest, of the slabs `among` allows."""
        unpinned = [
            (shelf, slab)
            for shelf in self
            for slab in shelf.slabs.values()
            if not slab.pins and among(shelf, slab)
        ]
        return min(unpinned, key=lambda pair: pair[1].last_use, default=None)

    def job(
        self,
        shelf: Shelf,
        item: int,
        position: int,
        block_hash: bytes,
        view: memoryview,
        length: int,
    ) -> FileJob:
        """Return a job that counts as a use, with its record pinned. Unpin the record when the
        threads are done."""
        self.uses += 1
        slab = shelf.slab_of(item)
        job = FileJob(
            slab=slab,
            record=slab.record(item),
            item=item,
            position=position,
            block_hash=block_hash,
            view=view,
            length=length,
            use=self.uses,
        )
        shelf.pin(item)
        return job

    def save_uses_soon(self) -> None:
        """Begin to save the uses of blocks if there were many since the last save."""
        if self.uses - self._saved_uses > SAVE_USES and self._saving.done() and not self._closed:
            self._saving = asyncio.create_task(self._save_uses())

    async def _save_uses(self) -> None:
        # Until everything is indexed, slabs do not know the uses of all their blocks.
        if not self._health.writable or not self.indexed:
            return
        since, self._saved_uses = self._saved_uses, self.uses
        async with self.changing:
            slabs = [
                slab for shelf in self for slab in shelf.slabs.values() if slab.last_use > since
            ]
            try:
                await self._threads.result(self._threads.writers, partial(_save_uses, slabs))
            except OSError as error:
                self._health.note_error(error)

    async def save_last_uses(self) -> None:
        """Save the last uses, and begin no other save."""
        self._closed = True
        await asyncio.wait([self._saving])
        await self._save_uses()

    def close(self) -> None:
        """Close the slabs' files. No thread may use them."""
        for shelf in self:
            for slab in shelf.slabs.values():
                slab.close()
        self._by_namespace.clear()


def _save_uses(slabs: list[Slab]) -> None:
    for slab in slabs:
        slab.save_uses()
