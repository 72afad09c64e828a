"""One client's session: dispatches its messages, and ends with it.

A client that sends garbage, dies or falls silent ends its own session and affects no other.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from tierd import __version__
from tierd.core.hints import PrefixHint, Priority
from tierd.core.reasons import Refusal
from tierd.daemon.node import Node
from tierd.daemon.session.acquires import SessionAcquires
from tierd.daemon.session.handles import Handles
from tierd.daemon.session.orders import Orders
from tierd.daemon.session.transport import Transport
from tierd.errors import NamespaceError, RefusedError, RemoteProtocolError
from tierd.wire import messages as m
from tierd.wire.session import Role, WireSession, encode, version_error

log = logging.getLogger("tierd")

_REFUSED: Final = {
    Refusal.PRESENT: m.SLOT_PRESENT,
    Refusal.BUSY: m.SLOT_REFUSED,
    Refusal.NO_ROOM: m.SLOT_REFUSED,
}


class Session:
    """One client. `on_closed` of the transport must call `closed` exactly once."""

    def __init__(self, owner: int, node: Node, peer: str, pid: int = 0) -> None:
        """`pid` is the client's process, 0 if it is unknown."""
        self.owner = owner
        self.pid = pid
        self.client = peer
        self.transport: Transport | None = None
        self._node = node
        self._wire = WireSession(Role.DAEMON, self._handle)
        self._over = False
        self._handles = Handles(node, self._send)
        self._acquires = SessionAcquires(owner, node, self._handles, self._send)
        self._copies = node.copies_of(owner, self._send)
        self._orders = Orders(node, self._send)
        self._inventory = node.inventory_of(self._send)
        self._engine: int | None = None
        """A descriptor of the client's process."""
        # WireSession rejects all other messages. A dict costs less than a match.
        self._handlers: dict[type[m.Message], Callable[[Any], None]] = {
            m.Hello: self._hello,
            m.Register: self._register,
            m.Acquire: self._acquires.ask,
            m.Release: self._release,
            m.Cancel: self._cancel,
            m.Reserve: self._reserve,
            m.Commit: self._commit,
            m.Abort: self._abort,
            m.Status: self._status,
            m.Ready: self._acquires.ready,
            m.Hint: self._hint,
            m.Export: self._copies.exports.add,
            m.DropExport: self._copies.exports.drop,
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
            m.Unregister: self._handles.unregister,
            m.Loaded: self._loaded,
        }
        self._fd_handlers: dict[type[m.Message], Callable[[Any, int], None]] = {
            m.Part: self._copies.exports.add_part,
            m.Attach: self._attach,
        }

    def data(self, chunk: memoryview, fds: Sequence[int] = ()) -> None:
        """Take bytes from the client, and descriptors, which the session owns from now on."""
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
        except Exception:  # a bug of the daemon ends this session only
            self._node.count("internal_errors_total")
            log.exception(
                "session %d (%s) ended by a bug of tierd",
                self.owner,
                self.client,
                extra=self._extra(),
            )
            self._end(m.Error(0, "internal error of the daemon"))

    def closed(self) -> None:
        """The client has closed its end, and no longer touches the slots it has reserved."""
        self._over = True
        self._node.forget_client(self.owner)
        self._acquires.close()
        self._orders.close()
        self._inventory.close()
        self._copies.close(partial(self._node.drop_owner, self.owner))
        self._handles.close()
        _close(self._wire.take_fds())
        if self._engine is not None:
            asyncio.get_running_loop().remove_reader(self._engine)
            os.close(self._engine)
            self._engine = None

    def _end(self, error: m.Error) -> None:
        self._over = True
        self._acquires.stop()
        self._send(error)
        if self.transport is not None:
            self.transport.finish()

    def _send(self, message: m.Message, fd: int | None = None) -> None:
        if self.transport is not None:
            self.transport.send(encode(message, 0 if fd is None else 1), fd)

    def _extra(self) -> dict[str, object]:
        """Fields of the session's log lines in the journal."""
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
        self._acquires.cancel(message.call)
        self._orders.cancel(message.call)

    def _hint(self, message: m.Hint) -> None:
        if message.priority > max(Priority):
            raise RemoteProtocolError(f"HINT has a priority of {message.priority}")
        spaces = self._handles.spaces(message.handles)
        hint = PrefixHint(
            message.pin_ms, message.next_use_ms, Priority(message.priority), message.session_ended
        )
        self._node.hint(spaces, m.split_hashes(message.hashes), hint)

    def _warm(self, message: m.Warm) -> None:
        self._orders.warm(message, self._handles.space(message.handle))

    def _teach(self, message: m.Teach) -> None:
        hashes = m.split_hashes(message.hashes)
        uses, ages_s = m.unpack_slots(message.uses), m.unpack_slots(message.ages_s)
        if not len(hashes) == len(uses) == len(ages_s) <= m.TAUGHT_MAX:
            raise RemoteProtocolError(
                f"TEACH needs uses and an age for each of at most {m.TAUGHT_MAX} hashes"
            )
        self._node.teach(self._handles.space(message.handle).namespace, hashes, uses, ages_s)

    def _loaded(self, message: m.Loaded) -> None:
        spaces = self._handles.spaces(message.handles)
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
            log.warning(
                "session %d refused: its client speaks protocol %d, tierd speaks %d",
                self.owner,
                message.version,
                m.PROTOCOL_VERSION,
            )
            self._end(version_error(message.version))
            return
        self.client = message.client[:80]
        self._node.name_client(self.owner, self.client)
        ttl_ms = self._node.lease_ttl_ns // 1_000_000
        self._handles.lease_ttl_s = -(-ttl_ms // 1000)
        self._send(m.Welcome(m.PROTOCOL_VERSION, self._node.epoch, __version__, ttl_ms))

    def _register(self, message: m.Register) -> None:
        try:
            self._handles.register(message)
        except (NamespaceError, RefusedError, OSError) as error:
            log.warning(
                "session %d (%s): registration refused: %s",
                self.owner,
                self.client,
                error,
                extra=self._extra(),
            )
            self._send(m.Error(message.call, str(error)))

    def _attach(self, message: m.Attach, fd: int) -> None:
        try:
            space = self._handles.space(message.handle)
        except RemoteProtocolError:
            os.close(fd)
            raise
        self._copies.attach(message, space, fd)
        self._watch_engine()

    def _watch_engine(self) -> None:
        """End the session as soon as the client's process ends.

        A child process may keep the socket open, and a new engine cannot use the device memory
        that the daemon has open for this session.
        """
        if self._engine is not None or not self.pid or self.transport is None or self._over:
            return
        try:
            self._engine = os.pidfd_open(self.pid)
        except OSError:
            # Another PID namespace, or gone already: the socket reports its end.
            return
        asyncio.get_running_loop().add_reader(self._engine, self.transport.close)

    # --- store ----------------------------------------------------------------------

    def _reserve(self, message: m.Reserve) -> None:
        space = self._handles.space(message.handle)
        hashes = m.split_hashes(message.hashes)
        parents = m.split_hashes(message.parents)
        if len(parents) != len(hashes):
            raise RemoteProtocolError("RESERVE needs one parent per hash")
        reservation = self._node.reserve(self.owner, space, hashes, parents)
        slots = [s if s >= 0 else _REFUSED[Refusal(s)] for s in reservation.slots]
        self._send(m.Reserved(message.call, reservation.reservation_id, m.pack_slots(slots)))
        # After the reply: the client copies while the daemon makes room for its next call.
        self._node.make_room_ahead(space, len(hashes))

    def _commit(self, message: m.Commit) -> None:
        if self._copies.is_filling(message.reservation):
            raise RemoteProtocolError("COMMIT names a reservation that a copy is still filling")
        count = self._node.commit_count(self.owner, message.reservation, message.blocks)
        # The reply first: the client goes on while the index is updated. No other message is
        # handled before the update.
        self._send(m.Committed(message.call, count))
        self._node.commit(self.owner, message.reservation, message.blocks)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
