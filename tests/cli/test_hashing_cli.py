"""`tierd hash` and the command line around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tierd import __version__
from tierd.cli.main import COMMANDS, main
from tierd.hashing import KeyStyle, Lora, RequestExtras, hash_blocks, root_hash

PROMPT = list(range(1, 41))


def write(path: Path, *lines: object) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def start(code: str) -> subprocess.Popen:
    """A Python that runs `code`, talked to by pipes, with the buffering that users get."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def expected(
    block_tokens: int = 16,
    seed: str | None = None,
    extras: RequestExtras = RequestExtras(),  # noqa: B008 (immutable)
    style: KeyStyle = KeyStyle.TAGGED,
) -> list[str]:
    keys = extras.block_keys(len(PROMPT) // block_tokens, block_tokens, style)
    hashes = hash_blocks(PROMPT, block_tokens, parent=root_hash(seed), extra=keys)
    return [digest.hex() for digest in hashes]


LORA = Lora("sql", "/adapters/sql")


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ([], expected()),
        (["--seed", "0"], expected(seed="0")),
        (["--seed", ""], expected(seed="")),
        (["--block-tokens", "8"], expected(8)),
        (["--salt", "a"], expected(extras=RequestExtras(salt="a"))),
        (["--lora", *LORA], expected(extras=RequestExtras(lora=LORA))),
        (
            ["--salt", "a", "--lora", *LORA, "--untagged"],
            expected(extras=RequestExtras(salt="a", lora=LORA), style=KeyStyle.UNTAGGED),
        ),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("-") else None,
)
def test_options(tmp_path, capsys, options, want):
    """An option would be taken and change nothing, or the wrong thing."""
    assert main(["hash", *options, write(tmp_path / "in", PROMPT)]) == 0
    assert json.loads(capsys.readouterr().out) == want


def test_each_line_gets_one_answer(tmp_path, capsys):
    """Answers would not match prompts where one is shorter than a block."""
    assert main(["hash", write(tmp_path / "in", PROMPT, [], PROMPT[:15], PROMPT[:16])]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [expected(), [], [], expected()[:1]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1, 2", "not JSON: Expecting ',' delimiter"),
        ("", "not JSON: Expecting value"),
        ("[" * 100_000, "not JSON: "),
        ("\udcff", "not JSON: "),
        ('{"a": 1}', "a line must hold a list of token ids, not {'a': 1}"),
        ("7", "a line must hold a list of token ids, not 7"),
        ("[1, true]", "token 1 must be int, got bool: True"),
        ("[1.0]", "token 0 must be int, got float: 1.0"),
        ("[NaN]", "token 0 must be int, got float: nan"),
        ("[1, -2]", "token 1 is out of range 0..4294967295: -2"),
        ("[[1]]", "token 0 must be int, got list: [1]"),
    ],
    ids=lambda value: value[:12],
)
def test_a_bad_line_is_named(tmp_path, capsys, line, message):
    """An operator would search a file of a million prompts for the bad one."""
    source = tmp_path / "in"
    source.write_text(f"[1]\n{line}\n[1]\n", errors="surrogateescape")
    assert main(["hash", str(source)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "[]\n"
    assert captured.err.startswith(f"tierd hash: {source}, line 2: {message}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hash", "/nonexistent"], "tierd: /nonexistent: No such file or directory\n"),
        (["hash", "/"], "tierd: /: Is a directory\n"),
        (["hash", "--block-tokens", "0"], "tierd: --block-tokens must be at least 1, got 0\n"),
        (["hash", "--salt", ""], "tierd: salt is empty"),
        (["hash", "--salt", "\udcff"], "tierd: salt has no UTF-8 form: '\\udcff'"),
    ],
)
def test_bad_options_are_named(capsys, words, message):
    """A mistyped command would end in a traceback, or hash something else."""
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(message)


def test_help_and_version(capsys):
    """A newcomer would not find the commands."""
    for words in (["--help"], ["--version"], ["hash", "--help"]):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 0
    out = capsys.readouterr().out
    assert f"tierd {__version__}\n" in out
    for name, summary in COMMANDS.items():
        assert name in out
        assert summary in out
    assert "--untagged" in out


def test_usage_errors(capsys):
    """A mistyped command would be silently ignored."""
    for words in ([], ["hsah"], ["hash", "--sede", "0"]):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2
    assert "invalid choice: 'hsah'" in capsys.readouterr().err


BARE = """
import sys
for name in ("uvloop", "msgspec", "xxhash"):
    sys.modules[name] = None
from tierd.cli.main import main
sys.exit(main({words!r}))
"""


@pytest.mark.slow
def test_answers_are_streamed_without_the_daemons_packages():
    """In an engine's environment, or fed by another program, `tierd hash` would not work."""
    with start(BARE.format(words=["hash", "--seed", "0"])) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(2):
            process.stdin.write(f"{PROMPT}\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline()) == expected(seed="0")
        out, err = process.communicate()
    assert (out, err, process.returncode) == ("", "", 0)


@pytest.mark.slow
def test_closed_output_ends_the_command_quietly():
    """`tierd hash FILE | head` would end in a traceback."""
    with start(BARE.format(words=["hash"])) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.write(f"{PROMPT}\n")
        process.stdin.close()
        assert process.stderr.read() == ""
        assert process.wait() == 1


def test_a_command_whose_packages_are_missing_names_them(monkeypatch, capsys):
    """`tierd serve` in an engine's environment would end in a traceback."""

    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named 'uvloop', asked by {name}", name="uvloop")

    monkeypatch.setattr("importlib.import_module", missing)
    assert main(["serve"]) == 2
    assert capsys.readouterr().err == "tierd serve: needs uvloop: pip install 'tierd[daemon]'\n"
