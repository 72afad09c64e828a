"""The latest blocks that requests did not get although a tier may have them, for `explain`.

One note per request, not per block: a request may name thousands, and noting them must be fast.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

BLOCKS_MAX: Final = 1 << 15
"""Number of latest blocks to remember per reason, in 3 MB; a single request may exceed it."""


class Why(enum.Enum):
    """Why a request did not get blocks."""

    LATE = "deadline_missed"
    """It was answered before they were promoted."""
    NOT_WORTH = "not_worth"
    """Loading them takes longer than computing them."""


class Unserved(NamedTuple):
    """Blocks that a request did not get, in each of these namespaces; some may have been
    resident."""

    why: Why
    at_s: int
    digests: frozenset[bytes]
    hashes: Sequence[bytes]


class Unserveds:
    """The latest notes by reason."""

    def __init__(self) -> None:
        self._notes: dict[Why, deque[Unserved]] = {why: deque() for why in Why}
        self._blocks = dict.fromkeys(Why, 0)

    def note(self, unserved: Unserved) -> None:
        """Note that a request did not get blocks."""
        notes, why = self._notes[unserved.why], unserved.why
        notes.append(unserved)
        self._blocks[why] += len(unserved.hashes)
        while len(notes) > 1 and self._blocks[why] > BLOCKS_MAX:
            self._blocks[why] -= len(notes.popleft().hashes)

    def latest(self, why: Why, digest: bytes) -> Iterator[Unserved]:
        """Yield the notes of a namespace, the latest first."""
        return (note for note in reversed(self._notes[why].copy()) if digest in note.digests)
