"""Turns: so many in each lane and so many bytes in all, the next one to whoever comes first."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

Rank = tuple[int, int]
"""The lower comes first."""

LAST_NS: Final = 1 << 63
"""In the place of when a request arrived: behind every one that did."""

_SEQUENCE: Final = itertools.count()


class ReadTurn:
    """One who waits for a turn. Its rank is asked for when a turn gets free."""

    def __init__(self, lane: ReadLane, size_bytes: int, rank: Callable[[], Rank]) -> None:
        self.lane = lane
        self.size_bytes = size_bytes
        self.rank = rank
        self.granted = asyncio.get_running_loop().create_future()

    def earlier(self) -> None:
        """Its rank may have become lower. That it is higher shows by itself."""
        self.lane.enter(self)


class ReadLane:
    """Who waits for one thing of which so many may be used at once."""

    def __init__(self, count: int) -> None:
        self.free = count
        """Turns that nobody has."""
        self._waiting: list[tuple[Rank, int, ReadTurn]] = []
        """A heap. A turn is in it as often as it has become earlier; that it has become later
        shows when it comes first."""

    def enter(self, turn: ReadTurn) -> None:
        """Have it wait where its rank now says."""
        heapq.heappush(self._waiting, (turn.rank(), next(_SEQUENCE), turn))

    def first(self) -> tuple[Rank, int, ReadTurn] | None:
        """Who comes first, if anybody waits."""
        waiting = self._waiting
        while waiting:
            rank, number, turn = waiting[0]
            if turn.granted.done():
                heapq.heappop(waiting)
            elif (now := turn.rank()) > rank:
                heapq.heapreplace(waiting, (now, number, turn))
            else:
                return waiting[0]
        return None


class ReadScheduler:
    """Hands out turns of some lanes, whose holders have at most `bytes_max` bytes together.

    One that alone is more gets its turn when nobody else has one. Nobody overtakes who waits
    for bytes: else many small ones would keep a large one waiting for ever.
    """

    def __init__(self, lanes: Sequence[ReadLane], bytes_max: int) -> None:
        self.bytes_in_flight = 0
        self._lanes = lanes
        self._bytes_max = bytes_max

    def resize(self, bytes_max: int) -> None:
        """Have another bound from the next turn on."""
        self._bytes_max = bytes_max

    @asynccontextmanager
    async def take(self, turn: ReadTurn) -> AsyncIterator[None]:
        """Around what needs the turn."""
        turn.lane.enter(turn)
        self._hand_out()
        try:
            await turn.granted
        except asyncio.CancelledError:
            if turn.granted.cancelled():
                self._hand_out()  # It may have kept others waiting for bytes.
            else:
                self._give_back(turn)  # It came in the same moment.
            raise
        try:
            yield
        finally:
            self._give_back(turn)

    def _give_back(self, turn: ReadTurn) -> None:
        turn.lane.free += 1
        self.bytes_in_flight -= turn.size_bytes
        self._hand_out()

    def _hand_out(self) -> None:
        while True:
            firsts = [first for lane in self._lanes if lane.free and (first := lane.first())]
            if not firsts:
                return
            turn = min(firsts)[2]
            if self.bytes_in_flight and self.bytes_in_flight + turn.size_bytes > self._bytes_max:
                return
            turn.lane.free -= 1
            self.bytes_in_flight += turn.size_bytes
            turn.granted.set_result(None)
