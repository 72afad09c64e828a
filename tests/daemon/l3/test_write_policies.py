"""Write policies of a whole node, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from tests.support import blocks
from tests.support.tiers.bench import Bench, config, run
from tierd.backend import Outcome, PutRequest
from tierd.config import StorageConfig, WritePolicy
from tierd.core.l2.evictions import EVICTING_SHARE_MAX
from tierd.core.l3.writes import DEMAND_EARLY
from tierd.errors import BackendError

MS = 1_000_000
L2_BLOCKS = 128


def tier_config(policy: WritePolicy, **keys: object) -> StorageConfig:
    return config("tier0", write_policy=policy, **keys)


def run_with_tier(test: Callable[[Bench], Awaitable[None]], tier: StorageConfig) -> None:
    run(test, tier, blocks_in_l2=L2_BLOCKS)


def store(bench: Bench, count: int, tag: object) -> list[bytes]:
    """Store a chain as a session does, which also makes room for the next store."""
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


def test_write_through_backs_up_blocks_that_are_evicted_at_once() -> None:
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

    run_with_tier(test, tier_config(WritePolicy.WRITE_THROUGH))


def test_backups_write_parents_before_children() -> None:
    """A daemon that dies in between would leave blocks behind that no request can use."""

    async def test(bench: Bench) -> None:
        order: list[bytes] = []
        raw = bench.raw[0]
        put_many = raw.put_many

        async def record_order(namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
            order.extend(request.block_hash for request in requests)
            return await put_many(namespace, requests)

        raw.put_many = record_order  # type: ignore[method-assign]
        hashes = bench.store(30, "long")
        await bench.backed_up()
        assert order == hashes

    run_with_tier(test, tier_config(WritePolicy.WRITE_THROUGH, write_batches=1))


@pytest.mark.parametrize("policy", WritePolicy)
def test_written_blocks_are_not_written_again(policy: WritePolicy) -> None:
    """HiCache's cache mode rewrites pages that the storage has, unless the backend checks."""

    async def test(bench: Bench) -> None:
        set_demand(bench, DEMAND_EARLY)
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

    run_with_tier(
        test,
        tier_config(policy, write_share=1.0)
        if policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        else tier_config(policy),
    )


@pytest.mark.parametrize("policy", WritePolicy)
def test_failed_writes_are_retried(policy: WritePolicy) -> None:
    """HiCache does not retry: one failed call would cost the block's hits permanently."""

    async def test(bench: Bench) -> None:
        set_demand(bench, DEMAND_EARLY)
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

    run_with_tier(test, tier_config(policy))


# --- write_back -------------------------------------------------------------------------


def test_write_back_writes_only_evicted_blocks() -> None:
    """Every block would go to disk, or evicted blocks would be lost."""

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

    run_with_tier(test, tier_config(WritePolicy.WRITE_BACK))


def test_write_back_promotions_drop_no_unwritten_block() -> None:
    """A promotion needs slots at once: without room made ahead, each load would drop as many
    unwritten blocks."""

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

    run_with_tier(test, tier_config(WritePolicy.WRITE_BACK))


