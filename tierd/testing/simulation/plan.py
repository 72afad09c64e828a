"""The plan of a simulated world, and how it is drawn from its seed."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass
from random import Random
from typing import Final

from tierd.config import PrefetchConfig, PrefetchPolicy, Size, StorageConfig, WritePolicy
from tierd.eviction import POLICIES
from tierd.testing.faulty import FaultPlan, InjectedFault
from tierd.testing.simulation.world import ROOT, World
from tierd.types import FORMAT_VERSION, HASH_BYTES, PAGE_BYTES, Namespace

BACK_SLACK_S: Final = 0.5
"""Extra time for a backend that is slow to end a cancelled probe."""

PATIENT_MS: Final = 60_000
"""Deadline of storage calls that never pass it."""

_ROT: Final = (
    InjectedFault.FLIP_PAYLOAD,
    InjectedFault.FLIP_HEADER,
    InjectedFault.SWAP,
    InjectedFault.TRUNCATE,
    InjectedFault.TORN_READ,
    InjectedFault.VANISH,
)
"""Faults of a disk whose calls all return."""


_KINDS: Final = ("sound", "slow", "away", "away", "faulty", "broken", "rotten", "rotten")


class Hostility(enum.Enum):
    """Events of a world that come at the worst moment."""

    NONE = "none"
    LEASES = "leases"
    """Crashes come at the worst moment for leases, and others need their memory at once."""
    STORAGE = "storage"
    """Storage calls take effect after they were cancelled, blocks are unreadable at one start and
    back at the next, and flushes come when that does most harm."""


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One storage tier: its size, its faults and its configuration.

    `outages` are (pause, duration) in seconds, one after the other. During an outage all calls
    hang (`hangs`), or all fail.
    """

    disk_bytes: int | None
    faults: FaultPlan
    outages: list[tuple[float, float]]
    hangs: bool
    config: StorageConfig
    late: float = 0.0
    """Chance that a store or delete call takes effect and returns late, even if it is cancelled
    before."""
    hides: float = 0.0
    """Chance, at each start, that a part of its blocks cannot be read in this incarnation."""
    shared: bool = False
    """Whether another node uses the same blocks."""
    forgets: bool = False
    """Whether it drops blocks by itself, some or all, while it serves."""

    @property
    def lossless(self) -> bool:
        """Whether it keeps every block that it accepted."""
        return self.sound and not self.forgets

    @property
    def sound(self) -> bool:
        """Whether it answers in time and has room; it may drop blocks by itself."""
        harmful = set(self.faults.chances) - {InjectedFault.LINGER}
        sound = not harmful and not self.outages and not self.late and not self.hides
        return self.disk_bytes is None and sound

    @property
    def back_within_s(self) -> float:
        """Time after an outage until it is used again: a hanging probe, a pause, another probe."""
        return (self.config.deadline_ms + self.config.probe_ms) / 1000 + BACK_SLACK_S


