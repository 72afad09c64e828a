"""The breaker's decisions: whether a call of one kind to a storage tier may begin.

A pure state machine: its methods report when calls begin and how they end, and answer whether
another call may begin. It knows no backends, timers or tasks. All times are seconds on the loop's
clock; methods get the current time as an argument.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from dataclasses import dataclass
from typing import Final

log = logging.getLogger("tierd")

FAILURES_IN_A_ROW_MAX: Final = 3
"""Consecutive failures that open the circuit: one lost connection may cause two."""

WINDOW_CALLS: Final = 20
FAILURES_IN_WINDOW_MIN: Final = 6
"""The circuit also opens if half of the last WINDOW_CALLS calls failed, or half of all calls if
there were fewer, but not below this number of failures. A tier that fails every other call never
has three failures in a row."""

USUAL_WEIGHT: Final = 1 / 8
"""Weight of the latest call in the usual duration, which a dozen calls then determine."""


class State(enum.Enum):
    """Whether calls may begin: all in CLOSED, one trial in HALF_OPEN, none in the other states."""

    CLOSED = "closed"
    """Calls may begin."""
    STALLED = "stalled"
    """No call begins until the calls in flight are answered or fail."""
    OPEN = "open"
    """The tier failed; only probes reach it."""
    HALF_OPEN = "half_open"
    """The probe was answered; one real call decides."""


@dataclass(eq=False, slots=True)
class Call:
    """One call in flight."""

    began_s: float
    era: int
    lookup: bool
    """The call only looks blocks up, so its success proves nothing for calls that move blocks."""
    blamed: bool = False
    """A request's deadline passed while it waited for this call."""


