"""What a simulated world is, and what is known of it while it runs.

One seed makes one world: arena size, namespaces, storage tiers and their faults, engines
and restarts. The world outlives the daemon: the disks and the chains are its own.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Final

from tierd.config import PrefetchConfig, StorageConfig
from tierd.core.epochs import Epochs, scope_of, split_scope, unpack_mark
from tierd.testing.backend import StoredBlock
from tierd.testing.faulty import FaultPlan, InjectedFault
from tierd.testing.simulation.connection import SimulatedConnection
from tierd.testing.simulation.engine import Habits
from tierd.testing.simulation.keeper import Keeper
from tierd.testing.simulation.loop import SimulationLoop
from tierd.types import DIGEST_BYTES, BlockKey, Namespace

if TYPE_CHECKING:
    from tierd.testing.simulation.life import DaemonIncarnation

ROOT: Final = hashlib.sha256(b"simulation").digest()

BACK_SLACK_S: Final = 0.5
"""For a backend that takes its time to let go of a hung probe."""

REMARKS_MAX: Final = 8

RUN_S_MAX: Final = 3600.0
"""Virtual time that a world gets; beyond it somebody waits for what never comes."""


class Violation(AssertionError):  # noqa: N818  # it is the daemon's, not the program's
    """A promise of the daemon was broken."""


class Hostility(enum.Enum):
    """What is out for the worst in a world."""

    NONE = "none"
    LEASES = "leases"
    """Crashes come when leases have most to lose, and others want their memory at once."""
    STORAGE = "storage"
    """Calls take effect after they were given up, parts are away at one start and back at the
    next, and flushes come when that does most harm."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run did, to see that it did something, and that a seed repeats."""

    digest: str
    counts: Counter[str]


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


