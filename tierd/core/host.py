"""Decisions about host memory (L2): which slot a block gets, who may use it, what is evicted.

Pure: no await, no clock, no I/O. The rest of the daemon calls only `HostTier`. Each call is one
decision, and the caller carries out the effects that it returns. Only the part that owns a piece
of state changes it. `tierd.core.states` lists the transitions of slots, reservations and leases.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
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
from tierd.types import Namespace


class HostTier:
    """The state machine of host memory (L2)."""

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
        "_uses",
        "eviction",
        "hints",
        "spaces",
    )

    def __init__(
        self,
        capacity_bytes: int,
        segment_bytes: int | None = None,
        hints: Hints | None = None,
        eviction: str = L2_DEFAULT,
    ) -> None:
        """`segment_bytes` fixes the size of all segments; without it, see `sharing`."""
        self.hints: Final = hints or Hints(int(capacity_bytes * PIN_SHARE))
        self.eviction: Final = eviction
        """Name of the eviction policy; each space has its own instance."""
        self._uses = Uses()
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

    # --- read-only state ------------------------------------------------------------

    @property
    def now_s(self) -> int:
        """CLOCK_MONOTONIC in seconds, as of the last `pass_time`."""
        return self._now_s

    @property
    def capacity_bytes(self) -> int:
        """Upper bound of the arena, in bytes."""
        return self._segments.capacity_bytes

    @property
    def limit_bytes(self) -> int:
        """Current bound of the arena, at most the capacity; see `set_limit`."""
        return self._segments.limit_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the segments that hold memory."""
        return self._segments.allocated_bytes

    @property
    def leases(self) -> Mapping[int, SlotLease]:
        """Leases that have not ended, by id."""
        return self._leases.held

    @property
    def reservations(self) -> Mapping[int, SlotReservation]:
        """Reservations that have not ended, by id."""
        return self._reservations.open

    @property
    def evicted(self) -> Mapping[Evicted, int]:
        """Number of evicted blocks, by reason."""
        return self._evictions.counts

    @property
    def evicted_blocks(self) -> int:
        """Number of evicted blocks, for all reasons."""
        return sum(self._evictions.counts.values())

    @property
    def revived_blocks(self) -> int:
        """Number of blocks that a request kept by asking for them while they were evicting."""
        return self._evictions.revived_blocks

    # --- time and size --------------------------------------------------------------

    def pass_time(self, now_s: int) -> None:
        """Set the time, CLOCK_MONOTONIC in seconds; called once per second."""
        self._now_s = now_s

    def set_capacity(self, capacity_bytes: int, pin_share: float) -> None:
        """Change the capacity; `shrink` gives back memory beyond it.

        The size of existing segments and of the books of uses does not change.
        """
        self._segments.set_capacity(capacity_bytes)
        self.hints.resize(int(capacity_bytes * pin_share))
        for space in self._spaces.values():
            if self.hints.kept_bytes > self.hints.quota_bytes:
                space._chain.unkeep(self.hints.override(space.digest))

    def set_limit(self, limit_bytes: int) -> None:
        """Set the bound for growth; `shrink` gives back memory beyond it."""
        self._segments.set_limit(limit_bytes)

    def set_pin_max(self, pin_max_s: int) -> None:
        """Set how long a hint can keep blocks; it applies to new hints."""
        self.hints.set_pin_max(pin_max_s)

    def set_claim(self, claim: Claim, *, claims_all: bool) -> None:
        """Call `claim` on evictions; `claims_all`: it holds most blocks, so slots get free late."""
        self._evictions.set_claim(claim, claims_all=claims_all)

    def shrink(self) -> list[Effect]:
        """Empty and decommit one segment if the allocated memory exceeds the limit.

        Leases, reservations and pending backups may prevent it for every segment. Blocks evicted
        so far stay evicted, and a later call continues.
        """
        return self._room.shrink(self._now_s)

    # --- namespaces -----------------------------------------------------------------

    def open_space(self, namespace: Namespace) -> Space | None:
        """Return a namespace's space, created on first use; None if one slot exceeds capacity."""
        space = self._spaces.get(namespace.digest)
        if space is None and namespace.slot_bytes <= self.capacity_bytes:
            # Spaces that have memory now or may get some at any time.
            others = sum(bool(s.sessions or s.live_segments) for s in self._spaces.values())
            per_segment = self._segments.slots_of_new(namespace.slot_bytes, others)
            space = self._make_space(namespace, per_segment)
        return space

    def _make_space(self, namespace: Namespace, slots_per_segment: int) -> Space:
        reuse = self._uses.book(namespace, self.capacity_bytes // namespace.slot_bytes)
        chain = ChainIndex(make_policy(self.eviction, 0, reuse))
        chain.kept = self.hints.kept(namespace.digest)
        space = Space(namespace, slots_per_segment, reuse, chain, self._now_s)
        self._spaces[space.digest] = space
        return space

    def register(self, space: Space, *, worthless: bool = False) -> None:
        """Count a registration of a session with a space."""
        space._register(self._now_s, worthless=worthless)

    def unregister(self, space: Space, known_until_s: int = 0, *, worthless: bool = False) -> None:
        """Undo one `register`; see `Space.known_until_s` and `Space.worthless`."""
        space._unregister(known_until_s, worthless=worthless)

    def empty_space(self, space: Space) -> list[Effect]:
        """Decommit all segments of a namespace that is not in use and has no blocks."""
        effects: list[Effect] = []
        if not space.items and space.live_segments and space.is_free:
            for index, live in enumerate(space.live):
                if live:
                    self._segments.decommit(space, index, effects)
        return effects

    def end_space(self, space: Space) -> list[Effect]:
        """Forget a namespace without memory that is not in use; return [] if it must stay.

        Callers that still have the Space find nothing in it and get no slots, even when the
        namespace has been opened again.
        """
        if space.live_segments or space.known_until_s > self._now_s or not space.is_free:
            return []
        space._ended = True
        del self._spaces[space.digest]
        self.hints.forget(space.digest)
        if all(other.reuse is not space.reuse for other in self._spaces.values()):
            self._uses.note_unused(space.namespace)
        return [EndSpace(space)]

    def clear_space(self, space: Space, most: int) -> list[Effect]:
        """Drop at most `most` blocks of a namespace without sessions."""
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
        """Learn uses that another node or an earlier incarnation counted; needs no space."""
        book = self._uses.book(namespace, self.capacity_bytes // namespace.slot_bytes)
        book.teach(hashes, uses, ages_s, now_ms)
        for space in self._spaces.values():
            if space.reuse is book:
                space._chain.policy.taught(space.find(hashes))

    def count_use(
        self, spaces: Sequence[Space], hashes: Sequence[bytes], request: int, now_s: float
    ) -> Iterator[int]:
        """Count a request's use of blocks, resident or not, step by step; see `Uses.count`."""
        return self._uses.count(spaces, hashes, request, now_s)

    # --- lookups, holds and leases --------------------------------------------------

    def prefix(self, space: Space, hashes: Sequence[bytes]) -> list[int]:
        """Return the slots of the longest verified prefix, and mark its blocks as recently used."""
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
        """Lease the longest prefix that all spaces have, unless it could still grow by a promotion
        (`more_elsewhere`) or a verification."""
        number, now_s = self._take_id(), self._now_s
        return self._finding.take(
            number, owner, spaces, hashes, expires_ns, now_s, more_elsewhere=more_elsewhere
        )

    def unverified(self, space: Space, hashes: Sequence[bytes]) -> list[int]:
        """Return the slots of the resident but unverified blocks among `hashes`."""
        return self._finding.unverified(space, hashes)

    def verified(self, space: Space, hashes: Sequence[bytes]) -> list[bytes]:
        """Return the hashes of resident verified blocks; evicting ones are revived first."""
        self.revive(space, hashes)
        get, unverified = space._chain.items.get, space._unverified
        return [h for h in hashes if (slot := get(h)) is not None and slot not in unverified]

    def revive(self, space: Space, hashes: Sequence[bytes]) -> bool:
        """Make evicting blocks readable again; return whether there were any."""
        return self._evictions.revive(space, hashes)

    def hold(self, space: Space, slots: Collection[int]) -> None:
        """Protect readable slots from eviction and reuse until `unhold`."""
        space._hold(slots)

    def unhold(self, space: Space, slots: Collection[int]) -> None:
        """Undo one `hold` of each slot."""
        space._unhold(slots)

    def settle(self, space: Space, slots: Sequence[int]) -> list[Effect]:
        """Free the slots whose blocks are evicting and no longer held."""
        return self._evictions.settle(space, slots)

    def drop(
        self, space: Space, slots: Sequence[int], why: Dropped = Dropped.DAMAGED
    ) -> list[Effect]:
        """Drop blocks permanently, even from the middle of a prefix; lookups no longer find them.
        A held slot becomes free when its last hold ends."""
        return self._evictions.drop(space, slots, why, self._now_s)

    def may_lease(self, owner: int, blocks: int) -> bool:
        """Whether `blocks` more leased blocks are within the bounds per owner and in total."""
        return self._leases.may(owner, blocks)

    def grant(
        self,
        owner: int,
        parts: list[tuple[Space, list[int]]],
        expires_ns: int,
        sources: bytes = b"",
    ) -> SlotLease:
        """Lease readable slots; see SlotLease for `sources`."""
        lease = SlotLease(self._take_id(), owner, parts, expires_ns, sources)
        self._leases.grant(lease)
        return lease

    def release(self, lease_id: int, owner: int) -> bool:
        """End a lease early; return False if it is not the owner's or has ended."""
        return self._leases.end(lease_id, owner, LeaseEvent.RELEASE)

    def expire(self, now_ns: int) -> int:
        """End leases that have expired; return their count."""
        return self._leases.expire(now_ns)

    # --- checksums, tiers and hints -------------------------------------------------

    def verify(self, space: Space, sums: Mapping[int, bytes]) -> list[int]:
        """Verify blocks whose computed checksum is the ledger's; return the slots where it is not,
        which the caller must drop."""
        return space._verify(sums)

    def note_checksums(self, space: Space, sums: Mapping[int, bytes]) -> list[int]:
        """Record checksums by slot; return the slots not dropped meanwhile, for the ledger."""
        checksums, dropped = space._checksums, space._dropped
        for slot, digest in sums.items():
            checksums[slot] = digest
        return [slot for slot in sums if slot not in dropped]

    def mark(self, space: Space, slots: Collection[int], *, add: int = 0, remove: int = 0) -> None:
        """Change which storage tiers have the blocks in some slots; see `tier_bits`."""
        space.tiers._mark(slots, add, remove)

    def hint(
        self, spaces: Sequence[Space], hashes: Sequence[bytes], hint: PrefixHint, now_ns: int
    ) -> int:
        """Apply an engine's hint to a prefix in these namespaces; return how many blocks it keeps.

        A namespace gets at most its share of the quota: its memory plus the unallocated memory,
        divided by the capacity. More would evict other namespaces' blocks.
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
        """End a bounded number of hints that have expired; return False if there were none."""
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
        """Adopt a namespace from an earlier incarnation; `blocks` come least recently used first.

        Its blocks are unverified, and its other slots are quarantined until `end_writes_before`.
        Slots in `leased` are held until `end_leases_before`, with or without a block in the
        ledger. Returns None if one slot exceeds the capacity. Memory beyond the capacity is given
        back when the arena shrinks.
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
        """End the holds for leases of earlier incarnations, which have expired; idempotent."""
        for space in self._spaces.values():
            space._end_leases_before()

    def end_writes_before(self) -> None:
        """Free quarantined slots: no client of an earlier incarnation can still write to them.
        Leased slots stay quarantined until a call after `end_leases_before`."""
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
        """Reserve slots for new blocks: one slot or Refusal per hash. Apply the effects first.

        Warmed blocks, which no request waits for, have a `worth` (`Reuse.worth`): they evict only
        blocks worth less, and take no memory from a namespace in use.
        """
        if space._evicting:
            self.revive(space, hashes)
        number = self._take_id()
        return self._storing.reserve(number, owner, space, hashes, parents, worth, self._now_s)

    def commit(
        self, owner: int, reservation_id: int, count: int, now_s: float | None = None
    ) -> list[int] | None:
        """Make the first `count` slots of a reservation readable and free the rest.

        Returns the slots that became readable, in order. Returns None and changes nothing if the
        reservation is not the owner's or has ended. With `now_s`, in seconds, blocks age from
        then on, before the first request uses them.
        """
        return self._storing.commit(owner, reservation_id, count, now_s)

    def commit_found(
        self, owner: int, reservation_id: int, found: Sequence[Found | None]
    ) -> list[int]:
        """Commit a promotion: blocks that a tier delivered become readable, with the parent and
        the checksum that it returned. None frees a slot."""
        return self._storing.commit_found(owner, reservation_id, found)

    def commit_count(self, owner: int, reservation_id: int, count: int) -> int:
        """Return how many blocks `commit` with these arguments would make readable."""
        reservation = self._reservations.get(owner, reservation_id)
        return 0 if reservation is None else min(count, reservation.granted)

    def abort(self, owner: int, reservation_id: int) -> bool:
        """Free the slots of a reservation; its owner no longer writes to them."""
        return self._storing.abort(owner, reservation_id)

    def drop_owner(self, owner: int) -> int:
        """Abort the reservations of an owner that is gone; its leases stay until they expire."""
        return self._storing.drop_owner(owner)

    def make_room_ahead(self, space: Space, count: int) -> list[Effect]:
        """Free slots for the next `count` blocks before a client waits for them.

        While memory is left, this adds a segment, whose pages can then be faulted in ahead, ten
        times faster. In a full arena it evicts the blocks that the next reservation would evict.
        """
        return self._room.make_ahead(space, count, self._now_s)

    def grow_ahead(self, space: Space) -> list[Effect]:
        """Keep one whole segment free while memory is left, without evicting: with pages faulted
        in ahead, a disk of 1.5 GB/s is read twice as fast."""
        return self._room.grow_ahead(space, self._now_s)

    def lose_segments(self, space: Space, made: int) -> None:
        """Undo NewSegment effects that failed: only the first `made` segments exist, and none is
        requested for SEGMENT_PAUSE_S."""
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
        """Empty the index, held blocks included; return whether that worked. Ends a test."""
        emptied = True
        for space in self._spaces.values():
            space._chain.unkeep(self.hints.override(space.digest))
            count = len(space.items)
            emptied &= len(space._chain.evict(count, lambda slot: False)) == count
        return emptied
