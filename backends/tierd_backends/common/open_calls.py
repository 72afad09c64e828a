"""Whether a tier is open, and how many of its calls are in flight: a tier closes after them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from tierd.errors import BackendError


class OpenCalls:
    """Belongs to the event loop. The tier sets `is_open`."""

    def __init__(self, what: str) -> None:
        """`what` names the tier in errors."""
        self.is_open = False
        self.in_flight = 0
        self._what = what
        self._idle = asyncio.Event()

    def check(self) -> None:
        """Raise BackendError unless the tier is open."""
        if not self.is_open:
            raise BackendError(f"{self._what} is not open")

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count one call in flight, which must begin while the tier is open."""
        self.check()
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    async def ended(self) -> None:
        """Wait until no call is in flight."""
        while self.in_flight:
            self._idle.clear()
            await self._idle.wait()
