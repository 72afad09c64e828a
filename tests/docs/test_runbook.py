"""Runs the runbook on a booted systemd, in the situations that it is for.

A shell runs each indented line, which must exit and print as the page says. Addresses, digests and
the package that pip would fetch are replaced.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import blocks
from tests.support.servers.redis import RedisServer
from tests.support.stand_in import OLD, SEED, StandIn
from tests.support.systemd_machine import SITE, Machine
from tests.support.traffic import wait_until
from tierd.client import Client
from tierd.hashing import KeyStyle, root_hash

pytestmark = [pytest.mark.slow, pytest.mark.long]

PAGE = Path(__file__).parents[2] / "docs" / "runbook.md"
NEW = blocks.namespace(64 << 10, hash_scheme=KeyStyle.TAGGED.value, hash_root=SEED, model="next")
STORE = "/var/lib/tierd/kv"

SHARED = "a system prompt that everybody has. " * 10
OFTEN = "another document, asked about often. " * 10
UNSEEN = "one that nobody has asked for yet. " * 10
MISSED = "a request that should have been a hit. " * 10

# Stands for `pip install --upgrade`: afterwards another version is installed.
PIP = f"""#!/bin/sh -e
[ "$*" = "install --upgrade tierd[daemon]" ]
sed -i 's/^__version__ = .*/__version__ = "99.0"/' {SITE}/tierd/__init__.py
"""


class Line(NamedTuple):
    """A command, its exit status, and a text that its output contains."""

    command: str
    status: int
    says: str | None


def runbook() -> dict[str, list[list[Line]]]:
    """The blocks of lines below each title that has any."""
    found = {}
    for part in re.split(r"^#+ ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title = part.partition("\n")[0]
        chunks = re.findall(r"(?:^    .+\n)+", part, re.MULTILINE)
        if chunks:
            found[title] = [[_line(row) for row in chunk.splitlines()] for chunk in chunks]
    return found


def _line(row: str) -> Line:
    command, _, told = row.strip().partition("  # ")
    says, status = re.search(r'says "(.+?)"', told), re.search(r"exit status (\d)", told)
    return Line(command.strip(), int(status[1]) if status else 0, says[1] if says else None)


@dataclass
class Node:
    """A machine with tierd installed as the page says, an engine, and the page's variables."""

    machine: Machine
    engine: StandIn
    redis: RedisServer
    names: dict[str, str] = field(default_factory=dict)

    def follow(self, lines: list[Line]) -> None:
        """Run lines, one after the other."""
        for command, status, says in lines:
            if command.startswith("export "):
                assert set(re.findall(r"(\w+)=", command)) <= self.names.keys(), command
                continue
            names = "".join(f"{name}={value} " for name, value in self.names.items())
            done = self.machine.run("sh", "-c", f"export {names}; {command}", check=False)
            told = done.stdout + done.stderr
            assert done.returncode == status, f"{command}: {done.returncode}\n{told}"
            assert says is None or says in told, f"{command} does not say {says!r}:\n{told}"
            if command == "systemctl restart tierd":
                self.wait_ready()

    def status(self) -> dict:
        """The daemon's status."""
        # With a longer timeout than an engine's.
        client = Client(self.machine.socket, name="status", call_timeout_ms=20_000)
        try:
            status: dict = client.status()
        finally:
            client.close()
        return status

    def tier(self, name: str) -> dict:
        """A tier's status."""
        [tier] = [tier for tier in self.status()["storage"] if tier["name"] == name]
        found: dict = tier
        return found

    def ask_until(self, condition: Callable[[], object]) -> None:
        """Send new prompts until `condition` holds."""
        asked = itertools.count()

        def met() -> object:
            self.engine.ask(f"{next(asked)} times something new. " * 10)
            return condition()

        try:
            wait_until(met, 20, "the condition does not hold")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.status()['storage']}") from None

    def wait_written(self) -> None:
        """Wait until the tiers have every block that they are to get."""
        wait_until(lambda: not self.status()["host"]["backlog_blocks"], 20, "backups do not finish")

    def restart(self) -> None:
        """Restart tierd with empty host memory."""
        self.machine.run("systemctl", "stop", "tierd")
        self.machine.run("systemctl", "start", "tierd")
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until all tiers are open and the engine is attached again."""
        wait_until(
            lambda: {tier["state"] for tier in self.status()["storage"]} == {"ready"},
            20,
            "a tier is not opened",
        )
        self.engine.attach()


def configuration(machine: Machine, redis: RedisServer) -> str:
    """The file that install-units writes, with this node's users and sizes and a second tier."""
    text = Path(f"{machine.root}/etc/tierd/tierd.toml").read_text()
    uid = machine.run("id", "--user", "tierd").stdout.strip()
    for default, own in (
        ("allow_uids = []", f"allow_uids = [0, {uid}]"),
        ('"8GiB"', '"64MiB"'),
        ('"64GiB"', '"32MiB"'),
    ):
        assert default in text
        text = text.replace(default, own)
    return f"""{text}
write_policy = "write_through"
[[storage]]
type = "redis"
url = "{redis.url}"
write_policy = "write_through"
probe_ms = 100
[prefetch]
min_tokens = 0
break_even = false
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with (
        RedisServer(tmp_path_factory.mktemp("redis")) as redis,
        Machine(tmp_path_factory.mktemp("machine")) as machine,
        StandIn(machine) as engine,
    ):
        told = machine.run("/opt/tierd/bin/tierd", "install-units").stdout
        [users] = [line for line in told.splitlines() if "systemd-sysusers" in line]
        machine.run("sh", "-ec", users)
        machine.write("/etc/tierd/tierd.toml", configuration(machine, redis))
        machine.write("/opt/tierd/bin/pip", PIP, 0o755)
        prompts = (SHARED, OFTEN, UNSEEN)
        rows = [json.dumps({"model": "base", "prompt": prompt}) for prompt in prompts]
        machine.write("/etc/tierd/warm.jsonl", "\n".join(rows))
        machine.write("/etc/tierd/request.json", json.dumps({"model": "base", "prompt": MISSED}))
        machine.run("systemctl", "start", "tierd.socket", "tierd.service")
        node = Node(machine, engine, redis)
        node.names = {"PATH": "/opt/tierd/bin:$PATH", "ENGINE": engine.url}
        node.names["PEER"] = "http://127.0.0.1:9464"
        node.wait_ready()
        yield node
        engine.detach()


def cold_start(node: Node) -> None:
    """Two prompts were sent before host memory was lost."""
    for prompt in (SHARED, OFTEN):
        node.engine.ask(prompt)
    node.wait_written()
    node.restart()


def hits_are_few(node: Node) -> None:
    """An engine runs with another PYTHONHASHSEED than the one in its namespace."""
    node.engine.seed = root_hash("42")
    node.engine.ask(MISSED)


def same_seed(node: Node) -> None:
    node.engine.seed = SEED


def tier_is_down(node: Node) -> None:
    """Redis has stopped, and blocks are waiting to be written."""
    node.redis.kill()
    node.ask_until(lambda: node.tier("redis")["state"] == "failing")
    wait_until(
        lambda: "failing" in node.machine.show("tierd", "StatusText")[0], 20, "no failing tier"
    )


def tier_is_back(node: Node) -> None:
    node.redis.start()
    wait_until(lambda: node.tier("redis")["state"] == "ready", 20, "the tier does not come back")


def disk_is_full(node: Node) -> None:
    """Another program has filled the disk, which is a small one here."""
    # Pending blocks would otherwise be written before the disk is full.
    node.machine.run("systemctl", "disable", "tierd-warm")
    node.machine.run("systemctl", "stop", "tierd")
    small = "size=64m,mode=700,uid=tierd"
    node.machine.run("mount", "-t", "tmpfs", "-o", small, "tmpfs", STORE)
    node.machine.run("systemctl", "start", "tierd")
    node.wait_ready()
    node.machine.run("sh", "-c", f"head --bytes=1G /dev/zero >{STORE}/others", check=False)
    node.ask_until(lambda: node.tier("file")["counters"]["refused_no_space_total"])


def disk_has_room(node: Node) -> None:
    node.machine.run("rm", f"{STORE}/others")


def another_model(node: Node) -> None:
    """An engine of another model runs."""
    node.engine.space = NEW
    node.engine.attach()
    node.names |= {"OLD": OLD.digest.hex(), "NEW": NEW.digest.hex()}


def nothing(node: Node) -> None:
    """The situation of the previous block is unchanged."""


SCENES: dict[str, list[Callable[[Node], None]]] = {
    "Cold start": [cold_start],
    "Few hits": [hits_are_few, same_seed],
    "A tier is down": [tier_is_down, tier_is_back],
    "Another model": [another_model, nothing],
    "A disk is full": [disk_is_full, disk_has_room],
    "Upgrade": [nothing],
}
"""Sets up each situation, and does what the operator has done before each further block."""


def test_every_section_has_a_situation(node: Node) -> None:
    """The runbook could describe a situation that no test covers."""
    page = runbook()
    [head] = page.pop("Runbook")
    assert head[0].command == f"export PATH={node.names['PATH']}"
    assert [line.command.split("=")[0] for line in head] == [f"export {n}" for n in node.names]
    assert {title: len(blocks) for title, blocks in page.items()} == {
        title: len(scenes) for title, scenes in SCENES.items()
    }


@pytest.mark.parametrize("title", SCENES)
def test_the_runbook(node: Node, title: str) -> None:
    """An on-call engineer would type lines that fail, or wait for output that never comes."""
    for make, lines in zip(SCENES[title], runbook()[title], strict=True):
        make(node)
        node.follow(lines)
