"""Estimate of the blocks in the tier, as one node sees them.

The estimate is a count of the server's keys, plus the node's own stores, minus its own drops.
Other nodes' stores, and the server's evictions and expiries, show only at the next count. The
shared capacity relies on the estimate; lookups never do.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierd.backend import HEADER_BYTES, BackendStats
from tierd.types import BlockKey


@dataclass(slots=True)
class _Space:
    """Blocks of a namespace, all of one length. `blocks` is below 0 while a drop is known before
    its store: two batches may end in another order than the server's."""

    blocks: int = 0
    block_bytes: int = 0


class Census:
    """Belongs to the event loop. Before the first complete count, the count in progress shows."""

    def __init__(self) -> None:
        self.complete = False
        self._shown: dict[bytes, _Space] = {}
        self._count: dict[bytes, _Space] | None = None
        self._own: set[BlockKey] = set()

    def begin(self) -> None:
        """Begin a count. Discards an unfinished one."""
        self._count = {}
        self._own.clear()
        if not self.complete:
            self._shown = self._count

    def seen(self, key: BlockKey, length: int) -> None:
        """Count a block that the scan found, unless this node stored it during the scan."""
        assert self._count is not None
        if key not in self._own:
            _add(self._count, key, length)

    def end(self) -> None:
        """Adopt the finished count."""
        assert self._count is not None
        self._shown, self._count = self._count, None
        self.complete = True
        self._own.clear()

    def stored(self, key: BlockKey, length: int) -> None:
        """Note that this node has stored a block."""
        if self._count is not None:
            self._own.add(key)
            _add(self._count, key, length)
        if self._shown is not self._count:
            _add(self._shown, key, length)

    def dropped(self, key: BlockKey) -> None:
        """Note that this node has dropped a block."""
        self._own.discard(key)
        if self._count is not None:
            _drop(self._count, key)
        if self._shown is not self._count:
            _drop(self._shown, key)

    def stats(self) -> BackendStats:
        """Return the fields of `Backend.stats` other than the capacity."""
        spaces = [space for space in self._shown.values() if space.blocks > 0]
        return BackendStats(
            blocks=sum(space.blocks for space in spaces),
            used_bytes=sum(space.blocks * (HEADER_BYTES + space.block_bytes) for space in spaces),
            index_complete=self.complete,
        )


def _add(spaces: dict[bytes, _Space], key: BlockKey, length: int) -> None:
    space = spaces.setdefault(key.namespace, _Space())
    space.blocks += 1
    space.block_bytes = length


def _drop(spaces: dict[bytes, _Space], key: BlockKey) -> None:
    spaces.setdefault(key.namespace, _Space()).blocks -= 1
