"""Wrappers around storage tiers keep the contract, count calls, and inject faults."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.support.tiers import file_tier, memory_tier
from tierd.backend import HEADER_BYTES, Backend, GetRequest, GetResult, Outcome, PutRequest
from tierd.errors import BackendError
from tierd.storage.breaker import BreakerBackend
from tierd.storage.measured import BOUNDS_S, Histogram, MeasuredBackend, MeasuredSpeed
from tierd.storage.wrapper import Wrapper
from tierd.testing.backend import MemoryBackend, StoredBlock
from tierd.testing.faulty import DAMAGE, NO_FAULTS, FaultPlan, FaultyBackend, InjectedFault
from tierd.testing.loop import SimulationLoop, run_simulation
from tierd.testing.suite import (
    NAMESPACE,
    BackendSuite,
    CanarySlots,
    Damage,
    SelfNamingBlock,
    check_result,
    contains,
    get,
    make_chain,
    put,
)
from tierd.types import PAGE_BYTES, BlockKey
from tierd_backends.file import FileBackend

BLOCK_BYTES = 5_000
SLOT_BYTES = 2 * PAGE_BYTES
CHAIN = make_chain("wrapped", 10, BLOCK_BYTES)


# --- the contract -----------------------------------------------------------------------


def breaker(inner: Backend) -> BreakerBackend:
    """Return a breaker that a slow machine does not open."""
    return BreakerBackend(inner, name="suite", deadline_s=60, slow_s=30, probe_s=0.01)


def stack(inner: Backend) -> BreakerBackend:
    """The daemon's wrappers around a tier."""
    return breaker(MeasuredBackend(inner))


def slow(inner: Backend, seed: int = 0) -> FaultyBackend:
    """Waits in which calls can race and be cancelled, and calls that end late: for virtual time."""
    return FaultyBackend(inner, FaultPlan({InjectedFault.LINGER: 0.5}, latency_s=1e-4), seed)


def core(backend: Backend) -> Backend:
    """Return the innermost backend."""
    while isinstance(backend, Wrapper):
        backend = backend.inner
    return backend


class WrappedSuite(BackendSuite, abstract=True):
    """Wraps the tier that another suite makes."""

    bounded = True

    def wrap(self, inner: Backend) -> Wrapper:
        raise NotImplementedError

    def bare(self) -> Backend:
        """Return the tier, not yet open, with its former content."""
        raise NotImplementedError

    async def _opened(self) -> Backend:
        backend = self.wrap(self.bare())
        await backend.open()
        return backend

    async def reopen(self, backend: Backend) -> Backend:
        await backend.close()
        return await self._opened()


class MemorySuite(WrappedSuite, memory_tier.MemorySuite, abstract=True):
    def bare(self) -> Backend:
        return MemoryBackend(self.capacity, blocks=self.blocks, marks=self.marks)

    async def make_backend(self, tmp_path: Path, capacity_bytes: int | None) -> Backend:
        self.capacity = capacity_bytes
        self.blocks: dict[BlockKey, StoredBlock] = {}
        self.marks: set[str] = set()
        return await self._opened()

    async def damage(self, backend: Backend, key: BlockKey, how: Damage, offset: int) -> None:
        await super().damage(core(backend), key, how, offset)

    async def swap(self, backend: Backend, first: BlockKey, second: BlockKey) -> None:
        await super().swap(core(backend), first, second)


class FileSuite(WrappedSuite, file_tier.FileSuite, abstract=True):
    @pytest.fixture
    def folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
            yield Path(path) / "tier"

    def bare(self) -> Backend:
        return FileBackend.from_options(
            file_tier.options(self.path, capacity=self.capacity or 256 << 20)
        )

    async def make_backend(self, tmp_path: Path, capacity_bytes: int | None) -> Backend:
        self.capacity = capacity_bytes
        return await self._opened()


class TestBreaker(MemorySuite):
    """A closed breaker changes nothing."""

    def wrap(self, inner: Backend) -> Wrapper:
        return breaker(inner)


class TestMeasured(MemorySuite):
    """Counting changes nothing."""

    def wrap(self, inner: Backend) -> Wrapper:
        return MeasuredBackend(inner)


class TestFaulty(MemorySuite):
    """Cancelled calls that end late keep the contract."""

    def wrap(self, inner: Backend) -> Wrapper:
        return FaultyBackend(inner, FaultPlan({InjectedFault.LINGER: 0.5}))


