"""Injected faults of storage tiers: their kinds, how they are drawn, and a wrapper with them.

`FaultyBackend` wraps any backend and injects the faults that are possible from outside. It never
breaks the contract itself: a cancelled call no longer uses its views when it ends.
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
    """A kind of fault; the counter `fault_NAME_total` counts how often it struck."""

    HANG = "hang"
    """A call does not end until it is cancelled."""
    FAIL_CALL = "fail_call"
    """A call raises BackendError, either before it did anything or after it did everything."""
    LINGER = "linger"
    """A cancelled call ends late, and uses its views until then."""
    FAIL_BLOCK = "fail_block"
    """A block's outcome is ERROR, and the storage was not touched for it."""
    TORN_READ = "torn_read"
    """A block's outcome is ERROR, after random bytes were written into its view."""
    VANISH = "vanish"
    """A block is gone when it is read, as if another process had deleted it."""
    FLIP_PAYLOAD = "flip_payload"
    """A bit of the stored payload has flipped when the block is read."""
    FLIP_HEADER = "flip_header"
    """A bit of the stored header has flipped when the block is read."""
    SWAP = "swap"
    """The block has been swapped with another one when it is read."""
    TRUNCATE = "truncate"
    """The stored payload has lost its end when the block is read."""
    LOSE_WRITE = "lose_write"
    """A block is reported as STORED but is lost, as on a disk that loses its write cache."""


DAMAGE: Final = frozenset(
    {
        InjectedFault.FLIP_PAYLOAD,
        InjectedFault.FLIP_HEADER,
        InjectedFault.SWAP,
        InjectedFault.TRUNCATE,
    }
)
"""Faults that change stored bytes; a wrapper cannot inject them."""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The chance of each fault, 0 to 1, per call or per block.

    `latency_s` is the mean of an exponential delay at the start of each call and at further
    points, which the backend defines. With 0 no call ever waits, so calls cannot overlap or be
    cancelled midway.
    """

    chances: Mapping[InjectedFault, float] = field(default_factory=dict)
    latency_s: float = 0.0


NO_FAULTS = FaultPlan()


class Faults:
    """Draws faults by `plan` and counts them in `counters`, to which it adds its names.

    `plan` may be replaced at any time.
    """

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
        """Draw whether a fault strikes now, and count it if so."""
        chance = self.plan.chances.get(fault, 0.0)
        # A fault without a chance draws nothing: old seeds survive a new kind of fault.
        if not chance or self.random.random() >= chance:
            return False
        self._counters[f"fault_{fault.value}_total"] += 1
        return True

    async def delay(self) -> None:
        """Sleep for a drawn time; return at once if the plan has no latency."""
        if self.plan.latency_s:
            await asyncio.sleep(self.random.expovariate(1 / self.plan.latency_s))

    def scribble(self, view: memoryview) -> None:
        """Overwrite the beginning of a view, of random length, with random bytes."""
        size = self.random.randint(1, len(view))
        view[:size] = self.random.randbytes(size)

    def check_payload(self, request: PutRequest, payload: bytes) -> None:
        """Count a payload that does not match its request's checksum."""
        if checksum(payload) != request.checksum:
            self._counters["torn_writes_total"] += 1

    @asynccontextmanager
    async def call(
        self, *, gets: Sequence[GetRequest] = (), puts: Sequence[PutRequest] = ()
    ) -> AsyncIterator[None]:
        """Inject the faults of a whole call around the body, and count the call as in flight."""
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
        """Wait until no call is in flight."""
        await self._idle.wait()


class FaultyBackend(Wrapper):
    """Wraps a real backend and injects every fault except DAMAGE, drawn from a seed.

    `plan` may be replaced at any time, for instance to let a failed server recover. Its latency
    delays each call before `inner` is called and again before the result is returned; a plan
    with latency only is a slow tier. The counter `torn_writes_total` counts blocks of cancelled
    puts whose slots were reused too early.
    """

    def __init__(self, inner: Backend, plan: FaultPlan = NO_FAULTS, seed: int = 0) -> None:
        super().__init__(inner)
        self._faults = Faults(self.own_counters, NO_FAULTS, Random(f"faulty backend {seed}"))
        self.plan = plan

    @property
    def plan(self) -> FaultPlan:
        """The faults to inject from now on."""
        return self._faults.plan

    @plan.setter
    def plan(self, plan: FaultPlan) -> None:
        damage = DAMAGE & plan.chances.keys()
        assert not damage, f"a wrapper cannot damage stored bytes: remove {damage} from the plan"
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
