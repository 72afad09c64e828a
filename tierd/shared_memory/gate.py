"""Who may write an engine's pages: agreed in memory that both processes share, not by message.

An engine takes the pages of a load back only once nobody can write to them any more. A message
could not settle that: the daemon may be stopped, with the message unread and a copy about to
begin. So each load has a place in a memfd: which loads have been called off there, and a lock
that the copying process holds while it writes. Whoever gets the lock first wins; the kernel gives
it back when a process dies.

A load that is called off takes its number with it, and all below it in the same place: a stopped
daemon may still have its message, and must find it called off however late that is. So loads are
best numbered upwards for as long as the gate lives.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from typing import Final

GATE_JOBS: Final = 1024
"""Loads that an engine's worker may have under way: load n has place n modulo this."""

_PROGRESS_AT: Final = GATE_JOBS * 8
_SIZE_BYTES: Final = _PROGRESS_AT + GATE_JOBS * 4
_F_ADD_SEALS: Final = 1033
_F_GET_SEALS: Final = 1034
_SEALS: Final = 0x1 | 0x2 | 0x4
_FLOCK = struct.Struct("hhqqi4x")


def make_gate() -> int:
    """A memfd for a gate, sealed against resizing; the caller's to close."""
    fd = os.memfd_create("tierd-gate", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, _SIZE_BYTES)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


class Gate:
    """One process's view of a gate. Two of one process exclude each other, too.

    The engine's side calls `prepare`, `call_off` and `progress`, the copying side `enter`,
    `unwanted`, `advance` and `leave`.
    """

    def __init__(self, fd: int) -> None:
        """Opens the memfd anew: locks belong to an open file, and `fd` may share another's.

        Raises OSError, or ValueError for a file that could be cut while it is mapped.
        """
        if fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size != _SIZE_BYTES:
            raise ValueError("this descriptor is not a sealed gate")
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
        """Give the view up, and every lock that it holds."""
        self._called_off.release()
        self._progress.release()
        self._map.close()
        os.close(self._fd)

    # The engine's side

    def prepare(self, job: int) -> None:
        """A load is about to be sent under this number, and the one before in its place is over.

        Raises ValueError for a number that has been called off.
        """
        if self.unwanted(job):
            raise ValueError(f"load {job} has been called off, and its number is spent")
        self._progress[_place(job)] = 0

    def call_off(self, job: int) -> bool:
        """Keep a load from writing; False while it is writing, which is when to ask again.

        After True no process writes a page of it, now or later. After False it may still come
        to its end, but is stopped as soon as can be.
        """
        place = _place(job)
        self._called_off[place] = max(job + 1, self._called_off[place])
        if not self._lock(place, fcntl.F_WRLCK):
            return False
        self._lock(place, fcntl.F_UNLCK)
        return True

    def progress(self, job: int) -> int:
        """How many layer groups of a load are in place."""
        return self._progress[_place(job)]

    # The copying side

    def enter(self, job: int) -> bool:
        """Begin to write a load's pages; False if it has been called off, or is being so.

        Also while another load is in its place: this view's lock would not keep them apart.
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
        """Whether a load has been called off; if it has been entered, leave it soon."""
        return self._called_off[_place(job)] > job

    def advance(self, job: int, groups: int) -> None:
        """So many layer groups of a load are in place."""
        self._progress[_place(job)] = groups

    def leave(self, job: int) -> None:
        """Nothing more is written by a load that has been entered."""
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
