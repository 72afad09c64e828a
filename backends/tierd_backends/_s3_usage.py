"""How many blocks a bucket holds, as far as one node can tell.

A listing in the background counts what is there, in the order of names. What this node
stores or drops meanwhile counts at once behind the listing, and is seen by it ahead. What
other nodes do after the listing is not known.
"""

from __future__ import annotations

from collections.abc import Iterable

from tierd.backend import BackendStats


class Usage:
    """Counts of blocks and bytes; belongs to the event loop."""

    def __init__(self) -> None:
        self._blocks = 0
        self._bytes = 0
        self._complete = False
        self._listed_to = ""

    def listed(self, sizes_bytes: Iterable[int], last: str, *, complete: bool) -> None:
        """Count a page of the listing, whose last name is `last`."""
        for size_bytes in sizes_bytes:
            self._blocks += 1
            self._bytes += size_bytes
        self._listed_to = last or self._listed_to
        self._complete = complete

    def changed(self, name: str, blocks: int, size_bytes: int) -> None:
        """Count what this node stored, or, with negative numbers, dropped."""
        if self._complete or name <= self._listed_to:
            self._blocks = max(0, self._blocks + blocks)
            self._bytes = max(0, self._bytes + size_bytes)

    def stats(self) -> BackendStats:
        """The counts now."""
        return BackendStats(
            blocks=self._blocks, used_bytes=self._bytes, index_complete=self._complete
        )
