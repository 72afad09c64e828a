"""Lookup: which tiers are asked for which blocks, and which blocks arrive by the deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.support import blocks
from tests.support.tiers.bench import (
    DEADLINE_S,
    PAGE,
    PROBE_S,
    SCOPE,
    Bench,
    Tier,
    config,
    damage,
    key,
    run,
)
from tierd.backend import GetRequest, GetResult
from tierd.config import StorageConfig
from tierd.daemon.l3.tier import BATCH_BYTES_MAX


def test_blocks_lost_by_the_first_tier_come_from_the_second() -> None:
    """A rotten or too small disk would hide the object store's blocks."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(12)
        await bench.backed_up()
        first, second = bench.raw
        bench.forget()
        damage(first, hashes[2])
        damage(first, hashes[9])
        # As if by another process: the index still lists the block.
        del first.blocks[key(hashes[5])]
        assert await bench.acquire(hashes) == 12
        assert second.log[-1] == ("get", 3)
        assert second.calls("contains") == 0
        await bench.backed_up()
        assert set(first.blocks) == set(second.blocks)
        bench.forget()
        second.hangs = {"contains", "get"}
        assert await bench.acquire(hashes) == 12
        await bench.backed_up()
        bench.check_nothing_is_left()

    run(test)


def test_failing_tier_is_skipped() -> None:
    """An error of the first tier would be a miss although the second tier has the block."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(6)
        await bench.backed_up()
        bench.forget()
        await bench.raw[0].close()  # Every call raises BackendError from here on.
        assert await bench.acquire(hashes) == 6
        bench.forget()
        assert await bench.acquire(hashes) == 6

    run(test)


def test_slow_tier_does_not_delay_blocks_of_a_fast_tier() -> None:
    """A local hit would be lost because the object store did not answer about the rest."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(10)
        await bench.backed_up()
        bench.forget()
        first, second = bench.raw
        for block_hash in hashes[6:]:
            await first.delete_many(SCOPE, [block_hash])
        second.hangs = {"contains"}
        assert await bench.acquire(hashes, 0.5) == 6
        second.hangs.clear()
        await asyncio.sleep(DEADLINE_S + PROBE_S + 0.1)
        bench.forget()
        second.takes_s = 0.2
        assert await bench.acquire(hashes, 1.0) == 10

    run(test)


def test_promotion_begins_before_the_last_tier_has_answered() -> None:
    """A prefix in the file tier would be read only after the object store's answer."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(4)
        await bench.backed_up()
        bench.forget()
        unknown, _ = blocks.chain(2, "unknown")
        bench.raw[0].takes_s = 0.1
        bench.raw[1].takes_s = 0.2
        began_s = bench.loop.time()
        assert await bench.acquire([*hashes, *unknown]) == 4
        # 0.1 s to ask the first tier, 0.1 s to read it, while the second takes 0.2 s to answer.
        assert bench.loop.time() - began_s == pytest.approx(0.3)

    run(test)


def test_only_the_prefix_present_for_all_ranks_is_promoted() -> None:
    """Blocks that another rank lacks would be read for nothing, and evict others from L2."""

    async def test(bench: Bench) -> None:
        ranks = [bench.node.register(blocks.namespace(PAGE, tp_rank=r, tp_size=2)) for r in (0, 1)]
        hashes = bench.store(8, space=ranks[0])
        bench.store(3, space=ranks[1])
        await bench.backed_up()
        bench.forget()
        assert await bench.acquire(hashes, spaces=ranks) == 3
        assert [len(rank.items) for rank in ranks] == [3, 3]
        assert bench.raw[1].calls("get") == 0
        bench.check_nothing_is_left()

    run(test)


def test_concurrent_requests_share_one_read_per_block() -> None:
    """A popular prefix would be read from storage once per request."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(8)
        await bench.backed_up()
        bench.forget()
        bench.raw[0].takes_s = 0.1
        damage(bench.raw[0], hashes[4])
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(bench.acquire(hashes)) for _ in range(5)]
        assert [task.result() for task in asked] == [8] * 5
        gets = [[count for what, count in raw.log if what == "get"] for raw in bench.raw]
        assert gets == [[8], [1]]

    run(test)


