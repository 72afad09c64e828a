"""One incarnation of a daemon's host memory, and the state that it leaves to the next one."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from functools import partial

from tests.support import blocks
from tests.support.page_engine import ROOT, chain, content, namespace, parents_of
from tierd.backend import checksum
from tierd.clock import Clock, SystemClock
from tierd.config import StorageConfig
from tierd.core.host import HostTier
from tierd.core.l2.space import Space
from tierd.daemon.l2.incarnations import Incarnations
from tierd.daemon.l2.memory import INTERNAL, HostMemory
from tierd.daemon.l2.verification import Verification
from tierd.memory.ledger import Ledger, LedgerRecord
from tierd.testing.simulation.keeper import Keeper

SEGMENT = 4 * (32 << 10)


CAPACITY = 8 * SEGMENT


class ManualClock:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def monotonic_ns(self) -> int:
        return self.now_ns


class OneIncarnation:
    """The host memory of a daemon, without its tasks."""

    def __init__(
        self,
        keeper: Keeper,
        *,
        capacity: int = CAPACITY,
        tiers: tuple[StorageConfig, ...] = (),
        clock: Clock | None = None,
    ) -> None:
        clock = clock or SystemClock()
        self.host = HostTier(capacity, segment_bytes=SEGMENT)
        self.counters: Counter[str] = Counter()
        self.memory = HostMemory(self.host, clock, self.counters, None, manager=keeper)
        self.incarnations = Incarnations(self.memory, tiers, os.urandom(8), clock)
        self.incarnations.begin()

    def space(self, model: str = "m") -> Space:
        space = self.host.open_space(namespace(model))
        assert space is not None
        return space

    def store(self, space: Space, hashes: list[bytes], *, prove: bool = True) -> list[int]:
        """Store blocks with the right bytes; returns their slots. `prove`: with their checksums."""
        return self._fill(space, hashes, parents_of(hashes), content, prove=prove)

    def store_chain(self, space: Space, count: int, tag: object, *, prove: bool) -> list[int]:
        """Store self-identifying blocks of any namespace; returns their slots."""
        hashes, parents = blocks.chain(count, tag)
        return self._fill(
            space, hashes, parents, partial(blocks.payload, space.namespace), prove=prove
        )

    def _fill(
        self,
        space: Space,
        hashes: list[bytes],
        parents: list[bytes],
        right: Callable[[bytes], bytes],
        *,
        prove: bool,
    ) -> list[int]:
        reservation = self.memory.reserve(INTERNAL, space, hashes, parents)
        slots = [slot for slot in reservation.slots if slot >= 0]
        for block_hash, slot in zip(reservation.hashes, reservation.slots, strict=True):
            if slot >= 0:
                self.memory.payload(space, slot)[:] = right(block_hash)
        self.host.commit(INTERNAL, reservation.reservation_id, len(slots))
        if prove:
            sums = {slot: checksum(self.memory.payload(space, slot)) for slot in slots}
            self.memory.note_checksums(space, sums)
        self.memory.check()
        return slots

    def prove(self) -> None:
        """Verify all blocks."""
        asyncio.run(Verification(self.memory).run())
        self.memory.check()

    def end(self) -> None:
        """End as a process does."""
        self.incarnations.close()
        self.memory.arena.close()


def held_by_nobody(incarnation: OneIncarnation) -> bool:
    """Whether every slot may be reused."""
    return not any(
        any(space.refs) or space.quarantined for space in incarnation.host.spaces.values()
    )


def ledger_with(records: list[LedgerRecord]) -> Ledger:
    ledger = Ledger.create(namespace(), 3, 8, segment=77)
    for record in records:
        ledger.ready(record)
    return ledger


RECORDS = [
    LedgerRecord(place, h, ROOT, 4096, checksum(h), place + 5, place, place % 2)
    for place, h in enumerate(chain("ledger", 6))
]
