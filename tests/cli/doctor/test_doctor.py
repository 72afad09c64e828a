"""`tierd doctor` finds faults, reports each once, and never hangs."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path

import pytest

import tierd.client.session
from tests.support.daemon_process import DaemonProcess
from tests.support.doctor_scene import (
    Examine,
    codes,
    namespace,
    register,
)
from tests.support.fake_node import FakeDaemon
from tierd import __version__
from tierd.cli.doctor import command as doctor
from tierd.cli.doctor.checks import node
from tierd.cli.doctor.checks.finding import TEXT_CHARS_MAX, Finding, Level, gather
from tierd.cli.main import main
from tierd.client import Client
from tierd.hashing import root_hash

CAPACITY = 64 << 20


@pytest.fixture
def status(daemon: DaemonProcess) -> dict:
    """What the real daemon says, to change."""
    client = daemon.client()
    try:
        return client.status()
    finally:
        client.close()


# --- the command ----------------------------------------------------------------------


def test_healthy_node_has_no_findings_and_nothing_is_left_behind(
    daemon: DaemonProcess, examine: Examine, tmp_path: Path
) -> None:
    """The command would cry wolf on a healthy node, or leave files in a tier's directory."""
    store = tmp_path / "store"
    store.mkdir()
    tiers = f'[[storage]]\ntype = "file"\npath = "{store}"\ncapacity = "1MiB"\nreserve_free = 0\n'
    found = examine(socket=daemon.socket, tiers=tiers)
    wrong = {c: f for c, f in found.items() if c != "rc" and f["level"] in ("warning", "fault")}
    assert wrong.keys() <= {"slow_clock", "free_memory", "answers"}, "of this machine, at most"
    assert {"config", "answers", "capacity", "tier_speed"} <= found.keys()
    assert __version__ in found["answers"]["what"]
    assert os.listdir(store) == []


def test_json_has_its_documented_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """A script that reads the findings would break with the next release."""
    rc = main(["doctor", "--json", "--config", "/nowhere.toml", "--socket", "/nowhere.sock"])
    output = json.loads(capsys.readouterr().out)
    assert rc == 1
    assert output.keys() == {"schema", "counts", "findings"}
    assert output["schema"] == 1
    faults = [each["code"] for each in output["findings"] if each["level"] == "fault"]
    assert faults == ["no_socket", "config"], "no daemon runs, and none would start"
    assert output["counts"].keys() == {"ok", "note", "warning", "fault"}
    assert sum(output["counts"].values()) == len(output["findings"])
    levels = [each["level"] for each in output["findings"]]
    assert levels == sorted(levels, key=["fault", "warning", "note", "ok"].index), "worst first"
    for each in output["findings"]:
        assert each.keys() == {"level", "subject", "code", "what", "why", "do"}
        assert all(isinstance(value, str) for value in each.values())
        assert each["level"] == "ok" or (each["why"] and each["do"]), "what to do is not said"


