"""Host memory as a device, for engines on CPUs and for tests of the copying code.

Peers' allocations are memfds, and streams are threads. Order, events and pinning obey CUDA's
rules even where host memory needs no such rule, so that code which works here works on a GPU.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tierd.device.api import Addresses, CannotOpenError, Device, DeviceError, Direction, Pitched
from tierd.shared_memory.exports import HOST_UUID, Export, ExportKind, counter_of, device_text

_F_GET_SEALS: Final = 1034
_F_SEAL_SHRINK: Final = 0x2
_SHORT_BYTES: Final = 32 << 10
"""A piece below this size is copied in less time than it takes to get the GIL back."""
_POLL_MIN_S: Final = 50e-6
_POLL_MAX_S: Final = 1e-3
_COUNTER_BYTES: Final = 8

_memmove_free = ctypes.CDLL(None).memmove
_memmove_held = ctypes.PyDLL(None).memmove
for _function in (_memmove_free, _memmove_held):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _function.restype = None


class HostDevice(Device):
    """Host memory. Pieces of about 32 KiB and more are copied at the speed of memcpy."""

    uuid = HOST_UUID
    name = "host"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._opened: dict[tuple[int, int], _Opened] = {}
        self._allocated: dict[int, mmap.mmap] = {}
        self._pinned: dict[int, int] = {}
        self._pin_starts: Addresses = np.empty(0, np.uint64)
        self._pin_ends: Addresses = np.empty(0, np.uint64)
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, _Event | _Counter] = {}

    # --- memory ---------------------------------------------------------------------

    def open(self, export: Export) -> int:
        fd = _memfd_of(export)
        status = os.fstat(fd)
        if status.st_size != export.size_bytes:
            raise CannotOpenError(
                f"the engine exported {export.size_bytes} bytes as a memfd of {status.st_size}"
            )
        with self._lock:
            opened = self._opened.get((status.st_dev, status.st_ino))
            if opened is None:
                try:
                    memory = mmap.mmap(fd, export.size_bytes)
                except OSError as error:
                    raise CannotOpenError(f"cannot map the engine's memfd: {error}") from error
                opened = _Opened(memory, _address_of(memory), 0)
                self._opened[status.st_dev, status.st_ino] = opened
            opened.uses += 1
            return opened.address

    def close(self, address: int) -> None:
        with self._lock:
            keys = [key for key, opened in self._opened.items() if opened.address == address]
            if not keys:
                raise DeviceError(f"nothing is open at {address:#x}")
            opened = self._opened[keys[0]]
            opened.uses -= 1
            if not opened.uses:
                del self._opened[keys[0]]
                opened.memory.close()

    def allocate(self, size_bytes: int) -> int:
        try:
            memory = mmap.mmap(-1, size_bytes)
        except OSError as error:
            raise DeviceError(f"cannot allocate {size_bytes} bytes: {error}") from error
        address = _address_of(memory)
        with self._lock:
            self._allocated[address] = memory
        return address

    def free(self, address: int) -> None:
        with self._lock:
            memory = self._allocated.pop(address, None)
        if memory is None:
            raise DeviceError(f"nothing is allocated at {address:#x}")
        memory.close()

    def pin(self, address: int, size_bytes: int) -> None:
        """Record the pin only; a copy across the end of a pinned stretch fails as on a GPU."""
        with self._lock:
            end = address + size_bytes
            if any(start < end and address < stop for start, stop in self._pinned.items()):
                raise DeviceError(f"memory at {address:#x} is pinned already")
            self._pinned[address] = end
            self._know_pins()

    def unpin(self, address: int) -> None:
        with self._lock:
            if self._pinned.pop(address, None) is None:
                raise DeviceError(f"nothing is pinned at {address:#x}")
            self._know_pins()

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that are pinned."""
        with self._lock:
            return sum(end - start for start, end in self._pinned.items())

    def _know_pins(self) -> None:
        starts = sorted(self._pinned)
        self._pin_starts = np.array(starts, np.uint64)
        self._pin_ends = np.array([self._pinned[start] for start in starts], np.uint64)

    # --- order ----------------------------------------------------------------------

    def create_stream(self, *, urgent: bool) -> int:
        number = next(self._numbers)
        stream = _Stream(f"tierd-{'urgent' if urgent else 'stream'}-{number}")
        with self._lock:
            self._streams[number] = stream
        return number

    def create_event(self) -> int:
        return self._new_event(_Event())

    def open_event(self, handle: bytes, bases: list[int]) -> int:
        place = counter_of(handle)
        if place is None:
            raise CannotOpenError("host memory has counters for events, not a GPU's handles")
        export, offset = place
        with self._lock:
            sizes = {x.address: len(x.memory) for x in self._opened.values()}
        if export >= len(bases) or offset + _COUNTER_BYTES > sizes.get(bases[export], 0):
            raise CannotOpenError(
                f"an event's counter is at byte {offset} of allocation {export}, which is outside "
                "of the exported memory"
            )
        if offset % _COUNTER_BYTES:
            raise CannotOpenError(
                f"an event's counter is at byte {offset}, not at a multiple of {_COUNTER_BYTES}"
            )
        return self._new_event(_Counter(bases[export] + offset))

    def _new_event(self, event: _Event | _Counter) -> int:
        number = next(self._numbers)
        self._events[number] = event
        return number

    def close_event(self, event: int) -> None:
        """Close an event; a stream that waits for a peer's event continues."""
        closed = self._events.pop(event)
        if isinstance(closed, _Counter):
            with closed.lock:
                closed.closed = True

    def record(self, event: int, stream: int) -> None:
        recorded = self._events[event]
        assert isinstance(recorded, _Event), "a peer's events are recorded by the peer"
        record = threading.Event()
        recorded.newest = record
        self._streams[stream].add(record.set)

    def query(self, event: int) -> bool:
        queried = self._events[event]
        assert isinstance(queried, _Event), "a peer's counter happens for a value only"
        return queried.newest is None or queried.newest.is_set()

    def wait(self, stream: int, event: int, value: int) -> None:
        waited = self._events[event]
        if isinstance(waited, _Counter):
            self._streams[stream].add_wait(lambda: waited.reached(value))
        elif waited.newest is not None:
            self._streams[stream].add_wait(waited.newest.is_set)

    # --- copies ---------------------------------------------------------------------

    def copy(
        self,
        pages: Addresses,
        slots: Addresses,
        lengths: Addresses,
        direction: Direction,
        stream: int,
    ) -> None:
        self._check_pins(slots, slots + lengths)
        into, source = (pages, slots) if direction is Direction.LOAD else (slots, pages)
        pieces = (into.tolist(), source.tolist(), lengths.tolist())
        self._streams[stream].add(lambda: _copy(*pieces))

    def copy_pitched(self, pieces: list[Pitched], direction: Direction, stream: int) -> None:
        if not pieces:
            return
        fields = np.array(pieces, np.uint64)
        starts = fields[:, 2]
        self._check_pins(
            starts, starts + fields[:, 3] * (fields[:, 5] - np.uint64(1)) + fields[:, 4]
        )
        pieces = list(pieces)
        self._streams[stream].add(lambda: _copy_pitched(pieces, direction))

    def gather(
        self, pages: Addresses, lengths: Addresses, staging: int, direction: Direction, stream: int
    ) -> None:
        staged = np.cumsum(lengths) - lengths + np.uint64(staging)
        into, source = (pages, staged) if direction is Direction.LOAD else (staged, pages)
        pieces = (into.tolist(), source.tolist(), lengths.tolist())
        self._streams[stream].add(lambda: _copy(*pieces))

    def _check_pins(self, starts: Addresses, ends: Addresses) -> None:
        with self._lock:
            pin_starts, pin_ends = self._pin_starts, self._pin_ends
        if not len(pin_starts):
            return
        first = np.searchsorted(pin_starts, starts, side="right")
        last = np.searchsorted(pin_starts, ends - np.uint64(1), side="right")
        within = (first > 0) & (starts < pin_ends[first - 1])
        if np.any((first != last) | (within & (ends > pin_ends[first - 1]))):
            raise DeviceError("a copy crosses the end of memory that was pinned as a whole")

    def shut(self) -> None:
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            stream.shut()
        with self._lock:
            self._streams.clear()
            self._events.clear()
            for opened in self._opened.values():
                opened.memory.close()
            for memory in self._allocated.values():
                memory.close()
            self._opened.clear()
            self._allocated.clear()
            self._pinned.clear()
            self._know_pins()


