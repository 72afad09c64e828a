"""The disk space of a file tier: what its namespaces hold, and which one gets room if it is full.

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
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from tierd.sizes import about
from tierd_backends.file.directory import StoreDirectory
from tierd_backends.file.shelf import Shelf
from tierd_backends.file.slab import Slab, records_within, remove_files
from tierd_backends.file.threads import DiskThreads

RETRY_S = 10.0
"""Pause before the tier grows again after the disk had no room, or writes again after EROFS."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Errors that refuse a block; all other errors are failures of the tier."""

OURS_S = 1.0
"""Shortest time between two checks that the tier still has its directory: about one batch."""

WATCH_S = 10.0
"""How often free disk space is checked: other programs fill the disk as well. More often would
drop too much, because some file systems count removed files as free only seconds later."""

REST_S = 60.0
"""Pause before the tier grows again after other programs took of its reserve: they may go on, and
the tier would have to drop its new slabs again."""

SAVE_USES = 4096
"""Hits between two saves of the uses, one system call per slab. A SIGKILL loses this many hits."""

_log = logging.getLogger("tierd_backends.file")


class DiskSpace:
    """The shelves and their bytes. Event loop only; slabs are added and dropped one at a time."""

    def __init__(
        self,
        *,
        directory: StoreDirectory,
        threads: DiskThreads,
        counters: dict[str, int],
        capacity_bytes: int,
        slab_bytes: int,
        eviction: str,
    ) -> None:
        self.shelves: dict[bytes, Shelf] = {}
        self.eviction = eviction
        """Name of the policy that orders evictions within a shelf."""
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.reserve_bytes = 0
        self.direct = False
        # Uses order blocks across restarts. They start at the clock, so this run's uses come after
        # the last run's before its index is read. A clock set back only costs that order.
        self.uses = time.time_ns()
        self._saved_uses = self.uses
        self._directory = directory
        self._threads = threads
        self._counters = counters
        self._slab_bytes = slab_bytes
        self.unread: list[str] = []
        """Slabs and indexes that could not be read at start: they may hold blocks."""
        self._growing = asyncio.Lock()
        self._grow_after = 0.0
        self._broken = False
        self.trouble = ""
        """Text of the last disk error."""
        self._ours_until = 0.0
        self._write_after = 0.0
        self._closed = False
        self._saving: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._saving.set_result(None)

    @property
    def indexed(self) -> bool:
        """Whether every block that was on disk at start is known."""
        return all(shelf.indexed for shelf in self.shelves.values())

    @property
    def writable(self) -> bool:
        """False on a read-only disk: each failed put would evict a block for nothing."""
        now = asyncio.get_running_loop().time()
        return not self._directory.read_only and now >= self._write_after

    @property
    def broken(self) -> bool:
        """Whether adding a slab failed lately for a reason other than lack of room."""
        return self._broken and asyncio.get_running_loop().time() < self._grow_after

    async def check_ours(self) -> None:
        """Raise BackendError if the tier has lost its directory; checks every OURS_S at most."""
        now = asyncio.get_running_loop().time()
        if now < self._ours_until:
            return
        await self._threads.result(self._threads.writers, self._directory.check_ours)
        self._ours_until = now + OURS_S

    def note_error(self, error: OSError) -> None:
        """Count a disk error. After EROFS, stop writing for RETRY_S."""
        self._counters["io_errors_total"] += 1
        self.trouble = str(error)
        if error.errno == errno.EROFS:
            self._write_after = asyncio.get_running_loop().time() + RETRY_S

    def save_uses_soon(self) -> None:
        """Begin to save the uses of blocks if there were many since the last save."""
        if self.uses - self._saved_uses > SAVE_USES and self._saving.done() and not self._closed:
            self._saving = asyncio.create_task(self._save_uses())

    async def _save_uses(self) -> None:
        # Until everything is indexed, slabs do not know the uses of all their blocks.
        if not self.writable or not self.indexed:
            return
        since, self._saved_uses = self._saved_uses, self.uses
        async with self._growing:
            slabs = [
                slab
                for shelf in self.shelves.values()
                for slab in shelf.slabs.values()
                if slab.last_use > since
            ]
            threads = self._threads
            try:
                await threads.result(threads.writers, partial(_save_uses, slabs))
            except OSError as error:
                self.note_error(error)

    async def make_room(self, shelf: Shelf, count: int) -> None:
        """Add slabs while `shelf` has fewer than `count` free records and may grow."""
        if shelf.free_records >= count:
            return
        async with self._growing:
            while shelf.free_records < count and not self._closed and await self._grow(shelf):
                pass

    async def drop_unlinked(self, shelf: Shelf) -> None:
        """Drop slabs whose files another process removed: only closing them frees their bytes."""
        async with self._growing:
            for slab in list(shelf.slabs.values()):
                if slab.unlinked and not slab.pins and not self._closed:
                    self.trouble = (
                        f"{slab.folder}/{slab.number:08d}.slab was removed by another process"
                    )
                    _log.warning("%s: its blocks are lost", self.trouble)
                    await self._drop_slab(shelf, slab)

    async def drop_empty(self, shelf: Shelf) -> None:
        """Remove the slabs of a namespace that has no block left, unless it is in use.

        Raises OSError if files cannot be removed; a restart finds their blocks again.
        """
        async with self._growing:
            for slab in list(shelf.slabs.values()):
                if shelf.idle and not slab.pins and not self._closed:
                    await self._drop_slab(shelf, slab, tell=True)
            if shelf.idle and not shelf.slabs and self.shelves.get(shelf.namespace) is shelf:
                del self.shelves[shelf.namespace]

    async def watch(self) -> None:
        """Keep to the capacity, and keep the reserve free, until cancelled."""
        while True:
            await self.shrink()
            await asyncio.sleep(WATCH_S)

    async def shrink(self) -> None:
        """Drop the coldest slabs until the tier keeps to its capacity, which a restart may lower,
        and leaves its reserve free, which other programs may fill."""
        async with self._growing:
            short = 0
            if self.used_bytes and self.reserve_bytes and self.writable:
                short = self.reserve_bytes - await self._free_bytes()
            if short > 0:
                self._grow_after = asyncio.get_running_loop().time() + REST_S
                _log.warning(
                    "%s: other programs left %s less free than reserve_free: dropping slabs",
                    self._directory.path,
                    about(short),
                )
            while self.writable and (short > 0 or self.used_bytes > self.capacity_bytes):
                victim = _coldest(
                    (shelf, slab)
                    for shelf in self.shelves.values()
                    for slab in shelf.slabs.values()
                )
                if victim is None:
                    return
                if self.used_bytes <= self.capacity_bytes:
                    self._counters["reserve_slabs_total"] += 1
                short -= victim[1].size_bytes
                await self._drop_slab(*victim)

    async def close(self) -> None:
        """Finish adding and dropping slabs, and save the last uses."""
        self._closed = True
        await asyncio.wait([self._saving])
        await self._save_uses()

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
            self.note_error(error)
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
            self.note_error(error)
            self._broken = error.errno not in NO_ROOM
            self._grow_after = asyncio.get_running_loop().time() + RETRY_S
            _log.warning("no slab added to %s for %.0f s: %s", folder, RETRY_S, error)
            added = False
        else:
            slab.last_use = self.uses
            self.used_bytes += slab.size_bytes
            shelf.add_slab(slab, range(slab.records))
            added = True
        if cancelled is not None:
            raise cancelled
        return added

    def _victim_for(self, shelf: Shelf) -> tuple[Shelf, Slab] | None:
        if not self.indexed:
            return None
        idle_since = self.uses - len(shelf.index) if shelf.slabs else self.uses + 1
        return _coldest(
            (other, slab)
            for other in self.shelves.values()
            if other is not shelf
            for slab in other.slabs.values()
            if slab.last_use < idle_since
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
            self.note_error(error)
            _log.warning("cannot remove %s/%08d.slab: %s", slab.folder, slab.number, error)
            if tell:
                raise
        else:
            self.used_bytes -= slab.size_bytes
        if cancelled is not None:
            raise cancelled


def _coldest(slabs: Iterable[tuple[Shelf, Slab]]) -> tuple[Shelf, Slab] | None:
    unpinned = [(shelf, slab) for shelf, slab in slabs if not slab.pins]
    return min(unpinned, key=lambda pair: pair[1].last_use, default=None)


def _save_uses(slabs: list[Slab]) -> None:
    for slab in slabs:
        slab.save_uses()


def _remove(slab: Slab, *, last: bool) -> None:
    """Unlink and close a slab, and remove its folder after its last slab. Runs in a thread."""
    try:
        remove_files(slab.folder, slab.number)
    finally:
        slab.close()
    if last:
        with suppress(OSError):
            slab.folder.rmdir()
