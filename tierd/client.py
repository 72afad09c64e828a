"""The client of a tierd daemon: sync, without threads or an event loop of its own.

Made for the inside of an engine. Nothing here waits longer than it was told to, and
while the daemon is away every call answers a miss at once. Bytes never cross the
socket: they are copied to and from slots that both sides have mapped.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import select
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from tierd import __version__
from tierd.attaching import Attachment, Attachments, PendingCopy, Probe
from tierd.errors import DisconnectedError, NamespaceError, RefusedError, RemoteProtocolError
from tierd.exports import NO_EVENT, Export, PageLayout
from tierd.mapping import SharedMapping
from tierd.types import FORMAT_VERSION, HASH_BYTES, Namespace
from tierd.wire import messages as m
from tierd.wire.session import Role, WireSession, encode

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger("tierd.client")

DEFAULT_SOCKET: Final = "/run/tierd/tierd.sock"

RECONNECT_FIRST_S: Final = 0.05
RECONNECT_MAX_S: Final = 2.0
"""Pause before connecting again, doubled from the first to the longest."""

OUTBOUND_BYTES_MAX: Final = 8 << 20
"""Unsent calls to a daemon that does not read: beyond it the session is given up."""

HINT_MS_MAX: Final = 1 << 40
"""Far beyond what any daemon grants."""

_DONT_WAIT: Final = int(socket.MSG_DONTWAIT)
_CLOSE_ON_EXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
_SEND_FLAGS: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_RECEIVE_BYTES: Final = 256 << 10
_POPULATE_BYTES_MAX: Final = 1 << 62
_FD = struct.Struct("i")
_CMSG_SPACE: Final = socket.CMSG_SPACE(16 * 4)


_PLAIN_REPLIES: Final = frozenset({m.Reserved, m.Committed, m.StatusReply})


class _Life:
    """What belongs to one life of the daemon and is worthless in the next."""

    __slots__ = (
        "epoch",
        "lease_ttl_s",
        "min_tokens",
        "segments",
        "slots_per_segment",
        "told_too_short",
        "usable_until",
    )

    def __init__(self, epoch: bytes, lease_ttl_s: float) -> None:
        self.epoch = epoch
        self.lease_ttl_s = lease_ttl_s
        self.segments: dict[tuple[Handle, int], SharedMapping] = {}
        self.slots_per_segment: dict[Handle, int] = {}
        self.usable_until = float("inf")
        self.min_tokens: int | None = None
        """Fewer missing tokens are not brought from tiers; None until it has been asked for."""
        self.told_too_short = False

    def forget(self, handle: Handle) -> None:
        """Have nothing of a handle mapped any more."""
        self.slots_per_segment.pop(handle, None)
        for key in [key for key in self.segments if key[0] is handle]:
            del self.segments[key]


class Handle:
    """One registered namespace. It outlives disconnects; `ready` says if it is usable now."""

    __slots__ = ("namespace", "number", "refusal", "slot_bytes")

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.number: int | None = None
        self.refusal: str | None = None
        self.slot_bytes = namespace.slot_bytes

    @property
    def ready(self) -> bool:
        """Whether the daemon that is connected now has accepted the namespace."""
        return self.number is not None


class Lease:
    """The right to use slots of READY blocks until `expires_ns` (CLOCK_MONOTONIC).

    `blocks` is their number, from block `own` of the acquire on; `slots[i][k]` the slot of the kth
    for handle i. `sources` says what had each: 0 host memory, n + 1 storage tier n.
    A copy out of a slot that has ended after `expires_ns` must be thrown away.
    """

    __slots__ = ("blocks", "epoch", "expires_ns", "lease_id", "slots", "sources")

    def __init__(
        self,
        lease_id: int,
        epoch: bytes,
        blocks: int,
        slots: list[list[int]],
        expires_ns: int,
        sources: bytes,
    ) -> None:
        self.lease_id = lease_id
        self.epoch = epoch
        self.blocks = blocks
        self.slots = slots
        self.expires_ns = expires_ns
        self.sources = sources


class PendingAcquire:
    """An ACQUIRE under way; `lease` stays None when nothing was found in time."""

    __slots__ = ("call", "done", "handles", "lease")

    def __init__(self, call: int, handles: int) -> None:
        self.call = call
        self.handles = handles
        self.done = False
        self.lease: Lease | None = None


class Reservation:
    """Slots to fill. `slots[i]` is None where hash i needs none or gets none.

    `present[i]` says that the block is stored already. `views[i]` is the whole slot.
    """

    __slots__ = ("epoch", "present", "reservation_id", "slots", "views")

    def __init__(
        self,
        reservation_id: int,
        epoch: bytes,
        slots: list[int | None],
        present: list[bool],
        views: list[memoryview | None],
    ) -> None:
        self.reservation_id = reservation_id
        self.epoch = epoch
        self.slots = slots
        self.present = present
        self.views = views


class Client:
    """A session with the daemon at `socket_path`, made again whenever it breaks.

    Thread-safe; a call that waits holds off the others. `map_segments=False` is for
    callers that only look blocks up. `call_timeout_ms` bounds every call that waits.
    """

    def __init__(
        self,
        socket_path: str = DEFAULT_SOCKET,
        *,
        name: str = "client",
        map_segments: bool = True,
        call_timeout_ms: int = 1000,
    ) -> None:
        self._path = socket_path
        self._name = name
        self._map_segments = map_segments
        self._timeout_s = call_timeout_ms / 1000
        self._lock = threading.RLock()
        self._sock: socket.socket | None = None
        self._wire = WireSession(Role.CLIENT, self._dispatch)
        self._outbound: deque[tuple[memoryview, int | None]] = deque()
        self._outbound_bytes = 0
        self._retry_at = 0.0
        self._retry_pause = RECONNECT_FIRST_S
        self._calls = 0
        self._handles: list[Handle] = []
        self._pending: dict[int, PendingAcquire] = {}
        self._registering: dict[int, Handle] = {}
        # Unregistered before the daemon has answered; and numbers of those of this session.
        self._leaving: dict[Handle, bool] = {}
        self._ended: set[int] = set()
        self._replies: dict[int, m.Message | None] = {}
        self._filling: dict[Reservation, socket.socket] = {}
        self._guards: dict[socket.socket, int] = {}
        self._attachments = Attachments(self._send, self._next_call)
        self._life: _Life | None = None
        self._past: _Life | None = None
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._receive_timeout_s: float | None = None
        self._turned_away = ""
        """Why the daemon that was last met wants no session with this process."""
        self.last_error = ""

    # --- session --------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether a daemon has answered the greeting of the present session."""
        return self._life is not None

    @property
    def epoch(self) -> bytes:
        """Identity of the connected daemon's life; empty when there is none."""
        return self._life.epoch if self._life is not None else b""

    def fileno(self) -> int:
        """The socket, to select on; -1 when disconnected."""
        return self._sock.fileno() if self._sock is not None else -1

    def register(self, namespace: Namespace) -> Handle:
        """A handle for a namespace, once the daemon has accepted it; while there is no daemon at
        once, and it is registered as soon as there is one.

        Raises NamespaceError for a namespace that no daemon would accept, and RefusedError if
        this one refuses it, or this process.
        """
        with self._lock:
            handle = self.begin_register(namespace)
            try:
                self._check_allowed(handle)
            except RefusedError:
                self._handles.remove(handle)
                raise
            return handle

    def begin_register(self, namespace: Namespace) -> Handle:
        """`register` without waiting for the answer: `Handle.ready` and `refusal` have it later.

        Raises NamespaceError for a namespace that no daemon would accept. Never blocks.
        """
        namespace.validate()
        with self._lock:
            handle = Handle(namespace)
            self._handles.append(handle)
            if self._sock is None:
                self.poll()
            else:
                self._send_register(handle)
            return handle

    def unregister(self, handle: Handle, *, worthless: bool = False) -> None:
        """Use a handle no more; never blocks, and again does nothing. Detach what is attached to it
        before. What is leased or reserved under it stays so.

        With `worthless` nobody will ask for the namespace's blocks again: the daemon drops them.
        """
        with self._lock:
            if handle not in self._handles:
                return
            self._handles.remove(handle)
            handle.refusal = "it is registered no more"
            for life in (self._life, self._past):
                if life is not None:
                    life.forget(handle)
            number, handle.number = handle.number, None
            if number is not None:
                self._end_handle(number, worthless)
            elif handle in self._registering.values():
                self._leaving[handle] = worthless

    def _end_handle(self, number: int, worthless: bool) -> None:
        self._ended.add(number)
        self._send(m.Unregister(number, worthless))

    def poll(self) -> None:
        """Connect if it is time to, send and receive what can be, without waiting."""
        with self._lock:
            if self._sock is None and not self._connect():
                return
            self._flush()
            self._attachments.try_again(time.monotonic())
            while self._receive(wait_s=0.0):
                pass

    def wait(self, timeout_s: float) -> None:
        """Like poll(), but wait up to `timeout_s` for the daemon to say something."""
        with self._lock:
            if self._sock is None and not self._connect():
                return
            self._flush()
            self._attachments.try_again(time.monotonic())
            if self._receive(wait_s=timeout_s):
                while self._receive(wait_s=0.0):
                    pass

    def close(self) -> None:
        """End the session; the client may be used again and would connect again."""
        with self._lock:
            self._disconnect("closed")
            self._past = None
            self._retry_at = 0.0

    # --- looking up -----------------------------------------------------------------

    def begin_acquire(
        self,
        handles: Sequence[Handle],
        hashes: Sequence[bytes],
        deadline_ms: int,
        *,
        request: int = 0,
        waited_ms: int = 0,
        prefill_tokens_per_s: int = 0,
        own: int = 0,
    ) -> PendingAcquire:
        """Ask for the longest prefix of `hashes` that all `handles` have. Never blocks.

        The engine has the first `own` blocks in its own cache: the lease begins after them. At most
        KEYS_PER_CALL_MAX hashes are asked for; a longer prefix is cut. `request` is the same number
        each time that one request of a user asks (`request_number`), which arrived `waited_ms` ago;
        `prefill_tokens_per_s` is how fast the engine computes prompts, if known.
        """
        with self._lock:
            self.poll()
            about = (request, max(0, waited_ms), max(0, prefill_tokens_per_s), own)
            return self._begin_acquire(handles, hashes, deadline_ms, about)

    def _begin_acquire(
        self,
        handles: Sequence[Handle],
        hashes: Sequence[bytes],
        deadline_ms: int,
        about: tuple[int, int, int, int] = (0, 0, 0, 0),
    ) -> PendingAcquire:
        self._calls += 1
        pending = PendingAcquire(self._calls, len(handles))
        known = [handle.number for handle in handles if handle.number is not None]
        if self._life is None or not hashes or not known or len(known) < len(handles):
            pending.done = True
            return pending
        _check_hashes(hashes)
        self._pending[pending.call] = pending
        blob = b"".join(hashes[: m.KEYS_PER_CALL_MAX])
        deadline_ms = max(0, deadline_ms)
        self._send(m.Acquire(pending.call, known, blob, deadline_ms, *about))
        return pending

    def acquire(
        self, handles: Sequence[Handle], hashes: Sequence[bytes], deadline_ms: int
    ) -> Lease | None:
        """`begin_acquire` and wait for the answer, at most `deadline_ms` and a call's timeout.

        What comes of it is counted once `loaded` says so.
        """
        with self._lock:
            self._ensure_ready(handles)
            pending = self._begin_acquire(handles, hashes, deadline_ms)
            end = time.monotonic() + deadline_ms / 1000 + self._timeout_s
            while not pending.done:
                left = end - time.monotonic()
                if left <= 0:
                    self.cancel(pending)
                    break
                self._receive(wait_s=left)
            return pending.lease

    def ready(self, pending: PendingAcquire) -> None:
        """Tell that the request could be computed now; it may be answered sooner. Never blocks."""
        with self._lock:
            if pending.call in self._pending:
                self._send(m.Ready(pending.call))

    def loaded(
        self, handles: Sequence[Handle], wanted: int, sources: Sequence[int], *, prefill_us: int = 0
    ) -> bool:
        """Tell what was saved, for the daemon's metrics: of `wanted` blocks that were asked for,
        `sources[s]` are used instead of computed, of those that a lease's source s had.

        `prefill_us` is how long computing them would have taken, if known. False, and nothing is
        told, while the daemon is away. Never blocks.
        """
        known = [handle.number for handle in handles if handle.number is not None]
        with self._lock:
            if self._life is None or not known or len(known) < len(handles):
                return False
            self._send(
                m.Loaded(
                    known,
                    min(wanted, m.LOADED_MAX),
                    list(sources),
                    min(prefill_us, m.LOADED_US_MAX),
                )
            )
            return True

    def hint(
        self,
        handles: Sequence[Handle],
        hashes: Sequence[bytes],
        *,
        pin_ms: int = 0,
        next_use_ms: int = 0,
        priority: int = 0,
        session_ended: bool = False,
    ) -> None:
        """Say how the prefix `hashes`, from its first block on, will be used. Never blocks.

        `pin_ms` has it kept so long, `next_use_ms` until its likely next use; `priority` is below
        0 for what may go first, above for what had better stay. A prefix whose session has ended
        goes first. The daemon honours it within bounds, and need not have the blocks yet. Nothing
        happens while it is away. At most KEYS_PER_CALL_MAX hashes; the rest is left out.
        """
        _check_hashes(hashes)
        known = [handle.number for handle in handles if handle.number is not None]
        with self._lock:
            if self._life is None or not hashes or not known or len(known) < len(handles):
                return
            self._send(
                m.Hint(
                    known,
                    b"".join(hashes[: m.KEYS_PER_CALL_MAX]),
                    min(max(0, pin_ms), HINT_MS_MAX),
                    min(max(0, next_use_ms), HINT_MS_MAX),
                    1 + (priority > 0) - (priority < 0),
                    session_ended,
                )
            )

    def cancel(self, pending: PendingAcquire) -> None:
        """Give an acquire up; a lease that comes too late is released."""
        with self._lock:
            pending.done = True
            if pending.lease is not None:
                self.release(pending.lease)
                pending.lease = None
            elif pending.call in self._pending:
                self._send(m.Cancel(pending.call))

    def release(self, lease: Lease) -> None:
        """Give a lease back. Never blocks; a second release does nothing."""
        with self._lock:
            if lease.epoch == self.epoch:
                self._send(m.Release(lease.lease_id))

    def lease_views(
        self, handle: Handle, epoch: bytes, slots: Sequence[int]
    ) -> list[memoryview] | None:
        """The bytes of leased slots, or None if they are not mapped here.

        Works for the life of a daemon that has died, until its last lease would have ended.
        """
        with self._lock:
            life = self._life_of(epoch)
            if life is None:
                # The segment may be on its way.
                self.poll()
                life = self._life_of(epoch)
            if life is None:
                return None
            views = self._views(life, handle, slots)
            if views is None:
                self.poll()
                views = self._views(life, handle, slots)
            return views

    # --- storing --------------------------------------------------------------------

    def reserve(
        self, handle: Handle, hashes: Sequence[bytes], parents: Sequence[bytes]
    ) -> Reservation | None:
        """Slots for new blocks; None when the daemon is away. `commit` or `abort` must follow.

        At most KEYS_PER_CALL_MAX hashes. `parents[i]` is the hash before `hashes[i]`, or
        the namespace's hash_root. ValueError for anything that is not a hash, or too many.
        """
        if not len(hashes) == len(parents) <= m.KEYS_PER_CALL_MAX:
            raise ValueError(f"a parent a hash, at most {m.KEYS_PER_CALL_MAX} of them")
        _check_hashes(hashes)
        _check_hashes(parents)
        with self._lock:
            self._ensure_ready([handle])
            if handle.number is None or not hashes:
                return None
            call = self._next_call()
            reply = self._call(
                call, m.Reserve(call, handle.number, b"".join(hashes), b"".join(parents))
            )
            life = self._life
            if not isinstance(reply, m.Reserved) or life is None:
                return None
            raw = m.unpack_slots(reply.slots)
            slots = [None if slot >= m.SLOT_PRESENT else slot for slot in raw]
            wanted = [slot for slot in slots if slot is not None]
            mapped = self._views(life, handle, wanted)
            if mapped is None:
                self._send(m.Abort(reply.reservation))
                return None
            views = iter(mapped)
            reservation = Reservation(
                reply.reservation,
                life.epoch,
                slots,
                [slot == m.SLOT_PRESENT for slot in raw],
                [None if slot is None else next(views) for slot in slots],
            )
            if wanted and self._sock is not None:
                self._filling[reservation] = self._sock
            return reservation

    def commit(self, reservation: Reservation, count: int | None = None) -> list[bool]:
        """Publish the slots of a reservation, or the first `count` of them; per hash if stored."""
        with self._lock:
            granted = sum(slot is not None for slot in reservation.slots)
            stored = 0
            if self._filled(reservation):
                call = self._next_call()
                wanted = granted if count is None else min(count, granted)
                reply = self._call(call, m.Commit(call, reservation.reservation_id, wanted))
                if isinstance(reply, m.Committed):
                    stored = reply.blocks
            result = []
            for slot, present in zip(reservation.slots, reservation.present, strict=True):
                if slot is None:
                    result.append(present)
                else:
                    result.append(stored > 0)
                    stored -= 1
            return result

    def abort(self, reservation: Reservation) -> None:
        """Give the slots of a reservation back unwritten. Never blocks."""
        with self._lock:
            if self._filled(reservation):
                self._send(m.Abort(reservation.reservation_id))

    def _filled(self, reservation: Reservation) -> bool:
        """Nobody writes to its slots any more; whether its session still goes on."""
        sock = self._filling.pop(reservation, None)
        if sock is None or sock is self._sock:
            return sock is not None
        if sock not in self._filling.values():
            self._close_socket(sock)
        return False

    def _close_socket(self, sock: socket.socket) -> None:
        """Nobody of this process writes to slots of that session any more."""
        sock.close()
        guard = self._guards.pop(sock, None)
        if guard is not None:
            os.close(guard)

    # --- copies that the daemon makes -----------------------------------------------

    def attach(
        self,
        handle: Handle,
        exports: Sequence[Export],
        layout: PageLayout,
        *,
        events: Sequence[bytes],
        gate_fd: int,
        layer_ends: Sequence[int],
        probe: Probe,
    ) -> Attachment:
        """Show the daemon where blocks lie in this process, so that it copies them. Never blocks.

        The descriptors stay the caller's, and open until `detach`. It is attached again after
        each reconnect. `probe(first)` is called each time: it fills a block of its choice, tells
        which and the SHA-256 of its bytes in the order of the runs, and leaves them be until
        the daemon has answered; after the `first` time blocks may be in use. `layer_ends` are
        the places in a block where layers end that a load brings one after the other.
        """
        attachment = Attachment(
            handle,
            exports,
            layout,
            events=events,
            gate_fd=gate_fd,
            layer_ends=layer_ends,
            probe=probe,
        )
        with self._lock:
            self._attachments.add(attachment)
        return attachment

    def detach(self, attachment: Attachment) -> bool:
        """End an attachment; False if the daemon did not say in time that it copies no more.

        It copies no more either way once a gate's `call_off` says so, for loads.
        """
        with self._lock:
            self._attachments.remove(attachment)
            if not self._attachments.is_known(attachment):
                return True
            end = time.monotonic() + self._timeout_s
            while self._sock is not None and self._attachments.is_known(attachment):
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._receive(wait_s=left)
            return self._sock is not None

    def begin_store(
        self,
        attachment: Attachment,
        reservation: Reservation,
        blocks: Sequence[int],
        *,
        event: int = NO_EVENT,
        value: int = 0,
    ) -> PendingCopy:
        """Have pages copied into the slots of a reservation. Never blocks.

        `blocks[i]` is the engine's block for the i-th slot that was granted. The copy begins
        after the event. `commit` or `abort` must follow once the copy is done.
        """
        with self._lock:
            number = attachment.number
            if number is None or self._filling.get(reservation) is not self._sock:
                return _not_begun("the daemon does not copy for this engine now")
            return self._attachments.begin(
                lambda call: m.Store(
                    call,
                    number,
                    reservation.reservation_id,
                    m.pack_slots(blocks),
                    event,
                    value,
                )
            )

    def begin_load(
        self,
        attachment: Attachment,
        epoch: bytes,
        slots: Sequence[int],
        blocks: Sequence[int],
        expires_ns: int,
        *,
        job: int,
        event: int = NO_EVENT,
        value: int = 0,
    ) -> PendingCopy:
        """Have leased slots copied into pages. Never blocks.

        `epoch` and `expires_ns` are the lease's. The caller has prepared the `job` of its gate,
        and may use neither the pages nor the number again before the copy is done, or its gate
        has called it off: the session may end while pages are written.
        """
        with self._lock:
            number = attachment.number
            if number is None or self._life is None or self._life.epoch != epoch:
                return _not_begun("the daemon does not copy for this engine now")
            return self._attachments.begin(
                lambda call: m.Load(
                    call,
                    number,
                    m.pack_slots(slots),
                    m.pack_slots(blocks),
                    expires_ns,
                    job,
                    event,
                    value,
                )
            )

    # --- the simple API -------------------------------------------------------------

    def put(self, handle: Handle, blocks: Sequence[tuple[bytes, bytes, Buffer]]) -> list[bool]:
        """Store blocks given as (hash, parent, buffer); per block whether the daemon has it now.

        False: there is no daemon, no room, or another session is storing it. Every buffer must
        hold exactly the namespace's `block_bytes`; ValueError otherwise. Raises RefusedError if
        the daemon refuses the namespace, or this process.
        """
        self._check_allowed(handle)
        size = handle.namespace.block_bytes
        sources = [_flat(buffer, size) for _, _, buffer in blocks]
        done: list[bool] = []
        for start in range(0, len(blocks), m.KEYS_PER_CALL_MAX):
            part = blocks[start : start + m.KEYS_PER_CALL_MAX]
            with self._lock:
                reservation = self.reserve(handle, [b[0] for b in part], [b[1] for b in part])
                if reservation is None:
                    return done + [False] * (len(blocks) - len(done))
                try:
                    for view, source in zip(reservation.views, sources[start:], strict=False):
                        if view is not None:
                            copy(view[:size], source)
                except BaseException:
                    self.abort(reservation)
                    raise
                done += self.commit(reservation)
        return done

    def get(
        self,
        handle: Handle,
        hashes: Sequence[bytes],
        deadline_ms: int,
        into: Sequence[Buffer] | None = None,
    ) -> list[memoryview]:
        """Copies of the longest prefix of `hashes` to be had by the deadline.

        `into` gives the buffers to fill, of `block_bytes` each; new ones are made otherwise.
        Raises RefusedError if the daemon refuses the namespace, or this process. Where storage
        tiers were not asked because too few tokens are missing (`prefetch.min_tokens`), the log
        and `last_error` say so.
        """
        self._check_allowed(handle)
        found = self._get(handle, hashes, deadline_ms, into)
        if len(found) < len(hashes):
            self._note_too_short(handle, len(hashes) - len(found))
        return found

    def _get(
        self,
        handle: Handle,
        hashes: Sequence[bytes],
        deadline_ms: int,
        into: Sequence[Buffer] | None,
    ) -> list[memoryview]:
        size = handle.namespace.block_bytes
        targets = [_flat(buffer, size) for buffer in into] if into is not None else None
        wanted = min(len(hashes), m.KEYS_PER_CALL_MAX)
        with self._lock:
            lease = self.acquire([handle], hashes, deadline_ms)
            if lease is None:
                self.loaded([handle], wanted, [])
                return []
            try:
                views = self.lease_views(handle, lease.epoch, lease.slots[0])
                if views is None:
                    return []
                if targets is None:
                    targets = [memoryview(bytearray(size)) for _ in views]
                filled = targets[: len(views)]
                for target, view in zip(filled, views, strict=False):
                    copy(target, view[:size])
                if time.monotonic_ns() >= lease.expires_ns:
                    return []
                self.loaded([handle], wanted, by_source(lease.sources[: len(filled)]))
                return filled
            finally:
                self.release(lease)

    def _check_allowed(self, handle: Handle) -> None:
        """Raise RefusedError if the daemon that is there will have none of it."""
        with self._lock:
            self._ensure_ready([handle])
            if handle.refusal is not None:
                raise RefusedError(f"{self._path} refuses the namespace: {handle.refusal}")
            if self._turned_away:
                raise RefusedError(f"{self._path} refuses this process: {self._turned_away}")

    def _note_too_short(self, handle: Handle, missing: int) -> None:
        """Say, once a life of the daemon, that so few blocks are never brought from a tier."""
        with self._lock:
            life = self._life
            if life is None or life.told_too_short:
                return
            if life.min_tokens is None:
                life.min_tokens = self._min_tokens()
            tokens = missing * handle.namespace.block_tokens
            if life.min_tokens is not None and tokens < life.min_tokens:
                life.told_too_short = True
                self.last_error = (
                    f"{tokens} tokens are missing in host memory, and storage tiers are not asked "
                    f"for less than {life.min_tokens} (prefetch.min_tokens of the daemon)"
                )
                log.warning("%s: %s", self._path, self.last_error)

    def _min_tokens(self) -> int | None:
        try:
            prefetch = self.status().get("prefetch")
        except DisconnectedError:
            return None
        found = prefetch.get("min_tokens") if isinstance(prefetch, dict) else None
        return found if isinstance(found, int) else None

    def populate(self, budget_bytes: int = _POPULATE_BYTES_MAX) -> bool:
        """Fault mapped segments in ahead of use, without the GIL; True while more remains.

        Without it the first copy to or from each page runs at a tenth of memcpy.
        """
        with self._lock:
            segments = list(self._life.segments.values()) if self._life is not None else []
        for segment in segments:
            while segment.populated_bytes < segment.size_bytes:
                if budget_bytes <= 0:
                    return True
                before = segment.populated_bytes
                with contextlib.suppress(OSError):
                    segment.populate_next()
                if segment.populated_bytes == before:
                    break
                budget_bytes -= segment.populated_bytes - before
        return False

    def status(self) -> dict[str, object]:
        """The daemon's status; raises DisconnectedError with the reason when it is away."""
        with self._lock:
            call = self._next_call()
            self._ensure_ready([])
            reply = self._call(call, m.Status(call)) if self.connected else None
            if not isinstance(reply, m.StatusReply):
                raise DisconnectedError(f"no answer from {self._path}: {self.last_error}")
            return reply.body

    # --- connection -----------------------------------------------------------------

    def _connect(self) -> bool:
        now = time.monotonic()
        if now < self._retry_at:
            return False
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(self._path)
            sock.setblocking(True)
        except OSError as error:
            sock.close()
            # A file's mode says no as a daemon would.
            self._turned_away = os.strerror(error.errno) if error.errno == errno.EACCES else ""
            self._back_off(f"cannot connect: {error.strerror or error}")
            return False
        self._sock = sock
        self._wire = WireSession(Role.CLIENT, self._dispatch)
        self._outbound.clear()
        self._outbound_bytes = 0
        self._receive_timeout_s = None
        self._send(m.Hello(m.PROTOCOL_VERSION, f"{self._name} (tierd {__version__})"))
        for handle in self._handles:
            self._send_register(handle)
        return self._sock is not None

    def _back_off(self, why: str) -> None:
        self.last_error = why
        self._retry_at = time.monotonic() + self._retry_pause
        self._retry_pause = min(self._retry_pause * 2, RECONNECT_MAX_S)

    def _disconnect(self, why: str) -> None:
        """End the session: every call under way is a miss."""
        if self._sock is None:
            return
        for fd in self._wire.take_fds():
            os.close(fd)
        # Once it is closed the daemon gives the slots reserved over it to others, so it
        # stays open while they are being filled.
        if self._sock not in self._filling.values():
            self._close_socket(self._sock)
        self._sock = None
        self._back_off(why)
        if self._life is not None:
            self._life.usable_until = time.monotonic() + self._life.lease_ttl_s
            self._past, self._life = self._life, None
        for handle in self._handles:
            handle.number = None
        self._outbound.clear()
        self._outbound_bytes = 0
        self._attachments.lost()
        for pending in self._pending.values():
            pending.done = True
        self._pending.clear()
        self._registering.clear()
        self._leaving.clear()
        self._ended.clear()
        self._replies = dict.fromkeys(self._replies)

    def _send_register(self, handle: Handle) -> None:
        call = self._next_call()
        handle.refusal = None
        self._registering[call] = handle
        self._send(m.Register(call, handle.namespace.to_fields(), self._map_segments))

    def _ensure_ready(self, handles: Sequence[Handle]) -> None:
        """Connect and register, waiting at most a call's timeout for a daemon that is there."""
        if self._life is not None:
            for handle in handles:
                if handle.number is None:
                    break
            else:
                return
        self.poll()
        end = time.monotonic() + self._timeout_s
        while self._sock is not None and not (
            self.connected and all(h.ready or h.refusal for h in handles)
        ):
            left = end - time.monotonic()
            if left <= 0:
                self._disconnect("the daemon does not answer")
                return
            self._receive(wait_s=left)

    # --- calls ----------------------------------------------------------------------

    def _next_call(self) -> int:
        self._calls += 1
        return self._calls

    def _call(self, call: int, message: m.FromClient) -> m.Message | None:
        """Send and wait for the reply; None on timeout, and the session is over then."""
        self._replies[call] = None
        try:
            self._send(message)
            end = time.monotonic() + self._timeout_s
            while self._sock is not None:
                reply = self._replies[call]
                if reply is not None:
                    return reply
                left = end - time.monotonic()
                if left <= 0:
                    self._disconnect("the daemon does not answer")
                    return None
                self._receive(wait_s=left)
            return None
        finally:
            del self._replies[call]

    def _send(self, message: m.FromClient, fd: int | None = None) -> None:
        if self._sock is None:
            return
        data = encode(message, 0 if fd is None else 1)
        if not self._outbound and fd is None:
            try:
                sent = self._sock.send(data, _SEND_FLAGS)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self._disconnect(str(error))
                return
            if sent == len(data):
                return
            data = data[sent:]
        self._outbound.append((memoryview(data), fd))
        self._outbound_bytes += len(data)
        if self._outbound_bytes > OUTBOUND_BYTES_MAX:
            self._disconnect("the daemon does not read")
        elif len(self._outbound) == 1:
            self._flush()

    def _flush(self) -> None:
        while self._outbound and self._sock is not None:
            data, fd = self._outbound[0]
            rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FD.pack(fd))]
            try:
                sent = self._sock.sendmsg([data], rights, _SEND_FLAGS)
            except BlockingIOError:
                return
            except OSError as error:
                self._disconnect(str(error))
                return
            self._outbound_bytes -= sent
            if sent == len(data):
                self._outbound.popleft()
            else:
                # The descriptor went with the first byte.
                self._outbound[0] = (data[sent:], None)

    def _receive(self, wait_s: float) -> bool:
        """Take what has arrived; False when nothing had by the end of `wait_s`."""
        sock = self._sock
        if sock is None:
            return False
        flags = 0
        if self._outbound:
            self._wait_both(sock, wait_s)
            flags = _DONT_WAIT
        elif wait_s <= 0:
            flags = _DONT_WAIT
        else:
            self._set_receive_timeout(sock, wait_s)
        try:
            if self._map_segments:
                flags |= _CLOSE_ON_EXEC
                count, control, _, _ = sock.recvmsg_into([self._buffer], _CMSG_SPACE, flags)
            else:
                count, control = sock.recv_into(self._buffer, 0, flags), []
        except BlockingIOError:
            return False
        except OSError as error:
            self._disconnect(str(error))
            return False
        if count == 0:
            self._disconnect(self.last_error or "the daemon closed the session")
            return False
        try:
            with memoryview(self._buffer)[:count] as chunk:
                self._wire.receive(chunk, _descriptors(control) if control else ())
        except RemoteProtocolError as error:
            self._disconnect(f"protocol: {error}")
        return True

    def _wait_both(self, sock: socket.socket, wait_s: float) -> None:
        """Wait until the daemon has said something or takes more of what is unsent."""
        poller = select.poll()
        poller.register(sock, select.POLLIN | select.POLLOUT)
        poller.poll(max(0.0, wait_s) * 1000)
        self._flush()

    def _set_receive_timeout(self, sock: socket.socket, wait_s: float) -> None:
        """Bound the next blocking read. The kernel's own timer saves a poll() a call."""
        # Setting it costs a call too, so one that is close to what is asked for stays.
        current = self._receive_timeout_s
        if current is not None and 0.5 * wait_s <= current <= 1.25 * wait_s:
            return
        whole, part = divmod(max(wait_s, 1e-5), 1.0)
        sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(whole), int(part * 1e6))
        )
        self._receive_timeout_s = wait_s

    def _dispatch(self, message: m.Message, fds: tuple[int, ...]) -> None:
        kind = type(message)
        if kind in _PLAIN_REPLIES:
            call = message.call  # type: ignore[union-attr]  # all plain replies have it
            if call in self._replies:
                self._replies[call] = message
        elif isinstance(message, m.Acquired):
            self._acquired(message)
        elif isinstance(message, m.Segment):
            self._segment(message, fds[0])
        elif isinstance(message, m.Guard):
            if self._sock is None or self._sock in self._guards:
                os.close(fds[0])
            else:
                self._guards[self._sock] = fds[0]
        elif isinstance(message, m.Welcome):
            # A new session with the same daemon: leases and mappings are as good as before.
            life = self._life_of(message.epoch)
            self._life = life or _Life(message.epoch, message.lease_ttl_ms / 1000)
            self._life.usable_until = float("inf")
            self._retry_pause = RECONNECT_FIRST_S
            self.last_error = self._turned_away = ""
        elif isinstance(message, m.Registered):
            self._registered(message)
        elif isinstance(message, (m.Attached, m.Detached, m.Copied)):
            self._attachments.take(message, time.monotonic())
        elif isinstance(message, m.Error):
            self._refused(message)

    def _registered(self, message: m.Registered) -> None:
        handle = self._registering.pop(message.call, None)
        if (
            handle is None
            or self._life is None
            or message.slot_bytes != handle.slot_bytes
            or not message.slots_per_segment
        ):
            raise RemoteProtocolError("REGISTERED does not fit what was registered")
        if handle in self._leaving:
            self._end_handle(message.handle, self._leaving.pop(handle))
            return
        handle.refusal = None
        self._life.slots_per_segment[handle] = message.slots_per_segment
        handle.number = message.handle
        self._attachments.offer(handle)

    def _refused(self, message: m.Error) -> None:
        if message.call == 0:
            self.last_error = message.reason
            if self._life is None:
                self._turned_away = message.reason
        elif message.call in self._registering:
            handle = self._registering.pop(message.call)
            handle.refusal = message.reason
            self._leaving.pop(handle, None)
        elif not self._attachments.refused(message.call, message.reason, time.monotonic()) and (
            message.call in self._replies
        ):
            self._replies[message.call] = message

    def _acquired(self, message: m.Acquired) -> None:
        pending = self._pending.pop(message.call, None)
        life = self._life
        if pending is None or life is None or not message.blocks:
            if pending is not None:
                pending.done = True
            return
        raw = m.unpack_slots(message.slots)
        if len(raw) != message.blocks * pending.handles:
            raise RemoteProtocolError("ACQUIRED does not name a slot a block and handle")
        slots = [
            list(raw[start : start + message.blocks])
            for start in range(0, len(raw), message.blocks)
        ]
        if len(message.sources) not in (0, message.blocks):
            raise RemoteProtocolError("ACQUIRED does not name a source a block")
        sources = message.sources or bytes(message.blocks)
        lease = Lease(message.lease, life.epoch, message.blocks, slots, message.expires_ns, sources)
        if pending.done:
            self.release(lease)
            return
        pending.lease = lease
        pending.done = True

    def _segment(self, message: m.Segment, fd: int) -> None:
        try:
            if message.handle in self._ended:
                return
            handle = next((h for h in self._handles if h.number == message.handle), None)
            life = self._life
            if handle is None or life is None:
                raise RemoteProtocolError("SEGMENT of a handle that is not registered")
            key = handle, message.segment
            mapped = life.segments.get(key)
            # A namespace that was forgotten meanwhile has others, with the same numbers.
            if mapped is None or not mapped.is_of(fd):
                size = life.slots_per_segment[handle] * handle.slot_bytes
                # The daemon's memory may outlive it: what is mapped, and faulted in, stays so.
                known = self._past.segments.get(key) if self._past is not None else None
                if known is None or not known.is_of(fd) or known.size_bytes != size:
                    known = SharedMapping(fd, size)
                life.segments[key] = known
        except (OSError, ValueError) as error:
            raise RemoteProtocolError(f"SEGMENT cannot be mapped: {error}") from error
        finally:
            os.close(fd)

    def _life_of(self, epoch: bytes) -> _Life | None:
        if self._life is not None and self._life.epoch == epoch:
            return self._life
        past = self._past
        if past is not None and past.usable_until <= time.monotonic():
            self._past = past = None
        return past if past is not None and past.epoch == epoch else None

    def _views(self, life: _Life, handle: Handle, slots: Sequence[int]) -> list[memoryview] | None:
        per, size = life.slots_per_segment.get(handle), handle.slot_bytes
        if per is None:
            return None
        views = []
        for slot in slots:
            index, place = divmod(slot, per)
            segment = life.segments.get((handle, index))
            if segment is None:
                return None
            views.append(segment.view[place * size : (place + 1) * size])
        return views


