"""A fake of the client and its daemon in one process, which a test can slow, stop and break.

It keeps blocks by (namespace, hash) and answers by the client's contract. Connectors are
tested against it without sockets; what it promises, the real client is tested for.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tierd.types import Namespace


@dataclass(eq=False)
class FakeHandle:
    namespace: Namespace
    ready: bool = True
    refusal: str | None = None


@dataclass(eq=False)
class FakeLease:
    lease_id: int
    epoch: bytes
    blocks: int
    slots: list[list[int]]
    expires_ns: int


@dataclass(eq=False)
class FakePending:
    done: bool = False
    lease: FakeLease | None = None


@dataclass(eq=False)
class FakeReservation:
    handle: FakeHandle
    hashes: list[bytes]
    parents: list[bytes]
    slots: list[int | None]
    views: list[memoryview | None]


@dataclass
class FakeDaemon:
    """Blocks, slots and leases. `answering` False holds lookups back; `up` False is a dead one."""

    up: bool = True
    answering: bool = True
    lease_ms: int = 60_000
    epoch: bytes = b"epoch-1"
    blocks: dict[tuple[bytes, bytes], int] = field(default_factory=dict)
    parents: dict[tuple[bytes, bytes], bytes] = field(default_factory=dict)
    slots: dict[int, bytearray] = field(default_factory=dict)
    leases: dict[int, FakeLease] = field(default_factory=dict)
    waiting: list[tuple[FakePending, list[FakeHandle], list[bytes]]] = field(default_factory=list)
    lookups: int = 0
    about: list[dict[str, int]] = field(default_factory=list)
    ready: int = 0
    hints: list[tuple[list[FakeHandle], list[bytes], dict[str, int]]] = field(default_factory=list)
    commits: list[list[bytes]] = field(default_factory=list)
    aborts: int = 0
    double_releases: int = 0
    reserve_gate: threading.Event | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)
    ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def restart(self) -> None:
        """A new life without what was held."""
        self.epoch = self.epoch + b"+"
        self.blocks.clear()
        self.leases.clear()
        self.up = True

    def answer(self) -> None:
        with self.lock:
            waiting, self.waiting = self.waiting, []
            for pending, handles, hashes in waiting:
                count = 0
                for block_hash in hashes:
                    if any((h.namespace.digest, block_hash) not in self.blocks for h in handles):
                        break
                    count += 1
                if count:
                    slots = [
                        [self.blocks[h.namespace.digest, x] for x in hashes[:count]]
                        for h in handles
                    ]
                    expires_ns = time.monotonic_ns() + self.lease_ms * 1_000_000
                    lease = FakeLease(next(self.ids), self.epoch, count, slots, expires_ns)
                    self.leases[lease.lease_id] = lease
                    pending.lease = lease
                pending.done = True


class FakeClient:
    """The contract of tierd.client.Client over a FakeDaemon."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self.daemon = daemon
        self.closed = False
        self.handles: list[FakeHandle] = []

    @property
    def connected(self) -> bool:
        return self.daemon.up and not self.closed

    @property
    def epoch(self) -> bytes:
        return self.daemon.epoch if self.connected else b""

    def register(self, namespace: Namespace) -> FakeHandle:
        handle = FakeHandle(namespace)
        self.handles.append(handle)
        return handle

    def poll(self) -> None:
        if not self.daemon.up:
            with self.daemon.lock:
                for pending, _, _ in self.daemon.waiting:
                    pending.done = True
                self.daemon.waiting.clear()
        elif self.daemon.answering:
            self.daemon.answer()

    def wait(self, timeout_s: float) -> None:
        self.poll()

    def close(self) -> None:
        self.closed = True

    def begin_acquire(
        self,
        handles: Sequence[FakeHandle],
        hashes: Sequence[bytes],
        deadline_ms: int,
        **about: int,
    ) -> FakePending:
        pending = FakePending()
        with self.daemon.lock:
            self.daemon.about.append(about)
            self.daemon.lookups += 1
            self.daemon.waiting.append((pending, list(handles), list(hashes)))
        return pending

    def ready(self, pending: FakePending) -> None:
        self.daemon.ready += 1

    def hint(self, handles: Sequence[FakeHandle], hashes: Sequence[bytes], **said: int) -> None:
        self.daemon.hints.append((list(handles), list(hashes), said))

    def cancel(self, pending: FakePending) -> None:
        with self.daemon.lock:
            self.daemon.waiting = [w for w in self.daemon.waiting if w[0] is not pending]
            if pending.lease is not None:
                self.release(pending.lease)
            pending.done = True

    def release(self, lease: FakeLease) -> None:
        with self.daemon.lock:
            if self.daemon.leases.pop(lease.lease_id, None) is None:
                self.daemon.double_releases += 1

    def reserve(
        self, handle: FakeHandle, hashes: Sequence[bytes], parents: Sequence[bytes]
    ) -> FakeReservation | None:
        if self.daemon.reserve_gate is not None:
            self.daemon.reserve_gate.wait(5)
        if not self.connected:
            return None
        slots: list[int | None] = []
        views: list[memoryview | None] = []
        with self.daemon.lock:
            for block_hash in hashes:
                if (handle.namespace.digest, block_hash) in self.daemon.blocks:
                    slots.append(None)
                    views.append(None)
                    continue
                slot = next(self.daemon.ids)
                self.daemon.slots[slot] = bytearray(handle.namespace.slot_bytes)
                slots.append(slot)
                views.append(memoryview(self.daemon.slots[slot]))
        return FakeReservation(handle, list(hashes), list(parents), slots, views)

    def commit(self, reservation: FakeReservation, count: int | None = None) -> list[bool]:
        digest = reservation.handle.namespace.digest
        left = len(reservation.slots) if count is None else count
        stored = []
        with self.daemon.lock:
            for block_hash, parent, slot in zip(
                reservation.hashes, reservation.parents, reservation.slots, strict=True
            ):
                stored.append(self.connected and (slot is None or left > 0))
                if slot is not None:
                    if stored[-1]:
                        self.daemon.blocks[digest, block_hash] = slot
                        self.daemon.parents[digest, block_hash] = parent
                    left -= 1
            self.daemon.commits.append(reservation.hashes)
        return stored

    def abort(self, reservation: FakeReservation) -> None:
        self.daemon.aborts += 1

    def lease_views(
        self, handle: FakeHandle, epoch: bytes, slots: Sequence[int]
    ) -> list[memoryview] | None:
        if epoch != self.daemon.epoch:
            return None
        return [memoryview(self.daemon.slots[slot]) for slot in slots]

    def populate(self, budget_bytes: int) -> bool:
        return False
