"""The engine's side of the host device, for engines on CPUs: exported memory and its events.

This module imports nothing of the daemon.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from typing import Final

from tierd.shared_memory.exports import HOST_UUID, Export, ExportKind, Part, counter_handle

_F_ADD_SEALS: Final = 1033
_SEALS: Final = 0x1 | 0x2 | 0x4


class HostExport:
    """Zeroed host memory that another process can map: a memfd sealed against resizing.

    Owns the memory and the descriptor in `export`.
    """

    def __init__(self, size_bytes: int) -> None:
        """Raises OSError."""
        fd = os.memfd_create("tierd-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(fd, size_bytes)
        except OSError:
            os.close(fd)
            raise
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.view = memoryview(self._map)
        self.export = Export(
            ExportKind.MEMFD, HOST_UUID, size_bytes, b"", (Part(0, size_bytes, fd),)
        )
        # An owner that cannot close it, because a view is in use, leaks no descriptor.
        self._close_fd = weakref.finalize(self, os.close, fd)

    def close(self) -> None:
        """Unmap the memory. Raises BufferError while a view of it is in use."""
        self.view.release()
        self._map.close()
        self._close_fd()


class HostEvent:
    """An event in 8 bytes of exported memory, which count how often it has happened."""

    def __init__(self, memory: HostExport, export: int, offset: int) -> None:
        """`export` is the index of `memory` in a layout's exports; `offset` is a multiple of 8."""
        self.handle = counter_handle(export, offset)
        self._counter = ctypes.c_uint64.from_address(memory.address + offset)
        self._memory = memory
        self._promised = self._counter.value

    def promise(self) -> int:
        """Return the value for a copy that has to wait for the next `record`."""
        self._promised += 1
        return self._promised

    def record(self) -> int:
        """Let the event happen once; return its value.

        A copy that waits for this value sees all writes made before the call. The call keeps the
        oldest open promise, if there is one.
        """
        self._promised = max(self._promised, self._counter.value + 1)
        self._counter.value += 1
        return self._counter.value
