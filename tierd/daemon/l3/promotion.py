"""Bringing blocks from storage tiers into L2 for requests that wait for them.

A promotion is a batch of blocks that some waiter needs, in prefix order; a block is
promoted once, however many wait for it. What a tier turns out not to have, or to have
damaged, is asked of the next one. Waiters leave at their deadline; the slots of a batch
belong to the batch until its I/O has ended, whoever still waits.
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
from tierd.daemon.l3.backup import Backups, Covers, nobody
from tierd.daemon.l3.read_scheduler import Rank, ReadScheduler, ReadTurn
from tierd.daemon.l3.tier import StorageTier, batch_blocks

Spawn = Callable[[Callable[[], Coroutine[object, object, None]], str], asyncio.Task[None]]


@dataclass(eq=False, slots=True)
class Waiter:
    """One ACQUIRE: what it holds so far, by space and block hash."""

    spaces: list[Space]
    arrived_ns: int = 0
    """When its request arrived at the engine, CLOCK_MONOTONIC."""
    worth: float | None = None
    """Of blocks that no request waits for: what they are worth; see HostTier.reserve."""
    held: list[dict[bytes, int]] = field(default_factory=list)
    brought: dict[bytes, int] = field(default_factory=dict)
    """Number of the tier that brought a block, of the first space's, while this waited."""
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
    ) -> SlotLease | None:
        """Lease the longest prefix that every space holds, and let go of the rest."""
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
    """A batch of one space's blocks; the tier number `first` has them, as far as is known."""

    space: Space
    first: int
    left: list[bytes]
    """Its blocks that are still under way."""
    done: asyncio.Future[None]
    place: int
    """Of its first block in the prefix of who wanted it first."""
    under_way: dict[tuple[bytes, bytes], Promotion]
    """Where others find it, by space and block."""
    waiters: set[Waiter] = field(default_factory=set)
    source: StorageTier | None = None
    """The tier that it reads, or waits for its turn to read."""
    reading: StorageTier | None = None
    """The tier that is being read."""
    turn: ReadTurn | None = None
    """What it waits for, while it waits for a turn to read."""
    room: asyncio.Future[None] | None = None
    """What it waits for, while it waits for slots."""
    void: bool = False
    """What it brings is not to be published: it has been flushed since."""
    failed: dict[bytes, Outcome | None] = field(default_factory=dict)
    """How the last attempt at a block that did not come ended; None: there was no room."""

    @property
    def doubtful(self) -> bool:
        """Whether nobody else is to join it: it is void, or its tier is one that no new read would
        be begun on. Only who waits for it already does: else all that want a popular block would
        wait in an outage, each in turn."""
        return self.void or (self.source is not None and not self.source.reads_allowed)

    def rank(self) -> Rank:
        """Whose turn it is: what the request that has waited longest needs, in prefix order."""
        return min((waiter.arrived_ns for waiter in self.waiters), default=0), self.place

    @property
    def worth(self) -> float | None:
        """What its blocks are worth if no request waits for them."""
        worths = [waiter.worth for waiter in self.waiters if waiter.worth is not None]
        return min(worths, default=0.0) if len(worths) == len(self.waiters) else None

    def join(self, waiter: Waiter) -> None:
        """Another waiter has come; the batch goes to its place in the queue."""
        if waiter not in self.waiters:
            self.waiters.add(waiter)
            if self.turn is not None:
                self.turn.earlier()

    def leave(self, waiter: Waiter) -> None:
        """A waiter has gone. Without any, a batch leaves the queue, and at once is nothing that
        another could join: behind reads that hang it would keep its blocks from being read from
        anywhere else."""
        self.waiters.discard(waiter)
        waits = self.turn.granted if self.turn is not None else self.room
        if not self.waiters and waits is not None:
            waits.cancel()
            self.keep([])

    def keep(self, left: list[bytes]) -> None:
        """Only these blocks are under way any more."""
        for block_hash in set(self.left).difference(left):
            del self.under_way[self.space.digest, block_hash]
        self.left = left


