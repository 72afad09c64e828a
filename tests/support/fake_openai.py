"""A fake of an engine's OpenAI API: its tokens are letters, and computed blocks are stored with a
daemon under the hashes that the real engine would use."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Request = dict[str, object]


def letters(text: str) -> list[int]:
    """One token per letter."""
    return [ord(letter) for letter in text]


def render(request: Mapping[str, object]) -> str:
    """The text of a chat or of a completion."""
    if "messages" not in request:
        return str(request["prompt"])
    return json.dumps([request["messages"], request.get("tools")]) + "assistant:"


class FakeOpenAI:
    """The requests that it got, and the answers that it gives."""

    def __init__(self, store: Callable[[Request], None]) -> None:
        self.url = ""
        self.computed: list[Request] = []
        self.tokenized: list[Request] = []
        self.at_once_max = 0
        self.refusal: tuple[int, str] | None = None
        """Status and message of all answers."""
        self.hold = threading.Event()
        """Requests wait until this is set."""
        self.hold.set()
        self.store = store
        self.store_delay_s = 0.0
        self._at_once = 0
        self._lock = threading.Lock()

    def answer(self, path: str, request: Request) -> tuple[int, Request]:
        """Status and body."""
        if self.refusal is not None:
            status, message = self.refusal
            return status, {"error": {"message": message}}
        if path == "/tokenize":
            self.tokenized.append(request)
            return 200, {"tokens": letters(render(request))}
        if path != "/v1/completions":
            return 404, {"error": {"message": "no such path"}}
        with self._lock:
            self._at_once += 1
            self.at_once_max = max(self.at_once_max, self._at_once)
        self.hold.wait()
        with self._lock:
            self.computed.append(request)
            self._at_once -= 1
        return 200, {"choices": [{"text": ""}]}

    def end(self, path: str, request: Request) -> None:
        """Called once the answer is sent: stores come later, as in the real engine."""
        if path == "/v1/completions" and self.refusal is None:
            time.sleep(self.store_delay_s)
            with self._lock:
                self.store(request)


@contextmanager
def serving(engine: FakeOpenAI) -> Iterator[FakeOpenAI]:
    """Serves at `engine.url` within the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the base class's name
            length = int(self.headers["Content-Length"])
            request = json.loads(self.rfile.read(length))
            status, body = engine.answer(self.path, request)
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            engine.end(self.path, request)

        def log_message(self, *_: object) -> None:
            """Discard the log."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        # Threads that the server waits for at the end.
        server.daemon_threads = False
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        engine.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield engine
        finally:
            engine.hold.set()
            server.shutdown()
            thread.join()
