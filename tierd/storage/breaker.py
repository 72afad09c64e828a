"""A deadline and a circuit breaker around a storage tier.

Every call is bounded. A tier that does not answer, is slow, or fails gets no more calls, so an
outage costs one deadline in all, not one per request. A probe finds out when the tier is back.
Reads and writes are judged separately: a full disk can still be read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Final, TypeVar

from tierd.backend import Backend, GetRequest, GetResult, Outcome, PutRequest, Scanned
from tierd.errors import BackendError
from tierd.storage.circuit import Circuit
from tierd.storage.wrapper import Wrapper
from tierd.types import HASH_BYTES, SCOPE_BYTES

PROBE_NAMESPACE: Final = bytes(SCOPE_BYTES)
"""A scope that no namespace has, so the probe looks up a block that cannot exist."""

_MISS: Final = GetResult(Outcome.MISS)

_T = TypeVar("_T")


class BreakerBackend(Wrapper):
    """Bounds every call by `deadline_s` and refuses calls that are unlikely to succeed.

    Reads (contains_many, use_many, get_into) and writes (put_many) have one circuit each; `Circuit`
    decides when it opens, stalls and closes. A refused call does not reach `inner`: it returns
    False, MISS or REFUSED at once, but use_many raises BackendError, because its False means that
    a block is gone. delete_many, scan, reload and the calls for marks are bounded, scan per step,
    but never refused: an operator started them and needs their result. Of these only marks() is
    judged, because every read may have to wait for it.

    A call that misses its deadline is cancelled, and raises BackendError once `inner` has
    released the views; the circuit opens at the deadline. All other exceptions, and
    cancellations, pass unchanged. open() and close() are not bounded.

    Counters: `breaker_refused_reads_total` and `breaker_refused_writes_total` count the
    blocks of refused calls, `breaker_read_deadlines_total` and `breaker_write_deadlines_total`
    calls that missed the deadline, `breaker_probes_total` and `breaker_probes_failed_total`
    probes.
    """

    def __init__(
        self, inner: Backend, *, name: str, deadline_s: float, slow_s: float, probe_s: float
    ) -> None:
        assert deadline_s > 0
        assert probe_s > 0
        super().__init__(inner)
        self._deadline_s = deadline_s
        self._probe_s = probe_s
        self._reads = Circuit(name, "reads", slow_s=slow_s)
        self._writes = Circuit(name, "writes", slow_s=slow_s)
        self._random = Random(f"probes of {name}")
        self._changed = asyncio.Event()
        self._prober: asyncio.Task[None] | None = None
        self.own_counters = {
            "breaker_refused_reads_total": 0,
            "breaker_refused_writes_total": 0,
            "breaker_read_deadlines_total": 0,
            "breaker_write_deadlines_total": 0,
            "breaker_probes_total": 0,
            "breaker_probes_failed_total": 0,
        }

    def configure(self, *, deadline_s: float, slow_s: float, probe_s: float) -> None:
        """Change the times for calls and pauses that begin from now on."""
        self._deadline_s, self._probe_s = deadline_s, probe_s
        self._reads.in_flight.slow_s = self._writes.in_flight.slow_s = slow_s

    @property
    def reads_allowed(self) -> bool:
        """Whether a read that begins now would reach the tier; changes no state."""
        return self._reads.allows(asyncio.get_running_loop().time())

    @property
    def writes_allowed(self) -> bool:
        """Whether a write that begins now would reach the tier; changes no state."""
        return self._writes.allows(asyncio.get_running_loop().time())

    @property
    def failing(self) -> bool:
        """Whether reads or writes are refused, or their last trial calls failed.

        A probe may succeed on a tier whose real calls all fail.
        """
        now_s = asyncio.get_running_loop().time()
        return self._reads.failing(now_s) or self._writes.failing(now_s)

    @property
    def why(self) -> str:
        """The last failure of the circuit that is failing; empty if neither is."""
        now_s = asyncio.get_running_loop().time()
        failing = [circuit for circuit in (self._writes, self._reads) if circuit.failing(now_s)]
        return next((circuit.why for circuit in failing if circuit.why), "")

    def blame_reads(self) -> None:
        """Report that a request's own, shorter deadline passed while it waited for reads.

        Call this before the request cancels its reads. No further reads begin until one of those
        in flight succeeds; if none does, a probe is sent at once and decides. Reads that have
        taken less time than reads usually take are not blamed.
        """
        self._reads.blame(asyncio.get_running_loop().time())

    def status(self) -> dict[str, dict[str, object]]:
        """Return state, reason, age in seconds and number of openings of both circuits."""
        now_s = asyncio.get_running_loop().time()
        return {"reads": self._reads.status(now_s), "writes": self._writes.status(now_s)}

    async def open(self) -> None:
        await self.inner.open()
        assert self._prober is None
        self._prober = asyncio.create_task(self._probe_loop(), name="breaker probe")

    async def close(self) -> None:
        prober, self._prober = self._prober, None
        if prober is not None:
            prober.cancel()
            await asyncio.wait([prober])
        await self.inner.close()

    async def contains_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        if not hashes:
            return []
        if not self.reads_allowed:
            self.own_counters["breaker_refused_reads_total"] += len(hashes)
            return [False] * len(hashes)
        return await self._judged(
            self._reads,
            "breaker_read_deadlines_total",
            self.inner.contains_many(namespace, hashes),
            _judge_lookup,
            lookup=True,
        )

    async def use_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        if not hashes:
            return []
        if not self.reads_allowed:
            raise BackendError("the tier's reads are stopped")
        return await self._judged(
            self._reads,
            "breaker_read_deadlines_total",
            self.inner.use_many(namespace, hashes),
            _judge_lookup,
            lookup=True,
        )

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        if not requests:
            return []
        if not self.reads_allowed:
            self.own_counters["breaker_refused_reads_total"] += len(requests)
            return [_MISS] * len(requests)
        return await self._judged(
            self._reads,
            "breaker_read_deadlines_total",
            self.inner.get_into(namespace, requests),
            _judge_results,
        )

    async def put_many(self, namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
        if not requests:
            return []
        if not self.writes_allowed:
            self.own_counters["breaker_refused_writes_total"] += len(requests)
            return [Outcome.REFUSED] * len(requests)
        return await self._judged(
            self._writes,
            "breaker_write_deadlines_total",
            self.inner.put_many(namespace, requests),
            _judge_outcomes,
        )

    async def delete_many(self, namespace: bytes, hashes: Sequence[bytes]) -> int:
        async with self._bounded():
            return await self.inner.delete_many(namespace, hashes)

    async def scan(self) -> AsyncIterator[Scanned]:
        steps = self.inner.scan()
        try:
            while True:
                async with self._bounded():
                    step = await anext(steps, None)
                if step is None:
                    return
                yield step
        finally:
            if isinstance(steps, AsyncGenerator):
                await steps.aclose()

    async def marks(self) -> list[str]:
        if not self.reads_allowed:
            async with self._bounded():
                return await self.inner.marks()
        return await self._judged(
            self._reads,
            "breaker_read_deadlines_total",
            self.inner.marks(),
            _judge_lookup,
            lookup=True,
        )

    async def add_mark(self, mark: str) -> None:
        async with self._bounded():
            await self.inner.add_mark(mark)

    async def drop_marks(self, marks: Sequence[str]) -> None:
        async with self._bounded():
            await self.inner.drop_marks(marks)

    async def reload(self) -> None:
        async with self._bounded():
            await self.inner.reload()

    async def _judged(
        self,
        circuit: Circuit,
        deadlines: str,
        work: Awaitable[_T],
        judge: Callable[[_T], str | None],
        *,
        lookup: bool = False,
    ) -> _T:
        """Await a call and report its result to the circuit; `judge` returns a failure or None."""
        loop = asyncio.get_running_loop()
        call = circuit.begin(loop.time(), lookup=lookup)

        def missed() -> None:
            self.own_counters[deadlines] += 1
            circuit.miss(loop.time(), self._no_answer)
            self._wake(circuit)

        try:
            async with self._bounded(missed):
                answer = await work
            failure = judge(answer)
            if failure is not None and (trouble := self.inner.stats().trouble):
                failure = f"{failure}: {trouble}"
        except Exception as error:
            circuit.end(call, loop.time(), _text(error))
            raise
        except BaseException:
            circuit.abandon(call, loop.time())
            raise
        else:
            circuit.end(call, loop.time(), failure)
            return answer
        finally:
            self._wake(circuit)

    def _wake(self, circuit: Circuit) -> None:
        """Wake the prober if the circuit may need a probe."""
        if circuit.is_open or circuit.in_doubt:
            self._changed.set()

    @asynccontextmanager
    async def _bounded(self, missed: Callable[[], None] | None = None) -> AsyncIterator[None]:
        """Cancel the body at the deadline and raise BackendError once it has ended.

        `missed` is called at the deadline, even if the body takes longer to end.
        """
        loop = asyncio.get_running_loop()

        def expire() -> None:
            if missed is not None:
                missed()
            scope.reschedule(loop.time())

        timer = loop.call_later(self._deadline_s, expire)
        try:
            async with asyncio.timeout(None) as scope:
                try:
                    yield
                finally:
                    timer.cancel()
        except TimeoutError:
            if not scope.expired():
                raise
            raise BackendError(self._no_answer) from None

    @property
    def _no_answer(self) -> str:
        return f"no answer within {self._deadline_s:g} s"

    async def _probe_loop(self) -> None:
        """Probe at once when a circuit is in doubt, and every `probe_s` while one is open."""
        loop = asyncio.get_running_loop()
        circuits = (self._reads, self._writes)
        due_s: float | None = None
        while True:
            now_s = loop.time()
            if any(circuit.in_doubt for circuit in circuits):
                due_s = now_s
            elif not any(circuit.is_open for circuit in circuits):
                due_s = None
            elif due_s is None:
                due_s = now_s + self._probe_s
            if due_s is not None and due_s <= now_s:
                due_s = None
                await self._probe(circuits)
                continue
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await self._changed.wait()

    async def _probe(self, circuits: Sequence[Circuit]) -> None:
        self.own_counters["breaker_probes_total"] += 1
        # A new hash for each probe, so that no cache can have the answer.
        unknown = self._random.randbytes(HASH_BYTES)
        failure = None
        try:
            async with self._bounded():
                await self.inner.contains_many(PROBE_NAMESPACE, [unknown])
        except Exception as error:  # noqa: BLE001  # a backend's bug is a failed probe, no more
            self.own_counters["breaker_probes_failed_total"] += 1
            failure = _text(error)
        now_s = asyncio.get_running_loop().time()
        for circuit in circuits:
            circuit.probed(now_s, failure)


def _judge_lookup(answers: Sequence[bool] | Sequence[str]) -> str | None:
    """Return None: a lookup that was answered is no failure, whatever the answer."""
    return None


def _judge_results(results: Sequence[GetResult]) -> str | None:
    return _judge_outcomes([result.outcome for result in results])


def _judge_outcomes(outcomes: Sequence[Outcome]) -> str | None:
    """Return the failure if at least half of the blocks failed, else None."""
    errors = outcomes.count(Outcome.ERROR)
    return f"{errors} of {len(outcomes)} blocks failed" if 2 * errors >= len(outcomes) else None


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, BackendError) else f"{type(error).__name__}: {error}"