class TestStackOnFiles(FileSuite):
    """The daemon's wrappers around the code of a real disk."""

    def wrap(self, inner: Backend) -> Wrapper:
        return stack(inner)


class TestFaultyFiles(FileSuite):
    """Injected waits around the code of a real disk."""

    def wrap(self, inner: Backend) -> Wrapper:
        return FaultyBackend(inner, FaultPlan({InjectedFault.LINGER: 0.5}))


class SlowStack(MemorySuite, abstract=True):
    """All wrappers at once, with waits; run in simulation."""

    __test__ = False

    def wrap(self, inner: Backend) -> Wrapper:
        return stack(slow(inner))


RACES = [
    SlowStack.test_put_at_once,
    SlowStack.test_cancelled_by_the_first_of_two,
    SlowStack.test_close_in_flight,
    partial(SlowStack.test_concurrency, seed=1),
    partial(SlowStack.test_cancelled_get, seed=1),
    partial(SlowStack.test_cancelled_put, seed=1),
]


@pytest.mark.slow
@pytest.mark.parametrize("race", RACES)
def test_wrappers_conform_in_simulation(
    tmp_path: Path, race: Callable[[SlowStack, Backend], Awaitable[None]]
) -> None:
    """Without waits around its calls a wrapper would pass the suite although calls race."""

    async def scenario(loop: SimulationLoop) -> None:
        suite = SlowStack()
        backend = await suite.make_backend(tmp_path, None)
        await race(suite, backend)
        await backend.close()
        assert backend.counters["torn_writes_total"] == 0

    for seed in range(2):
        run_simulation(seed, scenario)


# --- measured ---------------------------------------------------------------------------


async def measured(plan: FaultPlan = NO_FAULTS) -> tuple[MeasuredBackend, MemoryBackend]:
    tier = MemoryBackend(3 * (HEADER_BYTES + BLOCK_BYTES), plan=plan)
    backend = MeasuredBackend(tier)
    await backend.open()
    return backend, tier


def nonzero(backend: Backend) -> dict[str, int]:
    return {name[:-6]: value for name, value in backend.counters.items() if value}


async def test_outcomes_and_bytes_are_counted() -> None:
    """The operator could not tell a cold tier from a failing one."""
    backend, tier = await measured()
    await put(backend, CHAIN[:2])
    assert (
        await put(backend, CHAIN[:5])
        == [Outcome.PRESENT] * 2 + [Outcome.STORED] + [Outcome.REFUSED] * 2
    )
    await get(backend, CHAIN[:4])
    await contains(backend, CHAIN)
    tier.blocks[CHAIN[2].key] = tier.blocks[CHAIN[2].key]._replace(payload=b"short")
    await get(backend, CHAIN[2:3])
    assert nonzero(backend) == {
        "corrupt": 1,
        "lookup_calls": 1,
        "get_calls": 2,
        "put_calls": 2,
        "get_hit": 3,
        "get_miss": 1,
        "get_corrupt": 1,
        "put_stored": 3,
        "put_present": 2,
        "put_refused": 2,
        "read_bytes": 3 * BLOCK_BYTES,
        "written_bytes": 3 * BLOCK_BYTES,
    }
    await backend.close()


async def test_failed_blocks_are_counted() -> None:
    """I/O errors of single blocks would not show."""
    backend, _ = await measured(FaultPlan({InjectedFault.FAIL_BLOCK: 1.0}))
    await put(backend, CHAIN[:3])
    await get(backend, CHAIN[:2])
    counted = nonzero(backend)
    assert (counted["put_error"], counted["get_error"]) == (3, 2)
    assert "read_bytes" not in counted
    assert "written_bytes" not in counted
    await backend.close()


