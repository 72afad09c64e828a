"""The S3 tier: each block is an object, header first, in a bucket that nodes may share.

This module takes a batch through the tier and belongs to the event loop. bucket.py makes the
requests, on threads; changes.py decides when a block may be changed. Nothing is cached: the bucket
is asked for every block, because other nodes store and drop blocks too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, Final, TypeVar

import msgspec

from tierd.backend import (
    HEADER_BYTES,
    Backend,
    BackendStats,
    BlockHeader,
    GetRequest,
    GetResult,
    Outcome,
    PutRequest,
    Scanned,
    pack_header,
    unpack_header,
)
from tierd.errors import BackendError
from tierd.types import BlockKey
from tierd_backends.common.calls import CallThreads, CallTurn
from tierd_backends.common.failures import Failures
from tierd_backends.common.open_calls import OpenCalls
from tierd_backends.common.second_read import COUNTERS, DamageSite, judge
from tierd_backends.common.shared_capacity import SharedCapacity
from tierd_backends.s3.bucket import Bucket, Read
from tierd_backends.s3.changes import ObjectChanges
from tierd_backends.s3.failure import FailureKind, S3Error
from tierd_backends.s3.jobs import Batch, Fetch, Look, ObjectChange
from tierd_backends.s3.listing import ListedObject, Page
from tierd_backends.s3.options import S3Options
from tierd_backends.s3.usage import Usage, keep_counted

ASK_EACH_MAX: Final = 32
"""Longest list of hashes that are looked up one by one: the size of one batch of the daemon."""

USE_EVERY_S: Final = 6 * 3600.0
"""How often blocks in use are looked up. At 0.4 dollars per million requests, 32,000 blocks cost
5 cents a day."""

LOG_EVERY_S: Final = 60.0
"""Failures of one kind are logged at most this often; all are counted."""

CLOSE_S_MAX: Final = 5.0
"""Longest wait for calls in flight when the tier is closed; then they are cancelled."""

__all__ = ["S3Backend", "S3Options"]

_log = logging.getLogger("tierd_backends.s3")
_T = TypeVar("_T")


class S3Backend(Backend):
    """Blocks as objects in a bucket of any server that speaks S3."""

    Options: ClassVar[type[msgspec.Struct]] = S3Options
    in_worker: ClassVar[bool] = True

    def __init__(self, options: S3Options) -> None:
        """Raises ConfigError with every malformed option. Touches nothing."""
        options.check()
        self._options = options
        self._where = f"S3 bucket {options.bucket}" + (
            f" at {options.endpoint}" if options.endpoint else ""
        )
        self.counters = {
            **COUNTERS,
            "denied_total": 0,
            "io_errors_total": 0,
            "retries_total": 0,
            "skipped_full_total": 0,
            "throttled_total": 0,
            "timeouts_total": 0,
            "unreadable_total": 0,
        }
        self._failures = Failures(_log, self.counters, log_every_s=LOG_EVERY_S, where=self._where)
        self._calls = OpenCalls(self._where)
        self._shared_capacity = SharedCapacity(options.capacity, self._where)
        self._usage = Usage()
        self._readers: CallThreads
        self._writers: CallThreads
        self._bucket: Bucket
        self._changes: ObjectChanges
        self._indexing: asyncio.Task[None]

    @property
    def shared(self) -> bool:
        return True

    @property
    def use_every_s(self) -> float:
        """Each lookup costs money, and the rules that drop objects count in days."""
        return USE_EVERY_S

    @property
    def place(self) -> str:
        options = self._options
        return f"{options.endpoint} {options.region} {options.bucket} {options.prefix}"

    @classmethod
    def from_options(cls, options: msgspec.Struct) -> S3Backend:
        assert isinstance(options, S3Options)
        return cls(options)

    async def open(self) -> None:
        assert not self._calls.is_open
        self._readers = CallThreads("tierd-s3-read", self._options.connections)
        self._writers = CallThreads("tierd-s3-write", self._options.connections)
        try:
            bucket = await self._call(
                self._readers, lambda _: Bucket.find(self._options, self._failures)
            )
            try:
                await self._call(self._readers, bucket.try_requests)
            except BaseException:
                bucket.close()
                raise
        except S3Error as error:
            await self._end_threads()
            raise BackendError(f"{self._where}: {error}") from error
        except BaseException:
            await self._end_threads()
            raise
        self._bucket = bucket
        self._calls.is_open = True
        self._usage = Usage()
        self._changes = ObjectChanges(bucket, self._writers, self._usage)
        self._indexing = asyncio.create_task(
            keep_counted(self._usage, self._page, self._shared_capacity)
        )

    async def close(self) -> None:
        if not self._calls.is_open:
            return
        self._calls.is_open = False
        self._indexing.cancel()
        await asyncio.wait([self._indexing])
        if not self._indexing.cancelled() and (error := self._indexing.exception()):
            _log.error("%s: counting failed", self._where, exc_info=error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S_MAX):
                await self._calls.ended()
        self._readers.interrupt()
        self._writers.interrupt()
        await self._calls.ended()
        await self._end_threads()
        self._bucket.close()

    async def contains_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        names = [self._name(namespace, block_hash) for block_hash in hashes]
        with self._calls.call():
            await self._changes.settled(names)
            if len(names) <= ASK_EACH_MAX:
                return await self._ask(names)
            # A prefix rarely has holes, so the search is for its end: each round looks at one
            # place per connection. A hole shows as a miss when it is fetched.
            low, high = 0, len(names)  # All below `low` are present, `high` is absent.
            ask = self._options.connections
            places = {0}
            while low < high:
                places |= {low + (high - low) * (i + 1) // (ask + 1) for i in range(ask)}
                asked = sorted(place for place in places if low <= place < high)
                for place, there in zip(
                    asked, await self._ask([names[place] for place in asked]), strict=True
                ):
                    if not there:
                        high = place
                        break
                    low = place + 1
                places = set()
            return [True] * high + [False] * (len(names) - high)

    async def use_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        """Look every block up. A use changes nothing: the bucket keeps no order of uses."""
        answers: list[bool] = []
        for at in range(0, len(hashes), ASK_EACH_MAX):
            answers += await self.contains_many(namespace, hashes[at : at + ASK_EACH_MAX])
        return answers

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        fetches = []
        for block_hash, view, length in requests:
            assert 0 < length <= len(view)
            key = BlockKey(namespace, block_hash)
            fetches.append(Fetch(self._name(namespace, block_hash), key, view[:length]))
        batch = Batch(self._options.connections, self._failures)
        with self._calls.call():
            await self._changes.settled([fetch.name for fetch in fetches])
            try:
                await self._readers.run(lambda turn: self._fetch(batch, turn), fetches)
            finally:
                for fetch in fetches:
                    if fetch.fault is not None:
                        self._note_fault(fetch, fetch.fault)
            batch.raise_if_shut_out(self._where, [fetch.outcome for fetch in fetches])
            bad = {f.name: f.etag for f in fetches if f.outcome is Outcome.CORRUPT and f.etag}
            changes = [ObjectChange(name, etag=etag) for name, etag in bad.items()]
            await self._changes.make(changes, Batch(len(changes), self._failures))
        return [GetResult(fetch.outcome, fetch.header) for fetch in fetches]

    async def put_many(self, namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
        changes = []
        for block_hash, parent, digest, view, length in requests:
            assert 0 < length <= len(view)
            header = BlockHeader(BlockKey(namespace, block_hash), parent, length, digest)
            name = self._name(namespace, block_hash)
            changes.append(ObjectChange(name, pack_header(header), view[:length]))
        batch = Batch(self._options.connections, self._failures)
        sizes_bytes = [HEADER_BYTES + len(change.payload) for change in changes]
        used_bytes = self._usage.stats().used_bytes
        with (
            self._calls.call(),
            self._shared_capacity.admit(used_bytes, sizes_bytes) as admitted,
        ):
            await self._changes.make(changes[:admitted], batch)
            outcomes = [change.outcome for change in changes[:admitted]]
            batch.raise_if_shut_out(self._where, outcomes)
            for there in await self._ask([change.name for change in changes[admitted:]]):
                outcomes.append(Outcome.PRESENT if there else Outcome.REFUSED)
        self.counters["skipped_full_total"] += outcomes.count(Outcome.REFUSED)
        return outcomes

    async def delete_many(self, namespace: bytes, hashes: Sequence[bytes]) -> int:
        names = dict.fromkeys(self._name(namespace, block_hash) for block_hash in hashes)
        changes = [ObjectChange(name) for name in names]
        batch = Batch(self._options.connections, self._failures)
        with self._calls.call():
            await self._changes.make(changes, batch)
        if batch.failure is not None:
            failed = sum(change.outcome is Outcome.ERROR for change in changes)
            raise BackendError(
                f"{self._where}: {failed} blocks were not deleted: {batch.failure}"
            ) from batch.failure
        return -sum(change.blocks for change in changes)

    async def scan(self) -> AsyncIterator[Scanned]:
        token = ""
        while True:
            with self._calls.call():
                page = await self._page(token)
            yield Scanned()
            at_once = self._options.connections
            for at in range(0, len(page.objects), at_once):
                yield await self._peek(page.objects[at : at + at_once])
            token = page.token
            if not token:
                return

    async def _peek(self, objects: Sequence[ListedObject]) -> Scanned:
        """Read the headers of some objects: about one round trip. Raises BackendError if the
        server fails for all of them."""
        looks = [Look(self._bucket.name(each.key)) for each in objects]
        with self._calls.call():
            await self._look(looks, peek=True)
        failures = [look.failure for look in looks if look.failure is not None]
        away = (FailureKind.PEER, FailureKind.NO_BUCKET, FailureKind.ELSEWHERE)
        if len(failures) == len(looks) and failures[0].kind in away:
            raise BackendError(f"{self._where}: {failures[0]}") from failures[0]
        headers = []
        for look, each in zip(looks, objects, strict=True):
            header = unpack_header(look.raw_header or b"")
            if (
                header is not None
                and header.key == each.key
                and header.length + HEADER_BYTES == each.size_bytes
            ):
                headers.append(header)
        return Scanned(headers, [f"{look.name}: {look.failure}" for look in looks if look.failure])

    async def marks(self) -> list[str]:
        return await self._of_marks(self._readers, self._bucket.marks)

    async def add_mark(self, mark: str) -> None:
        await self._of_marks(self._writers, lambda turn: self._bucket.add_mark(turn, mark))

    async def drop_marks(self, marks: Sequence[str]) -> None:
        for mark in marks:
            await self._of_marks(self._writers, partial(self._drop_mark, mark))

    def _drop_mark(self, mark: str, turn: CallTurn[None]) -> None:
        self._bucket.drop_mark(turn, mark)

    async def _of_marks(self, threads: CallThreads, function: Callable[[CallTurn[None]], _T]) -> _T:
        with self._calls.call():
            try:
                return await self._call(threads, function)
            except S3Error as error:
                raise BackendError(f"{self._where}: {error}") from error

    async def reload(self) -> None:
        """Read the credentials again: those in use may be valid, but not for long."""
        with self._calls.call():
            await self._call(self._readers, lambda _: self._bucket.read_keys_again())

    def stats(self) -> BackendStats:
        """Return this node's estimate: the last listing, and its own changes since."""
        return replace(
            self._usage.stats(),
            capacity_bytes=self._shared_capacity.capacity_bytes,
            trouble=self._failures.trouble,
        )

    def _name(self, namespace: bytes, block_hash: bytes) -> str:
        self._calls.check()
        return self._bucket.name(BlockKey(namespace, block_hash))

    async def _call(self, threads: CallThreads, function: Callable[[CallTurn[None]], _T]) -> _T:
        """Run one function on one thread and return its result."""
        results: list[_T] = []

        def work(turn: CallTurn[None]) -> None:
            results.append(function(turn))
            turn.take()

        await threads.run(work, [None])
        if not results:
            raise BackendError(f"{self._where} is being closed")
        return results[0]

    async def _page(self, token: str) -> Page:
        try:
            return await self._call(self._readers, lambda turn: self._bucket.page(turn, token))
        except S3Error as error:
            raise BackendError(f"{self._where}: {error}") from error

    async def _ask(self, names: Sequence[str]) -> list[bool]:
        """Return whether each object is present."""
        looks = [Look(name) for name in names]
        await self._look(looks, peek=False)
        return [look.size_bytes is not None for look in looks]

    async def _look(self, looks: Sequence[Look], *, peek: bool) -> None:
        batch = Batch(self._options.connections, self._failures)

        def work(turn: CallTurn[Look]) -> None:
            while (look := turn.take()) is not None:
                if batch.failure is not None and not peek:
                    continue
                try:
                    if peek:
                        look.raw_header = self._bucket.read_header(turn, look.name)
                    else:
                        look.size_bytes = self._bucket.size_of(turn, look.name)
                    look.done = True
                except S3Error as failure:
                    look.failure = failure
                    batch.note(failure, turn)

        await self._readers.run(work, looks)
        if not all(look.done or (peek and look.failure) for look in looks):
            raise BackendError(
                f"{self._where}: {batch.failure or 'it is being closed'}"
            ) from batch.failure

    def _fetch(self, batch: Batch, turn: CallTurn[Fetch]) -> None:
        raw_header = memoryview(bytearray(HEADER_BYTES))
        while (fetch := turn.take()) is not None:
            if batch.given_up:
                batch.skip()
                continue
            try:
                read = self._bucket.read(turn, fetch.name, fetch.key, fetch.view, raw_header)
            except S3Error as failure:
                if failure.kind is FailureKind.UNREADABLE:
                    self._missed(fetch, failure)
                else:
                    batch.note(failure, turn)
                continue
            if read is not None and read.header is None:
                self._fetch_again(batch, turn, fetch, read, raw_header)
            else:
                fetch.outcome = Outcome.MISS if read is None else Outcome.HIT
                fetch.header = read.header if read is not None else None

    def _fetch_again(
        self, batch: Batch, turn: CallTurn[Fetch], fetch: Fetch, first: Read, raw_header: memoryview
    ) -> None:
        """Judge a damaged object by a second read, over another connection."""
        fetch.fault = DamageSite.UNKNOWN
        try:
            second = self._bucket.read(
                turn, fetch.name, fetch.key, fetch.view, raw_header, fresh=True
            )
        except S3Error as failure:
            if failure.kind is FailureKind.UNREADABLE:
                self._missed(fetch, failure)
            else:
                batch.note(failure, turn)
            return
        if second is None:
            fetch.outcome, fetch.fault = Outcome.MISS, None
            return
        fetch.header, fetch.etag = second.header, second.etag
        fetch.fault = judge(first, second, second.header)
        if second.header is not None:
            fetch.outcome = Outcome.HIT
        elif fetch.fault is DamageSite.STORED:
            fetch.outcome = Outcome.CORRUPT

    def _missed(self, fetch: Fetch, failure: S3Error) -> None:
        """In a thread: note that the server does not deliver an object which it has."""
        fetch.outcome, fetch.fault = Outcome.MISS, None
        self._failures.count("unreadable_total")
        self._failures.warn(failure.kind, f"{fetch.name}: {failure}")

    def _note_fault(self, fetch: Fetch, fault: DamageSite) -> None:
        """Count and log an object that was read damaged."""
        self._failures.count(fault.counter)
        kept = "; kept, since it has no ETag to delete it by" if not fetch.etag else ""
        told = {
            DamageSite.STORED: f"is another or a damaged block{kept}",
            DamageSite.TRANSIT: "was damaged in transit: check the network and this machine",
            DamageSite.UNKNOWN: "was read damaged, and could not be read again: kept",
        }
        self._failures.warn(fault, f"{fetch.name} {told[fault]}")

    async def _end_threads(self) -> None:
        await self._readers.close()
        await self._writers.close()
