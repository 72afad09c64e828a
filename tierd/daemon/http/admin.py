"""Metrics and health over HTTP: read-only, local, and cheap for the daemon.

    GET /metrics     what STATUS reports, for Prometheus
    GET /v1/status   the same as JSON, with the daemon's phase
    GET /v1/hotset   the hot set of host memory, for another node's `tierd warm`
    GET /healthz     200 while the daemon's own work progresses, else 503 with the reason
    GET /readyz      200 while engines are served; 503 before, and from SIGTERM on

A connection has one request, which is read into a bounded buffer and answered at once, without a
task; a slow connection is closed. Only the hot set is streamed, to one client at a time. No request
changes any state.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import ipaddress
import json
import logging
import re
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from http import HTTPStatus
from typing import Final, NamedTuple, cast

from tierd import __version__
from tierd.clock import SystemClock
from tierd.config import AdminConfig
from tierd.daemon.http.exposition import CONTENT_TYPE
from tierd.daemon.http.health import Health
from tierd.daemon.http.metrics import scrape
from tierd.daemon.jobs.hotset import WORK_S, gather
from tierd.daemon.node import Node
from tierd.errors import ConfigError
from tierd.hotset import pieces

log = logging.getLogger("tierd")

REQUEST_BYTES_MAX: Final = 8 << 10
"""Longest request with its headers, as in most web servers."""

DISCARD_BYTES_MAX: Final = 64 << 10
"""Bytes that a client may send after its request before it is disconnected."""

CONNECTION_S_MAX: Final = 5.0
"""Longest duration of a connection."""

CONNECTIONS_MAX: Final = 16
"""Connections at once: one or two Prometheus servers, and an operator's curl."""

BUSY_SHARE_MAX: Final = 1 / 20
"""Largest share of the loop's time, for which engines wait, that making one page may take; until
then the last page is served again. A page takes 0.3 ms with 8 namespaces, 11 to 25 with 1,024."""

HOTSET: Final = "/v1/hotset"

STREAM_S_MAX: Final = 300.0
"""Longest duration of a connection that streams a hot set: a million blocks take 100 s within
BUSY_SHARE_MAX of the loop's time."""

_REQUEST: Final = re.compile(rb"([A-Z]{1,16}) (/[!-~]{0,200}) HTTP/1\.[01]")
_END: Final = b"\r\n\r\n"
_TEXT: Final = "text/plain; charset=utf-8"
_JSON: Final = "application/json"
_JSON_LINES: Final = "application/x-ndjson"


class Phase(enum.Enum):
    """The daemon's phase, as /readyz reports it."""

    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"


class _Reply(NamedTuple):
    body: str
    status: HTTPStatus = HTTPStatus.OK
    kind: str = _TEXT


