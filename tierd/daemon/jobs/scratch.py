"""Temporary memory for blocks that are read to be verified, or to be copied between tiers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

from tierd.shared_memory.mapping import SharedMapping


class Scratch:
    """Page-aligned shared memory to read into. Grows to the largest batch."""

    def __init__(self) -> None:
        self._fd = -1
        self._view = memoryview(b"")

    def views(self, sizes_bytes: Sequence[int]) -> list[memoryview]:
        """Return a slot for each size; the slots of the previous call are no longer valid."""
        total = sum(sizes_bytes)
        if total > len(self._view):
            self.close()
            self._fd = os.memfd_create("tierd-scratch", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, total)
            self._view = SharedMapping(self._fd, total).view
        ends = list(accumulate(sizes_bytes))
        return [self._view[end - size : end] for end, size in zip(ends, sizes_bytes, strict=True)]

    def close(self) -> None:
        """Release the memory; there must be no view in use."""
        self._view = memoryview(b"")
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@contextmanager
def scratch_memory() -> Iterator[Scratch]:
    """Provide temporary memory, released when the context ends."""
    scratch = Scratch()
    try:
        yield scratch
    finally:
        scratch.close()
