"""An NVIDIA GPU as a device: the calls, their errors in words, and what has to be remembered.

Streams, events, copies, pinning and legacy IPC go through cupy's runtime; what that lacks goes
to the driver through cuda-bindings. Both see the GPU's primary context. Not yet run on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeVar, assert_never

import numpy as np

from tierd.device import kernels
from tierd.device.api import (
    Addresses,
    CannotOpenError,
    Device,
    DeviceError,
    Direction,
    Pitched,
)
from tierd.device.cuda_errors import REMEDIES, failure
from tierd.device.pins import Pins
from tierd.shared_memory.exports import Export, ExportKind, counter_of, device_text, native_of

_missing: str
try:
    # By their own names, so that tests may put others in their place.
    from cuda.bindings import driver as driver
    from cupy.cuda import runtime as runtime
except ImportError as error:
    _missing = str(error)
else:
    _missing = ""

IPC_HANDLE_BYTES: Final = 64

_NOT_READY: Final = 600
_PORTABLE_AND_MAPPED: Final = 1 | 2
_WAIT_GEQ: Final = 0
_BATCH_ABI: Final = 13_000
_URGENT: Final = -5
"""A stream's priority is cut to what the device has, so this means: the highest."""

_SHUT_TIMEOUT_S: Final = 2.0

_CONNECTIONS: Final = "32"
"""Hardware queues of the process. Streams that share one wait for each other's events, too, and
by default eight queues are all there are for every attachment's waits and the copies."""

_EVENT_REMEDY: Final = (
    "IPC events need one /dev/shm for daemon and engine (--ipc=host, or /dev/shm mounted into both)"
)

T = TypeVar("T")


def _failure(what: str, code: int, kind: type[DeviceError] = DeviceError) -> DeviceError:
    """The error for a result that has no text."""
    try:
        name = driver.CUresult(code).name
    except ValueError:
        name = "unknown"
    return failure(what, code, name, kind)


@contextlib.contextmanager
def _worded(what: str, kind: type[DeviceError] = DeviceError, remedy: str = "") -> Iterator[None]:
    """Turn the runtime's errors into ours."""
    try:
        yield
    except runtime.CUDARuntimeError as error:
        raise failure(what, error.status, str(error), kind, remedy) from error


def _checked(what: str, result: int, kind: type[DeviceError] = DeviceError) -> None:
    """Raise for a driver's result other than success."""
    if result:
        raise _failure(what, int(result), kind)


def _value(what: str, answer: tuple[int, T], kind: type[DeviceError] = DeviceError) -> T:
    """What a driver call answered beside its result."""
    result, value = answer
    _checked(what, result, kind)
    return value


def visible() -> list[bytes]:
    """UUIDs of the GPUs that this process can use, by ordinal.

    Raises CannotOpenError where there is none, or nothing to use it with.
    """
    what = "no GPU can be used"
    if _missing:
        raise CannotOpenError(f"{what}: pip install 'tierd[cuda]' ({_missing})")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", _CONNECTIONS)
    try:
        _checked(what, driver.cuInit(0)[0], CannotOpenError)
        count = _value(what, driver.cuDeviceGetCount(), CannotOpenError)
        answers = [driver.cuDeviceGetUuid(ordinal) for ordinal in range(count)]
        # The runtime may be newer than the driver, which only it knows.
        with _worded(what, CannotOpenError, "the NVIDIA driver is older than CUDA 13"):
            runtime.getDeviceCount()
    except (RuntimeError, OSError) as error:
        # A driver library that is not there is told by RuntimeError, without a number.
        raise CannotOpenError(f"{what}: no NVIDIA driver here ({error})") from error
    uuids_here = [bytes(_value(what, answer, CannotOpenError).bytes) for answer in answers]
    if not uuids_here:
        raise CannotOpenError(f"{what}: {REMEDIES[100]}")
    return uuids_here


