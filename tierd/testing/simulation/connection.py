"""A simulated unix stream socket: delayed, split anywhere, and cut off when an end dies.

The daemon's end behaves like `tierd.daemon.session.transport`: a client that does not read fills
a bounded queue, a send to a client that is gone closes the connection at once, and the peer's
close is reported exactly once. File descriptors are real.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Final

OUTBOUND_BYTES_MAX: Final = 64 << 10
"""Bytes of unread replies that end a session; production allows two frames of the largest size."""

WHOLE_CHANCE: Final = 0.7
"""Chance that a delivery brings all pending bytes, instead of a part that ends anywhere."""


class _Stream:
    """One direction: bytes and descriptors in order, each part after a random delay."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        random: Random,
        latency_s: float,
        deliver: Callable[[bytes, list[int]], None],
        ended: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._random = random
        self._latency_s = latency_s
        self._deliver = deliver
        self._ended = ended
        self._buffer = bytearray()
        self._fds: deque[tuple[int, int]] = deque()
        self._start = 0
        self._ending = False
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._over = False

    def __len__(self) -> int:
        return len(self._buffer)

    def write(self, data: bytes, fd: int | None = None) -> None:
        """Send bytes, with a duplicate of a descriptor attached to the first byte."""
        if self._ending or self._over:
            return
        if fd is not None:
            self._fds.append((self._start + len(self._buffer), os.dup(fd)))
        self._buffer += data
        self._schedule()

    def end(self) -> None:
        """End the stream after the pending bytes."""
        self._ending = True
        self._schedule()

    def tear(self) -> None:
        """End the stream, and lose the pending bytes from a random position on."""
        del self._buffer[self._random.randint(0, len(self._buffer)) :]
        while self._fds and self._fds[-1][0] >= self._start + len(self._buffer):
            os.close(self._fds.pop()[1])
        self._ending = True
        self._schedule()

    def drop(self) -> None:
        """Discard everything, since the receiver is gone."""
        self._over = True
        self._buffer.clear()
        while self._fds:
            os.close(self._fds.pop()[1])
        if self._timer is not None:
            self._timer.cancel()

    def pause(self, paused: bool) -> None:
        """Set whether the receiver has stopped reading."""
        self._paused = paused
        self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None or self._paused or self._over:
            return
        if self._buffer or self._ending:
            delay_s = self._random.expovariate(1 / self._latency_s)
            self._timer = self._loop.call_later(delay_s, self._arrive)

    def _arrive(self) -> None:
        self._timer = None
        if self._over or self._paused:
            return
        if not self._buffer:
            self._over = True
            self._ended()
            return
        size = len(self._buffer)
        if self._random.random() >= WHOLE_CHANCE:
            size = self._random.randint(1, size)
        if len(self._fds) > 1:
            # As in the kernel, a read ends after the descriptors of one send.
            size = min(size, self._fds[1][0] - self._start)
        chunk = bytes(self._buffer[:size])
        del self._buffer[:size]
        self._start += size
        fds = []
        while self._fds and self._fds[0][0] < self._start:
            fds.append(self._fds.popleft()[1])
        self._schedule()
        self._deliver(chunk, fds)


class DaemonEnd:
    """A `tierd.daemon.session.transport.Transport`."""

    def __init__(self, connection: SimulatedConnection) -> None:
        self._connection = connection
        self._finishing = False
        self.closed = False

    def send(self, data: bytes, fd: int | None = None) -> None:
        """Queue one frame; close the connection at once if the client is gone."""
        connection = self._connection
        if self.closed or self._finishing:
            return
        if connection.client.closed:
            self.close()
            return
        if len(connection.to_client) + len(data) > OUTBOUND_BYTES_MAX:
            self._finishing = True
            connection.to_client.tear()
            connection.on_finished()
            return
        connection.on_said(data)
        connection.to_client.write(data, fd)

    def finish(self) -> None:
        """Send the queued frames and nothing more; discard further data from the client."""
        self._finishing = True
        self._connection.to_client.end()
        self._connection.on_finished()

    def close(self) -> None:
        """Close at once, as a daemon does at its end, and notify the session."""
        if not self.closed:
            self.closed = True
            self._connection.to_daemon.drop()
            self._connection.to_client.end()
            self._connection.on_closed()

    def kill(self) -> None:
        """Close as if the daemon's process were killed; the session is not notified."""
        if not self.closed:
            self.closed = True
            self._connection.to_daemon.drop()
            self._connection.to_client.tear()

    def arrive(self, chunk: bytes, fds: list[int]) -> None:
        """Receive bytes from the client."""
        assert not fds
        if not self._finishing:
            self._connection.on_heard(chunk)


class ClientEnd:
    """The client's end; once it is `closed`, no thread of the client uses a slot."""

    def __init__(self, connection: SimulatedConnection) -> None:
        self._connection = connection
        self.closed = False

    def send(self, data: bytes) -> None:
        """Send bytes to the daemon."""
        self._connection.to_daemon.write(data)

    def close(self, *, torn: bool) -> None:
        """Close, or die and lose some of the sent bytes (`torn`); idempotent."""
        if not self.closed:
            self.closed = True
            self._connection.to_client.drop()
            if torn:
                self._connection.to_daemon.tear()
            else:
                self._connection.to_daemon.end()

    def pause(self, paused: bool) -> None:
        """Stop or continue reading."""
        if not self.closed:
            self._connection.to_client.pause(paused)


class SimulatedConnection:
    """Both ends and both streams. The callbacks are set before the first byte.

    `on_heard` gets the bytes that reach the daemon, and `on_said` each frame that the daemon
    sends. `on_finished` is called when the daemon sends no more, and `on_closed` when the client
    has closed. `on_data` and `on_end` are the client's.
    """

    on_heard: Callable[[bytes], None]
    on_said: Callable[[bytes], None]
    on_finished: Callable[[], None]
    on_closed: Callable[[], None]
    on_data: Callable[[bytes, list[int]], None]
    on_end: Callable[[], None]

    def __init__(self, loop: asyncio.AbstractEventLoop, random: Random, latency_s: float) -> None:
        self.daemon = DaemonEnd(self)
        self.client = ClientEnd(self)
        self.to_daemon = _Stream(loop, random, latency_s, self.daemon.arrive, self.daemon.close)
        self.to_client = _Stream(
            loop,
            random,
            latency_s,
            lambda chunk, fds: self.on_data(chunk, fds),
            lambda: self.on_end(),
        )
