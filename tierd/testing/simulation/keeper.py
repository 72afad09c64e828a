"""A service manager for the simulation: it keeps descriptors from one life to the next."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tierd.daemon.lifecycle.service import ServiceManager


class Keeper(ServiceManager):
    """Keeps at once, and never loses anything."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[tuple[str, int]] = []

    @property
    def present(self) -> bool:
        """It always is."""
        return True

    def keep(self, name: str, fds: Sequence[int]) -> None:
        """Keep copies."""
        self._kept += [(name, os.dup(fd)) for fd in fds]

    def forget(self, name: str) -> None:
        """Close what has this name."""
        for entry in [entry for entry in self._kept if entry[0] == name]:
            self._kept.remove(entry)
            os.close(entry[1])

    def take_kept(self) -> list[tuple[str, int]]:
        """Copies of everything, for the next life."""
        return [(name, os.dup(fd)) for name, fd in self._kept]

    def names(self) -> list[str]:
        """What is kept, a name a descriptor."""
        return [name for name, _ in self._kept]

    def close(self) -> None:
        """Lose everything."""
        for _, fd in self._kept:
            os.close(fd)
        self._kept.clear()
