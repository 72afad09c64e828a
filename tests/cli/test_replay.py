"""`tierd replay`: its numbers on a small trace, and its errors for wrong input."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.traces import BLOCK_TOKENS, trace_lines
from tierd.cli.main import main
from tierd.config import Size, StorageConfig, WritePolicy
from tierd.core.l3.writes import RATE_BURST_S
from tierd.eviction import L2_DEFAULT, POLICIES, STORAGE_DEFAULT
from tierd.replay.optimal import belady, ideal
from tierd.replay.simulate import ReplayResult, Setup, simulate
from tierd.replay.trace import Trace, parse_trace

TRACE = trace_lines(7)


def parsed(lines: list[bytes]) -> Trace:
    return parse_trace(lines, "trace", BLOCK_TOKENS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(TRACE))
    return path


def replay(
    trace: Trace,
    l2: int,
    l3: int = 0,
    orders: tuple[str, str] = ("lru", "lru"),
    write: WritePolicy = WritePolicy.WRITE_THROUGH,
    **keys: object,
) -> ReplayResult:
    storage = StorageConfig(type="memory", write_policy=write, **keys)  # type: ignore[arg-type]
    return simulate(trace, Setup(l2, l3, *orders, storage, 1 << 20), BLOCK_TOKENS)


def hits(name: str, blocks: int) -> int:
    return replay(parsed(TRACE), blocks, orders=(name, "lru")).l2.blocks


GOLDEN = {
    "hazard": (1748, 3542, 4338),
    "credit": (1861, 3688, 4345),
    "lru": (1768, 3548, 4338),
    "lfu": (1803, 3416, 4263),
    "s3fifo": (1828, 3468, 4247),
    "arc": (1799, 3571, 4280),
}
"""Usable hits at 50, 200 and 800 blocks, of 6,341 block references; 4,353 at best."""


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_hits_match_the_recorded_numbers(name: str) -> None:
    """A policy that changed without anybody's wish shows here first."""
    assert tuple(hits(name, blocks) for blocks in (50, 200, 800)) == GOLDEN[name]


@pytest.mark.slow
def test_no_policy_beats_the_optimum() -> None:
    """A ceiling below a real policy's hits would be no ceiling."""
    trace = parsed(TRACE)
    most = ideal(trace, BLOCK_TOKENS)
    for blocks in (1, 50, 200, 800):
        best = belady(trace, blocks, BLOCK_TOKENS)
        assert best.blocks <= most.blocks
        assert best.tokens <= most.tokens
        assert all(hits(name, blocks) <= best.blocks for name in POLICIES)
    assert belady(trace, trace.unique_blocks, BLOCK_TOKENS).blocks == most.blocks
    assert hits("lru", trace.unique_blocks) == most.blocks


def test_second_tier_acts_as_one_larger_cache() -> None:
    """Blocks would get lost between the tiers, as HiCache's write_back drops what its host memory
    has no room for."""
    trace = parsed(TRACE)
    most = ideal(trace, BLOCK_TOKENS)
    for write in (WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK):
        outcome = replay(trace, 400, trace.unique_blocks, write=write)
        assert outcome.l2.blocks + outcome.l3.blocks == most.blocks
        assert outcome.l2.tokens + outcome.l3.tokens == most.tokens
        assert outcome.l3_written <= trace.unique_blocks
        assert not outcome.refused_hits


GOLDEN_TWO_TIERS = {
    WritePolicy.WRITE_THROUGH: (2715, 1346, 1941),
    WritePolicy.WRITE_BACK: (2715, 1346, 1850),
    WritePolicy.WRITE_THROUGH_SELECTIVE: (2715, 1086, 1204),
}
"""Hits of L2 (100 blocks) and L3 (1,000), and blocks written."""


@pytest.mark.slow
@pytest.mark.parametrize("write", WritePolicy)
def test_writes_match_the_recorded_numbers(write: WritePolicy) -> None:
    """A write policy that changed without anybody's wish shows here first."""
    outcome = replay(parsed(TRACE), 100, 1000, (L2_DEFAULT, STORAGE_DEFAULT), write)
    assert (outcome.l2.blocks, outcome.l3.blocks, outcome.l3_written) == GOLDEN_TWO_TIERS[write]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["hazard", "lru"])
