"""Prefetch on virtual time: no request exceeds its deadline, whatever the tiers do."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support import blocks
from tests.support.tiers.bench import PAGE, SPACE, Bench, Tier, config, key, run
from tierd.backend import GetRequest, GetResult
from tierd.config import PrefetchConfig, PrefetchPolicy
from tierd.core.l3.prefetch import deadline_ns
from tierd.daemon.l3.tier import BATCH_BLOCKS_MAX
from tierd.daemon.session.acquiring import Patience
from tierd.daemon.session.session import Session
from tierd.errors import BackendError
from tierd.wire import messages as m
from tierd.wire.session import Role, WireSession, encode

MS = 1_000_000
BLOCK_TOKENS = SPACE.block_tokens
CHAINS = 3
CHAIN_BLOCKS = 2 * BATCH_BLOCKS_MAX + 5
LATE_MS = 10
"""Tolerance in ms after the deadline. On virtual time nothing is late by itself."""

QUICK = PrefetchConfig(min_tokens=0, timeout_base_ms=200, timeout_per_ki_ms=100, timeout_max_ms=700)


# --- tiers that misbehave, in any mixture -----------------------------------------------


@dataclass(frozen=True)
class Behaviour:
    """How a tier behaves; times in s."""

    ask_s: float = 0.0
    get_s: float = 0.0
    verify_s: float = 0.0
    """After each read, one batch at a time: all batches share one checksum thread."""
    sick_from_s: float = 1e9
    sick_until_s: float = 1e9
    raises: bool = False
    """While sick, every call raises instead of hanging."""
    lingers_s: float = 0.0
    has: float = 1.0
    """Share of each chain's blocks that the tier has, from the front."""
    damaged: bool = False
    read_batches: int = 4


class MisbehavingTier(Tier):
    """A tier with a behaviour, which counts the bytes of reads in flight."""

    def __init__(self, behaviour: Behaviour) -> None:
        super().__init__()
        self.behaviour: Behaviour | None = None
        self.later = behaviour
        self.began_s = 0.0
        self.in_flight = 0
        self.verifier = asyncio.Lock()

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        size = len(requests) * PAGE
        self.in_flight += size
        try:
            results = await super().get_into(namespace, requests)
            if self.behaviour is not None and self.behaviour.verify_s:
                async with self.verifier:
                    await asyncio.sleep(self.behaviour.verify_s)
            return results
        finally:
            self.in_flight -= size

    async def _step(self, what: str, count: int) -> None:
        behaviour = self.behaviour
        if behaviour is None:
            return
        self.log.append((what, count))
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(
                behaviour.ask_s if what in ("contains", "probe") else behaviour.get_s
            )
            if behaviour.sick_from_s <= loop.time() - self.began_s < behaviour.sick_until_s:
                if behaviour.raises:
                    raise BackendError("connection refused")
                await loop.create_future()
        except asyncio.CancelledError:
            await asyncio.sleep(behaviour.lingers_s)
            raise


@dataclass(frozen=True)
class Arrival:
    """A request; times in ms."""

    chain: int = 0
    blocks: int = CHAIN_BLOCKS
    at: int = 0
    waited: int = 0
    client: int = 60_000
    ready: int | None = None
    """When the engine is ready to compute it."""
    aborted: int | None = None


@dataclass
class Outcome:
    """Result of a request: blocks (None if it was aborted), and lateness in ms."""

    arrival: Arrival
    blocks: int | None = None
    late_ms: float = 0.0
    took_ms: float = 0.0


