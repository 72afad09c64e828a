"""Warming yields to requests, evicts nothing more valuable, and leaves nothing held."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from tests.support import blocks
from tests.support.tiers.bench import (
    EPOCH,
    PAGE,
    SCOPE,
    SPACE,
    Bench,
    Tier,
    config,
    damage,
    key,
    run,
)
from tierd.backend import Outcome, PutRequest, checksum
from tierd.config import WritePolicy
from tierd.core.l2.space import Space
from tierd.core.l3.epochs import scope_of
from tierd.daemon.jobs.warming import BUSY_SHARE, QUIET_NS, Pace, Warming, WarmOrder
from tierd.eviction.policy import PrefixRequest
from tierd.testing.backend import MemoryBackend
from tierd.types import Namespace
from tierd.wire.messages import Warmth

OTHER = blocks.namespace(PAGE, model="another")


async def warm(
    bench: Bench,
    hashes: Sequence[bytes],
    want: WarmOrder = WarmOrder(),  # noqa: B008  # immutable
    deadline_s: float = 60.0,
    space: Space | None = None,
) -> Warming:
    """Warm, and assert that nothing is left held once the backends have returned."""
    warming = Warming(space or bench.space, hashes, want, Pace())
    await bench.node.warmings.run(warming, deadline_s)
    bench.node.check()
    assert not bench.node.host.leases
    return warming


def fates(warming: Warming) -> dict[Warmth, int]:
    return dict(Counter(map(Warmth, warming.outcomes)))


async def in_tiers(
    bench: Bench, count: int, tag: object = 0, namespace: Namespace = SPACE
) -> list[bytes]:
    """Store blocks that only the tiers have, with no record of their uses."""
    hashes, parents = blocks.chain(count, tag)
    for raw in bench.raw:
        for block_hash, parent in zip(hashes, parents, strict=True):
            payload = blocks.payload(namespace, block_hash)
            view = memoryview(bytearray(payload))
            request = PutRequest(block_hash, parent, checksum(payload), view, len(payload))
            await MemoryBackend.put_many(raw, scope_of(namespace.digest, EPOCH), [request])
    return hashes


async def empty(raw: Tier) -> None:
    await MemoryBackend.delete_many(raw, SCOPE, [k.block_hash for k in list(raw.blocks)])


class Paced(Tier):
    """A tier with a separate duration for each operation."""

    def __init__(self, **takes_s: float) -> None:
        super().__init__()
        self._takes_s = takes_s

    async def _step(self, what: str, count: int) -> None:
        self.takes_s = self._takes_s.get(what, 0.0)
        await super()._step(what, count)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(100):
        while not condition():
            await asyncio.sleep(0.001)


def use(bench: Bench, hashes: Sequence[bytes], times: int = 1) -> None:
    """Count uses of these blocks, as requests do."""
    for _ in range(times):
        for _ in bench.node.host.count_use([bench.space], hashes, 0, bench.loop.time()):
            pass


# --- into host memory -------------------------------------------------------------------


def test_warm_loads_blocks_from_tiers() -> None:
    """The first user after a deploy would pay for a cold cache."""

    async def test(bench: Bench) -> None:
        hashes = await in_tiers(bench, 100)
        damage(bench.raw[0], hashes[7])  # The next tier still has it.
        warming = await warm(bench, hashes)
        assert fates(warming) == {Warmth.BROUGHT: 100}
        assert warming.sources == {"tier0": 99, "tier1": 1}
        # The next blocks need not wait for the kernel's memory.
        assert len(bench.space.free) >= bench.space.slots_per_segment
        assert fates(await warm(bench, hashes)) == {Warmth.HERE: 100}
        read = bench.raw[0].calls("get")
        assert await bench.acquire(hashes) == 100
        assert bench.raw[0].calls("get") == read  # All blocks were in host memory.
        bench.check_nothing_is_left()

    run(test)


def test_warm_distinguishes_missing_and_unreadable_blocks() -> None:
    """An operator would not know which prompts to have computed, and which tier to repair."""

    async def test(bench: Bench) -> None:
        hashes = await in_tiers(bench, 20)
        bench.raw[0].blocks.pop(key(hashes[3]))
        damage(bench.raw[0], hashes[5])
        warming = await warm(bench, [*hashes, b"?" * 32])
        expected = [Warmth.BROUGHT] * 21
        expected[3], expected[5], expected[20] = Warmth.NOWHERE, Warmth.CORRUPT, Warmth.NOWHERE
        assert list(warming.outcomes) == expected
        bench.forget()
        bench.raw[0].hangs = {"get", "contains"}
        assert await bench.acquire(hashes, deadline_s=5.0) == 0
        assert set(fates(await warm(bench, hashes))) == {Warmth.AWAY}

    run(test, config("only"))


def test_warm_keeps_its_deadline_when_a_tier_hangs() -> None:
    """A deploy would wait for a tier that does not answer, and blocks would stay held."""

    async def test(bench: Bench) -> None:
        hashes = await in_tiers(bench, 40)
        bench.raw[0].hangs, bench.raw[0].lingers_s = {"get"}, 0.5
        began_s = bench.loop.time()
        warming = await warm(bench, hashes, deadline_s=0.7)
        assert bench.loop.time() - began_s == pytest.approx(0.7, abs=0.01)
        assert fates(warming) == {Warmth.LATE: 40}
        bench.raw[0].hangs = set()
        await until(lambda: not bench.node.promotions.under_way)
        await asyncio.sleep(3.0)
        bench.check_nothing_is_left()

    run(test, config("slow"))


def test_warm_can_be_cancelled() -> None:
    """Ctrl-C would leave the daemon reading for a client that is gone."""

    async def test(bench: Bench) -> None:
        hashes = await in_tiers(bench, 640)
        warming = Warming(bench.space, hashes, WarmOrder(), Pace())
        going = asyncio.ensure_future(bench.node.warmings.run(warming, 60.0))
        await until(lambda: Warmth.BROUGHT in warming.outcomes)
        warming.cancel()
        warming.cancel()
        await going
        assert set(fates(warming)) == {Warmth.BROUGHT, Warmth.LATE}
        calls = bench.raw[0].calls("get")
        await asyncio.sleep(5.0)
        assert bench.raw[0].calls("get") == calls
        bench.check_nothing_is_left()

    # A duration at which no read ends in the millisecond of the check.
    run(test, config("disk"), raw=[Paced(get=0.1005)], blocks_in_l2=1024)


def test_warm_orders_of_a_session_share_one_rate() -> None:
    """A warm limited in rate would take all of a shared disk."""

    async def test(bench: Bench) -> None:
        hashes = await in_tiers(bench, 128)
        began_s = bench.loop.time()
        pace, want = Pace(), WarmOrder(bytes_per_s=16 * PAGE)
        orders = [Warming(bench.space, hashes[at : at + 64], want, pace) for at in (0, 64)]
        await asyncio.gather(*(bench.node.warmings.run(each, 60.0) for each in orders))
        assert bench.loop.time() - began_s >= 128 / 16 - 32 / 16 - 0.1
        assert [fates(each) for each in orders] == [{Warmth.BROUGHT: 64}] * 2

    run(test)


# --- eviction for warmed blocks -----------------------------------------------------------


def test_warm_evicts_only_less_valuable_blocks() -> None:
    """A warm would evict blocks that users are requesting."""

    async def test(bench: Bench) -> None:
        cold = await in_tiers(bench, 64, "cold")
        hot = [bench.store(32, tag) for tag in range(8)]
        for each in hot:
            use(bench, each)
        await bench.backed_up()
        assert len(bench.space.items) == 256
        assert fates(await warm(bench, cold)) == {Warmth.NO_ROOM: 64}
        assert all(h in bench.space.items for each in hot for h in each)

        # These have more recorded uses than the oldest ones.
        await asyncio.sleep(100.0)
        use(bench, cold, times=3)
        use(bench, hot[7])
        assert fates(await warm(bench, cold)) == {Warmth.BROUGHT: 64}
        assert all(h in bench.space.items for h in hot[7])
        assert len(bench.space.items) == 256

    run(test)


def test_hot_set_larger_than_memory_does_not_evict_itself() -> None:
    """A hot set that is too large would end as its least valuable part, after useless reads."""

    async def test(bench: Bench) -> None:
        first = [h for tag in (1, 2) for h in bench.store(128, tag)]
        await bench.backed_up()
        more = await in_tiers(bench, 32, "more")
        use(bench, first)
        await asyncio.sleep(5.0)
        use(bench, more)  # As valuable, but reported to the daemon later.
        assert fates(await warm(bench, more)) == {Warmth.NO_ROOM: 32}
        assert all(h in bench.space.items for h in first)

    run(test)


def test_warm_does_not_evict_leased_or_kept_blocks() -> None:
    """A warm would take slots that an engine is copying from, or blocks that were to be kept."""

    async def test(bench: Bench) -> None:
        wanted = await in_tiers(bench, 256, "wanted")
        first = bench.store(128, "leased")
        second = bench.store(128, "other")
        await bench.backed_up()
        lease = await bench.node.acquire(1, [bench.space], first, bench.loop.now_ns + 10**9)
        assert lease is not None
        use(bench, wanted, times=5)
        warming = Warming(bench.space, wanted, WarmOrder(), Pace())
        bench.node.lease_ttl_ns = 10**15
        await bench.node.warmings.run(warming, 600.0)
        bench.node.check()
        assert fates(warming) == {Warmth.BROUGHT: 128, Warmth.NO_ROOM: 128}
        assert all(h in bench.space.items for h in first)
        assert not any(h in bench.space.items for h in second)
        bench.node.host.release(lease.lease_id, 1)

    run(test)


def test_warm_takes_no_memory_from_namespaces_in_use() -> None:
    """Warming a model would slow down another that serves; only idle memory may be taken."""

    async def test(bench: Bench) -> None:
        wanted = await in_tiers(bench, 64, namespace=OTHER)
        use(bench, [h for tag in (1, 2) for h in bench.store(128, tag)])
        assert bench.node.host.allocated_bytes == 256 * PAGE
        other = bench.node.register(OTHER)
        other.reuse.use(PrefixRequest(wanted, bench.loop.time() + 1))
        before = bench.space.live_segments
        assert fates(await warm(bench, wanted, space=other)) == {Warmth.NO_ROOM: 64}
        assert bench.space.live_segments == before
        bench.node.unregister(bench.space)
        assert fates(await warm(bench, wanted, space=other)) == {Warmth.BROUGHT: 64}
        assert bench.space.live_segments == before - 2

    run(test)


def test_warm_pins_blocks_within_the_quota() -> None:
    """Blocks warmed for a launch would be evicted before it."""

    async def test(bench: Bench) -> None:
        hashes = await in_tiers(bench, 16)
        warming = await warm(bench, hashes, WarmOrder(pin_ms=60_000))
        assert warming.pinned_blocks == 16
        for tag in range(20):
            bench.store(32, tag)
            await bench.backed_up()
        assert all(h in bench.space.items for h in hashes)
        many = await warm(bench, list(bench.space.items), WarmOrder(pin_ms=60_000))
        assert many.pinned_blocks < len(bench.space.items)  # The quota of hints applies as well.

    run(test)


def test_warm_does_not_evict_kept_blocks_when_nothing_else_can_go() -> None:
    """A warm would evict blocks that a user had asked to keep."""

    async def test(bench: Bench) -> None:
        wanted = await in_tiers(bench, 32, "wanted")
        kept = bench.store(32, "kept")
        await warm(bench, kept, WarmOrder(pin_ms=10**9))
        leased = [bench.store(112, tag) for tag in (1, 2)]
        for each in leased:
            assert await bench.node.acquire(1, [bench.space], each, bench.loop.now_ns + 10**9)
        use(bench, wanted, times=5)
        warming = Warming(bench.space, wanted, WarmOrder(), Pace())
        bench.node.lease_ttl_ns = 10**15
        await bench.node.warmings.run(warming, 0.5)
        assert fates(warming) == {Warmth.NO_ROOM: 32}
        assert all(h in bench.space.items for h in kept)
        assert bench.node.host.hints.kept_blocks == 32

    run(test)


# --- priority of requests ------------------------------------------------------------------


def test_requests_are_read_before_a_warm() -> None:
    """A user's request would wait behind a warm."""

    async def test(bench: Bench) -> None:
        cold = await in_tiers(bench, 180, "cold")
        asked = await in_tiers(bench, 32, "asked")
        warming = Warming(bench.space, cold, WarmOrder(), Pace())
        going = asyncio.ensure_future(bench.node.warmings.run(warming, 600.0))
        await until(lambda: bench.node.promotions.under_way)
        began_s = bench.loop.time()
        assert await bench.acquire(asked) == 32
        # One read of the tier was reserved for it.
        assert bench.loop.time() - began_s == pytest.approx(0.5, abs=0.01)
        await going
        assert fates(warming) == {Warmth.BROUGHT: 180}

    run(test, config("disk", read_batches=2), raw=[Paced(get=0.5)], blocks_in_l2=512)