class Admin:
    """Answers HTTP requests about a node."""

    def __init__(self, node: Node, health: Health | None = None) -> None:
        self.phase = Phase.STARTING
        self.open: set[_Connection] = set()
        self._node = node
        self._streaming = False
        self._health = health or Health(node.threads)

        def status() -> dict[str, object]:
            return {**node.status(), "phase": self.phase.value}

        self._pages: dict[str, Callable[[], _Reply]] = {
            "/healthz": self._healthz,
            "/metrics": _CachedPage(lambda: _Reply(scrape(status()), kind=CONTENT_TYPE)),
            "/readyz": self._readyz,
            "/v1/status": _CachedPage(lambda: _Reply(_json(status()), kind=_JSON)),
            HOTSET: self._no_stream,
        }

    @contextlib.asynccontextmanager
    async def serving(self, listener: socket.socket | None) -> AsyncIterator[None]:
        """Answer requests on `listener`, if there is one, until the block ends."""
        if listener is None:
            yield
            return
        loop = asyncio.get_running_loop()
        if listener.family == socket.AF_UNIX:
            server = await loop.create_unix_server(lambda: _Connection(self), sock=listener)
        else:
            server = await loop.create_server(lambda: _Connection(self), sock=listener)
        log.info("metrics and health on %s", _name_of(listener))
        try:
            yield
        finally:
            server.close()
            for connection in [*self.open]:
                connection.abort()

    def answer(self, head: bytes) -> bytes:
        """Return the complete reply to a request; `head` is the request up to its empty line."""
        asked = _asked(head)
        if asked is None:
            return _packed(_Reply("not an HTTP request\n", HTTPStatus.BAD_REQUEST))
        method, path = asked
        if method not in (b"GET", b"HEAD"):
            return _packed(_Reply("GET or HEAD\n", HTTPStatus.METHOD_NOT_ALLOWED), "GET, HEAD")
        page = self._pages.get(path)
        if page is None:
            known = " ".join(self._pages)
            return _packed(_Reply(f"not found; the paths are {known}\n", HTTPStatus.NOT_FOUND))
        reply = _packed(page())
        return reply if method == b"GET" else reply[: reply.index(_END) + len(_END)]

    def stream(self, head: bytes) -> AsyncGenerator[bytes, None] | None:
        """Return the pieces of a streamed reply; None if `answer` gives the reply."""
        if _asked(head) != (b"GET", HOTSET):
            return None
        if self._streaming or self.phase is not Phase.SERVING:
            return None
        return self._hotset()

    async def _hotset(self) -> AsyncGenerator[bytes, None]:
        self._streaming = True
        try:
            yield _head(HTTPStatus.OK, _JSON_LINES)
            pause = _Pacer()
            gathered = await gather(self._node.host, SystemClock(), pause)
            for piece in pieces(
                gathered.families(), written_s=int(time.time()), version=__version__
            ):
                yield piece
                await pause()
        finally:
            self._streaming = False

    def follow(self, work: Callable[[], Coroutine[object, object, None]]) -> asyncio.Task[None]:
        """Run `work`, which streams a reply, as a task of the node."""
        return self._node.spawn(work, "stream")

    def _no_stream(self) -> _Reply:
        if self._streaming or self.phase is not Phase.SERVING:
            why = "another client reads it" if self._streaming else self.phase.value
            return _Reply(f"{why}\n", HTTPStatus.SERVICE_UNAVAILABLE)
        return _Reply("", kind=_JSON_LINES)  # The method is HEAD.

    def _healthz(self) -> _Reply:
        if trouble := self._health.trouble:
            return _Reply(f"{trouble}\n", HTTPStatus.SERVICE_UNAVAILABLE)
        return _Reply("ok\n")

    def _readyz(self) -> _Reply:
        if self.phase is not Phase.SERVING:
            return _Reply(f"{self.phase.value}\n", HTTPStatus.SERVICE_UNAVAILABLE)
        return _Reply("ok\n")


class _CachedPage:
    """A page that is made at most as often as BUSY_SHARE_MAX allows."""

    def __init__(self, make: Callable[[], _Reply]) -> None:
        self._make = make
        self._made: _Reply
        self._good_until_s = 0.0

    def __call__(self) -> _Reply:
        began_s = time.monotonic()
        if began_s >= self._good_until_s:
            self._made = self._make()
            took_s = time.monotonic() - began_s
            self._good_until_s = began_s + took_s / BUSY_SHARE_MAX
        return self._made


