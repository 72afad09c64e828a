"""Decides which read of a storage tier starts next.

A tier's lane limits how many reads run at once; the scheduler limits their bytes in all lanes.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

Rank = tuple[int, int]
"""Order of reads: arrival time and place in the prefix; the lowest rank starts first."""

LAST_NS: Final = 1 << 63
"""Arrival time of a read that no request waits for: it starts after the reads of all requests."""

_SEQUENCE: Final = itertools.count()


class QueuedRead:
    """A read that waits to start. Its rank may change and is computed when it is compared."""

    def __init__(self, lane: ReadLane, size_bytes: int, rank: Callable[[], Rank]) -> None:
        self.lane = lane
        self.size_bytes = size_bytes
        self.rank = rank
        self.granted = asyncio.get_running_loop().create_future()

    def reorder(self) -> None:
        """Note that the rank may have become lower; a higher rank needs no note."""
        self.lane.enter(self)


class ReadLane:
    """Reads of one tier that wait; at most `count` run at once."""

    def __init__(self, count: int) -> None:
        self.free = count
        """How many more reads may start."""
        self._waiting: list[tuple[Rank, int, QueuedRead]] = []
        """A heap. A read is entered again each time its rank becomes lower. A rank that became
        higher is found when the read comes first."""

    def enter(self, read: QueuedRead) -> None:
        """Queue a read by its present rank."""
        heapq.heappush(self._waiting, (read.rank(), next(_SEQUENCE), read))

    def first(self) -> tuple[Rank, int, QueuedRead] | None:
        """Return the waiting read with the lowest rank, or None."""
        waiting = self._waiting
        while waiting:
            rank, number, read = waiting[0]
            if read.granted.done():
                heapq.heappop(waiting)
            elif (now := read.rank()) > rank:
                heapq.heapreplace(waiting, (now, number, read))
            else:
                return waiting[0]
        return None


class ReadScheduler:
    """Starts the reads of several lanes, with at most `bytes_max` bytes in flight.

    A larger read starts when no other is in flight. No read overtakes one that waits for bytes,
    or many small reads could keep a large one waiting forever.
    """

    def __init__(self, lanes: Sequence[ReadLane], bytes_max: int) -> None:
        self.bytes_in_flight = 0
        self._lanes = lanes
        self._bytes_max = bytes_max

    def resize(self, bytes_max: int) -> None:
        """Change the limit for reads that have not started."""
        self._bytes_max = bytes_max

    @asynccontextmanager
    async def take(self, read: QueuedRead) -> AsyncIterator[None]:
        """Wait until a read may start; the read is in flight until the context ends."""
        read.lane.enter(read)
        self._start_reads()
        try:
            await read.granted
        except asyncio.CancelledError:
            if read.granted.cancelled():
                self._start_reads()  # It may have kept others waiting for bytes.
            else:
                self._finish(read)  # It was started in the same turn of the loop.
            raise
        try:
            yield
        finally:
            self._finish(read)

    def _finish(self, read: QueuedRead) -> None:
        read.lane.free += 1
        self.bytes_in_flight -= read.size_bytes
        self._start_reads()

    def _start_reads(self) -> None:
        while True:
            firsts = [first for lane in self._lanes if lane.free and (first := lane.first())]
            if not firsts:
                return
            read = min(firsts)[2]
            if self.bytes_in_flight and self.bytes_in_flight + read.size_bytes > self._bytes_max:
                return
            read.lane.free -= 1
            self.bytes_in_flight += read.size_bytes
            read.granted.set_result(None)