@dataclass
class World:
    """A bench whose tiers hold all chains, and misbehave after `begin`."""

    bench: Bench
    misbehaving: list[MisbehavingTier]
    prefetch: PrefetchConfig
    chains: list[list[bytes]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    async def begin(self) -> None:
        bench = self.bench
        for tag in range(CHAINS):
            bench.node.memory.make_room_ahead(bench.space, CHAIN_BLOCKS)
            await asyncio.sleep(1)
            self.chains.append(bench.store(CHAIN_BLOCKS, tag))
            assert len(bench.space.items) == CHAIN_BLOCKS
            await bench.backed_up()
            bench.forget()
        for raw in self.misbehaving:
            behaviour = raw.later
            for chain in self.chains:
                for place, block_hash in enumerate(chain):
                    if place >= behaviour.has * len(chain):
                        raw.blocks.pop(key(block_hash), None)
                    elif behaviour.damaged and place % 7 == 3:
                        header, payload = raw.blocks[key(block_hash)]
                        broken = bytes((payload[0] ^ 1,)) + payload[1:]
                        raw.blocks[key(block_hash)] = type(raw.blocks[key(block_hash)])(
                            header, broken
                        )
            raw.behaviour, raw.began_s = behaviour, bench.loop.time()
        bench.node.prefetch = self.prefetch

    async def serve(self, arrivals: Sequence[Arrival]) -> list[Outcome]:
        """Send all requests as sessions would; returns their outcomes."""
        async with asyncio.TaskGroup() as group:
            for arrival in arrivals:
                group.create_task(self._serve(arrival))
            watch = asyncio.create_task(self._watch())
        watch.cancel()
        return self.outcomes

    async def _watch(self) -> None:
        while True:
            in_flight = sum(raw.in_flight for raw in self.misbehaving)
            assert in_flight <= max(self.prefetch.bytes_in_flight, BATCH_BLOCKS_MAX * PAGE)
            assert in_flight <= self.bench.node.promotions.read_scheduler.bytes_in_flight
            await asyncio.sleep(0.003)

    async def _serve(self, arrival: Arrival) -> None:
        await asyncio.sleep(arrival.at / 1000)
        bench, outcome = self.bench, Outcome(arrival)
        self.outcomes.append(outcome)
        hashes, spaces = self.chains[arrival.chain][: arrival.blocks], [bench.space]
        began_ns = bench.loop.now_ns
        resident = len(bench.node.host.prefix(bench.space, hashes))
        end_ns = bench.deadline_ns(hashes, waited_ms=arrival.waited, client_ms=arrival.client)
        assert end_ns == deadline_ns(
            self.prefetch,
            now_ns=began_ns,
            waited_ms=arrival.waited,
            client_ms=arrival.client,
            missing_tokens=(len(hashes) - resident) * BLOCK_TOKENS,
        )
        patience = Patience()
        if arrival.ready is not None and self.prefetch.policy is PrefetchPolicy.BEST_EFFORT:
            bench.loop.call_later(arrival.ready / 1000, patience.end)
            end_ns = min(end_ns, began_ns + arrival.ready * MS)
        ask = bench.node.acquire(
            1, spaces, hashes, end_ns, patience=patience, waited_ms=arrival.waited
        )
        task = asyncio.create_task(ask)
        if arrival.aborted is not None:
            bench.loop.call_later(arrival.aborted / 1000, task.cancel)
        await asyncio.wait([task])
        bench.node.check()
        outcome.took_ms = (bench.loop.now_ns - began_ns) / MS
        outcome.late_ms = (bench.loop.now_ns - end_ns) / MS
        if task.cancelled():
            return
        lease = task.result()
        outcome.blocks = 0
        if lease is not None:
            outcome.blocks = len(lease.parts[0][1])
            for block_hash, slot in zip(hashes, lease.parts[0][1], strict=False):
                right = blocks.payload(SPACE, block_hash)
                assert bench.node.memory.payload(bench.space, slot) == right
            bench.node.host.release(lease.lease_id, 1)


def world(
    test: Callable[[World], Awaitable[None]],
    *behaviours: Behaviour,
    prefetch: PrefetchConfig = QUICK,
    deadline_ms: int = 2000,
) -> None:
    """Run a test on a node whose tiers behave as given."""
    raw = [MisbehavingTier(behaviour) for behaviour in behaviours]

    async def scenario(bench: Bench) -> None:
        scenario_world = World(bench, raw, prefetch)
        bench.node.promotions.read_scheduler._bytes_max = prefetch.bytes_in_flight
        await scenario_world.begin()
        await test(scenario_world)
        # Lingering reads have ended by then.
        await asyncio.sleep(60)
        bench.check_nothing_is_left()
        assert not bench.node.promotions.read_scheduler.bytes_in_flight
        for tier, behaviour in zip(bench.tiers, behaviours, strict=True):
            assert tier.reads.free == behaviour.read_batches

    configs = [
        config(
            f"tier{i}",
            read_batches=behaviour.read_batches,
            deadline_ms=deadline_ms,
            slow_ms=deadline_ms,
        )
        for i, behaviour in enumerate(behaviours)
    ]
    run(scenario, *configs, blocks_in_l2=2048, raw=raw)


# --- deadlines --------------------------------------------------------------------------

BEHAVIOURS = {
    "fast": Behaviour(get_s=0.001),
    "slow": Behaviour(ask_s=0.05, get_s=0.15, read_batches=1),
    "slow to answer": Behaviour(ask_s=0.5),
    "slow to verify": Behaviour(get_s=0.01, verify_s=0.15),
    "hanging": Behaviour(sick_from_s=0.0, lingers_s=3.0),
    "hanging in reads": Behaviour(get_s=0.01, sick_from_s=0.015, lingers_s=3.0),
    "dying": Behaviour(ask_s=0.01, get_s=0.02, sick_from_s=0.05, raises=True),
    "dead": Behaviour(sick_from_s=0.0, raises=True),
    "damaged": Behaviour(get_s=0.02, damaged=True),
}


@pytest.mark.parametrize("policy", list(PrefetchPolicy))
@pytest.mark.parametrize("name", BEHAVIOURS)
def test_misbehaving_tier_does_not_delay_requests_beyond_the_deadline(
    policy: PrefetchPolicy, name: str
) -> None:
    """A request would wait indefinitely for a disk that is slow, hangs or dies."""

    async def test(scenario_world: World) -> None:
        ready = 100 if policy is PrefetchPolicy.BEST_EFFORT else None
        asked = [Arrival(chain=c, at=30 * i, ready=ready) for i, c in enumerate((0, 0, 1, 2))]
        outcomes = await scenario_world.serve(asked)
        assert all(o.late_ms <= LATE_MS for o in outcomes), outcomes
        if name == "fast":
            assert [o.blocks for o in outcomes] == [CHAIN_BLOCKS] * 4
        if name in ("hanging", "slow to answer"):
            first = outcomes[0]
            allowed = {
                PrefetchPolicy.BEST_EFFORT: 100.0,
                PrefetchPolicy.WAIT_COMPLETE: 700.0,
                PrefetchPolicy.TIMEOUT: 200.0 + 100 * CHAIN_BLOCKS * BLOCK_TOKENS // 1024,
            }[policy]
            if name == "slow to answer":
                allowed = min(allowed, 500)
            assert first.took_ms == pytest.approx(allowed, abs=LATE_MS)
        if name == "dead":
            assert max(o.took_ms for o in outcomes) < LATE_MS, "every read is known to fail"

    world(test, BEHAVIOURS[name], prefetch=replace_policy(policy))


def replace_policy(policy: PrefetchPolicy, **changes: int) -> PrefetchConfig:
    keys = {name: getattr(QUICK, name) for name in QUICK.__struct_fields__}
    return PrefetchConfig(**{**keys, "policy": policy, **changes})


times = st.integers(0, 900)
behaviours = st.builds(
    Behaviour,
    ask_s=st.sampled_from([0.0, 0.001, 0.04, 0.3]),
    get_s=st.sampled_from([0.0, 0.001, 0.03, 0.2, 1.0]),
    verify_s=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
    sick_from_s=st.sampled_from([0.0, 0.02, 0.1, 0.5, 1e9]),
    sick_until_s=st.sampled_from([0.3, 2.0, 1e9]),
    raises=st.booleans(),
    lingers_s=st.sampled_from([0.0, 0.5, 5.0]),
    has=st.sampled_from([0.0, 0.4, 1.0]),
    damaged=st.booleans(),
    read_batches=st.integers(1, 4),
)
arrivals = st.builds(
    Arrival,
    chain=st.integers(0, CHAINS - 1),
    blocks=st.integers(1, CHAIN_BLOCKS),
    at=times,
    waited=st.sampled_from([0, 0, 0, 40, 250, 5000]),
    client=st.sampled_from([0, 30, 400, 60_000]),
    ready=st.one_of(st.none(), times),
    aborted=st.one_of(st.none(), st.none(), times),
)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.lists(behaviours, min_size=1, max_size=3),
    st.lists(arrivals, min_size=1, max_size=8),
    st.sampled_from(list(PrefetchPolicy)),
    st.sampled_from([1, 40 * PAGE, 1 << 30]),
)
@example(
    [Behaviour(get_s=0.2, read_batches=1)],
    [Arrival(), Arrival(chain=1, at=10, aborted=5), Arrival(chain=1, at=15)],
    PrefetchPolicy.TIMEOUT,
    1,
)
def test_random_tiers_and_arrivals_delay_no_request_beyond_the_deadline(
    tiers, requests, policy, bytes_in_flight
) -> None:
    """Two faults at once, or an abort at the wrong moment, would hold up a request or its slots."""

    async def test(scenario_world: World) -> None:
        for outcome in await scenario_world.serve(requests):
            assert outcome.late_ms <= LATE_MS, outcome
            if outcome.blocks is None:
                assert outcome.took_ms <= (outcome.arrival.aborted or 0) + LATE_MS, outcome

    prefetch = replace_policy(policy, bytes_in_flight=bytes_in_flight)
    world(test, *tiers, prefetch=prefetch)


