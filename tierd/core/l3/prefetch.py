"""How long a request may wait for what tiers have of its prefix, and what is worth bringing.

Pure: it is told times, sizes and speeds. It refuses to know tasks, tiers and slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final, assert_never

from tierd.config import PrefetchConfig, PrefetchPolicy

TRIAL_EVERY: Final = 32
"""Of each tier one in so many loads that are not worth it is done all the same: its speed is
known from its loads only, and would for ever stay what it was in its worst hour."""

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
    """When a request that arrived `waited_ms` ago is answered at the latest, at least `now_ns`.

    The policy's clock starts at the request's arrival and covers everything; the client's
    deadline, which starts now, can only make it shorter.
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
    """Whether a load of so many tokens takes no longer than computing them."""
    return load_s <= tokens / prefill_tokens_per_s


class BreakEven:
    """Which loads would take longer than computing their tokens, all requests together."""

    def __init__(self) -> None:
        self._refused: Counter[int] = Counter()

    def trial(self, tier: int) -> bool:
        """A load is not worth it because of this tier: whether to do it all the same.

        Counted by tier: of two that take turns in being asked, one would always get the trials.
        """
        self._refused[tier] += 1
        return self._refused[tier] % TRIAL_EVERY == 0


class Worth:
    """What of one request's prefix is worth bringing. Tokens count from its start."""

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
        """Whether the last answer was no because computing is faster."""
        self.on_trial: list[int] = []
        """Tiers that the last answer is a trial of: it was yes although they were slow."""

    def asking(self, tokens: int) -> bool:
        """Whether to ask tiers at all, for a prefix of so many tokens."""
        return tokens - self._resident_tokens >= self._min_tokens

    def bringing(self, tokens: int, more_tokens: int, loads_s: Mapping[int, float]) -> bool:
        """Whether to bring the last `more_tokens` of a prefix.

        `loads_s` says how long each tier takes for its part, those of unknown speed left out.
        They are read at the same time, so the slowest part decides.
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