def test_text_says_what_why_and_what_to_do(
    tmp_path: Path, status: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    """An operator would have to know what a code means; a name could control the terminal."""
    body = {**status, "version": "\x1b[31m9.9"}
    with FakeDaemon(tmp_path / "fake.sock", body):
        (tmp_path / "tierd.toml").write_text("capacity")
        words = ["--config", str(tmp_path / "tierd.toml"), "--socket", str(tmp_path / "fake.sock")]
        assert main(["doctor", *words]) == 1
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].startswith(f"fault   configuration: {tmp_path / 'tierd.toml'}: ")
    assert lines[1].startswith("        why:  ")
    assert lines[2].startswith("        do:   ")
    assert lines[-1].startswith("1 fault, ")
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--user", "no such user"], "no such user"),
        (["--engine", "ftp://engine"], "want http://HOST:PORT"),
    ],
)
def test_a_wrong_command_line_is_refused(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typing error would look like a sick node."""
    assert main(["doctor", *words]) == 2
    assert says in capsys.readouterr().err


def test_hanging_check_is_a_finding_and_the_others_run(
    examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead NFS mount would hang the command that is to find it."""
    mended = threading.Event()

    def hang() -> list[Finding]:
        mended.wait()
        return []

    fine = Finding(Level.OK, "b", "fine", "")
    found = gather([("a", hang), ("b", lambda: [fine])], 0.1)
    mended.set()
    assert [(each.subject, each.code) for each in found] == [("a", "no_answer"), ("b", "fine")]


@pytest.mark.parametrize("error", [FileNotFoundError("gone"), KeyError("field")])
def test_failed_check_is_a_finding(error: Exception) -> None:
    """A file that disappears, or an older daemon's status, would end the command."""

    def look() -> list[Finding]:
        raise error

    [found] = gather([("a", look)], 5.0)
    assert (found.code, found.level) == ("unseen", Level.WARNING)


# --- the daemon -----------------------------------------------------------------------


def test_broken_configuration_is_reported_and_the_daemon_is_checked(
    daemon: DaemonProcess, examine: Examine, tmp_path: Path
) -> None:
    """One typing error would hide everything else."""
    config = tmp_path / "broken.toml"
    config.write_text('[host]\ncapacty = "1GiB"\n')
    found = examine("--socket", daemon.socket, config=config)
    assert found["rc"] == 1
    assert found["config"]["level"] == "fault"
    assert "did you mean host.capacity" in found["config"]["what"]
    assert found["answers"]["level"] == "ok"


def test_unreadable_configuration_is_not_a_fault(
    daemon: DaemonProcess, examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every user but root would read that the node is broken."""

    def closed(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", closed)
    found = examine("--socket", daemon.socket, config=Path("/closed.toml"))
    assert found["config_unseen"]["level"] == "note"
    assert found["answers"]["level"] == "ok"


def test_daemon_with_another_configuration_is_not_a_fault(
    daemon: DaemonProcess, examine: Examine
) -> None:
    """A user who passes only a socket would read that the node is broken."""
    found = examine("--socket", daemon.socket, config=Path("/nowhere.toml"))
    assert found["config_unseen"]["level"] == "note"
    assert found["rc"] != 1


def test_no_socket(examine: Examine) -> None:
    """The report would not say that the daemon is down, or what would stop its start."""
    found = examine()
    assert found["rc"] == 1
    assert found["no_socket"]["level"] == "fault"
    assert "capacity" in found, "without a daemon the rest was not looked at"


def test_not_a_socket(examine: Examine, tmp_path: Path) -> None:
    """A stray file would be reported as a daemon that does not answer."""
    (tmp_path / "file").write_text("")
    assert examine("--socket", str(tmp_path / "file"))["not_a_socket"]["level"] == "fault"


def test_socket_without_a_daemon(examine: Examine, tmp_path: Path) -> None:
    """A socket that a killed daemon left would look like one that is in trouble."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "left.sock"))
    found = examine("--socket", str(tmp_path / "left.sock"))
    assert found["nobody_listens"]["level"] == "fault"


def test_a_refused_uid(examine: Examine, status: dict, tmp_path: Path) -> None:
    """The report would not name allow_uids, which refuses this user."""
    refusal = "uid 7 may not connect: see allow_uids in the configuration"
    with FakeDaemon(tmp_path / "fake.sock", status, refusal=refusal):
        found = examine("--socket", str(tmp_path / "fake.sock"))
    assert found["refused"]["level"] == "fault"
    assert "allow_uids" in found["refused"]["do"]


def test_a_daemon_that_does_not_answer(
    examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon whose loop is stuck would hang the command."""
    monkeypatch.setattr(doctor, "DAEMON_S", 0.2)
    with FakeDaemon(tmp_path / "fake.sock", {}, silent=True):
        found = examine("--socket", str(tmp_path / "fake.sock"))
    assert found["no_answer"]["subject"] == "daemon"
    assert found["rc"] == 1


def test_another_version_is_a_warning(examine: Examine, status: dict, tmp_path: Path) -> None:
    """A daemon that was not restarted after an upgrade would go unnoticed."""
    with FakeDaemon(tmp_path / "fake.sock", {**status, "version": "0.0.1"}):
        found = examine("--socket", str(tmp_path / "fake.sock"))
    assert found["version_skew"]["level"] == "warning"
    assert "0.0.1" in found["version_skew"]["what"]
    assert found["rc"] in (1, 3)


def test_exit_status_of_warnings(examine: Examine, status: dict, tmp_path: Path) -> None:
    """A script could not distinguish faults from warnings."""
    with FakeDaemon(tmp_path / "fake.sock", {**status, "version": "0.0.1"}):
        assert examine(socket=str(tmp_path / "fake.sock"))["rc"] == 3


def test_a_connector_of_another_version(
    daemon: DaemonProcess, examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with an old connector would go unnoticed after an upgrade."""
    monkeypatch.setattr(tierd.client.session, "__version__", "0.0.1")
    client = Client(daemon.socket, name="vllm-worker-0")
    try:
        client.status()
        found = examine("--socket", daemon.socket)
    finally:
        client.close()
    assert found["connector_skew"]["level"] == "warning"
    assert "vllm-worker-0 runs tierd 0.0.1" in found["connector_skew"]["what"]
    assert "connector_skew" not in examine("--socket", daemon.socket), "it has gone"


def test_a_user_who_may_not_connect(daemon: DaemonProcess, examine: Examine) -> None:
    """An engine of another user would run without tierd for no visible reason."""
    found = examine("--user", "nobody", socket=daemon.socket)
    assert found["user_denied"]["level"] == "fault"
    assert found["user_not_allowed"]["level"] == "fault"
    assert "65534" in found["user_not_allowed"]["do"]
    mode = os.stat(daemon.socket).st_mode
    os.chmod(daemon.socket, 0)
    try:
        assert "user_denied" not in examine("--user", "root", socket=daemon.socket)
    finally:
        os.chmod(daemon.socket, mode)


def test_engines_that_cannot_share(daemon: DaemonProcess, examine: Examine) -> None:
    """Two engines with other seeds would each fill half of host memory, without a word."""
    client = daemon.client()
    try:
        one, other = namespace(), namespace(hash_root=root_hash("7"))
        for each in (one, other, namespace(model="another", block_tokens=32)):
            register(client, each)
        found = examine("--socket", daemon.socket)
    finally:
        client.close()
    output = found["cannot_share"]
    assert output["level"] == "warning"
    assert "hash_root" in output["what"]
    assert "PYTHONHASHSEED" in output["do"]


def test_block_sizes_that_differ_are_named(status: dict) -> None:
    """Another block size changes other fields as well, which would hide it."""
    other = {"block_tokens": 32, "block_bytes": 8192, "layout": "x", "hash_root": "aa"}
    space = {"model": "m", "tp_rank": 0, "sessions": 1, "blocks": 0, "block_tokens": 16}
    space |= {"block_bytes": 4096, "layout": "y", "hash_root": "aa"}
    spaces = [{"digest": "1", **space}, {"digest": "2", **space, **other}]
    [found] = node.look_at_namespaces({"namespaces": spaces})
    assert "block_tokens: 16 and 32" in found.what
    assert not list(
        node.look_at_namespaces({"namespaces": [spaces[0], {**spaces[1], "model": ""}]})
    )
    idle = [spaces[0], {**spaces[1], "sessions": 0}]
    assert not list(node.look_at_namespaces({"namespaces": idle})), "it is not used"


def test_findings_from_the_daemons_tier_states(status: dict) -> None:
    """A tier that is away, or damages blocks, would only show in its own numbers."""
    shut = {"state": "open", "why": "too slow"}
    tier = {"name": "t", "state": "failing", "why": "", "circuits": {"reads": shut}}
    tier |= {"counters": {"corrupt_total": 2, "damaged_in_transit_total": 1}}
    found = list(node.look_at_tiers({"storage": [tier]}))
    output = ("tier_away", "tier_corrupt", "tier_transit")
    assert codes(found) == dict.fromkeys(output, Level.WARNING)
    assert "reads: too slow" in found[0].what


def test_refused_clients_are_reported(examine: Examine, status: dict, tmp_path: Path) -> None:
    """A refused engine runs without tierd: nothing else would report it."""
    status["counters"]["clients_refused_total"] = 3
    with FakeDaemon(tmp_path / "fake.sock", status):
        found = examine("--socket", str(tmp_path / "fake.sock"))
    assert found["clients_refused"]["level"] == "warning"


@pytest.mark.parametrize(
    ("changes", "code", "level"),
    [
        ({}, "unit", Level.OK),
        ({"ActiveState": "failed", "Result": "watchdog"}, "unit_failed", Level.FAULT),
        ({"ActiveState": "inactive"}, "unit_inactive", Level.WARNING),
        ({"NRestarts": "4"}, "restarts", Level.WARNING),
        ({"NFileDescriptorStore": "0"}, "nothing_kept", Level.WARNING),
        ({"WatchdogUSec": "0"}, "no_watchdog", Level.WARNING),
        ({"LoadState": "not-found"}, "no_unit", Level.NOTE),
    ],
)
def test_unit_settings_are_checked(
    status: dict, changes: dict[str, str], code: str, level: Level
) -> None:
    """An operator would have to ask systemd for the unit's settings."""
    unit = {"LoadState": "loaded", "ActiveState": "active", "NRestarts": "0", "Result": "success"}
    unit |= {"NFileDescriptorStore": "5", "WatchdogUSec": "30s"}
    status["host"]["allocated_bytes"] = 1
    found = codes(list(node.look_at_service({**unit, **changes}, status)))
    assert found.pop(code) is level
    assert all(each is Level.OK for each in found.values())


def test_long_texts_are_truncated() -> None:
    """What a server says could fill the screen."""
    fields = Finding(Level.OK, "s", "c", "x" * 10_000).to_fields()
    assert len(fields["what"]) == TEXT_CHARS_MAX
