"""Which host memory is pinned, and where a GPU sees it."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from tierd.device.api import Addresses


class Pins:
    """Stretches of host memory that come and go while other threads ask about them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pinned: dict[int, tuple[int, int]] = {}
        self._sort()

    def add(self, address: int, size_bytes: int, seen_at: int) -> None:
        """A stretch has been pinned, and the GPU sees it at another address, or the same."""
        with self._lock:
            self._pinned[address] = size_bytes, (seen_at - address) % (1 << 64)
            self._sort()

    def remove(self, address: int) -> None:
        """What begins there is about to be unpinned."""
        with self._lock:
            del self._pinned[address]
            self._sort()

    def starts(self) -> list[int]:
        """Where each stretch begins."""
        with self._lock:
            return list(self._pinned)

    def seen(self, slots: Addresses, sizes: Addresses) -> tuple[Addresses, npt.NDArray[np.bool_]]:
        """The slots as the GPU sees them, and which of them lie within one stretch."""
        begins, ends, shifts = self._table
        if not begins.size:
            return slots, np.zeros(slots.size, np.bool_)
        at = np.searchsorted(begins, slots, side="right")
        pinned = (at > 0) & (slots + sizes <= ends[at - 1])
        return slots + np.where(pinned, shifts[at - 1], np.uint64(0)), pinned

    def _sort(self) -> None:
        """Replaces the table as a whole: `seen` takes no lock."""
        rows = sorted((begin, begin + size, shift) for begin, (size, shift) in self._pinned.items())
        self._table = np.array(rows, np.uint64).reshape(-1, 3).T