@pytest.mark.parametrize("work", ["asking", "copying"])
def test_warm_reads_slowly_while_engines_load(work: str) -> None:
    """Loads of a busy engine would share its disk with a warm."""

    async def test(bench: Bench) -> None:
        cold = await in_tiers(bench, 320, "cold")
        warming = Warming(bench.space, cold, WarmOrder(), Pace())
        going = asyncio.ensure_future(bench.node.warmings.run(warming, 600.0))
        busy_s, step_s = 10.0, QUIET_NS / 2e9
        end_s = bench.loop.time() + busy_s
        if work == "copying":
            bench.node.lease_ttl_ns = int(busy_s * 1e9)
            hashes = bench.store(1)
            assert bench.node.acquire_now(1, [bench.space], hashes).lease
        while bench.loop.time() < end_s:
            if work == "asking":
                bench.node.acquire_now(1, [bench.space], [b"?" * 32])
            await asyncio.sleep(step_s)
        read_s = 0.04 * bench.raw[0].calls("get")
        assert 0 < read_s <= BUSY_SHARE * busy_s + 0.04
        began_s = bench.loop.time()
        await going
        assert fates(warming) == {Warmth.BROUGHT: 320}
        assert bench.loop.time() - began_s < 3.0  # At full speed once the engines are quiet.

    run(
        test,
        config("disk", write_policy=WritePolicy.WRITE_BACK),
        raw=[Paced(get=0.04)],
        blocks_in_l2=512,
    )


