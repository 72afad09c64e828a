"""Each write and prefetch policy under a real vLLM engine, as `tierd status --json` shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon_process import DaemonProcess
from tests.proxy import Flow, Proxy
from tests.redis_servers import RedisServer
from tests.tier_scene import table
from tests.traffic import wait_until
from tests.vllm_engine import BLOCK_BYTES, BLOCK_TOKENS, Engine, prompt, whole_blocks

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 8
LENGTH = 640
BLOCKS = (LENGTH + TOKENS - 1) // BLOCK_TOKENS
FULL = whole_blocks(LENGTH)
TIER_MS = {"deadline_ms": 10_000, "slow_ms": 10_000, "timeout_ms": 10_000}
LARGE, SMALL = "64MiB", f"{3 * BLOCKS * BLOCK_BYTES // 1024}KiB"


class Node:
    """A daemon and an engine on one socket; the daemon's policies change beneath the engine."""

    def __init__(self, directory: Path, server: RedisServer, proxy: Proxy) -> None:
        self._directory, self._server, self.proxy = directory, server, proxy
        self.daemon = DaemonProcess(directory, storage="")
        self.daemon.start()
        self.engine = Engine(
            directory, self.daemon.socket, extra={"prefetch_deadline_ms": 8000}, max_model_len=1024
        )
        self.engine.wait_connected(self.daemon)
        self.right: dict[str, list[int]] = {}

    def serve(self, capacity: str, prefetch: dict[str, object], **keys: object) -> None:
        """Start the daemon again with these policies, the engine and host memory empty."""
        self.daemon.stop()
        storage = table("redis", {**self._server.options(port=self.proxy.port), **TIER_MS, **keys})
        self.daemon = DaemonProcess(
            self._directory, capacity=capacity, storage=storage, prefetch=prefetch
        )
        self.daemon.start()
        self.engine.wait_connected(self.daemon)
        self.engine.reset()

    def ask(self, tag: str) -> int:
        """One request; the tokens that were loaded for it. The answer is the same each time."""
        self.engine.reset()
        result = self.engine.generate([prompt(LENGTH, tag)], tokens=TOKENS)
        (tokens,) = result["tokens"]
        assert self.right.setdefault(tag, tokens) == tokens, tag
        return int(result["cached"][0])

    def status(self) -> dict:
        """By the command that an operator uses, once nothing is under way."""
        self.daemon.wait_backed_up()
        return self.daemon.status()

    def written(self) -> int:
        """Blocks that were written into the tier."""
        (tier,) = self.status()["storage"]
        return int(tier["counters"]["put_stored_total"])

    def close(self) -> None:
        """End both."""
        self.engine.kill_if_running()
        self.daemon.stop()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with (
        RedisServer(tmp_path_factory.mktemp("redis")) as server,
        Proxy(("127.0.0.1", server.port)) as proxy,
    ):
        made = Node(tmp_path_factory.mktemp("node"), server, proxy)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(autouse=True)
def empty(node: Node) -> None:
    node.proxy.heal()
    with node._server.client() as client:
        client.flushall()


def stored(node: Node, blocks: int) -> None:
    node.engine.wait_stored(node.daemon, blocks)
    node.daemon.wait_backed_up()


def test_write_through_writes_at_once(node: Node) -> None:
    """A daemon that dies would take every prefix with it."""
    node.serve(LARGE, {}, write_policy="write_through")
    assert node.ask("a") == 0
    stored(node, BLOCKS)
    assert node.written() == BLOCKS


def test_write_back_writes_what_is_evicted(node: Node) -> None:
    """Every block would be written, or what has no room in memory would be lost."""
    node.serve(SMALL, {}, write_policy="write_back")
    for tag in ("a", "b"):
        assert node.ask(tag) == 0
    stored(node, 2 * BLOCKS)
    assert node.written() == 0
    for tag in ("c", "d", "e"):
        node.ask(tag)
    wait_until(lambda: node.written() >= BLOCKS, 20.0, "what is evicted is not written")
    status = node.status()
    assert status["counters"]["evicted_blocks_total"] >= node.written()
    assert node.ask("a") > 0, "what was evicted comes back"


def test_selective_writes_what_is_asked_for_twice(node: Node) -> None:
    """Prompts that come once would use up the budget, or those that come again not be kept."""
    node.serve(LARGE, {}, write_policy="write_through_selective", write_share=0.01)
    for number in range(12):
        node.ask(f"once {number}")
    stored(node, 12 * BLOCKS)
    before = node.written()
    (tier,) = node.status()["storage"]
    assert tier["counters"]["backup_refused_total"] > 0, "the budget is not in use"
    assert before < 12 * BLOCKS
    for _ in range(2):
        node.ask("once 11")
    (tier,) = node.status()["storage"]
    assert tier["counters"]["refused_hits_total"] > 0


SLOW = Flow(bytes_per_s=4e6)
"""Half a second and more for a prompt of 2.5 MB."""


def brought(node: Node, prefetch: dict[str, object]) -> tuple[int, dict]:
    """Tokens that are loaded from a slow tier under a policy, and the daemon's counters."""
    node.serve(LARGE, {}, write_policy="write_through")
    node.ask("slow")
    stored(node, BLOCKS)
    node.serve(LARGE, prefetch, write_policy="write_through", read_batches=1)
    node.proxy.spoil(down=SLOW)
    loaded = node.ask("slow")
    node.proxy.heal()
    return loaded, node.status()["counters"]


def test_wait_complete_brings_all(node: Node) -> None:
    """A hit would be cut short by a tier that needs its time."""
    loaded, counters = brought(node, {"policy": "wait_complete", "timeout_max_ms": 8000})
    assert loaded == FULL
    assert not counters.get("deadline_missed_total", 0)
    assert counters["saved_tokens_total"] == FULL


def test_timeout_brings_what_comes_in_time(node: Node) -> None:
    """A slow tier would keep a request longer than the operator allows."""
    waits = {"policy": "timeout", "timeout_base_ms": 200, "timeout_per_ki_ms": 0}
    loaded, counters = brought(node, waits)
    assert loaded < FULL
    assert counters["deadline_missed_total"] == 1


def test_best_effort_waits_for_nothing(node: Node) -> None:
    """An engine that has nothing else to do would wait for a disk."""
    loaded, counters = brought(node, {"policy": "best_effort", "timeout_max_ms": 8000})
    assert loaded < FULL
    assert counters["best_effort_ended_total"] == 1
    assert not counters.get("deadline_missed_total", 0)
