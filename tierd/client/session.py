"""A client's sessions with the daemon: connects, registers namespaces, and dispatches messages.

It composes the client's parts: connection, waiting calls, registrations, acquires, slots being
filled, and attachments. One lock guards them all.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from tierd import __version__
from tierd.client.attaching import Attachments
from tierd.client.connection import DaemonConnection
from tierd.client.filling import Filling
from tierd.client.known import KnownIncarnations
from tierd.client.leases import Acquires
from tierd.client.registering import Registrations
from tierd.client.values import Handle
from tierd.client.waiting import WaitingCalls
from tierd.errors import RefusedError, RemoteProtocolError
from tierd.types import Namespace
from tierd.wire import messages as m

if TYPE_CHECKING:
    from typing import Self

DEFAULT_SOCKET: Final = "/run/tierd/tierd.sock"

_PLAIN_REPLIES: Final = frozenset({m.Reserved, m.Committed, m.StatusReply})


class ClientSession:
    """A session with the daemon, opened again when it breaks, and its registered namespaces."""

    def __init__(
        self,
        socket_path: str = DEFAULT_SOCKET,
        *,
        name: str = "client",
        map_segments: bool = True,
        call_timeout_ms: int = 1000,
    ) -> None:
        self._name = name
        self._lock = threading.RLock()
        self._connection = DaemonConnection(
            socket_path,
            takes_fds=map_segments,
            dispatch=self._dispatch,
            opened=self._opened,
            lost=self._lost,
        )
        self._waiting = WaitingCalls(self._connection, call_timeout_ms / 1000)
        self._incarnations = KnownIncarnations()
        self._attachments = Attachments(self._connection.send, self._connection.next_call)
        self._registrations = Registrations(
            self._connection,
            self._incarnations,
            map_segments=map_segments,
            on_registered=self._attachments.offer,
        )
        self._acquires = Acquires(self._connection, self._incarnations)
        self._filling = Filling()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def last_error(self) -> str:
        """Why the last connection or call failed; empty after a success."""
        return self._connection.last_error

    @property
    def connected(self) -> bool:
        """Whether the daemon has answered the greeting of the present session."""
        return self._incarnations.now is not None

    @property
    def epoch(self) -> bytes:
        """Identity of the connected daemon's incarnation, 8 bytes; empty: not connected."""
        return self._incarnations.now.epoch if self._incarnations.now is not None else b""

    def fileno(self) -> int:
        """The socket's descriptor, to select on; -1 when disconnected. The client owns it."""
        return self._connection.sock.fileno() if self._connection.sock is not None else -1

    def register(self, namespace: Namespace) -> Handle:
        """Register a namespace and wait for the daemon's answer, at most `call_timeout_ms`.

        While the daemon is away, returns a handle that is not `ready` at once; the client registers
        it when it has connected. Raises NamespaceError for a namespace that no daemon would
        accept, and RefusedError if this daemon refuses the namespace or this process.
        """
        with self._lock:
            handle = self.begin_register(namespace)
            try:
                self._check_allowed(handle)
            except RefusedError:
                self._registrations.drop(handle)
                raise
            return handle

    def begin_register(self, namespace: Namespace) -> Handle:
        """Register without waiting: `Handle.ready` and `Handle.refusal` show the answer later.

        Raises NamespaceError for a namespace that no daemon would accept. Never blocks.
        """
        namespace.validate()
        with self._lock:
            handle = Handle(namespace)
            self._registrations.add(handle)
            if self._connection.sock is None:
                self.poll()
            return handle

    def unregister(self, handle: Handle, *, worthless: bool = False) -> None:
        """End the use of a handle. Never blocks; a second call does nothing.

        Detach its attachments first. Its leases and reservations stay valid. `worthless`: no
        client will ask for the namespace's blocks again, so the daemon drops them.
        """
        with self._lock:
            self._registrations.unregister(handle, worthless)

    def poll(self) -> None:
        """Connect if a retry is due, then send and receive without waiting. Never blocks."""
        with self._lock:
            if not self._connection.connect():
                return
            self._connection.flush()
            self._attachments.try_again(time.monotonic())
            while self._connection.receive(wait_s=0.0):
                pass

    def wait(self, timeout_s: float) -> None:
        """Like `poll`, but wait at most `timeout_s` for a message of the daemon."""
        with self._lock:
            if not self._connection.connect():
                return
            self._connection.flush()
            self._attachments.try_again(time.monotonic())
            if self._connection.receive(wait_s=timeout_s):
                while self._connection.receive(wait_s=0.0):
                    pass

    def close(self) -> None:
        """End the session. The next call would connect again, but earlier leases are lost."""
        with self._lock:
            self._connection.disconnect("closed")
            self._incarnations.forget_past()
            self._connection.retry_now()

    def _check_allowed(self, handle: Handle) -> None:
        """Raise RefusedError if the connected daemon refuses the namespace or this process."""
        with self._lock:
            self._ensure_ready([handle])
            if handle.refusal is not None:
                raise RefusedError(
                    f"{self._connection.path} refuses the namespace: {handle.refusal}"
                )
            if self._connection.turned_away:
                raise RefusedError(
                    f"{self._connection.path} refuses this process: {self._connection.turned_away}"
                )

    def _ensure_ready(self, handles: Sequence[Handle]) -> None:
        """Connect and register, and wait at most a call's timeout for the daemon's answers."""
        if self._incarnations.now is not None:
            for handle in handles:
                if handle.number is None:
                    break
            else:
                return
        self.poll()
        end = time.monotonic() + self._waiting.timeout_s
        while self._connection.sock is not None and not (
            self.connected and all(h.ready or h.refusal for h in handles)
        ):
            left = end - time.monotonic()
            if left <= 0:
                self._connection.disconnect("the daemon does not answer")
                return
            self._connection.receive(wait_s=left)

    # --- called by the connection ------------------------------------------------------

    def _opened(self) -> None:
        hello = f"{self._name} (tierd {__version__})"
        self._connection.send(m.Hello(m.PROTOCOL_VERSION, hello))
        self._registrations.send_all()

    def _lost(self, sock: socket.socket) -> None:
        self._waiting.lost()
        self._filling.lost(sock)
        self._incarnations.lost()
        self._registrations.lost()
        self._attachments.lost()
        self._acquires.lost()

    def _dispatch(self, message: m.Message, fds: tuple[int, ...]) -> None:
        kind = type(message)
        if kind in _PLAIN_REPLIES:
            call = message.call  # type: ignore[union-attr]  # all plain replies have it
            self._waiting.replied(call, message)
        elif isinstance(message, m.Acquired):
            self._acquires.acquired(message)
        elif isinstance(message, m.Segment):
            self._segment(message, fds[0])
        elif isinstance(message, m.Guard):
            self._filling.guard(self._connection.sock, fds[0])
        elif isinstance(message, m.Welcome):
            self._incarnations.welcome(message.epoch, message.lease_ttl_ms / 1000)
            self._connection.welcomed()
        elif isinstance(message, m.Registered):
            self._registrations.registered(message)
        elif isinstance(message, (m.Attached, m.Detached, m.Copied)):
            self._attachments.take(message, time.monotonic())
        elif isinstance(message, m.Error):
            self._refused(message)

    def _refused(self, message: m.Error) -> None:
        call, reason = message.call, message.reason
        if call == 0:
            self._connection.last_error = reason
            if self._incarnations.now is None:
                self._connection.turned_away = reason
        elif not self._registrations.refused(call, reason) and (
            not self._attachments.refused(call, reason, time.monotonic())
        ):
            self._waiting.replied(call, message)

    def _segment(self, message: m.Segment, fd: int) -> None:
        try:
            if self._registrations.has_ended(message.handle):
                return
            handle = self._registrations.of_number(message.handle)
            now = self._incarnations.now
            if handle is None or now is None:
                raise RemoteProtocolError(f"SEGMENT of handle {message.handle}: not registered")
            self._incarnations.map(now, handle, message.segment, fd)
        except (OSError, ValueError) as error:
            raise RemoteProtocolError(
                f"segment {message.segment} cannot be mapped: {error}"
            ) from error
        finally:
            os.close(fd)
