"""Which storage tiers have the block in each slot, or are getting it: two bits a tier.

Bit i stands for tier i. It is set while the tier has the block, as far as is known, while the
block waits for it, and where the tier is not meant to get it. Beside it `asked_bit` is set in the
first case alone: then the tier is asked now and then whether it still has the block.
"""

from __future__ import annotations

from collections.abc import Iterable

from tierd.config import TIERS_MAX


def asked_bit(bit: int) -> int:
    """The bit beside that of a tier: it may be asked for the block, which is lost if it says no.
    A tier that is kept from having the block is not asked."""
    return bit << TIERS_MAX


class TierBits:
    """The bits of all slots of a namespace; `HostTier.mark` changes them."""

    __slots__ = ("_bits",)

    def __init__(self) -> None:
        self._bits: list[int] = []

    def __len__(self) -> int:
        return len(self._bits)

    def of(self, slot: int) -> int:
        """The bits of one slot."""
        return self._bits[slot]

    def lacking(self, slots: Iterable[int], bits: int) -> list[int]:
        """Those of the slots that lack one of the bits."""
        known = self._bits
        return [slot for slot in slots if known[slot] & bits != bits]

    def having(self, slots: Iterable[int], bits: int) -> list[int]:
        """Those of the slots that have one of the bits."""
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
