"""CUDA in host memory, with the rules that tierd relies on; fake_cuda_calls has its functions.

Two processes can share its memory and events. It is as strict as a GPU where leniency would hide an
error: a thread needs a context, host memory in a batch has to be pinned in one call, an event waits
for its newest record, a batch of order ANY reads its sources at once, and an invalid address breaks
the context permanently.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import itertools
import os
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from cuda.bindings import driver as bindings

HANDLE = struct.Struct("<IIQ48x")
HOST_VIEW = 1 << 52
"""Where the GPU sees pinned memory, if it does not use host addresses."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def munmap(address: int, size: int) -> None:
    """Unmap addresses and everything in them."""
    _libc.munmap(address, size)


def mmap(size: int, fd: int, at: int = 0) -> int:
    """Shared memory of a descriptor, or private memory without one, at a given address."""
    flags = (0x01 if fd >= 0 else 0x22) | (0x10 if at else 0)
    address = _libc.mmap(at or None, size, 0x3, flags, fd, 0)
    assert address != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    return int(address)


@dataclass
class Area:
    """Memory that is known to the GPU."""

    address: int
    size: int
    fd: int
    kind: str
    """malloc, pool, managed, opened, reserved, or chunk (part of a reserved area)."""
    handle_types: int = 0


class FakeCuda:
    """The GPUs of one process."""

    def __init__(self, uuids: list[bytes], *, host_pointers: bool = True) -> None:
        self.uuids = uuids
        self.host_pointers = host_pointers
        self.pitch_max = (1 << 31) - 1
        self.fail: dict[str, int] = {}
        """The next call of a function fails with this result."""
        self.broken = 0
        self.ordinals: set[int] = set()
        """Devices that have been made current."""
        self.calls: collections.Counter[str] = collections.Counter()
        self.areas: dict[int, Area] = {}
        self.pinned: dict[int, int] = {}
        self.events: dict[int, tuple[np.ndarray, int]] = {}
        self.streams: dict[int, collections.deque[Callable[[], bool]]] = {}
        self.opened: collections.Counter[int] = collections.Counter()
        self.lock = threading.RLock()
        self.local = threading.local()
        self._numbers = itertools.count(0x1000, 16)
        self._descriptors: dict[int, int] = {}
        self._stopped = False
        self._news = threading.Event()
        self.batch_entry = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_size_t] * 8)(self.batch)
        threading.Thread(target=self._work, daemon=True).start()

    def stop(self) -> None:
        """Stop working on the streams."""
        self._stopped = True
        self._news.set()

    def number(self) -> int:
        return next(self._numbers)

    # Streams

    def _work(self) -> None:
        while not self._stopped:
            self._news.wait()
            with self.lock:
                for work in self.streams.values():
                    while work and not self.broken and work[0]():
                        work.popleft()
                if not any(self.streams.values()):
                    self._news.clear()
            time.sleep(100e-6)

    def put(self, stream: int, work: Callable[[], object]) -> None:
        """Put work that takes no time on a stream."""
        self.put_wait(stream, lambda: (work(), True)[1])

    def put_wait(self, stream: int, done: Callable[[], bool]) -> None:
        with self.lock:
            self.streams.setdefault(stream, collections.deque()).append(done)
            self._news.set()

    def delay(self, stream: int, seconds: float) -> None:
        """Put a long-running kernel on a stream."""
        end: list[float] = []

        def done() -> bool:
            end[:] = end or [time.monotonic() + seconds]
            return time.monotonic() >= end[0]

        self.put_wait(stream, done)

    def idle(self, stream: int) -> bool:
        with self.lock:
            return not self.streams.get(stream)

    def synchronize(self) -> None:
        while not all(map(self.idle, list(self.streams))) and not self.broken:
            time.sleep(100e-6)

    # Memory

    def allocate(self, size: int, kind: str, handle_types: int = 0) -> int:
        fd = os.memfd_create(kind)
        os.ftruncate(fd, size)
        address = mmap(size, fd)
        self.areas[address] = Area(address, size, fd, kind, handle_types)
        return address

    def expandable(self, chunk: int, count: int, handle_types: int = 1) -> int:
        """Reserved addresses, of which `count` chunks are mapped and one is not."""
        base = mmap(chunk * (count + 1), -1)
        for at in range(base, base + chunk * count, chunk):
            fd = os.memfd_create("chunk")
            os.ftruncate(fd, chunk)
            mmap(chunk, fd, at)
            self.areas[at] = Area(at, chunk, fd, "chunk", handle_types)
        return base

    def drop(self, address: int) -> None:
        area = self.areas.pop(address)
        munmap(area.address, area.size)
        if area.fd >= 0:
            os.close(area.fd)

    def area(self, address: int) -> Area | None:
        found = [x for x in self.areas.values() if x.address <= address < x.address + x.size]
        return next((x for x in found if x.kind != "reserved"), None)

    def is_device(self, address: int, size: int) -> bool:
        while size > 0:
            area = self.area(address)
            if area is None:
                return False
            size -= area.address + area.size - address
            address = area.address + area.size
        return True

    def host(self, address: int) -> int:
        """The real address of pinned memory that the GPU sees at an address."""
        if HOST_VIEW <= address < HOST_VIEW << 1 and not self.host_pointers:
            return address - HOST_VIEW
        return address

    def move(self, to: int, source: int, size: int) -> None:
        """One copy, made when the stream reaches it. One side is device memory."""
        sides = self.is_device(to, size), self.is_device(source, size)
        if not any(sides):
            self.broken = 700
            return
        ctypes.memmove(self.host(to), self.host(source), size)

    def batch(
        self,
        targets: int,
        sources: int,
        sizes: int,
        count: int,
        attributes: int,
        indices: int,
        attribute_count: int,
        stream: int,
    ) -> int:
        """cuMemcpyBatchAsync, with the driver's signature since 13.0."""
        self.calls["batch"] += 1
        if code := self.fail.pop("batch", self.broken):
            return code
        assert stream, "the NULL stream takes no batches"
        assert attribute_count == 1
        assert ctypes.c_size_t.from_address(indices).value == 0
        order = ctypes.c_int.from_address(attributes).value
        columns = [
            list((ctypes.c_size_t * count).from_address(x)) for x in (targets, sources, sizes)
        ]
        for to, source, size in zip(*columns, strict=True):
            host = source if self.is_device(to, size) else to
            if not self.host_pointers and host < HOST_VIEW:
                return 700
            host = self.host(host)
            if not any(x <= host and host + size <= x + n for x, n in self.pinned.items()):
                return 1
            if order == bindings.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_ANY:
                data = ctypes.string_at(self.host(source), size)
                self.put(stream, functools.partial(self.write, to, data))
            else:
                self.put(stream, functools.partial(self.move, to, source, size))
        return 0

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(self.host(address), data, len(data))

    # Handles

    def handle(self, fd: int) -> bytes:
        return HANDLE.pack(os.getpid(), fd, os.fstat(fd).st_ino)

    def open_handle(self, handle: bytes) -> tuple[int, int]:
        """Result and descriptor."""
        pid, fd, inode = HANDLE.unpack(handle)
        if pid == os.getpid():
            return 201, -1
        try:
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        except OSError:
            return 1, -1
        if os.fstat(opened).st_ino != inode:
            os.close(opened)
            return 1, -1
        return 0, opened

    def new_event(self, fd: int) -> int:
        """The memory of an event: the number of records, and of completed ones."""
        address = mmap(16, fd)
        counts = np.ctypeslib.as_array((ctypes.c_uint64 * 2).from_address(address))
        event = self.number()
        self.events[event] = counts, fd
        return event

    def created_event(self) -> int:
        fd = os.memfd_create("event")
        os.ftruncate(fd, 16)
        return self.new_event(fd)

    def record(self, event: int, stream: int) -> None:
        counts, _ = self.events[event]
        counts[0] += 1
        number = int(counts[0])
        self.put(stream, lambda: counts.__setitem__(1, number))
