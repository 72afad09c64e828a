"""The limit of host memory (L2): the capacity, or less while the machine is short of memory.

Pure: once per second it gets the available memory and the stall times of tasks, and returns a
limit. A reserve stays available to other processes. L2 may have the memory beyond it, at least
`min_bytes` and at most its capacity. How much available memory a machine needs is not known in
advance, so it is learned from stalls: each one enlarges the reserve, which then slowly shrinks
again. A limit that followed the stalls directly would grow into the next stall at once.
"""

from __future__ import annotations

from typing import Final, NamedTuple

RESERVE_SHARE: Final = 1 / 64
"""Share of all memory that stays available, within the next two bounds."""

RESERVE_BYTES_MIN: Final = 64 << 20
RESERVE_BYTES_MAX: Final = 4 << 30

LEARNED_SHARE_MAX: Final = 1 / 16
"""Largest share of all memory that stalls can make the reserve. With more memory available, tasks
stall at a cgroup limit of their own, and memory from L2 would not help them."""

STALLED_SHARE: Final = 0.1
"""Share of time with some task stalled from which on memory counts as short."""

STUCK_SHARE: Final = 0.05
"""Share of time with all tasks stalled at once from which on memory counts as short."""

STALLED_STEP: Final = 1 / 32
STUCK_STEP: Final = 1 / 8
"""Share of the capacity added to the reserve after a second with some, or all, tasks stalled."""

CALM_S: Final = 30.0
"""Seconds without a shortage before L2 grows again."""

GROWTH_SHARE_PER_S: Final = 1 / 64
"""Share of the capacity that the limit grows by per second: all of it in about a minute."""

FORGOTTEN_S: Final = 1800.0
"""Half-life of the part of the reserve that stalls have added."""


class MemorySample(NamedTuple):
    """A sample of the machine's memory and of the daemon's cgroups; the tightest bound counts."""

    total_bytes: int
    """The tightest bound."""
    available_bytes: int
    """Bytes that can still be allocated before a process is killed."""
    stalled_us: int
    """Total time in which some task waited for memory, since the machine started."""
    stuck_us: int
    """Total time in which all tasks waited for memory."""


class Pressure:
    """Decides the limit; it remembers the last sample and the learned part of the reserve."""

    def __init__(self, capacity_bytes: int, min_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.min_bytes = min(min_bytes, capacity_bytes)
        self.limit_bytes = capacity_bytes
        self.learned_bytes = 0.0
        """Bytes that stalls have added to the reserve."""
        self.short = False
        """Whether L2 has more memory than the machine can spare."""
        self.stalled_share = 0.0
        """Share of the time between the last two samples with some task stalled."""
        self._before: MemorySample | None = None
        self._before_s = 0.0
        self._short_s = -CALM_S

    def resize(self, capacity_bytes: int, min_bytes: int) -> None:
        """Change the bounds, from the next sample on."""
        self.min_bytes = min(min_bytes, capacity_bytes)
        if self.limit_bytes == self.capacity_bytes:
            self.limit_bytes = capacity_bytes
        self.limit_bytes = min(max(self.limit_bytes, self.min_bytes), capacity_bytes)
        self.capacity_bytes = capacity_bytes

    def decide(
        self, sample: MemorySample, now_s: float, *, allocated_bytes: int, resident_bytes: int
    ) -> int:
        """Return the new limit in bytes.

        `resident_bytes` is the part of L2's allocated bytes that is in physical memory.
        """
        before, seconds = self._before, now_s - self._before_s
        self._before, self._before_s = sample, now_s
        if before is not None and seconds > 0:
            self._learn(before, sample, seconds)
        # Memory allocated but not yet touched will come from the available memory.
        least = _least(sample)
        room = resident_bytes + sample.available_bytes - (least + self.learned_bytes)
        # Stay clear of the point where L2 must shrink: other processes' use fluctuates.
        target = room - least
        limit: float = self.limit_bytes
        self.short = room < min(limit, allocated_bytes)
        if self.short:
            limit = target
            self._short_s = now_s
        elif target < limit:
            # Nothing must be evicted, but memory beyond the target must not be allocated.
            limit = min(limit, max(target, allocated_bytes))
        elif self.is_calm(now_s) and seconds > 0:
            step = self.capacity_bytes * GROWTH_SHARE_PER_S * min(seconds, 1.0)
            limit = min(limit + step, target)
        self.limit_bytes = int(min(max(limit, self.min_bytes), self.capacity_bytes))
        return self.limit_bytes

    def is_calm(self, now_s: float) -> bool:
        """Whether memory has not been short for CALM_S."""
        return now_s - self._short_s >= CALM_S

    def _learn(self, before: MemorySample, sample: MemorySample, seconds: float) -> None:
        self.learned_bytes *= 0.5 ** (seconds / FORGOTTEN_S)
        self.stalled_share = (sample.stalled_us - before.stalled_us) / (seconds * 1e6)
        stuck = (sample.stuck_us - before.stuck_us) / (seconds * 1e6) >= STUCK_SHARE
        if not stuck and self.stalled_share < STALLED_SHARE:
            return
        least = _least(sample)
        most = max(sample.total_bytes * LEARNED_SHARE_MAX, 2 * least)
        if sample.available_bytes < most:
            step = self.capacity_bytes * (STUCK_STEP if stuck else STALLED_STEP)
            wanted = min(sample.available_bytes + step, most)
            self.learned_bytes = max(self.learned_bytes, wanted - least)


def _least(sample: MemorySample) -> float:
    return min(max(sample.total_bytes * RESERVE_SHARE, RESERVE_BYTES_MIN), RESERVE_BYTES_MAX)
