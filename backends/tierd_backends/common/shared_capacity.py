"""Whether a store that nodes share may take another block, and when to count it again.

A node knows what it counted last and what it stored and dropped since; what others did
shows at its next count. So the lid is kept to within what they store between two counts, and
once a node has counted: until then blocks are stored, since a count may take many minutes.
Room is made by the server alone, by its eviction, expiry or lifecycle rules: a count finds it.
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
"""Shortest wait between two counts: what a fleet writes meanwhile may be over the lid."""

COUNT_SHARE_MAX: Final = 1 / 50
"""Longest part of the time that is spent counting. Of a bucket, 10 pages a second in a count
are then at most 17,000 LIST requests a day, 0.09 USD at AWS, however many objects there are."""

Capacity = Annotated[
    int | str,
    Meta(
        description="Most bytes under prefix, of all nodes, as far as this one has counted; "
        'beyond it blocks are not stored. Such as "400GiB"; 0: no limit.'
    ),
]
"""The option of such a tier."""

_log = logging.getLogger("tierd_backends")


def capacity_problems(capacity: int | str) -> Iterator[str]:
    """What is wrong with the option."""
    try:
        parse_size(capacity)
    except ConfigError as error:
        yield f"capacity: {error}"


class SharedCapacity:
    """The capacity of a tier. Belongs to the event loop."""

    def __init__(self, capacity: int | str, what: str) -> None:
        """`capacity` as configured, sound and 0 for none, of the tier that is called `what` in the
        log."""
        self.capacity_bytes = parse_size(capacity)
        self._what = what
        self._writing_bytes = 0
        self._full = False

    @contextmanager
    def admit(self, used_bytes: int, sizes_bytes: Sequence[int]) -> Iterator[int]:
        """How many blocks of these sizes, from the first on, may be stored inside `with`.

        `used_bytes` is what the tier holds, without what is being stored.
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
        """How long to wait until the next count; None if nothing is decided by it."""
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
