"""The states of slots, reservations and leases, and the tables of their transitions."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.support import blocks
from tierd.core.effects import Effect, NewSegment
from tierd.core.host import HostTier
from tierd.core.l2.leases import SlotLease
from tierd.core.l2.reservations import Found, SlotReservation
from tierd.core.l2.slots import Adopted, Slots
from tierd.core.l2.space import Space
from tierd.core.reasons import Dropped, Evicted
from tierd.core.states import (
    LEASES,
    RESERVATIONS,
    SLOTS,
    LeaseState,
    ReservationEvent,
    ReservationState,
    SlotState,
    step,
)
from tierd.testing.transitions import Seen, states_of, watched

PAGE = 4096
PER = 4
SEGMENT = PER * PAGE
CAPACITY = 6 * SEGMENT
SPACES = [blocks.namespace(PAGE, model=name) for name in ("adopted", "new")]
CHAINS = [blocks.chain(6, tag) for tag in "abc"]
PROMOTER, ENGINE, OTHER = 0, 1, 2

SEEN: Seen = Counter()


def checksum_of(block_hash: bytes) -> bytes:
    return hashlib.sha256(block_hash).digest()[:16]


class Events(RuleBasedStateMachine):
    """All calls of a HostTier, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.watch = watched(SEEN)
        self.watch.__enter__()
        self.host = HostTier(CAPACITY, SEGMENT)
        self.host.set_claim(self.claim, claims_all=False)
        self.claims = True
        self.claimed: list[tuple[Space, int]] = []
        self.fails = False
        self.made: Counter[Space] = Counter()
        self.open: list[SlotReservation] = []
        self.leases: list[SlotLease] = []
        self.now_s = 0

    def teardown(self) -> None:
        self.watch.__exit__(None, None, None)

    def claim(self, space: Space, slots: Sequence[int], most: int) -> None:
        verified = [slot for slot in slots if slot not in space.unverified]
        taken = verified[:most] if self.claims else []
        self.host.hold(space, taken)
        self.claimed += [(space, slot) for slot in taken]

    def apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, NewSegment) and effect.segment < len(effect.space.live):
                if self.fails and effect.segment >= self.made[effect.space]:
                    self.host.lose_segments(effect.space, self.made[effect.space])
                else:
                    self.made[effect.space] = max(self.made[effect.space], effect.segment + 1)

    def space(self, at: int) -> Space:
        space = self.host.open_space(SPACES[at])
        assert space is not None
        return space

    @initialize(blocks_there=st.integers(0, 6), leased=st.sets(st.integers(0, 2 * PER - 1)))
    def adopt(self, blocks_there: int, leased: set[int]) -> None:
        hashes, parents = CHAINS[0]
        found = [
            Adopted(slot, h, parents[slot], checksum_of(h), 7, 0)
            for slot, h in enumerate(hashes[:blocks_there])
        ]
        space = self.host.adopt(SPACES[0], PER, [True, True], found, leased)
        assert space is not None
        self.made[space] = 2

    which = st.integers(0, 1)
    chain = st.integers(0, len(CHAINS) - 1)

    @rule(at=which, chain=chain, owner=st.sampled_from([PROMOTER, ENGINE, OTHER]))
    def reserve(self, at: int, chain: int, owner: int) -> None:
        reservation, effects = self.host.reserve(owner, self.space(at), *CHAINS[chain])
        self.apply(effects)
        if reservation.reservation_id in self.host.reservations:
            self.open.append(reservation)

    @rule(at=which, chain=chain)
    def store(self, at: int, chain: int) -> None:
        reservation, effects = self.host.reserve(OTHER, self.space(at), *CHAINS[chain])
        self.apply(effects)
        self.host.commit(OTHER, reservation.reservation_id, 6)

    @rule(data=st.data(), count=st.integers(0, 6), aborts=st.booleans())
    def end(self, data: st.DataObject, count: int, aborts: bool) -> None:
        self.open = [r for r in self.open if r.state is ReservationState.OPEN]
        if not self.open:
            return
        mine = data.draw(st.sampled_from(self.open))
        if aborts:
            assert self.host.abort(mine.owner, mine.reservation_id)
        elif mine.owner == PROMOTER:
            found = [
                Found(parent, checksum_of(h)) if slot >= 0 and i < count else None
                for i, (h, parent, slot) in enumerate(
                    zip(mine.hashes, mine.parents, mine.slots, strict=True)
                )
            ]
            self.host.commit_found(PROMOTER, mine.reservation_id, found)
        else:
            assert self.host.commit(mine.owner, mine.reservation_id, count) is not None
        assert self.host.commit(mine.owner, mine.reservation_id, count) is None

    @rule(owner=st.sampled_from([ENGINE, OTHER]))
    def owner_goes(self, owner: int) -> None:
        self.host.drop_owner(owner)

    @rule(at=which, chain=chain)
    def lease(self, at: int, chain: int) -> None:
        space = self.space(at)
        slots = self.host.prefix(space, CHAINS[chain][0])
        if slots:
            self.leases.append(self.host.grant(ENGINE, [(space, slots)], self.now_s + 5))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.leases:
            lease = data.draw(st.sampled_from(self.leases))
            held = lease.state is LeaseState.HELD
            assert self.host.release(lease.lease_id, ENGINE) == held

    @rule(seconds=st.sampled_from([1, 6, 700]))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds
        self.host.pass_time(self.now_s)
        self.host.expire(self.now_s)

    @rule(data=st.data())
    def claim_ends(self, data: st.DataObject) -> None:
        if self.claimed:
            space, slot = self.claimed.pop(data.draw(st.integers(0, len(self.claimed) - 1)))
            self.host.unhold(space, [slot])
            self.apply(self.host.settle(space, [slot]))

    @rule(at=which, data=st.data())
    def drop(self, at: int, data: st.DataObject) -> None:
        space = self.space(at)
        known = sorted({*space.items.values(), *space.evicting})
        if known:
            slots = data.draw(st.sets(st.sampled_from(known), max_size=3))
            self.apply(self.host.drop(space, sorted(slots), Dropped.FLUSHED))

    @rule(data=st.data(), sound=st.booleans())
    def verify(self, data: st.DataObject, sound: bool) -> None:
        space = self.space(0)
        if space.unverified:
            slot = data.draw(st.sampled_from(sorted(space.unverified)))
            found = space.unverified[slot] if sound else bytes(16)
            rotten = self.host.verify(space, {slot: found})
            assert rotten == ([] if sound else [slot])
            self.apply(self.host.drop(space, rotten))

    @rule(leases=st.booleans(), writes=st.booleans())
    def incarnation_ends(self, leases: bool, writes: bool) -> None:
        if leases:
            self.host.end_leases_before()
        if writes:
            self.host.end_writes_before()

    @rule(segments=st.integers(1, 6))
    def shrink(self, segments: int) -> None:
        self.host.set_limit(segments * SEGMENT)
        self.apply(self.host.shrink())

    @rule(at=which, count=st.integers(0, 9))
    def make_room(self, at: int, count: int) -> None:
        self.apply(self.host.make_room_ahead(self.space(at), count))

    @rule(fails=st.booleans(), claims=st.booleans())
    def moods(self, fails: bool, claims: bool) -> None:
        self.fails, self.claims = fails, claims

    @invariant()
    def holds(self) -> None:
        self.host.check()
        for space in self.host.spaces.values():
            states_of(space)


