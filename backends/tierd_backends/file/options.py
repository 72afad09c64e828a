"""Options of the file tier, and the sizes that follow from them. Nothing is opened here."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tierd.errors import ConfigError
from tierd.eviction import STORAGE_POLICIES
from tierd.sizes import parse_size, parse_size_of

SLABS_MAX = 2048
"""Slabs grow with the capacity to keep their number near this: each has two open files."""

SLABS_MIN = 8
"""A small tier gets smaller slabs, so that namespaces can still take slabs from each other."""

THREADS_MAX = 64
"""Far more threads than any device gains from: a typing error must not start thousands."""


class FileOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Keys of a `[[storage]]` table of type "file"."""

    path: Annotated[
        str,
        Meta(
            description="Directory of the tier, created if missing; it must belong to one tierd "
            "only."
        ),
    ]
    capacity: Annotated[
        int | str,
        Meta(
            description='Upper bound of the bytes that the tier\'s files occupy, such as "400GiB".'
        ),
    ]
    slab: Annotated[
        int | str,
        Meta(
            description="Size of one slab file; smaller in a small tier, larger beyond 2048 slabs."
        ),
    ] = "256MiB"
    reserve_free: Annotated[
        int | str,
        Meta(
            description="Free space of the file system that the tier leaves to others, in bytes or "
            "as a percentage."
        ),
    ] = "1GiB"
    direct: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="Use of O_DIRECT. auto: if the file system supports it; on: refuse to "
            "start without it; off: never."
        ),
    ] = "auto"
    eviction: Annotated[
        Literal["credit", "lru", "lfu", "s3fifo", "arc"],
        Meta(
            description="Order in which blocks are evicted from the tier: "
            f"{', '.join(STORAGE_POLICIES)}."
        ),
    ] = "credit"
    threads: Annotated[
        int, Meta(description="Number of I/O threads for reads, and the same number for writes.")
    ] = 4

    def check(self) -> None:
        """Raise ConfigError with every malformed option."""
        problems = []
        if not 1 <= self.threads <= THREADS_MAX:
            problems.append(f"threads is {self.threads}; it must be 1 to {THREADS_MAX}")
        for name in ("capacity", "slab", "reserve_free"):
            try:
                parse = partial(parse_size_of, whole_bytes=0) if "_" in name else parse_size
                parse(getattr(self, name))
            except ConfigError as error:
                problems.append(f"{name}: {error}")
        if problems:
            raise ConfigError(*problems)

    @property
    def capacity_bytes(self) -> int:
        """Upper bound of the bytes of all slabs and indexes."""
        return parse_size(self.capacity)

    @property
    def slab_bytes(self) -> int:
        """Size of one slab: as configured, within the bounds that SLABS_MIN and SLABS_MAX set."""
        capacity_bytes = self.capacity_bytes
        return max(
            min(parse_size(self.slab), capacity_bytes // SLABS_MIN), capacity_bytes // SLABS_MAX
        )

    @property
    def files_max(self) -> int:
        """Most files that the tier has open at once: two per slab."""
        return 2 * (self.capacity_bytes // max(1, self.slab_bytes) + SLABS_MIN)
