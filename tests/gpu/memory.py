"""The engine's memory that the checks copy: of a GPU with torch, of the host, or of fake CUDA.

Runs in the engine's process only. Work on the stream is asynchronous and in order.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from tierd.device.engine_cuda import Counters, Events, Exports, MemorySpan
from tierd.device.engine_host import HostEvent, HostExport
from tierd.shared_memory.exports import Export

UUID = bytes(range(16, 32))
"""The UUID of fake CUDA's GPU."""

CHUNK_BYTES = 2 << 20


class Memory(ABC):
    """Tensors of bytes, which keep their addresses, and a stream."""

    handles: Sequence[bytes]
    """Events for the daemon, set once `show` has returned."""

    @abstractmethod
    def allocate(self, size_bytes: int) -> int:
        """Allocate memory; returns its address."""

    @abstractmethod
    def show(
        self, spans: list[MemorySpan], *, counters: bool
    ) -> tuple[Sequence[Export], list[tuple[int, int]]]:
        """Export tensors, with counters or native events; returns allocation and offset of each."""

    @abstractmethod
    def read(self, address: int, size_bytes: int) -> bytes:
        """The bytes once the stream is idle."""

    @abstractmethod
    def write(self, address: int, data: bytes) -> None:
        """Put a write on the stream."""

    @abstractmethod
    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Put a copy on the stream."""

    @abstractmethod
    def delay(self, seconds: float) -> None:
        """Put work of this duration on the stream."""

    def step(self) -> None:
        """Run a substitute for a step of a model, and wait for it."""
        time.sleep(0.001)

    @abstractmethod
    def record(self) -> tuple[int, int]:
        """Event and value that are reached when the stream has done its present work."""


class HostMemory(Memory):
    """Memfds, and a thread as the stream."""

    def __init__(self) -> None:
        self._exports: dict[int, HostExport] = {}
        self._event: HostEvent | None = None
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._work.get()()

    def allocate(self, size_bytes: int) -> int:
        export = HostExport(size_bytes)
        self._exports[export.address] = export
        return export.address

    def show(
        self, spans: list[MemorySpan], *, counters: bool
    ) -> tuple[Sequence[Export], list[tuple[int, int]]]:
        exports = [self._exports[span.address] for span in spans]
        exports.append(HostExport(4096))
        self._event = HostEvent(exports[-1], len(spans), 8)
        self.handles = (self._event.handle,)
        return [export.export for export in exports], [(i, 0) for i in range(len(spans))]

    def read(self, address: int, size_bytes: int) -> bytes:
        done = threading.Event()
        self._work.put(done.set)
        done.wait()
        return ctypes.string_at(address, size_bytes)

    def write(self, address: int, data: bytes) -> None:
        self._work.put(lambda: ctypes.memmove(address, data, len(data)))

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        self._work.put(lambda: ctypes.memmove(target, source, size_bytes))

    def delay(self, seconds: float) -> None:
        self._work.put(lambda: time.sleep(seconds))

    def record(self) -> tuple[int, int]:
        assert self._event is not None
        value = self._event.promise()
        self._work.put(self._event.record)
        return 0, value


class CudaMemory(Memory):
    """CUDA memory, exported by the same means as engines use. Subclasses allocate it."""

    stream: int

    def __init__(self) -> None:
        self._events: Events | Counters | None = None
        self._shown: Exports | None = None

    def show(
        self, spans: list[MemorySpan], *, counters: bool
    ) -> tuple[Sequence[Export], list[tuple[int, int]]]:
        events = Counters(0) if counters else Events(0)
        more = [events.span] if isinstance(events, Counters) else []
        shown = Exports(0, [*spans, *more])
        self.handles = (
            events.handles(shown.places[-1]) if isinstance(events, Counters) else events.handles
        )
        self._events, self._shown = events, shown
        return shown.exports, [(place.export, place.offset) for place in shown.places[: len(spans)]]

    def record(self) -> tuple[int, int]:
        assert self._events is not None
        return self._events.record(self.stream)


class FakeMemory(CudaMemory):
    """CUDA in host memory."""

    def __init__(self, kind: str) -> None:
        from tests.support.device.fake_cuda import FakeCuda
        from tests.support.device.fake_cuda_calls import install

        super().__init__()
        self._fake = FakeCuda([UUID])
        self._driver = install(self._fake)
        self._driver.cuCtxPushCurrent(None)
        self._expandable = kind != "fake"
        self._handle_types = 0 if kind == "fake-none" else 1
        self.stream = 7

    def allocate(self, size_bytes: int) -> int:
        if self._expandable:
            chunks = -(-size_bytes // CHUNK_BYTES)
            return self._fake.expandable(CHUNK_BYTES, chunks, self._handle_types)
        return int(self._driver.cuMemAlloc(size_bytes)[1])

    def read(self, address: int, size_bytes: int) -> bytes:
        self._fake.synchronize()
        return ctypes.string_at(address, size_bytes)

    def write(self, address: int, data: bytes) -> None:
        self._fake.put(self.stream, lambda: self._fake.write(address, data))

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        self._fake.put(self.stream, lambda: self._fake.move(target, source, size_bytes))

    def delay(self, seconds: float) -> None:
        self._fake.delay(self.stream, seconds)


class TorchMemory(CudaMemory):
    """A GPU's memory from torch's allocator, configured by PYTORCH_CUDA_ALLOC_CONF."""

    def __init__(self) -> None:
        import torch

        super().__init__()
        self._torch = torch
        self._tensors: dict[int, torch.Tensor] = {}
        torch.cuda.init()
        self._stream = torch.cuda.Stream()
        self.stream = self._stream.cuda_stream
        self._per_s = self._cycles_per_s()
        self._weights = torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda")
        self._activations = torch.ones(64, 4096, dtype=torch.bfloat16, device="cuda")

    def _cycles_per_s(self) -> float:
        """Cycles per second of the kernel that does nothing."""
        cycles = 10_000_000
        self._torch.cuda._sleep(cycles)
        self._torch.cuda.synchronize()
        begin = time.perf_counter()
        self._torch.cuda._sleep(cycles)
        self._torch.cuda.synchronize()
        return cycles / (time.perf_counter() - begin)

    def allocate(self, size_bytes: int) -> int:
        tensor = self._torch.zeros(size_bytes, dtype=self._torch.uint8, device="cuda")
        self._torch.cuda.synchronize()
        self._tensors[tensor.data_ptr()] = tensor
        return int(tensor.data_ptr())

    def _slice(self, address: int, size_bytes: int):
        base = max(base for base in self._tensors if base <= address)
        return self._tensors[base][address - base : address - base + size_bytes]

    def read(self, address: int, size_bytes: int) -> bytes:
        self._torch.cuda.synchronize()
        return bytes(self._slice(address, size_bytes).cpu().numpy())

    def write(self, address: int, data: bytes) -> None:
        # Copied to the GPU now; only the copy within the GPU is on the stream.
        source = self._torch.frombuffer(bytearray(data), dtype=self._torch.uint8).cuda()
        self._torch.cuda.current_stream().synchronize()
        with self._torch.cuda.stream(self._stream):
            self._slice(address, len(data)).copy_(source)
        source.record_stream(self._stream)

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        with self._torch.cuda.stream(self._stream):
            self._slice(target, size_bytes).copy_(self._slice(source, size_bytes))

    def delay(self, seconds: float) -> None:
        with self._torch.cuda.stream(self._stream):
            self._torch.cuda._sleep(int(seconds * self._per_s))

    def step(self) -> None:
        # Like a decoding step: matrices read once, by many short kernels.
        with self._torch.cuda.stream(self._stream):
            for _ in range(100):
                self._activations = self._torch.tanh(self._activations @ self._weights)
        self._stream.synchronize()


def managed() -> int:
    """Managed memory of the GPU, which cannot be exported."""
    from cuda.bindings import driver

    result, address = driver.cuMemAllocManaged(CHUNK_BYTES, 1)
    assert not result
    return int(address)


def memory_of(kind: str) -> Memory:
    """The memory of an engine of this kind."""
    if kind == "host":
        return HostMemory()
    if kind.startswith("fake"):
        return FakeMemory(kind)
    return TorchMemory()
