"""The chain index against a model that recomputes everything at each step."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierd.chain import ChainIndex
from tierd.eviction import policy

ROOT = b"R" * 32
HASHES = 40
ITEMS = 64


def hash_at(number: int) -> bytes:
    return b"%032d" % number


def never_busy(item: int) -> bool:
    return False


class ChainAgainstModel(RuleBasedStateMachine):
    """An order other than LRU among leaves would leave holes in prefixes or lose slots forever.

    Block n has a lower-numbered parent or the root, so that chains are acyclic, but
    blocks come and go in any order: children before parents, parents from the middle,
    and item numbers return with other blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        # Compaction must happen in small examples too.
        self.slack = mock.patch.object(policy, "HEAP_SLACK", 3)
        self.slack.start()
        self.index = ChainIndex()
        self.blocks: dict[int, tuple[bytes, bytes]] = {}
        self.used: dict[int, int] = {}
        self.busy: set[int] = set()
        self.now = 0

    def teardown(self) -> None:
        self.slack.stop()

    def model_insert(self, item: int, block_hash: bytes, parent: bytes) -> None:
        self.index.insert(item, block_hash, parent)
        self.now += 1
        self.blocks[item] = (block_hash, parent)
        self.used[item] = self.now

    def forget(self, item: int) -> None:
        del self.blocks[item]
        del self.used[item]
        self.busy.discard(item)

    def leaves(self) -> list[int]:
        parents = {parent for _, parent in self.blocks.values()}
        return [item for item, (block_hash, _) in self.blocks.items() if block_hash not in parents]

    @rule(item=st.integers(0, ITEMS - 1), number=st.integers(0, HASHES - 1), data=st.data())
    def insert(self, item: int, number: int, data: st.DataObject) -> None:
        present = {block_hash for block_hash, _ in self.blocks.values()}
        if item in self.blocks or hash_at(number) in present:
            return
        above = data.draw(st.integers(-1, number - 1), label="parent")
        self.model_insert(item, hash_at(number), ROOT if above < 0 else hash_at(above))

    @rule(start=st.integers(0, HASHES - 1), count=st.integers(1, 12), first=st.integers(0, ITEMS))
    def insert_run(self, start: int, count: int, first: int) -> None:
        present = {block_hash for block_hash, _ in self.blocks.values()}
        free = [item % ITEMS for item in range(first, first + ITEMS)]
        free = [item for item in free if item not in self.blocks]
        for number in range(start, min(start + count, HASHES)):
            if hash_at(number) not in present and free:
                self.model_insert(free.pop(), hash_at(number), hash_at(number - 1))

    @rule(data=st.data(), count=st.integers(1, 12))
    def remove(self, data: st.DataObject, count: int) -> None:
        for _ in range(min(count, len(self.blocks))):
            item = data.draw(st.sampled_from(sorted(self.blocks)), label="removed")
            self.index.remove(item)
            self.forget(item)

    @rule(left=st.integers(0, 6))
    def flush(self, left: int) -> None:
        for item in sorted(self.blocks, key=self.used.__getitem__)[left:]:
            self.index.remove(item)
            self.forget(item)

    @rule(data=st.data(), number=st.integers(0, ITEMS - 1))
    def move(self, data: st.DataObject, number: int) -> None:
        if self.blocks and number not in self.blocks:
            item = data.draw(st.sampled_from(sorted(self.blocks)), label="moved")
            self.index.move(item, number)
            self.blocks[number] = self.blocks.pop(item)
            self.used[number] = self.used.pop(item)
            self.busy.discard(item)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        if self.blocks:
            batch = data.draw(st.lists(st.sampled_from(sorted(self.blocks))), label="touched")
            self.index.touch(batch)
            self.now += 1
            self.used.update(dict.fromkeys(batch, self.now))

    @rule(data=st.data())
    def make_busy(self, data: st.DataObject) -> None:
        if self.blocks:
            self.busy = data.draw(st.sets(st.sampled_from(sorted(self.blocks))), label="busy")

    @rule(count=st.integers(0, HASHES + 1))
    def evict(self, count: int) -> None:
        busy = set(self.busy)
        taken = self.index.evict(count, busy.__contains__)
        expected: list[int] = []
        while len(expected) < count:
            coldest = min(
                (item for item in self.leaves() if item not in busy),
                key=lambda item: (self.used[item], item),
                default=None,
            )
            if coldest is None:
                break
            expected.append(coldest)
            self.forget(coldest)
        assert taken == expected

    @invariant()
    def same_blocks(self) -> None:
        self.index.check()
        assert self.index.items == {pair[0]: item for item, pair in self.blocks.items()}
        assert type(self.index.items) is dict
        for item, (block_hash, parent) in self.blocks.items():
            assert self.index.hash_of(item) == block_hash
            assert self.index.parent_of(item) == parent
            assert block_hash in self.index

    @invariant()
    def heap_is_bounded(self) -> None:
        # However often item numbers are reused.
        leaves = self.index.policy.leaves
        assert leaves.entries <= 2 * (policy.HEAP_SLACK + len(leaves.rank))


ChainAgainstModel.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
TestChainAgainstModel = pytest.mark.slow(ChainAgainstModel.TestCase)


