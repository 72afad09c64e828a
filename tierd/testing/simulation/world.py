"""A simulated world: the state that outlives a daemon, and what the checks know while it runs.

One seed makes one world: arena size, namespaces, storage tiers and their faults, engines and
restarts. The disks and the engines' chains belong to the world, not to a daemon.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, Protocol

from tierd.core.l3.epochs import Epochs, scope_of, split_scope, unpack_mark
from tierd.testing.backend import MemoryBackend, StoredBlock
from tierd.testing.loop import SimulationLoop
from tierd.testing.simulation.connection import SimulatedConnection
from tierd.testing.simulation.keeper import Keeper
from tierd.types import DIGEST_BYTES, BlockKey, Namespace

ROOT: Final = hashlib.sha256(b"simulation").digest()


REMARKS_MAX: Final = 8

RUN_S_MAX: Final = 3600.0
"""Virtual time limit of a world; a longer run means that a task waits forever."""


class RunningDaemon(Protocol):
    """The running daemon, as its world sees it; see `incarnation.current`."""

    @property
    def accepting(self) -> bool: ...

    @property
    def backends(self) -> Sequence[MemoryBackend]: ...

    @property
    def leases(self) -> Mapping[int, object]: ...

    @property
    def writers(self) -> Mapping[int, object]: ...

    def adopt(self, connection: SimulatedConnection, name: str) -> None:
        """A client has connected."""


class Violation(AssertionError):  # noqa: N818  # it is the daemon's, not the program's
    """The daemon broke a promise."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The counts and the digest of a run: they show that it did something, and that it repeats."""

    digest: str
    counts: Counter[str]


