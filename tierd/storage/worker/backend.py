"""A storage tier whose backend runs in a separate process.

For backends that burn CPU in Python: as threads they raise the p99 of the daemon's loop to
10-20 ms; as a niced process they leave it below 1 ms, and their crash does not lose L2. The
process maps the arena, so blocks go straight into their slots. This module restarts the process
and adds up its counters; incarnation.py makes the calls to one process and decides when to kill it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import ClassVar, Final, TypeVar

import msgspec

from tierd.backend import (
    Backend,
    BackendStats,
    GetRequest,
    GetResult,
    Outcome,
    PutRequest,
    Scanned,
)
from tierd.errors import BackendError, ConfigError
from tierd.storage.worker.incarnation import BackendBugError as BackendBugError
from tierd.storage.worker.incarnation import WorkerIncarnation
from tierd.storage.worker.wire import (
    BLOCKS_PER_CALL_MAX,
    HASHES_PER_CALL_MAX,
    AddMark,
    Contains,
    Delete,
    DropMarks,
    Get,
    Marks,
    Open,
    Put,
    Reload,
    Report,
    Scan,
    Use,
    pack_gets,
    pack_hashes,
    pack_puts,
    unpack_outcomes,
    unpack_results,
    unpack_scanned,
    unpack_texts,
)
from tierd.storage.wrapper import WrapperOptions

RESTART_S_MIN: Final = 0.1
RESTART_S_MAX: Final = 5.0
"""The pause before a restart doubles between these limits, so that a backend that always crashes
costs a few percent of a core. A process that ran for more than twice RESTART_S_MAX is restarted
at once."""

OPEN_S_MAX: Final = 30.0
"""Seconds that a restarted backend may take to open; the caller bounds the first opening."""

log = logging.getLogger("tierd.worker")
_T = TypeVar("_T")


class WorkerBackend(Backend):
    """Presents a backend class in a worker process as a backend. Options go over the socket only.

    Calls raise BackendError at once while no process is running, and BackendBugError if the
    backend breaks its contract.
    """

    Options: ClassVar[type[msgspec.Struct]] = WrapperOptions

    def __init__(self, cls: type[Backend], options: msgspec.Struct) -> None:
        """`options` are plain values, as a TOML table holds them. Raises ConfigError."""
        # Never opened: it checks the options and has the names of the counters.
        self._unopened = cls.from_options(options)
        self._target = f"{cls.__module__}:{cls.__qualname__}"
        self._lets_go_s = cls.lets_go_s
        self._options: dict[str, object] = msgspec.to_builtins(options)
        self._stats = self._unopened.stats()
        self.counters = {
            **self._unopened.counters,
            "worker_deaths_total": 0,
            "worker_kills_total": 0,
            "worker_restarts_total": 0,
        }
        self._past = dict(self.counters)
        self._incarnation: WorkerIncarnation | None = None
        self._spare: WorkerIncarnation | None = None
        """A process whose backend could not be opened, for the next attempt."""
        self._away = f"{cls.__name__} is not open"
        self._guard: asyncio.Task[None] | None = None
        self._scans = itertools.count()

    @property
    def shared(self) -> bool:
        return self._unopened.shared

    @property
    def use_every_s(self) -> float:
        return self._unopened.use_every_s

    @property
    def place(self) -> str:
        return self._unopened.place

    def refusals(self, is_own: Callable[[int], bool]) -> Iterable[str]:
        return self._unopened.refusals(is_own)

    @classmethod
    def from_options(cls, options: msgspec.Struct) -> WorkerBackend:
        raise NotImplementedError("a worker is built for a backend, not from options")

    async def open(self) -> None:
        assert self._guard is None
        self._incarnation = await self._begin()
        self._guard = asyncio.create_task(self._keep_alive(self._incarnation), name="worker")

    async def close(self) -> None:
        self._away = "the backend is closed"
        if self._guard is not None:
            self._guard.cancel()
            await asyncio.wait([self._guard])
            self._guard = None
        await self._end_spare()
        if self._incarnation is not None:
            await self._incarnation.stop()
            self._incarnation = None
            self._stats = self._unopened.stats()

    async def contains_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        return await self._ask(Contains, namespace, hashes)

    async def use_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        return await self._ask(Use, namespace, hashes)

    async def _ask(
        self, kind: type[Contains] | type[Use], namespace: bytes, hashes: Sequence[bytes]
    ) -> list[bool]:
        answers: list[bool] = []
        for part in _parts(hashes, HASHES_PER_CALL_MAX):
            packed = await self._serving().call(kind(namespace, pack_hashes(part)))
            answers += map(bool, _bytes(packed))
        return answers

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        results: list[GetResult] = []
        for part in _parts(requests, BLOCKS_PER_CALL_MAX):
            incarnation = self._serving()
            places = incarnation.place([request.view for request in part])
            packed = await incarnation.call(Get(namespace, pack_gets(part, places)))
            results += unpack_results(_bytes(packed))
        return results

    async def put_many(self, namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for part in _parts(requests, BLOCKS_PER_CALL_MAX):
            incarnation = self._serving()
            places = incarnation.place([request.view for request in part])
            packed = await incarnation.call(Put(namespace, pack_puts(part, places)))
            outcomes += unpack_outcomes(_bytes(packed))
        return outcomes

    async def delete_many(self, namespace: bytes, hashes: Sequence[bytes]) -> int:
        dropped = 0
        for part in _parts(hashes, HASHES_PER_CALL_MAX):
            count = await self._serving().call(Delete(namespace, pack_hashes(part)))
            assert isinstance(count, int)
            dropped += count
        return dropped

    async def scan(self) -> AsyncIterator[Scanned]:
        incarnation, scan = self._serving(), next(self._scans)
        try:
            while (step := unpack_scanned(_bytes(await incarnation.call(Scan(scan))))) is not None:
                yield step
        finally:
            incarnation.end_scan(scan)

    async def marks(self) -> list[str]:
        return unpack_texts(_bytes(await self._serving().call(Marks())))

    async def add_mark(self, mark: str) -> None:
        await self._serving().call(AddMark(mark))

    async def drop_marks(self, marks: Sequence[str]) -> None:
        await self._serving().call(DropMarks(list(marks)))

    async def reload(self) -> None:
        await self._serving().call(Reload())

    def stats(self) -> BackendStats:
        """Return the stats of the worker's last report, at most a second old."""
        return self._stats

    def _serving(self) -> WorkerIncarnation:
        if self._incarnation is None:
            raise BackendError(self._away)
        return self._incarnation

    async def _begin(self) -> WorkerIncarnation:
        """Return a process whose backend is open. Raises as open() does.

        If the backend cannot be opened, its process is kept for the next attempt: starting one
        costs a third of a second of CPU, and a server may be away for hours.
        """
        # The counters of a new backend start at 0.
        self._past = dict(self.counters)
        if self._spare is not None and self._spare.dying:
            await self._end_spare()
        incarnation = self._spare or WorkerIncarnation(
            self._target, self._take_report, lets_go_s=self._lets_go_s
        )
        self._spare = incarnation
        try:
            await incarnation.call(Open(self._options, logging.getLogger().getEffectiveLevel()))
        except BackendBugError as error:
            await self._end_spare()
            raise BackendError(str(error)) from error
        except BackendError:
            if incarnation.dying:
                await self._end_spare()
            raise
        except BaseException:
            await self._end_spare()
            raise
        self._spare = None
        return incarnation

    async def _end_spare(self) -> None:
        incarnation, self._spare = self._spare, None
        if incarnation is not None:
            await incarnation.end("could not open")

    async def _keep_alive(self, incarnation: WorkerIncarnation) -> None:
        """Start a new process whenever one ends, until cancelled."""
        loop = asyncio.get_running_loop()
        pause_s = 0.0
        while True:
            born = loop.time()
            await incarnation.ended.wait()
            self._note_death(incarnation)
            if loop.time() - born > 2 * RESTART_S_MAX:
                pause_s = 0.0
            successor = None
            while successor is None:
                await asyncio.sleep(pause_s)
                pause_s = min(max(2 * pause_s, RESTART_S_MIN), RESTART_S_MAX)
                successor = await self._begin_again()
            self._incarnation = incarnation = successor

    async def _begin_again(self) -> WorkerIncarnation | None:
        try:
            async with asyncio.timeout(OPEN_S_MAX):
                incarnation = await self._begin()
        except TimeoutError:
            self._away = f"the restarted worker did not open in {OPEN_S_MAX:g} s"
        except (BackendError, ConfigError) as error:
            self._away = f"the worker cannot be restarted: {error}"
        else:
            self.counters["worker_restarts_total"] += 1
            log.info("%s: restarted as process %d", self._target, incarnation.pid)
            return incarnation
        log.warning("%s: %s", self._target, self._away)
        return None

    def _note_death(self, incarnation: WorkerIncarnation) -> None:
        self._incarnation = None
        self._away = incarnation.dying
        self.counters["worker_deaths_total"] += 1
        if incarnation.killed_for:
            self.counters["worker_kills_total"] += 1
        log.error("%s: %s", self._target, incarnation.dying)

    def _take_report(self, report: Report) -> None:
        self._stats = BackendStats(
            report.blocks,
            report.used_bytes,
            report.capacity_bytes,
            report.index_complete,
            report.trouble,
        )
        # Update in place: a wrapper refers to this dict.
        for name, count in report.counters.items():
            self.counters[name] = self._past.get(name, 0) + count


def _parts(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    """Yield `items` in order, at most `size` at a time; mostly in one piece, without a copy."""
    for start in range(0, len(items), size):
        yield items if len(items) <= size else items[start : start + size]


def _bytes(value: bytes | int) -> bytes:
    assert isinstance(value, bytes)
    return value
