"""Epochs and marks: after a complete flush no node of a fleet serves older blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.core.l3.epochs import (
    EPOCH_VALID_S,
    SALT_BITS,
    Epochs,
    Mark,
    fresh_epoch,
    idle_marks,
    pack_mark,
    scope_of,
    split_scope,
    unpack_mark,
)

DIGESTS = [bytes([0xAA] * 16), bytes([0xAA, 0xBB] + [0] * 14), bytes([0x11] * 16)]
PREFIXES = ["", "aa", "aabb", "11", DIGESTS[0].hex()]
MARGIN_S = 2.0


def test_mark_survives_packing() -> None:
    """A flush would invalidate another namespace, or none."""
    for prefix in PREFIXES:
        mark = Mark(prefix, 77)
        assert unpack_mark(pack_mark(mark)) == mark


@given(st.integers(0, 80), st.characters(codec="ascii"))
def test_damaged_mark_is_rejected(place: int, character: str) -> None:
    """A mark with changed bytes would invalidate another namespace, or set a wrong epoch."""
    text = pack_mark(Mark("aabb", 1 << 60))
    place %= len(text)
    changed = text[:place] + character + text[place + 1 :]
    assert changed == text or unpack_mark(changed) is None


def test_scopes_have_one_length_and_can_be_split() -> None:
    """A backend that tells scopes apart by length would mix up two epochs."""
    for epoch in (0, 1, (1 << 64) - 1):
        assert len(scope_of(DIGESTS[0], epoch)) == 24
        assert split_scope(scope_of(DIGESTS[0], epoch)) == (DIGESTS[0], epoch)


def test_fresh_epoch_exceeds_known_ones_after_a_clock_reset() -> None:
    """After the clock was set back, a flush would have no effect."""
    known = fresh_epoch(0, 10_000, 5, flush=True)
    assert fresh_epoch(known, 1, 0, flush=False) > known
    assert fresh_epoch(known, 20_000, 0, flush=False) >> SALT_BITS == 20_000


marks = st.lists(
    st.builds(Mark, st.sampled_from(PREFIXES), st.integers(1, 8)), max_size=12, unique=True
)


@given(marks, marks, st.sampled_from(DIGESTS))
def test_epoch_is_the_largest_of_the_covering_marks(
    first: list[Mark], second: list[Mark], digest: bytes
) -> None:
    """Forgetting idle marks, or learning marks in another order, would change which blocks hit."""
    epochs = Epochs(first)
    news = epochs.learn(second)
    every = [*first, *second]
    covering = [mark.epoch for mark in every if digest.hex().startswith(mark.prefix)]
    assert epochs.of(digest) == max(covering, default=0)
    assert (
        epochs.of(digest) == Epochs(reversed(every)).of(digest) == Epochs(epochs.known).of(digest)
    )
    assert set(news) <= set(second)
    texts = [pack_mark(mark) for mark in every]
    kept = set(texts).difference(idle_marks(texts))
    assert {unpack_mark(text) for text in kept} == set(epochs.known)


@given(marks, st.sets(st.integers(0, 11)))
def test_lost_mark_is_replaced_and_never_restored(first: list[Mark], lost: set[int]) -> None:
    """A tier restored from yesterday's copy would serve blocks that were flushed today."""
    epochs = Epochs([Mark("", 1), *first])
    texts = [pack_mark(m) for i, m in enumerate(epochs.known) if i not in lost]
    todo = epochs.todo(texts)
    before = {digest: epochs.of(digest) for digest in DIGESTS}
    present = Epochs(filter(None, map(unpack_mark, texts)))
    for digest in DIGESTS:
        covered = any(digest.hex().startswith(prefix) for prefix in todo.fresh)
        assert covered or present.of(digest) == before[digest] > 0
    junk = epochs.todo([*map(pack_mark, epochs.known), "junk"])
    assert junk == ([""], ["junk"])
    assert epochs.todo(map(pack_mark, epochs.known)) == ([], [])


