"""The write queue of one storage tier: which blocks it is to get, within a bound in bytes.

Each tier has a bound of its own, so that a tier that hangs takes no room from the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from tierd.backend import Outcome
from tierd.core.l2.space import Space
from tierd.core.l2.tier_bits import asked_bit
from tierd.core.l3.writes import LAST, Miss, WriteMoment, Writes
from tierd.daemon.l3.drain import DrainBacklog
from tierd.daemon.l3.tier import StorageTier, batch_blocks
from tierd.daemon.l3.tier_history import TierHistory

WRITE_PAUSE_S: Final = 0.02
"""How often the queue checks whether a tier that takes no writes takes them again."""


class WriteQueue:
    """Blocks that one tier is to get. Each is held once for it, from `admit` to `finish`."""

    def __init__(self, tier: StorageTier, bit: int, bytes_max: int, l2_bytes: int) -> None:
        self.tier = tier
        self.writes = Writes(tier.config, l2_bytes)
        self.history = TierHistory(tier.counters)
        self.backlog = DrainBacklog()
        self.bit = bit
        self.both = bit | asked_bit(bit)
        self.bytes_max = bytes_max
        self.pending_bytes = 0
        self.pending_blocks = 0
        """Blocks that wait for a checksum, wait to be written, or are being written."""
        self.waiting: deque[tuple[Space, int]] = deque()
        self.writing: dict[tuple[Space, int], None] = {}
        self.ready = asyncio.Event()
        self._stopped_s: float | None = None

    def room(self, space: Space) -> int:
        """Return how many more blocks of a space may wait."""
        if not self.tier.writes_allowed:
            return 0
        count = (self.bytes_max - self.pending_bytes) // space.slot_bytes
        # A tier whose share is less than one block still gets one at a time.
        return max(0 if self.pending_blocks else 1, count)

    def admit(self, space: Space, lacking: Sequence[int]) -> Sequence[int]:
        """Admit slots from the first on as long as there is room; count the others as skipped."""
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
        """Count blocks that the tier does not get now, and remember that it lacks them.

        An evicting block counts as dropped, because the tier will not get another chance.
        """
        if slots:
            dropped = sum(slot in space.evicting for slot in slots)
            self.tier.counters["backup_skipped_total"] += len(slots) - dropped
            self.tier.counters["backup_dropped_total"] += dropped
            self.note_missed(space, slots, why)

    def choose(
        self, space: Space, lacking: Sequence[int], moment: WriteMoment, now_ns: int
    ) -> list[int]:
        """Return the slots that the tier's policy wants now, out of slots that the tier lacks."""
        if moment is WriteMoment.USED:
            lacking = self.history.without_resting(space, lacking)
        hashes = [block_hash for block_hash, _ in space.identities(lacking)]
        places = self.writes.choose(
            moment, space.digest, hashes, space.reuse, space.slot_bytes, now_ns
        )
        if moment in LAST:
            self.tier.counters["backup_refused_total"] += len(lacking) - len(places)
        return [lacking[place] for place in places]

    def note_missed(self, space: Space, slots: Iterable[int], why: Miss) -> None:
        """Remember that the tier did not get these blocks, though its policy wanted them."""
        hashes = [block_hash for block_hash, _ in space.identities(slots)]
        self.writes.missed.add(space.digest, hashes, why)

    def take_missed(self, space: Space, slots: Sequence[int]) -> list[int]:
        """Return the slots whose blocks the tier is known not to have got, and forget that."""
        remove, digest = self.writes.missed.remove, space.digest
        identities = zip(slots, space.identities(slots), strict=True)
        return [slot for slot, (block_hash, _) in identities if remove(digest, block_hash)]

    def note_written(self, space: Space, slots: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Record how the writes of a batch ended, and refund what was not written."""
        self.take_missed(space, slots)
        self.history.note_written(space, slots, outcomes)
        unwritten = len(outcomes) - outcomes.count(Outcome.STORED)
        self.writes.budget.refund(unwritten * space.slot_bytes)

    def count_refused_hits(self, space: Space, hashes: Iterable[bytes]) -> None:
        """Count the requested blocks that host memory lacks and the tier did not get."""
        lost = self.writes.missed.lost(space.digest, hashes)
        self.tier.counters["refused_hits_total"] += lost

    def enqueue(self, space: Space, slot: int) -> None:
        """Let an admitted block, which has a checksum, wait to be written."""
        self.waiting.append((space, slot))
        self.ready.set()

    def next_batch(self) -> tuple[Space, list[int]]:
        """Take waiting slots of one space, within the limits of a batch. There must be one."""
        space, slot = self.waiting.popleft()
        slots = [slot]
        limit = batch_blocks(space)
        while self.waiting and self.waiting[0][0] is space and len(slots) < limit:
            slots.append(self.waiting.popleft()[1])
        return space, slots

    async def may_write(self) -> bool:
        """Wait until the tier takes writes; False if it takes none for too long.

        The wait ends `deadline_ms + probe_ms` after the tier stopped taking writes.
        """
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

    def finish(self, space: Space, count: int) -> None:
        """Give back the room of `count` admitted blocks that are written or given up."""
        self.pending_bytes -= count * space.slot_bytes
        self.pending_blocks -= count

    def status(self) -> dict[str, object]:
        """Return the queue's part of STATUS."""
        return {
            "backup_queue": self.pending_blocks,
            "backup_queue_bytes": self.pending_bytes,
            "backup_queue_bytes_max": self.bytes_max,
            "write_policy": self.writes.policy.value,
            "write_demand": round(self.writes.budget.demand, 3),
            "written_unread_share": self.history.unread_share,
        }
