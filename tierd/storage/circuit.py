"""The breaker's decisions: whether a call of one kind to a storage tier may begin.

A pure state machine: its methods report when calls begin and how they end, and answer whether
another call may begin. It knows no backends, timers or tasks. in_flight.py decides whether the
calls in flight show a stall. All times are seconds on the loop's clock; methods get the current
time as an argument.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from typing import Final

from tierd.storage.in_flight import Call, CallsInFlight

log = logging.getLogger("tierd")

FAILURES_IN_A_ROW_MAX: Final = 3
"""Consecutive failures that open the circuit: one lost connection may cause two."""

WINDOW_CALLS: Final = 20
FAILURES_IN_WINDOW_MIN: Final = 6
"""The circuit also opens if half of the last WINDOW_CALLS calls failed, or half of all calls if
there were fewer, but not below this number of failures. A tier that fails every other call never
has three failures in a row."""


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
        self.why = ""
        """The last failure, for the status."""
        self.opened = 0
        """How often the circuit opened, failed trials included."""
        self.in_flight = CallsInFlight(slow_s=slow_s)
        self._name = name
        self._what = what
        self._extra = {"tierd": {"tier": name}}
        self._state = State.CLOSED
        self._since_s: float | None = None
        # Number of state changes: a call that began before the last change is not counted.
        self._era = 0
        self._trial: Call | None = None
        # Whether a trial failed since the circuit was last closed: probes succeed, calls do not.
        self._relapsed = False
        self._lookups, self._moves = _Tally(), _Tally()

    # --- state ------------------------------------------------------------------------

    def state(self, now_s: float) -> State:
        """Return the state; a stall begins and ends with time, without an event."""
        if self._state is not State.OPEN and self.in_flight.stalled_since(now_s) is not None:
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
        """Whether the tier must be probed at once."""
        return self.in_flight.in_doubt

    def status(self, now_s: float) -> dict[str, object]:
        """Return state, reason, age and number of openings for STATUS."""
        state, why, since_s = self.state(now_s), self.why, self._since_s
        if state is State.STALLED:
            since_s = self.in_flight.stalled_since(now_s)
            why = f"a call has been in flight for over {self.in_flight.slow_s:g} s"
            if self.in_flight.doubted:
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
        self.in_flight.add(call)
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
            failure = self.in_flight.slowness(call, now_s)
        if failure is None:
            self.in_flight.succeeded(call, now_s)
        if call.era == self._era:
            self._count(call, now_s, failure)

    def abandon(self, call: Call, now_s: float) -> None:
        """Record that a call was cancelled by its caller.

        That counts as a failure only if the call was slow, or was a blamed trial.
        """
        trial = call is self._trial
        self._leave(call)
        failure = self.in_flight.slowness(call, now_s)
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
        if self._state is not State.OPEN:
            self.in_flight.blame(now_s, doubt=self._state is State.CLOSED)

    def probed(self, now_s: float, failure: str | None) -> None:
        """Record a probe's result. After an answer an open circuit admits one trial call.

        A circuit that was only in doubt admits all calls again.
        """
        if failure is not None:
            if self.in_doubt or self._state is State.OPEN:
                self._open(now_s, failure)
        elif self.in_doubt:
            self.in_flight.trust()
        elif self._state is State.OPEN:
            self._state = State.HALF_OPEN
            self._since_s = now_s

    # --- inside -----------------------------------------------------------------------

    def _leave(self, call: Call) -> None:
        self.in_flight.remove(call)
        if call is self._trial:
            self._trial = None

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
        self.in_flight.trust()
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