class Promotions:
    """All promotions under way, by space and block."""

    def __init__(
        self,
        memory: HostMemory,
        backups: Backups,
        tiers: Sequence[StorageTier],
        spawn: Spawn,
        bytes_max: int,
    ) -> None:
        """At most `bytes_max` bytes of slots are being read into at once."""
        self.under_way: dict[tuple[bytes, bytes], Promotion] = {}
        self.turns = ReadScheduler([tier.reads for tier in tiers], bytes_max)
        self.barred: Covers = nobody
        """Namespaces of which nothing is brought now."""
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
        """Have `waiter` get these blocks: hold what is resident, and promote the rest.

        `found` says which tier has a block, `first` the place of the first one in the prefix.
        A block that was resident or under way a moment ago and is neither any more is left out.
        """
        loop = asyncio.get_running_loop()
        space, held = waiter.spaces[at], waiter.held[at]
        items, limit = space.items, batch_blocks(space)
        current: Promotion | None = None
        begun = []
        here: dict[bytes, int] = {}
        for place, block_hash in enumerate(hashes, first):
            slot = items.get(block_hash)
            if slot is not None:
                if block_hash not in held and slot not in space.unverified:
                    here[block_hash] = slot
                continue
            key = (space.digest, block_hash)
            batch = self.under_way.get(key)
            if batch is not None and batch.doubtful:
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
                    begun.append(current)
                current.left.append(block_hash)
                self.under_way[key] = batch = current
            waiter.batches[batch] = None
            batch.join(waiter)
        waiter.take(self._memory.host, at, list(here), list(here.values()))
        for batch in begun:
            self._spawn(partial(self._run, batch), "promotion")

    def void(self, covers: Covers) -> None:
        """What is under way of these namespaces becomes nobody's."""
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
            if batch.waiters:  # It is the daemon that stops.
                raise
        finally:
            batch.keep([])
            batch.done.set_result(None)

    async def _bring_all(self, batch: Promotion, number: int) -> list[bytes]:
        """Read a batch's blocks, and wait for slots while blocks that are being written keep them.

        Returns the blocks that the tier did not give.
        """
        missed, left = [], batch.left
        while left and self._tiers[number].reads_allowed:
            given, short = await self._bring(batch, number, left)
            missed += given
            holds = self._backups.holds(batch.space)
            # While the others were read some that kept slots may have been written.
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
        """Blocks of a batch get no slots, and are not under way any more."""
        batch.failed.update(dict.fromkeys(hashes))
        batch.keep([h for h in batch.left if h not in hashes])
        self._memory.counters["promotion_no_room_total"] += len(hashes)

    async def _bring(
        self, batch: Promotion, number: int, hashes: Sequence[bytes]
    ) -> tuple[list[bytes], list[bytes]]:
        """Read blocks into fresh slots; what is sound becomes READY and held by the waiters.

        Returns the blocks that the tier did not give, and the blocks that got no slot.
        """
        space, tier = batch.space, self._tiers[number]
        batch.source = tier
        batch.turn = ReadTurn(tier.reads, len(hashes) * space.slot_bytes, batch.rank)
        async with self.turns.take(batch.turn):
            batch.turn = None
            if not batch.waiters or batch.void:
                return [], []
            unknown = [space.namespace.hash_root] * len(hashes)
            worth = batch.worth
            reservation = self._memory.reserve(INTERNAL, space, hashes, unknown, worth)
            if worth is None:
                # As a session does: else the next batch finds what leaves not written yet.
                self._memory.make_room_ahead(space, len(hashes))
            else:
                self._memory.grow_ahead(space)
            granted = [(i, slot) for i, slot in enumerate(reservation.slots) if slot >= 0]
            refused = dict(zip(hashes, reservation.slots, strict=True))
            short = [h for h, slot in refused.items() if slot == Refusal.NO_ROOM and worth is None]
            gone = {h for h, slot in refused.items() if slot < 0}.difference(short)
            # A request that wants one of them must not wait for it here.
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
        self._backups.promoted(space, ready, number)
