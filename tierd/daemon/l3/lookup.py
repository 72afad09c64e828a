"""One ACQUIRE's lookup in the storage tiers: which tier has each block, and what to promote.

Each rank's blocks are looked up tier by tier, in configured order. As soon as a tier has answered,
the prefix that is known for every rank is promoted, while the lookup goes on in the tiers below.
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
    """The lookup for one waiter; it starts promotions without waiting for them."""

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
        """Length of each rank's prefix that is in L2, in promotion, or in a tier."""
        self._begun = 0
        self._got = [0] * ranks
        """Length of each rank's prefix that is in L2."""
        self._answered = asyncio.Event()
        """Set by the next answer of a tier, and then replaced."""

    async def ask(self, at: int) -> None:
        """Look up the non-resident blocks of the rank at index `at`, tier by tier."""
        held, found = self._waiter.held[at], self._found[at]
        self._advance(at)
        for number, tier in enumerate(self._tiers):
            missing = [h for h in self._hashes if h not in held and h not in found]
            if not missing:
                break
            while not tier.reads_allowed and tier in self._asking:
                # A half-open breaker lets one call through, which may be another rank's lookup. If
                # this rank skipped the tier, the common prefix would be empty, nothing would be
                # read, and the breaker would never close.
                await self._answered.wait()
            if not tier.reads_allowed:
                continue
            self._asking[at] = tier
            answers = await tier.contains(self._waiter.spaces[at].digest, missing)
            self._asking[at] = None
            answered, self._answered = self._answered, asyncio.Event()
            answered.set()
            if not self._waiter.open:
                return  # A third-party backend may have swallowed the cancellation.
            found.update((h, number) for h, yes in zip(missing, answers, strict=True) if yes)
            self._advance(at)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self._found)

    async def finish(self, asks: Sequence[asyncio.Task[None]]) -> None:
        """Wait for all lookups, and for promotions that may still extend the prefix."""
        await asyncio.wait(asks)
        pending = {batch.done for batch in self._waiter.batches}
        while pending and self._may_grow():
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)

    def blame(self) -> None:
        """Report the passed deadline to the tiers that the request still waits for."""
        slow = [tier for tier in self._asking if tier is not None]
        slow += [batch.reading for batch in self._waiter.batches if batch.reading is not None]
        for tier in dict.fromkeys(slow):
            tier.blame_reads()

    def unserved(self, why: Why, at_s: int) -> Unserved:
        """Return a note of the missing blocks, from the first one that not all ranks hold."""
        waiter, hashes = self._waiter, self._hashes
        got = min(waiter.length(at, hashes) for at in range(self.ranks))
        digests = frozenset(space.digest for space in waiter.spaces)
        return Unserved(why, at_s, digests, hashes[got:])

    def _may_grow(self) -> bool:
        """Whether the prefix of all ranks may still become longer.

        Blocks behind a block that no tier delivered are useless.
        """
        end = len(self._hashes)
        for at, space in enumerate(self._waiter.spaces):
            held, items, got = self._waiter.held[at], space.items, self._got[at]
            while got < len(self._hashes) and (
                self._hashes[got] in held or self._hashes[got] in items
            ):
                got += 1
            self._got[at] = got
            arriving = got < len(self._hashes) and (
                (space.digest, self._hashes[got]) in self._promotions.under_way
            )
            if not arriving:
                end = min(end, got)
        return any(got < end for got in self._got)

    def _advance(self, at: int) -> None:
        """Extend the known prefix of the rank at index `at`, and promote what all ranks have."""
        space, found = self._waiter.spaces[at], self._found[at]
        items, under_way = space.items, self._promotions.under_way
        reach = self._reach[at]
        for block_hash in self._hashes[reach:]:
            if block_hash not in items:
                batch = under_way.get((space.digest, block_hash))
                if not batch.joinable if batch is not None else block_hash not in found:
                    break
            reach += 1
        self._reach[at] = reach
        known = min(self._reach)
        if known > self._begun and self._is_worth(known):
            first, self._begun = self._begun, known
            for rank, has in enumerate(self._found):
                self._promotions.join(self._waiter, rank, self._hashes[first:known], has, first)

    def _is_worth(self, known: int) -> bool:
        """Whether to promote the prefix of `known` blocks beyond the part already begun."""
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