def test_write_back_keeps_the_prefix_of_a_chain_evicted_at_once() -> None:
    """Blocks without their parents would be written, which no request can use."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(100, "long")
        bench.forget()
        await bench.backed_up()
        kept = len(written(bench))
        assert 0 < kept < 100, "blocks beyond the evicting limit are dropped"
        assert written(bench) == set(hashes[:kept])

    run_with_tier(test, tier_config(WritePolicy.WRITE_BACK))


def test_evicting_block_is_served_until_it_is_written() -> None:
    """The backup would read a reused slot, or a block in memory would be a miss."""

    async def test(bench: Bench) -> None:
        bench.raw[0].takes_s = 1.0
        first = bench.store(4, "first")
        more = 0
        while not bench.space.evicting:
            bench.store(4, more)
            more += 1
        evicted = [h for h in first if h not in bench.space.items]
        assert evicted, "the oldest blocks are evicted first"
        # Bench.acquire compares the bytes and the lease.
        assert await bench.acquire(first, 0.0) == 4
        assert bench.node.host.revived_blocks == len(evicted)
        assert not bench.tiers[0].counters["get_calls_total"]
        await bench.backed_up()
        bench.node.check()
        assert set(evicted) <= written(bench)

    run_with_tier(test, tier_config(WritePolicy.WRITE_BACK))


def test_write_back_to_a_hanging_tier_does_not_delay_stores() -> None:
    """HiCache's write_back copies during the eviction: a slow disk would stop the engine. tierd
    drops and counts the blocks that the tier cannot take, and keeps only a small share of L2
    waiting."""

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
        assert not bench.space.evicting, "abandoned and freed"

    run_with_tier(test, tier_config(WritePolicy.WRITE_BACK))


def test_failed_write_of_an_evicting_block_frees_its_slot() -> None:
    """Each disk error would leak a slot, as host memory leaked in HiCache after its backup thread
    had died."""

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

    run_with_tier(test, tier_config(WritePolicy.WRITE_BACK))


def test_drain_writes_blocks_that_only_l2_has() -> None:
    """An upgrade of the daemon would lose all writes that write_back had deferred."""

    async def test(bench: Bench) -> None:
        stored = bench.store(20, "kept")
        await asyncio.sleep(1)
        assert not written(bench)
        assert await bench.node.drain(5.0) == 0
        assert written(bench) == set(stored)
        # Sessions stay open until the end of the drain.
        late = bench.store(3, "late")
        assert await bench.node.drain(5.0) == 0
        assert set(late) <= written(bench)

    run_with_tier(test, tier_config(WritePolicy.WRITE_BACK))


def test_drain_does_not_wait_for_a_tier_that_accepts_no_writes() -> None:
    """systemd would kill the daemon before it has drained the other tiers."""

    async def test(bench: Bench) -> None:
        bench.raw[0].hangs = {"put"}
        bench.store(20, "kept")
        began_ns = bench.loop.now_ns
        assert await bench.node.drain(60.0) == 20
        assert bench.loop.now_ns - began_ns < 5000 * MS

    run_with_tier(test, tier_config(WritePolicy.WRITE_BACK))


# --- write_through_selective ------------------------------------------------------------


def set_demand(bench: Bench, demand: float) -> None:
    """Set the demand of the tier's write budget."""
    budget = bench.node.backups.queues[0].writes.budget
    budget.demand, budget._first_steps = demand, 0


def test_repeated_use_by_one_request_does_not_admit_a_write() -> None:
    """Chunks, a preemption and a renewed lease of one request would each count as a use, and blocks
    read once would be written."""

    async def test(bench: Bench) -> None:
        set_demand(bench, 2 * DEMAND_EARLY)
        # Maximal chance of reuse, so that only the number of uses decides.
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

    run_with_tier(test, tier_config(WritePolicy.WRITE_THROUGH_SELECTIVE, write_share=1.0))


def test_hits_lost_to_refused_writes_are_counted() -> None:
    """An operator could not see that the budget is too small for the traffic."""

    async def test(bench: Bench) -> None:
        set_demand(bench, 1.0)
        hashes = bench.store(8, "refused")
        bench.forget()
        counters = bench.tiers[0].counters
        assert counters["backup_refused_total"] == 8
        bench.node.learning.note([bench.space], hashes, request=2)
        bench.node.learning.note([bench.space], hashes, request=3)
        await bench.learned()
        assert counters["refused_hits_total"] == 8, "each refusal costs at most one hit"
        assert not written(bench)

    run_with_tier(test, tier_config(WritePolicy.WRITE_THROUGH_SELECTIVE, write_share=0.01))


def test_blocks_already_in_the_tier_cost_no_write_budget() -> None:
    """Prompts stored again after a restart would use up the budget of new ones."""

    async def test(bench: Bench) -> None:
        set_demand(bench, DEMAND_EARLY)
        bench.store(8, "again")
        await bench.backed_up()
        budget = bench.node.backups.queues[0].writes.budget
        spent_bytes = budget._written_bytes
        for _ in range(5):
            bench.forget()
            bench.store(8, "again")
            await bench.backed_up()
            set_demand(bench, DEMAND_EARLY)
        assert budget._written_bytes <= spent_bytes
        assert bench.tiers[0].status()["counters"]["put_present_total"] == 40  # type: ignore[index]

    run_with_tier(test, tier_config(WritePolicy.WRITE_THROUGH_SELECTIVE))


def test_failed_writes_cost_no_write_budget() -> None:
    """After an outage the budget would be spent with nothing written."""

    async def test(bench: Bench) -> None:
        set_demand(bench, DEMAND_EARLY)
        bench.raw[0].hangs = {"put"}
        for tag in range(12):
            store(bench, 8, tag)
        await asyncio.sleep(10)
        bench.node.check()
        assert not written(bench)
        assert bench.node.backups.queues[0].writes.budget._written_bytes == 0

    run_with_tier(test, tier_config(WritePolicy.WRITE_THROUGH_SELECTIVE))


def test_blocks_written_and_later_read_are_counted() -> None:
    """A tier whose blocks are never read would look as useful as any other."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(8, "read")
        bench.store(8, "never read")
        await bench.backed_up()
        for _ in range(3):
            bench.forget()
            assert await bench.acquire(hashes) == 8
        assert bench.tiers[0].counters["written_and_read_total"] == 8

    run_with_tier(test, tier_config(WritePolicy.WRITE_THROUGH))