def test_selective_writes_less_and_keeps_most(policy: str) -> None:
    """A policy that saves writes by losing the hits is no use."""
    trace = parsed(trace_lines(9, 2400))
    through, selective = (
        replay(trace, 400, 2000, (policy, "lru"), write)
        for write in (WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_THROUGH_SELECTIVE)
    )
    writes = selective.l3_written / through.l3_written
    assert writes < 0.7
    assert selective.l3.blocks / through.l3.blocks > writes + 0.05
    assert 0 < selective.refused_hits <= selective.l3_refused


@pytest.mark.slow
def test_smaller_write_budget_is_kept_and_loses_few_hits() -> None:
    """The share that an operator sets would be a wish."""
    trace = parsed(trace_lines(9, 2400))
    offered = replay(trace, 200, 2000, write=WritePolicy.WRITE_THROUGH).l3_written
    selective = WritePolicy.WRITE_THROUGH_SELECTIVE
    runs = [replay(trace, 200, 2000, write=selective, write_share=s) for s in (0.1, 0.3, 0.6)]
    written = [run.l3_written / offered for run in runs]
    assert all(w < s + 0.06 for w, s in zip(written, (0.1, 0.3, 0.6), strict=True)), written
    kept = [run.l3.blocks for run in runs]
    assert kept == sorted(kept)


def test_write_rate_limit_is_kept() -> None:
    """A node would be sized for a link that its backups then fill."""
    trace = parsed(TRACE)
    bound = Size(200_000)
    outcome = replay(
        trace,
        200,
        2000,
        write=WritePolicy.WRITE_THROUGH_SELECTIVE,
        write_share=1.0,
        write_bytes_per_s=bound,
    )
    assert 0 < outcome.l3_written << 20 <= bound * (trace.seconds + RATE_BURST_S) + (1 << 20)


