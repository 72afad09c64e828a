"""The break-even gate: loads that are refused because recomputing is faster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence

from tests.support import blocks
from tests.support.tiers.bench import SPACE, Bench, config, run
from tierd.backend import GetRequest, GetResult
from tierd.config import PrefetchConfig
from tierd.core.l3.prefetch import TRIAL_EVERY, BreakEven, Worth

Ask = Callable[[int], Coroutine[None, None, int]]

TOKENS = 1000

PREFIX_BLOCKS = 24
PREFIX_TOKENS = PREFIX_BLOCKS * SPACE.block_tokens


def is_loaded(gate: BreakEven, loads_s: dict[int, float], tokens_per_s: int = 1000) -> bool:
    """Return whether the prefix of a request of TOKENS, computed in 1 s by default, is loaded."""
    worth = Worth(
        PrefetchConfig(min_tokens=0), gate, resident_tokens=0, prefill_tokens_per_s=tokens_per_s
    )
    brought = worth.bringing(TOKENS, TOKENS, loads_s)
    assert worth.refused is not brought
    assert worth.bringing(TOKENS, TOKENS, loads_s) is brought, "one request, one answer"
    return brought


def test_load_slower_than_computing_is_refused() -> None:
    """A hit would make a request slower than a miss."""
    gate = BreakEven()
    assert is_loaded(gate, {0: 0.9})
    assert not is_loaded(gate, {0: 1.1})
    assert not is_loaded(gate, {0: 0.1, 1: 1.1}), "the slowest part decides"
    assert is_loaded(gate, {0: 0.9, 1: 0.9}), "tiers are read at the same time"


def test_unknown_speeds_refuse_nothing() -> None:
    """A new tier would never be read, and so never be measured."""
    gate = BreakEven()
    assert all(is_loaded(gate, {}) for _ in range(100))
    assert all(is_loaded(gate, {0: 1e9}, tokens_per_s=0) for _ in range(100))


def test_break_even_gate_can_be_disabled() -> None:
    """An operator who pays for the engine's time could not save it."""
    config = PrefetchConfig(min_tokens=0, break_even=False)
    worth = Worth(config, BreakEven(), resident_tokens=0, prefill_tokens_per_s=10**6)
    assert worth.bringing(TOKENS, TOKENS, {0: 1e9})


def test_each_slow_tier_gets_its_own_trials() -> None:
    """Of two slow tiers that are looked up alternately, one would never recover."""
    gate = BreakEven()
    brought = {0: 0, 1: 0}
    for number in range(4 * TRIAL_EVERY):
        brought[number % 2] += is_loaded(gate, {number % 2: 5.0})
    assert brought == {0: 2, 1: 2}


# --- on a node --------------------------------------------------------------------------


def run_with_gate(test: Callable[[Bench, Ask], Awaitable[None]]) -> None:
    """Run a test on a node whose only tier has a prefix and whose memory is empty. `ask` returns
    the blocks loaded for an engine with the given speed in tokens/s."""

    async def prepared(bench: Bench) -> None:
        hashes = bench.store(PREFIX_BLOCKS)
        await bench.backed_up()
        assert hashes == blocks.chain(PREFIX_BLOCKS)[0]

        async def ask(tokens_per_s: int) -> int:
            bench.forget()
            end_ns = bench.loop.now_ns + 10**11
            lease = await bench.node.acquire(
                1, [bench.space], hashes, end_ns, prefill_tokens_per_s=tokens_per_s
            )
            await asyncio.sleep(0.1)
            if lease is None:
                return 0
            bench.node.host.release(lease.lease_id, 1)
            return len(lease.parts[0][1])

        await test(bench, ask)
        bench.check_nothing_is_left()

    run(prepared, config("tier0", deadline_ms=60_000, slow_ms=60_000))


def test_recovered_tier_is_used_again_after_one_trial() -> None:
    """Speeds measured in a bad hour would keep loads refused for many trials."""

    async def test(bench: Bench, ask: Ask) -> None:
        raw = bench.raw[0]
        tokens_per_s = 10 * PREFIX_TOKENS  # The engine computes the prefix in 0.1 s.
        raw.takes_s = 0.01
        assert [await ask(tokens_per_s) for _ in range(100)] == [PREFIX_BLOCKS] * 100
        raw.takes_s = 2.0
        slow = [await ask(tokens_per_s) for _ in range(10 * TRIAL_EVERY)]
        assert sum(map(bool, slow[TRIAL_EVERY:])) == 9, "except for trials"
        raw.takes_s = 0.09
        well = [await ask(tokens_per_s) for _ in range(3 * TRIAL_EVERY)]
        first = well.index(PREFIX_BLOCKS)
        assert first < TRIAL_EVERY
        assert well[first:] == [PREFIX_BLOCKS] * (len(well) - first)

    run_with_gate(test)


def test_trial_of_a_tier_that_is_still_slow_allows_no_further_loads() -> None:
    """Each trial would let slow loads through."""

    async def test(bench: Bench, ask: Ask) -> None:
        bench.raw[0].takes_s = 2.0
        assert await ask(10 * PREFIX_TOKENS) == PREFIX_BLOCKS, "its speed is unknown"
        for _ in range(5):
            is_loaded = [await ask(10 * PREFIX_TOKENS) for _ in range(TRIAL_EVERY)]
            assert is_loaded == [0] * (TRIAL_EVERY - 1) + [PREFIX_BLOCKS]

    run_with_gate(test)


def test_other_requests_do_not_join_a_trial() -> None:
    """During a trial every request would wait for a tier of unknown speed."""

    async def test(bench: Bench, ask: Ask) -> None:
        raw, tokens_per_s = bench.raw[0], 10 * PREFIX_TOKENS
        other = bench.store(PREFIX_BLOCKS, "other")
        await bench.backed_up()
        get_into = raw.get_into

        async def slow(namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
            await asyncio.sleep(2)
            return await get_into(namespace, requests)

        raw.get_into = slow  # type: ignore[method-assign]
        assert await ask(tokens_per_s) == PREFIX_BLOCKS
        for _ in range(TRIAL_EVERY - 1):
            assert await ask(tokens_per_s) == 0
        trial = asyncio.create_task(ask(tokens_per_s))
        await asyncio.sleep(1)
        began_ns = bench.loop.now_ns
        lease = await bench.node.acquire(
            1, [bench.space], other, began_ns + 10**11, prefill_tokens_per_s=tokens_per_s
        )
        assert (lease, bench.loop.now_ns - began_ns < 10**7) == (None, True)
        assert await trial == PREFIX_BLOCKS

    run_with_gate(test)


def test_refused_loads_are_counted() -> None:
    """An operator could not see why tierd loads nothing."""

    async def test(bench: Bench, ask: Ask) -> None:
        def counters(name: str) -> int:
            return bench.node.counters[name]

        assert await ask(0) == PREFIX_BLOCKS
        bench.raw[0].takes_s = 0.5
        assert await ask(PREFIX_TOKENS) == PREFIX_BLOCKS, "the engine computes the prefix in 1 s"
        assert not counters("loads_refused_total")
        assert await ask(4 * PREFIX_TOKENS) == 0
        assert counters("loads_refused_total") == 1
        assert counters("acquired_blocks_total") == 2 * PREFIX_BLOCKS

    run_with_gate(test)
