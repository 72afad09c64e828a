"""Backup: checksums of blocks in L2, and their way to the storage tiers that lack them.

What waits is held in L2, so each tier has a bound of its own in bytes. Beyond it, or while
the tier takes no writes, a block is skipped and counted, and offered again when an engine
next presents it. Nothing here ever makes a client wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from tierd.backend import Outcome, PutRequest, checksum
from tierd.core.host import Space
from tierd.daemon.memory import HostMemory
from tierd.daemon.tier import StorageTier, batch_blocks

PENDING_SHARE_MAX: Final = 0.25
"""Share of the capacity that blocks waiting for checksum and backup may pin in L2, of all
tiers together; each has an equal part, so that one that hangs leaves the others theirs.
"""

WRITE_PAUSE_S: Final = 0.02
"""How often a tier that takes no writes is looked at again while something waits for it."""

MISSED_MAX: Final = 1 << 16
"""Blocks remembered a tier, the latest ones, as not written; each costs about 200 bytes."""

CHECKSUM_BATCH: Final = 32
"""Blocks summed by one hop to a thread: 64 MiB of 2 MiB blocks take about 3 ms."""

CHECKSUM_PAUSE_S: Final = 0.005
"""Pause before a round of checksums. A hop to a thread and back costs about 0.1 ms."""


class WriteQueue:
    """Blocks that one tier is to get. Each is held once for it, from `admit` to `let_go`."""

    def __init__(self, tier: StorageTier, bit: int, bytes_max: int) -> None:
        self.tier = tier
        self.bit = bit
        self.bytes_max = bytes_max
        self.pending_bytes = 0
        self.pending_blocks = 0
        """Waiting for a checksum, waiting to be written, and being written."""
        self.waiting: deque[tuple[Space, int]] = deque()
        self.writing: dict[tuple[Space, int], None] = {}
        self.missed: dict[bytes, None] = {}
        """Keys of blocks that the tier was to get and did not."""
        self.ready = asyncio.Event()
        # Long enough for the first probe: a short stall costs no backups.
        self._patience_s = (tier.config.deadline_ms + tier.config.probe_ms) / 1000
        self._stopped_s: float | None = None

    def admit(self, space: Space, lacking: Sequence[int]) -> Sequence[int]:
        """As many of the slots as may wait, from the first on; the others are counted."""
        count = 0
        if self.tier.writes_allowed:
            self._stopped_s = None
            count = (self.bytes_max - self.pending_bytes) // space.slot_bytes
            if not self.pending_blocks:
                # A tier whose share is less than one block still gets one at a time.
                count = max(1, count)
        taken = lacking[: max(0, count)]
        self.skip(space, lacking[len(taken) :])
        self.pending_bytes += len(taken) * space.slot_bytes
        self.pending_blocks += len(taken)
        return taken

    def skip(self, space: Space, slots: Sequence[int]) -> None:
        """Count blocks that the tier does not get this time, and remember that it lacks them."""
        if slots:
            self.tier.counters["backup_skipped_total"] += len(slots)
            self.lacks(space, slots)

    def lacks(self, space: Space, slots: Iterable[int]) -> None:
        """Remember that the tier did not get these blocks, as long as there is room."""
        for slot in slots:
            self.missed[_key(space, slot)] = None
        while len(self.missed) > MISSED_MAX:
            del self.missed[next(iter(self.missed))]

    def lacked(self, space: Space, slot: int) -> bool:
        """Whether the tier is known not to have got a block; forgets it."""
        return self.missed.pop(_key(space, slot), self) is None

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
            if loop.time() - self._stopped_s >= self._patience_s:
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
        }


class _Fresh(NamedTuple):
    """A block that is to get a checksum, and the bits of the tiers that wait for it."""

    space: Space
    slot: int
    tiers: int


class Backups:
    """The queues of all tiers, and the checksums before them.

    Bit i of `Space.backed_up` stands for tier i. It is set while the tier has the block, as
    far as is known, while the block waits for it, and where the tier is not meant to get it.
    """

    def __init__(self, memory: HostMemory, tiers: Sequence[StorageTier]) -> None:
        self._memory = memory
        self._host = memory.host
        share = int(self._host.capacity_bytes * PENDING_SHARE_MAX) // max(1, len(tiers))
        self.queues = [
            WriteQueue(tier, 1 << i, min(tier.config.write_queue, share))
            for i, tier in enumerate(tiers)
        ]
        self._every = (1 << len(tiers)) - 1
        self._fresh: deque[_Fresh] = deque()
        self._fresh_ready = asyncio.Event()
        self._summing: list[_Fresh] = []

    # --- what is to be backed up -----------------------------------------------------

    def offer(self, space: Space, slots: Sequence[int]) -> None:
        """Queue READY slots for the tiers that lack them, as far as these take more."""
        backed_up = space.backed_up
        tiers: dict[int, int] = {}
        for queue in self.queues:
            bit = queue.bit
            lacking = [slot for slot in slots if not backed_up[slot] & bit]
            if not lacking:
                continue
            taken = queue.admit(space, lacking)
            self._host.hold(space, taken)
            for slot in taken:
                backed_up[slot] |= bit
                tiers[slot] = tiers.get(slot, 0) | bit
        for slot, bits in tiers.items():
            if space.checksums[slot] is None:
                self._fresh.append(_Fresh(space, slot, bits))
                self._fresh_ready.set()
            else:
                self._pass_on(_Fresh(space, slot, bits))

    def offer_again(self, space: Space, hashes: Sequence[bytes], slots: Sequence[int]) -> None:
        """Offer blocks that an engine presents and that are there already (`slots` < 0)."""
        items, backed_up, every = space.chain.items, space.backed_up, self._every
        again: dict[int, None] = {}
        for block_hash, slot in zip(hashes, slots, strict=True):
            if slot < 0:
                resident = items.get(block_hash)
                if resident is not None and backed_up[resident] != every:
                    again[resident] = None
        if again:
            self.offer(space, list(again))

    def promoted(self, space: Space, slots: Sequence[int], source: int) -> None:
        """Note that tier number `source` had these blocks, and fill those above that want them.

        Those below count as having them, but for what they are known to have missed: a block
        goes to all tiers at once, and a lower one keeps it longer. To ask would cost a call
        for each promotion.
        """
        bits = self._every & -(1 << source)
        for queue in self.queues[:source]:
            if not queue.tier.config.fill_from_lower:
                bits |= queue.bit
        below = [q for q in self.queues[source + 1 :] if q.missed and q.tier.writes_allowed]
        for slot in slots:
            lacking = sum(queue.bit for queue in below if queue.lacked(space, slot))
            space.backed_up[slot] = bits & ~lacking
        if below or bits != self._every:
            self.offer(space, slots)

    # --- what waits ------------------------------------------------------------------

    @property
    def blocks(self) -> int:
        """Blocks that wait for a checksum or a backup, in flight included, once a tier."""
        return sum(queue.pending_blocks for queue in self.queues)

    @property
    def drainable(self) -> bool:
        """Whether blocks wait for a tier that takes writes."""
        return any(q.pending_blocks and q.tier.writes_allowed for q in self.queues)

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
        missing = [(f.space, f.slot) for f in batch if f.space.checksums[f.slot] is None]
        views = [self._memory.payload(space, slot) for space, slot in missing]
        sums = await self._memory.in_thread(_checksums, views)
        for (space, slot), digest in zip(missing, sums, strict=True):
            space.checksums[slot] = digest
            self._memory.record(space, slot)

    def _pass_on(self, fresh: _Fresh) -> None:
        for queue in self.queues:
            if fresh.tiers & queue.bit:
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
                    queue.skip(space, slots)
                    self._unmark(space, slots, queue)
            finally:
                self._host.unhold(space, slots)
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
                    space.chain.hash_of(slot),
                    space.chain.parent_of(slot),
                    digest,
                    self._memory.arena.view(space, slot),
                    space.namespace.block_bytes,
                )
            )
        outcomes = await queue.tier.put(space.digest, requests)
        kept = (Outcome.STORED, Outcome.PRESENT)
        lost = [slot for slot, outcome in zip(slots, outcomes, strict=True) if outcome not in kept]
        queue.lacks(space, lost)
        self._unmark(space, lost, queue)

    def _unmark(self, space: Space, slots: Sequence[int], queue: WriteQueue) -> None:
        for slot in slots:
            space.backed_up[slot] &= ~queue.bit

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
            ready = set(space.chain.items.values())
            for slot, bits in enumerate(space.backed_up):
                assert 0 <= bits <= self._every
                assert slot in ready or not bits, "a slot without a block is backed up"
        for number, queue in enumerate(self.queues):
            pending = self._pending(number)
            for space, slot in pending:
                assert space.refs[slot] > 0, "a block that waits for a tier is not held"
                assert space.backed_up[slot] & queue.bit, "a block waits for a tier that has it"
            assert len(set(pending)) == len(pending) == queue.pending_blocks
            assert queue.pending_bytes == sum(space.slot_bytes for space, _ in pending)
            assert queue.pending_bytes <= queue.bytes_max or queue.pending_blocks == 1
        pinned = sum(queue.pending_bytes for queue in self.queues)
        share = int(self._host.capacity_bytes * PENDING_SHARE_MAX)
        assert pinned <= share or any(queue.pending_blocks == 1 for queue in self.queues)


def _key(space: Space, slot: int) -> bytes:
    return space.digest + space.chain.hash_of(slot)


def _checksums(views: Sequence[memoryview]) -> list[bytes]:
    return [checksum(view) for view in views]