def test_failed_cancelled_and_buggy_calls_are_counted_apart() -> None:
    """A tier that is down, a backend's bug and engines that cancel would look alike."""

    class Buggy(MemoryBackend):
        async def get_into(
            self, namespace: bytes, requests: Sequence[GetRequest]
        ) -> list[GetResult]:
            raise TypeError("bug")

    async def scenario(loop: SimulationLoop) -> None:
        backend, tier = await measured(FaultPlan({InjectedFault.FAIL_CALL: 1.0}))
        for call in (put, get, contains):
            with pytest.raises(BackendError):
                await call(backend, CHAIN[:2])
        tier.plan = FaultPlan({InjectedFault.HANG: 1.0})
        for call in (put, get, contains):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call(backend, CHAIN[:2]), 3.0)
        ops = ("put", "get", "lookup")
        expected = {f"{op}_{how}": 1 for op in ops for how in ("failed", "cancelled")}
        expected |= {f"{op}_calls": 2 for op in ops}
        counted = {name: n for name, n in nonzero(backend).items() if "fault" not in name}
        assert counted == expected
        assert backend.latency()["get"]["max_ms"] == pytest.approx(3000)
        await backend.close()
        buggy = MeasuredBackend(Buggy())
        with pytest.raises(TypeError):
            await get(buggy, CHAIN[:1])
        assert nonzero(buggy) == {"get_calls": 1, "get_bugs": 1}

    run_simulation(1, scenario)


async def test_every_counter_exists_from_the_start() -> None:
    """A dashboard would have no line until the first error, and nothing to compare it with."""
    backend = stack(MemoryBackend())
    names = set(backend.counters)
    await backend.open()
    await put(backend, CHAIN)
    await get(backend, CHAIN)
    await backend.close()
    assert set(backend.counters) == names
    assert {"get_error_total", "put_bugs_total", "lookup_failed_total"} <= names


@pytest.mark.parametrize("durations", [[0.001] * 99 + [2.0], [i / 1000 for i in range(1, 1001)]])
def test_quantiles_are_right_to_within_a_bucket(durations: list[float]) -> None:
    """An operator would look for a latency that the tier does not have."""
    histogram = Histogram()
    for duration in durations:
        histogram.add(duration)
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        exact = sorted(durations)[max(0, int(share * len(durations)) - 1)]
        assert exact / 2 <= histogram.quantile_s(share) <= exact * 2
    assert histogram.quantile_s(1.0) == histogram.max_s == max(durations)
    assert histogram.sum_s == pytest.approx(sum(durations))
    assert histogram.count == sum(histogram.buckets) == len(durations)


def test_histogram_takes_extreme_durations() -> None:
    """Durations of zero and of minutes would be lost, or end the call that they time."""
    histogram = Histogram()
    assert histogram.quantile_s(0.99) == 0
    histogram.add(0.0)
    assert histogram.quantile_s(0.5) == 0
    histogram.add(BOUNDS_S[0])
    histogram.add(BOUNDS_S[-1])
    histogram.add(1000.0)
    assert histogram.buckets[0] == 2
    assert histogram.buckets[-2:] == [1, 1]
    assert histogram.quantile_s(1.0) == 1000


async def test_latency_names_every_operation() -> None:
    """`tierd status` would show nothing for operations without a call so far."""
    backend, _ = await measured()
    none = [0] * (len(BOUNDS_S) + 1)
    assert backend.latency() == {
        op: {"count": 0, "sum_s": 0, "p50_ms": 0, "p99_ms": 0, "max_ms": 0, "buckets": none}
        for op in ("lookup", "get", "put", "use")
    }
    await backend.close()


def test_speed_is_measured_for_the_tier_not_the_call() -> None:
    """The gate would skip loads from a tier that is fast with several calls, or idle at night."""
    speed = MeasuredSpeed()
    assert speed.bytes_per_s is None
    now_s = 100.0
    for _ in range(50):
        # Four concurrent calls of one second each, then an idle hour.
        for _ in range(4):
            speed.begin(now_s)
        now_s += 1.0
        for _ in range(4):
            speed.end(now_s, 25)
        now_s += 3600
    assert speed.bytes_per_s == pytest.approx(100)


def test_speed_counts_overlapping_time_once() -> None:
    """A tier with concurrent reads would look twice or half as fast as it is."""
    speed = MeasuredSpeed()
    speed.begin(10.0)
    speed.begin(10.5)
    speed.end(11.0, 100)
    speed.end(11.5, 50)
    assert speed.bytes_per_s == pytest.approx(100)


def test_speed_follows_the_tier() -> None:
    """A tier that has become slow would be taken for a fast one for hours."""
    speed = MeasuredSpeed()
    now_s = 0.0

    def run(calls: int, moved_bytes: int) -> float:
        nonlocal now_s
        for _ in range(calls):
            speed.begin(now_s)
            now_s += 0.1
            speed.end(now_s, moved_bytes)
        assert speed.bytes_per_s is not None
        return speed.bytes_per_s

    assert run(10, 100) == pytest.approx(1000)
    assert run(100, 10) == pytest.approx(100, rel=0.1)
    assert run(100, 100) == pytest.approx(1000, rel=0.1)
    # A hung call is busy time without bytes.
    speed.begin(now_s)
    speed.end(now_s + 10, 0)
    assert speed.bytes_per_s is not None
    assert speed.bytes_per_s < 250


