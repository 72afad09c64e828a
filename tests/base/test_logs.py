"""The log: fields for the journal, a bound on floods, and writes that do not block."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon_process import DaemonProcess
from tierd import logs
from tierd.config import LogConfig, LogFormat, LogLevel
from tierd.logs import PERIOD_S, REPEATS_MAX, Calm, Journal

WAIT_S = 20.0


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[socket.socket]:
    """The journal's socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(tmp_path / "journal"))
        made.settimeout(WAIT_S)
        yield made


def fields(data: bytes) -> dict[str, str]:
    """The fields of an entry in the journal's native protocol."""
    found = {}
    while data:
        name, equals, rest = data.partition(b"\n")[0].partition(b"=")
        if equals:
            found[name.decode()], data = rest.decode(), data.partition(b"\n")[2]
        else:
            data = data[len(name) + 1 :]
            (size,) = struct.unpack_from("<Q", data)
            found[name.decode()] = data[8 : 8 + size].decode()
            assert data[8 + size : 9 + size] == b"\n"
            data = data[9 + size :]
    return found


def logger(handler: logging.Handler) -> logging.Logger:
    """A logger that only this test uses."""
    made = logging.Logger("tierd.test")
    made.addHandler(handler)
    return made


# --- the journal ------------------------------------------------------------------------


def test_entries_have_fields(tmp_path: Path, journal: socket.socket) -> None:
    """An operator could not filter the journal for errors, or for one tier's lines."""
    handler = Journal("worker", tmp_path / "journal")
    log = logger(handler)
    log.warning("tier %s fails", "s3", extra={"tierd": {"tier": "s3", "name-space": "ab\ncd"}})
    entry = fields(journal.recv(1 << 16))
    assert entry["MESSAGE"] == "tier s3 fails"
    assert entry["PRIORITY"] == "4"
    assert entry["SYSLOG_IDENTIFIER"] == "tierd"
    assert entry["CODE_FILE"] == __file__
    assert entry["CODE_FUNC"] == "test_entries_have_fields"
    assert int(entry["CODE_LINE"]) > 0
    assert entry["TIERD_LOGGER"] == "tierd.test"
    assert entry["TIERD_PROCESS"] == "worker"
    assert entry["TIERD_TIER"] == "s3"
    assert entry["TIERD_NAME_SPACE"] == "ab\ncd"
    handler.close()


def test_a_traceback_is_one_entry(tmp_path: Path, journal: socket.socket) -> None:
    """A traceback would be split into lines, between those of other processes."""
    handler = Journal(path=tmp_path / "journal")
    try:
        raise ValueError("deep\ninside")
    except ValueError:
        logger(handler).exception("a bug of ours")
    entry = fields(journal.recv(1 << 16))
    assert entry["MESSAGE"].startswith("a bug of ours\nTraceback")
    assert entry["MESSAGE"].endswith("deep\ninside")
    assert entry["PRIORITY"] == "3"
    handler.close()


def test_unresponsive_journal_does_not_block(tmp_path: Path, journal: socket.socket) -> None:
    """While journald is restarted or swapped out, every engine on the node would wait for it."""
    handler = Journal(path=tmp_path / "journal")
    log, count = logger(handler), 10_000
    for number in range(count):
        log.info("line %d", number)
    journal.setblocking(False)
    got = []
    try:
        while True:
            got.append(fields(journal.recv(1 << 16))["MESSAGE"])
    except BlockingIOError:
        pass
    assert 0 < len(got) < count
    log.info("after")
    lost = fields(journal.recv(1 << 16))["MESSAGE"]
    assert lost.startswith(f"{count - len(got)} lines were lost")
    assert fields(journal.recv(1 << 16))["MESSAGE"] == "after"
    handler.close()