@dataclass(slots=True)
class World:
    """The engines' chains, the disks, and the checks' record of what the daemon must keep."""

    loop: SimulationLoop
    seed: int
    random: Random
    counts: Counter[str] = field(default_factory=Counter)
    chains: list[list[bytes]] = field(default_factory=list)
    parents: dict[bytes, bytes] = field(default_factory=dict)
    liars: set[bytes] = field(default_factory=set)
    disks: list[dict[BlockKey, StoredBlock]] = field(default_factory=list)
    """The blocks of each disk, by scope and hash."""
    marks: list[set[str]] = field(default_factory=list)
    """The marks of each disk."""
    down: set[int] = field(default_factory=set)
    promised: dict[BlockKey, int] = field(default_factory=dict)
    stored: set[BlockKey] = field(default_factory=set)
    """Blocks that engines have stored since the last flush began."""
    ever: set[BlockKey] = field(default_factory=set)
    """Blocks that were ever stored."""
    barred: set[BlockKey] = field(default_factory=set)
    """Blocks dropped by a complete flush and not stored since."""
    hidden: list[dict[BlockKey, StoredBlock]] = field(default_factory=list)
    """By tier, blocks that cannot be read in this incarnation."""
    landing: int = 0
    """Calls to tiers that have not taken effect yet."""
    unheard: int = 0
    """Calls among them that the daemon has cancelled."""
    late_flushed: int = 0
    hidden_flushed: int = 0
    """Blocks already dropped by a complete flush when they were written late, or came back."""
    lossless: bool = False
    network_s: float = 0.0
    incarnation: RunningDaemon | None = None
    keeper: Keeper | None = None
    told: dict[int, tuple[set[BlockKey], set[BlockKey]]] = field(default_factory=dict)
    withheld: list[set[BlockKey]] = field(default_factory=list)
    """By tier, blocks of L2 withheld from it because another node had flushed it."""
    connections: int = 0
    remarks: deque[str] = field(default_factory=lambda: deque(maxlen=REMARKS_MAX))
    """The latest provocations, shown with a violation."""
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
        """Note a provocation, to be shown with a later violation."""
        self.remarks.append(f"{self.loop.elapsed_s:.6f} s: {what}")

    def note(self, *what: object) -> None:
        """Add an event to the run's digest."""
        self._digest.update(repr((self.loop.now_ns, *what)).encode())

    def granted(self) -> list[int]:
        """Return the ids of all clients' leases and reservations, for clients that guess them."""
        incarnation = self.incarnation
        return [*incarnation.leases, *incarnation.writers] if incarnation is not None else []

    def payload(self, space: Namespace, block_hash: bytes) -> bytes:
        """Return the only valid payload of a block."""
        return self.payload_of(BlockKey(space.digest, block_hash), space.block_bytes)

    def payload_of(self, key: BlockKey, length: int) -> bytes:
        """Return the only valid payload of a key, which has a namespace's digest or scope."""
        key = BlockKey(key.namespace[:DIGEST_BYTES], key.block_hash)
        payload = self._payloads.get(key)
        if payload is None:
            payload = hashlib.shake_128(key.namespace + key.block_hash).digest(length)
            self._payloads[key] = payload
        return payload

    def know(self, key: BlockKey, payload: bytes) -> None:
        """Set the valid payload of a key that a simulated engine computes."""
        self._payloads[key] = payload

    def connect(
        self, name: str, random: Random, incarnation: RunningDaemon | None = None
    ) -> SimulatedConnection | None:
        """Connect to this daemon, or else to the running one; return None if none accepts."""
        incarnation = incarnation or self.incarnation
        if incarnation is None or not incarnation.accepting:
            return None
        self.connections += 1
        connection = SimulatedConnection(self.loop, Random(random.random()), self.network_s)
        incarnation.adopt(connection, name)
        return connection

    def scoped(self, number: int, key: BlockKey) -> BlockKey:
        """Return a block's key on a disk in the current epoch."""
        epochs = Epochs(filter(None, map(unpack_mark, self.marks[number])))
        return BlockKey(scope_of(key.namespace, epochs.of(key.namespace)), key.block_hash)

    def on_disk(self, number: int, key: BlockKey) -> bool:
        """Whether a tier's disk has the block in the current epoch, damaged or not."""
        return self.scoped(number, key) in self.disks[number]

    def kept(self, key: BlockKey, tiers: int) -> int:
        """Return the bits of `tiers` whose disks have the block."""
        on_disk = (n for n in range(len(self.disks)) if tiers >> n & 1 and self.on_disk(n, key))
        return sum(1 << number for number in on_disk)

    def begin_flush(self, covers: Callable[[bytes], bool]) -> None:
        """Note that a flush of some namespaces begins: their blocks need not be found again."""
        self.stored.clear()
        self.promised = {k: bits for k, bits in self.promised.items() if not covers(k.namespace)}

    def end_flush(self, before: set[BlockKey]) -> None:
        """Note that a flush is complete: blocks of `before` must not be served unless stored
        again."""
        self.barred |= before - self.stored

    def committing(self, key: BlockKey) -> None:
        """Note that a client commits a block, which the daemon may store from now on."""
        self.ever.add(key)
        self.stored.add(key)
        self.barred.discard(key)

    def is_barred(self, key: BlockKey) -> bool:
        """Whether a complete flush has dropped a block."""
        return BlockKey(key.namespace[:DIGEST_BYTES], key.block_hash) in self.barred

    def check_flushed(self, number: int, covers: Callable[[bytes], bool]) -> None:
        """Check that a flushed tier serves only blocks stored since."""
        for scope, block_hash in self.disks[number]:
            key = BlockKey(split_scope(scope)[0], block_hash)
            barred = self.scoped(number, key).namespace != scope
            if covers(key.namespace) and not barred and key not in self.stored:
                self.fail("a flushed block would still be served by a tier")

    def check_promises(self) -> None:
        """Check that acknowledged blocks are on the disks that were meant to get them."""
        lost = sum(self.kept(key, tiers) != tiers for key, tiers in self.promised.items())
        if self.lossless and lost:
            self.fail(f"{lost} of {len(self.promised)} acknowledged and drained blocks are lost")

    async def supervise(self, work: asyncio.Task[None]) -> None:
        """Wait for the end of the run, or stop it at the first violation."""
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
        """Return the record of the run."""
        return RunRecord(self._digest.hexdigest(), self.counts)
