"""What one life of the daemon leaves to the next, and what the next believes of it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.one_life import CAPACITY, RECORDS, OneLife, held_by_nobody, ledger_with
from tests.support.page_engine import ROOT, chain, content, namespace
from tests.support.tiers.bench import Bench, Tier, config, run
from tierd.clock import SystemClock
from tierd.config import StorageConfig, WritePolicy
from tierd.core.effects import NewSegment
from tierd.daemon.l2.memory import INTERNAL
from tierd.daemon.l2.verification import Verification
from tierd.memory.ledger import Ledger, LedgerError
from tierd.memory.past import LOG_BYTES, ArenaGuard, IncarnationPage, PastPage
from tierd.testing.simulation.keeper import Keeper


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    keeper = Keeper()
    yield keeper
    keeper.close()


def test_blocks_and_their_order_are_kept(keeper: Keeper) -> None:
    """After a restart the wrong blocks would be evicted first, or prefixes have holes."""
    life = OneLife(keeper)
    old, new = chain("old", 6), chain("new", 6)
    life.store(life.space(), old)
    life.store(life.space(), new)
    life.store(life.space(), chain("unproven", 3), prove=False)
    life.end()
    life = OneLife(keeper)
    life.memory.check()
    space = life.space()
    assert sorted(space.items) == sorted([*old, *new])
    assert life.host.prefix(space, old) == [], "served before it was proven"
    life.prove()
    life.lives.tick()
    assert len(life.host.prefix(space, old)) == 6
    assert [space.identity(space.items[h])[1] for h in old] == [ROOT, *old[:-1]]
    life.host.prefix(space, [])
    evicted = space._chain.evict(6, lambda slot: False)
    gone = [h for h in old if h not in space.items]
    assert len(evicted) == 6
    assert len(gone) == 6, "what was stored last went first"
    life.end()


def test_reservations_of_two_lives_have_different_numbers(keeper: Keeper) -> None:
    """A COMMIT that an engine sent to the old daemon would publish half of a new block."""
    life = OneLife(keeper)
    space = life.space()
    for tag in range(5):
        life.store(space, chain(tag, 2))
    last = max(space.generations)
    life.end()
    life = OneLife(keeper)
    reservation = life.memory.reserve(INTERNAL, life.space(), chain("x", 1), [ROOT])
    assert reservation.reservation_id > last
    life.end()


def test_doubtful_slots_stay_where_they_are(keeper: Keeper) -> None:
    """Memory that somebody may still write to would be given to another namespace."""
    life = OneLife(keeper)
    life.store(life.space(), chain("a", 2))
    life.end()
    life = OneLife(keeper)
    writer = life.lives.guard()
    life.prove()
    space = life.space()
    assert len(space.quarantined) == 2
    life.end()
    life = OneLife(keeper)
    space = life.space()
    for _ in range(3):
        life.lives.tick()
        assert len(space.quarantined) == 2
        assert not life.host.shrink()
        life.host.set_limit(0)
        life.memory.check()
    assert writer is not None
    os.close(writer)
    life.lives.tick()
    assert not space.quarantined
    assert len(space.free) == 2
    life.memory.check()
    life.end()


def test_a_life_in_the_middle_of_ending_another_can_be_killed(keeper: Keeper) -> None:
    """A second crash, soon after the first, would empty host memory."""
    life = OneLife(keeper)
    life.store(life.space(), chain("a", 4))
    writer = life.lives.guard()
    life.end()
    for _ in range(3):
        life = OneLife(keeper)
        assert len(life.space().items) == 4
        life.lives.tick()
        life.end()
    assert writer is not None
    os.close(writer)


def test_slots_stay_while_a_lease_of_before_lasts(keeper: Keeper) -> None:
    """An engine that still copies under its lease would copy another request's bytes."""
    life = OneLife(keeper)
    life.store(life.space(), chain("a", 8))
    space = life.space()
    slots = [space.items[h] for h in chain("a", 8)]
    until = SystemClock().monotonic_ns() + 500 * 10**9
    life.lives.leased(life.host.grant(1, [(space, slots[:4])], until))
    life.lives.tick()
    life.end()
    for _ in range(2):
        life = OneLife(keeper)
        space = life.space()
        life.prove()
        life.lives.tick()
        life.memory.check()
        # What nobody reads may go at once: a full arena could take in nothing otherwise.
        assert {slot for slot in slots if space.refs[slot]} == set(slots[:4])
        life.end()