def test_doubted_speed_is_replaced_by_the_next_call() -> None:
    """A tier that has recovered would be taken for a slow one for as long as it was slow."""
    speed = MeasuredSpeed()
    speed.begin(0.0)
    speed.end(100.0, 100)
    speed.doubt()
    assert speed.bytes_per_s == pytest.approx(1.0), (
        "until the next call the old speed is the best guess"
    )
    speed.begin(100.0)
    speed.end(100.1, 100)
    assert speed.bytes_per_s == pytest.approx(1000, rel=0.05)


def test_reads_and_writes_have_their_own_speeds() -> None:
    """Reads would be judged by the speed of writes."""

    async def scenario(loop: SimulationLoop) -> None:
        tier = MemoryBackend()
        backend = MeasuredBackend(FaultyBackend(tier))
        await backend.open()
        assert backend.read_bytes_per_s is None
        assert backend.write_bytes_per_s is None
        writing = FaultyBackend(tier, FaultPlan(latency_s=1.0), seed=1)
        backend.inner = writing
        for i in range(0, 200, 2):
            await put(backend, make_chain(str(i), 2, BLOCK_BYTES))
        assert backend.write_bytes_per_s == pytest.approx(BLOCK_BYTES, rel=0.9)
        assert backend.read_bytes_per_s is None
        backend.inner = FaultyBackend(tier, FaultPlan(latency_s=0.01), seed=1)
        for i in range(0, 200, 2):
            await get(backend, make_chain(str(i), 2, BLOCK_BYTES))
        assert backend.read_bytes_per_s is not None
        assert backend.read_bytes_per_s > 20 * (backend.write_bytes_per_s or 0)
        await backend.close()

    run_simulation(1, scenario)


# --- faulty -----------------------------------------------------------------------------


async def faulty(plan: FaultPlan, seed: int = 0) -> FaultyBackend:
    """A backend that holds CHAIN and from now on fails by `plan`."""
    backend = FaultyBackend(MemoryBackend(), seed=seed)
    await backend.open()
    assert await put(backend, CHAIN) == [Outcome.STORED] * len(CHAIN)
    backend.plan = plan
    return backend


async def test_faults_of_wrapper_and_inner_tier_are_counted() -> None:
    """A test could not tell whether the faults that it needs have happened."""
    backend = FaultyBackend(
        MemoryBackend(plan=FaultPlan({InjectedFault.FAIL_BLOCK: 1.0})),
        FaultPlan({InjectedFault.VANISH: 1.0}),
    )
    await backend.open()
    await put(backend, CHAIN[:2])
    await get(backend, CHAIN[:3])
    assert nonzero(backend) == {"fault_fail_block": 5, "fault_vanish": 3}
    await backend.close()


@pytest.mark.parametrize("fault", [fault for fault in InjectedFault if fault in DAMAGE])
async def test_wrapper_refuses_faults_that_damage_blocks(fault: InjectedFault) -> None:
    """A test of bit rot would pass without any damage."""
    with pytest.raises(AssertionError, match="cannot damage stored bytes"):
        FaultyBackend(MemoryBackend(), FaultPlan({fault: 0.1}))


def test_cancelled_call_uses_its_views_until_it_ends() -> None:
    """A caller that reuses a slot when it cancels, before the call has ended, would pass."""

    async def scenario(loop: SimulationLoop) -> None:
        backend = await faulty(
            FaultPlan({InjectedFault.HANG: 1.0, InjectedFault.LINGER: 1.0}, latency_s=0.01)
        )
        slots = CanarySlots(2, SLOT_BYTES)
        slots.view(1)[:BLOCK_BYTES] = CHAIN[0].payload
        key, parent, checksum = CHAIN[0].key, CHAIN[0].parent, CHAIN[0].checksum
        read = GetRequest(key.block_hash, slots.view(0), BLOCK_BYTES)
        write = PutRequest(key.block_hash, parent, checksum, slots.view(1), BLOCK_BYTES)
        calls: list[asyncio.Task[object]] = [
            loop.create_task(backend.get_into(NAMESPACE, [read])),
            loop.create_task(backend.put_many(NAMESPACE, [write])),
        ]
        await asyncio.sleep(1)
        for call in calls:
            call.cancel()
        await asyncio.sleep(1e-6)
        assert not any(call.done() for call in calls)
        slots.blank(0)
        slots.blank(1)
        await asyncio.wait(calls)
        assert not slots.is_blank(0)
        assert backend.counters["torn_writes_total"] == 1
        slots.blank(0)
        await asyncio.sleep(1)
        assert slots.is_blank(0)
        await backend.close()

    run_simulation(0, scenario)


