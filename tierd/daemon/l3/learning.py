"""Counts the uses of blocks by requests: after the reply, in short slices.

Each ACQUIRE is queued and counted later, in slices between which the loop does other work. A use
decides what a block is worth in L2 and to storage tiers. The hits that an arena of twice the size
would have had are counted too. This module does not know clients.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Final, NamedTuple

from tierd.clock import Clock
from tierd.core.host import HostTier
from tierd.core.l2.space import Space
from tierd.daemon.l3.backup import Backups
from tierd.eviction.reuse import SLICE

NS: Final = 1_000_000_000

WAITING_MAX: Final = 1024
"""Maximum requests that wait to be counted; beyond it the oldest are discarded."""

WAITING_BLOCKS_MAX: Final = 1 << 19
"""Maximum blocks of the waiting requests, which take 40 MB; the latest request may have more."""

PAUSE_S: Final = 0.001
"""Pause between two slices of SLICE blocks, each of less than 0.1 ms, so that most calls find the
loop idle. Without it the p99 of the smallest call is five times as long. With it 60,000 blocks per
second can be counted, more than an engine computes."""

HURRY_BLOCKS: Final = 1 << 16
"""Number of waiting blocks beyond which there is no pause."""

STEP_BLOCKS: Final = 16
"""Fixed cost of a step, in blocks."""


Guarded = Callable[[Callable[[], Coroutine[object, object, None]]], Awaitable[None]]
"""Runs work; an exception is counted and logged, and ends nothing else."""


class _Asked(NamedTuple):
    """An ACQUIRE: the namespaces, the blocks, and when it arrived."""

    spaces: list[Space]
    hashes: Sequence[bytes]
    request: int
    own: int
    now_ns: int


class Learning:
    """Requests that are not counted yet."""

    def __init__(
        self,
        host: HostTier,
        backups: Backups,
        clock: Clock,
        counters: Counter[str],
        guarded: Guarded,
    ) -> None:
        self._host = host
        self._backups = backups
        self._clock = clock
        self._counters = counters
        self._guarded = guarded
        self._waiting: deque[_Asked] = deque()
        self._ready = asyncio.Event()
        self._waiting_blocks = 0
        self._now: _Asked | None = None
        # Blocks since the last pause.
        self._done = 0

    def note(
        self, spaces: Sequence[Space], hashes: Sequence[bytes], request: int, own: int = 0
    ) -> None:
        """Queue a request for a prefix; return at once. Number 0 is a new request each time.

        The engine uses the first `own` blocks without needing a load.
        """
        unique, now_ns = list(dict.fromkeys(spaces)), self._clock.monotonic_ns()
        self._waiting.append(_Asked(unique, hashes, request, own, now_ns))
        self._waiting_blocks += len(hashes)
        while len(self._waiting) > 1 and (
            len(self._waiting) > WAITING_MAX or self._waiting_blocks > WAITING_BLOCKS_MAX
        ):
            self._waiting_blocks -= len(self._waiting.popleft().hashes)
            self._counters["uses_not_counted_total"] += 1
        self._ready.set()

    @property
    def busy(self) -> bool:
        """Whether a request is not counted yet."""
        return bool(self._waiting) or self._now is not None

    async def run(self) -> None:
        """Count queued requests, forever."""
        while True:
            await self._ready.wait()
            # The reply is on its way, and its receiver may send the next call at once.
            await asyncio.sleep(PAUSE_S)
            while self._waiting:
                asked = self._now = self._waiting.popleft()
                self._waiting_blocks -= len(asked.hashes)
                # A bug here may cost hits, but must not end the daemon.
                await self._guarded(partial(self._count, asked))
            self._now = None
            self._ready.clear()

    async def _count(self, asked: _Asked) -> None:
        self._count_ghosts(asked)
        now_s = asked.now_ns / NS
        for blocks in self._host.count_use(asked.spaces, asked.hashes, asked.request, now_s):
            await self._pause_after(blocks)
        if not self._backups.queues:
            return
        for space in asked.spaces:
            for start in range(0, len(asked.hashes), SLICE):
                part = asked.hashes[start : start + SLICE]
                self._backups.note_used(space, part)
                await self._pause_after(len(part))

    async def _pause_after(self, blocks: int) -> None:
        """Pause if the steps since the last pause handled about SLICE blocks."""
        self._done += blocks + STEP_BLOCKS
        if self._done >= SLICE:
            self._done = 0
            await asyncio.sleep(0 if self._waiting_blocks > HURRY_BLOCKS else PAUSE_S)

    def _count_ghosts(self, asked: _Asked) -> None:
        """Count the blocks that only an arena of twice the size would have had."""
        space, hashes = asked.spaces[0], asked.hashes[asked.own :]
        found = list(map(space.items.get, hashes))
        if None in found:
            resident = found.index(None)
            self._counters["ghost_blocks_total"] += space.twice(hashes[resident:])
