"""Decide by a second read where a damaged block was damaged.

A link, a cable, a controller or this machine's memory may damage a block in transit. The stored
block is then sound, and other nodes may need it. So before a tier drops a block it reads the
block again, past anything that may have damaged the first read (a connection, a cache).
Stored bytes are the same at every read: two reads that differ were damaged in transit.
"""

from __future__ import annotations

import enum
from typing import Final

from tierd.backend import BlockHeader


class DamageSite(enum.Enum):
    """The place where a block was damaged."""

    TRANSIT = "damaged_in_transit_total"
    """In transit: the second read was sound, or damaged in another way. The block is kept."""
    STORED = "corrupt_total"
    """In the store: two reads gave the same wrong bytes. The block is dropped."""
    UNKNOWN = "damage_unconfirmed_total"
    """Not known: the second read failed. The block is kept."""

    @property
    def counter(self) -> str:
        """Name of the counter of these reads."""
        return self.value


COUNTERS: Final = dict.fromkeys((fault.counter for fault in DamageSite), 0)
"""Initial values of these counters, for a backend's `counters`."""


def judge(first: object, second: object, header: BlockHeader | None) -> DamageSite:
    """Return where a block was damaged, from two reads of it. `header` is set if the second read
    was sound. `first` and `second` stand for all bytes of a read: the bytes or a hash of them."""
    return DamageSite.STORED if header is None and first == second else DamageSite.TRANSIT
