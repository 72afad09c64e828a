"""Bringing blocks from storage tiers into L2 for requests that wait for them.

A promotion is a batch of blocks that some waiter needs, in prefix order; a block is
promoted once, however many wait for it. What a tier turns out not to have, or to have
damaged, is asked of the next one. Waiters leave at their deadline; the slots of a batch
belong to the batch until its I/O has ended, whoever still waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tierd.backend import GetRequest, GetResult, Outcome
from tierd.core.host import HostTier, Lease, Reservation, Space
from tierd.daemon.backup import Backups
from tierd.daemon.memory import INTERNAL, HostMemory
from tierd.daemon.tier import StorageTier, batch_blocks

Spawn = Callable[[Callable[[], Coroutine[object, object, None]], str], asyncio.Task[None]]


@dataclass(eq=False, slots=True)
class Waiter:
    """One ACQUIRE: what it holds so far, by space and block hash."""

    spaces: list[Space]
    held: list[dict[bytes, int]] = field(default_factory=list)
    batches: dict[Promotion, None] = field(default_factory=dict)
    open: bool = True

    def __post_init__(self) -> None:
        self.held = [{} for _ in self.spaces]

    def take(self, host: HostTier, at: int, hashes: Sequence[bytes], slots: Sequence[int]) -> None:
        """Hold READY slots of the space at index `at`."""
        host.hold(self.spaces[at], slots)
        self.held[at].update(zip(hashes, slots, strict=True))

    def refresh(self, host: HostTier, hashes: Sequence[bytes]) -> None:
        """Hold what has become resident at the front since the last look."""
        for at, space in enumerate(self.spaces):
            known = self.held[at]
            slots = host.prefix(space, hashes)
            # By hash: a client may ask for a block twice, and it is held once.
            fresh = {h: s for h, s in zip(hashes, slots, strict=False) if h not in known}
            self.take(host, at, list(fresh), list(fresh.values()))

    def length(self, at: int, hashes: Sequence[bytes]) -> int:
        """Blocks held without a gap from the first on."""
        held = self.held[at]
        for count, block_hash in enumerate(hashes):
            if block_hash not in held:
                return count
        return len(hashes)

    def close(self, host: HostTier) -> None:
        """Let go of everything and leave the batches; idempotent."""
        if not self.open:
            return
        self.open = False
        for space, held in zip(self.spaces, self.held, strict=True):
            host.unhold(space, list(held.values()))
            held.clear()
        for batch in self.batches:
            batch.leave(self)

    def conclude(
        self, host: HostTier, owner: int, hashes: Sequence[bytes], expires_ns: int
    ) -> Lease | None:
        """Lease the longest prefix that every space holds, and let go of the rest."""
        count = min(self.length(at, hashes) for at in range(len(self.spaces)))
        lease = None
        if count:
            parts = [
                (space, [held[h] for h in hashes[:count]])
                for space, held in zip(self.spaces, self.held, strict=True)
            ]
            lease = host.grant(owner, parts, expires_ns)
        self.close(host)
        return lease


@dataclass(eq=False, slots=True)
class Promotion:
    """A batch of one space's blocks; the tier number `first` has them, as far as is known."""

    space: Space
    first: int
    hashes: list[bytes]
    done: asyncio.Future[None]
    waiters: set[Waiter] = field(default_factory=set)
    source: StorageTier | None = None
    """The tier that it reads, or waits for its turn to read."""
    reading: StorageTier | None = None
    """The tier that is being read."""
    queueing: asyncio.Task[None] | None = None
    """Its own task, while that waits for a turn to read."""

    @property
    def doubtful(self) -> bool:
        """Whether its tier is one that no new read would be begun on. Only who waits for it
        already does: else all that want a popular block would wait in an outage, each in turn."""
        return self.source is not None and not self.source.reads_allowed

    def leave(self, waiter: Waiter) -> None:
        """A waiter has gone. Without any, a batch leaves the queue: behind reads that hang it
        would keep its blocks from being read from anywhere else."""
        self.waiters.discard(waiter)
        if not self.waiters and self.queueing is not None:
            self.queueing.cancel()


