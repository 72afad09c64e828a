"""A connection to the daemon: connects again, sends, receives, and matches replies to calls.

It knows a message's number, and nothing of what messages mean.
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
"""Pause before connecting again, doubled from the first to the longest."""

OUTBOUND_BYTES_MAX: Final = 8 << 20
"""Unsent calls to a daemon that does not read: beyond it the session is given up."""

_DONT_WAIT: Final = int(socket.MSG_DONTWAIT)
_CLOSE_ON_EXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
_SEND_FLAGS: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_RECEIVE_BYTES: Final = 256 << 10
_FD = struct.Struct("i")
_CMSG_SPACE: Final = socket.CMSG_SPACE(16 * 4)


class DaemonConnection:
    """A socket to the daemon at `path`, made again when it breaks. Used under the client's lock.

    `dispatch` gets each message. `opened` says what a session begins with. `lost` gets the
    socket of a session that is over, still open, and closes it.
    """

    def __init__(
        self,
        path: str,
        *,
        takes_fds: bool,
        timeout_s: float,
        dispatch: Callable[[m.Message, tuple[int, ...]], None],
        opened: Callable[[], None],
        lost: Callable[[socket.socket], None],
    ) -> None:
        self.path = path
        self.timeout_s = timeout_s
        """Bounds every call that waits for its reply."""
        self.sock: socket.socket | None = None
        self.last_error = ""
        self.turned_away = ""
        """Why the daemon that was last met wants no session with this process."""
        self._takes_fds = takes_fds
        self._dispatch = dispatch
        self._opened = opened
        self._lost = lost
        self._wire = WireSession(Role.CLIENT, dispatch)
        self._outbound: deque[tuple[memoryview, int | None]] = deque()
        self._outbound_bytes = 0
        self._retry_at = 0.0
        self._retry_pause = RECONNECT_FIRST_S
        self._calls = 0
        self._replies: dict[int, m.Message | None] = {}
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._receive_timeout_s: float | None = None

    def connect(self) -> bool:
        """Whether there is a connection. One is tried once the pause after the last is over."""
        if self.sock is not None:
            return True
        now = time.monotonic()
        if now < self._retry_at:
            return False
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(self.path)
            sock.setblocking(True)
        except OSError as error:
            sock.close()
            # A file's mode says no as a daemon would.
            self.turned_away = os.strerror(error.errno) if error.errno == errno.EACCES else ""
            self._back_off(f"cannot connect: {error.strerror or error}")
            return False
        self.sock = sock
        self._wire = WireSession(Role.CLIENT, self._dispatch)
        self._outbound.clear()
        self._outbound_bytes = 0
        self._receive_timeout_s = None
        self._opened()
        return self.sock is not None

    def welcomed(self) -> None:
        """The daemon has answered the greeting."""
        self._retry_pause = RECONNECT_FIRST_S
        self.last_error = self.turned_away = ""

    def _back_off(self, why: str) -> None:
        self.last_error = why
        self._retry_at = time.monotonic() + self._retry_pause
        self._retry_pause = min(self._retry_pause * 2, RECONNECT_MAX_S)

    def disconnect(self, why: str) -> None:
        """End the session: every call under way is a miss."""
        sock = self.sock
        if sock is None:
            return
        for fd in self._wire.take_fds():
            os.close(fd)
        self.sock = None
        self._back_off(why)
        self._outbound.clear()
        self._outbound_bytes = 0
        self._replies = dict.fromkeys(self._replies)
        self._lost(sock)

    def retry_now(self) -> None:
        """Have the next `connect` make no pause."""
        self._retry_at = 0.0

    def next_call(self) -> int:
        """A number for a call."""
        self._calls += 1
        return self._calls

    def replied(self, call: int, message: m.Message) -> None:
        """Take the reply to a call; dropped if nobody waits for it."""
        if call in self._replies:
            self._replies[call] = message

    def call(self, call: int, message: m.FromClient) -> m.Message | None:
        """Send and wait for the reply; None on timeout, and the session is over then."""
        self._replies[call] = None
        try:
            self.send(message)
            end = time.monotonic() + self.timeout_s
            while self.sock is not None:
                reply = self._replies[call]
                if reply is not None:
                    return reply
                left = end - time.monotonic()
                if left <= 0:
                    self.disconnect("the daemon does not answer")
                    return None
                self.receive(wait_s=left)
            return None
        finally:
            del self._replies[call]

    def send(self, message: m.FromClient, fd: int | None = None) -> None:
        """Send a message, and a descriptor with it, now or as soon as the daemon takes it."""
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
        """Send what is unsent, as much as the daemon takes."""
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
        """Take what has arrived; False when nothing had by the end of `wait_s`."""
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
        """Wait until the daemon has said something or takes more of what is unsent."""
        poller = select.poll()
        poller.register(sock, select.POLLIN | select.POLLOUT)
        poller.poll(max(0.0, wait_s) * 1000)
        self.flush()

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


def _descriptors(control: Sequence[tuple[int, int, bytes]]) -> list[int]:
    found: list[int] = []
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            count = len(data) // 4
            found += struct.unpack(f"{count}i", data[: count * 4])
    return found
