"""The client of a tierd daemon: synchronous, without threads and without an event loop.

It is made to run inside an engine. No call waits longer than its timeout, and while the
daemon is away every call returns a miss at once. Block bytes never cross the socket: the
caller copies them to and from slots of shared memory that both sides have mapped.

The simple API is `register`, `put` and `get`. An engine that must not wait uses
`begin_acquire`, `lease_views` and `release` to load, and `reserve`, `commit` and `abort`
to store. `attach`, `begin_load` and `begin_store` have the daemon make the copies.
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
from tierd.client.attaching import Attachment, Attachments, PendingCopy, Probe
from tierd.errors import DisconnectedError, NamespaceError, RefusedError, RemoteProtocolError
from tierd.shared_memory.exports import NO_EVENT, Export, PageLayout
from tierd.shared_memory.mapping import SharedMapping
from tierd.types import HASH_BYTES, Namespace
from tierd.wire import messages as m
from tierd.wire.session import Role, WireSession, encode

if TYPE_CHECKING:
    from typing import Self

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


class _Incarnation:
    """State that is valid for one incarnation of the daemon only."""

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
    """One registered namespace. It stays valid when the connection breaks.

    `ready` says whether it can be used now. `refusal` is the daemon's reason once it has
    refused the namespace, else None. `slot_bytes` is the size of a slot: `block_bytes` of the
    namespace, rounded up to whole pages of 4,096 bytes.
    """

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
    """The right to read the slots of `blocks` readable blocks until `expires_ns`.

    `expires_ns` is a time of CLOCK_MONOTONIC. The first leased block is number `own` of the
    acquire. `slots[i][k]` is the slot of leased block k for handle i. `sources[k]` says which
    tier had it: 0 for host memory, n + 1 for storage tier n. The daemon owns the slots: read
    them only, and throw away a copy that ended after `expires_ns`. `release` ends the lease.
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
    """An acquire under way. Once `done`, `lease` is the result, or None if nothing was found."""

    __slots__ = ("call", "done", "handles", "lease")

    def __init__(self, call: int, handles: int) -> None:
        self.call = call
        self.handles = handles
        self.done = False
        self.lease: Lease | None = None


