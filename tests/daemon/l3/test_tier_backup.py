"""Backups to each tier, and the effect of one tier's outage or hang on the others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.support.tiers.bench import (
    DEADLINE_S,
    PAGE,
    PROBE_S,
    SCOPE,
    Bench,
    Tier,
    config,
    key,
    run,
)
from tierd.backend import GetRequest, GetResult, Outcome
from tierd.config import TIERS_MAX, Size, WritePolicy
from tierd.core.effects import Effect
from tierd.daemon.l3.backup import PENDING_SHARE_MAX
from tierd.daemon.l3.tier import LOG_EVERY_S, StorageTier, opened
from tierd.errors import BackendError
from tierd.testing.loop import SimulationLoop, run_simulation


def test_hanging_tier_does_not_block_backups_to_other_tiers() -> None:
    """One dead object store would stop all backups, and pin L2 until engines cannot store."""

    async def test(bench: Bench) -> None:
        first, second = bench.raw
        second.hangs = {"put"}
        share = int(256 * PAGE * PENDING_SHARE_MAX) // 2
        stored: list[bytes] = []
        for number in range(40):
            stored += bench.store(4, number)
            bench.node.check()
            queue = bench.node.backups.queues[1]
            assert queue.pending_bytes <= share
            await asyncio.sleep(0.05)
        assert set(first.blocks) == {key(block_hash) for block_hash in stored}
        assert bench.tiers[0].counters["backup_skipped_total"] == 0
        assert bench.tiers[1].counters["backup_skipped_total"] >= 4 * 40 - share // PAGE
        await asyncio.sleep(10)
        # Queued backups were abandoned, and hold nothing.
        assert bench.node.backlog() == 0
        bench.check_nothing_is_left()
        second.hangs.clear()
        await asyncio.sleep(DEADLINE_S + PROBE_S + 1)
        for number in range(40):
            bench.store(4, number)
            await asyncio.sleep(0.05)
        await bench.backed_up()
        assert set(second.blocks) == set(first.blocks)
        assert first.calls("put") == 40

    run(test)


def test_bytes_queued_for_a_tier_are_bounded() -> None:
    """A slow tier would pin as much of L2 as engines store meanwhile."""

    async def test(bench: Bench) -> None:
        (raw,) = bench.raw
        raw.takes_s = 0.5
        hashes = bench.store(20)
        queue = bench.node.backups.queues[0]
        assert queue.pending_bytes == 5 * PAGE
        assert bench.tiers[0].counters["backup_skipped_total"] == 15
        assert bench.tiers[0].status()["state"] == "ready"
        await bench.backed_up()
        # From the first block on: a tail without its beginning is useless.
        assert set(raw.blocks) == {key(block_hash) for block_hash in hashes[:5]}
        for _ in range(3):
            bench.store(20)
            await bench.backed_up()
        assert set(raw.blocks) == {key(block_hash) for block_hash in hashes}
        assert queue.pending_bytes == 0

    run(test, config("tier", write_queue=Size(5 * PAGE + 1)))


def test_queue_share_smaller_than_a_block_still_backs_up() -> None:
    """A small arena with large blocks would never reach its storage."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(2)
        await bench.backed_up()
        bench.store(2)
        await bench.backed_up()
        for raw in bench.raw:
            assert set(raw.blocks) == {key(block_hash) for block_hash in hashes}

    run(test, config("a", write_queue=Size(1)), config("b", write_queue=Size(1)))


def test_short_stall_drops_no_queued_backups() -> None:
    """One slow write would discard all writes queued behind it."""

    async def test(bench: Bench) -> None:
        (raw,) = bench.raw
        raw.hangs = {"put"}
        first = bench.store(1)
        await asyncio.sleep(0.1)
        hashes = bench.store(40, "behind")
        assert bench.node.backlog() == 41
        await asyncio.sleep(1)
        raw.hangs.clear()
        await bench.backed_up()
        # The write that hung has failed; the others only waited.
        assert set(raw.blocks) == {key(block_hash) for block_hash in hashes}
        bench.store(1)
        await bench.backed_up()
        assert key(first[0]) in raw.blocks

    run(test, config("tier", write_batches=1))


@pytest.mark.parametrize("fill", [True, False])
def test_promotion_fills_the_tiers_above(fill: bool) -> None:
    """After each restart the same blocks would be read from the object store again."""

    async def test(bench: Bench) -> None:
        first, second = bench.raw
        hashes = bench.store(6)
        await bench.backed_up()
        bench.forget()
        await first.delete_many(SCOPE, hashes)
        written = first.calls("put"), second.calls("put")
        assert await bench.acquire(hashes) == 6
        await bench.backed_up()
        bench.store(6)
        await bench.backed_up()
        assert (first.calls("put"), second.calls("put")) == (written[0] + fill, written[1])
        assert len(first.blocks) == (6 if fill else 0)

    run(test, config("first", fill_from_lower=fill), config("second"))