def test_a_life_that_leaves_no_leases_is_not_followed(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The leases of the life before it would be taken for its own, and its readers be written to;
    or its own memory be emptied under them."""
    caplog.set_level(logging.CRITICAL, "tierd")
    life = OneLife(keeper)
    life.store(life.space(), chain("a", 4))
    life.end()

    def none_left(self: ArenaGuard) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(ArenaGuard, "hold", none_left)
        life = OneLife(keeper)
    life.prove()
    space = life.space()
    slots = life.host.prefix(space, chain("a", 4))
    views = [life.memory.payload(space, slot) for slot in slots]
    life.lives.leased(life.host.grant(1, [(space, slots)], SystemClock().monotonic_ns() + 10**10))
    life.end()
    assert len([name for name in keeper.names() if "-" in name]) == 2, "of the first life"
    life = OneLife(keeper)
    assert life.counters["adoption_dropped_segments_total"] == 1
    for tag in range(8):
        life.store(life.space(), chain(tag, 4))
    assert [bytes(view) for view in views] == [content(h) for h in chain("a", 4)]
    life.end()


def test_slots_stay_while_a_copy_process_of_before_runs(keeper: Keeper) -> None:
    """A copy that the daemon's end did not stop would bring another block to its engine."""
    life = OneLife(keeper)
    slots = life.store(life.space(), chain("a", 4))
    copying = life.lives.copying()
    assert copying is not None
    life.end()
    for _ in range(2):
        life = OneLife(keeper)
        life.prove()
        life.lives.tick()
        for tag in range(16):
            life.store(life.space(), chain(tag, 4))
        assert life.host.prefix(life.space(), chain("a", 4)) == slots
        life.end()
    os.close(copying)
    life = OneLife(keeper)
    life.lives.tick()
    assert held_by_nobody(life)
    life.end()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 900_000), st.integers(1, 40)), max_size=12))
@pytest.mark.slow
def test_no_lease_is_lost_in_the_log(leases: list[tuple[int, int]]) -> None:
    """A block that an engine still reads would be evicted after a restart under high load."""
    page = IncarnationPage.create(bytes(16))
    for number, (count, until) in enumerate(leases):
        page.lease(bytes([number % 3]) * 16, range(number, number + count), until)
    again = PastPage(page.fd, 0)
    assert again.until_ns == max((until for _, until in leases), default=0)
    for now in (0, 10, 39, 40):
        told = again.leased(now)
        for number, (count, until) in enumerate(leases):
            if until > now and told.complete:
                slots = told.slots[bytes([number % 3]) * 16]
                assert {number, number + count - 1} <= slots
        if sum(count for count, _ in leases) * 4 + 64 * len(leases) < LOG_BYTES // 2:
            assert told.complete
    page.no_leases()
    assert PastPage(page.fd, 0).until_ns == 0
    page.close()


TIER = StorageConfig(type="file", name="file", options={"path": "/a"})
OTHER = StorageConfig(type="file", name="file", options={"path": "/b"})


@pytest.mark.parametrize(("tiers", "known"), [((TIER,), 1), ((OTHER,), 0), ((OTHER, TIER), 0)])
def test_what_tiers_have_is_kept_for_the_same_tiers(
    keeper: Keeper, tiers: tuple[StorageConfig, ...], known: int
) -> None:
    """All of L2 would be written again after a restart, or never, to a tier that lacks it."""
    life = OneLife(keeper, tiers=(TIER,))
    space = life.space()
    slots = life.store(space, chain("a", 4))
    life.memory.mark(space, slots, add=1)
    life.memory.mark(space, slots[:1], remove=1)
    life.end()
    for _ in range(2):
        life = OneLife(keeper, tiers=tiers)
        assert sorted(life.space().tiers.of(slot) for slot in slots) == [0, known, known, known]
        life.end()


