"""Decisions about L2: which slot a block gets, who may use it until when, what goes.

Pure: no await, no clock, no I/O. Callers act on what it answers: `reserve` may ask
for segments to be created or hollowed before the slots may be used. Capacity is
counted in whole segments, whatever their slots hold, so it is a hard bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Sequence
from itertools import accumulate, islice, repeat
from typing import Final

from tierd.chain import ChainIndex
from tierd.core.hints import PIN_SHARE, HintedNamespace, Hints, PrefixHint
from tierd.core.sharing import by_worth, donors, segment_bytes
from tierd.core.space import (
    GONE,
    NO_SLOT,
    WHY_BITS,
    Adopted,
    Dropped,
    Effect,
    EndSpace,
    Evicted,
    Forget,
    HollowSegment,
    Move,
    NewSegment,
    NoRoom,
    Refusal,
    SlotLease,
    SlotReservation,
    Space,
)
from tierd.core.uses import Uses
from tierd.eviction import L2_DEFAULT, make_policy
from tierd.types import HASH_BYTES, Namespace

WRITING_SHARE_MAX: Final = 0.5
"""Share of the capacity that one owner may have reserved and not yet committed."""

EVICT_AHEAD_SHARE: Final = 1 / 128
"""Share of a space's slots that may be free in a full arena: an eviction takes 2 us a block,
which a client then does not wait for."""

LEAVING_AHEAD_SHARE: Final = 1 / 32
"""Share that is kept free where tiers get blocks when they leave, or as many slots as the last
call took if those are more: such a slot is free only once it is written, and a client that finds
none has others dropped."""

LEAVING_SHARE_MAX: Final = 1 / 8
"""Share of a space's slots whose blocks may be leaving: what is written late is no longer L2's."""


SEGMENT_PAUSE_S: Final = 5
"""After a segment could not be made none is asked for before this has passed: descriptors, or
memory, seldom come back sooner."""

LEASED_BLOCKS_MAX: Final = 1 << 22
LEASED_BLOCKS_ALL_MAX: Final = 1 << 24
"""Blocks that one owner may have leased at once, and all together, each as often as it is leased:
8 bytes each of the daemon's own memory. An engine that forgets to give leases back gets no more."""

WORTH_LESS: Final = 0.8
"""A block gives way to one that nobody waits for if it is worth less than so much of it: the blocks
of one hot set, of which the daemon is told over some seconds, do not push each other out."""

Claim = Callable[[Space, Sequence[int], int], None]
"""Told of the slots whose blocks are leaving. It may hold some, at most so many, to write them:
they are free when `settle` finds that nobody holds them any more."""


