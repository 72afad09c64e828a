"""The CUDA device and its engine's side over CUDA in host memory: all but the GPU itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tests.support.device.fake_cuda import FakeCuda
from tests.support.device.fake_cuda_calls import installed
from tierd.device import cuda
from tierd.device.api import CannotOpenError, DeviceError, Direction, Pitched
from tierd.device.choice import finish
from tierd.device.cuda import CudaDevice
from tierd.device.engine_cuda import (
    EVENTS,
    Counters,
    Events,
    Exports,
    Facts,
    MemorySpan,
    SpanPlace,
    chains,
    descriptors_error,
    device_uuid,
    export_kind,
    places,
)
from tierd.shared_memory.exports import (
    Export,
    ExportKind,
    Part,
    counter_handle,
    device_text,
    native_handle,
)

UUID = bytes(range(16, 32))
OTHER = bytes(range(64, 80))
MIB = 1 << 20


@pytest.fixture(params=[True, False], ids=["host pointers", "device pointers"])
def fake(request):
    made = FakeCuda([OTHER, UUID], host_pointers=request.param)
    with installed(made) as driver:
        yield made
    assert not driver.retained
    assert not driver.contexts


@pytest.fixture
def device(fake):
    found = CudaDevice.find(UUID)
    yield found
    found.shut()
    assert not fake.opened
    assert not fake.pinned


class Host:
    """Pinned host memory."""

    def __init__(self, device, size_bytes):
        self.bytes = np.zeros(size_bytes, np.uint8)
        self.address = self.bytes.ctypes.data
        device.pin(self.address, size_bytes)


def addresses(*values):
    return np.array(values, np.uint64)


def device_bytes(address, size):
    return np.frombuffer((ctypes.c_char * size).from_address(address), np.uint8)


class Peer:
    """Another process, in which an engine would run: opening one's own handles is refused."""

    CODE = """
import os, sys
from tests.support.device.fake_cuda import FakeCuda
from tests.support.device.fake_cuda_calls import install
from tierd.device.engine_cuda import Events, Exports, MemorySpan
fake = FakeCuda([bytes(range(16, 32))])
driver = install(fake)
driver.cuCtxPushCurrent(None)
_, base = driver.cuMemAlloc(1 << 20)
exports = Exports(0, [MemorySpan(base + 4096, 4096)])
events = Events(0)
print(exports.exports[0].handle.hex(), exports.places[0].offset, events.handles[0].hex())
sys.stdout.flush()
for line in sys.stdin:
    fake.delay(5, 0.05)
    fake.put(5, lambda: fake.write(base, b"engine"))
    events.record(5)
    print("recorded", flush=True)
"""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        handle, offset, event = self._line().split()
        self.export = Export(ExportKind.CUDA_IPC, UUID, MIB, bytes.fromhex(handle))
        self.event = bytes.fromhex(event)
        self.offset = int(offset)

    def _line(self):
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def write_later(self):
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self._line() == "recorded\n"

    def kill(self):
        self.process.kill()
        with contextlib.ExitStack() as stack:
            for pipe in (self.process.stdin, self.process.stdout):
                assert pipe is not None
                stack.callback(pipe.close)
            self.process.wait()


@pytest.fixture
def peer():
    made = Peer()
    yield made
    made.kill()


# --- opening ------------------------------------------------------------------------


def test_gpu_is_found_by_uuid_not_by_ordinal(fake):
    """CUDA_VISIBLE_DEVICES would make the daemon copy from another engine's GPU."""
    assert CudaDevice.find(UUID).name == f"Fake GPU {device_text(UUID)}"
    assert fake.ordinals == {1}
    assert "GPU-10111213-1415-" in CudaDevice.find(UUID).name
    with pytest.raises(CannotOpenError, match=r"is not visible.*CUDA_VISIBLE_DEVICES.*--gpus"):
        CudaDevice.find(bytes(16))


@pytest.mark.parametrize(
    ("call", "code", "words"),
    [
        ("setDevice", 46, "compute mode is exclusive"),
        ("setDevice", 2, "gpu_memory_utilization"),
        ("getDeviceCount", 35, "older than CUDA 13"),
        ("cuInit", 999, "DeviceAllow"),
    ],
)
def test_a_gpu_that_cannot_be_used_says_what_to_change(fake, call, code, words):
    """An operator would read a number."""
    fake.fail[call] = code
    with pytest.raises(CannotOpenError, match=words):
        CudaDevice.find(UUID)


