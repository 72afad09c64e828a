"""What commands show while they work."""

from __future__ import annotations

import io
import sys

import pytest

from tierd.cli.common import progress as progress_module
from tierd.cli.common.progress import ProgressLine


class Clock:
    """time.monotonic()."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress_module, "time", made)
    return made


def test_terminal_shows_a_bar(clock, monkeypatch) -> None:
    """An operator could not see how long a warm still takes."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = ProgressLine(lines_s=10)
    clock.now_s += 30
    progress.bar(0.25, "5 of 9 blocks")
    progress.bar(None, "6 of 9 blocks")
    progress.clear()
    assert terminal.getvalue().split("\r\x1b[K")[1:] == [
        "[#####...............]  25%, 5 of 9 blocks, about 0h01m30s left",
        "6 of 9 blocks",
        "",
    ]


def test_log_gets_a_line_per_interval(clock, capsys) -> None:
    """A unit's journal would be full of progress, or have control characters, or nothing."""
    progress, silent = ProgressLine(lines_s=10), ProgressLine()
    for count in range(25):
        clock.now_s += 1
        progress.bar(None, f"{count} blocks")
        silent.bar(None, "nothing")
    progress.clear()
    assert capsys.readouterr().err == "9 blocks\n19 blocks\n"