@dataclass(slots=True)
class _Opened:
    """A mapped allocation of a peer."""

    size_bytes: int
    uses: int = 0
    exports: list[Export] = field(default_factory=list)
    """Each was opened at the driver once. Compared by identity: other allocations of other
    lives of an engine were seen to have handles of the same bytes."""
    mapped: list[tuple[int, int]] = field(default_factory=list)
    """Address and size of each physical chunk, if it has several."""


class CudaDevice(Device):
    """A GPU; every thread may call, and is bound to it by its first call."""

    def __init__(self, ordinal: int, uuid: bytes) -> None:
        """Creates the GPU's context, some hundred MiB of its memory. Raises CannotOpenError."""
        self.uuid = uuid
        self._ordinal = ordinal
        self._bound = threading.local()
        self._lock = threading.Lock()
        self._opened: dict[int, _Opened] = {}
        self._pins = Pins()
        self._streams: list[int] = []
        self._shut = False
        what = f"{device_text(uuid)} cannot be used"
        with _worded(what, CannotOpenError):
            self._bind()
        kinds = driver.CUdevice_attribute

        def ask(attribute: driver.CUdevice_attribute) -> int:
            return _value(what, driver.cuDeviceGetAttribute(attribute, ordinal), CannotOpenError)

        self._host_pointers = bool(
            ask(kinds.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM)
        )
        self._pitch_max = ask(kinds.CU_DEVICE_ATTRIBUTE_MAX_PITCH)
        major = ask(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = ask(kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        self._arch = f"sm_{major}{minor}"
        self._memory_stream = self.create_stream(urgent=False)
        name = _value(what, driver.cuDeviceGetName(128, ordinal), CannotOpenError)
        self.name = f"{name.rstrip(bytes(1)).decode(errors='replace')} {device_text(uuid)}"

    @classmethod
    def find(cls, uuid: bytes) -> CudaDevice:
        """The GPU of this UUID, whatever its ordinal here. Raises CannotOpenError."""
        uuids_here = visible()
        if uuid not in uuids_here:
            raise CannotOpenError(
                f"{device_text(uuid)} is not visible to the daemon, which sees "
                f"{', '.join(map(device_text, uuids_here))}: see CUDA_VISIBLE_DEVICES "
                f"(here {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')!r}), the container's "
                "--gpus, the unit's DeviceAllow, and MIG instances"
            )
        return cls(uuids_here.index(uuid), uuid)

    def _bind(self) -> None:
        """Make the GPU's context this thread's, once a thread. Within `_doing`."""
        if not getattr(self._bound, "done", False):
            runtime.setDevice(self._ordinal)
            self._bound.done = True

    @contextlib.contextmanager
    def _doing(
        self, what: str, kind: type[DeviceError] = DeviceError, remedy: str = ""
    ) -> Iterator[None]:
        with _worded(what, kind, remedy):
            self._bind()
            yield

    # --- memory ---------------------------------------------------------------------

    def open(self, export: Export) -> int:
        if export.device != self.uuid:
            raise CannotOpenError(f"{device_text(export.device)} is not {self.name}")
        with self._lock, self._doing("the engine's memory cannot be opened", CannotOpenError):
            for address, opened in self._opened.items():
                if any(known is export for known in opened.exports):
                    opened.uses += 1
                    return address
            match export.kind:
                case ExportKind.CUDA_IPC:
                    address, opened = self._open_legacy(export)
                case ExportKind.CUDA_VMM:
                    address, opened = self._open_chunks(export)
                case ExportKind.MEMFD:
                    raise CannotOpenError("host memory cannot be opened on a GPU")
                case _:
                    assert_never(export.kind)
            opened.uses += 1
            opened.exports.append(export)
            self._opened[address] = opened
            return address

    def _open_legacy(self, export: Export) -> tuple[int, _Opened]:
        if len(export.handle) != IPC_HANDLE_BYTES or export.parts:
            raise CannotOpenError(f"a CUDA IPC handle has {IPC_HANDLE_BYTES} bytes and no parts")
        base = runtime.ipcOpenMemHandle(export.handle)
        # The driver answers a handle that is open already with the same address.
        opened = self._opened.get(base, _Opened(export.size_bytes))
        result, _, size_bytes = driver.cuMemGetAddressRange(base)
        # Where the driver does not tell the size, the engine's word is all there is.
        if not result and size_bytes < export.size_bytes:
            runtime.ipcCloseMemHandle(base)
            raise CannotOpenError(
                f"the allocation has {size_bytes} bytes, not the {export.size_bytes} announced"
            )
        return base, opened

    def _open_chunks(self, export: Export) -> tuple[int, _Opened]:
        """Map all parts to one stretch of addresses. Releases everything if one fails."""
        end = 0
        for part in export.parts:
            if part.offset != end or part.size_bytes < 1:
                raise CannotOpenError("the parts of an allocation must lie end to end")
            end += part.size_bytes
        if end != export.size_bytes or not end:
            raise CannotOpenError(f"the parts have {end} bytes, the allocation {export.size_bytes}")
        what = "the engine's memory cannot be mapped"
        answer = driver.cuMemAddressReserve(end, 0, 0, 0)
        base = int(_value(what, answer, CannotOpenError))
        opened = _Opened(end)
        try:
            for part in export.parts:
                kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
                imported = driver.cuMemImportFromShareableHandle(part.fd, kind)
                handle = _value(what, imported, CannotOpenError)
                # The mapping keeps the memory; the handle has served when it is made.
                (result,) = driver.cuMemMap(base + part.offset, part.size_bytes, 0, handle, 0)
                driver.cuMemRelease(handle)
                _checked(what, result, CannotOpenError)
                opened.mapped.append((base + part.offset, part.size_bytes))
            access = driver.CUmemAccessDesc()
            access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = self._ordinal
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            _checked(what, driver.cuMemSetAccess(base, end, [access], 1)[0], CannotOpenError)
        except CannotOpenError:
            self._unmap(base, opened)
            raise
        return base, opened

    def _unmap(self, base: int, opened: _Opened) -> None:
        for address, size_bytes in opened.mapped:
            driver.cuMemUnmap(address, size_bytes)
        driver.cuMemAddressFree(base, opened.size_bytes)

    def close(self, address: int) -> None:
        with self._lock, self._doing("the engine's memory cannot be closed"):
            opened = self._opened[address]
            opened.uses -= 1
            if not opened.uses:
                del self._opened[address]
                self._let_go(address, opened)

    def _let_go(self, address: int, opened: _Opened) -> None:
        if opened.mapped:
            self._unmap(address, opened)
            return
        for _ in opened.exports:
            runtime.ipcCloseMemHandle(address)

    def allocate(self, size_bytes: int) -> int:
        with self._doing(f"no {size_bytes} bytes of GPU memory"):
            address = runtime.mallocAsync(size_bytes, self._memory_stream)
            runtime.streamSynchronize(self._memory_stream)
            return address

    def free(self, address: int) -> None:
        with self._doing("GPU memory cannot be freed"):
            # In a stream's order: cudaFree would wait for all streams, of which one may be
            # waiting for the event of an engine that is dead.
            runtime.freeAsync(address, self._memory_stream)

    def pin(self, address: int, size_bytes: int) -> None:
        """Page-lock host memory; no copied piece may lie across the border of two pins.

        The driver's lock is held for 0.1 s a GB, and every other process that uses a GPU of
        this machine may wait for it: pin in stretches of 1 to 4 GB.
        """
        remedy = "see the memory limit of the daemon's unit or container, and the GPU's free memory"
        with self._doing(f"{size_bytes} bytes cannot be pinned", remedy=remedy):
            runtime.hostRegister(address, size_bytes, _PORTABLE_AND_MAPPED)
            seen_at = address
            if not self._host_pointers:
                answer = driver.cuMemHostGetDevicePointer(address, 0)
                seen_at = int(_value("pinned memory has no address on the GPU", answer))
        self._pins.add(address, size_bytes, seen_at)

    def unpin(self, address: int) -> None:
        self._pins.remove(address)
        with self._doing("memory cannot be unpinned"):
            runtime.hostUnregister(address)

    # --- order ----------------------------------------------------------------------

    def create_stream(self, *, urgent: bool) -> int:
        with self._doing("no stream"):
            # Never the NULL stream: it waits for others, and takes no batches.
            stream = runtime.streamCreateWithPriority(
                runtime.streamNonBlocking, _URGENT if urgent else 0
            )
        self._streams.append(stream)
        return stream

    def create_event(self) -> int:
        with self._doing("no event"):
            return runtime.eventCreateWithFlags(runtime.eventDisableTiming)

    def open_event(self, handle: bytes, bases: list[int]) -> int:
        """A native event's address, or minus the address of a counter."""
        native = native_of(handle)
        if native is not None and len(native) == IPC_HANDLE_BYTES:
            what = "the engine's event cannot be opened"
            with self._doing(what, CannotOpenError, _EVENT_REMEDY):
                return runtime.ipcOpenEventHandle(native)
        place = counter_of(handle)
        if place is None:
            raise CannotOpenError("an event's handle is of no known kind")
        index, offset = place
        if index >= len(bases):
            raise CannotOpenError(f"a counter lies in allocation {index} of {len(bases)}")
        base = bases[index]
        with self._lock:
            size_bytes = self._opened[base].size_bytes
        if offset % 8 or offset + 8 > size_bytes:
            raise CannotOpenError(f"a counter cannot lie at byte {offset} of {size_bytes}")
        return -(base + offset)

    def close_event(self, event: int) -> None:
        if event > 0:
            with self._doing("an event cannot be closed"):
                runtime.eventDestroy(event)

    def record(self, event: int, stream: int) -> None:
        assert event > 0, "a counter is written by its owner alone"
        with self._doing("an event cannot be recorded"):
            runtime.eventRecord(event, stream)

    def query(self, event: int) -> bool:
        assert event > 0, "a counter can only be waited for"
        with self._doing("an event cannot be queried"):
            status = runtime.eventQuery(event)
        if status not in (0, _NOT_READY):
            raise _failure("work on the GPU has failed", status)
        return status == 0

    def wait(self, stream: int, event: int, value: int) -> None:
        with self._doing("a stream cannot wait"):
            if event > 0:
                runtime.streamWaitEvent(stream, event)
            else:
                answer = driver.cuStreamWaitValue64(stream, -event, value, _WAIT_GEQ)
                _checked("a stream cannot wait for a counter", answer[0])

    # --- copies ---------------------------------------------------------------------

    def copy(
        self,
        pages: Addresses,
        slots: Addresses,
        lengths: Addresses,
        direction: Direction,
        stream: int,
    ) -> None:
        """Pieces in pinned memory are one batch; others are slower, and the call may wait."""
        seen, pinned = self._pins.seen(slots, lengths)
        loads = direction is Direction.LOAD
        targets, sources = (pages, seen) if loads else (seen, pages)
        with self._doing("a copy cannot be begun"):
            if pinned.any():
                self._batch(targets[pinned], sources[pinned], lengths[pinned], direction, stream)
            kind = runtime.memcpyHostToDevice if loads else runtime.memcpyDeviceToHost
            rest = ~pinned
            for to, source, size in zip(
                targets[rest].tolist(), sources[rest].tolist(), lengths[rest].tolist(), strict=True
            ):
                runtime.memcpyAsync(to, source, size, kind, stream)

    def _batch(
        self,
        targets: Addresses,
        sources: Addresses,
        sizes: Addresses,
        direction: Direction,
        stream: int,
    ) -> None:
        attributes = driver.CUmemcpyAttributes()
        order = driver.CUmemcpySrcAccessOrder
        # Slots do not change during a load, so they may be read before the stream is there.
        # Pages do until the stream's waits have passed, so a store has to keep the order.
        attributes.srcAccessOrder = (
            order.CU_MEMCPY_SRC_ACCESS_ORDER_ANY
            if direction is Direction.LOAD
            else order.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        )
        first = np.zeros(1, np.uint64)
        columns = [np.ascontiguousarray(column, np.uint64) for column in (targets, sources, sizes)]
        result = self._batch_call(
            *(column.ctypes.data for column in columns),
            columns[2].size,
            attributes.getPtr(),
            first.ctypes.data,
            1,
            stream,
        )
        _checked("a batch of copies cannot be begun", result)

    @functools.cached_property
    def _batch_call(self) -> Callable[..., int]:
        """The driver's entry itself: bindings would make a Python object of every address."""
        answer = driver.cuGetProcAddress(b"cuMemcpyBatchAsync", _BATCH_ABI, 0)
        _checked("the driver has no batches of copies", answer[0])
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        prototype = ctypes.CFUNCTYPE(
            ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer
        )
        return prototype(answer[1])

    def copy_pitched(self, pieces: list[Pitched], direction: Direction, stream: int) -> None:
        loads = direction is Direction.LOAD
        kind = runtime.memcpyHostToDevice if loads else runtime.memcpyDeviceToHost
        table = np.array(pieces, np.uint64).reshape(-1, len(Pitched._fields))
        _, _, slots, pitches, widths, rows = table.T
        seen, _ = self._pins.seen(slots, (rows - np.uint64(1)) * pitches + widths)
        with self._doing("a pitched copy cannot be begun"):
            for piece, slot in zip(pieces, seen.tolist(), strict=True):
                page, page_pitch, _, slot_pitch, width, height = piece
                to, to_pitch, source, source_pitch = (
                    (page, page_pitch, slot, slot_pitch)
                    if loads
                    else (slot, slot_pitch, page, page_pitch)
                )
                if max(page_pitch, slot_pitch) <= self._pitch_max:
                    runtime.memcpy2DAsync(
                        to, to_pitch, source, source_pitch, width, height, kind, stream
                    )
                    continue
                for row in range(height):
                    runtime.memcpyAsync(
                        to + row * to_pitch, source + row * source_pitch, width, kind, stream
                    )

    def gather(
        self, pages: Addresses, lengths: Addresses, staging: int, direction: Direction, stream: int
    ) -> None:
        with self._doing("pieces cannot be gathered"):
            load, store = self._kernels
            kernel = load if direction is Direction.LOAD else store
            for parameters in kernels.launches(pages, lengths, staging):
                pointers = (ctypes.c_void_p * 1)(parameters.ctypes.data)
                answer = driver.cuLaunchKernel(
                    kernel,
                    *(kernels.BLOCKS, 1, 1),
                    *(kernels.THREADS, 1, 1),
                    0,
                    stream,
                    ctypes.addressof(pointers),
                    0,
                )
                _checked("a kernel cannot be started", answer[0])

    @functools.cached_property
    def _kernels(self) -> tuple[driver.CUfunction, driver.CUfunction]:
        """The kernel of a load, and that of a store."""
        what = f"the kernels cannot be loaded for {self._arch}"
        module = _value(what, driver.cuModuleLoadData(kernels.compile_for(self._arch)))
        return (
            _value(what, driver.cuModuleGetFunction(module, kernels.SCATTER)),
            _value(what, driver.cuModuleGetFunction(module, kernels.GATHER)),
        )

    def shut(self) -> None:
        """Streams that still wait for a dead engine's event are left to the process's end."""
        if self._shut:
            return
        self._shut = True
        with contextlib.suppress(DeviceError), self._doing("the GPU cannot be let go"):
            deadline = time.monotonic() + _SHUT_TIMEOUT_S
            for stream in self._streams:
                while runtime.streamQuery(stream) == _NOT_READY:
                    if time.monotonic() > deadline:
                        return
                    time.sleep(0.001)
            with self._lock:
                opened, self._opened = self._opened, {}
            for address, mapping in opened.items():
                self._let_go(address, mapping)
            for address in self._pins.starts():
                self.unpin(address)
            for stream in self._streams:
                runtime.streamDestroy(stream)
