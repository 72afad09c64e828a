"""A connection to the daemon: connects, connects again with a growing pause, sends and receives.

It numbers calls, and does not know what messages mean.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from tierd.errors import RemoteProtocolError
from tierd.wire import messages as m
from tierd.wire.session import Role, WireSession, encode

RECONNECT_FIRST_S: Final = 0.05
RECONNECT_MAX_S: Final = 2.0
"""First and longest pause before the client connects again; it doubles each time."""

OUTBOUND_BYTES_MAX: Final = 8 << 20
"""Most unsent bytes. The session to a daemon that reads less ends."""

_DONT_WAIT: Final = int(socket.MSG_DONTWAIT)
_CLOSE_ON_EXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
_SEND_FLAGS: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_RECEIVE_BYTES: Final = 256 << 10
_FD = struct.Struct("i")
_CMSG_SPACE: Final = socket.CMSG_SPACE(16 * 4)


class _Backoff:
    """The pause before the next attempt to connect."""

    def __init__(self) -> None:
        self._at_s = 0.0
        self._pause_s = RECONNECT_FIRST_S

    @property
    def over(self) -> bool:
        """Whether the pause is over."""
        return time.monotonic() >= self._at_s

    def failed(self) -> None:
        """Begin a pause, twice as long as the one before."""
        self._at_s = time.monotonic() + self._pause_s
        self._pause_s = min(self._pause_s * 2, RECONNECT_MAX_S)

    def succeeded(self) -> None:
        """Make the next pause a short one."""
        self._pause_s = RECONNECT_FIRST_S

    def skip(self) -> None:
        """End the pause now."""
        self._at_s = 0.0


class DaemonConnection:
    """A socket to the daemon at `path`, opened again when it breaks. Used under the client's lock.

    `dispatch` receives each message and its descriptors. `opened` sends the first messages of a
    session. `lost` takes the open socket of a session that is over, and closes it.
    """

    def __init__(
        self,
        path: str,
        *,
        takes_fds: bool,
        dispatch: Callable[[m.Message, tuple[int, ...]], None],
        opened: Callable[[], None],
        lost: Callable[[socket.socket], None],
    ) -> None:
        self.path = path
        self.sock: socket.socket | None = None
        self.last_error = ""
        self.turned_away = ""
        """Why the last daemon refuses a session with this process; empty: it does not."""
        self._takes_fds = takes_fds
        self._dispatch = dispatch
        self._opened = opened
        self._lost = lost
        self._wire = WireSession(Role.CLIENT, dispatch)
        self._outbound: deque[tuple[memoryview, int | None]] = deque()
        self._outbound_bytes = 0
        self._backoff = _Backoff()
        self._calls = 0
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._receive_timeout_s: float | None = None

    def connect(self) -> bool:
        """Return whether there is a connection. Tries to connect if the last pause is over."""
        if self.sock is not None:
            return True
        if not self._backoff.over:
            return False
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(self.path)
            sock.setblocking(True)
        except OSError as error:
            sock.close()
            # The socket file's mode refuses this process, as a daemon's allow list does.
            self.turned_away = os.strerror(error.errno) if error.errno == errno.EACCES else ""
            self._note_failure(f"cannot connect: {error.strerror or error}")
            return False
        self.sock = sock
        self._wire = WireSession(Role.CLIENT, self._dispatch)
        self._outbound.clear()
        self._outbound_bytes = 0
        self._receive_timeout_s = None
        self._opened()
        return self.sock is not None

    def welcomed(self) -> None:
        """Note that the daemon has answered the greeting."""
        self._backoff.succeeded()
        self.last_error = self.turned_away = ""

    def _note_failure(self, why: str) -> None:
        self.last_error = why
        self._backoff.failed()

    def disconnect(self, why: str) -> None:
        """End the session: every call in progress is a miss."""
        sock = self.sock
        if sock is None:
            return
        for fd in self._wire.take_fds():
            os.close(fd)
        self.sock = None
        self._note_failure(why)
        self._outbound.clear()
        self._outbound_bytes = 0
        self._lost(sock)

    def retry_now(self) -> None:
        """Let the next `connect` try at once."""
        self._backoff.skip()

    def next_call(self) -> int:
        """Return a number for a call."""
        self._calls += 1
        return self._calls

    def send(self, message: m.FromClient, fd: int | None = None) -> None:
        """Send a message, and a descriptor with it, now or once the daemon reads again."""
        if self.sock is None:
            return
        data = encode(message, 0 if fd is None else 1)
        if not self._outbound and fd is None:
            try:
                sent = self.sock.send(data, _SEND_FLAGS)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self.disconnect(str(error))
                return
            if sent == len(data):
                return
            data = data[sent:]
        self._outbound.append((memoryview(data), fd))
        self._outbound_bytes += len(data)
        if self._outbound_bytes > OUTBOUND_BYTES_MAX:
            self.disconnect("the daemon does not read")
        elif len(self._outbound) == 1:
            self.flush()

    def flush(self) -> None:
        """Send as many of the unsent messages as the socket takes. Never blocks."""
        while self._outbound and self.sock is not None:
            data, fd = self._outbound[0]
            rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FD.pack(fd))]
            try:
                sent = self.sock.sendmsg([data], rights, _SEND_FLAGS)
            except BlockingIOError:
                return
            except OSError as error:
                self.disconnect(str(error))
                return
            self._outbound_bytes -= sent
            if sent == len(data):
                self._outbound.popleft()
            else:
                # The descriptor went with the first byte.
                self._outbound[0] = (data[sent:], None)

    def receive(self, wait_s: float) -> bool:
        """Dispatch the messages that have arrived. Returns False if none came within `wait_s`."""
        sock = self.sock
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
            if self._takes_fds:
                flags |= _CLOSE_ON_EXEC
                count, control, _, _ = sock.recvmsg_into([self._buffer], _CMSG_SPACE, flags)
            else:
                count, control = sock.recv_into(self._buffer, 0, flags), []
        except BlockingIOError:
            return False
        except OSError as error:
            self.disconnect(str(error))
            return False
        if count == 0:
            self.disconnect(self.last_error or "the daemon closed the session")
            return False
        try:
            with memoryview(self._buffer)[:count] as chunk:
                self._wire.receive(chunk, _descriptors(control) if control else ())
        except RemoteProtocolError as error:
            self.disconnect(f"protocol: {error}")
        return True

    def _wait_both(self, sock: socket.socket, wait_s: float) -> None:
        """Wait until a message arrives or the daemon reads again, and send unsent messages."""
        poller = select.poll()
        poller.register(sock, select.POLLIN | select.POLLOUT)
        poller.poll(max(0.0, wait_s) * 1000)
        self.flush()

    def _set_receive_timeout(self, sock: socket.socket, wait_s: float) -> None:
        """Bound the next blocking read. The socket's own timeout saves a poll() per call."""
        # Setting the timeout costs a system call, so a timeout close to `wait_s` stays.
        current = self._receive_timeout_s
        if current is not None and 0.5 * wait_s <= current <= 1.25 * wait_s:
            return
        whole, part = divmod(max(wait_s, 1e-5), 1.0)
        sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(whole), int(part * 1e6))
        )
        self._receive_timeout_s = wait_s


def _descriptors(control: Sequence[tuple[int, int, bytes]]) -> list[int]:
    found: list[int] = []
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            count = len(data) // 4
            found += struct.unpack(f"{count}i", data[: count * 4])
    return found