# --- all wrappers -----------------------------------------------------------------------


async def bad_day(loop: SimulationLoop) -> Counter[str]:
    """Callers that read, write and cancel on a failing tier behind all wrappers, until the tier has
    recovered."""
    seed = loop.random.randrange(1 << 30)
    faults = dict.fromkeys(set(InjectedFault) - DAMAGE, 0.05)
    tier = FaultyBackend(MemoryBackend(seed=seed), FaultPlan(faults, latency_s=0.01), seed)
    backend = BreakerBackend(
        MeasuredBackend(tier), name="bad day", deadline_s=0.5, slow_s=0.2, probe_s=1.0
    )
    await backend.open()
    chains = [make_chain(f"chain {number}", 8, BLOCK_BYTES) for number in range(8)]

    async def read(slots: CanarySlots, chain: list[SelfNamingBlock]) -> None:
        requests = [
            GetRequest(block.key.block_hash, slots.view(position), BLOCK_BYTES)
            for position, block in enumerate(chain)
        ]
        results = await backend.get_into(NAMESPACE, requests)
        for position, block in enumerate(chain):
            check_result(block, results[position], slots.view(position))
        slots.check()

    async def caller() -> None:
        slots = CanarySlots(8, SLOT_BYTES)
        for _ in range(40):
            chain = loop.random.choice(chains)[: loop.random.randint(1, 8)]
            match loop.random.randrange(3):
                case 0:
                    call: Awaitable[object] = put(backend, chain)
                case 1:
                    call = read(slots, chain)
                case _:
                    call = contains(backend, chain)
            began_s = loop.time()
            try:
                await asyncio.wait_for(call, loop.random.choice((0.1, 9)))
            except TimeoutError:
                backend.blame_reads()
            except BackendError:
                pass
            # At the latest at the deadline, plus the time that a call takes to release its views.
            assert loop.time() - began_s < 0.5 + 0.5
            for slot in range(8):
                slots.blank(slot)
            await asyncio.sleep(loop.random.random() * 0.5)
            assert all(slots.is_blank(slot) for slot in range(8))

    async with asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(caller())
    tier.plan = FaultPlan(latency_s=0.001)
    await asyncio.sleep(1.0 + 0.5)
    for chain in chains:
        await put(backend, chain)
        assert await get(backend, chain) == [Outcome.HIT] * 8
    states = backend.status()
    assert (states["reads"]["state"], states["writes"]["state"]) == ("closed", "closed")
    await backend.close()
    counted = Counter(backend.counters)
    assert counted["torn_writes_total"] == 0
    for op in ("lookup", "get", "put"):
        assert counted[f"{op}_bugs_total"] == 0
        calls = backend.inner
        assert isinstance(calls, MeasuredBackend)
        assert calls.histograms[op].count == counted[f"{op}_calls_total"]
    for what in ("reads", "writes"):
        opened = states[what]["opened_total"]
        assert isinstance(opened, int)
        counted[f"opened_{what}"] = opened
    return counted


@pytest.mark.slow
def test_wrappers_survive_a_bad_day() -> None:
    """In some order of events a caller would get wrong bytes, a slot would be used after its call,
    or a breaker would stay open."""
    seen = Counter[str]()
    for seed in range(8):
        seen += run_simulation(seed, bad_day)
    for fault in set(InjectedFault) - DAMAGE:
        assert seen[f"fault_{fault.value}_total"], fault
    assert seen["opened_reads"] > 10
    assert seen["opened_writes"] > 10
    assert seen["breaker_refused_reads_total"] > 100
    assert seen["breaker_read_deadlines_total"] > 10
    assert run_simulation(3, bad_day) == run_simulation(3, bad_day)
