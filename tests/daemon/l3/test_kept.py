"""Uses in host memory keep blocks in tiers that evict: they are reported and rewritten."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from tests.support.tiers.bench import DEADLINE_S, PAGE, Bench, Tier, config, key, run
from tierd.backend import HEADER_BYTES
from tierd.config import WritePolicy
from tierd.daemon.l3.renewal import ASK_MAX, TELL_PAUSE_S
from tierd.daemon.l3.tier_history import REST_S

HOT = 4
COLD = 8
WRITTEN = list(WritePolicy)


class SmallTier(Tier):
    """A tier of a few blocks that evicts the least recently used, and counts reported uses."""

    def __init__(self, blocks: int = 40) -> None:
        super().__init__()
        self._capacity_bytes = blocks * (PAGE + HEADER_BYTES)
        self.uses_every_s = 1.0
        self.hears = True

    @property
    def use_every_s(self) -> float:
        return self.uses_every_s

    async def use_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        await self._step("use", len(hashes))
        if self.hears:
            return await super().use_many(namespace, hashes)
        return [namespace + block_hash in self._index for block_hash in hashes]

    def lose(self, hashes: Sequence[bytes]) -> None:
        """Drop blocks without reporting it."""
        for block_hash in hashes:
            self._drop(key(block_hash))


async def use(bench: Bench, hashes: Sequence[bytes]) -> int:
    """Acquire as a request does; returns the length of the resident prefix."""
    settled, lease, count = bench.node.acquire_now(1, [bench.space], hashes)
    assert settled
    assert lease is not None
    bench.node.host.release(lease.lease_id, 1)
    bench.node.learning.note([bench.space], hashes, 0)
    await bench.learned()
    return count


async def uses_reported(bench: Bench) -> None:
    """Wait until all uses have been reported and their effects are done."""
    await bench.learned()
    while any(renewal.busy for renewal in bench.node.backups.renewals):
        await asyncio.sleep(0.01)
    await bench.backed_up()


def has(tier: Tier, hashes: Sequence[bytes]) -> int:
    return sum(key(block_hash) in tier.blocks for block_hash in hashes)


async def store_everywhere(bench: Bench) -> list[bytes]:
    """Store blocks in L2 and in the tier."""
    hashes = bench.store(HOT, "hot")
    await bench.backed_up()
    return hashes


def run_on(tier: SmallTier, test: Callable[[Bench], Awaitable[None]], **keys: object) -> None:
    """Run a test on a node with this tier, and assert that nothing is left under way."""

    async def whole(bench: Bench) -> None:
        await test(bench)
        bench.check_nothing_is_left()

    run(whole, config("tier", **keys), raw=[tier])


def test_blocks_used_in_host_memory_are_kept_by_an_evicting_tier() -> None:
    """A tier would evict a node's hottest prefix first, because host memory answers for it."""
    tier = SmallTier()

    async def test(bench: Bench) -> None:
        hot = await store_everywhere(bench)
        for number in range(30):
            bench.store(COLD, number)
            await bench.backed_up()
            assert await use(bench, hot) == HOT
            await uses_reported(bench)
            assert has(tier, hot) == HOT
            await asyncio.sleep(1.0)
        assert tier.calls("put") == 31, "it was never to be written again"

    run_on(tier, test)


def test_used_blocks_that_a_tier_has_dropped_are_written_again() -> None:
    """Other nodes would not find popular blocks until this node evicts them."""
    tier = SmallTier()

    async def test(bench: Bench) -> None:
        hot = await store_everywhere(bench)
        tier.lose(hot)
        # Blocks missing right after their write are no proof that the tier evicts.
        await asyncio.sleep(REST_S + 1)
        assert await use(bench, hot) == HOT
        await uses_reported(bench)
        assert has(tier, hot) == HOT

    run_on(tier, test)


def test_tier_too_small_for_the_used_blocks_is_not_rewritten_at_each_use() -> None:
    """A disk smaller than host memory would be worn out by rewriting blocks it drops."""
    tier = SmallTier(10)
    tier.hears = False

    async def test(bench: Bench) -> None:
        chains = [bench.store(5, number) for number in range(8)]
        await bench.backed_up()
        written = tier.calls("put")
        for _ in range(20):
            for hashes in chains:
                await use(bench, hashes)
            await uses_reported(bench)
            await asyncio.sleep(2.0)
        assert tier.calls("put") <= written + len(chains)

    run_on(tier, test)


@pytest.mark.parametrize("policy", WRITTEN)
def test_used_blocks_dropped_by_a_tier_are_written_before_eviction_from_l2(
    policy: WritePolicy,
) -> None:
    """A prefix used for hours would be lost when host memory evicts it."""
    tier = SmallTier()

    async def test(bench: Bench) -> None:
        hot = bench.store(HOT, "hot")
        for _ in range(3):
            await use(bench, hot)
        bench.forget()
        await bench.backed_up()
        assert await bench.acquire(hot) == HOT
        await uses_reported(bench)
        assert has(tier, hot) == HOT
        tier.lose(hot)
        bench.forget()
        await uses_reported(bench)
        assert has(tier, hot) == HOT
        assert await bench.acquire(hot) == HOT
        await uses_reported(bench)

    run_on(tier, test, write_policy=policy)