@pytest.mark.parametrize("after_s", [0.05, 0.15, 0.25, 0.35, 0.45])
def test_cancelled_request_leaves_nothing_held(after_s: float) -> None:
    """Aborted requests would pin L2, one after the other."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(8)
        await bench.backed_up()
        bench.forget()
        for raw in bench.raw:
            raw.takes_s, raw.lingers_s = 0.1, 0.05
        damage(bench.raw[0], hashes[4])
        task = asyncio.create_task(bench.acquire(hashes))
        await asyncio.sleep(after_s)
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(10)
        bench.check_nothing_is_left()
        assert await bench.acquire(hashes) == 8

    run(test)


def test_acquire_ends_at_its_deadline_though_a_backend_lingers() -> None:
    """A backend slow to cancel would keep the engine's request waiting."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(8)
        await bench.backed_up()
        bench.forget()
        for raw in bench.raw:
            raw.hangs, raw.lingers_s = {"get"}, 5.0
        for deadline_s in (0.0, 0.01, 0.5):
            # `acquire` checks the time.
            assert await bench.acquire(hashes, deadline_s) == 0
        await asyncio.sleep(30)
        bench.check_nothing_is_left()

    run(test)


def test_default_timeouts_suit_a_slow_link() -> None:
    """A working tier behind 1 Gbit/s would open its breaker on its own full batches."""
    given = StorageConfig(type="s3")
    bytes_in_flight = max(given.read_batches, given.write_batches) * BATCH_BYTES_MAX
    assert bytes_in_flight / 125e6 < 0.5 * given.slow_ms / 1000


def test_late_lookup_is_cancelled() -> None:
    """Lookups whose requests have ended would use up a server's connections."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(8)
        await bench.backed_up()
        bench.forget()
        bench.raw[0].hangs = {"contains"}
        assert await bench.acquire(hashes, 0.1) == 0
        await asyncio.sleep(0.01)
        bench.check_nothing_is_left()
        assert bench.raw[1].calls("contains") == 0

    run(test)


@pytest.mark.parametrize("what", ["contains", "get"])
def test_tier_silent_for_one_request_is_skipped_by_the_next(what: str) -> None:
    """Each request in a tier's first seconds of silence would lose its own deadline to it."""

    async def test(bench: Bench) -> None:
        hashes, others = bench.store(6), bench.store(6, "others")
        await bench.backed_up()
        bench.forget()
        bench.raw[0].hangs = {what}
        assert await bench.acquire(hashes, 0.2) == 0
        before_s, asked = bench.loop.time(), bench.raw[0].calls(what)
        assert await bench.acquire(others, 0.2) == 6
        assert bench.loop.time() - before_s < 0.1 * DEADLINE_S
        assert bench.raw[0].calls(what) == asked

    run(test)


