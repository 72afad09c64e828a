"""One client's socket, driven by the event loop: bytes in, frames and descriptors out.

A client that stops reading, sends garbage or dies affects its own session only. The socket is
closed only after the client has closed its end: until then the client's threads may write to slots
that it has reserved.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from tierd.wire.frames import FRAME_BYTES_MAX, HEAD_BYTES

RECEIVE_BYTES: Final = 256 << 10
"""Bytes per read; a larger frame takes several iterations of the loop."""

OUTBOUND_BYTES_MAX: Final = 2 * (FRAME_BYTES_MAX + HEAD_BYTES)
"""Queued replies to a client that does not read: two frames of the largest size."""


_CONTROL_BYTES: Final = socket.CMSG_SPACE(64 * array.array("i").itemsize)


def descriptors(control: Sequence[tuple[int, int, bytes]]) -> Sequence[int]:
    """Return the descriptors in control messages; the caller owns them."""
    fds = array.array("i")
    for level, kind, raw in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
    return fds


class Transport(Protocol):
    """A session's connection: a socket, or a simulated one."""

    def send(self, data: bytes, fd: int | None = None) -> None:
        """Queue one frame, with at most one descriptor, which stays the caller's."""

    def finish(self) -> None:
        """Send the queue, then nothing more; bytes that still arrive are discarded."""

    def close(self) -> None:
        """Close at once, for a client that is known to be gone."""


class SocketTransport:
    """A connected unix stream socket on the running loop.

    `on_data` gets bytes, and the descriptors that came with them, which it then owns.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_data: Callable[[memoryview, Sequence[int]], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._sock = sock
        self._on_data = on_data
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[memoryview, int | None]] = deque()
        self._queued_bytes = 0
        self._finishing = False
        self._closed = False
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._readable)

    # Shared by all sockets: each read is consumed before the next one starts.
    _buffer = memoryview(bytearray(RECEIVE_BYTES))

    def send(self, data: bytes, fd: int | None = None) -> None:
        """Send at once if the socket accepts it, else queue within OUTBOUND_BYTES_MAX."""
        if self._closed or self._finishing:
            return
        if fd is None and not self._queue:
            # The usual case: the socket accepts the whole reply.
            try:
                sent = self._sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self.close()
                return
            if sent == len(data):
                return
            data = data[sent:]
        if self._queued_bytes + len(data) > OUTBOUND_BYTES_MAX:
            self._queue.clear()
            self._queued_bytes = 0
            self.finish()
            return
        # The descriptor number stays valid: the arena closes segments only at exit.
        self._queue.append((memoryview(data), fd))
        self._queued_bytes += len(data)
        if len(self._queue) == 1:
            self._flush()

    def finish(self) -> None:
        """Half-close after the queue is sent; on_closed is called once the peer has closed too."""
        self._finishing = True
        if not self._queue and not self._closed:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close at once; only for a daemon that stops, or a peer that is gone."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._on_closed()

    def _flush(self) -> None:
        while self._queue:
            data, fd = self._queue[0]
            control = (
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
                if fd is not None
                else []
            )
            try:
                sent = self._sock.sendmsg([data], control)
            except BlockingIOError:
                self._loop.add_writer(self._sock.fileno(), self._writable)
                return
            except OSError:
                self.close()
                return
            self._queued_bytes -= sent
            if sent == len(data):
                self._queue.popleft()
            else:
                # The descriptor went with the first byte.
                self._queue[0] = (data[sent:], None)
        if self._finishing:
            self.finish()

    def _writable(self) -> None:
        self._loop.remove_writer(self._sock.fileno())
        self._flush()

    def _readable(self) -> None:
        try:
            count, control, _, _ = self._sock.recvmsg_into(
                (self._buffer,), _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            count, control = 0, []
        fds = descriptors(control) if control else ()
        if count and not self._finishing:
            self._on_data(self._buffer[:count], fds)
            return
        for fd in fds:
            os.close(fd)
        if count == 0:
            self.close()