@pytest.mark.slow
def test_every_step_is_in_a_table_and_every_row_is_reached() -> None:
    """The core could take steps that the tables lack, or the tables have rows that never occur."""
    SEEN.clear()
    run_state_machine_as_test(
        Events,
        settings=settings(
            max_examples=300,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    rows = {*SLOTS, *RESERVATIONS, *LEASES}
    assert rows - SEEN.keys() == set()
    assert SEEN.keys() - rows == set()


def test_step_missing_in_the_tables_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check would pass whatever the core does."""

    def settle_all(self: Slots, slots: list[int]) -> list[int]:
        for slot in slots:
            self._evicting.pop(slot, None)
            self._quarantined.append(slot)
        return list(slots)

    monkeypatch.setattr(Slots, "_settle", settle_all)
    events = Events()
    try:
        events.adopt(0, set())
        events.host.end_writes_before()
        space = events.space(0)
        reservation, effects = events.host.reserve(ENGINE, space, *CHAINS[1])
        events.apply(effects)
        events.host.commit(ENGINE, reservation.reservation_id, 6)
        events.claims = False
        with pytest.raises(AssertionError, match="in no table"):
            events.host._evictions.evict(space, 1, Evicted.ROOM, 0, [])
    finally:
        events.teardown()


def test_end_states_have_no_events() -> None:
    """A reservation that has ended would publish a block a second time."""
    for table, first in ((RESERVATIONS, ReservationState.OPEN), (LEASES, LeaseState.HELD)):
        assert {state for state, _ in table} == {first}
    with pytest.raises(KeyError):
        step(RESERVATIONS, ReservationState.COMMITTED, ReservationEvent.ABORT)


def test_only_free_slots_are_reserved() -> None:
    """A client would write into a block that another one reads."""
    to_writing = {state for (state, _), after in SLOTS.items() if after is SlotState.WRITING}
    assert to_writing == {SlotState.FREE}
