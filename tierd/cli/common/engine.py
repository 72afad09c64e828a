"""An engine's OpenAI API, as far as commands use it: its tokenizer, and prompts to compute.

A connection a request: requests are few and long, and one that hangs or breaks takes no other
with it.
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
"""Longest wait for an answer: a long prompt behind others takes minutes on a busy engine."""

CONNECT_S: Final = 5.0
"""Longest wait for it to take a connection."""

ANSWER_BYTES_MAX: Final = 64 << 20
"""A million tokens take less than 8 MB."""

SAID_CHARS_MAX: Final = 200
"""Of what an engine says of its own accord."""


class EngineAwayError(TierdError):
    """No answer from the engine; the message names its URL."""


class EngineRefusedError(TierdError):
    """The engine understood the request and does not do it; others may go well."""


class EngineServer:
    """The engine at a URL. Safe for several threads."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        """Connects to nothing. Raises ConfigError if it is no URL of a server."""
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
        """What it serves: "id", and for an adapter its "root" and "parent" as it has them."""
        found = self._call("GET", "/v1/models", None).get("data")
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            raise EngineRefusedError(f"{self.url}: /v1/models lists no models")
        return found

    def tokens(self, request: Mapping[str, object]) -> list[int]:
        """The tokens of {"prompt": text} or {"messages": ...}, with "model" and what else the
        engine's /tokenize takes. Raises EngineAwayError, EngineRefusedError."""
        tokens = self._call("POST", "/tokenize", request).get("tokens")
        if not isinstance(tokens, list):
            raise EngineRefusedError(f"{self.url}: /tokenize answered without tokens")
        return tokens

    def compute(self, tokens: list[int], *, model: str | None, salt: str | None) -> None:
        """Have a prompt computed, and so stored. Raises EngineAwayError, EngineRefusedError."""
        request: dict[str, object] = {"prompt": tokens, "max_tokens": 1, "temperature": 0}
        if model is not None:
            request["model"] = model
        if salt is not None:
            request["cache_salt"] = salt
        self._call("POST", "/v1/completions", request)

    def version(self) -> str:
        """Of vLLM. Raises as the others do."""
        return str(self._call("GET", "/version", None).get("version", "unknown"))

    def text(self, path: str) -> str:
        """What it answers to a GET, whatever that is."""
        return self._ask("GET", path, None).decode("utf-8", "replace")

    def _call(self, method: str, path: str, body: Mapping[str, object] | None) -> dict[str, object]:
        answer = self._ask(method, path, body)
        try:
            value = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise EngineRefusedError(f"{self.url}{path} answered no JSON: {error}") from error
        if not isinstance(value, dict):
            raise EngineRefusedError(f"{self.url}{path} answered no object")
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
    """The status, and the message of an error as the OpenAI API has it."""
    message = ""
    try:
        value = json.loads(answer)
        message = value["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    status = f"{response.status} {response.reason}"
    return printable(f"{status}: {message}" if message else status)[:SAID_CHARS_MAX]
