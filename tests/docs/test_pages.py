"""Runs every command of the pages in order, as a newcomer would.

tierd is started by the README's command. Addresses, paths, sizes and digests are replaced. A
command that needs a booted systemd, a package index, a GPU or a model is listed in ELSEWHERE, with
the test that covers it; a command that is neither run nor listed fails a test.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.support.page_texts import PAGES, codes, prose
from tests.support.servers.redis import free_port
from tests.support.stand_in import SEED, StandIn
from tests.support.traffic import wait_until
from tierd.cli.bench import tier_speed
from tierd.cli.main import COMMANDS, main, parser_of
from tierd.client import Client
from tierd.hashing import hash_blocks

TEXT = "You are a helpful assistant. " * 20

ELSEWHERE: Final = {
    "make demo": "a model; .ci/run",
    "make test": "this",
    "pip install": "a package index; the wheel is installed by tests/support/systemd_machine.py",
    "vllm serve": "a model; tests/e2e/test_vllm_serve.py",
    "/opt/tierd/bin/tierd install-units": "systemd; tests/e2e/test_systemd.py",
    "python3 -m venv /opt/tierd": "systemd; tests/support/systemd_machine.py",
    "systemctl start tierd": "systemd; tests/e2e/test_systemd.py",
    "systemctl stop tierd": "systemd; tests/e2e/test_systemd.py",
}
"""Commands that are not run here, and what covers them."""

STATUSES: Final = {
    "tierd doctor": {0, 1, 3},
    "tierd explain": {0, 3},
    "tierd warm --hotset": {0, 3},
    "tierd warm --from": {0, 3},
    "tierd bench --engine": {0, 2},
    "tierd fsck": {2},
}
"""Exit statuses that a command may have here other than 0: doctor and explain have findings, the
stand-in engine may be as fast with long prompts, and tierd is not stopped."""

SAID: Final = {
    "tierd fsck": "stop tierd first",
    "tierd fsck --repair /var/lib/tierd/nvme": "stop tierd first",
}
"""What the commands that fail print."""


def commands_of(page: str) -> list[str]:
    """The commands of a page, one per line, without comments and the files that they write."""
    found = []
    for block in (code.text for code in codes(page) if code.language == "bash"):
        joined = re.sub(r"\\\n\s*", "", block)
        joined = re.sub(r"^cat > \S+ <<'TOML'\n.*?^TOML\n", "", joined, flags=re.M | re.S)
        found += [re.split(r"  # |    #", line)[0].strip() for line in joined.splitlines()]
    return [line for line in found if line]


def elsewhere(command: str) -> bool:
    return command.startswith(tuple(ELSEWHERE))


@dataclass
class Node:
    """The README's daemon, and replacements for the pages' addresses."""

    directory: Path
    socket: str
    listen: str
    engine: StandIn

    def client(self, name: str) -> Client:
        return Client(self.socket, name=name, call_timeout_ms=5000)

    def status(self) -> dict:
        client = self.client("test")
        try:
            return client.status()
        finally:
            client.close()

    def here(self, command: str) -> str:
        """A command of a page, adapted to this node."""
        digest = self.engine.space.digest.hex()
        for there, here in (
            ("http://127.0.0.1:8000", self.engine.url),
            ("http://localhost:8000", self.engine.url),
            ("http://node7:9464", f"http://{self.listen}"),
            ("--user vllm", "--user root"),
            ("32f2e62d", digest[:8]),
            ("32f2", digest[:4]),
            ("You are a helpful...", TEXT),
            ('"[1, 2, 3, ...]"', f'"{[ord(letter) for letter in TEXT]}"'),
            ("5f2c...", hash_blocks([*map(ord, TEXT)], 16, parent=SEED)[0].hex()),
            ("/var/lib/tierd/nvme", str(self.directory / "tier")),
            ("trace.jsonl.gz", str(self.directory / "trace.jsonl")),
        ):
            command = command.replace(there, here)
        return command


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """The README's commands, run by a shell, with its [admin] table."""
    directory = tmp_path_factory.mktemp("node")
    listen = f"127.0.0.1:{free_port()}"
    [start] = [code.text for code in codes("README.md") if "tierd serve --config" in code.text]
    [admin] = [code.text for code in codes("docs/metrics.md") if code.text.startswith("[admin]")]
    lines = [line for line in start.splitlines() if not line.startswith("pip install")]
    lines.insert(-2, admin.replace("127.0.0.1:9464", listen))
    script = "\n".join(["set -e", *lines])
    for there, here in (
        ("/run/tierd", str(directory)),
        ("/var/lib/tierd", str(directory / "tier")),
        ('"64GiB"', '"64MiB"'),
        ('"800GiB"', '"64MiB"\nreserve_free = "0"\nwrite_policy = "write_through"'),
    ):
        assert there in script
        script = script.replace(there, here)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with (directory / "log").open("wb") as log:
        shell = subprocess.Popen(
            ["bash", "-c", script],
            cwd=directory,
            env={**os.environ, "PATH": path},
            stderr=log,
            start_new_session=True,
        )
    engine = StandIn(None)  # type: ignore[arg-type]  # the machine is set below
    found = Node(directory, str(directory / "tierd.sock"), listen, engine)
    engine._machine = found  # type: ignore[assignment]  # only its client is used

    def serves() -> bool:
        assert shell.poll() is None, (directory / "log").read_text()
        try:
            return bool(found.status()["storage"][0]["state"] == "ready")
        except Exception:
            return False

    try:
        wait_until(serves, 60, "the README's tierd does not serve")
        with engine:
            engine.attach()
            engine.ask(TEXT)
            wait_until(lambda: not found.status()["host"]["backlog_blocks"], 20, "not backed up")
            tokens = [ord(letter) for letter in TEXT]
            (directory / "prompts.jsonl").write_text(json.dumps(tokens) + "\n")
            rows = [
                {"timestamp": at, "input_length": 1024, "output_length": 4, "hash_ids": [1, 2 + at]}
                for at in range(20)
            ]
            trace = "\n".join(map(json.dumps, rows))
            (directory / "trace.jsonl").write_text(trace + "\n")
            yield found
            engine.detach()
    finally:
        os.killpg(shell.pid, signal.SIGTERM)
        shell.wait(30)