@pytest.mark.slow
def test_json_has_the_measured_values(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that sizes nodes reads these names."""
    words = ["replay", str(path), "--l2-blocks", "100", "--l3-blocks", "400", "--what-if"]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    trace = parsed(TRACE)
    assert report["trace"]["block_refs"] == trace.block_refs
    assert 0 < report["l2"]["usable_hit_ratio"] < report["belady"]["l2"]["usable_hit_ratio"]
    l2, l3, both = (report[tier]["usable_hit_ratio"] for tier in ("l2", "l3", "total"))
    assert both == pytest.approx(l2 + l3)
    assert both <= report["ideal"]["usable_hit_ratio"]
    written = report["l3"]["written_blocks"]
    assert report["l3"]["writes_per_access"] == pytest.approx(written / trace.block_refs)
    block_bytes = BLOCK_TOKENS * (128 << 10)
    assert report["l3"]["written_bytes"] == written * block_bytes
    daily = written / 400 / (trace.seconds / 86_400)
    assert report["l3"]["drive_writes_a_day"] == pytest.approx(daily)
    assert report["l3"]["refused_hits"] <= report["l3"]["refused_blocks"]
    assert 0 < report["l2"]["usable_token_ratio"] < 1
    assert set(report) == {"trace", "l2", "l3", "total", "ideal", "belady", "what_if"}
    changes = [row["change"] for row in report["what_if"]]
    assert changes[0] == "L2 twice the size"
    assert "no admission" in changes
    assert main(words) == 0
    assert "what if no admission" in capsys.readouterr().out


def test_several_sizes_print_a_list(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One run must do for a curve."""
    words = ["replay", str(path), "--json", "--policy", "lru", "--l2-blocks", "50", "200"]
    assert main(words) == 0
    small, large = json.loads(capsys.readouterr().out)
    assert small["l3"] is None
    assert small["l2"]["usable_hit_ratio"] < large["l2"]["usable_hit_ratio"]


@pytest.mark.slow
def test_result_does_not_depend_on_the_number_of_processes(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node would be sized by the machine that its trace was replayed on."""
    words = ["replay", str(path), "--l2-blocks", "50", "90", "--l3-blocks", "300", "--what-if"]
    outputs = []
    for processes in ("1", "5"):
        assert main([*words, "--json", "--processes", processes]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["parent", "child"])
def test_killed_replay_leaves_no_process(target: str, path: Path) -> None:
    """Ctrl-C, or the kernel for want of memory, would leave cores busy for hours, or hang."""
    path.write_bytes(b"".join(trace_lines(3, 20_000)))
    words = ["replay", str(path), "--l2-blocks", "500", "--what-if", "--processes", "2"]
    replaying = subprocess.Popen(
        [sys.executable, "-m", "tierd.cli.main", *words], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 30
    while len(pids := children(replaying.pid)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(*(replaying.pid, signal.SIGINT) if target == "parent" else (pids[0], signal.SIGKILL))
    _, error = replaying.communicate(timeout=30)
    assert replaying.returncode == (130 if target == "parent" else 2)
    assert ("--processes" in error) == (target == "child")
    assert "Traceback" not in error
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
def test_gzip_and_plain_traces_are_equal(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Traces come compressed."""
    packed = path.with_suffix(".gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    outputs = []
    for file in (path, packed):
        assert main(["replay", str(file), "--l2-blocks", "50", "--json"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


def line(**changes: object) -> bytes:
    record = {"timestamp": 5, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
    return json.dumps({**record, **changes}).encode() + b"\n"


BAD = {
    "not JSON": b"{nonsense\n",
    "not an object": b"[1, 2]\n",
    "no ids": b'{"timestamp": 5, "input_length": 600}\n',
    "ids of text": line(hash_ids=["a", "b"]),
    "ids of truth": line(hash_ids=[True, 2]),
    "negative time": line(timestamp=-1),
    "time goes back": line(timestamp=4),
    "no time": line(timestamp=None),
    "not a number": line(timestamp=float("nan")),
    "too many tokens": line(input_length=2000),
    "a number of 5,000 digits": b'{"timestamp": ' + b"9" * 5000 + b"}\n",
    "too deep": b"[" * 100_000 + b"\n",
    "not text": b"\xff\xfe\x00\n",
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_line_is_named(what: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Out of a million lines, the operator must learn which one it is."""
    path.write_bytes(line() + b"\n" + BAD[what] + line())
    assert main(["replay", str(path), "--l2-blocks", "50"]) == 2
    error = capsys.readouterr().err
    assert "line 3:" in error
    assert len(error) < 500


def test_huge_ids_are_accepted(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some engines write 64-bit hashes, signed ones too, or longer ones."""
    ids = [-(1 << 63), 1 << 200]
    path.write_bytes(line(hash_ids=ids) + line(hash_ids=ids))
    assert main(["replay", str(path), "--l2-blocks", "50", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["l2"]["usable_hit_ratio"] == 0.5


def test_file_that_is_not_a_trace_is_refused(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty table would look like a cache that hits nothing."""
    whole = gzip.compress(path.read_bytes())
    cases = {b"": "no requests", b"\n\n": "no requests", whole[:-500]: "after line"}
    cases[whole[:40] + b"\x00" * 40 + whole[80:]] = "line"
    for content, message in cases.items():
        path.write_bytes(content)
        assert main(["replay", str(path), "--l2-blocks", "50"]) == 2
        assert message in capsys.readouterr().err
    assert main(["replay", str(path.with_name("absent")), "--l2-blocks", "50"]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--l2-blocks", "0"],
        ["--l2-blocks", "5", "--l3-blocks", "-1"],
        ["--l2-blocks", "5", "6", "--l3-blocks", "7", "8", "9"],
        ["--l2-blocks", "5", "--l3-blocks", "99999999999"],
        ["--l2-blocks", "5", "--write-share", "0"],
        ["--l2-blocks", "5", "--write-policy", "write_thru"],
        ["--l2-blocks", "5", "--write-policy", "write_back", "--drive-writes-per-day", "1"],
        ["--l2-blocks", "5", "--write-bytes-per-s", "fast"],
        ["--l2-blocks", "5", "--block-bytes", "0"],
        ["--l2-blocks", "5", "--block-tokens", "0"],
        ["--l2-blocks", "99999999999"],
        ["--l2-blocks", "5", "--processes", "0"],
    ],
)
def test_impossible_sizes_are_refused(
    words: list[str], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong flag must not end in a stack trace, nor in a run of hours."""
    assert main(["replay", str(path), *words]) == 2
    assert capsys.readouterr().err.startswith("tierd: ")