def test_later_request_does_not_wait_for_a_hanging_read() -> None:
    """Each request for a popular prefix would lose its deadline to a read begun by another."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(6)
        await bench.backed_up()
        bench.forget()
        bench.raw[0].hangs = {"get"}
        assert await bench.acquire(hashes, 0.2) == 0
        before_s = bench.loop.time()
        assert await bench.acquire(hashes, 0.2) == 0
        assert bench.loop.time() - before_s < 0.01

    run(test)


def test_later_request_does_not_wait_behind_hanging_reads() -> None:
    """Each request for blocks that were queued when a disk hung would lose its deadline."""

    async def test(bench: Bench) -> None:
        (raw,) = bench.raw
        read, queued = bench.store(6), bench.store(6, "queued")
        await bench.backed_up()
        bench.forget()
        raw.hangs, raw.lingers_s = {"get"}, 1000.0
        async with asyncio.TaskGroup() as group:
            for hashes in (read, queued):
                group.create_task(bench.acquire(hashes, 0.2))
        for hashes in (read, queued):
            before_s = bench.loop.time()
            assert await bench.acquire(hashes, 0.2) == 0
            assert bench.loop.time() - before_s < 0.01
        raw.hangs.clear()
        await asyncio.sleep(1100)
        bench.check_nothing_is_left()
        assert await bench.acquire(queued) == 6

    run(test, config("tier", read_batches=1))


def test_blocks_queued_behind_hanging_reads_come_from_the_next_tier() -> None:
    """A hanging disk would keep queued blocks from being read from another tier."""

    async def test(bench: Bench) -> None:
        read, queued = bench.store(6), bench.store(6, "queued")
        await bench.backed_up()
        bench.forget()
        first = bench.raw[0]
        first.hangs, first.lingers_s = {"get"}, 1000.0
        async with asyncio.TaskGroup() as group:
            for hashes in (read, queued):
                group.create_task(bench.acquire(hashes, 0.2))
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        assert await bench.acquire(queued, 0.2) == 6

    run(test, config("first", read_batches=1), config("second"))


def test_outage_costs_one_deadline_and_ends_by_itself() -> None:
    """A dead server would slow every request, or stay unused after it has come back."""

    async def test(bench: Bench) -> None:
        first, second = bench.raw
        hashes = bench.store(6)
        await bench.backed_up()
        bench.forget()
        first.hangs = {"contains", "get", "put"}
        # The first request waits for the tier's deadline, and still gets the block.
        began_s = bench.loop.time()
        assert await bench.acquire(hashes) == 6
        assert bench.loop.time() - began_s == pytest.approx(DEADLINE_S, abs=0.1)
        for _ in range(20):
            bench.forget()
            began_s = bench.loop.time()
            assert await bench.acquire(hashes) == 6
            assert bench.loop.time() - began_s < 0.01
            await asyncio.sleep(0.3)
        assert bench.tiers[0].status()["state"] == "failing"
        first.hangs.clear()
        await asyncio.sleep(DEADLINE_S + PROBE_S + 0.1)
        asked = first.calls("get")
        second.hangs = {"contains", "get"}
        bench.forget()
        assert await bench.acquire(hashes, 1.0) == 6
        assert first.calls("get") > asked
        await bench.backed_up()

    run(test)


def test_recovered_tier_is_used_by_engines_of_several_ranks() -> None:
    """A tensor-parallel engine would lose its tiers to the first outage, until a restart."""

    async def test(bench: Bench) -> None:
        (raw,) = bench.raw
        ranks = [bench.node.register(blocks.namespace(PAGE, tp_rank=r, tp_size=2)) for r in (0, 1)]
        for rank in ranks:
            hashes = bench.store(8, space=rank)
        await bench.backed_up()
        bench.forget()
        raw.takes_s, raw.hangs = 0.01, {"contains", "get"}
        assert await bench.acquire(hashes, 0.5, ranks) == 0
        await asyncio.sleep(DEADLINE_S)
        raw.hangs.clear()
        await asyncio.sleep(DEADLINE_S + PROBE_S)
        # The first request is the trial.
        await bench.acquire(hashes, 0.5, ranks)
        await asyncio.sleep(0.1)
        bench.forget()
        assert await bench.acquire(hashes, 0.5, ranks) == 8
        bench.check_nothing_is_left()

    run(test, config("tier"))


class SlowTailTier(Tier):
    """Delays blocks that are not in `quick`."""

    def __init__(self) -> None:
        super().__init__()
        self.quick: set[bytes] = set()

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        slow = any(request.block_hash not in self.quick for request in requests)
        await asyncio.sleep(1.0 if slow else 0.1)
        return await super().get_into(namespace, requests)


def test_acquire_does_not_wait_for_blocks_behind_a_lost_one() -> None:
    """A request would wait until its deadline for many blocks that it cannot be given."""
    raw = SlowTailTier()

    async def test(bench: Bench) -> None:
        ranks = [bench.node.register(blocks.namespace(PAGE, tp_rank=r, tp_size=2)) for r in (0, 1)]
        for rank in ranks:
            for count in (50, 100, 150):  # As many at once as may be queued for backup.
                hashes = bench.store(count, space=rank)
                await bench.backed_up()
        bench.forget()
        raw.quick = set(hashes[:64])
        # As if by another process: the index still lists the block.
        del raw.blocks[key(hashes[40], ranks[1].namespace)]
        began_s = bench.loop.time()
        assert await bench.acquire(hashes, spaces=ranks) == 40
        assert bench.loop.time() - began_s < 0.2
        began_s = bench.loop.time()
        assert await bench.acquire(hashes, spaces=ranks[:1]) == 150
        assert bench.loop.time() - began_s > 0.5
        await asyncio.sleep(0.1)  # The other rank's read, which began as late, ends by itself.
        bench.check_nothing_is_left()

    run(test, config("tier", read_batches=64), raw=[raw], blocks_in_l2=1024)


def test_request_with_a_short_deadline_does_not_open_the_breaker() -> None:
    """One client that asks for answers in 20 ms would turn others' hits into misses."""

    async def test(bench: Bench) -> None:
        (raw,) = bench.raw
        chains = []
        for number in range(20):
            chains.append(bench.store(4, number))
            await bench.backed_up()
        bench.forget()
        raw.takes_s = 0.1

        async def impatient() -> None:
            for number in range(1000):
                assert await bench.acquire(chains[10 + number % 10], 0.02) == 0
                await asyncio.sleep(0.013 * (number % 7))

        assert await bench.acquire(chains[0]) == 4
        task = asyncio.create_task(impatient())
        for number in range(1, 10):
            await asyncio.sleep(0.017 * number)
            assert await bench.acquire(chains[number]) == 4, number
        task.cancel()

    run(test, config("tier"))


