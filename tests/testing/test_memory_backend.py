"""The faulty backend: sound without faults, and never worse than the contract allows with them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.support.tiers.memory_tier import MemorySuite
from tierd.backend import (
    HEADER_BYTES,
    Backend,
    GetRequest,
    Outcome,
    PutRequest,
)
from tierd.errors import BackendError, ConfigError
from tierd.testing.backend import (
    NO_FAULTS,
    FaultPlan,
    InjectedFault,
    MemoryBackend,
    MemoryOptions,
    StoredBlock,
)
from tierd.testing.loop import SimulationLoop, run_simulation
from tierd.testing.suite import (
    NAMESPACE,
    ROOT,
    CanarySlots,
    SelfNamingBlock,
    check_result,
    contains,
    get,
    make_block,
    make_chain,
    put,
    scanned,
)
from tierd.types import PAGE_BYTES

BLOCK_BYTES = 5_000
SLOT_BYTES = 2 * PAGE_BYTES


class TestMemory(MemorySuite):
    """Without faults it is sound."""


class SlowMemory(TestMemory, abstract=True):
    """Run in simulation: with waits to race and cancel in, and calls that end late."""

    __test__ = False
    plan = FaultPlan({InjectedFault.LINGER: 0.5}, latency_s=0.0001)


RACES = [
    SlowMemory.test_put_at_once,
    SlowMemory.test_delete_while_putting,
    SlowMemory.test_cancelled_by_the_first_of_two,
    partial(SlowMemory.test_concurrency, seed=1),
    partial(SlowMemory.test_cancelled_get, seed=1),
    partial(SlowMemory.test_cancelled_put, seed=1),
]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("race", RACES)
def test_conforms_in_simulation(
    seed: int, race: Callable[[SlowMemory, Backend], Awaitable[None]]
) -> None:
    """Without waits inside its calls the simulated tier would pass the suite and hide races."""

    async def scenario(loop: SimulationLoop) -> None:
        backend = MemoryBackend(plan=SlowMemory.plan, seed=seed)
        await backend.open()
        await race(SlowMemory(), backend)
        await backend.close()
        assert backend.counters["torn_writes_total"] == 0

    run_simulation(seed, scenario)


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        SlowMemory.test_capacity,
        SlowMemory.test_prefix_stays_whole,
        SlowMemory.test_chain_longer_than_the_tier,
    ],
)
def test_keeps_its_bounds_in_simulation(
    tmp_path: Path, check: Callable[[SlowMemory, Path], Awaitable[None]]
) -> None:
    """Eviction between the two halves of a slow call would tear prefixes."""
    run_simulation(1, lambda loop: check(SlowMemory(), tmp_path))


def test_close_waits_for_calls_in_flight() -> None:
    """Closing would free memory that calls in flight still use."""

    async def suite(loop: SimulationLoop) -> None:
        backend = MemoryBackend(plan=SlowMemory.plan)
        await backend.open()
        await SlowMemory().test_close_in_flight(backend)

    run_simulation(1, suite, shuffle=False)

    async def scenario(loop: SimulationLoop) -> None:
        [block] = chain_of(1)
        slots = CanarySlots(1, SLOT_BYTES)
        async with faulty(FaultPlan(latency_s=1.0), [block]) as backend:
            request = GetRequest(block.key.block_hash, slots.view(0), BLOCK_BYTES)
            call = asyncio.create_task(backend.get_into(NAMESPACE, [request]))
            await asyncio.sleep(0.001)
            await backend.close()
            assert slots.view(0)[:BLOCK_BYTES] == block.payload
            assert [result.outcome for result in await call] == [Outcome.HIT]

    run_simulation(1, scenario)


async def test_truncated_block_is_corrupt_even_if_the_slot_has_its_end() -> None:
    """Detection of damage would depend on the slot's previous content."""
    [block] = chain_of(1)
    async with faulty(NO_FAULTS, [block]) as backend:
        header, payload = backend.blocks[block.key]
        backend.blocks[block.key] = StoredBlock(header, payload[:-1])
        slots = CanarySlots(1, SLOT_BYTES)
        slots.view(0)[:BLOCK_BYTES] = block.payload
        request = GetRequest(block.key.block_hash, slots.view(0), BLOCK_BYTES)
        [result] = await backend.get_into(NAMESPACE, [request])
        assert result.outcome is Outcome.CORRUPT


