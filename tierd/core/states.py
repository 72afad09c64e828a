"""States of slots, reservations and leases, and the events that move them: the whole of it.

Reservations and leases take each step through these tables (`step`). Slots take theirs in the
methods of `tierd.core.l2.slots.Slots` that `TAKEN_BY` names, a batch at a time; tests watch those
(`tierd.testing.simulation.transitions`) and hold every step that they see against the table.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar


class _Fast(enum.Enum):
    """Its members are hashed by what they are: an Enum's hash is that of a name, in Python."""

    __hash__ = object.__hash__


class Sender(enum.Enum):
    """Who may send an event."""

    SESSION = "session"
    """A client, by its session, and the daemon for its own reservations."""
    DAEMON = "daemon"
    """The daemon by itself: what its copies, checks and clocks have found."""
    CORE = "core"
    """The core, to make room for whoever asked."""


class SlotState(_Fast):
    """Where a slot is; it is in one place at a time."""

    ABSENT = "absent"
    """Its segment has no memory, or there is none."""
    FREE = "free"
    WRITING = "writing"
    """Reserved; its owner may be writing to it."""
    READABLE = "readable"
    """It holds a block, which is served."""
    UNVERIFIED = "unverified"
    """It holds a block of an earlier incarnation, which is served once its checksum was seen."""
    EVICTING = "evicting"
    """Its block was evicted, and comes back if it is asked for while somebody still holds it."""
    DROPPED = "dropped"
    """Its block is gone for good, and somebody still holds it."""
    QUARANTINED = "quarantined"
    """Somebody of an earlier incarnation may still write to it, or read from it."""


class SlotEvent(_Fast):
    """What moves a slot."""

    GROW = "grow"
    DECOMMIT = "decommit"
    LOSE = "lose"
    """The system did not give the segment that was asked for."""
    RESERVE = "reserve"
    COMMIT = "commit"
    ABORT = "abort"
    EVICT = "evict"
    SETTLE = "settle"
    """Nobody holds it any more."""
    REVIVE = "revive"
    """A request has asked for its block."""
    DROP = "drop"
    RELEASE = "release"
    """Nobody holds what was dropped any more."""
    VERIFY = "verify"
    MOVE_AWAY = "move away"
    MOVE_IN = "move in"
    MOVE_IN_UNVERIFIED = "move in unverified"
    ADOPT_BLOCK = "adopt block"
    ADOPT_SLOT = "adopt slot"
    CLEAR = "clear"
    """Nobody of an earlier incarnation uses it any more."""


