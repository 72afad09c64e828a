"""Fakes of a daemon and of a vLLM, for answers that real ones cannot be made to give.

The daemon speaks tierd's protocol and holds no blocks; the engine implements the part of vLLM's
HTTP API that tierd's commands use, and computes nothing.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

from tierd.wire import messages as m
from tierd.wire.session import Role, WireSession, encode


class FakeDaemon(socketserver.ThreadingUnixStreamServer):
    """Listens on `path`, welcomes, and answers STATUS with `body`; or stays silent, or refuses."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self, path: Path, body: dict[str, object], *, silent: bool = False, refusal: str = ""
    ) -> None:
        self.body, self.silent, self.refusal = body, silent, refusal
        super().__init__(str(path), _Session)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> FakeDaemon:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Session(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, FakeDaemon)
        wire = WireSession(Role.DAEMON, self._answer)
        if self.server.refusal:
            self.request.sendall(encode(m.Error(0, self.server.refusal)))
            self.request.shutdown(socket.SHUT_WR)
        while data := self.request.recv(1 << 16):
            if not self.server.silent and not self.server.refusal:
                wire.receive(data)

    def _answer(self, message: m.FromClient | m.FromDaemon, _: tuple[int, ...]) -> None:
        assert isinstance(self.server, FakeDaemon)
        match message:
            case m.Hello():
                self._say(m.Welcome(m.PROTOCOL_VERSION, bytes(16), "fake", 30_000))
            case m.Status():
                self._say(m.StatusReply(message.call, self.server.body))

    def _say(self, message: m.Message) -> None:
        self.request.sendall(encode(message))


class FakeEngine:
    """An HTTP server; `compute` gets each prompt's tokens, `metrics` is the text of /metrics."""

    def __init__(self, compute: Callable[[list[int]], None] = lambda tokens: None) -> None:
        self.compute = compute
        self.metrics = ""
        self.answers: dict[str, tuple[int, bytes]] = {}
        """Responses by path that replace the default ones."""
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                engine.respond(self, {})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                engine.respond(self, json.loads(body))

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def respond(self, handler: BaseHTTPRequestHandler, body: dict[str, object]) -> None:
        """Answer one request."""
        status, answer = self.answers.get(handler.path) or (200, self._answer(handler.path, body))
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(answer)))
        handler.end_headers()
        handler.wfile.write(answer)

    def _answer(self, path: str, body: dict[str, object]) -> bytes:
        match path:
            case "/version":
                return b'{"version": "0.0.fake"}'
            case "/v1/models":
                models = [
                    {"id": "adapter", "parent": "base", "max_model_len": 4096},
                    {"id": "base", "parent": None, "max_model_len": 4096},
                ]
                return json.dumps({"data": models}).encode()
            case "/metrics":
                return self.metrics.encode()
            case "/v1/completions":
                assert body["model"] == "base"
                prompt = body["prompt"]
                assert isinstance(prompt, list)
                self.compute(prompt)
                return b'{"choices": []}'
        return b""
