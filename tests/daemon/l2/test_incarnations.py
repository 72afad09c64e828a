"""State handed from one incarnation of the daemon to the next, and which parts are trusted."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.one_incarnation import (
    CAPACITY,
    RECORDS,
    OneIncarnation,
    held_by_nobody,
    ledger_with,
)
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


def test_blocks_and_eviction_order_survive_a_restart(keeper: Keeper) -> None:
    """After a restart the wrong blocks would be evicted first, or prefixes would have holes."""
    incarnation = OneIncarnation(keeper)
    old, new = chain("old", 6), chain("new", 6)
    incarnation.store(incarnation.space(), old)
    incarnation.store(incarnation.space(), new)
    incarnation.store(incarnation.space(), chain("unverified", 3), prove=False)
    incarnation.end()
    incarnation = OneIncarnation(keeper)
    incarnation.memory.check()
    space = incarnation.space()
    assert sorted(space.items) == sorted([*old, *new])
    assert incarnation.host.prefix(space, old) == [], "served before it was verified"
    incarnation.prove()
    incarnation.incarnations.tick()
    assert len(incarnation.host.prefix(space, old)) == 6
    assert [space.identity(space.items[h])[1] for h in old] == [ROOT, *old[:-1]]
    incarnation.host.prefix(space, [])
    evicted = space._chain.evict(6, lambda slot: False)
    gone = [h for h in old if h not in space.items]
    assert len(evicted) == 6
    assert len(gone) == 6, "the block stored last was evicted first"
    incarnation.end()


def test_reservation_numbers_differ_between_incarnations(keeper: Keeper) -> None:
    """A COMMIT that an engine sent to the old daemon would publish half of a new block."""
    incarnation = OneIncarnation(keeper)
    space = incarnation.space()
    for tag in range(5):
        incarnation.store(space, chain(tag, 2))
    last = max(space.generations)
    incarnation.end()
    incarnation = OneIncarnation(keeper)
    reservation = incarnation.memory.reserve(INTERNAL, incarnation.space(), chain("x", 1), [ROOT])
    assert reservation.reservation_id > last
    incarnation.end()


def test_quarantined_slots_are_not_reused_while_a_writer_holds_the_guard(keeper: Keeper) -> None:
    """Memory that a process may still write to would be given to another namespace."""
    incarnation = OneIncarnation(keeper)
    incarnation.store(incarnation.space(), chain("a", 2))
    incarnation.end()
    incarnation = OneIncarnation(keeper)
    writer = incarnation.incarnations.guard()
    incarnation.prove()
    space = incarnation.space()
    assert len(space.quarantined) == 2
    incarnation.end()
    incarnation = OneIncarnation(keeper)
    space = incarnation.space()
    for _ in range(3):
        incarnation.incarnations.tick()
        assert len(space.quarantined) == 2
        assert not incarnation.host.shrink()
        incarnation.host.set_limit(0)
        incarnation.memory.check()
    assert writer is not None
    os.close(writer)
    incarnation.incarnations.tick()
    assert not space.quarantined
    assert len(space.free) == 2
    incarnation.memory.check()
    incarnation.end()


def test_repeated_crashes_during_adoption_keep_the_blocks(keeper: Keeper) -> None:
    """A second crash, soon after the first, would empty host memory."""
    incarnation = OneIncarnation(keeper)
    incarnation.store(incarnation.space(), chain("a", 4))
    writer = incarnation.incarnations.guard()
    incarnation.end()
    for _ in range(3):
        incarnation = OneIncarnation(keeper)
        assert len(incarnation.space().items) == 4
        incarnation.incarnations.tick()
        incarnation.end()
    assert writer is not None
    os.close(writer)


def test_slots_leased_by_a_former_incarnation_are_not_reused(keeper: Keeper) -> None:
    """An engine that still copies under its lease would copy another request's bytes."""
    incarnation = OneIncarnation(keeper)
    incarnation.store(incarnation.space(), chain("a", 8))
    space = incarnation.space()
    slots = [space.items[h] for h in chain("a", 8)]
    until = SystemClock().monotonic_ns() + 500 * 10**9
    incarnation.incarnations.leased(incarnation.host.grant(1, [(space, slots[:4])], until))
    incarnation.incarnations.tick()
    incarnation.end()
    for _ in range(2):
        incarnation = OneIncarnation(keeper)
        space = incarnation.space()
        incarnation.prove()
        incarnation.incarnations.tick()
        incarnation.memory.check()
        # Slots without a lease are free at once: a full arena could not store otherwise.
        assert {slot for slot in slots if space.refs[slot]} == set(slots[:4])
        incarnation.end()