@pytest.mark.parametrize("reason", ["missing", "too long"])
def test_without_a_journal_lines_go_to_stderr(
    tmp_path: Path, reason: str, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """Log lines would be lost without a journal."""
    text = "x"
    if reason == "too long":
        request.getfixturevalue("journal")
        text = "x" * (4 << 20)
    handler = Journal(path=tmp_path / "journal")
    logger(handler).error("one %s\ntwo", text)
    assert capsys.readouterr().err == f"<3>one {text}\n<3>two\n"
    handler.close()


# --- floods -----------------------------------------------------------------------------


class Lines(logging.Handler):
    """Keeps the lines that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_flood_is_limited_and_counted() -> None:
    """During a tier's outage one repeated line would fill the disk, or hide all others."""
    output, now_s = Lines(), [100.0]
    calm = Calm(output, lambda: now_s[0])
    log = logger(calm)

    def flood(count: int) -> None:
        for number in range(count):
            log.error("failed: %d", number)

    log.info("before")
    flood(REPEATS_MAX + 4312)
    log.info("another one")
    assert output.lines[0] == "before"
    assert output.lines[1 : REPEATS_MAX + 1] == [f"failed: {n}" for n in range(REPEATS_MAX)]
    assert output.lines[REPEATS_MAX + 1 :] == ["another one"]
    now_s[0] += PERIOD_S
    flood(1)
    assert output.lines[-2:] == [
        f"failed: {REPEATS_MAX + 4311} (repeated 4,312 times in 10 s)",
        "failed: 0",
    ]
    # The count is also logged at the end, without a new line of that kind.
    flood(REPEATS_MAX + 1)
    calm.close()
    assert output.lines[-1] == f"failed: {REPEATS_MAX} (repeated 2 times in 10 s)"
    assert calm._timer is None


def test_suppressed_lines_are_reported_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end and the size of a flood would be logged with the next flood, or never."""
    monkeypatch.setattr(logs, "PERIOD_S", 0.05)
    output = Lines()
    calm = Calm(output)
    log = logger(calm)
    for _ in range(REPEATS_MAX + 3):
        log.error("failed")
    timer = calm._timer
    assert timer is not None
    timer.join(WAIT_S)
    assert "repeated 3 times" in output.lines[-1]
    calm.close()


# --- configuration ----------------------------------------------------------------------


PROGRAM = """
import logging, sys
from tierd import logs
from tierd.config import LogConfig, LogFormat, LogLevel
{setup}
logging.getLogger("tierd").info("some %s", "news", extra={{"tierd": {{"tier": "s3"}}}})
logging.getLogger("tierd").debug("details")
"""


def stderr_of(setup: str, env: dict[str, str] | None = None) -> str:
    """The stderr of a process."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(setup=setup)],
        stderr=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, **(env or {})},
    ).stderr


def test_json_is_an_object_a_line() -> None:
    """A log shipper would split a traceback into lines, and guess their level."""
    log = logger(handler := logging.StreamHandler())
    handler.setFormatter(logs.Json("worker"))
    lines: list[str] = []
    handler.emit = lambda record: lines.append(handler.format(record))  # type: ignore[method-assign]
    try:
        raise ValueError("x\ny")
    except ValueError:
        log.exception("bug %d", 1, extra={"tierd": {"tier": "s3", "message": "not this"}})
    (text,) = lines
    line = json.loads(text)
    assert "\n" not in text
    assert line["time"].endswith("Z")
    told = {key: line[key] for key in ("level", "logger", "message", "process", "tier")}
    assert told == {
        "level": "error",
        "logger": "tierd.test",
        "message": "bug 1",
        "process": "worker",
        "tier": "s3",
    }
    assert line["exception"].endswith("x\ny")


@pytest.mark.slow
def test_child_process_logs_like_its_daemon() -> None:
    """Lines of child processes would have another format or level."""
    before = logging.getLogger().level, list(logging.getLogger().handlers)
    try:
        logs.configure(LogConfig(format=LogFormat.JSON, level=LogLevel.INFO))
        logs.set_level(LogLevel.DEBUG)
        env = logs.for_children()
    finally:
        logs.configure(LogConfig())
        root = logging.getLogger()
        for handler in [h for h in root.handlers if h not in before[1]]:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(before[0])
    child = "import os; logs.configure_child('worker', os.environ)"
    first, second = map(json.loads, stderr_of(child, env).splitlines())
    assert first["process"] == second["process"] == "worker"
    assert [first["message"], second["message"]] == ["some news", "details"]
    plain = stderr_of(child)
    assert " INFO worker[" in plain
    assert "details" not in plain


@pytest.mark.slow
def test_daemon_uses_the_configured_format(tmp_path: Path) -> None:
    """`log.format` would be checked and then ignored, or not apply to a tier's process."""
    with DaemonProcess(tmp_path, extra='[log]\nformat = "json"') as daemon:
        pass
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    assert {line.get("process") for line in lines} == {None, "worker"}
    assert any("serves on" in line["message"] for line in lines)


def test_journal_is_detected_by_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service with its stderr in a file would leave that file empty."""
    found = os.fstat(2)
    monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
    assert logs.stderr_is_journal()
    monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino + 1}")
    assert not logs.stderr_is_journal()
    monkeypatch.delenv("JOURNAL_STREAM")
    assert not logs.stderr_is_journal()


@pytest.mark.slow
def test_start_failure_is_an_error_in_the_journal(tmp_path: Path) -> None:
    """`journalctl -p err` would not say why a service failed."""
    with (tmp_path / "stderr").open("w+b") as stderr:
        found = os.fstat(stderr.fileno())
        env = {**os.environ, "JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        command = ["serve", "--config", str(tmp_path / "none.toml")]
        done = subprocess.run(
            [sys.executable, "-m", "tierd.cli.main", *command], stderr=stderr, env=env
        )
        assert done.returncode == 2
        stderr.seek(0)
        assert stderr.read().startswith(b"<3>tierd: cannot read ")
