"""Objects that are listed, and looked up well, but were not to be had when they were read.

A server's rules may have moved an object to an archive, its bytes or its key may be gone, or it
may be encrypted with a key of somebody else's. It is no outage: that block is missed. It must not
be in the block's way for ever either: a put that finds one of these reads it again, and stores the
block over it. Used by several threads.
"""

from __future__ import annotations

import threading
import time
from typing import Final

SUSPECTS_MAX: Final = 4096
"""The latest ones: a few hundred bytes each."""

AVOID_S: Final = 60.0
"""How long one that the server does not give is not looked up: each request for its block would
read it in vain. Another node may store it anew meanwhile."""


class Suspects:
    """Names of such objects, each with the time until which a lookup does not find it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until_s: dict[str, float] = {}

    def add(self, name: str, *, refused: bool) -> None:
        """An object was not to be had; `refused` if the server says that it will not give it,
        and not that it is gone."""
        with self._lock:
            self._until_s.pop(name, None)
            self._until_s[name] = time.monotonic() + AVOID_S * refused
            if len(self._until_s) > SUSPECTS_MAX:
                del self._until_s[next(iter(self._until_s))]

    def clear(self, name: str) -> None:
        """It was read well, or stored."""
        if name in self._until_s:
            with self._lock:
                self._until_s.pop(name, None)

    def avoid(self, name: str) -> bool:
        """Whether it is not to be looked up now."""
        return self._until_s.get(name, 0.0) > time.monotonic()

    def __contains__(self, name: str) -> bool:
        return name in self._until_s