def test_segments_are_dropped_when_the_incarnation_before_kept_no_leases(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Leases of an older incarnation would be taken for those of the last one: its readers' slots
    would be written to, or its memory decommitted under them."""
    caplog.set_level(logging.CRITICAL, "tierd")
    incarnation = OneIncarnation(keeper)
    incarnation.store(incarnation.space(), chain("a", 4))
    incarnation.end()

    def none_left(self: ArenaGuard) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(ArenaGuard, "hold", none_left)
        incarnation = OneIncarnation(keeper)
    incarnation.prove()
    space = incarnation.space()
    slots = incarnation.host.prefix(space, chain("a", 4))
    views = [incarnation.memory.payload(space, slot) for slot in slots]
    incarnation.incarnations.leased(
        incarnation.host.grant(1, [(space, slots)], SystemClock().monotonic_ns() + 10**10)
    )
    incarnation.end()
    assert len([name for name in keeper.names() if "-" in name]) == 2, "of the first incarnation"
    incarnation = OneIncarnation(keeper)
    assert incarnation.counters["adoption_dropped_segments_total"] == 1
    for tag in range(8):
        incarnation.store(incarnation.space(), chain(tag, 4))
    assert [bytes(view) for view in views] == [content(h) for h in chain("a", 4)]
    incarnation.end()


def test_slots_are_not_reused_while_an_old_copy_process_runs(keeper: Keeper) -> None:
    """A copy process that outlives the daemon would bring another block to its engine."""
    incarnation = OneIncarnation(keeper)
    slots = incarnation.store(incarnation.space(), chain("a", 4))
    copying = incarnation.incarnations.copying()
    assert copying is not None
    incarnation.end()
    for _ in range(2):
        incarnation = OneIncarnation(keeper)
        incarnation.prove()
        incarnation.incarnations.tick()
        for tag in range(16):
            incarnation.store(incarnation.space(), chain(tag, 4))
        assert incarnation.host.prefix(incarnation.space(), chain("a", 4)) == slots
        incarnation.end()
    os.close(copying)
    incarnation = OneIncarnation(keeper)
    incarnation.incarnations.tick()
    assert held_by_nobody(incarnation)
    incarnation.end()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 900_000), st.integers(1, 40)), max_size=12))
@pytest.mark.slow
def test_lease_log_loses_no_lease(leases: list[tuple[int, int]]) -> None:
    """A block that an engine still reads would be evicted after a restart under high load."""
    page = IncarnationPage.create(bytes(16))
    for number, (count, until) in enumerate(leases):
        page.lease(bytes([number % 3]) * 16, range(number, number + count), until)
    again = PastPage(page.fd, 0)
    assert again.until_ns == max((until for _, until in leases), default=0)
    for now in (0, 10, 39, 40):
        found = again.leased(now)
        for number, (count, until) in enumerate(leases):
            if until > now and found.complete:
                slots = found.slots[bytes([number % 3]) * 16]
                assert {number, number + count - 1} <= slots
        if sum(count for count, _ in leases) * 4 + 64 * len(leases) < LOG_BYTES // 2:
            assert found.complete
    page.no_leases()
    assert PastPage(page.fd, 0).until_ns == 0
    page.close()


TIER = StorageConfig(type="file", name="file", options={"path": "/a"})
OTHER = StorageConfig(type="file", name="file", options={"path": "/b"})


@pytest.mark.parametrize(("tiers", "known"), [((TIER,), 1), ((OTHER,), 0), ((OTHER, TIER), 0)])
def test_backup_marks_are_kept_only_for_unchanged_tiers(
    keeper: Keeper, tiers: tuple[StorageConfig, ...], known: int
) -> None:
    """After a restart all of L2 would be written again, or never, to a tier that lacks it."""
    incarnation = OneIncarnation(keeper, tiers=(TIER,))
    space = incarnation.space()
    slots = incarnation.store(space, chain("a", 4))
    incarnation.memory.mark(space, slots, add=1)
    incarnation.memory.mark(space, slots[:1], remove=1)
    incarnation.end()
    for _ in range(2):
        incarnation = OneIncarnation(keeper, tiers=tiers)
        assert sorted(incarnation.space().tiers.of(slot) for slot in slots) == [
            0,
            known,
            known,
            known,
        ]
        incarnation.end()


def test_evicted_and_moved_blocks_are_not_adopted(keeper: Keeper) -> None:
    """A slot's old name would be served with the bytes of a later block."""
    incarnation = OneIncarnation(keeper)
    space, other = incarnation.space(), incarnation.space("other")
    for tag in range(20):
        incarnation.store(space, chain(tag, 3))
    incarnation.store(other, chain("b", 12))
    here = set(space.items)
    names = keeper.names()
    incarnation.end()
    incarnation = OneIncarnation(keeper)
    assert len(names) == len(set(names)) * 2 - 2, "one segment and one ledger per name"
    assert set(incarnation.space().items) == here
    incarnation.prove()
    assert incarnation.counters["rotten_blocks_total"] == 0
    incarnation.end()


def test_decommitted_segments_are_removed_from_the_service_manager(keeper: Keeper) -> None:
    """The service manager would run out of room for descriptors of empty segments."""
    incarnation = OneIncarnation(keeper)
    for tag in "xy":
        incarnation.store(incarnation.space(), chain(tag, 16))
    before = len(keeper.names())
    incarnation.host.set_limit(CAPACITY // 2)
    while effects := incarnation.host.shrink():
        incarnation.memory._apply(effects)
    incarnation.memory.check()
    assert len(keeper.names()) == before - 2 * 4
    incarnation.end()
    incarnation = OneIncarnation(keeper)
    assert len(incarnation.space().items) == 16
    incarnation.memory.check()
    for tag in "bcde":
        incarnation.store(incarnation.space(), chain(tag, 4))
    incarnation.end()


def test_segments_larger_than_a_lower_capacity_are_dropped(keeper: Keeper) -> None:
    """A capacity below one block would keep tierd from starting, or keep the memory."""
    incarnation = OneIncarnation(keeper)
    incarnation.store(incarnation.space(), chain("a", 4))
    incarnation.end()
    incarnation = OneIncarnation(keeper, capacity=16 << 10)
    assert incarnation.counters["adoption_dropped_segments_total"] == 1
    assert not [name for name in keeper.names() if "-" not in name]
    incarnation.end()


def test_dropped_blocks_are_not_served_and_their_leased_slots_not_reused(keeper: Keeper) -> None:
    """Damaged bytes would be served again, or a slot be filled while a reader uses it."""
    incarnation = OneIncarnation(keeper)
    space = incarnation.space()
    hashes = chain("a", 4)
    slots = incarnation.store(space, hashes)
    lease = incarnation.host.grant(7, [(space, slots)], 1)
    incarnation.memory.drop(space, slots[1:3])
    incarnation.memory.check()
    assert incarnation.host.prefix(space, hashes) == slots[:1]
    again = incarnation.store(space, hashes)
    assert len(again) == 2
    assert not set(again) & set(slots), "a leased slot was filled"
    assert incarnation.host.prefix(space, hashes) == [slots[0], *again, slots[3]]
    incarnation.host.release(lease.lease_id, 7)
    incarnation.memory.check()
    assert set(slots[1:3]) <= set(space.free)
    incarnation.end()


def test_guard_is_held_while_any_duplicate_is_open() -> None:
    """A slot would be reused while a child process, or a message in transit, can write to it."""
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
def test_damaged_ledger_yields_no_wrong_record(data: st.DataObject) -> None:
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
        records = [record._replace(tiers=0) for record in found.records()]
        assert [
            record for record in records if record not in [r._replace(tiers=0) for r in RECORDS]
        ] == []
        assert found.namespace == namespace()
        assert len(records) >= len(RECORDS) - 1
    finally:
        os.close(fd)


def test_ledger_of_another_segment_is_refused() -> None:
    """Two segments whose descriptors were mixed up would swap their blocks."""
    ledger = ledger_with(RECORDS)
    assert list(Ledger.read(os.dup(ledger.fd), 77).records()) == RECORDS
    with pytest.raises(LedgerError, match="another segment"):
        Ledger.read(ledger.fd, 78)
    os.close(ledger.fd)


def test_records_refused_once_are_not_adopted_later(keeper: Keeper) -> None:
    """A record that one incarnation refused would be trusted by the next."""
    incarnation = OneIncarnation(keeper)
    space = incarnation.space()
    slots = incarnation.store(space, chain("a", 3))
    # A length that no block of this namespace has.
    [segment] = incarnation.memory.arena.segments(space)
    [record] = [r for r in segment.ledger.records() if r.place == slots[2]]
    segment.ledger.ready(record._replace(length=record.length - 1))
    incarnation.end()
    incarnation = OneIncarnation(keeper)
    assert len(incarnation.space().items) == 2
    incarnation.memory.check()
    incarnation.end()


def test_lease_log_that_overflows_reports_itself_incomplete() -> None:
    """Under the highest load the log wraps before leases end, and the first would be lost."""
    page = IncarnationPage.create(bytes(16))
    count = LOG_BYTES // 4 // 5
    for number in range(8):
        page.lease(bytes([number]) * 16, range(count), 100 + number)
    found = PastPage(page.fd, 50).leased(50)
    assert not found.complete
    assert len(found.slots) == 4
    assert PastPage(page.fd, 50).leased(103).complete, "the lost leases have ended"
    page.close()


@pytest.mark.parametrize("rotten", [False, True])
def test_adopted_blocks_are_verified_before_backup(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, rotten: bool
) -> None:
    """Damaged bytes would be stored under a new checksum and served as sound, or a stop soon after
    a start would lose blocks that only host memory has."""
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
        # Ask for a backup now: the block is not verified yet.
        slot = next(iter(bench.space.items.values()))
        bench.node.backups.claim(bench.space, [slot], 8)
        await bench.backed_up()
        assert not raw.blocks
        assert await bench.node.drain(60.0) == 0

    run(before, tier, raw=[raw], manager=keeper)
    assert not raw.blocks

    async def nothing(self: Verification) -> None:
        """Verify nothing unless it is asked for."""

    monkeypatch.setattr(Verification, "run", nothing)
    run(after, tier, raw=[raw], manager=keeper)
    assert len(raw.blocks) == (7 if rotten else 8)


def test_incarnation_without_descriptors_serves_but_keeps_nothing(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a free descriptor tierd would not start or stop, or would leak descriptors."""

    def none_left(self: ArenaGuard) -> int:
        raise OSError(24, "Too many open files")

    # A record would keep the error, and with it everything its frames hold.
    caplog.set_level(logging.CRITICAL, "tierd")
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(ArenaGuard, "hold", none_left)
        incarnation = OneIncarnation(keeper)
    assert not incarnation.incarnations.kept
    assert incarnation.incarnations.guard() is None
    incarnation.end()
    assert len(os.listdir("/proc/self/fd")) == before


def test_acquire_does_not_wait_for_verification_beyond_its_deadline(
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


def test_new_segments_are_kept_with_the_service_manager(keeper: Keeper) -> None:
    """A segment whose descriptors are not kept is lost at the next restart."""
    incarnation = OneIncarnation(keeper)
    space = incarnation.space()
    effects = incarnation.host.make_room_ahead(space, 0)
    assert any(isinstance(effect, NewSegment) for effect in effects)
    incarnation.memory._apply(effects)
    [segment] = incarnation.memory.arena.segments(space)
    assert keeper.names().count(segment.kept_as) == 2
    incarnation.end()
