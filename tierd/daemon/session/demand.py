"""What engines ask for and load, told apart by namespace for as many as metrics may name.

Each name that is ever shown is a time series that Prometheus keeps, and engines make new
namespaces as they like. So a namespace is counted by itself while it has a seat, else with the
others, and what has been counted stays where it was: no number ever goes down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tierd.core.l2.space import Space

SHOWN_CHARS_MAX: Final = 100
"""Of a namespace's text in STATUS; a field that differs further on still has another digest."""

SEATS_MAX: Final = 20
"""Namespaces that are counted by themselves at once."""


@dataclass(slots=True)
class DemandCounts:
    """What engines asked for and loaded, since the start."""

    requested_tokens: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    prefill_tokens_per_s: int = 0
    """How fast an engine computes prompts, as one said last; 0: none has."""

    def status(self) -> dict[str, object]:
        """The numbers, for STATUS."""
        return {
            "requested_tokens": self.requested_tokens,
            "loaded_tokens": self.loaded_tokens,
            "loaded_bytes": self.loaded_bytes,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
        }


class Demand:
    """The tallies. The first to ask have the seats, until no engine uses the namespace any more
    and none of its blocks is left."""

    def __init__(self) -> None:
        self.others = DemandCounts()
        self._seated: dict[bytes, tuple[Space, DemandCounts]] = {}
        self._before: dict[bytes, DemandCounts] = {}
        """Of those that have lost their seat: with a new one they go on counting there."""

    def of(self, space: Space) -> DemandCounts:
        """Where to count what is asked of a namespace now."""
        seat = self._seated.get(space.digest)
        if seat is not None:
            return seat[1]
        if len(self._seated) >= SEATS_MAX and not self._unseat():
            return self.others
        tally = self._before.pop(space.digest, None) or DemandCounts()
        self._seated[space.digest] = (space, tally)
        return tally

    def _unseat(self) -> bool:
        """Free the seat of a namespace that is gone; whether there was one."""
        for digest, (space, tally) in self._seated.items():
            if not space.sessions and not space.items:
                del self._seated[digest]
                self._before[digest] = tally
                return True
        return False

    def status(self) -> list[dict[str, object]]:
        """Who has a seat, by digest; and all others, as "other"."""
        seated = [
            {
                "namespace": digest.hex(),
                "model": space.namespace.model[:SHOWN_CHARS_MAX],
                **tally.status(),
            }
            for digest, (space, tally) in self._seated.items()
        ]
        return [*seated, {"namespace": "other", "model": "", **self.others.status()}]
