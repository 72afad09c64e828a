"""What a second read says of a block whose first read was damaged.

A link, a cable, a controller or this machine's memory may damage what is on its way, while
the block itself is sound, and other nodes may need it. So a tier reads such a block once more,
past whatever may have been damaged on the way (a connection, a cache), before it drops it.
What is stored cannot be two things at once: two reads that differ were damaged on their way.
"""

from __future__ import annotations

import enum
from typing import Final

from tierd.backend import BlockHeader


class DamageSite(enum.Enum):
    """Where a damaged read was damaged."""

    TRANSIT = "damaged_in_transit_total"
    """On its way: the second read was sound, or damaged in another way. The block is kept."""
    STORED = "corrupt_total"
    """Where it lies: two reads gave the same wrong bytes. The block is dropped."""
    UNKNOWN = "damage_unconfirmed_total"
    """The second read could not be made, so the block is kept."""

    @property
    def counter(self) -> str:
        """Name of the counter of such reads."""
        return self.value


COUNTERS: Final = dict.fromkeys((fault.counter for fault in DamageSite), 0)
"""For a backend's counters."""


def judge(first: object, second: object, header: BlockHeader | None) -> DamageSite:
    """Where a block was damaged of which two reads gave `first` and `second`; `header` if the
    second was sound. Reads are compared by what all their bytes are, or hash to."""
    return DamageSite.STORED if header is None and first == second else DamageSite.TRANSIT
