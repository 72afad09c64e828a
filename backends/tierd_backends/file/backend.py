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
import os
import resource
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

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
from tierd.eviction import STORAGE_POLICIES
from tierd.sizes import about, parse_size, parse_size_of
from tierd.types import BlockKey, slot_bytes_for
from tierd_backends.common.again import COUNTERS, DamageSite
from tierd_backends.file.directory import StoreDirectory, no_direct
from tierd_backends.file.fsck import check_store
from tierd_backends.file.restart import open_slabs, read_indexes
from tierd_backends.file.shelf import Shelf
from tierd_backends.file.space import DiskSpace
from tierd_backends.file.threads import DiskThreads, FileJob

SLABS_MAX = 2048
"""Slabs grow with the capacity to keep their number near this: each has two open files."""

SLABS_MIN = 8
"""A small tier gets smaller slabs, so that namespaces can still take slabs from each other."""

THREADS_MAX = 64
"""Far more threads than any device gains from: a typing error must not start thousands."""

FILES_BESIDE = 256
"""Descriptors left for everything else that the process opens."""

INDEXING_STEP_S = 0.1
"""Longest wait of one scan step while the indexes are being read."""

_log = logging.getLogger("tierd_backends.file")
_T = TypeVar("_T")


class FileOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Keys of a `[[storage]]` table of type "file"."""

    path: Annotated[
        str,
        Meta(
            description="Directory of the tier, created if missing; it must belong to one tierd "
            "only."
        ),
    ]
    capacity: Annotated[
        int | str,
        Meta(
            description='Upper bound of the bytes that the tier\'s files occupy, such as "400GiB".'
        ),
    ]
    slab: Annotated[
        int | str,
        Meta(
            description="Size of one slab file; smaller in a small tier, larger beyond 2048 slabs."
        ),
    ] = "256MiB"
    reserve_free: Annotated[
        int | str,
        Meta(
            description="Free space of the file system that the tier leaves to others, in bytes or "
            "as a percentage."
        ),
    ] = "1GiB"
    direct: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="Use of O_DIRECT. auto: if the file system supports it; on: refuse to "
            "start without it; off: never."
        ),
    ] = "auto"
    eviction: Annotated[
        Literal["credit", "lru", "lfu", "s3fifo", "arc"],
        Meta(
            description="Order in which blocks are evicted from the tier: "
            f"{', '.join(STORAGE_POLICIES)}."
        ),
    ] = "credit"
    threads: Annotated[
        int, Meta(description="Number of I/O threads for reads, and the same number for writes.")
    ] = 4


class FileBackend(Backend):
    """Blocks in slabs of equal records, under one directory."""

    Options: ClassVar[type[msgspec.Struct]] = FileOptions
    in_worker: ClassVar[bool] = True
    checks_offline: ClassVar[bool] = True
    lets_go_s: ClassVar[float] = 30.0
    """A disk that hangs for seconds usually comes back. Giving up on it means reading the index
    from it again."""

    def __init__(self, options: FileOptions) -> None:
        """Raises ConfigError with every malformed option. Touches nothing on disk."""
        problems = []
        if not 1 <= options.threads <= THREADS_MAX:
            problems.append(f"threads is {options.threads}; it must be 1 to {THREADS_MAX}")
        for name in ("capacity", "slab", "reserve_free"):
            try:
                parse = partial(parse_size_of, whole_bytes=0) if "_" in name else parse_size
                parse(getattr(options, name))
            except ConfigError as error:
                problems.append(f"{name}: {error}")
        if problems:
            raise ConfigError(*problems)
        self._options = options
        self._capacity_bytes = parse_size(options.capacity)
        self._slab_bytes = max(
            min(parse_size(options.slab), self._capacity_bytes // SLABS_MIN),
            self._capacity_bytes // SLABS_MAX,
        )
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
        if problem := _too_many_files(self._slabs_max(), 0):
            yield problem

    async def open(self) -> None:
        assert not self._opened
        self._threads = DiskThreads(self._options.threads)
        self._space = DiskSpace(
            directory=self._directory,
            threads=self._threads,
            counters=self.counters,
            capacity_bytes=self._capacity_bytes,
            slab_bytes=self._slab_bytes,
            eviction=self._options.eviction,
        )
        try:
            await self._threads.result(self._threads.readers, self._open_files)
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
        self._indexing = asyncio.create_task(
            read_indexes(self._space, self._threads, self.counters), name="reading the index"
        )
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
        shelf = self._space.shelves.get(namespace)
        if shelf is None:
            return [False] * len(hashes)
        return [block_hash in shelf.index for block_hash in hashes]

    async def use_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        """Until the index is complete, an unknown block counts as present."""
        self._check_open()
        shelf = self._space.shelves.get(namespace)
        if shelf is None:
            return [not self._space.indexed] * len(hashes)
        shelf.use(hashes)
        found = list(map(shelf.find, hashes))
        for item in found:
            if item is not None:
                self._space.uses += 1
                shelf.slab_of(item).mark_used(item, self._space.uses)
        self._space.save_uses_soon()
        return [item is not None or not shelf.indexed for item in found]

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        self._check_open()
        results = [GetResult(Outcome.MISS)] * len(requests)
        shelf = self._space.shelves.get(namespace)
        if shelf is None:
            return results
        jobs: list[FileJob] = []
        with contextlib.ExitStack() as pins:
            for position, (block_hash, view, length) in enumerate(requests):
                item = shelf.find(block_hash)
                if item is not None:
                    jobs.append(self._job(shelf, item, position, block_hash, view, length))
                    pins.callback(shelf.unpin, item)
            cancelled = await self._threads.run(self._threads.readers, _read, jobs, abandon=True)
            hits = []
            for job in jobs:
                results[job.position] = GetResult(self._was_read(shelf, job), job.header)
                if job.header is not None:
                    hits.append(job.block_hash)
            shelf.use([h for h in hits if h in shelf.index])
        self._note_faults(jobs)
        self._note_errors("read", jobs)
        if cancelled is not None:
            raise cancelled
        self._space.save_uses_soon()
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
            return Outcome.MISS  # The call was called off before this read.
        return Outcome.CORRUPT if job.fault is DamageSite.STORED else Outcome.ERROR

    async def put_many(self, namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
        self._check_open()
        if not requests:
            return []
        if not self._space.writable:
            return [Outcome.ERROR] * len(requests)
        await self._space.check_ours()
        shelf = self._space.shelves.get(namespace)
        if shelf is None:
            slot_bytes = slot_bytes_for(len(requests[0].view))
            shelf = Shelf(namespace, slot_bytes, self._options.eviction)
            self._space.shelves[namespace] = shelf
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
        shelf = self._space.shelves.get(namespace)
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
                    jobs.append(self._job(shelf, item, 0, block_hash, memoryview(b""), 0))
                    pins.callback(shelf.unpin, item)
                    shelf.retire(item, block_hash)
            cancelled = await self._threads.run(self._threads.writers, _clear, jobs, abandon=False)
        failed = self._note_errors("clear", jobs)
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
        yield Scanned(unread=self._space.unread)
        for shelf in list(self._space.shelves.values()):
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
            return BackendStats(capacity_bytes=self._capacity_bytes)
        return BackendStats(
            blocks=sum(len(shelf.index) for shelf in self._space.shelves.values()),
            used_bytes=self._space.used_bytes,
            capacity_bytes=self._capacity_bytes,
            index_complete=self._space.indexed,
            trouble=self._space.trouble,
        )

    def _job(
        self,
        shelf: Shelf,
        item: int,
        position: int,
        block_hash: bytes,
        view: memoryview,
        length: int,
    ) -> FileJob:
        """Return a job with its record pinned. Unpin it when the threads are done."""
        self._space.uses += 1
        slab = shelf.slab_of(item)
        job = FileJob(
            slab=slab,
            record=slab.record(item),
            item=item,
            position=position,
            block_hash=block_hash,
            view=view,
            length=length,
            use=self._space.uses,
        )
        shelf.pin(item)
        return job

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
            job = self._job(shelf, item, position, block_hash, view, length)
            job.header = BlockHeader(BlockKey(shelf.namespace, block_hash), parent, length, digest)
            job.first_in_slab = not jobs or jobs[-1].slab is not job.slab
            jobs.append(job)
            shelf.writing[block_hash] = asyncio.get_running_loop().create_future()
        leaders = {p: shelf.writing[h] for p, h in again if h in shelf.writing}
        with contextlib.ExitStack() as settling:
            for job in reversed(jobs):
                parent = requests[job.position].parent
                settling.callback(self._was_written, shelf, job, parent, outcomes)
            cancelled = await self._threads.run(self._threads.writers, _write, jobs, abandon=True)
        self._note_errors("write", jobs)
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

    def _note_errors(self, action: str, jobs: Sequence[FileJob]) -> list[OSError]:
        """Count a batch's errors, and log one line for them. Returns the errors."""
        failed = [job for job in jobs if job.error is not None]
        errors = [job.error for job in failed if job.error is not None]
        for error in errors:
            self._space.note_error(error)
        if errors:
            where = f"{failed[0].slab.folder}/{failed[0].slab.number:08d}.slab"
            _log.warning("cannot %s %d blocks, in %s: %s", action, len(errors), where, errors[0])
        return errors

    def _note_faults(self, jobs: Sequence[FileJob]) -> None:
        """Count the damaged reads of a batch, and log one line for each kind."""
        told = {
            DamageSite.STORED: "are damaged on disk (two reads gave the same wrong bytes): dropped",
            DamageSite.TRANSIT: "were damaged in reading, not on disk: check cables and memory",
            DamageSite.UNKNOWN: "were read damaged, and could not be read again: kept",
        }
        for fault, what in told.items():
            hit = [job for job in jobs if job.fault is fault]
            self.counters[fault.counter] += len(hit)
            if hit:
                where = f"{hit[0].slab.folder}/{hit[0].slab.number:08d}.slab"
                wanted = hit[0].block_hash.hex()
                _log.warning(
                    "%d records %s, such as %d of %s for block %s",
                    len(hit),
                    what,
                    hit[0].record,
                    where,
                    wanted,
                )

    def _slabs_max(self) -> int:
        """Number of files that may be open at once, two per slab."""
        return 2 * (self._capacity_bytes // max(1, self._slab_bytes) + SLABS_MIN)

    def _open_files(self) -> None:
        """Open the directory and its slabs. Runs in a thread, before anything else runs."""
        directory, space = self._directory, self._space
        directory.open()
        if directory.read_only:
            space.trouble = f"{directory.path} is on a read-only file system"
        space.reserve_bytes = parse_size_of(self._options.reserve_free, directory.total_bytes())
        if self._options.direct != "off":
            space.direct = directory.takes_direct()
            if not space.direct and self._options.direct == "on":
                raise ConfigError(no_direct(directory.path))
        _allow_open_files(self._slabs_max())
        open_slabs(directory, space, self.counters)
        _log.info(
            "%s: %d slabs, %s of %s, %s%s",
            directory.path,
            sum(len(shelf.slabs) for shelf in space.shelves.values()),
            about(space.used_bytes),
            about(space.capacity_bytes),
            "O_DIRECT" if space.direct else "through the page cache",
            ", read-only" if directory.read_only else "",
        )

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
        for shelf in self._space.shelves.values():
            for slab in shelf.slabs.values():
                slab.close()
        self._space.shelves.clear()
        self._directory.close()


def _read(run: list[FileJob]) -> None:
    left = run
    if len(run) > 1:
        headers = run[0].slab.read_run(
            run[0].record,
            [BlockKey(job.slab.namespace, job.block_hash) for job in run],
            [job.view for job in run],
            [job.length for job in run],
        )
        for job, header in zip(run, headers or (), strict=False):
            job.header = header
            # If it is read well now, this one was damaged on its way.
            job.fault = DamageSite.TRANSIT if header is None else None
        left = [job for job in run if job.header is None]
    for job in left:
        key = BlockKey(job.slab.namespace, job.block_hash)
        reading = job.slab.read(job.record, key, job.view, job.length)
        if reading.header is None or reading.fault is not None:
            job.fault = reading.fault
        job.header, job.error, job.dropped = reading.header, reading.error, reading.dropped


def _write(run: list[FileJob]) -> None:
    if any(job.first_in_slab for job in run):
        run[0].slab.find_unlinked()
    headers = [job.header for job in run if job.header is not None]
    assert len(headers) == len(run)
    if len(run) > 1:
        views, uses = [job.view for job in run], [job.use for job in run]
        try:
            run[0].slab.write_run(run[0].record, headers, views, uses)
        except OSError:
            # Which of them cannot be written shows one by one.
            pass
        else:
            return
    for job, header in zip(run, headers, strict=True):
        try:
            job.slab.write(job.record, header, job.view, job.use)
        except OSError as error:
            job.error = error


def _clear(run: list[FileJob]) -> None:
    for job in run:
        try:
            job.slab.clear(job.record)
        except OSError as error:
            job.error = error


def _allow_open_files(count: int) -> None:
    """Raise this process's soft limit so that `count` more files can be opened."""
    opened = len(os.listdir("/proc/self/fd"))
    if problem := _too_many_files(count, opened):
        raise ConfigError(problem)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = opened + count + FILES_BESIDE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _too_many_files(count: int, opened: int) -> str:
    """Return why `count` more files cannot be opened, or "" if they can."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= opened + count + FILES_BESIDE:
        return ""
    return (
        f"{count} slab files may be open at once but the limit is {hard}: "
        "raise LimitNOFILE, or `slab`"
    )