class Promotions:
    """All promotions under way, by space and block."""

    def __init__(
        self, memory: HostMemory, backups: Backups, tiers: Sequence[StorageTier], spawn: Spawn
    ) -> None:
        self.under_way: dict[tuple[bytes, bytes], Promotion] = {}
        self._memory = memory
        self._backups = backups
        self._tiers = tiers
        self._spawn = spawn

    def join(
        self, waiter: Waiter, at: int, hashes: Sequence[bytes], found: Mapping[bytes, int]
    ) -> None:
        """Have `waiter` get these blocks: hold what is resident, and promote the rest.

        `found` says which tier has a block. A block that was resident or under way a moment
        ago and is neither any more is left out.
        """
        loop = asyncio.get_running_loop()
        space, held = waiter.spaces[at], waiter.held[at]
        items, limit = space.chain.items, batch_blocks(space)
        current: Promotion | None = None
        begun = []
        for block_hash in hashes:
            slot = items.get(block_hash)
            if slot is not None:
                if block_hash not in held:
                    waiter.take(self._memory.host, at, [block_hash], [slot])
                continue
            key = (space.digest, block_hash)
            batch = self.under_way.get(key)
            if batch is not None and batch.doubtful:
                continue
            if batch is None:
                tier = found.get(block_hash)
                if tier is None:
                    continue
                if current is None or current.first != tier or len(current.hashes) >= limit:
                    current = Promotion(space, tier, [], loop.create_future())
                    begun.append(current)
                current.hashes.append(block_hash)
                self.under_way[key] = batch = current
            waiter.batches[batch] = None
            batch.waiters.add(waiter)
        for batch in begun:
            self._spawn(partial(self._run, batch), "promotion")

    async def _run(self, batch: Promotion) -> None:
        left = batch.hashes
        try:
            for number in range(batch.first, len(self._tiers)):
                if self._tiers[number].reads_allowed:
                    before, left = left, await self._bring(batch, number, left)
                    self._forget(batch, set(before).difference(left))
                if not left or not batch.waiters:
                    break
        finally:
            self._forget(batch, left)
            batch.done.set_result(None)

    def _forget(self, batch: Promotion, hashes: Iterable[bytes]) -> None:
        for block_hash in hashes:
            del self.under_way[batch.space.digest, block_hash]

    async def _bring(self, batch: Promotion, number: int, hashes: Sequence[bytes]) -> list[bytes]:
        """Read blocks into fresh slots; what is sound becomes READY and held by the waiters.

        Those that the tier did not give.
        """
        space, tier = batch.space, self._tiers[number]
        batch.source = tier
        if not batch.waiters:
            return []
        batch.queueing = asyncio.current_task()
        async with tier.reads:
            batch.queueing = None
            if not batch.waiters:
                return []
            unknown = [space.namespace.hash_root] * len(hashes)
            reservation = self._memory.reserve(INTERNAL, space, hashes, unknown)
            granted = [(i, slot) for i, slot in enumerate(reservation.slots) if slot >= 0]
            if len(granted) < len(hashes):
                self._memory.counters["promotion_no_room_total"] += len(hashes) - len(granted)
            if not granted:
                return []
            length = space.namespace.block_bytes
            requests = [
                GetRequest(hashes[i], self._memory.arena.view(space, slot), length)
                for i, slot in granted
            ]
            results = [GetResult(Outcome.ERROR)] * len(requests)
            batch.reading = tier
            try:
                results = await tier.get(space.digest, requests)
            finally:
                batch.reading = None
                self._publish(batch, number, reservation, granted, results)
        return [
            request.block_hash
            for request, result in zip(requests, results, strict=True)
            if result.outcome is not Outcome.HIT
        ]

    def _publish(
        self,
        batch: Promotion,
        number: int,
        reservation: Reservation,
        granted: list[tuple[int, int]],
        results: Sequence[GetResult],
    ) -> None:
        space, host = batch.space, self._memory.host
        good = [False] * len(reservation.slots)
        for (i, slot), (outcome, header) in zip(granted, results, strict=True):
            if outcome is Outcome.HIT and header is not None:
                good[i] = True
                reservation.parents[i] = header.parent
                space.checksums[slot] = header.checksum
        ready = host.commit_some(INTERNAL, reservation.reservation_id, good)
        hashes = [space.chain.hash_of(slot) for slot in ready]
        for slot in ready:
            self._memory.record(space, slot)
        for waiter in batch.waiters:
            for at, own in enumerate(waiter.spaces):
                if own is space:
                    waiter.take(host, at, hashes, ready)
        self._backups.promoted(space, ready, number)
