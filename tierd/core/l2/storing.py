"""The two-phase store: slots are reserved, filled by their owner, and then committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, repeat
from typing import Final

from tierd.core.effects import Effect
from tierd.core.l2.reservations import Found, Reservations, SlotReservation
from tierd.core.l2.room import Room
from tierd.core.l2.segments import Segments
from tierd.core.l2.space import Space
from tierd.core.reasons import NoRoom, Refusal
from tierd.core.states import ReservationEvent

WRITING_SHARE_MAX: Final = 0.5
"""Share of the capacity that one owner may have reserved and not yet committed."""


class Storing:
    """Handles a store from its RESERVE to its COMMIT or ABORT."""

    __slots__ = ("_reservations", "_room", "_segments")

    def __init__(self, reservations: Reservations, segments: Segments, room: Room) -> None:
        self._reservations = reservations
        self._segments = segments
        self._room = room

    def reserve(
        self,
        number: int,
        owner: int,
        space: Space,
        hashes: Sequence[bytes],
        parents: Sequence[bytes],
        worth: float | None,
        now_s: int,
    ) -> tuple[SlotReservation, list[Effect]]:
        """See HostTier.reserve; `number` becomes the reservation's id."""
        items, writing = space._chain.items, space._writing
        if worth is None:
            space._used_s = now_s
        slots = list(map(items.get, hashes, repeat(Refusal.NO_ROOM)))
        touched = [slot for slot in slots if slot >= 0]
        wanted: list[int] = []
        seen: set[bytes] = set()
        for i, block_hash in enumerate(hashes):
            if slots[i] >= 0:
                slots[i] = Refusal.PRESENT
            elif block_hash in writing or block_hash in seen:
                slots[i] = Refusal.BUSY
            else:
                seen.add(block_hash)
                wanted.append(i)
        above = _resident_parents(items, wanted, hashes, parents)
        shield = touched + above
        space._chain.touch(shield)
        count = self._may_write(owner, space, len(wanted))
        space._hold(shield)
        effects = self._room.make(space, count, worth, now_s)
        space._unhold(shield)
        taken = space._reserve([hashes[i] for i in wanted[:count]], number)
        for i, slot in zip(wanted, taken, strict=False):
            slots[i] = slot
        reservation = SlotReservation(
            number, owner, space, list(hashes), list(parents), slots, above
        )
        if len(taken) < len(wanted):
            shared = len(taken) == count
            why = NoRoom.SHARE if shared else self._room.why_none(space, now_s)
            reservation.refused = why
        if taken:
            self._reservations.begin(reservation, len(taken))
        return reservation, effects

    def _may_write(self, owner: int, space: Space, wanted: int) -> int:
        """Return how many of the `wanted` blocks an owner may reserve."""
        has = self._reservations.writing_bytes(owner)
        allowed = int(self._segments.limit_bytes * WRITING_SHARE_MAX) - has
        count = max(0, min(wanted, allowed // space.slot_bytes))
        if count == 0 and wanted and not has:
            count = 1  # An arena of one or two slots still stores one block at a time.
        return count

    def commit(
        self, owner: int, reservation_id: int, count: int, now_s: float | None
    ) -> list[int] | None:
        """See HostTier.commit."""
        reservation = self._reservations.get(owner, reservation_id)
        if reservation is None:
            return None
        if now_s is not None:
            reservation.space.reuse.pass_time(now_s)
        granted = accumulate(slot >= 0 for slot in reservation.slots)
        good = [number <= count for number in granted]
        return self._end(reservation, ReservationEvent.COMMIT, good)

    def commit_found(
        self, owner: int, reservation_id: int, found: Sequence[Found | None]
    ) -> list[int]:
        """See HostTier.commit_found."""
        reservation = self._reservations.get(owner, reservation_id)
        assert reservation is not None
        space = reservation.space
        for i, block in enumerate(found):
            if block is not None:
                reservation.parents[i] = block.parent
                space._checksums[reservation.slots[i]] = block.checksum
        good = [block is not None for block in found]
        return self._end(reservation, ReservationEvent.COMMIT, good)

    def abort(self, owner: int, reservation_id: int) -> bool:
        """Free the slots of a reservation; its owner no longer writes to them."""
        reservation = self._reservations.get(owner, reservation_id)
        if reservation is not None:
            self._end(reservation, ReservationEvent.ABORT)
        return reservation is not None

    def drop_owner(self, owner: int) -> int:
        """Abort the reservations of an owner that is gone; return their count."""
        mine = self._reservations.of(owner)
        for reservation in mine:
            self._end(reservation, ReservationEvent.OWNER_GONE)
        return len(mine)

    def _end(
        self,
        reservation: SlotReservation,
        event: ReservationEvent,
        good: Sequence[bool] | None = None,
    ) -> list[int]:
        """End a reservation; return its slots that are readable now, those marked `good`."""
        self._reservations.end(reservation, event)
        hashes, parents, slots = reservation.hashes, reservation.parents, reservation.slots
        return reservation.space._end_writing(
            hashes, parents, slots, good if good is not None else repeat(False, len(slots))
        )


def _resident_parents(
    items: Mapping[bytes, int], wanted: list[int], hashes: Sequence[bytes], parents: Sequence[bytes]
) -> list[int]:
    """Return the slots of readable blocks that are parents of the wanted blocks."""
    found: list[int] = []
    before = -1
    for i in wanted:
        # Most parents are the previous wanted block, which is not readable yet either.
        if before != i - 1 or i == 0 or parents[i] != hashes[before]:
            slot = items.get(parents[i])
            if slot is not None:
                found.append(slot)
        before = i
    return found