class HostTier:
    """The state machine of L2."""

    def __init__(
        self,
        capacity_bytes: int,
        segment_bytes: int | None = None,
        hints: Hints | None = None,
        eviction: str = L2_DEFAULT,
    ) -> None:
        """With `segment_bytes` all namespaces have segments of so many bytes."""
        self.capacity_bytes = capacity_bytes
        self.limit_bytes = capacity_bytes
        """What the arena may have now, at most the capacity; see `set_limit`."""
        self.hints = hints or Hints(int(capacity_bytes * PIN_SHARE))
        self.eviction = eviction
        """Name of the policy that orders evictions, in each space by itself."""
        self.uses = Uses()
        self._segment_bytes = segment_bytes
        self.now_s = 0
        """The time, CLOCK_MONOTONIC, as it is told every second, for when blocks left."""
        self.spaces: dict[bytes, Space] = {}
        self.leases: dict[int, SlotLease] = {}
        self.reservations: dict[int, SlotReservation] = {}
        self.allocated_bytes = 0
        self.evicted: Counter[Evicted] = Counter()
        self.revived_blocks = 0
        """Blocks that were asked for while they were leaving, and stayed."""
        self.claim: Claim | None = None
        self.claims_all = False
        """Whether blocks usually are claimed, so that slots get free late."""
        self._next_id = 1
        self._bound_bytes = capacity_bytes
        self._segments_from_s = 0
        self._writing_bytes: dict[int, int] = {}
        self._leased_blocks: Counter[int] = Counter()

    @property
    def evicted_blocks(self) -> int:
        """Blocks that were evicted, for whatever reason."""
        return self.evicted.total()

    # --- how much -------------------------------------------------------------------

    def set_capacity(self, capacity_bytes: int, pin_share: float) -> None:
        """Have another capacity from now on; `shrink` gives back what is more.

        Follow: the limit, the quota of hints, the share that an owner may reserve, the segments
        of new namespaces. Not: how much is remembered of blocks, and segments that there are.
        """
        self.capacity_bytes = capacity_bytes
        self.set_limit(capacity_bytes)
        self.hints.quota_bytes = int(capacity_bytes * pin_share)
        for space in self.spaces.values():
            if self.hints.kept_bytes > self.hints.quota_bytes:
                space.chain.unkeep(self.hints.override(space.digest))

    def set_limit(self, limit_bytes: int) -> None:
        """Grow no further than this from now on; `shrink` gives back what is more."""
        self.limit_bytes = min(limit_bytes, self.capacity_bytes)
        self._lower_bound()

    def shrink(self) -> list[Effect]:
        """Empty and hollow one segment if more is allocated than the limit.

        Nothing may come of it: leases, reservations and blocks on their way to a tier keep
        segments. What was evicted stays so, and a later call goes on from there.
        """
        effects: list[Effect] = []
        if self.allocated_bytes > self.limit_bytes:
            ranked = by_worth(self.spaces.values(), self.now_s)
            if not any(self._empty_segment(s, Evicted.SHRUNK, effects) for s in ranked):
                for space in ranked:
                    # The machine comes before what engines would like to be kept.
                    if space.chain.keeping and not space.leaving:
                        space.chain.unkeep(self.hints.override(space.digest))
        self._lower_bound()
        return effects

    def _lower_bound(self) -> None:
        self._bound_bytes = max(self.limit_bytes, self.allocated_bytes)

    # --- namespaces -----------------------------------------------------------------

    def open_space(self, namespace: Namespace) -> Space | None:
        """The space of a namespace, made on first use; None if a slot exceeds the capacity."""
        digest = namespace.digest
        space = self.spaces.get(digest)
        if space is None:
            slot_bytes = namespace.slot_bytes
            if slot_bytes > self.capacity_bytes:
                return None
            # Those that may have memory at any time, whether they have some now or not.
            others = sum(bool(s.sessions or s.live_segments) for s in self.spaces.values())
            size = self._segment_bytes or segment_bytes(self.capacity_bytes, others + 1)
            per_segment = max(1, size // slot_bytes)
            reuse = self.uses.book(namespace, self.capacity_bytes // slot_bytes)
            chain = ChainIndex(make_policy(self.eviction, 0, reuse))
            space = Space(namespace, digest, slot_bytes, per_segment, reuse, chain)
            space.chain.kept = self.hints.kept(digest)
            space.used_s = self.now_s
            self.spaces[digest] = space
        return space

    def empty_space(self, space: Space) -> list[Effect]:
        """Take all memory from a namespace that nobody uses and that holds nothing any more."""
        effects: list[Effect] = []
        if not space.chain.items and space.live_segments and space.is_free:
            for index, live in enumerate(space.live):
                if live:
                    self._hollow(space, index, effects)
        return effects

    def end_space(self, space: Space) -> list[Effect]:
        """Forget a namespace that nobody uses and that has no memory, if it can be.

        What still names it finds nothing, and gets nothing, also once there is another one of the
        same digest.
        """
        if space.live_segments or space.known_until_s > self.now_s or not space.is_free:
            return []
        space.ended = True
        del self.spaces[space.digest]
        self.hints.forget(space.digest)
        if all(other.reuse is not space.reuse for other in self.spaces.values()):
            self.uses.note_unused(space.namespace)
        return [EndSpace(space)]

    def clear_space(self, space: Space, most: int) -> list[Effect]:
        """Drop so many blocks, at most, of a namespace that nobody uses any more."""
        assert not space.sessions
        return self.drop(space, list(islice(space.chain.items.values(), most)), Dropped.ENDED)

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
        for space in self.spaces.values():
            if space.reuse is book:
                found = map(space.chain.items.get, hashes)
                space.chain.policy.taught([item for item in found if item is not None])

    # --- looking up and leasing -----------------------------------------------------

    def prefix(self, space: Space, hashes: Sequence[bytes]) -> list[int]:
        """Slots of the longest run of READY blocks from the first hash on; touches them."""
        space.used_s = self.now_s
        found = list(map(space.chain.items.get, hashes))
        if None in found and space.leaving and self.revive(space, hashes):
            found = list(map(space.chain.items.get, hashes))
        if None in found:
            del found[found.index(None) :]
        slots: list[int] = found  # type: ignore[assignment]  # cut at the first None
        if space.unproven:
            doubted = (i for i, slot in enumerate(slots) if slot in space.unproven)
            del slots[next(doubted, len(slots)) :]
        space.chain.touch(slots)
        return slots

    def unproven(self, space: Space, hashes: Sequence[bytes]) -> list[int]:
        """Slots of those of the blocks that are here, but whose checksum is still to be seen."""
        if not space.unproven:
            return []
        found = map(space.chain.items.get, hashes)
        return [slot for slot in found if slot is not None and slot in space.unproven]

    def hold(self, space: Space, slots: Collection[int]) -> None:
        """Keep READY slots from eviction and reuse until `unhold`."""
        refs = space.refs
        for slot in slots:
            refs[slot] += 1

    def unhold(self, space: Space, slots: Collection[int]) -> None:
        """Undo one `hold` of each slot."""
        refs = space.refs
        for slot in slots:
            refs[slot] -= 1
        if space.dropped:
            self._free_dropped(space, slots)

    def drop(
        self, space: Space, slots: Sequence[int], why: Dropped = Dropped.DAMAGED
    ) -> list[Effect]:
        """Take READY or leaving blocks out for good, whatever place they have in a prefix.

        They are found by nobody from now on. Slots that somebody holds are free once nobody does.
        """
        record = self._left(why)
        for slot in slots:
            if slot not in space.leaving:
                space.leaving[slot] = space.identity(slot)
                space.chain.remove(slot)
            space.ghosts.put(space.leaving[slot][0], record)
            space.dropped.add(slot)
            space.unproven.pop(slot, None)
        self._free_dropped(space, slots)
        return [Forget(space, list(slots))] if slots else []

    def _free_dropped(self, space: Space, slots: Collection[int]) -> None:
        for slot in space.dropped.intersection(slots):
            if not space.refs[slot]:
                space.dropped.discard(slot)
                del space.leaving[slot]
                self._free(space, slot)

    def settle(self, space: Space, slots: Sequence[int]) -> list[Effect]:
        """Free those of the slots whose blocks were leaving and that nobody holds any more."""
        gone = [slot for slot in slots if slot in space.leaving and not space.refs[slot]]
        for slot in gone:
            del space.leaving[slot]
            self._free(space, slot)
        return [Forget(space, gone)] if gone else []

    def may_lease(self, owner: int, blocks: int) -> bool:
        """Whether neither the owner nor all together have too many leased for so many more."""
        known = self._leased_blocks
        mine = known[owner] + blocks <= LEASED_BLOCKS_MAX
        return mine and known.total() + blocks <= LEASED_BLOCKS_ALL_MAX

    def grant(self, owner: int, parts: list[tuple[Space, list[int]]], expires_ns: int) -> SlotLease:
        """Lease READY slots."""
        self._leased_blocks[owner] += sum(len(slots) for _, slots in parts)
        for space, slots in parts:
            self.hold(space, slots)
        lease = SlotLease(self._take_id(), owner, parts, expires_ns)
        self.leases[lease.lease_id] = lease
        return lease

    def release(self, lease_id: int, owner: int) -> bool:
        """End a lease before its time; False if it is not, or no longer, the owner's."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.owner != owner:
            return False
        del self.leases[lease_id]
        for space, slots in lease.parts:
            self.unhold(space, slots)
            self._leased_blocks[owner] -= len(slots)
        if not self._leased_blocks[owner]:
            del self._leased_blocks[owner]
        return True

    def expire(self, now_ns: int) -> int:
        """End the leases whose time is over; their count."""
        # In no order: how long a lease lasts can be changed at any time.
        over = [lease for lease in self.leases.values() if lease.expires_ns <= now_ns]
        for lease in over:
            self.release(lease.lease_id, lease.owner)
        return len(over)

    # --- hints ----------------------------------------------------------------------

    def hint(
        self, spaces: Sequence[Space], hashes: Sequence[bytes], hint: PrefixHint, now_ns: int
    ) -> None:
        """Believe what an engine says of a prefix in these namespaces, within bounds.

        Of each namespace at most the share of the quota is kept that its memory, with what
        nobody has yet, has of the whole: the others' blocks would have to make room for it.
        """
        parts = []
        unused = max(0, self.limit_bytes - self.allocated_bytes)
        for space in dict.fromkeys(spaces):
            if space.ended:
                continue
            memory = space.memory_bytes + unused
            limit = self.hints.quota_bytes * memory // self.capacity_bytes
            parts.append(HintedNamespace(space.digest, space.slot_bytes, limit))
            if hint.demotes:
                self.hints.counters["demoted_blocks_total"] += space.chain.demote(hashes)
        if parts:
            self.hints.take(parts, hashes, hint, now_ns)

    def expire_hints(self, now_ns: int) -> bool:
        """Let go of what was kept until now; False if there is no more of it."""
        over = self.hints.expire(now_ns)
        for digest, hashes in over:
            self.spaces[digest].chain.unkeep(hashes)
        return bool(over)

    # --- a life before --------------------------------------------------------------

    def adopt(
        self,
        namespace: Namespace,
        slots_per_segment: int,
        live: Sequence[bool],
        blocks: Sequence[Adopted],
        leased: Container[int],
    ) -> Space | None:
        """Take a namespace over as a life before left it; the one used last comes last.

        Its blocks are READY and unproven; whatever else is in its live segments is doubtful until
        `end_writes_before`. Slots in `leased` are held until `end_leases_before`, with a block or
        without: what is leased need not be in the ledger. None if no slot of it fits the
        capacity. What exceeds the capacity goes when the arena shrinks.
        """
        assert namespace.digest not in self.spaces
        space = self.open_space(namespace)
        if space is None:
            return None
        space.slots_per_segment = slots_per_segment
        total = len(live) * slots_per_segment
        space.live = list(live)
        space.generations = [0] * total
        space.refs = [0] * total
        space.checksums = [None] * total
        space.backed_up = [0] * total
        space.resize()
        self.allocated_bytes += space.memory_bytes
        space.since_s = self.now_s
        self._lower_bound()
        for slot, block_hash, parent, checksum, generation, backed_up in blocks:
            if block_hash in space.chain:
                continue
            space.chain.insert(slot, block_hash, parent)
            space.unproven[slot] = checksum
            space.generations[slot] = generation
            space.backed_up[slot] = backed_up
            self._next_id = max(self._next_id, generation)
        here = [slot for slot in range(total) if live[slot // slots_per_segment]]
        space.leased_before = frozenset(slot for slot in here if slot in leased)
        self.hold(space, space.leased_before)
        # Low slots come last, as those that are free: they are handed out first.
        space.doubtful = [slot for slot in reversed(here) if slot not in space.unproven]
        return space

    def end_leases_before(self) -> None:
        """Nobody reads what was adopted by a lease of a life before any more; idempotent."""
        for space in self.spaces.values():
            held, space.leased_before = space.leased_before, frozenset()
            self.unhold(space, held)

    def end_writes_before(self) -> None:
        """Nobody of a life before writes to a slot any more; what is leased stays doubtful until a
        call after `end_leases_before`."""
        for space in self.spaces.values():
            doubtful, refs = space.doubtful, space.refs
            space.free[:0] = [slot for slot in doubtful if not refs[slot]]
            space.doubtful = [slot for slot in doubtful if refs[slot]]

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
        items, writing = space.chain.items, space.writing
        if worth is None:
            space.used_s = self.now_s
        if space.leaving:
            self.revive(space, hashes)
        slots = list(map(items.get, hashes, repeat(Refusal.NO_ROOM)))
        touched = [slot for slot in slots if slot >= 0]
        wanted: list[int] = []
        for i, block_hash in enumerate(hashes):
            if slots[i] >= 0:
                slots[i] = Refusal.PRESENT
            elif block_hash in writing:
                slots[i] = Refusal.BUSY
            else:
                writing[block_hash] = NO_SLOT
                wanted.append(i)
        above = _resident_parents(items, wanted, hashes, parents)
        shield = touched + above
        space.chain.touch(shield)
        allowed = int(self.limit_bytes * WRITING_SHARE_MAX) - self._writing_bytes.get(owner, 0)
        count = max(0, min(len(wanted), allowed // space.slot_bytes))
        if count == 0 and wanted and not self._writing_bytes.get(owner):
            count = 1  # An arena of one or two slots still serves one block at a time.
        self.hold(space, shield)
        taken, effects = self._take_slots(space, count, worth)
        self.unhold(space, shield)
        reservation = SlotReservation(
            self._take_id(), owner, space, list(hashes), list(parents), slots, above
        )
        generations = space.generations
        for i, slot in zip(wanted, taken, strict=False):
            slots[i] = slot
            writing[hashes[i]] = slot
            generations[slot] = reservation.reservation_id
        for i in wanted[len(taken) :]:
            del writing[hashes[i]]
        if len(taken) < len(wanted):
            shared = len(taken) == count
            reservation.refused = NoRoom.SHARE if shared else self._why_no_room(space)
        if taken:
            self.hold(space, above)
            self.reservations[reservation.reservation_id] = reservation
            self._add_writing(owner, len(taken) * space.slot_bytes)
        return reservation, effects

    def commit(self, owner: int, reservation_id: int, count: int) -> list[int] | None:
        """Make the first `count` slots of a reservation READY and free the rest.

        The slots that became READY, in order; None if the reservation is not the owner's
        or no longer there, and nothing has changed then.
        """
        reservation = self._end_reservation(owner, reservation_id)
        if reservation is None:
            return None
        granted = accumulate(slot >= 0 for slot in reservation.slots)
        return self._publish(reservation, [number <= count for number in granted])

    def commit_some(self, owner: int, reservation_id: int, good: Sequence[bool]) -> list[int]:
        """Like `commit`, but for the daemon's own promotions: READY where `good`, by hash."""
        reservation = self._end_reservation(owner, reservation_id)
        assert reservation is not None
        return self._publish(reservation, good)

    def _publish(self, reservation: SlotReservation, good: Sequence[bool]) -> list[int]:
        space = reservation.space
        ready: list[int] = []
        for block_hash, parent, slot, ok in zip(
            reservation.hashes, reservation.parents, reservation.slots, good, strict=True
        ):
            if slot < 0:
                continue
            del space.writing[block_hash]
            if ok:
                space.chain.insert(slot, block_hash, parent)
                space.ghosts.records.pop(block_hash, None)
                ready.append(slot)
            else:
                self._free(space, slot)
        return ready

    def abort(self, owner: int, reservation_id: int) -> bool:
        """Free the slots of a reservation, which its owner no longer touches."""
        return self.commit(owner, reservation_id, 0) is not None

    def drop_owner(self, owner: int) -> int:
        """Abort the reservations of an owner that is gone; its leases end at their time."""
        mine = [r.reservation_id for r in self.reservations.values() if r.owner == owner]
        for reservation_id in mine:
            self.abort(owner, reservation_id)
        return len(mine)

    def make_room_ahead(self, space: Space, count: int) -> list[Effect]:
        """Have slots for the next `count` blocks, before somebody waits for them.

        While memory is left, by a segment, whose pages can be faulted in before a client
        writes to them, ten times faster. In a full arena, by evicting now what the next
        reservation would evict, within EVICT_AHEAD_SHARE of the space, or more where it takes
        time to make a slot free.
        """
        effects: list[Effect] = []
        free = len(space.free) + space.free_soon
        slots = space.live_segments * space.slots_per_segment
        if self.claims_all:
            ahead = max(int(slots * LEAVING_AHEAD_SHARE), count)
            ahead = min(ahead, int(slots * LEAVING_SHARE_MAX))
        else:
            ahead = min(int(slots * EVICT_AHEAD_SHARE), count)
        if free <= max(space.slots_per_segment // 4, ahead) and self._grow(space, effects):
            return effects
        short = ahead - free - len(space.leaving)
        if short > 0:
            self._evict(space, short, Evicted.AHEAD, effects)
        return effects

    def grow_ahead(self, space: Space) -> list[Effect]:
        """Have a whole segment free, while memory is left: its pages can be faulted in before
        blocks are read into them, twice as fast on a disk of 1.5 GB/s. Evicts nothing."""
        effects: list[Effect] = []
        if len(space.free) + space.free_soon < space.slots_per_segment:
            self._grow(space, effects)
        return effects

    def commit_count(self, owner: int, reservation_id: int, count: int) -> int:
        """How many blocks a `commit` with these arguments would make READY."""
        reservation = self.reservations.get(reservation_id)
        if reservation is None or reservation.owner != owner:
            return 0
        return min(count, sum(slot >= 0 for slot in reservation.slots))

    def lose_segments(self, space: Space, made: int) -> None:
        """Undo NewSegment effects that could not be carried out, for whoever got their slots: the
        namespace has no segments but the first `made`. None is asked for again for a while."""
        self._segments_from_s = self.now_s + SEGMENT_PAUSE_S
        total = made * space.slots_per_segment
        for reservation in list(self.reservations.values()):
            if reservation.space is not space or max(reservation.slots) < total:
                continue
            for i, slot in enumerate(reservation.slots):
                if slot >= total:
                    reservation.slots[i] = Refusal.NO_ROOM
                    del space.writing[reservation.hashes[i]]
                    self._add_writing(reservation.owner, -space.slot_bytes)
            reservation.refused = NoRoom.SEGMENT
            if max(reservation.slots) < 0:
                # Who has got nothing has nothing to commit, and does not say so.
                self._end_reservation(reservation.owner, reservation.reservation_id)
        self.allocated_bytes -= sum(space.live[made:]) * space.segment_bytes
        del space.live[made:]
        space.free = [slot for slot in space.free if slot < total]
        for by_slot in (space.generations, space.refs, space.checksums, space.backed_up):
            del by_slot[total:]
        space.resize()

    # --- room -----------------------------------------------------------------------

    def _take_slots(
        self, space: Space, count: int, worth: float | None
    ) -> tuple[list[int], list[Effect]]:
        effects: list[Effect] = []
        only_idle = worth is not None
        while len(space.free) < count:
            if self._grow(space, effects) or self._borrow(space, effects, only_idle=only_idle):
                continue
            evicted = self._evict(space, count - len(space.free), Evicted.ROOM, effects, worth)
            # Whoever nobody waits for may come again when what leaves is written.
            if evicted and (worth is None or len(space.free) >= count):
                continue
            if space.leaving or not space.chain.keeping or worth is not None:
                break
            # It has lent its memory since, and nothing else is left: pins never stop stores.
            space.chain.unkeep(self.hints.override(space.digest))
        taken = space.free[-count:][::-1] if count else []
        del space.free[len(space.free) - len(taken) :]
        return taken, effects

    def _why_no_room(self, space: Space) -> NoRoom:
        """Why a namespace has got fewer slots than it was asked for."""
        if self._segments_from_s > self.now_s and False not in space.live:
            return NoRoom.SEGMENT
        return NoRoom.HELD if space.live_segments else NoRoom.OTHERS

    def _may_grow(self, space: Space) -> bool:
        """Whether a segment could be made, were there memory for it: a hollow one has been."""
        return not space.ended and (self._segments_from_s <= self.now_s or False in space.live)

    def _grow(self, space: Space, effects: list[Effect]) -> bool:
        """Add a segment within the bound."""
        size = space.segment_bytes
        if not self._may_grow(space):
            return False
        # While there is more than the limit, what one namespace gives up another may still have.
        if self.allocated_bytes + size > self._bound_bytes:
            return False
        self.allocated_bytes += size
        per = space.slots_per_segment
        if not space.live_segments:
            space.since_s = self.now_s
        try:
            index = space.live.index(False)
        except ValueError:
            index = len(space.live)
            space.live.append(False)
            space.generations += [0] * per
            space.refs += [0] * per
            space.checksums += [None] * per
            space.backed_up += [0] * per
        space.live[index] = True
        space.resize()
        # Low slots are handed out first, so that a segment's pages are used in order.
        space.free[:0] = range((index + 1) * per - 1, index * per - 1, -1)
        effects.append(NewSegment(space, index))
        return True

    def _borrow(self, space: Space, effects: list[Effect], *, only_idle: bool) -> bool:
        """Empty and hollow so many segments of other spaces as make room for one of this space."""
        size = space.segment_bytes
        if not self._may_grow(space):
            return False
        missing = self.allocated_bytes + size - self._bound_bytes
        found = list(donors(self.spaces.values(), space, self.now_s, only_idle=only_idle))
        if sum(most * donor.segment_bytes for donor, most in found) < missing:
            return False
        for donor, most in found:
            for _ in range(most):
                if not self._empty_segment(donor, Evicted.LENT, effects):
                    break
                missing -= donor.segment_bytes
                if missing <= 0:
                    return True
        return False

    def _empty_segment(self, space: Space, why: Evicted, effects: list[Effect]) -> bool:
        """Hollow a segment: evict as many of the coldest blocks as it has, move the others out.

        Evicting until one is empty by itself would cost up to a fifth of the cache. False if
        leases and reservations keep every segment; what was evicted stays so.
        """
        index = self._loosest_segment(space)
        if index is None:
            return False
        inside = range(index * space.slots_per_segment, (index + 1) * space.slots_per_segment)
        while True:
            room = [slot for slot in space.free if slot not in inside]
            rest = sorted(set(inside).difference(space.free))
            short = len(rest) - len(room)
            if short <= 0:
                break
            if not self._evict(space, short, why, effects):
                return False
            if any(slot in inside for slot in space.leaving):
                return False  # Until it is written; a later call finds another segment, or this.
        if rest:
            self._move(space, list(zip(rest, room[-len(rest) :], strict=True)), effects)
        self._hollow(space, index, effects)
        return True

    def _loosest_segment(self, space: Space) -> int | None:
        """The live segment with the fewest blocks, of those without a held or reserved slot."""
        per = space.slots_per_segment
        used = [per] * len(space.live)
        for slot in space.free:
            used[slot // per] -= 1
        reserved = {slot // per for slot in (*space.writing.values(), *space.doubtful)}
        movable = [
            index
            for index, live in enumerate(space.live)
            if live
            and index not in reserved
            and not any(space.refs[index * per : (index + 1) * per])
        ]
        return min(movable, key=used.__getitem__, default=None)

    def _move(self, space: Space, pairs: list[tuple[int, int]], effects: list[Effect]) -> None:
        taken = {target for _, target in pairs}
        space.free = [slot for slot in space.free if slot not in taken]
        for slot, target in pairs:
            space.chain.move(slot, target)
            space.generations[target] = space.generations[slot]
            space.checksums[target] = space.checksums[slot]
            space.backed_up[target] = space.backed_up[slot]
            if slot in space.unproven:
                space.unproven[target] = space.unproven[slot]
            self._free(space, slot)
        effects.append(Move(space, pairs))

    def _evict(
        self,
        space: Space,
        count: int,
        why: Evicted,
        effects: list[Effect],
        worth: float | None = None,
    ) -> int:
        """Evict up to `count` of the coldest leaves; how many. What is claimed is free later.

        With a `worth` only what is worth less.
        """
        chain, refs, leaving = space.chain, space.refs, space.leaving
        most = max(1, int(space.live_segments * space.slots_per_segment * LEAVING_SHARE_MAX))
        room = max(0, most - len(leaving))

        def busy(slot: int) -> bool:
            if refs[slot]:
                return True
            leaving[slot] = chain.hash_of(slot), chain.parent_of(slot)
            return False

        spare = None
        if worth is not None:
            floor = worth * WORTH_LESS
            spare = lambda other: space.reuse.worth(other) >= floor  # noqa: E731
        slots = chain.evict(count, busy, spare)
        self.evicted[why] += len(slots)
        record = self._left(why)
        for slot in slots:
            space.ghosts.put(leaving[slot][0], record)
        if self.claim is not None and slots:
            self.claim(space, slots, room)
        effects += self.settle(space, slots)
        return len(slots)

    def _left(self, why: Evicted | Dropped) -> int:
        """What is remembered of blocks that leave now."""
        return self.now_s << WHY_BITS | GONE.index(why)

    def revive(self, space: Space, hashes: Sequence[bytes]) -> bool:
        """Make blocks READY again that are leaving; whether any was."""
        by_hash = {
            block_hash: slot
            for slot, (block_hash, _) in space.leaving.items()
            if slot not in space.dropped
        }
        again = [by_hash[h] for h in dict.fromkeys(hashes) if h in by_hash]
        for slot in again:
            block_hash, parent = space.leaving.pop(slot)
            space.chain.insert(slot, block_hash, parent)
            space.ghosts.records.pop(block_hash, None)
        self.revived_blocks += len(again)
        return bool(again)

    def _hollow(self, space: Space, index: int, effects: list[Effect]) -> None:
        per = space.slots_per_segment
        gone = range(index * per, (index + 1) * per)
        space.free = [slot for slot in space.free if slot not in gone]
        space.live[index] = False
        space.resize()
        self.allocated_bytes -= space.segment_bytes
        effects.append(HollowSegment(space, index))

    def _free(self, space: Space, slot: int) -> None:
        space.unproven.pop(slot, None)
        space.checksums[slot] = None
        space.backed_up[slot] = 0
        space.free.append(slot)

    def _end_reservation(self, owner: int, reservation_id: int) -> SlotReservation | None:
        reservation = self.reservations.get(reservation_id)
        if reservation is None or reservation.owner != owner:
            return None
        del self.reservations[reservation_id]
        self.unhold(reservation.space, reservation.held)
        granted = sum(slot >= 0 for slot in reservation.slots)
        self._add_writing(owner, -granted * reservation.space.slot_bytes)
        return reservation

    def _add_writing(self, owner: int, size_bytes: int) -> None:
        total = self._writing_bytes.pop(owner, 0) + size_bytes
        if total:
            self._writing_bytes[owner] = total

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id

    # --- proof ----------------------------------------------------------------------

    def check(self) -> None:
        """Assert every invariant; for tests and simulation."""
        allocated = 0
        held: Counter[tuple[bytes, int]] = Counter()
        for lease in self.leases.values():
            for space, slots in lease.parts:
                held.update((space.digest, slot) for slot in slots)
        leased = Counter(dict.fromkeys(self._leased_blocks, 0))
        for lease in self.leases.values():
            leased[lease.owner] += sum(len(slots) for _, slots in lease.parts)
        assert leased == self._leased_blocks
        for space in self.spaces.values():
            held.update((space.digest, slot) for slot in space.leased_before)
        writing: dict[int, int] = {}
        for reservation in self.reservations.values():
            space = reservation.space
            for block_hash, slot in zip(reservation.hashes, reservation.slots, strict=True):
                if slot >= 0:
                    assert space.writing[block_hash] == slot
                    writing[reservation.owner] = (
                        writing.get(reservation.owner, 0) + space.slot_bytes
                    )
        assert writing == self._writing_bytes
        for space in self.spaces.values():
            space.chain.check()
            allocated += space.memory_bytes
            assert space.live_segments == sum(space.live)
            assert not space.ended
            total = len(space.live) * space.slots_per_segment
            assert len(space.refs) == len(space.generations) == total
            assert len(space.checksums) == len(space.backed_up) == total
            ready = sorted(space.chain.items.values())
            others_places = (*space.writing.values(), *space.leaving, *space.doubtful)
            places = sorted([*ready, *space.free, *others_places])
            assert places == [s for s in range(total) if space.live[s // space.slots_per_segment]]
            for slot, refs in enumerate(space.refs):
                assert refs >= held[space.digest, slot]
            others = {*range(total)}.difference(ready, space.leaving, space.leased_before)
            assert not any(space.refs[slot] for slot in others)
            assert space.leased_before <= {*ready, *space.leaving, *space.doubtful}, (
                "a slot was reused that a former incarnation has leased"
            )
            for slot, (block_hash, _) in space.leaving.items():
                assert space.refs[slot], "a block is leaving that nobody writes"
                if slot not in space.dropped:
                    assert block_hash not in space.chain
                    assert block_hash not in space.writing
            assert space.dropped <= space.leaving.keys()
            assert space.unproven.keys() <= set(ready) | space.leaving.keys()
            for block_hash in space.writing:
                assert block_hash not in space.chain
                assert len(block_hash) == HASH_BYTES
        self.hints.check()
        assert allocated == self.allocated_bytes
        assert self.limit_bytes <= self.capacity_bytes
        assert allocated <= self._bound_bytes


def _resident_parents(
    items: dict[bytes, int], wanted: list[int], hashes: Sequence[bytes], parents: Sequence[bytes]
) -> list[int]:
    """Slots of the READY blocks that the wanted ones hang on."""
    found: list[int] = []
    before = NO_SLOT
    for i in wanted:
        # Most blocks of a call hang on the one before them, which is not READY yet either.
        if before != i - 1 or i == 0 or parents[i] != hashes[before]:
            slot = items.get(parents[i])
            if slot is not None:
                found.append(slot)
        before = i
    return found
