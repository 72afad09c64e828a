"""The Redis tier: a block is one value, header and payload together, on Redis or Valkey.

This module takes a batch through the tier. wire.py decides how a value travels, nodes.py which
server keeps a key, connect.py how a server is reached. Modules that need redis-py are imported
when the tier is opened, so options can be checked without it.

Making room is up to the server: `maxmemory` with a `maxmemory-policy` that evicts. With volatile-
lru and `ttl_s` it evicts blocks and never the marks of flushes, which have no TTL; with allkeys-lru
it may evict marks, and what it has is then not served any longer. With `noeviction` a full server
refuses blocks. `capacity` only decides when to stop storing; see common/shared_capacity.py. The
server's LRU sees reads, and TOUCH reports uses in host memory to it. With `ttl_s`, PEXPIRE renews a
block's time at each use that the daemon reports. Reads do not renew it: they stay reads, which
replicas and append-only files never see. A use is reported at most once per quarter of `ttl_s`, or
once per minute if that is shorter.

The address must lead to a master. If a server replies that it is another one (READONLY, for
example), its links are closed and the address is resolved again. Marks are read and written only
over new links, and at a server that takes writes: the address may by now lead to another server
than the old links do.

A user needs +get +set +exists +unlink +scan +getrange +watch +sadd +srem +smembers on the
prefix's keys, and +multi +exec; in a cluster also +cluster|slots, +cluster|nodes and +asking.
Without +touch and +pexpire the server does not learn of uses. It may then drop blocks in use; tierd
still notices that they are missing, and writes them again.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import msgspec

from tierd.backend import (
    HEADER_BYTES,
    Backend,
    BackendStats,
    GetRequest,
    GetResult,
    Outcome,
    PutRequest,
    Scanned,
)
from tierd.errors import BackendError, ConfigError
from tierd.types import BlockKey
from tierd_backends.common.calls import CallThreads
from tierd_backends.common.failures import Failures
from tierd_backends.common.open_calls import OpenCalls
from tierd_backends.common.second_read import COUNTERS, DamageSite
from tierd_backends.common.shared_capacity import SharedCapacity
from tierd_backends.redis.census import Census
from tierd_backends.redis.options import RedisOptions, parse_target

if TYPE_CHECKING:
    from tierd_backends.redis.nodes import Nodes, RedisNode
    from tierd_backends.redis.wire import Reply
    from tierd_backends.redis.work import Work

OPEN_S_MAX = 5.0
"""Longest wait for a first answer; the lookup of the server's name has no other limit."""

CLOSE_STEP_S = 0.05
"""Pause between two interruptions of calls in flight: a call may be about to go on."""

PIPELINE_KEYS_MAX = 1000
"""Keys per pipelined batch: one round trip for a long prompt, 130 KB on the wire."""

VALUE_BYTES_MAX = 512 << 20
"""Largest value that a server takes by default (proto-max-bulk-len)."""

LOG_EVERY_S = 10.0
"""Least time between two log lines of one kind: in an outage each batch would add one."""

ROOMS_MAX = 3
ROOM_BLOCKS = 16
"""Attempts to add a mark to a full server, and blocks dropped before each further attempt."""

USE_EVERY_S = 1.0
"""How often a use is reported: the clock of the server's LRU has whole seconds."""

DENIED_S = 60.0
"""Pause before a command that this user may not give is tried again."""

RENEW_S_MIN, RENEW_S_MAX = 0.5, 60.0
"""Bounds of the time between two reports of a use with a TTL: replicas and append-only files
see each one."""

RECOUNT_S = 60.0
"""Wait before the blocks are counted again after a server failed during the count."""

_log = logging.getLogger("tierd_backends.redis")


