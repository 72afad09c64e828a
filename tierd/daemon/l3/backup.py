"""Backup: copies blocks from host memory (L2) to the storage tiers that lack them.

Each tier's write policy (`tierd.core.l3.writes`) decides which blocks it gets, and when. Waiting
blocks are held in L2, so each tier has its own bound in bytes. Beyond it, or while the tier takes
no writes, a block is skipped and counted. It is offered again when an engine next presents or
uses it, and when L2 evicts it. No client ever waits for a backup.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Container, Mapping, Sequence
from functools import partial
from typing import Final

from tierd.backend import Outcome, PutRequest
from tierd.clock import Clock
from tierd.config import TIERS_MAX
from tierd.core.l2.space import Space
from tierd.core.l2.tier_bits import asked_bit
from tierd.core.l3.writes import Miss, WriteMoment
from tierd.daemon.l2.memory import HostMemory
from tierd.daemon.l3.checksums import Checksums, PendingChecksum
from tierd.daemon.l3.drain import lacked_blocks
from tierd.daemon.l3.renewal import Covers as Covers
from tierd.daemon.l3.renewal import Renewal
from tierd.daemon.l3.tier import StorageTier
from tierd.daemon.l3.write_queue import WriteQueue

PENDING_SHARE_MAX: Final = 0.25
"""Maximum share of L2's capacity that blocks waiting for checksums and backups of all tiers may
hold. Each tier has an equal part, so that a tier that hangs takes no room from the others."""

DRAIN_POLL_S: Final = 0.01
"""How often a drain checks its progress: most writes of a tier take longer."""


def no_namespace(digest: bytes) -> bool:
    """Cover no namespace."""
    return False


class Backups:
    """The write queues of all tiers, and the checksums before them.

    `Space.tiers` says which tiers have a block or are getting it.
    """

    def __init__(self, memory: HostMemory, tiers: Sequence[StorageTier], clock: Clock) -> None:
        self._memory = memory
        self._host = memory.host
        self._clock = clock
        self.barred: Covers = no_namespace
        """Namespaces whose blocks are not written now."""
        self.stopping = False
        """Whether new blocks are written at once; `drain` writes the others."""
        self.queues = [
            WriteQueue(tier, 1 << i, tier.config.write_queue, self._host.capacity_bytes)
            for i, tier in enumerate(tiers)
        ]
        self.resize()
        if tiers:
            late = any(queue.writes.when_evicting for queue in self.queues)
            self._host.set_claim(self.claim, claims_all=late)
        self.renewals = [
            Renewal(queue.tier, queue.bit, memory, partial(self._missing, queue))
            for queue in self.queues
        ]
        self._every = (1 << len(tiers)) - 1
        self.checksums = Checksums(memory, self._pass_on)

    def resize(self) -> None:
        """Give each tier its part of the present capacity."""
        share = int(self._host.capacity_bytes * PENDING_SHARE_MAX) // max(1, len(self.queues))
        for queue in self.queues:
            queue.bytes_max = min(queue.tier.config.write_queue, share)

    # --- offering blocks to tiers ----------------------------------------------------

    def note_used(self, space: Space, hashes: Sequence[bytes]) -> None:
        """Offer blocks whose use by a request has just been counted: it may make them worth it."""
        items, slots = space.items, space.find(hashes)
        for queue in self.queues:
            if len(queue.writes.missed) and len(slots) < len(hashes):
                queue.count_refused_hits(space, (h for h in hashes if h not in items))
        lacked = space.tiers.lacking(dict.fromkeys(slots), self._every)
        if lacked:
            self.offer(space, lacked, WriteMoment.USED)
        if slots:
            for renewal in self.renewals:
                renewal.used(space, slots)

    def claim(self, space: Space, slots: Sequence[int], count_max: int) -> None:
        """Hold blocks that L2 evicts, the deepest first, until tiers have got them.

        Holds the blocks that tiers lack and are to get, and those that a tier is asked about
        because it may have dropped them. Where a budget or a queue has no room, the deepest
        blocks are left out.
        """
        upwards = slots[::-1]
        lacked = space.tiers.lacking(upwards, self._every)
        held = self.offer(space, lacked, WriteMoment.EVICTING, count_max) if lacked else ()
        if not self.barred(space.digest):
            for renewal in self.renewals:
                held = {*held, *renewal.claim(space, upwards, held, count_max - len(held))}

    def _missing(self, queue: WriteQueue, space: Space, slots: Sequence[int]) -> None:
        """Offer blocks again that a tier no longer has, as it says."""
        self.note_lost(space, slots, queue.bit)
        queue.history.note_dropped(space, slots)
        if self.stopping:
            queue.backlog.add_first([(space, h) for h, _ in space.identities(slots)])
            return
        evicting = [slot for slot in slots if slot in space.evicting]
        self.offer(space, [slot for slot in slots if slot not in space.evicting], WriteMoment.USED)
        self.offer(space, evicting, WriteMoment.EVICTING)

    def offer(
        self, space: Space, slots: Sequence[int], moment: WriteMoment, count_max: int | None = None
    ) -> Collection[int]:
        """Queue slots for the tiers that lack them, want them and have room for them.

        Returns the queued slots, at most `count_max`, whatever the number of tiers.
        """
        tiers: dict[int, int] = {}
        for queue in self.queues:
            wanted = self._wanted(queue, space, slots, moment)
            more = len(wanted) if count_max is None else count_max - len(tiers)
            for slot in self._take(queue, space, wanted, tiers, more):
                tiers[slot] = tiers.get(slot, 0) | queue.bit
        self._begin(space, tiers)
        return tiers.keys()

    def _take(
        self,
        queue: WriteQueue,
        space: Space,
        wanted: Sequence[int],
        held: Container[int],
        more: int,
    ) -> Sequence[int]:
        """Hold and mark the slots that a tier has room for; return them.

        At most `more` of them are not `held` for another tier already.
        """
        if not wanted:
            return ()
        fresh = [slot for slot in wanted if slot not in held]
        beyond = set(fresh[max(0, more) :])
        if beyond:
            queue.skip(space, list(beyond), Miss.FULL)
        taken = queue.admit(space, [slot for slot in wanted if slot not in beyond])
        queue.writes.budget.refund((len(wanted) - len(taken)) * space.slot_bytes)
        self._host.hold(space, taken)
        self._host.mark(space, taken, add=queue.bit)
        return taken

    def _wanted(
        self, queue: WriteQueue, space: Space, slots: Sequence[int], moment: WriteMoment
    ) -> list[int]:
        """Return the slots that a tier lacks and its policy wants now."""
        if self.barred(space.digest):
            return []
        lacking = space.lacking(slots, queue.bit)
        if not lacking:
            return []
        if self.stopping:
            moment = WriteMoment.STOPPING
        return queue.choose(space, lacking, moment, self._clock.monotonic_ns())

    def compute_checksums(self, space: Space, slots: Sequence[int]) -> None:
        """Queue blocks for their checksums, whether or not a tier is to get them."""
        without = space.without_checksum(slots)
        self._host.hold(space, without)
        self.checksums.add(PendingChecksum(space, slot, 0) for slot in without)

    def _begin(self, space: Space, tiers: Mapping[int, int]) -> None:
        """Pass held slots on to the tiers with the given bits, after their checksums."""
        for slot, bits in tiers.items():
            block = PendingChecksum(space, slot, bits)
            if space.checksums[slot] is None:
                self.checksums.add([block])
            else:
                self._pass_on(block)

    def offer_again(self, space: Space, hashes: Sequence[bytes], slots: Sequence[int]) -> None:
        """Offer blocks that an engine presents and that L2 has already (`slots` < 0)."""
        refused = (h for h, slot in zip(hashes, slots, strict=True) if slot < 0)
        if again := space.tiers.lacking(dict.fromkeys(space.find(refused)), self._every):
            self.offer(space, again, WriteMoment.USED)

    def note_promoted(self, space: Space, slots: Sequence[int], source: int) -> None:
        """Record that tier number `source` gave these blocks, and offer them to the tiers above.

        Lower tiers count as having them, except for blocks that they are known to have missed:
        a block goes to all tiers at once, and a lower tier keeps it longer. Asking the tier would
        cost a call per promotion; the next use asks it.
        """
        self.queues[source].history.note_read(space, slots)
        bits = self._every & -(1 << source)
        bits |= asked_bit(bits)
        for queue in self.queues[:source]:
            if not queue.tier.config.fill_from_lower:
                bits |= queue.bit
        below = [
            q for q in self.queues[source + 1 :] if len(q.writes.missed) and q.tier.writes_allowed
        ]
        self._memory.mark(space, slots, add=bits)
        for queue in below:
            # A tier is not asked for a block that it lacks.
            missed = queue.take_missed(space, slots)
            self._memory.mark(space, missed, remove=queue.both)
        if below or bits & self._every != self._every:
            self.offer(space, slots, WriteMoment.STORED)

    # --- ending backups --------------------------------------------------------------

    def give_up(self, covers: Covers) -> None:
        """Take blocks of these namespaces out of all queues.

        Blocks that are being written, or whose checksum is being computed, are `under_way`.
        """
        for renewal in self.renewals:
            renewal.give_up(covers)
        for queue in self.queues:
            queue.history.end_rests()
            given: dict[Space, list[int]] = {}
            kept: deque[tuple[Space, int]] = deque()
            for space, slot in queue.waiting:
                if covers(space.digest):
                    given.setdefault(space, []).append(slot)
                else:
                    kept.append((space, slot))
            queue.waiting = kept
            for space, slots in given.items():
                self._leave_out(queue, space, slots)
        for block in self.checksums.take_out(covers):
            for queue in self.queues:
                if block.tiers & queue.bit:
                    self._leave_out(queue, block.space, [block.slot])

    def under_way(self, covers: Covers) -> bool:
        """Whether a checksum, a write or a query is in progress for blocks of these namespaces."""
        if any(renewal.under_way(covers) for renewal in self.renewals):
            return True
        return self.checksums.under_way(covers) or any(
            covers(space.digest) for queue in self.queues for space, _ in queue.writing
        )

    def holds(self, space: Space) -> bool:
        """Whether blocks of a space are held in L2 until their checksum or write is done."""
        if any(block.space is space for block in self.checksums.pending):
            return True
        return any(
            each is space for queue in self.queues for each, _ in (*queue.writing, *queue.waiting)
        )

    def note_lost(self, space: Space, slots: Sequence[int], bits: int) -> None:
        """Record that the tiers with these bits no longer have these blocks of L2."""
        self._memory.mark(space, slots, remove=bits | asked_bit(bits))

    def withhold(self, space: Space, slots: Sequence[int], bit: int) -> None:
        """Keep a tier from getting these blocks of L2, and from being asked for them."""
        self._memory.mark(space, slots, add=bit, remove=asked_bit(bit))

    def note_filled(self, space: Space, slots: Sequence[int], number: int) -> None:
        """Record that a warming call has written these blocks to tier `number`."""
        queue = self.queues[number]
        # A block that waits for the tier is marked when its own write ends.
        self._memory.mark(space, space.tiers.lacking(slots, queue.bit), add=queue.both)

    def _leave_out(self, queue: WriteQueue, space: Space, slots: Sequence[int]) -> None:
        """Release admitted blocks unwritten; while the daemon stops they are offered again."""
        if self.stopping:
            queue.backlog.add((space, h) for h, _ in space.identities(slots))
        queue.note_missed(space, slots, Miss.FLUSHED)
        self._memory.mark(space, slots, remove=queue.both)
        self._memory.let_go(space, slots)
        queue.finish(space, len(slots))

    # --- stopping --------------------------------------------------------------------

    @property
    def blocks(self) -> int:
        """Blocks that wait for a checksum or a write, or have one in progress, once per tier."""
        return sum(queue.pending_blocks for queue in self.queues)

    @property
    def drainable(self) -> bool:
        """Whether blocks wait for a checksum, or for a tier that takes writes."""
        if self.checksums.busy:
            return True
        if any(renewal.busy and renewal.tier.reads_allowed for renewal in self.renewals):
            return True
        return any(
            (q.pending_blocks or len(q.backlog)) and q.tier.writes_allowed for q in self.queues
        )

    @property
    def left(self) -> int:
        """Blocks that a drain still has to write, once per tier."""
        return self.blocks + sum(len(queue.backlog) for queue in self.queues)

    async def drain(self, end_s: float, enough: asyncio.Event) -> int:
        """Write the blocks of L2 that tiers lack and want; return how many were not written.

        Ends at `end_s` of the loop's clock, when `enough` is set, or when nothing is left.
        """
        left = self._drain_on()
        while self.drainable and asyncio.get_running_loop().time() < end_s:
            if enough.is_set():
                break
            await asyncio.sleep(DRAIN_POLL_S)
            left = self._drain_on()
        return self.blocks + left

    def _drain_on(self) -> int:
        """Queue as many blocks that tiers lack as there is room for.

        Returns how many blocks are not queued yet, or were given up.
        """
        if not self.stopping:
            self.stopping = True
            for queue, renewal in zip(self.queues, self.renewals, strict=True):
                queue.backlog.add(lacked_blocks(self._host.spaces.values(), queue.bit))
                renewal.recheck(queue.history.written_blocks)
        for queue in self.queues:
            for space, block_hash in queue.backlog.take(self.barred, queue.room):
                # The block may have moved or left since.
                if (slot := space.items.get(block_hash)) is not None:
                    wanted = self._wanted(queue, space, [slot], WriteMoment.STOPPING)
                    taken = self._take(queue, space, wanted, (), len(wanted))
                    self._begin(space, dict.fromkeys(taken, queue.bit))
        for queue, renewal in zip(self.queues, self.renewals, strict=True):
            if not (queue.pending_blocks or len(queue.backlog) or renewal.busy):
                renewal.recheck_after(queue.history.written_blocks)
        return sum(queue.backlog.unfinished for queue in self.queues)

    # --- writing ---------------------------------------------------------------------

    def note_capacities(self) -> None:
        """Tell the write budgets their tiers' capacities: a tier may open late, and may change."""
        for queue in self.queues:
            queue.writes.budget.resize(queue.tier.capacity_bytes)

    def _pass_on(self, block: PendingChecksum) -> None:
        """Queue a block, which has its checksum, for the tiers that wait for it."""
        if not block.tiers:
            self._memory.let_go(block.space, [block.slot])
        barred = self.barred(block.space.digest)
        for queue in self.queues:
            if block.tiers & queue.bit and barred:
                self._leave_out(queue, block.space, [block.slot])
            elif block.tiers & queue.bit:
                queue.enqueue(block.space, block.slot)

    async def write(self, queue: WriteQueue) -> None:
        """Write a tier's waiting blocks, forever; `write_batches` such tasks run per tier."""
        while True:
            if not queue.waiting:
                queue.ready.clear()
                await queue.ready.wait()
                continue
            space, slots = queue.next_batch()
            batch = [(space, slot) for slot in slots]
            queue.writing.update(dict.fromkeys(batch))
            try:
                if await queue.may_write():
                    await self._write_batch(queue, space, slots)
                else:
                    queue.skip(space, slots, Miss.AWAY)
                    self._not_written(space, slots, queue)
            finally:
                self._memory.let_go(space, slots)
                for entry in batch:
                    del queue.writing[entry]
                queue.finish(space, len(slots))

    async def _write_batch(self, queue: WriteQueue, space: Space, slots: list[int]) -> None:
        requests = []
        for slot in slots:
            digest = space.checksums[slot]
            assert digest is not None
            requests.append(
                PutRequest(
                    *space.identity(slot),
                    digest,
                    self._memory.arena.view(space, slot),
                    space.namespace.block_bytes,
                )
            )
        outcomes = await queue.tier.put(space.digest, requests)
        kept = (Outcome.STORED, Outcome.PRESENT)
        lost = [slot for slot, outcome in zip(slots, outcomes, strict=True) if outcome not in kept]
        queue.note_written(space, slots, outcomes)
        got = [slot for slot, outcome in zip(slots, outcomes, strict=True) if outcome in kept]
        self._memory.mark(space, got, add=queue.both)
        queue.note_missed(space, lost, Miss.FAILED)
        self._not_written(space, lost, queue)

    def _not_written(self, space: Space, slots: Sequence[int], queue: WriteQueue) -> None:
        if self.stopping:
            queue.backlog.given_up += len(slots)
        self._memory.mark(space, slots, remove=queue.both)

    # --- for tests -------------------------------------------------------------------

    def waits(self, number: int, space: Space, slot: int) -> bool:
        """Whether a block waits for tier `number`, or is being written to it; for tests."""
        return (space, slot) in self._pending(number)

    def _pending(self, number: int) -> list[tuple[Space, int]]:
        queue = self.queues[number]
        before = [(b.space, b.slot) for b in self.checksums.pending if b.tiers & queue.bit]
        return [*before, *queue.waiting, *queue.writing]

    def check(self) -> None:
        """Assert the invariants of masks and queues; for tests."""
        for space in self._host.spaces.values():
            ready = {*space.items.values(), *space.evicting}
            for slot in range(len(space.tiers)):
                bits = space.tiers.of(slot)
                assert not bits & ~(self._every | asked_bit(self._every))
                assert not bits >> TIERS_MAX & ~bits, "a tier is asked for what it does not have"
                assert slot in ready or not bits, "a slot without a block is backed up"
        for number, queue in enumerate(self.queues):
            pending = self._pending(number)
            for space, slot in pending:
                assert space.refs[slot] > 0, "a block that waits for a tier is not held"
                assert space.tiers.of(slot) & queue.both == queue.bit, (
                    "a block waits for a tier that has it"
                )
            assert len(set(pending)) == len(pending) == queue.pending_blocks
            assert queue.pending_bytes == sum(space.slot_bytes for space, _ in pending)
            assert queue.pending_bytes <= queue.bytes_max or queue.pending_blocks == 1
        pinned = sum(queue.pending_bytes for queue in self.queues)
        share = int(self._host.capacity_bytes * PENDING_SHARE_MAX)
        assert pinned <= share or any(queue.pending_blocks == 1 for queue in self.queues)
