"""Blocks that one storage tier took or gave lately, and those that it dropped soon afterwards.

The history says how many written blocks were never read, when the tier last had a block that it
lacks now, and which blocks are not to be written again yet. It starts empty with the daemon.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from tierd.backend import Outcome
from tierd.core.l2.space import Space
from tierd.core.l3.writes import MISSED_MAX
from tierd.eviction.policy import Ghosts

UNREAD: Final = 1
"""Bit of a record: nobody has read the block since the tier took it."""

REST_S: Final = 300
"""A block that a tier drops within this time after it took or gave it is not written again for
this long while it stays in L2. The tier may be too small for such blocks, and each use would
cost another write."""


class TierHistory:
    """Records of one tier by block key."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._written_blocks = 0
        # When the tier took or gave a block, in seconds of the loop's clock, and UNREAD.
        self._records = Ghosts(MISSED_MAX)
        # Until when a block that the tier dropped soon is not written again.
        self._resting: dict[bytes, int] = {}

    @property
    def written_blocks(self) -> int:
        """Blocks written since the daemon's start."""
        return self._written_blocks

    @property
    def unread_share(self) -> float:
        """Share of the blocks written since the daemon's start that were never read."""
        written, read = self._written_blocks, self._counters["written_and_read_total"]
        return round(1 - read / written, 4) if written else 0.0

    def latest_s(self, key: bytes) -> int | None:
        """When the tier last took or gave a block, by the loop's clock; None if not known."""
        record = self._records.records.get(key)
        return None if record is None else record >> 1

    def note_written(self, space: Space, slots: Iterable[int], outcomes: Sequence[Outcome]) -> None:
        """Record how the writes of a batch ended."""
        now, records = _now_s() << 1, self._records.records
        for key, outcome in zip(_keys(space, slots), outcomes, strict=True):
            if outcome is Outcome.STORED:
                self._written_blocks += 1
                self._records.put(key, now | UNREAD)
            elif outcome is Outcome.PRESENT:
                self._records.put(key, now | records.get(key, 0) & UNREAD)

    def note_read(self, space: Space, slots: Iterable[int]) -> None:
        """Record that blocks came from the tier; count those that are read for the first time."""
        now, records = _now_s() << 1, self._records.records
        for key in _keys(space, slots):
            if records.get(key, 0) & UNREAD:
                self._counters["written_and_read_total"] += 1
            self._records.put(key, now)

    def note_dropped(self, space: Space, slots: Iterable[int]) -> None:
        """Record that the tier has dropped blocks on its own."""
        now, records = _now_s(), self._records.records
        for key in _keys(space, slots):
            until = (records.get(key, 0) >> 1) + REST_S
            if key in records and now < until and len(self._resting) < MISSED_MAX:
                self._resting[key] = until

    def without_resting(self, space: Space, slots: Sequence[int]) -> Sequence[int]:
        """Return the slots whose blocks may be written again."""
        if not self._resting:
            return slots
        keyed = zip(slots, _keys(space, slots), strict=True)
        return [slot for slot, key in keyed if not self._rests(key)]

    def end_rests(self) -> None:
        """Let every block be written again."""
        self._resting.clear()

    def _rests(self, key: bytes) -> bool:
        if self._resting.get(key, 0) > _now_s():
            return True
        self._resting.pop(key, None)
        return False


def _now_s() -> int:
    return int(asyncio.get_running_loop().time())


def _keys(space: Space, slots: Iterable[int]) -> list[bytes]:
    digest = space.digest
    return [digest + block_hash for block_hash, _ in space.identities(slots)]
