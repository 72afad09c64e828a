"""Which blocks a storage tier gets, and when: its write policy and its write budget.

Used by the daemon and by `tierd replay`. Pure: the caller supplies the time and carries the
writes out. This module knows no slots and no queues: other code decides whether a tier can take a
block at the moment.

How `write_through_selective` spends its budget: a block that leaves L2 is written if its chance of
reuse while the tier still has it reaches a threshold, the demand. The demand is steered so that
the writes match the budget: it rises while they exceed it, and falls while budget is left. A block
that stays in L2 can wait. It is written early only if `write_uses` requests have used it and its
chance of reuse is higher still: popular blocks then survive a crash and reach other nodes. When
the demand is almost zero, every block is written as soon as it is stored.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from itertools import islice
from math import ceil, exp
from typing import Final, NamedTuple

from tierd.config import StorageConfig, WritePolicy
from tierd.eviction.reuse import Reuse

DEMAND_START: Final = 0.2
"""The demand after FIRST_STEPS, when reuse has been observed."""

FIRST_STEPS: Final = 3
"""Steps with a demand of 0: about a sixteenth of L2 is written as soon as it is stored."""

DEMAND_MIN: Final = 0.001
DEMAND_MAX: Final = 0.95

DEMAND_EARLY: Final = 0.01
"""Demand at or below which blocks are written as soon as they are stored."""

STAYING: Final = 0.1
"""Exponent of the demand for a block that stays in L2."""

STEPS: Final = 40
"""Steps of the demand while blocks of L2's capacity come up for writing."""

GAIN: Final = 0.05
"""Gain of the steering: at twice the budget the demand doubles in 14 steps."""

KEEP: Final = 0.95
"""Share of the counts kept at each step, so that they cover about the last 20 steps. With fewer
steps the demand swings with each long prompt, and the same writes yield fewer hits. With more it
follows a change too late, and the writes exceed the share."""

RATE_BURST_S: Final = 10.0
"""Seconds' worth of `write_bytes_per_s` in one burst: short, since it protects a network."""

ENDURANCE_BURST_S: Final = 3600.0
"""Seconds' worth of `drive_writes_per_day` in one burst: long, since a drive wears over years."""

HORIZON_S_MAX: Final = 1800.0
"""Upper bound of the horizon for predicted uses, and the horizon of a tier that never evicts."""

MISSED_MAX: Final = 1 << 16
"""Latest unwritten blocks to remember per tier; each takes about 200 bytes."""

DAY_S: Final = 86_400.0
NS: Final = 1_000_000_000


class WriteMoment(enum.Enum):
    """When a tier may get a block that it lacks."""

    STORED = "stored"
    """The block has just become readable in L2."""
    USED = "used"
    """A request asks for the block, and it is in L2."""
    EVICTING = "evicting"
    """The block is being evicted from L2."""
    STOPPING = "stopping"
    """The daemon stops, and L2 may be lost with it."""


LAST: Final = (WriteMoment.EVICTING, WriteMoment.STOPPING)
"""The last chances: a block not written then is lost with L2's copy."""


