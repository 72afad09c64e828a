"""Progress display of long commands."""

from __future__ import annotations

import sys
import time
from typing import Final

from tierd.cli.common.text import duration, size

BAR_CHARS: Final = 20


class ProgressLine:
    """A rewritten line if stderr is a terminal; if not, a new line every `lines_s`, if given."""

    def __init__(self, lines_s: float | None = None) -> None:
        self._shown = sys.stderr.isatty()
        self._lines_s = lines_s
        self._began_s = self._said_s = time.monotonic()

    def say(self, text: str) -> None:
        """Show the current activity."""
        if self._shown:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif self._lines_s is not None and time.monotonic() - self._said_s >= self._lines_s:
            self._said_s = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    def bar(self, share: float | None, text: str) -> None:
        """Show the share that is done, 0 to 1 or None if unknown, and the remaining time."""
        if share:
            spent_s = time.monotonic() - self._began_s
            full = round(BAR_CHARS * share)
            left = duration(spent_s * (1 - share) / share)
            bar = f"[{'#' * full}{'.' * (BAR_CHARS - full)}] {share:4.0%}"
            text = f"{bar}, {text}, about {left} left"
        self.say(text)

    def bytes(self, what: str, done_bytes: int, all_bytes: int) -> None:
        """Show the bytes done, the speed, and the remaining time at that speed."""
        if not self._shown:
            return
        speed = done_bytes / max(1e-3, time.monotonic() - self._began_s)
        text = f"{what}: {size(done_bytes)} of {size(all_bytes)}, {size(speed)}/s"
        if done_bytes:
            text += f", {duration((all_bytes - done_bytes) / speed)} left"
        self.say(text)

    def clear(self) -> None:
        """Clear the line on a terminal."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
