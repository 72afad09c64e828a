"""What an engine does not get of host memory, and why: counted, and told in the log.

A line for each namespace and reason, and no more than so many in a while: an engine that cannot
store tries again with every request.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

from tierd.core.l2.reservations import SlotReservation
from tierd.core.l2.space import Space
from tierd.core.reasons import NoRoom, Refusal

LINES_MAX: Final = 20
LINES_S: Final = 60
"""Lines within so many seconds; what is not told then is when it happens again."""

TOLD_MAX: Final = 4096
"""Namespaces and reasons that are remembered as told; beyond it all are forgotten."""

_WHY: Final = {
    NoRoom.SHARE: "its engine has reserved half of host memory, and is yet to fill it",
    NoRoom.HELD: "all that it has is leased, reserved, or being written to a storage tier",
    NoRoom.OTHERS: "it has no memory, and other namespaces use all of it: raise host.capacity",
    NoRoom.SEGMENT: "no memory segment can be made, as another line says",
}

log = logging.getLogger("tierd")


class Refusals:
    """Counts into `counters`; `store_counter` names the counter of a reason."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        counters.update({store_counter(why): 0 for why in NoRoom})
        self._told: set[tuple[bytes, str]] = set()
        self._lines = 0
        self._since_s = 0

    def stored(self, space: Space, reservation: SlotReservation, now_s: int) -> None:
        """A session's reservation has been answered."""
        why = reservation.refused
        if why is None:
            return
        refused = reservation.slots.count(Refusal.NO_ROOM)
        self._counters[store_counter(why)] += refused
        if self._tell(space, why.value, now_s):
            log.warning(
                "namespace %s of %s: %d blocks are not stored: %s",
                space.digest.hex(),
                space.namespace.model,
                refused,
                _WHY[why],
            )

    def leased(self, space: Space, client: str, now_s: int) -> None:
        """A session has too much leased to get more."""
        self._counters["leases_refused_total"] += 1
        if self._tell(space, "leases", now_s):
            log.warning(
                "namespace %s of %s: what it has is not found for %s, which does not give leases "
                "back: they end after host.lease_ttl_ms",
                space.digest.hex(),
                space.namespace.model,
                client or "a client",
            )

    def _tell(self, space: Space, why: str, now_s: int) -> bool:
        if (space.digest, why) in self._told:
            return False
        if now_s - self._since_s >= LINES_S:
            self._since_s, self._lines = now_s, 0
        if self._lines >= LINES_MAX:
            return False
        if len(self._told) >= TOLD_MAX:
            self._told.clear()
        self._lines += 1
        self._told.add((space.digest, why))
        return True


def store_counter(why: NoRoom) -> str:
    """Of blocks that were not stored for a reason."""
    return f"store_refused_{why.value}_blocks_total"
