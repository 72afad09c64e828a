"""A real vLLM and a real tierd: the same tokens wherever KV comes from, and whatever breaks.

All of it with the engine's worker as the one that copies, and with the daemon.

Greedy tokens of a float32 model with random weights are compared: they change when one
element of the KV is wrong. Each test starts few engines, because each takes long.
"""

from __future__ import annotations

import hashlib
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cbor2
import pytest

from tests.daemon_process import DaemonProcess
from tests.service_manager import ServiceManager
from tests.traffic import wait_until
from tests.vllm_engine import BLOCK_TOKENS, Engine, prompt, whole_blocks
from tierd.backend import HEADER_BYTES, unpack_header
from tierd.types import PAGE_BYTES

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


def block_hashes(tokens: list[int]) -> list[bytes]:
    """What vLLM hashes, under PYTHONHASHSEED=0, written out here once more."""
    parent = hashlib.sha256(cbor2.dumps("0")).digest()
    hashes = []
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = [parent, tokens[start : start + BLOCK_TOKENS], None]
        parent = hashlib.sha256(cbor2.dumps(block, canonical=True)).digest()
        hashes.append(parent)
    return hashes


@pytest.fixture(params=["shm", "host_ipc"])
def transfer(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture
def start(tmp_path: Path, transfer: str) -> Iterator[Callable[..., Engine]]:
    """Starts engines, and stops those that a failed test left behind."""
    started: list[Engine] = []

    def begin(socket: str, *, layerwise: bool = False, **settings: object) -> Engine:
        extra = {"transfer": transfer, "layerwise": layerwise}
        started.append(Engine(tmp_path, socket, extra=extra, **settings))
        return started[-1]

    yield begin
    for engine in started:
        engine.kill_if_running()


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


def test_tokens_are_the_same_from_every_tier(daemon: DaemonProcess, start, transfer) -> None:
    """A user would get another answer because a prefix was cached, moved, damaged or lost."""
    lengths = (330, 331, 352, 500)
    prompts = [prompt(length, length) for length in lengths]
    full = [whole_blocks(length) for length in lengths]
    stored = sum(length // BLOCK_TOKENS for length in lengths)

    with start("") as engine:
        gold = engine.generate(prompts, tokens=12)["tokens"]

    with start(daemon.socket) as engine:
        cold = engine.generate(prompts, tokens=12)
        assert (cold["tokens"], cold["cached"]) == (gold, [0] * 4)
        engine.reset()
        loaded = engine.generate(prompts, tokens=12)
        assert (loaded["tokens"], loaded["cached"]) == (gold, full)
        stats = engine.settled()
        assert stats["loaded_tokens"] == sum(full)
        assert stats["store_blocks"] >= stored
        assert stats["load_failures"] == 0
        copied = daemon.status()["counters"].get("copy_load_blocks_total", 0) * BLOCK_TOKENS
        assert copied == (sum(full) if transfer == "host_ipc" else 0), "who copies"
        engine.reset()
        engine.call("fail_loads", count=3)
        assert engine.generate(prompts, tokens=12)["tokens"] == gold, "after failed loads"
        assert engine.settled()["load_failures"] == 3
        engine.reset()
        loaded = engine.generate(prompts, tokens=12)
        assert (loaded["tokens"], loaded["cached"]) == (gold, full), "they are offered again"
        # Another tenant's salt must not find them.
        salted = engine.generate(prompts[:1], tokens=12, salts=["tenant"])
        assert salted["cached"] == [0]

    daemon.wait_backed_up()
    with start(daemon.socket) as engine:
        again = engine.generate(prompts, tokens=12)
        assert (again["tokens"], again["cached"]) == (gold, full), "from memory, after a restart"
        daemon.stop()
        daemon.start()
        engine.reset()
        engine.wait_connected(daemon)
        again = engine.generate(prompts, tokens=12)
        assert (again["tokens"], again["cached"]) == (gold, full), "from storage"
        daemon.wait_backed_up()

        daemon.stop()
        records = find_records(daemon.store)
        chains = [block_hashes(tokens) for tokens in prompts]
        flip(records[chains[0][5]])
        swap(records[chains[1][3]], records[chains[1][7]])
        daemon.start()
        engine.reset()
        engine.wait_connected(daemon)
        damaged = engine.generate(prompts, tokens=12)
        assert damaged["tokens"] == gold
        assert damaged["cached"] == [5 * 32, 3 * 32, full[2], full[3]]
        assert daemon.status()["storage"][0]["counters"]["corrupt_total"] >= 2
        daemon.wait_backed_up()

        daemon.stop()
        for slab in daemon.store.glob("*/*.slab"):
            with slab.open("r+b") as file:
                file.truncate(slab.stat().st_size // 2 + 1)
        daemon.start()
        engine.reset()
        engine.wait_connected(daemon)
        cut = engine.generate(prompts, tokens=12)
        assert cut["tokens"] == gold
        engine.settled()


def proven(daemon: DaemonProcess) -> int:
    """Blocks that the daemon's next life can take over."""
    count: int = daemon.status()["host"]["proven_blocks"]
    return count


def test_no_death_of_the_daemon_reaches_a_user(tmp_path: Path, start) -> None:
    """tierd absent, killed in a load or a store, or restarted would lose or change answers."""
    manager = ServiceManager(tmp_path / "manager")
    daemon = DaemonProcess(tmp_path / "tierd", storage="", manager=manager)
    prompts = [prompt(400 + 40 * i, i) for i in range(8)]
    full = [whole_blocks(len(tokens)) for tokens in prompts]
    try:
        with manager, start(daemon.socket) as engine:
            gold = engine.generate(prompts)["tokens"]
            daemon.start()
            engine.wait_connected(daemon)
            source = random.Random(7)
            for turn in range(10):
                # Empty at first, so these are stores; from the second half on loads of what
                # the life before had.
                engine.reset()
                engine.call("start", prompts=prompts, tokens=16)
                time.sleep(source.random() * 0.4)
                daemon.kill()
                result = engine.call("join")
                assert result["tokens"] == gold, f"killed in turn {turn}"
                assert set(result["finish"]) == {"length"}
                if turn < 5:
                    manager.lose()
                daemon.start()
                if turn % 2:
                    engine.wait_connected(daemon)
                    engine.reset()
                    assert engine.generate(prompts)["tokens"] == gold
            # Connected, and silent: requests wait for one deadline at most.
            assert daemon.process is not None
            daemon.process.send_signal(signal.SIGSTOP)
            for _ in range(3):
                engine.reset()
                assert engine.generate(prompts)["tokens"] == gold
            daemon.process.send_signal(signal.SIGCONT)
            daemon.kill()
            daemon.start()
            for steps in (1, 2, 3, 5, 8):
                engine.reset()
                engine.wait_connected(daemon)
                assert engine.call("abort", prompts=prompts, steps=steps)["left"] == 0
            engine.reset()
            engine.generate(prompts)
            engine.reset()
            last = engine.generate(prompts)
            assert (last["tokens"], last["cached"]) == (gold, full), "it works as before"
            wait_until(
                lambda: proven(daemon) == daemon.status()["host"]["blocks"], 20, "no checksums"
            )
            daemon.kill()
            daemon.start()
            engine.reset()
            engine.wait_connected(daemon)
            again = engine.generate(prompts)
            assert (again["tokens"], again["cached"]) == (gold, full), "memory outlives the daemon"
            assert engine.call("reset", external=True)["reset"]
            fresh = engine.generate(prompts)
            assert (fresh["tokens"], fresh["cached"]) == (gold, [0] * 8), "a reset is a reset"
            engine.settled()
            assert daemon.status()["host"]["leases"] == 0
    finally:
        daemon.stop()


def test_preemption_under_pressure(l2_daemon: DaemonProcess, start) -> None:
    """Blocks that change owner while they are stored would be published with others' KV."""
    prompts = [prompt(40 + 9 * i, i) for i in range(10)]
    with start("") as engine:
        gold = engine.generate(prompts, tokens=160)["tokens"]
    with start(
        l2_daemon.socket, llm={"num_gpu_blocks_override": 24, "max_model_len": 512}
    ) as engine:
        for _ in range(3):
            assert engine.generate(prompts, tokens=160)["tokens"] == gold
        stats = engine.settled()
        assert stats["preemptions"] > 0
        assert stats["loaded_tokens"] > 0
        assert stats["store_blocks"] > 0


def test_layer_by_layer(tmp_path: Path) -> None:
    """Layers that compute while later ones load would read KV that is not there, or leave it in
    the engine's cache, above all when the daemon dies then or the request's blocks are taken."""
    extra = {"transfer": "host_ipc", "layerwise": True}
    prompts = [prompt(700 + 40 * i, i) for i in range(6)]
    full = [whole_blocks(len(tokens)) for tokens in prompts]
    crowd = [prompt(40 + 9 * i, i) for i in range(10)]
    with Engine(tmp_path, "") as engine:
        gold = engine.generate(prompts, tokens=8)["tokens"]
        crowd_gold = engine.generate(crowd, tokens=100)["tokens"]
    daemon = DaemonProcess(tmp_path / "tierd", storage="")
    daemon.start()
    try:
        with Engine(tmp_path, daemon.socket, extra=extra) as engine:
            source = random.Random(7)
            for turn in range(5):
                engine.wait_connected(daemon)
                assert engine.generate(prompts, tokens=8)["tokens"] == gold
                engine.wait_stored(daemon, sum(full) // BLOCK_TOKENS)
                engine.reset()
                engine.call("start", prompts=prompts, tokens=8)
                time.sleep(source.random() * 0.06)
                daemon.kill()
                assert engine.call("join")["tokens"] == gold, f"killed in turn {turn}"
                # What is left of the loads in the engine's own cache.
                assert engine.generate(prompts, tokens=8)["tokens"] == gold
                daemon.start()
            engine.wait_connected(daemon)
            engine.generate(prompts)
            engine.wait_stored(daemon, sum(full) // BLOCK_TOKENS)
            for steps in (1, 2, 3, 5):
                engine.reset()
                assert engine.call("abort", prompts=prompts, steps=steps)["left"] == 0
                assert engine.generate(prompts, tokens=8)["tokens"] == gold
            engine.reset()
            last = engine.generate(prompts, tokens=8)
            assert (last["tokens"], last["cached"]) == (gold, full)
            stats = engine.settled()
            assert stats["load_early_starts"] > 0
            assert stats["load_failures"] == 0
        llm = {"num_gpu_blocks_override": 24, "max_model_len": 512}
        with Engine(tmp_path, daemon.socket, extra=extra, llm=llm) as engine:
            for _ in range(2):
                assert engine.generate(crowd, tokens=100)["tokens"] == crowd_gold
            stats = engine.settled()
            assert stats["preemptions"] > 0
            assert stats["load_early_starts"] > 0
    finally:
        daemon.stop()


def test_two_ranks(l2_daemon: DaemonProcess, start) -> None:
    """A rank would load the other's half, or a block that only one of them stored."""
    prompts = [prompt(100 + 40 * i, i) for i in range(2)]
    full = [whole_blocks(len(tokens)) for tokens in prompts]
    with start(
        l2_daemon.socket, layerwise=True, processes=True, llm={"tensor_parallel_size": 2}
    ) as engine:
        cold = engine.generate(prompts, tokens=6)
        assert cold["cached"] == [0, 0]
        engine.wait_stored(l2_daemon, 2 * sum(length // BLOCK_TOKENS for length in full))
        engine.reset()
        loaded = engine.generate(prompts, tokens=6)
        assert (loaded["tokens"], loaded["cached"]) == (cold["tokens"], full)
        assert l2_daemon.status()["host"]["leases"] == 0
    assert len(l2_daemon.status()["namespaces"]) == 2