def test_request_joins_the_read_of_a_warm() -> None:
    """A request for a block that is being warmed would have it read a second time."""

    async def test(bench: Bench) -> None:
        hashes = await in_tiers(bench, 64)
        bench.raw[0].takes_s = 0.1
        warming = Warming(bench.space, hashes, WarmOrder(), Pace())
        going = asyncio.ensure_future(bench.node.warmings.run(warming, 60.0))
        await until(lambda: bench.node.promotions.under_way)
        assert await bench.acquire(hashes) == 64
        await going
        assert bench.raw[0].calls("get") == 2
        bench.check_nothing_is_left()

    run(test, config("disk"))


def test_request_joining_a_warm_gets_room_for_its_blocks() -> None:
    """A request would miss a block because the warm was allowed no room for it."""

    async def test(bench: Bench) -> None:
        cold, asked = await in_tiers(bench, 32, "cold"), await in_tiers(bench, 32, "asked")
        use(bench, [h for tag in (1, 2) for h in bench.store(128, tag)])
        await bench.backed_up()
        bench.raw[0].takes_s = 1.0
        first = asyncio.ensure_future(bench.acquire(asked))
        await until(lambda: bench.raw[0].calls("get"))
        bench.raw[0].takes_s = 0.1
        warming = Warming(bench.space, cold, WarmOrder(), Pace())
        going = asyncio.ensure_future(bench.node.warmings.run(warming, 60.0))
        await until(lambda: len(bench.node.promotions.under_way) == 64)
        assert await bench.acquire(cold) == 32  # It joins the queued read.
        assert await first == 32
        await going
        assert fates(warming) == {Warmth.BROUGHT: 32}

    run(test, config("disk", read_batches=1))


