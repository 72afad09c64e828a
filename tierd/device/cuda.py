"""An NVIDIA GPU as a device: its calls, their error messages, and the state that they need.

Streams, events, copies, pinning and legacy IPC go through cupy's runtime; calls that it lacks go
to the driver through cuda-bindings. Both use the GPU's primary context. Not yet run on a GPU.
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
    # Bound to module names so that tests can replace them.
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
"""Priority of urgent streams: the device clamps it to its highest priority."""

_SHUT_TIMEOUT_S: Final = 2.0

_CONNECTIONS: Final = "32"
"""Hardware queues of the process. Streams that share a queue also wait for each other's events,
and the default of eight queues is too few for the copies and the waits of all attachments."""

_EVENT_REMEDY: Final = (
    "IPC events need one /dev/shm for daemon and engine (--ipc=host, or /dev/shm mounted into both)"
)

T = TypeVar("T")


def _failure(what: str, code: int, kind: type[DeviceError] = DeviceError) -> DeviceError:
    """Return the error for a driver result, which has a code but no text."""
    try:
        name = driver.CUresult(code).name
    except ValueError:
        name = "unknown"
    return failure(what, code, name, kind)


@contextlib.contextmanager
def _worded(what: str, kind: type[DeviceError] = DeviceError, remedy: str = "") -> Iterator[None]:
    """Turn the runtime's errors into errors of class `kind`."""
    try:
        yield
    except runtime.CUDARuntimeError as error:
        raise failure(what, error.status, str(error), kind, remedy) from error


def _checked(what: str, result: int, kind: type[DeviceError] = DeviceError) -> None:
    """Raise if the result of a driver call is not success."""
    if result:
        raise _failure(what, int(result), kind)


def _value(what: str, answer: tuple[int, T], kind: type[DeviceError] = DeviceError) -> T:
    """Return the value of a driver call; raise if its result is not success."""
    result, value = answer
    _checked(what, result, kind)
    return value


def visible() -> list[bytes]:
    """Return the UUIDs of the GPUs that this process can use, by ordinal.

    Raises CannotOpenError if there is no GPU, driver or library.
    """
    what = "no GPU can be used"
    if _missing:
        raise CannotOpenError(f"{what}: pip install 'tierd[cuda]' ({_missing})")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", _CONNECTIONS)
    try:
        _checked(what, driver.cuInit(0)[0], CannotOpenError)
        count = _value(what, driver.cuDeviceGetCount(), CannotOpenError)
        answers = [driver.cuDeviceGetUuid(ordinal) for ordinal in range(count)]
        # Only the runtime can tell that it is too new for the driver.
        with _worded(what, CannotOpenError, "the NVIDIA driver is older than CUDA 13"):
            runtime.getDeviceCount()
    except (RuntimeError, OSError) as error:
        # The bindings report a missing driver library as a RuntimeError without a number.
        raise CannotOpenError(f"{what}: no NVIDIA driver here ({error})") from error
    uuids_here = [bytes(_value(what, answer, CannotOpenError).bytes) for answer in answers]
    if not uuids_here:
        raise CannotOpenError(f"{what}: {REMEDIES[100]}")
    return uuids_here


@dataclass(slots=True)
class _Opened:
    """A peer's allocation that is mapped."""

    size_bytes: int
    uses: int = 0
    exports: list[Export] = field(default_factory=list)
    """Exports that the driver opened once each. Compared by identity: different allocations of
    different incarnations of an engine were seen to have equal handle bytes."""
    mapped: list[tuple[int, int]] = field(default_factory=list)
    """Address and size of each physical chunk; empty for legacy IPC."""


class CudaDevice(Device):
    """A GPU. Any thread may call it; a thread's first call binds the thread to the GPU."""

    def __init__(self, ordinal: int, uuid: bytes) -> None:
        """Create the GPU's context, which takes a few hundred MiB. Raises CannotOpenError."""
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
        """Return the GPU with this UUID, whatever its ordinal. Raises CannotOpenError."""
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
        """Make the GPU's context current, once per thread. `_doing` calls it."""
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
        # For a handle that is already open the driver returns the same address.
        opened = self._opened.get(base, _Opened(export.size_bytes))
        result, _, size_bytes = driver.cuMemGetAddressRange(base)
        # If the driver does not know the size, only the engine's statement is left.
        if not result and size_bytes < export.size_bytes:
            runtime.ipcCloseMemHandle(base)
            raise CannotOpenError(
                f"the allocation has {size_bytes} bytes, not the {export.size_bytes} announced"
            )
        return base, opened

    def _open_chunks(self, export: Export) -> tuple[int, _Opened]:
        """Map all parts to one contiguous range of addresses. A failure unmaps them all."""
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
                # The mapping keeps the memory alive, so the handle can be released.
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
        with self._doing(f"{size_bytes} bytes of GPU memory cannot be allocated"):
            address = runtime.mallocAsync(size_bytes, self._memory_stream)
            runtime.streamSynchronize(self._memory_stream)
            return address

    def free(self, address: int) -> None:
        with self._doing("GPU memory cannot be freed"):
            # Stream-ordered: cudaFree would wait for all streams, and one of them may be waiting
            # for the event of a dead engine.
            runtime.freeAsync(address, self._memory_stream)

    def pin(self, address: int, size_bytes: int) -> None:
        """Page-lock host memory; no copied piece may cross the border of two pins.

        This holds the driver's lock for 0.1 s per GB, and every other process that uses a GPU of
        this machine may wait for that lock: pin in stretches of 1 to 4 GB.
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
        with self._doing("a stream cannot be created"):
            # Never the NULL stream: it waits for other streams and does not accept batches.
            stream = runtime.streamCreateWithPriority(
                runtime.streamNonBlocking, _URGENT if urgent else 0
            )
        self._streams.append(stream)
        return stream

    def create_event(self) -> int:
        with self._doing("an event cannot be created"):
            return runtime.eventCreateWithFlags(runtime.eventDisableTiming)

    def open_event(self, handle: bytes, bases: list[int]) -> int:
        """Return a native event's address, or the negated address of a counter."""
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
            raise CannotOpenError(
                f"a counter is in allocation {index}, but only {len(bases)} exist"
            )
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
        """Copy pieces in pinned memory as one batch; other pieces are slower and may block."""
        seen, pinned = self._pins.seen(slots, lengths)
        loads = direction is Direction.LOAD
        targets, sources = (pages, seen) if loads else (seen, pages)
        with self._doing("a copy cannot be started"):
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
        # Slots do not change during a load, so the copy may read them ahead of stream order.
        # Pages change until the stream's waits have passed, so a store keeps the stream order.
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
        _checked("a batch of copies cannot be started", result)

    @functools.cached_property
    def _batch_call(self) -> Callable[..., int]:
        """The driver's function itself: the bindings would build a Python object per address."""
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
        with self._doing("a pitched copy cannot be started"):
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
        """The kernels of loads and of stores."""
        what = f"the kernels cannot be loaded for {self._arch}"
        module = _value(what, driver.cuModuleLoadData(kernels.compile_for(self._arch)))
        return (
            _value(what, driver.cuModuleGetFunction(module, kernels.SCATTER)),
            _value(what, driver.cuModuleGetFunction(module, kernels.GATHER)),
        )

    def shut(self) -> None:
        """Release all resources, unless a stream still waits for a dead engine's event.

        Then the end of the process releases them.
        """
        if self._shut:
            return
        self._shut = True
        with contextlib.suppress(DeviceError), self._doing("the GPU cannot be released"):
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
