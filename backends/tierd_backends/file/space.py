"""The disk space of a file tier: how its slabs come and go, and which namespace gets room if the
tier is full.

Capacity bounds the bytes of all slabs and indexes. A namespace that needs room grows by one slab
if the tier has room. Otherwise it takes a whole slab of another namespace: one that was not used
for as many uses as the growing namespace holds blocks. If there is no such slab, its shelf
evicts a leaf of the namespace itself. Taking a slab may leave blocks in other slabs without their
parents: no prefix reaches them, and they age out.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from contextlib import suppress
from functools import partial

from tierd.sizes import about
from tierd_backends.file.directory import StoreDirectory
from tierd_backends.file.health import DiskHealth
from tierd_backends.file.shelf import Shelf
from tierd_backends.file.shelves import Shelves
from tierd_backends.file.slab import Slab, records_within, remove_files
from tierd_backends.file.threads import DiskThreads

RETRY_S = 10.0
"""Pause before the tier grows again after the disk had no room."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Errors that refuse a block; all other errors are failures of the tier."""

WATCH_S = 10.0
"""How often free disk space is checked: other programs fill the disk as well. More often would
drop too much, because some file systems count removed files as free only seconds later."""

REST_S = 60.0
"""Pause before the tier grows again after other programs took of its reserve: they may go on, and
the tier would have to drop its new slabs again."""

_log = logging.getLogger("tierd_backends.file")