class _Tally:
    """Recent successes and failures of one kind of calls."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._failed: deque[bool] = deque(maxlen=WINDOW_CALLS)

    def add(self, failed: bool) -> bool:
        """Count one call; return whether too many have failed. Only meaningful after a failure."""
        self._in_a_row = self._in_a_row + 1 if failed else 0
        self._failed.append(failed)
        failures = self._failed.count(True)
        return self._in_a_row >= FAILURES_IN_A_ROW_MAX or (
            failures >= FAILURES_IN_WINDOW_MIN and 2 * failures >= len(self._failed)
        )


class Circuit:
    """The circuit of reads or of writes of the tier `name`.

    Lookups and calls that move blocks are counted separately. A successful lookup precedes each
    read that fails, so counted together half of all calls would succeed.
    """

    def __init__(self, name: str, what: str, *, slow_s: float) -> None:
        assert slow_s > 0
        self.why = ""
        """The last failure, for the status."""
        self.opened = 0
        """How often the circuit opened, failed trials included."""
        self._name = name
        self._what = what
        self._extra = {"tierd": {"tier": name}}
        self.slow_s = slow_s
        """A call that takes longer counts as failed."""
        self._state = State.CLOSED
        self._since_s: float | None = None
        # Number of state changes: a call that began before the last change is not counted.
        self._era = 0
        self._calls: dict[Call, None] = {}
        self._trial: Call | None = None
        # Whether a trial failed since the circuit was last closed: probes succeed, calls do not.
        self._relapsed = False
        self._doubted_s: float | None = None
        self._lookups, self._moves = _Tally(), _Tally()
        # Usual duration of a successful call, by `lookup`; 0 before the first one.
        self._usual_s = {True: 0.0, False: 0.0}

    # --- state ------------------------------------------------------------------------

    def state(self, now_s: float) -> State:
        """Return the state; a stall begins and ends with time, without an event."""
        if self._state is not State.OPEN and self._stalled_since(now_s) is not None:
            return State.STALLED
        return self._state

    def allows(self, now_s: float) -> bool:
        """Whether a call may begin."""
        state = self.state(now_s)
        return state is State.CLOSED or (state is State.HALF_OPEN and self._trial is None)

    def failing(self, now_s: float) -> bool:
        """Whether no call may begin, or the last trial failed."""
        return self._relapsed or not self.allows(now_s)

    @property
    def is_open(self) -> bool:
        """Whether the tier must be probed periodically."""
        return self._state is State.OPEN

    @property
    def in_doubt(self) -> bool:
        """Whether the tier must be probed at once.

        All blamed calls have ended without a success. They were cancelled, so only a probe can
        show whether the tier works.
        """
        return self._doubted_s is not None and not any(call.blamed for call in self._calls)

    def status(self, now_s: float) -> dict[str, object]:
        """Return state, reason, age and number of openings for STATUS."""
        state, why, since_s = self.state(now_s), self.why, self._since_s
        if state is State.STALLED:
            since_s = self._stalled_since(now_s)
            why = f"a call has been in flight for over {self.slow_s:g} s"
            if self._doubted_s is not None:
                why = "not answered before a request's deadline"
        return {
            "state": state.value,
            "why": why,
            "since_s": None if since_s is None else round(now_s - since_s, 3),
            "opened_total": self.opened,
        }

    # --- events -----------------------------------------------------------------------

    def begin(self, now_s: float, *, lookup: bool) -> Call:
        """Record that a call begins; it must be allowed, and `end` or `abandon` must follow."""
        assert self.allows(now_s)
        call = Call(now_s, self._era, lookup)
        self._calls[call] = None
        if self._state is State.HALF_OPEN:
            self._trial = call
        return call

    def miss(self, now_s: float, why: str) -> None:
        """Open the circuit because a call missed its deadline, even if the call has not ended."""
        self._open(now_s, why)

    def end(self, call: Call, now_s: float, failure: str | None) -> None:
        """Record that a call ended; `failure` is None for a success."""
        self._leave(call)
        if failure is None:
            failure = self._slowness(call, now_s)
        if failure is None:
            took_s, usual_s = now_s - call.began_s, self._usual_s[call.lookup]
            self._usual_s[call.lookup] += (took_s - usual_s) * (USUAL_WEIGHT if usual_s else 1)
            if call.blamed and self._vouches(call):
                self._trust()
        if call.era == self._era:
            self._count(call, now_s, failure)

    def abandon(self, call: Call, now_s: float) -> None:
        """Record that a call was cancelled by its caller.

        That counts as a failure only if the call was slow, or was a blamed trial.
        """
        trial = call is self._trial
        self._leave(call)
        failure = self._slowness(call, now_s)
        if failure is None and trial and call.blamed:
            failure = "not answered before a request's deadline"
        if failure is not None and call.era == self._era:
            self._count(call, now_s, failure)

    def blame(self, now_s: float) -> None:
        """Blame the calls in flight because a request's deadline passed while it waited for them.

        No further call begins until a blamed call succeeds or, if none does, a probe is answered.
        Calls that have run for less than the usual duration are not blamed: a request that gives
        the tier too little time says nothing about the tier, and must not block other requests.
        """
        late = [c for c in self._calls if now_s - c.began_s >= self._usual_s[c.lookup]]
        if not late or self._state is State.OPEN:
            return
        for call in late:
            call.blamed = True
        if self._state is State.CLOSED and self._doubted_s is None:
            self._doubted_s = now_s

    def probed(self, now_s: float, failure: str | None) -> None:
        """Record a probe's result. After an answer an open circuit admits one trial call.

        A circuit that was only in doubt admits all calls again.
        """
        if failure is not None:
            if self.in_doubt or self._state is State.OPEN:
                self._open(now_s, failure)
        elif self.in_doubt:
            self._trust()
        elif self._state is State.OPEN:
            self._state = State.HALF_OPEN
            self._since_s = now_s

    # --- inside -----------------------------------------------------------------------

    def _stalled_since(self, now_s: float) -> float | None:
        if self._doubted_s is not None:
            return self._doubted_s
        oldest = next(iter(self._calls), None)
        if oldest is not None and now_s - oldest.began_s > self.slow_s:
            return oldest.began_s + self.slow_s
        return None

    def _slowness(self, call: Call, now_s: float) -> str | None:
        took_s = now_s - call.began_s
        return f"took {took_s:.3f} s" if took_s > self.slow_s else None

    def _leave(self, call: Call) -> None:
        del self._calls[call]
        if call is self._trial:
            self._trial = None

    def _trust(self) -> None:
        """End the doubt and the blame of calls in flight."""
        self._doubted_s = None
        for call in self._calls:
            call.blamed = False

    def _vouches(self, call: Call) -> bool:
        """Whether the success of a blamed call clears the blamed calls still in flight.

        The success of a lookup clears only lookups.
        """
        return not call.lookup or all(other.lookup for other in self._calls if other.blamed)

    def _count(self, call: Call, now_s: float, failure: str | None) -> None:
        """Count a call that began since the last change of state."""
        tally = self._lookups if call.lookup else self._moves
        trial = self._state is State.HALF_OPEN
        if failure is not None:
            self.why = failure
            if tally.add(failed=True) or trial:
                self._open(now_s, failure)
        elif not trial:
            tally.add(failed=False)
        elif not call.lookup:
            # Only a trial that moves blocks closes. An answered lookup proves no more than the
            # probe did: it would admit all calls to a server that stalls when it sends blocks.
            self._close(now_s)

    def _open(self, now_s: float, why: str) -> None:
        self.why = why
        if self._state is State.OPEN:
            return
        if self._state is State.CLOSED:
            # Log once per outage: a failed trial belongs to the same outage.
            log.warning(
                "storage tier %s: %s stopped: %s", self._name, self._what, why, extra=self._extra
            )
        self._relapsed = self._relapsed or self._state is State.HALF_OPEN
        self._trust()
        self._enter(State.OPEN, now_s)
        self.opened += 1

    def _close(self, now_s: float) -> None:
        log.info("storage tier %s: %s resumed", self._name, self._what, extra=self._extra)
        self._relapsed = False
        self._enter(State.CLOSED, now_s)

    def _enter(self, state: State, now_s: float) -> None:
        self._state = state
        self._since_s = now_s
        self._era += 1
        self._lookups, self._moves = _Tally(), _Tally()