class ReservationState(_Fast):
    """What has become of a reservation."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"
    LOST = "lost"
    """The memory behind all its slots could not be had."""


class ReservationEvent(_Fast):
    """What moves a reservation."""

    COMMIT = "commit"
    ABORT = "abort"
    OWNER_GONE = "owner gone"
    LOSE_SOME = "lose some"
    LOSE_ALL = "lose all"


class LeaseState(_Fast):
    """What has become of a lease."""

    HELD = "held"
    RELEASED = "released"
    EXPIRED = "expired"


class LeaseEvent(_Fast):
    """What ends a lease. The end of its owner is not among it: a copy may go on."""

    RELEASE = "release"
    EXPIRE = "expire"


class SlotRule(NamedTuple):
    """A row of the table of slots."""

    state: SlotState
    event: SlotEvent
    becomes: SlotState
    sender: Sender


_S, _E = SlotState, SlotEvent
SLOT_RULES: Final = (
    SlotRule(_S.ABSENT, _E.GROW, _S.FREE, Sender.CORE),
    SlotRule(_S.ABSENT, _E.ADOPT_BLOCK, _S.UNVERIFIED, Sender.DAEMON),
    SlotRule(_S.ABSENT, _E.ADOPT_SLOT, _S.QUARANTINED, Sender.DAEMON),
    SlotRule(_S.FREE, _E.RESERVE, _S.WRITING, Sender.SESSION),
    SlotRule(_S.FREE, _E.MOVE_IN, _S.READABLE, Sender.CORE),
    SlotRule(_S.FREE, _E.MOVE_IN_UNVERIFIED, _S.UNVERIFIED, Sender.CORE),
    SlotRule(_S.FREE, _E.DECOMMIT, _S.ABSENT, Sender.CORE),
    SlotRule(_S.FREE, _E.LOSE, _S.ABSENT, Sender.DAEMON),
    SlotRule(_S.WRITING, _E.COMMIT, _S.READABLE, Sender.SESSION),
    SlotRule(_S.WRITING, _E.ABORT, _S.FREE, Sender.SESSION),
    SlotRule(_S.WRITING, _E.LOSE, _S.ABSENT, Sender.DAEMON),
    SlotRule(_S.READABLE, _E.EVICT, _S.EVICTING, Sender.CORE),
    SlotRule(_S.READABLE, _E.MOVE_AWAY, _S.FREE, Sender.CORE),
    SlotRule(_S.READABLE, _E.DROP, _S.DROPPED, Sender.DAEMON),
    SlotRule(_S.UNVERIFIED, _E.VERIFY, _S.READABLE, Sender.DAEMON),
    SlotRule(_S.UNVERIFIED, _E.EVICT, _S.EVICTING, Sender.CORE),
    SlotRule(_S.UNVERIFIED, _E.MOVE_AWAY, _S.FREE, Sender.CORE),
    SlotRule(_S.UNVERIFIED, _E.DROP, _S.DROPPED, Sender.DAEMON),
    SlotRule(_S.EVICTING, _E.SETTLE, _S.FREE, Sender.DAEMON),
    SlotRule(_S.EVICTING, _E.REVIVE, _S.READABLE, Sender.SESSION),
    SlotRule(_S.EVICTING, _E.DROP, _S.DROPPED, Sender.DAEMON),
    SlotRule(_S.DROPPED, _E.RELEASE, _S.FREE, Sender.DAEMON),
    SlotRule(_S.QUARANTINED, _E.CLEAR, _S.FREE, Sender.DAEMON),
)

SLOTS: Final = MappingProxyType({(r.state, r.event): r.becomes for r in SLOT_RULES})

TAKEN_BY: Final = MappingProxyType(
    {
        "_grow": (_E.GROW,),
        "_decommit": (_E.DECOMMIT,),
        "_lose": (_E.LOSE,),
        "_adopt": (_E.ADOPT_BLOCK, _E.ADOPT_SLOT),
        "_clear": (_E.CLEAR,),
        "_reserve": (_E.RESERVE,),
        "_end_writing": (_E.COMMIT, _E.ABORT),
        "_evict": (_E.EVICT,),
        "_settle": (_E.SETTLE,),
        "_revive": (_E.REVIVE,),
        "_drop": (_E.DROP,),
        "_release_dropped": (_E.RELEASE,),
        "_verify": (_E.VERIFY,),
        "_move": (_E.MOVE_AWAY, _E.MOVE_IN, _E.MOVE_IN_UNVERIFIED),
    }
)
"""The methods of `Slots` that move slots, and by which events; no other one may."""

RESERVATIONS: Final = MappingProxyType(
    {
        (ReservationState.OPEN, ReservationEvent.COMMIT): ReservationState.COMMITTED,
        (ReservationState.OPEN, ReservationEvent.ABORT): ReservationState.ABORTED,
        (ReservationState.OPEN, ReservationEvent.OWNER_GONE): ReservationState.ABORTED,
        (ReservationState.OPEN, ReservationEvent.LOSE_SOME): ReservationState.OPEN,
        (ReservationState.OPEN, ReservationEvent.LOSE_ALL): ReservationState.LOST,
    }
)
"""COMMIT and ABORT are the owner's to send; the others the daemon's."""

LEASES: Final = MappingProxyType(
    {
        (LeaseState.HELD, LeaseEvent.RELEASE): LeaseState.RELEASED,
        (LeaseState.HELD, LeaseEvent.EXPIRE): LeaseState.EXPIRED,
    }
)
"""RELEASE is the owner's to send, EXPIRE the daemon's clock's."""

_State = TypeVar("_State")
_Event = TypeVar("_Event")


def step(table: Mapping[tuple[_State, _Event], _State], state: _State, event: _Event) -> _State:
    """The state after an event; a KeyError is a bug of ours: nobody may send it then."""
    return table[state, event]