async def test_blocks_swapped_while_closed_are_not_admitted() -> None:
    """Two blocks would be each other's parents: eviction and scan would work on a false chain."""
    chain = chain_of(3)
    async with faulty(NO_FAULTS, chain) as backend:
        blocks = backend.blocks
        first, second = chain[0].key, chain[1].key
        blocks[first], blocks[second] = blocks[second], blocks[first]
        assert await scanned(backend) == [chain[2].header]
    again = MemoryBackend(blocks=blocks)
    await again.open()
    assert again.stats().blocks == 1
    assert await contains(again, chain) == [False, False, True]
    await again.close()


async def test_used_blocks_are_evicted_last() -> None:
    """The simulated tier would lose other blocks than a real one."""
    blocks = [make_block(f"use {number}", ROOT, BLOCK_BYTES) for number in range(5)]
    backend = MemoryBackend(3 * (BLOCK_BYTES + HEADER_BYTES))
    await backend.open()
    await put(backend, blocks[:3])
    assert await get(backend, blocks[:1]) == [Outcome.HIT]
    assert await put(backend, blocks[1:2]) == [Outcome.PRESENT]
    await put(backend, blocks[3:4])
    assert await contains(backend, blocks) == [True, True, False, True, False]
    await put(backend, blocks[4:])
    assert await contains(backend, blocks) == [False, True, False, True, True]
    assert backend.counters["evicted_blocks_total"] == 2
    await backend.close()


async def test_children_of_a_refused_parent_are_refused() -> None:
    """A prefix would be stored with a hole, so that no request can use its end."""
    parent = make_block("large", ROOT, 4 * BLOCK_BYTES)
    child = make_block("small", parent.key.block_hash, BLOCK_BYTES)
    backend = MemoryBackend(3 * BLOCK_BYTES)
    await backend.open()
    assert await put(backend, [parent, child]) == [Outcome.REFUSED] * 2
    await backend.close()


@asynccontextmanager
async def faulty(
    plan: FaultPlan, chain: list[SelfNamingBlock], seed: int = 0
) -> AsyncIterator[MemoryBackend]:
    """A backend that holds `chain` and from now on fails by `plan`."""
    backend = MemoryBackend(seed=seed)
    await backend.open()
    assert await put(backend, chain) == [Outcome.STORED] * len(chain)
    backend.plan = plan
    yield backend
    await backend.close()


def chain_of(count: int) -> list[SelfNamingBlock]:
    return make_chain("faulty", count, BLOCK_BYTES)


DAMAGE = [
    InjectedFault.FLIP_PAYLOAD,
    InjectedFault.FLIP_HEADER,
    InjectedFault.SWAP,
    InjectedFault.TRUNCATE,
]


@pytest.mark.parametrize("fault", DAMAGE)
async def test_damage_is_found_and_dropped(fault: InjectedFault) -> None:
    """The simulated tier would return wrong bytes itself, or its damage would have no effect."""
    chain = chain_of(4)
    async with faulty(FaultPlan({fault: 1.0}), chain) as backend:
        outcomes = await get(backend, chain[:1])
        assert outcomes == [Outcome.CORRUPT]
        assert backend.counters[f"fault_{fault.value}_total"] == 1
        assert backend.counters["corrupt_total"] == 1
        backend.plan = NO_FAULTS
        assert await get(backend, chain[:1]) == [Outcome.MISS]
        rest = await get(backend, chain[1:])
        swapped = 1 if fault is InjectedFault.SWAP else 0
        assert rest.count(Outcome.CORRUPT) == swapped
        assert rest.count(Outcome.HIT) == 3 - swapped


def test_cancelled_read_may_write_until_it_returns() -> None:
    """A caller that reuses a slot on cancelling, not at the end of the call, would pass."""

    async def scenario(loop: SimulationLoop) -> bool:
        slots = CanarySlots(1, SLOT_BYTES)
        plan = FaultPlan({InjectedFault.HANG: 1.0, InjectedFault.LINGER: 1.0}, latency_s=0.01)
        async with faulty(plan, chain_of(1)) as backend:
            request = GetRequest(chain_of(1)[0].key.block_hash, slots.view(0), BLOCK_BYTES)
            call = asyncio.create_task(backend.get_into(NAMESPACE, [request]))
            await asyncio.sleep(1)
            call.cancel()
            await asyncio.sleep(1e-6)
            assert not call.done()
            slots.blank(0)
            await asyncio.wait([call])
            late = not slots.is_blank(0)
            slots.blank(0)
            await asyncio.sleep(1)
            assert slots.is_blank(0)
            slots.check()
            return late

    assert run_simulation(0, scenario)


