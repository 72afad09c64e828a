"""A real vLLM and a real tierd: equal tokens wherever KV comes from, and whatever fails.

Every test runs with copies by the engine's worker and with copies by the daemon.

Greedy tokens of a float32 model with random weights are compared: they change when one element of
the KV is wrong. Engines are shared, because each takes long to start: one without tierd gives the
right answers, and one per way of copying stays while daemons come and go.
"""

from __future__ import annotations

import hashlib
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import cbor2
import pytest

from tests.support.daemon_process import DaemonProcess
from tests.support.engines.vllm_engine import BLOCK_TOKENS, Engine, prompt, whole_blocks
from tests.support.service_manager import ServiceManager
from tests.support.traffic import wait_until
from tierd.backend import HEADER_BYTES, unpack_header
from tierd.types import PAGE_BYTES

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


def block_hashes(tokens: list[int]) -> list[bytes]:
    """vLLM's block hashes under PYTHONHASHSEED=0, computed independently."""
    parent = hashlib.sha256(cbor2.dumps("0")).digest()
    hashes = []
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = [parent, tokens[start : start + BLOCK_TOKENS], None]
        parent = hashlib.sha256(cbor2.dumps(block, canonical=True)).digest()
        hashes.append(parent)
    return hashes


ENGINE_BLOCKS = 180
"""Room in an engine for the concurrent requests of every test but one; `CROWD` needs twice that."""

LENGTHS = (330, 331, 352, 500)
PROMPTS = [prompt(length, length) for length in LENGTHS]
EIGHT = [prompt(400 + 40 * i, i) for i in range(8)]
LONG = [prompt(700 + 40 * i, i) for i in range(6)]
OWN, THEIRS = prompt(300, "own"), [777, *prompt(480, "theirs")]
"""The second one is loaded by `second_connector`."""
TURN = prompt(150, "turn")
TURN_TOKENS = 100
CROWD = [prompt(40 + 9 * i, i) for i in range(32)]
CROWD_TOKENS = 120


class Node:
    """An engine, and the directory of the daemon on its socket."""

    def __init__(self, directory: Path, **extra: object) -> None:
        self.directory = directory
        self.transfer = extra["transfer"]
        self.engine = Engine(
            directory,
            str(directory / "tierd.sock"),
            extra=extra,
            llm={"num_gpu_blocks_override": ENGINE_BLOCKS, "max_model_len": 4096},
        )

    def daemon(
        self, storage: str | None = "", manager: ServiceManager | None = None
    ) -> DaemonProcess:
        """A daemon on the engine's socket, not started; the previous one must have ended."""
        return DaemonProcess(self.directory, storage=storage, manager=manager)


class Gold:
    """Answers of an engine without tierd."""

    def __init__(self, directory: Path) -> None:
        with Engine(directory, "") as engine:
            self.prompts = engine.generate(PROMPTS, tokens=12)["tokens"]
            self.eight = engine.generate(EIGHT)["tokens"]
            self.long = engine.generate(LONG, tokens=8)["tokens"]
            self.crowd = engine.generate(CROWD, tokens=CROWD_TOKENS)["tokens"]
            self.two = engine.generate([OWN, THEIRS], tokens=8)["tokens"]
            (self.turn,) = engine.generate([TURN], tokens=TURN_TOKENS)["tokens"]
            (self.next_turn,) = engine.generate([self.chat], tokens=8)["tokens"]

    @property
    def chat(self) -> list[int]:
        """The prompt of a second turn."""
        return [*TURN, *self.turn, *prompt(20, "next")]


@pytest.fixture(scope="module")
def gold(tmp_path_factory: pytest.TempPathFactory) -> Gold:
    return Gold(tmp_path_factory.mktemp("gold"))


@pytest.fixture(scope="module", params=["shm", "host_ipc"])
def node(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp("node"), transfer=request.param)
    yield node
    node.engine.kill_if_running()


def find_records(store: Path) -> dict[bytes, tuple[Path, int, int]]:
    """Slab, offset and size of each block's record in a file tier."""
    found = {}
    for slab in store.glob("*/*.slab"):
        head = slab.with_suffix(".index").read_bytes()[:64]
        record_bytes = PAGE_BYTES + int.from_bytes(head[16:24], "little")
        raw = slab.read_bytes()
        for at in range(0, len(raw), record_bytes):
            header = unpack_header(raw[at : at + HEADER_BYTES])
            if header is not None:
                found[header.key.block_hash] = (slab, at, record_bytes)
    return found


