"""What host memory's use means to a storage tier: it hears of it, and says what it has lost.

Host memory answers for the blocks that are used most, so a tier never sees them used, and its
eviction drops them first. Uses are told to it in the background, in batches and seldom, and its
answers say what it does not have any more: evicted, expired, lost with a server's restart. A block
that host memory evicts is held until the tier has answered, if requests have used it again.

Answers only ever take away: no block is taken for kept because of one, so none that comes late
or from before a flush does harm. What is missing is for the write policy to judge.
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
"""Prefixes remembered as told; each costs about 150 bytes. What is forgotten is told again."""

NOTED_MAX: Final = 1 << 16
"""Blocks whose use waits to be told; beyond it the oldest are not."""

ASK_MAX: Final = 1024
"""Blocks of one call: some 2 ms of a Redis server's time."""

TELL_PAUSE_S: Final = 0.2
"""Before each call that nobody waits for: at most 5,000 blocks a second."""

CHECK_S: Final = 60.0
"""A tier that is to be told less often than this is asked for nothing that leaves."""

USED_AGAIN: Final = 2
"""Requests that have used a block which is worth a question when it leaves."""

ROUNDS_MAX: Final = 3
"""Times that a stop asks for what is used often."""

Missing = Callable[[Space, Sequence[int]], None]
"""Told of slots whose blocks the tier has lost."""

Covers = Callable[[bytes], bool]


class Renewal:
    """What one tier is told and asked."""

    def __init__(self, tier: StorageTier, bit: int, memory: HostMemory, missing: Missing) -> None:
        self.tier = tier
        self.rounds = 0
        """Times that everything was asked for since the daemon stops."""
        self._stored_blocks = 0
        self._asked = asked_bit(bit)
        self._memory = memory
        self._missing = missing
        self._told = Ghosts(TOLD_MAX)
        """The last block of a part of a prefix, and when it may be told again, in ms."""
        self._noted: deque[tuple[Space, Sequence[bytes]]] = deque()
        self._noted_blocks = 0
        self._noted_ready = asyncio.Event()
        self._telling = False
        self._evicting: deque[tuple[Space, int]] = deque()
        self._evicting_ready = asyncio.Event()
        self._checking: Space | None = None

    # --- what it is to hear -----------------------------------------------------------

    def used(self, space: Space, slots: Sequence[int]) -> None:
        """A request has used these blocks, a part of a prefix, parents first."""
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
        """Hold those of the slots that leave L2 and may have left the tier before, until it has
        said so; which they are. None that is `held` already, and at most so many `more`."""
        if more <= 0 or not self._asks or not self.tier.reads_allowed:
            return ()
        wanted = [slot for slot in slots if self._is_worth(space, slot) and slot not in held][:more]
        self._memory.host.hold(space, wanted)
        self._evicting.extend((space, slot) for slot in wanted)
        if wanted:
            self._evicting_ready.set()
        return wanted

    def recheck(self, stored_blocks: int) -> None:
        """The daemon stops, and the tier has got so many blocks in all: ask for all that requests
        have used again."""
        if not self._asks:
            return
        self.rounds += 1
        self._stored_blocks = stored_blocks
        for space in self._memory.host.spaces.values():
            worth = [h for h, slot in space.items.items() if self._is_worth(space, slot)]
            for at in range(0, len(worth), ASK_MAX):
                self._note(space, worth[at : at + ASK_MAX])

    def recheck_after(self, stored_blocks: int) -> None:
        """The tier has got so many blocks by now, and nothing waits for it: what is used often may
        have had to go for them."""
        if 0 < self.rounds < ROUNDS_MAX and stored_blocks != self._stored_blocks:
            self.recheck(stored_blocks)

    @property
    def _asks(self) -> bool:
        return self.tier.raw.use_every_s <= CHECK_S and self.tier.writes_allowed

    def _is_worth(self, space: Space, slot: int) -> bool:
        """Whether the tier may be asked for a block that is worth it."""
        if not space.tiers.of(slot) & self._asked or slot in space.unverified:
            return False
        return space.reuse.uses(space.identity(slot)[0]) >= USED_AGAIN

    def _note(self, space: Space, hashes: Sequence[bytes]) -> None:
        self._noted.append((space, hashes))
        self._noted_blocks += len(hashes)
        self._noted_ready.set()

    # --- what a flush waits for -------------------------------------------------------

    def give_up(self, covers: Covers) -> None:
        """Blocks of these namespaces that wait to be asked for leave without."""
        waiting, self._evicting = self._evicting, deque()
        for space, slot in waiting:
            if covers(space.digest):
                self._memory.let_go(space, [slot])
            else:
                self._evicting.append((space, slot))

    def under_way(self, covers: Covers) -> bool:
        """Whether blocks that leave are being asked for just now."""
        return self._checking is not None and covers(self._checking.digest)

    @property
    def busy(self) -> bool:
        """Whether something waits to be told or asked, or is."""
        return bool(self._noted or self._telling or self._evicting or self._checking)

    # --- work -------------------------------------------------------------------------

    async def tell(self) -> None:
        """Tell what is noted, for ever."""
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
        """Ask for what leaves, for ever."""
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
        """What is noted of one space, within the limits of a call."""
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
        """Tell of a use of blocks; those that the tier lacks."""
        answers = await self.tier.use(space.digest, hashes)
        if answers is None:
            return ()
        self.tier.counters["renewed_blocks_total"] += answers.count(True)
        return [h for h, has in zip(hashes, answers, strict=True) if not has]

    def _lose(self, space: Space, slots: Sequence[int]) -> None:
        """The tier has none of these, as it says; it may have been kept from some meanwhile."""
        asked = space.tiers.having(slots, self._asked)
        lost = [slot for slot in asked if slot not in space.dropped]
        if lost:
            self.tier.counters["forgotten_blocks_total"] += len(lost)
            self._missing(space, lost)
