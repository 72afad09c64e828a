"""Backup: checksums of blocks in L2, and their way to the storage tiers that lack them.

Each tier's write policy (tierd.core.l3.writes) says which blocks it gets, and when. What waits
is held in L2, so each tier has a bound of its own in bytes. Beyond it, or while the tier
takes no writes, a block is skipped and counted, and offered again when an engine next
presents or uses it, and when it leaves L2. Nothing here ever makes a client wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from tierd.backend import Outcome, PutRequest
from tierd.clock import Clock
from tierd.config import TIERS_MAX
from tierd.core.l2.space import Space
from tierd.core.l2.tier_bits import asked_bit
from tierd.core.l3.writes import Miss, WriteMoment
from tierd.daemon.l2.memory import HostMemory
from tierd.daemon.l3.renewal import Covers as Covers
from tierd.daemon.l3.renewal import Renewal
from tierd.daemon.l3.tier import StorageTier
from tierd.daemon.l3.write_queue import WriteQueue

PENDING_SHARE_MAX: Final = 0.25
"""Share of the capacity that blocks waiting for checksum and backup may pin in L2, of all
tiers together; each has an equal part, so that one that hangs leaves the others theirs.
"""

CHECKSUM_BATCH: Final = 32
"""Blocks summed by one hop to a thread: 64 MiB of 2 MiB blocks take about 3 ms."""

CHECKSUM_PAUSE_S: Final = 0.005
"""Pause before a round of checksums. A hop to a thread and back costs about 0.1 ms."""

DRAIN_LOOK_S: Final = 0.01
"""How often a drain is looked at: a tier's write takes longer as a rule."""


def nobody(digest: bytes) -> bool:
    """Covers no namespace."""
    return False


class _Fresh(NamedTuple):
    """A block that is to get a checksum, and the bits of the tiers that wait for it."""

    space: Space
    slot: int
    tiers: int


