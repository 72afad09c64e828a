"""Lookups of a prefix in host memory, and its lease in the same decision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tierd.core.l2.evictions import Evictions
from tierd.core.l2.leases import Leases, SlotLease
from tierd.core.l2.space import Space


class Taken(NamedTuple):
    """The result of an attempt to lease a prefix that several spaces must have."""

    lease: SlotLease | None
    resident: int
    """Number of leading blocks that every space has, verified."""
    settled: bool
    """Whether no promotion or verification could make the prefix longer."""
    refused: bool = False
    """Whether the owner has too many leased blocks."""


class BlockFinder:
    """Looks blocks up by their hashes, and leases them."""

    __slots__ = ("_evictions", "_leases")

    def __init__(self, evictions: Evictions, leases: Leases) -> None:
        self._evictions = evictions
        self._leases = leases

    def prefix(self, space: Space, hashes: Sequence[bytes], now_s: int) -> list[int]:
        """See HostTier.prefix."""
        space._used_s = now_s
        get = space._chain.items.get
        found = list(map(get, hashes))
        if None in found and space._evicting and self._evictions.revive(space, hashes):
            found = list(map(get, hashes))
        if None in found:
            del found[found.index(None) :]
        slots: list[int] = found  # type: ignore[assignment]  # cut at the first None
        if unverified := space._unverified:
            unserved = (i for i, slot in enumerate(slots) if slot in unverified)
            del slots[next(unserved, len(slots)) :]
        space._chain.touch(slots)
        return slots

    def unverified(self, space: Space, hashes: Sequence[bytes]) -> list[int]:
        """See HostTier.unverified."""
        if not space._unverified:
            return []
        return [slot for slot in space.find(hashes) if slot in space._unverified]

    def take(
        self,
        number: int,
        owner: int,
        spaces: Sequence[Space],
        hashes: Sequence[bytes],
        expires_ns: int,
        now_s: int,
        *,
        more_elsewhere: bool,
    ) -> Taken:
        """See HostTier.take_prefix; `number` becomes the lease's id."""
        parts = [(space, self.prefix(space, hashes, now_s)) for space in spaces]
        count = min(len(slots) for _, slots in parts)
        if count < len(hashes):
            more = more_elsewhere or any(self.unverified(space, hashes) for space in spaces)
            if more:
                return Taken(None, count, settled=False)
        if count == 0:
            return Taken(None, 0, settled=True)
        if not self._leases.may(owner, count * len(spaces)):
            return Taken(None, count, settled=True, refused=True)
        cut = [(space, slots[:count]) for space, slots in parts]
        lease = SlotLease(number, owner, cut, expires_ns)
        self._leases.grant(lease)
        return Taken(lease, count, settled=True)
