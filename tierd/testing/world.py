"""What a simulated world is, and what is known of it while it runs.

One seed makes one world: arena size, namespaces, storage tiers and their faults, engines
and restarts. The world outlives the daemon: the disks and the chains are its own.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Final

from tierd.testing.backend import FaultPlan, StoredBlock
from tierd.testing.connection import Connection
from tierd.testing.engine import Habits
from tierd.testing.loop import SimulationLoop
from tierd.types import BlockKey, Namespace

if TYPE_CHECKING:
    from tierd.testing.life import Life

RUN_S_MAX: Final = 3600.0
"""Virtual time that a world gets; beyond it somebody waits for what never comes."""


class Violation(AssertionError):  # noqa: N818  # it is the daemon's, not the program's
    """A promise of the daemon was broken."""


@dataclass(frozen=True, slots=True)
class Account:
    """What a run did, to see that it did something, and that a seed repeats."""

    digest: str
    counts: Counter[str]


@dataclass(frozen=True, slots=True)
class Plan:
    """One world, drawn from its seed."""

    capacity_bytes: int
    segment_bytes: int
    lease_ttl_ms: int
    disk_bytes: int | None
    faults: FaultPlan
    engines: list[list[Namespace]]
    habits: Habits
    sessions: int
    requests: int
    restarts: int
    kills: bool


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
    promised: set[BlockKey] = field(default_factory=set)
    lossless: bool = False
    network_s: float = 0.0
    life: Life | None = None
    connections: int = 0
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
        """The only right bytes for a key."""
        payload = self._payloads.get(key)
        if payload is None:
            payload = hashlib.shake_128(key.namespace + key.block_hash).digest(length)
            self._payloads[key] = payload
        return payload

    def connect(self, name: str, random: Random) -> Connection | None:
        """A connection to the daemon that runs now, if one does."""
        life = self.life
        if life is None or not life.accepting:
            return None
        self.connections += 1
        connection = Connection(self.loop, Random(random.random()), self.network_s)
        life.adopt(connection, name)
        return connection

    def on_disk(self, key: BlockKey) -> bool:
        """Whether some disk has the block, sound or not."""
        return any(key in disk for disk in self.disks)

    def check_promises(self) -> None:
        """Blocks whose commit was acknowledged and that were backed up must be on a disk."""
        lost = sum(not self.on_disk(key) for key in self.promised)
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
            raise Violation(self.violation)

    def account(self) -> Account:
        """For the record."""
        return Account(self._digest.hexdigest(), self.counts)
