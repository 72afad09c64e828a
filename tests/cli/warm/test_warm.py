"""`tierd warm`: prefixes are in host memory before an engine asks for them."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support import blocks
from tests.support.daemon_process import DaemonProcess
from tests.support.fake_openai import FakeOpenAI, letters, serving
from tierd import hotset
from tierd.cli import main as main_module
from tierd.cli.common.engine import EngineServer
from tierd.cli.common.operator import Operator, tables
from tierd.cli.common.text import size
from tierd.cli.main import main
from tierd.cli.warm import command as warm_module
from tierd.cli.warm import run as warm_run
from tierd.client import Client
from tierd.errors import DisconnectedError
from tierd.hashing import KeyStyle, Lora, RequestExtras, hash_blocks, root_hash
from tierd.types import Namespace

pytestmark = pytest.mark.slow

ROOT = root_hash()
BASE: dict[str, Any] = {"hash_scheme": KeyStyle.TAGGED.value, "hash_root": ROOT, "tp_size": 2}
RANKS = [blocks.namespace(**BASE, tp_rank=rank) for rank in range(2)]
ADAPTER = Lora("sql", "/adapters/sql")
ADAPTER_RANKS = [
    blocks.namespace(**BASE, tp_rank=rank, weights="rev-1+lora:sql=7") for rank in range(2)
]
BIG = blocks.namespace(block_bytes=512 << 10, model="big")
BIG_CHAINS = [blocks.chain(2, number)[0] for number in range(24)]
"""More than L2 has room for."""
TOKENS = 16
COUNT = 10
TEXT = "a system prompt that everybody has. " * 5
"""Eleven blocks of letters, and some more."""
CHAT = [{"role": "user", "content": TEXT}]


def prompt(number: int, count: int = COUNT) -> list[int]:
    return [number, *range(count * TOKENS - 1)]


def hashes_of(tokens: list[int], extras: RequestExtras | None = None) -> list[bytes]:
    keys = None
    if extras is not None:
        keys = extras.block_keys(len(tokens) // TOKENS, TOKENS, KeyStyle.TAGGED)
    return hash_blocks(tokens, TOKENS, parent=ROOT, extra=keys)


def store(client: Client, namespace: Namespace, hashes: list[bytes]) -> None:
    parents = [namespace.hash_root, *hashes[:-1]]
    contents = [blocks.payload(namespace, h) for h in hashes]
    handle = client.register(namespace)
    end_s = time.monotonic() + 20
    # Where L2 is full they have to wait until others are in the tiers.
    while not all(client.put(handle, list(zip(hashes, parents, contents, strict=True)))):
        assert time.monotonic() < end_s
        time.sleep(0.01)


def as_json(namespace: Namespace) -> dict[str, object]:
    return {**namespace.to_fields(), "hash_root": namespace.hash_root.hex()}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """A daemon whose tier has prompts 0 to 3 (3: of a tenant), a text, a chat, and BIG."""
    path = tmp_path_factory.mktemp("warm")
    storage = "".join(
        f'[[storage]]\ntype = "file"\nname = "{name}"\npath = "{path}/{name}"\n'
        f'capacity = "64MiB"\nreserve_free = "0"\nwrite_policy = "{policy}"\n'
        for name, policy in (("disk", "write_through"), ("other", "write_back"))
    )
    storage += '[admin]\nlisten = "127.0.0.1:0"\n'
    with DaemonProcess(path, capacity="16MiB", storage=storage) as running:
        running.wait_tier("disk", "ready")
        client = running.client()
        for rank in RANKS:
            for number in range(3):
                store(client, rank, hashes_of(prompt(number)))
            store(client, rank, hashes_of(prompt(3), RequestExtras(salt="tenant")))
            for text in (TEXT, json.dumps([CHAT, None]) + "assistant:"):
                store(client, rank, hashes_of(letters(text)))
        for hashes in BIG_CHAINS:
            store(client, BIG, hashes)
            running.wait_backed_up()
        client.close()
        flush(running, host=True, tiers=[1])
        yield running


def flush(daemon: DaemonProcess, prefix: str = "", *, host: bool, tiers: list[int]) -> None:
    with Operator(daemon.socket, "test") as operator:
        [*_, result] = operator.flush(prefix, host=host, tiers=tiers, timeout_s=10)
    assert result["complete"]


@pytest.fixture
def cold(daemon):
    """It, with nothing in L2, and knowing of the engine's namespaces only."""
    flush(daemon, host=True, tiers=[])
    return daemon


