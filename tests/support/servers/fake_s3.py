"""A scripted fake of an S3 server, for answers that real servers cannot be made to give.

It checks no signature and has one bucket. By default it keeps objects in memory and answers as S3
does. A script may answer any request with arbitrary bytes:

    def script(request):
        if request.method == "GET":
            yield b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + bytes(50)
            yield STALL

    fake.script = script
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from tierd.testing import suite
from tierd_backends.s3 import S3Backend, S3Options

BUCKET = "fake-bucket"


class Do(enum.Enum):
    """Script actions other than sending bytes."""

    STALL = "stall"
    """Stay silent until the client closes or the server ends."""
    CLOSE = "close"
    """Close the connection."""


STALL, CLOSE = Do.STALL, Do.CLOSE


@dataclass
class Request:
    """A received request; `name` is the object's, empty for the bucket."""

    method: str
    name: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


Script = Callable[[Request], "Iterable[bytes | float | Do] | None"]
"""The response to a request: bytes to send, seconds to pause, actions. None, or only pauses, leaves
the response to the server."""


def reply(status: int, body: bytes = b"", **headers: str) -> bytes:
    """A whole reply; underscores in names of headers become dashes."""
    head = [f"HTTP/1.1 {status} Whatever"]
    head += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if not any(name.lower() == "content_length" for name in headers):
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*head, "", ""]).encode() + body


def etag(body: bytes) -> str:
    """The ETag of an object."""
    return f'"{hashlib.md5(body).hexdigest()}"'


def error(status: int, code: str, more: str = "", **headers: str) -> bytes:
    """An S3 error response."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>why</Message>{more}</Error>"
    return reply(status, body.encode(), **headers)


def on(method: str, *parts: bytes | float | Do) -> Script:
    """A script that answers every request of this method, for objects only, with these parts."""

    def script(request: Request) -> Iterable[bytes | float | Do] | None:
        return parts if request.method == method and request.name else None

    return script


def says(status: int, code: str, *methods: str) -> Script:
    """The script of a server that answers some methods with an error."""

    def script(request: Request) -> Iterable[bytes | float | Do] | None:
        if request.method not in methods:
            return None
        return [reply(status) if request.method == "HEAD" else error(status, code)]

    return script


class FakeS3:
    """Listens on 127.0.0.1; a context manager. `objects` is what the bucket holds, by name."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.script: Script | None = None
        self.refuse_bodies: bytes | None = None
        """If set, the response to a request with a body after its head; the connection then
        ends."""
        self.connections = 0
        self.connections_max = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def options(self, **more: object) -> dict[str, object]:
        """Keys of a `[[storage]]` table of type "s3"."""
        return {
            "bucket": BUCKET,
            "endpoint": self.endpoint,
            "access_key": "fake",
            "secret_key": "fake",
            **more,
        }

    def count(self, *methods: str) -> int:
        """Number of requests so far, of these methods if any are given."""
        return sum(not methods or each.method in methods for each in list(self.requests))

    def __enter__(self) -> FakeS3:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._sockets.add(sock)
                self.connections += 1
                self.connections_max = max(self.connections_max, self.connections)
            self._start(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError), sock.makefile("rb") as file:
                if sock.recv(1, socket.MSG_PEEK) == b"\x16":
                    # The beginning of TLS: answered in plain text, as plain servers do.
                    sock.sendall(reply(400))
                    return
                while (request := _read_request(file)) is not None:
                    self.requests.append(request)
                    length = int(request.headers.get("content-length", "0"))
                    if length and self.refuse_bodies is not None:
                        sock.sendall(self.refuse_bodies)
                        return
                    request.body = file.read(length)
                    if len(request.body) < length:
                        return
                    if not self._answer(sock, request):
                        return
        finally:
            with self._lock:
                self._sockets.discard(sock)
                self.connections -= 1
            sock.close()

    def _answer(self, sock: socket.socket, request: Request) -> bool:
        """Answer a request; returns whether the connection stays open."""
        scripted = False
        for part in (self.script and self.script(request)) or ():
            scripted = scripted or not isinstance(part, float)
            match part:
                case bytes():
                    sock.sendall(part)
                case Do.CLOSE:
                    return False
                case Do.STALL:
                    while sock.recv(1 << 16):
                        pass
                    return False
                case _:
                    self._ended.wait(part)
        if not scripted:
            sock.sendall(self._default(request))
        return True

    def _default(self, request: Request) -> bytes:
        name = request.name
        match request.method:
            case "GET" if not name:
                return self._list(request)
            case "GET" | "HEAD" if name not in self.objects:
                return error(404, "NoSuchKey") if request.method == "GET" else reply(404)
            case "HEAD":
                body = self.objects[name]
                return reply(200, Content_Length=str(len(body)), ETag=etag(body))
            case "GET" if "range" in request.headers:
                first, _, last = request.headers["range"].removeprefix("bytes=").partition("-")
                return reply(206, self.objects[name][int(first) : int(last) + 1])
            case "GET":
                return reply(200, self.objects[name], ETag=etag(self.objects[name]))
            case "PUT":
                with self._lock:
                    if "if-none-match" in request.headers and name in self.objects:
                        return error(412, "PreconditionFailed")
                    self.objects[name] = request.body
                return reply(200)
            case "DELETE":
                with self._lock:
                    wanted = request.headers.get("if-match")
                    if wanted and wanted != etag(self.objects.get(name, b"")):
                        return error(412, "PreconditionFailed")
                    self.objects.pop(name, None)
                return b"HTTP/1.1 204 No Content\r\n\r\n"
        return error(405, "MethodNotAllowed")

    def _list(self, request: Request) -> bytes:
        limit = int(request.query.get("max-keys", "1000"))
        after = request.query.get("continuation-token", "")
        names = sorted(
            name
            for name in list(self.objects)
            if name.startswith(request.query.get("prefix", "")) and name > after
        )
        shown = names[:limit]
        entries = "".join(
            f"<Contents><Key>{name}</Key><Size>{len(self.objects[name])}</Size></Contents>"
            for name in shown
        )
        more = (
            f"<IsTruncated>true</IsTruncated><NextContinuationToken>{shown[-1]}"
            "</NextContinuationToken>"
            if len(names) > limit
            else "<IsTruncated>false</IsTruncated>"
        )
        return reply(200, f"<ListBucketResult>{entries}{more}</ListBucketResult>".encode())


@contextlib.asynccontextmanager
async def running(fake: FakeS3, **more: object) -> AsyncIterator[S3Backend]:
    """An S3 tier on a fake server, open and with its bucket counted; few connections."""
    settings = fake.options(**{"connections": 2, "timeout_ms": 5000, **more})
    backend = S3Backend.from_options(msgspec.convert(settings, S3Options))
    async with suite.running(backend):
        try:
            yield backend
        finally:
            fake.script = None


def _read_request(file) -> Request | None:
    first = file.readline().decode("latin-1").split()
    if len(first) != 3:
        return None
    headers = {}
    while (line := file.readline().decode("latin-1").strip()) != "":
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    url = urlsplit(first[1])
    query = {name: values[0] for name, values in parse_qs(url.query).items()}
    name = unquote(url.path).removeprefix(f"/{BUCKET}").lstrip("/")
    return Request(first[0], name, query, headers, b"")
