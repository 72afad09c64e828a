"""`tierd bench` leaves nothing behind, and its table matches the daemon's decisions."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import blocks
from tests.support.fake_node import FakeDaemon, FakeEngine
from tests.support.servers.redis import RedisServer
from tierd.cli.bench import command as bench
from tierd.cli.bench import tier_speed
from tierd.cli.common import speed
from tierd.cli.common.break_even import (
    LENGTHS,
    Model,
    PrefillDemand,
    TierSpeed,
    first_paying,
    learned_load,
)
from tierd.cli.common.engine import EngineServer
from tierd.cli.common.speed import DiskSpeed, disk_speed
from tierd.cli.main import main
from tierd.config import PrefetchConfig
from tierd.core.l3.prefetch import BreakEven, Worth
from tierd.errors import ConfigError

Bench = Callable[..., int]
MODEL = ("--kv-bytes-per-token", "4096", "--prefill", "1000")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Run the command on little data."""
    monkeypatch.setattr(tier_speed, "ROUNDS", 1)
    monkeypatch.setattr(tier_speed, "ROUND_BYTES", 4 << 20)
    monkeypatch.setattr(tier_speed, "ALONE", 1)
    monkeypatch.setattr(bench, "copy_bytes_per_s", lambda: speed.copy_bytes_per_s(1 << 20))
    monkeypatch.setenv("TIERD_SOCKET", str(tmp_path / "none.sock"))

    def command(*words: str, tiers: str = "") -> int:
        config = tmp_path / "tierd.toml"
        config.write_text(f'[host]\ncapacity = "64MiB"\n{tiers}')
        return main(["bench", "--config", str(config), *words])

    return command


def file_tier(path: Path) -> str:
    return f'[[storage]]\ntype = "file"\nname = "disk"\npath = "{path}"\ncapacity = "1MiB"\n'


# --- the table ------------------------------------------------------------------------

speeds = st.builds(
    TierSpeed,
    latency_s=st.floats(0, 10),
    bytes_per_s=st.floats(1e4, 1e11),
)
models = st.builds(
    Model, bytes_per_token=st.integers(1, 1 << 22), block_tokens=st.sampled_from([1, 16, 32, 256])
)


@given(speed=speeds, model=models, prefill=st.integers(1, 10**7), min_tokens=st.integers(0, 5000))
def test_break_even_matches_the_daemons_decision(
    speed: TierSpeed, model: Model, prefill: int, min_tokens: int
) -> None:
    """A user would buy a disk for loads that the daemon then refuses, or none for ones it does."""
    config = PrefetchConfig(min_tokens=min_tokens)

    def brings(tokens: int) -> bool:
        gate = Worth(config, BreakEven(), resident_tokens=0, prefill_tokens_per_s=prefill)
        return gate.bringing(tokens, tokens, {0: speed.load_s(model, tokens)})

    first = first_paying(speed, model, prefill, min_tokens)
    if first is None:
        assert not any(brings(tokens) for tokens in LENGTHS if speed.latency_s > 1e-9)
        return
    assert first % model.block_tokens == 0
    assert brings(first)
    assert brings(4 * first)
    assert first == model.block_tokens or not brings(first - model.block_tokens)


def test_load_time_of_known_speeds() -> None:
    """The table's numbers could be off by the latency, or by a unit."""
    tier = TierSpeed(latency_s=0.5, bytes_per_s=1e6)
    model = Model(bytes_per_token=1000, block_tokens=16)
    assert tier.load_s(model, 1000) == pytest.approx(1.5)
    # 0.5 s + 1 ms a token against 2 ms a token: even at 500 tokens, which is 31.25 blocks.
    assert first_paying(tier, model, 500) == 512
    assert first_paying(tier, model, 500, min_tokens=600) == 608
    assert first_paying(tier, model, 1000) is None, "as fast as the tier, and it begins at once"


def test_speeds_measured_by_the_daemon_are_used() -> None:
    """The model would have to be looked up by hand; one rank's bytes be taken for all."""
    spaces = [blocks.namespace(8192, tp_size=2, tp_rank=rank) for rank in (0, 1)]
    other = blocks.namespace(4096, model="other")
    shown = [
        {**space.to_fields(), "hash_root": "", "digest": space.digest.hex()}
        for space in [*spaces, other]
    ]
    seats = [
        {"namespace": spaces[0].digest.hex(), "prefill_tokens_per_s": 300},
        {"namespace": other.digest.hex(), "prefill_tokens_per_s": 400},
        {"namespace": "other", "prefill_tokens_per_s": 10**9},
    ]
    load = learned_load({"namespaces": shown, "demand": seats})
    assert load == PrefillDemand(Model(2 * 8192 / 16, 16, 2), 300)
    assert learned_load({"namespaces": shown, "demand": []}) is None


# --- the command ----------------------------------------------------------------------