def _not_begun(why: str) -> PendingCopy:
    pending = PendingCopy()
    pending.end(0, why)
    return pending


COPY_BY_VIEW_MAX: Final = 1 << 20
"""Below it a memoryview assignment is fastest; it holds the GIL, 50 us at most here."""


def copy(target: memoryview, source: memoryview) -> None:
    """Copy equal numbers of bytes; large ones without the GIL."""
    if len(source) <= COPY_BY_VIEW_MAX:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def by_source(sources: bytes) -> list[int]:
    """How many blocks each source had, for `Client.loaded`, of some of a lease's `sources`."""
    counts = Counter(sources)
    return [counts[number] for number in range(max(sources, default=-1) + 1)]


def request_number(request_id: str) -> int:
    """A number for a request that has an id, the same wherever it is asked for; never 0."""
    digest = hashlib.sha256(request_id.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1 or 1


def _check_hashes(hashes: Sequence[bytes]) -> None:
    """Joined on the wire, hashes of other lengths would be cut at the wrong places."""
    if hashes and set(map(len, hashes)) != {HASH_BYTES}:
        raise ValueError(f"a block hash has {HASH_BYTES} bytes")


def _flat(buffer: Buffer, size_bytes: int) -> memoryview:
    view = memoryview(buffer).cast("B")
    if len(view) != size_bytes:
        raise ValueError(f"a block has {size_bytes} bytes, this buffer {len(view)}")
    return view


def _descriptors(control: Sequence[tuple[int, int, bytes]]) -> list[int]:
    found: list[int] = []
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            count = len(data) // 4
            found += struct.unpack(f"{count}i", data[: count * 4])
    return found


__all__ = [
    "DEFAULT_SOCKET",
    "FORMAT_VERSION",
    "HASH_BYTES",
    "Attachment",
    "Client",
    "Handle",
    "Lease",
    "Namespace",
    "NamespaceError",
    "PendingAcquire",
    "PendingCopy",
    "RefusedError",
    "Reservation",
    "by_source",
    "request_number",
]
