"""An engine's side of CUDA: shows its memory to the daemon's process, and when it may be touched.

Needs cuda-bindings, which torch brings along, and a context on the GPU; neither torch nor cupy is
imported, so memory and streams come as numbers. Not yet run on a GPU.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import os
import resource
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

from tierd.device.api import CannotOpenError
from tierd.shared_memory.exports import Export, ExportKind, Part, counter_handle, native_handle

_missing: str
try:
    from cuda.bindings import driver as driver
except ImportError as error:
    _missing = str(error)
else:
    _missing = ""

IPC_HANDLE_BYTES: Final = 64

EVENTS: Final = 64
"""Events of an engine, used in turn; one that is recorded again too soon is waited for longer,
never too short. Also streams that may record counters."""

COUNTER_BYTES: Final = 2 << 20
"""cudaMalloc's grain: an allocation's neighbours in it would be shown to the daemon, too."""

_EVENT_FLAGS: Final = 2 | 4
"""Without timing, for other processes."""

_POSIX_FD: Final = 1
_DEVICE_MEMORY: Final = 2
_WRITE_DEFAULT: Final = 0

_FDS_SPARE: Final = 256
"""Descriptors left to the engine when memory in chunks has taken one for each."""

T = TypeVar("T")


class MemorySpan(NamedTuple):
    """Memory of the engine's, such as a tensor's storage: `untyped_storage()` tells both."""

    address: int
    size_bytes: int


class Facts(NamedTuple):
    """What the driver says of an address."""

    memory_type: int
    managed: bool
    legacy_ipc: bool
    handle_types: int
    pooled: bool


class SpanPlace(NamedTuple):
    """Where a span lies: which of the exports, and at which offset."""

    export: int
    offset: int


def export_kind(facts: Facts) -> ExportKind:
    """How memory of this kind can be shown to another process.

    Raises CannotOpenError, which names the setting to change, if it cannot.
    """
    if facts.managed:
        raise CannotOpenError(
            "managed memory cannot be shown to another process: use an allocator that takes "
            "cudaMalloc, not cudaMallocManaged"
        )
    if facts.memory_type != _DEVICE_MEMORY:
        raise CannotOpenError("this is no GPU's memory")
    if facts.legacy_ipc:
        return ExportKind.CUDA_IPC
    if facts.pooled:
        raise CannotOpenError(
            "memory of cudaMallocAsync cannot be shown to another process: take "
            "backend:cudaMallocAsync out of PYTORCH_CUDA_ALLOC_CONF"
        )
    if facts.handle_types & _POSIX_FD:
        return ExportKind.CUDA_VMM
    raise CannotOpenError(
        "the engine's memory was allocated without a file descriptor for other processes (handle "
        f"types {facts.handle_types}): with expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF, "
        "set it to False or unset TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=0; with vLLM's sleep mode "
        "or cumem allocator, take away --enable-sleep-mode and --enable-cumem-allocator"
    )


def chains(chunks: Iterable[MemorySpan]) -> list[list[MemorySpan]]:
    """Chunks in order of address, each once; those that lie end to end are together."""
    found: list[list[MemorySpan]] = []
    for chunk in sorted(set(chunks)):
        last = found[-1][-1] if found else None
        if last is not None and last.address + last.size_bytes == chunk.address:
            found[-1].append(chunk)
        else:
            found.append([chunk])
    return found


def places(spans: Sequence[MemorySpan], allocations: Sequence[MemorySpan]) -> list[SpanPlace]:
    """Where each span lies in these allocations, which are in order of address."""
    begins = [allocation.address for allocation in allocations]
    answer = []
    for span in spans:
        index = bisect.bisect_right(begins, span.address) - 1
        assert index >= 0, "every span lies in one of the allocations that were made from it"
        offset = span.address - begins[index]
        assert offset + span.size_bytes <= allocations[index].size_bytes
        answer.append(SpanPlace(index, offset))
    return answer


def descriptors_error(needed: int, limit: int) -> str:
    """Why so many descriptors cannot be had; empty if they can."""
    if needed + _FDS_SPARE <= limit:
        return ""
    return (
        f"the engine's memory lies in {needed} chunks, each of which takes a file descriptor, and "
        f"may have {limit}: raise `ulimit -n` (LimitNOFILE=), or set expandable_segments:False"
    )


class _HasPointer(Protocol):
    def getPtr(self) -> int: ...  # noqa: N802 - the binding's name.


def handle_bytes(handle: _HasPointer) -> bytes:
    """The 64 bytes of an IPC handle; their attribute has gone from newer bindings."""
    return ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES)


def _checked(what: str, result: int) -> None:
    if result:
        raise CannotOpenError(f"{what}: {driver.CUresult(result).name} ({int(result)})")


def _value(what: str, answer: tuple[int, T]) -> T:
    result, value = answer
    _checked(what, result)
    return value


@contextlib.contextmanager
def _context(ordinal: int) -> Iterator[None]:
    """Have the GPU's primary context, which torch uses, be the thread's for a while."""
    if _missing:
        raise CannotOpenError(f"pip install cuda-bindings ({_missing})")
    what = "the engine's GPU cannot be used"
    try:
        _checked(what, driver.cuInit(0)[0])
    except RuntimeError as error:
        raise CannotOpenError(f"{what}: no NVIDIA driver here ({error})") from error
    context = _value(what, driver.cuDevicePrimaryCtxRetain(ordinal))
    try:
        _checked(what, driver.cuCtxPushCurrent(context)[0])
        try:
            yield
        finally:
            driver.cuCtxPopCurrent()
    finally:
        driver.cuDevicePrimaryCtxRelease(ordinal)


def device_uuid(ordinal: int) -> bytes:
    """The UUID of the engine's GPU, whatever the daemon's ordinal for it is."""
    with _context(ordinal):
        return bytes(_value("the GPU has no UUID", driver.cuDeviceGetUuid(ordinal)).bytes)


def _facts(address: int) -> Facts:
    kinds = driver.CUpointer_attribute
    what = f"the driver does not know address {address:#x}"
    kind = driver.cuPointerGetAttribute(kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)

    def ask(attribute: driver.CUpointer_attribute) -> int:
        """0 also for what this kind of memory does not have."""
        result, value = driver.cuPointerGetAttribute(attribute, address)
        return 0 if result else int(value)

    return Facts(
        memory_type=int(_value(what, kind)),
        managed=bool(ask(kinds.CU_POINTER_ATTRIBUTE_IS_MANAGED)),
        legacy_ipc=bool(ask(kinds.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE)),
        handle_types=ask(kinds.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES),
        pooled=bool(ask(kinds.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE)),
    )


def _chunks(span: MemorySpan) -> Iterator[MemorySpan]:
    """The allocation of a span; for reserved addresses, each physical chunk that it touches."""
    address = span.address
    while address < span.address + span.size_bytes:
        result, base, size_bytes = driver.cuMemGetAddressRange(address)
        _checked(f"the driver does not know address {address:#x}", result)
        yield MemorySpan(int(base), size_bytes)
        address = int(base) + size_bytes


class Exports:
    """The allocations under some memory of the engine's, which has to stay where it is.

    Owns the descriptors of the exports' parts until `close`; the daemon has its own by then.
    """

    def __init__(self, ordinal: int, spans: Sequence[MemorySpan]) -> None:
        """Raises CannotOpenError with the setting to change; nothing is left open then."""
        self.exports: tuple[Export, ...] = ()
        self._fds: list[int] = []
        uuid = device_uuid(ordinal)
        legacy: set[MemorySpan] = set()
        chunks: set[MemorySpan] = set()
        with _context(ordinal):
            for span in spans:
                kind = export_kind(_facts(span.address))
                (legacy if kind is ExportKind.CUDA_IPC else chunks).update(_chunks(span))
            refusal = descriptors_error(len(chunks), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            if chunks and refusal:
                raise CannotOpenError(refusal)
            shown = [[allocation] for allocation in legacy] + chains(chunks)
            shown.sort()
            try:
                self.exports = tuple(
                    self._legacy(uuid, chain[0])
                    if chain[0] in legacy
                    else self._chunked(uuid, chain)
                    for chain in shown
                )
            except CannotOpenError:
                self.close()
                raise
        allocations = [
            MemorySpan(chain[0].address, sum(chunk.size_bytes for chunk in chain))
            for chain in shown
        ]
        self.places = places(spans, allocations)
        """Where each of the spans lies, in their order."""

    def close(self) -> None:
        """Give the descriptors back; idempotent."""
        while self._fds:
            os.close(self._fds.pop())

    def _legacy(self, uuid: bytes, allocation: MemorySpan) -> Export:
        answer = driver.cuIpcGetMemHandle(allocation.address)
        handle = handle_bytes(_value("the engine's memory has no IPC handle", answer))
        return Export(ExportKind.CUDA_IPC, uuid, allocation.size_bytes, handle)

    def _chunked(self, uuid: bytes, chain: list[MemorySpan]) -> Export:
        base = chain[0].address
        parts = [
            Part(chunk.address - base, chunk.size_bytes, self._descriptor(chunk)) for chunk in chain
        ]
        size_bytes = parts[-1].offset + parts[-1].size_bytes
        return Export(ExportKind.CUDA_VMM, uuid, size_bytes, parts=tuple(parts))

    def _descriptor(self, chunk: MemorySpan) -> int:
        what = "the engine's memory has no file descriptor"
        handle = _value(what, driver.cuMemRetainAllocationHandle(chunk.address))
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        result, fd = driver.cuMemExportToShareableHandle(handle, kind, 0)
        driver.cuMemRelease(handle)
        _checked(what, result)
        self._fds.append(fd)
        return fd


class Events:
    """When the engine's work has been done, told by IPC events.

    The daemon opens them at attach; that fails where it has another /dev/shm than the engine.
    `Counters` do not mind. Closed only after the daemon has let them go.
    """

    def __init__(self, ordinal: int) -> None:
        """Raises CannotOpenError where IPC events cannot be had: use Counters then."""
        self._ordinal = ordinal
        self._events: list[driver.CUevent] = []
        self._next = 0
        self._lock = threading.Lock()
        what = "IPC events cannot be had"
        handles = []
        with _context(ordinal):
            attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED
            if not _value(what, driver.cuDeviceGetAttribute(attribute, ordinal)):
                raise CannotOpenError(f"{what} on this GPU")
            try:
                for _ in range(EVENTS):
                    event = _value(what, driver.cuEventCreate(_EVENT_FLAGS))
                    self._events.append(event)
                    handle = _value(what, driver.cuIpcGetEventHandle(event))
                    handles.append(native_handle(handle_bytes(handle)))
            except CannotOpenError:
                self.close()
                raise
        self.handles: tuple[bytes, ...] = tuple(handles)

    def record(self, stream: int) -> tuple[int, int]:
        """An event and its value for a job that has to follow what the stream has been given.

        Only outside of a graph's capture. A job may be sent once this has returned.
        """
        with self._lock, _context(self._ordinal):
            index = self._next
            self._next = (index + 1) % EVENTS
            answer = driver.cuEventRecord(self._events[index], stream)
            _checked("an event cannot be recorded", answer[0])
            return index, 0

    def close(self) -> None:
        """Destroy the events."""
        with _context(self._ordinal):
            while self._events:
                driver.cuEventDestroy(self._events.pop())


class Counters:
    """When the engine's work has been done, told by counters in its GPU memory, one a stream."""

    def __init__(self, ordinal: int) -> None:
        """Raises CannotOpenError."""
        self._ordinal = ordinal
        self._lock = threading.Lock()
        self._slots: dict[int, int] = {}
        self._values = [0] * EVENTS
        what = "there is no GPU memory for counters"
        with _context(ordinal):
            self._base = int(_value(what, driver.cuMemAlloc(COUNTER_BYTES)))
            _checked(what, driver.cuMemsetD8(self._base, 0, COUNTER_BYTES)[0])
            # The zeros are written in no stream's order, and may not overtake a first value.
            _checked(what, driver.cuCtxSynchronize()[0])
        self.span = MemorySpan(self._base, COUNTER_BYTES)
        """To be exported with the pages."""

    def handles(self, place: SpanPlace) -> tuple[bytes, ...]:
        """The counters as events, if `span` lies at this place of the exports."""
        return tuple(counter_handle(place.export, place.offset + 8 * i) for i in range(EVENTS))

    def record(self, stream: int) -> tuple[int, int]:
        """As that of `Events`. Raises CannotOpenError for one stream too many."""
        # The lock: a stream's values have to be enqueued in the order in which they are dealt.
        with self._lock, _context(self._ordinal):
            slot = self._slots.setdefault(stream, len(self._slots))
            if slot >= EVENTS:
                del self._slots[stream]
                raise CannotOpenError(f"counters are for {EVENTS} streams at most")
            self._values[slot] += 1
            value = self._values[slot]
            answer = driver.cuStreamWriteValue64(
                stream, self._base + 8 * slot, value, _WRITE_DEFAULT
            )
            _checked("a counter cannot be written", answer[0])
            return slot, value

    def close(self) -> None:
        """Free the counters."""
        with _context(self._ordinal):
            driver.cuMemFree(self._base)