@pytest.fixture
def ranks(tmp_path) -> list[str]:
    """Words that name the namespaces."""
    words = []
    for rank in RANKS:
        file = tmp_path / f"rank{rank.tp_rank}.json"
        file.write_text(json.dumps(as_json(rank)))
        words += ["--namespace", str(file)]
    return words


@pytest.fixture
def engine(daemon):
    """A stand-in for an engine of both ranks, which stores what it computes."""
    client = daemon.client("engine")

    def compute(request):
        lora = ADAPTER if request.get("model") == ADAPTER.name else None
        extras = RequestExtras(salt=request.get("cache_salt"), lora=lora)
        for rank in ADAPTER_RANKS if lora else RANKS:
            store(client, rank, hashes_of(request["prompt"], extras))

    with serving(FakeOpenAI(compute)) as running:
        yield running
    client.close()


def warm(daemon: DaemonProcess, *words: object) -> int:
    return main(["warm", "--socket", daemon.socket, *map(str, words)])


def lines(tmp_path, *values: object):
    """A file of prompts."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f"{v if isinstance(v, str) else json.dumps(v)}\n" for v in values))
    return path


def status_of(daemon: DaemonProcess) -> dict:
    client = daemon.client()
    try:
        return client.status()
    finally:
        client.close()


def resident(daemon: DaemonProcess) -> dict[str, int]:
    """Blocks in L2 of the namespaces that have any."""
    spaces = status_of(daemon)["namespaces"]
    return {space["digest"]: space["blocks"] for space in spaces if space["blocks"]}


def explained(daemon: DaemonProcess, space: Namespace, hashes: list[bytes]):
    """What the daemon says of each block."""
    with Operator(daemon.socket, "test") as operator:
        return tables(operator.explain(space.digest, hashes)["blocks"])


def both(count: int, ranks=RANKS) -> dict[str, int]:
    return {rank.digest.hex(): count for rank in ranks}


def read_blocks(daemon: DaemonProcess) -> int:
    count: int = daemon.tiers()["disk"]["counters"]["get_hit_total"]
    return count


# --- sources --------------------------------------------------------------------------


def test_warm_prompts_of_every_form(cold, engine, ranks, tmp_path, capsys, monkeypatch) -> None:
    """The first user would wait for the disk, though the prompt was given to be warmed."""
    path = lines(
        tmp_path,
        prompt(0),
        {"tokens": prompt(1), "namespace": [r.digest.hex() for r in RANKS]},
        "",
        {"prompt": prompt(2), "model": "base", "max_tokens": 5},
        {"tokens": prompt(3), "salt": "tenant"},
        {"prompt": TEXT},
        {"messages": CHAT, "temperature": 1},
    )
    stdin = io.TextIOWrapper(io.BytesIO(json.dumps(prompt(0)).encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert warm(cold, "-", path, *ranks, "--engine", engine.url, "--json") == 0
    output = json.loads(capsys.readouterr().out)
    text, chat = (len(letters(t)) // TOKENS for t in (TEXT, json.dumps([CHAT, None]) + 10 * "."))
    assert (output["units"], output["brought"] + output["here"]) == (7, 50 + text + chat)
    assert output["bytes"] >= 4096 * sum(resident(cold).values())
    assert resident(cold) == both(40 + text + chat)
    assert engine.computed == []


def test_missing_blocks_are_reported(cold, ranks, tmp_path, capsys) -> None:
    """An operator would take a cold prefix for a warm one."""
    client = cold.client()
    store(client, RANKS[1], hashes_of(prompt(70)))
    client.close()
    path = lines(tmp_path, *(prompt(number) for number in (0, 9, 3, 70)))
    assert warm(cold, path, *ranks) == 3
    output = capsys.readouterr().out
    # What only one rank has is of no use.
    assert "10 of 40 blocks in host memory" in output
    assert f"30 blocks: no tier has them ({path}, line 2, {path}, line 3, {path}, line 4)" in output
    # Of what another tenant's salt hides, nothing has come.
    assert resident(cold)[RANKS[0].digest.hex()] == COUNT


def write_hot_set(path, runs: list[tuple[list[bytes], int]], ranks=RANKS) -> str:
    """A hot set of runs from the root on, each with its uses."""
    root = ranks[0].hash_root
    found = [hotset.HotRun(root, hashes, uses, 60, len(hashes)) for hashes, uses in runs]
    parts = hotset.pieces([(ranks, found)], written_s=int(time.time()), version="0")
    path.write_bytes(b"".join(parts))
    return str(path)


def test_hot_set(cold, tmp_path, capsys) -> None:
    """After a boot nothing would be warm, or prompts beside the hot set would have no namespace."""
    name = write_hot_set(tmp_path / "hot", [(hashes_of(prompt(n)), 9 - n) for n in (0, 1, 8)])
    missing = tmp_path / "missing"
    # A restart has made the daemon forget the namespaces; the hot set has them.
    cold.stop()
    cold.start()
    words = ["--hotset", name, "--hotset", missing, "--if-exists", "--json"]
    assert warm(cold, lines(tmp_path, prompt(2)), missing, *words, "--dry-run") == 0
    assert json.loads(capsys.readouterr().out)["nowhere"] == 10
    assert warm(cold, lines(tmp_path, prompt(2)), missing, *words) == 3
    output = json.loads(capsys.readouterr().out)
    assert [output[key] for key in ("units", "brought", "missing")] == [4, 30, 10]
    [reason] = output["reasons"]
    assert (reason["blocks"], reason["first"]) == (10, [f"{name}, run 3"])
    assert resident(cold) == both(30)
    # Another node gives its hot set as well.
    found = re.findall(r"metrics and health on (http://[0-9.:]+)", cold.log.read_text())
    assert warm(cold, "--hotset", f"{found[-1]}/v1/hotset") == 0
    assert "30 of 30 blocks" in capsys.readouterr().out
    # What was hot there counts as hot here.
    [block] = explained(cold, RANKS[0], hashes_of(prompt(0))[:1])
    assert int(str(block["uses"])) >= 9


def test_hot_set_larger_than_host_memory(cold, tmp_path, capsys) -> None:
    """The least worth would push out the most, or the command would never end."""
    runs = [(hashes, 99 - number) for number, hashes in enumerate(BIG_CHAINS)]
    write_hot_set(tmp_path / "hot", runs, [BIG])
    assert warm(cold, "--hotset", tmp_path / "hot", "--json") == 3
    output = json.loads(capsys.readouterr().out)
    assert output["blocks"] == 2 * len(BIG_CHAINS)
    [reason] = output["reasons"]
    assert "no space" in reason["why"]
    assert reason["blocks"] == output["missing"] > 0
    assert resident(cold) == {BIG.digest.hex(): output["had"]} == {BIG.digest.hex(): 32}
    found = explained(cold, BIG, [h for hashes in BIG_CHAINS for h in hashes])
    assert all(block["host"] for block in found[: output["had"]]), "not the most valuable blocks"


def test_warm_everything_in_a_tier(cold, ranks, tmp_path, capsys) -> None:
    """`--from` would miss prefixes, or bring them without their parents."""
    words = ["--from", "disk", *ranks]
    assert warm(cold, *words, "--size", f"{4096 * 2 * 25}B", "--json") == 0
    assert json.loads(capsys.readouterr().out)["brought"] == 25
    for rank in RANKS:
        assert resident(cold)[rank.digest.hex()] == 25
    assert warm(cold, *words, "--json") == 0
    assert json.loads(capsys.readouterr().out)["here"] == 25
    # All prefixes can be had from their first block on.
    client = cold.client()
    handles = [client.register(rank) for rank in RANKS]
    lease = client.acquire(handles, hashes_of(prompt(2)), 0)
    assert lease is not None
    assert lease.blocks == COUNT
    client.release(lease)
    client.close()


def test_warm_into_another_tier(cold, ranks, tmp_path, capsys) -> None:
    """`--to` would fill host memory, and not the tier."""
    path = lines(tmp_path, prompt(0), prompt(9))
    assert warm(cold, path, *ranks, "--to", "other") == 3
    assert "10 of 20 blocks in other" in capsys.readouterr().out
    assert cold.tiers()["other"]["blocks"] == 20
    assert resident(cold) == {}


# --- an engine ---------------------------------------------------------------------------


def test_engine_computes_what_is_missing(cold, engine, ranks, tmp_path, capsys) -> None:
    """A cold prefix would stay cold; or the engine would compute what a tier has; or another
    tenant's, or another adapter's, KV."""
    path = lines(
        tmp_path,
        prompt(0),
        {"prompt": prompt(20), "cache_salt": "tenant"},
        {"prompt": prompt(21), "model": "sql"},
        {"tokens": prompt(22), "lora": list(ADAPTER)},
        *(prompt(number) for number in range(30, 36)),
    )
    words = ["--engine", engine.url, "--lora", "sql=/adapters/sql", "--concurrency", 2]
    engine.store_delay_s = 0.1
    assert warm(cold, path, *ranks, *words, "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert output["blocks"] == output["had"] == 100
    assert output["brought"] == COUNT
    asked = {request["prompt"][0]: request for request in engine.computed}
    # The adapter's first prompt had to be computed before its namespace was known.
    assert sorted(asked) == [20, 21, 22, *range(30, 36)]
    assert all(request["max_tokens"] == 1 for request in engine.computed)
    assert [asked[n].get("model") for n in (20, 21, 22)] == [None, "sql", "sql"]
    assert [asked[n].get("cache_salt") for n in (20, 21, 22)] == ["tenant", None, None]
    assert engine.at_once_max <= 2
    assert resident(cold) == {**both(80), **both(20, ADAPTER_RANKS)}
    cold.wait_backed_up()
    # Next time tiers have all blocks, and a missing path is reported.
    engine.computed.clear()
    assert warm(cold, path, *ranks, *words) == 0
    assert engine.computed == []
    assert warm(cold, path, *ranks, "--engine", engine.url) == 2
    assert "'sql' is an adapter: pass --lora" in capsys.readouterr().err


def test_engine_that_stores_nothing(cold, engine, ranks, tmp_path, capsys, monkeypatch) -> None:
    """A prefix that was computed and not stored would count as warm."""
    monkeypatch.setattr(warm_run, "STORE_S", 0.3)
    engine.store = lambda request: None
    path = lines(tmp_path, prompt(0), prompt(40))
    assert warm(cold, path, *ranks, "--engine", engine.url) == 3
    assert "10 blocks: the engine computed them but did not store" in capsys.readouterr().out


def test_engine_that_refuses(cold, engine, ranks, tmp_path, capsys) -> None:
    """An operator would not know why a prompt is cold; or the rest would not be warmed."""
    engine.refusal = 400, "too long\x1b[2J"
    path = lines(tmp_path, prompt(41), {"prompt": TEXT}, prompt(0))
    assert warm(cold, path, *ranks, "--engine", engine.url) == 3
    output = capsys.readouterr().out
    assert "10 of 20 blocks" in output
    assert f"10 blocks: the engine at {engine.url}: 400 Bad Request: too long?[2J" in output
    assert f"({path}, line 2, {path}, line 1)" in output


def test_engine_that_is_down(cold, ranks, tmp_path, capsys, monkeypatch) -> None:
    """Blocks in tiers would stay cold as well, or the exit status would be 0."""
    url = "http://127.0.0.1:9"
    path = lines(tmp_path, prompt(41), {"prompt": TEXT}, {"messages": CHAT}, prompt(0))
    asked: list[object] = []
    tokenize = EngineServer.tokens

    def tokens(self, request):
        asked.append(request)
        return tokenize(self, request)

    monkeypatch.setattr(EngineServer, "tokens", tokens)
    assert warm(cold, path, *ranks, "--engine", url) == 3
    assert len(asked) == 1, "who does not answer may take its time to"
    assert f"no answer from the engine at {url}" in capsys.readouterr().err
    assert resident(cold) == both(COUNT)
    assert warm(cold, lines(tmp_path, prompt(41)), *ranks, "--engine", url) == 1
    assert warm(cold, lines(tmp_path, prompt(0)), *ranks, "--engine", url) == 0


# --- how ---------------------------------------------------------------------------------


def test_dry_run_changes_nothing(cold, ranks, tmp_path, capsys) -> None:
    """A question would cost reads, or its answer be wrong."""
    path = lines(tmp_path, prompt(0), prompt(9))
    journal = tmp_path / "journal"
    before = read_blocks(cold)
    words = [path, *ranks, "--dry-run", "--resume", journal]
    assert warm(cold, *words, "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["blocks"], output["bytes"], output["here"], output["nowhere"]) == (
        20,
        163840,
        0,
        10,
    )
    assert output["tiers"]["disk"] == {"blocks": 10}
    assert sum(output["read_bytes"].values()) == 81920
    assert output["compute_s"] is None
    assert (read_blocks(cold), resident(cold), journal.exists()) == (before, {}, False)
    warm(cold, lines(tmp_path, prompt(0)), *ranks)
    capsys.readouterr()
    assert warm(cold, *words) == 0
    assert "10 in host memory, 0 in no tier" in capsys.readouterr().out
    assert warm(cold, lines(tmp_path, prompt(0), "nothing"), *words[1:], "--skip-bad") == 3
    assert "1 not read: malformed" in capsys.readouterr().out


def test_verify_and_pin(cold, ranks, tmp_path, capsys) -> None:
    """`--pin` would let the prefix go; `--verify` would call it damaged."""
    path = lines(tmp_path, prompt(0))
    assert warm(cold, path, *ranks, "--pin", "1h") == 0
    assert status_of(cold)["host"]["pinned_bytes"] == 2 * COUNT * 4096
    assert "pinned: 80 KiB of 80 KiB\n" in capsys.readouterr().out
    assert warm(cold, path, *ranks, "--verify") == 0
    write_hot_set(tmp_path / "hot", [(hashes, 9) for hashes in BIG_CHAINS], [BIG])
    assert warm(cold, "--hotset", tmp_path / "hot", "--pin", "1h") == 3
    kept = status_of(cold)["host"]["pinned_bytes"] - 2 * COUNT * 4096
    assert f"pinned: {size(kept)} of 1" in (output := capsys.readouterr().out)
    assert "; host.pin_share allows no more" in output


def test_resume(cold, engine, ranks, tmp_path, capsys) -> None:
    """Finished units would be read or computed again, or blocks lost since would be skipped."""
    path = lines(tmp_path, {"prompt": TEXT}, prompt(0), prompt(50), prompt(51)[:15])
    journal = tmp_path / "journal"
    words = [path, *ranks, "--engine", engine.url, "--resume", journal, "--json"]
    assert warm(cold, *words) == 0
    asked = len(engine.tokenized), len(engine.computed), read_blocks(cold)
    capsys.readouterr()
    assert warm(cold, *words) == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["units"], output["before"], output["blocks"]) == (4, 31, 31)
    assert (len(engine.tokenized), len(engine.computed), read_blocks(cold)) == asked
    cold.wait_backed_up()
    flush(cold, RANKS[1].digest.hex(), host=True, tiers=[])
    assert warm(cold, *words) == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["before"], output["brought"]) == (0, 31)
    assert read_blocks(cold) == asked[2] + 31
    # Other ranks or another target are other work.
    assert warm(cold, path, *ranks[:2], *words[5:]) == 0
    assert json.loads(capsys.readouterr().out)["before"] == 0
    assert warm(cold, *words, "--to", "other") == 2
    assert "is the journal of a warm to 'host memory'" in capsys.readouterr().err


def test_daemon_ends_during_a_warm(cold, ranks, tmp_path, capsys, monkeypatch) -> None:
    """A warm that ended too early would count as complete, or not report what it did."""
    heard = []

    def next_warmed(self, timeout_s):
        heard.append(hear(self, timeout_s))
        if any(heard[:-1]):
            raise DisconnectedError("no answer from it: it closed the session")
        return heard[-1]

    hear = Operator.next_warmed
    monkeypatch.setattr(Operator, "next_warmed", next_warmed)
    path = lines(tmp_path, prompt(0)[:16], prompt(1))
    assert warm(cold, path, *ranks[:2]) == 1
    output = capsys.readouterr()
    assert "1 of 1 blocks" in output.out or "10 of 10 blocks" in output.out
    assert output.err == "tierd: no answer from it: it closed the session\n"


@contextmanager
def command(daemon: DaemonProcess, *words: object):
    """`tierd warm` as a process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tierd.cli.main", "warm", "--socket", daemon.socket]
        + [str(word) for word in words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_interrupted_and_resumed(cold, tmp_path) -> None:
    """Ctrl-C would leave leases behind, or all work to be done again."""
    path = lines(tmp_path, *(prompt(n % 3, 1 + n // 3) for n in range(30)))
    names = [word for rank in RANKS for word in ("--namespace", rank.digest.hex())]
    write_hot_set(tmp_path / "hot", [(hashes_of(prompt(0, 1)), 1)])
    warm(cold, "--hotset", tmp_path / "hot")
    words = [path, *names, "--resume", tmp_path / "journal"]
    before = read_blocks(cold)
    with command(cold, *words, "--rate", "80kB/s") as process:
        end_s = time.monotonic() + 20
        while read_blocks(cold) < before + 8:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (130, "")
    assert "interrupted before all was processed" in out
    finished = (tmp_path / "journal").read_text().count("\n") - 1
    assert 0 < finished < 30
    assert status_of(cold)["host"]["leases"] == 0
    had = sum(resident(cold).values())
    before = read_blocks(cold)
    with command(cold, *words, "--json") as process:
        out, err = process.communicate(timeout=20)
    output = json.loads(out)
    assert (process.returncode, output["had"], output["units"]) == (0, 165, 30)
    assert output["before"] > 0
    assert resident(cold) == both(30)
    assert read_blocks(cold) - before <= 60 - had, "blocks that had come were read again"
    assert status_of(cold)["host"]["leases"] == 0


@pytest.mark.parametrize("held", ["tier", "stdin", "engine"])
def test_deadline(cold, engine, ranks, tmp_path, monkeypatch, capsys, held) -> None:
    """A unit that warms at boot would delay the boot."""
    path = lines(tmp_path, *(prompt(n) for n in (0, 1, 2, 60)))
    words = [*ranks, "--deadline", "0.3"]
    reader, writer = os.pipe()
    stdin = os.fdopen(reader)
    if held == "tier":
        words += ["--rate", "40kB/s"]
    elif held == "engine":
        engine.hold.clear()
        words += ["--engine", engine.url]
    else:
        monkeypatch.setattr(sys, "stdin", stdin)
        path = "-"
    late_s = []
    for _ in range(5):
        began_s = time.monotonic()
        assert warm(cold, path, *words) == 3
        late_s.append(time.monotonic() - began_s - 0.3)
        output = capsys.readouterr().out
        assert "deadline" in output
        if held == "engine":
            assert "10 blocks: the deadline passed first" in output
        if min(late_s) <= 0.1:
            break  # The others are the machine's.
    assert -0.1 <= min(late_s) <= 0.1
    stdin.close()
    os.close(writer)
    assert status_of(cold)["host"]["leases"] == 0


def test_deadline_counts_from_the_start_of_the_process(cold, monkeypatch, capsys) -> None:
    """A deadline would be missed by the time that imports take."""
    code = "import time; time.sleep(0.2); from tierd.cli.main import _age_s; print(_age_s())"
    began_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    # The kernel reports a process's start in hundredths of a second.
    assert 0.19 <= float(done.stdout) <= time.monotonic() - began_s + 0.01

    monkeypatch.setattr(main_module, "_age_s", lambda: 60.0)
    words = ["warm", "-", "--socket", cold.socket, "--deadline", "60"]
    monkeypatch.setattr(sys, "argv", ["tierd", *words])
    assert main() == 3
    assert "the deadline passed" in capsys.readouterr().out


# --- wrong input -----------------------------------------------------------------------


def test_malformed_line(cold, ranks, tmp_path, capsys) -> None:
    """A typing mistake would be skipped silently, or stop a warm that should continue."""
    path = lines(tmp_path, prompt(0), "nothing", prompt(1))
    assert warm(cold, path, *ranks) == 2
    output = capsys.readouterr()
    assert f"{path}, line 2: not JSON" in output.err
    assert "10 of 10 blocks" in output.out, "the prompt before it was not warmed"
    (tmp_path / "hot").write_text("nothing")
    words = ["--hotset", tmp_path / "hot", "--skip-bad"]
    assert warm(cold, path, *ranks, *words) == 3
    output = capsys.readouterr()
    assert "20 of 20 blocks" in output.out
    assert "1 not read: malformed: " in output.out
    assert "hot, line 1: the file was cut" in output.out
    assert "1 not read: malformed: not JSON: Expecting value" in output.out
    assert f"({path}, line 2)" in output.out


def test_wrong_input(cold, ranks, tmp_path, capsys) -> None:
    """A wrong line, file, namespace or option would warm nothing, and say nothing."""
    digest = RANKS[0].digest.hex()
    known = ["--namespace", digest]
    warm(cold, lines(tmp_path, prompt(0)), *ranks)
    other = blocks.namespace()
    client = cold.client()
    store(client, other, hashes_of(prompt(0)))
    client.close()
    capsys.readouterr()
    hot = write_hot_set(tmp_path / "hot", [(hashes_of(prompt(0)), 1)])
    newer = tmp_path / "newer"
    newer.write_text(
        (tmp_path / "hot").read_text().replace('"tierd_hotset": 2', '"tierd_hotset": 3')
    )
    cut = tmp_path / "cut"
    cut.write_bytes((tmp_path / "hot").read_bytes()[:-30])
    for line, words, named in (
        (prompt(0), (), "line 1: pass --namespace: tierd knows more than one engine: "),
        (prompt(0), (), digest),  # It lists what it knows.
        ({"prompt": "text"}, known, "line 1: the prompt is text: pass --tokenizer DIR"),
        ([1.5] * 16, known, "token 0"),
        ({"tokens": [1], "namespace": {"model": "m"}}, (), "field 'block_bytes' is missing"),
        ({"tokens": [1], "namespace": 7}, (), "not 7"),
        ({"tokens": [1], "namespace": [digest, other.digest.hex()]}, (), "one engine"),
        ({"tokens": [1], "namespace": other.digest.hex()}, (), "opaque-test"),
        ({"tokens": [1], "lora": ["x", "/x"]}, known, "no namespace of the adapter x"),
        (prompt(0), ("--namespace", "no-such-file"), "neither a file nor a digest"),
        (prompt(0), ("--namespace", "0" * 32), digest),
        (prompt(0), ("--tokenizer", str(tmp_path / "none")), "no such directory"),
        (prompt(0), ("--engine", "ftp://x"), "want http://HOST:PORT"),
        (prompt(0), ("--hotset", str(newer)), "newer, line 1: the hot set has version 3"),
        (prompt(0), ("--hotset", str(cut)), "was cut"),
        (prompt(0), ("--hotset", hot[:-1]), "No such file"),
        (prompt(0), ("--hotset", "http://127.0.0.1:9/v1/hotset"), "Connection refused"),
        (prompt(0), ("--to", "nowhere"), "no tier is named 'nowhere'; tiers: disk, other"),
        (prompt(0), ("--from", "nowhere"), "no tier is named"),
        (prompt(0), ("--size", "1GB"), "--size needs --from"),
        (prompt(0), ("--rate", "0"), "--rate must be"),
        (prompt(0), ("--concurrency", "0"), "--concurrency must be"),
        (prompt(0), ("--pin", "soon"), "'soon' is not a time"),
        (prompt(0), ("--lora", "sql"), "pass NAME=PATH"),
    ):
        assert warm(cold, lines(tmp_path, line), *words) == 2, named
        assert named in capsys.readouterr().err
    assert warm(cold, tmp_path / "missing.jsonl") == 2
    assert "missing.jsonl: No such file" in capsys.readouterr().err
    assert main(["warm", "--socket", str(tmp_path / "no.sock")]) == 1
    assert "no answer from" in capsys.readouterr().err


def test_warm_waits_for_tiers_that_are_indexing(monkeypatch) -> None:
    """Right after a boot everything would be missing."""
    states = ["opening", "indexing", "ready"]

    class Daemon:
        def status(self):
            return {"storage": [{"state": "ready"}, {"state": states.pop(0)}]}

    monkeypatch.setattr(warm_module, "INDEX_POLL_S", 0.0)
    warm_module.wait_for_tiers(Daemon(), lambda text: None)  # type: ignore[arg-type]
    assert not states