@pytest.mark.slow
def test_allocation_is_reference_counted(fake, device, peer):
    """A mapping that is left open keeps a dead engine's GPU memory."""
    address = device.open(peer.export)
    assert device.open(peer.export) == address
    # The same handle bytes of another process are another allocation, whatever the driver says.
    again = device.open(Export(*peer.export))
    assert fake.calls["ipcOpenMemHandle"] == 2
    device.close(address)
    device.close(address)
    assert fake.opened[again] == 2
    device.close(again)
    assert not fake.opened


@pytest.mark.slow
def test_stream_waits_for_a_peers_event(fake, device, peer):
    """A store would read the page before the step that computes it."""
    base = device.open(peer.export)
    event = device.open_event(peer.event, [base])
    stream = device.create_stream(urgent=False)
    host = Host(device, 6)
    peer.write_later()
    device.wait(stream, event, 0)
    device.copy(addresses(base), addresses(host.address), addresses(6), Direction.STORE, stream)
    finish(device, stream)
    assert host.bytes.tobytes() == b"engine"
    device.close_event(event)


@pytest.mark.slow
def test_wrong_exports_and_events_are_refused(fake, device, peer):
    """A wrong size would let a copy run over the end of the mapping."""
    with pytest.raises(CannotOpenError, match=f"has {MIB} bytes, not the {MIB + 1}"):
        device.open(peer.export._replace(size_bytes=MIB + 1))
    with pytest.raises(CannotOpenError, match="is not Fake GPU"):
        device.open(peer.export._replace(device=OTHER))
    with pytest.raises(CannotOpenError, match="64 bytes"):
        device.open(peer.export._replace(handle=bytes(63)))
    with pytest.raises(CannotOpenError, match="host memory"):
        device.open(peer.export._replace(kind=ExportKind.MEMFD))
    assert not fake.opened
    base = device.open(peer.export)
    for handle, words in [
        (counter_handle(1, 0), "allocation 1, but only 1 exist"),
        (counter_handle(0, MIB - 4), "cannot lie"),
        (counter_handle(0, MIB), "cannot lie"),
        (native_handle(bytes(9)), "no known kind"),
        (b"", "no known kind"),
    ]:
        with pytest.raises(CannotOpenError, match=words):
            device.open_event(handle, [base])
    fake.fail["ipcOpenEventHandle"] = 1
    with pytest.raises(CannotOpenError, match="/dev/shm"):
        device.open_event(peer.event, [base])
    device.close(base)
    peer.kill()
    with pytest.raises(CannotOpenError, match="its engine is gone"):
        device.open(peer.export)


def test_equal_pids_in_two_pid_namespaces_are_reported(fake, device):
    """`invalid device context` says nothing to an operator who runs two containers."""
    driver = cuda.driver
    (base,) = (driver.cuMemAlloc(MIB)[1],)
    own = Exports(1, [MemorySpan(int(base), MIB)]).exports[0]
    with pytest.raises(CannotOpenError, match="same PID in another PID namespace"):
        device.open(own)


# --- reserved addresses -------------------------------------------------------------


def test_chunks_are_mapped_to_one_stretch(fake, device):
    """Without it KV of expandable segments or of vLLM's cumem allocator cannot be copied."""
    base = fake.expandable(2 * MIB, 3)
    spans = [MemorySpan(base + 100, 3 * MIB), MemorySpan(base + 5 * MIB, MIB)]
    exports = Exports(1, spans)
    (export,) = exports.exports
    assert export.kind is ExportKind.CUDA_VMM
    assert [part[:2] for part in export.parts] == [(i * 2 * MIB, 2 * MIB) for i in range(3)]
    assert exports.places == [SpanPlace(0, 100), SpanPlace(0, 5 * MIB)]
    mapped = device.open(export)
    exports.close()
    exports.close()
    device_bytes(base, 6 * MIB)[:] = np.arange(6 * MIB) % 251
    assert np.array_equal(device_bytes(mapped, 6 * MIB), device_bytes(base, 6 * MIB))
    device.close(mapped)
    assert fake.area(mapped) is None