# --- what counts towards the deadline ---------------------------------------------------


def test_deadline_includes_the_lookup() -> None:
    """The clock would start at the first read, and a slow existence check would come on top."""

    async def test(scenario_world: World) -> None:
        (outcome,) = await scenario_world.serve([Arrival(client=300)])
        assert outcome.blocks == 0
        assert outcome.took_ms == pytest.approx(300, abs=LATE_MS)

    world(
        test,
        Behaviour(ask_s=0.25, get_s=0.1),
        prefetch=replace_policy(PrefetchPolicy.WAIT_COMPLETE),
    )


def test_lookup_that_uses_up_the_deadline_starts_no_read() -> None:
    """Blocks would be read for which no request waits."""

    async def test(scenario_world: World) -> None:
        (outcome,) = await scenario_world.serve([Arrival(client=300)])
        assert outcome.blocks == 0
        assert outcome.took_ms == pytest.approx(300, abs=LATE_MS)
        await asyncio.sleep(1)
        assert scenario_world.misbehaving[0].in_flight == 0
        assert not scenario_world.bench.space.items

    world(test, Behaviour(ask_s=0.35))


@pytest.mark.parametrize("policy", list(PrefetchPolicy))
def test_deadline_includes_verification(policy: PrefetchPolicy) -> None:
    """The clock would stop when the bytes arrive, and a busy checksum thread would come on top; or
    unverified blocks would be served."""

    async def test(scenario_world: World) -> None:
        ready = 400 if policy is PrefetchPolicy.BEST_EFFORT else None
        (outcome,) = await scenario_world.serve([Arrival(client=400, ready=ready)])
        assert outcome.took_ms == pytest.approx(400, abs=LATE_MS)
        # Two batches have arrived, and the third is being verified; the loop chose their order.
        first = CHAIN_BLOCKS - CHAIN_BLOCKS // BATCH_BLOCKS_MAX * BATCH_BLOCKS_MAX
        in_flight = scenario_world.misbehaving[0].in_flight // PAGE
        assert (outcome.blocks, in_flight) in (
            (2 * BATCH_BLOCKS_MAX, first),
            (BATCH_BLOCKS_MAX, BATCH_BLOCKS_MAX),
        )

    prefetch = replace_policy(policy, timeout_base_ms=5000, timeout_max_ms=5000)
    world(test, Behaviour(get_s=0.01, verify_s=0.15, read_batches=1), prefetch=prefetch)


