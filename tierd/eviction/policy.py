"""The interface of eviction policies, which order the leaves of an index for eviction.

The index (`tierd.chain`) knows which blocks are resident and which of them are leaves; a
policy knows how much each is worth. Pure: each request carries its time, in seconds of a clock
that never goes back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from typing import ClassVar, Final, NamedTuple

ITEM_BITS: Final = 32
ITEM_MASK: Final = (1 << ITEM_BITS) - 1

ABSENT: Final = -1
"""Value in the column of children for an item that is not resident."""

NO_ITEM: Final = -1

GHOSTS_MIN: Final = 64
"""Minimum number of evicted blocks to remember, whatever the capacity."""

HEAP_SLACK: Final = 64
"""Stale entries that are allowed before the heaps are compacted."""


class PrefixRequest(NamedTuple):
    """One request's use of a chain of blocks, in chain order from the root.

    `partial` means that the last block is not full: an engine offloads only full blocks,
    but a trace lists partial ones. `output_tokens` is the number of tokens that the engine
    generated or expects to generate, None if unknown.
    """

    hashes: Sequence[bytes]
    now_s: float
    partial: bool = False
    output_tokens: int | None = None


class Policy(ABC):
    """Orders the leaves of one index. Items are the index's small dense integers.

    Only the index calls a policy: it inserts each item, exposes it whenever it becomes a leaf
    again, and removes it. `capacity` is the maximum number of items (`resize`).
    """

    name: ClassVar[str]
    places: ClassVar[int] = 1
    """Number of queues of leaves; a `victim` is chosen among the heads of the queues."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.leaves = LeafHeaps(self.places)
        self.hashes: list[bytes] = []
        self._aside: list[int] = []

    def attach(self, children: list[int], hashes: list[bytes]) -> None:
        """Set the index's columns with each item's number of children and hash; read-only."""
        self.leaves.children = children
        self.hashes = hashes

    def resize(self, capacity: int) -> None:
        """Set the maximum number of items."""
        self.capacity = capacity

    @abstractmethod
    def use(self, request: PrefixRequest, items: Sequence[int | None]) -> None:
        """Count one request's use; `items[i]` is the item of block i, None if not resident."""

    @abstractmethod
    def touch(self, items: Iterable[int]) -> None:
        """Make resident items recent without counting a use."""

    def taught(self, items: Iterable[int]) -> None:  # noqa: B027  # most read no book
        """The `Reuse` book was taught uses of resident items."""

    @abstractmethod
    def insert(self, item: int, block_hash: bytes) -> None:
        """Add a resident item; its block may have been used before."""

    @abstractmethod
    def victim(self) -> int | None:
        """Return the leaf to evict next, or None if there is none; does not remove it."""

    def set_aside(self, item: int) -> None:
        """Skip the last victim, which is busy, until `restore`."""
        self.leaves.pop(item)
        self._aside.append(item)

    def restore(self) -> None:
        """End a series of victims: items that were set aside may be victims again."""
        self.leaves.enter_head()
        if self._aside:
            aside, self._aside = self._aside, []
            for item in aside:
                self.expose(item)

    def park(self, item: int) -> None:
        """Exclude the last victim, which must be kept, until `unpark`."""
        self.set_aside(item)
        self._aside.pop()
        self.leaves.parked.add(item)

    def unpark(self, item: int) -> None:
        """Make a parked item evictable again; no effect on other resident items."""
        if item in self.leaves.parked:
            self.leaves.parked.remove(item)
            if not self.leaves.children[item]:
                self.expose(item)

    def expose(self, item: int) -> None:
        """Note that an item has become a leaf."""
        self.leaves.expose(item)

    def remove(self, item: int, block_hash: bytes, *, evicted: bool) -> None:
        """Remove an item; `evicted` is false if it was removed for a reason besides its worth."""
        self.leaves.drop(item, first=evicted)

    def move(self, item: int, target: int) -> None:
        """Give an item another number; it keeps its place and rank."""
        self.leaves.put(target, self.leaves.place[item], self.leaves.rank[item])

    def check(self) -> None:
        """Assert every invariant; for tests."""
        assert not self._aside
        self.leaves.check()


