"""Counters that several threads add to and one thread drains."""

from __future__ import annotations

import threading


class DrainedCounters:
    """Sums by name since they were last drained. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}

    def add(self, **amounts: float) -> None:
        """Add to each named counter."""
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] = self._values.get(name, 0) + amount

    def drain(self) -> dict[str, float]:
        """Return the sums since the last call, by name."""
        with self._lock:
            values, self._values = self._values, {}
        return values
