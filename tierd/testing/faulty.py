"""What goes wrong with storage tiers: the faults, how they are drawn, and a tier that has them.

`FaultyBackend` puts around any backend what can be done to it from outside. It never
breaks the contract itself: a cancelled call has let go of its views when it ends.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Final

from tierd.backend import (
    Backend,
    GetRequest,
    GetResult,
    Outcome,
    PutRequest,
    Scanned,
    checksum,
)
from tierd.errors import BackendError
from tierd.storage.wrapper import Wrapper


class InjectedFault(enum.Enum):
    """What may go wrong; the counter `fault_NAME_total` says how often it did."""

    HANG = "hang"
    """A call never ends; only cancelling it does."""
    FAIL_CALL = "fail_call"
    """A call raises BackendError, before it did anything or after it did everything."""
    LINGER = "linger"
    """A cancelled call takes its time to end, and uses its views until then."""
    FAIL_BLOCK = "fail_block"
    """A block's outcome is ERROR, and nothing was done for it."""
    TORN_READ = "torn_read"
    """A block's outcome is ERROR, after noise was written into its view."""
    VANISH = "vanish"
    """A block is gone when it is read, as if another process had deleted it."""
    FLIP_PAYLOAD = "flip_payload"
    """A bit of the stored payload has changed when the block is read."""
    FLIP_HEADER = "flip_header"
    """A bit of the stored header has changed when the block is read."""
    SWAP = "swap"
    """The block and another one lie under each other's keys when it is read."""
    TRUNCATE = "truncate"
    """The stored payload has lost its end when the block is read."""
    LOSE_WRITE = "lose_write"
    """A block is reported as STORED and is not there: a disk that lies about its cache."""


DAMAGE: Final = frozenset(
    {
        InjectedFault.FLIP_PAYLOAD,
        InjectedFault.FLIP_HEADER,
        InjectedFault.SWAP,
        InjectedFault.TRUNCATE,
    }
)
"""What happens to stored bytes, which nobody but the storage itself can do."""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """How often each fault strikes: its chance, 0 to 1, per call or per block.

    `latency_s` is the mean of an exponential delay, which a call has at its beginning and
    at other points that its backend names; with 0 no call ever waits, so that it cannot be
    raced or cancelled.
    """

    chances: Mapping[InjectedFault, float] = field(default_factory=dict)
    latency_s: float = 0.0


NO_FAULTS = FaultPlan()


class Faults:
    """Draws what strikes by `plan`, which may be replaced at any time, and counts it in
    `counters`, which it fills with its names."""

    def __init__(self, counters: dict[str, int], plan: FaultPlan, random: Random) -> None:
        self.plan = plan
        self.random = random
        self._counters = counters
        counters |= {f"fault_{fault.value}_total": 0 for fault in InjectedFault}
        counters["torn_writes_total"] = 0
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def strikes(self, fault: InjectedFault) -> bool:
        """Whether a fault happens now; counts it if so."""
        chance = self.plan.chances.get(fault, 0.0)
        # No draw for what cannot happen: adding a kind of fault keeps old seeds.
        if not chance or self.random.random() >= chance:
            return False
        self._counters[f"fault_{fault.value}_total"] += 1
        return True

    async def delay(self) -> None:
        """Take a drawn time, or none at all if the plan has no latency."""
        if self.plan.latency_s:
            await asyncio.sleep(self.random.expovariate(1 / self.plan.latency_s))

    def scribble(self, view: memoryview) -> None:
        """Overwrite some beginning of a view with noise."""
        size = self.random.randint(1, len(view))
        view[:size] = self.random.randbytes(size)

    def check_payload(self, request: PutRequest, payload: bytes) -> None:
        """Count bytes to store that no longer have their checksum."""
        if checksum(payload) != request.checksum:
            self._counters["torn_writes_total"] += 1

    @asynccontextmanager
    async def call(
        self, *, gets: Sequence[GetRequest] = (), puts: Sequence[PutRequest] = ()
    ) -> AsyncIterator[None]:
        """Around each call: what strikes it as a whole, and what `ended` waits for."""
        self._in_flight += 1
        self._idle.clear()
        try:
            await self.delay()
            if self.strikes(InjectedFault.HANG):
                await asyncio.get_running_loop().create_future()
            fails = self.strikes(InjectedFault.FAIL_CALL)
            if fails and self.random.random() < 0.5:
                raise BackendError("simulated: the tier failed at once")
            yield
            if fails:
                raise BackendError("simulated: the tier failed at the end")
        except asyncio.CancelledError:
            if self.strikes(InjectedFault.LINGER):
                await self.delay()
                for request in gets:
                    self.scribble(request.view)
                for put in puts:
                    self.check_payload(put, bytes(put.view[: put.length]))
            raise
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def ended(self) -> None:
        """Return when no call is in flight."""
        await self._idle.wait()