def test_promotion_does_not_write_to_the_tiers_below() -> None:
    """Each load from the disk would cost a write, or a lookup, at the object store."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(6)
        await bench.backed_up()
        bench.forget()
        second = bench.raw[1]
        before = list(second.log)
        assert await bench.acquire(hashes) == 6
        bench.store(6)
        await bench.backed_up()
        assert second.log == before

    run(test)


def test_blocks_missed_by_a_lower_tier_in_an_outage_are_written_later() -> None:
    """The fleet would not find an outage's blocks until the node's disk had lost them."""

    async def test(bench: Bench) -> None:
        second = bench.raw[1]
        second.hangs = {"put"}
        hashes = bench.store(6)
        await bench.backed_up()
        assert not second.blocks
        second.hangs.clear()
        await asyncio.sleep(DEADLINE_S + PROBE_S + 0.1)
        bench.forget()
        assert await bench.acquire(hashes) == 6
        await bench.backed_up()
        assert len(second.blocks) == 6

    run(test)


def test_batches_in_flight_match_the_configuration() -> None:
    """A tier with high latency could not be read or written faster."""

    async def test(bench: Bench) -> None:
        (raw,) = bench.raw
        raw.takes_s = 0.1
        chains = [bench.store(4, number) for number in range(12)]
        await bench.backed_up()
        assert raw.at_once == 1
        bench.forget()
        async with asyncio.TaskGroup() as group:
            for hashes in chains:
                group.create_task(bench.acquire(hashes))
        gets = [what for what, _ in raw.log].count("get")
        assert gets == 12
        # All lookups at once, but at most three reads.
        assert bench.tiers[0].reads.free == 3

    run(test, config("tier", read_batches=3, write_batches=1))


class LyingTier(Tier):
    """Returns damaged blocks as such, but with their bytes and header."""

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        results = await super().get_into(namespace, requests)
        for request in requests:
            request.view[0] ^= 1
        return [GetResult(Outcome.CORRUPT, result.header) for result in results]


def test_result_that_is_not_a_hit_is_not_served() -> None:
    """A third party's backend that fills in too much would have wrong bytes served."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(4)
        await bench.backed_up()
        bench.forget()
        assert await bench.acquire(hashes) == 0
        bench.check_nothing_is_left()

    run(test, raw=[LyingTier()])


class FlakyTier(Tier):
    """Every third read fails: too rarely for the breaker."""

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        results = await super().get_into(namespace, requests)
        if self.calls("get") % 3 == 0:
            raise BackendError("connection reset")
        return results


def test_occasional_failures_do_not_flood_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A line for each failed call would fill the log's disk."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(4)
        await bench.backed_up()
        for _ in range(300):
            bench.forget()
            await bench.acquire(hashes)
            await asyncio.sleep(0.1)
        counters = bench.tiers[0].status()["counters"]
        assert isinstance(counters, dict)
        assert counters["get_failed_total"] == 100

    run(test, raw=[FlakyTier()])
    lines = [line for line in caplog.messages if "get failed: connection reset" in line]
    assert 1 < len(lines) <= 300 * 0.1 / LOG_EVERY_S + 1


class SlowToCloseTier(Tier):
    """Takes as long to close as a worker process that hangs."""

    async def close(self) -> None:
        await asyncio.sleep(3.0)
        await super().close()


def test_hanging_tiers_are_closed_concurrently() -> None:
    """Each would add its time to a stop, which then would end with an error."""

    async def scenario(loop: SimulationLoop) -> None:
        tiers = [StorageTier(config(f"tier{i}"), SlowToCloseTier()) for i in range(TIERS_MAX)]
        async with opened(tiers):
            began_s = loop.time()
        assert loop.time() - began_s == pytest.approx(3.0)

    run_simulation(0, scenario)


def test_drain_does_not_wait_for_an_unavailable_tier() -> None:
    """A stop during an outage would take its whole budget, and exceed systemd's timeout."""

    async def test(bench: Bench) -> None:
        bench.raw[1].hangs = {"put"}
        for number in range(5):
            bench.store(3, number)
            await asyncio.sleep(0.01)
        await asyncio.sleep(DEADLINE_S + 0.1)
        hashes = bench.store(20)
        began_s = bench.loop.time()
        assert await bench.node.drain(60) > 0
        assert bench.loop.time() - began_s < 0.5
        assert all(key(block_hash) in bench.raw[0].blocks for block_hash in hashes)

    run(test)


def test_drain_writes_blocks_that_have_moved() -> None:
    """A namespace that gives up memory as the daemon stops would lose its blocks."""

    async def test(bench: Bench) -> None:
        raw, space = bench.raw[0], bench.space
        hashes = bench.store(30)
        raw.takes_s = 0.1
        drain = asyncio.create_task(bench.node.drain(5.0))
        await asyncio.sleep(0.05)
        (queue,) = bench.node.backups.queues
        assert any(block_hash == hashes[-1] for _, block_hash in queue.backlog._waiting)
        effects: list[Effect] = []
        slot = space.items[hashes[-1]]
        bench.node.host._room.move(space, [(slot, space.free[0])], effects)
        bench.node.memory._apply(effects)
        assert await drain == 0
        assert {each for each in hashes if key(each) in raw.blocks} == set(hashes)

    run(test, config("tier", write_policy=WritePolicy.WRITE_BACK, write_batches=1), blocks_in_l2=64)
