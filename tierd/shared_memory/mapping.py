"""Shared mappings of memfds, for the daemon and its clients.

Writing to a fresh mapping of 4 KiB pages faults them in at a tenth of the speed of memcpy, so both
sides populate mappings before use. `mmap.madvise` holds the GIL for the whole range (0.7 s per
GiB); the call through ctypes does not.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from typing import NamedTuple

_MADV_REMOVE = 9
_MADV_DONTDUMP = 16
_MADV_POPULATE_WRITE = 23

POPULATE_CHUNK_BYTES = 16 << 20
"""Bytes populated by one call. It takes about 10 ms, the longest wait of a stop or a request."""

_serials = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class ViewPlace(NamedTuple):
    """Where a view lies, for a process that maps the same memfd."""

    serial: int
    """Number of the mapping in this process. It is never reused, unlike a descriptor's number."""
    fd: int
    size_bytes: int
    offset: int


class _SharedMmap(mmap.mmap):
    """A mapping with its descriptor, so that another process can find the place of a view."""

    serial: int
    fd: int
    address: int


def place_of(view: memoryview) -> ViewPlace:
    """Return the place of a writable view that was cut from a `SharedMapping.view`."""
    shared = view.obj
    assert isinstance(shared, _SharedMmap)
    offset = ctypes.addressof(ctypes.c_char.from_buffer(view)) - shared.address
    return ViewPlace(shared.serial, shared.fd, len(shared), offset)


class SharedMapping:
    """A read-write shared mapping of `size_bytes` of a memfd.

    It owns the mapping, not the descriptor, which must stay open while the mapping is used.
    """

    __slots__ = ("_address", "_inode", "_mmap", "populated_bytes", "size_bytes", "view")

    def __init__(self, fd: int, size_bytes: int) -> None:
        found = os.fstat(fd)
        if found.st_size < size_bytes:
            # Touching a page past the end of the file would raise SIGBUS.
            raise ValueError(
                f"the segment has {found.st_size} bytes, not the {size_bytes} that were declared"
            )
        self._inode = found.st_dev, found.st_ino
        self._mmap = _SharedMmap(fd, size_bytes)
        self.size_bytes = size_bytes
        self.view = memoryview(self._mmap)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mmap))
        self._mmap.serial = next(_serials)
        self._mmap.fd = fd
        self._mmap.address = self._address
        self.populated_bytes = 0
        # Otherwise a crash would dump the arena to a core file, and hold its slots for minutes.
        self._advise(0, size_bytes, _MADV_DONTDUMP)

    def is_of(self, fd: int) -> bool:
        """Whether this maps the file that `fd` refers to."""
        found = os.fstat(fd)
        return self._inode == (found.st_dev, found.st_ino)

    @property
    def serial(self) -> int:
        """Number of this mapping in this process; never reused."""
        return self._mmap.serial

    @property
    def address(self) -> int:
        """Start address of the mapping in this process."""
        return self._address

    def populate_next(self) -> bool:
        """Fault in the next chunk without the GIL. Returns True while more remains.

        Raises OSError (ENOMEM) if memory is exhausted.
        """
        offset = self.populated_bytes
        if offset >= self.size_bytes:
            return False
        length = min(POPULATE_CHUNK_BYTES, self.size_bytes - offset)
        self._advise(offset, length, _MADV_POPULATE_WRITE)
        self.populated_bytes = offset + length
        return self.populated_bytes < self.size_bytes

    def give_back(self) -> None:
        """Decommit the memory; the mapping stays valid and reads as zeros."""
        self._advise(0, self.size_bytes, _MADV_REMOVE)
        self.populated_bytes = 0

    def advise(self, advice: int) -> None:
        """Call madvise(2) for the whole mapping. Raises OSError."""
        self._advise(0, self.size_bytes, advice)

    def _advise(self, offset: int, length: int, advice: int) -> None:
        if _libc.madvise(self._address + offset, length, advice) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