@dataclass(slots=True)
class World:
    """What outlives a daemon: engines' chains, the disks, and what was seen of it all."""

    loop: SimulationLoop
    seed: int
    random: Random
    counts: Counter[str] = field(default_factory=Counter)
    chains: list[list[bytes]] = field(default_factory=list)
    parents: dict[bytes, bytes] = field(default_factory=dict)
    liars: set[bytes] = field(default_factory=set)
    disks: list[dict[BlockKey, StoredBlock]] = field(default_factory=list)
    """What the disks have, by scope and hash."""
    marks: list[set[str]] = field(default_factory=list)
    """The marks of each disk."""
    down: set[int] = field(default_factory=set)
    promised: dict[BlockKey, int] = field(default_factory=dict)
    stored: set[BlockKey] = field(default_factory=set)
    """Blocks that engines have stored since the last flush began."""
    ever: set[BlockKey] = field(default_factory=set)
    """Blocks that were ever stored."""
    barred: set[BlockKey] = field(default_factory=set)
    """Blocks that a flush has ended with "complete" since they were last stored."""
    hidden: list[dict[BlockKey, StoredBlock]] = field(default_factory=list)
    """By tier, what cannot be read in this life."""
    landing: int = 0
    """Calls to tiers that are still to take effect."""
    unheard: int = 0
    """Those of them that the daemon has given up."""
    late_flushed: int = 0
    hidden_flushed: int = 0
    """Blocks that a complete flush had dropped when they landed, or came back."""
    lossless: bool = False
    network_s: float = 0.0
    life: DaemonIncarnation | None = None
    keeper: Keeper | None = None
    told: dict[int, tuple[set[BlockKey], set[BlockKey]]] = field(default_factory=dict)
    withheld: list[set[BlockKey]] = field(default_factory=list)
    """By tier, blocks of L2 that it was not to get any more, since another node had flushed it."""
    connections: int = 0
    remarks: deque[str] = field(default_factory=lambda: deque(maxlen=REMARKS_MAX))
    """The latest of what somebody did to provoke a violation, to be told with it."""
    violation: str | None = None
    _main: asyncio.Task[None] | None = None
    _payloads: dict[BlockKey, bytes] = field(default_factory=dict)
    _digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    def now_ns(self) -> int:
        """Virtual CLOCK_MONOTONIC."""
        return self.loop.now_ns

    def fail(self, what: str) -> None:
        """Record a violation and stop; the first one counts."""
        if self.violation is None:
            self.violation = what
            if self._main is not None:
                self._main.cancel()

    def remark(self, what: str) -> None:
        """Have something told with a violation that comes after it."""
        self.remarks.append(f"{self.loop.elapsed_s:.6f} s: {what}")

    def note(self, *what: object) -> None:
        """Make an event part of the run's digest."""
        self._digest.update(repr((self.loop.now_ns, *what)).encode())

    def granted(self) -> list[int]:
        """Numbers of leases and reservations that somebody has, for those who meddle."""
        life = self.life
        return [*life.leases, *life.writers] if life is not None else []

    def payload(self, space: Namespace, block_hash: bytes) -> bytes:
        """The only right bytes for a block."""
        return self.payload_of(BlockKey(space.digest, block_hash), space.block_bytes)

    def payload_of(self, key: BlockKey, length: int) -> bytes:
        """The only right bytes for a key, with a namespace's digest or a scope of it."""
        key = BlockKey(key.namespace[:DIGEST_BYTES], key.block_hash)
        payload = self._payloads.get(key)
        if payload is None:
            payload = hashlib.shake_128(key.namespace + key.block_hash).digest(length)
            self._payloads[key] = payload
        return payload

    def know(self, key: BlockKey, payload: bytes) -> None:
        """Be told the right bytes for a key by whoever computes it."""
        self._payloads[key] = payload

    def connect(
        self, name: str, random: Random, life: DaemonIncarnation | None = None
    ) -> SimulatedConnection | None:
        """A connection to this daemon, or to the one that runs now, if one does."""
        life = life or self.life
        if life is None or not life.accepting:
            return None
        self.connections += 1
        connection = SimulatedConnection(self.loop, Random(random.random()), self.network_s)
        life.adopt(connection, name)
        return connection

    def scoped(self, number: int, key: BlockKey) -> BlockKey:
        """Where a block lies on a disk, if it is not barred there."""
        epochs = Epochs(filter(None, map(unpack_mark, self.marks[number])))
        return BlockKey(scope_of(key.namespace, epochs.of(key.namespace)), key.block_hash)

    def on_disk(self, number: int, key: BlockKey) -> bool:
        """Whether the disk of a tier has the block, sound or not, and not barred."""
        return self.scoped(number, key) in self.disks[number]

    def kept(self, key: BlockKey, tiers: int) -> int:
        """Those bits of `tiers` whose disks have the block."""
        on_disk = (n for n in range(len(self.disks)) if tiers >> n & 1 and self.on_disk(n, key))
        return sum(1 << number for number in on_disk)

    def begin_flush(self, covers: Callable[[bytes], bool]) -> None:
        """What there is now of some namespaces is not to be found again."""
        self.stored.clear()
        self.promised = {k: bits for k, bits in self.promised.items() if not covers(k.namespace)}

    def end_flush(self, before: set[BlockKey]) -> None:
        """A flush is complete: what there was `before` is not to be served, unless it was stored
        again."""
        self.barred |= before - self.stored

    def committing(self, key: BlockKey) -> None:
        """A client asks to have a block stored, and the daemon may do so from now on."""
        self.ever.add(key)
        self.stored.add(key)
        self.barred.discard(key)

    def is_barred(self, key: BlockKey) -> bool:
        """Whether a block of a tier is one that a flush has dropped."""
        return BlockKey(key.namespace[:DIGEST_BYTES], key.block_hash) in self.barred

    def check_flushed(self, number: int, covers: Callable[[bytes], bool]) -> None:
        """A flushed tier has nothing but what was stored since."""
        for scope, block_hash in self.disks[number]:
            key = BlockKey(split_scope(scope)[0], block_hash)
            barred = self.scoped(number, key).namespace != scope
            if covers(key.namespace) and not barred and key not in self.stored:
                self.fail("a flushed block would still be served by a tier")

    def check_promises(self) -> None:
        """Blocks whose commit was acknowledged must be on the disks that were to get them."""
        lost = sum(self.kept(key, tiers) != tiers for key, tiers in self.promised.items())
        if self.lossless and lost:
            self.fail(f"{lost} of {len(self.promised)} acknowledged and drained blocks are lost")

    async def supervise(self, work: asyncio.Task[None]) -> None:
        """Wait for the run, or stop it at the first violation."""
        self._main = work
        try:
            async with asyncio.timeout(RUN_S_MAX):
                await work
        except TimeoutError:
            raise Violation("the world does not come to an end") from None
        except asyncio.CancelledError:
            if self.violation is None:
                raise
        if self.violation is not None:
            violation = Violation(self.violation)
            for remark in self.remarks:
                violation.add_note(remark)
            raise violation

    def account(self) -> RunRecord:
        """For the record."""
        return RunRecord(self._digest.hexdigest(), self.counts)
