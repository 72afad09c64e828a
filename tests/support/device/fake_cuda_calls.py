"""The functions of fake_cuda, with the libraries' names and return values."""

# ruff: noqa: N802, N815

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import os
import struct
from collections.abc import Iterator

from cuda.bindings import driver as bindings
from cupy.cuda import runtime as real_runtime

from tests.support.device.fake_cuda import HOST_VIEW, Area, FakeCuda, mmap, munmap
from tierd.device import cuda, engine_cuda, kernels

Result = tuple[int]


def install(fake: FakeCuda) -> Driver:
    """Replace the libraries, for the rest of this process."""
    cuda.runtime = Runtime(fake)  # type: ignore[assignment]
    driver = Driver(fake)
    cuda.driver = engine_cuda.driver = driver  # type: ignore[assignment]
    return driver


@contextlib.contextmanager
def installed(fake: FakeCuda) -> Iterator[Driver]:
    """Replace the libraries within the block."""
    before = cuda.runtime, cuda.driver, engine_cuda.driver
    try:
        yield install(fake)
    finally:
        cuda.runtime, cuda.driver, engine_cuda.driver = before
        fake.stop()


class Runtime:
    """Stands for cupy.cuda.runtime."""

    CUDARuntimeError = real_runtime.CUDARuntimeError
    memcpyHostToDevice = 1
    memcpyDeviceToHost = 2
    eventDisableTiming = 2
    streamNonBlocking = 1

    def __init__(self, fake: FakeCuda) -> None:
        self._fake = fake

    def __getattribute__(self, name: str):
        found = object.__getattribute__(self, name)
        if name.startswith("_") or not callable(found) or name == "CUDARuntimeError":
            return found
        fake = self._fake

        def call(*arguments):
            fake.calls[name] += 1
            code = fake.fail.pop(name, fake.broken)
            if not code and name != "setDevice" and not getattr(fake.local, "bound", False):
                code = 0 if name == "getDeviceCount" else 201
            if name in ("eventQuery", "streamQuery"):
                return code or found(*arguments)
            if code:
                raise real_runtime.CUDARuntimeError(code)
            with fake.lock:
                return found(*arguments)

        return call

    def _raise(self, code: int) -> None:
        raise real_runtime.CUDARuntimeError(code)

    def setDevice(self, ordinal: int) -> None:
        assert ordinal < len(self._fake.uuids)
        self._fake.local.bound = True
        self._fake.ordinals.add(ordinal)

    def getDeviceCount(self) -> int:
        return len(self._fake.uuids)

    def mallocAsync(self, size: int, stream: int) -> int:
        return self._fake.allocate(size, "pool")

    def freeAsync(self, address: int, stream: int) -> None:
        assert self._fake.areas[address].kind == "pool"
        self._fake.drop(address)

    def hostRegister(self, address: int, size: int, flags: int) -> None:
        if any(address < x + n and x < address + size for x, n in self._fake.pinned.items()):
            self._raise(712)
        self._fake.pinned[address] = size

    def hostUnregister(self, address: int) -> None:
        if self._fake.pinned.pop(address, None) is None:
            self._raise(713)

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        fake = self._fake
        code, fd = fake.open_handle(handle)
        if code:
            self._raise(code)
        inode = os.fstat(fd).st_ino
        for area in fake.areas.values():
            if area.kind == "opened" and os.fstat(area.fd).st_ino == inode:
                os.close(fd)
                fake.opened[area.address] += 1
                return area.address
        size = os.fstat(fd).st_size
        address = mmap(size, fd)
        fake.areas[address] = Area(address, size, fd, "opened")
        fake.opened[address] = 1
        return address

    def ipcCloseMemHandle(self, address: int) -> None:
        fake = self._fake
        assert fake.areas[address].kind == "opened"
        fake.opened[address] -= 1
        if not fake.opened[address]:
            del fake.opened[address]
            fake.drop(address)

    def ipcOpenEventHandle(self, handle: bytes) -> int:
        code, fd = self._fake.open_handle(handle)
        if code:
            self._raise(code)
        return self._fake.new_event(fd)

    def eventCreateWithFlags(self, flags: int) -> int:
        return self._fake.created_event()

    def eventDestroy(self, event: int) -> None:
        os.close(self._fake.events.pop(event)[1])

    def eventRecord(self, event: int, stream: int) -> None:
        self._fake.record(event, stream)

    def eventQuery(self, event: int) -> int:
        counts, _ = self._fake.events[event]
        return 0 if counts[1] >= counts[0] else 600

    def streamCreateWithPriority(self, flags: int, priority: int) -> int:
        stream = self._fake.number()
        self._fake.streams[stream] = collections.deque()
        return stream

    def streamDestroy(self, stream: int) -> None:
        assert not self._fake.streams.pop(stream)

    def streamQuery(self, stream: int) -> int:
        return 0 if self._fake.idle(stream) else 600

    def streamSynchronize(self, stream: int) -> None:
        assert self._fake.idle(stream), "only streams of which nothing was asked are waited for"

    def streamWaitEvent(self, stream: int, event: int) -> None:
        counts, _ = self._fake.events[event]
        newest = int(counts[0])
        self._fake.put_wait(stream, lambda: bool(counts[1] >= newest))

    def memcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        self._fake.put(stream, lambda: self._fake.move(to, source, size))

    def memcpy2DAsync(
        self,
        to: int,
        to_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        rows: int,
        kind: int,
        stream: int,
    ) -> None:
        if not width <= min(to_pitch, source_pitch) <= self._fake.pitch_max:
            self._raise(12)
        if max(to_pitch, source_pitch) > self._fake.pitch_max:
            self._raise(12)
        for row in range(rows):
            self.memcpyAsync(to + row * to_pitch, source + row * source_pitch, width, kind, stream)