# A fleet that shares one tier: each node has its own view of the marks, calls take effect late,
# and the tier loses marks. A flush waits as the daemon does.


@dataclass
class Node:
    """A node, and the reading of marks that it relies on."""

    view: Epochs = field(default_factory=Epochs)
    read_s: float | None = None
    skew_ms: int = 0


@dataclass
class Fleet:
    """A shared tier and its nodes."""

    random: Random
    nodes: list[Node]
    now_s: float = 1000.0
    marks: set[str] = field(default_factory=set)
    blocks: dict[tuple[bytes, int], float] = field(default_factory=dict)
    """The time at which the store of each block began, by scope and number."""
    late: list[tuple[str, object, float]] = field(default_factory=list)
    complete: list[tuple[str, float]] = field(default_factory=list)
    """Flushes: the prefix and the start time."""
    barred: list[Mark] = field(default_factory=list)
    """The marks of the flushes."""
    served: int = 0

    def read(self, node: Node) -> None:
        """Read the marks like `TierEpochs`."""
        for _ in range(4):
            began_s, texts = self.now_s, sorted(self.marks)
            todo = node.view.todo(texts)
            if not todo.fresh and not todo.unreadable:
                node.view.learn(filter(None, map(unpack_mark, texts)))
                node.read_s = began_s
                return
            for prefix in todo.fresh:
                flush = any(mark.flush for mark in node.view.known)
                self.marks.add(pack_mark(self.fresh(node, prefix, flush=flush)))
            self.marks.difference_update(todo.unreadable)
        raise AssertionError("the marks do not come to rest")

    def fresh(self, node: Node, prefix: str, *, flush: bool) -> Mark:
        read = [m.epoch for t in self.marks if (m := unpack_mark(t)) is not None]
        largest = max([node.view.largest, *read])
        wall_ms = max(0, int(self.now_s * 1000) + node.skew_ms)
        salt = self.random.getrandbits(SALT_BITS)
        return Mark(prefix, fresh_epoch(largest, wall_ms, salt, flush=flush))

    def scope(self, node: Node, digest: bytes) -> bytes:
        if node.read_s is None or self.now_s - node.read_s >= EPOCH_VALID_S:
            self.read(node)
        return scope_of(digest, node.view.of(digest))

    def get(self, node: Node, digest: bytes, number: int) -> None:
        """Look blocks up; they must be newer than every complete flush."""
        stored_s = self.blocks.get((self.scope(node, digest), number))
        if stored_s is not None:
            self.served += 1
            for prefix, began_s in self.complete:
                assert not digest.hex().startswith(prefix) or stored_s >= began_s

    def put(self, node: Node, digest: bytes, number: int) -> None:
        """Store a block, now or much later."""
        key = self.scope(node, digest), number
        self.land("block", key, self.now_s)

    def land(self, what: str, key: object, began_s: float) -> None:
        if self.random.random() < 0.3:
            self.late.append((what, key, began_s))
        elif what == "block":
            self.blocks.setdefault(key, began_s)  # type: ignore[arg-type]
        else:
            self.marks.add(str(key))

    def pass_s(self, seconds: float) -> None:
        """Let time pass: all nodes continue to work, and late calls may take effect."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += self.random.uniform(0.1, 3.0)
            node, digest = self.random.choice(self.nodes), self.random.choice(DIGESTS)
            self.get(node, digest, self.random.randrange(4))
            if self.random.random() < 0.5:
                self.put(node, digest, self.random.randrange(4))
            if self.late and self.random.random() < 0.2:
                what, key, began_s = self.late.pop(self.random.randrange(len(self.late)))
                if what == "block":
                    self.blocks.setdefault(key, began_s)  # type: ignore[arg-type]
                else:
                    self.marks.add(str(key))

    def flush(self, node: Node, prefix: str) -> None:
        """Flush like the daemon; the flush is incomplete if its mark is lost meanwhile."""
        began_s = self.now_s
        self.read(node)
        mark = self.fresh(node, prefix, flush=True)
        self.land("mark", pack_mark(mark), began_s)
        self.read(node)
        held = self.holder(mark)
        if held is None:
            return  # Incomplete: the mark may still be written.
        self.marks.difference_update(idle_marks(self.marks))
        self.pass_s(EPOCH_VALID_S + MARGIN_S)
        self.read(node)
        if held in self.marks:
            self.complete.append((prefix, began_s))
            self.barred.append(mark)

    def holder(self, mark: Mark) -> str | None:
        found = {t: m for t in self.marks if (m := unpack_mark(t)) is not None}
        barring = [
            t
            for t, m in found.items()
            if mark.prefix.startswith(m.prefix) and m.epoch >= mark.epoch and m.flush
        ]
        return max(barring, key=lambda t: found[t].epoch, default=None)

    def remembered(self) -> bool:
        """Whether at least one node knows all complete flushes."""
        return any(
            all(
                mark.epoch <= node.view.of(bytes.fromhex(f"{mark.prefix:0<32}"))
                for mark in self.barred
            )
            for node in self.nodes
        )

    def lose(self) -> None:
        """Lose marks of the tier, or damage one; each node repairs that at its next reading.

        If one node knows all flushes, it reads first.
        """
        some = self.remembered()
        lost = {mark for mark in self.marks if not some or self.random.random() < 0.5}
        self.marks -= lost
        if lost and self.random.random() < 0.3:
            self.marks.add("junk")
        if some:
            self.knowers_read()

    def restore(self, marks: set[str], blocks: dict[tuple[bytes, int], float]) -> None:
        """Restore an older copy of the tier; a node that knows newer marks reads first."""
        self.marks, self.blocks = set(marks), dict(blocks)
        self.knowers_read()

    def knowers_read(self) -> None:
        """Let the nodes read, most recent marks first: only they can notice lost marks."""
        for node in sorted(self.nodes, key=lambda node: -node.view.largest):
            self.read(node)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32))
def test_no_node_serves_flushed_blocks_after_a_complete_flush(seed: int) -> None:
    """A flushed block would be served again, by the node that flushed or by another one."""
    served = play(seed)
    assert served >= 0


def play(seed: int) -> int:
    random = Random(seed)
    nodes = [Node(skew_ms=random.randrange(-5000, 5000)) for _ in range(3)]
    fleet = Fleet(random, nodes)
    backup: tuple[set[str], dict[tuple[bytes, int], float]] | None = None
    for _ in range(random.randint(5, 25)):
        fleet.pass_s(random.uniform(0.5, 15))
        match random.choice(["flush", "flush", "flush", "new node", "lose", "save", "restore"]):
            case "flush":
                fleet.flush(random.choice(nodes), random.choice(PREFIXES))
            case "new node":
                # A restart without state: the node knows only the marks in the tier.
                nodes[random.randrange(len(nodes))] = Node()
            case "lose":
                fleet.lose()
            case "save":
                backup = set(fleet.marks), dict(fleet.blocks)
            case "restore" if backup is not None and fleet.remembered():
                fleet.restore(*backup)
    return fleet.served


def test_random_fleet_finds_blocks() -> None:
    """A random fleet that never finds a block would prove nothing."""
    assert sum(play(seed) for seed in range(20)) > 100


@pytest.mark.parametrize("count", [0, 1, 700])
def test_many_marks_are_looked_up_quickly(count: int) -> None:
    """A tier with many marks would hold up every lookup."""
    every = [Mark(f"{number:08x}", number + 1) for number in range(count)]
    epochs = Epochs([Mark("", 1), *every])
    assert len(epochs.known) == max(1, count)  # The first one is idle.
    assert epochs.of(bytes.fromhex("00000005") + bytes(12)) == (6 if count > 5 else 1)