class TokenBucket:
    """A rate limit with a burst, in bytes: it starts full and refills at `bytes_per_s`.

    The last block taken may overdraw it.
    """

    def __init__(self, bytes_per_s: float, burst_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._size_bytes = self._level_bytes = bytes_per_s * burst_s

    def fill(self, size_bytes: float) -> None:
        """Add bytes, up to the size of a burst."""
        self._level_bytes = min(self._size_bytes, self._level_bytes + size_bytes)

    def take(self, size_bytes: float) -> None:
        """Take bytes out; the caller checks `room` first."""
        self._level_bytes -= size_bytes

    def room(self, size_bytes: int) -> int:
        """Return how many blocks of `size_bytes` may be taken."""
        return max(0, ceil(self._level_bytes / size_bytes))


class WriteBudget:
    """The budget of `write_through_selective`: a share of all possible writes, and rates.

    The share is kept on average, the rates always, except for a burst.
    """

    def __init__(self, config: StorageConfig, l2_bytes: int) -> None:
        self.demand = 0.0
        """Chance of reuse from which on a block is worth a write."""
        self._first_steps = FIRST_STEPS
        self._by_rate: TokenBucket | None = None
        self._by_endurance: TokenBucket | None = None
        self._step_bytes = max(1, l2_bytes // STEPS)
        self._capacity_bytes = 0
        self._last_ns: int | None = None
        # Decaying sums of the bytes offered and written, and of the time that took.
        self._offered_bytes = self._written_bytes = self._span_s = 0.0
        self._stepped_bytes = 0
        self.configure(config)

    def configure(self, config: StorageConfig) -> None:
        """Change the bounds. A rate that does not change keeps its bucket's level."""
        self._share = config.write_share
        rate = config.write_bytes_per_s
        if rate != (self._by_rate.bytes_per_s if self._by_rate is not None else 0):
            self._by_rate = TokenBucket(rate, RATE_BURST_S) if rate else None
        self._endurance_per_s = config.drive_writes_per_day / DAY_S
        self._endure()

    @property
    def horizon_s(self) -> float:
        """Seconds for which the tier keeps a block, from its capacity and the recent writes."""
        if not self._capacity_bytes or not self._written_bytes:
            return HORIZON_S_MAX
        return min(self._capacity_bytes * self._span_s / self._written_bytes, HORIZON_S_MAX)

    def pass_time(self, now_ns: int) -> None:
        """Advance the time, which refills the rates."""
        passed_s = (now_ns - self._last_ns) / NS if self._last_ns is not None else 0.0
        self._last_ns = now_ns
        self._span_s += passed_s
        for bucket in self._buckets():
            bucket.fill(bucket.bytes_per_s * passed_s)

    def offer(self, size_bytes: int) -> None:
        """Count bytes that write_through would write now; a share of them may be written."""
        self._offered_bytes += size_bytes
        self._stepped_bytes += size_bytes
        while self._stepped_bytes >= self._step_bytes:
            self._stepped_bytes -= self._step_bytes
            self._steer()

    def spend_on(self, count: int, size_bytes: int) -> int:
        """Return how many of `count` blocks may be written now, and spend the budget on them."""
        for bucket in self._buckets():
            count = min(count, bucket.room(size_bytes))
        self._written_bytes += count * size_bytes
        for bucket in self._buckets():
            bucket.take(count * size_bytes)
        return count

    def refund(self, size_bytes: int) -> None:
        """Return the bytes of a block that was not written after all."""
        self._written_bytes = max(0.0, self._written_bytes - size_bytes)
        for bucket in self._buckets():
            bucket.fill(size_bytes)

    def resize(self, capacity_bytes: int) -> None:
        """Set the tier's capacity, the unit of `drive_writes_per_day`."""
        if not capacity_bytes or capacity_bytes == self._capacity_bytes:
            return
        self._capacity_bytes = capacity_bytes
        self._endure()

    def _endure(self) -> None:
        rate = self._capacity_bytes * self._endurance_per_s
        if rate != (self._by_endurance.bytes_per_s if self._by_endurance is not None else 0):
            self._by_endurance = TokenBucket(rate, ENDURANCE_BURST_S) if rate else None

    def _buckets(self) -> list[TokenBucket]:
        return [b for b in (self._by_rate, self._by_endurance) if b is not None]

    def _steer(self) -> None:
        if self._first_steps:
            self._first_steps -= 1
            if not self._first_steps:
                self.demand = DEMAND_START
            return
        allowed = [self._share * self._offered_bytes]
        allowed += [bucket.bytes_per_s * self._span_s for bucket in self._buckets()]
        usage = self._written_bytes / max(min(allowed), 1.0)
        demand = self.demand * exp(min(GAIN * (usage - 1), 1.0))
        self.demand = min(max(demand, DEMAND_MIN), DEMAND_MAX)
        self._offered_bytes *= KEEP
        self._written_bytes *= KEEP
        self._span_s *= KEEP


class Miss(enum.Enum):
    """Why a tier did not get a block."""

    REFUSED = "refused"
    """The write policy did not choose it, or the write budget was spent."""
    MISSED = "missed"
    """It was REFUSED, and a later request missed it."""
    FULL = "full"
    """The write queue was full."""
    AWAY = "away"
    """The tier accepted no writes."""
    FAILED = "failed"
    """The write failed, or the tier refused the block."""
    FLUSHED = "flushed"
    """A flush removed it from the write queue."""


class Missed:
    """The latest blocks that a tier did not get, by namespace and hash; at most `limit`.

    They are ghosts: a request for a block that the policy refused would have hit the tier.
    """

    def __init__(self, limit: int = MISSED_MAX) -> None:
        self._limit = limit
        self._why: dict[bytes, Miss] = {}

    def __len__(self) -> int:
        return len(self._why)

    def why(self, digest: bytes, block_hash: bytes) -> Miss | None:
        """Return why the tier did not get a block; None if it got it or that is not known."""
        return self._why.get(digest + block_hash)

    def count(self, digest: bytes, hashes: Sequence[bytes]) -> int:
        """Return how many of these blocks the tier is known not to have got."""
        missed = self._why
        return sum([digest + block_hash in missed for block_hash in hashes])

    def add(self, digest: bytes, hashes: Iterable[bytes], why: Miss) -> None:
        """Note that the tier does not get these blocks."""
        missed = self._why
        for block_hash in hashes:
            missed[digest + block_hash] = why
        if len(missed) > self._limit:
            # Many at a time: each iteration of a dict steps over the entries deleted before.
            excess = len(missed) - self._limit * 63 // 64
            for key in list(islice(missed, excess)):
                del missed[key]

    def remove(self, digest: bytes, block_hash: bytes) -> bool:
        """Forget a block that the tier got, or may have got; return whether it was noted."""
        return self._why.pop(digest + block_hash, None) is not None

    def lost(self, digest: bytes, hashes: Iterable[bytes]) -> int:
        """Return how many blocks that L2 lacks the tier would have, had its policy not refused
        them. Each refusal counts once: a written block would not have been refused again.
        """
        missed, lost = self._why, 0
        for block_hash in hashes:
            key = digest + block_hash
            if missed.get(key) is Miss.REFUSED:
                missed[key] = Miss.MISSED
                lost += 1
        return lost


class Demands(NamedTuple):
    """The thresholds of `write_through_selective` for a block that stays in L2, and its values."""

    uses: int
    uses_min: int
    chance: float
    """Chance that it is used again while the tier would keep it."""
    chance_min: float


class Writes:
    """One tier's write decisions, its budget, and the blocks that it did not get."""

    def __init__(self, config: StorageConfig, l2_bytes: int) -> None:
        self.policy = config.write_policy
        self.budget = WriteBudget(config, l2_bytes)
        self.missed = Missed()
        self._config = config

    def configure(self) -> None:
        """Apply a changed configuration of the tier; the write policy stays."""
        self.budget.configure(self._config)

    @property
    def when_evicting(self) -> bool:
        """Whether the policy writes blocks on eviction from L2."""
        return self.policy is not WritePolicy.WRITE_THROUGH

    def demands(self, block_hash: bytes, reuse: Reuse) -> Demands | None:
        """Return what decides on writing a used block that stays in L2; None unless the policy is
        selective."""
        if self.policy is not WritePolicy.WRITE_THROUGH_SELECTIVE:
            return None
        chance = reuse.chance(block_hash, self.budget.horizon_s)
        uses, uses_min = reuse.uses(block_hash), self._config.write_uses
        return Demands(uses, uses_min, chance, self.budget.demand**STAYING)

    def choose(
        self,
        moment: WriteMoment,
        digest: bytes,
        hashes: Sequence[bytes],
        reuse: Reuse,
        size_bytes: int,
        now_ns: int,
    ) -> list[int]:
        """Return the positions of the blocks to write now, among blocks that the tier lacks.

        Each has `size_bytes`. They come in the order of writing: parents before children, or the
        reverse for evicted blocks. The budget is spent on the chosen blocks; an evicted block
        that is not chosen is noted as missed. When the daemon stops, blocks that `write_uses`
        requests have used are also chosen, whatever the demand: there is no later chance.
        """
        if self.policy is WritePolicy.WRITE_THROUGH:
            return [*range(len(hashes))]
        if self.policy is WritePolicy.WRITE_BACK:
            return [*range(len(hashes))] if moment in LAST else []
        budget = self.budget
        budget.pass_time(now_ns)
        if moment is WriteMoment.STORED:
            # Blocks refused before do not count again: write_through would write them once.
            new = len(hashes) - self.missed.count(digest, hashes)
            budget.offer(new * size_bytes)
        early = budget.demand <= DEMAND_EARLY
        if moment is WriteMoment.STORED and not early:
            return []
        demand = budget.demand if moment in LAST else budget.demand**STAYING
        chosen = [*range(len(hashes))]
        if moment is WriteMoment.USED and not early:
            chosen = [
                place for place in chosen if reuse.uses(hashes[place]) >= self._config.write_uses
            ]
        if not early:
            chances = reuse.chances([hashes[place] for place in chosen], budget.horizon_s)
            last, uses_min = moment is WriteMoment.STOPPING, self._config.write_uses
            chosen = [
                place
                for place, chance in zip(chosen, chances, strict=True)
                if chance >= demand or (last and reuse.uses(hashes[place]) >= uses_min)
            ]
        chosen = chosen[: budget.spend_on(len(chosen), size_bytes)]
        if moment not in LAST:
            return chosen
        if len(chosen) < len(hashes):
            taken = set(chosen)
            refused = [h for place, h in enumerate(hashes) if place not in taken]
            self.missed.add(digest, refused, Miss.REFUSED)
        return chosen