class FaultyBackend(Wrapper):
    """A real backend on bad days, drawn from a seed: every fault but DAMAGE.

    `plan` may be replaced at any time, as when a dead server comes back. Calls are delayed
    by its latency before `inner` is asked and before its answer is given; a plan without
    chances is a slow tier. The counter `torn_writes_total` counts blocks of cancelled puts
    whose slots were reused too early.
    """

    def __init__(self, inner: Backend, plan: FaultPlan = NO_FAULTS, seed: int = 0) -> None:
        super().__init__(inner)
        self._faults = Faults(self.own_counters, NO_FAULTS, Random(f"faulty backend {seed}"))
        self.plan = plan

    @property
    def plan(self) -> FaultPlan:
        """What goes wrong from now on."""
        return self._faults.plan

    @plan.setter
    def plan(self, plan: FaultPlan) -> None:
        assert not DAMAGE & plan.chances.keys(), "stored bytes cannot be damaged from outside"
        self._faults.plan = plan

    async def close(self) -> None:
        await self._faults.ended()
        await self.inner.close()

    async def contains_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        async with self._faults.call():
            answers = await self.inner.contains_many(namespace, hashes)
            await self._faults.delay()
            return answers

    async def use_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        async with self._faults.call():
            answers = await self.inner.use_many(namespace, hashes)
            await self._faults.delay()
            return answers

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        faults = self._faults
        async with faults.call(gets=requests):
            results = [GetResult(Outcome.ERROR)] * len(requests)
            asked = []
            for i, request in enumerate(requests):
                if faults.strikes(InjectedFault.FAIL_BLOCK):
                    continue
                if faults.strikes(InjectedFault.TORN_READ):
                    faults.scribble(request.view)
                    continue
                if faults.strikes(InjectedFault.VANISH):
                    await self.inner.delete_many(namespace, [request.block_hash])
                asked.append(i)
            answers = await self.inner.get_into(namespace, [requests[i] for i in asked])
            for i, answer in zip(asked, answers, strict=True):
                results[i] = answer
            await faults.delay()
            return results

    async def put_many(self, namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
        faults = self._faults
        async with faults.call(puts=requests):
            outcomes = [Outcome.ERROR] * len(requests)
            asked = []
            for i in range(len(requests)):
                if faults.strikes(InjectedFault.FAIL_BLOCK):
                    continue
                if faults.strikes(InjectedFault.LOSE_WRITE):
                    outcomes[i] = Outcome.STORED
                    continue
                asked.append(i)
            answers = await self.inner.put_many(namespace, [requests[i] for i in asked])
            for i, answer in zip(asked, answers, strict=True):
                outcomes[i] = answer
            await faults.delay()
            return outcomes

    async def delete_many(self, namespace: bytes, hashes: Sequence[bytes]) -> int:
        async with self._faults.call():
            dropped = await self.inner.delete_many(namespace, hashes)
            await self._faults.delay()
            return dropped

    async def scan(self) -> AsyncIterator[Scanned]:
        async for step in self.inner.scan():
            await self._faults.delay()
            yield step

    async def marks(self) -> list[str]:
        async with self._faults.call():
            return await self.inner.marks()

    async def add_mark(self, mark: str) -> None:
        async with self._faults.call():
            await self.inner.add_mark(mark)

    async def drop_marks(self, marks: Sequence[str]) -> None:
        async with self._faults.call():
            await self.inner.drop_marks(marks)
