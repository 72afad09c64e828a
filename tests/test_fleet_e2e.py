"""Real vLLM engines on two nodes that share storage: the same tokens, whichever node computed.

Then one of them under load while its tiers hang, die, lie and come back: the same tokens, and
no request waits longer than it may. Each engine is started once, because that takes long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.daemon_process import DaemonProcess
from tests.planting import DAMAGES, RedisStore, S3Store, plant
from tests.proxy import Flow, Proxy, Then
from tests.redis_servers import RedisServer
from tests.s3_servers import SeaweedFS
from tests.tier_scene import table
from tests.traffic import wait_until
from tests.vllm_engine import BLOCK_BYTES, BLOCK_TOKENS, Engine, prompt, whole_blocks

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

PREFETCH_MS = 800
"""How long a request may wait for its prefix."""

SLACK_S = 1.0
"""A request may take so much longer than computing it did, beside the deadline: the connector's
grace, and what else runs on the machine."""

TIER_MS = {"deadline_ms": 500, "slow_ms": 400, "probe_ms": 300}
TOKENS = 12
PATIENT_MS = {"deadline_ms": 20_000, "slow_ms": 20_000, "timeout_ms": 20_000}
"""Where all blocks must get into a tier: a busy machine's S3 server takes its time."""

LENGTHS = (330, 331, 352, 500, 420, 380)
PROMPTS = [prompt(length, length) for length in LENGTHS]
FULL = [whole_blocks(length) for length in LENGTHS]
STORED = sum((length + TOKENS - 1) // BLOCK_TOKENS for length in LENGTHS)
"""Blocks that prompts and answers fill; of the last token there is no KV."""

LARGE, SMALL = "128MiB", "4MiB"
"""Host memory for all blocks with room to spare, and for half of them."""


class Node:
    """A daemon and an engine that stay on one socket, while the daemon's tiers change."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.daemon = DaemonProcess(directory, storage="")
        self.daemon.start()
        self.engine = Engine(
            directory, self.daemon.socket, extra={"prefetch_deadline_ms": PREFETCH_MS}
        )

    def serve(self, storage: str, capacity: str) -> None:
        """Start the daemon again with other tiers, and the engine with nothing cached."""
        self.daemon.stop()
        self.daemon = DaemonProcess(self._directory, capacity=capacity, storage=storage)
        self.daemon.start()
        self.engine.wait_connected(self.daemon)
        self.engine.reset()

    def run(self) -> dict:
        """Greedy tokens of all prompts at once."""
        return self.engine.generate(PROMPTS, tokens=TOKENS)

    def close(self) -> None:
        """End both."""
        self.engine.kill_if_running()
        self.daemon.stop()


class Gold:
    """What is right: computed, with nothing to load from; and how long each prompt took."""

    def __init__(self, node: Node) -> None:
        node.engine.wait_connected(node.daemon)
        self.tokens: list[list[int]] = []
        self.seconds: list[float] = []
        # The first computation of an engine takes longer.
        node.engine.generate([prompt(400, "warm")], tokens=TOKENS)
        for tokens in PROMPTS:
            result = node.engine.generate([tokens], tokens=TOKENS)
            assert result["cached"] == [0]
            self.tokens += result["tokens"]
            self.seconds.append(result["seconds"])


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    server = SeaweedFS(tmp_path_factory.mktemp("weed"))
    with server:
        yield server


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    with ExitStack() as stack:
        started = []
        for name in ("a", "b"):
            started.append(Node(tmp_path_factory.mktemp(name)))
            stack.callback(started[-1].close)
        yield started


@pytest.fixture(scope="module")
def gold(nodes: list[Node]) -> Gold:
    return Gold(nodes[0])


def test_a_node_loads_what_another_computed(
    nodes: list[Node], gold: Gold, redis: RedisServer, weed: SeaweedFS
) -> None:
    """A fleet would compute the same prefix on every node, or give other answers on one."""
    s3 = weed.options(weed.make_bucket())
    storage = table("redis", {**redis.options(), **PATIENT_MS})
    storage += table("s3", {**s3, **PATIENT_MS})
    first, second = nodes
    first.serve(storage, LARGE)
    computed = first.run()
    assert (computed["tokens"], computed["cached"]) == (gold.tokens, [0] * len(PROMPTS))
    first.engine.wait_stored(first.daemon, STORED)
    for tier in first.daemon.wait_backed_up()["storage"]:
        assert tier["counters"]["put_stored_total"] == STORED, tier

    _loads_from(0, second, gold, storage)
    with redis.client() as client:
        client.flushall()
    _loads_from(1, second, gold, storage)
    # What S3 had has filled Redis again, for whoever comes next.
    second.daemon.wait_backed_up()
    _loads_from(0, first, gold, storage)


def _loads_from(number: int, node: Node, gold: Gold, storage: str) -> None:
    """With nothing cached on the node, every block comes from this tier of it."""
    node.serve(storage, LARGE)
    before = node.engine.settled()["loaded_tokens"]
    loaded = node.run()
    assert (loaded["tokens"], loaded["cached"]) == (gold.tokens, FULL)
    stats, status = node.engine.settled(), node.daemon.status()
    assert stats["loaded_tokens"] - before == sum(FULL)
    assert status["counters"]["promoted_blocks_acquired_total"] == sum(FULL) // BLOCK_TOKENS
    hits = [tier["counters"]["get_hit_total"] for tier in status["storage"]]
    assert hits == [sum(FULL) // BLOCK_TOKENS * (at == number) for at in range(2)]
    assert status["host"]["leases"] == 0


# --- faults under an engine ---------------------------------------------------------


class World:
    """An engine whose daemon has little memory, a Redis tier, and an S3 tier behind a proxy."""

    def __init__(self, node: Node, gold: Gold, redis: RedisServer, weed: SeaweedFS) -> None:
        self.node = node
        self.gold = gold
        self.redis = redis
        self.weed = weed
        self.bucket = weed.make_bucket()
        self.proxy = Proxy(("127.0.0.1", weed.port))

    def fill(self) -> None:
        """Have all blocks in both tiers, and none in memory."""
        self._serve(LARGE, **PATIENT_MS)
        self.node.run()
        self.node.engine.wait_stored(self.node.daemon, STORED)
        status = self.node.daemon.wait_backed_up()
        for tier in status["storage"]:
            assert tier["counters"]["put_stored_total"] == STORED, tier
        self._serve(SMALL, **TIER_MS)

    def _serve(self, capacity: str, **times_ms: int) -> None:
        s3 = self.weed.options(self.bucket, endpoint=f"http://127.0.0.1:{self.proxy.port}")
        storage = table("redis", {**self.redis.options(), **times_ms})
        storage += table("s3", {**s3, **times_ms})
        self.node.serve(storage, capacity)

    def empty_redis(self) -> None:
        """So that S3 is asked."""
        with self.redis.client() as client:
            client.flushall()

    def plant(self, damage: str) -> None:
        """Damage all blocks in both tiers."""
        with self.redis.client() as client:
            plant(RedisStore(client), DAMAGES[damage], STORED)
        plant(S3Store(self.weed, self.bucket), DAMAGES[damage], STORED)

    def ask(self, why: str) -> int:
        """Every prompt, one after the other: right and in time. The tokens that were loaded."""
        self.node.engine.reset()
        loaded = 0
        for tokens, right, seconds in zip(
            PROMPTS, self.gold.tokens, self.gold.seconds, strict=True
        ):
            result = self.node.engine.generate([tokens], tokens=TOKENS)
            assert result["tokens"] == [right], why
            assert result["seconds"] <= seconds + PREFETCH_MS / 1000 + SLACK_S, why
            loaded += result["cached"][0]
        self.node.engine.settled()
        assert self.node.daemon.status()["host"]["leases"] == 0, why
        return loaded

    def hits(self, kind: str) -> int:
        """Blocks that came from the tier since its daemon was started."""
        tiers = {tier["type"]: tier for tier in self.node.daemon.status()["storage"]}
        return int(tiers[kind]["counters"]["get_hit_total"])

    def wait_well(self) -> None:
        """Until both tiers take and give again: a request decides, once a probe has passed."""

        def well() -> bool:
            self.node.engine.reset()
            self.node.run()
            return all(
                circuit["state"] == "closed"
                for tier in self.node.daemon.status()["storage"]
                for circuit in tier["circuits"].values()
            )

        wait_until(well, 20.0, "a tier stays shut")


Fault = Callable[[World], AbstractContextManager[None]]


@contextmanager
def redis_hangs(world: World) -> Iterator[None]:
    world.redis.pause()
    try:
        yield
    finally:
        world.redis.resume()


@contextmanager
def redis_dies(world: World) -> Iterator[None]:
    world.redis.kill()
    try:
        yield
    finally:
        world.redis.start()


@contextmanager
def redis_is_empty(world: World) -> Iterator[None]:
    world.redis.restart()
    yield


def s3_answers(flow: Flow) -> Fault:
    @contextmanager
    def spoil(world: World) -> Iterator[None]:
        world.empty_redis()
        world.proxy.spoil(down=flow)
        yield
        world.proxy.heal()

    return spoil


def planted(damage: str) -> Fault:
    @contextmanager
    def spoil(world: World) -> Iterator[None]:
        world.plant(damage)
        yield

    return spoil


HALF = BLOCK_BYTES // 2

FAULTS: dict[str, Fault] = {
    "redis hangs": redis_hangs,
    "redis dies": redis_dies,
    "redis is empty": redis_is_empty,
    "s3 stalls in a body": s3_answers(Flow(good_bytes=HALF)),
    "s3 breaks in a body": s3_answers(Flow(good_bytes=HALF, then=Then.RESET)),
    "swapped": planted("swapped"),
    "oversized": planted("oversized"),
}


def test_no_fault_of_a_tier_reaches_a_user(
    nodes: list[Node], gold: Gold, redis: RedisServer, weed: SeaweedFS
) -> None:
    """A tier that hangs, dies, lies or is emptied would change, delay or fail answers."""
    world = World(nodes[0], gold, redis, weed)
    with world.proxy:
        world.empty_redis()
        world.fill()
        assert world.ask("before") == sum(FULL)
        for name, fault in FAULTS.items():
            hits = world.hits("s3")
            with fault(world):
                for turn in ("first", "second"):
                    loaded = world.ask(f"{name}, {turn} time")
            if name.startswith("redis"):
                assert loaded == sum(FULL), f"{name}: what is in S3 is not used"
                assert world.hits("s3") > hits, name
            world.wait_well()
            world.ask(f"after: {name}")
        corrupt = [t["counters"]["get_corrupt_total"] for t in nodes[0].daemon.status()["storage"]]
        assert min(corrupt) > 0, "nothing planted was read"
        assert world.ask("in the end") > 0
