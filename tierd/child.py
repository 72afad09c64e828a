"""A process of the daemon's own: how it is started, and the socket between the two.

The socket carries frames and descriptors, on a loop at either end. Sending never blocks: what
it does not take waits here, and senders of large frames wait for `ready` first. What is sent to
a peer that has gone is thrown away: reading finds out, after all that the peer had sent.
"""

from __future__ import annotations

import array
import asyncio
import ctypes
import faulthandler
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from tierd import logs
from tierd.wire.frames import (
    FDS_PER_FRAME_MAX,
    FRAME_BYTES_MAX,
    FrameDecoder,
    FrameHandler,
    encode_frame,
)

RECEIVE_BYTES: Final = 256 << 10
"""Bytes taken by one read; a larger frame takes several turns of the loop."""

OUTBOUND_BYTES_MAX: Final = FRAME_BYTES_MAX
"""Bytes that may wait before senders have to: a peer that does not read holds up calls, and
costs the memory of two frames."""

_CONTROL_BYTES: Final = socket.CMSG_SPACE(array.array("i").itemsize * FDS_PER_FRAME_MAX)

_PR_SET_PDEATHSIG: Final = 1

log = logging.getLogger("tierd.worker")

_kept_open: list[int] = []


def keep_open(fd: int) -> None:
    """Have every child that is started from now on have this descriptor until it ends."""
    _kept_open.append(fd)


def keep_no_longer(fd: int) -> None:
    """Undo `keep_open` for children that are yet to be started."""
    _kept_open.remove(fd)


def start_child(
    module: str, *arguments: str, keep: Sequence[int] = ()
) -> tuple[socket.socket, subprocess.Popen[bytes], int]:
    """This end of its socket, a process, and a descriptor that is readable when it ends.

    Runs `python -m MODULE DESCRIPTOR ARGUMENTS`, which is to call `be_child`, and has copies of
    the descriptors in `keep` until it ends. Called on the loop's own thread: the process asks to
    die with the thread that started it. Raises OSError if the system has no room for it.
    """
    # It finds every module that this process finds, wherever it was started.
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    near, far = socket.socketpair()
    try:
        with far:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(far.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[far.fileno(), *_kept_open, *keep],
                env={**os.environ, **logs.for_children(), "PYTHONPATH": path},
            )
        try:
            return near, process, os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            raise
    except OSError:
        near.close()
        raise


def be_child(name: str) -> socket.socket:
    """Set this process up as `start_child` means it; its end of the socket.

    It dies with the daemon, even if its own loop hangs, which would not see the end of the
    socket. Signals that end a service are the daemon's to act on.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    logs.configure_child(name, os.environ)
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    return sock


def leave_at_once(why: str) -> None:
    """For `on_end`: the daemon has gone, or cannot be understood, whatever threads still do."""
    log.warning("ending: the daemon %s", why)
    logging.shutdown()
    os._exit(1)


class Stream:
    """A connected unix stream socket, which it owns, on the running loop."""

    # One buffer serves all: a read is consumed before the next one starts.
    _buffer = memoryview(bytearray(RECEIVE_BYTES))

    def __init__(
        self, sock: socket.socket, on_frame: FrameHandler, on_end: Callable[[str], None]
    ) -> None:
        """`on_end` hears why nothing more will come; the stream is closed then."""
        self._sock = sock
        self._on_frame = on_frame
        self._on_end = on_end
        self._decoder = FrameDecoder()
        self._queue: deque[tuple[memoryview, int | None]] = deque()
        self._queued_bytes = 0
        self._ready = asyncio.Event()
        self._ready.set()
        self._closed = False
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self.read)

    async def ready(self) -> None:
        """Wait until no more than OUTBOUND_BYTES_MAX are queued, or the stream is closed."""
        while not self._ready.is_set():
            await self._ready.wait()

    def send(self, payload: bytes, fd: int | None = None) -> None:
        """Send a frame, or queue it. `fd` stays the caller's, who may close it.

        Raises OSError, and sends nothing, if there is no room for another descriptor.
        """
        if self._closed:
            return
        data = memoryview(encode_frame(payload, 0 if fd is None else 1))
        if fd is not None:
            fd = os.dup(fd)
        elif not self._queue:
            # Nearly always: it goes out whole, at once.
            sent = self._try(data, None)
            if sent == len(data):
                return
            data = data[sent:]
        self._queue.append((data, fd))
        self._queued_bytes += len(data)
        if len(self._queue) == 1:
            self._loop.add_writer(self._sock.fileno(), self._write)
            self._write()
        if self._queued_bytes > OUTBOUND_BYTES_MAX:
            self._ready.clear()

    async def flush(self) -> None:
        """Wait until all is sent, or the stream is closed."""
        while self._queue:
            await asyncio.sleep(0.001)

    def read(self) -> bool:
        """Handle what has come; False if there was nothing, or it was the end."""
        if self._closed:
            return False
        try:
            count, control, _, _ = self._sock.recvmsg_into(
                [self._buffer], _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except OSError:
            count, control = 0, []
        if count == 0:
            self._end("closed its socket")
            return False
        fds = array.array("i")
        for _, _, raw in control:
            fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
        try:
            self._decoder.feed(self._buffer[:count], fds, self._on_frame)
        except Exception as error:  # of either side's code: they do not understand each other
            log.exception("cannot take a frame")
            self._end(f"sent a frame that cannot be taken: {error}")
            return False
        return True

    def close(self) -> None:
        """Close the socket and forget what is queued; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        left = [fd for _, fd in self._queue if fd is not None]
        for fd in (*left, *self._decoder.take_fds()):
            os.close(fd)
        self._queue.clear()
        self._ready.set()

    def _end(self, why: str) -> None:
        if not self._closed:
            self.close()
            self._on_end(why)

    def _try(self, data: memoryview, fd: int | None) -> int:
        """Bytes that the socket has taken."""
        try:
            if fd is None:
                return self._sock.send(data)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
            return self._sock.sendmsg([data], [rights])
        except BlockingIOError:
            return 0
        except (BrokenPipeError, ConnectionResetError):
            return len(data)
        except OSError as error:
            self._loop.call_soon(self._end, f"cannot be written to: {error}")
            return len(data)

    def _write(self) -> None:
        while self._queue:
            data, fd = self._queue[0]
            sent = self._try(data, fd)
            if sent == 0:
                return
            self._queued_bytes -= sent
            if fd is not None:
                # It went with the first byte.
                os.close(fd)
            if sent < len(data):
                self._queue[0] = (data[sent:], None)
                continue
            self._queue.popleft()
            if self._queued_bytes <= OUTBOUND_BYTES_MAX:
                self._ready.set()
        self._loop.remove_writer(self._sock.fileno())
