"""`tierd explain`: shows where a prompt's blocks are, and what to do about missing ones."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace

import pytest

from tests.support import blocks
from tests.support.daemon_process import DaemonProcess
from tierd.cli.main import main
from tierd.client import Client
from tierd.hashing import KeyStyle, Lora, RequestExtras, hash_blocks, root_hash
from tierd.types import Namespace
from tierd.wire.messages import EXPLAINED_MAX

ROOT = root_hash()
TOKENS = 16
SIZE = 64 << 10
RANKS = [
    blocks.namespace(
        SIZE, hash_scheme=KeyStyle.TAGGED.value, hash_root=ROOT, tp_rank=rank, tp_size=2
    )
    for rank in range(2)
]
OTHER = blocks.namespace(SIZE, model="other\x1b[2J", hash_scheme="sglang-sha256", hash_root=ROOT)


def prompt(number: int, count: int = 6) -> list[int]:
    return [number, *range(count * TOKENS - 1)]


def hashes_of(tokens: list[int], salt: str | None = None, lora: Lora | None = None) -> list[bytes]:
    extras = RequestExtras(salt=salt, lora=lora)
    keys = extras.block_keys(len(tokens) // TOKENS, TOKENS, KeyStyle.TAGGED)
    return hash_blocks(tokens, TOKENS, parent=ROOT, extra=keys)


def store(client: Client, namespace: Namespace, hashes: list[bytes]) -> bool:
    """Whether all of a prompt's blocks were stored: an arena that is full may refuse some."""
    parents = [ROOT, *hashes[:-1]]
    contents = [blocks.payload(namespace, h) for h in hashes]
    handle = client.register(namespace)
    return all(client.put(handle, list(zip(hashes, parents, contents, strict=True))))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """Prompt 0 is in memory and in the tier; of prompt 1 the second rank lacks the last blocks."""
    path = tmp_path_factory.mktemp("explain")
    storage = (
        f'[[storage]]\ntype = "file"\nname = "disk"\npath = "{path}/store"\n'
        'capacity = "16MiB"\nreserve_free = "0"\nwrite_policy = "write_through"\n'
    )
    with DaemonProcess(path, capacity="16MiB", storage=storage) as running:
        running.wait_tier("disk", "ready")
        client = running.client()
        for rank in RANKS:
            assert store(client, rank, hashes_of(prompt(0)))
            assert store(client, rank, hashes_of(prompt(2), "tenant"))
        assert store(client, RANKS[0], hashes_of(prompt(1)))
        assert store(client, RANKS[1], hashes_of(prompt(1))[:4])
        client.close()
        running.wait_backed_up()
        yield running


def explain(daemon: DaemonProcess, *words: str) -> int:
    return main(["explain", "--socket", daemon.socket, *words])


@pytest.mark.slow
def test_prompt_with_all_blocks(daemon, capsys) -> None:
    """What is there would be said to be missing, or the other way round."""
    assert explain(daemon, "--tokens", json.dumps(prompt(0))) == 0
    assert capsys.readouterr().out.splitlines() == [
        "blocks 0-5 (96 tokens): in host memory and tier disk",
        "A request would load 96 of 96 tokens now.",
    ]
    assert explain(daemon, "--all", "--tokens", json.dumps([*prompt(0), 5])) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "block 0 (16 tokens): in host memory and tier disk"
    assert len(lines) == 7
    assert lines[-1] == "A request would load 96 of 97 tokens now."


