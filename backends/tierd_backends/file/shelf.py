"""One namespace of the file tier in memory: which record holds which block, which is reusable.

Pure state of the event loop: no I/O, no await, no clock. An item is a record's number
across all slabs of the namespace. A record is free, taken (pinned by a write), resident
(in the index), or retired: out of the index, and free after its last unpin.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

from tierd.backend import Outcome
from tierd.chain import ChainIndex
from tierd.eviction import make_policy
from tierd.eviction.policy import PrefixRequest
from tierd_backends.file.slab import Slab
from tierd_backends.file.slab_index import RECORDS_MAX


class Shelf:
    """The slabs of a namespace and the blocks in them."""

    def __init__(self, namespace: bytes, slot_bytes: int, eviction: str) -> None:
        self.namespace = namespace
        self.slot_bytes = slot_bytes
        self.index = ChainIndex(make_policy(eviction, 0))
        self.slabs: dict[int, Slab] = {}
        self.next_number = 1
        self.indexed = True
        """False until every slab found at start has been read; until then nothing is evicted."""
        self.writing: dict[bytes, asyncio.Future[Outcome | None]] = {}
        """Blocks being written, and the outcome of each write; None if it was cancelled."""
        self._free: deque[int] = deque()
        self._pins: dict[int, int] = {}
        self._retired: set[int] = set()
        self._needed: dict[bytes, int] = {}

    @property
    def free_records(self) -> int:
        """Number of records that a write can take without an eviction."""
        return len(self._free)

    @property
    def idle(self) -> bool:
        """Whether the namespace is indexed, has no block, and no call is about to put one."""
        return self.indexed and not (len(self.index) or self.writing or self._needed)

    def slab_of(self, item: int) -> Slab:
        """Return the slab of an item's record."""
        return self.slabs[item // RECORDS_MAX]

    def find(self, block_hash: bytes) -> int | None:
        """Return the item that holds a block, or None."""
        return self.index.items.get(block_hash)

    def pin(self, item: int) -> None:
        """Protect a record from eviction and reuse until unpin()."""
        self._pins[item] = self._pins.get(item, 0) + 1
        self.slab_of(item).pins += 1

    def unpin(self, item: int) -> None:
        """Undo one pin(); the last one frees a retired record."""
        self.slab_of(item).pins -= 1
        left = self._pins.pop(item) - 1
        if left:
            self._pins[item] = left
        elif item in self._retired:
            self._retired.remove(item)
            # To the far end: a record whose I/O failed is the last one to be used again.
            self._free.appendleft(item)

    def retire(self, item: int, block_hash: bytes) -> bool:
        """Free a pinned record at its last unpin. Returns whether it held the block until now."""
        assert item in self._pins
        held = self.index.items.get(block_hash) == item
        if held:
            self.index.remove(item)
            self._retired.add(item)
        return held

    def need(self, hashes: Iterable[bytes]) -> None:
        """Protect these blocks, if resident, from eviction until unneed()."""
        for block_hash in hashes:
            self._needed[block_hash] = self._needed.get(block_hash, 0) + 1

    def unneed(self, hashes: Iterable[bytes]) -> None:
        """Undo one need()."""
        for block_hash in hashes:
            left = self._needed.pop(block_hash) - 1
            if left:
                self._needed[block_hash] = left

    def take(self, count: int) -> tuple[list[int], int]:
        """Take up to `count` records for writing, free ones first. Returns their items, and the
        number of evicted blocks. The caller pins the records before anything else runs."""
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        evicted: list[int] = []
        if len(taken) < count and self.indexed:
            evicted = self.index.evict(count - len(taken), self._busy)
        return taken + evicted, len(evicted)

    def use(self, hashes: Sequence[bytes]) -> None:
        """Count a batch's use of these blocks, parents first."""
        # Time 0: no policy of a storage tier reads the time.
        self.index.use(PrefixRequest(hashes, 0.0))

    def store(self, item: int, block_hash: bytes, parent: bytes, last_use: int) -> None:
        """Make the block in a record resident; no other record may hold its hash."""
        self.index.insert(item, block_hash, parent)
        slab = self.slab_of(item)
        slab.mark_used(item, last_use)

    def give_back(self, item: int) -> None:
        """Free a taken record that holds no block. It is still pinned, and free after unpin()."""
        assert item in self._pins
        self._retired.add(item)

    def add_slab(self, slab: Slab, free: Sequence[int]) -> None:
        """Add a slab. The records in `free` hold no block."""
        assert slab.slot_bytes == self.slot_bytes
        self.slabs[slab.number] = slab
        self._resize()
        self.add_free(slab, free)

    def add_free(self, slab: Slab, free: Sequence[int]) -> None:
        """Add records of an owned slab that turned out to hold no block."""
        first = slab.number * RECORDS_MAX
        # Reversed, because take() pops at the end: a fresh slab is filled front to back.
        self._free.extend(first + record for record in reversed(free))

    def drop_slab(self, slab: Slab) -> int:
        """Forget an unpinned slab and its blocks. Returns the number of those blocks."""
        assert slab.pins == 0
        first = slab.number * RECORDS_MAX
        before = len(self.index)
        for item in range(first, first + slab.records):
            with suppress(KeyError):
                self.index.hash_of(item)
                self.index.remove(item)
        self._free = deque(item for item in self._free if item // RECORDS_MAX != slab.number)
        del self.slabs[slab.number]
        self._resize()
        return before - len(self.index)

    def check(self) -> None:
        """Assert that each record is in exactly one state; for tests, with no call in flight."""
        self.index.check()
        assert not self._pins
        assert not self._needed
        assert not self._retired
        assert not self.writing
        free = set(self._free)
        held = set(self.index.items.values())
        assert len(free) == len(self._free)
        assert not free & held
        records = self.index.policy.capacity
        assert records == sum(slab.records for slab in self.slabs.values())
        assert not self.indexed or len(free) + len(held) == records

    def _resize(self) -> None:
        self.index.policy.resize(sum(slab.records for slab in self.slabs.values()))

    def _busy(self, item: int) -> bool:
        return item in self._pins or self.index.hash_of(item) in self._needed
