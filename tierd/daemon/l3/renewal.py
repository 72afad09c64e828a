"""Renewal: tells a storage tier which of its blocks are used in host memory.

Host memory serves the most used blocks, so a tier never sees their uses, and its eviction would
drop them first. Uses are reported to the tier in the background, rarely and in batches. Its
answers say which blocks it no longer has: evicted, expired, or lost with a server's restart. A
block that host memory evicts is held until the tier has answered, if requests used it again.

An answer can only remove a block from the tier's known ones, never add one, so a late answer or
one from before a flush does no harm. The write policy decides whether a lost block is written
again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Final

from tierd.core.l2.space import Space
from tierd.core.l2.tier_bits import asked_bit
from tierd.daemon.l2.memory import HostMemory
from tierd.daemon.l3.tier import StorageTier
from tierd.eviction.policy import Ghosts

TOLD_MAX: Final = 1 << 14
"""Prefixes remembered as reported; each costs about 150 bytes. A forgotten one is reported
again."""

NOTED_MAX: Final = 1 << 16
"""Maximum blocks whose use waits to be reported; beyond it the oldest are discarded."""

ASK_MAX: Final = 1024
"""Maximum blocks of one call: some 2 ms of a Redis server's time."""

TELL_PAUSE_S: Final = 0.2
"""Pause before each background call: at most 5,000 blocks per second."""

CHECK_S: Final = 60.0
"""A tier whose uses are reported less often than this is not asked about evicted blocks."""

USED_AGAIN: Final = 2
"""Minimum number of requests that used a block before the tier is asked about it."""

ROUNDS_MAX: Final = 3
"""Maximum times that a stop asks about all blocks used again."""

Missing = Callable[[Space, Sequence[int]], None]
"""Takes slots whose blocks the tier has lost."""

Covers = Callable[[bytes], bool]
"""Whether a namespace, by its digest, is among those of a flush."""


