"""Client of an engine's OpenAI API: models, metrics, its tokenizer, and prompts to compute.

Each request has its own connection: requests are few and long, and one that hangs or breaks must
not affect another.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from tierd.cli.common.text import printable
from tierd.errors import ConfigError, TierdError

TIMEOUT_S: Final = 300.0
"""Longest wait for an answer: on a busy engine a long prompt takes minutes."""

CONNECT_S: Final = 5.0
"""Longest wait for a connection."""

ANSWER_BYTES_MAX: Final = 64 << 20
"""Largest answer that is read. A million tokens take less than 8 MB."""

SAID_CHARS_MAX: Final = 200
"""Limit of an engine's error text in a message."""


class EngineAwayError(TierdError):
    """The engine does not answer; the message names its URL."""


class EngineRefusedError(TierdError):
    """The engine refused one request; others may succeed."""


class EngineServer:
    """The engine at a URL. Thread-safe."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        """Check the URL without connecting. Raises ConfigError if it is not a server's URL."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--engine {url}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ConfigError(f"--engine {url}: want http://HOST:PORT")
        self.url = url
        self._https = parts.scheme == "https"
        self._host, self._port = parts.hostname, port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s

    def models(self) -> list[dict[str, object]]:
        """Return the served models: "id", and for an adapter also "root" and "parent". Raises
        EngineAwayError, EngineRefusedError."""
        found = self._call("GET", "/v1/models", None).get("data")
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            raise EngineRefusedError(f"{self.url}: /v1/models lists no models")
        return found

    def tokens(self, request: Mapping[str, object]) -> list[int]:
        """Return the tokens of a request with "prompt" (text) or "messages", "model" and other
        fields of /tokenize. Raises EngineAwayError, EngineRefusedError."""
        tokens = self._call("POST", "/tokenize", request).get("tokens")
        if not isinstance(tokens, list):
            raise EngineRefusedError(f"{self.url}: /tokenize answered without tokens")
        return tokens

    def compute(self, tokens: list[int], *, model: str | None, salt: str | None) -> None:
        """Let the engine compute, and so store, a prompt. Raises EngineAwayError,
        EngineRefusedError."""
        request: dict[str, object] = {"prompt": tokens, "max_tokens": 1, "temperature": 0}
        if model is not None:
            request["model"] = model
        if salt is not None:
            request["cache_salt"] = salt
        self._call("POST", "/v1/completions", request)

    def version(self) -> str:
        """Return vLLM's version. Raises EngineAwayError, EngineRefusedError."""
        return str(self._call("GET", "/version", None).get("version", "unknown"))

    def text(self, path: str) -> str:
        """Return the answer to a GET as text. Raises EngineAwayError, EngineRefusedError."""
        return self._ask("GET", path, None).decode("utf-8", "replace")

    def _call(self, method: str, path: str, body: Mapping[str, object] | None) -> dict[str, object]:
        answer = self._ask(method, path, body)
        try:
            value = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise EngineRefusedError(f"{self.url}{path} answered invalid JSON: {error}") from error
        if not isinstance(value, dict):
            raise EngineRefusedError(f"{self.url}{path} did not answer a JSON object")
        return value

    def _ask(self, method: str, path: str, body: Mapping[str, object] | None) -> bytes:
        kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=min(CONNECT_S, self._timeout_s))
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.connect()
            connection.sock.settimeout(self._timeout_s)
            connection.request(method, self._path + path, data, headers)
            response = connection.getresponse()
            answer = response.read(ANSWER_BYTES_MAX)
        except (OSError, http.client.HTTPException) as error:
            why = str(error) or type(error).__name__
            raise EngineAwayError(f"no answer from the engine at {self.url}: {why}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise EngineRefusedError(f"the engine at {self.url}: {_said(response, answer)}")
        return answer


def _said(response: http.client.HTTPResponse, answer: bytes) -> str:
    """Return the HTTP status, and the message of an OpenAI API error if there is one."""
    message = ""
    try:
        value = json.loads(answer)
        message = value["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    status = f"{response.status} {response.reason}"
    return printable(f"{status}: {message}" if message else status)[:SAID_CHARS_MAX]