@pytest.mark.slow
def test_prompt_with_missing_blocks(daemon, capsys) -> None:
    """An operator would not see the first missing block, the reason, and what to do."""
    assert explain(daemon, "--tokens", json.dumps(prompt(1))) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "blocks 0-3 (64 tokens): in host memory and tier disk"
    assert lines[1] == (
        "blocks 4-5 (32 tokens): rank 0 in host memory and tier disk, rank 1 MISSING"
    )
    digest = RANKS[0].digest.hex()
    assert lines[2:4] == [
        f"    rank 1: another namespace, {digest} (test-model), has this hash in host memory and "
        "tier disk: its tp_rank is 0, not 1",
        "      -> a prefix is usable only if all ranks have it: find out why this rank stored less",
    ]
    assert lines[4].startswith("    rank 1: tierd started ")
    assert lines[5].startswith("      -> load the prefix with tierd warm")
    assert lines[6] == "    rank 1: no engine has stored it since tierd started"
    assert lines[-1] == "A request would load 64 of 96 tokens now."
    # Behind a hole nothing is of use.
    client = daemon.client()
    assert store(client, RANKS[0], hashes_of(prompt(3, 3)))
    handle, last = client.register(RANKS[1]), hashes_of(prompt(3, 3))[2]
    assert all(client.put(handle, [(last, b"p" * 32, blocks.payload(RANKS[1], last))]))
    client.close()
    assert explain(daemon, "--tokens", json.dumps(prompt(3, 3))) == 3
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "A request would load 0 of 48 tokens now.",
        "16 more tokens follow missing block 0: not usable.",
    ]
    # With a salt it is another prompt.
    assert explain(daemon, "--tokens", json.dumps(prompt(2))) == 3
    assert "would load 0 of 96" in capsys.readouterr().out
    assert explain(daemon, "--salt", "tenant", "--tokens", json.dumps(prompt(2))) == 0


@pytest.mark.slow
def test_an_adapter(daemon, capsys) -> None:
    """The base model's blocks would be shown for an adapter's prompt."""
    client = daemon.client()
    for rank in RANKS:
        own = replace(rank, weights=f"{rank.weights}+lora:law=2")
        assert store(client, own, hashes_of(prompt(4), lora=Lora("law", "/adapters/law")))
    client.close()
    words = ("--tokens", json.dumps(prompt(4)))
    assert explain(daemon, "--lora", "law=/adapters/law", *words) == 0
    assert explain(daemon, *words) == 3
    assert "would load 0 of 96" in capsys.readouterr().out


