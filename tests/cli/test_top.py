"""`tierd top`: right numbers, in any window, also while the daemon restarts."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tests.support import blocks
from tests.support.daemon_process import DaemonProcess
from tests.support.tiers.bench import SPACE, Bench, run
from tierd.cli.common.text import duration, number, percent, printable, size
from tierd.cli.main import main
from tierd.cli.top.command import HISTORY_MAX, Pen, TrendPoint, Watch, draw
from tierd.cli.top.sample import sample

WAIT_S = 20.0
TOKENS = SPACE.block_tokens

# --- samples --------------------------------------------------------------------------


def statuses() -> list[dict]:
    """Of a node: at first, and later, after loads, misses and stores."""
    found: list[dict] = []

    async def test(bench: Bench) -> None:
        node, clock = bench.node, bench.loop
        bench.store(6, "cold")
        await bench.backed_up()
        bench.forget()
        bench.raw[0].takes_s = 0.5
        assert await bench.acquire(blocks.chain(6, "cold")[0]) == 6
        bench.forget()
        found.append(copy.deepcopy(node.status()))
        began_ns = clock.now_ns
        bench.raw[0].takes_s = 0.1
        assert await bench.acquire(blocks.chain(8, "cold")[0]) == 6
        bench.store(4, "new")
        other = bench.node.register(blocks.namespace(model="\x1b[31m模型"))
        assert await bench.acquire(blocks.chain(1, "new")[0], spaces=[other]) == 0
        clock.now_ns = began_ns + 2 * 10**9
        found.append(copy.deepcopy(node.status()))

    run(test)
    return found


BEFORE, AFTER = statuses()


def test_rates_cover_the_time_between_samples() -> None:
    """An operator would see the average since the start, and no change."""
    now = sample(BEFORE, AFTER)
    assert not now.restarted
    assert now.seconds == pytest.approx(2, abs=0.01)
    assert now.requested_tokens_per_s == pytest.approx(9 * TOKENS / 2, rel=0.01)
    assert now.hit_ratio == pytest.approx(6 / 9)
    assert now.host_hit_ratio == 0
    assert now.stored_blocks_per_s == pytest.approx(2, rel=0.01)
    near, far = now.tiers
    assert near.hit_ratio == pytest.approx(6 / 9)
    assert far.hit_ratio == 0
    assert near.read_bytes_per_s == pytest.approx(3 * 4096, rel=0.01)
    assert near.read_p99_s == 0.125
    assert far.read_p99_s is None
    assert [space.requested_tokens for space in now.namespaces] == [14 * TOKENS, TOKENS]
    assert now.namespaces[0].requested_tokens_per_s == pytest.approx(4 * TOKENS, rel=0.01)
    assert now.namespaces[0].hit_ratio == 6 / 8


def test_restarted_daemon_has_no_negative_rates() -> None:
    """Its counters begin at 0, and a rate would be minus a million."""
    now = sample(AFTER, BEFORE)
    assert now.restarted
    assert now.seconds == BEFORE["uptime_s"]
    assert now.stored_blocks_per_s == pytest.approx(6 / BEFORE["uptime_s"])
    assert min(now.requested_tokens_per_s, *now.evicted_blocks_per_s.values()) >= 0


def test_new_tier_and_namespace() -> None:
    """After a reload, top would end with a traceback."""
    before = copy.deepcopy(BEFORE)
    del before["storage"][0]
    before["demand"] = []
    assert sample(before, AFTER).tiers[0].read_bytes_per_s > 0


def test_status_names_unusual_states(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An operator would look for the missing half of host memory for an hour."""
    output = copy.deepcopy(AFTER)
    monkeypatch.setattr("tierd.cli.status.Client.status", lambda _: output)
    assert main(["status"]) == 0
    text = capsys.readouterr().out
    assert "limited" not in text
    assert "verified" not in text
    assert "\x1b" not in text
    output["host"].update(limit_bytes=512 << 10, unverified_blocks=9)
    assert main(["status"]) == 0
    text = capsys.readouterr().out
    assert "limited to 512 KiB under memory pressure" in text
    assert "9 blocks kept over a restart are unverified" in text


# --- numbers --------------------------------------------------------------------------


def test_numbers_are_human_readable() -> None:
    """A size would be off by a unit, or a cell burst its column."""
    assert [size(n) for n in (0, 1023, 1 << 20, 1.5 * (1 << 40), 1 << 60)] == [
        "0 B",
        "1023 B",
        "1 MiB",
        "1.5 TiB",
        "1.05e+06 TiB",
    ]
    assert [number(n) for n in (0, 999.4, 999.9, 12_345, 1e6)] == [
        "0",
        "999",
        "1 k",
        "12.3 k",
        "1 M",
    ]
    assert [percent(share) for share in (None, 0, 0.12345, 1)] == ["-", "0 %", "12.3 %", "100 %"]
    assert duration(3 * 3600 + 5 * 60 + 9.9) == "3h05m09s"
    assert printable("a\x1b[31m\n\x9b") == "a?[31m??"


@given(st.floats(0, 9e14))
def test_a_size_fits_its_column(value: float) -> None:
    """One number would shift the other columns."""
    assert len(size(value)) <= 8
    assert len(number(value)) <= 6


# --- the picture ----------------------------------------------------------------------

