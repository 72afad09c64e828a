"""How many blocks a node believes that the tier holds.

A count of the server's keys at the start, then the node's own stores and drops. What other
nodes store, and what the server evicts or expires, shows only at the next start: this is
for the operator, nothing is decided by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierd.backend import HEADER_BYTES, BackendStats
from tierd.types import BlockKey


@dataclass(slots=True)
class _Space:
    """Blocks of a namespace, all of one length. Below 0 while a drop is known before the store
    that it followed, since two batches may end in another order than the server saw them."""

    blocks: int = 0
    block_bytes: int = 0


class Census:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self.complete = False
        self._spaces: dict[bytes, _Space] = {}
        self._own: set[BlockKey] = set()

    def begin(self) -> None:
        """Forget everything: a count begins."""
        self.complete = False
        self._spaces.clear()
        self._own.clear()

    def seen(self, key: BlockKey, length: int) -> None:
        """The count has come by a block; what this node stored meanwhile is counted already."""
        if key not in self._own:
            self._add(key, length)

    def end(self) -> None:
        """The count has been all round."""
        self.complete = True
        self._own.clear()

    def stored(self, key: BlockKey, length: int) -> None:
        """This node has stored a block."""
        if not self.complete:
            self._own.add(key)
        self._add(key, length)

    def dropped(self, key: BlockKey) -> None:
        """This node has dropped a block."""
        self._own.discard(key)
        self._spaces.setdefault(key.namespace, _Space()).blocks -= 1

    def stats(self) -> BackendStats:
        """For `Backend.stats`."""
        spaces = [space for space in self._spaces.values() if space.blocks > 0]
        return BackendStats(
            blocks=sum(space.blocks for space in spaces),
            used_bytes=sum(space.blocks * (HEADER_BYTES + space.block_bytes) for space in spaces),
            index_complete=self.complete,
        )

    def _add(self, key: BlockKey, length: int) -> None:
        space = self._spaces.setdefault(key.namespace, _Space())
        space.blocks += 1
        space.block_bytes = length