class Renewal:
    """Uses to report to one tier, and evicted blocks to ask it about."""

    def __init__(self, tier: StorageTier, bit: int, memory: HostMemory, missing: Missing) -> None:
        self.tier = tier
        self.rounds = 0
        """How often a stop has asked about all blocks used again; 0 before a stop."""
        self._stored_blocks = 0
        self._asked = asked_bit(bit)
        self._memory = memory
        self._missing = missing
        self._told = Ghosts(TOLD_MAX)
        """Key of the last block of a part of a prefix, and when to report it again, in ms."""
        self._noted: deque[tuple[Space, Sequence[bytes]]] = deque()
        self._noted_blocks = 0
        self._noted_ready = asyncio.Event()
        self._telling = False
        self._evicting: deque[tuple[Space, int]] = deque()
        self._evicting_ready = asyncio.Event()
        self._checking: Space | None = None

    # --- noting uses and evictions ----------------------------------------------------

    def used(self, space: Space, slots: Sequence[int]) -> None:
        """Note that a request has used these blocks, a part of a prefix, parents first."""
        key = space.digest + space.identity(slots[-1])[0]
        now_ms = int(1000 * asyncio.get_running_loop().time())
        if now_ms < self._told.records.get(key, now_ms):
            return
        hashes = space.hashes_of(space.tiers.having(slots, self._asked))
        if hashes:
            self._told.put(key, now_ms + int(1000 * self.tier.raw.use_every_s))
            self._note(space, hashes)
            while self._noted_blocks > NOTED_MAX and len(self._noted) > 1:
                self._noted_blocks -= len(self._noted.popleft()[1])

    def claim(
        self, space: Space, slots: Sequence[int], held: Collection[int], more: int
    ) -> Sequence[int]:
        """Hold evicted slots whose blocks the tier may have lost, until it has answered.

        Returns them: at most `more`, and none that is `held` already.
        """
        if more <= 0 or not self._asks or not self.tier.reads_allowed:
            return ()
        wanted = [slot for slot in slots if self._is_worth(space, slot) and slot not in held][:more]
        self._memory.host.hold(space, wanted)
        self._evicting.extend((space, slot) for slot in wanted)
        if wanted:
            self._evicting_ready.set()
        return wanted

    def recheck(self, stored_blocks: int) -> None:
        """Ask about all blocks that requests have used again, because the daemon stops.

        `stored_blocks` is the number of blocks written to the tier so far.
        """
        if not self._asks:
            return
        self.rounds += 1
        self._stored_blocks = stored_blocks
        for space in self._memory.host.spaces.values():
            worth = [h for h, slot in space.items.items() if self._is_worth(space, slot)]
            for at in range(0, len(worth), ASK_MAX):
                self._note(space, worth[at : at + ASK_MAX])

    def recheck_after(self, stored_blocks: int) -> None:
        """Ask again if blocks were written since: they may have evicted often used ones."""
        if 0 < self.rounds < ROUNDS_MAX and stored_blocks != self._stored_blocks:
            self.recheck(stored_blocks)

    @property
    def _asks(self) -> bool:
        return self.tier.raw.use_every_s <= CHECK_S and self.tier.writes_allowed

    def _is_worth(self, space: Space, slot: int) -> bool:
        """Whether to ask the tier about a block."""
        if not space.tiers.of(slot) & self._asked or slot in space.unverified:
            return False
        return space.reuse.uses(space.identity(slot)[0]) >= USED_AGAIN

    def _note(self, space: Space, hashes: Sequence[bytes]) -> None:
        self._noted.append((space, hashes))
        self._noted_blocks += len(hashes)
        self._noted_ready.set()

    # --- flushes ----------------------------------------------------------------------

    def give_up(self, covers: Covers) -> None:
        """Release the evicted blocks of these namespaces that wait for a call."""
        waiting, self._evicting = self._evicting, deque()
        for space, slot in waiting:
            if covers(space.digest):
                self._memory.let_go(space, [slot])
            else:
                self._evicting.append((space, slot))

    def under_way(self, covers: Covers) -> bool:
        """Whether a call about evicted blocks of these namespaces is in progress."""
        return self._checking is not None and covers(self._checking.digest)

    @property
    def busy(self) -> bool:
        """Whether a call waits or is in progress."""
        return bool(self._noted or self._telling or self._evicting or self._checking)

    # --- work -------------------------------------------------------------------------

    async def tell(self) -> None:
        """Report noted uses, forever."""
        while True:
            await self._noted_ready.wait()
            self._noted_ready.clear()
            while self._noted:
                if not self.rounds:
                    await asyncio.sleep(TELL_PAUSE_S)
                self._telling = True
                try:
                    space, hashes = self._next_noted()
                    lost = await self._ask(space, hashes)
                    self._lose(space, space.find(lost))
                finally:
                    self._telling = False

    async def check(self) -> None:
        """Ask about evicted blocks, forever."""
        while True:
            await self._evicting_ready.wait()
            self._evicting_ready.clear()
            while self._evicting:
                space, slots = self._next_evicting()
                self._checking = space
                try:
                    hashes = [block_hash for block_hash, _ in space.identities(slots)]
                    by_hash = dict(zip(hashes, slots, strict=True))
                    lost = await self._ask(space, list(by_hash))
                    self._lose(space, [by_hash[h] for h in lost])
                finally:
                    self._checking = None
                    self._memory.let_go(space, slots)

    def _next_noted(self) -> tuple[Space, Sequence[bytes]]:
        """Take noted blocks of one space, within the limits of a call."""
        space, first = self._noted.popleft()
        hashes = dict.fromkeys(first)
        self._noted_blocks -= len(first)
        while self._noted and self._noted[0][0] is space:
            if len(hashes) + len(self._noted[0][1]) > ASK_MAX:
                break
            _, more = self._noted.popleft()
            hashes.update(dict.fromkeys(more))
            self._noted_blocks -= len(more)
        return space, list(hashes)

    def _next_evicting(self) -> tuple[Space, list[int]]:
        space, slot = self._evicting.popleft()
        slots = [slot]
        while self._evicting and self._evicting[0][0] is space and len(slots) < ASK_MAX:
            slots.append(self._evicting.popleft()[1])
        return space, slots

    async def _ask(self, space: Space, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Report a use of blocks; return the blocks that the tier lacks."""
        answers = await self.tier.use(space.digest, hashes)
        if answers is None:
            return ()
        self.tier.counters["renewed_blocks_total"] += answers.count(True)
        return [h for h, has in zip(hashes, answers, strict=True) if not has]

    def _lose(self, space: Space, slots: Sequence[int]) -> None:
        """Report blocks that the tier lacks, except those withheld from it meanwhile."""
        asked = space.tiers.having(slots, self._asked)
        lost = [slot for slot in asked if slot not in space.dropped]
        if lost:
            self.tier.counters["forgotten_blocks_total"] += len(lost)
            self._missing(space, lost)