class _Pacer:
    """Pauses between pieces of work, which together take BUSY_SHARE_MAX of the loop's time."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()

    async def __call__(self) -> None:
        took_s = time.monotonic() - self._since_s
        if took_s > WORK_S:
            await asyncio.sleep(took_s / BUSY_SHARE_MAX)
            self._since_s = time.monotonic()


class _Connection(asyncio.Protocol):
    """One client, from its connection to its end."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._request = bytearray()
        self._answered = False
        self._discarded_bytes = 0
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle
        self._stream: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not say so.
        self._timer = asyncio.get_running_loop().call_later(CONNECTION_S_MAX, self.abort)
        if len(self._admin.open) >= CONNECTIONS_MAX:
            self.abort()
        self._admin.open.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self._admin.open.discard(self)
        if self._stream is not None:
            self._stream.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        if self._answered:
            # A close with unread bytes would reset the connection before the client has read the
            # reply.
            self._discarded_bytes += len(data)
            if self._discarded_bytes > DISCARD_BYTES_MAX:
                self.abort()
            return
        before = len(self._request)
        self._request += data[: REQUEST_BYTES_MAX + 1 - before]
        end = self._request.find(_END, max(0, before - len(_END)))
        if end >= 0:
            self._reply(bytes(self._request[:end]))
        elif len(self._request) > REQUEST_BYTES_MAX:
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self._say(_packed(_Reply(f"at most {REQUEST_BYTES_MAX} bytes\n", status)))

    def _reply(self, head: bytes) -> None:
        replies = self._admin.stream(head)
        if replies is None:
            self._say(self._admin.answer(head))
            return
        self._answered = True
        self._request.clear()
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(STREAM_S_MAX, self.abort)
        self._stream = self._admin.follow(partial(self._say_all, replies))

    async def _say_all(self, replies: AsyncGenerator[bytes, None]) -> None:
        async with contextlib.aclosing(replies):
            async for piece in replies:
                self._transport.write(piece)
                await self._writable.wait()
        self._transport.write_eof()

    def _say(self, reply: bytes) -> None:
        self._answered = True
        self._request.clear()
        self._transport.write(reply)
        # The connection ends when the client has closed its side.
        self._transport.write_eof()

    def abort(self) -> None:
        """Close at once, even in the middle of a reply."""
        self._transport.abort()


def tcp_listener(config: AdminConfig) -> socket.socket:
    """A listening socket at `config.listen`. Raises ConfigError, also if the address is taken."""
    address, port = tcp_address(config)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=CONNECTIONS_MAX)
    except OSError as error:
        raise ConfigError(f"cannot listen on admin.listen {config.listen}: {error}") from error


def tcp_address(config: AdminConfig) -> tuple[str, int]:
    """The address and port of a text like 127.0.0.1:9464 or [::1]:9464.

    Raises ConfigError for another text, and for an address that other machines can reach unless
    admin.allow_remote is set.
    """
    host, _, port = config.listen.rpartition(":")
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        number = int(port) if re.fullmatch("[0-9]{1,5}", port) else -1
        if not 0 <= number < 1 << 16 or (address.version == 6) != host.startswith("["):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"admin.listen is {config.listen!r}; it must be like 127.0.0.1:9464, [::1]:9464, or "
            "the absolute path of a unix socket"
        ) from None
    if not address.is_loopback and not config.allow_remote:
        raise ConfigError(
            f"admin.listen is {config.listen}, which other machines can reach without a password: "
            "use 127.0.0.1, or set admin.allow_remote = true"
        )
    return str(address), number


def _asked(head: bytes) -> tuple[bytes, str] | None:
    """Return method and path of a request; None if it is malformed."""
    match = _REQUEST.fullmatch(head.partition(b"\r\n")[0])
    return None if match is None else (match[1], match[2].decode().partition("?")[0])


def _json(status: dict[str, object]) -> str:
    return json.dumps(status, indent=2) + "\n"


def _packed(reply: _Reply, allow: str = "") -> bytes:
    body = reply.body.encode("utf-8", "replace")
    more = [f"Content-Length: {len(body)}", *([f"Allow: {allow}"] if allow else [])]
    return _head(reply.status, reply.kind, more) + body


def _head(status: HTTPStatus, kind: str, more: Sequence[str] = ()) -> bytes:
    head = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {kind}",
        *more,
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
    ]
    return "\r\n".join([*head, "", ""]).encode()


def _name_of(listener: socket.socket) -> str:
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return str(name)
    host = f"[{name[0]}]" if listener.family == socket.AF_INET6 else name[0]
    return f"http://{host}:{name[1]}"
