"""Bytes under a lease stay, whatever becomes of the daemon that granted it.

Readers here keep the mappings that a former incarnation gave them, and look at their bytes for as
long as their leases last: through crashes, flushes, full arenas and memory pressure.
"""

from __future__ import annotations

import logging
import mmap
import os
from dataclasses import dataclass
from random import Random
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import blocks
from tests.support.one_life import (
    CAPACITY,
    SEGMENT,
    ManualClock,
    OneLife,
    held_by_nobody,
)
from tierd.core.l2.space import Space
from tierd.core.reasons import Dropped
from tierd.memory import past
from tierd.memory.past import LEASE_NS_MAX, LifePage, PastPage
from tierd.testing.simulation.keeper import Keeper

S = 10**9
BLOCK_BYTES = SEGMENT // 4
SLOTS = CAPACITY // BLOCK_BYTES
MODELS = ("a", "b")
ENGINE = 7

Place = tuple[str, int, int]
"""A namespace, where to begin among its blocks, and how many."""


@dataclass(frozen=True)
class Plan:
    """What happens in one incarnation, until it is killed."""

    stores: list[tuple[str, int, bool]]
    """Namespace, blocks, and whether their checksums come to be known."""
    leases: list[tuple[Place, int]]
    """What is leased, and for how many seconds."""
    flushes: list[Place]
    copied: Place | None
    """What a copy process reads for an engine; it is still at it when the daemon is killed."""
    hangs: bool
    """Whether that process outlives the daemon."""
    writes: bool
    """Whether an engine has reserved slots, and writes to them when the daemon is gone."""
    damage: str
    idle_s: int
    """How long nothing is left to happen in the incarnation after it."""


