"""What engines request and load, by namespace.

Prometheus keeps a time series for each name ever shown, and engines create namespaces freely. So
only a limited number of namespaces have a seat and are counted separately; all others are counted
together. Counts never move between the two: no number ever decreases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tierd.core.l2.space import Space

SHOWN_CHARS_MAX: Final = 100
"""Length of a namespace's text in STATUS. Namespaces that differ beyond it have other digests."""

SEATS_MAX: Final = 20
"""Namespaces that are counted separately at a time."""


@dataclass(slots=True)
class DemandCounts:
    """What engines requested and loaded since the start."""

    requested_tokens: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    prefill_tokens_per_s: int = 0
    """Prefill speed that an engine reported last; 0 if none has."""

    def status(self) -> dict[str, object]:
        """Return the counts, for STATUS."""
        return {
            "requested_tokens": self.requested_tokens,
            "loaded_tokens": self.loaded_tokens,
            "loaded_bytes": self.loaded_bytes,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
        }


class Demand:
    """Assigns the seats to the first namespaces requested. A namespace without engines and blocks
    loses its seat to another one."""

    def __init__(self) -> None:
        self.others = DemandCounts()
        self._seated: dict[bytes, tuple[Space, DemandCounts]] = {}
        self._before: dict[bytes, DemandCounts] = {}
        """Counts of namespaces that have lost their seat; they resume with a new seat."""

    def of(self, space: Space) -> DemandCounts:
        """Return the counts to which a request for this namespace adds."""
        seat = self._seated.get(space.digest)
        if seat is not None:
            return seat[1]
        if len(self._seated) >= SEATS_MAX and not self._unseat():
            return self.others
        tally = self._before.pop(space.digest, None) or DemandCounts()
        self._seated[space.digest] = (space, tally)
        return tally

    def _unseat(self) -> bool:
        """Free the seat of a namespace without engines and blocks, if any; whether there was."""
        for digest, (space, tally) in self._seated.items():
            if not space.sessions and not space.items:
                del self._seated[digest]
                self._before[digest] = tally
                return True
        return False

    def status(self) -> list[dict[str, object]]:
        """Return the counts of each namespace with a seat, and of all others as "other"."""
        seated = [
            {
                "namespace": digest.hex(),
                "model": space.namespace.model[:SHOWN_CHARS_MAX],
                **tally.status(),
            }
            for digest, (space, tally) in self._seated.items()
        ]
        return [*seated, {"namespace": "other", "model": "", **self.others.status()}]