@pytest.mark.parametrize(
    "failing", ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"]
)
def test_failed_mapping_leaves_nothing_open(fake, device, failing):
    """Reserved addresses and physical memory would be gone until the copy process ends."""
    exports = Exports(1, [MemorySpan(fake.expandable(2 * MIB, 2), 3 * MIB)])
    fake.fail[failing] = 999
    areas = len(fake.areas)
    with pytest.raises(CannotOpenError, match="cannot be mapped"):
        device.open(exports.exports[0])
    assert len(fake.areas) == areas
    exports.close()


@pytest.mark.parametrize("parts", [[], [(0, 4)], [(0, 4), (5, 4)], [(4, 4)], [(0, 0), (0, 8)]])
def test_parts_with_gaps_are_refused(fake, device, parts):
    """A copy into a gap would end the copy process."""
    wrong = Export(
        ExportKind.CUDA_VMM, UUID, 8, b"", tuple(Part(at, size, -1) for at, size in parts)
    )
    with pytest.raises(CannotOpenError, match="parts"):
        device.open(wrong)
    assert not fake.calls["cuMemAddressReserve"]


# --- copies -------------------------------------------------------------------------


def move(device, way, pages, host, direction, stream):
    lengths = np.full(4, 512, np.uint64)
    page_addresses = addresses(*(pages + 1024 * i for i in (2, 0, 3, 1)))
    slots = addresses(*(host + 512 * i for i in range(4)))
    if way == "copy":
        device.copy(page_addresses, slots, lengths, direction, stream)
    elif way == "pitched":
        pieces = [
            Pitched(int(p), 999, int(s), 777, 512, 1)
            for p, s in zip(page_addresses, slots, strict=True)
        ]
        device.copy_pitched(pieces, direction, stream)
    else:
        staging = device.allocate(2048)
        if direction is Direction.STORE:
            device.gather(page_addresses, lengths, staging, direction, stream)
        device.copy(addresses(staging), slots[:1], addresses(2048), direction, stream)
        if direction is Direction.LOAD:
            device.gather(page_addresses, lengths, staging, direction, stream)
        finish(device, stream)
        device.free(staging)
    finish(device, stream)


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("way", ["copy", "pitched", "gather"])
def test_every_way_moves_the_right_bytes(fake, device, way, pinned):
    """A wrong byte is a wrong token."""
    stream = device.create_stream(urgent=True)
    pages = device.allocate(4096)
    host = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    if pinned:
        device.pin(host.ctypes.data, 2048)
        device.pin(host.ctypes.data + 2048, 2048)
    content = host[:2048].copy()
    move(device, way, pages, host.ctypes.data, Direction.LOAD, stream)
    seen = device_bytes(pages, 4096).reshape(4, 1024)
    assert np.array_equal(seen[[2, 0, 3, 1], :512].ravel(), content)
    assert not seen[:, 512:].any()
    move(device, way, pages, host.ctypes.data + 2048, Direction.STORE, stream)
    assert np.array_equal(host[2048:], content)
    assert bool(fake.calls["batch"]) == (pinned and way != "pitched")
    device.free(pages)


def test_pitches_beyond_the_hardware_are_copied_row_by_row(fake, device):
    """Layers of a large cache lie further apart than a copy engine's pitch."""
    stream = device.create_stream(urgent=True)
    pages = device.allocate(4096)
    host = Host(device, 4096)
    host.bytes[:] = 7
    device._pitch_max = 512
    device.copy_pitched([Pitched(pages, 1024, host.address, 64, 64, 4)], Direction.LOAD, stream)
    finish(device, stream)
    assert not fake.calls["memcpy2DAsync"]
    rows = device_bytes(pages, 4096).reshape(4, 1024)
    assert (rows[:, :64] == 7).all()
    assert not rows[:, 64:].any()
    device.free(pages)


def test_a_store_does_not_read_its_pages_before_the_stream_has_waited(fake, device):
    """The batch's order attribute would let the copy engine read a page too early."""
    stream = device.create_stream(urgent=False)
    pages = device.allocate(16)
    host = Host(device, 16)
    fake.delay(stream, 0.02)
    fake.put(stream, lambda: fake.write(pages, b"after the waits!"))
    device.copy(addresses(pages), addresses(host.address), addresses(16), Direction.STORE, stream)
    finish(device, stream)
    assert host.bytes.tobytes() == b"after the waits!"
    device.free(pages)