def drawn(random: Random) -> Plan:
    """A plan, every kind of event about as likely as not."""

    def place() -> Place:
        return random.choice(MODELS), random.randrange(SLOTS), random.randint(1, 8)

    return Plan(
        stores=[
            (random.choice(MODELS), random.randint(1, SLOTS // 2), random.random() < 0.5)
            for _ in range(random.randint(1, 4))
        ],
        leases=[(place(), random.choice((3, 30, 500))) for _ in range(random.randrange(4))],
        flushes=[place() for _ in range(random.randrange(3))],
        copied=place() if random.random() < 0.4 else None,
        hangs=random.random() < 0.7,
        writes=random.random() < 0.3,
        damage=random.choice(("", "", "", "", "log", "state", "segment", "ledger")),
        idle_s=random.choice((0, 5, 40, 600)),
    )


@dataclass(eq=False)
class Reader:
    """Somebody who looks at slots until a time, or for as long as its process lives."""

    views: list[memoryview]
    right: list[bytes]
    until_ns: float
    hold: int = -1


class Node:
    """Incarnations of a daemon, one after the other, and who reads from them and writes to them."""

    def __init__(self) -> None:
        self.keeper = Keeper()
        self.clock = ManualClock()
        self.life = OneLife(self.keeper, clock=self.clock)
        self.readers: list[Reader] = []
        self.writers: list[tuple[int, list[memoryview]]] = []
        self.stored = 0

    def run(self, plan: Plan) -> None:
        """Live, be killed, and be there again."""
        memory, host = self.life.memory, self.life.host
        for model, count, prove in plan.stores:
            self.store(model, count, prove=prove)
        for place, ttl_s in plan.leases:
            space, chosen = self.chosen(place)
            lease = host.grant(
                ENGINE, [(space, list(chosen.values()))], self.clock.now_ns + ttl_s * S
            )
            self.life.lives.leased(lease)
            self.read(space, chosen, lease.expires_ns)
        if plan.copied is not None:
            space, chosen = self.chosen(plan.copied)
            hold = self.life.lives.copying()
            assert hold is not None
            host.hold(space, list(chosen.values()))
            self.read(space, chosen, float("inf"), hold)
        for place in plan.flushes:
            space, chosen = self.chosen(place)
            memory.drop(space, list(chosen.values()), Dropped.FLUSHED)
        if plan.writes:
            self.begin_to_write("a", 3)
        self.attack()
        self.kill(hangs=plan.hangs, damage=plan.damage)
        self.attack()
        self.pass_time(plan.idle_s)
        self.attack()

    def space(self, model: str) -> Space:
        space = self.life.host.open_space(blocks.namespace(BLOCK_BYTES, model=model))
        assert space is not None
        return space

    def chosen(self, place: Place) -> tuple[Space, dict[bytes, int]]:
        """Blocks that may be served, with their slots."""
        model, start, count = place
        space = self.space(model)
        known = [(h, s) for h, s in space.items.items() if s not in space.unverified]
        start = start % max(1, len(known))
        return space, dict(known[start : start + count])

    def store(self, model: str, count: int, *, prove: bool) -> None:
        self.stored += 1
        self.life.store_chain(self.space(model), count, self.stored, prove=prove)

    def read(self, space: Space, chosen: dict[bytes, int], until_ns: float, hold: int = -1) -> None:
        views = [self.life.memory.payload(space, slot) for slot in chosen.values()]
        right = [blocks.payload(space.namespace, block_hash) for block_hash in chosen]
        self.readers.append(Reader(views, right, until_ns, hold))

    def begin_to_write(self, model: str, count: int) -> None:
        hold = self.life.lives.guard()
        assert hold is not None
        self.stored += 1
        space = self.space(model)
        reservation = self.life.memory.reserve(ENGINE, space, *blocks.chain(count, self.stored))
        slots = [slot for slot in reservation.slots if slot >= 0]
        self.writers.append((hold, [self.life.memory.payload(space, slot) for slot in slots]))

    def attack(self) -> None:
        """Take all that can be had: under memory pressure, and for every block that fits."""
        self.life.lives.tick()
        for limit in (CAPACITY // 2, 0):
            self.life.host.set_limit(limit)
            while self.life.memory.shrink():
                pass
            self.check()
        self.life.host.set_limit(CAPACITY)
        for model in MODELS * 2:
            self.store(model, SLOTS // 2, prove=False)
            self.check()

    def kill(self, *, hangs: bool, damage: str) -> None:
        self.life.end()
        for reader in [reader for reader in self.readers if reader.hold >= 0]:
            if not hangs:
                os.close(reader.hold)
                self.readers.remove(reader)
        if damage:
            self.damage(damage)
        self.life = OneLife(self.keeper, clock=self.clock)
        for _, views in self.writers:
            for view in views:
                view[:] = b"\xee" * len(view)
        self.life.prove()

    def damage(self, what: str) -> None:
        """Change a byte of what is kept, or lose half of a segment."""
        kept = self.keeper._kept
        pages = [fd for name, fd in kept if name.startswith("life-")]
        arena = [entry for entry in kept if "-" not in entry[0]]
        if what == "log":
            _flip(pages[-1], 4096 + 16)
        elif what == "state":
            _flip(pages[-1], 64 + 8)
        elif arena and what == "segment":
            kept.remove(arena[0])
            os.close(arena[0][1])
        elif arena:
            _flip(arena[1][1], 20)

    def pass_time(self, seconds: float) -> None:
        self.clock.now_ns += int(seconds * S)
        self.life.host.expire(self.clock.now_ns)
        self.life.lives.tick()

    def check(self) -> None:
        """What is leased has its bytes, and what is served its own."""
        self.life.memory.check()
        for reader in self.readers:
            if reader.until_ns > self.clock.now_ns:
                for view, right in zip(reader.views, reader.right, strict=True):
                    assert view == right, "bytes have changed under a valid lease"
        for model in MODELS:
            space = self.space(model)
            for block_hash, slot in self.chosen((model, 0, SLOTS))[1].items():
                right = blocks.payload(space.namespace, block_hash)
                assert self.life.memory.payload(space, slot) == right

    def end(self) -> None:
        """When nobody reads or writes any more, every slot can be used again."""
        for hold in [
            *(reader.hold for reader in self.readers),
            *(hold for hold, _ in self.writers),
        ]:
            if hold >= 0:
                os.close(hold)
        self.life.end()
        self.readers.clear()
        self.life = OneLife(self.keeper, clock=self.clock)
        self.pass_time(600)
        assert held_by_nobody(self.life)
        self.life.memory.check()
        self.life.end()
        self.keeper.close()


def _flip(fd: int, at: int) -> None:
    [old] = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([old ^ 0x5A]), at)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_bytes_under_a_lease_stay(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """An engine would copy another's KV under its lease, and answer with wrong tokens."""
    caplog.set_level(logging.CRITICAL, "tierd")
    random = Random(seed)
    node = Node()
    for _ in range(random.randint(1, 3)):
        node.run(drawn(random))
    node.end()


class Recorder(bytearray):
    """A page's memory that tells each write to it."""

    writes: list[tuple[int, bytes]]

    def __setitem__(self, where, value):
        self.writes.append((where.start, bytes(value)))
        super().__setitem__(where, value)


leases = st.tuples(st.integers(0, 40), st.integers(1, 40), st.booleans())
"""How many slots, until when, and whether all leases have been given back before."""


@given(st.lists(leases, min_size=1, max_size=8), st.data())
def test_a_log_that_is_torn_loses_no_lease(
    plan: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    """A daemon killed in the middle of a write would leave leases that the next one breaks."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(past, "LOG_BYTES", 1024)
        page = LifePage.create(bytes(16))
        recorder = Recorder(os.pread(page.fd, 1 << 20, 0))
        page._mapping = cast("mmap.mmap", recorder)
        granted: list[tuple[bytes, range, int]] = []
        for number, (count, until_ns, given_back) in enumerate(plan):
            recorder.writes = []
            if given_back:
                page.no_leases()
                granted.clear()
            before = len(recorder.writes)
            name, slots = bytes([number % 3]) * 16, range(number, number + count)
            page.lease(name, slots, until_ns)
            for at, (start, written) in enumerate(recorder.writes):
                cut = data.draw(st.integers(0, len(written)))
                os.pwrite(page.fd, written[:cut], start)
                _all_told(page.fd, granted if at >= before else [])
                whole = start >= 4096 or cut in (0, len(written))
                assert not whole or PastPage(page.fd, 0).readable, "all is held for nothing"
                os.pwrite(page.fd, written, start)
            granted.append((name, slots, until_ns))
            _all_told(page.fd, granted)
        page.close()


def _all_told(fd: int, granted: list[tuple[bytes, range, int]]) -> None:
    told = PastPage(fd, 0)
    for now_ns in (0, 20):
        found = told.leased(now_ns)
        for name, slots, until_ns in granted:
            assert told.until_ns >= until_ns
            if until_ns > now_ns and found.complete:
                assert found.slots.get(name, set()) >= {*slots}


def test_a_log_that_is_damaged_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit would have a slot reused under its reader's eyes, or tierd hang at each start."""
    monkeypatch.setattr(past, "LOG_BYTES", 1024)
    page = LifePage.create(bytes(16))
    right: dict[bytes, set[int]] = {}
    for number in range(3):
        name, slots = bytes([number % 2]) * 16, range(number, number + 9)
        page.lease(name, slots, 50 + number)
        right.setdefault(name, set()).update(slots)
    assert PastPage(page.fd, 0).leased(0) == (right, True)
    refused = 0
    for at in range(4096 + 1024):
        for bit in (0, 7):
            [old] = os.pread(page.fd, 1, at)
            os.pwrite(page.fd, bytes([old ^ (1 << bit)]), at)
            told = PastPage(page.fd, 0)
            if told.readable:
                assert told.leased(0) == (right, True)
                assert told.until_ns == 52
            else:
                assert not told.leased(LEASE_NS_MAX - 1).complete
                assert told.until_ns == LEASE_NS_MAX
                refused += 1
            os.pwrite(page.fd, bytes([old]), at)
    assert refused == 2 * (2 * (32 + 8) + 3 * (40 + 9 * 4)), "what is sealed"
    for size in (0, 64, 4096, 4096 + 1023, 4096 + 1025):
        os.ftruncate(page.fd, size)
        assert not PastPage(page.fd, 0).readable
    page.close()


def test_a_lease_of_another_clock_is_not_believed() -> None:
    """Memory that came with a machine's image would be held for days, or not at all."""
    page = LifePage.create(bytes(16))
    page.lease(bytes(16), [1, 2], 10**15)
    told = PastPage(page.fd, 10)
    assert not told.readable
    assert told.until_ns == 10 + LEASE_NS_MAX
    page.close()
