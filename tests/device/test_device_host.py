"""The host device follows CUDA's rules: code that works with it must work on a GPU."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tierd.device.api import CannotOpenError, DeviceError, Direction, Pitched
from tierd.device.choice import finish
from tierd.device.engine_host import HostEvent, HostExport
from tierd.device.host import HostDevice
from tierd.shared_memory.exports import HOST_UUID, Export, ExportKind, Part, counter_handle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZE = 1 << 16


@pytest.fixture
def device() -> Iterator[HostDevice]:
    device = HostDevice()
    yield device
    device.shut()


@pytest.fixture
def memory() -> Iterator[HostExport]:
    memory = HostExport(SIZE)
    yield memory
    memory.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


class Held:
    """A stream that does nothing until it is let go: a kernel that takes long."""

    def __init__(self, device: HostDevice, memory: HostExport, offset: int = SIZE - 8) -> None:
        self.event = HostEvent(memory, 0, offset)
        self.stream = device.create_stream(urgent=False)
        opened = device.open_event(self.event.handle, [device.open(memory.export)])
        device.wait(self.stream, opened, self.event.promise())

    def let_go(self) -> None:
        self.event.record()


# Memory


def test_memory_that_is_opened_twice_is_mapped_once(device: HostDevice, memory: HostExport) -> None:
    """A CUDA handle that is opened twice fails, or is closed under the other user."""
    first, second = device.open(memory.export), device.open(memory.export)
    copy = os.dup(memory.export.parts[0].fd)
    again = device.open(memory.export._replace(parts=(Part(0, SIZE, copy),)))
    os.close(copy)
    assert first == second == again
    assert first != memory.address
    other = HostExport(SIZE)
    assert device.open(other.export) != first
    other.close()
    device.close(first)
    device.close(first)
    memory.view[:2] = b"ok"
    target = np.zeros(2, np.uint8)
    stream = device.create_stream(urgent=True)
    device.copy(numbers(first), numbers(target.ctypes.data), numbers(2), Direction.STORE, stream)
    finish(device, stream)
    assert target.tobytes() == b"ok"
    device.close(first)
    with pytest.raises(DeviceError, match="nothing is open"):
        device.close(first)


def loose(size: int, seals: int = 0) -> int:
    fd = os.memfd_create("loose", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, 1033, seals)
    return fd


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda fd: (Part(0, SIZE, fd), Part(SIZE, SIZE, fd)), "one part"),
        (lambda fd: (), "one part"),
        (lambda fd: (Part(4096, SIZE - 4096, fd),), "one part"),
        (lambda fd: (Part(0, SIZE, loose(SIZE)),), "not sealed"),
        (lambda fd: (Part(0, SIZE, loose(4096, 2)),), "bytes as a memfd of 4096"),
        (lambda fd: (Part(0, SIZE, loose(2 * SIZE, 2)),), "bytes as a memfd of 131072"),
        (lambda fd: (Part(0, SIZE, loose(SIZE, 2 | 8)),), "cannot map"),
        (lambda fd: (Part(0, SIZE, os.pipe()[0]),), "has to be a memfd"),
    ],
)
def test_memory_that_could_vanish_is_refused(
    device: HostDevice,
    memory: HostExport,
    change: Callable[[int], tuple[Part, ...]],
    reason: str,
) -> None:
    """A peer could cut its file while it is copied: the process dies of a SIGBUS."""
    export = memory.export._replace(parts=change(memory.export.parts[0].fd))
    with pytest.raises(CannotOpenError, match=reason):
        device.open(export)


def test_a_gpus_memory_is_refused(device: HostDevice) -> None:
    """An engine on a GPU would get an OSError instead of the reason."""
    for kind, uuid in ((ExportKind.CUDA_IPC, b"\x01" * 16), (ExportKind.CUDA_VMM, HOST_UUID)):
        with pytest.raises(CannotOpenError, match="GPU"):
            device.open(Export(kind, uuid, SIZE, bytes(64)))


def test_pinning_obeys_cudas_rules(device: HostDevice, memory: HostExport) -> None:
    """A copy across two registrations, or memory registered twice, would fail on a GPU only."""
    base = device.open(memory.export)
    host = np.zeros(3 * 4096, np.uint8)
    at = host.ctypes.data
    device.pin(at, 4096)
    device.pin(at + 4096, 4096)
    assert device.pinned_bytes == 8192
    with pytest.raises(DeviceError, match="pinned already"):
        device.pin(at + 4095, 4)
    stream = device.create_stream(urgent=True)
    for start in (at + 4000, at + 8000, at - 10):
        with pytest.raises(DeviceError, match="crosses"):
            device.copy(numbers(base), numbers(start), numbers(4096 + 10), Direction.STORE, stream)
    with pytest.raises(DeviceError, match="crosses"):
        device.copy_pitched([Pitched(base, 64, at + 4000, 64, 64, 4)], Direction.STORE, stream)
    device.copy(
        numbers(base, base), numbers(at, at + 4096), numbers(4096, 4096), Direction.STORE, stream
    )
    device.copy_pitched([Pitched(base, 64, at + 4032, 64, 64, 1)], Direction.STORE, stream)
    finish(device, stream)
    device.unpin(at)
    assert device.pinned_bytes == 4096
    with pytest.raises(DeviceError, match="nothing is pinned"):
        device.unpin(at)


def test_device_memory_is_allocated_and_freed(device: HostDevice) -> None:
    """Scratch memory of every attachment would add up."""
    address = device.allocate(4096)
    device.free(address)
    with pytest.raises(DeviceError, match="nothing is allocated"):
        device.free(address)


# Order


def test_event_that_was_never_recorded_counts_as_happened(
    device: HostDevice, memory: HostExport
) -> None:
    """Code that waits for it to happen later would pass here and copy at once on a GPU."""
    event = device.create_event()
    assert device.query(event)
    stream = device.create_stream(urgent=False)
    device.wait(stream, event, 0)
    held = Held(device, memory)
    device.record(event, held.stream)
    assert not device.query(event)
    finish(device, stream)
    held.let_go()
    until(lambda: device.query(event))


def test_wait_takes_the_newest_record_at_its_call(device: HostDevice, memory: HostExport) -> None:
    """A later record would delay or release work that is ordered behind an earlier one."""
    first, second = Held(device, memory), Held(device, memory, SIZE - 16)
    event, done = device.create_event(), device.create_event()
    stream = device.create_stream(urgent=False)
    device.record(event, first.stream)
    device.wait(stream, event, 0)
    device.record(done, stream)
    device.record(event, second.stream)
    second.let_go()
    until(lambda: device.query(event))
    assert not device.query(done)
    first.let_go()
    until(lambda: device.query(done))


def test_newest_record_is_what_is_queried(device: HostDevice, memory: HostExport) -> None:
    """An event that is used again would seem to have happened before its batch has been copied."""
    held = Held(device, memory)
    event = device.create_event()
    stream = device.create_stream(urgent=False)
    device.record(event, stream)
    until(lambda: device.query(event))
    device.record(event, held.stream)
    assert not device.query(event)
    held.let_go()
    until(lambda: device.query(event))


def test_wait_for_a_peers_counter_compares_values(device: HostDevice, memory: HostExport) -> None:
    """A store would copy pages that the engine is still computing."""
    peer = HostEvent(memory, 0, 64)
    event = device.open_event(peer.handle, [device.open(memory.export)])
    done = device.create_event()
    stream = device.create_stream(urgent=False)
    past, first, second = peer.record(), peer.promise(), peer.promise()
    assert (past, first, second) == (1, 2, 3)
    device.wait(stream, event, past)
    finish(device, stream)
    device.wait(stream, event, second)
    device.record(done, stream)
    assert peer.record() == first
    time.sleep(0.01)
    assert not device.query(done)
    assert peer.record() == second
    until(lambda: device.query(done))
    assert peer.record() == peer.promise() - 1


def test_counter_outside_of_its_allocation_is_refused(
    device: HostDevice, memory: HostExport
) -> None:
    """A peer would have this process read any address, or die of one."""
    base = device.open(memory.export)
    for handle, reason in (
        (counter_handle(1, 0), "outside"),
        (counter_handle(0, SIZE - 7), "outside"),
        (counter_handle(0, (1 << 64) - 8), "outside"),
        (counter_handle(0, 4), "multiple of 8"),
        (b"\x00" + bytes(64), "counters"),
        (b"\x01", "counters"),
    ):
        with pytest.raises(CannotOpenError, match=reason):
            device.open_event(handle, [base])


def test_closing_an_event_frees_the_stream_that_waits_for_it(
    device: HostDevice, memory: HostExport
) -> None:
    """The memory of an engine that has died would be read after it was unmapped."""
    peer = HostEvent(memory, 0, 64)
    base = device.open(memory.export)
    event = device.open_event(peer.handle, [base])
    stream = device.create_stream(urgent=False)
    device.wait(stream, event, peer.promise())
    device.close_event(event)
    finish(device, stream)
    device.close(base)


def test_shut_ends_a_stream_that_waits_forever(memory: HostExport) -> None:
    """A process could not end while an engine hangs."""
    device = HostDevice()
    held = Held(device, memory)
    before = threading.active_count()
    device.record(device.create_event(), held.stream)
    device.shut()
    assert threading.active_count() == before - 1
    device.shut()


def test_arrays_may_change_once_a_call_returns(device: HostDevice, memory: HostExport) -> None:
    """The next batch's addresses would be used for this one."""
    held = Held(device, memory)
    base = device.open(memory.export)
    memory.view[:4] = b"page"
    target = np.zeros(16, np.uint8)
    pages, lengths = numbers(base), numbers(4)
    slots = numbers(target.ctypes.data)
    pieces = [Pitched(base, 4, target.ctypes.data + 4, 4, 4, 1)]
    device.copy(pages, slots, lengths, Direction.STORE, held.stream)
    device.copy_pitched(pieces, Direction.STORE, held.stream)
    device.gather(pages, lengths, target.ctypes.data + 8, Direction.STORE, held.stream)
    pages[:], slots[:], lengths[:] = 0, 0, 0
    pieces.clear()
    held.let_go()
    finish(device, held.stream)
    assert target.tobytes() == b"pagepagepage\0\0\0\0"
