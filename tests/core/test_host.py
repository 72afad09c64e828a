"""The host tier against a model that recomputes everything, and reports from the field."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support import blocks
from tierd.core.effects import DecommitSegment, Effect, EndSpace, Forget, Move, NewSegment
from tierd.core.host import HostTier
from tierd.core.l2.leases import SlotLease
from tierd.core.l2.reservations import Found, SlotReservation
from tierd.core.l2.sharing import IDLE_S, TURN_S, segment_bytes
from tierd.core.l2.space import Space
from tierd.core.reasons import NoRoom, Refusal

PAGE = 4096
INTERNAL = 0
TTL = 100

# Slots of one, three and two pages: segments of four, one and two slots.
SPACES = [
    blocks.namespace(PAGE, model="a"),
    blocks.namespace(3 * PAGE - 5, model="b"),
    blocks.namespace(2 * PAGE, model="c"),
]
CAPACITY = 24 * PAGE
SEGMENT = 4 * PAGE

CHAINS, DEPTH = 4, 6


def hash_at(number: int) -> bytes:
    return b"%032d" % number


def parent_of(number: int) -> bytes:
    """Chains of DEPTH blocks; every other one branches off the middle of the one before."""
    chain, depth = divmod(number, DEPTH)
    if depth:
        return hash_at(number - 1)
    return hash_at(number - DEPTH // 2) if chain % 2 else blocks.ROOT


NUMBERS = range(CHAINS * DEPTH)
PARENTS = {hash_at(number): parent_of(number) for number in NUMBERS}
runs = st.builds(
    lambda start, count: list(range(start, min(start + count, len(NUMBERS)))),
    st.sampled_from(NUMBERS),
    st.integers(1, 9),
)
mixes = st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=8)
owners = st.integers(1, 3)
which = st.integers(0, len(SPACES) - 1)

Place = tuple[bytes, int]


def content_of(space: Space, block_hash: bytes) -> bytes:
    """Return the only valid content of a block."""
    return space.digest + block_hash


@dataclass(eq=False)
class Held:
    """A lease, or a hold by the daemon, and the blocks that its slots must contain."""

    places: list[tuple[Space, int, bytes]]
    lease: SlotLease | None = None


@dataclass(eq=False)
class Writer:
    """An open reservation; its owner has filled the first `written` slots."""

    reservation: SlotReservation
    parents_ready: set[bytes]
    written: int = 0

    @property
    def granted(self) -> list[tuple[bytes, int]]:
        pairs = zip(self.reservation.hashes, self.reservation.slots, strict=True)
        return [(block_hash, slot) for block_hash, slot in pairs if slot >= 0]


class HostAgainstModel(RuleBasedStateMachine):
    """A bug of the host tier would serve wrong bytes: a slot reused during a read or a write.

    The model keeps the memory, the ledger and the segments like the daemon, and changes them
    only by effects. Writers write as late as possible.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host = HostTier(CAPACITY, SEGMENT)
        opened = [self.host.open_space(namespace) for namespace in SPACES]
        self.spaces = [space for space in opened if space is not None]
        assert len(self.spaces) == len(SPACES)
        self.memory: dict[Place, bytes] = {}
        self.ledger: dict[Place, bytes] = {}
        self.live: set[Place] = set()
        self.writers: list[Writer] = []
        self.holds: list[Held] = []
        self.ended: list[tuple[int, int]] = []
        self.now = 0
        self.made: Counter[Space] = Counter()
        self.failing = False
        """Whether the system refuses new segments."""

    # --- the world ------------------------------------------------------------------

    def ready(self) -> dict[Place, bytes]:
        return {
            (space.digest, slot): block_hash
            for space in self.spaces
            for block_hash, slot in space.items.items()
        }

    def apply(self, effects: list[Effect]) -> None:
        """Apply effects, all before the new slots are written."""
        for effect in effects:
            if isinstance(effect, Forget):
                for slot in effect.slots:
                    self.ledger.pop((effect.space.digest, slot), None)
                continue
            if isinstance(effect, Move):
                in_use = self.places_in_use()
                for slot, target in effect.pairs:
                    old, new = (effect.space.digest, slot), (effect.space.digest, target)
                    assert old not in in_use
                    assert new not in in_use
                    assert new not in self.ledger
                    self.memory[new] = self.memory.pop(old)
                    self.ledger[new] = self.ledger.pop(old)
                continue
            if isinstance(effect, EndSpace):
                assert not any(digest == effect.space.digest for digest, _ in self.live)
                continue
            made = self.made[effect.space]
            if isinstance(effect, NewSegment) and effect.segment >= made:
                if effect.segment >= len(effect.space.live):
                    continue  # Lost together with an earlier segment.
                if self.failing:
                    self.host.lose_segments(effect.space, made)
                    continue
                self.made[effect.space] += 1
            place = (effect.space.digest, effect.segment)
            per = effect.space.slots_per_segment
            if isinstance(effect, NewSegment):
                assert place not in self.live
                self.live.add(place)
                continue
            assert isinstance(effect, DecommitSegment)
            self.live.remove(place)
            for slot in range(effect.segment * per, (effect.segment + 1) * per):
                self.memory.pop((effect.space.digest, slot), None)

    def changing(self, act: Callable[[], list[Effect]]) -> None:
        """Run a call that may evict, and check the evicted blocks."""
        before = self.ready()
        effects = act()
        self.apply(effects)
        assert self.ledger == self.ready(), "the effects do not tell all that has happened"
        after = {(digest, h) for (digest, _), h in self.ready().items()}
        parents = {(digest, PARENTS.get(h, blocks.ROOT)) for digest, h in after}
        for (digest, _), block_hash in before.items():
            if (digest, block_hash) not in after:
                assert (digest, block_hash) not in parents, "a prefix has a hole"

    def state(self) -> object:
        """Return all state that a refused call must not change."""
        return (
            [
                (dict(s.items), list(s.free), dict(s.writing), list(s.refs), list(s.live))
                for s in self.spaces
            ],
            set(self.host.leases),
            set(self.host.reservations),
            self.host.allocated_bytes,
        )

    # --- storing --------------------------------------------------------------------

    @rule(at=which, owner=owners, numbers=runs)
    def store(self, at: int, owner: int, numbers: list[int]) -> None:
        writer = self.reserve(at, owner, numbers)
        if writer is not None:
            self.fill(writer, len(writer.granted))
            self.publish(writer, len(writer.granted))

    @rule(at=which, owner=st.integers(0, 3), numbers=runs | mixes)
    def begin(self, at: int, owner: int, numbers: list[int]) -> None:
        self.reserve(at, owner, numbers)

    def reserve(self, at: int, owner: int, numbers: list[int]) -> Writer | None:
        space = self.spaces[at]
        hashes = [hash_at(number) for number in numbers]
        parents = [PARENTS[h] for h in hashes]
        items, writing = dict(space.items), dict(space.writing)
        made: list[SlotReservation] = []
        mine = sum(
            len(w.granted) * w.reservation.space.slot_bytes
            for w in self.writers
            if w.reservation.owner == owner
        )

        def act() -> list[Effect]:
            reservation, effects = self.host.reserve(owner, space, hashes, parents)
            made.append(reservation)
            return effects

        self.changing(act)
        reservation = made[0]
        seen: set[bytes] = set()
        refused = False
        for block_hash, slot in zip(hashes, reservation.slots, strict=True):
            if block_hash in items:
                assert slot == Refusal.PRESENT
                assert space.items[block_hash] == items[block_hash]
            elif block_hash in writing or block_hash in seen:
                assert slot == Refusal.BUSY
            elif slot == Refusal.NO_ROOM:
                refused = True
                seen.add(block_hash)
            else:
                assert not refused, "a later block got room that an earlier one was refused"
                seen.add(block_hash)
                place = (space.digest, slot)
                assert (space.digest, slot // space.slots_per_segment) in self.live
                assert place not in self.ledger
                assert place not in self.places_in_use()
        # Only the parents of granted blocks must stay; a block that was present may be evicted.
        ready_now = {
            parent
            for parent, slot in zip(parents, reservation.slots, strict=True)
            if slot >= 0 and parent in space.items
        }
        writer = Writer(reservation, ready_now)
        granted = [slot for _, slot in writer.granted]
        assert len(set(granted)) == len(granted)
        within = mine + len(granted) * space.slot_bytes
        assert within <= CAPACITY // 2 or len(granted) == 1
        if granted:
            self.writers.append(writer)
        why = reservation.refused
        assert (why is not None) == refused
        if (
            refused
            and why is not NoRoom.SEGMENT
            and within + space.slot_bytes <= self.host.limit_bytes // 2
        ):
            self.assert_full(space, {*hashes, *parents})
        return writer if granted else None

    def assert_full(self, space: Space, kept: set[bytes]) -> None:
        """Check that a block was only refused if no block could have made room for it."""
        assert not space.free
        assert self.host.allocated_bytes + space.segment_bytes > self.host.limit_bytes
        above = {PARENTS[h] for h in space.items}
        for block_hash, slot in space.items.items():
            assert block_hash in above or block_hash in kept or space.refs[slot]

    def places_in_use(self) -> set[Place]:
        written = {
            (w.reservation.space.digest, slot) for w in self.writers for _, slot in w.granted
        }
        return written | {(s.digest, slot) for held in self.holds for s, slot, _ in held.places}

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        writer = data.draw(st.sampled_from(self.writers))
        self.fill(writer, data.draw(st.integers(writer.written, len(writer.granted))))

    def fill(self, writer: Writer, upto: int) -> None:
        space, granted = writer.reservation.space, writer.granted
        for block_hash, slot in granted[writer.written : upto]:
            self.memory[space.digest, slot] = content_of(space, block_hash)
        writer.written = upto

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        writer = data.draw(st.sampled_from(self.writers))
        self.publish(writer, data.draw(st.integers(0, writer.written)))

    def publish(self, writer: Writer, count: int) -> None:
        reservation, space = writer.reservation, writer.reservation.space
        for parent in writer.parents_ready:
            assert parent in space.items, "the parent of a new block was evicted"
        ready = self.host.commit(reservation.owner, reservation.reservation_id, count)
        assert ready == [slot for _, slot in writer.granted[:count]]
        self.end(writer, writer.granted[:count])

    @precondition(lambda self: any(w.reservation.owner == INTERNAL for w in self.writers))
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        mine = [w for w in self.writers if w.reservation.owner == INTERNAL]
        writer = data.draw(st.sampled_from(mine))
        reservation, space = writer.reservation, writer.reservation.space
        size = len(reservation.hashes)
        good = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
        pairs = zip(reservation.hashes, reservation.slots, good, strict=True)
        expected = [(h, slot) for h, slot, ok in pairs if ok and slot >= 0]
        for block_hash, slot in expected:
            self.memory[space.digest, slot] = content_of(space, block_hash)
        found = [
            Found(parent, block_hash[-16:]) if ok and slot >= 0 else None
            for block_hash, parent, slot, ok in zip(
                reservation.hashes, reservation.parents, reservation.slots, good, strict=True
            )
        ]
        ready = self.host.commit_found(INTERNAL, reservation.reservation_id, found)
        assert ready == [slot for _, slot in expected]
        self.end(writer, expected)

    def end(self, writer: Writer, ready: list[tuple[bytes, int]]) -> None:
        self.writers.remove(writer)
        reservation = writer.reservation
        self.ended.append((reservation.owner, reservation.reservation_id))
        for block_hash, slot in ready:
            space = reservation.space
            assert space.items[block_hash] == slot
            assert space.checksums[slot] in (None, block_hash[-16:])
            assert not space.tiers.of(slot)
            self.host.note_checksums(space, {slot: block_hash[-16:]})
            self.host.mark(space, [slot], add=1)
            self.ledger[reservation.space.digest, slot] = block_hash
        for block_hash, slot in set(writer.granted) - set(ready):
            assert block_hash not in reservation.space.items
            assert slot in reservation.space.free

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        writer = data.draw(st.sampled_from(self.writers))
        reservation = writer.reservation
        assert self.host.abort(reservation.owner, reservation.reservation_id)
        self.end(writer, [])

    @rule(owner=owners)
    def drop_owner(self, owner: int) -> None:
        mine = [w for w in self.writers if w.reservation.owner == owner]
        assert self.host.drop_owner(owner) == len(mine)
        for writer in mine:
            self.end(writer, [])

    @rule(owner=owners, data=st.data())
    def stale_or_foreign(self, owner: int, data: st.DataObject) -> None:
        before = self.state()
        theirs = [w.reservation for w in self.writers if w.reservation.owner != owner]
        for reservation in theirs:
            assert self.host.commit(owner, reservation.reservation_id, 9) is None
            assert not self.host.abort(owner, reservation.reservation_id)
        for ended_owner, reservation_id in self.ended[-5:]:
            assert self.host.commit(ended_owner, reservation_id, 9) is None
        for held in self.holds:
            if held.lease is not None and held.lease.owner != owner:
                assert not self.host.release(held.lease.lease_id, owner)
        assert not self.host.release(data.draw(st.integers(10_000, 20_000)), owner)
        assert self.state() == before

    # --- using ----------------------------------------------------------------------

    @precondition(lambda self: any(len(space.items) for space in self.spaces))
    @rule(
        owner=owners,
        data=st.data(),
        ats=st.lists(which, max_size=2),
        ttl=st.sampled_from([1, TTL // 2, TTL]),
    )
    def acquire(self, owner: int, data: st.DataObject, ats: list[int], ttl: int) -> None:
        some = [i for i, space in enumerate(self.spaces) if len(space.items)]
        ats = [data.draw(st.sampled_from(some)), *ats]
        first = data.draw(st.sampled_from(sorted(map(int, self.spaces[ats[0]].items))))
        hashes = [hash_at(n) for n in range(first, min(first + 8, len(NUMBERS)))]
        spaces = [self.spaces[at] for at in ats]
        found = [self.host.prefix(space, hashes) for space in spaces]
        for space, slots in zip(spaces, found, strict=True):
            count = 0
            while count < len(hashes) and hashes[count] in space.items:
                count += 1
            assert slots == [space.items[h] for h in hashes[:count]]
        shared = min(len(slots) for slots in found)
        if not shared:
            return
        parts = [(space, slots[:shared]) for space, slots in zip(spaces, found, strict=True)]
        lease = self.host.grant(owner, parts, self.now + ttl)
        places = [
            (space, slot, h)
            for space, slots in parts
            for slot, h in zip(slots, hashes, strict=False)
        ]
        self.holds.append(Held(places, lease))

    @precondition(lambda self: any(held.lease for held in self.holds))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from([held for held in self.holds if held.lease]))
        assert held.lease is not None
        assert self.host.release(held.lease.lease_id, held.lease.owner)
        self.holds.remove(held)
        before = self.state()
        assert not self.host.release(held.lease.lease_id, held.lease.owner)
        assert self.state() == before

    @rule(later=st.integers(0, TTL))
    def expire(self, later: int) -> None:
        self.now += later
        over = [h for h in self.holds if h.lease is not None and h.lease.expires_ns <= self.now]
        assert self.host.expire(self.now) == len(over)
        for held in over:
            self.holds.remove(held)

    @rule(at=which, data=st.data())
    def hold(self, at: int, data: st.DataObject) -> None:
        space = self.spaces[at]
        if space.items:
            some = st.sampled_from(sorted(space.items.items()))
            chosen = data.draw(st.lists(some, min_size=1, max_size=4))
            self.host.hold(space, [slot for _, slot in chosen])
            self.holds.append(Held([(space, slot, h) for h, slot in chosen]))

    @precondition(lambda self: any(held.lease is None for held in self.holds))
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from([held for held in self.holds if held.lease is None]))
        self.host.unhold(held.places[0][0], [slot for _, slot, _ in held.places])
        self.holds.remove(held)

    @rule(at=which, count=st.integers(0, 300))
    def make_room_ahead(self, at: int, count: int) -> None:
        self.changing(lambda: self.host.make_room_ahead(self.spaces[at], count))

    @rule(segments=st.integers(1, CAPACITY // SEGMENT))
    def limit(self, segments: int) -> None:
        self.host.set_limit(segments * SEGMENT)

    @rule()
    def shrink(self) -> None:
        before = self.host.allocated_bytes
        self.changing(self.host.shrink)
        assert before > self.host.limit_bytes or self.host.allocated_bytes == before

    @rule(at=which, sessions=st.integers(0, 1))
    def sessions_come_and_go(self, at: int, sessions: int) -> None:
        self.spaces[at]._sessions = sessions

    @rule(seconds=st.sampled_from([1, TURN_S, IDLE_S]))
    def time_passes(self, seconds: int) -> None:
        self.host.pass_time(self.host.now_s + seconds)

    @rule(failing=st.booleans())
    def the_system_gives_segments_or_not(self, failing: bool) -> None:
        self.failing = failing

    @rule(at=which, most=st.integers(0, 3), back_s=st.integers(0, 2))
    def a_namespace_ends(self, at: int, most: int, back_s: int) -> None:
        space = self.spaces[at]
        if space.sessions or any(place[0] is space for held in self.holds for place in held.places):
            return
        if any(writer.reservation.space is space for writer in self.writers):
            most = 0  # Open writes have parents, which would be dropped.
        self.host.register(space)
        self.host.unregister(space, self.host.now_s + back_s)
        before = {slot for _, slot in space.items.items()}
        self.apply(self.host.clear_space(space, most))
        assert len(before) - len(space.items) == min(most, len(before))
        self.apply(self.host.empty_space(space))
        self.apply(self.host.end_space(space))
        writing = any(writer.reservation.space is space for writer in self.writers)
        ends = not (writing or space.items or space.known_until_s > self.host.now_s)
        assert space.ended == ends
        if ends:
            assert self.host.reserve(1, space, [bytes(32)], [blocks.ROOT])[0].slots == [-3]
            again = self.host.open_space(space.namespace)
            assert again is not None
            self.spaces[at] = again

    # --- invariants -----------------------------------------------------------------

    @invariant()
    def sound(self) -> None:
        self.host.check()

    @invariant()
    def every_ready_block_has_its_own_bytes(self) -> None:
        for space in self.spaces:
            for block_hash, slot in space.items.items():
                assert self.memory[space.digest, slot] == content_of(space, block_hash)
                assert space.checksums[slot] == block_hash[-16:]
                assert space.tiers.of(slot)

    @invariant()
    def held_slots_stay(self) -> None:
        refs: Counter[Place] = Counter()
        for held in self.holds:
            for space, slot, block_hash in held.places:
                assert space.items.get(block_hash) == slot
                refs[space.digest, slot] += 1
        for writer in self.writers:
            for slot in writer.reservation.held:
                refs[writer.reservation.space.digest, slot] += 1
        for space in self.spaces:
            for slot, count in enumerate(space.refs):
                assert count == refs[space.digest, slot]

    @invariant()
    def ledger_tells_the_truth(self) -> None:
        assert self.ledger == self.ready()

    @invariant()
    def memory_is_bounded(self) -> None:
        held = {(s.digest, i) for s in self.spaces for i, live in enumerate(s.live) if live}
        assert held == self.live
        size = {space.digest: space.segment_bytes for space in self.spaces}
        assert sum(size[digest] for digest, _ in self.live) == self.host.allocated_bytes
        assert self.host.allocated_bytes <= CAPACITY


HostAgainstModel.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None
)
TestHostAgainstModel = pytest.mark.slow(HostAgainstModel.TestCase)


# --- reports from the field ----------------------------------------------------------


def tier(slots: int, *, segment_slots: int = 4, model: str = "m") -> tuple[HostTier, Space]:
    """A host tier with room for `slots` blocks of one page, and one space in it."""
    host = HostTier(slots * PAGE, segment_slots * PAGE)
    return host, opened(host, model)


def opened(host: HostTier, model: str, block_bytes: int = PAGE) -> Space:
    space = host.open_space(blocks.namespace(block_bytes, model=model))
    assert space is not None
    return space


def store(host: HostTier, space: Space, count: int, tag: object, owner: int = 1) -> list[bytes]:
    """Store a chain block by block while there is room; return the stored hashes."""
    stored = []
    for block_hash, parent in zip(*blocks.chain(count, tag), strict=True):
        reservation, _ = host.reserve(owner, space, [block_hash], [parent])
        if host.commit(owner, reservation.reservation_id, 1):
            stored.append(block_hash)
        host.check()
    return stored


def lease(host: HostTier, space: Space, hashes: list[bytes], owner: int = 1) -> SlotLease:
    slots = host.prefix(space, hashes)
    assert len(slots) == len(hashes)
    return host.grant(owner, [(space, slots)], TTL)


def test_late_commit_publishes_no_other_reservation() -> None:
    """A late commit of an aborted write would publish the next write before its bytes are there."""
    host, space = tier(8)
    hashes, parents = blocks.chain(1)
    first, _ = host.reserve(1, space, hashes, parents)
    assert host.abort(1, first.reservation_id)
    second, _ = host.reserve(1, space, hashes, parents)
    assert second.slots[0] == first.slots[0]
    assert host.commit(1, first.reservation_id, 1) is None
    assert host.prefix(space, hashes) == []
    assert host.commit(1, second.reservation_id, 1) == second.slots
    assert host.prefix(space, hashes) == second.slots
    host.check()


def test_held_slots_are_not_evicted() -> None:
    """A backup in flight would write another block's bytes under this block's name."""
    host, space = tier(8)
    kept = store(host, space, 3, "kept")
    slots = host.prefix(space, kept)
    host.hold(space, slots)
    for n in range(100):
        store(host, space, 2, n)
        assert host.prefix(space, kept) == slots
    host.unhold(space, slots)
    for n in range(100, 104):
        store(host, space, 2, n)
    assert host.prefix(space, kept) == []


def test_oversize_block_is_refused_without_eviction() -> None:
    """A block larger than the arena would empty it, and loop while trying."""
    host, space = tier(4)
    stored = store(host, space, 4, "small")
    assert host.open_space(blocks.namespace(5 * PAGE, model="large")) is None
    assert host.prefix(space, stored) == [0, 1, 2, 3]
    assert list(host.spaces) == [space.digest]


def test_expired_lease_frees_its_slots_and_late_release_does_nothing() -> None:
    """Expired leases would fill the arena; a late release would free another lease's slots."""
    host, space = tier(8)
    hashes = store(host, space, 4, "old")
    old = lease(host, space, hashes)
    assert host.expire(TTL - 1) == 0
    assert host.expire(TTL) == 1
    new = host.grant(2, [(space, host.prefix(space, hashes))], 2 * TTL)
    assert not host.release(old.lease_id, 1)
    store(host, space, 8, "pressure")
    assert len(host.prefix(space, hashes)) == 4
    assert host.release(new.lease_id, 2)
    host.check()


def test_leases_expire_independently() -> None:
    """After a reload that shortens leases, new short leases would last as long as the old ones."""
    host, space = tier(8)
    hashes = store(host, space, 3, "a")
    for slot, expires in zip(host.prefix(space, hashes), (600, 2, 30), strict=True):
        host.grant(1, [(space, [slot])], expires)
    for now, ended in ((1, 0), (2, 1), (29, 0), (30, 1), (599, 0), (600, 1)):
        assert host.expire(now) == ended
    host.check()


def test_second_release_does_nothing() -> None:
    """A double release would let another engine's block be evicted under its copy."""
    host, space = tier(8)
    hashes = store(host, space, 2, "shared")
    a = lease(host, space, hashes, owner=1)
    lease(host, space, hashes, owner=2)
    assert host.release(a.lease_id, 1)
    assert not host.release(a.lease_id, 1)
    assert not host.release(a.lease_id, 2)
    store(host, space, 20, "pressure")
    assert len(host.prefix(space, hashes)) == 2
    host.check()


def test_leased_prefix_survives_pressure() -> None:
    """A lookup would promise more blocks than the load finds, which fails the request in vLLM."""
    host, space = tier(16)
    hashes = store(host, space, 12, "promised")
    promised = lease(host, space, hashes)
    stored = store(host, space, 100, "pressure", owner=2)
    assert promised.parts[0][1] == host.prefix(space, hashes)
    assert len(stored) >= 3


def test_store_is_refused_when_all_slots_are_leased() -> None:
    """A block would be listed although it got no slot."""
    host, space = tier(8)
    hashes = store(host, space, 8, "pinned")
    lease(host, space, hashes)
    new, parents = blocks.chain(3, "new")
    reservation, effects = host.reserve(2, space, new, parents)
    assert reservation.slots == [Refusal.NO_ROOM] * 3
    assert effects == []
    assert host.commit(2, reservation.reservation_id, 3) is None
    assert host.prefix(space, new) == []
    assert len(host.prefix(space, hashes)) == 8
    host.check()


def test_batch_is_stored_in_part_when_room_is_short() -> None:
    """One refused block would cause the whole batch to be refused."""
    host, space = tier(8)
    lease(host, space, store(host, space, 5, "pinned"))
    new, parents = blocks.chain(8, "batch")
    reservation, _ = host.reserve(2, space, new, parents)
    assert [slot >= 0 for slot in reservation.slots] == [True] * 3 + [False] * 5
    assert reservation.slots[3:] == [Refusal.NO_ROOM] * 5
    assert host.commit(2, reservation.reservation_id, 8) == reservation.slots[:3]
    assert len(host.prefix(space, new)) == 3
    host.check()
    again, _ = host.reserve(2, space, new, parents)
    assert again.slots[:3] == [Refusal.PRESENT] * 3


def test_promotion_evicts_before_it_is_refused() -> None:
    """Prefetch would fail in an arena full of unused blocks."""
    host, space = tier(28)
    store(host, space, 18, "residents")
    restored, _ = blocks.chain(11, "restored")
    reservation, _ = host.reserve(INTERNAL, space, restored, [blocks.ROOT] * 11)
    assert min(reservation.slots) >= 0
    host.check()


def test_promotion_without_room_evicts_nothing() -> None:
    """A promotion that cannot get all its slots would evict blocks on its way."""
    host, space = tier(28)
    hashes = store(host, space, 18, "pinned")
    lease(host, space, hashes)
    restored, _ = blocks.chain(11, "restored")
    reservation, effects = host.reserve(INTERNAL, space, restored, [blocks.ROOT] * 11)
    assert [slot >= 0 for slot in reservation.slots] == [True] * 10 + [False]
    assert not any(isinstance(effect, Forget) for effect in effects)
    assert len(host.prefix(space, hashes)) == 18


def test_store_keeps_prefixes_of_all_its_blocks() -> None:
    """A store for two requests would evict the prefix that the second one continues."""
    host, space = tier(4)
    hashes, parents = blocks.chain(2, "second")
    store(host, space, 1, "second")
    store(host, space, 3, "first")
    first, first_parents = blocks.chain(4, "first")
    batch = [first[3], hashes[1]]
    reservation, _ = host.reserve(1, space, batch, [first_parents[3], parents[1]])
    host.commit(1, reservation.reservation_id, 2)
    if hashes[1] in space.items:
        assert host.prefix(space, hashes) != []
    assert len(host.prefix(space, first)) >= 3


def test_prefix_stays_until_its_continuation_is_committed() -> None:
    """A block stored behind an evicted block can never be served, so its slot would be wasted."""
    host, space = tier(4)
    store(host, space, 1, "long")
    hashes, parents = blocks.chain(2, "long")
    reservation, _ = host.reserve(1, space, hashes[1:], parents[1:])
    store(host, space, 9, "pressure", owner=2)
    assert host.commit(1, reservation.reservation_id, 1) is not None
    assert len(host.prefix(space, hashes)) == 2
    store(host, space, 9, "more pressure", owner=2)
    assert host.prefix(space, hashes) == []
    host.check()


def test_idle_namespace_gives_up_its_memory() -> None:
    """Yesterday's engine would hold the arena, and today's engine could store nothing."""
    host, old = tier(16)
    store(host, old, 16, "yesterday")
    new = opened(host, "today")
    new._sessions = 1
    assert len(store(host, new, 16, "today")) == 16
    assert old.live_segments == 0
    assert len(new.items) == 16


def test_busy_namespaces_share_evenly() -> None:
    """The first engine of a node would keep the arena, or two would take segments in circles."""
    host, first = tier(16, model="first")
    second = opened(host, "second")
    first._sessions = second._sessions = 1
    store(host, first, 16, "first")
    for n in range(20):
        store(host, second, 2, n)
        store(host, first, 2, n)
        host.pass_time(host.now_s + TURN_S)
    assert (first.live_segments, second.live_segments) == (2, 2)
    assert host.evicted_blocks <= 16 + 80


def test_uncommitted_reservations_leave_room_for_others() -> None:
    """An engine that reserves and never commits would keep all others from storing."""
    host, space = tier(16)
    hashes, parents = blocks.chain(16, "greedy")
    greedy, _ = host.reserve(1, space, hashes, parents)
    assert sum(slot >= 0 for slot in greedy.slots) == 8
    more, more_parents = blocks.chain(4, "more")
    assert host.reserve(1, space, more, more_parents)[0].slots == [Refusal.NO_ROOM] * 4
    assert len(store(host, space, 4, "other", owner=2)) == 4
    assert host.drop_owner(1) == 1
    host.check()


def test_every_rank_of_an_engine_gets_room() -> None:
    """The last ranks could store nothing, and a prefix is only usable if all ranks have it."""
    host = HostTier(256 << 20)
    ranks = [opened(host, f"rank {rank}", 2 << 20) for rank in range(16)]
    for space in ranks:
        host.register(space)
        host.make_room_ahead(space, 0)
    for n in range(20):
        for space in ranks:
            assert len(store(host, space, 4, n)) == 4
    assert {space.memory_bytes >> 20 for space in ranks} <= set(range(8, 25))


def test_namespaces_take_turns_when_memory_is_short() -> None:
    """The last adapters of an engine could never store anything."""
    host, first = tier(16, model="0")
    spaces = [first, *(opened(host, str(number)) for number in range(1, 6))]
    for space in spaces:
        host.register(space)
    hashes, parents = blocks.chain(4, "some")
    assert [len(store(host, space, 4, "some")) for space in spaces[:4]] == [4] * 4
    refused, _ = host.reserve(1, spaces[4], hashes, parents)
    assert refused.refused is NoRoom.OTHERS
    host.pass_time(host.now_s + TURN_S)
    assert len(host.prefix(first, hashes)) == 4
    assert len(store(host, spaces[4], 4, "some")) == 4
    assert [space.live_segments for space in spaces] == [1, 0, 1, 1, 1, 0], "used longest ago"
    assert len(store(host, spaces[5], 4, "some")) == 4
    assert [space.live_segments for space in spaces] == [1, 0, 0, 1, 1, 1]
    # A namespace that has just got memory keeps it for a while.
    host.hold(spaces[0], host.prefix(spaces[0], hashes))
    host.hold(spaces[3], host.prefix(spaces[3], hashes))
    refused, _ = host.reserve(1, spaces[1], hashes, parents)
    assert refused.refused is NoRoom.OTHERS
    host.check()


def test_unused_namespace_gives_up_its_last_segment() -> None:
    """An adapter that was used once would keep its memory until the engine ends."""
    host, quiet = tier(16, model="quiet")
    busy = opened(host, "busy")
    quiet._sessions = busy._sessions = 1
    store(host, quiet, 2, "quiet")
    for segments in (1, 0):
        host.pass_time(host.now_s + IDLE_S // 2)
        store(host, busy, 16, host.now_s)
        assert quiet.live_segments == segments
    assert len(store(host, quiet, 2, "again")) == 2


def test_each_of_a_thousand_namespaces_can_have_a_segment() -> None:
    """The first ones would take all memory, or need more segments than a service manager keeps."""
    for capacity in (64 << 20, 2 << 30, 64 << 30, 2 << 40):
        sizes = [segment_bytes(capacity, number) for number in range(1, 1025)]
        assert sum(sizes) < capacity
        assert capacity / min(sizes) <= 8192 + 1
        assert sizes[0] == max(sizes) <= capacity / 32


def test_returning_client_finds_its_segments() -> None:
    """A client would use memory that no longer belongs to its namespace."""
    host, space = tier(8)
    store(host, space, 2, "some")
    host.register(space)
    host.unregister(space, 3)
    host.clear_space(space, 9)
    for now_s in (0, 2):
        host.pass_time(now_s)
        host.empty_space(space)
        assert host.end_space(space) == []
        assert host.spaces == {space.digest: space}
    assert host.allocated_bytes == 0, "its memory is others' at once"
    host.pass_time(3)
    assert host.end_space(space) == [EndSpace(space)]
    assert host.open_space(space.namespace) is not space


def test_reservation_ends_when_it_loses_all_slots() -> None:
    """Its client has nothing to commit, so the parents of its blocks could never be evicted."""
    host, space = tier(8)
    kept = store(host, space, 4, "kept")
    new, parents = blocks.chain(2, "new")
    reservation, _ = host.reserve(1, space, new, [kept[-1], parents[1]])
    host.lose_segments(space, 1)
    assert reservation.slots == [Refusal.NO_ROOM] * 2
    assert (reservation.refused, host.reservations) == (NoRoom.SEGMENT, {})
    assert not any(space.refs)
    host.check()


def test_lending_a_segment_evicts_one_segment_of_blocks() -> None:
    """A second engine's first block would evict a fifth of the first engine's cache."""
    host, first = tier(256, segment_slots=16, model="first")
    first._sessions = 1
    # Chains whose slots lie across the segments, used in another order than stored.
    hashes = [store(host, first, 10, n) for n in range(25)]
    for n in [*range(0, 25, 2), *range(1, 25, 2)]:
        store(host, first, 3, f"more {n}")
        host.prefix(first, hashes[n])
    before = len(first.items)
    second = opened(host, "second")
    second._sessions = 1
    reservation, effects = host.reserve(2, second, [bytes(32)], [blocks.ROOT])
    host.check()
    assert reservation.slots == [0]
    assert before - len(first.items) <= 16
    moved = [pair for effect in effects if isinstance(effect, Move) for pair in effect.pairs]
    assert moved
    decommitted = [effect.segment for effect in effects if isinstance(effect, DecommitSegment)]
    assert {slot // 16 for slot, _ in moved} == set(decommitted)


def test_segment_in_use_is_not_lent() -> None:
    """A block would be moved while an engine copies it."""
    host, first = tier(16)
    hashes = store(host, first, 16, "first")
    held = [host.prefix(first, hashes)[slot] for slot in (0, 4, 8)]
    host.hold(first, held)
    second = opened(host, "second")
    assert len(store(host, second, 1, "second")) == 1
    assert [first.live[slot // 4] for slot in held] == [True] * 3
    assert host.prefix(first, hashes[:1]) == held[:1]
    lease(host, second, store(host, second, 4, "more"))
    host.check()


def test_failed_segment_refuses_only_its_blocks() -> None:
    """Out of file descriptors, a namespace would hand out slots without memory."""
    host, space = tier(8, segment_slots=4)
    kept = store(host, space, 2, "kept")
    hashes, parents = blocks.chain(4, "new")
    reservation, effects = host.reserve(1, space, hashes, parents)
    lost = [effect.segment for effect in effects if isinstance(effect, NewSegment)]
    assert lost == [1]
    host.lose_segments(space, 1)
    host.check()
    assert sum(slot >= 0 for slot in reservation.slots) == 2
    assert len(host.commit(1, reservation.reservation_id, 4) or []) == 2
    assert len(host.prefix(space, kept)) == 2
    host.check()
    assert len(store(host, space, 2, "later")) == 2
    host.check()


def test_room_ahead_uses_new_memory_first() -> None:
    """An arena with a third of its memory in use would evict blocks."""
    host, space = tier(512, segment_slots=16)
    host.set_claim(lambda space, slots, most: None, claims_all=True)
    hashes = store(host, space, 150, "some")
    for _ in range(3):
        effects = host.make_room_ahead(space, 150)
        assert not any(isinstance(effect, Forget) for effect in effects)
    assert len(host.prefix(space, hashes)) == 150
    host.check()


def test_growing_ahead_evicts_nothing() -> None:
    """A warm-up would wait for the kernel's memory, or evict blocks for others not yet loaded."""
    host, space = tier(64, segment_slots=16)
    store(host, space, 20, "some")
    assert [type(effect) for effect in host.grow_ahead(space)] == [NewSegment]
    assert host.grow_ahead(space) == []  # A whole segment is free.
    store(host, space, 44, "full")
    assert host.grow_ahead(space) == []
    assert len(space.items) == 64
    host.check()


def test_room_ahead_spares_leased_blocks() -> None:
    """A block would be evicted while an engine copies it, although no client waits for its slot."""
    host, space = tier(256, segment_slots=16)
    hashes = store(host, space, 256, "full")
    held = lease(host, space, hashes)
    assert host.make_room_ahead(space, 16) == []
    host.check()
    assert len(host.prefix(space, hashes)) == 256
    assert host.release(held.lease_id, 1)
    # Then two of 256 slots, from the end of the chain, and no more when asked again.
    assert [
        effect.slots for effect in host.make_room_ahead(space, 16) if isinstance(effect, Forget)
    ]
    assert host.make_room_ahead(space, 16) == []
    assert len(host.prefix(space, hashes)) == 254
    host.check()
