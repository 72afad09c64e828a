"""The health of a file tier's disk, as the tier's calls find it: errors, damage, and whether the
disk takes writes. Every error is counted; a batch logs one line for its errors and one for each
kind of damage.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Sequence
from typing import Final

from tierd_backends.common.second_read import DamageSite
from tierd_backends.file.directory import StoreDirectory
from tierd_backends.file.jobs import FileJob
from tierd_backends.file.threads import DiskThreads

WRITE_AGAIN_S: Final = 10.0
"""Pause before the tier writes again after EROFS."""

OURS_S: Final = 1.0
"""Shortest time between two checks that the tier still has its directory: about one batch."""

_DAMAGE: Final = {
    DamageSite.STORED: "are damaged on disk (two reads gave the same wrong bytes): dropped",
    DamageSite.TRANSIT: "were damaged in reading, not on disk: check cables and memory",
    DamageSite.UNKNOWN: "were read damaged, and could not be read again: kept",
}

_log = logging.getLogger("tierd_backends.file")


class DiskHealth:
    """Belongs to the event loop."""

    def __init__(
        self, directory: StoreDirectory, threads: DiskThreads, counters: dict[str, int]
    ) -> None:
        self.trouble = ""
        """Text of the last disk error."""
        self.unread: list[str] = []
        """Slabs and indexes that could not be read at start: they may hold blocks."""
        self._directory = directory
        self._threads = threads
        self._counters = counters
        self._ours_until = 0.0
        self._write_after = 0.0

    @property
    def writable(self) -> bool:
        """False on a read-only disk: each failed put would evict a block for nothing."""
        now = asyncio.get_running_loop().time()
        return not self._directory.read_only and now >= self._write_after

    async def check_ours(self) -> None:
        """Raise BackendError if the tier has lost its directory; checks every OURS_S at most."""
        now = asyncio.get_running_loop().time()
        if now < self._ours_until:
            return
        await self._threads.result(self._threads.writers, self._directory.check_ours)
        self._ours_until = now + OURS_S

    def note_error(self, error: OSError) -> None:
        """Count a disk error. After EROFS, stop writing for WRITE_AGAIN_S."""
        self._counters["io_errors_total"] += 1
        self.trouble = str(error)
        if error.errno == errno.EROFS:
            self._write_after = asyncio.get_running_loop().time() + WRITE_AGAIN_S

    def note_errors(self, action: str, jobs: Sequence[FileJob]) -> list[OSError]:
        """Count a batch's errors, and log one line for them. Returns the errors."""
        failed = [job for job in jobs if job.error is not None]
        errors = [job.error for job in failed if job.error is not None]
        for error in errors:
            self.note_error(error)
        if errors:
            where = f"{failed[0].slab.folder}/{failed[0].slab.number:08d}.slab"
            _log.warning("cannot %s %d blocks, in %s: %s", action, len(errors), where, errors[0])
        return errors

    def note_damage(self, jobs: Sequence[FileJob]) -> None:
        """Count the damaged reads of a batch, and log one line for each kind."""
        for fault, what in _DAMAGE.items():
            hit = [job for job in jobs if job.fault is fault]
            self._counters[fault.counter] += len(hit)
            if hit:
                _log.warning(
                    "%d records %s, such as %d of %s/%08d.slab for block %s",
                    len(hit),
                    what,
                    hit[0].record,
                    hit[0].slab.folder,
                    hit[0].slab.number,
                    hit[0].block_hash.hex(),
                )
