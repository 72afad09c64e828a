"""What a file tier holds across its namespaces, and who gets room when it is full.

Capacity bounds the bytes of all slabs and indexes. A namespace that needs room grows by
a slab while the tier has room; else it takes the whole slab of another namespace that
was not used for as many uses as this one holds blocks; else (the shelf's decision) it
evicts a leaf of its own. A slab taken that way may leave blocks behind
whose parents are gone: no prefix reaches them, and they age out.
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
"""How long the tier neither grows after the disk had no room, nor writes after EROFS."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Errors that refuse a block; others are failures of the tier."""

OURS_S = 1.0
"""How often the tier looks whether its directory is still there: a call of a batch's length."""

WATCH_S = 10.0
"""How often the disk is looked at, which others fill as well. Some file systems count what was
removed only seconds later, and more would go than has to."""

REST_S = 60.0
"""How long the tier does not grow after others took of its reserve: they may go on, and what it
took in between would have to go again."""

SAVE_USES = 4096
"""Hits after which they are written down, one system call a slab: a SIGKILL loses so many."""

_log = logging.getLogger("tierd_backends.file")


class DiskSpace:
    """The shelves and their bytes. Event loop only; one slab is added or dropped at a time."""

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
        """Name of the policy by which a shelf evicts."""
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.reserve_bytes = 0
        self.direct = False
        # Uses order blocks across restarts. Starting at the clock puts this run's uses after
        # the last run's before its index is read; a clock set back only costs that order.
        self.uses = time.time_ns()
        self._saved_uses = self.uses
        self._directory = directory
        self._threads = threads
        self._counters = counters
        self._slab_bytes = slab_bytes
        self.unread: list[str] = []
        """What could not be looked at when the tier was opened: blocks may lie there."""
        self._growing = asyncio.Lock()
        self._grow_after = 0.0
        self._broken = False
        self.trouble = ""
        """The last error of the disk, in words."""
        self._ours_until = 0.0
        self._write_after = 0.0
        self._closed = False
        self._saving: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._saving.set_result(None)

    @property
    def indexed(self) -> bool:
        """Whether every block found at start is known."""
        return all(shelf.indexed for shelf in self.shelves.values())

    @property
    def writable(self) -> bool:
        """False on a read-only disk: trying would evict a block for each that can't be put."""
        now = asyncio.get_running_loop().time()
        return not self._directory.read_only and now >= self._write_after

    @property
    def broken(self) -> bool:
        """Whether no slab could be added lately for another reason than that there is no room."""
        return self._broken and asyncio.get_running_loop().time() < self._grow_after

    async def check_ours(self) -> None:
        """Raise BackendError if the tier has lost its directory; looks every OURS_S at most."""
        now = asyncio.get_running_loop().time()
        if now < self._ours_until:
            return
        await self._threads.result(self._threads.writers, self._directory.check_ours)
        self._ours_until = now + OURS_S

    def note_error(self, error: OSError) -> None:
        """Count an error of the disk, and rest from writing if it has become read-only."""
        self._counters["io_errors_total"] += 1
        self.trouble = str(error)
        if error.errno == errno.EROFS:
            self._write_after = asyncio.get_running_loop().time() + RETRY_S

    def save_uses_soon(self) -> None:
        """Begin to write down in which order blocks were hit, if many were since the last time."""
        if self.uses - self._saved_uses > SAVE_USES and self._saving.done() and not self._closed:
            self._saving = asyncio.create_task(self._save_uses())

    async def _save_uses(self) -> None:
        # Before all is indexed, slabs do not know the uses of all their blocks.
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
        """Let go of slabs whose files somebody removed: their bytes are held for nobody."""
        async with self._growing:
            for slab in list(shelf.slabs.values()):
                if slab.unlinked and not slab.pins and not self._closed:
                    self.trouble = f"{slab.folder}/{slab.number:08d}.slab was removed beside tierd"
                    _log.warning("%s: its blocks are lost", self.trouble)
                    await self._drop_slab(shelf, slab)

    async def drop_empty(self, shelf: Shelf) -> None:
        """Give back the room of a namespace of which nothing is left, unless it is in use.

        Raises OSError if files cannot be removed: what they hold will be found again.
        """
        async with self._growing:
            for slab in list(shelf.slabs.values()):
                if shelf.idle and not slab.pins and not self._closed:
                    await self._drop_slab(shelf, slab, tell=True)
            if shelf.idle and not shelf.slabs and self.shelves.get(shelf.namespace) is shelf:
                del self.shelves[shelf.namespace]

    async def watch(self) -> None:
        """Keep the capacity, and what is to stay free of the disk, for ever."""
        while True:
            await self.shrink()
            await asyncio.sleep(WATCH_S)

    async def shrink(self) -> None:
        """Drop the coldest slabs until the capacity is kept, as after a start with a lower one,
        and the reserve, as when others fill the disk."""
        async with self._growing:
            short = 0
            if self.used_bytes and self.reserve_bytes and self.writable:
                short = self.reserve_bytes - await self._free_bytes()
            if short > 0:
                self._grow_after = asyncio.get_running_loop().time() + REST_S
                _log.warning(
                    "%s: others leave %s less free than reserve_free: slabs are dropped",
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
        """Finish what is being added or dropped, and write down the last uses."""
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
        """Records of the next slab; 0 if the capacity or the disk has no room for one."""
        self._broken = False
        room = self.capacity_bytes - self.used_bytes
        if records_within(room, slot_bytes):
            room = min(room, await self._free_bytes() - self.reserve_bytes)
            if not records_within(room, slot_bytes):
                self._grow_after = asyncio.get_running_loop().time() + RETRY_S
        # A block larger than a slab gets a slab of its own.
        usual = max(1, records_within(self._slab_bytes, slot_bytes))
        return min(records_within(room, slot_bytes), usual)

    async def _free_bytes(self) -> int:
        """What the disk has left; without an answer, the reserve alone."""
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
            # Something was planted under that number: the next one will do.
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
        """Remove a slab; with `tell` it is empty, and a failure is raised."""
        blocks = shelf.drop_slab(slab)
        self._counters["evicted_blocks_total"] += blocks
        self._counters["evicted_slabs_total"] += not tell
        remove = partial(_remove, slab, last=not shelf.slabs)
        future, cancelled = await self._threads.call(self._threads.writers, remove)
        try:
            future.result()
        except OSError as error:
            # Its bytes stay counted: they are still there.
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
    """In a thread: unlink and close a slab, and its folder if it was the last one there."""
    try:
        remove_files(slab.folder, slab.number)
    finally:
        slab.close()
    if last:
        with suppress(OSError):
            slab.folder.rmdir()
