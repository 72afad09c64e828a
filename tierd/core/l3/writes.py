"""Which blocks a storage tier gets, and when: its write policy and its write budget.

The daemon and `tierd replay` decide by this. Pure: the caller says what time it is and carries
the writes out. It refuses to know slots and queues: whether a tier can take a block just now is
decided elsewhere.

How `write_through_selective` spends its budget: a block that leaves L2 is written if it is likely
enough to be used again while the tier still has it. How likely is the demand, which is steered so
that the writes come to what the budget allows: it rises while they are more, and falls while there
is room. A block that stays in L2 can wait: it is written before only if `write_uses` requests have
used it and it is likelier still, so that a crash, and other nodes, find what everybody uses. Once
the demand has fallen to nearly nothing everything is written as soon as it is stored.
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
"""What is demanded once anything is known of reuse."""

FIRST_STEPS: Final = 3
"""Steps until then: a sixteenth of L2 is written as soon as it is stored."""

DEMAND_MIN: Final = 0.001
DEMAND_MAX: Final = 0.95

DEMAND_EARLY: Final = 0.01
"""Demand from which on down a block is written as soon as it is stored."""

STAYING: Final = 0.1
"""Power of the demand that is made of a block which stays in L2."""

STEPS: Final = 40
"""Steps of the demand while L2's capacity comes up for writing."""

GAIN: Final = 0.05
"""How fast it is steered: at twice the budget the demand doubles in 14 steps."""

KEEP: Final = 0.95
"""Share of what was counted that is kept at each step: it is of the last 20 steps or so. With fewer
the demand swings with each long prompt, and the same writes keep fewer hits; with more it follows
a change too late, and more is written than the share."""

RATE_BURST_S: Final = 10.0
"""Seconds of `write_bytes_per_s` that may be written at once: it protects a network."""

ENDURANCE_BURST_S: Final = 3600.0
"""Seconds of `drive_writes_per_day` that may be written at once: a drive counts its years."""

HORIZON_S_MAX: Final = 1800.0
"""How far ahead use is predicted at most; also the horizon of a tier that never turns over."""

MISSED_MAX: Final = 1 << 16
"""Blocks remembered a tier, the latest ones, as not written; each costs about 200 bytes."""

DAY_S: Final = 86_400.0
NS: Final = 1_000_000_000


class WriteMoment(enum.Enum):
    """When a tier may get a block that it lacks."""

    STORED = "stored"
    """It has just become readable in L2."""
    USED = "used"
    """A request asks for it, and it is in L2."""
    EVICTING = "evicting"
    """It is about to leave L2, by eviction."""
    STOPPING = "stopping"
    """The daemon stops, and L2 may be lost with it."""


LAST: Final = (WriteMoment.EVICTING, WriteMoment.STOPPING)
"""What is not written then is lost with L2's copy."""