@pytest.mark.slow
def test_json_and_hashes(daemon, capsys) -> None:
    """A script could not see which block is missing where, or look up a hash from a log."""
    assert explain(daemon, "--json", "--tokens", json.dumps(prompt(1))) == 3
    output = json.loads(capsys.readouterr().out)
    assert (output["tokens"], output["tokens_there"], output["block_tokens"]) == (96, 64, 16)
    assert [block["there"] for block in output["blocks"]] == [True] * 4 + [False] * 2
    assert [n["digest"] for n in output["namespaces"]] == [rank.digest.hex() for rank in RANKS]
    first, second = output["blocks"][4]["ranks"]
    assert (first["host"], first["tiers"], first["why"]) == ("ready", ["disk"], [])
    assert second["why"][0]["in"] == ["host", "disk"]
    assert second["why"][0]["namespace"]["digest"] == RANKS[0].digest.hex()
    words = [block["hash"] for block in output["blocks"]]
    # One that takes more than one question.
    assert explain(daemon, "--json", "--tokens", json.dumps(prompt(0, EXPLAINED_MAX + 2))) == 3
    output = json.loads(capsys.readouterr().out)
    assert [block["there"] for block in output["blocks"]] == [True] * 6 + [False] * (
        EXPLAINED_MAX - 4
    )
    assert explain(daemon, "--namespace", RANKS[1].digest.hex(), words[3], words[4]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"block 0 ({words[3][:16]}...): in host memory and tier disk"
    assert lines[1] == f"block 1 ({words[4][:16]}...): MISSING"
    assert not any("would load" in line for line in lines)


@pytest.mark.slow
def test_files(daemon, tmp_path, capsys, monkeypatch) -> None:
    """A prompt from a log of requests would have to be taken apart by hand."""
    file = tmp_path / "prompt.json"
    for content in (
        prompt(0),
        {"tokens": prompt(2), "salt": "tenant"},
        {"model": "m", "prompt": prompt(2), "cache_salt": "tenant"},
        {"tokens": prompt(0), "namespace": [rank.digest.hex() for rank in RANKS]},
    ):
        file.write_text(json.dumps(content, indent=1))
        assert explain(daemon, str(file)) == 0, content
    line = json.dumps(prompt(0)).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(line)))
    assert explain(daemon, "-") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_wrong_input(daemon, tmp_path, capsys) -> None:
    """A wrong word would be explained as a prompt that was never stored."""
    file = tmp_path / "two.jsonl"
    file.write_text(f"{prompt(0)}\n{prompt(1)}\n")
    text, empty = tmp_path / "prompt.txt", tmp_path / "empty"
    text.write_text("Once upon a time")
    empty.write_text("\n")
    digest = RANKS[0].digest.hex()
    tokens = json.dumps(prompt(0))
    for words, named in (
        ((), "pass exactly one of FILE, block hashes"),
        (("--text", "x", "--tokens", "[1]"), "pass exactly one of FILE, block hashes"),
        (("--tokens", "[1,"), "--tokens: not JSON"),
        (("--tokens", '["a"]'), "token 0"),
        (("--tokens", "[1, 2]"), "the prompt has 2 tokens, less than one block"),
        ((str(file),), "has 2 prompts"),
        ((str(empty),), "is empty"),
        ((str(tmp_path / "none"),), "No such file"),
        (("a" * 64, "b" * 63), "block hashes of 64 hex digits"),
        (("--salt", "x", "a" * 64), "do not apply to block hashes"),
        (("--lora", "name", "--tokens", tokens), "NAME=PATH"),
        (("--lora", "a=/b", "--tokens", tokens), "no namespace of the adapter a"),
        ((str(text),), "--tokenizer DIR"),
        (("--text", "x", "--tokenizer", str(tmp_path / "none")), "no such directory"),
        (("--namespace", "0" * 32, "--tokens", tokens), digest),  # It lists what it knows.
        (("--namespace", "nowhere", "--tokens", tokens), "neither a file nor a digest"),
    ):
        assert explain(daemon, *words) == 2, words
        assert named in capsys.readouterr().err, words
    fields = tmp_path / "other.json"
    fields.write_text(json.dumps({**OTHER.to_fields(), "hash_root": ROOT.hex()}))
    assert explain(daemon, "--namespace", str(fields), "--tokens", tokens) == 2
    assert "is private to its engine" in capsys.readouterr().err
    # A block can be requested by its hash.
    assert explain(daemon, "--namespace", str(fields), hashes_of(prompt(0))[0].hex()) == 3
    out = capsys.readouterr().out
    assert out.startswith(f"no engine has used namespace {OTHER.digest.hex()}")
    assert "another namespace, " in out
    assert main(["explain", "--socket", str(tmp_path / "no.sock"), "a" * 64]) == 1
    assert "no answer from" in capsys.readouterr().err
    assert explain(daemon, "--text", "x", "--engine", "http://127.0.0.1:1") == 1
    assert "127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_tier_that_is_too_small(daemon, capsys) -> None:
    """A disk that is too small would look like one that was never written to."""
    client = daemon.client()
    for number in range(100, 160):
        store(client, RANKS[0], hashes_of(prompt(number)))
        if number % 4 == 0:
            daemon.wait_backed_up()  # More might not fit its write queue.
    digest = RANKS[0].digest.hex()
    for number in range(100, 160):
        words = [h.hex() for h in hashes_of(prompt(number))]
        explain(daemon, "--json", "--namespace", digest, words[-1])
        [block] = json.loads(capsys.readouterr().out)["blocks"]
        whats = [reason["what"] for reason in block["ranks"][0]["why"]]
        if whats == ["evicted", "tier_dropped"]:
            break
    assert whats == ["evicted", "tier_dropped"]
    ages_s = [r.get("ago_s", r.get("had_s")) for r in block["ranks"][0]["why"]]
    assert all(age_s < 60 for age_s in ages_s), "two clocks"
    explain(daemon, "--namespace", digest, words[-1])
    out = capsys.readouterr().out
    assert "tier disk had it" in out
    assert "new blocks needed the space" in out
    client.close()
