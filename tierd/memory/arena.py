"""The memory of L2: memfd segments and the ledger that describes their slots.

Acts on what `tierd.core.host` decides. Segments are sealed against resizing, so that
neither side can turn the other's access into a SIGBUS. A hollow segment keeps its
descriptor and its mappings, here and in the clients: only its memory is given back.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence

from tierd.core.space import Space
from tierd.errors import ConfigError
from tierd.limits import descriptors_limit, memory_limit
from tierd.memory.ledger import Ledger, LedgerError
from tierd.memory.placement import Placement
from tierd.shared_memory.mapping import SharedMapping
from tierd.sizes import about
from tierd.types import Namespace

_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_SEALS = 0x1 | 0x2 | 0x4

DESCRIPTORS_LEFT = 64
"""Descriptors, or a quarter of all, that segments leave for the rest of the daemon, which would
not live without them: sessions, files of tiers, the kernel's word on memory."""


class Segment:
    """One memfd and this process's mapping of it, with its part of the ledger. Owns all."""

    __slots__ = ("fd", "kept_as", "ledger", "mapping", "pins")

    def __init__(self, fd: int, size_bytes: int, ledger: Ledger) -> None:
        """Raises OSError or ValueError (it is too short); `fd` is the caller's then."""
        self.fd = fd
        self.mapping = SharedMapping(fd, size_bytes)
        self.ledger = ledger
        self.kept_as = ""
        """Its name where descriptors are kept for another life."""
        self.pins = 0
        """Processes that may have it pinned: pages that a device keeps would no longer be the
        file's once they were given back, and what it writes be lost."""

    @classmethod
    def create(cls, namespace: Namespace, index: int, slots: int) -> Segment:
        """A new one of so many slots, without memory yet. Raises OSError."""
        name = f"tierd-{namespace.digest.hex()[:12]}-{index}"
        size_bytes = slots * namespace.slot_bytes
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
            ledger = Ledger.create(namespace, index, slots, os.fstat(fd).st_ino)
        except OSError:
            os.close(fd)
            raise
        try:
            if fd >= _descriptors() or ledger.fd >= _descriptors():
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return cls(fd, size_bytes, ledger)
        except OSError:
            os.close(fd)
            os.close(ledger.fd)
            raise

    @classmethod
    def adopt(cls, fd: int, ledger_fd: int) -> Segment:
        """One that a life before left. Raises LedgerError or OSError; the descriptors are the
        caller's then."""
        found = os.fstat(fd)
        ledger = Ledger.read(ledger_fd, found.st_ino)
        size_bytes = ledger.slots * ledger.namespace.slot_bytes
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
        if found.st_size != size_bytes or seals & _SEALS != _SEALS:
            raise LedgerError("its segment has another size, or could be cut")
        return cls(fd, size_bytes, ledger)

    def close(self) -> None:
        """Close the descriptors; the mappings go with this object."""
        os.close(self.fd)
        os.close(self.ledger.fd)

    def give_back(self) -> None:
        """Return the memory to the system, once nobody has it pinned."""
        if not self.pins:
            self.mapping.give_back()


class Arena:
    """All segments, by space and index."""

    def __init__(self, placement: Placement | None = None) -> None:
        self.placement = placement or Placement()
        self._segments: dict[Space, list[Segment]] = {}

    def create(self, space: Space, index: int) -> Segment:
        """Make segment `index` usable: a new one, or the hollow one as it is.

        Raises OSError, and nothing has changed then.
        """
        segments = self._segments.get(space, [])
        if index < len(segments):
            return segments[index]
        assert index == len(segments)
        segment = Segment.create(space.namespace, index, space.slots_per_segment)
        self.placement.apply(segment.mapping)
        self._segments.setdefault(space, []).append(segment)
        return segment

    def adopt(self, space: Space, segments: Sequence[Segment]) -> None:
        """Take the segments of a life before over, in the order of their numbers."""
        assert space not in self._segments
        assert len(segments) == len(space.live)
        self._segments[space] = list(segments)

    def hollow(self, space: Space, index: int) -> None:
        """Give the memory of a segment back to the system."""
        self._segments[space][index].give_back()

    def end(self, space: Space) -> Sequence[Segment]:
        """Let the segments of a space go; their descriptors are closed.

        Whoever else has one mapped keeps its mapping, and finds zeros.
        """
        gone = self._segments.pop(space, [])
        for segment in gone:
            segment.close()
        return gone

    def keep_hollow(self, space: Space) -> None:
        """Give back what clients that faulted hollow segments in have made them hold again."""
        for live, segment in zip(space.live, self.segments(space), strict=True):
            if not live and os.fstat(segment.fd).st_blocks:
                segment.give_back()

    def move(self, space: Space, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks and their records from slot to slot; nobody may hold either slot."""
        segments, per = self._segments[space], space.slots_per_segment
        for slot, target in pairs:
            self.view(space, target)[:] = self.view(space, slot)
            there = segments[target // per].ledger
            segments[slot // per].ledger.move(slot % per, there, target % per)

    def forget(self, space: Space, slots: Sequence[int]) -> None:
        """Take evicted slots out of the ledger, before their bytes change."""
        for index, places in space.by_segment(slots).items():
            self._segments[space][index].ledger.forget(places)

    def segments(self, space: Space) -> Sequence[Segment]:
        """The segments of a space, hollow ones included, by index."""
        return self._segments.get(space, ())

    def view(self, space: Space, slot: int) -> memoryview:
        """All bytes of one slot."""
        index, place = divmod(slot, space.slots_per_segment)
        start = place * space.slot_bytes
        return self._segments[space][index].mapping.view[start : start + space.slot_bytes]

    @property
    def populated_bytes(self) -> int:
        """Bytes whose pages have been faulted in ahead of use."""
        return sum(s.mapping.populated_bytes for many in self._segments.values() for s in many)

    def close(self) -> None:
        """Close the descriptors; the mappings go with the process."""
        for many in self._segments.values():
            for segment in many:
                segment.close()
        self._segments.clear()


def _descriptors() -> int:
    """Numbers of descriptors below which segments may have theirs: the lowest free ones are used
    first, so that the number of a new one tells how many there are."""
    most = descriptors_limit()
    return most - min(DESCRIPTORS_LEFT, most // 4)


def check_capacity(capacity_bytes: int) -> None:
    """Raise ConfigError if the memory that this process may have cannot hold `capacity_bytes`."""
    limit = memory_limit()
    if capacity_bytes > limit.size_bytes * 0.95:
        raise ConfigError(
            f"host.capacity is {about(capacity_bytes)}, but {limit.by} is "
            f"{about(limit.size_bytes)}: lower host.capacity, and leave room for the engine"
        )