def test_deadline_includes_time_behind_another_requests_reads() -> None:
    """A request would wait its full time after the previous request has had its own."""

    async def test(scenario_world: World) -> None:
        first, second = await scenario_world.serve(
            [Arrival(chain=0), Arrival(chain=1, at=10, client=250)]
        )
        assert first.blocks == CHAIN_BLOCKS
        assert second.blocks == 0
        assert second.took_ms == pytest.approx(250, abs=LATE_MS)

    prefetch = replace_policy(PrefetchPolicy.WAIT_COMPLETE)
    world(test, Behaviour(get_s=0.2, read_batches=1), prefetch=prefetch)


@pytest.mark.parametrize("policy", [PrefetchPolicy.TIMEOUT, PrefetchPolicy.WAIT_COMPLETE])
def test_deadline_includes_time_in_the_engines_queue(policy: PrefetchPolicy) -> None:
    """HiCache's clock starts only at the first poll that finds the request blocked."""

    async def test(scenario_world: World) -> None:
        (outcome,) = await scenario_world.serve([Arrival(waited=10_000)])
        assert (outcome.blocks, outcome.took_ms < LATE_MS) == (0, True)
        assert scenario_world.misbehaving[0].calls("get") == 0

    world(test, BEHAVIOURS["hanging"], prefetch=replace_policy(policy))


