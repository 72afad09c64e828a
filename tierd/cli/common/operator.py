"""An operator's session with the daemon: orders that take their time, followed to their end."""

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
"""How long a daemon may say nothing; it tells of an order several times a second."""


_Call = (
    m.Status | m.Register | m.Describe | m.Flush | m.Scrub | m.StopScrub | m.Explain | m.Inventory
)


class Operator:
    """A session at `path`: one call at a time, and WARMs beside it.

    Raises DisconnectedError if no daemon is there.
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
        # Nobody has it yet who would close it when a deadline or Ctrl-C comes just here.
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
        """The daemon's status."""
        for reply in self._call(m.Status(self._next_call())):
            if isinstance(reply, m.StatusReply):
                return reply.body
        raise RemoteProtocolError("STATUS was not answered by one")

    def describe(self, digest: bytes) -> Namespace:
        """The namespace of a digest. Raises RefusedError if the daemon does not know it."""
        for reply in self._call(m.Describe(self._next_call(), digest)):
            if isinstance(reply, m.Described):
                return Namespace.from_fields(reply.namespace)
        raise RemoteProtocolError("DESCRIBE was not answered by it")

    def flush(
        self, prefix: str, *, host: bool, tiers: list[int], timeout_s: float | None
    ) -> Iterator[dict[str, object]]:
        """What a flush tells of its progress, and its result last.

        Raises TimeoutError while it goes on, RefusedError if it is not begun.
        """
        return self._follow(m.Flush(self._next_call(), prefix, host, tiers), timeout_s)

    def scrub(self, tiers: list[int], bytes_per_s: int) -> Iterator[dict[str, object]]:
        """The same of a scrub."""
        return self._follow(m.Scrub(self._next_call(), tiers, bytes_per_s), None)

    def stop_scrub(self) -> Iterator[dict[str, object]]:
        """Have the scrub that is going on end, whoever began it."""
        return self._follow(m.StopScrub(self._next_call()), None)

    def register(self, namespace: Namespace) -> int:
        """A handle of a namespace, without its segments. Raises RefusedError."""
        call = self._next_call()
        for reply in self._call(m.Register(call, namespace.to_fields(), want_segments=False)):
            if isinstance(reply, m.Registered):
                return reply.handle
        raise RemoteProtocolError("REGISTER was not answered by it")

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
        """Send a WARM and return its call; `next_warmed` has the answer. Several may go on."""
        call = self._next_call()
        ms = max(0, round(1000 * deadline_s))
        pin_ms = round(1000 * pin_s)
        self._warms.add(call)
        self._send(m.Warm(call, handle, b"".join(hashes), target, ms, bytes_per_s, pin_ms, verify))
        return call

    def cancel(self, call: int) -> None:
        """Have a WARM that goes on end; its answer comes at once."""
        self._send(m.Cancel(call))

    def next_warmed(self, timeout_s: float) -> m.Warmed | None:
        """The next answer to a WARM, of whichever comes first; None if there is none by then.

        Raises RefusedError, with the reason, for one that was not begun.
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
        """Tell of uses that another daemon, or an earlier life, has counted."""
        for at in range(0, len(hashes), m.TAUGHT_MAX):
            part = slice(at, at + m.TAUGHT_MAX)
            blob = b"".join(hashes[part])
            self._send(m.Teach(handle, blob, m.pack_slots(uses[part]), m.pack_slots(ages_s[part])))

    def explain(self, digest: bytes, hashes: Sequence[bytes]) -> dict[str, object]:
        """Where blocks are, and why not where they are not. Raises RefusedError."""
        for reply in self._call(m.Explain(self._next_call(), digest, b"".join(hashes))):
            if isinstance(reply, m.Explained):
                return reply.body
        raise RemoteProtocolError("EXPLAIN was not answered by it")

    def inventory(self, digest: bytes, source: int) -> Iterator[m.Listed]:
        """Pages of all that L2 (0) or a tier (its number + 1) has. Raises RefusedError."""
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
        """Send a call; its replies for as long as anybody wants them."""
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
        """Answers to WARMs come between those to other calls."""
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
        help=f"default: $TIERD_SOCKET or {DEFAULT_SOCKET}",
    )


def table(value: object) -> dict[str, object]:
    """A map of an answer."""
    assert isinstance(value, dict)
    return value


def tables(value: object) -> list[dict[str, object]]:
    """A list of maps of an answer."""
    assert isinstance(value, list)
    return [table(entry) for entry in value]


def whole(value: object) -> int:
    """A number of an answer."""
    assert isinstance(value, int)
    return value