def test_eviction_takes_a_request_from_its_deepest_block() -> None:
    """A prefix would have a hole: its tail, still resident, could never be served."""
    index = ChainIndex()
    for number in range(5):
        index.insert(number, hash_at(number), hash_at(number - 1) if number else ROOT)
    index.touch(range(5))
    assert index.evict(3, never_busy) == [4, 3, 2]
    assert set(index.items.values()) == {0, 1}


def test_eviction_prefers_the_coldest_chain() -> None:
    """The conversation in use would be evicted, and an abandoned one kept."""
    index = ChainIndex()
    for number in range(4):
        index.insert(number, hash_at(number), ROOT if number % 2 == 0 else hash_at(number - 1))
    index.touch([0, 1])
    assert index.evict(4, never_busy) == [3, 2, 1, 0]


def test_a_busy_leaf_keeps_itself_and_its_prefix() -> None:
    """A slot under a copy would be reused, and an engine would read another block's bytes."""
    index = ChainIndex()
    for number in range(3):
        index.insert(number, hash_at(number), hash_at(number - 1) if number else ROOT)
    assert index.evict(3, {2}.__contains__) == []
    index.check()
    assert index.evict(3, never_busy) == [2, 1, 0]


def test_a_block_stored_before_its_parent_still_protects_it() -> None:
    """Parallel backups commit out of order: the parent would be evicted below its child."""
    index = ChainIndex()
    index.insert(0, hash_at(1), hash_at(0))
    index.insert(1, hash_at(0), ROOT)
    index.check()
    assert index.evict(1, never_busy) == [0]


def test_a_parent_that_returns_finds_its_children_again() -> None:
    """A block dropped as corrupt and stored again would be evicted before its own tail."""
    index = ChainIndex()
    for number in range(3):
        index.insert(number, hash_at(number), hash_at(number - 1) if number else ROOT)
    index.remove(1)
    index.check()
    index.insert(7, hash_at(1), hash_at(0))
    index.touch([2])
    index.check()
    assert index.evict(2, never_busy) == [2, 7]


def test_eviction_among_many_dropped_entries_loses_no_block() -> None:
    """After a flush, compaction inside an eviction would forget leaves: their slots leak."""
    index = ChainIndex()
    index.insert(0, hash_at(0), ROOT)
    index.insert(200, hash_at(200), ROOT)
    index.insert(201, hash_at(201), hash_at(200))
    index.insert(202, hash_at(202), ROOT)
    for item in range(1, 100):
        index.insert(item, hash_at(item), ROOT)
    for item in range(1, 100):
        index.remove(item)
    assert index.evict(2, {0}.__contains__) == [201, 200]
    index.check()
    assert index.evict(9, never_busy) == [0, 202]


def test_dropped_entries_do_not_pile_up() -> None:
    """An index filled and flushed for weeks would grow its heap until memory runs out."""
    index = ChainIndex()
    index.insert(0, hash_at(0), ROOT)
    for _ in range(1_000):
        for item in range(1, 11):
            index.insert(item, hash_at(item), hash_at(0))
        for item in range(1, 11):
            index.remove(item)
    leaves = index.policy.leaves
    assert leaves.entries <= 2 * (policy.HEAP_SLACK + len(leaves.rank))
    assert len(index) == 1
    index.check()


def test_absent_item_raises_key_error() -> None:
    """A slot that holds no block would be reported with another block's hash."""
    index = ChainIndex()
    index.insert(3, hash_at(3), ROOT)
    for absent in (0, 4, 1_000, -1):
        with pytest.raises(KeyError):
            index.hash_of(absent)
        with pytest.raises(KeyError):
            index.parent_of(absent)
        with pytest.raises(KeyError):
            index.remove(absent)
    index.remove(3)
    with pytest.raises(KeyError):
        index.hash_of(3)
    assert len(index) == 0


def test_inserting_twice_fails_an_assert() -> None:
    """Two slots under one hash, or two hashes in one slot: one of them is a wrong byte."""
    index = ChainIndex()
    index.insert(0, hash_at(0), ROOT)
    with pytest.raises(AssertionError):
        index.insert(1, hash_at(0), ROOT)
    with pytest.raises(AssertionError):
        index.insert(0, hash_at(1), ROOT)
    index.check()


def test_ring_of_parents_can_be_evicted() -> None:
    """A client that names blocks as each other's parents would fill slots forever."""
    index = ChainIndex()
    names = [bytes([i]) * 32 for i in range(4)]
    index.insert(0, names[0], names[0])
    for item in (1, 2, 3):
        index.insert(item, names[item], names[item % 3 + 1])
    index.check()
    assert sorted(index.evict(4, lambda item: False)) == [0, 1, 2, 3]
    index.check()


def test_moved_block_keeps_its_place_in_the_order() -> None:
    """A cold block that moved would outlive the blocks in use, or be evicted as another block."""
    index = ChainIndex()
    for number in range(3):
        index.insert(number, hash_at(number), ROOT)
    index.remove(2)
    index.move(0, 2)
    index.check()
    assert index.hash_of(2) == hash_at(0)
    with pytest.raises(KeyError):
        index.move(0, 5)
    assert index.evict(1, never_busy) == [2]
    index.insert(0, hash_at(5), hash_at(1))
    index.move(1, 9)
    index.check()
    assert index.evict(2, never_busy) == [0, 9]
