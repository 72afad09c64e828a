"""Whose KV the engine's blocks hold, and which blocks get a new owner.

A block is known if a request's own forward pass computed it, or tierd loaded it. A block that the
engine hands out is removed at once, before its new owner writes to it.
"""

from __future__ import annotations

from collections.abc import Sequence


class BlockContent:
    """The hash of each known block, and the blocks handed out since the last step."""

    def __init__(self) -> None:
        self._hashes: dict[int, bytes] = {}
        self._handed_out: list[int] = []
        self._any_handed_out = False

    def holds(self, block: int, block_hash: bytes) -> bool:
        """Whether a block is known to hold this KV."""
        return self._hashes.get(block) == block_hash

    def put(self, block: int, block_hash: bytes) -> None:
        """Record the KV that a block holds."""
        self._hashes[block] = block_hash

    def hand_out(self, blocks: Sequence[int]) -> None:
        """Record that these blocks get a new owner, which may write to them from now on."""
        self._handed_out.extend(blocks)
        for block in blocks:
            self._hashes.pop(block, None)

    def forget(self) -> None:
        """Forget the content of every block."""
        self._hashes = {}

    def doubt(self) -> None:
        """After an error: forget the content of every block; any may have a new owner."""
        self._hashes = {}
        self._any_handed_out = True

    def take_handed_out(self) -> tuple[list[int], bool]:
        """Return the blocks handed out since the last call, and whether any block may have been.

        Raises nothing.
        """
        blocks, self._handed_out = self._handed_out, []
        unknown, self._any_handed_out = self._any_handed_out, False
        return blocks, unknown
