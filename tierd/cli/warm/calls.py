"""Cuts wants into WARM calls, bounded in blocks and bytes: one per rank for the same blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from tierd.cli.warm.sources import WantedBlocks
from tierd.types import Namespace

CALLS_MAX: Final = 4
"""WARM calls in flight: enough that the daemon has the next call's reads when one ends."""

CALL_BLOCKS_MAX: Final = 512
CALL_BYTES_MAX: Final = 256 << 20
"""Largest call. Progress is reported at its end, and an interruption repeats up to one call."""

AHEAD_BLOCKS: Final = 2 * CALLS_MAX * CALL_BLOCKS_MAX
"""Blocks read ahead of the calls."""


@dataclass(slots=True)
class WarmUnit:
    """A want in flight."""

    want: WantedBlocks
    outcomes: bytearray
    asked: int
    """Leading blocks that the daemon is asked for; there is no space for the others."""
    left: int
    """Outstanding answers: one for each piece and rank."""
    warm: int = 0
    """Blocks that are warm by the answers so far."""
    before: bytes | None = None
    """Outcomes at the time when an engine was asked to compute the unit; None: it was not asked."""
    store_end_s: float = 0.0


class Piece(NamedTuple):
    """Some of a unit's blocks."""

    unit: WarmUnit
    start: int
    stop: int


@dataclass(slots=True)
class WarmCall:
    """A call for the blocks of some pieces, for one rank."""

    pieces: list[Piece]
    namespace: Namespace
    hashes: list[bytes]
    """Distinct hashes: prompts share prefixes."""


class CallQueue:
    """The pieces that no call has been made for, and the calls that are ready to be sent."""

    def __init__(self, bytes_per_s: int) -> None:
        """`bytes_per_s` is the rate limit; 0: none."""
        self._bytes_per_s = bytes_per_s
        self._pieces: deque[Piece] = deque()
        self._ahead_blocks = 0
        self._ready: deque[WarmCall] = deque()

    @property
    def has_room(self) -> bool:
        """Whether more wants may be read."""
        return self._ahead_blocks < AHEAD_BLOCKS

    def add(self, unit: WarmUnit) -> None:
        """Queue the blocks that a unit asks for."""
        size = self._blocks_per_call(unit.want.ranks)
        for start in range(0, unit.asked, size):
            self._pieces.append(Piece(unit, start, min(start + size, unit.asked)))
            unit.left += len(unit.want.ranks)
        self._ahead_blocks += unit.asked

    def next(self) -> WarmCall | None:
        """Return the next call. The calls of all ranks of some blocks follow one another."""
        if not self._ready and not self._gather():
            return None
        return self._ready.popleft()

    def _gather(self) -> bool:
        """Make one call per rank from the next pieces of the same ranks; return False if none."""
        if not self._pieces:
            return False
        ranks = self._pieces[0].unit.want.ranks
        room = self._blocks_per_call(ranks)
        pieces: list[Piece] = []
        while self._pieces and self._pieces[0].unit.want.ranks == ranks:
            room -= self._pieces[0].stop - self._pieces[0].start
            if pieces and room < 0:
                break
            pieces.append(self._pieces.popleft())
        self._ahead_blocks -= sum(piece.stop - piece.start for piece in pieces)
        all_hashes = (h for unit, start, stop in pieces for h in unit.want.hashes[start:stop])
        hashes = list(dict.fromkeys(all_hashes))
        self._ready.extend(WarmCall(pieces, rank, hashes) for rank in ranks)
        return True

    def _blocks_per_call(self, ranks: Sequence[Namespace]) -> int:
        """Return the blocks per call. With a rate limit, a call takes about one second."""
        size_bytes = min(CALL_BYTES_MAX, self._bytes_per_s or CALL_BYTES_MAX)
        largest = max(rank.block_bytes for rank in ranks)
        return max(1, min(CALL_BLOCKS_MAX, size_bytes // largest))
