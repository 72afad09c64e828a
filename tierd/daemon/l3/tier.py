"""A storage tier as the daemon sees it: reads and writes always answer and never raise.

Owns the backend, wrapped in a measurement and a breaker, and opens it, repeatedly if need be. An
exception or a wrong answer of a third-party backend becomes a counted miss here. This module does
not know which blocks go where; backup and promotion decide that.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from tierd.backend import (
    Backend,
    BackendStats,
    BlockHeader,
    GetRequest,
    GetResult,
    Outcome,
    PutRequest,
)
from tierd.config import StorageConfig
from tierd.core.l2.space import Space
from tierd.core.l3.epochs import split_scope
from tierd.daemon.l3.epochs import TierEpochs, Times
from tierd.daemon.l3.read_scheduler import ReadLane
from tierd.errors import BackendError, ConfigError
from tierd.eviction.policy import Ghosts
from tierd.storage.breaker import BreakerBackend
from tierd.storage.measured import MeasuredBackend
from tierd.types import DIGEST_BYTES, BlockKey

log = logging.getLogger("tierd")

BATCH_BLOCKS_MAX: Final = 32
BATCH_BYTES_MAX: Final = 8 << 20
"""Maximum blocks and bytes of one call: enough for every I/O thread, and few enough to keep prefix
order. Where four calls share a link of 1 Gbit/s, a call takes 0.3 s."""

OPEN_S_MAX: Final = 2.0
"""Maximum time that opening the tiers delays serving; it then continues in the background."""

OPEN_CALL_S_MAX: Final = 30.0
"""Maximum duration of one attempt to open a tier, so that a hanging one is reported."""

LOG_EVERY_S: Final = 10.0
"""Minimum time between two log lines of a kind. A tier that fails too rarely for its breaker
would otherwise write one per call; failures that are not logged are still counted."""

DAMAGED_MAX: Final = 4096
"""Damaged blocks remembered, the latest ones; each costs about 200 bytes."""

UNREAD_MAX: Final = 3
"""Maximum unreadable places that a scan names."""

WHY_CHARS_MAX: Final = 400
COUNTERS_MAX: Final = 128
"""Limits on a tier's part of a status, so that all tiers fit one frame."""

_T = TypeVar("_T")


class TierState(enum.Enum):
    """State of a tier in one word."""

    OPENING = "opening"
    """The first attempt to open it has not ended yet."""
    UNAVAILABLE = "unavailable"
    """It could not be opened; tierd keeps trying."""
    FAILING = "failing"
    """It is open, but its breaker stops reads or writes, or the last ones failed."""
    INDEXING = "indexing"
    """It is open, but has not indexed all its blocks yet."""
    READY = "ready"


