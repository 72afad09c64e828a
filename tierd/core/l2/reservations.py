"""Reservations: which slots an owner is writing to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tierd.core.l2.space import Space
from tierd.core.reasons import NoRoom, Refusal
from tierd.core.states import RESERVATIONS, ReservationEvent, ReservationState, step


@dataclass(slots=True, eq=False)
class SlotReservation:
    """Slots that one owner fills. The id is also the slots' generation: it is never reused.

    `held` are the readable slots of the new blocks' parents. They are held until the reservation
    ends: evicting them would leave a hole before the new blocks. `refused` says why blocks with
    Refusal.NO_ROOM have no slot.
    """

    reservation_id: int
    owner: int
    space: Space
    hashes: list[bytes]
    parents: list[bytes]
    slots: list[int]
    held: list[int]
    refused: NoRoom | None = None
    state: ReservationState = ReservationState.OPEN

    @property
    def granted(self) -> int:
        """Number of blocks that have a slot."""
        return sum(slot >= 0 for slot in self.slots)


class Found(NamedTuple):
    """Parent and checksum of a block, as returned by the tier that delivered it."""

    parent: bytes
    checksum: bytes


class Reservations:
    """The reservations that have not ended."""

    __slots__ = ("_open", "_writing_bytes")

    def __init__(self) -> None:
        self._open: dict[int, SlotReservation] = {}
        self._writing_bytes: dict[int, int] = {}

    @property
    def open(self) -> Mapping[int, SlotReservation]:
        """Open reservations by id."""
        return self._open

    def writing_bytes(self, owner: int) -> int:
        """Return the bytes of the slots that an owner has reserved."""
        return self._writing_bytes.get(owner, 0)

    def begin(self, reservation: SlotReservation, granted: int) -> None:
        """Add a reservation with `granted` slots."""
        space = reservation.space
        space._hold(reservation.held)
        self._open[reservation.reservation_id] = reservation
        self._add_writing(reservation.owner, granted * space.slot_bytes)

    def get(self, owner: int, reservation_id: int) -> SlotReservation | None:
        """One that is the owner's and has not ended."""
        reservation = self._open.get(reservation_id)
        return reservation if reservation is not None and reservation.owner == owner else None

    def of(self, owner: int) -> list[SlotReservation]:
        """All of an owner."""
        return [each for each in self._open.values() if each.owner == owner]

    def end(self, reservation: SlotReservation, event: ReservationEvent) -> None:
        """End a reservation; the caller publishes or frees its slots."""
        reservation.state = step(RESERVATIONS, reservation.state, event)
        del self._open[reservation.reservation_id]
        space = reservation.space
        space._unhold(reservation.held)
        self._add_writing(reservation.owner, -reservation.granted * space.slot_bytes)

    def lose(self, space: Space, total: int) -> None:
        """Take back reserved slots of a space except its first `total` ones."""
        for reservation in list(self._open.values()):
            if reservation.space is not space or max(reservation.slots) < total:
                continue
            before = reservation.granted
            reservation.slots[:] = [
                slot if slot < total else Refusal.NO_ROOM for slot in reservation.slots
            ]
            lost = before - reservation.granted
            self._add_writing(reservation.owner, -lost * space.slot_bytes)
            reservation.refused = NoRoom.SEGMENT
            if lost == before:
                # An owner without slots sends no COMMIT, so the reservation ends here.
                self.end(reservation, ReservationEvent.LOSE_ALL)
            else:
                some = ReservationEvent.LOSE_SOME
                reservation.state = step(RESERVATIONS, reservation.state, some)

    def _add_writing(self, owner: int, size_bytes: int) -> None:
        total = self._writing_bytes.pop(owner, 0) + size_bytes
        if total:
            self._writing_bytes[owner] = total

    def check(self) -> None:
        """Assert every invariant; for tests."""
        writing: dict[int, int] = {}
        for reservation in self._open.values():
            assert reservation.state is ReservationState.OPEN
            space = reservation.space
            for block_hash, slot in zip(reservation.hashes, reservation.slots, strict=True):
                if slot >= 0:
                    assert space._writing[block_hash] == slot
            size_bytes = reservation.granted * space.slot_bytes
            writing[reservation.owner] = writing.get(reservation.owner, 0) + size_bytes
        assert writing == self._writing_bytes
