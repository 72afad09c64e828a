"""What a command that takes long shows of its progress."""

from __future__ import annotations

import sys
import time

from tierd.cli.text import duration, size


class Progress:
    """One line on a terminal's stderr, rewritten; nothing elsewhere."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._began_s = time.monotonic()

    def say(self, text: str) -> None:
        """Show what is being done."""
        if self._shown:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def bytes(self, what: str, done_bytes: int, all_bytes: int) -> None:
        """Show how far it has got, how fast, and when it will be done at that speed."""
        if not self._shown:
            return
        speed = done_bytes / max(1e-3, time.monotonic() - self._began_s)
        text = f"{what}: {size(done_bytes)} of {size(all_bytes)}, {size(speed)}/s"
        if done_bytes:
            text += f", {duration((all_bytes - done_bytes) / speed)} left"
        self.say(text)

    def clear(self) -> None:
        """Leave an empty line."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