def test_file_tier_is_measured_and_not_changed(
    run: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bench would fill the tier, or the disk beside it, with its own data."""
    store = tmp_path / "disk" / "store"
    store.mkdir(parents=True)
    (store / "LOCK").write_text("1\n")
    assert run("--json", *MODEL, "--block-bytes", "64KiB", tiers=file_tier(store)) == 0
    output = json.loads(capsys.readouterr().out)
    assert output.keys() == {
        "schema",
        "block_bytes",
        "memory_copy_bytes_per_s",
        "tiers",
        "failed",
        "break_even",
    }
    [tier] = output["tiers"]
    assert tier.keys() == {
        "tier",
        "get_bytes_per_s",
        "put_bytes_per_s",
        "get_one_block_ms",
        "raw_read_bytes_per_s",
        "raw_write_bytes_per_s",
        "get_of_raw",
        "put_of_raw",
        "direct",
    }
    assert tier["tier"] == "disk"
    assert all(tier[name] > 0 for name in tier if name not in ("tier", "direct"))
    table = output["break_even"]
    assert table["kv_bytes_per_token"] == 4096
    assert table["pays_from_tokens"].keys() == {"host memory", "disk"}
    assert [row["tokens"] for row in table["lengths"]] == list(LENGTHS)
    assert table["lengths"][0]["recompute_ms"] == 512
    assert os.listdir(store.parent) == ["store"]
    assert os.listdir(store) == ["LOCK"]


def test_text_names_the_break_even_length(
    run: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader would have to find the crossing in the table."""

    async def measured(*_: object) -> tier_speed.Result:
        return tier_speed.Result("disk", 1e9, 5e8, 0.001, DiskSpeed(1e9, 2e9, True))

    monkeypatch.setattr(bench, "measure", measured)
    tiers, small = file_tier(tmp_path / "s"), ("--block-bytes", "64KiB")
    assert run(*small, "--kv-bytes-per-token", "1", "--prefill", "1", tiers=tiers) == 0
    text = capsys.readouterr().out
    assert "get 1.00 GB/s (0.50 of disk speed), put 0.50 GB/s (0.50 of disk speed)" in text
    assert "host memory: offload pays from 16 tokens" in text
    assert "disk: offload pays from 256 tokens" in text, "min_tokens"
    assert run(*small, "--kv-bytes-per-token", "4000000", "--prefill", "1e9", tiers=tiers) == 0
    text = capsys.readouterr().out
    assert "disk: offload does not pay for this model: recomputing is always faster" in text
    assert run(tiers=tiers) == 0
    assert "no table: pass the model" in capsys.readouterr().out


def test_redis_tier_is_not_changed(
    run: Bench,
    tmp_path: Path,
    redis_server: RedisServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Blocks of the bench would take other nodes' room, for ever."""
    client = redis_server.client()
    client.set("tierd:somebody", "else")
    tiers = f'[[storage]]\ntype = "redis"\nurl = "{redis_server.url}"\n'
    assert run("--json", *MODEL, "--block-bytes", "64KiB", tiers=tiers) == 0
    [tier] = json.loads(capsys.readouterr().out)["tiers"]
    assert tier["get_bytes_per_s"] > 0
    assert tier["raw_read_bytes_per_s"] is None
    assert client.keys() == [b"tierd:somebody"]
    client.close()


def test_unreachable_tier_is_reported_and_the_others_are_measured(
    run: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One dead server would leave the operator without the other numbers."""
    dead = '[[storage]]\ntype = "redis"\nurl = "redis://127.0.0.1:9/0"\n'
    words = ("--json", "--block-bytes", "64KiB", *MODEL)
    assert run(*words, tiers=file_tier(tmp_path / "s") + dead) == 3
    out, err = capsys.readouterr()
    assert json.loads(out)["failed"].keys() == {"redis"}
    assert [tier["tier"] for tier in json.loads(out)["tiers"]] == ["disk"]
    assert "tierd: tier redis: the server at 127.0.0.1:9 refuses" in err
    assert run(*words, "--tier", "redis", tiers=file_tier(tmp_path / "s") + dead) == 1


def test_full_disk_is_reported(
    run: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bench would fill the disk that the tier is to have."""
    monkeypatch.setattr(tier_speed, "ROUNDS", 1 << 30)
    assert run(tiers=file_tier(tmp_path / "s")) == 1
    assert "bench needs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tier", "dsik"], "no tier is named 'dsik'; tiers: disk"),
        (["--layers", "3"], "--layers, --kv-heads and --head-dim together"),
        (["--layers", "3", "--kv-bytes-per-token", "1"], "the model is given twice"),
        (["--kv-bytes-per-token", "0"], "at least 1"),
        (["--block-bytes", "0"], "--block-bytes"),
        (["--block-bytes", "8G"], "is not a size"),
        (["--prefill", "0"], "--prefill must be more than 0"),
        (["--prefill", "nan"], "--prefill must be more than 0"),
        (["--prefill", "1", "--engine", "http://x"], "exclude each other"),
        (["--namespace", "00"], "needs a running tierd"),
        (["--engine", "http://127.0.0.1:9"], "no answer from the engine at http://127.0.0.1:9"),
        (["--engine", "gopher://x"], "want http://HOST:PORT"),
    ],
)
def test_wrong_input(
    run: Bench, tmp_path: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typing error would cost two minutes and give another model's table."""
    assert run(*words, tiers=file_tier(tmp_path / "s")) == 2
    assert says in capsys.readouterr().err


def test_model_is_given_by_shape_or_namespace(
    run: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A factor of two, keys and values, would be forgotten."""
    shape = ["--layers", "32", "--kv-heads", "8", "--head-dim", "128"]
    assert run("--json", *shape, "--prefill", "8000") == 0
    output = json.loads(capsys.readouterr().out)
    assert output["break_even"]["kv_bytes_per_token"] == 131_072
    assert output["block_bytes"] == 2 << 20

    space = blocks.namespace(4096)
    shown = {
        **space.to_fields(),
        "hash_root": "",
        "digest": space.digest.hex(),
        "sessions": 0,
    }
    with FakeDaemon(tmp_path / "d.sock", {"namespaces": [shown], "demand": []}):
        words = ["--socket", str(tmp_path / "d.sock"), "--prefill", "8000", "--json"]
        assert run(*words, "--namespace", space.digest.hex()) == 0
        output = json.loads(capsys.readouterr().out)
        assert output["break_even"]["kv_bytes_per_token"] == 256
        assert output["block_bytes"] == 4096
        for more in ((), ("--namespace", space.digest.hex()[:4])):
            assert run(*words, *more) == 0
            output = json.loads(capsys.readouterr().out)
            assert output["break_even"]["kv_bytes_per_token"] == 256
        assert run(*words, "--namespace", "0000") == 2
        said = f"knows no namespace 0000; known: {space.digest.hex()} (test-model, rank 0)"
        assert said in capsys.readouterr().err


def test_only_model_is_the_default(
    run: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A digest would have to be copied though there is nothing to choose; or one of two models be
    taken, whichever comes first."""
    spaces = [blocks.namespace(8192, tp_size=2, tp_rank=rank) for rank in (0, 1)]
    spaces.append(blocks.namespace(8192, weights="w+lora:sql=1", tp_size=2))
    spaces.append(blocks.namespace(4096, model="other"))
    shown = [
        {**space.to_fields(), "hash_root": "", "digest": space.digest.hex(), "sessions": 1}
        for space in spaces
    ]
    path = tmp_path / "d.sock"
    words = ["--socket", str(path), "--json"]
    for some in (shown[:3], [*shown[:3], {**shown[3], "sessions": 0}], shown):
        with FakeDaemon(path, {"namespaces": some, "demand": []}):
            status = run(*words, "--prefill", "8000")
        path.unlink()
        out, said = capsys.readouterr()
        if some is shown:
            assert status == 2
            assert "pass --namespace, one of: " in said
            assert all(space.digest.hex() in said for space in spaces)
        else:
            assert status == 0
            assert json.loads(out)["break_even"]["kv_bytes_per_token"] == 2 * 8192 / 16


def test_engine_speed_excludes_the_overhead_of_a_request() -> None:
    """A slow network would be taken for a slow engine."""
    now_s = 0.0
    seen: list[list[int]] = []

    def compute(tokens: list[int]) -> None:
        nonlocal now_s
        seen.append(tokens)
        # A second for any request, and more for the first one, which compiles.
        now_s += 1.0 + len(tokens) / 500 + (30.0 if len(seen) == 1 else 0.0)

    with FakeEngine(compute) as fake:
        found = bench.prefill_tokens_per_s(EngineServer(fake.url), clock=lambda: now_s)
    assert found == pytest.approx(500)
    assert len({tuple(tokens) for tokens in seen}) == len(seen), (
        "a prompt was in the engine's cache"
    )
    assert {len(tokens) for tokens in seen} == {512, 2048}

    with FakeEngine() as fake, pytest.raises(ConfigError, match="took no longer"):
        bench.prefill_tokens_per_s(EngineServer(fake.url), clock=lambda: now_s)


def test_disk_probe_leaves_no_file_and_moves_the_stated_bytes(tmp_path: Path) -> None:
    """A speed of nothing at all would look like a fast disk."""
    found = disk_speed(tmp_path, io_bytes=64 << 10, size_bytes=1 << 20, threads=2)
    assert found.read_bytes_per_s > 0
    assert found.write_bytes_per_s > 0
    assert os.listdir(tmp_path) == []
