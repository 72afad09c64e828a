"""The clock, injected so that a simulation can replace it.

Times are nanoseconds on the scale of CLOCK_MONOTONIC: an arbitrary epoch that all processes
of a node share, so the expiry of a lease can be sent to a client.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A clock that never goes back; two readings may be equal."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since the clock's epoch."""


class SystemClock:
    """CLOCK_MONOTONIC of this node."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since the node's epoch, usually its boot."""
        return time.monotonic_ns()
