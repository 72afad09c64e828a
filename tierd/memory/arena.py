"""The memory of L2: memfd segments and the ledgers that describe their slots.

Acts on what `tierd.core.host` decides. Segments are sealed against resizing, so that
neither side can turn the other's access into a SIGBUS. A decommitted segment keeps its
descriptor and its mappings, here and in the clients: only its memory is given back.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence

from tierd.core.l2.space import Space
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
"""Descriptors that segments leave for sessions, files of tiers and /proc, which the daemon needs
to keep running; at most a quarter of all descriptors."""


class Segment:
    """One memfd, this process's mapping of it, and its ledger. Owns all three."""

    __slots__ = ("fd", "kept_as", "ledger", "mapping", "pins")

    def __init__(self, fd: int, size_bytes: int, ledger: Ledger) -> None:
        """Raises OSError, or ValueError if the memfd is too short; the caller then owns `fd`."""
        self.fd = fd
        self.mapping = SharedMapping(fd, size_bytes)
        self.ledger = ledger
        self.kept_as = ""
        """Its name among the descriptors that the service manager keeps for the next incarnation.
        """
        self.pins = 0
        """Number of processes that may have the segment pinned. A pinned segment must not be
        decommitted: the device would keep pages that no longer belong to the file, and its writes
        would be lost."""

    @classmethod
    def create(cls, namespace: Namespace, index: int, slots: int) -> Segment:
        """Create a segment of `slots` slots, without memory yet. Raises OSError."""
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
        """Take over a segment of an earlier incarnation.

        Raises LedgerError or OSError; the caller then owns the descriptors.
        """
        found = os.fstat(fd)
        ledger = Ledger.read(ledger_fd, found.st_ino)
        size_bytes = ledger.slots * ledger.namespace.slot_bytes
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
        if found.st_size != size_bytes or seals & _SEALS != _SEALS:
            raise LedgerError("its segment has a wrong size, or is not sealed against resizing")
        return cls(fd, size_bytes, ledger)

    def close(self) -> None:
        """Close the descriptors; the mappings end with this object."""
        os.close(self.fd)
        os.close(self.ledger.fd)

    def give_back(self) -> None:
        """Return the memory to the system, unless a process may have it pinned."""
        if not self.pins:
            self.mapping.give_back()


class Arena:
    """All segments by space and index."""

    def __init__(self, placement: Placement | None = None) -> None:
        self.placement = placement or Placement()
        self._segments: dict[Space, list[Segment]] = {}

    def create(self, space: Space, index: int) -> Segment:
        """Make segment `index` usable: a new one, or the decommitted one as it is.

        Raises OSError; then nothing has changed.
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
        """Add segments of an earlier incarnation, in the order of their numbers."""
        assert space not in self._segments
        assert len(segments) == len(space.live)
        self._segments[space] = list(segments)

    def decommit(self, space: Space, index: int) -> None:
        """Give the memory of a segment back to the system."""
        self._segments[space][index].give_back()

    def end(self, space: Space) -> Sequence[Segment]:
        """Remove the segments of a space and close their descriptors; return the segments.

        Other processes keep their mappings, which read as zeros.
        """
        gone = self._segments.pop(space, [])
        for segment in gone:
            segment.close()
        return gone

    def keep_decommitted(self, space: Space) -> None:
        """Give back what clients that faulted decommitted segments in have made them hold again."""
        for live, segment in zip(space.live, self.segments(space), strict=True):
            if not live and os.fstat(segment.fd).st_blocks:
                segment.give_back()

    def move(self, space: Space, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks and their records from slot to slot; both slots must be free of holders."""
        segments, per = self._segments[space], space.slots_per_segment
        for slot, target in pairs:
            self.view(space, target)[:] = self.view(space, slot)
            there = segments[target // per].ledger
            segments[slot // per].ledger.move(slot % per, there, target % per)

    def forget(self, space: Space, slots: Sequence[int]) -> None:
        """Remove evicted slots from the ledger before their bytes change."""
        for index, places in space.by_segment(slots).items():
            self._segments[space][index].ledger.forget(places)

    def segments(self, space: Space) -> Sequence[Segment]:
        """The segments of a space, decommitted ones included, by index."""
        return self._segments.get(space, ())

    def view(self, space: Space, slot: int) -> memoryview:
        """Return all bytes of one slot."""
        index, place = divmod(slot, space.slots_per_segment)
        start = place * space.slot_bytes
        return self._segments[space][index].mapping.view[start : start + space.slot_bytes]

    @property
    def populated_bytes(self) -> int:
        """Bytes whose pages have been faulted in ahead of use."""
        return sum(s.mapping.populated_bytes for many in self._segments.values() for s in many)

    def close(self) -> None:
        """Close the descriptors; the mappings end with the process."""
        for many in self._segments.values():
            for segment in many:
                segment.close()
        self._segments.clear()


def _descriptors() -> int:
    """Return the bound below which the descriptor numbers of segments must be.

    The system gives out the lowest free number, so the number of a new descriptor shows how many
    are in use.
    """
    most = descriptors_limit()
    return most - min(DESCRIPTORS_LEFT, most // 4)


def check_capacity(capacity_bytes: int) -> None:
    """Raise ConfigError if `capacity_bytes` exceeds 95 % of the memory this process may use."""
    limit = memory_limit()
    if capacity_bytes > limit.size_bytes * 0.95:
        raise ConfigError(
            f"host.capacity is {about(capacity_bytes)}, but {limit.by} is "
            f"{about(limit.size_bytes)}: lower host.capacity, and leave room for the engine"
        )
