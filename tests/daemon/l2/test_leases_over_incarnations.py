"""Bytes under a lease stay unchanged, whatever happens to the daemon that granted it.

The readers of these tests keep the mappings from a former incarnation and compare their bytes for
as long as their leases last: through crashes, flushes, full arenas and memory pressure.
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
from tests.support.one_incarnation import (
    CAPACITY,
    SEGMENT,
    ManualClock,
    OneIncarnation,
    held_by_nobody,
)
from tierd.core.l2.space import Space
from tierd.core.reasons import Dropped
from tierd.memory import past
from tierd.memory.past import LEASE_NS_MAX, IncarnationPage, PastPage
from tierd.testing.simulation.keeper import Keeper

S = 10**9
BLOCK_BYTES = SEGMENT // 4
SLOTS = CAPACITY // BLOCK_BYTES
MODELS = ("a", "b")
ENGINE = 7

Place = tuple[str, int, int]
"""Namespace, index of the first block, number of blocks."""


@dataclass(frozen=True)
class Plan:
    """What happens in one incarnation, until it is killed."""

    stores: list[tuple[str, int, bool]]
    """Namespace, number of blocks, and whether their checksums get computed."""
    leases: list[tuple[Place, int]]
    """The leased blocks, and the lease's length in seconds."""
    flushes: list[Place]
    copied: Place | None
    """Blocks that a copy process is still reading for an engine when the daemon is killed."""
    hangs: bool
    """Whether that process outlives the daemon."""
    writes: bool
    """Whether an engine has reserved slots, and writes to them after the daemon's death."""
    damage: str
    idle_s: int
    """Seconds that pass after the next incarnation has started."""


def random_plan(random: Random) -> Plan:
    """Draw a plan in which every kind of event is about as likely as not."""

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
    """A process that reads slots until a time, or for as long as it runs."""

    views: list[memoryview]
    right: list[bytes]
    until_ns: float
    hold: int = -1


