"""Bringing blocks from storage tiers into L2 for requests that wait for them.

A promotion is a batch of blocks that some waiter needs, in prefix order; a block is
promoted once, however many wait for it. Waiters leave at their deadline; the slots
of a batch belong to the batch until its I/O has ended, whoever still waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tierd.core.host import HostTier, Lease, Space

if TYPE_CHECKING:
    from tierd.daemon.tier import StorageTier


@dataclass(eq=False, slots=True)
class Waiter:
    """One ACQUIRE: what it holds so far, by space and block hash."""

    spaces: list[Space]
    held: list[dict[bytes, int]] = field(default_factory=list)
    batches: list[Promotion] = field(default_factory=list)
    open: bool = True

    def __post_init__(self) -> None:
        self.held = [{} for _ in self.spaces]

    def take(self, host: HostTier, at: int, hashes: Sequence[bytes], slots: Sequence[int]) -> None:
        """Hold READY slots of the space at index `at`."""
        host.hold(self.spaces[at], slots)
        self.held[at].update(zip(hashes, slots, strict=True))

    def refresh(self, host: HostTier, hashes: Sequence[bytes]) -> None:
        """Hold what has become resident at the front since the last look."""
        for at, space in enumerate(self.spaces):
            known = self.held[at]
            slots = host.prefix(space, hashes)
            # By hash: a client may ask for a block twice, and it is held once.
            fresh = {h: s for h, s in zip(hashes, slots, strict=False) if h not in known}
            self.take(host, at, list(fresh), list(fresh.values()))

    def length(self, at: int, hashes: Sequence[bytes]) -> int:
        """Blocks held without a gap from the first on."""
        held = self.held[at]
        for count, block_hash in enumerate(hashes):
            if block_hash not in held:
                return count
        return len(hashes)

    def close(self, host: HostTier) -> None:
        """Let go of everything and leave the batches; idempotent."""
        if not self.open:
            return
        self.open = False
        for space, held in zip(self.spaces, self.held, strict=True):
            host.unhold(space, list(held.values()))
            held.clear()
        for batch in self.batches:
            batch.waiters.discard(self)

    def conclude(
        self, host: HostTier, owner: int, hashes: Sequence[bytes], expires_ns: int
    ) -> Lease | None:
        """Lease the longest prefix that every space holds, and let go of the rest."""
        count = min(self.length(at, hashes) for at in range(len(self.spaces)))
        lease = None
        if count:
            parts = [
                (space, [held[h] for h in hashes[:count]])
                for space, held in zip(self.spaces, self.held, strict=True)
            ]
            lease = host.grant(owner, parts, expires_ns)
        self.close(host)
        return lease


@dataclass(eq=False, slots=True)
class Promotion:
    """A batch of one space's blocks on their way from one tier."""

    space: Space
    tier: StorageTier
    hashes: list[bytes]
    done: asyncio.Future[None]
    waiters: set[Waiter] = field(default_factory=set)
    started: bool = False

    def join(self, waiter: Waiter) -> None:
        """Have `waiter` wait for this batch."""
        self.waiters.add(waiter)
        waiter.batches.append(self)
