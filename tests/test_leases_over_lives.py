"""Bytes under a lease stay, whatever becomes of the daemon that granted it.

Readers here keep the mappings that a former incarnation gave them, and look at their bytes for as
long as their leases last: through crashes, flushes, full arenas and memory pressure.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests import blocks
from tests.test_lives import CAPACITY, SEGMENT, ManualClock, OneLife
from tierd.core.space import Dropped, Lease, Reservation, Space
from tierd.testing.keeper import Keeper

S = 10**9
BLOCK_BYTES = SEGMENT // 4
MODELS = ("a", "b")
SLOTS = CAPACITY // BLOCK_BYTES
ENGINE = 7
models = st.sampled_from(MODELS)


@dataclass(eq=False)
class Reader:
    """Somebody who may look at slots until a time, or for as long as its process lives."""

    views: list[memoryview]
    right: list[bytes]
    until_ns: float
    lease: Lease | None = None
    copying: int | None = None
    """The hold of a copy process, which ends with it."""
    copied: Callable[[], None] | None = None
    """Tells the daemon that it has copied."""


@dataclass(eq=False)
class Writer:
    """An engine with a reservation, and its hold; it may write whenever it likes."""

    views: list[memoryview]
    hold: int
    reservation: Reservation | None


class LeasesOverLives(RuleBasedStateMachine):
    """An engine would copy another's KV under its lease, and answer with wrong tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.keeper = Keeper()
        self.clock = ManualClock()
        self.life = OneLife(self.keeper, clock=self.clock)
        self.readers: list[Reader] = []
        self.writers: list[Writer] = []
        self.stored = 0

    def space(self, model: str) -> Space:
        space = self.life.host.open_space(blocks.namespace(BLOCK_BYTES, model=model))
        assert space is not None
        return space

    def resident(self, model: str) -> list[tuple[bytes, int]]:
        """Blocks that may be served, with their slots."""
        space = self.space(model)
        return [(h, s) for h, s in sorted(space.chain.items.items()) if s not in space.unproven]

    # --- what engines do ------------------------------------------------------------

    @rule(model=models, count=st.integers(1, 5), prove=st.booleans())
    def store(self, model: str, count: int, prove: bool) -> None:
        self.stored += 1
        self.life.store_chain(self.space(model), count, self.stored, prove=prove)

    @rule(model=models)
    def fill(self, model: str) -> None:
        """Ask for more than there is: every slot that may be had is written to."""
        for _ in range(3):
            self.store(model, SLOTS // 2, False)

    @precondition(lambda self: any(self.resident(model) for model in MODELS))
    @rule(data=st.data(), ttl_s=st.sampled_from([1, 5, 30, 500]))
    def lease(self, data: st.DataObject, ttl_s: int) -> None:
        model = data.draw(st.sampled_from([m for m in MODELS if self.resident(m)]))
        some = st.sampled_from(self.resident(model))
        chosen = data.draw(st.lists(some, min_size=1, max_size=6, unique=True))
        space, host = self.space(model), self.life.host
        slots = [slot for _, slot in chosen]
        lease = host.grant(ENGINE, [(space, slots)], self.clock.now_ns + ttl_s * S)
        self.life.lives.leased(lease)
        self.readers.append(self.reader(space, chosen, lease.expires_ns, lease))

    def reader(
        self,
        space: Space,
        chosen: list[tuple[bytes, int]],
        until_ns: float,
        lease: Lease | None = None,
    ) -> Reader:
        return Reader(
            [self.life.memory.payload(space, slot) for _, slot in chosen],
            [blocks.payload(space.namespace, block_hash) for block_hash, _ in chosen],
            until_ns,
            lease,
        )

    @precondition(lambda self: any(reader.lease for reader in self.readers))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from([r for r in self.readers if r.lease]))
        assert reader.lease is not None
        assert self.life.host.release(reader.lease.lease_id, ENGINE)
        self.readers.remove(reader)

    @rule(model=models, count=st.integers(1, 4))
    def begin_to_write(self, model: str, count: int) -> None:
        hold = self.life.lives.guard()
        assert hold is not None
        self.stored += 1
        space = self.space(model)
        hashes, parents = blocks.chain(count, self.stored)
        reservation = self.life.memory.reserve(ENGINE, space, hashes, parents)
        views = [self.life.memory.payload(space, slot) for slot in reservation.slots if slot >= 0]
        self.writers.append(Writer(views, hold, reservation))

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), byte=st.integers(1, 255))
    def write_late(self, data: st.DataObject, byte: int) -> None:
        for view in data.draw(st.sampled_from(self.writers)).views:
            view[:] = bytes([byte]) * len(view)

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def stop_writing(self, data: st.DataObject) -> None:
        writer = data.draw(st.sampled_from(self.writers))
        if writer.reservation is not None:
            self.life.host.abort(ENGINE, writer.reservation.reservation_id)
        self.writers.remove(writer)
        os.close(writer.hold)

    # --- what the daemon does -------------------------------------------------------

    @precondition(lambda self: any(self.resident(model) for model in MODELS))
    @rule(data=st.data())
    def flush(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from([m for m in MODELS if self.resident(m)]))
        some = st.sampled_from([slot for _, slot in self.resident(model)])
        chosen = data.draw(st.lists(some, min_size=1, max_size=SLOTS, unique=True))
        self.life.memory.drop(self.space(model), chosen, Dropped.FLUSHED)

    @precondition(lambda self: any(self.resident(model) for model in MODELS))
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        """The daemon's copy process reads slots for an engine, however long that takes."""
        model = data.draw(st.sampled_from([m for m in MODELS if self.resident(m)]))
        some = st.sampled_from(self.resident(model))
        chosen = data.draw(st.lists(some, min_size=1, max_size=4, unique=True))
        hold = self.life.lives.copying()
        assert hold is not None
        space = self.space(model)
        slots = [slot for _, slot in chosen]
        self.life.host.hold(space, slots)
        reader = self.reader(space, chosen, float("inf"))
        reader.copying = hold
        reader.copied = partial(self.life.memory.let_go, space, slots)
        self.readers.append(reader)

    @precondition(lambda self: any(reader.copied for reader in self.readers))
    @rule(data=st.data())
    def end_copy(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from([r for r in self.readers if r.copied]))
        assert reader.copied is not None
        assert reader.copying is not None
        reader.copied()
        os.close(reader.copying)
        self.readers.remove(reader)

    @rule()
    def verify(self) -> None:
        self.life.prove()

    @rule(segments=st.integers(0, CAPACITY // SEGMENT))
    def press(self, segments: int) -> None:
        """The machine is short of memory, and then no more."""
        self.life.host.set_limit(segments * SEGMENT)
        while self.life.memory.shrink():
            self.life.memory.check()
        self.life.host.set_limit(CAPACITY)

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, 29.0, 600.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now_ns += int(seconds * S)
        self.life.host.expire(self.clock.now_ns)
        self.life.lives.tick()
        self.forget_ended()

    def forget_ended(self) -> None:
        now_ns = self.clock.now_ns
        self.readers = [reader for reader in self.readers if reader.until_ns > now_ns]

    @rule(hangs=st.booleans(), damage=st.sampled_from(["", "log", "head", "segment"]))
    def crash(self, hangs: bool, damage: str) -> None:
        """SIGKILL. What the daemon had copied goes on, or not, after its end."""
        self.life.end()
        for reader in [reader for reader in self.readers if reader.copying is not None]:
            if not hangs:
                assert reader.copying is not None
                os.close(reader.copying)
                self.readers.remove(reader)
        for reader in self.readers:
            reader.lease = reader.copied = None
        for writer in self.writers:
            writer.reservation = None
        if damage:
            self.damage(damage)
        self.life = OneLife(self.keeper, clock=self.clock)

    def damage(self, what: str) -> None:
        """Change a byte in what is kept of former lives, or lose half of a segment."""
        if what == "segment":
            arena = [name for name in self.keeper.names() if "-" not in name]
            if arena:
                gone = next(kept for kept in self.keeper._kept if kept[0] == arena[0])
                self.keeper._kept.remove(gone)
                os.close(gone[1])
            return
        page = next(fd for name, fd in self.keeper._kept if name.startswith("life-"))
        at = 70 if what == "head" else 4096 + self.stored % 64
        old = os.pread(page, 1, at)
        os.pwrite(page, bytes([old[0] ^ 0x5A]), at)

    # --- what must always hold ------------------------------------------------------

    @invariant()
    def sound(self) -> None:
        self.life.memory.check()

    @invariant()
    def bytes_under_a_lease_stay(self) -> None:
        self.forget_ended()
        for reader in self.readers:
            for view, right in zip(reader.views, reader.right, strict=True):
                assert view == right, "bytes have changed under a valid lease"

    @invariant()
    def what_is_served_is_right(self) -> None:
        for model in MODELS:
            space = self.space(model)
            for block_hash, slot in self.resident(model):
                right = blocks.payload(space.namespace, block_hash)
                assert self.life.memory.payload(space, slot) == right

    def teardown(self) -> None:
        """Once nobody reads or writes any more, every slot can be used again."""
        for reader in self.readers:
            if reader.copying is not None:
                os.close(reader.copying)
        for writer in self.writers:
            os.close(writer.hold)
        self.readers.clear()
        self.life.end()
        self.life = OneLife(self.keeper, clock=self.clock)
        self.pass_time(600.0)
        for space in self.life.host.spaces.values():
            assert not any(space.refs)
            assert not space.doubtful
        self.life.memory.check()
        self.life.end()
        self.keeper.close()


LeasesOverLives.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLeasesOverLives = pytest.mark.slow(LeasesOverLives.TestCase)