class RedisBackend(Backend):
    """Blocks as values of a Redis or Valkey server, or of a cluster of them."""

    Options: ClassVar[type[msgspec.Struct]] = RedisOptions
    in_worker: ClassVar[bool] = True

    def __init__(self, options: RedisOptions) -> None:
        """Raises ConfigError with every malformed option. Connects to nothing."""
        self._options = options
        self._target = parse_target(options)
        self._shared_capacity = SharedCapacity(
            options.capacity, f"the Redis tier at {self._target.host}"
        )
        self.counters = {
            **COUNTERS,
            "connects_total": 0,
            "io_errors_total": 0,
            "moved_total": 0,
            "node_down_total": 0,
            "reconnects_total": 0,
            "refused_no_space_total": 0,
            "skipped_full_total": 0,
            "skipped_total": 0,
            "timeouts_total": 0,
        }
        self._failures = Failures(_log, self.counters, log_every_s=LOG_EVERY_S)
        self._calls = OpenCalls(f"the tier at {self._target.host}")
        self._census = Census()
        self._touch_from_s = 0.0
        """When to report uses again after the server has denied TOUCH or PEXPIRE to this user."""
        self._threads: CallThreads
        self._nodes: Nodes
        self._work: Work
        self._taking_census: asyncio.Task[None]

    @property
    def shared(self) -> bool:
        return True

    @property
    def use_every_s(self) -> float:
        if not self._options.ttl_s:
            return USE_EVERY_S
        return min(max(self._options.ttl_s / 4, RENEW_S_MIN), RENEW_S_MAX)

    @property
    def place(self) -> str:
        target = self._target
        return f"{target.host}:{target.port}/{target.db} {self._options.prefix}"

    @classmethod
    def from_options(cls, options: msgspec.Struct) -> RedisBackend:
        assert isinstance(options, RedisOptions)
        for package in ("redis", "hiredis"):
            if importlib.util.find_spec(package) is None:
                raise ConfigError(f"{package} is not installed: pip install 'tierd[redis]'")
        return cls(options)

    async def open(self) -> None:
        assert not self._calls.is_open
        from tierd_backends.redis.connect import Access, Address, Connector
        from tierd_backends.redis.nodes import Nodes
        from tierd_backends.redis.work import Work

        options, target = self._options, self._target
        access = Access(
            db=target.db,
            username=target.username,
            password=target.password,
            password_file=options.password_file,
            tls=target.tls,
            tls_ca=options.tls_ca,
            tls_cert=options.tls_cert,
            tls_key=options.tls_key,
            tls_verify_hostname=options.tls_verify_hostname,
            silence_s=options.timeout_ms / 1000,
            prefix=options.prefix,
        )
        seed = Address(target.host, target.port)
        self._nodes = Nodes(seed, Connector(access), options.cluster, self._failures.count)
        self._work = Work(self._nodes, options.prefix, 1000 * options.ttl_s)
        self._threads = CallThreads("tierd-redis", options.connections)
        try:
            async with asyncio.timeout(OPEN_S_MAX):
                await self._threads.run(self._work.probe, [None])
        except TimeoutError as error:
            await self._shut()
            raise BackendError(
                f"no answer from {seed} within {OPEN_S_MAX:.0f} s: does its name resolve?"
            ) from error
        except BaseException:
            await self._shut()
            raise
        self._calls.is_open = True
        self._census = Census()
        self._taking_census = asyncio.create_task(self._take_census())

    async def close(self) -> None:
        if not self._calls.is_open:
            return
        self._calls.is_open = False
        self._taking_census.cancel()
        await asyncio.wait([self._taking_census])
        if not self._taking_census.cancelled() and (error := self._taking_census.exception()):
            _log.error("counting blocks failed", exc_info=error)
        patience_s = self._options.timeout_ms / 1000
        while self._calls.in_flight:
            try:
                async with asyncio.timeout(patience_s):
                    await self._calls.ended()
            except TimeoutError:
                self._threads.interrupt()
                patience_s = CLOSE_STEP_S
        await self._shut()

    async def contains_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        """As the contract says. In a cluster, blocks of a node that is down are False as long as
        another node answers: those blocks could not be read, the other nodes' blocks can."""
        with self._calls.call():
            keys = [self._work.key_of(BlockKey(namespace, block_hash)) for block_hash in hashes]
            answers = await self._each(b"EXISTS", keys)
            failed = [answer for answer in answers if isinstance(answer, Exception)]
            if failed and (len(failed) == len(answers) or not self._options.cluster):
                raise _as_backend_error(failed[0])
            return [answer == 1 for answer in answers]

    async def use_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        """Blocks of a cluster's node that is down count as present."""
        from tierd_backends.redis.connect import DeniedError

        with self._calls.call():
            keys = [self._work.key_of(BlockKey(namespace, block_hash)) for block_hash in hashes]
            ttl_ms = 1000 * self._options.ttl_s
            answers: list[Reply | BackendError] = []
            now_s = asyncio.get_running_loop().time()
            if now_s >= self._touch_from_s:
                try:
                    # TOUCH the marks as well: eviction may take that key; see tierd.core.l3.epochs.
                    touched = [self._work.marks_key, *([] if ttl_ms else keys)]
                    _, *answers = await self._each(b"TOUCH", touched)
                    if ttl_ms:
                        answers = await self._each(b"PEXPIRE", keys, b"%d" % ttl_ms)
                except DeniedError as error:
                    if not error.of_command:
                        raise
                    self._touch_from_s = now_s + DENIED_S
                    self._failures.warn(
                        "touch", f"blocks in use may be evicted by the server: {error}"
                    )
            if now_s < self._touch_from_s:
                answers = await self._each(b"EXISTS", keys)
            failed = [answer for answer in answers if isinstance(answer, BackendError)]
            if failed and len(failed) == len(answers):
                raise failed[0]
            return [answer != 0 for answer in answers]

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        from tierd_backends.redis.work import GetJob

        with self._calls.call():
            jobs = []
            for request in requests:
                block = BlockKey(namespace, request.block_hash)
                jobs.append(GetJob(self._work.key_of(block), block, request))
            try:
                await self._threads.run(self._work.get, self._work.runs(jobs))
            finally:
                for job in jobs:
                    if job.fault is not None:
                        self._note_fault(job.key, job.fault)
                    if job.dropped:
                        self._census.dropped(job.block)
                self._note_errors("get", [job.why for job in jobs if job.why])
            return [job.result for job in jobs]

    async def put_many(self, namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
        from tierd_backends.redis.work import PutJob

        with self._calls.call():
            blocks = [BlockKey(namespace, request.block_hash) for request in requests]
            keys = [self._work.key_of(block) for block in blocks]
            outcomes = [Outcome.PRESENT] * len(requests)
            # Blocks that are present need not be sent. Where EXISTS failed, SET is tried.
            answers = await self._each(b"EXISTS", keys)
            jobs = []
            for position, answer in enumerate(answers):
                if HEADER_BYTES + requests[position].length > VALUE_BYTES_MAX:
                    outcomes[position] = Outcome.REFUSED
                elif answer != 1:
                    outcomes[position] = Outcome.ERROR
                    jobs.append(
                        PutJob(keys[position], blocks[position], requests[position], position)
                    )
            sizes_bytes = [HEADER_BYTES + job.request.length for job in jobs]
            with self._shared_capacity.admit(
                self._census.stats().used_bytes, sizes_bytes
            ) as admitted:
                beyond, jobs = jobs[admitted:], jobs[:admitted]
                try:
                    await self._threads.run(self._work.put, self._work.runs(jobs))
                finally:
                    for job in jobs:
                        outcomes[job.position] = job.outcome
                        if job.outcome is Outcome.STORED:
                            self._census.stored(job.block, job.request.length)
                    self._failures.count("refused_no_space_total", outcomes.count(Outcome.REFUSED))
                    self._note_errors("put", [job.why for job in jobs if job.why])
            self._failures.count("skipped_full_total", len(beyond))
            for job in beyond:
                outcomes[job.position] = Outcome.REFUSED
            return outcomes

    async def delete_many(self, namespace: bytes, hashes: Sequence[bytes]) -> int:
        with self._calls.call():
            blocks = [BlockKey(namespace, block_hash) for block_hash in hashes]
            answers = await self._each(b"UNLINK", [self._work.key_of(block) for block in blocks])
            dropped = [b for b, answer in zip(blocks, answers, strict=True) if answer == 1]
            for block in dropped:
                self._census.dropped(block)
            failed = [answer for answer in answers if isinstance(answer, Exception)]
            if failed:
                raise BackendError(f"{len(failed)} blocks could not be deleted: {failed[0]}")
            return len(dropped)

    async def scan(self) -> AsyncIterator[Scanned]:
        before = await self._shape()
        for node in self._nodes.masters():
            async for step in self._scan_node(node):
                yield step
        after = await self._shape()
        if before != after or after[1]:
            # A key may have moved from a node not yet scanned to one already scanned.
            yield Scanned(unread=["the cluster's slots were being moved"])

    async def _scan_node(self, node: RedisNode) -> AsyncIterator[Scanned]:
        from tierd_backends.redis.connect import ServerUnreachableError
        from tierd_backends.redis.work import PageJob

        page = PageJob(node)
        while True:
            try:
                with self._calls.call():
                    await self._threads.run(self._work.page, [page])
            except ServerUnreachableError as error:
                if not self._options.cluster:
                    raise
                yield Scanned(unread=[str(error)])
                return
            yield Scanned(page.headers, page.unread)
            if page.cursor == b"0":
                return

    async def _shape(self) -> tuple[object, bool]:
        from tierd_backends.redis.work import ShapeJob

        job = ShapeJob()
        with self._calls.call():
            await self._threads.run(self._work.shape, [job])
        return job.shape

    async def marks(self) -> list[str]:
        reply = await self._of_marks(b"SMEMBERS")
        if not isinstance(reply, list) or not all(isinstance(each, bytes) for each in reply):
            raise BackendError("the server did not answer SMEMBERS with a set of strings")
        return [each.decode("utf-8", "replace") for each in reply if isinstance(each, bytes)]

    async def add_mark(self, mark: str) -> None:
        from tierd_backends.redis.wire import ErrorReply

        for _ in range(ROOMS_MAX):
            reply = await self._of_marks(b"SADD", mark.encode(), or_full=True)
            if not isinstance(reply, ErrorReply):
                return
            # A full server takes no mark, and only the flush that needs the mark would make room.
            await self._make_room()
        raise BackendError("the server has no room for the mark of a flush")

    async def drop_marks(self, marks: Sequence[str]) -> None:
        if marks:
            await self._of_marks(b"SREM", *(mark.encode() for mark in marks))

    async def _of_marks(self, *words: bytes, or_full: bool = False) -> Reply:
        from tierd_backends.redis.wire import ErrorReply
        from tierd_backends.redis.work import MarksJob

        job = MarksJob(words)
        with self._calls.call():
            await self._threads.run(self._work.marks, [job])
        if isinstance(job.reply, ErrorReply) and not (or_full and job.reply.code == "OOM"):
            raise _as_backend_error(job.reply)
        return job.reply

    async def _make_room(self) -> None:
        """Drop some blocks of the server that keeps the marks, as its eviction would."""
        async for step in self._scan_node(self._nodes.of(self._work.marks_key)):
            if step.headers:
                for header in step.headers[:ROOM_BLOCKS]:
                    await self.delete_many(header.key.namespace, [header.key.block_hash])
                return

    async def reload(self) -> None:
        """Log in again: the password is read at every connect."""
        self._calls.check()
        self._nodes.log_in_again()

    def stats(self) -> BackendStats:
        """Return this node's estimate; see census.py. Lookups never rely on it."""
        return replace(
            self._census.stats(),
            capacity_bytes=self._shared_capacity.capacity_bytes,
            trouble=self._failures.trouble,
        )

    async def _each(
        self, verb: bytes, keys: Sequence[bytes], *rest: bytes
    ) -> list[Reply | BackendError]:
        """Send `verb` for every key. Returns each key's reply, which may be an error reply, or
        the reason why there is none."""
        from tierd_backends.redis.work import EachJob

        by_node: dict[RedisNode, list[int]] = {}
        for position, key in enumerate(keys):
            by_node.setdefault(self._nodes.of(key), []).append(position)
        jobs = [
            EachJob(node, verb, [keys[position] for position in part], part, rest)
            for node, positions in by_node.items()
            for part in _chunks(positions, PIPELINE_KEYS_MAX)
        ]
        await self._threads.run(self._work.each, jobs)
        answers: list[Reply | BackendError] = [BackendError("the tier is closing")] * len(keys)
        for job in jobs:
            for number, position in enumerate(job.positions):
                if job.failure is not None:
                    answers[position] = job.failure
                elif job.replies:
                    answers[position] = job.replies[number]
        return answers

    async def _take_census(self) -> None:
        """Count the blocks in the background; with a capacity, again and again."""
        loop = asyncio.get_running_loop()
        pause_s: float | None = 0.0
        while pause_s is not None:
            await asyncio.sleep(pause_s)
            began_s = loop.time()
            self._census.begin()
            try:
                async for step in self.scan():
                    for header in step.headers:
                        self._census.seen(header.key, header.length)
                    if step.unread:
                        raise BackendError("; ".join(step.unread))
            except BackendError as error:
                _log.warning("cannot count the blocks in the tier yet: %s", error)
                pause_s = RECOUNT_S
            else:
                self._census.end()
                pause_s = self._shared_capacity.pause_s(loop.time() - began_s)

    def _note_errors(self, action: str, reasons: Sequence[str]) -> None:
        """Count a batch's errors, and log one line for them."""
        if reasons:
            self._failures.count("io_errors_total", len(reasons))
            self._failures.trouble = reasons[0]
            self._failures.warn(action, f"cannot {action} {len(reasons)} blocks: {reasons[0]}")

    def _note_fault(self, key: bytes, fault: DamageSite) -> None:
        """Count a damaged read, and log a line from time to time."""
        self._failures.count(fault.counter)
        told = {
            DamageSite.STORED: "held another or a damaged block",
            DamageSite.TRANSIT: "was damaged in transit: check the network and this machine",
            DamageSite.UNKNOWN: "was read damaged, and could not be read again: kept",
        }
        self._failures.warn(fault.counter, f"{key.decode()} {told[fault]}")

    async def _shut(self) -> None:
        await self._threads.close()
        self._nodes.close()


def _chunks(positions: list[int], size: int) -> Iterable[list[int]]:
    for start in range(0, len(positions), size):
        yield positions[start : start + size]


def _as_backend_error(error: Exception) -> BackendError:
    return error if isinstance(error, BackendError) else BackendError(f"the server says: {error}")
