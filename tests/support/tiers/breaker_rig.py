"""A breaker on virtual time, around a scripted tier."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from tierd.backend import GetRequest, GetResult, Outcome, PutRequest, Scanned
from tierd.errors import BackendError
from tierd.storage.breaker import PROBE_NAMESPACE, BreakerBackend
from tierd.testing.backend import MemoryBackend
from tierd.testing.loop import SimulationLoop, run_simulation
from tierd.testing.suite import NAMESPACE, CanarySlots, make_chain
from tierd.types import PAGE_BYTES

DEADLINE_S, SLOW_S, PROBE_S = 2.0, 1.0, 5.0
CALL_S = 0.01

BLOCKS = make_chain("breaker", 8, 100)
HASHES = [block.key.block_hash for block in BLOCKS]
HIT, MISS, ERROR = Outcome.HIT, Outcome.MISS, Outcome.ERROR


@dataclass(frozen=True)
class Act:
    """The tier's behaviour until it is changed."""

    takes_s: float = CALL_S
    lingers_s: float = 0.0
    raises: Exception | None = None
    outcomes: Sequence[Outcome] = ()


OK = Act()
HUNG = Act(takes_s=1e6)
DOWN = Act(raises=BackendError("connection refused"))
SLOW = Act(takes_s=1.5)


@dataclass
class Puppet(MemoryBackend):
    """A scripted tier that records its calls."""

    reads: Act = OK
    writes: Act = OK
    probes: Act = OK
    asked: list[tuple[str, float]] = field(default_factory=list)
    in_flight: int = 0

    def __post_init__(self):
        super().__init__()
        self.began_s = asyncio.get_running_loop().time()

    async def _act(self, what: str, act: Act) -> None:
        loop = asyncio.get_running_loop()
        self.asked.append((what, round(loop.time() - self.began_s, 6)))
        self.in_flight += 1
        try:
            await asyncio.sleep(act.takes_s)
        except asyncio.CancelledError:
            if act.lingers_s:
                await asyncio.sleep(act.lingers_s)
            raise
        finally:
            self.in_flight -= 1
        if act.raises is not None:
            # A new exception each time: an exception keeps every traceback that it was raised with.
            raise type(act.raises)(*act.raises.args)

    def count(self, what: str) -> int:
        return [name for name, _ in self.asked].count(what)

    async def contains_many(self, namespace, hashes):
        if namespace == PROBE_NAMESPACE:
            assert len(hashes) == 1
            await self._act("probe", self.probes)
        else:
            await self._act("lookup", self.reads)
        return [True] * len(hashes)

    async def get_into(self, namespace, requests):
        act = self.reads
        await self._act("get", act)
        return [GetResult(outcome) for outcome in act.outcomes or [HIT] * len(requests)]

    async def put_many(self, namespace, requests):
        act = self.writes
        await self._act("put", act)
        return list(act.outcomes or [Outcome.STORED] * len(requests))

    async def delete_many(self, namespace, hashes):
        await self._act("delete", self.writes)
        return len(hashes)

    async def scan(self):
        for block in BLOCKS:
            await self._act("scan", self.reads)
            yield Scanned([block.header])


class Rig:
    """A breaker around a puppet."""

    def __init__(self, loop: SimulationLoop) -> None:
        self.loop = loop
        self.tier = Puppet()
        self.breaker = BreakerBackend(
            self.tier, name="nvme", deadline_s=DEADLINE_S, slow_s=SLOW_S, probe_s=PROBE_S
        )
        self.slots = CanarySlots(len(BLOCKS), PAGE_BYTES)

    @property
    def time(self) -> float:
        return round(self.loop.time() - self.tier.began_s, 6)

    def reads(self) -> str:
        state = self.breaker.status()["reads"]["state"]
        assert isinstance(state, str)
        return state

    def writes(self) -> str:
        state = self.breaker.status()["writes"]["state"]
        assert isinstance(state, str)
        return state

    async def get(self, count: int = 1) -> list[Outcome]:
        requests = [GetRequest(HASHES[i], self.slots.view(i), 100) for i in range(count)]
        return [result.outcome for result in await self.breaker.get_into(NAMESPACE, requests)]

    async def put(self, count: int = 1) -> list[Outcome]:
        requests = [
            PutRequest(block.key.block_hash, block.parent, block.checksum, self.slots.view(i), 100)
            for i, block in enumerate(BLOCKS[:count])
        ]
        return await self.breaker.put_many(NAMESPACE, requests)

    async def lookup(self, count: int = 1) -> list[bool]:
        return await self.breaker.contains_many(NAMESPACE, HASHES[:count])

    async def start(self, call: Coroutine[object, object, object]) -> asyncio.Task[object]:
        """Begin a call; returns when it has reached the tier or has ended."""
        asked = len(self.tier.asked)
        task = self.loop.create_task(call)
        while len(self.tier.asked) == asked and not task.done():
            await asyncio.sleep(0)
        return task

    async def fail(self, call: Callable[[], Awaitable[object]], times: int = 1) -> None:
        for _ in range(times):
            with pytest.raises(BackendError):
                await call()

    async def open_reads(self) -> None:
        """Open the read circuit with three failures; the tier then stays down."""
        self.tier.reads = self.tier.probes = DOWN
        await self.fail(self.get, 3)
        assert self.reads() == "open"

    async def half_open_reads(self) -> None:
        """The tier has recovered, and the probe has succeeded."""
        await self.open_reads()
        self.tier.reads = self.tier.probes = OK
        await asyncio.sleep(PROBE_S + 2 * CALL_S)
        assert self.reads() == "half_open"


def simulated(scenario: Callable[[Rig], Awaitable[None]]) -> Callable[[], None]:
    """Run a test on virtual time, with several orders of simultaneous events."""

    async def run(loop: SimulationLoop) -> None:
        rig = Rig(loop)
        await rig.breaker.open()
        try:
            await scenario(rig)
        finally:
            await rig.breaker.close()
        assert not rig.tier.in_flight
        assert asyncio.all_tasks() == {asyncio.current_task()}

    def test() -> None:
        for seed in range(4):
            run_simulation(seed, run)

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return test


@asynccontextmanager
async def rigged(loop: SimulationLoop):
    rig = Rig(loop)
    await rig.breaker.open()
    try:
        yield rig
    finally:
        await rig.breaker.close()
