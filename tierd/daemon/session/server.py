"""Sessions: what each client may say, and what the daemon answers.

One session's garbage, death or silence ends that session and touches nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any, Final

from tierd import __version__
from tierd.core.hints import PrefixHint, Priority
from tierd.core.l2.leases import SlotLease
from tierd.core.l2.space import Space
from tierd.core.reasons import Refusal
from tierd.daemon.lifecycle.listening import EngineSocket
from tierd.daemon.node import Node
from tierd.daemon.session.acquiring import Patience
from tierd.daemon.session.orders import Orders
from tierd.daemon.session.transport import SocketTransport, Transport
from tierd.errors import NamespaceError, RefusedError, RemoteProtocolError
from tierd.memory.arena import Segment as ArenaSegment
from tierd.types import Namespace
from tierd.wire import messages as m
from tierd.wire.session import Role, WireSession, encode, version_error

log = logging.getLogger("tierd")

ACQUIRES_IN_FLIGHT_MAX: Final = 256
"""Waiting ACQUIREs a session; the next one is answered as a miss at once."""

HANDLES_MAX: Final = 1024
"""Registrations a session."""

SESSIONS_MAX: Final = 1024
"""Connected clients; a node has tens of engine processes."""

REFUSED_MAX: Final = 16
"""Refused clients that may take their time to read why; further ones are only cut off."""

ACCEPT_PAUSE_S: Final = 1
"""Pause after a failed accept, which would otherwise fail again at once."""

_REFUSED: Final = {
    Refusal.PRESENT: m.SLOT_PRESENT,
    Refusal.BUSY: m.SLOT_REFUSED,
    Refusal.NO_ROOM: m.SLOT_REFUSED,
}


class Session:
    """One client. `on_closed` of the transport must call `closed` exactly once."""

    def __init__(self, owner: int, node: Node, peer: str, pid: int = 0) -> None:
        """`pid` is the client's process, 0 if it is not known."""
        self.owner = owner
        self.pid = pid
        self.client = peer
        self.transport: Transport | None = None
        self._node = node
        self._wire = WireSession(Role.DAEMON, self._handle)
        self._spaces: dict[int, Space] = {}
        self._wants_segments: set[int] = set()
        self._acquires: dict[int, asyncio.Task[None]] = {}
        self._patience: dict[int, Patience] = {}
        self._over = False
        self._next_handle = 0
        self._lease_ttl_s = 0
        self._copies = node.copies_of(owner, self._send)
        self._orders = Orders(node, self._send)
        self._inventory = node.inventory_of(self._send)
        self._engine: int | None = None
        self._guard: int | None = None
        # The session layer lets only these through; a dict costs less than a match.
        self._handlers: dict[type[m.Message], Callable[[Any], None]] = {
            m.Hello: self._hello,
            m.Register: self._register,
            m.Acquire: self._acquire,
            m.Release: self._release,
            m.Cancel: self._cancel,
            m.Reserve: self._reserve,
            m.Commit: self._commit,
            m.Abort: self._abort,
            m.Status: self._status,
            m.Ready: self._ready,
            m.Hint: self._hint,
            m.Export: self._copies.export,
            m.DropExport: self._copies.drop_export,
            m.Detach: self._copies.detach,
            m.Store: self._copies.store,
            m.Load: self._copies.load,
            m.Flush: self._orders.flush,
            m.Scrub: self._orders.scrub,
            m.StopScrub: self._orders.stop_scrub,
            m.Describe: self._orders.describe,
            m.Warm: self._warm,
            m.Explain: self._orders.explain,
            m.Inventory: self._inventory.ask,
            m.Teach: self._teach,
            m.Unregister: self._unregister,
            m.Loaded: self._loaded,
        }
        self._fd_handlers: dict[type[m.Message], Callable[[Any, int], None]] = {
            m.Part: self._copies.part,
            m.Attach: self._attach,
        }
        node.listen(self._announce)

    def data(self, chunk: memoryview, fds: Sequence[int] = ()) -> None:
        """Bytes from the client, and descriptors, which are this object's from now on."""
        if self._over:
            _close(fds)
            return
        try:
            self._wire.receive(chunk, fds)
        except RemoteProtocolError as error:
            self._node.count("protocol_errors_total")
            log.warning(
                "session %d (%s) ended: %s", self.owner, self.client, error, extra=self._extra()
            )
            self._end(m.Error(0, str(error)))
        except Exception:  # our bug ends this session, not the daemon
            self._node.count("internal_errors_total")
            log.exception(
                "session %d (%s) ended by a bug of ours",
                self.owner,
                self.client,
                extra=self._extra(),
            )
            self._end(m.Error(0, "internal error of the daemon"))

    def closed(self) -> None:
        """The peer has closed its end: it no longer touches what it had reserved."""
        self._over = True
        self._node.unlisten(self._announce)
        self._node.forget_client(self.owner)
        for task in self._acquires.values():
            task.cancel()
        self._orders.close()
        self._inventory.close()
        self._copies.close(partial(self._node.drop_owner, self.owner))
        for handle in list(self._spaces):
            self._drop_handle(handle, known_s=self._lease_ttl_s)
        _close(self._wire.take_fds())
        if self._guard is not None:
            os.close(self._guard)
            self._guard = None
        if self._engine is not None:
            asyncio.get_running_loop().remove_reader(self._engine)
            os.close(self._engine)
            self._engine = None

    def _end(self, error: m.Error) -> None:
        self._over = True
        self._send(error)
        if self.transport is not None:
            self.transport.finish()

    def _send(self, message: m.Message, fd: int | None = None) -> None:
        if self.transport is not None:
            self.transport.send(encode(message, 0 if fd is None else 1), fd)

    def _extra(self) -> dict[str, object]:
        """Fields of the session's lines in the journal."""
        return {"tierd": {"session": self.owner, "client": self.client, "client_pid": self.pid}}

    def _handle(self, message: m.Message, fds: tuple[int, ...]) -> None:
        if self._over:
            _close(fds)
        elif fds:
            self._fd_handlers[type(message)](message, fds[0])
        else:
            self._handlers[type(message)](message)

    def _release(self, message: m.Release) -> None:
        self._node.release(message.lease, self.owner)

    def _abort(self, message: m.Abort) -> None:
        abort = partial(self._node.abort, self.owner, message.reservation)
        self._copies.after_filling(message.reservation, abort)

    def _cancel(self, message: m.Cancel) -> None:
        task = self._acquires.get(message.call)
        if task is not None:
            task.cancel()
        self._orders.cancel(message.call)

    def _ready(self, message: m.Ready) -> None:
        patience = self._patience.get(message.call)
        if patience is not None and self._node.is_best_effort:
            patience.end()

    def _hint(self, message: m.Hint) -> None:
        if message.priority > max(Priority):
            raise RemoteProtocolError(f"HINT has a priority of {message.priority}")
        spaces = self._named(message.handles)
        hint = PrefixHint(
            message.pin_ms, message.next_use_ms, Priority(message.priority), message.session_ended
        )
        self._node.hint(spaces, m.split_hashes(message.hashes), hint)

    def _warm(self, message: m.Warm) -> None:
        self._orders.warm(message, self._space(message.handle))

    def _teach(self, message: m.Teach) -> None:
        hashes = m.split_hashes(message.hashes)
        uses, ages_s = m.unpack_slots(message.uses), m.unpack_slots(message.ages_s)
        if not len(hashes) == len(uses) == len(ages_s) <= m.TAUGHT_MAX:
            raise RemoteProtocolError(
                f"TEACH needs uses and an age for each of at most {m.TAUGHT_MAX} hashes"
            )
        self._node.teach(self._space(message.handle).namespace, hashes, uses, ages_s)

    def _loaded(self, message: m.Loaded) -> None:
        spaces = self._named(message.handles)
        if not sum(message.sources) <= message.wanted <= m.LOADED_MAX:
            raise RemoteProtocolError(
                f"LOADED says {sum(message.sources)} of {message.wanted} blocks, at most "
                f"{m.LOADED_MAX}"
            )
        if message.prefill_us > m.LOADED_US_MAX:
            raise RemoteProtocolError(f"LOADED says {message.prefill_us} us")
        self._node.loaded(spaces, message.wanted, message.sources, message.prefill_us)

    def _status(self, message: m.Status) -> None:
        self._send(m.StatusReply(message.call, self._node.status()))

    def _hello(self, message: m.Hello) -> None:
        if message.version != m.PROTOCOL_VERSION:
            log.warning("session %d: client speaks protocol %d", self.owner, message.version)
            self._end(version_error(message.version))
            return
        self.client = message.client[:80]
        self._node.name_client(self.owner, self.client)
        ttl_ms = self._node.lease_ttl_ns // 1_000_000
        self._lease_ttl_s = -(-ttl_ms // 1000)
        self._send(m.Welcome(m.PROTOCOL_VERSION, self._node.epoch, __version__, ttl_ms))

    def _register(self, message: m.Register) -> None:
        try:
            if len(self._spaces) >= HANDLES_MAX:
                raise RefusedError(f"a session registers at most {HANDLES_MAX} namespaces")
            if message.want_segments and self._guard is None:
                self._guard = self._node.writer_guard()
                if self._guard is not None:
                    self._send(m.Guard(), self._guard)
            namespace = Namespace.from_fields(message.namespace)
            space = self._node.register(namespace, to_store=message.want_segments)
        except (NamespaceError, RefusedError, OSError) as error:
            log.warning(
                "session %d (%s): registration refused: %s",
                self.owner,
                self.client,
                error,
                extra=self._extra(),
            )
            self._send(m.Error(message.call, str(error)))
            return
        if self._over:
            # Something that was sent meanwhile has found the client gone, and nobody closes again.
            self._node.unregister(space)
            return
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._spaces[handle] = space
        self._send(m.Registered(message.call, handle, space.slot_bytes, space.slots_per_segment))
        if message.want_segments:
            self._wants_segments.add(handle)
            # A decommitted one is announced when it is filled: a client that faulted it in
            # before would take memory that nobody counts.
            for index, segment in self._node.live_segments(space):
                self._send(m.Segment(handle, index), segment.fd)

    def _unregister(self, message: m.Unregister) -> None:
        self._space(message.handle)
        self._drop_handle(message.handle, worthless=message.worthless)

    def _drop_handle(self, handle: int, known_s: int = 0, *, worthless: bool = False) -> None:
        """The client may come back within `known_s`, with what it has mapped."""
        maps = handle in self._wants_segments
        self._wants_segments.discard(handle)
        space = self._spaces.pop(handle)
        self._node.unregister(space, known_s if maps else 0, worthless=worthless)

    def _announce(self, space: Space, index: int, segment: ArenaSegment) -> None:
        """A segment was created, or filled again: new ones are sent to who maps the space."""
        # A copy: telling a client that has gone ends its session.
        for handle in list(self._wants_segments):
            if self._spaces.get(handle) is space:
                self._send(m.Segment(handle, index), segment.fd)

    def _attach(self, message: m.Attach, fd: int) -> None:
        try:
            space = self._space(message.handle)
        except RemoteProtocolError:
            os.close(fd)
            raise
        self._copies.attach(message, space, fd)
        self._watch_engine()

    def _watch_engine(self) -> None:
        """End the session as soon as its process has ended.

        A child of it may hold the socket open, while the device memory that we have open is
        what a new engine waits for.
        """
        if self._engine is not None or not self.pid or self.transport is None or self._over:
            return
        try:
            self._engine = os.pidfd_open(self.pid)
        except OSError:
            # Of another PID namespace, or gone already: the socket will tell.
            return
        asyncio.get_running_loop().add_reader(self._engine, self.transport.close)

    def _space(self, handle: int) -> Space:
        space = self._spaces.get(handle)
        if space is None:
            raise RemoteProtocolError(f"handle {handle} is not registered")
        return space

    def _named(self, handles: Sequence[int]) -> list[Space]:
        """The namespaces of the handles of a call that may name several."""
        if not 1 <= len(handles) <= m.HANDLES_PER_CALL_MAX:
            raise RemoteProtocolError(
                f"a call names 1 to {m.HANDLES_PER_CALL_MAX} handles, not {len(handles)}"
            )
        return [self._space(handle) for handle in handles]

    # --- store ----------------------------------------------------------------------

    def _reserve(self, message: m.Reserve) -> None:
        space = self._space(message.handle)
        hashes = m.split_hashes(message.hashes)
        parents = m.split_hashes(message.parents)
        if len(parents) != len(hashes):
            raise RemoteProtocolError("RESERVE needs one parent a hash")
        reservation = self._node.reserve(self.owner, space, hashes, parents)
        slots = [s if s >= 0 else _REFUSED[Refusal(s)] for s in reservation.slots]
        self._send(m.Reserved(message.call, reservation.reservation_id, m.pack_slots(slots)))
        # After the reply: the client copies while room for its next call is made.
        self._node.make_room_ahead(space, len(hashes))

    def _commit(self, message: m.Commit) -> None:
        if self._copies.is_filling(message.reservation):
            raise RemoteProtocolError("COMMIT of a reservation that is still being filled")
        count = self._node.commit_count(self.owner, message.reservation, message.blocks)
        # The reply first: the client goes on while the index is brought up to date, and no
        # other message is looked at before that is done.
        self._send(m.Committed(message.call, count))
        self._node.commit(self.owner, message.reservation, message.blocks)

    # --- acquire --------------------------------------------------------------------

    def _acquire(self, message: m.Acquire) -> None:
        if message.call in self._acquires:
            raise RemoteProtocolError(f"call {message.call} is in flight already")
        spaces = self._named(message.handles)
        asked = m.split_hashes(message.hashes)
        hashes = asked[message.own :]
        settled, lease, resident = self._node.acquire_now(
            self.owner, spaces, hashes, message.prefill_tokens_per_s
        )
        if not settled and len(self._acquires) >= ACQUIRES_IN_FLIGHT_MAX:
            self._node.count("acquires_refused_total")
            settled = True
        if settled:
            self._acquired(message.call, lease)
        self._node.note_request(spaces, asked, message.request, message.own)
        if settled:
            return
        call, node = message.call, self._node
        deadline_ns = node.acquire_deadline_ns(
            spaces[0],
            len(hashes) - resident,
            waited_ms=message.waited_ms,
            client_ms=message.deadline_ms,
        )
        self._patience[call] = patience = Patience()
        ask = partial(
            node.acquire,
            self.owner,
            spaces,
            hashes,
            deadline_ns,
            patience=patience,
            waited_ms=message.waited_ms,
            prefill_tokens_per_s=message.prefill_tokens_per_s,
        )
        self._acquires[call] = task = node.spawn(
            partial(self._acquire_slowly, call, ask), "acquire"
        )
        task.add_done_callback(partial(self._acquire_over, call))

    async def _acquire_slowly(
        self, call: int, ask: Callable[[], Awaitable[SlotLease | None]]
    ) -> None:
        lease = await ask()
        if not self._over:
            self._acquired(call, lease)
        elif lease is not None:
            self._node.release(lease.lease_id, self.owner)

    def _acquire_over(self, call: int, task: asyncio.Task[None]) -> None:
        """Answer a miss if the task could not: it may have been cancelled before its first step."""
        if self._acquires.get(call) is not task:
            return
        self._node.count("acquires_cancelled_total")
        if not self._over:
            self._acquired(call, None)

    def _acquired(self, call: int, lease: SlotLease | None) -> None:
        self._acquires.pop(call, None)
        self._patience.pop(call, None)
        if lease is None:
            self._send(m.Acquired(call, 0, 0, b"", 0, b""))
            return
        blob = b"".join(m.pack_slots(slots) for _, slots in lease.parts)
        count = len(lease.parts[0][1])
        self._send(m.Acquired(call, lease.lease_id, count, blob, lease.expires_ns, lease.sources))


class Server:
    """Accepts clients on a listening unix socket and runs their sessions."""

    def __init__(self, node: Node, allow_uids: frozenset[int]) -> None:
        self._node = node
        self.allow_uids = allow_uids
        self._owners = itertools.count(1)
        self._transports: set[SocketTransport] = set()
        self._refused: set[SocketTransport] = set()
        self._socket: EngineSocket | None = None
        self._listener: socket.socket | None = None

    def listen(self, where: EngineSocket) -> None:
        """Start accepting; the listener is this object's from now on."""
        where.listener.setblocking(False)
        self._socket, self._listener = where, where.listener
        asyncio.get_running_loop().add_reader(where.listener.fileno(), self._accept)

    def allow(self, uids: Collection[int]) -> None:
        """Let these users in from now on, root and the daemon's own if none is named."""
        self.allow_uids = frozenset(uids) or default_allow_uids()
        if self._socket is not None:
            self._socket.open_to(self.allow_uids)

    def stop_listening(self) -> None:
        """Accept nobody any more; idempotent."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    def close(self) -> None:
        """End all sessions."""
        self.stop_listening()
        for transport in [*self._transports, *self._refused]:
            transport.close()

    @property
    def sessions(self) -> int:
        """Connected clients."""
        return len(self._transports)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # EMFILE and the like: clients wait in the backlog and try again by themselves.
            self._node.count("accept_failed_total")
            log.warning("cannot accept a client, next try in %d s: %s", ACCEPT_PAUSE_S, error)
            loop, fd = asyncio.get_running_loop(), self._listener.fileno()
            loop.remove_reader(fd)
            loop.call_later(ACCEPT_PAUSE_S, self._resume)
            return
        pid, uid = _peer_credentials(sock)
        if uid not in self.allow_uids:
            self._refuse(
                sock, pid, f"uid {uid} may not connect: see allow_uids in the configuration"
            )
        elif len(self._transports) >= SESSIONS_MAX:
            self._refuse(sock, pid, f"{SESSIONS_MAX} clients are connected already")
        else:
            self.adopt(sock, f"pid {pid}", pid)

    def _resume(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def adopt(self, sock: socket.socket, peer: str, pid: int = 0) -> Session:
        """Run a session on a connected socket."""
        session = Session(next(self._owners), self._node, peer, pid)
        transport: SocketTransport

        def closed() -> None:
            self._transports.discard(transport)
            session.closed()

        transport = SocketTransport(sock, session.data, closed)
        session.transport = transport
        self._transports.add(transport)
        return session

    def _refuse(self, sock: socket.socket, pid: int, reason: str) -> None:
        self._node.count("clients_refused_total")
        log.warning("client with pid %d refused: %s", pid, reason)
        if len(self._refused) >= REFUSED_MAX:
            sock.close()
            return
        # Closed at once, with its greeting unread, it would reset the peer before it has
        # read the reason.
        transport = SocketTransport(
            sock, lambda _, fds: _close(fds), lambda: self._refused.discard(transport)
        )
        self._refused.add(transport)
        transport.send(encode(m.Error(0, reason)))
        transport.finish()


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _peer_credentials(sock: socket.socket) -> tuple[int, int]:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def default_allow_uids() -> frozenset[int]:
    """Root and the daemon's own user."""
    return frozenset({0, os.getuid()})