def test_any_thread_may_be_the_first_to_call(fake, device):
    """CUDA returns a special error to a thread without a context."""
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(device.create_event()))
    thread.start()
    thread.join()
    assert answers
    device.close_event(answers[0])


@pytest.mark.parametrize(("code", "sticky"), [(700, True), (719, True), (214, True), (2, False)])
def test_sticky_errors_are_marked(fake, device, code, sticky):
    """A lost context would make every later copy fail, or a full memory end the process."""
    fake.fail["eventCreateWithFlags"] = code
    with pytest.raises(DeviceError, match=str(code)) as failure:
        device.create_event()
    assert failure.value.sticky is sticky
    event = device.create_event()
    fake.fail["eventQuery"] = code
    with pytest.raises(DeviceError, match="has failed") as failure:
        device.query(event)
    assert failure.value.sticky is sticky
    assert device.query(event), "never recorded"
    device.close_event(event)


def test_illegal_copy_breaks_the_context_permanently(fake, device):
    """The fake must be as strict as a GPU, or later tests prove nothing."""
    stream = device.create_stream(urgent=False)
    host = Host(device, 16)
    device.copy(addresses(4096), addresses(host.address), addresses(16), Direction.STORE, stream)
    with pytest.raises(DeviceError) as failure:
        finish(device, stream)
    assert failure.value.sticky
    fake.broken = 0


def test_shut_does_not_wait_for_a_stream_that_waits_forever(fake, monkeypatch):
    """The daemon could not stop after an engine died in the middle of a step."""
    monkeypatch.setattr(cuda, "_SHUT_TIMEOUT_S", 0.01)
    device = CudaDevice.find(UUID)
    stream = device.create_stream(urgent=False)
    fake.put_wait(stream, lambda: False)
    begin = time.monotonic()
    device.shut()
    device.shut()
    assert time.monotonic() - begin < 5


# --- the engine's side --------------------------------------------------------------

LEGACY = Facts(memory_type=2, managed=False, legacy_ipc=True, handle_types=0, pooled=False)


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        (LEGACY, ExportKind.CUDA_IPC),
        (LEGACY._replace(legacy_ipc=False, handle_types=1), ExportKind.CUDA_VMM),
        (LEGACY._replace(legacy_ipc=False, handle_types=9), ExportKind.CUDA_VMM),
    ],
)
def test_memory_is_exported_in_a_way_it_supports(facts, kind):
    """Reserved addresses have no IPC handle."""
    assert export_kind(facts) is kind


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (LEGACY._replace(managed=True), "cudaMallocManaged"),
        (LEGACY._replace(memory_type=1), "not GPU memory"),
        (LEGACY._replace(legacy_ipc=False, pooled=True, handle_types=1), "backend:cudaMallocAsync"),
        (LEGACY._replace(legacy_ipc=False), "expandable_segments.*--enable-sleep-mode"),
        (LEGACY._replace(legacy_ipc=False, handle_types=8), r"\(handle types 8\)"),
    ],
)
def test_error_of_unexportable_memory_names_the_setting(facts, words):
    """The engine would copy by itself forever, and its log would not say why."""
    with pytest.raises(CannotOpenError, match=words):
        export_kind(facts)


@pytest.mark.parametrize("kind", ["managed", "pool"])
def test_refusals_come_from_the_drivers_attributes(fake, kind):
    """The decision would be right, on facts that were read wrongly."""
    cuda.driver.cuCtxPushCurrent(cuda.driver.CUcontext(1))
    address = fake.allocate(MIB, kind)
    with pytest.raises(CannotOpenError, match="cannot be shown"):
        Exports(1, [MemorySpan(address, MIB)])
    with pytest.raises(CannotOpenError, match="does not know"):
        Exports(1, [MemorySpan(12, MIB)])
    cuda.driver.cuCtxPopCurrent()