@dataclass(slots=True)
class Habits:
    """The speed of an engine, and the chances, 0 to 1, of its irregular actions.

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
    """Whether a service manager keeps host memory from one incarnation to the next."""
    hostility: Hostility = Hostility.NONE


def draw_plan(random: Random, world: World) -> WorldPlan:
    """Draw a world with few slots and short chains, so that conflicts are frequent."""
    slots = random.randint(12, 40)
    pages = random.choice((1, 1, 2, 4))
    world.network_s = random.choice((1e-5, 2e-4, 2e-3, 1e-2))
    _draw_chains(random, world)
    models = [
        [
            _namespace(model, rank, ranks, (pages if rank == 0 else 1) * PAGE_BYTES - shorter)
            for rank in range(ranks)
        ]
        for model in range(random.randint(1, 2))
        for ranks in (random.randint(1, 3),)
        for shorter in (random.choice((0, 16, 1000)),)
    ]
    total = slots * pages * PAGE_BYTES
    tiers = _draw_tiers(random, total)
    world.disks = [{} for _ in tiers]
    world.marks = [set() for _ in tiers]
    return WorldPlan(
        capacity_bytes=total,
        segment_bytes=random.choice((1, 4, 8)) * pages * PAGE_BYTES,
        lease_ttl_ms=random.choice((50, 200, 2000)),
        prefetch=_draw_prefetch(random),
        tiers=tiers,
        engines=[random.choice(models) for _ in range(random.randint(1, 4))],
        habits=_draw_habits(random),
        sessions=random.randint(1, 4),
        requests=random.randint(5, 15),
        restarts=random.choice((0, 1, 1, 2)),
        kills=random.random() < 0.5,
        keeps=random.random() < 0.5,
        eviction=random.choice(POLICIES),
    )


def _draw_tiers(random: Random, total_bytes: int) -> list[TierPlan]:
    """Draw up to three tiers, often of one kind: a tier that loses blocks hides other bugs."""
    kinds = [random.choice(_KINDS) for _ in range(random.choice((0, 1, 1, 1, 2, 2, 3)))]
    if random.random() < 0.5:
        kinds = kinds[:1] * len(kinds)
    small = random.random() < 0.3
    return [
        _draw_tier(random, number, kind, total_bytes, small) for number, kind in enumerate(kinds)
    ]


def _draw_tier(random: Random, number: int, kind: str, total_bytes: int, small: bool) -> TierPlan:
    chances: dict[InjectedFault, float] = {}
    if kind in ("faulty", "broken", "rotten"):
        for fault in _ROT if kind == "rotten" else InjectedFault:
            if random.random() < 0.5:
                chances[fault] = random.random() * (0.05 if kind == "faulty" else 0.3)
    elif random.random() < 0.5:
        chances[InjectedFault.LINGER] = 0.5
    latency_s = random.choice((1e-4, 2e-3, 2e-2))
    if kind in ("sound", "away"):
        latency_s = random.choice((0.0, 1e-4))
    outages = [
        (random.expovariate(1 / 0.1), random.choice((0.1, 1.0, 5.0)))
        for _ in range(random.randint(1, 4) if kind == "away" else 0)
    ]
    # A tier without faults must not lose blocks, so it must not miss a deadline either.
    patient = kind in ("sound", "slow")
    deadline_ms = PATIENT_MS if patient else random.choice((50, 200, 1000))
    config = StorageConfig(
        type="memory",
        name=f"tier{number}",
        deadline_ms=deadline_ms,
        slow_ms=deadline_ms if patient else deadline_ms // 2,
        probe_ms=random.choice((20, 200)),
        read_batches=random.choice((1, 4)),
        write_batches=random.choice((1, 2)),
        write_queue=Size(random.choice((PAGE_BYTES, total_bytes, total_bytes))),
        fill_from_lower=random.random() < 0.7,
        write_policy=random.choice(list(WritePolicy)),
        write_share=random.choice((0.1, 0.5, 1.0)),
    )
    return TierPlan(
        disk_bytes=total_bytes // 2 if small else None,
        faults=FaultPlan(chances, latency_s),
        outages=outages,
        hangs=random.random() < 0.7,
        config=config,
    )


def _draw_prefetch(random: Random) -> PrefetchConfig:
    # The auditor waits long enough for every block.
    return PrefetchConfig(
        policy=random.choice(list(PrefetchPolicy)), timeout_base_ms=PATIENT_MS, min_tokens=0
    )


def _draw_habits(random: Random) -> Habits:
    pace_s = random.choice((0.001, 0.01, 0.1, 0.5))
    if random.random() < 0.7:
        return Habits(pace_s)
    return Habits(pace_s, die=0, garbage=0, meddle=0, cancel=0, pause=0, forget=0.1, break_off=0.1)


def _draw_chains(random: Random, world: World) -> None:
    """Draw chains of hashes that share prefixes, as conversations do."""
    for number in range(random.randint(4, 8)):
        trunk = random.choice(world.chains) if world.chains and random.random() < 0.6 else []
        chain = trunk[: random.randint(0, len(trunk))]
        parent = chain[-1] if chain else ROOT
        for place in range(len(chain), random.randint(len(chain) + 1, len(chain) + 8)):
            block_hash = hashlib.sha256(parent + f"{number}/{place}".encode()).digest()
            assert len(block_hash) == HASH_BYTES
            world.parents[block_hash] = parent
            chain = [*chain, block_hash]
            parent = block_hash
        world.chains.append(chain)
    if random.random() < 0.3:
        # A client that lies: no real hash chain forms a ring.
        ring = [random.randbytes(HASH_BYTES) for _ in range(random.randint(1, 4))]
        world.parents |= zip(ring, [ring[-1], *ring], strict=False)
        world.liars |= set(ring)
        world.chains.append(ring)


def _namespace(model: int, rank: int, ranks: int, block_bytes: int) -> Namespace:
    return Namespace(
        model=f"model-{model}",
        weights="1",
        kv_dtype="bfloat16",
        block_tokens=16,
        block_bytes=block_bytes,
        layout="simulated",
        groups=("full",),
        platform="simulated",
        tp_rank=rank,
        tp_size=ranks,
        pp_rank=0,
        pp_size=1,
        cp_rank=0,
        cp_size=1,
        hash_scheme="opaque-simulated",
        hash_root=ROOT,
        format_version=FORMAT_VERSION,
    )
