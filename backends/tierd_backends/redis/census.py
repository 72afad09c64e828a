"""How many blocks a node believes that the tier holds.

A count of the server's keys, then the node's own stores and drops. What other nodes store,
and what the server evicts or expires, shows only at the next count. The lid of
the tier is kept by it, lookups never are.
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
    """Belongs to the event loop. A count in progress shows, unless there is a whole one."""

    def __init__(self) -> None:
        self.complete = False
        self._shown: dict[bytes, _Space] = {}
        self._count: dict[bytes, _Space] | None = None
        self._own: set[BlockKey] = set()

    def begin(self) -> None:
        """A count begins, in the place of one that was broken off if there was one."""
        self._count = {}
        self._own.clear()
        if not self.complete:
            self._shown = self._count

    def seen(self, key: BlockKey, length: int) -> None:
        """The count has come by a block; what this node stored meanwhile is counted already."""
        assert self._count is not None
        if key not in self._own:
            _add(self._count, key, length)

    def end(self) -> None:
        """The count has been all round."""
        assert self._count is not None
        self._shown, self._count = self._count, None
        self.complete = True
        self._own.clear()

    def stored(self, key: BlockKey, length: int) -> None:
        """This node has stored a block."""
        if self._count is not None:
            self._own.add(key)
            _add(self._count, key, length)
        if self._shown is not self._count:
            _add(self._shown, key, length)

    def dropped(self, key: BlockKey) -> None:
        """This node has dropped a block."""
        self._own.discard(key)
        if self._count is not None:
            _drop(self._count, key)
        if self._shown is not self._count:
            _drop(self._shown, key)

    def stats(self) -> BackendStats:
        """For `Backend.stats`, but for the capacity."""
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
