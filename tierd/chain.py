"""An index of chained blocks that evicts the least recently used leaf first.

Blocks form a forest: each names its parent's hash. Only a block without resident
children may go, so that what stays of a prefix never has a hole. Items are small
dense integers (slot numbers): what is known of an item lies in lists indexed by it,
here and at the owner, which halves memory and the cost of a touch against dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush, heapreplace

_ITEM_BITS = 32
_ITEM_MASK = (1 << _ITEM_BITS) - 1
_ABSENT = b""
_NO_PARENT = b"\xff" * 32
"""Stands for the parent of a block that would close a ring; no hash in earnest is this."""

_HEAP_SLACK = 64
"""Below this many entries the heap is not worth compacting."""


class ChainIndex:
    """Hash to item, and the order in which items may be evicted.

    Recency is a stamp that a touch of a whole batch shares; touching costs one list
    store an item. The heap holds at most one entry an item; an entry whose stamp is
    out of date is put back with the right one when it comes up, and one whose item
    left or got a child is dropped then. An entry is one integer, stamp above item:
    it compares in half the time of a tuple.
    """

    def __init__(self) -> None:
        self.items: dict[bytes, int] = {}
        self._hash: list[bytes] = []
        self._parent: list[bytes] = []
        self._children: list[int] = []
        self._stamp: list[int] = []
        self._queued = bytearray()
        # Resident children by parent hash, for parents that are not resident.
        self._orphans: dict[bytes, int] = {}
        self._heap: list[int] = []
        self._clock = 0

    def __len__(self) -> int:
        return len(self.items)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self.items

    def hash_of(self, item: int) -> bytes:
        """Hash of a resident item; KeyError if the item is not in the index."""
        if 0 <= item < len(self._hash) and (block_hash := self._hash[item]):
            return block_hash
        raise KeyError(item)

    def parent_of(self, item: int) -> bytes:
        """Parent hash of a resident item; KeyError if the item is not in the index."""
        self.hash_of(item)
        return self._parent[item]

    def insert(self, item: int, block_hash: bytes, parent: bytes) -> None:
        """Add an item as the most recently used one. Neither item nor hash may be present."""
        assert block_hash
        assert block_hash not in self.items
        assert 0 <= item <= _ITEM_MASK
        if item >= len(self._hash):
            self._grow(item + 1)
        assert not self._hash[item]
        if parent == block_hash or (
            block_hash in self._orphans and self._is_below(parent, block_hash)
        ):
            # No honest chain has a ring; the blocks of one could never be evicted.
            parent = _NO_PARENT
        above = self.items.get(parent)
        if above is not None:
            self._children[above] += 1
        else:
            self._orphans[parent] = self._orphans.get(parent, 0) + 1
        children = self._orphans.pop(block_hash, 0)
        self._clock += 1
        self.items[block_hash] = item
        self._hash[item] = block_hash
        self._parent[item] = parent
        self._children[item] = children
        self._stamp[item] = self._clock
        if not children:
            self._push(item)

    def _is_below(self, block_hash: bytes, ancestor: bytes) -> bool:
        """Whether `ancestor` is among the resident ancestors of `block_hash`, or above the last."""
        item = self.items.get(block_hash)
        while item is not None:
            if self._parent[item] == ancestor:
                return True
            item = self.items.get(self._parent[item])
        return False

    def remove(self, item: int) -> None:
        """Take an item out, whatever its place; its parent may become a leaf.

        KeyError if the item is not in the index.
        """
        self.hash_of(item)
        self._drop(item)
        # The item's entry stays in the heap until it comes up; a bound keeps an index
        # that is mostly filled and flushed from growing without end.
        if len(self._heap) > _HEAP_SLACK and len(self._heap) > 2 * len(self.items):
            self._compact()

    def move(self, item: int, target: int) -> None:
        """Give a resident item another, free number; it keeps its place and its recency.

        KeyError if the item is not in the index.
        """
        block_hash = self.hash_of(item)
        if target >= len(self._hash):
            self._grow(target + 1)
        assert not self._hash[target]
        if self._queued[target]:
            # The entry of whoever had the number before may come up later than this item must.
            self._compact()
        self.items[block_hash] = target
        for column in (self._hash, self._parent):
            column[target], column[item] = column[item], _ABSENT
        self._children[target] = self._children[item]
        self._stamp[target] = self._stamp[item]
        if not self._children[target]:
            self._push(target)

    def touch(self, items: Iterable[int]) -> None:
        """Make resident items the most recently used ones."""
        self._clock += 1
        stamp, now = self._stamp, self._clock
        for item in items:
            stamp[item] = now

    def evict(self, count: int, busy: Callable[[int], bool]) -> list[int]:
        """Remove up to `count` leaves that are not busy, coldest first, and return them.

        A parent that becomes a leaf meanwhile takes its turn in the same call.
        """
        taken: list[int] = []
        kept: list[int] = []
        heap, stamp = self._heap, self._stamp
        while heap and len(taken) < count:
            entry = heap[0]
            item = entry & _ITEM_MASK
            if not self._hash[item] or self._children[item]:
                heappop(heap)
                self._queued[item] = False
            elif stamp[item] != entry >> _ITEM_BITS:
                heapreplace(heap, stamp[item] << _ITEM_BITS | item)
            elif busy(item):
                kept.append(heappop(heap))
            else:
                heappop(heap)
                self._queued[item] = False
                self._drop(item)
                taken.append(item)
        for entry in kept:
            heappush(heap, entry)
        return taken

    def check(self) -> None:
        """Assert every invariant; for tests."""
        resident = {item for item, block_hash in enumerate(self._hash) if block_hash}
        assert resident == set(self.items.values())
        assert len(resident) == len(self.items)
        counted: dict[bytes, int] = {}
        for item in resident:
            assert self.items[self._hash[item]] == item
            assert 0 < self._stamp[item] <= self._clock
            counted[self._parent[item]] = counted.get(self._parent[item], 0) + 1
        for item in resident:
            assert self._children[item] == counted.pop(self._hash[item], 0)
        assert counted == self._orphans
        queued = {entry & _ITEM_MASK for entry in self._heap}
        assert len(queued) == len(self._heap)
        assert queued == {item for item, flag in enumerate(self._queued) if flag}
        for entry in self._heap:
            # An entry may come up too early, which puts it back, but never too late.
            item = entry & _ITEM_MASK
            assert not self._hash[item] or entry >> _ITEM_BITS <= self._stamp[item]
        assert {item for item in resident if not self._children[item]} <= queued

    def _drop(self, item: int) -> None:
        block_hash, parent = self._hash[item], self._parent[item]
        self._hash[item] = self._parent[item] = _ABSENT
        del self.items[block_hash]
        if self._children[item]:
            self._orphans[block_hash] = self._children[item]
        above = self.items.get(parent)
        if above is not None:
            self._children[above] -= 1
            if not self._children[above]:
                self._push(above)
        elif self._orphans[parent] > 1:
            self._orphans[parent] -= 1
        else:
            del self._orphans[parent]

    def _push(self, item: int) -> None:
        if not self._queued[item]:
            self._queued[item] = True
            heappush(self._heap, self._stamp[item] << _ITEM_BITS | item)

    def _compact(self) -> None:
        """Rebuild the heap from the leaves alone."""
        leaves = [i for i in self.items.values() if not self._children[i]]
        self._heap = [self._stamp[i] << _ITEM_BITS | i for i in leaves]
        heapify(self._heap)
        self._queued = bytearray(len(self._queued))
        for item in leaves:
            self._queued[item] = True

    def _grow(self, size: int) -> None:
        # An eighth more than asked: one item at a time costs twice an insert.
        more = size + size // 8 - len(self._hash)
        self._hash.extend([_ABSENT] * more)
        self._parent.extend([_ABSENT] * more)
        self._children.extend([0] * more)
        self._stamp.extend([0] * more)
        self._queued.extend(bytes(more))