def test_answer_long_after_its_deadline_is_counted() -> None:
    """A daemon starved by the machine would look as if its tiers were slow."""

    async def test(bench: Bench) -> None:
        (block_hash,) = bench.store(1)
        for late_ms, counted in ((99, 0), (101, 1)):
            deadline_ns = bench.loop.now_ns - late_ms * 1_000_000
            await bench.node.acquire(1, [bench.space], [block_hash], deadline_ns)
            assert bench.node.counters["answers_late_total"] == counted

    run(test)


@pytest.mark.parametrize("deadline_s", [2.0, 0.15])
def test_acquire_waits_for_room_while_blocks_are_backed_up(deadline_s: float) -> None:
    """A request with seconds left would miss at once: the leaf of every chain in host memory was
    waiting for its backup, so nothing could be evicted."""

    async def test(bench: Bench) -> None:
        raw, node = bench.raw[0], bench.node
        hashes = bench.store(16)
        await bench.backed_up()
        bench.forget()
        for count in (16, 32, 48):
            bench.store(count, "fills")
            await bench.backed_up()
        raw.takes_s = 0.5
        bench.store(64, "fills")
        await asyncio.sleep(0.1)
        raw.takes_s = 0.0
        began_s = bench.loop.time()
        got = await bench.acquire(hashes, deadline_s)
        took_s = bench.loop.time() - began_s
        assert got == (16 if deadline_s == 2.0 else 0)
        assert took_s == pytest.approx(min(0.4, deadline_s), abs=0.02)
        assert not node.counters["promotion_no_room_total"]
        await bench.backed_up()
        bench.check_nothing_is_left()

    run(test, config("tier", write_batches=1), blocks_in_l2=64)
