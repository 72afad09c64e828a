"""Policies of a node whose tiers have bugs or fail midway: faults that HiCache's users met."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.support import blocks
from tests.support.tiers.bench import Bench, config, run
from tierd.backend import GetRequest, GetResult, Outcome, PutRequest
from tierd.config import PrefetchConfig, PrefetchPolicy, StorageConfig, WritePolicy
from tierd.errors import BackendError

MS = 1_000_000
L2_BLOCKS = 128
CHAIN_BLOCKS = 24
CAP_MS = 5000


def waiting(policy: PrefetchPolicy, base_ms: int = 1000) -> PrefetchConfig:
    return PrefetchConfig(
        policy=policy,
        min_tokens=0,
        timeout_base_ms=base_ms,
        timeout_per_ki_ms=0,
        timeout_max_ms=CAP_MS,
    )


def tier(policy: WritePolicy = WritePolicy.WRITE_THROUGH, **keys: object) -> StorageConfig:
    return config("tier0", write_policy=policy, deadline_ms=60_000, slow_ms=60_000, **keys)


async def ask(bench: Bench, hashes: Sequence[bytes], waited_ms: int = 0) -> tuple[int, int]:
    """Acquire as a session does; returns the number of blocks, and the time rounded to 10 ms."""
    spaces, began_ns = [bench.space], bench.loop.now_ns
    end_ns = bench.deadline_ns(hashes, waited_ms=waited_ms, client_ms=10 * CAP_MS)
    lease = await bench.node.acquire(1, spaces, hashes, end_ns, waited_ms=waited_ms)
    took_ms = round((bench.loop.now_ns - began_ns) / MS / 10) * 10
    bench.node.check()
    if lease is None:
        return 0, took_ms
    for block_hash, slot in zip(hashes, lease.parts[0][1], strict=False):
        right = blocks.payload(bench.space.namespace, block_hash)
        assert bench.node.memory.payload(bench.space, slot) == right
    bench.node.host.release(lease.lease_id, 1)
    return len(lease.parts[0][1]), took_ms


async def only_in_tier(bench: Bench, *tags: object) -> list[list[bytes]]:
    """Store chains that the tier has and L2 lacks."""
    chains = []
    for tag in tags:
        chains.append(bench.store(CHAIN_BLOCKS, tag))
        await bench.backed_up()
    bench.forget()
    return chains


@pytest.mark.parametrize("error", [BackendError("connection reset"), ZeroDivisionError("a bug")])
@pytest.mark.parametrize("policy", WritePolicy)
def test_backups_continue_after_errors_and_bugs_of_a_backend(
    policy: WritePolicy, error: Exception
) -> None:
    """HiCache's backup thread died of the first exception: nothing was written afterwards, and the
    memory of queued writes was never freed."""

    async def test(bench: Bench) -> None:
        raw = bench.raw[0]
        put_many = raw.put_many

        async def failing(namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
            raise error

        raw.put_many = failing  # type: ignore[method-assign]
        for tag in range(100):
            bench.store_at_once(4, tag)
            await asyncio.sleep(0.1)
        await asyncio.sleep(30)
        bench.check_nothing_is_left()
        assert not bench.space.evicting
        raw.put_many = put_many  # type: ignore[method-assign]
        await asyncio.sleep(30)
        bench.store(4, "well")
        assert await bench.node.drain(10.0) == 0
        assert set(blocks.chain(4, "well")[0]) <= {key.block_hash for key in raw.blocks}

    run(test, tier(policy), blocks_in_l2=L2_BLOCKS)


@pytest.mark.parametrize("error", [BackendError("connection reset"), ZeroDivisionError("a bug")])
@pytest.mark.parametrize("what", ["contains_many", "get_into"])
@pytest.mark.parametrize("policy", PrefetchPolicy)
def test_acquire_ends_at_once_when_a_backend_fails(
    policy: PrefetchPolicy, what: str, error: Exception
) -> None:
    """HiCache's wait_complete never ended after an error in batch_get; a request would wait until
    its deadline for blocks that can no longer arrive."""

    async def test(bench: Bench) -> None:
        (hashes,) = await only_in_tier(bench, "a")
        bench.node.prefetch = waiting(policy)
        raw, right = bench.raw[0], getattr(bench.raw[0], what)

        async def failing(namespace: bytes, asked: Sequence[object]) -> list[object]:
            raise error

        setattr(raw, what, failing)
        for _ in range(2):
            assert await ask(bench, hashes) == (0, 0)
        setattr(raw, what, right)
        await asyncio.sleep(30)
        assert (await ask(bench, hashes))[0] == CHAIN_BLOCKS
        bench.check_nothing_is_left()

    run(test, tier(), blocks_in_l2=L2_BLOCKS)


@pytest.mark.parametrize("policy", PrefetchPolicy)
def test_blocks_that_no_tier_has_are_not_waited_for(policy: PrefetchPolicy) -> None:
    """HiCache's wait_complete waited for a prefetch of no pages."""

    async def test(bench: Bench) -> None:
        (hashes,) = await only_in_tier(bench, "a")
        bench.node.prefetch = waiting(policy)
        for asked in ([], blocks.chain(CHAIN_BLOCKS, "nobody's")[0]):
            assert await ask(bench, asked) == (0, 0)
        get_into = bench.raw[0].get_into

        async def emptied(namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
            """The blocks disappear between the lookup and the read."""
            bench.raw[0].blocks.clear()
            return await get_into(namespace, requests)

        bench.raw[0].get_into = emptied  # type: ignore[method-assign]
        assert await ask(bench, hashes) == (0, 0)
        bench.check_nothing_is_left()

    run(test, tier(), blocks_in_l2=L2_BLOCKS)


def test_request_with_all_its_blocks_does_not_wait_behind_others() -> None:
    """HiCache looks at finished prefetches only when its queue scan reaches them: a hit would wait
    for those of others."""

    async def test(bench: Bench) -> None:
        slow, quick = await only_in_tier(bench, "slow", "quick")
        bench.node.prefetch = waiting(PrefetchPolicy.WAIT_COMPLETE)
        get_into = bench.raw[0].get_into

        async def some_hang(namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
            if requests[0].block_hash in slow:
                await asyncio.sleep(3)
            return await get_into(namespace, requests)

        bench.raw[0].get_into = some_hang  # type: ignore[method-assign]
        waits = asyncio.create_task(ask(bench, slow))
        await asyncio.sleep(0.01)
        assert await ask(bench, quick) == (CHAIN_BLOCKS, 0)
        assert await waits == (CHAIN_BLOCKS, 3000)

    run(test, tier(), blocks_in_l2=L2_BLOCKS)


def test_misses_use_up_no_read_capacity() -> None:
    """HiCache's limit counts requested tokens, not hits: long new prompts would keep others from
    being prefetched."""

    async def test(bench: Bench) -> None:
        (hashes,) = await only_in_tier(bench, "a")
        bench.node.prefetch = waiting(PrefetchPolicy.WAIT_COMPLETE)
        bench.raw[0].takes_s = 0.1
        new = [blocks.chain(5000, tag)[0] for tag in range(8)]
        others = [asyncio.create_task(ask(bench, each)) for each in new]
        await asyncio.sleep(0.01)
        assert await ask(bench, hashes) == (CHAIN_BLOCKS, 200)
        for other in others:
            assert (await other)[0] == 0

    run(test, tier(), blocks_in_l2=L2_BLOCKS)


def test_retry_after_a_missed_deadline_gets_the_rest() -> None:
    """HiCache does not retry a prefetch whose deadline has passed: one slow moment of a store would
    cost a preempted request its whole prefix again."""

    async def test(bench: Bench) -> None:
        (hashes,) = await only_in_tier(bench, "a")
        bench.node.prefetch = waiting(PrefetchPolicy.TIMEOUT, base_ms=250)
        bench.raw[0].takes_s = 0.2
        assert await ask(bench, hashes) == (0, 250)
        # The read that was under way continues, and is used.
        await asyncio.sleep(0.2)
        assert await ask(bench, hashes) == (CHAIN_BLOCKS, 0)
        assert bench.raw[0].calls("get") == 1

    run(test, tier(), blocks_in_l2=L2_BLOCKS)


def test_throughput_recovers_after_an_overload() -> None:
    """HiCache's throughput fell under pressure and never recovered."""

    async def test(bench: Bench) -> None:
        tags = [f"chain {number}" for number in range(20)]
        chains = await only_in_tier(bench, *tags)
        bench.node.prefetch = waiting(PrefetchPolicy.TIMEOUT, base_ms=500)
        assert (await ask(bench, chains[0]))[0] == CHAIN_BLOCKS
        bench.forget()
        bench.raw[0].takes_s = 0.3
        async with asyncio.TaskGroup() as group:
            for number in range(200):
                group.create_task(ask(bench, chains[number % len(chains)], waited_ms=number))
        await asyncio.sleep(5)
        bench.check_nothing_is_left()
        assert not bench.node.promotions.read_scheduler.bytes_in_flight
        assert bench.tiers[0].reads.free == bench.tiers[0].config.read_batches
        bench.raw[0].takes_s = 0.0
        for chain in chains:
            assert await ask(bench, chain) == (CHAIN_BLOCKS, 0)

    run(test, tier(), blocks_in_l2=L2_BLOCKS)
