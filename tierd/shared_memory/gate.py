"""The gate: shared memory in which an engine and a copy process agree who may write its pages.

An engine reuses the pages of a load only once no process can write to them. A message cannot
ensure that: the daemon may be stopped with the message unread and a copy about to begin. So each
load has a place in a memfd, with a record of called-off loads and a lock that the copy process
holds while it writes. The first process to get the lock wins; the kernel releases the lock when a
process dies.

Calling off a load also uses up its number, and all lower numbers of the same place: a stopped
daemon may still have its message, and must find the load called off, however late it is. So number
loads upwards during the whole life of the gate.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from typing import Final

GATE_JOBS: Final = 1024
"""Places of a gate, and most loads in progress: load n has place n modulo this number."""

_PROGRESS_AT: Final = GATE_JOBS * 8
_SIZE_BYTES: Final = _PROGRESS_AT + GATE_JOBS * 4
_F_ADD_SEALS: Final = 1033
_F_GET_SEALS: Final = 1034
_SEALS: Final = 0x1 | 0x2 | 0x4
_FLOCK = struct.Struct("hhqqi4x")


def make_gate() -> int:
    """Return a memfd for a gate, sealed against resizing. The caller must close it."""
    fd = os.memfd_create("tierd-gate", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, _SIZE_BYTES)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


class Gate:
    """One view of a gate. Views exclude each other, even within one process.

    The engine's side calls `prepare`, `call_off` and `progress`; the copying side calls `enter`,
    `unwanted`, `advance` and `leave`.
    """

    def __init__(self, fd: int) -> None:
        """Open the memfd again: locks belong to an open file, and `fd` may share another view's.

        Raises OSError, or ValueError for a file that could shrink while it is mapped.
        """
        if fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size != _SIZE_BYTES:
            raise ValueError("the descriptor is not a sealed gate: use one from make_gate()")
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(self._fd, _SIZE_BYTES)
        except OSError:
            os.close(self._fd)
            raise
        self._held: set[int] = set()
        self._called_off = memoryview(self._map)[:_PROGRESS_AT].cast("Q")
        self._progress = memoryview(self._map)[_PROGRESS_AT:].cast("I")

    def close(self) -> None:
        """Close the view and release every lock that it holds."""
        self._called_off.release()
        self._progress.release()
        self._map.close()
        os.close(self._fd)

    # The engine's side

    def prepare(self, job: int) -> None:
        """Prepare for sending a load with this number. The previous load of its place must be over.

        Raises ValueError for a number that has been called off.
        """
        if self.unwanted(job):
            raise ValueError(f"load {job} has been called off: use a number that is not used up")
        self._progress[_place(job)] = 0

    def call_off(self, job: int) -> bool:
        """Call a load off. Returns False while it is being written; call again then.

        After True no process writes its pages, now or later. After False the load may still
        complete, but the copying side stops it as soon as possible.
        """
        place = _place(job)
        self._called_off[place] = max(job + 1, self._called_off[place])
        if not self._lock(place, fcntl.F_WRLCK):
            return False
        self._lock(place, fcntl.F_UNLCK)
        return True

    def progress(self, job: int) -> int:
        """Return the number of layer groups of a load that are loaded."""
        return self._progress[_place(job)]

    # The copying side

    def enter(self, job: int) -> bool:
        """Begin to write a load's pages. Returns False if it has been, or is being, called off.

        Also returns False while another load is in its place: one view's lock cannot separate them.
        """
        place = _place(job)
        if place in self._held or not self._lock(place, fcntl.F_WRLCK):
            return False
        if self.unwanted(job):
            self._lock(place, fcntl.F_UNLCK)
            return False
        self._held.add(place)
        return True

    def unwanted(self, job: int) -> bool:
        """Whether a load has been called off; a load that was entered must then be left soon."""
        return self._called_off[_place(job)] > job

    def advance(self, job: int, groups: int) -> None:
        """Record that `groups` layer groups of a load are loaded."""
        self._progress[_place(job)] = groups

    def leave(self, job: int) -> None:
        """End the writing of a load that was entered."""
        self._held.remove(_place(job))
        self._lock(_place(job), fcntl.F_UNLCK)

    def _lock(self, place: int, kind: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, place, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True


def _place(job: int) -> int:
    if job < 0:
        raise ValueError(f"loads are numbered from 0 upwards, not {job}")
    return job % GATE_JOBS
