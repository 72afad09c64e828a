"""A tier's failures: each one is counted, one line of each kind is logged per period, and the
last one is shown as the tier's trouble. Can be used by several threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable


class Failures:
    """Failures of one tier. `trouble` is the text of the last one, for the status."""

    def __init__(
        self, log: logging.Logger, counters: dict[str, int], *, log_every_s: float, where: str = ""
    ) -> None:
        """`counters` are the tier's; `where` begins each line, if it is not empty."""
        self.trouble = ""
        self._log = log
        self._log_every_s = log_every_s
        self._where = f"{where}: " if where else ""
        self._counters = counters
        # A plain `+=` on a dict loses counts between threads.
        self._counting = threading.Lock()
        self._silent_until_s: dict[Hashable, float] = {}

    def count(self, name: str, more: int = 1) -> None:
        """Add to the existing counter `name`."""
        with self._counting:
            self._counters[name] += more

    def warn(self, kind: Hashable, text: str) -> None:
        """Log a line, unless one of its kind was logged lately."""
        now_s = time.monotonic()
        if now_s >= self._silent_until_s.get(kind, now_s):
            self._silent_until_s[kind] = now_s + self._log_every_s
            self._log.warning("%s%s", self._where, text)