class CountedUses(Policy):
    """A policy that counts the uses of each resident item."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._uses: list[int] = []

    def _set_uses(self, item: int, count: int) -> None:
        if item >= len(self._uses):
            self._uses.extend([0] * (item + item // 8 + 1 - len(self._uses)))
        self._uses[item] = count

    def move(self, item: int, target: int) -> None:
        super().move(item, target)
        self._set_uses(target, self._uses[item])


class Ghosts:
    """Records of at most `limit` blocks that are not resident; the oldest are forgotten first."""

    def __init__(self, limit: int) -> None:
        self.limit = max(limit, GHOSTS_MIN)
        self.records: dict[bytes, int] = {}

    def resize(self, limit: int) -> None:
        """Set the maximum number of records."""
        self.limit = max(limit, GHOSTS_MIN)
        if len(self.records) > self.limit:
            self.trim()

    def put(self, block_hash: bytes, record: int) -> None:
        """Remember a block as the newest one."""
        self.records.pop(block_hash, None)
        self.records[block_hash] = record
        if len(self.records) > self.limit:
            self.trim()

    def trim(self) -> None:
        """Forget the oldest eighth.

        Deleting one at a time would be slow: a dict would step over all earlier deletions.
        """
        for block_hash in list(islice(self.records, len(self.records) - self.limit * 7 // 8)):
            del self.records[block_hash]

    def check(self, limit: int) -> None:
        """Assert that there are at most `limit` records; for tests."""
        assert len(self.records) <= max(limit, GHOSTS_MIN)


class LeafHeaps:
    """Queues of leaves by rank; the lowest rank is evicted first.

    Each item has a place (its queue) and a rank in it. While the item keeps its place, only
    `rerank` may lower its rank. Heap entries are lazy: when an entry reaches the top, an outdated
    rank is corrected, and the entry of an item that was removed, got a child or changed its place
    is dropped. There are at most twice as many entries as there ever were items, plus HEAP_SLACK.

    Victims are mostly a leaf, its parent, the parent's parent, all of one request. A parent whose
    rank is not above the rank of its child, which was just removed, is next in its place. It then
    is the `head`, which has no heap entry until the series of victims ends or leaves this chain.
    """

    def __init__(self, places: int) -> None:
        self.heaps: list[list[int]] = [[] for _ in range(places)]
        self.children: list[int] = []
        self.rank: list[int] = []
        self.place: list[int] = []
        self.parked: set[int] = set()
        """Items that must be kept; a parked leaf needs no entry."""
        self.head = NO_ITEM
        # Place and rank of the victim that was just removed, until its parent is exposed.
        self._gone = NO_ITEM, NO_ITEM
        # Items that may be leaves without an entry. Most get a child before the next `settle`.
        self._fresh: list[int] = []

    @property
    def entries(self) -> int:
        """Number of entries, including stale entries and entries still to be made."""
        return sum(map(len, self.heaps)) + len(self._fresh)

    def put(self, item: int, place: int, rank: int) -> None:
        """Give an item that is or becomes resident a place and a rank."""
        if item >= len(self.rank):
            more = item + item // 8 + 1 - len(self.rank)
            self.rank.extend([0] * more)
            self.place.extend([0] * more)
        self.rank[item] = rank
        self.place[item] = place
        self._fresh.append(item)

    def expose(self, item: int) -> None:
        """Add an entry for a leaf, or make it the head."""
        place, rank = self.place[item], self.rank[item]
        gone, rank_gone = self._gone
        if self.head != NO_ITEM:
            self.enter_head()
        elif place == gone and rank <= rank_gone:
            self.head = item
            return
        heappush(self.heaps[place], rank << ITEM_BITS | item)

    def rerank(self, item: int, place: int, rank: int) -> None:
        """Give a resident item a new place and rank; the rank may be lower than before."""
        self.enter_head()
        sooner = self.place[item] != place or rank < self.rank[item]
        self.place[item] = place
        self.rank[item] = rank
        if sooner and not self.children[item]:
            self._fresh.append(item)

    def settle(self) -> None:
        """Add entries for new leaves; call it before a series of `peek`."""
        if not self._fresh:
            return
        self.enter_head()
        children = self.children
        fresh = [item for item in self._fresh if not children[item]]
        self._fresh.clear()
        if sum(map(len, self.heaps)) + len(fresh) > HEAP_SLACK + len(children):
            self._compact()
            return
        for item in fresh:
            self.expose(item)

    def drop(self, item: int, *, first: bool) -> None:
        """Remove an item; `first` means that it was the first of its place."""
        if item == self.head:
            self.head = NO_ITEM
        if self.parked:
            self.parked.discard(item)
        self._gone = (self.place[item], self.rank[item]) if first else (NO_ITEM, NO_ITEM)
        if len(self._fresh) > HEAP_SLACK + len(self.rank):
            self.settle()

    def enter_head(self) -> None:
        """Add an entry for the head, if there is one, and clear it."""
        self._gone = NO_ITEM, NO_ITEM
        if self.head != NO_ITEM:
            item, self.head = self.head, NO_ITEM
            self.expose(item)

    def peek(self, place: int) -> int:
        """Return the leaf with the lowest rank in a place, or NO_ITEM."""
        if self.head != NO_ITEM and self.place[self.head] == place:
            return self.head
        heap, children = self.heaps[place], self.children
        while heap:
            entry = heap[0]
            item = entry & ITEM_MASK
            if children[item] or self.place[item] != place:
                heappop(heap)
            elif self.rank[item] != entry >> ITEM_BITS:
                heapreplace(heap, self.rank[item] << ITEM_BITS | item)
            else:
                return item
        return NO_ITEM

    def pop(self, item: int) -> None:
        """Remove the entry of the leaf that `peek` has just returned."""
        if item == self.head:
            self.head = NO_ITEM
            return
        entry = heappop(self.heaps[self.place[item]])
        assert entry & ITEM_MASK == item

    def _compact(self) -> None:
        for heap in self.heaps:
            heap.clear()
        for item, children in enumerate(self.children):
            if not children:
                self.heaps[self.place[item]].append(self.rank[item] << ITEM_BITS | item)
        for heap in self.heaps:
            heapify(heap)

    def check(self) -> None:
        """Assert that each leaf has an entry that comes up in time; for tests."""
        assert self.head == NO_ITEM
        due: dict[int, int] = {}
        for place, heap in enumerate(self.heaps):
            for entry in heap:
                item = entry & ITEM_MASK
                if self.place[item] == place:
                    rank = entry >> ITEM_BITS
                    due[item] = min(rank, due.get(item, rank))
        waiting = self.parked.union(self._fresh)
        assert all(self.children[item] != ABSENT for item in self.parked)
        for item, children in enumerate(self.children):
            if not children and item not in waiting:
                assert due[item] <= self.rank[item]
