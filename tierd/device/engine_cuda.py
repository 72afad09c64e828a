"""The engine's side of CUDA: exports of its memory, and events that order copies after its work.

Needs cuda-bindings, a dependency of torch, and a context on the GPU. Imports neither torch nor
cupy, so memory and streams are given as numbers. Not yet run on a GPU.
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
"""Events of an engine, used in turn. A copy may wait for a later record of a reused event, never
for an earlier one. Also the maximum number of streams that record counters."""

COUNTER_BYTES: Final = 2 << 20
"""Granularity of cudaMalloc; a smaller allocation would expose its neighbours to the daemon."""

_EVENT_FLAGS: Final = 2 | 4
"""Flags: without timing, and shareable with other processes."""

_POSIX_FD: Final = 1
_DEVICE_MEMORY: Final = 2
_WRITE_DEFAULT: Final = 0

_FDS_SPARE: Final = 256
"""Descriptors to leave to the engine when each chunk of memory takes one."""

T = TypeVar("T")


class MemorySpan(NamedTuple):
    """Memory of the engine, such as a tensor's `untyped_storage()`."""

    address: int
    size_bytes: int


class Facts(NamedTuple):
    """The driver's attributes of an address."""

    memory_type: int
    managed: bool
    legacy_ipc: bool
    handle_types: int
    pooled: bool


class SpanPlace(NamedTuple):
    """The position of a span: the index of its export, and the offset in it."""

    export: int
    offset: int


def export_kind(facts: Facts) -> ExportKind:
    """Return how memory of this kind can be shared with another process.

    Raises CannotOpenError, which names the setting to change, if it cannot be shared.
    """
    if facts.managed:
        raise CannotOpenError(
            "managed memory cannot be shown to another process: use an allocator that uses "
            "cudaMalloc, not cudaMallocManaged"
        )
    if facts.memory_type != _DEVICE_MEMORY:
        raise CannotOpenError("the engine's KV memory is not GPU memory")
    if facts.legacy_ipc:
        return ExportKind.CUDA_IPC
    if facts.pooled:
        raise CannotOpenError(
            "memory of cudaMallocAsync cannot be shown to another process: remove "
            "backend:cudaMallocAsync from PYTORCH_CUDA_ALLOC_CONF"
        )
    if facts.handle_types & _POSIX_FD:
        return ExportKind.CUDA_VMM
    raise CannotOpenError(
        "the engine's memory was allocated without a file descriptor for other processes (handle "
        f"types {facts.handle_types}): with expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF, "
        "set it to False or unset TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=0; with vLLM's sleep mode "
        "or cumem allocator, remove --enable-sleep-mode and --enable-cumem-allocator"
    )


def chains(chunks: Iterable[MemorySpan]) -> list[list[MemorySpan]]:
    """Return distinct chunks by address, grouped so that a group's chunks are contiguous."""
    found: list[list[MemorySpan]] = []
    for chunk in sorted(set(chunks)):
        last = found[-1][-1] if found else None
        if last is not None and last.address + last.size_bytes == chunk.address:
            found[-1].append(chunk)
        else:
            found.append([chunk])
    return found


def places(spans: Sequence[MemorySpan], allocations: Sequence[MemorySpan]) -> list[SpanPlace]:
    """Return the place of each span in these allocations, which are sorted by address."""
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
    """Return why `needed` descriptors exceed the limit, or an empty text if they do not."""
    if needed + _FDS_SPARE <= limit:
        return ""
    return (
        f"the engine's memory has {needed} chunks, each of which takes a file descriptor, and the "
        f"limit is {limit}: raise `ulimit -n` (LimitNOFILE=), or set expandable_segments:False"
    )


class _HasPointer(Protocol):
    def getPtr(self) -> int: ...  # noqa: N802 - the binding's name.


def handle_bytes(handle: _HasPointer) -> bytes:
    """Return the 64 bytes of an IPC handle; newer bindings have no attribute for them."""
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
    """Make the GPU's primary context, which torch uses, current in this thread."""
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
    """Return the UUID of the engine's GPU, which identifies it in every process."""
    with _context(ordinal):
        return bytes(_value("the GPU has no UUID", driver.cuDeviceGetUuid(ordinal)).bytes)


def _facts(address: int) -> Facts:
    kinds = driver.CUpointer_attribute
    what = f"the driver does not know address {address:#x}"
    kind = driver.cuPointerGetAttribute(kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)

    def ask(attribute: driver.CUpointer_attribute) -> int:
        """Return the attribute, or 0 if this kind of memory does not have it."""
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
    """Yield the allocation of a span; for reserved addresses, each physical chunk it touches."""
    address = span.address
    while address < span.address + span.size_bytes:
        result, base, size_bytes = driver.cuMemGetAddressRange(address)
        _checked(f"the driver does not know address {address:#x}", result)
        yield MemorySpan(int(base), size_bytes)
        address = int(base) + size_bytes


class Exports:
    """The allocations that hold some memory of the engine, which must not move.

    Owns the descriptors of the exports' parts until `close`; the daemon has duplicates by then.
    """

    def __init__(self, ordinal: int, spans: Sequence[MemorySpan]) -> None:
        """Raises CannotOpenError, which names the setting to change; then nothing stays open."""
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
        """The place of each span, in the order of `spans`."""

    def close(self) -> None:
        """Close the descriptors; idempotent."""
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
    """IPC events that order copies after the engine's work.

    The daemon opens them at attach, which fails if daemon and engine do not share /dev/shm;
    `Counters` work without it. Close them only after the daemon has closed them.
    """

    def __init__(self, ordinal: int) -> None:
        """Raises CannotOpenError if the GPU has no IPC events: use Counters then."""
        self._ordinal = ordinal
        self._events: list[driver.CUevent] = []
        self._next = 0
        self._lock = threading.Lock()
        what = "IPC events are not available"
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
        """Return an event and a value for a job that must follow the stream's work so far.

        Call it outside of graph capture. The job may be sent after this has returned.
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
    """Counters in GPU memory, one per stream, that order copies after the engine's work."""

    def __init__(self, ordinal: int) -> None:
        """Raises CannotOpenError."""
        self._ordinal = ordinal
        self._lock = threading.Lock()
        self._slots: dict[int, int] = {}
        self._values = [0] * EVENTS
        what = "GPU memory for counters cannot be allocated"
        with _context(ordinal):
            self._base = int(_value(what, driver.cuMemAlloc(COUNTER_BYTES)))
            _checked(what, driver.cuMemsetD8(self._base, 0, COUNTER_BYTES)[0])
            # The memset is in no stream's order, and must not overwrite a first value.
            _checked(what, driver.cuCtxSynchronize()[0])
        self.span = MemorySpan(self._base, COUNTER_BYTES)
        """Memory to export with the pages."""

    def handles(self, place: SpanPlace) -> tuple[bytes, ...]:
        """Return the handles of the counters; `place` is the place of `span` in the exports."""
        return tuple(counter_handle(place.export, place.offset + 8 * i) for i in range(EVENTS))

    def record(self, stream: int) -> tuple[int, int]:
        """Like `Events.record`. Raises CannotOpenError for more than EVENTS streams."""
        # The lock ensures that a stream's values are enqueued in ascending order.
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
