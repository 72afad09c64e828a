"""What is used most is kept: what uses in host memory mean to tiers that drop blocks."""

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


class Small(Tier):
    """A tier of a few blocks, which drops what was used longest ago, and hears of uses."""

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
        """Drop blocks without telling anybody."""
        for block_hash in hashes:
            self._drop(key(block_hash))


async def use(bench: Bench, hashes: Sequence[bytes]) -> int:
    """What a request does that comes by the socket; the resident prefix."""
    settled, lease, count = bench.node.acquire_now(1, [bench.space], hashes)
    assert settled
    assert lease is not None
    bench.node.host.release(lease.lease_id, 1)
    bench.node.learning.note([bench.space], hashes, 0)
    await bench.learned()
    return count


async def told(bench: Bench) -> None:
    """Wait until all that is to be told has been, and what came of it is done."""
    await bench.learned()
    while any(renewal.busy for renewal in bench.node.backups.renewals):
        await asyncio.sleep(0.01)
    await bench.backed_up()


def has(tier: Tier, hashes: Sequence[bytes]) -> int:
    return sum(key(block_hash) in tier.blocks for block_hash in hashes)


async def stored(bench: Bench) -> list[bytes]:
    """Blocks that L2 and the tier have."""
    hashes = bench.store(HOT, "hot")
    await bench.backed_up()
    return hashes


def run_on(tier: Small, test: Callable[[Bench], Awaitable[None]], **keys: object) -> None:
    """Run a test on a node with this tier, at whose end nothing is under way."""

    async def whole(bench: Bench) -> None:
        await test(bench)
        bench.check_nothing_is_left()

    run(whole, config("tier", **keys), raw=[tier])


def test_what_is_used_in_host_memory_outlives_what_is_not_in_a_tier() -> None:
    """A tier would drop a node's hottest prefix first, since host memory answers for it."""
    tier = Small()

    async def test(bench: Bench) -> None:
        hot = await stored(bench)
        for number in range(30):
            bench.store(COLD, number)
            await bench.backed_up()
            assert await use(bench, hot) == HOT
            await told(bench)
            assert has(tier, hot) == HOT
            await asyncio.sleep(1.0)
        assert tier.calls("put") == 31, "it was never to be written again"

    run_on(tier, test)


def test_what_a_tier_has_dropped_is_written_when_it_is_used() -> None:
    """Other nodes would not find what everybody uses here until this node loses it."""
    tier = Small()

    async def test(bench: Bench) -> None:
        hot = await stored(bench)
        tier.lose(hot)
        # What was just written and is gone is no news of a tier that has room for it.
        await asyncio.sleep(REST_S + 1)
        assert await use(bench, hot) == HOT
        await told(bench)
        assert has(tier, hot) == HOT

    run_on(tier, test)


def test_a_tier_that_is_too_small_for_what_is_used_is_not_written_at_each_use() -> None:
    """A disk that is smaller than host memory would be worn out by rewriting what it drops."""
    tier = Small(10)
    tier.hears = False

    async def test(bench: Bench) -> None:
        chains = [bench.store(5, number) for number in range(8)]
        await bench.backed_up()
        written = tier.calls("put")
        for _ in range(20):
            for hashes in chains:
                await use(bench, hashes)
            await told(bench)
            await asyncio.sleep(2.0)
        assert tier.calls("put") <= written + len(chains)

    run_on(tier, test)


@pytest.mark.parametrize("policy", WRITTEN)
def test_what_leaves_host_memory_is_in_a_tier_that_has_dropped_it(policy: WritePolicy) -> None:
    """A prefix that was used for hours would be nowhere once its turn to leave has come."""
    tier = Small()

    async def test(bench: Bench) -> None:
        hot = bench.store(HOT, "hot")
        for _ in range(3):
            await use(bench, hot)
        bench.forget()
        await bench.backed_up()
        assert await bench.acquire(hot) == HOT
        await told(bench)
        assert has(tier, hot) == HOT
        tier.lose(hot)
        bench.forget()
        await told(bench)
        assert has(tier, hot) == HOT
        assert await bench.acquire(hot) == HOT
        await told(bench)

    run_on(tier, test, write_policy=policy)


def test_what_was_used_once_is_not_asked_for_when_it_leaves() -> None:
    """Each document that passes by would keep its slots for the time of a question."""
    tier = Small()

    async def test(bench: Bench) -> None:
        hashes = bench.store(COLD, "once")
        bench.node.learning.note([bench.space], hashes, 1)
        await bench.backed_up()
        bench.forget()
        assert not bench.space.evicting
        await told(bench)
        assert not tier.calls("use")

    run_on(tier, test)


