"""Leases: which owner may use which slots, and until when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tierd.core.l2.space import Space
from tierd.core.states import LEASES, LeaseEvent, LeaseState, step

LEASED_BLOCKS_MAX: Final = 1 << 22
LEASED_BLOCKS_ALL_MAX: Final = 1 << 24
"""Leased blocks of one owner and of all owners, counted once per lease: each takes 8 bytes of the
daemon's own memory. An engine that does not release its leases gets no more."""


@dataclass(slots=True, eq=False)
class SlotLease:
    """The right to use slots until `expires_ns` (CLOCK_MONOTONIC), even if the owner is gone."""

    lease_id: int
    owner: int
    parts: list[tuple[Space, list[int]]]
    expires_ns: int
    sources: bytes = b""
    """One byte per block: 0 if host memory had it, else 1 + the number of the tier that delivered
    it. Empty if host memory had all blocks."""
    state: LeaseState = LeaseState.HELD


class Leases:
    """The leases that have not ended, and the number of leased blocks by owner."""

    __slots__ = ("_blocks", "_held")

    def __init__(self) -> None:
        self._held: dict[int, SlotLease] = {}
        self._blocks: Counter[int] = Counter()

    @property
    def held(self) -> Mapping[int, SlotLease]:
        """Leases by id."""
        return self._held

    def may(self, owner: int, blocks: int) -> bool:
        """Whether `blocks` more leased blocks are within the bounds per owner and in total."""
        known = self._blocks
        mine = known[owner] + blocks <= LEASED_BLOCKS_MAX
        return mine and known.total() + blocks <= LEASED_BLOCKS_ALL_MAX

    def grant(self, lease: SlotLease) -> None:
        """Add a lease, and hold its slots, which are readable."""
        for space, slots in lease.parts:
            space._hold(slots)
            self._blocks[lease.owner] += len(slots)
        self._held[lease.lease_id] = lease

    def end(self, lease_id: int, owner: int, event: LeaseEvent) -> bool:
        """End a lease; return False if it is not the owner's or has ended."""
        lease = self._held.get(lease_id)
        if lease is None or lease.owner != owner:
            return False
        lease.state = step(LEASES, lease.state, event)
        del self._held[lease_id]
        for space, slots in lease.parts:
            space._unhold(slots)
            self._blocks[owner] -= len(slots)
        if not self._blocks[owner]:
            del self._blocks[owner]
        return True

    def expire(self, now_ns: int) -> int:
        """End leases that have expired; return their count."""
        # Leases are not sorted by expiry: their duration can be reconfigured at any time.
        over = [lease for lease in self._held.values() if lease.expires_ns <= now_ns]
        for lease in over:
            self.end(lease.lease_id, lease.owner, LeaseEvent.EXPIRE)
        return len(over)

    def check(self) -> dict[bytes, Counter[int]]:
        """Assert every invariant; return the leases per slot by namespace. For tests."""
        leased = Counter(dict.fromkeys(self._blocks, 0))
        held: dict[bytes, Counter[int]] = {}
        for lease in self._held.values():
            assert lease.state is LeaseState.HELD
            for space, slots in lease.parts:
                leased[lease.owner] += len(slots)
                held.setdefault(space.digest, Counter()).update(slots)
        assert leased == self._blocks
        return held