@dataclass(slots=True)
class _Opened:
    memory: mmap.mmap
    address: int
    uses: int


class _Event:
    """An event of this process: it has happened when its newest record, if any, has happened."""

    newest: threading.Event | None = None


class _Counter:
    """A peer's event: a 64-bit counter in shared memory, which only grows."""

    def __init__(self, address: int) -> None:
        self.lock = threading.Lock()
        """Held while the counter is read; its memory is unmapped only after `closed` was set."""
        self.closed = False
        self._value = ctypes.c_uint64.from_address(address)

    def reached(self, value: int) -> bool:
        with self.lock:
            return self.closed or self._value.value >= value


class _Stream:
    """A thread that does its work in order."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._shut = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def add_wait(self, happened: Callable[[], bool]) -> None:
        if not happened():
            self._work.put(lambda: self._wait(happened))

    def shut(self) -> None:
        """End the thread; work that has not begun is dropped."""
        self._shut = True
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None and not self._shut:
            work()

    def _wait(self, happened: Callable[[], bool]) -> None:
        pause = _POLL_MIN_S
        while not happened() and not self._shut:
            time.sleep(pause)
            pause = min(2 * pause, _POLL_MAX_S)


def _memfd_of(export: Export) -> int:
    if export.kind is not ExportKind.MEMFD or export.device != HOST_UUID:
        raise CannotOpenError(
            f"the export is memory of {device_text(export.device)}, a GPU that this node does not "
            "have"
        )
    if len(export.parts) != 1 or export.parts[0][:2] != (0, export.size_bytes):
        raise CannotOpenError(
            f"the export has {len(export.parts)} parts: host memory is exported as one part, a "
            f"memfd of all {export.size_bytes} bytes"
        )
    fd = export.parts[0].fd
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError as error:
        raise CannotOpenError(f"host memory has to be a memfd: {error}") from error
    if not seals & _F_SEAL_SHRINK:
        # The engine could truncate it, and this process would die of SIGBUS.
        raise CannotOpenError("the engine's memfd is not sealed against shrinking")
    return fd


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _copy(into: list[int], source: list[int], lengths: list[int]) -> None:
    for target, origin, length in zip(into, source, lengths, strict=True):
        if length < _SHORT_BYTES:
            _memmove_held(target, origin, length)
        else:
            _memmove_free(target, origin, length)


def _copy_pitched(pieces: list[Pitched], direction: Direction) -> None:
    for piece in pieces:
        pages = _rows(piece.page, piece.page_pitch, piece.width, piece.rows)
        slots = _rows(piece.slot, piece.slot_pitch, piece.width, piece.rows)
        if direction is Direction.LOAD:
            pages[:] = slots
        else:
            slots[:] = pages


def _rows(address: int, pitch: int, width: int, rows: int) -> npt.NDArray[np.void]:
    """Return rows as an array of an opaque type: one assignment copies them without the GIL."""
    span = pitch * (rows - 1) + width
    memory = (ctypes.c_char * span).from_address(address)
    return np.ndarray(rows, np.dtype((np.void, width)), memoryview(memory), 0, (pitch,))