class Driver:
    """Stands for cuda.bindings.driver. Its types are the real ones."""

    def __init__(self, fake: FakeCuda) -> None:
        self._fake = fake
        self.retained = 0
        """Handles of physical memory that have not been released."""
        self.contexts = 0
        """Contexts that were pushed and not popped."""

    def __getattr__(self, name: str):
        return getattr(bindings, name)

    def __getattribute__(self, name: str):
        found = object.__getattribute__(self, name)
        if not name.startswith("cu"):
            return found
        fake = self._fake

        def call(*arguments):
            fake.calls[name] += 1
            code = fake.fail.pop(name, fake.broken)
            free = ("cuInit", "cuDevice", "cuCtx")
            if not code and not name.startswith(free) and not getattr(fake.local, "bound", False):
                code = 201
            with fake.lock:
                answer = found(*arguments) if not code else None
            if answer is None:
                answers = {"Result": 1, "tuple[int, int, int]": 3}
                width = answers.get(found.__annotations__.get("return", ""), 2)
                return (bindings.CUresult(code), 0, 0)[:width]
            return (bindings.CUresult(answer[0]), *answer[1:])

        return call

    def cuInit(self, flags: int) -> Result:
        return (0,)

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return 0, len(self._fake.uuids)

    def cuDeviceGetUuid(self, ordinal: int):
        uuid = bindings.CUuuid()
        ctypes.memmove(uuid.getPtr(), self._fake.uuids[ordinal], 16)
        return 0, uuid

    def cuDeviceGetName(self, length: int, ordinal: int) -> tuple[int, bytes]:
        return 0, b"Fake GPU" + bytes(length - 8)

    def cuDeviceGetAttribute(self, attribute: int, ordinal: int) -> tuple[int, int]:
        kinds = bindings.CUdevice_attribute
        return 0, {
            kinds.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: int(
                self._fake.host_pointers
            ),
            kinds.CU_DEVICE_ATTRIBUTE_MAX_PITCH: self._fake.pitch_max,
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 9,
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: 0,
            kinds.CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED: 1,
        }[kinds(attribute)]

    def cuDevicePrimaryCtxRetain(self, ordinal: int):
        self.retained += 1
        return 0, bindings.CUcontext(1)

    def cuDevicePrimaryCtxRelease(self, ordinal: int) -> Result:
        self.retained -= 1
        return (0,)

    def cuCtxPushCurrent(self, context) -> Result:
        self.contexts += 1
        self._fake.local.bound = True
        return (0,)

    def cuCtxPopCurrent(self):
        self.contexts -= 1
        return 0, bindings.CUcontext(1)

    def cuCtxSynchronize(self) -> Result:
        return (0,)

    def cuGetProcAddress(self, symbol: bytes, version: int, flags: int) -> tuple[int, int, int]:
        assert (symbol, version, flags) == (b"cuMemcpyBatchAsync", 13_000, 0)
        return 0, ctypes.cast(self._fake.batch_entry, ctypes.c_void_p).value or 0, 0

    def cuMemAlloc(self, size: int) -> tuple[int, int]:
        return 0, self._fake.allocate(size, "malloc")

    def cuMemFree(self, address: int) -> Result:
        self._fake.drop(address)
        return (0,)

    def cuMemsetD8(self, address: int, value: int, size: int) -> Result:
        ctypes.memset(address, value, size)
        return (0,)

    def cuMemGetAddressRange(self, address: int) -> tuple[int, int, int]:
        area = self._fake.area(address)
        return (0, area.address, area.size) if area is not None else (1, 0, 0)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[int, int]:
        return (0, address + HOST_VIEW) if address in self._fake.pinned else (1, 0)

    def cuPointerGetAttribute(self, attribute: int, address: int):
        area = self._fake.area(address)
        if area is None:
            return 1, 0
        kinds = bindings.CUpointer_attribute
        if attribute == kinds.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE and area.kind != "pool":
            return 1, None
        return 0, {
            kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE: 2,
            kinds.CU_POINTER_ATTRIBUTE_IS_MANAGED: area.kind == "managed",
            kinds.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: area.kind == "malloc",
            kinds.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: area.handle_types,
            kinds.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: bindings.CUmemoryPool(7),
        }[kinds(attribute)]

    def cuIpcGetMemHandle(self, address: int):
        area = self._fake.areas.get(address)
        if area is None or area.kind != "malloc":
            return 1, None
        handle = bindings.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), self._fake.handle(area.fd), 64)
        return 0, handle

    def cuEventCreate(self, flags: int):
        assert flags == 6
        return 0, bindings.CUevent(self._fake.created_event())

    def cuEventDestroy(self, event) -> Result:
        os.close(self._fake.events.pop(int(event))[1])
        return (0,)

    def cuEventRecord(self, event, stream: int) -> Result:
        self._fake.record(int(event), stream)
        return (0,)

    def cuIpcGetEventHandle(self, event):
        handle = bindings.CUipcEventHandle()
        fd = self._fake.events[int(event)][1]
        ctypes.memmove(handle.getPtr(), self._fake.handle(fd), 64)
        return 0, handle

    def cuStreamWriteValue64(self, stream: int, address: int, value: int, flags: int) -> Result:
        if not self._fake.is_device(address, 8):
            return (1,)
        self._fake.put(stream, lambda: self._fake.write(address, value.to_bytes(8, "little")))
        return (0,)

    def cuStreamWaitValue64(self, stream: int, address: int, value: int, flags: int) -> Result:
        assert not flags, "at least the value"
        if not self._fake.is_device(address, 8):
            return (1,)

        def reached() -> bool:
            if not self._fake.is_device(address, 8):
                self._fake.broken = 700
                return False
            return int(ctypes.c_uint64.from_address(address).value) >= value

        self._fake.put_wait(stream, reached)
        return (0,)

    def cuModuleLoadData(self, image: bytes):
        assert image == kernels.compile_for("sm_90")
        return 0, bindings.CUmodule(1)

    def cuModuleGetFunction(self, module, name: bytes):
        return 0, bindings.CUfunction({kernels.GATHER: 1, kernels.SCATTER: 2}[name])

    def cuLaunchKernel(self, function, *arguments) -> Result:
        *sizes, stream, parameters, _ = arguments
        assert sizes == [kernels.BLOCKS, 1, 1, kernels.THREADS, 1, 1, 0]
        at = ctypes.c_size_t.from_address(parameters).value
        staging, count, _ = struct.unpack("<QII", ctypes.string_at(at, 16))
        gather = int(function) == 1
        for page, staged, size in struct.iter_unpack("<QII", ctypes.string_at(at + 16, 16 * count)):
            to, source = (staging + staged, page) if gather else (page, staging + staged)
            self._fake.put(stream, functools.partial(self._fake.move, to, source, size))
        return (0,)

    # Reserved addresses; a handle is its area's descriptor

    def cuMemRetainAllocationHandle(self, address: int):
        area = self._fake.area(address)
        if area is None or area.kind != "chunk":
            return 1, None
        self.retained += 1
        return 0, bindings.CUmemGenericAllocationHandle(os.dup(area.fd))

    def cuMemExportToShareableHandle(self, handle, kind: int, flags: int) -> tuple[int, int]:
        assert kind == bindings.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return 0, os.dup(int(handle))

    def cuMemImportFromShareableHandle(self, fd: int, kind: int):
        assert kind == bindings.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        try:
            handle = os.dup(fd)
        except OSError:
            return 1, None
        self.retained += 1
        return 0, bindings.CUmemGenericAllocationHandle(handle)

    def cuMemRelease(self, handle) -> Result:
        os.close(int(handle))
        self.retained -= 1
        return (0,)

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int):
        base = mmap(size, -1)
        self._fake.areas[base - 1] = Area(base, size, -1, "reserved")
        return 0, bindings.CUdeviceptr(base)

    def cuMemAddressFree(self, address: int, size: int) -> Result:
        area = self._fake.areas.pop(address - 1)
        assert area.size == size
        assert not self._fake.is_device(address, 1), "unmapped first"
        munmap(address, size)
        return (0,)

    def cuMemMap(self, address: int, size: int, offset: int, handle, flags: int) -> Result:
        if os.fstat(int(handle)).st_size != size:
            return (1,)
        mmap(size, int(handle), address)
        self._fake.areas[address] = Area(address, size, os.dup(int(handle)), "chunk")
        return (0,)

    def cuMemSetAccess(self, address: int, size: int, access: list, count: int) -> Result:
        assert count == len(access) == 1
        assert self._fake.is_device(address, size)
        return (0,)

    def cuMemUnmap(self, address: int, size: int) -> Result:
        area = self._fake.areas.pop(address)
        mmap(size, -1, address)
        os.close(area.fd)
        return (0,)
