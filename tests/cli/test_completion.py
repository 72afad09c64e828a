"""`tierd completion`: the words that shells offer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tierd.cli.main import COMMANDS, main, parser_of


@pytest.fixture
def script(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> str:
    """The script of a shell."""
    assert main(["completion", request.param]) == 0
    return capsys.readouterr().out


def complete(script: str, line: str, directory: Path) -> set[str]:
    """What bash offers for the last word of a line."""
    words = line.split(" ")
    ask = (
        f"{script}\nCOMP_WORDS=({' '.join(words[:-1])} {words[-1]!r}); COMP_CWORD={len(words) - 1}"
    )
    done = subprocess.run(
        ["bash", "-c", f'{ask}; _tierd; printf "%s\\n" "${{COMPREPLY[@]}}"'],
        capture_output=True,
        text=True,
        cwd=directory,
        check=True,
    )
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_bash_offers_commands_options_choices_and_files(script: str, tmp_path: Path) -> None:
    """A shell would offer missing commands, or omit existing ones."""
    (tmp_path / "prompts.jsonl").touch()
    assert complete(script, "tierd st", tmp_path) == {"status"}
    assert set(COMMANDS) < complete(script, "tierd ", tmp_path)
    assert complete(script, "tierd install-units --d", tmp_path) == {"--dry-run"}
    assert complete(script, "tierd replay --l3-policy s", tmp_path) == {"s3fifo"}
    assert complete(script, "tierd completion f", tmp_path) == {"fish"}
    assert complete(script, "tierd hash pro", tmp_path) == {"prompts.jsonl"}
    assert complete(script, "tierd serve --config ", tmp_path) == {"prompts.jsonl"}
    # Where an option's value has the name of a command, the command is still the first.
    assert complete(script, "tierd serve --config status --c", tmp_path) == {"--config"}


@pytest.mark.parametrize(
    ("script", "shell"), [("zsh", "zsh"), ("fish", "fish")], indirect=["script"]
)
def test_other_shells_parse_their_scripts(script: str, shell: str) -> None:
    """Starting a shell prints errors."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    """`tierd COMMAND --help` would not say what the command does or returns."""
    below = parser_of([name])._subparsers
    assert below is not None
    [commands] = below._group_actions
    assert isinstance(commands.choices, dict)
    parser = commands.choices[name]
    assert len(parser.description or "") > 40
    for action in parser._actions:
        assert action.help or not action.option_strings, f"{action.option_strings} says nothing"