class TokenBucket:
    """Bytes that may be written at once: it starts full, and may owe the rest of what it gave last.

    It fills at a speed.
    """

    def __init__(self, bytes_per_s: float, burst_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._size_bytes = self._level_bytes = bytes_per_s * burst_s

    def fill(self, size_bytes: float) -> None:
        """Add bytes, as far as they fit."""
        self._level_bytes = min(self._size_bytes, self._level_bytes + size_bytes)

    def take(self, size_bytes: float) -> None:
        """Take bytes out; it is for the caller to look at the room first."""
        self._level_bytes -= size_bytes

    def room(self, size_bytes: int) -> int:
        """Blocks that may be taken."""
        return max(0, ceil(self._level_bytes / size_bytes))


class WriteBudget:
    """What `write_through_selective` may write: a share of all that it could, and a speed.

    The share is kept on average, the speed always, but for a burst.
    """

    def __init__(self, config: StorageConfig, l2_bytes: int) -> None:
        self.demand = 0.0
        """How likely a block must be used again to be worth a write."""
        self._first_steps = FIRST_STEPS
        self._by_rate: TokenBucket | None = None
        self._by_endurance: TokenBucket | None = None
        self._step_bytes = max(1, l2_bytes // STEPS)
        self._capacity_bytes = 0
        self._last_ns: int | None = None
        # Of late: what came up, what was written, and how long that took.
        self._offered_bytes = self._written_bytes = self._span_s = 0.0
        self._stepped_bytes = 0
        self.configure(config)

    def configure(self, config: StorageConfig) -> None:
        """Keep these bounds from now on. A speed that is as it was keeps what it had left."""
        self._share = config.write_share
        rate = config.write_bytes_per_s
        if rate != (self._by_rate.bytes_per_s if self._by_rate is not None else 0):
            self._by_rate = TokenBucket(rate, RATE_BURST_S) if rate else None
        self._endurance_per_s = config.drive_writes_per_day / DAY_S
        self._endure()

    @property
    def horizon_s(self) -> float:
        """How long the tier keeps what it gets, from its capacity and what it has got of late."""
        if not self._capacity_bytes or not self._written_bytes:
            return HORIZON_S_MAX
        return min(self._capacity_bytes * self._span_s / self._written_bytes, HORIZON_S_MAX)

    def pass_time(self, now_ns: int) -> None:
        """It is so late: what is bounded by speed may go on."""
        passed_s = (now_ns - self._last_ns) / NS if self._last_ns is not None else 0.0
        self._last_ns = now_ns
        self._span_s += passed_s
        for bucket in self._buckets():
            bucket.fill(bucket.bytes_per_s * passed_s)

    def offer(self, size_bytes: int) -> None:
        """Blocks come up for a decision that write_through would have written by then: their share
        may be written."""
        self._offered_bytes += size_bytes
        self._stepped_bytes += size_bytes
        while self._stepped_bytes >= self._step_bytes:
            self._stepped_bytes -= self._step_bytes
            self._steer()

    def spend_on(self, count: int, size_bytes: int) -> int:
        """So many blocks are worth a write; how many of them may be written now."""
        for bucket in self._buckets():
            count = min(count, bucket.room(size_bytes))
        self._written_bytes += count * size_bytes
        for bucket in self._buckets():
            bucket.take(count * size_bytes)
        return count

    def refund(self, size_bytes: int) -> None:
        """A block was not written after all."""
        self._written_bytes = max(0.0, self._written_bytes - size_bytes)
        for bucket in self._buckets():
            bucket.fill(size_bytes)

    def resize(self, capacity_bytes: int) -> None:
        """The tier's capacity is known, or has changed: `drive_writes_per_day` is counted in it."""
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
    """Its policy did not want it, or its budget was spent."""
    MISSED = "missed"
    """The same, and a request has asked for it since, in vain."""
    FULL = "full"
    """Too much waited to be written already."""
    AWAY = "away"
    """It took no writes."""
    FAILED = "failed"
    """It was given the block, and did not keep it."""
    FLUSHED = "flushed"
    """A flush ended the wait."""


class Missed:
    """The blocks that a tier did not get, by namespace and hash; at most `limit`, the latest.

    Ghosts: what comes back to one that the policy refused would have been a hit of the tier.
    """

    def __init__(self, limit: int = MISSED_MAX) -> None:
        self._limit = limit
        self._why: dict[bytes, Miss] = {}

    def __len__(self) -> int:
        return len(self._why)

    def why(self, digest: bytes, block_hash: bytes) -> Miss | None:
        """Why the tier did not get a block; None if that is not known, or it has got it."""
        return self._why.get(digest + block_hash)

    def count(self, digest: bytes, hashes: Sequence[bytes]) -> int:
        """How many of these the tier is known not to have got."""
        missed = self._why
        return sum([digest + block_hash in missed for block_hash in hashes])

    def add(self, digest: bytes, hashes: Iterable[bytes], why: Miss) -> None:
        """The tier does not get these blocks."""
        missed = self._why
        for block_hash in hashes:
            missed[digest + block_hash] = why
        if len(missed) > self._limit:
            # More than one: a dict would step over all that left before, each time.
            excess = len(missed) - self._limit * 63 // 64
            for key in list(islice(missed, excess)):
                del missed[key]

    def remove(self, digest: bytes, block_hash: bytes) -> bool:
        """The tier has got a block, or may; whether it was known not to have."""
        return self._why.pop(digest + block_hash, None) is not None

    def lost(self, digest: bytes, hashes: Iterable[bytes]) -> int:
        """A request asks for blocks that are not in L2: how many the tier would have, but for its
        policy. Each refusal costs one hit: had it been written, it would not be refused again.
        """
        missed, lost = self._why, 0
        for block_hash in hashes:
            key = digest + block_hash
            if missed.get(key) is Miss.REFUSED:
                missed[key] = Miss.MISSED
                lost += 1
        return lost


class Demands(NamedTuple):
    """What `write_through_selective` demands of a block that stays in L2, and what it has."""

    uses: int
    uses_min: int
    chance: float
    """That it is used again while the tier would keep it."""
    chance_min: float


class Writes:
    """One tier's decisions, its budget, and what it did not get."""

    def __init__(self, config: StorageConfig, l2_bytes: int) -> None:
        self.policy = config.write_policy
        self.budget = WriteBudget(config, l2_bytes)
        self.missed = Missed()
        self._config = config

    def configure(self) -> None:
        """The tier's configuration has changed; its policy stays."""
        self.budget.configure(self._config)

    @property
    def when_evicting(self) -> bool:
        """Whether blocks are meant to be written as late as when they leave L2."""
        return self.policy is not WritePolicy.WRITE_THROUGH

    def demands(self, block_hash: bytes, reuse: Reuse) -> Demands | None:
        """What decides whether a block that is used, and stays, is written; None where its uses
        decide nothing."""
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
        """Places of the blocks that are to be written now, of some that the tier lacks.

        All are `size_bytes`, and in the order in which they are to be written: parents before
        children, or the reverse if they are evicted. The bytes of the chosen blocks are spent; an
        evicted block that is not chosen is missed. A stop writes what `write_uses` requests have
        used, whatever is demanded: it comes all at once, and no later chance comes.
        """
        if self.policy is WritePolicy.WRITE_THROUGH:
            return [*range(len(hashes))]
        if self.policy is WritePolicy.WRITE_BACK:
            return [*range(len(hashes))] if moment in LAST else []
        budget = self.budget
        budget.pass_time(now_ns)
        if moment is WriteMoment.STORED:
            # What was refused counts once: write_through would write it once.
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
