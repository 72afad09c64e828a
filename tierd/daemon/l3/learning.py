"""Learning from what requests ask for: after the reply, and never for long at a time.

Each ACQUIRE is noted and counted later, in slices between which the loop does other work: as
a use of its blocks, which says what they are worth in L2 and to tiers, and for what an arena
of twice the size would have had. It refuses to know clients.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from tierd.clock import Clock
from tierd.core.host import HostTier
from tierd.core.l2.space import Space
from tierd.daemon.l3.backup import Backups
from tierd.eviction.policy import PrefixRequest
from tierd.eviction.reuse import SLICE, Reuse

NS: Final = 1_000_000_000

WAITING_MAX: Final = 1024
"""Requests that wait to be counted; beyond it the oldest are not."""

WAITING_BLOCKS_MAX: Final = 1 << 19
"""Their blocks, which take 40 MB; the latest request may have them all."""

PAUSE_S: Final = 0.001
"""Between two slices of SLICE blocks, of less than 0.1 ms: so a request that comes meanwhile mostly
finds the loop idle. Without it the p99 of the smallest call is five times as long. It leaves time
to count 60,000 blocks a second, more than an engine computes."""

HURRY_BLOCKS: Final = 1 << 16
"""With more blocks waiting there is no pause."""

STEP_BLOCKS: Final = 16
"""A step takes as long as so many blocks even if it has none."""


Guarded = Callable[[Callable[[], Coroutine[object, object, None]]], Awaitable[None]]
"""Runs work whose bugs are counted and logged, and end nothing else."""


class _Asked(NamedTuple):
    """An ACQUIRE: what it asked for, of which namespaces, and when."""

    spaces: list[Space]
    hashes: Sequence[bytes]
    request: int
    own: int
    now_ns: int


class Learning:
    """What is noted and not yet counted."""

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
        """A request asks for a prefix; returns at once. 0 is a request of its own each time.

        Of the first `own` blocks the engine has no need, but it uses them.
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
        """Whether something noted is not counted yet."""
        return bool(self._waiting) or self._now is not None

    async def run(self) -> None:
        """Count what is noted, for ever."""
        while True:
            await self._ready.wait()
            # The reply is on its way, and who gets it may ask again at once.
            await asyncio.sleep(PAUSE_S)
            while self._waiting:
                asked = self._now = self._waiting.popleft()
                self._waiting_blocks -= len(asked.hashes)
                # A bug here costs hits, the daemon's end would cost all.
                await self._guarded(partial(self._count, asked))
            self._now = None
            self._ready.clear()

    async def _count(self, asked: _Asked) -> None:
        self._count_ghosts(asked)
        new: dict[Reuse, Sequence[bytes]] = {}
        for space in asked.spaces:
            book = space.reuse
            if book not in new:
                new[book] = self._host.uses.new(book, asked.hashes, asked.request)
                await self._use(book, PrefixRequest(new[book], asked.now_ns / NS))
        for space in asked.spaces:
            for part in _slices(new[space.reuse]):
                self._host.use(space, PrefixRequest(part, asked.now_ns / NS))
                await self._breathe(len(part))
            if self._backups.queues:
                for part in _slices(asked.hashes):
                    self._backups.used(space, part)
                    await self._breathe(len(part))

    async def _use(self, book: Reuse, request: PrefixRequest) -> None:
        if not request.hashes:
            return
        for _ in book.use_slices(request):
            await self._breathe(SLICE)
        await self._breathe(len(request.hashes) % SLICE)
        if book.rebuild_due:
            await asyncio.sleep(0)
            book.rebuild()

    async def _breathe(self, blocks: int) -> None:
        """A step that handled so many blocks is done: let others go first now and then."""
        self._done += blocks + STEP_BLOCKS
        if self._done >= SLICE:
            self._done = 0
            await asyncio.sleep(0 if self._waiting_blocks > HURRY_BLOCKS else PAUSE_S)

    def _count_ghosts(self, asked: _Asked) -> None:
        """Count the blocks that only an arena of twice the size would have had."""
        space, hashes = asked.spaces[0], asked.hashes[asked.own :]
        found = list(map(space.items.get, hashes))
        if None in found:
            here = found.index(None)
            self._counters["ghost_blocks_total"] += space.twice(hashes[here:])


def _slices(hashes: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(hashes), SLICE):
        yield hashes[start : start + SLICE]
