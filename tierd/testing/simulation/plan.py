"""What a simulated world is made of, as it is drawn from its seed."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from tierd.config import PrefetchConfig, StorageConfig
from tierd.testing.faulty import FaultPlan, InjectedFault
from tierd.types import Namespace

BACK_SLACK_S: Final = 0.5
"""For a backend that takes its time to let go of a hung probe."""


class Hostility(enum.Enum):
    """What is out for the worst in a world."""

    NONE = "none"
    LEASES = "leases"
    """Crashes come when leases have most to lose, and others want their memory at once."""
    STORAGE = "storage"
    """Calls take effect after they were given up, parts are away at one start and back at the
    next, and flushes come when that does most harm."""


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One storage tier: what it can hold, what goes wrong, and how it is configured.

    `outages` are (pause, duration) in seconds, one after the other: all calls hang, or all
    fail, and then all is as it was.
    """

    disk_bytes: int | None
    faults: FaultPlan
    outages: list[tuple[float, float]]
    hangs: bool
    config: StorageConfig
    late: float = 0.0
    """Chance that a call which stores or drops is not answered and takes effect later, whether
    or not it has been given up by then."""
    hides: float = 0.0
    """Chance, at each start, that a part of what it has cannot be read in this life."""
    shared: bool = False
    """Whether another node has the same blocks in it."""
    forgets: bool = False
    """Whether it drops blocks by itself, some or all, while it serves."""

    @property
    def lossless(self) -> bool:
        """Whether what it was given and has not refused is there for ever."""
        return self.sound and not self.forgets

    @property
    def sound(self) -> bool:
        """Whether it answers, has room, and only forgets, if at all."""
        harmful = set(self.faults.chances) - {InjectedFault.LINGER}
        sound = not harmful and not self.outages and not self.late and not self.hides
        return self.disk_bytes is None and sound

    @property
    def back_within_s(self) -> float:
        """How soon it is used again after an outage: a probe that hangs, a pause, another one."""
        return (self.config.deadline_ms + self.config.probe_ms) / 1000 + BACK_SLACK_S


@dataclass(slots=True)
class Habits:
    """How fast an engine is, and the chances, 0 to 1, of what it does now and then.

    `pace_s` is the mean pause between requests.
    """

    pace_s: float = 0.01
    die: float = 0.2
    garbage: float = 0.02
    meddle: float = 0.1
    cancel: float = 0.15
    pause: float = 0.05
    forget: float = 0.2
    break_off: float = 0.2


@dataclass(frozen=True, slots=True)
class WorldPlan:
    """One world, drawn from its seed."""

    capacity_bytes: int
    segment_bytes: int
    lease_ttl_ms: int
    eviction: str
    prefetch: PrefetchConfig
    tiers: list[TierPlan]
    engines: list[list[Namespace]]
    habits: Habits
    sessions: int
    requests: int
    restarts: int
    kills: bool
    keeps: bool
    """Whether a service manager keeps host memory from one life to the next."""
    hostility: Hostility = Hostility.NONE
