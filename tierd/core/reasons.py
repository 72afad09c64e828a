"""Reasons why blocks got no slot, and why they left host memory."""

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
    """Its owner has as many uncommitted slots as one owner may have."""
    HELD = "held"
    """All slots of the namespace are leased, reserved, or being written to a tier."""
    OTHERS = "others"
    """The namespace has no memory, and no other one could give it any."""
    SEGMENT = "segment"
    """The system did not provide a memory segment."""


class Evicted(enum.Enum):
    """Why blocks were evicted."""

    ROOM = "room"
    """A reservation needed their slots."""
    AHEAD = "ahead"
    """The next reservation should find free slots."""
    LENT = "lent"
    """Another namespace needed the memory."""
    SHRUNK = "shrunk"
    """The machine was short of memory, or the capacity was lowered."""


class Dropped(enum.Enum):
    """Why blocks were dropped permanently."""

    FLUSHED = "flushed"
    """A flush dropped them from every tier."""
    DAMAGED = "damaged"
    """Their bytes did not match their checksum."""
    ENDED = "ended"
    """Their namespace has ended."""


GONE: Final[tuple[Evicted | Dropped, ...]] = (*Evicted, *Dropped)
WHY_BITS: Final = 3
WHY_MASK: Final = (1 << WHY_BITS) - 1
DROPPED: Final = 4
"""Bit that is set in the number of each reason in Dropped: an arena of twice the size would not
have the block either. A ghost's record is the time in seconds, shifted, plus that number."""
assert [why for at, why in enumerate(GONE) if at & DROPPED] == list(Dropped)
assert len(GONE) <= WHY_MASK + 1


def record_of(why: Evicted | Dropped, now_s: int) -> int:
    """Return the ghost's record of a block that leaves now."""
    return now_s << WHY_BITS | GONE.index(why)