def test_block_used_once_is_evicted_without_asking_the_tier() -> None:
    """Each document read once would keep its slots for the duration of a lookup."""
    tier = SmallTier()

    async def test(bench: Bench) -> None:
        hashes = bench.store(COLD, "once")
        bench.node.learning.note([bench.space], hashes, 1)
        await bench.backed_up()
        bench.forget()
        assert not bench.space.evicting
        await uses_reported(bench)
        assert not tier.calls("use")

    run_on(tier, test)


@pytest.mark.parametrize("policy", WRITTEN)
def test_drain_writes_used_blocks_that_a_tier_has_dropped(policy: WritePolicy) -> None:
    """After an orderly restart the hottest prefix would be lost."""
    tier = SmallTier()

    async def test(bench: Bench) -> None:
        hot = await store_everywhere(bench)
        for _ in range(5):
            await use(bench, hot)
        await uses_reported(bench)
        cold = [bench.store(COLD, number) for number in range(20)]
        await bench.backed_up()
        tier.lose(hot)
        assert await bench.node.drain(10) == 0
        assert has(tier, hot) == HOT
        assert sum(has(tier, hashes) for hashes in cold) > 0

    run_on(tier, test, write_policy=policy)


def test_drain_does_not_wait_for_a_tier_that_does_not_answer() -> None:
    """A stop in an outage would take its whole budget."""
    tier = SmallTier()

    async def test(bench: Bench) -> None:
        hot = await store_everywhere(bench)
        for _ in range(5):
            await use(bench, hot)
        tier.hangs = {"use", "put", "get", "contains"}
        bench.store(1, "more")
        await asyncio.sleep(2 * DEADLINE_S + 1)
        began_s = bench.loop.time()
        await bench.node.drain(60)
        assert bench.loop.time() - began_s < 0.5

    run_on(tier, test)


def test_hanging_tier_delays_neither_requests_nor_evictions() -> None:
    """The engine would wait for a tier from which it has requested nothing."""
    tier = SmallTier()

    async def test(bench: Bench) -> None:
        hot = await store_everywhere(bench)
        tier.hangs = {"use"}
        began_s = bench.loop.time()
        for _ in range(5):
            assert await use(bench, hot) == HOT
        assert bench.loop.time() - began_s < 0.1
        for number in range(80):
            bench.store_at_once(COLD, number)
            await asyncio.sleep(0.01)
        await asyncio.sleep(3 * DEADLINE_S)
        # Blocks without an answer were neither taken for lost nor kept.
        assert not bench.space.evicting

    run_on(tier, test)


def test_use_reports_are_bounded_in_rate_and_size() -> None:
    """A server would get reports of the same prefix for each of thousands of requests a second."""
    tier = SmallTier(1000)

    async def test(bench: Bench) -> None:
        chains = [bench.store(20, number) for number in range(10)]
        await bench.backed_up()
        began_s = bench.loop.time()
        while bench.loop.time() - began_s < 5.0:
            for hashes in chains:
                await use(bench, hashes)
            await asyncio.sleep(0.01)
        calls = [count for what, count in tier.log if what == "use"]
        assert 3 <= len(calls) <= 5.0 / TELL_PAUSE_S + 1
        assert max(calls) <= ASK_MAX
        assert sum(calls) <= 200 * 6

    run_on(tier, test)


def test_tier_billed_per_call_rarely_gets_use_reports() -> None:
    """Each use, each eviction and each stop would be billed."""
    tier = SmallTier(1000)
    tier.uses_every_s = 6 * 3600.0

    async def test(bench: Bench) -> None:
        hot = await store_everywhere(bench)
        for _ in range(100):
            await use(bench, hot)
            await asyncio.sleep(60)
        assert tier.calls("use") == 1
        bench.forget()
        assert await bench.acquire(hot) == HOT
        tier.lose(hot)
        await asyncio.sleep(5 * 3600)
        await use(bench, hot)
        await uses_reported(bench)
        assert tier.calls("use") == 2
        assert has(tier, hot) == HOT
        await bench.node.drain(10)
        assert tier.calls("use") == 2

    run_on(tier, test)


def test_blocks_assumed_to_be_in_a_lower_tier_are_checked() -> None:
    """A block of the disk would never reach the fleet's server once that has lost it."""
    upper, lower = SmallTier(1000), SmallTier(1000)

    async def test(bench: Bench) -> None:
        hot = await store_everywhere(bench)
        bench.forget()
        lower.lose(hot)
        await asyncio.sleep(REST_S + 1)
        assert await bench.acquire(hot) == HOT
        await use(bench, hot)
        await uses_reported(bench)
        assert has(lower, hot) == HOT

    run(test, config("upper"), config("lower"), raw=[upper, lower])


def test_tier_excluded_from_promotions_gets_no_use_reports() -> None:
    """It would be written at each use of its blocks, against its configuration."""
    upper, lower = SmallTier(1000), SmallTier(1000)

    async def test(bench: Bench) -> None:
        hot = await store_everywhere(bench)
        bench.forget()
        upper.lose(hot)
        assert await bench.acquire(hot) == HOT
        for _ in range(3):
            await asyncio.sleep(REST_S)
            await use(bench, hot)
        await uses_reported(bench)
        bench.forget()
        await bench.node.drain(10)
        assert not has(upper, hot)
        assert lower.calls("use") > 0
        assert not upper.calls("use")

    run(test, config("upper", fill_from_lower=False), config("lower"), raw=[upper, lower])
