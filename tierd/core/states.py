"""All states of slots, reservations and leases, and the events that change them.

Reservations and leases take each step by these tables (`step`). Slots change state in batches, in
the methods of `tierd.core.l2.slots.Slots` that `TAKEN_BY` names. Tests watch these methods
(`tierd.testing.transitions`) and compare every step with the table.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar


class _Fast(enum.Enum):
    """An enum whose members are hashed by identity, in C: Enum hashes its name in Python code."""

    __hash__ = object.__hash__


class Sender(enum.Enum):
    """Who may send an event."""

    SESSION = "session"
    """A client through its session, or the daemon for its own reservations."""
    DAEMON = "daemon"
    """The daemon itself, after a copy, a check or a timeout."""
    CORE = "core"
    """The core, to make room for a reservation."""


class SlotState(_Fast):
    """The state of a slot."""

    ABSENT = "absent"
    """Its segment has no memory or does not exist."""
    FREE = "free"
    WRITING = "writing"
    """Reserved; its owner may be writing to it."""
    READABLE = "readable"
    """It has a block that may be served."""
    UNVERIFIED = "unverified"
    """It has a block of an earlier incarnation, which is served only after its verification."""
    EVICTING = "evicting"
    """Its block was evicted but is still held; a request for the block revives it."""
    DROPPED = "dropped"
    """Its block was dropped permanently but is still held."""
    QUARANTINED = "quarantined"
    """A client of an earlier incarnation may still write to it or read from it."""


class SlotEvent(_Fast):
    """An event that changes a slot's state."""

    GROW = "grow"
    DECOMMIT = "decommit"
    LOSE = "lose"
    """The system did not provide the requested segment."""
    RESERVE = "reserve"
    COMMIT = "commit"
    ABORT = "abort"
    EVICT = "evict"
    SETTLE = "settle"
    """The last hold of an evicting block has ended."""
    REVIVE = "revive"
    """A request asked for an evicting block."""
    DROP = "drop"
    RELEASE = "release"
    """The last hold of a dropped block has ended."""
    VERIFY = "verify"
    MOVE_AWAY = "move away"
    MOVE_IN = "move in"
    MOVE_IN_UNVERIFIED = "move in unverified"
    ADOPT_BLOCK = "adopt block"
    ADOPT_SLOT = "adopt slot"
    CLEAR = "clear"
    """No client of an earlier incarnation can still use the slot."""


class ReservationState(_Fast):
    """The state of a reservation."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"
    LOST = "lost"
    """The system provided no memory for any of its slots."""


class ReservationEvent(_Fast):
    """An event that changes a reservation's state."""

    COMMIT = "commit"
    ABORT = "abort"
    OWNER_GONE = "owner gone"
    LOSE_SOME = "lose some"
    LOSE_ALL = "lose all"


class LeaseState(_Fast):
    """The state of a lease."""

    HELD = "held"
    RELEASED = "released"
    EXPIRED = "expired"


class LeaseEvent(_Fast):
    """An event that ends a lease. The end of its owner does not: a copy may still be running."""

    RELEASE = "release"
    EXPIRE = "expire"


class SlotRule(NamedTuple):
    """A row of the slots' table: an event moves a slot from `state` to `becomes`."""

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
"""The methods of `Slots` that may change a slot's state, each with its events."""

RESERVATIONS: Final = MappingProxyType(
    {
        (ReservationState.OPEN, ReservationEvent.COMMIT): ReservationState.COMMITTED,
        (ReservationState.OPEN, ReservationEvent.ABORT): ReservationState.ABORTED,
        (ReservationState.OPEN, ReservationEvent.OWNER_GONE): ReservationState.ABORTED,
        (ReservationState.OPEN, ReservationEvent.LOSE_SOME): ReservationState.OPEN,
        (ReservationState.OPEN, ReservationEvent.LOSE_ALL): ReservationState.LOST,
    }
)
"""The owner sends COMMIT and ABORT; the daemon sends the others."""

LEASES: Final = MappingProxyType(
    {
        (LeaseState.HELD, LeaseEvent.RELEASE): LeaseState.RELEASED,
        (LeaseState.HELD, LeaseEvent.EXPIRE): LeaseState.EXPIRED,
    }
)
"""The owner sends RELEASE; the daemon sends EXPIRE."""

_State = TypeVar("_State")
_Event = TypeVar("_Event")


def step(table: Mapping[tuple[_State, _Event], _State], state: _State, event: _Event) -> _State:
    """Return the state after an event; a KeyError means that the caller has a bug."""
    return table[state, event]
