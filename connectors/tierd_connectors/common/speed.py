"""The engine's prefill speed, measured from its scheduler's steps."""

from __future__ import annotations

from typing import Final

STEP_TOKENS_MIN: Final = 256
"""Fewest prompt tokens of a step that is measured: a smaller step is mostly overhead."""

STEP_NS_MAX: Final = 10_000_000_000
"""A longer time between two steps is a pause, not computation of the first step."""

MEMORY: Final = 0.9
"""Factor on older measurements at each measured step: the last ten or so determine the speed."""


class PrefillSpeed:
    """Prompt tokens per second, over the last steps with at least STEP_TOKENS_MIN of them."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._ns = 0.0
        self._began_ns = 0
        self._step_tokens = 0

    def step(self, now_ns: int, prompt_tokens: int) -> None:
        """Measure the previous step, which has ended, and begin one of `prompt_tokens`."""
        took_ns = now_ns - self._began_ns
        if self._step_tokens >= STEP_TOKENS_MIN and 0 < took_ns < STEP_NS_MAX:
            self._tokens = self._tokens * MEMORY + self._step_tokens
            self._ns = self._ns * MEMORY + took_ns
        self._began_ns, self._step_tokens = now_ns, prompt_tokens

    @property
    def tokens_per_s(self) -> int:
        """The speed in tokens per second; 0 until it is known."""
        return int(self._tokens * 1e9 / self._ns) if self._ns else 0
