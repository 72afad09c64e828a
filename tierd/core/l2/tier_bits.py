"""Which storage tiers have the block in each slot, or are getting it: two bits per tier.

Bit i stands for tier i. It is set if the tier is known to have the block, if the block waits to
be written to it, or if the tier must not get the block. A second bit, `asked_bit`, is set only in
the first case: then the daemon asks the tier now and then whether it still has the block.
"""

from __future__ import annotations

from collections.abc import Iterable

from tierd.config import TIERS_MAX


def asked_bit(bit: int) -> int:
    """Return the second bit of a tier: the tier has the block and may be asked whether it still
    does. A tier that must not get the block is not asked."""
    return bit << TIERS_MAX


class TierBits:
    """The bits of all slots of a namespace; `HostTier.mark` changes them."""

    __slots__ = ("_bits",)

    def __init__(self) -> None:
        self._bits: list[int] = []

    def __len__(self) -> int:
        return len(self._bits)

    def of(self, slot: int) -> int:
        """Return the bits of one slot."""
        return self._bits[slot]

    def lacking(self, slots: Iterable[int], bits: int) -> list[int]:
        """Return the slots that lack one of the bits."""
        known = self._bits
        return [slot for slot in slots if known[slot] & bits != bits]

    def having(self, slots: Iterable[int], bits: int) -> list[int]:
        """Return the slots that have one of the bits."""
        known = self._bits
        return [slot for slot in slots if known[slot] & bits]

    def _mark(self, slots: Iterable[int], add: int, remove: int) -> None:
        known, keep = self._bits, ~remove
        for slot in slots:
            known[slot] = known[slot] & keep | add

    def _grow(self, count: int) -> None:
        self._bits += [0] * count

    def _cut(self, total: int) -> None:
        del self._bits[total:]