def swap(one: tuple[Path, int, int], other: tuple[Path, int, int]) -> None:
    """Exchange two records, headers included."""
    contents = []
    for slab, at, size in (one, other):
        contents.append(slab.read_bytes()[at : at + size])
    for (slab, at, _), content in zip((one, other), reversed(contents), strict=True):
        with slab.open("r+b") as file:
            file.seek(at)
            file.write(content)


def flip(record: tuple[Path, int, int]) -> None:
    """Change one bit of a record's payload."""
    slab, at, _ = record
    with slab.open("r+b") as file:
        file.seek(at + PAGE_BYTES + 1000)
        byte = file.read(1)[0]
        file.seek(at + PAGE_BYTES + 1000)
        file.write(bytes([byte ^ 4]))


def test_tokens_are_the_same_from_every_tier(node: Node, gold: Gold) -> None:
    """A user would get another answer because a prefix was cached, moved, damaged or lost."""
    engine = node.engine
    full = [whole_blocks(length) for length in LENGTHS]
    stored = sum(length // BLOCK_TOKENS for length in LENGTHS)

    def run() -> tuple[list[list[int]], list[int]]:
        engine.reset()
        result = engine.generate(PROMPTS, tokens=12)
        return result["tokens"], result["cached"]

    def again() -> None:
        daemon.start()
        engine.reset()
        engine.wait_connected(daemon)

    with node.daemon(storage=None) as daemon:
        engine.wait_connected(daemon)
        assert run() == (gold.prompts, [0] * 4)
        assert run() == (gold.prompts, full)
        stats = engine.settled()
        assert stats["loaded_tokens"] == sum(full)
        assert stats["store_blocks"] >= stored
        assert stats["load_failures"] == 0
        copied = daemon.status()["counters"].get("copy_load_blocks_total", 0) * BLOCK_TOKENS
        assert copied == (sum(full) if node.transfer == "host_ipc" else 0), "wrong side copies"
        engine.call("fail_loads", count=3)
        assert run()[0] == gold.prompts, "after failed loads"
        assert engine.settled()["load_failures"] == 3
        assert run() == (gold.prompts, full), "they are offered again"
        # Another tenant's salt must not find them.
        salted = engine.generate(PROMPTS[:1], tokens=12, salts=["tenant"])
        assert salted["cached"] == [0]

        daemon.wait_backed_up()
        daemon.stop()
        again()
        assert run() == (gold.prompts, full), "from storage"
        daemon.wait_backed_up()

        daemon.stop()
        records = find_records(daemon.store)
        chains = [block_hashes(tokens) for tokens in PROMPTS]
        flip(records[chains[0][5]])
        swap(records[chains[1][3]], records[chains[1][7]])
        again()
        assert run() == (gold.prompts, [5 * 32, 3 * 32, full[2], full[3]]), "damaged"
        assert daemon.status()["storage"][0]["counters"]["corrupt_total"] >= 2
        daemon.wait_backed_up()

        daemon.stop()
        for slab in daemon.store.glob("*/*.slab"):
            with slab.open("r+b") as file:
                file.truncate(slab.stat().st_size // 2 + 1)
        again()
        assert run()[0] == gold.prompts, "cut"
        engine.settled()


def proven(daemon: DaemonProcess) -> int:
    """Blocks that the daemon's next incarnation can take over."""
    count: int = daemon.status()["host"]["verified_blocks"]
    return count


def test_daemon_deaths_do_not_affect_answers(tmp_path: Path, node: Node, gold: Gold) -> None:
    """Killing or restarting the daemon during a load or a store would lose or change answers."""
    manager = ServiceManager(tmp_path / "manager")
    daemon, engine = node.daemon(manager=manager), node.engine
    full = [whole_blocks(len(tokens)) for tokens in EIGHT]

    def run() -> tuple[list[list[int]], list[int]]:
        engine.reset()
        result = engine.generate(EIGHT)
        return result["tokens"], result["cached"]

    try:
        with manager:
            assert run() == (gold.eight, [0] * 8), "absent"
            daemon.start()
            engine.wait_connected(daemon)
            source = random.Random(7)
            for turn in range(10):
                # Empty at first, so these are stores; from the second half on, loads of blocks of
                # the previous incarnation.
                engine.reset()
                engine.call("start", prompts=EIGHT, tokens=16)
                time.sleep(source.random() * 0.4)
                daemon.kill()
                result = engine.call("join")
                assert result["tokens"] == gold.eight, f"killed in turn {turn}"
                assert set(result["finish"]) == {"length"}
                if turn < 5:
                    manager.lose()
                daemon.start()
                if turn % 2:
                    engine.wait_connected(daemon)
                    assert run()[0] == gold.eight
            # Connected but silent: requests wait for one deadline at most.
            assert daemon.process is not None
            daemon.process.send_signal(signal.SIGSTOP)
            for _ in range(3):
                assert run()[0] == gold.eight
            daemon.process.send_signal(signal.SIGCONT)
            daemon.kill()
            daemon.start()
            for steps in (1, 2, 3, 5, 8):
                engine.reset()
                engine.wait_connected(daemon)
                assert engine.call("abort", prompts=EIGHT, steps=steps)["left"] == 0
            run()
            assert run() == (gold.eight, full), "it works as before"
            wait_until(
                lambda: proven(daemon) == daemon.status()["host"]["blocks"], 20, "no checksums"
            )
            daemon.kill()
            daemon.start()
            engine.reset()
            engine.wait_connected(daemon)
            assert run() == (gold.eight, full), "memory outlives the daemon"
            assert engine.call("reset", external=True)["reset"]
            fresh = engine.generate(EIGHT)
            assert (fresh["tokens"], fresh["cached"]) == (gold.eight, [0] * 8), "blocks kept"
            engine.settled()
            assert daemon.status()["host"]["leases"] == 0
    finally:
        daemon.stop()


def crowd(node: Node, gold: Gold, turns: int) -> dict[str, int]:
    """Requests for twice as many blocks as the engine has room for; returns the rise of its
    counters.

    A daemon must be running.
    """
    before = node.engine.settled()
    for _ in range(turns):
        came = node.engine.generate(CROWD, tokens=CROWD_TOKENS)
        assert came["tokens"] == gold.crowd
    after = node.engine.settled()
    names = ("preemptions", "loaded_tokens", "store_blocks", "load_early_starts")
    return {name: after[name] - before[name] for name in names}


class Savings:
    """The daemon's and the engine's own counters of one engine's requests."""

    def __init__(self, engine: Engine, daemon: DaemonProcess) -> None:
        self._engine, self._daemon = engine, daemon

    def now(self) -> Counter[str]:
        # One more request, so that the counters of the last step are included.
        self._engine.generate([prompt(8, "after all")], tokens=2)
        status, stats = self._daemon.status(), self._engine.call("stats")
        (tier,) = status["storage"]
        told, read = status["counters"], tier["counters"]
        return Counter(
            wanted=told.get("requested_tokens_total", 0),
            saved=told.get("saved_tokens_total", 0),
            host=told.get("host_loaded_tokens_total", 0),
            tier=read.get("loaded_tokens_total", 0),
            read=read.get("get_hit_total", 0) * BLOCK_TOKENS,
            loaded=stats.get("loaded_tokens", 0),
            queries=stats["external_queries"],
            hits=stats["external_hits"],
            own=stats["own_hits"],
        )

    def of(self, prompts: list[list[int]], *, failed: int = 0) -> Counter[str]:
        """The rise of the counters for these requests; engine and daemon must agree."""
        before = self.now()
        cached = sum(self._engine.generate(prompts, tokens=4)["cached"])
        now = self.now()
        rise = Counter({name: int(now[name] - before[name]) for name in now})
        assert rise["saved"] == rise["loaded"] == rise["host"] + rise["tier"]
        if not failed:
            assert rise["hits"] == rise["saved"]
            assert cached == rise["saved"] + rise["own"]
            # vLLM also counts the rest of the last block, the daemon does not.
            assert 0 <= rise["queries"] - rise["wanted"] <= (len(prompts) + 1) * BLOCK_TOKENS
        return rise


SAVED = [prompt(length, f"saved {length}") for length in (600, 700, 900)]
HALVES = [tokens[: len(tokens) // 2] for tokens in SAVED]


@pytest.mark.long
def test_savings_equal_tokens_the_engine_did_not_compute(node: Node, tmp_path: Path) -> None:
    """Tokens that the engine had in its own cache would count as saved, and tiers be read for
    them."""
    engine, full = node.engine, sum(whole_blocks(len(tokens)) for tokens in SAVED)
    halves = sum(whole_blocks(len(tokens)) for tokens in HALVES)
    engine.reset()
    prefetch = {"policy": "wait_complete", "min_tokens": 0, "break_even": False}
    with DaemonProcess(node.directory, prefetch=prefetch) as daemon:

        def again() -> None:
            daemon.wait_backed_up()
            daemon.stop()
            daemon.start()
            engine.wait_connected(daemon)

        engine.wait_connected(daemon)
        savings = Savings(engine, daemon)
        assert savings.of(SAVED)["saved"] == 0, "cold"
        engine.wait_stored(daemon, full // BLOCK_TOKENS)
        rise = savings.of(SAVED)
        assert (rise["saved"], rise["own"], rise["read"]) == (0, full, 0), "the engine's own"
        engine.reset()
        assert savings.of(SAVED)["host"] == full
        engine.reset()
        savings.of(HALVES)
        rise = savings.of(SAVED)
        assert (rise["own"], rise["host"], rise["read"]) == (halves, full - halves, 0)

        again()
        rise = savings.of(SAVED)
        assert (rise["saved"], rise["own"], rise["read"]) == (0, full, 0), "no tier is read for it"
        # Now the engine has stored it in host memory again.
        again()
        engine.reset()
        rise = savings.of(SAVED)
        assert (rise["tier"], rise["read"]) == (full, full)
        again()
        engine.reset()
        assert savings.of(HALVES)["tier"] == halves
        rise = savings.of(SAVED)
        assert (rise["own"], rise["tier"]) == (halves, full - halves)
        assert rise["read"] == full - halves, "blocks in the engine's own cache were read"

        engine.reset()
        engine.call("fail_loads", count=2)
        rise = savings.of(SAVED, failed=2)
        assert rise["hits"] == full, "vLLM counts offered tokens"
        assert rise["saved"] in {whole_blocks(len(tokens)) for tokens in SAVED}
        engine.reset()
        before = savings.now()
        for steps in (1, 2, 4):
            assert engine.call("abort", prompts=SAVED, steps=steps)["left"] == 0
            engine.reset()
        rise = savings.now() - before
        assert rise["saved"] == rise["loaded"] < rise["hits"], "aborted while they were loaded"
        assert savings.of(SAVED)["host"] == full
        engine.settled()
        if node.transfer == "shm":
            with Engine(tmp_path, daemon.socket) as second:
                second.wait_connected(daemon)
                rise = Savings(second, daemon).of(SAVED)
                assert (rise["host"], rise["own"]) == (full, 0), "of an engine that has started"


def test_preemption_under_pressure(node: Node, gold: Gold) -> None:
    """Blocks that change owner during a store would be published with another request's KV."""
    node.engine.reset()
    with node.daemon() as daemon:
        node.engine.wait_connected(daemon)
        rose = crowd(node, gold, turns=3)
        assert rose["preemptions"] > 0
        saved = daemon.status()["counters"]["saved_tokens_total"]
        assert rose["loaded_tokens"] == saved > 0, "also of those that were loaded twice"
        assert rose["store_blocks"] > 0


def test_layer_by_layer(tmp_path: Path, gold: Gold) -> None:
    """Layers that compute while later ones load would read missing KV, or leave it in the engine's
    cache, above all when the daemon dies or the request's blocks are reused."""
    full = [whole_blocks(len(tokens)) for tokens in LONG]
    node = Node(tmp_path, transfer="host_ipc", layerwise=True)
    engine, daemon = node.engine, node.daemon()
    daemon.start()
    try:
        source = random.Random(7)
        for turn in range(5):
            engine.wait_connected(daemon)
            assert engine.generate(LONG, tokens=8)["tokens"] == gold.long
            engine.wait_stored(daemon, sum(full) // BLOCK_TOKENS)
            engine.reset()
            engine.call("start", prompts=LONG, tokens=8)
            time.sleep(source.random() * 0.06)
            daemon.kill()
            assert engine.call("join")["tokens"] == gold.long, f"killed in turn {turn}"
            # Blocks that the loads left in the engine's own cache.
            assert engine.generate(LONG, tokens=8)["tokens"] == gold.long
            daemon.start()
        engine.wait_connected(daemon)
        engine.generate(LONG)
        engine.wait_stored(daemon, sum(full) // BLOCK_TOKENS)
        for steps in (1, 2, 3, 5):
            engine.reset()
            assert engine.call("abort", prompts=LONG, steps=steps)["left"] == 0
            assert engine.generate(LONG, tokens=8)["tokens"] == gold.long
        engine.reset()
        last = engine.generate(LONG, tokens=8)
        assert (last["tokens"], last["cached"]) == (gold.long, full)
        stats = engine.settled()
        assert stats["load_early_starts"] > 0
        assert stats["load_failures"] == 0
        rose = crowd(node, gold, turns=2)
        assert rose["preemptions"] > 0
        assert rose["load_early_starts"] > 0
    finally:
        engine.kill_if_running()
        daemon.stop()


def test_two_ranks(l2_daemon: DaemonProcess, tmp_path: Path) -> None:
    """A rank would load the other's half, or a block that only one of them stored."""
    prompts = [prompt(100 + 40 * i, i) for i in range(2)]
    full = [whole_blocks(len(tokens)) for tokens in prompts]
    extra = {"transfer": "host_ipc", "layerwise": True}
    two = {"tensor_parallel_size": 2}
    with Engine(tmp_path, l2_daemon.socket, extra=extra, llm=two) as engine:
        cold = engine.generate(prompts, tokens=6)
        assert cold["cached"] == [0, 0]
        engine.wait_stored(l2_daemon, 2 * sum(length // BLOCK_TOKENS for length in full))
        engine.reset()
        loaded = engine.generate(prompts, tokens=6)
        assert (loaded["tokens"], loaded["cached"]) == (cold["tokens"], full)
        assert l2_daemon.status()["host"]["leases"] == 0
    assert len(l2_daemon.status()["namespaces"]) == 2


SECOND = Path(__file__).parents[1] / "support" / "engines" / "second_connector.py"


def test_another_connector_and_an_error_do_not_change_answers(tmp_path: Path, gold: Gold) -> None:
    """Blocks loaded by another connector would be stored for their former owner, or as if they were
    right; and after one contained error blocks would be stored under other blocks' hashes."""
    few = {"num_gpu_blocks_override": 18, "max_model_len": 512, "max_num_seqs": 4}
    with DaemonProcess(tmp_path / "tierd", storage="") as daemon:
        socket = str(daemon.socket)
        with Engine(tmp_path, socket, llm=few, second=str(SECOND)) as engine:
            engine.wait_connected(daemon)
            another_connector(engine, gold)
            engine.call("fail_build")
            (first,) = engine.generate([TURN], tokens=TURN_TOKENS)["tokens"]
            assert first == gold.turn
            stats = engine.call("stats")
            assert (stats["errors"], stats["off"], stats["leases"]) == (1, "", 0)
            found = []
            for _ in range(2):
                assert engine.call("hold_stores", held=False)["settled"]
                engine.reset()
                told = engine.generate([gold.chat], tokens=8)
                assert told["tokens"] == [gold.next_turn]
                found += told["cached"]
            assert found[0] in (128, 160), "what was stored before the error"
            assert found[1] == whole_blocks(len(gold.chat)), "later requests are stored again"
            assert engine.call("stats")["errors"] == 1


def another_connector(engine: Engine, gold: Gold) -> None:
    """It fills blocks whose former owner has not been stored yet."""
    engine.call("hold_stores", held=True)
    before = engine.call("stats")
    assert engine.generate([OWN], tokens=8)["tokens"] == gold.two[:1]
    engine.call("start", prompts=[THEIRS], tokens=8)
    wait_until(lambda: engine.call("second")["filled"] == 15, 20, "it loads nothing")
    assert engine.call("hold_stores", held=False)["settled"]
    engine.call("second", finishes=True)
    assert engine.call("join")["tokens"] != gold.two[1:], "it does load"
    after = engine.call("stats")
    assert after["store_blocks_dropped"] > before.get("store_blocks_dropped", 0)
    engine.call("second", offers=False)
    for prompts, tokens in (([OWN], gold.two[:1]), ([THEIRS], gold.two[1:])):
        engine.reset()
        assert engine.generate(prompts, tokens=8)["tokens"] == tokens
    engine.reset()