class Backups:
    """The queues of all tiers, and the checksums before them.

    What tiers have, or are getting, is in `Space.tiers`.
    """

    def __init__(self, memory: HostMemory, tiers: Sequence[StorageTier], clock: Clock) -> None:
        self._memory = memory
        self._host = memory.host
        self._clock = clock
        self.barred: Covers = nobody
        """Namespaces of which nothing is written now."""
        self.stopping = False
        """What is stored is written at once from now on; `flush` writes the rest."""
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
        self._fresh: deque[_Fresh] = deque()
        self._fresh_ready = asyncio.Event()
        self._summing: list[_Fresh] = []

    def resize(self) -> None:
        """Give each tier its part of the capacity as it is now."""
        share = int(self._host.capacity_bytes * PENDING_SHARE_MAX) // max(1, len(self.queues))
        for queue in self.queues:
            queue.bytes_max = min(queue.tier.config.write_queue, share)

    # --- what is to be backed up -----------------------------------------------------

    def used(self, space: Space, hashes: Sequence[bytes]) -> None:
        """A request asks for blocks, and that has been counted: it may make them worth writing."""
        items, slots = space.items, space.find(hashes)
        for queue in self.queues:
            if len(queue.writes.missed) and len(slots) < len(hashes):
                queue.asked(space, (h for h in hashes if h not in items))
        lacked = space.tiers.lacking(dict.fromkeys(slots), self._every)
        if lacked:
            self.offer(space, lacked, WriteMoment.USED)
        if slots:
            for renewal in self.renewals:
                renewal.used(space, slots)

    def claim(self, space: Space, slots: Sequence[int], count_max: int) -> None:
        """Blocks leave L2, the deepest first: hold those that tiers lack and are to get, and
        write them, and those of which tiers are asked whether they still have them. What a budget
        or a queue has no room for is what lies deepest."""
        upwards = slots[::-1]
        lacked = space.tiers.lacking(upwards, self._every)
        held = self.offer(space, lacked, WriteMoment.EVICTING, count_max) if lacked else ()
        if not self.barred(space.digest):
            for renewal in self.renewals:
                held = {*held, *renewal.claim(space, upwards, held, count_max - len(held))}

    def _missing(self, queue: WriteQueue, space: Space, slots: Sequence[int]) -> None:
        """A tier says that it does not have these blocks any more."""
        self.lost(space, slots, queue.bit)
        queue.dropped(space, slots)
        if self.stopping:
            identities = zip(slots, space.identities(slots), strict=True)
            todo = [(space, slot, block_hash) for slot, (block_hash, _) in identities]
            queue.unflushed.extendleft(reversed(todo))
            return
        evicting = [slot for slot in slots if slot in space.evicting]
        self.offer(space, [slot for slot in slots if slot not in space.evicting], WriteMoment.USED)
        self.offer(space, evicting, WriteMoment.EVICTING)

    def offer(
        self, space: Space, slots: Sequence[int], moment: WriteMoment, count_max: int | None = None
    ) -> Collection[int]:
        """Queue slots for the tiers that lack them and want them, as far as these take more.

        At most `count_max` slots, whatever the number of tiers; which they are.
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
        anyhow: Container[int],
        more: int,
    ) -> Sequence[int]:
        """Hold and mark those of the slots that a tier has room for: of those that are not to
        be held anyhow at most so many `more`."""
        if not wanted:
            return ()
        fresh = [slot for slot in wanted if slot not in anyhow]
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
        """Those of the slots that a tier lacks and that its policy wants now."""
        if self.barred(space.digest):
            return []
        lacking = space.lacking(slots, queue.bit)
        if not lacking:
            return []
        if self.stopping:
            moment = WriteMoment.STOPPING
        return queue.choose(space, lacking, moment, self._clock.monotonic_ns())

    def sum_soon(self, space: Space, slots: Sequence[int]) -> None:
        """Have blocks get their checksums, whether or not a tier is to get them."""
        fresh = space.without_checksum(slots)
        self._host.hold(space, fresh)
        self._fresh.extend(_Fresh(space, slot, 0) for slot in fresh)
        if fresh:
            self._fresh_ready.set()

    def _begin(self, space: Space, tiers: Mapping[int, int]) -> None:
        """Have slots written to the tiers whose bits they come with, after their checksums."""
        for slot, bits in tiers.items():
            if space.checksums[slot] is None:
                self._fresh.append(_Fresh(space, slot, bits))
                self._fresh_ready.set()
            else:
                self._pass_on(_Fresh(space, slot, bits))

    def flush(self) -> int:
        """The daemon stops: begin to write what L2 has and tiers lack, as far as they take more.

        To be called again and again; how many blocks are still to be begun, or have been given
        up meanwhile.
        """
        if not self.stopping:
            self.stopping = True
            for queue, renewal in zip(self.queues, self.renewals, strict=True):
                queue.unflushed.extend(self._unwritten(queue))
                renewal.recheck(queue.stored_blocks)
        for queue in self.queues:
            queue.unbar(self.barred)
            todo = queue.unflushed
            while todo and queue.room(todo[0][0]):
                space, _, block_hash = block = todo.popleft()
                if self.barred(space.digest):
                    queue.kept_back.setdefault(space, []).append(block)
                # It may have moved since, or left.
                elif (slot := space.items.get(block_hash)) is not None:
                    wanted = self._wanted(queue, space, [slot], WriteMoment.STOPPING)
                    taken = self._take(queue, space, wanted, (), len(wanted))
                    self._begin(space, dict.fromkeys(taken, queue.bit))
        for queue, renewal in zip(self.queues, self.renewals, strict=True):
            if not (queue.pending_blocks or queue.undone or renewal.busy):
                renewal.recheck_after(queue.stored_blocks)
        return sum(queue.undone + queue.given_up for queue in self.queues)

    def _unwritten(self, queue: WriteQueue) -> list[tuple[Space, int, bytes]]:
        """What a tier lacks of L2, what is used most first, and parents before their children, or
        nearly so."""
        lacking = [
            (space, slot, block_hash)
            for space in self._host.spaces.values()
            for block_hash, slot in space.items.items()
            if not space.tiers.of(slot) & queue.bit
        ]
        lacking.sort(key=lambda todo: -todo[0].reuse.uses(todo[2]))
        return lacking

    def offer_again(self, space: Space, hashes: Sequence[bytes], slots: Sequence[int]) -> None:
        """Offer blocks that an engine presents and that are there already (`slots` < 0)."""
        refused = (h for h, slot in zip(hashes, slots, strict=True) if slot < 0)
        if again := space.tiers.lacking(dict.fromkeys(space.find(refused)), self._every):
            self.offer(space, again, WriteMoment.USED)

    def promoted(self, space: Space, slots: Sequence[int], source: int) -> None:
        """Note that tier number `source` had these blocks, and fill those above that want them.

        Those below count as having them, but for what they are known to have missed: a block
        goes to all tiers at once, and a lower one keeps it longer. To ask would cost a call
        for each promotion; the next use does.
        """
        self.queues[source].read(space, slots)
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
            # What it lacks it is not to be asked for.
            lacked = queue.lacked(space, slots)
            self._memory.mark(space, lacked, remove=queue.both)
        if below or bits & self._every != self._every:
            self.offer(space, slots, WriteMoment.STORED)

    # --- what is not to be backed up any more ----------------------------------------

    def give_up(self, covers: Covers) -> None:
        """Blocks of these namespaces that wait for tiers wait no longer. Those that are being
        written, or summed, are `under_way`."""
        for renewal in self.renewals:
            renewal.give_up(covers)
        for queue in self.queues:
            queue.resting.clear()
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
        fresh, self._fresh = self._fresh, deque()
        for block in fresh:
            if not block.tiers or not covers(block.space.digest):
                self._fresh.append(block)
            else:
                for queue in self.queues:
                    if block.tiers & queue.bit:
                        self._leave_out(queue, block.space, [block.slot])

    def under_way(self, covers: Covers) -> bool:
        """Whether blocks of these namespaces are being summed, written, or asked for on their way
        out, just now."""
        if any(renewal.under_way(covers) for renewal in self.renewals):
            return True
        summing = any(fresh.tiers and covers(fresh.space.digest) for fresh in self._summing)
        return summing or any(
            covers(space.digest) for queue in self.queues for space, _ in queue.writing
        )

    def holds(self, space: Space) -> bool:
        """Whether blocks of a space stay in L2 until they are summed up or written."""
        if any(fresh.space is space for fresh in (*self._fresh, *self._summing)):
            return True
        return any(
            each is space for queue in self.queues for each, _ in (*queue.writing, *queue.waiting)
        )

    def lost(self, space: Space, slots: Sequence[int], bits: int) -> None:
        """Tiers, by their bits, do not have these blocks of L2 any more."""
        self._memory.mark(space, slots, remove=bits | asked_bit(bits))

    def withhold(self, space: Space, slots: Sequence[int], bit: int) -> None:
        """A tier is not to get these blocks of L2, nor to be asked for them."""
        self._memory.mark(space, slots, add=bit, remove=asked_bit(bit))

    def wrote(self, space: Space, slots: Sequence[int], number: int) -> None:
        """Tier `number` has got these blocks from somebody else."""
        queue = self.queues[number]
        # One that waits for the tier counts as its own write ends.
        self._memory.mark(space, space.tiers.lacking(slots, queue.bit), add=queue.both)

    def _leave_out(self, queue: WriteQueue, space: Space, slots: Sequence[int]) -> None:
        """Blocks that were to wait for a tier do not; a stop has them wait again afterwards."""
        if self.stopping:
            queue.unflushed.extend((space, slot, space.identity(slot)[0]) for slot in slots)
        queue.lacks(space, slots, Miss.FLUSHED)
        self._memory.mark(space, slots, remove=queue.both)
        self._memory.let_go(space, slots)
        queue.let_go(space, len(slots))

    # --- what waits ------------------------------------------------------------------

    @property
    def blocks(self) -> int:
        """Blocks that wait for a checksum or a backup, in flight included, once a tier."""
        return sum(queue.pending_blocks for queue in self.queues)

    @property
    def drainable(self) -> bool:
        """Whether blocks wait for a checksum, or for a tier that takes writes."""
        if self._fresh or self._summing:
            return True
        if any(renewal.busy and renewal.tier.reads_allowed for renewal in self.renewals):
            return True
        return any((q.pending_blocks or q.undone) and q.tier.writes_allowed for q in self.queues)

    @property
    def left(self) -> int:
        """Blocks that a drain is still to write, once a tier."""
        return self.blocks + sum(queue.undone for queue in self.queues)

    async def drain(self, end_s: float, enough: asyncio.Event) -> int:
        """Write what tiers are to get and lack, until `end_s` of the loop's clock at most, and not
        once there is `enough`; the count left undone."""
        left = self.flush()
        while self.drainable and asyncio.get_running_loop().time() < end_s:
            if enough.is_set():
                break
            await asyncio.sleep(DRAIN_LOOK_S)
            left = self.flush()
        return self.blocks + left

    def note_capacities(self) -> None:
        """Tell the write budgets what their tiers hold, which open late and may change."""
        for queue in self.queues:
            queue.writes.budget.resize(queue.tier.capacity_bytes)

    # --- work ------------------------------------------------------------------------

    async def compute_checksums(self) -> None:
        """Compute missing checksums and pass the blocks on to the tiers, for ever."""
        while True:
            await self._fresh_ready.wait()
            self._fresh_ready.clear()
            # Nobody waits for a checksum: a pause makes one batch of many small commits.
            await asyncio.sleep(CHECKSUM_PAUSE_S)
            while self._fresh:
                count = min(CHECKSUM_BATCH, len(self._fresh))
                self._summing = [self._fresh.popleft() for _ in range(count)]
                await self._sum(self._summing)
                for fresh in self._summing:
                    self._pass_on(fresh)
                self._summing = []

    async def _sum(self, batch: Iterable[_Fresh]) -> None:
        fresh = ((f.space, f.slot) for f in batch if f.space.checksums[f.slot] is None)
        missing = list(dict.fromkeys(fresh))
        by_space: dict[Space, dict[int, bytes]] = {}
        sums = await self._memory.checksums(missing)
        for (space, slot), digest in zip(missing, sums, strict=True):
            by_space.setdefault(space, {})[slot] = digest
        for space, known in by_space.items():
            self._memory.note_checksums(space, known)

    def _pass_on(self, fresh: _Fresh) -> None:
        if not fresh.tiers:
            self._memory.let_go(fresh.space, [fresh.slot])
        barred = self.barred(fresh.space.digest)
        for queue in self.queues:
            if fresh.tiers & queue.bit and barred:
                self._leave_out(queue, fresh.space, [fresh.slot])
            elif fresh.tiers & queue.bit:
                queue.put(fresh.space, fresh.slot)

    async def write(self, queue: WriteQueue) -> None:
        """Write what waits for a tier, for ever; as many of these run as it has `write_batches`."""
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
                queue.let_go(space, len(slots))

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
        queue.got(space, slots, outcomes)
        got = [slot for slot, outcome in zip(slots, outcomes, strict=True) if outcome in kept]
        self._memory.mark(space, got, add=queue.both)
        queue.lacks(space, lost, Miss.FAILED)
        self._not_written(space, lost, queue)

    def _not_written(self, space: Space, slots: Sequence[int], queue: WriteQueue) -> None:
        if self.stopping:
            queue.given_up += len(slots)
        self._memory.mark(space, slots, remove=queue.both)

    # --- proof -----------------------------------------------------------------------

    def waits(self, number: int, space: Space, slot: int) -> bool:
        """Whether a block waits for tier `number`, or is being written to it; for tests."""
        return (space, slot) in self._pending(number)

    def _pending(self, number: int) -> list[tuple[Space, int]]:
        queue = self.queues[number]
        fresh = [(f.space, f.slot) for f in (*self._fresh, *self._summing) if f.tiers & queue.bit]
        return [*fresh, *queue.waiting, *queue.writing]

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
