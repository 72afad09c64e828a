"""Write and prefetch policies of the whole node, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from tests.support import blocks
from tests.support.tiers.bench import Bench, Tier, config, run
from tierd.backend import Outcome, PutRequest
from tierd.config import PrefetchConfig, PrefetchPolicy, StorageConfig, WritePolicy
from tierd.core.l2.evictions import EVICTING_SHARE_MAX
from tierd.core.l3.prefetch import TRIAL_EVERY, deadline_ns
from tierd.core.l3.writes import DEMAND_EARLY
from tierd.daemon.session.acquiring import Patience
from tierd.errors import BackendError

MS = 1_000_000
L2_BLOCKS = 128


def writes(policy: WritePolicy, **keys: object) -> StorageConfig:
    return config("tier0", write_policy=policy, **keys)


def node(test: Callable[[Bench], Awaitable[None]], tier: StorageConfig) -> None:
    run(test, tier, blocks_in_l2=L2_BLOCKS)


def store(bench: Bench, count: int, tag: object) -> list[bytes]:
    """Store a chain as a session does, which has room made for the next one."""
    hashes = bench.store(count, tag)
    bench.node.memory.make_room_ahead(bench.space, count)
    return hashes


def written(bench: Bench) -> set[bytes]:
    return {key.block_hash for key in bench.raw[0].blocks}


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


# --- write_through ----------------------------------------------------------------------


def test_write_through_keeps_a_first_seen_prefix_that_is_evicted_at_once() -> None:
    """HiCache's write_through does not persist prefixes that are evicted before their backup
    began, and flushes nothing while its scheduler is idle."""

    async def test(bench: Bench) -> None:
        bench.raw[0].takes_s = 0.05
        stored: list[bytes] = []
        for tag in range(60):
            stored += store(bench, 4, tag)
            await asyncio.sleep(0.1)
        await asyncio.sleep(30)
        bench.node.check()
        assert len(set(stored)) > len(bench.space.items)
        assert written(bench) == set(stored)
        counters = bench.tiers[0].counters
        assert not counters["backup_dropped_total"]
        assert not counters["backup_skipped_total"]

    node(test, writes(WritePolicy.WRITE_THROUGH))


def test_parents_are_written_before_their_children() -> None:
    """A daemon that dies in between would leave blocks behind that no request can use."""

    async def test(bench: Bench) -> None:
        order: list[bytes] = []
        raw = bench.raw[0]
        put_many = raw.put_many

        async def noted(namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
            order.extend(request.block_hash for request in requests)
            return await put_many(namespace, requests)

        raw.put_many = noted  # type: ignore[method-assign]
        hashes = bench.store(30, "long")
        await bench.backed_up()
        assert order == hashes

    node(test, writes(WritePolicy.WRITE_THROUGH, write_batches=1))


@pytest.mark.parametrize("policy", WritePolicy)
def test_a_block_that_was_written_is_not_written_again(policy: WritePolicy) -> None:
    """HiCache's cache mode rewrites pages that the storage has: it leaves that to backends."""

    async def test(bench: Bench) -> None:
        demanding(bench, DEMAND_EARLY)
        hashes = bench.store(4, "again")
        for tag in range(60):
            store(bench, 4, tag)
            await bench.backed_up()
        puts = bench.tiers[0].counters["put_calls_total"]
        assert await bench.acquire(hashes) == 4, "from the tier"
        for request in range(1, 5):
            bench.node.learning.note([bench.space], hashes, request)
            bench.store(4, "again")
        await bench.backed_up()
        assert bench.tiers[0].counters["put_calls_total"] == puts

    node(
        test,
        writes(policy, write_share=1.0)
        if policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        else writes(policy),
    )


