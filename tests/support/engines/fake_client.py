"""A fake of the client and its daemon in one process, which a test can slow, stop and break.

It keeps blocks by (namespace, hash) and follows the client's contract. Connectors are tested with
it without sockets; tests of the real client check the same contract.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tierd.client.attaching import PendingCopy
from tierd.shared_memory.exports import NO_EVENT, Export, PageLayout
from tierd.shared_memory.gate import Gate
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
    sources: bytes = b""

    def __post_init__(self) -> None:
        self.sources = self.sources or bytes(self.blocks)


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
    session: int


@dataclass(eq=False)
class FakeAttachment:
    handle: FakeHandle
    exports: Sequence[Export]
    layout: PageLayout
    gate_fd: int
    layer_ends: Sequence[int]
    probe: Callable[[bool], tuple[int, bytes]]
    number: int | None = None
    refusal: str | None = None
    how: str = "fake"
    seen: bool = False

    @property
    def ready(self) -> bool:
        return self.number is not None

    def memory(self) -> list[mmap.mmap]:
        """The exported allocations, mapped as by another process."""
        return [mmap.mmap(export.parts[0].fd, export.size_bytes) for export in self.exports]

    def content(self, block: int) -> bytes:
        """A block's bytes, in the order of a slot."""
        memory, shift = self.memory(), block * self.layout.block_stride
        return b"".join(
            memory[run.export][run.offset + shift : run.offset + shift + run.length]
            for run in self.layout.runs
        )


class FakeJob:
    """A copy as the daemon makes it, in steps: begin, first half, second half, report.

    A load of an attachment with layer groups has one step per group instead of the halves. It has
    its own mapping and gate, like another process, so it can continue after the session or the
    attachment has ended.
    """

    def __init__(
        self,
        attachment: FakeAttachment,
        pairs: list[tuple[int, bytearray]],
        pending: PendingCopy,
        job: int | None,
        event: tuple[int, int],
    ) -> None:
        self.pairs = pairs
        self.pending = pending
        self.job = job
        self.event = event
        self.step = 0
        self.answerable = True
        half, ends = len(pairs) // 2, attachment.layer_ends
        whole = (0, attachment.layout.block_bytes)
        self._parts = [(pairs[:half], whole), (pairs[half:], whole)]
        if ends and job is not None:
            starts = [0, *ends[:-1]]
            self._parts = [(pairs, part) for part in zip(starts, ends, strict=True)]
        self._layout = attachment.layout
        self._memory = attachment.memory()
        self._gate = Gate(attachment.gate_fd)

    @property
    def over(self) -> bool:
        return self.step > len(self._parts) + 1

    @property
    def writing(self) -> bool:
        """Whether it may write pages now: it has entered its gate."""
        return self.job is not None and 0 < self.step <= len(self._parts)

    def advance(self) -> None:
        """Make one more step."""
        self.step += 1
        if self.step == 1:
            if self.job is not None and not self._gate.enter(self.job):
                self._tell(0, "called off")
        elif self.step <= len(self._parts) + 1:
            self._copy(*self._parts[self.step - 2])
            if self.job is not None:
                self._gate.advance(self.job, self.step - 1)
                if self.step == len(self._parts) + 1:
                    self._gate.leave(self.job)
        else:
            self._tell(len(self.pairs), "")

    def fail(self) -> None:
        """The device fails: blocks copied so far do not count."""
        self._tell(0, "the device failed")

    def die(self) -> None:
        """End as if the process had died; the kernel releases its lock."""
        self.step = len(self._parts) + 2
        self._gate.close()

    def _tell(self, blocks: int, reason: str) -> None:
        self.die()
        if self.answerable:
            self.pending.end(blocks, reason)

    def _copy(self, pairs: list[tuple[int, bytearray]], part: tuple[int, int]) -> None:
        """Copy these blocks' bytes from one offset in the slot to another."""
        for block, slot in pairs:
            at = 0
            for export, offset, length in self._layout.runs:
                low, high = max(at, part[0]), min(at + length, part[1])
                start = offset + block * self._layout.block_stride - at
                if low < high and self.job is None:
                    slot[low:high] = self._memory[export][start + low : start + high]
                elif low < high:
                    self._memory[export][start + low : start + high] = bytes(slot[low:high])
                at += length