@pytest.mark.parametrize("wait_s", [0.004, 0.5])
def test_slot_reused_during_a_write_is_counted(wait_s: float) -> None:
    """A backup from a slot that was already reused would only show after a restart."""

    async def scenario(loop: SimulationLoop) -> tuple[int, list[Outcome]]:
        [block] = chain_of(1)
        slots = CanarySlots(1, SLOT_BYTES)
        slots.view(0)[:BLOCK_BYTES] = block.payload
        backend = MemoryBackend(plan=FaultPlan(latency_s=0.02), seed=1)
        await backend.open()
        request = PutRequest(
            block.key.block_hash, block.parent, block.checksum, slots.view(0), BLOCK_BYTES
        )
        call = asyncio.create_task(backend.put_many(NAMESPACE, [request]))
        await asyncio.sleep(wait_s)
        slots.blank(0)
        assert await call == [Outcome.STORED]
        return backend.counters["torn_writes_total"], await get(backend, [block])

    torn = wait_s < 0.1
    expected = (1, [Outcome.CORRUPT]) if torn else (0, [Outcome.HIT])
    assert run_simulation(0, scenario) == expected


async def mayhem(loop: SimulationLoop) -> tuple[dict[str, int], int]:
    """Callers that read, write, delete and give up on a tier with every fault at once."""
    chances = dict.fromkeys(InjectedFault, 0.05)
    backend = MemoryBackend(
        30 * (BLOCK_BYTES + HEADER_BYTES),
        plan=FaultPlan(chances, latency_s=0.001),
        seed=loop.random.randrange(1 << 30),
    )
    await backend.open()
    chains = [make_chain(f"chain {number}", 8, BLOCK_BYTES) for number in range(8)]

    async def caller() -> None:
        slots = CanarySlots(8, SLOT_BYTES)
        for _ in range(20):
            chain = loop.random.choice(chains)[: loop.random.randint(1, 8)]
            match loop.random.randrange(5):
                case 0:
                    call: Awaitable[object] = put(backend, chain)
                case 1:
                    hashes = [block.key.block_hash for block in chain]
                    call = backend.delete_many(NAMESPACE, hashes[-1:])
                case _:
                    call = read(slots, chain)
            try:
                await asyncio.wait_for(call, loop.random.choice((0.005, 0.2)))
            except (BackendError, TimeoutError):
                # No call writes into a slot after its end.
                for slot in range(8):
                    slots.blank(slot)
                await asyncio.sleep(0.1)
                assert all(slots.is_blank(slot) for slot in range(8))

    async def read(slots: CanarySlots, chain: list[SelfNamingBlock]) -> None:
        requests = [
            GetRequest(block.key.block_hash, slots.view(position), BLOCK_BYTES)
            for position, block in enumerate(chain)
        ]
        results = await backend.get_into(NAMESPACE, requests)
        for position, block in enumerate(chain):
            check_result(block, results[position], slots.view(position))
        slots.check()

    async with asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(caller())
    await backend.close()
    stats = backend.stats()
    assert stats.used_bytes <= stats.capacity_bytes
    assert stats.blocks == len(backend.blocks)
    assert backend.counters["torn_writes_total"] == 0
    return backend.counters, loop.now_ns


@pytest.mark.slow
def test_random_faults_repeat_and_leave_blocks_intact() -> None:
    """Wrong bytes caused by the simulated tier itself would look like a bug of the daemon."""
    struck = Counter[str]()
    for seed in range(10):
        counters, _ = run_simulation(seed, mayhem)
        struck.update(counters)
    assert all(struck[f"fault_{fault.value}_total"] for fault in InjectedFault)
    assert run_simulation(3, mayhem) == run_simulation(3, mayhem)


async def test_closed_tier_refuses_calls() -> None:
    """A call after the close would reopen a dead tier."""
    backend = MemoryBackend()
    with pytest.raises(BackendError, match="not open"):
        await get(backend, chain_of(1))
    await backend.open()
    await backend.close()
    with pytest.raises(BackendError, match="not open"):
        await put(backend, chain_of(1))


def test_options() -> None:
    """A capacity of 0 would silently make a tier that refuses every block."""
    assert MemoryBackend.from_options(MemoryOptions(capacity=7)).stats().capacity_bytes == 7
    assert MemoryBackend.from_options(MemoryOptions()).stats().capacity_bytes == 0
    with pytest.raises(ConfigError, match="capacity is 0"):
        MemoryBackend.from_options(MemoryOptions(capacity=0))
