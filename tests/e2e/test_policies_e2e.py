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
"""Few enough for write_back, which lets an eighth of host memory wait until it is written."""

MEDIUM = 330
LONG = 1600
LONG_FULL = whole_blocks(LONG)
BATCH_FULL = BATCH_BLOCKS_MAX * BLOCK_TOKENS
assert BATCH_FULL < LONG_FULL < 2 * BATCH_FULL, "a tier is read twice for it"


def memory(blocks: int) -> str:
    """A capacity of host memory."""
    return f"{blocks * BLOCK_BYTES >> 10}KiB"


LARGE = memory(512)

CAP_MS = 10_000
TIER_MS = {"deadline_ms": 20_000, "slow_ms": 20_000, "timeout_ms": 20_000}
"""No wait is ended by the tier's own deadline."""


class Node:
    """A daemon and an engine on one socket; the daemon's policies change beneath the engine."""

    def __init__(self, directory: Path, server: RedisServer, proxy: Proxy) -> None:
        self._directory, self.server, self.proxy = directory, server, proxy
        self.daemon = DaemonProcess(directory, storage="")
        self.daemon.start()
        extra = {"prefetch_deadline_ms": 2 * CAP_MS}
        self.engine = Engine(directory, self.daemon.socket, extra=extra)
        self.right: dict[str, list[int]] = {}

    def serve(self, capacity: str, prefetch: dict[str, object], **keys: object) -> None:
        """Start the daemon again with these policies and host memory empty."""
        self.daemon.stop()
        storage = table("redis", {**self.server.options(port=self.proxy.port), **TIER_MS, **keys})
        self.daemon = DaemonProcess(
            self._directory, capacity=capacity, storage=storage, prefetch=prefetch
        )
        self._begin()

    def crash(self) -> None:
        """Kill the daemon and start it again: what is left is what the tier has."""
        self.daemon.kill()
        self._begin()

    def _begin(self) -> None:
        self.daemon.start()
        self.engine.wait_connected(self.daemon)

    def ask(self, length: int, tag: str) -> int:
        """One request, with the engine's own cache empty; the tokens that were loaded for it.

        Its answer is the same each time.
        """
        self.engine.reset()
        result = self.engine.generate([prompt(length, tag)], tokens=TOKENS)
        (tokens,) = result["tokens"]
        assert self.right.setdefault(tag, tokens) == tokens, tag
        (cached,) = result["cached"]
        return int(cached)

    def store(self, length: int, tag: str) -> None:
        """A request for what nobody has; returns when it is stored and no tier is busy with it."""
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
        """The daemon's, and its tier's, by the command that an operator uses."""
        status = self.daemon.status()
        (tier,) = status["storage"]
        return Counter({**tier["counters"], **status["counters"]})

    def close(self) -> None:
        """End both."""
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
    """The node, with an empty tier; what a test leaves behind must be in order."""
    # It may still write what the test before has stored.
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


def test_write_back_writes_what_is_evicted(node: Node) -> None:
    """Every block would be written, or what has no room in memory would be lost."""
    room = 64
    node.serve(memory(room), {}, write_policy="write_back")
    asked = 3 * room // SHORT_BLOCKS // 2
    for number in range(asked):
        node.store(SHORT, f"{number}")
        if number == 2:
            assert not node.counters()["put_stored_total"], "there is room for these"
    status, counters = node.daemon.status(), node.counters()
    assert not counters["backup_dropped_total"]
    assert counters["put_stored_total"] == counters["evicted_blocks_total"] > room // 4
    assert counters["put_stored_total"] + status["host"]["blocks"] == asked * SHORT_BLOCKS
    for number in range(asked):
        assert node.ask(SHORT, f"{number}") == SHORT_FULL, "it is in memory, or comes back"
        node.daemon.wait_backed_up()
    assert node.counters()["get_hit_total"] > 0


def test_selective_writes_what_is_asked_for_again(node: Node) -> None:
    """Prompts that come once would use up the budget, or those that come again not be kept."""
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


def test_what_the_budget_refused_is_counted_when_it_is_asked_for(node: Node) -> None:
    """An operator could not see what refusing cost."""
    node.serve(memory(64), {}, write_policy="write_through_selective", write_share=0.2)
    once: list[str] = []
    while node.counters()["backup_refused_total"] < 2 * SHORT_BLOCKS:
        once.append(f"once {len(once)}")
        node.store(SHORT, once[-1])
        assert len(once) < 100, "the budget is not in use"
    assert not node.counters()["refused_hits_total"]
    for tag in once:
        node.ask(SHORT, tag)
    wait_until(
        lambda: node.counters()["refused_hits_total"], WAIT_S, "what refusing cost is not counted"
    )


# --- how long a request waits -----------------------------------------------------------


def loaded_slowly(node: Node, prefetch: dict[str, object], down: Flow) -> tuple[int, Counter[str]]:
    """Tokens that are loaded from a spoiled tier by a policy, and the counters then."""
    node.serve(LARGE, {}, write_policy="write_through")
    node.store(LONG, "long")
    node.serve(LARGE, {"timeout_max_ms": CAP_MS, **prefetch}, connections=1, read_batches=1)
    node.proxy.spoil(down=down)
    loaded = node.ask(LONG, "long")
    counters = node.counters()
    assert counters["saved_tokens_total"] == loaded
    return loaded, counters


def test_wait_complete_waits_for_all(node: Node) -> None:
    """A hit would be cut short by a tier that needs its time."""
    prefetch = {"policy": "wait_complete", "timeout_base_ms": 100, "timeout_per_ki_ms": 0}
    bytes_per_s = 4e6
    loaded, counters = loaded_slowly(node, prefetch, Flow(bytes_per_s=bytes_per_s))
    assert loaded == LONG_FULL
    took_s = LONG_FULL // BLOCK_TOKENS * BLOCK_BYTES / bytes_per_s
    assert counters["waited_us_total"] > 0.9 * took_s * 1e6
    assert not counters["deadline_missed_total"]


def test_timeout_takes_what_has_come_in_time(node: Node) -> None:
    """A tier that hangs would keep a request longer than the operator allows, or what it gave
    before would be thrown away."""
    prefetch = {"policy": "timeout", "timeout_base_ms": 2000, "timeout_per_ki_ms": 0}
    # All of the first batch, and a part of the second.
    passes = Flow(good_bytes=(BATCH_BLOCKS_MAX + 8) * BLOCK_BYTES)
    loaded, counters = loaded_slowly(node, prefetch, passes)
    assert loaded == BATCH_FULL
    assert counters["deadline_missed_total"] == 1
    assert 1.5e6 < counters["waited_us_total"] < 0.8e3 * CAP_MS


def test_best_effort_waits_for_nothing(node: Node) -> None:
    """An engine that has nothing else to do would wait for a disk."""
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
    assert not node.counters()["loads_refused_total"], "nothing is known of the tier's speed"
    assert node.ask(MEDIUM, "is refused") == 0
    counters = node.counters()
    assert counters["loads_refused_total"] == 1
    assert counters["saved_tokens_total"] == whole_blocks(MEDIUM)
    assert counters["saved_us_total"] > 0