class StorageTier:
    """One entry of `[[storage]]`, around its raw backend."""

    def __init__(
        self,
        config: StorageConfig,
        raw: Backend,
        *,
        now_s: Callable[[], float] | None = None,
        times: Times | None = None,
    ) -> None:
        self.config = config
        self.name = config.name
        self.raw = raw
        self.counters: Counter[str] = Counter()
        self.reads = ReadLane(config.read_batches)
        self.damaged = Ghosts(DAMAGED_MAX)
        """Keys of blocks found damaged, and when, in seconds of the loop's clock."""
        self.tried = asyncio.Event()
        """Set when the first attempt to open the tier has ended, successful or not."""
        self._open = False
        self._why = ""
        """Why the tier could not be opened, from the first failure until it is open."""
        self._quiet_until_s: dict[str, float] = {}
        self._measured = MeasuredBackend(raw, now_s=now_s)
        self._backend = BreakerBackend(
            self._measured,
            name=config.name,
            deadline_s=config.deadline_ms / 1000,
            slow_s=config.slow_ms / 1000,
            probe_s=config.probe_ms / 1000,
        )
        self.epochs = TierEpochs(self._backend, config.name, times or Times.of_loop(config.name))

    def configure(self) -> None:
        """Apply a changed `config`. Calls in progress keep their deadline."""
        self._backend.configure(
            deadline_s=self.config.deadline_ms / 1000,
            slow_s=self.config.slow_ms / 1000,
            probe_s=self.config.probe_ms / 1000,
        )

    async def reload(self) -> None:
        """Have an open backend reread its settings outside the configuration.

        A backend that is not open reads them when it is opened.
        """
        if not self._open:
            return
        await self._guard("reload", self._reloaded(), [True])

    async def _reloaded(self) -> list[bool]:
        await self._backend.reload()
        return [True]

    # --- opening and closing --------------------------------------------------------

    async def keep_opening(self) -> None:
        """Try to open the backend until that succeeds; log each new reason for a failure.

        Raises ConfigError, without another attempt, if only a restart can help.
        """
        while not await self._try_open():
            await asyncio.sleep(self.config.probe_ms / 1000)

    async def _try_open(self) -> bool:
        try:
            async with asyncio.timeout(OPEN_CALL_S_MAX):
                await self._backend.open()
        except ConfigError as error:
            self._why = f"{error}; correct this and restart tierd"
            raise ConfigError(f"storage tier {self.name}: {error}") from error
        except BackendError as error:
            self._unavailable(str(error))
        except TimeoutError:
            self._unavailable(
                f"it did not open within {OPEN_CALL_S_MAX:g} s: does its server's name resolve, "
                "or its disk answer?"
            )
        except Exception:  # a third-party backend's bug costs its tier, not the daemon
            self.counters["open_bugs_total"] += 1
            log.exception("storage tier %s: open failed unexpectedly", self.name)
            self._unavailable("open failed because of a bug; the log has the traceback")
        else:
            if self._why:
                log.info("storage tier %s: open", self.name, extra={"tierd": {"tier": self.name}})
            self._open, self._why = True, ""
            await self._read_marks()
        finally:
            self.tried.set()
        return self._open

    async def _read_marks(self) -> None:
        """Read the marks now, so that the first request need not wait for it.

        After a failure the next use of the tier tries again.
        """
        self.epochs.forget()
        await self._guard("marks", self._scope_of_all(), [b""])

    async def _scope_of_all(self) -> list[bytes]:
        return [await self.epochs.scope(bytes(DIGEST_BYTES), lambda: True)]

    async def close(self) -> None:
        """Close the backend, open or not."""
        try:
            await self.epochs.close()
            await self._backend.close()
        except Exception as error:  # noqa: BLE001  # one tier's failure must not leave others open
            log.warning("storage tier %s: closing failed: %s", self.name, error)

    def _unavailable(self, why: str) -> None:
        self.counters["open_failed_total"] += 1
        if why != self._why:
            log.warning(
                "storage tier %s: unavailable: %s; tierd serves without it and tries again "
                "every %d ms (probe_ms)",
                self.name,
                why,
                self.config.probe_ms,
                extra={"tierd": {"tier": self.name}},
            )
        self._why = why

    @property
    def why(self) -> str:
        """Why it could not be opened, or why its reads or writes fail; empty if they do not."""
        return self._backend.why if self._open else self._why

    @property
    def is_open(self) -> bool:
        """Whether the backend has been opened."""
        return self._open

    # --- calls ----------------------------------------------------------------------

    @property
    def reads_allowed(self) -> bool:
        """Whether reads are tried; if not, each misses at once."""
        return self._open and self._backend.reads_allowed

    @property
    def writes_allowed(self) -> bool:
        """Whether writes are tried; if not, each is refused at once."""
        return self._open and self._backend.writes_allowed

    @property
    def read_bytes_per_s(self) -> float | None:
        """Speed at which blocks arrive, including waits; None before the first block."""
        return self._measured.read_bytes_per_s

    def doubt_read_speed(self) -> None:
        """Measure the speed again with the next blocks read."""
        self._measured.doubt_read_speed()

    @property
    def blocks(self) -> int:
        """Number of blocks in the tier, as far as is known."""
        return self._backend.stats().blocks if self._open else 0

    @property
    def capacity_bytes(self) -> int:
        """Capacity of the backend; 0 while it is not known."""
        return self._backend.stats().capacity_bytes if self._open else 0

    def blame_reads(self) -> None:
        """Report that a request's deadline passed while it waited for a read of this tier."""
        self._backend.blame_reads()

    async def contains(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        """Return for each hash whether the tier probably has the block."""
        failed = [False] * len(hashes)
        if not self._open:
            return failed
        return await self._guard("contains", self._contains(namespace, hashes), failed)

    async def knows(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool] | None:
        """Return the same as `contains`, but None if the tier takes no reads or fails."""
        if not self.reads_allowed:
            return None
        failed = [False] * len(hashes)
        answers = await self._guard("contains", self._contains(namespace, hashes), failed)
        return None if answers is failed else answers

    async def _contains(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        scope = await self.epochs.scope(namespace, lambda: self.reads_allowed)
        return await self._backend.contains_many(scope, hashes)

    async def use(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool] | None:
        """Tell the tier that requests use these blocks in host memory, so that it keeps them.

        Returns for each block whether the tier may still have it; None if the tier takes no reads
        or fails.
        """
        if not self.reads_allowed:
            return None
        failed = [True] * len(hashes)
        answers = await self._guard("use", self._use(namespace, hashes), failed)
        return None if answers is failed else answers

    async def _use(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        scope = await self.epochs.scope(namespace, lambda: self.reads_allowed)
        answers = await self._backend.use_many(scope, hashes)
        if self.epochs.now(namespace) != scope:
            raise BackendError("the namespace was flushed during the call")
        return answers

    async def get(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        """Read blocks into their slots. A HIT is checked to be the requested block."""
        failed = [GetResult(Outcome.ERROR)] * len(requests)
        if not self._open:
            return failed
        return await self._guard("get", self._get(namespace, requests), failed)

    async def _get(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        scope = await self.epochs.scope(namespace, lambda: self.reads_allowed)
        results = list(await self._backend.get_into(scope, requests))
        if len(results) != len(requests):
            return results
        for i, (request, result) in enumerate(zip(requests, results, strict=True)):
            header = result.header
            if result.outcome is Outcome.HIT and (
                header is None
                or header.key != BlockKey(scope, request.block_hash)
                or header.length != request.length
            ):
                # Not an assert: the backend may be third-party, and this would be a wrong byte.
                self.counters["wrong_answers_total"] += 1
                if self._may_log("another block"):
                    log.error("storage tier %s returned a block that was not requested", self.name)
                results[i] = GetResult(Outcome.ERROR)
            elif header is not None:
                key = BlockKey(namespace, request.block_hash)
                results[i] = GetResult(result.outcome, header._replace(key=key))
            elif result.outcome is Outcome.CORRUPT:
                now_s = int(asyncio.get_running_loop().time())
                self.damaged.put(namespace + request.block_hash, now_s)
        # A flush may have begun and ended during the call.
        if await self.epochs.scope(namespace, lambda: self.reads_allowed) != scope:
            raise BackendError("the namespace was flushed while its blocks were read")
        return results

    async def put(self, namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
        """Write blocks; return the outcome of each."""
        failed = [Outcome.ERROR] * len(requests)
        if not self._open:
            return failed
        return await self._guard("put", self._put(namespace, requests), failed)

    async def _put(self, namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
        scope = await self.epochs.scope(namespace, lambda: self.reads_allowed)
        if self.epochs.unheeded(namespace):
            # L2 has not seen the flush yet, so these blocks may be older than it.
            raise BackendError("the namespace was flushed before its blocks could be written")
        outcomes = await self._backend.put_many(scope, requests)
        if self.epochs.now(namespace) != scope:
            raise BackendError("the namespace was flushed while its blocks were written")
        return outcomes

    async def each(
        self,
        take: Callable[[BlockHeader], Awaitable[None]],
        finish: Callable[[], Awaitable[None]],
        take_stale: Callable[[BlockKey], Awaitable[None]] | None = None,
    ) -> str:
        """Call `take` with the header of each block in the tier, and then `finish`.

        Blocks that flushes have barred are left out; `take_stale` gets their keys, with scopes.
        Returns why the scan was incomplete, or an empty string. A BackendError of `take`,
        `take_stale` or `finish` ends the scan and is returned too.
        """
        if not self._open:
            return self._why or "it has not been opened yet"
        steps = self._backend.scan()
        unread: list[str] = []
        try:
            async for step in steps:
                await self.epochs.scope(bytes(DIGEST_BYTES), lambda: True)
                unread += step.unread[: UNREAD_MAX - len(unread)]
                for header in step.headers:
                    age = self.epochs.age(header.key.namespace)
                    if age == 0:
                        digest, _ = split_scope(header.key.namespace)
                        await take(header._replace(key=BlockKey(digest, header.key.block_hash)))
                    elif age > 0 and take_stale is not None:
                        await take_stale(header.key)
            await finish()
        except BackendError as error:
            return str(error)
        except Exception as error:
            self.counters["wrong_answers_total"] += 1
            log.exception("storage tier %s: a scan failed unexpectedly", self.name)
            return f"the scan failed unexpectedly: {type(error).__name__}"
        finally:
            if isinstance(steps, AsyncGenerator):
                await steps.aclose()
        return f"parts of it could not be read: {'; '.join(unread)}" if unread else ""

    async def delete(self, scope: bytes, hashes: Sequence[bytes]) -> int:
        """Delete blocks; return how many. Raises BackendError."""
        try:
            return await self._backend.delete_many(scope, hashes)
        except BackendError:
            raise
        except Exception as error:  # a backend's bug is reported, not an outage
            self.counters["wrong_answers_total"] += 1
            log.exception("storage tier %s: delete failed unexpectedly", self.name)
            raise BackendError(f"delete failed unexpectedly: {type(error).__name__}") from error

    async def _guard(self, what: str, call: Awaitable[list[_T]], failed: list[_T]) -> list[_T]:
        """Return a backend's answer, or `failed` if it raised or its length is wrong."""
        try:
            answer = await call
        except BackendError as error:
            if self._may_log(what):
                log.warning("storage tier %s: %s failed: %s", self.name, what, error)
            return failed
        except Exception:  # a backend's bug is a counted miss, not an outage
            self.counters["wrong_answers_total"] += 1
            if self._may_log(f"{what} unexpectedly"):
                log.exception("storage tier %s: %s failed unexpectedly", self.name, what)
            return failed
        if len(answer) != len(failed):
            self.counters["wrong_answers_total"] += 1
            if self._may_log(f"{what} answers"):
                log.error(
                    "storage tier %s: %s returned %d results for %d blocks",
                    self.name,
                    what,
                    len(answer),
                    len(failed),
                )
            return failed
        return list(answer)

    def _may_log(self, what: str) -> bool:
        """Whether a log line about `what` is due; if so, the next is due after LOG_EVERY_S."""
        now_s = asyncio.get_running_loop().time()
        due = now_s >= self._quiet_until_s.get(what, now_s)
        if due:
            self._quiet_until_s[what] = now_s + LOG_EVERY_S
        return due

    # --- status ---------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """Return the tier's part of STATUS; its size is bounded whatever the backend returns."""
        stats = self._backend.stats() if self._open else BackendStats()
        circuits = self._backend.status()
        for circuit in circuits.values():
            circuit["why"] = str(circuit["why"])[:WHY_CHARS_MAX]
        counters = Counter(self._backend.counters)
        counters.update(self.counters)
        return {
            "name": self.name,
            "type": self.config.type,
            "shared": self.raw.shared,
            "state": self.state.value,
            "why": self.why[:WHY_CHARS_MAX],
            "circuits": circuits,
            "blocks": stats.blocks,
            "used_bytes": stats.used_bytes,
            "capacity_bytes": stats.capacity_bytes,
            "latency": self._measured.latency(),
            "read_bytes_per_s": self._measured.read_bytes_per_s,
            "write_bytes_per_s": self._measured.write_bytes_per_s,
            "counters": dict(sorted(counters.items())[:COUNTERS_MAX]),
        }

    @property
    def state(self) -> TierState:
        """The tier's state in one word."""
        if not self._open:
            return TierState.UNAVAILABLE if self._why else TierState.OPENING
        if self._backend.failing:
            return TierState.FAILING
        indexed = self._backend.stats().index_complete
        return TierState.READY if indexed else TierState.INDEXING


def batch_blocks(space: Space) -> int:
    """Return the maximum number of blocks of `space` in one call."""
    return max(1, min(BATCH_BLOCKS_MAX, BATCH_BYTES_MAX // space.slot_bytes))


@asynccontextmanager
async def opened(tiers: Sequence[StorageTier]) -> AsyncIterator[None]:
    """Keep the tiers open, or being opened, until the context ends; then close them.

    Waits at most OPEN_S_MAX for the first attempt of each tier. Raises the ConfigError of a tier
    that cannot be opened with its configuration, after closing the others.
    """
    tasks = [asyncio.create_task(tier.keep_opening(), name=f"open-{tier.name}") for tier in tiers]
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_S_MAX):
                for tier in tiers:
                    await tier.tried.wait()
        for task in tasks:
            if task.done():
                task.result()
            task.add_done_callback(_log_failure)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # All at once: each tier that hangs takes all its time, and a stop has little.
        await asyncio.gather(*(tier.close() for tier in tiers))


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log a ConfigError that came after the daemon had started."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s; tierd serves without it until it is restarted", error)
