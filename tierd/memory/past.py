"""What a life of the daemon leaves about itself, beside the arena, for the life after it.

Engines outlive the daemon. Until a lease ends its holder may be reading slots, and whoever had
reserved slots may still be writing to them, however long it had been stopped. So a life writes
down until when its leases last, and every process that may write holds its guard.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from tierd.types import DIGEST_BYTES

_MAGIC: Final = b"TIERDLIF"
_VERSION: Final = 2
_HEAD = struct.Struct(f"<8sI4x{DIGEST_BYTES}s")
_PAGE_BYTES: Final = 4096
_FIELDS_AT: Final = 64

LOG_BYTES: Final = 16 << 20
"""The log of leases: those of 4 million blocks within the time that a lease lasts."""

_ENTRY = struct.Struct(f"<QI4x{DIGEST_BYTES}s")
_TO_START: Final = 0xFFFFFFFF
_ALIGN: Final = 32

_FLOCK = struct.Struct("hhqqi4x")


class Leased(NamedTuple):
    """Leases of a life that may still last: until when, of which slots by namespace, and whether
    these are all that there are."""

    until_ns: int
    slots: dict[bytes, set[int]]
    complete: bool


class LifePage:
    """Which blocks are leased until when, and which storage tiers ledgers speak of.

    A page, and a log of leases that goes round. An entry counts once `end` is behind it, and until
    `start` is: whoever reads it later finds whole ones only.
    """

    def __init__(self, fd: int) -> None:
        """Owns `fd`."""
        self.fd = fd
        self._mapping = mmap.mmap(fd, _PAGE_BYTES + LOG_BYTES)
        # Each is stored in one piece, whenever the process is killed.
        self._fields = np.ndarray((4,), "<u8", self._mapping, _FIELDS_AT)
        self._start, self._end, self._until_ns, self._lost_until_ns = map(int, self._fields)

    @classmethod
    def create(cls, tiers: bytes) -> LifePage:
        """A new one; `tiers` is a digest of what tiers there are, and in which order."""
        fd = os.memfd_create("tierd-life", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _PAGE_BYTES + LOG_BYTES)
            os.pwrite(fd, _HEAD.pack(_MAGIC, _VERSION, tiers), 0)
            return cls(fd)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def read(cls, fd: int) -> LifePage | None:
        """The one in `fd`, which it owns then; None if there is none that can be understood."""
        if os.fstat(fd).st_size != _PAGE_BYTES + LOG_BYTES:
            return None
        magic, version, _ = _HEAD.unpack(os.pread(fd, _HEAD.size, 0))
        return cls(fd) if (magic, version) == (_MAGIC, _VERSION) else None

    @property
    def tiers(self) -> bytes:
        """What `create` was given."""
        tiers: bytes = _HEAD.unpack_from(self._mapping)[2]
        return tiers

    @property
    def until_ns(self) -> int:
        """When the last lease ends, CLOCK_MONOTONIC; 0 if there is none."""
        return self._until_ns

    def lease(self, digest: bytes, slots: Sequence[int], expires_ns: int) -> None:
        """Write down that these slots of a namespace are leased until then."""
        if expires_ns > self._until_ns:
            self._until_ns = expires_ns
            self._fields[2] = expires_ns
        size = _size_of(len(slots))
        if size > LOG_BYTES // 2:
            self._lose(expires_ns)
            return
        place = self._end % LOG_BYTES
        if place + size > LOG_BYTES:
            self._make_room(LOG_BYTES - place)
            _ENTRY.pack_into(self._mapping, _PAGE_BYTES + place, 0, _TO_START, bytes(DIGEST_BYTES))
            self._end += LOG_BYTES - place
            place = 0
        self._make_room(size)
        at = _PAGE_BYTES + place
        _ENTRY.pack_into(self._mapping, at, expires_ns, len(slots), digest)
        at += _ENTRY.size
        self._mapping[at : at + 4 * len(slots)] = struct.pack(f"<{len(slots)}I", *slots)
        self._end += size
        self._fields[1] = self._end

    def no_leases(self) -> None:
        """There is none now."""
        if self._until_ns:
            self._until_ns = self._lost_until_ns = 0
            self._start = self._end
            self._fields[0] = self._start
            self._fields[2:] = 0

    def leased(self, now_ns: int) -> Leased:
        """The leases that have not ended by `now_ns`, given back or not."""
        slots: dict[bytes, set[int]] = {}
        at, end = self._start, self._end
        while at < end:
            place = _PAGE_BYTES + at % LOG_BYTES
            expires_ns, count, digest = _ENTRY.unpack_from(self._mapping, place)
            if count == _TO_START:
                at += LOG_BYTES - at % LOG_BYTES
                continue
            if expires_ns > now_ns:
                found = struct.unpack_from(f"<{count}I", self._mapping, place + _ENTRY.size)
                slots.setdefault(digest, set()).update(found)
            at += _size_of(count)
        return Leased(self._until_ns, slots, self._lost_until_ns <= now_ns)

    def close(self) -> None:
        """Close the descriptor; the mapping goes with this object."""
        os.close(self.fd)

    def _make_room(self, size_bytes: int) -> None:
        """Have the oldest entries go that the next `size_bytes` would be written over."""
        while self._end + size_bytes - self._start > LOG_BYTES:
            place = self._start % LOG_BYTES
            expires_ns, count, _ = _ENTRY.unpack_from(self._mapping, _PAGE_BYTES + place)
            self._lose(expires_ns)
            self._start += LOG_BYTES - place if count == _TO_START else _size_of(count)
        self._fields[0] = self._start

    def _lose(self, expires_ns: int) -> None:
        if expires_ns > self._lost_until_ns:
            self._lost_until_ns = expires_ns
            self._fields[3] = expires_ns


def _size_of(count: int) -> int:
    """Bytes of an entry of so many slots."""
    return -(-(_ENTRY.size + 4 * count) // _ALIGN) * _ALIGN


class Guard:
    """An empty memfd that is locked as long as a process of a life may write to the arena.

    A hold is a descriptor with a shared lock of its own. Wherever copies of it are, in a child,
    in another process, or on the way to one: the lock is there until the last of them is closed.
    """

    def __init__(self, fd: int) -> None:
        """Owns `fd`."""
        self.fd = fd

    @classmethod
    def create(cls) -> Guard:
        """A new one, held by nobody. Raises OSError."""
        return cls(os.memfd_create("tierd-guard", os.MFD_CLOEXEC))

    def hold(self) -> int:
        """A new hold, the caller's to close. Raises OSError."""
        # Locks belong to an open file, so each hold is one; to read it is all that one needs.
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))
        except OSError:
            os.close(fd)
            raise
        return fd

    @property
    def held(self) -> bool:
        """Whether there is a hold anywhere."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        found = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, asked)
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Close the descriptor; holds stay."""
        os.close(self.fd)
