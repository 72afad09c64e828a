"""The write queue of one storage tier: what it is to get, and what it had.

Its bound in bytes is the tier's alone, so that a tier that hangs leaves the others theirs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from tierd.backend import Outcome
from tierd.core.l2.space import Space
from tierd.core.l2.tier_bits import asked_bit
from tierd.core.l3.writes import LAST, MISSED_MAX, Miss, WriteMoment, Writes
from tierd.daemon.l3.renewal import Covers
from tierd.daemon.l3.tier import StorageTier, batch_blocks
from tierd.eviction.policy import Ghosts

WRITE_PAUSE_S: Final = 0.02
"""How often a tier that takes no writes is looked at again while something waits for it."""

UNREAD: Final = 1
"""Bit of what is known of a block that a tier took: nobody has read it yet."""

REST_S: Final = 300
"""A block that a tier drops sooner after it took or gave it is not written again for so long while
it stays in L2: what uses it may be more than the tier can hold, and each use would be a write."""


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
            dropped = sum(slot in space.evicting for slot in slots)
            self.tier.counters["backup_skipped_total"] += len(slots) - dropped
            self.tier.counters["backup_dropped_total"] += dropped
            self.lacks(space, slots, why)

    def choose(
        self, space: Space, lacking: Sequence[int], moment: WriteMoment, now_ns: int
    ) -> list[int]:
        """Those of the slots, all of which the tier lacks, that its policy wants now."""
        if self.resting and moment is WriteMoment.USED:
            keyed = zip(lacking, _keys(space, lacking), strict=True)
            lacking = [slot for slot, key in keyed if not self._rests(key)]
        hashes = [block_hash for block_hash, _ in space.identities(lacking)]
        places = self.writes.choose(
            moment, space.digest, hashes, space.reuse, space.slot_bytes, now_ns
        )
        if moment in LAST:
            self.tier.counters["backup_refused_total"] += len(lacking) - len(places)
        return [lacking[place] for place in places]

    def dropped(self, space: Space, slots: Iterable[int]) -> None:
        """The tier has dropped these blocks by itself."""
        now, had = _now(), self.had.records
        for key in _keys(space, slots):
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
        hashes = [block_hash for block_hash, _ in space.identities(slots)]
        self.writes.missed.add(space.digest, hashes, why)

    def got(self, space: Space, slots: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Note how the writes of a batch ended."""
        now, records = _now() << 1, self.had.records
        self.lacked(space, slots)
        for key, outcome in zip(_keys(space, slots), outcomes, strict=True):
            if outcome is Outcome.STORED:
                self.stored_blocks += 1
                self.had.put(key, now | UNREAD)
            elif outcome is Outcome.PRESENT:
                self.had.put(key, now | records.get(key, 0) & UNREAD)
        unwritten = len(outcomes) - outcomes.count(Outcome.STORED)
        self.writes.budget.refund(unwritten * space.slot_bytes)

    def lacked(self, space: Space, slots: Sequence[int]) -> list[int]:
        """Those of the blocks that the tier is known not to have got; forgets that."""
        remove, digest = self.writes.missed.remove, space.digest
        identities = zip(slots, space.identities(slots), strict=True)
        return [slot for slot, (block_hash, _) in identities if remove(digest, block_hash)]

    def read(self, space: Space, slots: Iterable[int]) -> None:
        """Blocks came from the tier: count those whose write this is the first use of."""
        now, records = _now() << 1, self.had.records
        for key in _keys(space, slots):
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


def _now() -> int:
    return int(asyncio.get_running_loop().time())


def _keys(space: Space, slots: Iterable[int]) -> list[bytes]:
    digest = space.digest
    return [digest + block_hash for block_hash, _ in space.identities(slots)]
