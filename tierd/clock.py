"""Where the time comes from: injected, so that a simulation can own it.

Nanoseconds on the scale of CLOCK_MONOTONIC: an arbitrary epoch, shared by all
processes of a node, which is why a lease's expiry may be sent to a client.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Never goes back; two readings may be equal."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since the clock's epoch."""


class SystemClock:
    """CLOCK_MONOTONIC of this node."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since the node's epoch, usually its boot."""
        return time.monotonic_ns()