class Reservation:
    """Slots to fill, one for each hash of `reserve`.

    `slots[i]` is None where hash i got no slot: `present[i]` then says whether the daemon has
    the block already; if not, the daemon refused it. `views[i]` is the whole slot, `slot_bytes`
    long, and writable until `commit` or `abort`.
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
    """A session with the daemon at `socket_path`. It reconnects by itself after it breaks.

    All methods are thread-safe; a call that waits blocks the calls of other threads.
    `call_timeout_ms` bounds every call that waits for the daemon. `map_segments=False` suits a
    caller that looks blocks up and never touches their bytes. `name` appears in the daemon's
    log. `last_error` says why the last connection or call failed.

    A context manager: leaving the block calls `close`.
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
        self._incarnation: _Incarnation | None = None
        self._past: _Incarnation | None = None
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._receive_timeout_s: float | None = None
        self._turned_away = ""
        """Why the daemon that was last met wants no session with this process."""
        self.last_error = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- session --------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether a daemon has answered the greeting of the present session."""
        return self._incarnation is not None

    @property
    def epoch(self) -> bytes:
        """Identity of the connected daemon's incarnation, 8 bytes; empty without a connection."""
        return self._incarnation.epoch if self._incarnation is not None else b""

    def fileno(self) -> int:
        """The socket's descriptor, to select on; -1 when disconnected. The client owns it."""
        return self._sock.fileno() if self._sock is not None else -1

    def register(self, namespace: Namespace) -> Handle:
        """Register a namespace and wait for the daemon's answer, at most `call_timeout_ms`.

        While the daemon is away the handle comes back at once, not `ready`; the client registers
        it when it has connected. Raises NamespaceError for a namespace that no daemon would
        accept, and RefusedError if this daemon refuses the namespace or this process.
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
        """Register without waiting: `Handle.ready` and `Handle.refusal` show the answer later.

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
        """End the use of a handle. Never blocks; a second call does nothing.

        Detach its attachments first. Its leases and reservations stay valid. `worthless` says
        that nobody will ask for the namespace's blocks again: the daemon drops them.
        """
        with self._lock:
            if handle not in self._handles:
                return
            self._handles.remove(handle)
            handle.refusal = "it is registered no more"
            for incarnation in (self._incarnation, self._past):
                if incarnation is not None:
                    incarnation.forget(handle)
            number, handle.number = handle.number, None
            if number is not None:
                self._end_handle(number, worthless)
            elif handle in self._registering.values():
                self._leaving[handle] = worthless

    def _end_handle(self, number: int, worthless: bool) -> None:
        self._ended.add(number)
        self._send(m.Unregister(number, worthless))

    def poll(self) -> None:
        """Connect if a retry is due, then send and receive as much as possible. Never blocks."""
        with self._lock:
            if self._sock is None and not self._connect():
                return
            self._flush()
            self._attachments.try_again(time.monotonic())
            while self._receive(wait_s=0.0):
                pass

    def wait(self, timeout_s: float) -> None:
        """Like `poll`, but wait up to `timeout_s` for a message of the daemon."""
        with self._lock:
            if self._sock is None and not self._connect():
                return
            self._flush()
            self._attachments.try_again(time.monotonic())
            if self._receive(wait_s=timeout_s):
                while self._receive(wait_s=0.0):
                    pass

    def close(self) -> None:
        """End the session. The next call would connect again, but earlier leases are lost."""
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
        """Ask for a lease of the longest prefix of `hashes` that all `handles` have. Never blocks.

        `hashes` are 32 bytes each, in the order of the prefix; hashes beyond KEYS_PER_CALL_MAX
        are ignored. The daemon answers at the latest after `deadline_ms`. `own` is the number of
        leading blocks that the engine's own cache holds: the lease starts after them.

        `request` identifies a user's request (`request_number`): pass the same number each time
        that the request asks, so that it counts as one use. `waited_ms` is the request's age,
        `prefill_tokens_per_s` the engine's prefill speed; 0 means unknown for both.
        Raises ValueError for a hash of a wrong length.
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
        if self._incarnation is None or not hashes or not known or len(known) < len(handles):
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
        """`begin_acquire`, and wait for the answer: at most `deadline_ms` plus `call_timeout_ms`.

        Returns None when no tier has the first block, or while the daemon is away. Call
        `release` when done, and `loaded` to have the daemon count the hit.
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
        """Tell the daemon that the engine could compute the request now. Never blocks.

        The daemon may then answer before the deadline with the prefix that it has.
        """
        with self._lock:
            if pending.call in self._pending:
                self._send(m.Ready(pending.call))

    def loaded(
        self, handles: Sequence[Handle], wanted: int, sources: Sequence[int], *, prefill_us: int = 0
    ) -> bool:
        """Report a request's outcome to the daemon, which counts hits and savings. Never blocks.

        The request asked for `wanted` blocks and loaded `sources[s]` blocks from source s instead
        of computing them (s as in `Lease.sources`). `prefill_us` is the time that computing
        the loaded blocks would have taken, in microseconds; 0 means unknown. Returns False, and
        reports nothing, while the daemon is away.
        """
        known = [handle.number for handle in handles if handle.number is not None]
        with self._lock:
            if self._incarnation is None or not known or len(known) < len(handles):
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
        """Tell the daemon how the prefix `hashes` will be used. Never blocks.

        `hashes` start at the prefix's first block; hashes beyond KEYS_PER_CALL_MAX are ignored.
        `pin_ms` keeps the prefix for that time. `next_use_ms` is the time until its likely next
        use. A `priority` below 0 evicts it earlier, above 0 later. `session_ended` evicts it
        first. The daemon honours hints within configured bounds, also for blocks that arrive
        later. A hint is lost while the daemon is away.
        """
        _check_hashes(hashes)
        known = [handle.number for handle in handles if handle.number is not None]
        with self._lock:
            if self._incarnation is None or not hashes or not known or len(known) < len(handles):
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
        """Give up an acquire. A lease that has come, or comes later, is released. Never blocks."""
        with self._lock:
            pending.done = True
            if pending.lease is not None:
                self.release(pending.lease)
                pending.lease = None
            elif pending.call in self._pending:
                self._send(m.Cancel(pending.call))

    def release(self, lease: Lease) -> None:
        """End a lease. Never blocks; a second release does nothing."""
        with self._lock:
            if lease.epoch == self.epoch:
                self._send(m.Release(lease.lease_id))

    def lease_views(
        self, handle: Handle, epoch: bytes, slots: Sequence[int]
    ) -> list[memoryview] | None:
        """Views of leased slots, `slot_bytes` each; None if a slot is not mapped in this process.

        `epoch` and `slots` are the lease's. The daemon owns the memory: do not write to it. The
        views of a daemon that has died stay readable until its last lease would have ended.
        Never blocks.
        """
        with self._lock:
            incarnation = self._incarnation_of(epoch)
            if incarnation is None:
                # The segment may be on its way.
                self.poll()
                incarnation = self._incarnation_of(epoch)
            if incarnation is None:
                return None
            views = self._views(incarnation, handle, slots)
            if views is None:
                self.poll()
                views = self._views(incarnation, handle, slots)
            return views

    # --- storing --------------------------------------------------------------------

    def reserve(
        self, handle: Handle, hashes: Sequence[bytes], parents: Sequence[bytes]
    ) -> Reservation | None:
        """Reserve slots for new blocks; `commit` or `abort` must follow.

        `parents[i]` is the hash of the block before `hashes[i]`, or the namespace's `hash_root`
        for a first block. Waits at most `call_timeout_ms`. Returns None while the daemon is away
        or refuses the namespace. Raises ValueError for more than KEYS_PER_CALL_MAX hashes, for
        lists of different lengths and for a hash of a wrong length.
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
            incarnation = self._incarnation
            if not isinstance(reply, m.Reserved) or incarnation is None:
                return None
            raw = m.unpack_slots(reply.slots)
            slots = [None if slot >= m.SLOT_PRESENT else slot for slot in raw]
            wanted = [slot for slot in slots if slot is not None]
            mapped = self._views(incarnation, handle, wanted)
            if mapped is None:
                self._send(m.Abort(reply.reservation))
                return None
            views = iter(mapped)
            reservation = Reservation(
                reply.reservation,
                incarnation.epoch,
                slots,
                [slot == m.SLOT_PRESENT for slot in raw],
                [None if slot is None else next(views) for slot in slots],
            )
            if wanted and self._sock is not None:
                self._filling[reservation] = self._sock
            return reservation

    def commit(self, reservation: Reservation, count: int | None = None) -> list[bool]:
        """Publish the slots of a reservation, or only the first `count` of them.

        Returns for each hash of `reserve` whether the daemon has the block now. All False but
        for `present` blocks if the session broke meanwhile. Waits at most `call_timeout_ms`.
        The views of the reservation are the daemon's again.
        """
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
        """Return the slots of a reservation without publishing them. Never blocks."""
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

        `exports` are the allocations, `layout` the place of each block in them. `events` are
        handles of events that copies may wait for (`native_handle`, `counter_handle`). `gate_fd`
        is the memfd of the caller's gate. `layer_ends` are the offsets in a block, in bytes, at
        which layers end; a load brings the layers in this order.

        The caller keeps its descriptors open until `detach`; the client does not close them.
        The client attaches again after each reconnect and calls `probe(first)` each time: it
        fills one block that the engine does not use, returns its number and the SHA-256 of its
        bytes in the order of the runs, and leaves the block alone until the daemon has answered.
        `first` is False once blocks may be in use.
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
        """End an attachment, and wait at most `call_timeout_ms` for the daemon to stop copying.

        Returns False if the daemon did not confirm in time: pages may still be read. A gate's
        `call_off` ends loads in any case.
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
        """Have the daemon copy pages into the slots of a reservation. Never blocks.

        `blocks[i]` is the engine's block number for the i-th granted slot. The copy starts when
        event number `event` of the attachment has reached `value`; NO_EVENT starts it at once.
        Call `commit` or `abort` once the copy is done.
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
        """Have the daemon copy leased slots into pages. Never blocks.

        `epoch` and `expires_ns` are the lease's; slot `slots[i]` goes to the engine's block
        `blocks[i]`. The caller has prepared number `job` of its gate. It must not use the pages
        or the number again until the copy is done or the gate has called the job off, because
        the session may end while the daemon writes pages.
        """
        with self._lock:
            number = attachment.number
            if number is None or self._incarnation is None or self._incarnation.epoch != epoch:
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
        """Store blocks given as (hash, parent, buffer). The caller keeps the buffers.

        Returns for each block whether the daemon has it now. False means that the daemon is
        away, that it has no room, or that another session is storing the block. Raises
        ValueError for a buffer that does not hold exactly the namespace's `block_bytes`, and
        RefusedError if the daemon refuses the namespace or this process.
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
        """Return copies of the longest prefix of `hashes` that arrives before the deadline.

        Each copy has the namespace's `block_bytes`. `into` gives writable buffers of that size
        to fill; without it the client allocates new ones. The caller owns them in both cases. The
        contents of `into` beyond the returned prefix are undefined. Returns [] on a miss and
        while the daemon is away. Raises RefusedError if the daemon refuses the namespace or this
        process, and ValueError for a buffer of a wrong size.

        The daemon does not ask storage tiers for fewer than `prefetch.min_tokens` missing
        tokens; the log and `last_error` say so when that cut the result short.
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
        """Log, once per incarnation, that tiers are not asked for so few missing tokens."""
        with self._lock:
            incarnation = self._incarnation
            if incarnation is None or incarnation.told_too_short:
                return
            if incarnation.min_tokens is None:
                incarnation.min_tokens = self._min_tokens()
            tokens = missing * handle.namespace.block_tokens
            if incarnation.min_tokens is not None and tokens < incarnation.min_tokens:
                incarnation.told_too_short = True
                self.last_error = (
                    f"{tokens} tokens are missing in host memory, and storage tiers are not asked "
                    f"for fewer than {incarnation.min_tokens} (prefetch.min_tokens of the daemon)"
                )
                log.warning("%s: %s", self._path, self.last_error)

    def _min_tokens(self) -> int | None:
        """The bound of the daemon that is there; 0 if it has no storage tiers."""
        try:
            status = self.status()
        except DisconnectedError:
            return None
        prefetch = status.get("prefetch")
        found = prefetch.get("min_tokens") if isinstance(prefetch, dict) else None
        if not status.get("storage"):
            return 0
        return found if isinstance(found, int) else None

    def populate(self, budget_bytes: int = _POPULATE_BYTES_MAX) -> bool:
        """Fault in at most `budget_bytes` of the mapped segments; True while more remains.

        Runs without the GIL. Without it the first copy to or from each page runs at a tenth of
        memcpy's speed.
        """
        with self._lock:
            segments = (
                list(self._incarnation.segments.values()) if self._incarnation is not None else []
            )
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
        """The daemon's status document. Raises DisconnectedError with the reason if it is away."""
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
        if self._incarnation is not None:
            self._incarnation.usable_until = time.monotonic() + self._incarnation.lease_ttl_s
            self._past, self._incarnation = self._incarnation, None
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
        if self._incarnation is not None:
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
            incarnation = self._incarnation_of(message.epoch)
            self._incarnation = incarnation or _Incarnation(
                message.epoch, message.lease_ttl_ms / 1000
            )
            self._incarnation.usable_until = float("inf")
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
            or self._incarnation is None
            or message.slot_bytes != handle.slot_bytes
            or not message.slots_per_segment
        ):
            raise RemoteProtocolError("REGISTERED does not fit what was registered")
        if handle in self._leaving:
            self._end_handle(message.handle, self._leaving.pop(handle))
            return
        handle.refusal = None
        self._incarnation.slots_per_segment[handle] = message.slots_per_segment
        handle.number = message.handle
        self._attachments.offer(handle)

    def _refused(self, message: m.Error) -> None:
        if message.call == 0:
            self.last_error = message.reason
            if self._incarnation is None:
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
        incarnation = self._incarnation
        if pending is None or incarnation is None or not message.blocks:
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
        lease = Lease(
            message.lease, incarnation.epoch, message.blocks, slots, message.expires_ns, sources
        )
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
            incarnation = self._incarnation
            if handle is None or incarnation is None:
                raise RemoteProtocolError("SEGMENT of a handle that is not registered")
            key = handle, message.segment
            mapped = incarnation.segments.get(key)
            # A namespace that was forgotten meanwhile has others, with the same numbers.
            if mapped is None or not mapped.is_of(fd):
                size = incarnation.slots_per_segment[handle] * handle.slot_bytes
                # The daemon's memory may outlive it: what is mapped, and faulted in, stays so.
                known = self._past.segments.get(key) if self._past is not None else None
                if known is None or not known.is_of(fd) or known.size_bytes != size:
                    known = SharedMapping(fd, size)
                incarnation.segments[key] = known
        except (OSError, ValueError) as error:
            raise RemoteProtocolError(f"SEGMENT cannot be mapped: {error}") from error
        finally:
            os.close(fd)

    def _incarnation_of(self, epoch: bytes) -> _Incarnation | None:
        if self._incarnation is not None and self._incarnation.epoch == epoch:
            return self._incarnation
        past = self._past
        if past is not None and past.usable_until <= time.monotonic():
            self._past = past = None
        return past if past is not None and past.epoch == epoch else None

    def _views(
        self, incarnation: _Incarnation, handle: Handle, slots: Sequence[int]
    ) -> list[memoryview] | None:
        per, size = incarnation.slots_per_segment.get(handle), handle.slot_bytes
        if per is None:
            return None
        views = []
        for slot in slots:
            index, place = divmod(slot, per)
            segment = incarnation.segments.get((handle, index))
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
    "request_number",
]