# --- how much is read -------------------------------------------------------------------


def test_prefix_that_arrived_by_the_deadline_is_used() -> None:
    """All or nothing would discard the blocks that a slow tier delivered in time."""

    async def test(scenario_world: World) -> None:
        first, second = await scenario_world.serve(
            [Arrival(blocks=1), Arrival(chain=1, at=10, client=340)]
        )
        assert (first.blocks, second.blocks) == (1, 2 * BATCH_BLOCKS_MAX)

    prefetch = replace_policy(PrefetchPolicy.WAIT_COMPLETE)
    world(test, Behaviour(get_s=0.1, read_batches=1), prefetch=prefetch)


def test_bytes_in_flight_are_bounded_across_tiers() -> None:
    """A burst of long prompts would take the slots that engines need to store."""

    async def test(scenario_world: World) -> None:
        most = 0
        served = asyncio.create_task(
            scenario_world.serve([Arrival(chain=c) for c in range(CHAINS)])
        )
        while not served.done():
            most = max(most, sum(raw.in_flight for raw in scenario_world.misbehaving))
            await asyncio.sleep(0.001)
        assert [o.blocks for o in served.result()] == [CHAIN_BLOCKS] * CHAINS
        limit = scenario_world.prefetch.bytes_in_flight
        assert limit - BATCH_BLOCKS_MAX * PAGE < most <= limit

    prefetch = replace_policy(
        PrefetchPolicy.WAIT_COMPLETE, bytes_in_flight=2 * BATCH_BLOCKS_MAX * PAGE + 4 * PAGE
    )
    world(test, Behaviour(get_s=0.01, has=0.5), Behaviour(get_s=0.01), prefetch=prefetch)


