"""Faults that tests inject: in a memory tier, and in a wrapper around any tier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from tierd.backend import GetRequest, GetResult, Outcome
from tierd.errors import BackendError
from tierd.testing.backend import MemoryBackend
from tierd.testing.faulty import NO_FAULTS, FaultPlan, FaultyBackend, InjectedFault
from tierd.testing.loop import SimulationDeadlock, SimulationLoop, run_simulation
from tierd.testing.suite import NAMESPACE, CanarySlots, contains, get, make_chain, put
from tierd.types import PAGE_BYTES

BLOCK_BYTES = 5_000
SLOT_BYTES = 2 * PAGE_BYTES
CHAIN = make_chain("faulty", 10, BLOCK_BYTES)

FailingTier = MemoryBackend | FaultyBackend
Faulty = Callable[..., AbstractAsyncContextManager[FailingTier]]


@pytest.fixture(params=["memory", "wrapper"])
def faulty(request: pytest.FixtureRequest) -> Faulty:
    """Makes a tier that holds CHAIN and fails from now on as its plan says."""

    @asynccontextmanager
    async def made(plan: FaultPlan, seed: int = 0) -> AsyncIterator[FailingTier]:
        backend: FailingTier = MemoryBackend(seed=seed)
        if request.param == "wrapper":
            backend = FaultyBackend(backend, seed=seed)
        await backend.open()
        assert await put(backend, CHAIN) == [Outcome.STORED] * len(CHAIN)
        backend.plan = plan
        yield backend
        await backend.close()

    return made


async def test_torn_read_leaves_noise_and_returns_error(faulty: Faulty) -> None:
    """A caller that publishes a slot before the outcome would never be caught."""
    slots = CanarySlots(1, SLOT_BYTES)
    request = GetRequest(CHAIN[0].key.block_hash, slots.view(0), BLOCK_BYTES)
    async with faulty(FaultPlan({InjectedFault.TORN_READ: 1.0})) as backend:
        assert await backend.get_into(NAMESPACE, [request]) == [GetResult(Outcome.ERROR)]
    assert slots.view(0)[:8] != CHAIN[0].payload[:8]
    assert not slots.is_blank(0)
    slots.check()


async def test_failed_blocks_leave_their_neighbours(faulty: Faulty) -> None:
    """One block's outcome would be reported for another, or count as a failure of the tier."""
    outcomes: list[Outcome] = []
    for seed in range(5):
        async with faulty(FaultPlan({InjectedFault.FAIL_BLOCK: 0.5}), seed) as backend:
            # get() checks every HIT against its own block.
            read = await get(backend, CHAIN)
            assert read.count(Outcome.ERROR) == backend.counters["fault_fail_block_total"]
            outcomes += read
            more = make_chain(f"more {seed}", 10, BLOCK_BYTES)
            stored = await put(backend, more)
            backend.plan = NO_FAULTS
            assert await contains(backend, more) == [o is Outcome.STORED for o in stored]
    assert set(outcomes) == {Outcome.HIT, Outcome.ERROR}


async def test_vanished_block_is_present_and_then_a_miss(faulty: Faulty) -> None:
    """A block may be evicted between a lookup and its read: tests must be able to cause that."""
    async with faulty(FaultPlan({InjectedFault.VANISH: 1.0})) as backend:
        assert await contains(backend, CHAIN) == [True] * len(CHAIN)
        assert await get(backend, CHAIN[:3]) == [Outcome.MISS] * 3
        assert await contains(backend, CHAIN[:4]) == [False] * 3 + [True]
        assert backend.stats().blocks == len(CHAIN) - 3


async def test_lost_writes_are_reported_as_stored(faulty: Faulty) -> None:
    """Tests could not simulate a disk that lies about its cache."""
    more = make_chain("lost", 3, BLOCK_BYTES)
    async with faulty(FaultPlan({InjectedFault.LOSE_WRITE: 1.0})) as backend:
        assert await put(backend, more) == [Outcome.STORED] * 3
        assert await contains(backend, more) == [False] * 3


async def test_failed_call_may_have_done_its_work(faulty: Faulty) -> None:
    """A retry after a failure must cope with blocks that the failed call stored."""
    held: set[bool] = set()
    more = make_chain("failed", 1, BLOCK_BYTES)
    for seed in range(20):
        async with faulty(FaultPlan({InjectedFault.FAIL_CALL: 1.0}), seed) as backend:
            with pytest.raises(BackendError, match="simulated"):
                await put(backend, more)
            backend.plan = NO_FAULTS
            held |= set(await contains(backend, more))
    assert held == {True, False}


def test_hung_call_ends_only_by_cancellation(faulty: Faulty) -> None:
    """Only chance would find a caller without a deadline; the simulation reports a deadlock."""
    plan = FaultPlan({InjectedFault.HANG: 1.0})

    async def without_deadline(loop: SimulationLoop) -> None:
        async with faulty(plan) as backend:
            await get(backend, CHAIN)

    with pytest.raises(SimulationDeadlock):
        run_simulation(0, without_deadline)

    async def with_deadline(loop: SimulationLoop) -> None:
        async with faulty(plan) as backend:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(get(backend, CHAIN), 5)

    run_simulation(0, with_deadline)
