"""Each write and prefetch policy under a real vLLM engine, as `tierd status --json` shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon_process import DaemonProcess
from tests.support.engines.vllm_engine import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    Engine,
    prompt,
    whole_blocks,
)
from tests.support.servers.proxy import Flow, Proxy
from tests.support.servers.redis import RedisServer
from tests.support.tiers.scene import table
from tests.support.traffic import wait_until
from tierd.daemon.l3.tier import BATCH_BLOCKS_MAX

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 8
WAIT_S = 20.0

SHORT = 130
SHORT_FULL = whole_blocks(SHORT)
SHORT_BLOCKS = SHORT_FULL // BLOCK_TOKENS
"""Few enough for write_back, which lets an eighth of host memory wait for its backup."""

MEDIUM = 330
LONG = 1600
LONG_FULL = whole_blocks(LONG)
BATCH_FULL = BATCH_BLOCKS_MAX * BLOCK_TOKENS
assert BATCH_FULL < LONG_FULL < 2 * BATCH_FULL, "a load needs exactly two reads of the tier"


def memory(blocks: int) -> str:
    """A capacity of host memory."""
    return f"{blocks * BLOCK_BYTES >> 10}KiB"


LARGE = memory(512)

CAP_MS = 10_000
TIER_MS = {"deadline_ms": 20_000, "slow_ms": 20_000, "timeout_ms": 20_000}
"""The tier's own deadline ends no wait."""


class Node:
    """A daemon and an engine on one socket; the daemon's policies change, the engine stays."""

    def __init__(self, directory: Path, server: RedisServer, proxy: Proxy) -> None:
        self._directory, self.server, self.proxy = directory, server, proxy
        self.daemon = DaemonProcess(directory, storage="")
        self.daemon.start()
        extra = {"prefetch_deadline_ms": 2 * CAP_MS}
        self.engine = Engine(directory, self.daemon.socket, extra=extra)
        self.right: dict[str, list[int]] = {}

    def serve(self, capacity: str, prefetch: dict[str, object], **keys: object) -> None:
        """Restart the daemon with these policies and empty host memory."""
        self.daemon.stop()
        storage = table("redis", {**self.server.options(port=self.proxy.port), **TIER_MS, **keys})
        self.daemon = DaemonProcess(
            self._directory, capacity=capacity, storage=storage, prefetch=prefetch
        )
        self._begin()

    def crash(self) -> None:
        """Kill and restart the daemon: only the tier's blocks are left."""
        self.daemon.kill()
        self._begin()

    def _begin(self) -> None:
        self.daemon.start()
        self.daemon.wait_tier("redis", "ready", WAIT_S)
        self.engine.wait_connected(self.daemon)

    def ask(self, length: int, tag: str) -> int:
        """Make a request with the engine's own cache empty; returns the tokens loaded for it.

        Its answer must be the same each time.
        """
        self.engine.reset()
        result = self.engine.generate([prompt(length, tag)], tokens=TOKENS)
        (tokens,) = result["tokens"]
        assert self.right.setdefault(tag, tokens) == tokens, tag
        (cached,) = result["cached"]
        return int(cached)

    def store(self, length: int, tag: str) -> None:
        """Make a request for a new prompt; returns once it is stored and no tier is busy with
        it."""
        before = self._stored_blocks()
        assert self.ask(length, tag) == 0
        blocks = whole_blocks(length) // BLOCK_TOKENS
        wait_until(
            lambda: self._stored_blocks() >= before + blocks, WAIT_S, "a prompt is not stored"
        )
        self.daemon.wait_backed_up()

    def _stored_blocks(self) -> int:
        return int(self.daemon.wait_backed_up()["counters"].get("stored_blocks_total", 0))

    def counters(self) -> Counter[str]:
        """Counters of the daemon and its tier, from the command that an operator uses."""
        status = self.daemon.status()
        (tier,) = status["storage"]
        return Counter({**tier["counters"], **status["counters"]})

    def close(self) -> None:
        """End the daemon and the engine."""
        self.engine.kill_if_running()
        self.daemon.stop()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with (
        RedisServer(tmp_path_factory.mktemp("redis")) as server,
        Proxy(("127.0.0.1", server.port)) as proxy,
    ):
        node = Node(tmp_path_factory.mktemp("node"), server, proxy)
        try:
            yield node
        finally:
            node.close()


@pytest.fixture
def node(shared: Node) -> Iterator[Node]:
    """The node, with an empty tier; checks its state after the test."""
    # It may still be writing blocks of the previous test.
    shared.daemon.stop()
    with shared.server.client() as client:
        client.flushall()
    yield shared
    shared.proxy.heal()
    shared.engine.settled()


# --- what is written --------------------------------------------------------------------


def test_write_through_writes_at_once(node: Node) -> None:
    """A daemon that dies would take every prefix with it."""
    node.serve(LARGE, {}, write_policy="write_through")
    for number in range(3):
        node.store(SHORT, f"{number}")
    counters = node.counters()
    assert counters["put_stored_total"] == counters["stored_blocks_total"] == 3 * SHORT_BLOCKS
    assert not counters["evicted_blocks_total"]
    node.crash()
    assert [node.ask(SHORT, f"{number}") for number in range(3)] == [SHORT_FULL] * 3


