"""HTTP/1.1 for the S3 tier: bodies go from the socket straight into the caller's memory.

http.client would work, but it takes 50 us to parse a reply, and one or two more copying system
calls. Here a reply's head takes 10 us, and a body is received with few calls, each without the GIL.
This module knows neither S3 nor retries. A connection belongs to one thread at a time; another
thread may shut its socket down, which ends any wait on it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import re
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

HEAD_BYTES_MAX = 32 << 10
"""Longest head of a reply; also the size of the buffer for received bytes."""

LINE_BYTES_MAX = 256
"""Longest first line of a chunk: a number in hex, and extensions, which no server sends."""

GUESS_BYTES = 64 << 10
"""First buffer for a body of unknown length."""

INTERIM_REPLIES_MAX = 8
"""Most replies of status 100 to 199 before the final one; no sound server sends more."""

_STATUS = re.compile(rb"HTTP/1\.([01]) (\d{3})(?: [^\r\n]*)?", re.ASCII)
_LENGTH = re.compile(r"\d{1,15}", re.ASCII)
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,12})[ \t]*(?:;[^\r\n]*)?", re.ASCII)


class PeerError(Exception):
    """The connection is unusable: refused, cut, stalled, or the peer violates the protocol."""


class StalledError(PeerError):
    """The peer was silent for too long."""


class EndpointUnreachableError(PeerError):
    """The connection could not be made; the text says why."""


class Endpoint(NamedTuple):
    """Address of a server. `tls` is None for plain http."""

    host: str
    port: int
    tls: ssl.SSLContext | None


class Head(NamedTuple):
    """Status and headers of a reply; names in lower case, repeated headers joined by commas.

    `length` is the content-length, None if there is none."""

    status: int
    headers: dict[str, str]
    length: int | None


class HttpConnection:
    """A connection that is kept alive as long as the replies allow it."""

    def __init__(self, address: Endpoint, timeout_s: float) -> None:
        """Connect. Raises EndpointUnreachableError."""
        self._timeout_s = timeout_s
        self._buffer = bytearray(HEAD_BYTES_MAX)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        # Bytes of the reply's body, or of its current chunk, that are still to come. -1 for a body
        # of unknown length, which ends with the connection.
        self._left = 0
        self._chunked = False
        self._keep = True
        self._refused = False
        self.used = False
        self.until = math.inf
        """When to give up a reply, by time.monotonic, even if bytes still arrive."""
        self.open_ended = False
        """Whether only the end of the connection marks the end of the body."""
        try:
            self.sock = _connect(address, timeout_s)
        except (OSError, ValueError) as error:
            raise EndpointUnreachableError(_reason(error)) from error
        self._flags = 0 if isinstance(self.sock, ssl.SSLSocket) else socket.MSG_WAITALL

    def close(self) -> None:
        """Close the socket; idempotent."""
        with contextlib.suppress(OSError):
            self.sock.close()

    @property
    def reusable(self) -> bool:
        """Whether another request may follow: the last reply was read to its end."""
        return self._keep and not self._left and not self._chunked and self._start == self._end

    def is_stale(self) -> bool:
        """Whether the peer has closed the connection, or sent anything, since the last reply."""
        return self._is_readable()

    def _is_readable(self) -> bool:
        if isinstance(self.sock, ssl.SSLSocket) and self.sock.pending():
            return True
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(0))

    def send(self, *parts: bytes | memoryview, more: bool = False) -> None:
        """Send a request, or with `more` its beginning. Raises PeerError.

        A server that refuses a body sends the reason and closes without reading the body. So if a
        reply arrives before the end of sending, nothing more is sent.
        """
        if self._refused:
            return
        self._keep = False
        self.used = True
        try:
            self._send_all(parts, socket.MSG_MORE if more else 0)
        except OSError as error:
            self._refused = self._is_readable()
            if not self._refused:
                raise _peer_error(error, "sending") from error

    def _send_all(self, parts: Sequence[bytes | memoryview], flags: int) -> None:
        if isinstance(self.sock, ssl.SSLSocket):
            for part in parts:
                self.sock.sendall(part)
            return
        views = [memoryview(part) for part in parts]
        while views:
            sent = self.sock.sendmsg(views, (), flags)
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if views:
                views[0] = views[0][sent:]

    def read_head(self, *, body: bool = True) -> Head:
        """Return the head of the reply. Pass `body=False` after HEAD, whose reply has no body."""
        for _ in range(INTERIM_REPLIES_MAX):
            version, status, headers = self._parse_head(self._take_head())
            if status >= 200:
                break
        else:
            raise PeerError("the server sends interim replies without end")
        self._chunked, self.open_ended, self._left = False, False, 0
        length = headers.get("content-length")
        if length is not None and not _LENGTH.fullmatch(length):
            raise PeerError(f"content-length is {length!r}")
        head = Head(status, headers, None if length is None else int(length))
        # Until the end of the body is known: its rest would be taken for the next reply.
        keep = headers.get("connection", "keep-alive" if version else "close").lower()
        self._keep = not self._refused and "close" not in keep
        if body and status not in (204, 304):
            self._frame_body(headers, head.length)
        return head

    def _frame_body(self, headers: dict[str, str], length: int | None) -> None:
        if headers.get("transfer-encoding", "identity").lower() != "identity":
            if headers["transfer-encoding"].lower() != "chunked":
                self._keep = False
                raise PeerError(f"unknown transfer encoding {headers['transfer-encoding']!r}")
            self._chunked = True
            self._next_chunk()
        elif length is None:
            self._left, self._keep, self.open_ended = -1, False, True
        else:
            self._left = length

    def read_into(self, view: memoryview) -> int:
        """Fill `view` with the next bytes of the body; with fewer only at the body's end.

        Raises PeerError if the connection ends before the body. If `open_ended`, the body may be
        truncated without an error.
        """
        at = 0
        while at < len(view) and self._left:
            wanted = len(view) - at if self._left < 0 else min(len(view) - at, self._left)
            got = self._receive(view[at : at + wanted])
            if not got:
                if self._left < 0:
                    self._left = 0
                    break
                raise PeerError(f"the connection was cut {self._left} bytes before the end")
            at += got
            if self._left > 0:
                self._left -= got
                if self._chunked and not self._left:
                    self._end_chunk()
        return at

    @property
    def body_bytes(self) -> int | None:
        """Bytes of the body that are still to come; None if unknown."""
        return None if self._chunked or self._left < 0 else self._left

    def read_body(self, limit: int) -> bytes:
        """Return the rest of the body, but at most `limit` bytes."""
        known = self.body_bytes
        parts = bytearray(min(limit, GUESS_BYTES if known is None else known))
        got = self.read_into(memoryview(parts))
        while got == len(parts) < limit and self._left:
            more = bytearray(min(limit - got, got))
            size = self.read_into(memoryview(more))
            parts += more[:size]
            got += size
        return bytes(parts[:got])

    def _receive(self, view: memoryview) -> int:
        """Receive some bytes into `view`, buffered ones first. Returns 0 at the stream's end."""
        ahead = min(self._end - self._start, len(view))
        if ahead:
            view[:ahead] = self._view[self._start : self._start + ahead]
            self._start += ahead
            return ahead
        self._check_time()
        try:
            return self.sock.recv_into(view, len(view), self._flags)
        except OSError as error:
            raise _peer_error(error, "receiving") from error

    def _fill(self) -> None:
        """Receive more bytes into the buffer. Raises PeerError at the stream's end."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._buffer):
            size = self._end - self._start
            self._buffer[:size] = self._buffer[self._start : self._end]
            self._start, self._end = 0, size
        self._check_time()
        try:
            got = self.sock.recv_into(self._view[self._end :])
        except OSError as error:
            raise _peer_error(error, "receiving") from error
        if not got:
            raise PeerError("the connection was closed")
        self._end += got

    def _check_time(self) -> None:
        if time.monotonic() > self.until:
            raise StalledError("the reply takes too long")

    def _take_until(self, mark: bytes, limit: int) -> bytes:
        """Return the bytes before `mark`. Consumes both."""
        seen = 0
        while True:
            found = self._buffer.find(mark, max(self._start, self._start + seen), self._end)
            if found >= 0 and found - self._start <= limit:
                taken = bytes(self._view[self._start : found])
                self._start = found + len(mark)
                return taken
            if self._end - self._start >= limit:
                raise PeerError("it does not speak HTTP")
            seen = max(0, self._end - self._start - len(mark) + 1)
            self._fill()

    def _take_head(self) -> bytes:
        return self._take_until(b"\r\n\r\n", HEAD_BYTES_MAX - 4)

    def _parse_head(self, raw: bytes) -> tuple[int, int, dict[str, str]]:
        first, *lines = raw.split(b"\r\n")
        match = _STATUS.fullmatch(first)
        if match is None:
            raise PeerError("it does not speak HTTP")
        headers: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.decode("latin-1").partition(":")
            if not colon or not name or name[0] in " \t":
                raise PeerError("it does not speak HTTP")
            name, value = name.lower(), value.strip()
            if name in headers and headers[name] != value:
                value = f"{headers[name]}, {value}"
            headers[name] = value
        return int(match[1]), int(match[2]), headers

    def _next_chunk(self) -> None:
        match = _CHUNK.fullmatch(self._take_until(b"\r\n", LINE_BYTES_MAX))
        if match is None:
            raise PeerError("a chunk has no length")
        self._left = int(match[1], 16)
        if not self._left:
            while self._take_until(b"\r\n", LINE_BYTES_MAX):
                pass
            self._chunked = False

    def _end_chunk(self) -> None:
        if self._take_until(b"\r\n", LINE_BYTES_MAX):
            raise PeerError("a chunk is longer than it says")
        self._next_chunk()


def _connect(address: Endpoint, timeout_s: float) -> socket.socket:
    """Return a connected socket, with TLS if configured; no call waits longer than `timeout_s`."""
    sock = socket.create_connection((address.host, address.port), timeout_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.tls is not None:
            return address.tls.wrap_socket(sock, server_hostname=address.host)
        # Use the kernel's timeouts: one system call per receive, where Python's would poll first.
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock


def _peer_error(error: OSError, doing: str) -> PeerError:
    if isinstance(error, (BlockingIOError, TimeoutError)) or error.errno == errno.EAGAIN:
        return StalledError(f"no progress while {doing}")
    return PeerError(f"{_reason(error)} while {doing}")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = "set tls_ca to the authority that signed it"
        if "match" in error.verify_message:
            hint = "use a name of the certificate in endpoint"
        return f"its certificate is not trusted: {error.verify_message}; {hint}"
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, socket.gaierror):
        return f"{error.strerror}; check the name in endpoint"
    if isinstance(error, ConnectionRefusedError):
        return f"{error.strerror}; is it running, and is endpoint right?"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
