"""Table of pinned host memory and its addresses on the GPU."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from tierd.device.api import Addresses


class Pins:
    """Pinned stretches of host memory; thread-safe, and `seen` takes no lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pinned: dict[int, tuple[int, int]] = {}
        self._sort()

    def add(self, address: int, size_bytes: int, seen_at: int) -> None:
        """Add a pinned stretch; `seen_at` is its address on the GPU."""
        with self._lock:
            self._pinned[address] = size_bytes, (seen_at - address) % (1 << 64)
            self._sort()

    def remove(self, address: int) -> None:
        """Remove the stretch that begins at `address`; call it before unpinning."""
        with self._lock:
            del self._pinned[address]
            self._sort()

    def starts(self) -> list[int]:
        """Return the start address of each stretch."""
        with self._lock:
            return list(self._pinned)

    def seen(self, slots: Addresses, sizes: Addresses) -> tuple[Addresses, npt.NDArray[np.bool_]]:
        """Return the slots' addresses on the GPU, and which slots lie within one stretch."""
        begins, ends, shifts = self._table
        if not begins.size:
            return slots, np.zeros(slots.size, np.bool_)
        at = np.searchsorted(begins, slots, side="right")
        pinned = (at > 0) & (slots + sizes <= ends[at - 1])
        return slots + np.where(pinned, shifts[at - 1], np.uint64(0)), pinned

    def _sort(self) -> None:
        """Replace the table as a whole, because `seen` takes no lock."""
        rows = sorted((begin, begin + size, shift) for begin, (size, shift) in self._pinned.items())
        self._table = np.array(rows, np.uint64).reshape(-1, 3).T
