"""What a policy is told, and what it answers: the order in which the leaves of a chain may go.

The index (`tierd.chain`) knows which blocks are resident and which of them are leaves; a
policy knows how much each is worth. Pure: time comes with each request, in seconds of a
clock that never goes back.
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
"""In the column of children: the item is not resident."""

NO_ITEM: Final = -1

GHOSTS_MIN: Final = 64
"""Blocks that even the smallest memory of what has left holds."""

HEAP_SLACK: Final = 64
"""Below this many entries the heaps are not worth compacting."""


class PrefixRequest(NamedTuple):
    """One request's use of a chain of blocks, shallow first.

    `partial` says that the last block is not full: an engine offloads full blocks only,
    but a trace lists it. `output_tokens` is how many tokens the engine generated or
    expects to, None if it has not said.
    """

    hashes: Sequence[bytes]
    now_s: float
    partial: bool = False
    output_tokens: int | None = None


class Policy(ABC):
    """Orders the leaves of one index. Items are the index's small dense integers.

    Only the index calls it: each item is inserted, exposed whenever it becomes a leaf again,
    and removed. `capacity` is how many items there may be at most (`resize`).
    """

    name: ClassVar[str]
    places: ClassVar[int] = 1
    """How many queues the leaves are in; more than one `victim` looks at."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.leaves = LeafHeaps(self.places)
        self.hashes: list[bytes] = []
        self._aside: list[int] = []

    def attach(self, children: list[int], hashes: list[bytes]) -> None:
        """Learn where the index has the number of children and the hash of each item.

        A policy only reads them.
        """
        self.leaves.children = children
        self.hashes = hashes

    def resize(self, capacity: int) -> None:
        """There may be so many items from now on."""
        self.capacity = capacity

    @abstractmethod
    def use(self, request: PrefixRequest, items: Sequence[int | None]) -> None:
        """A request uses these blocks, once; `items` are the resident ones, by place."""

    @abstractmethod
    def touch(self, items: Iterable[int]) -> None:
        """Resident items were looked at outside of a request: they are recent, not used."""

    def taught(self, items: Iterable[int]) -> None:  # noqa: B027  # most read no book
        """The book knows more of the uses of resident items than before."""

    @abstractmethod
    def insert(self, item: int, block_hash: bytes) -> None:
        """An item is resident now; its block may have been used before it came."""

    @abstractmethod
    def victim(self) -> int | None:
        """The leaf to evict next; None if there is none."""

    def set_aside(self, item: int) -> None:
        """The last victim is busy: pass over it until `restore`."""
        self.leaves.pop(item)
        self._aside.append(item)

    def restore(self) -> None:
        """End of a series of victims: what was set aside may be one again."""
        self.leaves.enter_head()
        if self._aside:
            aside, self._aside = self._aside, []
            for item in aside:
                self.expose(item)

    def park(self, item: int) -> None:
        """The last victim is to stay: it does not come up again before `unpark`."""
        self.set_aside(item)
        self._aside.pop()
        self.leaves.parked.add(item)

    def unpark(self, item: int) -> None:
        """A resident item may go again; nothing if it was not parked."""
        if item in self.leaves.parked:
            self.leaves.parked.remove(item)
            if not self.leaves.children[item]:
                self.expose(item)

    def expose(self, item: int) -> None:
        """An item has become a leaf."""
        self.leaves.expose(item)

    def remove(self, item: int, block_hash: bytes, *, evicted: bool) -> None:
        """An item has left: as a victim, or for a reason that says nothing of its worth."""
        self.leaves.drop(item, first=evicted)

    def move(self, item: int, target: int) -> None:
        """An item has another number and keeps its worth."""
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
    """What is remembered of blocks that are not resident: at most `limit`, the oldest go first."""

    def __init__(self, limit: int) -> None:
        self.limit = max(limit, GHOSTS_MIN)
        self.records: dict[bytes, int] = {}

    def resize(self, limit: int) -> None:
        """Remember so many from now on."""
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
        """Forget the oldest eighth: one at a time, a dict would step over all that left before."""
        for block_hash in list(islice(self.records, len(self.records) - self.limit * 7 // 8)):
            del self.records[block_hash]

    def check(self, limit: int) -> None:
        """Assert that no more is remembered than that; for tests."""
        assert len(self.records) <= max(limit, GHOSTS_MIN)


class LeafHeaps:
    """Queues of leaves by rank, of which the lowest goes first.

    Each item has a place (a queue) and a rank in it. A rank may only grow while the item
    keeps its place, but by `rerank`. Entries are lazy: one that came too early is put back
    with the right rank, one of an item that left, got a child or changed its place is dropped
    when it comes up. Entries number at most twice what there ever was of items, and HEAP_SLACK.

    Victims mostly are a leaf, its parent, the parent's parent, all of one request. A parent
    whose turn is no later than that of its child, which has just gone, is the next one of its
    place: as the head it has no entry, until the series of victims ends or goes on elsewhere.
    """

    def __init__(self, places: int) -> None:
        self.heaps: list[list[int]] = [[] for _ in range(places)]
        self.children: list[int] = []
        self.rank: list[int] = []
        self.place: list[int] = []
        self.parked: set[int] = set()
        """Items that are to stay: a leaf among them need not have an entry."""
        self.head = NO_ITEM
        # Place and rank of the victim that has just gone, until its parent is exposed.
        self._gone = NO_ITEM, NO_ITEM
        # Items that may be leaves without an entry. Most get a child before anybody asks.
        self._fresh: list[int] = []

    @property
    def entries(self) -> int:
        """Entries there are, stale ones and those to be made included."""
        return sum(map(len, self.heaps)) + len(self._fresh)

    def put(self, item: int, place: int, rank: int) -> None:
        """Give an item, resident or about to be, a place and a rank."""
        if item >= len(self.rank):
            more = item + item // 8 + 1 - len(self.rank)
            self.rank.extend([0] * more)
            self.place.extend([0] * more)
        self.rank[item] = rank
        self.place[item] = place
        self._fresh.append(item)

    def expose(self, item: int) -> None:
        """Enter a leaf."""
        place, rank = self.place[item], self.rank[item]
        gone, rank_gone = self._gone
        if self.head != NO_ITEM:
            self.enter_head()
        elif place == gone and rank <= rank_gone:
            self.head = item
            return
        heappush(self.heaps[place], rank << ITEM_BITS | item)

    def rerank(self, item: int, place: int, rank: int) -> None:
        """Give a resident item another place and rank, which may be lower than the one before."""
        self.enter_head()
        sooner = self.place[item] != place or rank < self.rank[item]
        self.place[item] = place
        self.rank[item] = rank
        if sooner and not self.children[item]:
            self._fresh.append(item)

    def settle(self) -> None:
        """Enter what has become a leaf since the last call; before a series of `peek`."""
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
        """An item has gone; `first`: it was the first of its place."""
        if item == self.head:
            self.head = NO_ITEM
        if self.parked:
            self.parked.discard(item)
        self._gone = (self.place[item], self.rank[item]) if first else (NO_ITEM, NO_ITEM)
        if len(self._fresh) > HEAP_SLACK + len(self.rank):
            self.settle()

    def enter_head(self) -> None:
        """Give the head an entry like the others; there may be none."""
        self._gone = NO_ITEM, NO_ITEM
        if self.head != NO_ITEM:
            item, self.head = self.head, NO_ITEM
            self.expose(item)

    def peek(self, place: int) -> int:
        """The leaf with the lowest rank in a place, or NO_ITEM."""
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
        """Take back the entry of the leaf that `peek` has just found."""
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
        """Assert that every leaf will come up, and none too late; for tests."""
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