HISTORY = [TrendPoint(0.5, 1000.0, 1e6, None)] * HISTORY_MAX


def picture(width: int, height: int | None, **changes: object) -> list[str]:
    after = copy.deepcopy(AFTER)
    for tier in after["storage"]:
        tier.update(changes)
    lines = draw(sample(BEFORE, after), HISTORY, Pen(width, True), height)
    return [line.plain for line in lines]


def test_usual_window_shows_everything() -> None:
    """What an operator looks for would be below the edge."""
    circuit = {"state": "open", "why": "gone \x1b[2J", "since_s": 1.0, "opened_total": 1}
    circuits = {"reads": circuit, "writes": {**circuit, "state": "half_open"}}
    lines = picture(80, 24, state="failing", circuits=circuits)
    text = "\n".join(lines)
    assert len(lines) <= 24
    for word in (
        "hits     66.7 % now",
        "tier0      failing",
        "reads open, writes half_open: gone ?[2J",
        "namespace ",
        "?[31m模型",
    ):
        assert word in text
    assert re.search(r"tokens/s +█+ 1 k$", text, re.MULTILINE)
    assert "\x1b" not in text


@given(st.integers(1, 200), st.integers(1, 70))
def test_any_window_size_works(width: int, height: int) -> None:
    """A small window, or one made smaller, would be a mess."""
    lines = picture(width, height)
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width
    assert lines[0].startswith("tierd"[:width])


def test_sparklines() -> None:
    """A gap while the daemon was away would look like an idle daemon."""
    pen = Pen(80, True)
    values = [0.0] * 4 + [None] * 4 + [1.0] * 4 + [8.0] * 4
    assert pen.sparkline(values, HISTORY_MAX // 4)[-4:] == "▁ ▂█"
    assert pen.sparkline([0.0, 0.5], HISTORY_MAX, 1.0)[-2:] == "▁▅"
    assert pen.sparkline([], 10) == " " * 10
    assert pen._replace(unicode=False).sparkline([1.0], HISTORY_MAX).strip() == "#"


# --- the command ----------------------------------------------------------------------


def test_without_a_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script could not distinguish an idle daemon from a missing one."""
    socket = str(tmp_path / "none.sock")
    assert main(["top", "--once", "--socket", socket]) == 1
    assert "cannot connect" in capsys.readouterr().err
    with contextlib.closing(Watch(socket)) as watch:
        watch.look()
        text = "\n".join(line.plain for line in watch.frame(80, 24))
    assert text.startswith("waiting for tierd")
    for wrong in ("0", "-1", "nan", "1h"):
        with pytest.raises(SystemExit):
            main(["top", "--interval", wrong, "--socket", socket])


class Terminal:
    """`tierd top` in a terminal."""

    def __init__(self, *words: str, **environ: str) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(80, 24)
        self.before = termios.tcgetattr(self.slave)
        self.seen = ""
        # These would be taken for the terminal's size, and stay.
        inherited = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "LINES"}}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tierd.cli.main", "top", "--interval", "0.1", *words],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env={**inherited, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environ},
        )

    def resize(self, columns: int, rows: int) -> None:
        termios.tcsetwinsize(self.slave, (rows, columns))

    def wait_for(self, pattern: str) -> None:
        """Until something new on the screen looks like that."""
        self.seen, end = "", time.monotonic() + WAIT_S
        while not re.search(pattern, self.seen, re.DOTALL):
            assert time.monotonic() < end, self.seen
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 1 << 16).decode()

    def press(self, key: str) -> None:
        os.write(self.master, key.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.mark.slow
def test_in_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would end with its daemon, or leave a terminal that shows nothing that is typed."""
    with DaemonProcess(tmp_path, capacity="16MiB") as daemon:
        with contextlib.closing(Terminal("--socket", daemon.socket)) as terminal:
            terminal.wait_for(r"since start.*write/s")
            assert re.search("\x1b\\[[0-9;]*3[0-9]m", terminal.seen), "no colour"
            terminal.resize(40, 8)
            terminal.wait_for("\x1b\\[H((?!write/s).)*\x1b\\[H")
            assert daemon.stop() == 0
            terminal.wait_for("waiting for tierd")
            daemon.start()
            terminal.wait_for("up 0h00m")
            terminal.press("q")
            terminal.wait_for(r"\x1b\[\?1049l")
            assert terminal.process.wait(WAIT_S) == 0
            assert termios.tcgetattr(terminal.slave) == terminal.before
        with contextlib.closing(Terminal("--socket", daemon.socket, NO_COLOR="1")) as terminal:
            terminal.wait_for("since start")
            assert not re.search("\x1b\\[[0-9;]*3[0-9]m", terminal.seen)
            terminal.process.send_signal(signal.SIGINT)
            terminal.wait_for(r"\x1b\[\?1049l")
            assert terminal.process.wait(WAIT_S) == 0
            assert termios.tcgetattr(terminal.slave) == terminal.before
        daemon.wait_tier("file", "ready")
        command = ["top", "--interval", "0.1", "--socket", daemon.socket]
        assert main(command) == 0
        frame = capsys.readouterr().out
        assert "\x1b" not in frame
        assert re.search(r"^file +ready", frame, re.MULTILINE)
        assert main([*command, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["tiers"][0]["name"] == "file"
