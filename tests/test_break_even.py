"""Which loads are refused because computing is faster."""

from __future__ import annotations

from tierd.config import PrefetchConfig
from tierd.core.prefetch import TRIAL_EVERY, BreakEven, Worth

TOKENS = 1000


def asked(gate: BreakEven, loads_s: dict[int, float], tokens_per_s: int = 1000) -> bool:
    """Whether a request of TOKENS, computed in 1 s by default, has its prefix brought."""
    worth = Worth(
        PrefetchConfig(min_tokens=0), gate, resident_tokens=0, prefill_tokens_per_s=tokens_per_s
    )
    brought = worth.bringing(TOKENS, TOKENS, loads_s)
    assert worth.refused is not brought
    assert worth.bringing(TOKENS, TOKENS, loads_s) is brought, "one request, one answer"
    return brought


def test_a_slow_load_is_refused_and_a_fast_one_done() -> None:
    """A hit would make a request slower than a miss."""
    gate = BreakEven()
    assert asked(gate, {0: 0.9})
    assert not asked(gate, {0: 1.1})
    assert not asked(gate, {0: 0.1, 1: 1.1}), "the slowest part decides"
    assert asked(gate, {0: 0.9, 1: 0.9}), "tiers are read at the same time"


def test_unknown_speeds_refuse_nothing() -> None:
    """A new tier would never be read, and so never be measured."""
    gate = BreakEven()
    assert all(asked(gate, {}) for _ in range(100))
    assert all(asked(gate, {0: 1e9}, tokens_per_s=0) for _ in range(100))


def test_each_tier_gets_its_trials() -> None:
    """Of two slow tiers that are asked in turn one would never recover."""
    gate = BreakEven()
    brought = {0: 0, 1: 0}
    for number in range(4 * TRIAL_EVERY):
        brought[number % 2] += asked(gate, {number % 2: 5.0})
    assert brought == {0: 2, 1: 2}