@pytest.mark.parametrize("policy", WRITTEN)
def test_a_stop_writes_what_is_used_often_and_a_tier_has_dropped(policy: WritePolicy) -> None:
    """After an orderly restart the hottest prefix would be found nowhere."""
    tier = Small()

    async def test(bench: Bench) -> None:
        hot = await stored(bench)
        for _ in range(5):
            await use(bench, hot)
        await told(bench)
        cold = [bench.store(COLD, number) for number in range(20)]
        await bench.backed_up()
        tier.lose(hot)
        assert await bench.node.drain(10) == 0
        assert has(tier, hot) == HOT
        assert sum(has(tier, hashes) for hashes in cold) > 0

    run_on(tier, test, write_policy=policy)


def test_a_stop_asks_a_tier_that_does_not_answer_for_nothing() -> None:
    """A stop in an outage would take its whole budget."""
    tier = Small()

    async def test(bench: Bench) -> None:
        hot = await stored(bench)
        for _ in range(5):
            await use(bench, hot)
        tier.hangs = {"use", "put", "get", "contains"}
        bench.store(1, "more")
        await asyncio.sleep(2 * DEADLINE_S + 1)
        began_s = bench.loop.time()
        await bench.node.drain(60)
        assert bench.loop.time() - began_s < 0.5

    run_on(tier, test)


def test_a_tier_that_hangs_delays_neither_requests_nor_evictions() -> None:
    """The engine would wait for a tier that nobody asked anything of."""
    tier = Small()

    async def test(bench: Bench) -> None:
        hot = await stored(bench)
        tier.hangs = {"use"}
        began_s = bench.loop.time()
        for _ in range(5):
            assert await use(bench, hot) == HOT
        assert bench.loop.time() - began_s < 0.1
        for number in range(80):
            bench.store_at_once(COLD, number)
            await asyncio.sleep(0.01)
        await asyncio.sleep(3 * DEADLINE_S)
        # What the tier did not answer for was not taken for lost, nor kept.
        assert not bench.space.evicting

    run_on(tier, test)


def test_how_often_and_how_much_is_told_is_bounded() -> None:
    """A server would be asked for the same prefix at each of thousands of requests a second."""
    tier = Small(1000)

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


def test_a_tier_whose_questions_cost_money_is_rarely_told() -> None:
    """Each use, each eviction and each stop would be billed."""
    tier = Small(1000)
    tier.uses_every_s = 6 * 3600.0

    async def test(bench: Bench) -> None:
        hot = await stored(bench)
        for _ in range(100):
            await use(bench, hot)
            await asyncio.sleep(60)
        assert tier.calls("use") == 1
        bench.forget()
        assert await bench.acquire(hot) == HOT
        tier.lose(hot)
        await asyncio.sleep(5 * 3600)
        await use(bench, hot)
        await told(bench)
        assert tier.calls("use") == 2
        assert has(tier, hot) == HOT
        await bench.node.drain(10)
        assert tier.calls("use") == 2

    run_on(tier, test)


def test_what_a_lower_tier_is_only_believed_to_have_is_asked_for() -> None:
    """A block of the disk would never reach the fleet's server once that has lost it."""
    upper, lower = Small(1000), Small(1000)

    async def test(bench: Bench) -> None:
        hot = await stored(bench)
        bench.forget()
        lower.lose(hot)
        await asyncio.sleep(REST_S + 1)
        assert await bench.acquire(hot) == HOT
        await use(bench, hot)
        await told(bench)
        assert has(lower, hot) == HOT

    run(test, config("upper"), config("lower"), raw=[upper, lower])


def test_a_tier_that_is_not_to_be_filled_from_below_is_not_asked() -> None:
    """It would be written to each time its blocks are used, though it is not to have them."""
    upper, lower = Small(1000), Small(1000)

    async def test(bench: Bench) -> None:
        hot = await stored(bench)
        bench.forget()
        upper.lose(hot)
        assert await bench.acquire(hot) == HOT
        for _ in range(3):
            await asyncio.sleep(REST_S)
            await use(bench, hot)
        await told(bench)
        bench.forget()
        await bench.node.drain(10)
        assert not has(upper, hot)
        assert lower.calls("use") > 0
        assert not upper.calls("use")

    run(test, config("upper", fill_from_lower=False), config("lower"), raw=[upper, lower])