def tried() -> list[str]:
    found = [command for page in PAGES for command in commands_of(page) if not elsewhere(command)]
    # Commands that write files for others come first; commands that delete everything come last.
    first, last = ("tierd hotset export",), ("tierd flush", "tierd fsck")
    return sorted(
        dict.fromkeys(found), key=lambda line: line.startswith(last) - line.startswith(first)
    )


def run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit status and output of a line; runs in this process if it needs no shell."""
    if "|" in line:
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout, done.stderr
    try:
        status = main(shlex.split(line)[1:])
    except SystemExit as error:
        status = int(error.code or 0)
    return status, *capsys.readouterr()


@pytest.mark.slow
@pytest.mark.long
def test_every_command_of_the_pages(
    node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that a page shows would be refused."""
    monkeypatch.chdir(node.directory)
    monkeypatch.setenv("TIERD_SOCKET", node.socket)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    # Little data: the measured values do not matter here.
    monkeypatch.setattr(tier_speed, "ROUNDS", 1)
    monkeypatch.setattr(tier_speed, "ROUND_BYTES", 4 << 20)
    monkeypatch.setattr(tier_speed, "ALONE", 1)
    wrong = []
    for command in tried():
        if command == "tierd serve --config tierd.toml":
            continue  # The fixture has run it.
        line = node.here(command)
        if re.match(r"tierd (config (check|show)|doctor|bench|fsck$)", line):
            line += " --config tierd.toml"
        status, out, err = run(line, capsys)
        expected = next((s for words, s in STATUSES.items() if command.startswith(words)), {0})
        said = SAID.get(command, "")
        if status not in expected or "Traceback" in err or said not in err:
            wrong.append(f"{line}: {status}\n{out}{err}")
    assert not wrong, "\n".join(wrong)


def test_every_command_is_run_or_listed() -> None:
    """A page could gain a command that no test runs."""
    for page in PAGES:
        for command in commands_of(page):
            words = shlex.split(command)
            known = words[0] == "tierd" and words[1] in COMMANDS
            assert known or elsewhere(command) or command.startswith("echo "), command
    found = [command for page in PAGES for command in commands_of(page)]
    for named in ELSEWHERE:
        assert any(command.startswith(named) for command in found), f"{named} is on no page"


def spans() -> list[str]:
    """Commands of tierd within a sentence of a page."""
    found = []
    for page in PAGES:
        for part in re.split(r"\n\n|\n[*|]", prose(page)):
            found += [" ".join(span.split()) for span in part.split("`")[1::2]]
    return sorted({span for span in found if re.match(r"tierd [a-z]", span)})


@pytest.mark.parametrize("span", spans())
def test_commands_within_sentences_exist(span: str) -> None:
    """A command or an option would have been renamed."""
    words = span.split()[1:]
    assert words[0] in COMMANDS
    help_of = helps(words[0])
    for word in words[1:]:
        if word.startswith("--"):
            assert re.search(rf"{word}\b", help_of), word


def helps(command: str) -> str:
    """The help of a command and of its subcommands."""
    parser = parser_of([command])
    found = [parser]
    text = ""
    while found:
        one = found.pop()
        text += one.format_help()
        for action in one._actions:
            choices = action.choices
            if isinstance(choices, dict):
                found += [each for each in choices.values() if hasattr(each, "format_help")]
    return text
