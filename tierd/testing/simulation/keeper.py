"""A service manager for the simulation: it keeps descriptors for the next incarnation."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tierd.daemon.lifecycle.service import ServiceManager


class Keeper(ServiceManager):
    """Keeps descriptors at once, and never loses any."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[tuple[str, int]] = []

    @property
    def present(self) -> bool:
        """Always True."""
        return True

    def keep(self, name: str, fds: Sequence[int]) -> None:
        """Keep copies of descriptors under a name."""
        self._kept += [(name, os.dup(fd)) for fd in fds]

    def forget(self, name: str) -> None:
        """Close the descriptors with this name."""
        for entry in [entry for entry in self._kept if entry[0] == name]:
            self._kept.remove(entry)
            os.close(entry[1])

    def take_kept(self) -> list[tuple[str, int]]:
        """Return copies of all descriptors, for the next incarnation."""
        return [(name, os.dup(fd)) for name, fd in self._kept]

    def names(self) -> list[str]:
        """Return the name of each kept descriptor."""
        return [name for name, _ in self._kept]

    def close(self) -> None:
        """Close all descriptors."""
        for _, fd in self._kept:
            os.close(fd)
        self._kept.clear()
