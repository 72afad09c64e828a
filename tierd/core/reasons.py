"""Why blocks got no slot, and why they left."""

from __future__ import annotations

import enum
from typing import Final


class Refusal(enum.IntEnum):
    """Why a reservation has no slot for a block."""

    PRESENT = -1
    BUSY = -2
    NO_ROOM = -3


class NoRoom(enum.Enum):
    """Why a reservation has no slot for some of its blocks."""

    SHARE = "share"
    """Its owner has reserved all that one owner may, and not committed it."""
    HELD = "held"
    """All that the namespace has is leased, reserved, or being written to a tier."""
    OTHERS = "others"
    """The namespace has no memory, and no other one had any to give."""
    SEGMENT = "segment"
    """The system did not give a memory segment."""


class Evicted(enum.Enum):
    """Why blocks were evicted."""

    ROOM = "room"
    """A reservation needed their slots."""
    AHEAD = "ahead"
    """So that the next reservation finds free slots."""
    LENT = "lent"
    """Another namespace needed the memory."""
    SHRUNK = "shrunk"
    """The machine needed the memory, or the capacity was lowered."""


class Dropped(enum.Enum):
    """Why blocks were dropped for good."""

    FLUSHED = "flushed"
    """Somebody had them dropped, everywhere."""
    DAMAGED = "damaged"
    """Their bytes were not what they had been."""
    ENDED = "ended"
    """Their namespace has ended: nobody will ask for them."""


GONE: Final[tuple[Evicted | Dropped, ...]] = (*Evicted, *Dropped)
WHY_BITS: Final = 3
WHY_MASK: Final = (1 << WHY_BITS) - 1
DROPPED: Final = 4
"""Bit of a ghost's record that an arena of twice the size would not have had either: the record
is the time in seconds above the number of the reason."""
assert [why for at, why in enumerate(GONE) if at & DROPPED] == list(Dropped)
assert len(GONE) <= WHY_MASK + 1


def record_of(why: Evicted | Dropped, now_s: int) -> int:
    """What is remembered of a block that leaves now."""
    return now_s << WHY_BITS | GONE.index(why)
