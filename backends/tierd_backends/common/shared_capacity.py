"""Decide whether a store that nodes share may take another block, and when to count it again.

A node knows its last count, and the bytes that it has stored and dropped since. It sees the
changes of other nodes at its next count. So the store may exceed its capacity by as much as the
other nodes write between two counts. A node enforces the capacity only after its first count,
which may take many minutes; until then it stores blocks. Only the server makes room, by its
eviction, expiry or lifecycle rules; a count finds that room.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Final

from msgspec import Meta

from tierd.errors import ConfigError
from tierd.sizes import about, parse_size

COUNT_PAUSE_S: Final = 300.0
"""Shortest wait between two counts. The fleet's writes in between may exceed the capacity."""

COUNT_SHARE_MAX: Final = 1 / 50
"""Largest share of time spent counting. A count of a bucket lists 10 pages a second, so this is
at most 17,000 LIST requests a day (0.09 USD at AWS), for any number of objects."""

Capacity = Annotated[
    int | str,
    Meta(
        description="Upper bound of the bytes below prefix, of all nodes together, as counted now "
        'and then; no block is stored beyond it. Such as "400GiB"; 0: no limit.'
    ),
]
"""The `capacity` option of a tier that nodes share."""

_log = logging.getLogger("tierd_backends")


def capacity_problems(capacity: int | str) -> Iterator[str]:
    """Yield the problems of the `capacity` option."""
    try:
        parse_size(capacity)
    except ConfigError as error:
        yield f"capacity: {error}"


class SharedCapacity:
    """The shared capacity of one tier. Belongs to the event loop."""

    def __init__(self, capacity: int | str, what: str) -> None:
        """`capacity` as configured and checked (0: no limit); `what` names the tier in the log."""
        self.capacity_bytes = parse_size(capacity)
        self._what = what
        self._writing_bytes = 0
        self._full = False

    @contextmanager
    def admit(self, used_bytes: int, sizes_bytes: Sequence[int]) -> Iterator[int]:
        """Yield how many of these blocks, from the first on, may be stored inside `with`.

        `used_bytes` is the tier's content without blocks that are being stored.
        """
        if not self.capacity_bytes:
            yield len(sizes_bytes)
            return
        room_bytes = self.capacity_bytes - used_bytes - self._writing_bytes
        count = admitted_bytes = 0
        for size_bytes in sizes_bytes:
            if admitted_bytes + size_bytes > room_bytes:
                break
            admitted_bytes += size_bytes
            count += 1
        if sizes_bytes:
            self._tell(full=count < len(sizes_bytes))
        self._writing_bytes += admitted_bytes
        try:
            yield count
        finally:
            self._writing_bytes -= admitted_bytes

    def pause_s(self, count_took_s: float) -> float | None:
        """Seconds until the next count; None if no limit is set, so that no count is needed."""
        if not self.capacity_bytes:
            return None
        return max(COUNT_PAUSE_S, count_took_s / COUNT_SHARE_MAX)

    def _tell(self, *, full: bool) -> None:
        if full and not self._full:
            _log.warning(
                "%s is full: capacity is %s; blocks are not stored until a count finds room",
                self._what,
                about(self.capacity_bytes),
            )
        elif self._full and not full:
            _log.info("%s has room again", self._what)
        self._full = full