def test_chunks_that_lie_end_to_end_are_one_allocation():
    """Two tensors in one chunk would be exported twice, or a gap be mapped."""
    a, b, c, d = MemorySpan(100, 10), MemorySpan(110, 10), MemorySpan(130, 5), MemorySpan(135, 1)
    assert chains([b, a, d, b, c]) == [[a, b], [c, d]]
    assert chains([]) == []
    assert places(
        [MemorySpan(112, 8), MemorySpan(130, 6)], [MemorySpan(100, 20), MemorySpan(130, 6)]
    ) == [
        SpanPlace(0, 12),
        SpanPlace(1, 0),
    ]


def test_too_many_chunks_for_the_descriptor_limit_are_reported():
    """The engine would run out of descriptors, and its requests fail."""
    assert not descriptors_error(100, 1024)
    assert "ulimit -n" in descriptors_error(1000, 1024)


def test_failed_export_leaves_no_descriptor(fake):
    """An engine that tries again would run out of descriptors."""
    spans = [MemorySpan(fake.expandable(2 * MIB, 2), 3 * MIB)]
    before = len(os.listdir("/proc/self/fd"))
    fake.fail["cuMemExportToShareableHandle"] = 801
    with pytest.raises(CannotOpenError, match="no file descriptor"):
        Exports(1, spans)
    assert len(os.listdir("/proc/self/fd")) == before


def test_two_tensors_of_one_allocation_are_one_export(fake):
    """The daemon would map the same memory once a layer."""
    assert device_uuid(1) == UUID
    cuda.driver.cuCtxPushCurrent(cuda.driver.CUcontext(1))
    big, small = (int(cuda.driver.cuMemAlloc(size)[1]) for size in (4 * MIB, 2 * MIB))
    cuda.driver.cuCtxPopCurrent()
    spans = [MemorySpan(big + 512, 1024), MemorySpan(small, 2 * MIB), MemorySpan(big + MIB, MIB)]
    exports = Exports(1, spans)
    assert len(exports.exports) == 2
    for span, place in zip(spans, exports.places, strict=True):
        export = exports.exports[place.export]
        assert export.device == UUID
        assert export.size_bytes == (2 * MIB if span.address == small else 4 * MIB)
        assert place.offset == span.address - (small if span.address == small else big)


def test_events_are_reused_in_turn(fake):
    """A job would wait for another step than its own."""
    events = Events(1)
    assert len(events.handles) == EVENTS == len(set(events.handles))
    assert {len(handle) for handle in events.handles} == {65}
    assert [events.record(5) for _ in range(EVENTS + 1)] == [
        (i % EVENTS, 0) for i in range(EVENTS + 1)
    ]
    events.close()
    assert not fake.events


def test_each_stream_has_its_own_counter(fake, device):
    """Values of two streams in one counter would pass each other."""
    counters = Counters(1)
    assert counters.span.size_bytes == 2 * MIB
    assert [counters.record(stream) for stream in (5, 6, 5)] == [(0, 1), (1, 1), (0, 2)]
    first, second, *_ = counters.handles(SpanPlace(3, 64))
    assert first == counter_handle(3, 64)
    assert second == counter_handle(3, 72)
    for stream in range(100, 100 + EVENTS - 2):
        counters.record(stream)
    for _ in range(2):
        with pytest.raises(CannotOpenError, match="streams at most"):
            counters.record(1)
    assert counters.record(6) == (1, 2)
    fake.synchronize()
    counters.close()


def test_stream_waits_for_a_counter(fake, device):
    """Where IPC events are not available, a store would read too early."""
    stream = device.create_stream(urgent=False)
    pages = device.allocate(MIB)
    device._opened[pages] = cuda._Opened(MIB)
    event = device.open_event(counter_handle(0, 8), [pages])
    host = Host(device, 4)
    device.wait(stream, event, 3)
    device.copy(addresses(pages), addresses(host.address), addresses(4), Direction.STORE, stream)
    fake.write(pages, b"late")
    cuda.driver.cuStreamWriteValue64(7, pages + 8, 2, 0)
    done = device.create_event()
    device.record(done, stream)
    while not fake.idle(7):
        time.sleep(100e-6)
    assert not device.query(done)
    cuda.driver.cuStreamWriteValue64(7, pages + 8, 3, 0)
    finish(device, stream)
    assert host.bytes.tobytes() == b"late"
    device.close_event(event)
    del device._opened[pages]
    device.free(pages)
