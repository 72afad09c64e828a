"""Host memory: carries out what the core decides about it.

Makes, fills and decommits segments, moves blocks, and keeps the ledger. It refuses to know
why: who stores, who waits and where else a block lies is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Final, TypeVar, assert_never

from tierd.backend import checksum
from tierd.clock import Clock
from tierd.core.effects import DecommitSegment, Effect, EndSpace, Forget, Move, NewSegment
from tierd.core.host import HostTier
from tierd.core.l2.reservations import Found, SlotReservation
from tierd.core.l2.segments import SEGMENT_PAUSE_S
from tierd.core.l2.space import Space
from tierd.core.reasons import Dropped
from tierd.daemon.lifecycle.service import ServiceManager
from tierd.limits import segment_advice
from tierd.memory.arena import Arena, Segment
from tierd.memory.ledger import LIFE_BYTES, LedgerRecord
from tierd.memory.placement import Placement

log = logging.getLogger("tierd")

INTERNAL: Final = 0
"""Owner of the daemon's own reservations; sessions count from 1."""

_T = TypeVar("_T")


SegmentListener = Callable[[Space, int, Segment], None]


class HostMemory:
    """L2: the core's state machine and the memory that it decides about."""

    def __init__(
        self,
        host: HostTier,
        clock: Clock,
        counters: Counter[str],
        executor: Executor | None,
        placement: Placement | None = None,
        manager: ServiceManager | None = None,
    ) -> None:
        """`manager` keeps the segments for the daemon's next life, if there is one."""
        self.host = host
        self.arena = Arena(placement)
        self.manager = manager or ServiceManager()
        self.counters = counters
        self.listeners: list[SegmentListener] = []
        self.decommitted: Callable[[Segment], None] = lambda _: None
        """Told of a segment before its memory is given back."""
        self.closed: Callable[[Segment], None] = lambda _: None
        """Told of a segment that is no more."""
        self._clock = clock
        self._executor = executor
        self._unpopulated: deque[tuple[Space, int]] = deque()
        self._populate_ready = asyncio.Event()
        self._in_thread: dict[object, int] = {}
        self._want_room: dict[Space, list[asyncio.Future[None]]] = {}
        # A segment and its ledger have one name where the service manager keeps them. All names
        # together are one variable of the next life's environment, at most 128 KiB: they say
        # nothing, and are short.
        self._names = 0
        self._segments_fail = False
        self._life = bytes(LIFE_BYTES)

    async def in_thread(self, call: Callable[..., _T], *args: object) -> _T:
        """What `call` returns, run off the loop."""
        token = object()
        self._in_thread[token] = self._clock.monotonic_ns()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, call, *args)
        finally:
            del self._in_thread[token]

    @property
    def in_thread_s(self) -> float:
        """How long the oldest call off the loop has taken so far; 0 if there is none."""
        began_ns = next(iter(self._in_thread.values()), None)
        return 0.0 if began_ns is None else (self._clock.monotonic_ns() - began_ns) / 1e9

    def reserve(
        self,
        owner: int,
        space: Space,
        hashes: Sequence[bytes],
        parents: Sequence[bytes],
        worth: float | None = None,
    ) -> SlotReservation:
        """Slots for new blocks, with memory behind them; `worth` as in HostTier.reserve."""
        reservation, effects = self.host.reserve(owner, space, hashes, parents, worth)
        self._apply(effects)
        return reservation

    def commit_found(
        self, owner: int, reservation: SlotReservation, found: Sequence[Found | None]
    ) -> list[int]:
        """Publish what tiers have delivered into a reservation, by hash, and write it into the
        ledger; the slots that are readable now."""
        ready = self.host.commit_found(owner, reservation.reservation_id, found)
        self._record(reservation.space, ready)
        return ready

    def make_room_ahead(self, space: Space, count: int) -> None:
        """Have slots for the next `count` blocks before they are asked for."""
        self._apply(self.host.make_room_ahead(space, count))

    def grow_ahead(self, space: Space) -> None:
        """Have a segment more before the last one is full."""
        self._apply(self.host.grow_ahead(space))

    def shrink(self) -> bool:
        """Give a segment back if there is more than the limit; whether that could be done."""
        before = self.host.allocated_bytes
        self._apply(self.host.shrink())
        return self.host.allocated_bytes < before

    def resident_bytes(self) -> int:
        """Bytes of segments that have memory behind them, whoever has touched it."""
        return sum(
            # The kernel need not be asked about what has been faulted in as a whole.
            segment.mapping.size_bytes
            if segment.mapping.populated_bytes == segment.mapping.size_bytes
            else os.fstat(segment.fd).st_blocks * 512
            for space in self.host.spaces.values()
            for segment in self.arena.segments(space)
        )

    def let_go(self, space: Space, slots: Sequence[int]) -> None:
        """Undo one hold of each slot; what was to leave and is held by nobody is free then."""
        self.host.unhold(space, slots)
        if space.evicting:
            self._apply(self.host.settle(space, slots))
        for waits in self._want_room.pop(space, ()):
            if not waits.done():
                waits.set_result(None)

    def room(self, space: Space) -> asyncio.Future[None]:
        """Done once a copy of the daemon's no longer holds some slots of a space."""
        waits = asyncio.get_running_loop().create_future()
        self._want_room.setdefault(space, []).append(waits)
        return waits

    def payload(self, space: Space, slot: int) -> memoryview:
        """The bytes of a slot that count."""
        return self.arena.view(space, slot)[: space.namespace.block_bytes]

    async def checksums(self, blocks: Sequence[tuple[Space, int]]) -> list[bytes]:
        """The checksums of what these slots, which the caller holds, have in them now."""
        views = [self.payload(space, slot) for space, slot in blocks]
        return await self.in_thread(_checksums, views) if views else []

    def note_checksums(self, space: Space, sums: Mapping[int, bytes]) -> None:
        """The checksums of readable blocks, or evicting ones, are known: the ledger gets them."""
        # It has forgotten what was dropped meanwhile, and is not to learn it again.
        self._record(space, self.host.note_checksums(space, sums))

    async def verify(self, space: Space, slots: Sequence[int]) -> int:
        """Compare unverified blocks, which are held meanwhile, with the ledger; what differs is
        gone afterwards. How many blocks that is."""
        self.host.hold(space, slots)
        try:
            sums = await self.checksums([(space, slot) for slot in slots])
            rotten = self.host.verify(space, dict(zip(slots, sums, strict=True)))
            self.drop(space, rotten)
        finally:
            self.let_go(space, slots)
        return len(rotten)

    def _record(self, space: Space, slots: Sequence[int]) -> None:
        """Write blocks whose checksums are known into the ledger."""
        segments, per = self.arena.segments(space), space.slots_per_segment
        length, now_ns = space.namespace.block_bytes, self._clock.monotonic_ns()
        for slot, (block_hash, parent) in zip(slots, space.identities(slots), strict=True):
            digest, generation = space.checksums[slot], space.generations[slot]
            assert digest is not None
            index, place = divmod(slot, per)
            segments[index].ledger.ready(
                LedgerRecord(place, block_hash, parent, length, digest, generation, now_ns)
            )

    def adopt(self, space: Space, segments: Sequence[Segment]) -> None:
        """Have the segments of a space that a life before left, in the order of their numbers."""
        self.arena.adopt(space, segments)
        for index, segment in enumerate(segments):
            # A record that was not adopted must not turn up in the life after this one.
            first = index * space.slots_per_segment
            places = range(space.slots_per_segment)
            segment.ledger.forget_all_but([p for p in places if space.is_readable(first + p)])
            if space.live[index]:
                self._names = max(self._names, int(segment.kept_as, 16) + 1)
                self._unpopulated.append((space, index))
        self._populate_ready.set()

    def use(self, life: bytes) -> None:
        """From now on this incarnation leases slots and has them written: ledgers say whose."""
        self._life = life
        for space in self.host.spaces.values():
            for segment in self.arena.segments(space):
                segment.ledger.life = life

    def mark(self, space: Space, slots: Sequence[int], *, add: int = 0, remove: int = 0) -> None:
        """Storage tiers have blocks, by their bits, or no longer do; the ledger says so, too."""
        if not slots:
            return
        self.host.mark(space, slots, add=add, remove=remove)
        segments = self.arena.segments(space)
        for index, places in space.by_segment(slots).items():
            segments[index].ledger.note_tiers(places, add, remove)

    def drop(self, space: Space, slots: Sequence[int], why: Dropped = Dropped.DAMAGED) -> None:
        """Take blocks out for good; see HostTier.drop."""
        self._apply(self.host.drop(space, slots, why))

    def end(self, space: Space) -> bool:
        """Forget a namespace that nobody uses and that holds nothing; whether that was so."""
        self._apply(self.host.empty_space(space))
        # A process that has a segment pinned would keep its memory from the system.
        if all(segment.pins == 0 for segment in self.arena.segments(space)):
            self._apply(self.host.end_space(space))
        return space.ended

    def clear(self, space: Space, most: int) -> None:
        """Drop so many blocks, at most, of a namespace that nobody uses any more."""
        self._apply(self.host.clear_space(space, most))

    def keep_decommitted(self) -> None:
        """Give back what clients that faulted memory in have taken beyond the capacity."""
        for space in self.host.spaces.values():
            self.arena.keep_decommitted(space)

    async def populate(self) -> None:
        """Fault new segments in ahead of use, for ever."""
        while True:
            await self._populate_ready.wait()
            while self._unpopulated:
                space, index = self._unpopulated.popleft()
                if space.ended or index >= len(space.live):
                    continue
                segment = self.arena.segments(space)[index]
                try:
                    more = space.live[index]
                    while more:
                        more = await self.in_thread(segment.mapping.populate_next)
                        if space.ended or not space.live[index]:
                            # Hollowed while the chunk was being faulted in.
                            segment.give_back()
                            more = False
                except OSError as error:
                    self.counters["populate_failed_total"] += 1
                    log.warning("cannot fault in memory ahead of use: %s", error)
            self._populate_ready.clear()

    def _apply(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case NewSegment(space, index):
                    self._new_segment(space, index)
                case DecommitSegment(space, index):
                    self.decommitted(self.arena.segments(space)[index])
                    self.manager.forget(self.arena.segments(space)[index].kept_as)
                    self.arena.decommit(space, index)
                case Forget(space, slots):
                    self.arena.forget(space, slots)
                case Move(space, pairs):
                    self.arena.move(space, pairs)
                    self.counters["moved_blocks_total"] += len(pairs)
                case EndSpace(space):
                    self.counters["namespaces_ended_total"] += 1
                    for segment in self.arena.end(space):
                        self.closed(segment)
                case _:
                    assert_never(effect)

    def _new_segment(self, space: Space, index: int) -> None:
        if index >= len(space.live):
            return  # Lost with one before it.
        try:
            segment = self.arena.create(space, index)
        except OSError as error:
            self.counters["segments_failed_total"] += 1
            self._segments_fail = True
            log.error(
                "cannot make a memory segment of %.1f MiB, next try in %d s; until then blocks "
                "that need it are not stored: %s",
                space.segment_bytes / (1 << 20),
                SEGMENT_PAUSE_S,
                segment_advice(error),
            )
            self.host.lose_segments(space, len(self.arena.segments(space)))
            return
        if self._segments_fail:
            self._segments_fail = False
            log.info("memory segments can be made again")
        segment.kept_as = f"{self._names:x}"
        self._names += 1
        segment.ledger.life = self._life
        self.manager.keep(segment.kept_as, (segment.fd, segment.ledger.fd))
        self._unpopulated.append((space, index))
        self._populate_ready.set()
        # A copy: telling a client that has gone ends its session, and its listening.
        for listener in list(self.listeners):
            listener(space, index, segment)

    def check(self) -> None:
        """Assert the invariants of core and ledger; for tests."""
        self.host.check()
        for space in self.host.spaces.values():
            for index, segment in enumerate(self.arena.segments(space)):
                for record in segment.ledger.records():
                    slot = index * space.slots_per_segment + record.place
                    assert space.identity(slot)[0] == record.block_hash
                    known = space.checksums[slot] or space.unverified[slot]
                    assert known == record.checksum
                    assert space.generations[slot] == record.generation


def _checksums(views: Sequence[memoryview]) -> list[bytes]:
    return [checksum(view) for view in views]
