"""A `vllm serve` as a user starts it, with a model from files."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import pytest

from engine import model as model_script
from engine.process import engine_path, engine_python

READY_S = 150
STOP_S = 30
ATTACH_S = 30

README_ARGUMENTS = ["--prefix-caching-hash-algo", "sha256_cbor", "--kv-transfer-config"]
README_TRANSFER = '{"kv_connector":"TierdConnector","kv_role":"kv_both"}'

DAEMON_COPIES = "the daemon copies for this engine"
"""The server's log line for host_ipc."""

CPU_ARGUMENTS = [
    *("--dtype", "float32", "--block-size", "32", "--max-model-len", "4096"),
    *("--enforce-eager", "--enable-prompt-tokens-details"),
]

# One unbound thread: threads that spin on barriers are very slow on a busy machine.
CPU_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


class Streamed(NamedTuple):
    """A streamed answer."""

    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float


class Server:
    """A running `vllm serve`, attached to the socket that its environment names."""

    def __init__(
        self,
        model: Path,
        tierd_socket: str,
        log: Path,
        *,
        extra: Mapping[str, object] | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        """`extra` are settings of the connector; without any it is the README's command."""
        self.log = log
        transfer = README_TRANSFER
        if extra:
            settings = {**json.loads(transfer), "kv_connector_extra_config": extra}
            transfer = json.dumps(settings)
        self.model = str(model)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        environment |= {"PYTHONPATH": engine_path(), "TIERD_SOCKET": tierd_socket}
        # vLLM's development mode: cache resets, and calls to its workers.
        environment["VLLM_SERVER_DEV_MODE"] = "1"
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(engine_python(), "-m", "vllm.entrypoints.cli.main", "serve", model),
                    *(*README_ARGUMENTS, transfer),
                    *(*CPU_ARGUMENTS, *arguments),
                    *("--host", "127.0.0.1", "--port", str(port)),
                ],
                stdout=output,
                stderr=output,
                env={**environment, **CPU_ENVIRONMENT},
                start_new_session=True,
            )
        self._wait(self._healthy, READY_S)

    def complete(self, tokens: list[int], **hints: float) -> tuple[list[int], int]:
        """The greedy answer's token ids, and the number of cached tokens of the prompt."""
        request = {
            "kv_transfer_params": {"tierd": hints},
            "model": self.model,
            "prompt": tokens,
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = json.loads(self.get("/v1/completions", json.dumps(request).encode()))
        details = answer["usage"]["prompt_tokens_details"] or {}
        return answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0

    def stream(self, path: str, request: Mapping[str, object]) -> Streamed:
        """A request's greedy answer, and the time to its first token."""
        options = {
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sampling = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        body = {"model": self.model, **sampling, **request, **options}
        tokens: list[int] = []
        usage: dict = {}
        first_s = 0.0
        began_s = time.perf_counter()
        with self._open(path, json.dumps(body).encode()) as answer:
            for line in answer:
                word = line.removeprefix(b"data:").strip()
                if not word.startswith(b"{"):
                    continue
                event = json.loads(word)
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
                    if tokens and not first_s:
                        first_s = time.perf_counter() - began_s
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        return Streamed(tokens, usage["prompt_tokens"], cached, first_s)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = self.get("/metrics").decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait until `reached` is true: at most until the connector's next attempt to connect."""
        self._wait(reached, ATTACH_S)

    def stop(self) -> int:
        """SIGTERM to the main process, as an operator stops it; returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)

    def kill(self) -> None:
        """Kill all remaining processes of the server."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait()

    def _healthy(self) -> bool:
        try:
            self.get("/health")
        except urllib.error.URLError:
            return False
        return True

    def get(self, path: str, body: bytes | None = None) -> bytes:
        """The response to a GET, or to a POST if there is a body."""
        with self._open(path, body) as response:
            answer: bytes = response.read()
            return answer

    def _open(self, path: str, body: bytes | None) -> BinaryIO:
        request = urllib.request.Request(self.url + path, body)
        request.add_header("Content-Type", "application/json")
        opened: BinaryIO = urllib.request.urlopen(request, timeout=60)
        return opened

    def _wait(self, reached: Callable[[], bool], timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not reached():
            gone = self.process.poll() is not None
            if gone or time.monotonic() > end:
                self.kill()
                text = self.log.read_text()
                ours = "\n".join(line for line in text.splitlines() if "tierd" in line)
                pytest.fail(f"vllm serve:\n{ours}\n...\n{text[-4000:]}", pytrace=False)
            time.sleep(0.1)


def write_model(directory: Path) -> Path:
    """Write a tiny model's files; returns their directory."""
    return _write(directory)


def write_adapter(directory: Path, seed: int) -> Path:
    """Write a LoRA adapter for it; returns its directory."""
    return _write(directory, str(seed))


def _write(directory: Path, *seed: str) -> Path:
    script = model_script.__file__
    subprocess.run([engine_python(), script, directory, "tiny", *seed], check=True)
    return directory