def test_request_does_not_join_a_warm_without_room() -> None:
    """A request would join a read that delivers only part of its blocks, and miss the rest."""

    async def test(bench: Bench) -> None:
        cold = await in_tiers(bench, 32, "cold")
        use(bench, [h for tag, count in ((1, 128), (2, 112)) for h in bench.store(count, tag)])
        await bench.backed_up()
        warming = Warming(bench.space, cold, WarmOrder(), Pace())
        going = asyncio.ensure_future(bench.node.warmings.run(warming, 60.0))
        await until(lambda: bench.raw[0].calls("get"))
        assert await bench.acquire(cold) == 32
        await going
        assert fates(warming)[Warmth.BROUGHT] == 16

    run(test, config("disk"), raw=[Paced(get=0.1)])


# --- verifying ---------------------------------------------------------------------------------


def test_warm_with_verify_finds_rot_in_host_memory() -> None:
    """Damaged bytes in memory would be served although an operator asked for verification."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(64)
        await bench.backed_up()
        for block_hash in (hashes[9], hashes[40]):
            slot = bench.space.items[block_hash]
            bench.node.memory.payload(bench.space, slot)[0] ^= 1
        bench.raw[0].blocks.pop(key(hashes[40]))
        warming = await warm(bench, hashes, WarmOrder(verify=True))
        expected = [Warmth.HERE] * 64
        expected[9], expected[40] = Warmth.BROUGHT, Warmth.CORRUPT
        assert list(warming.outcomes) == expected
        assert bench.node.counters["rotten_blocks_total"] == 2
        assert await bench.acquire(hashes) == 40
        bench.check_nothing_is_left()

    run(test, config("disk"))


# --- into a tier ----------------------------------------------------------------------------------


def test_warm_fills_a_tier_from_memory_and_from_other_tiers() -> None:
    """A node's own disk would stay cold although a shared tier has all blocks."""

    async def test(bench: Bench) -> None:
        hashes = await in_tiers(bench, 100)
        near, far = bench.raw
        await empty(near)
        assert fates(await warm(bench, hashes[:30])) == {Warmth.BROUGHT: 30}
        await bench.backed_up()
        await empty(near)
        damage(far, hashes[50])
        warming = await warm(bench, [*hashes, b"?" * 32], WarmOrder(target=1))
        assert fates(warming) == {Warmth.BROUGHT: 99, Warmth.CORRUPT: 1, Warmth.NOWHERE: 1}
        assert warming.sources == {"host memory": 30, "tier1": 69}
        assert len(near.blocks) == 99
        assert len(bench.space.items) == 30  # It loaded nothing into host memory.
        assert fates(await warm(bench, hashes[:50], WarmOrder(target=1))) == {Warmth.HERE: 50}
        bench.node.memory.drop(bench.space, list(bench.space.items.values()))
        assert await bench.acquire(hashes) == 50
        bench.check_nothing_is_left()

    run(test)


