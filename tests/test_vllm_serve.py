"""`vllm serve` as the README says, with a model from files: what a user's server does.

The engine runs in three processes here, is attached by name alone, hashes with no seed
given, and identifies its weights by their files.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine import model as model_script
from engine.process import engine_path, engine_python
from tests.daemon_process import DaemonProcess

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]

READY_S = 150
STOP_S = 30
ATTACH_S = 30

README_ARGUMENTS = ["--prefix-caching-hash-algo", "sha256_cbor", "--kv-transfer-config"]
README_TRANSFER = '{"kv_connector":"TierdConnector","kv_role":"kv_both"}'

TRANSFERS = {
    "shm": README_TRANSFER,
    "host_ipc": README_TRANSFER[:-1] + ',"kv_connector_extra_config":{"transfer":"host_ipc"}}',
}

CPU_ARGUMENTS = [
    *("--dtype", "float32", "--block-size", "32", "--max-model-len", "4096"),
    *("--enforce-eager", "--enable-prompt-tokens-details"),
]

# One unbound thread: threads that spin on barriers crawl on a machine that does other work.
CPU_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


class Server:
    """A `vllm serve` that answers, with whatever socket its environment names."""

    def __init__(self, model: Path, tierd_socket: str, log: Path, transfer: str) -> None:
        self.log = log
        self._model = str(model)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        environment |= {"PYTHONPATH": engine_path(), "TIERD_SOCKET": tierd_socket}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(engine_python(), "-m", "vllm.entrypoints.cli.main", "serve", model),
                    *(*README_ARGUMENTS, TRANSFERS[transfer]),
                    *CPU_ARGUMENTS,
                    *("--host", "127.0.0.1", "--port", str(port)),
                ],
                stdout=output,
                stderr=output,
                env={**environment, **CPU_ENVIRONMENT},
                start_new_session=True,
            )
        self._wait(self._healthy, READY_S)

    def complete(self, tokens: list[int], **hints: float) -> tuple[list[int], int]:
        """The greedy answer's token ids, and how many of the prompt's tokens were cached."""
        request = {
            "kv_transfer_params": {"tierd": hints},
            "model": self._model,
            "prompt": tokens,
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = json.loads(self._get("/v1/completions", json.dumps(request).encode()))
        details = answer["usage"]["prompt_tokens_details"] or {}
        return answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = self._get("/metrics").decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait until `reached` is true, which takes as long as the connector's next try."""
        self._wait(reached, ATTACH_S)

    def stop(self) -> int:
        """SIGTERM to the main process, as an operator stops it; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)

    def kill(self) -> None:
        """End whatever is left of the server's processes."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait()

    def _healthy(self) -> bool:
        try:
            self._get("/health")
        except urllib.error.URLError:
            return False
        return True

    def _get(self, path: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(self._url + path, body)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as response:
            answer: bytes = response.read()
            return answer

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


@pytest.fixture
def model(tmp_path: Path) -> Path:
    script = model_script.__file__
    subprocess.run([engine_python(), script, tmp_path / "model", "tiny"], check=True)
    return tmp_path / "model"


@pytest.fixture(params=TRANSFERS)
def transfer(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture
def serve(model: Path, tmp_path: Path, transfer: str) -> Iterator[Callable[[str], Server]]:
    """Starts servers, and ends what a failed test left of them."""
    started: list[Server] = []

    def start(tierd_socket: str) -> Server:
        log = tmp_path / f"vllm-{len(started)}.log"
        started.append(Server(model, tierd_socket, log, transfer))
        return started[-1]

    yield start
    for server in started:
        server.kill()


def test_the_readme_s_command(
    tmp_path: Path, serve: Callable[[str], Server], transfer: str
) -> None:
    """Who follows the README would get no hits, other answers, or no server without tierd."""
    source = random.Random(0)
    one = [source.randrange(10, 15990) for _ in range(200)]
    other = one[:130] + [source.randrange(10, 15990) for _ in range(100)]
    # A busy machine brings no prefix in the time that a user would grant.
    daemon = DaemonProcess(tmp_path / "tierd", prefetch={"policy": "wait_complete"})
    try:
        server = serve(daemon.socket)
        gold = [server.complete(one), server.complete(other)]
        assert [cached for _, cached in gold] == [0, 128], "without tierd: the engine's own"

        daemon.start()
        # With their answers' tokens six and seven whole blocks, of which they share four.
        server.wait_until(
            lambda: (
                [server.complete(tokens)[0] for tokens in (one, other)]
                == [tokens for tokens, _ in gold]
                and daemon.status()["host"]["blocks"] == 6 + 7 - 4
            )
        )
        assert server.stop() == 0
        daemon.wait_backed_up()

        daemon.stop()
        daemon.start()
        server = serve(daemon.socket)
        again = [server.complete(one), server.complete(other)]
        assert [tokens for tokens, _ in again] == [tokens for tokens, _ in gold]
        assert [cached for _, cached in again] == [192, 224]
        # Of the other prompt's blocks the first four are the engine's own by then.
        loaded = 192 + 224 - 128
        assert server.metric("vllm:tierd_loaded_tokens_total") == loaded
        assert server.metric("vllm:external_prefix_cache_hits_total") == loaded
        copied = daemon.status()["counters"].get("copy_load_blocks_total", 0) * 32
        assert copied == (loaded if transfer == "host_ipc" else 0)
        told = "the daemon copies for this engine" in server.log.read_text()
        assert told == (transfer == "host_ipc")

        server.complete(one, pin_s=60)
        server.wait_until(lambda: daemon.status()["host"]["pinned_bytes"] > 0)
        assert daemon.status()["counters"]["pins_granted_blocks_total"] == 6
        assert server.metric("vllm:tierd_errors_total") == 0
        assert server.stop() == 0
    finally:
        daemon.stop()