class DiskSpace:
    """The bytes of the slabs. Event loop only; slabs are added and dropped one at a time."""

    def __init__(
        self,
        *,
        directory: StoreDirectory,
        threads: DiskThreads,
        health: DiskHealth,
        shelves: Shelves,
        counters: dict[str, int],
        capacity_bytes: int,
        slab_bytes: int,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.reserve_bytes = 0
        self.direct = False
        """Whether slabs are opened with O_DIRECT."""
        self._directory = directory
        self._threads = threads
        self._health = health
        self._shelves = shelves
        self._counters = counters
        self._slab_bytes = slab_bytes
        self._grow_after = 0.0
        self._broken = False
        self._closed = False

    @property
    def broken(self) -> bool:
        """Whether adding a slab failed lately for a reason other than lack of room."""
        return self._broken and asyncio.get_running_loop().time() < self._grow_after

    async def make_room(self, shelf: Shelf, count: int) -> None:
        """Add slabs while `shelf` has fewer than `count` free records and may grow."""
        if shelf.free_records >= count:
            return
        async with self._shelves.changing:
            while shelf.free_records < count and not self._closed and await self._grow(shelf):
                pass

    async def drop_unlinked(self, shelf: Shelf) -> None:
        """Drop slabs whose files another process removed: only closing them frees their bytes."""
        async with self._shelves.changing:
            for slab in list(shelf.slabs.values()):
                if slab.unlinked and not slab.pins and not self._closed:
                    trouble = f"{slab.folder}/{slab.number:08d}.slab was removed by another process"
                    self._health.trouble = trouble
                    _log.warning("%s: its blocks are lost", trouble)
                    await self._drop_slab(shelf, slab)

    async def drop_empty(self, shelf: Shelf) -> None:
        """Remove the slabs of a namespace that has no block left, unless it is in use.

        Raises OSError if files cannot be removed; a restart finds their blocks again.
        """
        async with self._shelves.changing:
            for slab in list(shelf.slabs.values()):
                if shelf.idle and not slab.pins and not self._closed:
                    await self._drop_slab(shelf, slab, tell=True)
            if shelf.idle and not shelf.slabs:
                self._shelves.remove(shelf)

    async def watch(self) -> None:
        """Keep to the capacity, and keep the reserve free, until cancelled."""
        while True:
            await self.shrink()
            await asyncio.sleep(WATCH_S)

    async def shrink(self) -> None:
        """Drop the coldest slabs until the tier keeps to its capacity, which a restart may lower,
        and leaves its reserve free, which other programs may fill."""
        async with self._shelves.changing:
            short = 0
            if self.used_bytes and self.reserve_bytes and self._health.writable:
                short = self.reserve_bytes - await self._free_bytes()
            if short > 0:
                self._grow_after = asyncio.get_running_loop().time() + REST_S
                _log.warning(
                    "%s: other programs left %s less free than reserve_free: dropping slabs",
                    self._directory.path,
                    about(short),
                )
            while self._health.writable and (short > 0 or self.used_bytes > self.capacity_bytes):
                victim = self._shelves.coldest(lambda _shelf, _slab: True)
                if victim is None:
                    return
                if self.used_bytes <= self.capacity_bytes:
                    self._counters["reserve_slabs_total"] += 1
                short -= victim[1].size_bytes
                await self._drop_slab(*victim)

    async def close(self) -> None:
        """Finish adding and dropping slabs, and save the last uses."""
        self._closed = True
        await self._shelves.save_last_uses()

    async def _grow(self, shelf: Shelf) -> bool:
        if asyncio.get_running_loop().time() < self._grow_after:
            return False
        if not records_within(self.capacity_bytes, shelf.slot_bytes):
            return False
        records = await self._records_addable(shelf.slot_bytes)
        if not records:
            victim = self._victim_for(shelf)
            if victim is None:
                return False
            await self._drop_slab(*victim)
            records = await self._records_addable(shelf.slot_bytes)
        return records > 0 and await self._add_slab(shelf, records)

    async def _records_addable(self, slot_bytes: int) -> int:
        """Return the records of the next slab; 0 if the capacity or the disk has no room."""
        self._broken = False
        room = self.capacity_bytes - self.used_bytes
        if records_within(room, slot_bytes):
            room = min(room, await self._free_bytes() - self.reserve_bytes)
            if not records_within(room, slot_bytes):
                self._grow_after = asyncio.get_running_loop().time() + RETRY_S
        # A block that is larger than slab_bytes gets one slab to itself.
        usual = max(1, records_within(self._slab_bytes, slot_bytes))
        return min(records_within(room, slot_bytes), usual)

    async def _free_bytes(self) -> int:
        """Bytes free on the disk; the reserve if the disk does not answer, so no slab is added."""
        threads = self._threads
        try:
            return await threads.result(threads.writers, self._directory.free_bytes)
        except OSError as error:
            self._health.note_error(error)
            self._broken = True
            return self.reserve_bytes

    async def _add_slab(self, shelf: Shelf, records: int) -> bool:
        folder = self._directory.folder(shelf.namespace)
        create = partial(
            Slab.create,
            folder,
            shelf.next_number,
            slot_bytes=shelf.slot_bytes,
            records=records,
            direct=self.direct,
        )
        shelf.next_number += 1
        future, cancelled = await self._threads.call(self._threads.writers, create)
        try:
            slab = future.result()
        except FileExistsError:
            # Another program made a file by that number: try the next number.
            added = True
        except OSError as error:
            self._health.note_error(error)
            self._broken = error.errno not in NO_ROOM
            self._grow_after = asyncio.get_running_loop().time() + RETRY_S
            _log.warning("no slab added to %s for %.0f s: %s", folder, RETRY_S, error)
            added = False
        else:
            slab.last_use = self._shelves.uses
            self.used_bytes += slab.size_bytes
            shelf.add_slab(slab, range(slab.records))
            added = True
        if cancelled is not None:
            raise cancelled
        return added

    def _victim_for(self, shelf: Shelf) -> tuple[Shelf, Slab] | None:
        if not self._shelves.indexed:
            return None
        uses = self._shelves.uses
        idle_since = uses - len(shelf.index) if shelf.slabs else uses + 1
        return self._shelves.coldest(
            lambda other, slab: other is not shelf and slab.last_use < idle_since
        )

    async def _drop_slab(self, shelf: Shelf, slab: Slab, *, tell: bool = False) -> None:
        """Remove a slab. `tell`: the slab is empty, and a failure is raised."""
        blocks = shelf.drop_slab(slab)
        self._counters["evicted_blocks_total"] += blocks
        self._counters["evicted_slabs_total"] += not tell
        remove = partial(_remove, slab, last=not shelf.slabs)
        future, cancelled = await self._threads.call(self._threads.writers, remove)
        try:
            future.result()
        except OSError as error:
            # Its bytes still count, because its files are still there.
            self._health.note_error(error)
            _log.warning("cannot remove %s/%08d.slab: %s", slab.folder, slab.number, error)
            if tell:
                raise
        else:
            self.used_bytes -= slab.size_bytes
        if cancelled is not None:
            raise cancelled


def _remove(slab: Slab, *, last: bool) -> None:
    """Unlink and close a slab, and remove its folder after its last slab. Runs in a thread."""
    try:
        remove_files(slab.folder, slab.number)
    finally:
        slab.close()
    if last:
        with suppress(OSError):
            slab.folder.rmdir()
