"""Promotion: reads blocks from storage tiers into L2 for requests that wait for them.

A promotion is a batch of blocks in prefix order. A block is promoted once, however many requests
wait for it. Blocks that a tier lacks, or has damaged, are requested from the next tier. Waiters
leave at their deadline. The slots of a batch belong to the batch until its I/O has ended, even if
no request waits any longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tierd.backend import GetRequest, GetResult, Outcome
from tierd.core.host import HostTier
from tierd.core.l2.leases import SlotLease
from tierd.core.l2.reservations import Found, SlotReservation
from tierd.core.l2.space import Space
from tierd.core.reasons import Refusal
from tierd.daemon.l2.memory import INTERNAL, HostMemory
from tierd.daemon.l3.backup import Backups, Covers, no_namespace
from tierd.daemon.l3.read_scheduler import QueuedRead, Rank, ReadScheduler
from tierd.daemon.l3.tier import StorageTier, batch_blocks

Spawn = Callable[[Callable[[], Coroutine[object, object, None]], str], asyncio.Task[None]]


@dataclass(eq=False, slots=True)
class Waiter:
    """One ACQUIRE, and the slots that it holds so far, by space and block hash."""

    spaces: list[Space]
    arrived_ns: int = 0
    """When its request arrived at the engine, CLOCK_MONOTONIC."""
    worth: float | None = None
    """Worth of blocks that no request waits for (see HostTier.reserve); None for a request."""
    held: list[dict[bytes, int]] = field(default_factory=list)
    brought: dict[bytes, int] = field(default_factory=dict)
    """Number of the tier that delivered a block of the first space during the wait."""
    batches: dict[Promotion, None] = field(default_factory=dict)
    open: bool = True

    def __post_init__(self) -> None:
        self.held = [{} for _ in self.spaces]

    def take(self, host: HostTier, at: int, hashes: Sequence[bytes], slots: Sequence[int]) -> None:
        """Hold READY slots of the space at index `at`."""
        host.hold(self.spaces[at], slots)
        self.held[at].update(zip(hashes, slots, strict=True))

    def refresh(self, host: HostTier, hashes: Sequence[bytes]) -> None:
        """Hold blocks of the prefix that have become resident since the last call."""
        for at, space in enumerate(self.spaces):
            known = self.held[at]
            slots = host.prefix(space, hashes)
            # By hash: a client may ask for a block twice, and it is held once.
            fresh = {h: s for h, s in zip(hashes, slots, strict=False) if h not in known}
            self.take(host, at, list(fresh), list(fresh.values()))

    def length(self, at: int, hashes: Sequence[bytes]) -> int:
        """Return how many blocks are held without a gap from the first on."""
        held = self.held[at]
        for count, block_hash in enumerate(hashes):
            if block_hash not in held:
                return count
        return len(hashes)

    def close(self, host: HostTier) -> None:
        """Release all held slots and leave the batches; idempotent."""
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
    ) -> SlotLease | None:
        """Lease the longest prefix held in every space, and release the rest."""
        count = min(self.length(at, hashes) for at in range(len(self.spaces)))
        for space, held in zip(self.spaces, self.held, strict=True):
            if space.dropped:
                gone = (i for i in range(count) if held[hashes[i]] in space.dropped)
                count = next(gone, count)
        lease = None
        if count and host.may_lease(owner, count * len(self.spaces)):
            parts = [
                (space, [held[h] for h in hashes[:count]])
                for space, held in zip(self.spaces, self.held, strict=True)
            ]
            sources = b""
            if brought := self.brought:
                sources = bytes(1 + brought.get(h, -1) for h in hashes[:count])
            lease = host.grant(owner, parts, expires_ns, sources)
        self.close(host)
        return lease


@dataclass(eq=False, slots=True)
class Promotion:
    """A batch of one space's blocks, which tier number `first` probably has."""

    space: Space
    first: int
    left: list[bytes]
    """Blocks that are still in progress."""
    done: asyncio.Future[None]
    place: int
    """Place of the first block in the prefix of the first waiter."""
    under_way: dict[tuple[bytes, bytes], Promotion]
    """Promotions in progress, by space and block, shared by all of them."""
    waiters: set[Waiter] = field(default_factory=set)
    source: StorageTier | None = None
    """The tier that it reads, or waits to read."""
    reading: StorageTier | None = None
    """The tier that is being read."""
    queued: QueuedRead | None = None
    """The read that has not started yet."""
    room: asyncio.Future[None] | None = None
    """Done when slots may be free, while the batch waits for slots."""
    void: bool = False
    """The namespace was flushed since: the blocks must not be published."""
    failed: dict[bytes, Outcome | None] = field(default_factory=dict)
    """Last outcome of each block that was not delivered; None if it got no slot."""

    @property
    def joinable(self) -> bool:
        """Whether more requests may wait for it: it is not void and its tier takes reads.

        In an outage, all requests for a popular block would otherwise wait, one after another.
        """
        return not self.void and (self.source is None or self.source.reads_allowed)

    def rank(self) -> Rank:
        """Rank by the request that has waited longest, then by the place in the prefix."""
        return min((waiter.arrived_ns for waiter in self.waiters), default=0), self.place

    @property
    def worth(self) -> float | None:
        """Worth of its blocks if no request waits for them, else None."""
        worths = [waiter.worth for waiter in self.waiters if waiter.worth is not None]
        return min(worths, default=0.0) if len(worths) == len(self.waiters) else None

    def join(self, waiter: Waiter) -> None:
        """Add a waiter, which may move the batch forward in the queue."""
        if waiter not in self.waiters:
            self.waiters.add(waiter)
            if self.queued is not None:
                self.queued.reorder()

    def leave(self, waiter: Waiter) -> None:
        """Remove a waiter. Without waiters, a batch that has not started is cancelled.

        No request can join a cancelled batch: behind reads that hang, it would keep its blocks
        from being read from another tier.
        """
        self.waiters.discard(waiter)
        waits = self.queued.granted if self.queued is not None else self.room
        if not self.waiters and waits is not None:
            waits.cancel()
            self.keep([])

    def keep(self, left: list[bytes]) -> None:
        """End the promotion of all blocks except these."""
        for block_hash in set(self.left).difference(left):
            del self.under_way[self.space.digest, block_hash]
        self.left = left


