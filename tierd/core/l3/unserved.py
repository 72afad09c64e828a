"""What requests asked for in vain although a tier may have it: the latest of them, for `explain`.

Noted a request, not a block: a request may name thousands, and whoever notes it must not be slow.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

BLOCKS_MAX: Final = 1 << 15
"""Blocks that are remembered for each reason, the latest; they take 3 MB. One request may have
more."""


class Why(enum.Enum):
    """Why a request did not get blocks."""

    LATE = "deadline_missed"
    """It was answered before they came."""
    NOT_WORTH = "not_worth"
    """Loading them takes longer than computing them."""


class Unserved(NamedTuple):
    """Blocks that a request did not get, of each of these namespaces, as far as they were not
    there already."""

    why: Why
    at_s: int
    digests: frozenset[bytes]
    hashes: Sequence[bytes]


class Unserveds:
    """The latest of each reason."""

    def __init__(self) -> None:
        self._notes: dict[Why, deque[Unserved]] = {why: deque() for why in Why}
        self._blocks = dict.fromkeys(Why, 0)

    def note(self, unserved: Unserved) -> None:
        """A request did not get these blocks."""
        notes, why = self._notes[unserved.why], unserved.why
        notes.append(unserved)
        self._blocks[why] += len(unserved.hashes)
        while len(notes) > 1 and self._blocks[why] > BLOCKS_MAX:
            self._blocks[why] -= len(notes.popleft().hashes)

    def latest(self, why: Why, digest: bytes) -> Iterator[Unserved]:
        """Those of a namespace, the latest first."""
        return (note for note in reversed(self._notes[why].copy()) if digest in note.digests)
