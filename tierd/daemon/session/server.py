"""The listening socket for engines: which clients may connect, and how many.

Accepts clients, refuses those beyond a limit or of other users with a reason, and runs a session
for each of the others.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import struct
from collections.abc import Collection, Sequence
from typing import Final

from tierd.daemon.lifecycle.listening import EngineSocket
from tierd.daemon.node import Node
from tierd.daemon.session.session import Session
from tierd.daemon.session.transport import SocketTransport
from tierd.wire import messages as m
from tierd.wire.session import encode

log = logging.getLogger("tierd")

SESSIONS_MAX: Final = 1024
"""Connected clients; a node has tens of engine processes."""

REFUSED_MAX: Final = 16
"""Refused clients that may still read the reason; further ones are disconnected at once."""

ACCEPT_PAUSE_S: Final = 1
"""Pause after a failed accept, which would fail again at once."""


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
        """Start accepting; the server owns the listener from now on."""
        where.listener.setblocking(False)
        self._socket, self._listener = where, where.listener
        asyncio.get_running_loop().add_reader(where.listener.fileno(), self._accept)

    def allow(self, uids: Collection[int]) -> None:
        """Admit these users from now on; without any, root and the daemon's own user."""
        self.allow_uids = frozenset(uids) or default_allow_uids()
        if self._socket is not None:
            self._socket.open_to(self.allow_uids)

    def stop_listening(self) -> None:
        """Accept no further clients; idempotent."""
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
        """Number of connected clients."""
        return len(self._transports)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Such as EMFILE. Clients wait in the backlog meanwhile.
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
        # Not closed at once: the kernel would reset the connection because of the client's unread
        # greeting, before the client has read the reason.
        transport = SocketTransport(
            sock, lambda _, fds: _close(fds), lambda: self._refused.discard(transport)
        )
        self._refused.add(transport)
        transport.send(encode(m.Error(0, reason)))
        transport.finish()


def default_allow_uids() -> frozenset[int]:
    """Root and the daemon's own user."""
    return frozenset({0, os.getuid()})


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _peer_credentials(sock: socket.socket) -> tuple[int, int]:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid
