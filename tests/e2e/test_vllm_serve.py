"""`vllm serve` as in the README, with a model from files, as on a user's server.

The engine runs in three processes, is attached by name alone, hashes without a given seed, and
identifies its weights by their files.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.daemon_process import DaemonProcess
from tests.support.engines.vllm_server import DAEMON_COPIES, Server, write_model

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[str, str], Server]]:
    """Starts servers, and ends servers that a failed test has left."""
    started: list[Server] = []
    model = write_model(tmp_path / "model")

    def start(tierd_socket: str, transfer: str) -> Server:
        log = tmp_path / f"vllm-{len(started)}.log"
        extra = {"transfer": transfer} if transfer != "shm" else None
        started.append(Server(model, tierd_socket, log, extra=extra))
        return started[-1]

    yield start
    for server in started:
        server.kill()


def test_readme_command(tmp_path: Path, serve: Callable[[str, str], Server]) -> None:
    """A user of the README would get no hits, other answers, or no server without tierd.

    The next server loads the blocks that the daemon has copied for the previous one.
    """
    source = random.Random(0)
    one = [source.randrange(10, 15990) for _ in range(200)]
    other = one[:130] + [source.randrange(10, 15990) for _ in range(100)]
    # A busy machine does not load a prefix within a user's usual deadline.
    daemon = DaemonProcess(tmp_path / "tierd", prefetch={"policy": "wait_complete"})
    try:
        server = serve(daemon.socket, "host_ipc")
        gold = [server.complete(one), server.complete(other)]
        assert [cached for _, cached in gold] == [0, 128], "without tierd, the engine's own cache"

        daemon.start()
        server.wait_until(lambda: DAEMON_COPIES in server.log.read_text())
        # With their answers' tokens, six and seven whole blocks, of which they share four.
        server.wait_until(
            lambda: (
                [server.complete(tokens)[0] for tokens in (one, other)]
                == [tokens for tokens, _ in gold]
                and daemon.status()["host"]["blocks"] == 6 + 7 - 4
            )
        )
        assert server.stop() == 0
        assert daemon.status()["counters"]["copy_store_blocks_total"] > 0
        daemon.wait_backed_up()

        daemon.stop()
        daemon.start()
        server = serve(daemon.socket, "shm")
        again = [server.complete(one), server.complete(other)]
        assert [tokens for tokens, _ in again] == [tokens for tokens, _ in gold]
        assert [cached for _, cached in again] == [192, 224]
        # By then the first four of the other prompt's blocks are in the engine's own cache.
        loaded = 192 + 224 - 128
        assert server.metric("vllm:tierd_loaded_tokens_total") == loaded
        assert server.metric("vllm:external_prefix_cache_hits_total") == loaded
        assert daemon.status()["counters"].get("copy_load_blocks_total", 0) == 0
        assert DAEMON_COPIES not in server.log.read_text()

        server.complete(one, pin_s=60)
        server.wait_until(lambda: daemon.status()["host"]["pinned_bytes"] > 0)
        assert daemon.status()["counters"]["pins_granted_blocks_total"] == 6

        # A reset with unchanged weights, as vLLM does for each pause: no block is lost.
        server.get("/reset_prefix_cache?reset_external=true", b"")
        assert server.complete(one) == (gold[0][0], 192)
        # Weights may be replaced after the reset, and before the next request.
        server.get("/reset_prefix_cache?reset_external=true", b"")
        server.get("/collective_rpc", json.dumps({"method": "check_health"}).encode())
        assert server.complete(one) == (gold[0][0], 0)
        assert server.metric("vllm:tierd_errors_total") == 0
        assert server.stop() == 0
    finally:
        daemon.stop()
