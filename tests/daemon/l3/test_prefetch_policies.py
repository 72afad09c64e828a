"""Prefetch policies of a whole node: deadlines and amounts, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from tests.support import blocks
from tests.support.tiers.bench import Bench, Tier, config, run
from tierd.config import PrefetchConfig, PrefetchPolicy, WritePolicy
from tierd.core.l3.prefetch import TRIAL_EVERY, deadline_ns
from tierd.daemon.session.acquiring import Patience
from tierd.errors import BackendError

MS = 1_000_000
L2_BLOCKS = 128


# --- prefetch: deadlines ----------------------------------------------------------------


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
def test_prefetch_deadline(keys, waited, client, tokens, expected) -> None:
    """A request would wait longer than the operator or the engine allows."""
    assert wait_ms(keys, waited=waited, client=client, tokens=tokens) == expected


def run_with_blocks_in_tier(
    test: Callable[[Bench], Awaitable[None]], prefetch: PrefetchConfig, **keys: object
) -> None:
    """Run a test with 24 blocks that only the tier has: the chain `blocks.chain(24)`."""

    async def prepared(bench: Bench) -> None:
        bench.store(24)
        await bench.backed_up()
        bench.forget()
        bench.node.prefetch = prefetch
        await test(bench)

    run(prepared, config("tier0", **keys), blocks_in_l2=L2_BLOCKS)


async def timed_acquire(
    bench: Bench, *, waited_ms: int = 0, client_ms: int = 60_000, ready_s: float | None = None
) -> tuple[int, float]:
    """Acquire the 24 blocks as a session would; returns the number of blocks and the time in ms."""
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
"""Longest wait in ms with `prefetch_config`, for an engine that is ready after 200 ms."""


def prefetch_config(policy: PrefetchPolicy) -> PrefetchConfig:
    return PrefetchConfig(
        policy=policy,
        timeout_base_ms=300,
        timeout_per_ki_ms=100,
        timeout_max_ms=900,
        min_tokens=0,
    )


@pytest.mark.parametrize("policy", list(PrefetchPolicy))
@pytest.mark.parametrize("tier", ["fast", "slow", "hanging", "dying"])
def test_prefetch_policies_keep_their_deadline(policy: PrefetchPolicy, tier: str) -> None:
    """A request would wait indefinitely for a disk: HiCache's wait_complete did when a read was
    revoked or had failed, and it ignored its timeout while a read was pending."""

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
        count, took_ms = await timed_acquire(bench, ready_s=ready_s)
        assert took_ms <= POLICIES[policy] + 10
        if tier == "fast":
            assert (count, took_ms < 10) == (24, True)
        # Blocks that arrived by then are used.
        assert count <= 24

    run_with_blocks_in_tier(test, prefetch_config(policy))


def test_time_in_the_engines_queue_shortens_the_deadline() -> None:
    """A request that sat in the engine's queue would wait a full deadline on top."""

    async def test(bench: Bench) -> None:
        bench.raw[0].hangs = {"get"}
        _, took_ms = await timed_acquire(bench, waited_ms=250)
        assert took_ms == pytest.approx(POLICIES[PrefetchPolicy.TIMEOUT] - 250, abs=10)

    run_with_blocks_in_tier(test, prefetch_config(PrefetchPolicy.TIMEOUT))


def test_wait_complete_ends_once_every_read_has_failed() -> None:
    """A request would wait until the hard cap for blocks that can no longer arrive."""

    async def test(bench: Bench) -> None:
        async def contains(namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
            raise BackendError("gone")

        bench.raw[0].contains_many = contains  # type: ignore[method-assign]
        count, took_ms = await timed_acquire(bench)
        assert (count, took_ms < 10) == (0, True)

    run_with_blocks_in_tier(test, prefetch_config(PrefetchPolicy.WAIT_COMPLETE))


def test_best_effort_returns_the_prefix_present_when_the_engine_is_ready() -> None:
    """A partial prefix would be thrown away, or a tier blamed for an engine that was quick."""

    async def test(bench: Bench) -> None:
        hashes, _ = blocks.chain(24)
        assert await bench.acquire(hashes[:8]) == 8
        bench.raw[0].takes_s = 0.2
        count, took_ms = await timed_acquire(bench, ready_s=0.25)
        assert took_ms == pytest.approx(250, abs=10)
        assert count == 8
        assert bench.node.counters["best_effort_ended_total"] == 1
        assert not bench.node.counters["deadline_missed_total"]
        assert bench.tiers[0].reads_allowed

    run_with_blocks_in_tier(test, prefetch_config(PrefetchPolicy.BEST_EFFORT), read_batches=1)


# --- prefetch: amounts ------------------------------------------------------------------


def test_prefix_below_min_tokens_is_not_looked_up() -> None:
    """A lookup and a read would be spent on tokens that the engine computes in 10 ms."""

    async def test(bench: Bench) -> None:
        calls = len(bench.raw[0].log)
        assert await timed_acquire(bench) == (0, 0)
        assert len(bench.raw[0].log) == calls, "not even asked"

    run_with_blocks_in_tier(test, PrefetchConfig(min_tokens=24 * 16 + 1))


def test_tier_prefix_below_min_tokens_is_not_read() -> None:
    """A long prompt of which a tier has only a short start would be read."""

    async def test(bench: Bench) -> None:
        hashes, _ = blocks.chain(64)
        end_ns = bench.loop.now_ns + 10**10
        assert await bench.node.acquire(1, [bench.space], hashes, end_ns) is None
        assert bench.raw[0].calls("get") == 0
        bench.node.prefetch = PrefetchConfig(min_tokens=24 * 16)
        lease = await bench.node.acquire(1, [bench.space], hashes, end_ns)
        assert lease is not None
        assert len(lease.parts[0][1]) == 24

    run_with_blocks_in_tier(test, PrefetchConfig(min_tokens=24 * 16 + 1))


def test_prefix_that_fills_most_of_l2_is_promoted_whole() -> None:
    """It would be cut to the limit of one reservation, as HiCache cuts a storage hit to the free
    room in its host memory."""

    async def test(bench: Bench) -> None:
        hashes: list[bytes] = []
        while len(hashes) < 100:
            hashes = bench.store(len(hashes) + 20, "long")
            await bench.backed_up()
        bench.forget()
        assert await bench.acquire(hashes) == 100
        assert not bench.node.counters["promotion_no_room_total"]

    run(
        test,
        config("tier0", write_policy=WritePolicy.WRITE_THROUGH),
        blocks_in_l2=L2_BLOCKS,
    )


def test_loads_slower_than_recomputing_are_refused_except_trials() -> None:
    """A hit would make a request slower than a miss, or a tier that was slow once would never be
    used again."""

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
        assert await ask(100) == 24, "worth loading for a slow engine"
        assert await ask(0) == 24, "loaded when the engine's speed is unknown"
        assert counters["acquired_blocks_total"] == 4 * 24
        assert counters["loads_refused_total"] == TRIAL_EVERY - 1

    run_with_blocks_in_tier(test, PrefetchConfig(min_tokens=0))


def test_tier_reads_first_for_the_request_that_has_waited_longest() -> None:
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
