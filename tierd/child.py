"""Child processes of the daemon: how they start, and the socket between daemon and child.

The socket carries frames and descriptors, with an event loop at each end. Sending never blocks:
`Stream` queues bytes that the socket does not take, and senders of large frames wait for `ready`
first. Bytes sent to a peer that has gone are dropped. The reader notices the end of the peer
after it has read everything that the peer had sent.
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
"""Maximum bytes of one read; a larger frame takes several loop iterations."""

OUTBOUND_BYTES_MAX: Final = FRAME_BYTES_MAX
"""Queued bytes above which senders wait: a peer that does not read delays calls, and costs at
most the memory of two frames."""

_CONTROL_BYTES: Final = socket.CMSG_SPACE(array.array("i").itemsize * FDS_PER_FRAME_MAX)

_PR_SET_PDEATHSIG: Final = 1

log = logging.getLogger("tierd.worker")

_kept_open: list[int] = []


def keep_open(fd: int) -> None:
    """Pass this descriptor to every child started from now on; the child keeps it until it ends."""
    _kept_open.append(fd)


def keep_no_longer(fd: int) -> None:
    """Undo `keep_open` for children started from now on."""
    _kept_open.remove(fd)


def start_child(
    module: str, *arguments: str, keep: Sequence[int] = ()
) -> tuple[socket.socket, subprocess.Popen[bytes], int]:
    """Start a child; return our end of its socket, the process and its pidfd.

    The pidfd becomes readable when the process ends. The child runs `python -m MODULE DESCRIPTOR
    ARGUMENTS`, must call `be_child`, and holds copies of the descriptors in `keep` until it ends.
    Call it on the loop's thread: the child dies with the thread that started it. Raises OSError
    if the system lacks resources.
    """
    # The child must find every module that this process finds, whatever its working directory.
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
    """Set up this process as a child of `start_child`; return the child's end of the socket.

    The child dies with the daemon even if its loop hangs and does not see the end of the socket.
    It ignores the signals that end a service: the daemon acts on them.
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
    """End this process without waiting for its threads; `on_end` of a child's stream calls it."""
    log.warning("ending: the daemon %s", why)
    logging.shutdown()
    os._exit(1)


class Stream:
    """A connected unix stream socket on the running loop; the stream owns the socket."""

    # All streams share one buffer: a read is consumed before the next one starts.
    _buffer = memoryview(bytearray(RECEIVE_BYTES))

    def __init__(
        self, sock: socket.socket, on_frame: FrameHandler, on_end: Callable[[str], None]
    ) -> None:
        """`on_end` is called once with the reason, after the peer or an error closed the stream."""
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
        """Wait until at most OUTBOUND_BYTES_MAX are queued, or the stream is closed."""
        while not self._ready.is_set():
            await self._ready.wait()

    def send(self, payload: bytes, fd: int | None = None) -> None:
        """Send a frame, or queue it. The caller still owns `fd` and may close it.

        Raises OSError, and sends nothing, if the process has no descriptor left.
        """
        if self._closed:
            return
        data = memoryview(encode_frame(payload, 0 if fd is None else 1))
        if fd is not None:
            fd = os.dup(fd)
        elif not self._queue:
            # The common case: the socket takes the whole frame at once.
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
        """Handle received bytes; return False if there were none, or the stream ended."""
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
        except Exception as error:  # a bug on either side: the frame cannot be interpreted
            log.exception("cannot take a frame")
            self._end(f"sent a frame that cannot be taken: {error}")
            return False
        return True

    def close(self) -> None:
        """Close the socket and drop the queued frames; idempotent."""
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
        """Return how many bytes the socket took; a socket that failed takes them all."""
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
                # The descriptor went with the first byte.
                os.close(fd)
            if sent < len(data):
                self._queue[0] = (data[sent:], None)
                continue
            self._queue.popleft()
            if self._queued_bytes <= OUTBOUND_BYTES_MAX:
                self._ready.set()
        self._loop.remove_writer(self._sock.fileno())
