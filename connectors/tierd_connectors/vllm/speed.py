"""How fast the engine computes prompts, seen from its scheduler."""

from __future__ import annotations

from typing import Final

STEP_TOKENS_MIN: Final = 256
"""Prompt tokens of a step that counts: a smaller one is mostly overhead."""

STEP_NS_MAX: Final = 10_000_000_000
"""A longer pause between two steps was none of the first one's making."""

MEMORY: Final = 0.9
"""Of what was counted before, at each step that counts: the last ten or so make the speed."""


class PrefillSpeed:
    """Prompt tokens a second, over the last steps that computed many of them."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._ns = 0.0
        self._began_ns = 0
        self._step_tokens = 0

    def step(self, now_ns: int, prompt_tokens: int) -> None:
        """A step begins, and so the one before it has ended."""
        took_ns = now_ns - self._began_ns
        if self._step_tokens >= STEP_TOKENS_MIN and 0 < took_ns < STEP_NS_MAX:
            self._tokens = self._tokens * MEMORY + self._step_tokens
            self._ns = self._ns * MEMORY + took_ns
        self._began_ns, self._step_tokens = now_ns, prompt_tokens

    @property
    def tokens_per_s(self) -> int:
        """The speed, or 0 if it is not known yet."""
        return int(self._tokens * 1e9 / self._ns) if self._ns else 0
