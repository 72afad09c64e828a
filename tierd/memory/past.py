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
from typing import Final

from tierd.types import DIGEST_BYTES

_MAGIC: Final = b"TIERDLIF"
_VERSION: Final = 1
_PAGE = struct.Struct(f"<8sI4xQ{DIGEST_BYTES}s")
_LEASED_UNTIL = struct.Struct("<Q")
_LEASED_UNTIL_AT: Final = 16
_PAGE_BYTES: Final = 4096

_FLOCK = struct.Struct("hhqqi4x")


class LifePage:
    """A page that says until when leases last, and which storage tiers ledgers speak of."""

    def __init__(self, fd: int) -> None:
        """Owns `fd`."""
        self.fd = fd
        self._mapping = mmap.mmap(fd, _PAGE_BYTES)

    @classmethod
    def create(cls, tiers: bytes) -> LifePage:
        """A new one; `tiers` is a digest of what tiers there are, and in which order."""
        fd = os.memfd_create("tierd-life", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _PAGE_BYTES)
            os.pwrite(fd, _PAGE.pack(_MAGIC, _VERSION, 0, tiers), 0)
            return cls(fd)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def read(cls, fd: int) -> LifePage | None:
        """The one in `fd`, which it owns then; None if there is none that can be understood."""
        if os.fstat(fd).st_size != _PAGE_BYTES:
            return None
        magic, version, _, _ = _PAGE.unpack(os.pread(fd, _PAGE.size, 0))
        return cls(fd) if (magic, version) == (_MAGIC, _VERSION) else None

    @property
    def leased_until_ns(self) -> int:
        """When the last lease ends, CLOCK_MONOTONIC; 0 if there is none."""
        until: int = _LEASED_UNTIL.unpack_from(self._mapping, _LEASED_UNTIL_AT)[0]
        return until

    @leased_until_ns.setter
    def leased_until_ns(self, until: int) -> None:
        _LEASED_UNTIL.pack_into(self._mapping, _LEASED_UNTIL_AT, until)

    @property
    def tiers(self) -> bytes:
        """What `create` was given."""
        tiers: bytes = _PAGE.unpack_from(self._mapping)[3]
        return tiers

    def close(self) -> None:
        """Close the descriptor."""
        self._mapping.close()
        os.close(self.fd)


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
