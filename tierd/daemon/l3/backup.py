"""Backup: checksums of blocks in L2, and their way to the storage tiers that lack them.

Each tier's write policy (tierd.core.writes) says which blocks it gets, and when. What waits
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
from tierd.core.space import Space
from tierd.core.writes import LAST, MISSED_MAX, Miss, WriteMoment, Writes
from tierd.daemon.l2.memory import HostMemory
from tierd.daemon.l3.renewal import Covers as Covers
from tierd.daemon.l3.renewal import Renewal, asked_bit
from tierd.daemon.l3.tier import StorageTier, batch_blocks
from tierd.eviction.policy import Ghosts

PENDING_SHARE_MAX: Final = 0.25
"""Share of the capacity that blocks waiting for checksum and backup may pin in L2, of all
tiers together; each has an equal part, so that one that hangs leaves the others theirs.
"""

WRITE_PAUSE_S: Final = 0.02
"""How often a tier that takes no writes is looked at again while something waits for it."""

CHECKSUM_BATCH: Final = 32
"""Blocks summed by one hop to a thread: 64 MiB of 2 MiB blocks take about 3 ms."""

CHECKSUM_PAUSE_S: Final = 0.005
"""Pause before a round of checksums. A hop to a thread and back costs about 0.1 ms."""

UNREAD: Final = 1
"""Bit of what is known of a block that a tier took: nobody has read it yet."""

REST_S: Final = 300
"""A block that a tier drops sooner after it took or gave it is not written again for so long while
it stays in L2: what uses it may be more than the tier can hold, and each use would be a write."""


def nobody(digest: bytes) -> bool:
    """Covers no namespace."""
    return False


class WriteQueue:
    """Blocks that one tier is to get. Each is held once for it, from `admit` to `let_go`."""

    def __init__(self, tier: StorageTier, bit: int, bytes_max: int, l2_bytes: int) -> None:
        self.tier = tier
        self.writes = Writes(tier.config, l2_bytes)
        self.bit = bit
        self.both = bit | asked_bit(bit)
        self.bytes_max = bytes_max
        self.pending_bytes = 0
        self.pending_blocks = 0
        """Waiting for a checksum, waiting to be written, and being written."""
        self.waiting: deque[tuple[Space, int]] = deque()
        self.writing: dict[tuple[Space, int], None] = {}
        self.stored_blocks = 0
        """Blocks written."""
        self.had = Ghosts(MISSED_MAX)
        """Keys of blocks that the tier took or gave lately, with when, in seconds of the loop's
        clock, and UNREAD."""
        self.unflushed: deque[tuple[Space, int, bytes]] = deque()
        """What it is still to be offered before the daemon stops."""
        self.kept_back: dict[Space, list[tuple[Space, int, bytes]]] = {}
        """The same, but of namespaces of which a flush has nothing written now."""
        self.given_up = 0
        """Blocks that waited for it since then and were not written."""
        self.resting: dict[bytes, int] = {}
        """Keys of blocks that it dropped soon, and until when they are not written again."""
        self.ready = asyncio.Event()
        self._stopped_s: float | None = None

    @property
    def undone(self) -> int:
        """Blocks that it is still to be offered before the daemon stops."""
        return len(self.unflushed) + sum(map(len, self.kept_back.values()))

    def unbar(self, barred: Covers) -> None:
        """Offer what is kept back of namespaces that are not `barred` any more."""
        for space in [space for space in self.kept_back if not barred(space.digest)]:
            self.unflushed.extendleft(reversed(self.kept_back.pop(space)))

    def room(self, space: Space) -> int:
        """Blocks of a space that may wait in addition."""
        if not self.tier.writes_allowed:
            return 0
        count = (self.bytes_max - self.pending_bytes) // space.slot_bytes
        # A tier whose share is less than one block still gets one at a time.
        return max(0 if self.pending_blocks else 1, count)

    def admit(self, space: Space, lacking: Sequence[int]) -> Sequence[int]:
        """As many of the slots as may wait, from the first on; the others are counted."""
        if self.tier.writes_allowed:
            self._stopped_s = None
        taken = lacking[: self.room(space)]
        self.skip(
            space, lacking[len(taken) :], Miss.FULL if self.tier.writes_allowed else Miss.AWAY
        )
        self.pending_bytes += len(taken) * space.slot_bytes
        self.pending_blocks += len(taken)
        return taken

    def skip(self, space: Space, slots: Sequence[int], why: Miss) -> None:
        """Count blocks that the tier does not get this time, or not at all because they leave L2,
        and remember that it lacks them."""
        if slots:
            dropped = sum(slot in space.leaving for slot in slots)
            self.tier.counters["backup_skipped_total"] += len(slots) - dropped
            self.tier.counters["backup_dropped_total"] += dropped
            self.lacks(space, slots, why)

    def choose(
        self, space: Space, lacking: Sequence[int], moment: WriteMoment, now_ns: int
    ) -> list[int]:
        """Those of the slots, all of which the tier lacks, that its policy wants now."""
        if self.resting and moment is WriteMoment.USED:
            lacking = [slot for slot in lacking if not self._rests(_key(space, slot))]
        hashes = [space.identity(slot)[0] for slot in lacking]
        places = self.writes.choose(
            moment, space.digest, hashes, space.reuse, space.slot_bytes, now_ns
        )
        if moment in LAST:
            self.tier.counters["backup_refused_total"] += len(lacking) - len(places)
        return [lacking[place] for place in places]

    def dropped(self, space: Space, slots: Iterable[int]) -> None:
        """The tier has dropped these blocks by itself."""
        now, had = _now(), self.had.records
        for key in (_key(space, slot) for slot in slots):
            until = (had.get(key, 0) >> 1) + REST_S
            if key in had and now < until and len(self.resting) < MISSED_MAX:
                self.resting[key] = until

    def _rests(self, key: bytes) -> bool:
        if self.resting.get(key, 0) > _now():
            return True
        self.resting.pop(key, None)
        return False

    def lacks(self, space: Space, slots: Iterable[int], why: Miss) -> None:
        """Remember that the tier did not get these blocks, though its policy wanted them."""
        hashes = [space.identity(slot)[0] for slot in slots]
        self.writes.missed.add(space.digest, hashes, why)

    def got(self, space: Space, slots: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Note how the writes of a batch ended."""
        now, records = _now() << 1, self.had.records
        for slot, outcome in zip(slots, outcomes, strict=True):
            self.lacked(space, slot)
            key = _key(space, slot)
            if outcome is Outcome.STORED:
                self.stored_blocks += 1
                self.had.put(key, now | UNREAD)
            elif outcome is Outcome.PRESENT:
                self.had.put(key, now | records.get(key, 0) & UNREAD)
        unwritten = len(outcomes) - outcomes.count(Outcome.STORED)
        self.writes.budget.refund(unwritten * space.slot_bytes)

    def lacked(self, space: Space, slot: int) -> bool:
        """Whether the tier is known not to have got a block; forgets it."""
        return self.writes.missed.remove(space.digest, space.identity(slot)[0])

    def read(self, space: Space, slots: Iterable[int]) -> None:
        """Blocks came from the tier: count those whose write this is the first use of."""
        now, records = _now() << 1, self.had.records
        for slot in slots:
            key = _key(space, slot)
            if records.get(key, 0) & UNREAD:
                self.tier.counters["written_and_read_total"] += 1
            self.had.put(key, now)

    def asked(self, space: Space, hashes: Iterable[bytes]) -> None:
        """A request asks for blocks that are not in L2: count those that were refused."""
        lost = self.writes.missed.lost(space.digest, hashes)
        self.tier.counters["refused_hits_total"] += lost

    def put(self, space: Space, slot: int) -> None:
        """Let an admitted block, which has a checksum, wait to be written."""
        self.waiting.append((space, slot))
        self.ready.set()

    def next_batch(self) -> tuple[Space, list[int]]:
        """Waiting slots of one space, within the limits of a batch. There must be one."""
        space, slot = self.waiting.popleft()
        slots = [slot]
        limit = batch_blocks(space)
        while self.waiting and self.waiting[0][0] is space and len(slots) < limit:
            slots.append(self.waiting.popleft()[1])
        return space, slots

    async def may_write(self) -> bool:
        """Whether the tier takes writes, if not now then before long; no longer than that."""
        loop = asyncio.get_running_loop()
        while not self.tier.writes_allowed:
            if self._stopped_s is None:
                self._stopped_s = loop.time()
            # Long enough for the first probe: a short stall costs no backups.
            config = self.tier.config
            if loop.time() - self._stopped_s >= (config.deadline_ms + config.probe_ms) / 1000:
                return False
            await asyncio.sleep(WRITE_PAUSE_S)
        self._stopped_s = None
        return True

    def let_go(self, space: Space, count: int) -> None:
        """`count` admitted blocks are written, or given up."""
        self.pending_bytes -= count * space.slot_bytes
        self.pending_blocks -= count

    def status(self) -> dict[str, object]:
        """What STATUS shows of the queue."""
        return {
            "backup_queue": self.pending_blocks,
            "backup_queue_bytes": self.pending_bytes,
            "backup_queue_bytes_max": self.bytes_max,
            "write_policy": self.writes.policy.value,
            "write_demand": round(self.writes.budget.demand, 3),
            "written_unread_share": self._unread_share(),
        }

    def _unread_share(self) -> float:
        """Share of the blocks written, since the daemon's start, that it has never read."""
        written = self.stored_blocks
        read = self.tier.counters["written_and_read_total"]
        return round(1 - read / written, 4) if written else 0.0