def test_batches_are_read_in_prefix_order() -> None:
    """With one read at a time the end of a prompt could be read first, and be of no use."""

    async def test(scenario_world: World) -> None:
        seen: list[list[bytes]] = []
        raw = scenario_world.misbehaving[0]
        get = raw.get_into

        async def watched(namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
            seen.append([request.block_hash for request in requests])
            return await get(namespace, requests)

        raw.get_into = watched  # type: ignore[method-assign]
        # The third request reaches the daemon later, but reached its engine earlier.
        await scenario_world.serve(
            [
                Arrival(chain=0, blocks=1),
                Arrival(chain=1, at=1),
                Arrival(chain=2, at=15, waited=100),
            ]
        )
        first, one, two = scenario_world.chains
        expected = [first[0], *one[:BATCH_BLOCKS_MAX], *two, *one[BATCH_BLOCKS_MAX:]]
        assert list(itertools.chain(*seen)) == expected

    prefetch = replace_policy(PrefetchPolicy.WAIT_COMPLETE)
    world(test, Behaviour(get_s=0.01, read_batches=1), prefetch=prefetch)


def test_batch_moves_up_when_an_older_request_joins_it() -> None:
    """The request that has waited longest would wait for blocks that another one asked for."""

    async def test(scenario_world: World) -> None:
        outcomes = await scenario_world.serve(
            [
                Arrival(chain=0, at=0),
                Arrival(chain=1, at=1, waited=50),
                Arrival(chain=2, at=2),
                Arrival(chain=2, at=3, waited=100),
            ]
        )
        took = {(o.arrival.chain, o.arrival.waited): o.took_ms for o in outcomes}
        # One read of the first was under way; then all three of the last, whoever asked first.
        assert took[2, 100] == pytest.approx(4 * 20, abs=5)
        assert took[2, 100] < took[1, 50] < took[0, 0]

    prefetch = replace_policy(PrefetchPolicy.WAIT_COMPLETE)
    world(test, Behaviour(get_s=0.02, read_batches=1), prefetch=prefetch)


# --- aborts -----------------------------------------------------------------------------


@pytest.mark.parametrize("aborted_ms", [0, 1, 50, 150])
def test_pending_reads_of_an_aborted_request_are_not_started(aborted_ms: int) -> None:
    """A departed client would keep a slow disk busy for everyone else."""

    async def test(scenario_world: World) -> None:
        gone, stays = await scenario_world.serve(
            [Arrival(chain=0, aborted=aborted_ms), Arrival(chain=1, at=200)]
        )
        assert (gone.blocks, stays.blocks) == (None, CHAIN_BLOCKS)
        # The read under way or about to start, and the reads of the remaining request.
        begun = 1 + aborted_ms // 100
        assert scenario_world.misbehaving[0].calls("get") <= begun + 3

    prefetch = replace_policy(PrefetchPolicy.WAIT_COMPLETE)
    scenario_world = Behaviour(get_s=0.1, read_batches=1)
    world(test, scenario_world, prefetch=prefetch)


def test_slots_of_an_abandoned_read_are_kept_until_the_backend_returns() -> None:
    """The tier would write into slots that hold another block by then."""

    async def test(scenario_world: World) -> None:
        raw, bench = scenario_world.misbehaving[0], scenario_world.bench
        (outcome,) = await scenario_world.serve([Arrival(client=100)])
        assert (outcome.blocks, raw.in_flight > 0) == (0, True)
        slots = len(bench.space.writing)
        assert slots * PAGE == raw.in_flight == bench.node.promotions.read_scheduler.bytes_in_flight
        await asyncio.sleep(2.5)  # The breaker has abandoned the read, and the backend lingers.
        assert len(bench.space.writing) == slots
        await asyncio.sleep(4)
        assert (len(bench.space.writing), raw.in_flight) == (0, 0)

    world(test, Behaviour(get_s=0.01, sick_from_s=0.005, lingers_s=4.0), deadline_ms=1000)


def test_request_arriving_during_an_abort_gets_the_blocks() -> None:
    """It would join reads that have just been abandoned, and be answered with a miss."""

    async def test(scenario_world: World) -> None:
        bench, hashes = scenario_world.bench, scenario_world.chains[1]
        spaces = [bench.space]
        blocker = asyncio.create_task(bench.acquire(scenario_world.chains[0]))
        await asyncio.sleep(0.01)
        end_ns = bench.loop.now_ns + 10_000 * MS
        leaves = asyncio.create_task(bench.node.acquire(1, spaces, hashes, end_ns))
        comes = asyncio.create_task(bench.node.acquire(1, spaces, hashes, end_ns))
        await asyncio.sleep(0.01)
        comes.cancel()
        await asyncio.sleep(0.01)
        # Close the last waiter as an abort does, with a new request in the same step of the loop.
        waiter = next(w for b in bench.node.promotions.under_way.values() for w in b.waiters)
        waiters = {w for b in bench.node.promotions.under_way.values() for w in b.waiters}
        assert waiter in waiters
        for each in waiters:
            if each.batches and next(iter(each.batches)).left[0] in hashes:
                each.close(bench.node.host)
        late = asyncio.create_task(bench.node.acquire(1, spaces, hashes, end_ns))
        leaves.cancel()
        lease = await late
        assert lease is not None
        assert len(lease.parts[0][1]) == CHAIN_BLOCKS
        bench.node.host.release(lease.lease_id, 1)
        assert await blocker == CHAIN_BLOCKS

    world(test, Behaviour(get_s=0.1, read_batches=1))


class Line:
    """A session's transport that records the daemon's messages."""

    def __init__(self) -> None:
        self.got: list[m.Message] = []
        self._wire = WireSession(Role.CLIENT, lambda message, _: self.got.append(message))

    def send(self, data: bytes, fd: int | None = None) -> None:
        assert fd is None
        self._wire.receive(memoryview(data))

    def finish(self) -> None:
        """The daemon ends the session."""

    def close(self) -> None:
        """The daemon knows that the client is gone."""

    def answers(self) -> list[m.Acquired]:
        return [message for message in self.got if isinstance(message, m.Acquired)]


def session(scenario_world: World, owner: int) -> tuple[Session, Line]:
    """Open a session with the namespace registered as handle 0."""
    bench = scenario_world.bench
    opened, line = Session(owner, bench.node, "test"), Line()
    opened.transport = line
    hello = m.Hello(m.PROTOCOL_VERSION, "test")
    for message in (hello, m.Register(1, SPACE.to_fields(), False)):
        opened.data(memoryview(encode(message)))
    return opened, line


def acquire(scenario_world: World, call: int, chain: int, deadline_ms: int = 5000) -> m.Acquire:
    return m.Acquire(call, [0], b"".join(scenario_world.chains[chain]), deadline_ms, 0, 0, 0)


@pytest.mark.parametrize("how", ["cancel", "death"])
def test_client_that_cancels_or_dies_frees_the_read_queue(how: str) -> None:
    """Its reads would go on, one batch after the other, ahead of those of other clients."""

    async def test(scenario_world: World) -> None:
        gone, line = session(scenario_world, 1)
        stays, other = session(scenario_world, 2)
        for chain in (0, 1):
            gone.data(memoryview(encode(acquire(scenario_world, 2 + chain, chain))))
        await asyncio.sleep(0.05)
        stays.data(memoryview(encode(acquire(scenario_world, 2, 2))))
        await asyncio.sleep(0.01)
        if how == "cancel":
            for call in (2, 3):
                gone.data(memoryview(encode(m.Cancel(call))))
        else:
            gone.closed()
        began_s = scenario_world.bench.loop.time()
        while not other.answers():
            await asyncio.sleep(0.01)
        assert other.answers()[0].blocks == CHAIN_BLOCKS
        # The read that was under way, and three of its own.
        assert scenario_world.bench.loop.time() - began_s == pytest.approx(0.34, abs=0.02)
        assert scenario_world.misbehaving[0].calls("get") == 4
        if how == "cancel":
            assert sorted((a.call, a.lease) for a in line.answers()) == [(2, 0), (3, 0)]
            gone.closed()
        scenario_world.bench.node.host.release(other.answers()[0].lease, 2)
        stays.closed()

    prefetch = replace_policy(PrefetchPolicy.WAIT_COMPLETE, timeout_max_ms=5000)
    world(test, Behaviour(get_s=0.1, read_batches=1), prefetch=prefetch)
