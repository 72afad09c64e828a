"""Counts and logs the blocks that engines could not store or lease, by reason.

Each namespace and reason is logged once, at a limited rate: an engine that cannot store tries again
with every request.
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
"""Period in seconds with at most LINES_MAX lines; a line left out is logged at the next event."""

LOGGED_MAX: Final = 4096
"""Remembered pairs of namespace and reason; beyond this number all are forgotten."""

_WHY: Final = {
    NoRoom.SHARE: "its engine has reserved half of host memory and not filled it yet",
    NoRoom.HELD: "all its slots are leased, reserved, or being written to a storage tier",
    NoRoom.OTHERS: "it has no memory, because other namespaces use all of it: raise host.capacity",
    NoRoom.SEGMENT: "the system refuses a memory segment, for a reason logged before",
}

log = logging.getLogger("tierd")


class Refusals:
    """Counts in `counters`, for blocks not stored under the name from `store_counter`."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        counters.update({store_counter(why): 0 for why in NoRoom})
        self._logged: set[tuple[bytes, str]] = set()
        self._lines = 0
        self._since_s = 0

    def stored(self, space: Space, reservation: SlotReservation, now_s: int) -> None:
        """Note the refused blocks of a reservation."""
        why = reservation.refused
        if why is None:
            return
        refused = reservation.slots.count(Refusal.NO_ROOM)
        self._counters[store_counter(why)] += refused
        if self._may_log(space, why.value, now_s):
            log.warning(
                "namespace %s of %s: %d blocks are not stored: %s",
                space.digest.hex(),
                space.namespace.model,
                refused,
                _WHY[why],
            )

    def leased(self, space: Space, client: str, now_s: int) -> None:
        """Note that a session has too many blocks leased to get more."""
        self._counters["leases_refused_total"] += 1
        if self._may_log(space, "leases", now_s):
            log.warning(
                "namespace %s of %s: lookups by %s miss, because it does not release its leases; "
                "they end after host.lease_ttl_ms",
                space.digest.hex(),
                space.namespace.model,
                client or "a client",
            )

    def _may_log(self, space: Space, why: str, now_s: int) -> bool:
        if (space.digest, why) in self._logged:
            return False
        if now_s - self._since_s >= LINES_S:
            self._since_s, self._lines = now_s, 0
        if self._lines >= LINES_MAX:
            return False
        if len(self._logged) >= LOGGED_MAX:
            self._logged.clear()
        self._lines += 1
        self._logged.add((space.digest, why))
        return True


def store_counter(why: NoRoom) -> str:
    """Return the name of the counter of blocks not stored for a reason."""
    return f"store_refused_{why.value}_blocks_total"