def test_write_back_writes_evicted_blocks(node: Node) -> None:
    """Every block would be written, or blocks without room in memory would be lost."""
    room = 64
    node.serve(memory(room), {}, write_policy="write_back")
    asked = 3 * room // SHORT_BLOCKS // 2
    for number in range(asked):
        node.store(SHORT, f"{number}")
        if number == 2:
            assert not node.counters()["put_stored_total"], "written without an eviction"
    status, counters = node.daemon.status(), node.counters()
    assert not counters["backup_dropped_total"]
    assert counters["put_stored_total"] == counters["evicted_blocks_total"] > room // 4
    assert counters["put_stored_total"] + status["host"]["blocks"] == asked * SHORT_BLOCKS
    for number in range(asked):
        assert node.ask(SHORT, f"{number}") == SHORT_FULL, "a block was lost"
        node.daemon.wait_backed_up()
    assert node.counters()["get_hit_total"] > 0


def test_selective_writes_blocks_requested_again(node: Node) -> None:
    """One-off prompts would use up the budget, or repeated prompts would not be kept."""
    room = 64
    node.serve(memory(room), {}, write_policy="write_through_selective", write_share=0.2)
    often = [f"often {number}" for number in range(4)]
    once: list[str] = []
    for tag in often:
        node.store(SHORT, tag)
    while len(once) < 30:
        for tag in often:
            node.ask(SHORT, tag)
        once.append(f"once {len(once)}")
        node.store(SHORT, once[-1])
    counters = node.counters()
    assert counters["backup_refused_total"] > SHORT_BLOCKS
    assert counters["put_stored_total"] < counters["stored_blocks_total"] // 2

    node.crash()
    kept, kept_once = (
        sum(node.ask(SHORT, tag) == SHORT_FULL for tag in tags) for tags in (often, once)
    )
    assert kept / len(often) > 2 * kept_once / len(once)


def test_hits_lost_to_the_budget_are_counted(node: Node) -> None:
    """An operator could not see the cost of refused writes."""
    node.serve(memory(64), {}, write_policy="write_through_selective", write_share=0.2)
    once: list[str] = []
    while node.counters()["backup_refused_total"] < 2 * SHORT_BLOCKS:
        once.append(f"once {len(once)}")
        node.store(SHORT, once[-1])
        assert len(once) < 100, "the budget refuses nothing"
    assert not node.counters()["refused_hits_total"]
    for tag in once:
        node.ask(SHORT, tag)
    wait_until(
        lambda: node.counters()["refused_hits_total"], WAIT_S, "the cost of refusals is not counted"
    )


# --- how long a request waits -----------------------------------------------------------


def loaded_slowly(node: Node, prefetch: dict[str, object], down: Flow) -> tuple[int, Counter[str]]:
    """Tokens that a policy loads from a disturbed tier, and the counters afterwards."""
    node.serve(LARGE, {}, write_policy="write_through")
    node.store(LONG, "long")
    node.serve(LARGE, {"timeout_max_ms": CAP_MS, **prefetch}, connections=1, read_batches=1)
    node.proxy.spoil(down=down)
    loaded = node.ask(LONG, "long")
    counters = node.counters()
    assert counters["saved_tokens_total"] == loaded
    return loaded, counters


def test_wait_complete_waits_for_all_blocks(node: Node) -> None:
    """A hit would be cut short by a slow tier."""
    prefetch = {"policy": "wait_complete", "timeout_base_ms": 100, "timeout_per_ki_ms": 0}
    bytes_per_s = 4e6
    loaded, counters = loaded_slowly(node, prefetch, Flow(bytes_per_s=bytes_per_s))
    assert loaded == LONG_FULL
    took_s = LONG_FULL // BLOCK_TOKENS * BLOCK_BYTES / bytes_per_s
    assert counters["waited_us_total"] > 0.9 * took_s * 1e6
    assert not counters["deadline_missed_total"]


def test_timeout_uses_blocks_that_arrived_in_time(node: Node) -> None:
    """A tier that hangs would delay a request longer than the operator allows, or the blocks that
    it delivered before would be discarded."""
    prefetch = {"policy": "timeout", "timeout_base_ms": 2000, "timeout_per_ki_ms": 0}
    # All of the first batch, and a part of the second.
    passes = Flow(good_bytes=(BATCH_BLOCKS_MAX + 8) * BLOCK_BYTES)
    loaded, counters = loaded_slowly(node, prefetch, passes)
    assert loaded == BATCH_FULL
    assert counters["deadline_missed_total"] == 1
    assert 1.5e6 < counters["waited_us_total"] < 0.8e3 * CAP_MS


def test_best_effort_does_not_wait(node: Node) -> None:
    """An otherwise idle engine would wait for a disk."""
    loaded, counters = loaded_slowly(node, {"policy": "best_effort"}, Flow(bytes_per_s=0.7e6))
    assert loaded < BATCH_FULL
    assert counters["best_effort_ended_total"] == 1
    assert not counters["deadline_missed_total"]
    assert counters["waited_us_total"] < 0.5e3 * CAP_MS


def test_a_load_slower_than_computing_is_refused(node: Node) -> None:
    """A hit would make a request slower than a miss."""
    node.serve(LARGE, {}, write_policy="write_through")
    for tag in ("measures", "is refused"):
        node.store(MEDIUM, tag)
    waits = {"policy": "wait_complete", "timeout_max_ms": CAP_MS}
    node.serve(LARGE, {**waits, "break_even": True})
    # About 150 tokens a second.
    node.proxy.spoil(down=Flow(bytes_per_s=0.6e6))
    assert node.ask(MEDIUM, "measures") == whole_blocks(MEDIUM)
    assert not node.counters()["loads_refused_total"], "refused before the tier was measured"
    assert node.ask(MEDIUM, "is refused") == 0
    counters = node.counters()
    assert counters["loads_refused_total"] == 1
    assert counters["saved_tokens_total"] == whole_blocks(MEDIUM)
    assert counters["saved_us_total"] > 0
