"""`tierd warm`: prompts' blocks are in host memory before an engine asks for them."""

from __future__ import annotations

import io
import json
import sys

import pytest

from tests import blocks
from tests.daemon_process import DaemonProcess
from tierd.cli import warm as warm_module
from tierd.cli.main import main
from tierd.client import Client
from tierd.hashing import KeyStyle, RequestExtras, hash_blocks, root_hash
from tierd.types import Namespace

ROOT = root_hash()
RANKS = [
    blocks.namespace(hash_scheme=KeyStyle.TAGGED.value, hash_root=ROOT, tp_rank=rank, tp_size=2)
    for rank in range(2)
]
TOKENS = 16


def prompt(number: int, count: int = 10) -> list[int]:
    return [number, *range(count * TOKENS - 1)]


def hashes_of(tokens: list[int], extras: RequestExtras | None = None) -> list[bytes]:
    keys = None
    if extras is not None:
        keys = extras.block_keys(len(tokens) // TOKENS, TOKENS, KeyStyle.TAGGED)
    return hash_blocks(tokens, TOKENS, parent=ROOT, extra=keys)


def store(client: Client, namespace: Namespace, hashes: list[bytes]) -> None:
    parents = [ROOT, *hashes[:-1]]
    contents = [blocks.payload(namespace, h) for h in hashes]
    handle = client.register(namespace)
    assert all(client.put(handle, list(zip(hashes, parents, contents, strict=True))))


def as_json(namespace: Namespace) -> dict[str, object]:
    return {**namespace.to_fields(), "hash_root": namespace.hash_root.hex()}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """A daemon that has been started again: blocks are in its tier, and none is in L2."""
    path = tmp_path_factory.mktemp("warm")
    storage = (
        f'[[storage]]\ntype = "file"\nname = "disk"\npath = "{path}/store"\n'
        'capacity = "64MiB"\nreserve_free = "0"\nwrite_policy = "write_through"\n'
    )
    with DaemonProcess(path, capacity="64MiB", storage=storage) as running:
        running.wait_tier("disk", "ready")
        client = running.client()
        for rank in RANKS:
            for number in range(3):
                store(client, rank, hashes_of(prompt(number)))
            store(client, rank, hashes_of(prompt(3), RequestExtras(salt="tenant")))
        client.close()
        running.wait_backed_up()
        running.stop()
        running.start()
        yield running


def resident(daemon: DaemonProcess) -> dict[str, int]:
    return {space["digest"]: space["blocks"] for space in daemon_status(daemon)["namespaces"]}


def daemon_status(daemon: DaemonProcess) -> dict:
    client = daemon.client()
    try:
        return client.status()
    finally:
        client.close()


def warm(daemon: DaemonProcess, *words: str) -> int:
    return main(["warm", "--socket", daemon.socket, *words])


@pytest.mark.slow
def test_warm(daemon, tmp_path, capsys, monkeypatch) -> None:
    """The first user would wait for the disk, or warm would not say what is still cold."""
    files = []
    for rank in RANKS:
        files.append(tmp_path / f"rank{rank.tp_rank}.json")
        files[-1].write_text(json.dumps(as_json(rank)))
    names = [word for file in files for word in ("--namespace", str(file))]
    lines = tmp_path / "warm.jsonl"
    lines.write_text(f"{prompt(0)}\n{json.dumps({'tokens': prompt(1)})}\n")
    assert warm(daemon, str(lines), *names) == 0
    assert "2 prompts: 20 of 20 blocks" in capsys.readouterr().out
    assert resident(daemon) == {rank.digest.hex(): 20 for rank in RANKS}

    # Of what is in no tier, and of what another tenant's salt hides, nothing comes.
    monkeypatch.setattr(
        sys,
        "stdin",
        io.TextIOWrapper(io.BytesIO(f"{prompt(0)}\n{prompt(9)}\n{prompt(3)}\n".encode())),
    )
    assert warm(daemon, "--json", *names) == 3
    told = json.loads(capsys.readouterr().out)
    assert told == {"prompts": 3, "blocks": 30, "had": 10, "missing": 20}
    assert resident(daemon) == {rank.digest.hex(): 20 for rank in RANKS}

    # A line has its own namespaces and salt; a digest is enough for what the daemon knows.
    lines.write_text(
        json.dumps(
            {"tokens": prompt(3), "salt": "tenant", "namespace": [r.digest.hex() for r in RANKS]}
        )
        + "\n"
        + json.dumps({"tokens": prompt(2), "namespace": as_json(RANKS[1])})
    )
    assert warm(daemon, str(lines)) == 0
    assert resident(daemon) == {RANKS[0].digest.hex(): 30, RANKS[1].digest.hex(): 40}
    assert daemon_status(daemon)["host"]["leases"] == 0


@pytest.mark.slow
def test_wrong_input(daemon, tmp_path, capsys) -> None:
    """A wrong line or namespace would warm nothing, and say nothing."""
    lines = tmp_path / "warm.jsonl"
    digest = RANKS[0].digest.hex()
    client = daemon.client()
    store(client, RANKS[0], hashes_of(prompt(0)))
    other = blocks.namespace()
    store(client, other, hashes_of(prompt(0)))
    client.close()
    for line, words, named in (
        (prompt(0), (), "line 2: no namespace"),
        ("nothing", ("--namespace", digest), "line 2: not JSON"),
        ({"prompt": []}, ("--namespace", digest), "line 2: want a list of token ids"),
        ({"tokens": [], "top_p": 1}, ("--namespace", digest), "unknown field 'top_p'"),
        ([1.5] * 16, ("--namespace", digest), "token 0"),
        ({"tokens": [], "lora": "x"}, ("--namespace", digest), "lora must be"),
        ({"tokens": [1], "namespace": {"model": "m"}}, (), "field 'block_bytes' is missing"),
        ({"tokens": [1], "namespace": 7}, (), "not 7"),
        ({"tokens": [1], "namespace": [digest, other.digest.hex()]}, (), "one engine"),
        ({"tokens": [1], "namespace": other.digest.hex()}, (), "opaque-test"),
        (prompt(0), ("--namespace", "no-such-file"), "neither a file nor a digest"),
        (prompt(0), ("--namespace", "0" * 32), digest),  # It lists what it knows.
    ):
        text = line if isinstance(line, str) else json.dumps(line)
        lines.write_text(f'{{"tokens": [], "namespace": "{digest}"}}\n{text}\n')
        assert warm(daemon, str(lines), *words) == 2
        assert named in capsys.readouterr().err
    assert warm(daemon, str(tmp_path / "missing.jsonl")) == 2


@pytest.mark.slow
def test_deadline_and_absence(daemon, tmp_path, capsys) -> None:
    """A unit that warms at boot would never end, or call a cold daemon warm."""
    lines = tmp_path / "warm.jsonl"
    lines.write_text(json.dumps({"tokens": prompt(0), "namespace": as_json(RANKS[0])}) + "\n")
    assert warm(daemon, str(lines), "--deadline", "0") == 3
    assert "the deadline has passed" in capsys.readouterr().err
    assert main(["warm", str(lines), "--socket", str(tmp_path / "no.sock")]) == 1
    assert "no answer from" in capsys.readouterr().err


def test_it_waits_for_tiers_that_read_their_index(monkeypatch) -> None:
    """Right after a boot everything would be missing."""
    states = ["opening", "indexing", "ready"]

    class Daemon:
        def __init__(self, path, name): ...

        def __enter__(self):
            return self

        def __exit__(self, *_): ...

        def status(self):
            return {"storage": [{"state": "ready"}, {"state": states.pop(0)}]}

    monkeypatch.setattr(warm_module, "Operator", Daemon)
    monkeypatch.setattr(warm_module, "INDEX_POLL_S", 0.0)
    client = Client("/nowhere", map_segments=False)
    warm_module._Warming(client, "/nowhere", None).wait_for_tiers()
    assert not states