class Node:
    """Successive incarnations of a daemon, with their readers and writers."""

    def __init__(self) -> None:
        self.keeper = Keeper()
        self.clock = ManualClock()
        self.incarnation = OneIncarnation(self.keeper, clock=self.clock)
        self.readers: list[Reader] = []
        self.writers: list[tuple[int, list[memoryview]]] = []
        self.stored = 0

    def run(self, plan: Plan) -> None:
        """Run one incarnation, kill it and start the next."""
        memory, host = self.incarnation.memory, self.incarnation.host
        for model, count, prove in plan.stores:
            self.store(model, count, prove=prove)
        for place, ttl_s in plan.leases:
            space, chosen = self.chosen(place)
            lease = host.grant(
                ENGINE, [(space, list(chosen.values()))], self.clock.now_ns + ttl_s * S
            )
            self.incarnation.incarnations.leased(lease)
            self.read(space, chosen, lease.expires_ns)
        if plan.copied is not None:
            space, chosen = self.chosen(plan.copied)
            hold = self.incarnation.incarnations.copying()
            assert hold is not None
            host.hold(space, list(chosen.values()))
            self.read(space, chosen, float("inf"), hold)
        for place in plan.flushes:
            space, chosen = self.chosen(place)
            memory.drop(space, list(chosen.values()), Dropped.FLUSHED)
        if plan.writes:
            self.begin_to_write("a", 3)
        self.reuse_all_it_can()
        self.kill(hangs=plan.hangs, damage=plan.damage)
        self.reuse_all_it_can()
        self.pass_time(plan.idle_s)
        self.reuse_all_it_can()

    def space(self, model: str) -> Space:
        space = self.incarnation.host.open_space(blocks.namespace(BLOCK_BYTES, model=model))
        assert space is not None
        return space

    def chosen(self, place: Place) -> tuple[Space, dict[bytes, int]]:
        """Return servable blocks with their slots."""
        model, start, count = place
        space = self.space(model)
        known = [(h, s) for h, s in space.items.items() if s not in space.unverified]
        start = start % max(1, len(known))
        return space, dict(known[start : start + count])

    def store(self, model: str, count: int, *, prove: bool) -> None:
        self.stored += 1
        self.incarnation.store_chain(self.space(model), count, self.stored, prove=prove)

    def read(self, space: Space, chosen: dict[bytes, int], until_ns: float, hold: int = -1) -> None:
        views = [self.incarnation.memory.payload(space, slot) for slot in chosen.values()]
        right = [blocks.payload(space.namespace, block_hash) for block_hash in chosen]
        self.readers.append(Reader(views, right, until_ns, hold))

    def begin_to_write(self, model: str, count: int) -> None:
        hold = self.incarnation.incarnations.guard()
        assert hold is not None
        self.stored += 1
        space = self.space(model)
        reservation = self.incarnation.memory.reserve(
            ENGINE, space, *blocks.chain(count, self.stored)
        )
        slots = [slot for slot in reservation.slots if slot >= 0]
        self.writers.append(
            (hold, [self.incarnation.memory.payload(space, slot) for slot in slots])
        )

    def reuse_all_it_can(self) -> None:
        """Reuse as much memory as possible: under memory pressure, and by storing blocks."""
        self.incarnation.incarnations.tick()
        for limit in (CAPACITY // 2, 0):
            self.incarnation.host.set_limit(limit)
            while self.incarnation.memory.shrink():
                pass
            self.check()
        self.incarnation.host.set_limit(CAPACITY)
        for model in MODELS * 2:
            self.store(model, SLOTS // 2, prove=False)
            self.check()

    def kill(self, *, hangs: bool, damage: str) -> None:
        self.incarnation.end()
        for reader in [reader for reader in self.readers if reader.hold >= 0]:
            if not hangs:
                os.close(reader.hold)
                self.readers.remove(reader)
        if damage:
            self.damage(damage)
        self.incarnation = OneIncarnation(self.keeper, clock=self.clock)
        for _, views in self.writers:
            for view in views:
                view[:] = b"\xee" * len(view)
        self.incarnation.prove()

    def damage(self, what: str) -> None:
        """Change a byte of the kept memory, or lose half of a segment."""
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
        self.incarnation.host.expire(self.clock.now_ns)
        self.incarnation.incarnations.tick()

    def check(self) -> None:
        """Assert that leased slots keep their bytes, and that servable blocks have the right
        ones."""
        self.incarnation.memory.check()
        for reader in self.readers:
            if reader.until_ns > self.clock.now_ns:
                for view, right in zip(reader.views, reader.right, strict=True):
                    assert view == right, "bytes have changed under a valid lease"
        for model in MODELS:
            space = self.space(model)
            for block_hash, slot in self.chosen((model, 0, SLOTS))[1].items():
                right = blocks.payload(space.namespace, block_hash)
                assert self.incarnation.memory.payload(space, slot) == right

    def end(self) -> None:
        """Assert that every slot is free once all readers and writers are gone."""
        for hold in [
            *(reader.hold for reader in self.readers),
            *(hold for hold, _ in self.writers),
        ]:
            if hold >= 0:
                os.close(hold)
        self.incarnation.end()
        self.readers.clear()
        self.incarnation = OneIncarnation(self.keeper, clock=self.clock)
        self.pass_time(600)
        assert held_by_nobody(self.incarnation)
        self.incarnation.memory.check()
        self.incarnation.end()
        self.keeper.close()


def _flip(fd: int, at: int) -> None:
    [old] = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([old ^ 0x5A]), at)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_leased_bytes_survive_random_crashes_flushes_and_pressure(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine would copy another's KV under its lease, and answer with wrong tokens."""
    caplog.set_level(logging.CRITICAL, "tierd")
    random = Random(seed)
    node = Node()
    for _ in range(random.randint(1, 3)):
        node.run(random_plan(random))
    node.end()


class Recorder(bytearray):
    """A page's memory that records each write to it."""

    writes: list[tuple[int, bytes]]

    def __setitem__(self, where, value):
        self.writes.append((where.start, bytes(value)))
        super().__setitem__(where, value)


leases = st.tuples(st.integers(0, 40), st.integers(1, 40), st.booleans())
"""Number of slots, expiry, and whether all earlier leases have been released."""


@given(st.lists(leases, min_size=1, max_size=8), st.data())
def test_torn_lease_log_loses_no_lease(
    plan: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    """A daemon killed during a write would leave leases that the next incarnation breaks."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(past, "LOG_BYTES", 1024)
        page = IncarnationPage.create(bytes(16))
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
                _assert_all_found(page.fd, granted if at >= before else [])
                whole = start >= 4096 or cut in (0, len(written))
                assert not whole or PastPage(page.fd, 0).readable, "an intact log was refused"
                os.pwrite(page.fd, written, start)
            granted.append((name, slots, until_ns))
            _assert_all_found(page.fd, granted)
        page.close()


def _assert_all_found(fd: int, granted: list[tuple[bytes, range, int]]) -> None:
    kept = PastPage(fd, 0)
    for now_ns in (0, 20):
        found = kept.leased(now_ns)
        for name, slots, until_ns in granted:
            assert kept.until_ns >= until_ns
            if until_ns > now_ns and found.complete:
                assert found.slots.get(name, set()) >= {*slots}


def test_damaged_lease_log_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One flipped bit would have a slot reused under its reader, or tierd hang at each start."""
    monkeypatch.setattr(past, "LOG_BYTES", 1024)
    page = IncarnationPage.create(bytes(16))
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
            kept = PastPage(page.fd, 0)
            if kept.readable:
                assert kept.leased(0) == (right, True)
                assert kept.until_ns == 52
            else:
                assert not kept.leased(LEASE_NS_MAX - 1).complete
                assert kept.until_ns == LEASE_NS_MAX
                refused += 1
            os.pwrite(page.fd, bytes([old]), at)
    assert refused == 2 * (2 * (32 + 8) + 3 * (40 + 9 * 4)), "bits of the sealed bytes"
    for size in (0, 64, 4096, 4096 + 1023, 4096 + 1025):
        os.ftruncate(page.fd, size)
        assert not PastPage(page.fd, 0).readable
    page.close()


def test_lease_log_of_another_clock_is_refused() -> None:
    """Memory restored from a machine's image would be held for days, or not at all."""
    page = IncarnationPage.create(bytes(16))
    page.lease(bytes(16), [1, 2], 10**15)
    kept = PastPage(page.fd, 10)
    assert not kept.readable
    assert kept.until_ns == 10 + LEASE_NS_MAX
    page.close()
