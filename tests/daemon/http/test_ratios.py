"""Hit ratios in STATUS and metrics: by tier, lost, of no use, and at twice the capacity."""

from __future__ import annotations

import asyncio

from tests.support.prometheus import read
from tests.support.tiers.bench import Bench, config, run
from tierd.config import Eviction, WritePolicy
from tierd.daemon.http.metrics import scrape
from tierd.eviction import POLICIES

SELECTIVE = config("tier", write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE, write_share=0.01)


def refuse_all(bench: Bench) -> None:
    """Have the write policy refuse every block."""
    budget = bench.node.backups.queues[0].writes.budget
    budget.demand, budget._first_steps = 1.0, 0
    budget._steer = lambda: None  # type: ignore[method-assign]


def tier(status: dict[str, object], at: int = 0) -> dict[str, object]:
    storage = status["storage"]
    assert isinstance(storage, list)
    found = storage[at]
    assert isinstance(found, dict)
    return found


def host(status: dict[str, object]) -> dict[str, object]:
    found = status["host"]
    assert isinstance(found, dict)
    return found


def counted(part: dict[str, object], name: str) -> object:
    counters = part["counters"]
    assert isinstance(counters, dict)
    return counters[name]


async def ask(bench: Bench, hashes: list[bytes]) -> None:
    """Acquire as a session does."""
    node, spaces = bench.node, [bench.space]
    settled, lease, _ = node.acquire_now(1, spaces, hashes)
    node.learning.note(spaces, hashes, 0)
    if settled:
        bench.load(hashes, lease)
        if lease is not None:
            node.host.release(lease.lease_id, 1)
    else:
        await bench.acquire(hashes)
    await bench.learned()


def test_hits_are_counted_by_the_tier_that_served_them() -> None:
    """An operator could not see whether a paid-for tier is useful."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(8)
        await bench.backed_up()
        bench.raw[0].blocks.clear()
        await ask(bench, hashes)
        bench.forget()
        await ask(bench, hashes)
        await ask(bench, [*hashes[:4], *[bytes([1]) * 32] * 4])
        status = bench.node.status()
        assert counted(status, "requested_blocks_total") == 24
        assert status["hit_ratio"] == round(20 / 24, 4)
        assert host(status)["hit_ratio"] == round(12 / 24, 4)
        assert [tier(status, at)["hit_ratio"] for at in (0, 1)] == [0, round(8 / 24, 4)]
        metrics = read(scrape(status))
        assert metrics["tierd_hit_ratio"].value() == round(20 / 24, 4)
        assert metrics["tierd_host_hit_ratio"].value() == 0.5
        assert metrics["tierd_tier_hit_ratio"].value(tier="tier1") == round(8 / 24, 4)
        assert metrics["tierd_tier_loaded_blocks_total"].value(tier="tier1") == 8

    run(test)


def test_blocks_written_and_never_read_are_counted() -> None:
    """An operator could not see that a drive is worn out for nothing."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(8)
        bench.store(24, "of no use")
        await bench.backed_up()
        assert tier(bench.node.status())["written_unread_share"] == 1.0
        bench.forget()
        for _ in range(2):
            await ask(bench, hashes)
            bench.forget()
        assert tier(bench.node.status())["written_unread_share"] == 0.75

    run(test, config("tier"))


def test_hit_ratio_at_twice_the_capacity_is_estimated() -> None:
    """An operator could not see whether more memory would help."""

    async def test(bench: Bench) -> None:
        refuse_all(bench)
        chains = [bench.store(16, tag) for tag in range(6)]
        for hashes in chains:
            await ask(bench, hashes)
        status = host(bench.node.status())
        held = sum(len(set(hashes) & bench.space.items.keys()) for hashes in chains)
        assert held <= 64
        assert status["hit_ratio"] == round(held / 96, 4)
        assert status["hit_ratio_at_twice"] == 1.0
        for tag in range(100, 120):
            await asyncio.sleep(1)
            bench.store(16, tag)
        for hashes in chains:
            await ask(bench, hashes)
        status = host(bench.node.status())
        assert status["hit_ratio_at_twice"] == 0.5, "all were evicted long ago"

    run(test, SELECTIVE, blocks_in_l2=64)


def test_evictions_are_counted_by_reason_and_lost_hits_by_refusal() -> None:
    """An operator could not see why blocks are evicted, or that the write budget is too small."""

    async def test(bench: Bench) -> None:
        refuse_all(bench)
        hashes = bench.store(64)
        bench.store(64, "more")
        bench.forget()
        await ask(bench, hashes)
        status = bench.node.status()
        assert counted(tier(status), "refused_hits_total") == 64
        metrics = read(scrape(status))
        assert metrics["tierd_tier_refused_hits_total"].value(tier="tier") == 64
        evicted = [
            metrics["tierd_evicted_blocks_total"].value(reason=why)
            for why in ("room", "ahead", "lent")
        ]
        assert sum(evicted) == counted(status, "evicted_blocks_total") == 128
        assert (
            metrics["tierd_tier_skipped_blocks_total"].value(tier="tier", reason="refused") == 128
        )

    run(test, SELECTIVE)


def test_every_replay_policy_can_be_configured() -> None:
    """A policy recommended by replay could not be configured."""
    assert sorted(POLICIES) == sorted(eviction.value for eviction in Eviction)
