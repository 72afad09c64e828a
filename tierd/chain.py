"""An index of chained blocks that evicts only leaves.

Blocks form a forest: each names its parent's hash. Only a block without resident children
may be evicted, so a resident prefix never has a hole. A policy (`tierd.eviction`) orders the
leaves, except for blocks that hints keep or evict first (`tierd.core.hints`). Items are small
dense integers (slot numbers). This index, the policy and the owner keep their data about items
in lists indexed by item: half the memory and half the cost of a touch compared with dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import compress, islice
from typing import Final

from tierd.eviction.lru import Lru
from tierd.eviction.policy import ABSENT, ITEM_MASK, Policy, PrefixRequest

_ABSENT = b""
_NO_PARENT = b"\xff" * 32
"""Parent recorded for a block that would close a ring; no real hash has this value."""

DEMOTED_MAX: Final = 1 << 18
"""Maximum number of demoted blocks; beyond it the oldest demotions are forgotten."""


class ChainIndex:
    """Maps hashes to items, holds the forest of resident blocks and evicts its leaves."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.items: dict[bytes, int] = {}
        self.policy = policy or Lru()
        self.kept: Container[bytes] = ()
        """Hashes not to evict while all their resident ancestors are kept too; set by the owner."""
        self._hash: list[bytes] = []
        self._parent: list[bytes] = []
        self._children: list[int] = []
        # Resident children by parent hash, for parents that are not resident.
        self._orphans: dict[bytes, int] = {}
        # Hashes to evict before all others, resident or not, and the items that may be leaves.
        self._demoted: dict[bytes, None] = {}
        self._demoted_leaves: dict[int, None] = {}
        self.policy.attach(self._children, self._hash)

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

    def part(self, start: int, count: int) -> tuple[list[bytes], list[bytes]] | None:
        """Return hashes and parents of the resident items among `count`; None past the last."""
        if start >= len(self._hash):
            return None
        hashes = self._hash[start : start + count]
        parents = self._parent[start : start + count]
        if _ABSENT in hashes:
            parents = list(compress(parents, hashes))
            hashes = list(filter(None, hashes))
        return hashes, parents

    def insert(self, item: int, block_hash: bytes, parent: bytes) -> None:
        """Add an item. Neither item nor hash may be present."""
        assert block_hash
        assert block_hash not in self.items
        assert 0 <= item <= ITEM_MASK
        if item >= len(self._hash):
            self._grow(item + 1)
        assert not self._hash[item]
        if parent == block_hash or (
            block_hash in self._orphans and self._is_below(parent, block_hash)
        ):
            # No valid chain has a ring, and blocks in a ring could never be evicted.
            parent = _NO_PARENT
        above = self.items.get(parent)
        if above is not None:
            self._children[above] += 1
        else:
            self._orphans[parent] = self._orphans.get(parent, 0) + 1
        self.items[block_hash] = item
        self._hash[item] = block_hash
        self._parent[item] = parent
        self._children[item] = self._orphans.pop(block_hash, 0)
        self.policy.insert(item, block_hash)
        if block_hash in self._demoted:
            self._demoted_leaves[item] = None

    def _is_below(self, block_hash: bytes, ancestor: bytes) -> bool:
        """Whether `ancestor` is a resident ancestor of `block_hash`, or the last one's parent."""
        item = self.items.get(block_hash)
        while item is not None:
            if self._parent[item] == ancestor:
                return True
            item = self.items.get(self._parent[item])
        return False

    def remove(self, item: int) -> None:
        """Remove an item, leaf or not; its parent may become a leaf.

        KeyError if the item is not in the index.
        """
        self.hash_of(item)
        self._drop(item, evicted=False)

    def move(self, item: int, target: int) -> None:
        """Give a resident item another, free number; it keeps its rank in the policy.

        KeyError if the item is not in the index.
        """
        block_hash = self.hash_of(item)
        if target >= len(self._hash):
            self._grow(target + 1)
        assert not self._hash[target]
        self.items[block_hash] = target
        for column in (self._hash, self._parent):
            column[target], column[item] = column[item], _ABSENT
        self._children[target], self._children[item] = self._children[item], ABSENT
        self.policy.move(item, target)
        self.policy.leaves.parked.discard(item)
        if block_hash in self._demoted:
            self._demoted_leaves[target] = None

    def use(self, request: PrefixRequest) -> int:
        """Count one request's use of its blocks; return how many leading blocks are resident."""
        found = list(map(self.items.get, request.hashes))
        self.policy.use(request, found)
        if self._demoted:
            for block_hash in request.hashes:
                self._demoted.pop(block_hash, None)
        return found.index(None) if None in found else len(found)

    def touch(self, items: Iterable[int]) -> None:
        """Make resident items recent without counting a use."""
        self.policy.touch(items)

    def demote(self, hashes: Sequence[bytes]) -> int:
        """Evict a prefix before all other blocks; return how many of its last blocks that covers.

        The demotion stops at the first block, from the end, that another chain shares. A use
        ends the demotion of a block. Blocks that are not resident count: they may be arriving.
        """
        items, children, demoted = self.items, self._children, self._demoted
        below = count = 0
        for block_hash in reversed(hashes):
            item = items.get(block_hash)
            if item is not None:
                if children[item] > below:
                    break
                below = 1
                if not children[item]:
                    self._demoted_leaves[item] = None
            demoted[block_hash] = None
            count += 1
        if len(demoted) > DEMOTED_MAX:
            for block_hash in list(islice(demoted, len(demoted) - DEMOTED_MAX * 7 // 8)):
                del demoted[block_hash]
        return count

    def unkeep(self, hashes: Iterable[bytes]) -> None:
        """Make hashes that have left `kept` evictable again."""
        for block_hash in hashes:
            item = self.items.get(block_hash)
            if item is not None:
                self.policy.unpark(item)
                if block_hash in self._demoted:
                    self._demoted_leaves[item] = None

    @property
    def keeping(self) -> bool:
        """Whether an eviction has passed over leaves because they are kept."""
        return bool(self.policy.leaves.parked)

    def evict(
        self,
        count: int,
        busy: Callable[[int], bool],
        spare: Callable[[bytes], bool] | None = None,
    ) -> list[int]:
        """Remove up to `count` leaves that are not busy, the least valuable first, and return them.

        `busy(item)` is called just before the item would be evicted, while it is still indexed.
        A parent that becomes a leaf can be evicted in the same call. `spare(hash)` is called
        before `busy`; if it returns true, eviction stops, because later leaves are worth no less.
        """
        taken: list[int] = []
        policy, kept, hashes = self.policy, self.kept, self._hash
        passed: list[int] = []
        while len(taken) < count:
            item = self._demoted_victim(busy, passed) if self._demoted_leaves else None
            demoted = item is not None
            if item is None:
                item = policy.victim()
                if item is None:
                    break
                if hashes[item] in kept and self._stays(item):
                    policy.park(item)
                    continue
                if spare is not None and spare(hashes[item]):
                    break
                if busy(item):
                    policy.set_aside(item)
                    continue
            self._drop(item, evicted=not demoted)
            taken.append(item)
        policy.restore()
        self._demoted_leaves.update(dict.fromkeys(passed))
        return taken

    def _demoted_victim(self, busy: Callable[[int], bool], passed: list[int]) -> int | None:
        """Return the next demoted leaf, or None; busy leaves are added to `passed`."""
        leaves = self._demoted_leaves
        while leaves:
            item, _ = leaves.popitem()
            if self._hash[item] not in self._demoted or self._children[item]:
                continue  # Used, gone, or a parent: it is listed again when its last child goes.
            if self._stays(item):
                continue
            if not busy(item):
                return item
            passed.append(item)
        return None

    def _stays(self, item: int) -> bool:
        """Whether a leaf and all its resident ancestors are kept.

        A kept leaf below a block that is not kept would stop the eviction of that block.
        """
        kept, items = self.kept, self.items
        above: int | None = item
        while above is not None and self._hash[above] in kept:
            above = items.get(self._parent[above])
        return above is None

    def check(self) -> None:
        """Assert every invariant; for tests."""
        resident = {item for item, block_hash in enumerate(self._hash) if block_hash}
        assert resident == set(self.items.values())
        assert len(resident) == len(self.items)
        counted: dict[bytes, int] = {}
        for item in resident:
            assert self.items[self._hash[item]] == item
            counted[self._parent[item]] = counted.get(self._parent[item], 0) + 1
        for item, children in enumerate(self._children):
            expected = counted.pop(self._hash[item], 0) if item in resident else ABSENT
            assert children == expected
        assert counted == self._orphans
        self.policy.check()
        for item in resident:
            block_hash = self._hash[item]
            if block_hash in self._demoted and not self._children[item]:
                assert item in self._demoted_leaves or block_hash in self.kept
        assert len(self._demoted) <= DEMOTED_MAX

    def _drop(self, item: int, *, evicted: bool) -> None:
        block_hash, parent = self._hash[item], self._parent[item]
        self._hash[item] = self._parent[item] = _ABSENT
        del self.items[block_hash]
        if self._children[item]:
            self._orphans[block_hash] = self._children[item]
        self._children[item] = ABSENT
        self.policy.remove(item, block_hash, evicted=evicted)
        if self._demoted:
            self._demoted.pop(block_hash, None)
        above = self.items.get(parent)
        if above is not None:
            self._children[above] -= 1
            if not self._children[above]:
                self.policy.expose(above)
                if self._hash[above] in self._demoted:
                    self._demoted_leaves[above] = None
        elif self._orphans[parent] > 1:
            self._orphans[parent] -= 1
        else:
            del self._orphans[parent]

    def _grow(self, size: int) -> None:
        # An eighth more than needed: growing by one item at a time costs twice an insert.
        more = size + size // 8 - len(self._hash)
        self._hash.extend([_ABSENT] * more)
        self._parent.extend([_ABSENT] * more)
        self._children.extend([ABSENT] * more)