def test_evicted_and_moved_blocks_do_not_come_back(keeper: Keeper) -> None:
    """A slot's old name would be served with the bytes of whatever came after it."""
    life = OneLife(keeper)
    space, other = life.space(), life.space("other")
    for tag in range(20):
        life.store(space, chain(tag, 3))
    life.store(other, chain("b", 12))
    here = set(space.items)
    names = keeper.names()
    life.end()
    life = OneLife(keeper)
    assert len(names) == len(set(names)) * 2 - 2, "a segment and a ledger a name"
    assert set(life.space().items) == here
    life.prove()
    assert life.counters["rotten_blocks_total"] == 0
    life.end()


def test_a_hollow_segment_is_not_kept(keeper: Keeper) -> None:
    """The service manager would run out of room for descriptors that hold nothing."""
    life = OneLife(keeper)
    for tag in "xy":
        life.store(life.space(), chain(tag, 16))
    before = len(keeper.names())
    life.host.set_limit(CAPACITY // 2)
    while effects := life.host.shrink():
        life.memory._apply(effects)
    life.memory.check()
    assert len(keeper.names()) == before - 2 * 4
    life.end()
    life = OneLife(keeper)
    assert len(life.space().items) == 16
    life.memory.check()
    for tag in "bcde":
        life.store(life.space(), chain(tag, 4))
    life.end()


def test_what_no_slot_fits_is_let_go(keeper: Keeper) -> None:
    """A capacity below one block would keep tierd from starting, or keep the memory."""
    life = OneLife(keeper)
    life.store(life.space(), chain("a", 4))
    life.end()
    life = OneLife(keeper, capacity=16 << 10)
    assert life.counters["adoption_dropped_segments_total"] == 1
    assert not [name for name in keeper.names() if "-" not in name]
    life.end()


def test_dropped_blocks_are_gone_for_everybody(keeper: Keeper) -> None:
    """Damaged bytes would be served again, or a slot be filled under its reader's eyes."""
    life = OneLife(keeper)
    space = life.space()
    hashes = chain("a", 4)
    slots = life.store(space, hashes)
    lease = life.host.grant(7, [(space, slots)], 1)
    life.memory.drop(space, slots[1:3])
    life.memory.check()
    assert life.host.prefix(space, hashes) == slots[:1]
    again = life.store(space, hashes)
    assert len(again) == 2
    assert not set(again) & set(slots), "a slot was filled that is leased"
    assert life.host.prefix(space, hashes) == [slots[0], *again, slots[3]]
    life.host.release(lease.lease_id, 7)
    life.memory.check()
    assert set(slots[1:3]) <= set(space.free)
    life.end()


def test_a_guard_is_held_by_whoever_has_a_copy() -> None:
    """A slot would be used again while a child, or a message on its way, still can write to it."""
    guard = ArenaGuard.create()
    hold = guard.hold()
    copy = os.dup(hold)
    other = guard.hold()
    for fd in (hold, other):
        assert guard.held
        os.close(fd)
    assert guard.held
    os.close(copy)
    assert not guard.held
    guard.close()


@given(st.data())
def test_a_damaged_ledger_tells_nothing_wrong(data: st.DataObject) -> None:
    """A block would be served under another's name, or the daemon die at each start."""
    ledger = ledger_with(RECORDS)
    fd = ledger.fd
    size = os.fstat(fd).st_size
    if data.draw(st.booleans()):
        os.ftruncate(fd, data.draw(st.integers(0, size - 1)))
    else:
        at = data.draw(st.integers(0, size - 1))
        raw = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([raw[0] ^ (1 << data.draw(st.integers(0, 7)))]), at)
    try:
        found = Ledger.read(fd, 77)
    except LedgerError:
        pass
    else:
        # Which tiers have a block is not sealed: it changes, and is only a hint.
        told = [record._replace(tiers=0) for record in found.records()]
        assert [
            record for record in told if record not in [r._replace(tiers=0) for r in RECORDS]
        ] == []
        assert found.namespace == namespace()
        assert len(told) >= len(RECORDS) - 1
    finally:
        os.close(fd)


def test_a_ledger_belongs_to_one_segment() -> None:
    """Two segments whose descriptors were mixed up would swap their blocks."""
    ledger = ledger_with(RECORDS)
    assert list(Ledger.read(os.dup(ledger.fd), 77).records()) == RECORDS
    with pytest.raises(LedgerError, match="another segment"):
        Ledger.read(ledger.fd, 78)
    os.close(ledger.fd)