def test_blocks_warmed_into_a_tier_are_not_written_again() -> None:
    """A tier would get the same blocks twice: when warmed, and when evicted from memory."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(20)
        assert fates(await warm(bench, hashes, WarmOrder(target=1))) == {Warmth.BROUGHT: 20}
        bench.forget()
        await bench.backed_up()
        assert bench.raw[0].calls("put") == 1
        assert await bench.acquire(hashes) == 20

    run(test, config("disk", write_policy=WritePolicy.WRITE_BACK))


def test_warm_writes_no_rotten_adopted_block_to_a_tier() -> None:
    """Bytes that changed between two incarnations would get a checksum that makes them look
    sound."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(3)
        slots = [bench.space.items[h] for h in hashes]
        for slot, block_hash in zip(slots, hashes, strict=True):
            payload = blocks.payload(SPACE, block_hash)
            bench.space._unverified[slot] = checksum(payload)
        bench.node.memory.payload(bench.space, slots[1])[0] ^= 1
        warming = await warm(bench, hashes, WarmOrder(target=1))
        assert list(warming.outcomes) == [Warmth.BROUGHT, Warmth.NOWHERE, Warmth.BROUGHT]
        assert {k.block_hash for k in bench.raw[0].blocks} == {hashes[0], hashes[2]}

    run(test, config("disk", write_policy=WritePolicy.WRITE_BACK))


def test_warm_reports_a_tier_that_accepts_no_writes() -> None:
    """A warm of a full or dead tier would look successful."""

    async def test(bench: Bench) -> None:
        hashes = await in_tiers(bench, 10)
        near, _ = bench.raw
        await empty(near)

        async def refuse(namespace, requests):
            return [Outcome.REFUSED] * len(requests)

        near.put_many = refuse  # type: ignore[method-assign]
        assert fates(await warm(bench, hashes, WarmOrder(target=1))) == {Warmth.UNWRITTEN: 10}
        near.hangs = {"contains"}
        assert fates(await warm(bench, hashes, WarmOrder(target=1))) == {Warmth.AWAY: 10}

    run(test)


# --- with a flush --------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [0, 1])
def test_flush_cancels_a_warm_in_progress(target: int) -> None:
    """Flushed blocks would be loaded again by a warm under way."""

    async def test(bench: Bench) -> None:
        hashes = await in_tiers(bench, 200)
        if target:
            await empty(bench.raw[0])
        warming = Warming(bench.space, hashes, WarmOrder(target=target), Pace())
        going = asyncio.ensure_future(bench.node.warmings.run(warming, 60.0))
        await until(lambda: bench.raw[0].calls("put" if target else "get") >= 2)
        flush = bench.node.flushes.begin("", host=True, numbers=[0, 1])
        await bench.node.flushes.run(flush)
        assert flush.status()["complete"]
        await going
        await asyncio.sleep(5.0)
        assert not bench.space.items
        assert not any(raw.blocks for raw in bench.raw)
        assert fates(await warm(bench, hashes)) == {Warmth.NOWHERE: 200}

    # A put takes longer than the rest of the flush.
    run(test, raw=[Paced(get=0.05, put=1.0), Paced(get=0.05)])


def test_warm_of_a_namespace_that_is_being_flushed_ends() -> None:
    """A warm during a flush would wait indefinitely, or report that no tier has the blocks."""

    async def test(bench: Bench) -> None:
        hashes = await in_tiers(bench, 10)
        bench.node.promotions.barred = lambda _: True
        assert fates(await warm(bench, hashes)) == {Warmth.BARRED: 10}

    run(test)