class _Fresh(NamedTuple):
    """A block that is to get a checksum, and the bits of the tiers that wait for it."""

    space: Space
    slot: int
    tiers: int


class Backups:
    """The queues of all tiers, and the checksums before them.

    Bit i of `Space.backed_up` stands for tier i. It is set while the tier has the block, as
    far as is known, while the block waits for it, and where the tier is not meant to get it. Beside
    it `asked_bit` is set in the first case alone: then the tier is asked now and then.
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
            self._host.claim = self.leaving
            self._host.claims_all = any(queue.writes.when_leaving for queue in self.queues)
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
        items, backed_up, every = space.chain.items, space.backed_up, self._every
        slots = [slot for h in hashes if (slot := items.get(h)) is not None]
        for queue in self.queues:
            if len(queue.writes.missed) and len(slots) < len(hashes):
                queue.asked(space, (h for h in hashes if h not in items))
        lacked = [slot for slot in dict.fromkeys(slots) if backed_up[slot] & every != every]
        if lacked:
            self.offer(space, lacked, WriteMoment.USED)
        if slots:
            for renewal in self.renewals:
                renewal.used(space, slots)

    def leaving(self, space: Space, slots: Sequence[int], count_max: int) -> None:
        """Blocks leave L2, the deepest first: hold those that tiers lack and are to get, and
        write them, and those of which tiers are asked whether they still have them. What a budget
        or a queue has no room for is what lies deepest."""
        every, upwards = self._every, slots[::-1]
        lacked = [slot for slot in upwards if space.backed_up[slot] & every != every]
        held = self.offer(space, lacked, WriteMoment.LEAVING, count_max) if lacked else ()
        if not self.barred(space.digest):
            for renewal in self.renewals:
                held = {*held, *renewal.leaving(space, upwards, held, count_max - len(held))}

    def _missing(self, queue: WriteQueue, space: Space, slots: Sequence[int]) -> None:
        """A tier says that it does not have these blocks any more."""
        self.lost(space, slots, queue.bit)
        queue.dropped(space, slots)
        if self.stopping:
            todo = [(space, slot, space.identity(slot)[0]) for slot in slots]
            queue.unflushed.extendleft(reversed(todo))
            return
        leaving = [slot for slot in slots if slot in space.leaving]
        self.offer(space, [slot for slot in slots if slot not in space.leaving], WriteMoment.USED)
        self.offer(space, leaving, WriteMoment.LEAVING)

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
        for slot in taken:
            space.backed_up[slot] |= queue.bit
        return taken

    def _wanted(
        self, queue: WriteQueue, space: Space, slots: Sequence[int], moment: WriteMoment
    ) -> list[int]:
        """Those of the slots that a tier lacks and that its policy wants now."""
        if self.barred(space.digest):
            return []
        backed_up, bit = space.backed_up, queue.bit
        unproven, dropped = space.unproven, space.dropped
        lacking = [
            slot
            for slot in slots
            if not backed_up[slot] & bit and slot not in unproven and slot not in dropped
        ]
        if not lacking:
            return []
        if self.stopping:
            moment = WriteMoment.STOPPING
        return queue.choose(space, lacking, moment, self._clock.monotonic_ns())

    def sum_soon(self, space: Space, slots: Sequence[int]) -> None:
        """Have blocks get their checksums, whether or not a tier is to get them."""
        fresh = [slot for slot in slots if space.checksums[slot] is None]
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
                elif (slot := space.chain.items.get(block_hash)) is not None:
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
            for block_hash, slot in space.chain.items.items()
            if not space.backed_up[slot] & queue.bit
        ]
        lacking.sort(key=lambda todo: -todo[0].reuse.uses(todo[2]))
        return lacking

    def offer_again(self, space: Space, hashes: Sequence[bytes], slots: Sequence[int]) -> None:
        """Offer blocks that an engine presents and that are there already (`slots` < 0)."""
        items, backed_up, every = space.chain.items, space.backed_up, self._every
        again: dict[int, None] = {}
        for block_hash, slot in zip(hashes, slots, strict=True):
            if slot < 0:
                resident = items.get(block_hash)
                if resident is not None and backed_up[resident] & every != every:
                    again[resident] = None
        if again:
            self.offer(space, list(again), WriteMoment.USED)

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
        for slot in slots:
            lacking = sum(queue.both for queue in below if queue.lacked(space, slot))
            space.backed_up[slot] = bits & ~lacking
            self._memory.note_tiers(space, [slot], add=bits & ~lacking)
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
        bits |= asked_bit(bits)
        for slot in slots:
            space.backed_up[slot] &= ~bits
        self._memory.note_tiers(space, slots, remove=bits)

    def withhold(self, space: Space, slots: Sequence[int], bit: int) -> None:
        """A tier is not to get these blocks of L2, nor to be asked for them."""
        for slot in slots:
            space.backed_up[slot] = space.backed_up[slot] & ~asked_bit(bit) | bit
        self._memory.note_tiers(space, slots, add=bit, remove=asked_bit(bit))

    def wrote(self, space: Space, slots: Sequence[int], number: int) -> None:
        """Tier `number` has got these blocks from somebody else."""
        queue = self.queues[number]
        # One that waits for the tier counts as its own write ends.
        fresh = [slot for slot in slots if not space.backed_up[slot] & queue.bit]
        for slot in fresh:
            space.backed_up[slot] |= queue.both
        self._memory.note_tiers(space, fresh, add=queue.both)

    def _leave_out(self, queue: WriteQueue, space: Space, slots: Sequence[int]) -> None:
        """Blocks that were to wait for a tier do not; a stop has them wait again afterwards."""
        if self.stopping:
            queue.unflushed.extend((space, slot, space.identity(slot)[0]) for slot in slots)
        queue.lacks(space, slots, Miss.FLUSHED)
        self._unmark(space, slots, queue)
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

    def note_capacities(self) -> None:
        """Tell the write budgets what their tiers hold, which open late and may change."""
        for queue in self.queues:
            queue.writes.budget.resize(queue.tier.capacity_bytes)

    # --- work ------------------------------------------------------------------------

    async def sum_up(self) -> None:
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
        sums = await self._memory.checksums(missing)
        for (space, slot), digest in zip(missing, sums, strict=True):
            space.checksums[slot] = digest
            # The ledger has forgotten what was dropped meanwhile, and is not to learn it again.
            if slot not in space.dropped:
                self._memory.record(space, slot)

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
        for slot in got:
            space.backed_up[slot] |= queue.both
        self._memory.note_tiers(space, got, add=queue.both)
        queue.lacks(space, lost, Miss.FAILED)
        self._not_written(space, lost, queue)

    def _not_written(self, space: Space, slots: Sequence[int], queue: WriteQueue) -> None:
        if self.stopping:
            queue.given_up += len(slots)
        self._unmark(space, slots, queue)

    def _unmark(self, space: Space, slots: Sequence[int], queue: WriteQueue) -> None:
        for slot in slots:
            space.backed_up[slot] &= ~queue.both
        self._memory.note_tiers(space, slots, remove=queue.both)

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
            ready = {*space.chain.items.values(), *space.leaving}
            for slot, bits in enumerate(space.backed_up):
                assert not bits & ~(self._every | asked_bit(self._every))
                assert not bits >> TIERS_MAX & ~bits, "a tier is asked for what it does not have"
                assert slot in ready or not bits, "a slot without a block is backed up"
        for number, queue in enumerate(self.queues):
            pending = self._pending(number)
            for space, slot in pending:
                assert space.refs[slot] > 0, "a block that waits for a tier is not held"
                assert space.backed_up[slot] & queue.both == queue.bit, (
                    "a block waits for a tier that has it"
                )
            assert len(set(pending)) == len(pending) == queue.pending_blocks
            assert queue.pending_bytes == sum(space.slot_bytes for space, _ in pending)
            assert queue.pending_bytes <= queue.bytes_max or queue.pending_blocks == 1
        pinned = sum(queue.pending_bytes for queue in self.queues)
        share = int(self._host.capacity_bytes * PENDING_SHARE_MAX)
        assert pinned <= share or any(queue.pending_blocks == 1 for queue in self.queues)


def _now() -> int:
    return int(asyncio.get_running_loop().time())


def _key(space: Space, slot: int) -> bytes:
    return space.digest + space.identity(slot)[0]
