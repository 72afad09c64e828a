"""The file tier: blocks in preallocated slabs on a local disk.

This module takes a batch through the tier. slab.py defines how a slab lies on disk, space.py
which namespace gets room, shelf.py which record a block takes and which block is evicted.
All state in memory belongs to the event loop. A record is pinned from before a thread gets it
until the thread is done with it, even if the caller was cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec

from tierd.backend import (
    SCANNED_MAX,
    Backend,
    BackendStats,
    BlockHeader,
    CheckReport,
    GetRequest,
    GetResult,
    Outcome,
    PutRequest,
    Scanned,
    Tell,
)
from tierd.errors import BackendError, ConfigError
from tierd.types import BlockKey, slot_bytes_for
from tierd_backends.common.second_read import COUNTERS, DamageSite
from tierd_backends.file.descriptors import too_many_files
from tierd_backends.file.directory import StoreDirectory
from tierd_backends.file.fsck import TEXTS, check_store
from tierd_backends.file.health import DiskHealth
from tierd_backends.file.jobs import FileJob, clear_run, read_run, write_run
from tierd_backends.file.options import FileOptions
from tierd_backends.file.restart import open_files, read_indexes
from tierd_backends.file.shelf import Shelf
from tierd_backends.file.shelves import Shelves
from tierd_backends.file.space import DiskSpace
from tierd_backends.file.threads import DiskThreads

INDEXING_STEP_S = 0.1
"""Longest wait of one scan step while the indexes are being read."""

_log = logging.getLogger("tierd_backends.file")
_T = TypeVar("_T")


class FileBackend(Backend):
    """Blocks in slabs of equal records, under one directory."""

    Options: ClassVar[type[msgspec.Struct]] = FileOptions
    in_worker: ClassVar[bool] = True
    checks_offline: ClassVar[bool] = True
    damage_texts: ClassVar[Mapping[str, str]] = TEXTS
    lets_go_s: ClassVar[float] = 30.0
    """A disk that hangs for seconds usually comes back. Giving up on it means reading the index
    from it again."""

    def __init__(self, options: FileOptions) -> None:
        """Raises ConfigError with every malformed option. Touches nothing on disk."""
        options.check()
        self._options = options
        self._directory = StoreDirectory(Path(options.path).expanduser())
        self.counters = {
            **COUNTERS,
            "evicted_blocks_total": 0,
            "evicted_slabs_total": 0,
            "index_damage_total": 0,
            "io_errors_total": 0,
            "lost_slabs_total": 0,
            "refused_no_space_total": 0,
            "reserve_slabs_total": 0,
        }
        self._opened = False
        self._threads: DiskThreads
        self._health: DiskHealth
        self._shelves: Shelves
        self._space: DiskSpace
        self._indexing: asyncio.Task[None]
        self._watching: asyncio.Task[None]

    @classmethod
    def from_options(cls, options: msgspec.Struct) -> FileBackend:
        assert isinstance(options, FileOptions)
        return cls(options)

    @classmethod
    def at(cls, path: str) -> FileOptions:
        return FileOptions(path=path, capacity=0)

    @classmethod
    def check(
        cls, options: msgspec.Struct, *, repair: bool, quick: bool, tell: Tell
    ) -> CheckReport:
        assert isinstance(options, FileOptions)
        path = cls(options)._directory.path
        return check_store(path, threads=options.threads, repair=repair, quick=quick, tell=tell)

    @property
    def direct(self) -> bool:
        """Whether slabs are opened with O_DIRECT. Valid once the tier is open."""
        return self._space.direct

    @property
    def place(self) -> str:
        return str(self._directory.path)

    def refusals(self, is_own: Callable[[int], bool]) -> Iterable[str]:
        yield from self._directory.refusals(is_own, direct=self._options.direct == "on")
        if problem := too_many_files(self._options.files_max, 0):
            yield problem

    async def open(self) -> None:
        assert not self._opened
        self._threads = DiskThreads(self._options.threads)
        self._health = DiskHealth(self._directory, self._threads, self.counters)
        self._shelves = Shelves(self._threads, self._health, self._options.eviction)
        self._space = DiskSpace(
            directory=self._directory,
            threads=self._threads,
            health=self._health,
            shelves=self._shelves,
            counters=self.counters,
            capacity_bytes=self._options.capacity_bytes,
            slab_bytes=self._options.slab_bytes,
        )
        try:
            opening = partial(
                open_files,
                self._options,
                self._directory,
                self._space,
                self._shelves,
                self._health,
                self.counters,
            )
            await self._threads.result(self._threads.readers, opening)
        except (PermissionError, NotADirectoryError, FileExistsError) as error:
            await self._shut()
            raise ConfigError(f"{self._directory.path} cannot be used: {error}") from error
        except OSError as error:
            await self._shut()
            raise BackendError(f"{self._directory.path} cannot be opened: {error}") from error
        except BaseException:
            await self._shut()
            raise
        self._opened = True
        self._indexing = asyncio.create_task(self._read_indexes(), name="reading the index")
        self._watching = asyncio.create_task(self._watch(), name="watching the disk")

    async def close(self) -> None:
        if not self._opened:
            return
        self._opened = False
        self._watching.cancel()
        self._indexing.cancel()
        await asyncio.wait([self._indexing, self._watching])
        for task in (self._indexing, self._watching):
            if not task.cancelled() and (error := task.exception()):
                _log.error("%s: %s failed", self._directory.path, task.get_name(), exc_info=error)
        await self._space.close()
        await self._shut()

    async def contains_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        self._check_open()
        shelf = self._shelves.get(namespace)
        if shelf is None:
            return [False] * len(hashes)
        return [block_hash in shelf.index for block_hash in hashes]

    async def use_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        """Until the index is complete, an unknown block counts as present."""
        self._check_open()
        shelf = self._shelves.get(namespace)
        if shelf is None:
            return [not self._shelves.indexed] * len(hashes)
        shelf.use(hashes)
        found = list(map(shelf.find, hashes))
        for item in found:
            if item is not None:
                self._shelves.uses += 1
                shelf.slab_of(item).mark_used(item, self._shelves.uses)
        self._shelves.save_uses_soon()
        return [item is not None or not shelf.indexed for item in found]

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        self._check_open()
        results = [GetResult(Outcome.MISS)] * len(requests)
        shelf = self._shelves.get(namespace)
        if shelf is None:
            return results
        jobs: list[FileJob] = []
        with contextlib.ExitStack() as pins:
            for position, (block_hash, view, length) in enumerate(requests):
                item = shelf.find(block_hash)
                if item is not None:
                    jobs.append(self._shelves.job(shelf, item, position, block_hash, view, length))
                    pins.callback(shelf.unpin, item)
            cancelled = await self._threads.run(self._threads.readers, read_run, jobs, abandon=True)
            hits = []
            for job in jobs:
                results[job.position] = GetResult(self._was_read(shelf, job), job.header)
                if job.header is not None:
                    hits.append(job.block_hash)
            shelf.use([h for h in hits if h in shelf.index])
        self._health.note_damage(jobs)
        self._health.note_errors("read", jobs)
        if cancelled is not None:
            raise cancelled
        self._shelves.save_uses_soon()
        return results

    def _was_read(self, shelf: Shelf, job: FileJob) -> Outcome:
        """Return a read's outcome. Forget a block that must not be found again."""
        if job.dropped:
            shelf.retire(job.item, job.block_hash)
        if job.header is not None:
            if shelf.find(job.block_hash) == job.item:
                job.slab.mark_used(job.item, job.use)
            return Outcome.HIT
        if not job.done:
            return Outcome.MISS  # The call was cancelled before this read.
        return Outcome.CORRUPT if job.fault is DamageSite.STORED else Outcome.ERROR

    async def put_many(self, namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
        self._check_open()
        if not requests:
            return []
        if not self._health.writable:
            return [Outcome.ERROR] * len(requests)
        await self._health.check_ours()
        shelf = self._shelves.get(namespace)
        if shelf is None:
            shelf = self._shelves.add(namespace, slot_bytes_for(len(requests[0].view)))
        # Make no room by evicting blocks that this batch names or whose children it names.
        needed = [h for request in requests for h in (request.block_hash, request.parent)]
        shelf.need(needed)
        try:
            wanted = {r.block_hash for r in requests if r.length <= shelf.slot_bytes}
            missing = sum(h not in shelf.index and h not in shelf.writing for h in wanted)
            await self._space.make_room(shelf, missing)
            self._check_open()
            outcomes, leaders = await self._put_new(shelf, requests)
        finally:
            shelf.unneed(needed)
        for position, leader in leaders.items():
            # Another call writes this block, or this batch names it twice.
            await asyncio.wait([leader])
            outcome = leader.result()
            if outcome is None:
                [outcome] = await self.put_many(namespace, [requests[position]])
            outcomes[position] = Outcome.PRESENT if outcome is Outcome.STORED else outcome
        return outcomes

    async def delete_many(self, namespace: bytes, hashes: Sequence[bytes]) -> int:
        self._check_open()
        await self._indexed()
        shelf = self._shelves.get(namespace)
        if shelf is None:
            return 0
        wanted = set(hashes)
        writes = [shelf.writing[h] for h in wanted if h in shelf.writing]
        if writes:
            await asyncio.wait(writes)
            self._check_open()
        jobs: list[FileJob] = []
        with contextlib.ExitStack() as pins:
            for block_hash in wanted:
                item = shelf.find(block_hash)
                if item is not None:
                    jobs.append(self._shelves.job(shelf, item, 0, block_hash, memoryview(b""), 0))
                    pins.callback(shelf.unpin, item)
                    shelf.retire(item, block_hash)
            cancelled = await self._threads.run(
                self._threads.writers, clear_run, jobs, abandon=False
            )
        failed = self._health.note_errors("clear", jobs)
        if cancelled is not None:
            raise cancelled
        if failed:
            raise BackendError(
                f"{len(failed)} deleted blocks may come back at the next start: {failed[0]}"
            ) from failed[0]
        if shelf.idle:
            try:
                await self._space.drop_empty(shelf)
            except OSError as error:
                raise BackendError(f"empty slabs cannot be removed: {error}") from error
        return len(jobs)

    async def scan(self) -> AsyncIterator[Scanned]:
        self._check_open()
        while not self._indexing.done():
            # A scan step must be short, and reading the indexes of a large tier takes long.
            await asyncio.wait([self._indexing], timeout=INDEXING_STEP_S)
            yield Scanned()
        await self._indexed()
        yield Scanned(unread=self._health.unread)
        for shelf in self._shelves:
            for slab in list(shelf.slabs.values()):
                if slab.number not in shelf.slabs:
                    continue
                self._check_open()
                slab.pins += 1
                try:
                    entries = await self._threads.result(self._threads.readers, slab.entries)
                except OSError as error:
                    where = f"{slab.folder.name}/{slab.number:08d}.slab"
                    yield Scanned(unread=[f"{where}: {error.strerror or error}"])
                    continue
                finally:
                    slab.pins -= 1
                for at in range(0, len(entries), SCANNED_MAX):
                    yield Scanned(
                        [
                            entry.header
                            for entry in entries[at : at + SCANNED_MAX]
                            if shelf.find(entry.header.key.block_hash) == slab.item(entry.record)
                        ]
                    )

    async def marks(self) -> list[str]:
        return await self._of_directory(self._directory.marks)

    async def add_mark(self, mark: str) -> None:
        await self._of_directory(partial(self._directory.add_mark, mark))

    async def drop_marks(self, marks: Sequence[str]) -> None:
        await self._of_directory(partial(self._directory.drop_marks, marks))

    async def _of_directory(self, call: Callable[[], _T]) -> _T:
        self._check_open()

        def at_home() -> _T:
            # Marks in another directory say nothing about the blocks in this one.
            self._directory.check_ours()
            return call()

        try:
            return await self._threads.result(self._threads.writers, at_home)
        except OSError as error:
            raise BackendError(f"{self._directory.path}: {error}") from error

    def stats(self) -> BackendStats:
        if not self._opened:
            return BackendStats(capacity_bytes=self._options.capacity_bytes)
        return BackendStats(
            blocks=sum(len(shelf.index) for shelf in self._shelves),
            used_bytes=self._space.used_bytes,
            capacity_bytes=self._space.capacity_bytes,
            index_complete=self._shelves.indexed,
            trouble=self._health.trouble,
        )

    async def _put_new(
        self, shelf: Shelf, requests: Sequence[PutRequest]
    ) -> tuple[list[Outcome], dict[int, asyncio.Future[Outcome | None]]]:
        """Write the blocks that the shelf lacks.

        Returns all outcomes, and by position the writes whose result decides an outcome.
        """
        outcomes = [Outcome.REFUSED] * len(requests)
        fresh: dict[bytes, int] = {}
        again: list[tuple[int, bytes]] = []
        present: list[int] = []
        for position, request in enumerate(requests):
            block_hash = request.block_hash
            item = shelf.find(block_hash)
            if item is not None:
                outcomes[position] = Outcome.PRESENT
                present.append(item)
            elif block_hash in shelf.writing or block_hash in fresh:
                again.append((position, block_hash))
            elif request.length <= shelf.slot_bytes:
                fresh[block_hash] = position
        shelf.index.touch(present)
        items, evicted = shelf.take(len(fresh))
        self.counters["evicted_blocks_total"] += evicted
        if self._space.broken:
            for position in list(fresh.values())[len(items) :]:
                outcomes[position] = Outcome.ERROR
        else:
            self.counters["refused_no_space_total"] += len(fresh) - len(items)
        jobs: list[FileJob] = []
        # In order: a prefix then lies in neighbouring records, and few calls move it.
        for item, position in zip(sorted(items), fresh.values(), strict=False):
            block_hash, parent, digest, view, length = requests[position]
            job = self._shelves.job(shelf, item, position, block_hash, view, length)
            job.header = BlockHeader(BlockKey(shelf.namespace, block_hash), parent, length, digest)
            job.first_in_slab = not jobs or jobs[-1].slab is not job.slab
            jobs.append(job)
            shelf.writing[block_hash] = asyncio.get_running_loop().create_future()
        leaders = {p: shelf.writing[h] for p, h in again if h in shelf.writing}
        with contextlib.ExitStack() as settling:
            for job in reversed(jobs):
                parent = requests[job.position].parent
                settling.callback(self._was_written, shelf, job, parent, outcomes)
            cancelled = await self._threads.run(
                self._threads.writers, write_run, jobs, abandon=True
            )
        self._health.note_errors("write", jobs)
        if any(job.slab.unlinked for job in jobs):
            await self._space.drop_unlinked(shelf)
        if cancelled is not None:
            raise cancelled
        return outcomes, leaders

    def _was_written(
        self, shelf: Shelf, job: FileJob, parent: bytes, outcomes: list[Outcome]
    ) -> None:
        """Unpin the record of a finished write. The record now holds its block, or is free."""
        outcome: Outcome | None = None
        try:
            if job.error is not None or job.slab.unlinked:
                outcome = outcomes[job.position] = Outcome.ERROR
            elif job.done:
                shelf.store(job.item, job.block_hash, parent, job.use)
                outcome = outcomes[job.position] = Outcome.STORED
        finally:
            if outcome is not Outcome.STORED and not shelf.retire(job.item, job.block_hash):
                shelf.give_back(job.item)
            shelf.unpin(job.item)
            shelf.writing.pop(job.block_hash).set_result(outcome)

    async def _read_indexes(self) -> None:
        """Enter every block found on disk; then enforce the capacity."""
        await read_indexes(self._shelves, self._threads, self._health, self.counters)
        await self._space.shrink()

    async def _watch(self) -> None:
        await asyncio.wait([self._indexing])
        await self._space.watch()

    async def _indexed(self) -> None:
        await asyncio.wait([self._indexing])
        self._check_open()
        self._indexing.result()

    def _check_open(self) -> None:
        if not self._opened:
            raise BackendError(f"{self._directory.path} is not open")

    async def _shut(self) -> None:
        await self._threads.close()
        self._shelves.close()
        self._directory.close()