def test_what_was_not_adopted_does_not_turn_up_later(keeper: Keeper) -> None:
    """A record that one life would not believe would be believed by the one after it."""
    life = OneLife(keeper)
    space = life.space()
    slots = life.store(space, chain("a", 3))
    # As long as no block of this namespace is.
    [segment] = life.memory.arena.segments(space)
    [record] = [r for r in segment.ledger.records() if r.place == slots[2]]
    segment.ledger.ready(record._replace(length=record.length - 1))
    life.end()
    life = OneLife(keeper)
    assert len(life.space().items) == 2
    life.memory.check()
    life.end()


def test_leases_that_the_log_forgets_keep_everything() -> None:
    """Under the highest load the log goes round before leases end, and would lose the first."""
    page = IncarnationPage.create(bytes(16))
    count = LOG_BYTES // 4 // 5
    for number in range(8):
        page.lease(bytes([number]) * 16, range(count), 100 + number)
    told = PastPage(page.fd, 50).leased(50)
    assert not told.complete
    assert len(told.slots) == 4
    assert PastPage(page.fd, 50).leased(103).complete, "those that were lost have ended"
    page.close()


@pytest.mark.parametrize("rotten", [False, True])
def test_what_was_adopted_is_proven_before_it_is_written(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, rotten: bool
) -> None:
    """Damaged bytes would be stored with a checksum of their own, and served as sound ones; or a
    stop soon after a start would lose what only host memory has."""
    tier = config("tier", write_policy=WritePolicy.WRITE_BACK)
    raw = Tier()

    async def before(bench: Bench) -> None:
        bench.store(8)
        while bench.space.verified_blocks < 8:
            await asyncio.sleep(0.01)
        if rotten:
            slot = next(iter(bench.space.items.values()))
            bench.node.memory.payload(bench.space, slot)[7] ^= 1

    async def after(bench: Bench) -> None:
        assert len(bench.space.unverified) == 8
        # Were one to leave L2 now: nobody has looked at it.
        slot = next(iter(bench.space.items.values()))
        bench.node.backups.claim(bench.space, [slot], 8)
        await bench.backed_up()
        assert not raw.blocks
        assert await bench.node.drain(60.0) == 0

    run(before, tier, raw=[raw], manager=keeper)
    assert not raw.blocks

    async def nothing(self: Verification) -> None:
        """Nobody proves what nobody asks for."""

    monkeypatch.setattr(Verification, "run", nothing)
    run(after, tier, raw=[raw], manager=keeper)
    assert len(raw.blocks) == (7 if rotten else 8)


def test_a_life_that_cannot_leave_anything_still_serves(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a descriptor to spare tierd would not start, or not stop, or leave some behind."""

    def none_left(self: ArenaGuard) -> int:
        raise OSError(24, "Too many open files")

    # A record would keep the error, and with it whatever its frames have.
    caplog.set_level(logging.CRITICAL, "tierd")
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(ArenaGuard, "hold", none_left)
        life = OneLife(keeper)
    assert not life.lives.kept
    assert life.lives.guard() is None
    life.end()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_request_does_not_wait_for_proofs_beyond_its_deadline(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after a restart, on a busy machine, requests would hang instead of being computed."""
    stored: list[bytes] = []

    async def before(bench: Bench) -> None:
        stored.extend(bench.store(8))
        while bench.space.verified_blocks < 8:
            await asyncio.sleep(0.01)

    async def after(bench: Bench) -> None:
        assert await bench.acquire(stored, 0.5) == 0
        monkeypatch.undo()
        assert await bench.acquire(stored, 0.5) == 8

    async def never(self: Verification, *_: object) -> None:
        await asyncio.get_running_loop().create_future()

    run(before, config("tier"), manager=keeper)
    monkeypatch.setattr(Verification, "run", never)
    monkeypatch.setattr(Verification, "verify", never)
    run(after, config("tier"), manager=keeper)


def test_effects_name_segments(keeper: Keeper) -> None:
    """A segment whose descriptors are not kept is lost at the next restart."""
    life = OneLife(keeper)
    space = life.space()
    effects = life.host.make_room_ahead(space, 0)
    assert any(isinstance(effect, NewSegment) for effect in effects)
    life.memory._apply(effects)
    [segment] = life.memory.arena.segments(space)
    assert keeper.names().count(segment.kept_as) == 2
    life.end()
