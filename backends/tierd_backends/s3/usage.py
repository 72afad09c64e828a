"""How many blocks a bucket holds, as far as one node can tell.

A listing in the background counts what is there, in the order of names. What this node
stores or drops meanwhile counts at once behind the listing, and is seen by it ahead. What
other nodes do after a listing shows in the next one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tierd.backend import BackendStats


@dataclass(slots=True)
class _Held:
    """What there is."""

    blocks: int = 0
    size_bytes: int = 0

    def change(self, blocks: int, size_bytes: int) -> None:
        """So many more, or with negative numbers less."""
        self.blocks = max(0, self.blocks + blocks)
        self.size_bytes = max(0, self.size_bytes + size_bytes)


class Usage:
    """Belongs to the event loop. A listing in progress shows, unless there is a whole one."""

    def __init__(self) -> None:
        self._complete = False
        self._shown = _Held()
        self._listing: _Held | None = None
        self._listed_to = ""

    def begin(self) -> None:
        """A listing begins."""
        self._listing = _Held()
        self._listed_to = ""
        if not self._complete:
            self._shown = self._listing

    def listed(self, sizes_bytes: Iterable[int], last: str, *, complete: bool) -> None:
        """Count a page of the listing, whose last name is `last`."""
        assert self._listing is not None
        for size_bytes in sizes_bytes:
            self._listing.change(1, size_bytes)
        self._listed_to = last or self._listed_to
        if complete:
            self._shown, self._listing = self._listing, None
            self._complete = True

    def changed(self, name: str, blocks: int, size_bytes: int) -> None:
        """Count what this node stored, or, with negative numbers, dropped."""
        if self._listing is not None and name <= self._listed_to:
            self._listing.change(blocks, size_bytes)
        if self._shown is not self._listing:
            self._shown.change(blocks, size_bytes)

    def stats(self) -> BackendStats:
        """The counts now, but for the capacity."""
        return BackendStats(
            blocks=self._shown.blocks,
            used_bytes=self._shown.size_bytes,
            index_complete=self._complete,
        )
