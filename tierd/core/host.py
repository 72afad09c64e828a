"""Decisions about L2: which slot a block gets, who may use it until when, what goes.

Pure: no await, no clock, no I/O. `HostTier` is all that the rest of the daemon calls: each call
is one decision, and callers act on the effects that it answers. What each part owns, nobody else
changes; which steps a slot, a reservation and a lease can take is written in `states`.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Final

from tierd.chain import ChainIndex
from tierd.core.effects import Effect, EndSpace
from tierd.core.hints import PIN_SHARE, HintedNamespace, Hints, PrefixHint
from tierd.core.l2.evictions import Claim, Evictions
from tierd.core.l2.finding import BlockFinder, Taken
from tierd.core.l2.leases import Leases, SlotLease
from tierd.core.l2.reservations import Found, Reservations, SlotReservation
from tierd.core.l2.room import Room
from tierd.core.l2.segments import Segments
from tierd.core.l2.slots import Adopted
from tierd.core.l2.space import Space
from tierd.core.l2.storing import Storing
from tierd.core.reasons import Dropped, Evicted
from tierd.core.states import LeaseEvent
from tierd.core.uses import Uses
from tierd.eviction import L2_DEFAULT, make_policy
from tierd.eviction.policy import PrefixRequest
from tierd.types import Namespace


class HostTier:
    """The state machine of L2."""

    __slots__ = (
        "_evictions",
        "_finding",
        "_leases",
        "_next_id",
        "_now_s",
        "_reservations",
        "_room",
        "_segments",
        "_spaces",
        "_storing",
        "eviction",
        "hints",
        "spaces",
        "uses",
    )

    def __init__(
        self,
        capacity_bytes: int,
        segment_bytes: int | None = None,
        hints: Hints | None = None,
        eviction: str = L2_DEFAULT,
    ) -> None:
        """With `segment_bytes` all namespaces have segments of so many bytes."""
        self.hints: Final = hints or Hints(int(capacity_bytes * PIN_SHARE))
        self.eviction: Final = eviction
        """Name of the policy that orders evictions, in each space by itself."""
        self.uses: Final = Uses()
        self._spaces: dict[bytes, Space] = {}
        self.spaces: Final = MappingProxyType(self._spaces)
        self._segments = Segments(capacity_bytes, segment_bytes)
        self._evictions = Evictions()
        self._room = Room(self._spaces, self._segments, self._evictions, self.hints)
        self._leases = Leases()
        self._finding = BlockFinder(self._evictions, self._leases)
        self._reservations = Reservations()
        self._storing = Storing(self._reservations, self._segments, self._room)
        self._now_s = 0
        self._next_id = 1

    # --- what anybody may see -------------------------------------------------------

    @property
    def now_s(self) -> int:
        """The time, CLOCK_MONOTONIC, as it is told every second."""
        return self._now_s

    @property
    def capacity_bytes(self) -> int:
        """Most bytes that the arena may ever have."""
        return self._segments.capacity_bytes

    @property
    def limit_bytes(self) -> int:
        """What the arena may have now, at most the capacity; see `set_limit`."""
        return self._segments.limit_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the segments that hold memory."""
        return self._segments.allocated_bytes

    @property
    def leases(self) -> Mapping[int, SlotLease]:
        """The leases that have not ended, by number."""
        return self._leases.held

    @property
    def reservations(self) -> Mapping[int, SlotReservation]:
        """The reservations that have not ended, by number."""
        return self._reservations.open

    @property
    def evicted(self) -> Mapping[Evicted, int]:
        """Blocks that were evicted, by reason."""
        return self._evictions.counts

    @property
    def evicted_blocks(self) -> int:
        """Blocks that were evicted, for whatever reason."""
        return sum(self._evictions.counts.values())

    @property
    def revived_blocks(self) -> int:
        """Blocks that were asked for while they were evicting, and stayed."""
        return self._evictions.revived_blocks

    # --- how much -------------------------------------------------------------------

    def pass_time(self, now_s: int) -> None:
        """It is so late, CLOCK_MONOTONIC; to be told every second."""
        self._now_s = now_s

    def set_capacity(self, capacity_bytes: int, pin_share: float) -> None:
        """Have another capacity from now on; `shrink` gives back what is more.

        How much is remembered of blocks stays, and so do segments that there are.
        """
        self._segments.set_capacity(capacity_bytes)
        self.hints.resize(int(capacity_bytes * pin_share))
        for space in self._spaces.values():
            if self.hints.kept_bytes > self.hints.quota_bytes:
                space._chain.unkeep(self.hints.override(space.digest))

    def set_limit(self, limit_bytes: int) -> None:
        """Grow no further than this from now on; `shrink` gives back what is more."""
        self._segments.set_limit(limit_bytes)

    def set_pin_max(self, pin_max_s: int) -> None:
        """Keep nothing for longer than this after its hint from now on."""
        self.hints.set_pin_max(pin_max_s)

    def set_claim(self, claim: Claim, *, claims_all: bool) -> None:
        """Tell `claim` of what is evicted; `claims_all`: it holds most, so slots get free late."""
        self._evictions.set_claim(claim, claims_all=claims_all)

    def shrink(self) -> list[Effect]:
        """Empty and decommit one segment if more is allocated than the limit.

        Leases, reservations and blocks on their way to a tier may keep all of them. What was
        evicted stays so, and a later call goes on from there.
        """
        return self._room.shrink(self._now_s)

    # --- namespaces -----------------------------------------------------------------

    def open_space(self, namespace: Namespace) -> Space | None:
        """The space of a namespace, made on first use; None if a slot exceeds the capacity."""
        space = self._spaces.get(namespace.digest)
        if space is None and namespace.slot_bytes <= self.capacity_bytes:
            # Those that may have memory at any time, whether they have some now or not.
            others = sum(bool(s.sessions or s.live_segments) for s in self._spaces.values())
            per_segment = self._segments.slots_of_new(namespace.slot_bytes, others)
            space = self._make_space(namespace, per_segment)
        return space

    def _make_space(self, namespace: Namespace, slots_per_segment: int) -> Space:
        reuse = self.uses.book(namespace, self.capacity_bytes // namespace.slot_bytes)
        chain = ChainIndex(make_policy(self.eviction, 0, reuse))
        chain.kept = self.hints.kept(namespace.digest)
        space = Space(namespace, slots_per_segment, reuse, chain, self._now_s)
        self._spaces[space.digest] = space
        return space

    def register(self, space: Space, *, worthless: bool = False) -> None:
        """One session more uses a space."""
        space._register(self._now_s, worthless=worthless)

    def unregister(self, space: Space, known_until_s: int = 0, *, worthless: bool = False) -> None:
        """One session less uses a space; see `Space.known_until_s` and `Space.worthless`."""
        space._unregister(known_until_s, worthless=worthless)

    def empty_space(self, space: Space) -> list[Effect]:
        """Take all memory from a namespace that nobody uses and that holds nothing any more."""
        effects: list[Effect] = []
        if not space.items and space.live_segments and space.is_free:
            for index, live in enumerate(space.live):
                if live:
                    self._segments.decommit(space, index, effects)
        return effects

    def end_space(self, space: Space) -> list[Effect]:
        """Forget a namespace that nobody uses and that has no memory, if it can be.

        What still names it finds and gets nothing, also once there is another of the same digest.
        """
        if space.live_segments or space.known_until_s > self._now_s or not space.is_free:
            return []
        space._ended = True
        del self._spaces[space.digest]
        self.hints.forget(space.digest)
        if all(other.reuse is not space.reuse for other in self._spaces.values()):
            self.uses.note_unused(space.namespace)
        return [EndSpace(space)]

    def clear_space(self, space: Space, most: int) -> list[Effect]:
        """Drop so many blocks, at most, of a namespace that nobody uses any more."""
        assert not space.sessions
        return self.drop(space, list(islice(space.items.values(), most)), Dropped.ENDED)

    def teach(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        uses: Sequence[int],
        ages_s: Sequence[int],
        now_ms: int,
    ) -> None:
        """Learn of uses that somebody else has counted; the namespace need not have a space."""
        book = self.uses.book(namespace, self.capacity_bytes // namespace.slot_bytes)
        book.teach(hashes, uses, ages_s, now_ms)
        for space in self._spaces.values():
            if space.reuse is book:
                space._chain.policy.taught(space.find(hashes))

    def use(self, space: Space, request: PrefixRequest) -> None:
        """A request has used blocks, resident or not: it counts in the order of evictions."""
        space._chain.use(request)

    # --- looking up, holding and leasing --------------------------------------------

    def prefix(self, space: Space, hashes: Sequence[bytes]) -> list[int]:
        """Slots of the longest run of verified blocks from the first hash on; touches them."""
        return self._finding.prefix(space, hashes, self._now_s)

    def take_prefix(
        self,
        owner: int,
        spaces: Sequence[Space],
        hashes: Sequence[bytes],
        expires_ns: int,
        *,
        more_elsewhere: bool,
    ) -> Taken:
        """Lease the longest prefix that all spaces have; but not if something could make it
        longer: a tier, if there is `more_elsewhere`, or a verification."""
        number, now_s = self._take_id(), self._now_s
        return self._finding.take(
            number, owner, spaces, hashes, expires_ns, now_s, more_elsewhere=more_elsewhere
        )

    def unverified(self, space: Space, hashes: Sequence[bytes]) -> list[int]:
        """Slots of those of the blocks that are resident but unverified."""
        return self._finding.unverified(space, hashes)

    def verified(self, space: Space, hashes: Sequence[bytes]) -> list[bytes]:
        """Those of the blocks that are resident and verified; they are not evicting any more."""
        self.revive(space, hashes)
        get, unverified = space._chain.items.get, space._unverified
        return [h for h in hashes if (slot := get(h)) is not None and slot not in unverified]

    def revive(self, space: Space, hashes: Sequence[bytes]) -> bool:
        """Make blocks readable again that are evicting; whether any was."""
        return self._evictions.revive(space, hashes)

    def hold(self, space: Space, slots: Collection[int]) -> None:
        """Keep readable slots from eviction and reuse until `unhold`."""
        space._hold(slots)

    def unhold(self, space: Space, slots: Collection[int]) -> None:
        """Undo one `hold` of each slot."""
        space._unhold(slots)

    def settle(self, space: Space, slots: Sequence[int]) -> list[Effect]:
        """Free those of the slots whose blocks are evicting and that nobody holds any more."""
        return self._evictions.settle(space, slots)

    def drop(
        self, space: Space, slots: Sequence[int], why: Dropped = Dropped.DAMAGED
    ) -> list[Effect]:
        """Take blocks out for good, whatever place they have in a prefix.

        They are found by nobody from now on. Slots that somebody holds are free once nobody does.
        """
        return self._evictions.drop(space, slots, why, self._now_s)

    def may_lease(self, owner: int, blocks: int) -> bool:
        """Whether neither the owner nor all together have too many leased for so many more."""
        return self._leases.may(owner, blocks)

    def grant(
        self,
        owner: int,
        parts: list[tuple[Space, list[int]]],
        expires_ns: int,
        sources: bytes = b"",
    ) -> SlotLease:
        """Lease readable slots; `sources` as in Lease."""
        lease = SlotLease(self._take_id(), owner, parts, expires_ns, sources)
        self._leases.grant(lease)
        return lease

    def release(self, lease_id: int, owner: int) -> bool:
        """End a lease before its time; False if it is not the owner's, or has ended."""
        return self._leases.end(lease_id, owner, LeaseEvent.RELEASE)

    def expire(self, now_ns: int) -> int:
        """End the leases whose time is over; their count."""
        return self._leases.expire(now_ns)

    # --- what is known of blocks ----------------------------------------------------

    def verify(self, space: Space, sums: Mapping[int, bytes]) -> list[int]:
        """The bytes of these unverified slots have these checksums; the slots where the ledger
        says otherwise, for the caller to drop."""
        return space._verify(sums)

    def note_checksums(self, space: Space, sums: Mapping[int, bytes]) -> list[int]:
        """These blocks have these checksums; the slots that were not dropped, for the ledger."""
        checksums, dropped = space._checksums, space._dropped
        for slot, digest in sums.items():
            checksums[slot] = digest
        return [slot for slot in sums if slot not in dropped]

    def mark(self, space: Space, slots: Collection[int], *, add: int = 0, remove: int = 0) -> None:
        """Change the bits of storage tiers of some slots; see `tier_bits`."""
        space.tiers._mark(slots, add, remove)

    def hint(
        self, spaces: Sequence[Space], hashes: Sequence[bytes], hint: PrefixHint, now_ns: int
    ) -> int:
        """Believe what an engine says of a prefix in these namespaces, within bounds; how many
        pins were granted, in blocks.

        Of each namespace at most the share of the quota is kept that its memory, with what
        nobody has yet, has of the whole: the others' blocks would have to make room for it.
        """
        parts = []
        demoted = 0
        unused = max(0, self.limit_bytes - self.allocated_bytes)
        for space in dict.fromkeys(spaces):
            if space.ended:
                continue
            memory = space.memory_bytes + unused
            limit = self.hints.quota_bytes * memory // self.capacity_bytes
            parts.append(HintedNamespace(space.digest, space.slot_bytes, limit))
            if hint.demotes:
                demoted += space._chain.demote(hashes)
        return self.hints.take(parts, hashes, hint, now_ns, demoted) if parts else 0

    def expire_hints(self, now_ns: int) -> bool:
        """Let go of what was kept until now; False if there is no more of it."""
        over = self.hints.expire(now_ns)
        for digest, hashes in over:
            self._spaces[digest]._chain.unkeep(hashes)
        return bool(over)

    # --- earlier incarnations -------------------------------------------------------

    def adopt(
        self,
        namespace: Namespace,
        slots_per_segment: int,
        live: Sequence[bool],
        blocks: Sequence[Adopted],
        leased: Container[int],
    ) -> Space | None:
        """Take a namespace over as an earlier incarnation left it; the block used last comes last.

        Its blocks are unverified, its other slots quarantined until `end_writes_before`. Slots in
        `leased` are held until `end_leases_before`, whether the ledger has a block there or not.
        None if no slot fits the capacity. What exceeds the capacity goes when the arena shrinks.
        """
        assert namespace.digest not in self._spaces
        if namespace.slot_bytes > self.capacity_bytes:
            return None
        space = self._make_space(namespace, slots_per_segment)
        space._adopt(live, blocks, leased)
        self._segments.adopt(space, self._now_s)
        self._next_id = max(self._next_id, *(block.generation for block in blocks), 0)
        return space

    def end_leases_before(self) -> None:
        """Nobody reads what was adopted by a lease of an earlier incarnation; idempotent."""
        for space in self._spaces.values():
            space._end_leases_before()

    def end_writes_before(self) -> None:
        """Nobody of an earlier incarnation writes to a slot any more; what is leased stays
        quarantined until a call after `end_leases_before`."""
        for space in self._spaces.values():
            space._clear()

    # --- two-phase store ------------------------------------------------------------

    def reserve(
        self,
        owner: int,
        space: Space,
        hashes: Sequence[bytes],
        parents: Sequence[bytes],
        worth: float | None = None,
    ) -> tuple[SlotReservation, list[Effect]]:
        """Slots for new blocks; per hash a slot or a Refusal. Act on the effects first.

        Blocks that nobody waits for come with what they are worth (`Reuse.worth`): then none
        goes for them that is worth as much, and no namespace in use gives up memory.
        """
        if space._evicting:
            self.revive(space, hashes)
        number = self._take_id()
        return self._storing.reserve(number, owner, space, hashes, parents, worth, self._now_s)

    def commit(
        self, owner: int, reservation_id: int, count: int, now_s: float | None = None
    ) -> list[int] | None:
        """Make the first `count` slots of a reservation readable and free the rest.

        The slots that became readable, in order; None if the reservation is not the owner's
        or no longer there, and nothing has changed then. With the time, in seconds, blocks begin
        to age from there, before a request uses them.
        """
        return self._storing.commit(owner, reservation_id, count, now_s)

    def commit_found(
        self, owner: int, reservation_id: int, found: Sequence[Found | None]
    ) -> list[int]:
        """Like `commit`, but for the daemon's own promotions: readable where a tier has delivered
        the block, by hash, under the parent and with the checksum that it says."""
        return self._storing.commit_found(owner, reservation_id, found)

    def commit_count(self, owner: int, reservation_id: int, count: int) -> int:
        """How many blocks a `commit` with these arguments would make readable."""
        reservation = self._reservations.get(owner, reservation_id)
        return 0 if reservation is None else min(count, reservation.granted)

    def abort(self, owner: int, reservation_id: int) -> bool:
        """Free the slots of a reservation, which its owner no longer touches."""
        return self._storing.abort(owner, reservation_id)

    def drop_owner(self, owner: int) -> int:
        """Abort the reservations of an owner that is gone; its leases end at their time."""
        return self._storing.drop_owner(owner)

    def make_room_ahead(self, space: Space, count: int) -> list[Effect]:
        """Have slots for the next `count` blocks, before somebody waits for them.

        While memory is left, by a segment, whose pages can then be faulted in beforehand, ten
        times faster. In a full arena, by evicting what the next reservation would evict.
        """
        return self._room.make_ahead(space, count, self._now_s)

    def grow_ahead(self, space: Space) -> list[Effect]:
        """Have a whole segment free, while memory is left: with pages faulted in beforehand, blocks
        are read twice as fast from a disk of 1.5 GB/s. Evicts nothing."""
        return self._room.grow_ahead(space, self._now_s)

    def lose_segments(self, space: Space, made: int) -> None:
        """Undo NewSegment effects that could not be carried out: the namespace has no segments but
        the first `made`. None is asked for again for a while."""
        self._reservations.lose(space, made * space.slots_per_segment)
        self._segments.lose(space, made, self._now_s)

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def check(self) -> None:
        """Assert every invariant; for tests and simulation."""
        leased = self._leases.check()
        self._reservations.check()
        allocated = 0
        for digest, space in self._spaces.items():
            space.check(leased.get(digest, {}))
            allocated += space.memory_bytes
            assert not space.ended
        self.hints.check()
        self._segments.check(allocated)

    def evict_everything(self) -> bool:
        """Empty the index, whoever holds blocks; whether that worked. The last call of a test."""
        emptied = True
        for space in self._spaces.values():
            space._chain.unkeep(self.hints.override(space.digest))
            count = len(space.items)
            emptied &= len(space._chain.evict(count, lambda slot: False)) == count
        return emptied