@pytest.mark.parametrize("policy", WritePolicy)
def test_a_write_that_failed_is_tried_again(policy: WritePolicy) -> None:
    """HiCache does not retry: one hiccup of a store would cost its hits for good."""

    async def test(bench: Bench) -> None:
        demanding(bench, DEMAND_EARLY)
        raw = bench.raw[0]
        put_many = raw.put_many

        async def failing(namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
            raise BackendError("connection reset")

        raw.put_many = failing  # type: ignore[method-assign]
        hashes = bench.store(4, "kept")
        await asyncio.sleep(1)
        assert not written(bench)
        raw.put_many = put_many  # type: ignore[method-assign]
        await asyncio.sleep(30)
        bench.node.learning.note([bench.space], hashes, 2)
        assert await bench.node.drain(10.0) == 0
        assert set(hashes) <= written(bench)
        bench.node.check()

    node(test, writes(policy))


# --- write_back -------------------------------------------------------------------------


def test_write_back_writes_what_is_evicted_and_nothing_else() -> None:
    """Every block would go to disk, or blocks that L2 has no room for would be lost."""

    async def test(bench: Bench) -> None:
        stored: list[bytes] = []
        for tag in range(80):
            stored += store(bench, 4, tag)
            await asyncio.sleep(0.05)
            bench.node.check()
        await bench.backed_up()
        bench.node.check()
        resident = set(bench.space.items)
        assert written(bench) == set(stored) - resident
        assert len(resident) > L2_BLOCKS * 3 // 4
        assert not bench.tiers[0].counters["backup_dropped_total"]

    node(test, writes(WritePolicy.WRITE_BACK))


def test_what_comes_back_pushes_out_nothing_that_is_not_written() -> None:
    """Each load would cost as many other blocks: a promotion needs slots at once, and what
    leaves for it would be dropped unless room had been made before."""

    async def test(bench: Bench) -> None:
        for tag in range(60):
            store(bench, 4, tag)
            await bench.backed_up()
        for tag in range(60):
            hashes, _ = blocks.chain(4, tag)
            assert await bench.acquire(hashes) == 4
            await bench.backed_up()
        assert bench.raw[0].calls("get") * 4 > L2_BLOCKS
        assert not bench.tiers[0].counters["backup_dropped_total"]

    node(test, writes(WritePolicy.WRITE_BACK))


def test_of_a_chain_that_leaves_at_once_the_prefix_is_kept() -> None:
    """Children without their parents would be written, which no request can use."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(100, "long")
        bench.forget()
        await bench.backed_up()
        kept = len(written(bench))
        assert 0 < kept < 100, "more than may be leaving is dropped"
        assert written(bench) == set(hashes[:kept])

    node(test, writes(WritePolicy.WRITE_BACK))


def test_a_leaving_block_keeps_its_slot_until_it_is_written_and_is_served_meanwhile() -> None:
    """A backup would be of whatever came into the slot, or a block in memory would be a miss."""

    async def test(bench: Bench) -> None:
        bench.raw[0].takes_s = 1.0
        first = bench.store(4, "first")
        more = 0
        while not bench.space.evicting:
            bench.store(4, more)
            more += 1
        leaving = [h for h in first if h not in bench.space.items]
        assert leaving, "the oldest blocks go first"
        # Right bytes and a lease: Bench.acquire looks at both.
        assert await bench.acquire(first, 0.0) == 4
        assert bench.node.host.revived_blocks == len(leaving)
        assert not bench.tiers[0].counters["get_calls_total"]
        await bench.backed_up()
        bench.node.check()
        assert set(leaving) <= written(bench)

    node(test, writes(WritePolicy.WRITE_BACK))


def test_write_back_never_keeps_an_engine_waiting_for_a_slow_tier() -> None:
    """HiCache's write_back copies within the eviction: a slow disk would stop the engine. Here
    what the tier cannot take is dropped and counted, and little of L2 waits for it."""

    async def test(bench: Bench) -> None:
        bench.raw[0].hangs = {"put"}
        began_ns = bench.loop.now_ns
        for tag in range(100):
            bench.store_at_once(4, tag)
            assert len(bench.space.evicting) <= L2_BLOCKS * EVICTING_SHARE_MAX
            bench.node.check()
        assert bench.loop.now_ns == began_ns
        assert bench.tiers[0].counters["backup_dropped_total"] > 200
        await asyncio.sleep(10)
        bench.node.check()
        assert not bench.space.evicting, "given up, and free"

    node(test, writes(WritePolicy.WRITE_BACK))


def test_a_failed_write_of_a_leaving_block_frees_its_slot() -> None:
    """Each error of a disk would cost a slot for ever, as host memory leaked in HiCache when
    its backup thread had died."""

    async def test(bench: Bench) -> None:
        failing = bench.raw[0]

        async def put_many(namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
            raise BackendError("no space left on device")

        failing.put_many = put_many  # type: ignore[method-assign]
        for tag in range(80):
            bench.store(4, tag)
            await asyncio.sleep(0.05)
        await asyncio.sleep(10)
        bench.check_nothing_is_left()
        assert not bench.space.evicting

    node(test, writes(WritePolicy.WRITE_BACK))


def test_a_stop_writes_what_only_l2_has() -> None:
    """An upgrade of the daemon would lose all that write_back had put off."""

    async def test(bench: Bench) -> None:
        stored = bench.store(20, "kept")
        await asyncio.sleep(1)
        assert not written(bench)
        assert await bench.node.drain(5.0) == 0
        assert written(bench) == set(stored)
        # Sessions go on until the end of the drain.
        late = bench.store(3, "late")
        assert await bench.node.drain(5.0) == 0
        assert set(late) <= written(bench)

    node(test, writes(WritePolicy.WRITE_BACK))


def test_a_stop_does_not_wait_for_a_tier_that_takes_no_writes() -> None:
    """systemd would kill the daemon in the middle of its drain of the others."""

    async def test(bench: Bench) -> None:
        bench.raw[0].hangs = {"put"}
        bench.store(20, "kept")
        began_ns = bench.loop.now_ns
        assert await bench.node.drain(60.0) == 20
        assert bench.loop.now_ns - began_ns < 5000 * MS

    node(test, writes(WritePolicy.WRITE_BACK))


# --- selective --------------------------------------------------------------------------


def demanding(bench: Bench, demand: float) -> None:
    """Have the tier's budget come to a demand."""
    budget = bench.node.backups.queues[0].writes.budget
    budget.demand, budget._first_steps = demand, 0


def test_one_request_does_not_make_its_blocks_worth_writing() -> None:
    """Chunks, a preemption and a renewed lease of one request would each count as a use, and
    what is read once would be written."""

    async def test(bench: Bench) -> None:
        demanding(bench, 2 * DEMAND_EARLY)
        # As likely a reuse as can be: it is not what is tested here.
        reuse = bench.space.reuse
        reuse.chance = lambda block_hash, horizon_s: 1.0  # type: ignore[method-assign]
        hashes, _ = blocks.chain(8, "one")
        spaces = [bench.space]
        for end in (2, 4, 8):
            bench.node.learning.note(spaces, hashes[:end], request=1)
            bench.store(end, "one")
        bench.node.learning.note(spaces, hashes, request=1)
        await asyncio.sleep(1)
        assert not written(bench)
        bench.node.learning.note(spaces, hashes, request=2)
        await bench.backed_up()
        assert written(bench) == set(hashes)

    node(test, writes(WritePolicy.WRITE_THROUGH_SELECTIVE, write_share=1.0))


def test_a_hit_that_a_refusal_cost_is_counted() -> None:
    """An operator could not see that the budget is too small for the traffic."""

    async def test(bench: Bench) -> None:
        demanding(bench, 1.0)
        hashes = bench.store(8, "refused")
        bench.forget()
        counters = bench.tiers[0].counters
        assert counters["backup_refused_total"] == 8
        bench.node.learning.note([bench.space], hashes, request=2)
        bench.node.learning.note([bench.space], hashes, request=3)
        await bench.learned()
        assert counters["refused_hits_total"] == 8, "each refusal costs at most one hit"
        assert not written(bench)

    node(test, writes(WritePolicy.WRITE_THROUGH_SELECTIVE, write_share=0.01))


def test_what_the_tier_has_already_costs_no_budget() -> None:
    """Prompts stored again after a restart would eat the budget of new ones."""

    async def test(bench: Bench) -> None:
        demanding(bench, DEMAND_EARLY)
        bench.store(8, "again")
        await bench.backed_up()
        budget = bench.node.backups.queues[0].writes.budget
        spent_bytes = budget._written_bytes
        for _ in range(5):
            bench.forget()
            bench.store(8, "again")
            await bench.backed_up()
            demanding(bench, DEMAND_EARLY)
        assert budget._written_bytes <= spent_bytes
        assert bench.tiers[0].status()["counters"]["put_present_total"] == 40  # type: ignore[index]

    node(test, writes(WritePolicy.WRITE_THROUGH_SELECTIVE))


def test_what_a_tier_could_not_take_costs_no_budget() -> None:
    """After an outage the budget would be gone, with nothing written."""

    async def test(bench: Bench) -> None:
        demanding(bench, DEMAND_EARLY)
        bench.raw[0].hangs = {"put"}
        for tag in range(12):
            store(bench, 8, tag)
        await asyncio.sleep(10)
        bench.node.check()
        assert not written(bench)
        assert bench.node.backups.queues[0].writes.budget._written_bytes == 0

    node(test, writes(WritePolicy.WRITE_THROUGH_SELECTIVE))


def test_writes_that_were_worth_it_are_counted() -> None:
    """A tier whose blocks are never read would look as useful as one whose are."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(8, "read")
        bench.store(8, "never read")
        await bench.backed_up()
        for _ in range(3):
            bench.forget()
            assert await bench.acquire(hashes) == 8
        assert bench.tiers[0].counters["written_and_read_total"] == 8

    node(test, writes(WritePolicy.WRITE_THROUGH))


# --- prefetch: how long -----------------------------------------------------------------


def wait_ms(keys: dict[str, object], *, waited: int, client: int, tokens: int) -> int:
    given = PrefetchConfig(**keys)  # type: ignore[arg-type]
    end = deadline_ns(
        given, now_ns=10**12, waited_ms=waited, client_ms=client, missing_tokens=tokens
    )
    return (end - 10**12) // MS


@pytest.mark.parametrize(
    ("keys", "waited", "client", "tokens", "expected"),
    [
        ({}, 0, 60_000, 0, 1000),
        ({}, 0, 60_000, 4096, 2000),
        ({}, 0, 60_000, 1 << 20, 30_000),
        # HiCache starts its clock at the first blocked poll of the scheduler.
        ({}, 600, 60_000, 0, 400),
        ({}, 5000, 60_000, 4096, 0),
        ({}, 0, 300, 4096, 300),
        ({"policy": PrefetchPolicy.WAIT_COMPLETE}, 0, 60_000, 0, 30_000),
        ({"policy": PrefetchPolicy.WAIT_COMPLETE}, 10_000, 60_000, 0, 20_000),
        ({"policy": PrefetchPolicy.WAIT_COMPLETE}, 0, 2000, 0, 2000),
        ({"policy": PrefetchPolicy.BEST_EFFORT, "timeout_max_ms": 700}, 0, 2000, 0, 700),
    ],
)
def test_deadlines(keys, waited, client, tokens, expected) -> None:
    """A request would wait longer than the operator, or the engine, allows."""
    assert wait_ms(keys, waited=waited, client=client, tokens=tokens) == expected


def prefetching(
    test: Callable[[Bench], Awaitable[None]], prefetch: PrefetchConfig, **keys: object
) -> None:
    """Run a test with 24 blocks that only the tier has, `bench.store(24)` gives their hashes."""

    async def prepared(bench: Bench) -> None:
        bench.store(24)
        await bench.backed_up()
        bench.forget()
        bench.node.prefetch = prefetch
        await test(bench)

    run(prepared, config("tier0", **keys), blocks_in_l2=L2_BLOCKS)


async def answered(
    bench: Bench, *, waited_ms: int = 0, client_ms: int = 60_000, ready_s: float | None = None
) -> tuple[int, float]:
    """Blocks and ms of an ACQUIRE of the 24 blocks, as a session would ask for them."""
    hashes, _ = blocks.chain(24)
    spaces, began_ns = [bench.space], bench.loop.now_ns
    end_ns = bench.deadline_ns(hashes, waited_ms=waited_ms, client_ms=client_ms)
    patience = Patience()
    if ready_s is not None:
        bench.loop.call_later(ready_s, patience.end)
    lease = await bench.node.acquire(
        1, spaces, hashes, end_ns, patience=patience, waited_ms=waited_ms
    )
    took_ms = (bench.loop.now_ns - began_ns) / MS
    bench.node.check()
    if lease is None:
        return 0, took_ms
    bench.node.host.release(lease.lease_id, 1)
    return len(lease.parts[0][1]), took_ms


POLICIES = {
    PrefetchPolicy.TIMEOUT: 300 + 100 * 24 * 16 / 1024,
    PrefetchPolicy.WAIT_COMPLETE: 900,
    PrefetchPolicy.BEST_EFFORT: 200,
}
"""Longest wait in ms with `PATIENCE`, and an engine that is ready after 200 ms."""


def patience_of(policy: PrefetchPolicy) -> PrefetchConfig:
    return PrefetchConfig(
        policy=policy,
        timeout_base_ms=300,
        timeout_per_ki_ms=100,
        timeout_max_ms=900,
        min_tokens=0,
    )


@pytest.mark.parametrize("policy", list(PrefetchPolicy))
@pytest.mark.parametrize("tier", ["fast", "slow", "hanging", "dying"])
def test_each_policy_keeps_its_deadline(policy: PrefetchPolicy, tier: str) -> None:
    """A request would wait for ever for a disk: HiCache's wait_complete did, when a read was
    revoked or had failed, and its timeout was ignored while a read was pending."""

    async def test(bench: Bench) -> None:
        raw = bench.raw[0]
        if tier == "slow":
            raw.takes_s = 0.5
        elif tier == "hanging":
            raw.hangs = {"get"}
            raw.lingers_s = 5.0
        elif tier == "dying":
            bench.loop.call_later(0.05, raw.hangs.update, {"get", "contains"})
            raw.takes_s = 0.03
        ready_s = 0.2 if policy is PrefetchPolicy.BEST_EFFORT else None
        count, took_ms = await answered(bench, ready_s=ready_s)
        assert took_ms <= POLICIES[policy] + 10
        if tier == "fast":
            assert (count, took_ms < 10) == (24, True)
        # What has come by then is used.
        assert count <= 24

    prefetching(test, patience_of(policy))


def test_time_that_a_request_has_waited_counts() -> None:
    """A request that sat in the engine's queue would wait a whole deadline more."""

    async def test(bench: Bench) -> None:
        bench.raw[0].hangs = {"get"}
        _, took_ms = await answered(bench, waited_ms=250)
        assert took_ms == pytest.approx(POLICIES[PrefetchPolicy.TIMEOUT] - 250, abs=10)

    prefetching(test, patience_of(PrefetchPolicy.TIMEOUT))


def test_wait_complete_ends_when_all_is_known_to_fail() -> None:
    """A request would wait out the hard cap for blocks that cannot come any more."""

    async def test(bench: Bench) -> None:
        async def contains(namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
            raise BackendError("gone")

        bench.raw[0].contains_many = contains  # type: ignore[method-assign]
        count, took_ms = await answered(bench)
        assert (count, took_ms < 10) == (0, True)

    prefetching(test, patience_of(PrefetchPolicy.WAIT_COMPLETE))


def test_best_effort_takes_what_is_there_when_the_engine_is_ready() -> None:
    """A partial prefix would be thrown away, or a tier blamed for an engine that was quick."""

    async def test(bench: Bench) -> None:
        hashes, _ = blocks.chain(24)
        assert await bench.acquire(hashes[:8]) == 8
        bench.raw[0].takes_s = 0.2
        count, took_ms = await answered(bench, ready_s=0.25)
        assert took_ms == pytest.approx(250, abs=10)
        assert count == 8
        assert bench.node.counters["best_effort_ended_total"] == 1
        assert not bench.node.counters["deadline_missed_total"]
        assert bench.tiers[0].reads_allowed

    prefetching(test, patience_of(PrefetchPolicy.BEST_EFFORT), read_batches=1)


# --- prefetch: how much -----------------------------------------------------------------


def test_a_short_prefix_is_not_fetched() -> None:
    """A question and a read of the store for what the engine computes in 10 ms."""

    async def test(bench: Bench) -> None:
        calls = len(bench.raw[0].log)
        assert await answered(bench) == (0, 0)
        assert len(bench.raw[0].log) == calls, "not even asked"

    prefetching(test, PrefetchConfig(min_tokens=24 * 16 + 1))


def test_what_tiers_have_of_a_long_prefix_may_be_too_short() -> None:
    """As above, for a long prompt of which only the start is known."""

    async def test(bench: Bench) -> None:
        hashes, _ = blocks.chain(64)
        end_ns = bench.loop.now_ns + 10**10
        assert await bench.node.acquire(1, [bench.space], hashes, end_ns) is None
        assert bench.raw[0].calls("get") == 0
        bench.node.prefetch = PrefetchConfig(min_tokens=24 * 16)
        lease = await bench.node.acquire(1, [bench.space], hashes, end_ns)
        assert lease is not None
        assert len(lease.parts[0][1]) == 24

    prefetching(test, PrefetchConfig(min_tokens=24 * 16 + 1))


def test_a_prefix_that_is_most_of_memory_comes_whole() -> None:
    """It would be cut to what may be reserved at once, as HiCache cuts a hit of its storage to
    the room there is in its host memory."""

    async def test(bench: Bench) -> None:
        hashes: list[bytes] = []
        while len(hashes) < 100:
            hashes = bench.store(len(hashes) + 20, "long")
            await bench.backed_up()
        bench.forget()
        assert await bench.acquire(hashes) == 100
        assert not bench.node.counters["promotion_no_room_total"]

    node(test, writes(WritePolicy.WRITE_THROUGH))


def test_loads_slower_than_computing_are_refused_but_for_a_trial() -> None:
    """A hit would make a request slower than a miss; or a tier that was slow once would never
    be used again."""

    async def test(bench: Bench) -> None:
        hashes, _ = blocks.chain(24)
        bench.raw[0].takes_s = 0.1

        async def ask(prefill_tokens_per_s: int) -> int:
            bench.forget()
            end_ns = bench.loop.now_ns + 10**10
            lease = await bench.node.acquire(
                1, [bench.space], hashes, end_ns, prefill_tokens_per_s=prefill_tokens_per_s
            )
            if lease is None:
                return 0
            bench.node.host.release(lease.lease_id, 1)
            return len(lease.parts[0][1])

        assert await ask(10**6) == 24, "nothing is measured yet"
        counters = bench.node.counters
        found = [await ask(10**6) for _ in range(TRIAL_EVERY)]
        assert found == [0] * (TRIAL_EVERY - 1) + [24]
        assert counters["loads_refused_total"] == TRIAL_EVERY - 1
        assert await ask(100) == 24, "a slow engine has it brought"
        assert await ask(0) == 24, "and so has one that does not say"
        assert counters["acquired_blocks_total"] == 4 * 24
        assert counters["loads_refused_total"] == TRIAL_EVERY - 1

    prefetching(test, PrefetchConfig(min_tokens=0))


def test_the_request_that_has_waited_longest_is_read_for_first() -> None:
    """A request would starve behind later ones, as in HiCache's scan of its whole queue."""

    async def test(bench: Bench) -> None:
        raw = bench.raw[0]
        chains = {}
        for tag in ("blocker", "late", "early"):
            chains[tag] = bench.store(4, tag)
            await bench.backed_up()
        bench.forget()
        bench.node.prefetch = PrefetchConfig(min_tokens=0)
        raw.takes_s = 0.1
        done: list[str] = []

        async def ask(tag: str, waited_ms: int) -> None:
            end_ns = bench.loop.now_ns + 10**10
            lease = await bench.node.acquire(
                1, [bench.space], chains[tag], end_ns, waited_ms=waited_ms
            )
            assert lease is not None
            done.append(tag)

        async with asyncio.TaskGroup() as group:
            group.create_task(ask("blocker", 0))
            await asyncio.sleep(0.05)
            group.create_task(ask("late", 0))
            await asyncio.sleep(0.01)
            group.create_task(ask("early", 5000))
        assert done == ["blocker", "early", "late"]

    run(test, config("tier0", read_batches=1), blocks_in_l2=L2_BLOCKS, raw=[Tier()])
