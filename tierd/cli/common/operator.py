"""An operator's session with the daemon, which follows long orders to their end."""

from __future__ import annotations

import argparse
import os
import select
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Final

from tierd.client import DEFAULT_SOCKET
from tierd.errors import DisconnectedError, RefusedError, RemoteProtocolError
from tierd.types import Namespace
from tierd.wire import messages as m
from tierd.wire.session import Role, WireSession, encode

ANSWER_S: Final = 10.0
"""Longest silence of a daemon; it reports an order's progress several times a second."""


_Call = (
    m.Status | m.Register | m.Describe | m.Flush | m.Scrub | m.StopScrub | m.Explain | m.Inventory
)


class Operator:
    """A session at `path`: one call at a time, and WARM calls in parallel. Owns the connection.

    Every method raises DisconnectedError if the daemon does not answer.
    """

    def __init__(self, path: str, name: str) -> None:
        self._arrived: deque[m.Message] = deque()
        self._warmed: deque[m.Warmed | m.Error] = deque()
        self._warms: set[int] = set()
        self._wire = WireSession(Role.CLIENT, lambda message, _: self._take(message))
        self._calls = 0
        self._path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(ANSWER_S)
        # A deadline or Ctrl-C may come before the caller has the session and can close it.
        with ExitStack() as undo:
            undo.callback(self._sock.close)
            try:
                self._sock.connect(path)
            except OSError as error:
                raise self._away(error) from error
            self._send(m.Hello(m.PROTOCOL_VERSION, name))
            undo.pop_all()

    def __enter__(self) -> Operator:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def status(self) -> dict[str, object]:
        """Return the daemon's status."""
        for reply in self._call(m.Status(self._next_call())):
            if isinstance(reply, m.StatusReply):
                return reply.body
        raise RemoteProtocolError("the daemon answered STATUS with another message")

    def describe(self, digest: bytes) -> Namespace:
        """Return the namespace of a digest. Raises RefusedError if it is unknown."""
        for reply in self._call(m.Describe(self._next_call(), digest)):
            if isinstance(reply, m.Described):
                return Namespace.from_fields(reply.namespace)
        raise RemoteProtocolError("the daemon answered DESCRIBE with another message")

    def flush(
        self, prefix: str, *, host: bool, tiers: list[int], timeout_s: float | None
    ) -> Iterator[dict[str, object]]:
        """Start a flush; yield its progress, and its result last.

        Raises TimeoutError after `timeout_s` (the flush continues), RefusedError if it does not
        start.
        """
        return self._follow(m.Flush(self._next_call(), prefix, host, tiers), timeout_s)

    def scrub(self, tiers: list[int], bytes_per_s: int) -> Iterator[dict[str, object]]:
        """Start a scrub; yield its progress, and its result last. Raises RefusedError if it does
        not start."""
        return self._follow(m.Scrub(self._next_call(), tiers, bytes_per_s), None)

    def stop_scrub(self) -> Iterator[dict[str, object]]:
        """Stop the running scrub, also one of another session; yield its result last. Raises
        RefusedError if none is running."""
        return self._follow(m.StopScrub(self._next_call()), None)

    def register(self, namespace: Namespace) -> int:
        """Register a namespace without segments; return its handle. Raises RefusedError."""
        call = self._next_call()
        for reply in self._call(m.Register(call, namespace.to_fields(), want_segments=False)):
            if isinstance(reply, m.Registered):
                return reply.handle
        raise RemoteProtocolError("the daemon answered REGISTER with another message")

    def begin_warm(
        self,
        handle: int,
        hashes: Sequence[bytes],
        *,
        target: int = 0,
        deadline_s: float,
        bytes_per_s: int = 0,
        pin_s: float = 0.0,
        verify: bool = False,
    ) -> int:
        """Send a WARM and return its call number; `next_warmed` returns the answer. Several may
        be in flight."""
        call = self._next_call()
        ms = max(0, round(1000 * deadline_s))
        pin_ms = round(1000 * pin_s)
        self._warms.add(call)
        self._send(m.Warm(call, handle, b"".join(hashes), target, ms, bytes_per_s, pin_ms, verify))
        return call

    def cancel(self, call: int) -> None:
        """End a WARM in flight; its answer comes at once."""
        self._send(m.Cancel(call))

    def next_warmed(self, timeout_s: float) -> m.Warmed | None:
        """Return the next answer to any WARM; None if none comes within `timeout_s`.

        Raises RefusedError, with the reason, for a WARM that did not start.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            if self._warmed:
                reply = self._warmed.popleft()
                if isinstance(reply, m.Error):
                    raise RefusedError(reply.reason)
                return reply
            for message in self._arrived:
                if isinstance(message, m.Error):
                    raise self._away(message.reason)
            self._arrived.clear()
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not self._readable(left_s):
                return None
            self._receive()

    def teach(
        self, handle: int, hashes: Sequence[bytes], uses: Sequence[int], ages_s: Sequence[int]
    ) -> None:
        """Send uses that another daemon, or an earlier incarnation, has counted."""
        for at in range(0, len(hashes), m.TAUGHT_MAX):
            part = slice(at, at + m.TAUGHT_MAX)
            blob = b"".join(hashes[part])
            self._send(m.Teach(handle, blob, m.pack_slots(uses[part]), m.pack_slots(ages_s[part])))

    def explain(self, digest: bytes, hashes: Sequence[bytes]) -> dict[str, object]:
        """Return where blocks are, and why they are missing elsewhere. Raises RefusedError."""
        for reply in self._call(m.Explain(self._next_call(), digest, b"".join(hashes))):
            if isinstance(reply, m.Explained):
                return reply.body
        raise RemoteProtocolError("the daemon answered EXPLAIN with another message")

    def inventory(self, digest: bytes, source: int) -> Iterator[m.Listed]:
        """Yield all blocks in L2 (0) or a tier (its number + 1), in pages. Raises RefusedError."""
        more = True
        while more:
            for reply in self._call(m.Inventory(self._next_call(), digest, source)):
                if isinstance(reply, m.Listed):
                    more = reply.more
                    yield reply
                    break

    def _follow(
        self, order: m.Flush | m.Scrub | m.StopScrub, timeout_s: float | None
    ) -> Iterator[dict[str, object]]:
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        for reply in self._call(order):
            if isinstance(reply, m.Progress | m.Done):
                yield reply.body
            if isinstance(reply, m.Done):
                return
            if end_s is not None and time.monotonic() >= end_s:
                raise TimeoutError

    def _call(self, message: _Call) -> Iterator[m.Message]:
        """Send a call; yield its replies without end. Raises RefusedError, DisconnectedError."""
        self._send(message)
        while True:
            while self._arrived:
                reply = self._arrived.popleft()
                if isinstance(reply, m.Error):
                    if reply.call == message.call:
                        raise RefusedError(reply.reason)
                    raise self._away(reply.reason)
                if getattr(reply, "call", None) == message.call:
                    yield reply
            self._receive()

    def _take(self, message: m.Message) -> None:
        """Queue a message. Answers to WARMs, which come between others, have their own queue."""
        if isinstance(message, m.Warmed | m.Error) and message.call in self._warms:
            self._warms.remove(message.call)
            self._warmed.append(message)
        else:
            self._arrived.append(message)

    def _readable(self, wait_s: float) -> bool:
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        return bool(poller.poll(wait_s * 1000))

    def _receive(self) -> None:
        try:
            data = self._sock.recv(1 << 18)
        except OSError as error:
            raise self._away(error) from error
        if not data:
            raise self._away("it closed the session")
        self._wire.receive(data)

    def _send(self, message: m.FromClient) -> None:
        try:
            self._sock.sendall(encode(message))
        except OSError as error:
            raise self._away(error) from error

    def _next_call(self) -> int:
        self._calls += 1
        return self._calls

    def _away(self, why: object) -> DisconnectedError:
        return DisconnectedError(f"no answer from {self._path}: {why}")


def add_socket(parser: argparse.ArgumentParser) -> None:
    """Add --socket."""
    parser.add_argument(
        "--socket",
        default=os.environ.get("TIERD_SOCKET", DEFAULT_SOCKET),
        help=f"the daemon's socket (default: $TIERD_SOCKET or {DEFAULT_SOCKET})",
    )


def table(value: object) -> dict[str, object]:
    """Return a value of an answer that must be a map."""
    assert isinstance(value, dict)
    return value


def tables(value: object) -> list[dict[str, object]]:
    """Return a value of an answer that must be a list of maps."""
    assert isinstance(value, list)
    return [table(entry) for entry in value]


def whole(value: object) -> int:
    """Return a value of an answer that must be an integer."""
    assert isinstance(value, int)
    return value