@dataclass
class FakeDaemon:
    """Blocks, slots and leases. `answering` False delays lookups; `up` False means a dead
    daemon."""

    up: bool = True
    answering: bool = True
    lease_ms: int = 60_000
    epoch: bytes = b"epoch-1"
    blocks: dict[tuple[bytes, bytes], int] = field(default_factory=dict)
    parents: dict[tuple[bytes, bytes], bytes] = field(default_factory=dict)
    slots: dict[int, bytearray] = field(default_factory=dict)
    owners: dict[int, bytes] = field(default_factory=dict)
    """The namespace of each reserved slot; a slot number is only meaningful within it."""
    leases: dict[int, FakeLease] = field(default_factory=dict)
    waiting: list[tuple[FakePending, list[FakeHandle], list[bytes]]] = field(default_factory=list)
    lookups: int = 0
    about: list[dict[str, int]] = field(default_factory=list)
    ready: int = 0
    hints: list[tuple[list[FakeHandle], list[bytes], dict[str, int]]] = field(default_factory=list)
    wanted: int = 0
    loaded: int = 0
    """Blocks that were hinted as wanted, and loaded."""
    prefill_us: int = 0
    commits: list[list[bytes]] = field(default_factory=list)
    aborts: int = 0
    double_releases: int = 0
    reserve_gate: threading.Event | None = None
    refuse: str = ""
    """The reason for refusing attachments; empty: it accepts them."""
    copying: bool = True
    """Whether copies are made at once; otherwise by `FakeJob.advance`."""
    session: int = 0
    attachments: list[FakeAttachment] = field(default_factory=list)
    jobs: list[FakeJob] = field(default_factory=list)
    ended_copies: int = 0
    probed: list[int] = field(default_factory=list)
    left: list[tuple[Namespace, bool]] = field(default_factory=list)
    """Unregistered namespaces, and whether they were declared worthless."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def restart(self) -> None:
        """A new incarnation without blocks."""
        self.epoch = self.epoch + b"+"
        self.blocks.clear()
        self.leases.clear()
        self.up = True

    def drop_session(self) -> None:
        """Break the session. Calls made in it may still arrive and be executed."""
        with self.lock:
            self.session += 1
            for attachment in self.attachments:
                attachment.number = None
            for job in self.jobs:
                job.answerable = False
                if not job.pending.done:
                    job.pending.end(0, "the session has ended")

    def kill(self) -> None:
        """The daemon dies, and its copying process with it."""
        with self.lock:
            self.drop_session()
            self.up = False
            for job in self.jobs:
                job.die()
            self.jobs.clear()

    def attach(self) -> None:
        """Answer each open ATTACH."""
        with self.lock:
            for attachment in self.attachments:
                if attachment.ready or attachment.refusal or not attachment.handle.ready:
                    continue
                block, digest = attachment.probe(not attachment.seen)
                self.probed.append(block)
                shown = hashlib.sha256(attachment.content(block)).digest()
                if self.refuse or shown != digest:
                    attachment.refusal = self.refuse or "the probe differs"
                else:
                    attachment.number = next(self.ids)
                    attachment.seen = True

    def copy(self) -> None:
        """Make every requested copy."""
        with self.lock:
            jobs, self.jobs = self.jobs, []
            for job in jobs:
                while not job.over:
                    job.advance()
                self.ended_copies += 1

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


_never_readable = os.eventfd(0, os.EFD_CLOEXEC)
"""Stands for the socket of every client."""


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

    def begin_register(self, namespace: Namespace) -> FakeHandle:
        handle = FakeHandle(namespace)
        self.handles.append(handle)
        return handle

    def unregister(self, handle: FakeHandle, *, worthless: bool = False) -> None:
        if handle in self.handles:
            self.handles.remove(handle)
            handle.ready, handle.refusal = False, "the client has unregistered it"
            self.daemon.left.append((handle.namespace, worthless))

    def poll(self) -> None:
        if not self.daemon.up:
            with self.daemon.lock:
                for pending, _, _ in self.daemon.waiting:
                    pending.done = True
                self.daemon.waiting.clear()
        elif self.daemon.answering:
            self.daemon.answer()
            self.daemon.attach()
            if self.daemon.copying:
                self.daemon.copy()

    def wait(self, timeout_s: float) -> None:
        self.poll()

    def fileno(self) -> int:
        return _never_readable if self.connected else -1

    def close(self) -> None:
        self.closed = True

    def attach(
        self,
        handle: FakeHandle,
        exports: Sequence[Export],
        layout: PageLayout,
        *,
        events: Sequence[bytes],
        gate_fd: int,
        layer_ends: Sequence[int],
        probe: Callable[[bool], tuple[int, bytes]],
    ) -> FakeAttachment:
        attachment = FakeAttachment(handle, exports, layout, gate_fd, layer_ends, probe)
        self.daemon.attachments.append(attachment)
        return attachment

    def detach(self, attachment: FakeAttachment) -> bool:
        self.daemon.attachments.remove(attachment)
        attachment.number = None
        return True

    def begin_store(
        self,
        attachment: FakeAttachment,
        reservation: FakeReservation,
        blocks: Sequence[int],
        *,
        event: int = NO_EVENT,
        value: int = 0,
    ) -> PendingCopy:
        slots = [self.daemon.slots[slot] for slot in reservation.slots if slot is not None]
        pairs = list(zip(blocks, slots, strict=True))
        began = attachment.ready and reservation.session == self.daemon.session
        return self._begin(attachment, pairs, None, (event, value), began=began)

    def begin_load(
        self,
        attachment: FakeAttachment,
        epoch: bytes,
        slots: Sequence[int],
        blocks: Sequence[int],
        expires_ns: int,
        *,
        job: int,
        event: int = NO_EVENT,
        value: int = 0,
    ) -> PendingCopy:
        owned = self._owned(attachment.handle, slots)
        began = attachment.ready and epoch == self.epoch and owned
        pairs = [
            (block, self.daemon.slots[slot]) for block, slot in zip(blocks, slots, strict=True)
        ]
        return self._begin(attachment, pairs, job, (event, value), began=began)

    def _begin(
        self,
        attachment: FakeAttachment,
        pairs: list[tuple[int, bytearray]],
        job: int | None,
        event: tuple[int, int],
        *,
        began: bool,
    ) -> PendingCopy:
        pending = PendingCopy()
        if began:
            with self.daemon.lock:
                self.daemon.jobs.append(FakeJob(attachment, pairs, pending, job, event))
        else:
            pending.end(0, "not attached")
        return pending

    def begin_acquire(
        self,
        handles: Sequence[FakeHandle],
        hashes: Sequence[bytes],
        deadline_ms: int,
        own: int = 0,
        **about: int,
    ) -> FakePending:
        pending = FakePending()
        with self.daemon.lock:
            self.daemon.about.append({"own": own, **about})
            self.daemon.lookups += 1
            self.daemon.waiting.append((pending, list(handles), list(hashes[own:])))
        return pending

    def ready(self, pending: FakePending) -> None:
        self.daemon.ready += 1

    def loaded(
        self,
        handles: Sequence[FakeHandle],
        wanted: int,
        sources: Sequence[int],
        *,
        prefill_us: int = 0,
    ) -> bool:
        if not self.connected:
            return False
        assert sum(sources) <= wanted
        self.daemon.wanted += wanted
        self.daemon.loaded += sum(sources)
        self.daemon.prefill_us += prefill_us
        return True

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
        if not self.connected or not handle.ready:
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
                self.daemon.owners[slot] = handle.namespace.digest
                slots.append(slot)
                views.append(memoryview(self.daemon.slots[slot]))
        return FakeReservation(
            handle, list(hashes), list(parents), slots, views, self.daemon.session
        )

    def commit(self, reservation: FakeReservation, count: int | None = None) -> list[bool]:
        digest = reservation.handle.namespace.digest
        left = len(reservation.slots) if count is None else count
        stored = []
        with self.daemon.lock:
            for block_hash, parent, slot in zip(
                reservation.hashes, reservation.parents, reservation.slots, strict=True
            ):
                alive = self.connected and reservation.session == self.daemon.session
                stored.append(alive and (slot is None or left > 0))
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
        if epoch != self.daemon.epoch or not self._owned(handle, slots):
            return None
        return [memoryview(self.daemon.slots[slot]) for slot in slots]

    def _owned(self, handle: FakeHandle, slots: Sequence[int]) -> bool:
        digest = handle.namespace.digest
        return all(self.daemon.owners.get(slot, digest) == digest for slot in slots)

    def populate(self, budget_bytes: int) -> bool:
        return False

    def mappings(self) -> list[object]:
        return []
