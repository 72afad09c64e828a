"""How much memory L2 may have now: the capacity, or less while the machine is short of it.

Pure: told once a second what is available and how long tasks have stalled, it answers with a
limit. A reserve stays available to everybody else; what there is beyond it L2 may have, at least
`min_bytes` and at most its capacity. Nobody can say beforehand how much a machine must have
available to run well, so stalls teach it: each one makes the reserve larger, and time slowly makes
it small again. A limit that followed the stalls themselves would grow into the next one at once.
"""

from __future__ import annotations

from typing import Final, NamedTuple

RESERVE_SHARE: Final = 1 / 64
"""Of all memory, what is to stay available, within the next two bounds."""

RESERVE_BYTES_MIN: Final = 64 << 20
RESERVE_BYTES_MAX: Final = 4 << 30

LEARNED_SHARE_MAX: Final = 1 / 16
"""Of all memory, what stalls can make the reserve at most. With more than that available tasks
stall at a limit of their own, and nothing that L2 gives up would help them."""

STALLED_SHARE: Final = 0.1
"""Of the time, in which some task stalled, from which on memory is short."""

STUCK_SHARE: Final = 0.05
"""The same where all tasks stalled at once: nothing gets done then."""

STALLED_STEP: Final = 1 / 32
STUCK_STEP: Final = 1 / 8
"""Of the capacity, how much more is reserved after a second of either."""

CALM_S: Final = 30.0
"""So long nothing must have been short before L2 grows again."""

GROWTH_SHARE_PER_S: Final = 1 / 64
"""Of the capacity, what it gets back in a second: all of it in a minute or so."""

FORGOTTEN_S: Final = 1800.0
"""Half of what stalls have added to the reserve is forgotten in this time."""


class MemorySample(NamedTuple):
    """What the machine says. All bounds count: its own memory, and that of cgroups around us."""

    total_bytes: int
    """The tightest bound."""
    available_bytes: int
    """What can still be had before something must be killed."""
    stalled_us: int
    """Time in which some task waited for memory, since the machine was started."""
    stuck_us: int
    """Time in which all did."""


class Pressure:
    """Decides the limit. Not more than a number is kept of what has been."""

    def __init__(self, capacity_bytes: int, min_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.min_bytes = min(min_bytes, capacity_bytes)
        self.limit_bytes = capacity_bytes
        self.learned_bytes = 0.0
        """What stalls have added to the reserve."""
        self.short = False
        """Whether L2 has more than there is room for."""
        self.stalled_share = 0.0
        """Of the time between the last two samples, in which some task stalled."""
        self._before: MemorySample | None = None
        self._before_s = 0.0
        self._short_s = -CALM_S

    def resize(self, capacity_bytes: int, min_bytes: int) -> None:
        """Have other bounds from the next sample on."""
        self.min_bytes = min(min_bytes, capacity_bytes)
        if self.limit_bytes == self.capacity_bytes:
            self.limit_bytes = capacity_bytes
        self.limit_bytes = min(max(self.limit_bytes, self.min_bytes), capacity_bytes)
        self.capacity_bytes = capacity_bytes

    def decide(
        self, sample: MemorySample, now_s: float, *, allocated_bytes: int, resident_bytes: int
    ) -> int:
        """The limit from now on, in bytes.

        Of what L2 has allocated, `resident_bytes` have memory behind them.
        """
        before, seconds = self._before, now_s - self._before_s
        self._before, self._before_s = sample, now_s
        if before is not None and seconds > 0:
            self._learn(before, sample, seconds)
        # What is allocated and not yet touched will be taken from what is available.
        least = _least(sample)
        room = resident_bytes + sample.available_bytes - (least + self.learned_bytes)
        # Some way from where it would have to shrink: what others take and give back is noise.
        target = room - least
        limit: float = self.limit_bytes
        self.short = room < min(limit, allocated_bytes)
        if self.short:
            limit = target
            self._short_s = now_s
        elif target < limit:
            # Nothing has to go, but it must not be promised to anybody either.
            limit = min(limit, max(target, allocated_bytes))
        elif self.is_calm(now_s) and seconds > 0:
            step = self.capacity_bytes * GROWTH_SHARE_PER_S * min(seconds, 1.0)
            limit = min(limit + step, target)
        self.limit_bytes = int(min(max(limit, self.min_bytes), self.capacity_bytes))
        return self.limit_bytes

    def is_calm(self, now_s: float) -> bool:
        """Whether nothing has been short for a while."""
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