class Promotions:
    """All promotions in progress, by space and block."""

    def __init__(
        self,
        memory: HostMemory,
        backups: Backups,
        tiers: Sequence[StorageTier],
        spawn: Spawn,
        bytes_max: int,
    ) -> None:
        """`bytes_max` limits the bytes of slots that are read into at once."""
        self.under_way: dict[tuple[bytes, bytes], Promotion] = {}
        self.read_scheduler = ReadScheduler([tier.reads for tier in tiers], bytes_max)
        self.barred: Covers = no_namespace
        """Namespaces whose blocks are not promoted now."""
        self._memory = memory
        self._backups = backups
        self._tiers = tiers
        self._spawn = spawn

    def join(
        self,
        waiter: Waiter,
        at: int,
        hashes: Sequence[bytes],
        found: Mapping[bytes, int],
        first: int,
    ) -> None:
        """Hold the resident blocks for `waiter`, and promote the others.

        `found` has the tier of each block, `first` is the place of the first block in the prefix.
        A block that is no longer resident or in progress, and not in `found`, is left out.
        """
        loop = asyncio.get_running_loop()
        space, held = waiter.spaces[at], waiter.held[at]
        items, limit = space.items, batch_blocks(space)
        current: Promotion | None = None
        started = []
        resident: dict[bytes, int] = {}
        for place, block_hash in enumerate(hashes, first):
            slot = items.get(block_hash)
            if slot is not None:
                if block_hash not in held and slot not in space.unverified:
                    resident[block_hash] = slot
                continue
            key = (space.digest, block_hash)
            batch = self.under_way.get(key)
            if batch is not None and not batch.joinable:
                continue
            if batch is None and self.barred(space.digest):
                continue
            if batch is None:
                tier = found.get(block_hash)
                if tier is None:
                    continue
                if current is None or current.first != tier or len(current.left) >= limit:
                    done = loop.create_future()
                    current = Promotion(space, tier, [], done, place, self.under_way)
                    started.append(current)
                current.left.append(block_hash)
                self.under_way[key] = batch = current
            waiter.batches[batch] = None
            batch.join(waiter)
        waiter.take(self._memory.host, at, list(resident), list(resident.values()))
        for batch in started:
            self._spawn(partial(self._run, batch), "promotion")

    def void(self, covers: Covers) -> None:
        """Keep promotions in progress of these namespaces from being published."""
        for batch in set(self.under_way.values()):
            batch.void = batch.void or covers(batch.space.digest)

    async def _run(self, batch: Promotion) -> None:
        try:
            for number in range(batch.first, len(self._tiers)):
                if not batch.left or not batch.waiters:
                    break
                if self._tiers[number].reads_allowed:
                    batch.keep(await self._bring_all(batch, number))
        except asyncio.CancelledError:
            if batch.waiters:  # The daemon is stopping.
                raise
        finally:
            batch.keep([])
            batch.done.set_result(None)

    async def _bring_all(self, batch: Promotion, number: int) -> list[bytes]:
        """Read a batch's blocks, waiting for slots that blocks waiting for tiers still occupy.

        Returns the blocks that the tier did not deliver.
        """
        missed, left = [], batch.left
        while left and self._tiers[number].reads_allowed:
            given, short = await self._bring(batch, number, left)
            missed += given
            holds = self._backups.holds(batch.space)
            # During the reads, blocks that occupied slots may have been written.
            again = short and batch.waiters and (holds or len(short) < len(left))
            if not again:
                self._no_slots(batch, short)
                break
            batch.keep([*missed, *short])
            left = short
            if holds:
                batch.room = self._memory.room(batch.space)
                try:
                    await batch.room
                finally:
                    batch.room = None
        return missed

    def _no_slots(self, batch: Promotion, hashes: Collection[bytes]) -> None:
        """End the promotion of blocks that get no slots."""
        batch.failed.update(dict.fromkeys(hashes))
        batch.keep([h for h in batch.left if h not in hashes])
        self._memory.counters["promotion_no_room_total"] += len(hashes)

    async def _bring(
        self, batch: Promotion, number: int, hashes: Sequence[bytes]
    ) -> tuple[list[bytes], list[bytes]]:
        """Read blocks into new slots; undamaged blocks become READY and held by the waiters.

        Returns the blocks that the tier did not deliver, and the blocks that got no slot.
        """
        space, tier = batch.space, self._tiers[number]
        batch.source = tier
        batch.queued = QueuedRead(tier.reads, len(hashes) * space.slot_bytes, batch.rank)
        async with self.read_scheduler.take(batch.queued):
            batch.queued = None
            if not batch.waiters or batch.void:
                return [], []
            unknown = [space.namespace.hash_root] * len(hashes)
            worth = batch.worth
            reservation = self._memory.reserve(INTERNAL, space, hashes, unknown, worth)
            if worth is None:
                # As a session does; otherwise the next batch waits for evicted blocks' writes.
                self._memory.make_room_ahead(space, len(hashes))
            else:
                self._memory.grow_ahead(space)
            granted = [(i, slot) for i, slot in enumerate(reservation.slots) if slot >= 0]
            refused = dict(zip(hashes, reservation.slots, strict=True))
            short = [h for h, slot in refused.items() if slot == Refusal.NO_ROOM and worth is None]
            gone = {h for h, slot in refused.items() if slot < 0}.difference(short)
            # Another request for one of these blocks must not wait for this batch.
            self._no_slots(batch, gone)
            if not granted:
                return [], short
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
        missed = {
            request.block_hash: result.outcome
            for request, result in zip(requests, results, strict=True)
            if result.outcome is not Outcome.HIT
        }
        batch.failed.update(missed)
        return list(missed), short

    def _publish(
        self,
        batch: Promotion,
        number: int,
        reservation: SlotReservation,
        granted: list[tuple[int, int]],
        results: Sequence[GetResult],
    ) -> None:
        space, host = batch.space, self._memory.host
        found: list[Found | None] = [None] * len(reservation.slots)
        for (i, _), (outcome, header) in zip(granted, results, strict=True):
            if outcome is Outcome.HIT and header is not None and not batch.void:
                found[i] = Found(header.parent, header.checksum)
        ready = self._memory.commit_found(INTERNAL, reservation, found)
        hashes = space.hashes_of(ready)
        for waiter in batch.waiters:
            for at, own in enumerate(waiter.spaces):
                if own is space:
                    waiter.take(host, at, hashes, ready)
                    if at == 0:
                        waiter.brought.update(dict.fromkeys(hashes, number))
        self._backups.note_promoted(space, ready, number)
