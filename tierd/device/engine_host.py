"""The engine's side of the host device: memory that the daemon may copy, and events for it.

For engines on CPUs: it needs nothing of the daemon.
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
    """Host memory, zeroed, that another process can map: a memfd sealed against resizing.

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
        # Whoever drops it while a view is in use, and so without closing it, leaks nothing.
        self._close_fd = weakref.finalize(self, os.close, fd)

    def close(self) -> None:
        """Unmap it. Raises BufferError while a view of it is in use."""
        self.view.release()
        self._map.close()
        self._close_fd()


class HostEvent:
    """An event in 8 bytes of exported memory: a counter of how often it has happened."""

    def __init__(self, memory: HostExport, export: int, offset: int) -> None:
        """`export` is the number of `memory` among a layout's; `offset` is a multiple of 8."""
        self.handle = counter_handle(export, offset)
        self._counter = ctypes.c_uint64.from_address(memory.address + offset)
        self._memory = memory
        self._promised = self._counter.value

    def promise(self) -> int:
        """The value to name in a copy that has to wait for the next `record`."""
        self._promised += 1
        return self._promised

    def record(self) -> int:
        """All that was written before it can be seen by a copy that waits for what it returns.

        Keeps one promise if there are any, the oldest first.
        """
        self._promised = max(self._promised, self._counter.value + 1)
        self._counter.value += 1
        return self._counter.value
