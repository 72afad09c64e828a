"""Suspects: objects that are listed, and found by a lookup, but could not be read.

A server's rules may have archived the object, its bytes or its encryption key may be lost, or the
key may belong to another account. This is no outage: only the object's block is a miss. The object
must not block its name forever either: a put that finds a suspect reads it again, and if that fails
stores the block over it. Used by several threads.
"""

from __future__ import annotations

import threading
import time
from typing import Final

SUSPECTS_MAX: Final = 4096
"""Most suspects kept, the latest ones: a few hundred bytes each."""

AVOID_S: Final = 60.0
"""How long a lookup misses an object that the server refuses to deliver: otherwise each request for
its block would try to read it. Not longer, because another node may store it again."""


class Suspects:
    """Names of suspects, each with the time until which lookups miss it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until_s: dict[str, float] = {}

    def add(self, name: str, *, refused: bool) -> None:
        """Note that an object could not be read; `refused`: the server has it but does not deliver
        it."""
        with self._lock:
            self._until_s.pop(name, None)
            self._until_s[name] = time.monotonic() + AVOID_S * refused
            if len(self._until_s) > SUSPECTS_MAX:
                del self._until_s[next(iter(self._until_s))]

    def clear(self, name: str) -> None:
        """Forget an object that was read well, or stored."""
        if name in self._until_s:
            with self._lock:
                self._until_s.pop(name, None)

    def avoid(self, name: str) -> bool:
        """Whether a lookup should miss it now."""
        return self._until_s.get(name, 0.0) > time.monotonic()

    def __contains__(self, name: str) -> bool:
        return name in self._until_s
