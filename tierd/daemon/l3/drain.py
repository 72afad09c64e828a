"""The blocks that a stopping daemon still has to offer to one storage tier.

A stop offers every tier the blocks of host memory that the tier lacks. While a flush bars a
namespace, its blocks are kept back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from tierd.core.l2.space import Space
from tierd.daemon.l3.renewal import Covers

Block = tuple[Space, bytes]
"""A block by its hash: it may move to another slot, or leave, before the tier has room."""


class DrainBacklog:
    """Blocks that one tier has not been offered yet. Empty unless the daemon is stopping."""

    def __init__(self) -> None:
        self._waiting: deque[Block] = deque()
        self._barred: dict[Space, list[Block]] = {}
        self.given_up = 0
        """Blocks that were offered during the stop but not written."""

    def __len__(self) -> int:
        return len(self._waiting) + sum(map(len, self._barred.values()))

    @property
    def unfinished(self) -> int:
        """Blocks that are not offered yet, or were given up."""
        return len(self) + self.given_up

    def add(self, blocks: Iterable[Block]) -> None:
        """Offer blocks after all others."""
        self._waiting.extend(blocks)

    def add_first(self, blocks: Sequence[Block]) -> None:
        """Offer blocks before all others."""
        self._waiting.extendleft(reversed(blocks))

    def take(self, barred: Covers, room: Callable[[Space], int]) -> Iterator[Block]:
        """Take out blocks as long as the tier has `room` and their namespace is not `barred`."""
        for space in [space for space in self._barred if not barred(space.digest)]:
            self.add_first(self._barred.pop(space))
        while self._waiting and room(self._waiting[0][0]):
            block = self._waiting.popleft()
            if barred(block[0].digest):
                self._barred.setdefault(block[0], []).append(block)
            else:
                yield block


def lacked_blocks(spaces: Iterable[Space], bit: int) -> list[Block]:
    """Return the blocks of host memory that a tier lacks.

    The most used blocks come first, and parents mostly before their children.
    """
    lacking = [
        (space, block_hash)
        for space in spaces
        for block_hash, slot in space.items.items()
        if not space.tiers.of(slot) & bit
    ]
    lacking.sort(key=lambda block: -block[0].reuse.uses(block[1]))
    return lacking
