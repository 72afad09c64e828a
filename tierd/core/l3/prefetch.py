"""How long a request may wait for the promotion of its prefix, and which loads are worth it.

Pure: it works on times, sizes and speeds, and knows no tasks, tiers or slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final, assert_never

from tierd.config import PrefetchConfig, PrefetchPolicy

TRIAL_EVERY: Final = 32
"""Every n-th load that is not worth it is done anyway, for each tier: a tier's speed is measured
only by loads, and a tier once found slow would count as slow forever."""

MS: Final = 1_000_000
KI: Final = 1024


def deadline_ns(
    config: PrefetchConfig,
    *,
    now_ns: int,
    waited_ms: int,
    client_ms: int,
    missing_tokens: int,
) -> int:
    """Return the latest time of the answer to a request that arrived `waited_ms` ago.

    It is at least `now_ns`. The policy's time starts at the request's arrival. The client's
    deadline, which starts now, can only shorten it.
    """
    match config.policy:
        case PrefetchPolicy.TIMEOUT:
            allowance_ms = config.timeout_per_ki_ms * missing_tokens // KI
            allowed_ms = min(config.timeout_base_ms + allowance_ms, config.timeout_max_ms)
        case PrefetchPolicy.WAIT_COMPLETE | PrefetchPolicy.BEST_EFFORT:
            allowed_ms = config.timeout_max_ms
        case _:
            assert_never(config.policy)
    return now_ns + max(0, min(allowed_ms - waited_ms, client_ms)) * MS


def pays(load_s: float, tokens: int, prefill_tokens_per_s: float) -> bool:
    """Whether a load of `tokens` takes no longer than computing them."""
    return load_s <= tokens / prefill_tokens_per_s


class BreakEven:
    """Counts loads that would take longer than computing their tokens, over all requests."""

    def __init__(self) -> None:
        self._refused: Counter[int] = Counter()

    def trial(self, tier: int) -> bool:
        """Count a load that is not worth it because of a tier; return whether to try it anyway.

        Counted per tier: with one count, two tiers asked alternately would give all trials to one.
        """
        self._refused[tier] += 1
        return self._refused[tier] % TRIAL_EVERY == 0


class Worth:
    """Decides which part of one request's prefix is worth loading; tokens count from its start."""

    def __init__(
        self,
        config: PrefetchConfig,
        break_even: BreakEven,
        *,
        resident_tokens: int,
        prefill_tokens_per_s: int,
    ) -> None:
        self._min_tokens = max(1, config.min_tokens)
        self._break_even = break_even
        self._resident_tokens = resident_tokens
        self._prefill_tokens_per_s = prefill_tokens_per_s if config.break_even else 0
        self._trials: dict[int, bool] = {}
        self.refused = False
        """Whether the last decision was no because computing is faster."""
        self.on_trial: list[int] = []
        """Tiers for which the last decision was yes only as a trial, although they are slow."""

    def asking(self, tokens: int) -> bool:
        """Whether to ask the tiers at all for a prefix of `tokens`."""
        return tokens - self._resident_tokens >= self._min_tokens

    def bringing(self, tokens: int, more_tokens: int, loads_s: Mapping[int, float]) -> bool:
        """Whether to load the last `more_tokens` of a prefix.

        `loads_s` has the time that each tier needs for its part, without tiers of unknown speed.
        The parts are read in parallel, so the slowest one decides.
        """
        self.refused, self.on_trial = False, []
        if tokens - self._resident_tokens < self._min_tokens:
            return False
        if not self._prefill_tokens_per_s:
            return True
        speed = self._prefill_tokens_per_s
        slow = [tier for tier, load_s in loads_s.items() if not pays(load_s, more_tokens, speed)]
        for tier in slow:
            if tier not in self._trials:
                self._trials[tier] = self._break_even.trial(tier)
        if all(self._trials[tier] for tier in slow):
            self.on_trial = slow
        else:
            self.refused = True
        return not self.refused
