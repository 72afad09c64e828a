"""When calls of one kind to a storage tier are worth making: the decisions of the breaker.

A pure state machine: it is told when calls begin and how they end, and says whether
another one may begin. It refuses to know backends, timers and tasks. All times are
seconds on the loop's clock, and every method is told the present one.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from dataclasses import dataclass
from typing import Final

log = logging.getLogger("tierd")

FAILURES_IN_A_ROW_MAX: Final = 3
"""Failures without a success between them that open: two may be one lost connection's."""

WINDOW_CALLS: Final = 20
FAILURES_IN_WINDOW_MIN: Final = 6
"""Half of the last WINDOW_CALLS, or of all if there are fewer, but at least so many failures: a
tier that fails every other call never fails three in a row."""

USUAL_WEIGHT: Final = 1 / 8
"""Of the latest call in what a call usually takes: a dozen calls tell."""


class State(enum.Enum):
    """Whether calls are made; what is not CLOSED refuses all calls, or all but one."""

    CLOSED = "closed"
    """Calls are made."""
    STALLED = "stalled"
    """None is begun until it is known whether those in flight are ever answered."""
    OPEN = "open"
    """The tier failed; only the probe asks it."""
    HALF_OPEN = "half_open"
    """The probe was answered; one real call decides."""


@dataclass(eq=False, slots=True)
class Call:
    """One call in flight."""

    began_s: float
    era: int
    lookup: bool
    """It only asks what the tier has, so it cannot vouch for calls that move blocks."""
    blamed: bool = False
    """A request has waited for it in vain."""


class _Tally:
    """How calls of one kind have gone of late."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._failed: deque[bool] = deque(maxlen=WINDOW_CALLS)

    def add(self, failed: bool) -> bool:
        """Take in one call; whether too many have failed, if it has."""
        self._in_a_row = self._in_a_row + 1 if failed else 0
        self._failed.append(failed)
        failures = self._failed.count(True)
        return self._in_a_row >= FAILURES_IN_A_ROW_MAX or (
            failures >= FAILURES_IN_WINDOW_MIN and 2 * failures >= len(self._failed)
        )


class Circuit:
    """Reads, or writes, of the tier `name`.

    Lookups and calls that move blocks are counted apart: each block that cannot be read has
    been looked up well before, which would make half of all calls a success.
    """

    def __init__(self, name: str, what: str, *, slow_s: float) -> None:
        assert slow_s > 0
        self.why = ""
        """The last failure, for whoever reads a status."""
        self.opened = 0
        """Times that it opened, failed trials included."""
        self._name = name
        self._what = what
        self._extra = {"tierd": {"tier": name}}
        self.slow_s = slow_s
        """A call that takes longer has failed."""
        self._state = State.CLOSED
        self._since_s: float | None = None
        # Calls that began before the last change of state say nothing about the time after it.
        self._era = 0
        self._calls: dict[Call, None] = {}
        self._trial: Call | None = None
        # Whether a trial has failed since it was closed: the probe is answered, real calls are not.
        self._relapsed = False
        self._doubted_s: float | None = None
        self._lookups, self._moves = _Tally(), _Tally()
        # What a call that goes well takes, a lookup or another one; 0 if none has yet.
        self._usual_s = {True: 0.0, False: 0.0}

    # --- what may be done -------------------------------------------------------------

    def state(self, now_s: float) -> State:
        """The state, a stall included, which passes without anybody's doing."""
        if self._state is not State.OPEN and self._stalled_since(now_s) is not None:
            return State.STALLED
        return self._state

    def allows(self, now_s: float) -> bool:
        """Whether a call may begin."""
        state = self.state(now_s)
        return state is State.CLOSED or (state is State.HALF_OPEN and self._trial is None)

    def failing(self, now_s: float) -> bool:
        """Whether no call may begin, or the last one that was let try failed."""
        return self._relapsed or not self.allows(now_s)

    @property
    def is_open(self) -> bool:
        """Whether the probe is to ask, every now and then."""
        return self._state is State.OPEN

    @property
    def in_doubt(self) -> bool:
        """Whether the probe is to ask at once: all calls that a request had waited for in vain
        have ended, and none of them well. They were called off, so nothing else will tell."""
        return self._doubted_s is not None and not any(call.blamed for call in self._calls)

    def status(self, now_s: float) -> dict[str, object]:
        """State, reason and age, for STATUS."""
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

    # --- what happens -----------------------------------------------------------------

    def begin(self, now_s: float, *, lookup: bool) -> Call:
        """A call begins, which must be allowed; `end` or `abandon` is owed for it."""
        assert self.allows(now_s)
        call = Call(now_s, self._era, lookup)
        self._calls[call] = None
        if self._state is State.HALF_OPEN:
            self._trial = call
        return call

    def miss(self, now_s: float, why: str) -> None:
        """A call's deadline has passed, whenever it will end: enough to open."""
        self._open(now_s, why)

    def end(self, call: Call, now_s: float, failure: str | None) -> None:
        """A call has ended, well if there is no `failure`."""
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
        """A call has ended because its caller gave up, which is a failure only if it was slow,
        or if it was a trial that a request has waited for in vain."""
        trial = call is self._trial
        self._leave(call)
        failure = self._slowness(call, now_s)
        if failure is None and trial and call.blamed:
            failure = "not answered before a request's deadline"
        if failure is not None and call.era == self._era:
            self._count(call, now_s, failure)

    def blame(self, now_s: float) -> None:
        """A request has waited in vain for calls in flight: until one of those ends well no
        others are begun, or until a probe tells, if none does.

        Calls younger than calls usually get are left out: a request that gives the tier less
        time than it needs says nothing about it, and would shut it for all others.
        """
        late = [c for c in self._calls if now_s - c.began_s >= self._usual_s[c.lookup]]
        if not late or self._state is State.OPEN:
            return
        for call in late:
            call.blamed = True
        if self._state is State.CLOSED and self._doubted_s is None:
            self._doubted_s = now_s

    def probed(self, now_s: float, failure: str | None) -> None:
        """A probe has ended. If the tier answers, one real call may try, or all if there was
        only a doubt."""
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
        """The doubt was unfounded."""
        self._doubted_s = None
        for call in self._calls:
            call.blamed = False

    def _vouches(self, call: Call) -> bool:
        """Whether a blamed call that ended well speaks for those still in flight."""
        return not call.lookup or all(other.lookup for other in self._calls if other.blamed)

    def _count(self, call: Call, now_s: float, failure: str | None) -> None:
        """Take a call of this era into account."""
        tally = self._lookups if call.lookup else self._moves
        trial = self._state is State.HALF_OPEN
        if failure is not None:
            self.why = failure
            if tally.add(failed=True) or trial:
                self._open(now_s, failure)
        elif not trial:
            tally.add(failed=False)
        elif not call.lookup:
            # A lookup that is answered says no more than the probe did. It would let everybody
            # loose, after each probe, on a server whose bodies stall.
            self._close(now_s)

    def _open(self, now_s: float, why: str) -> None:
        self.why = why
        if self._state is State.OPEN:
            return
        if self._state is State.CLOSED:
            # Once an outage: a failed trial is the same one.
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
