"""Host memory (L2): carries out what the core decides about it.

Makes, fills and decommits segments, moves blocks, and keeps the ledger. It does not know who
stores, who waits, or where else a block lies.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Final, assert_never

from tierd.backend import checksum
from tierd.clock import Clock
from tierd.core.effects import DecommitSegment, Effect, EndSpace, Forget, Move, NewSegment
from tierd.core.host import HostTier
from tierd.core.l2.reservations import Found, SlotReservation
from tierd.core.l2.segments import SEGMENT_PAUSE_S
from tierd.core.l2.space import Space
from tierd.core.reasons import Dropped
from tierd.daemon.l2.population import Population
from tierd.daemon.l2.threads import WorkerThreads
from tierd.daemon.lifecycle.service import ServiceManager
from tierd.limits import segment_advice
from tierd.memory.arena import Arena, Segment
from tierd.memory.ledger import INCARNATION_BYTES, LedgerRecord
from tierd.memory.placement import Placement

log = logging.getLogger("tierd")

INTERNAL: Final = 0
"""Owner of the daemon's own reservations; sessions count from 1."""

SegmentListener = Callable[[Space, int, Segment], None]


class HostMemory:
    """The core's state machine, and the segments that it decides about."""

    def __init__(
        self,
        host: HostTier,
        clock: Clock,
        counters: Counter[str],
        executor: Executor | None,
        placement: Placement | None = None,
        manager: ServiceManager | None = None,
    ) -> None:
        """`manager` keeps the segments for the next incarnation of the daemon, if it can."""
        self.host = host
        self.arena = Arena(placement)
        self.threads = WorkerThreads(clock, executor)
        self.population = Population(self.arena, self.threads, counters)
        self.manager = manager or ServiceManager()
        self.counters = counters
        self.listeners: list[SegmentListener] = []
        self.decommitted: Callable[[Segment], None] = lambda _: None
        """Called with a segment before its memory is given back."""
        self.closed: Callable[[Segment], None] = lambda _: None
        """Called with a segment that has been closed."""
        self._clock = clock
        self._want_room: dict[Space, list[asyncio.Future[None]]] = {}
        # The service manager keeps a segment and its ledger under one name. The names are short
        # numbers: together they are one variable of the next incarnation's environment, which has
        # at most 128 KiB.
        self._names = 0
        self._segments_fail = False
        self._epoch = bytes(INCARNATION_BYTES)

    def reserve(
        self,
        owner: int,
        space: Space,
        hashes: Sequence[bytes],
        parents: Sequence[bytes],
        worth: float | None = None,
    ) -> SlotReservation:
        """Reserve slots for new blocks, backed by memory; `worth` as in HostTier.reserve."""
        reservation, effects = self.host.reserve(owner, space, hashes, parents, worth)
        self._apply(effects)
        return reservation

    def commit_found(
        self, owner: int, reservation: SlotReservation, found: Sequence[Found | None]
    ) -> list[int]:
        """Publish blocks that tiers have delivered into a reservation, and record them in the
        ledger. Returns the slots that became readable."""
        ready = self.host.commit_found(owner, reservation.reservation_id, found)
        self._record(reservation.space, ready)
        return ready

    def make_room_ahead(self, space: Space, count: int) -> None:
        """Make room for the next `count` blocks before they are reserved."""
        self._apply(self.host.make_room_ahead(space, count))

    def grow_ahead(self, space: Space) -> None:
        """Add a segment before the last one is full."""
        self._apply(self.host.grow_ahead(space))

    def shrink(self) -> bool:
        """Give one segment back if memory exceeds the limit; returns whether one was given back."""
        before = self.host.allocated_bytes
        self._apply(self.host.shrink())
        return self.host.allocated_bytes < before

    def resident_bytes(self) -> int:
        """Bytes of segments with pages behind them, touched by the daemon or by clients."""
        return sum(
            # No system call for a segment that has been faulted in completely.
            segment.mapping.size_bytes
            if segment.mapping.populated_bytes == segment.mapping.size_bytes
            else os.fstat(segment.fd).st_blocks * 512
            for space in self.host.spaces.values()
            for segment in self.arena.segments(space)
        )

    def let_go(self, space: Space, slots: Sequence[int]) -> None:
        """Undo one hold of each slot. Evicting slots without another hold are free afterwards."""
        self.host.unhold(space, slots)
        if space.evicting:
            self._apply(self.host.settle(space, slots))
        for waits in self._want_room.pop(space, ()):
            if not waits.done():
                waits.set_result(None)

    def room(self, space: Space) -> asyncio.Future[None]:
        """Return a future that is done at the next `let_go` of slots of a space."""
        waits = asyncio.get_running_loop().create_future()
        self._want_room.setdefault(space, []).append(waits)
        return waits

    def payload(self, space: Space, slot: int) -> memoryview:
        """The block's bytes in a slot, without padding."""
        return self.arena.view(space, slot)[: space.namespace.block_bytes]

    async def checksums(self, blocks: Sequence[tuple[Space, int]]) -> list[bytes]:
        """Compute the checksums of the blocks in these slots, which the caller holds."""
        views = [self.payload(space, slot) for space, slot in blocks]
        return await self.threads.run(_checksums, views) if views else []

    def note_checksums(self, space: Space, sums: Mapping[int, bytes]) -> None:
        """Record the checksums of readable or evicting blocks in core and ledger."""
        # The core leaves out blocks that were dropped meanwhile: the ledger must not have them.
        self._record(space, self.host.note_checksums(space, sums))

    async def verify(self, space: Space, slots: Sequence[int]) -> int:
        """Compare unverified blocks, held meanwhile, with their checksums in the ledger.

        Drops the blocks that differ, and returns their number.
        """
        self.host.hold(space, slots)
        try:
            sums = await self.checksums([(space, slot) for slot in slots])
            rotten = self.host.verify(space, dict(zip(slots, sums, strict=True)))
            self.drop(space, rotten)
        finally:
            self.let_go(space, slots)
        return len(rotten)

    def _record(self, space: Space, slots: Sequence[int]) -> None:
        """Write blocks with known checksums into the ledger."""
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
        """Adopt a space's segments from a former incarnation, in the order of their numbers."""
        self.arena.adopt(space, segments)
        for index, segment in enumerate(segments):
            # A record that was not adopted must not reappear in the next incarnation.
            first = index * space.slots_per_segment
            places = range(space.slots_per_segment)
            segment.ledger.forget_all_but([p for p in places if space.is_readable(first + p)])
            if space.live[index]:
                self._names = max(self._names, int(segment.kept_as, 16) + 1)
                self.population.add(space, index)

    def use(self, epoch: bytes) -> None:
        """Note in all ledgers that this incarnation leases the slots from now on."""
        self._epoch = epoch
        for space in self.host.spaces.values():
            for segment in self.arena.segments(space):
                segment.ledger.incarnation = epoch

    def mark(self, space: Space, slots: Sequence[int], *, add: int = 0, remove: int = 0) -> None:
        """Set or clear the bits of storage tiers that have blocks, in core and ledger."""
        if not slots:
            return
        self.host.mark(space, slots, add=add, remove=remove)
        segments = self.arena.segments(space)
        for index, places in space.by_segment(slots).items():
            segments[index].ledger.note_tiers(places, add, remove)

    def drop(self, space: Space, slots: Sequence[int], why: Dropped = Dropped.DAMAGED) -> None:
        """Drop blocks permanently; see HostTier.drop."""
        self._apply(self.host.drop(space, slots, why))

    def end(self, space: Space) -> bool:
        """End a namespace without sessions and blocks; returns whether it has ended."""
        self._apply(self.host.empty_space(space))
        # A copy process that still pins a segment would keep its memory from the system.
        if all(segment.pins == 0 for segment in self.arena.segments(space)):
            self._apply(self.host.end_space(space))
        return space.ended

    def clear(self, space: Space, most: int) -> None:
        """Drop at most `most` blocks of a namespace without sessions."""
        self._apply(self.host.clear_space(space, most))

    def keep_decommitted(self) -> None:
        """Give back pages of decommitted segments that clients have faulted in again."""
        for space in self.host.spaces.values():
            self.arena.keep_decommitted(space)

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
            return  # Lost with an earlier segment.
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
        segment.ledger.incarnation = self._epoch
        self.manager.keep(segment.kept_as, (segment.fd, segment.ledger.fd))
        self.population.add(space, index)
        # A copy: a send to a client that has gone ends its session, which stops listening.
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
