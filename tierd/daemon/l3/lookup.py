"""One ACQUIRE's way through the storage tiers: who has what, and what is worth promoting.

Each rank's blocks are asked for tier by tier, cheaper ones first. As soon as a tier has
answered, the prefix that every rank is known to have is promoted, while the tiers below
are asked for the rest.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from tierd.core.l3.prefetch import Worth
from tierd.core.l3.unserved import Unserved, Why
from tierd.daemon.l3.promotion import Promotions, Waiter
from tierd.daemon.l3.tier import StorageTier


class Lookup:
    """What is known of one waiter's blocks; it begins promotions, and waits for none."""

    def __init__(
        self,
        waiter: Waiter,
        hashes: Sequence[bytes],
        tiers: Sequence[StorageTier],
        promotions: Promotions,
        worth: Worth,
    ) -> None:
        self._waiter = waiter
        self._worth = worth
        self._block_tokens = waiter.spaces[0].namespace.block_tokens
        self._hashes = hashes
        self._tiers = tiers
        self._promotions = promotions
        ranks = len(waiter.spaces)
        self._found: list[dict[bytes, int]] = [{} for _ in range(ranks)]
        self._asking: list[StorageTier | None] = [None] * ranks
        self._reach = [0] * ranks
        """Length of each rank's prefix that L2, promotions under way and tiers have together."""
        self._begun = 0
        self._got = [0] * ranks
        """Length of each rank's prefix that is in L2."""
        self._answered = asyncio.Event()
        """Of the next answer that a tier gives; each has an event of its own."""

    async def ask(self, at: int) -> None:
        """Ask the tiers for the blocks of the rank at index `at` that are not resident."""
        held, found = self._waiter.held[at], self._found[at]
        self._advance(at)
        for number, tier in enumerate(self._tiers):
            missing = [h for h in self._hashes if h not in held and h not in found]
            if not missing:
                break
            while not tier.reads_allowed and tier in self._asking:
                # A tier on trial takes one question at a time, and may have just got another
                # rank's: passed over, this rank would have no prefix, and so none would be read,
                # and the trial would never end.
                await self._answered.wait()
            if not tier.reads_allowed:
                continue
            self._asking[at] = tier
            answers = await tier.contains(self._waiter.spaces[at].digest, missing)
            self._asking[at] = None
            answered, self._answered = self._answered, asyncio.Event()
            answered.set()
            if not self._waiter.open:
                return  # A foreign backend may have swallowed the cancellation.
            found.update((h, number) for h, yes in zip(missing, answers, strict=True) if yes)
            self._advance(at)

    @property
    def ranks(self) -> int:
        """How many `ask` there are."""
        return len(self._found)

    async def finish(self, asks: Sequence[asyncio.Task[None]]) -> None:
        """Wait until all ranks have been asked for, and for what was begun as long as it may
        make the prefix longer."""
        await asyncio.wait(asks)
        pending = {batch.done for batch in self._waiter.batches}
        while pending and self._may_grow():
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)

    def blame(self) -> None:
        """The deadline has passed: tell the tiers that are being waited for."""
        slow = [tier for tier in self._asking if tier is not None]
        slow += [batch.reading for batch in self._waiter.batches if batch.reading is not None]
        for tier in dict.fromkeys(slow):
            tier.blame_reads()

    def unserved(self, why: Why, at_s: int) -> Unserved:
        """A note of what is still wanted, from the first block on that not all ranks have got."""
        waiter, hashes = self._waiter, self._hashes
        got = min(waiter.length(at, hashes) for at in range(self.ranks))
        digests = frozenset(space.digest for space in waiter.spaces)
        return Unserved(why, at_s, digests, hashes[got:])

    def _may_grow(self) -> bool:
        """Whether the prefix of all ranks is not final yet: what lies behind a block that no
        tier gave is of no use."""
        end = len(self._hashes)
        for at, space in enumerate(self._waiter.spaces):
            held, items, got = self._waiter.held[at], space.items, self._got[at]
            while got < len(self._hashes) and (
                self._hashes[got] in held or self._hashes[got] in items
            ):
                got += 1
            self._got[at] = got
            comes = got < len(self._hashes) and (
                (space.digest, self._hashes[got]) in self._promotions.under_way
            )
            if not comes:
                end = min(end, got)
        return any(got < end for got in self._got)

    def _advance(self, at: int) -> None:
        """See how far the rank at index `at` reaches now, and promote what all ranks have."""
        space, found = self._waiter.spaces[at], self._found[at]
        items, under_way = space.items, self._promotions.under_way
        reach = self._reach[at]
        for block_hash in self._hashes[reach:]:
            if block_hash not in items:
                batch = under_way.get((space.digest, block_hash))
                if batch.doubtful if batch is not None else block_hash not in found:
                    break
            reach += 1
        self._reach[at] = reach
        known = min(self._reach)
        if known > self._begun and self._is_worth(known):
            first, self._begun = self._begun, known
            for rank, has in enumerate(self._found):
                self._promotions.join(self._waiter, rank, self._hashes[first:known], has, first)

    def _is_worth(self, known: int) -> bool:
        """Whether to bring what is new of the prefix of so many blocks."""
        hashes = self._hashes[self._begun : known]
        wanted: Counter[int] = Counter()
        for space, found in zip(self._waiter.spaces, self._found, strict=True):
            for block_hash in hashes:
                number = found.get(block_hash)
                if number is not None and block_hash not in space.items:
                    wanted[number] += space.namespace.block_bytes
        loads_s = {}
        for number, size_bytes in wanted.items():
            speed = self._tiers[number].read_bytes_per_s
            if speed:
                loads_s[number] = size_bytes / speed
        tokens = self._block_tokens
        is_worth = self._worth.bringing(known * tokens, len(hashes) * tokens, loads_s)
        for number in self._worth.on_trial:
            self._tiers[number].doubt_read_speed()
        return is_worth
