"""The calls in flight to a storage tier, and whether they show that the tier stalls.

A tier stalls while its oldest call takes too long. It is also in doubt from the moment a request's
deadline passes while the request waits for the tier, until one of the calls that it waited for
succeeds. Pure: methods get the current time, in seconds on the loop's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

USUAL_WEIGHT: Final = 1 / 8
"""Weight of the latest call in the usual duration, which a dozen calls then determine."""


@dataclass(eq=False, slots=True)
class Call:
    """One call in flight."""

    began_s: float
    era: int
    """Number of state changes of the circuit before the call."""
    lookup: bool
    """The call only looks blocks up, so its success proves nothing for calls that move blocks."""
    blamed: bool = False
    """A request's deadline passed while it waited for this call."""


class CallsInFlight:
    """The calls in flight of one circuit, the oldest first."""

    def __init__(self, *, slow_s: float) -> None:
        assert slow_s > 0
        self.slow_s = slow_s
        """A call that takes longer counts as failed."""
        self._calls: dict[Call, None] = {}
        self._doubted_s: float | None = None
        # Usual duration of a successful call, by `lookup`; 0 before the first one.
        self._usual_s = {True: 0.0, False: 0.0}

    @property
    def doubted(self) -> bool:
        """Whether a request's deadline passed, and no answer has cleared the tier since."""
        return self._doubted_s is not None

    @property
    def in_doubt(self) -> bool:
        """Whether all blamed calls have ended without a success.

        They were cancelled, so only a probe can show whether the tier works.
        """
        return self.doubted and not any(call.blamed for call in self._calls)

    def stalled_since(self, now_s: float) -> float | None:
        """Return when the stall began; None if there is none."""
        if self._doubted_s is not None:
            return self._doubted_s
        oldest = next(iter(self._calls), None)
        if oldest is not None and now_s - oldest.began_s > self.slow_s:
            return oldest.began_s + self.slow_s
        return None

    def slowness(self, call: Call, now_s: float) -> str | None:
        """Return the failure of a call that takes too long; None for any other call."""
        took_s = now_s - call.began_s
        return f"took {took_s:.3f} s" if took_s > self.slow_s else None

    def add(self, call: Call) -> None:
        """Record that a call begins."""
        self._calls[call] = None

    def remove(self, call: Call) -> None:
        """Record that a call ended."""
        del self._calls[call]

    def succeeded(self, call: Call, now_s: float) -> None:
        """Record that a call that was removed had succeeded."""
        took_s, usual_s = now_s - call.began_s, self._usual_s[call.lookup]
        self._usual_s[call.lookup] += (took_s - usual_s) * (USUAL_WEIGHT if usual_s else 1)
        # The success of a blamed lookup clears only lookups.
        blamed = [other for other in self._calls if other.blamed]
        if call.blamed and (not call.lookup or all(other.lookup for other in blamed)):
            self.trust()

    def blame(self, now_s: float, *, doubt: bool) -> None:
        """Blame the calls that have run for at least the usual duration; with `doubt`, doubt the
        tier if there are any."""
        late = [c for c in self._calls if now_s - c.began_s >= self._usual_s[c.lookup]]
        for call in late:
            call.blamed = True
        if late and doubt and self._doubted_s is None:
            self._doubted_s = now_s

    def trust(self) -> None:
        """End the doubt and the blame of calls in flight."""
        self._doubted_s = None
        for call in self._calls:
            call.blamed = False
