"""The copy process: one device, driven by the daemon over a socket.

The process maps the arena's segments, pins them in the background, opens engines' exports, and
copies between segments and exports. It decides nothing about blocks. It ends when the daemon
closes its end of the socket, and exits with LOST when its device is lost.
Run as `python -m tierd.device.process DESCRIPTOR UUID BANDWIDTH_MAX JOB_LIMIT_MS`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, assert_never

import msgspec
import numpy as np
import uvloop

from tierd.child import Stream, be_child, leave_at_once
from tierd.device.api import CannotOpenError, Device, DeviceError, Direction
from tierd.device.copier import Copier
from tierd.device.frames import (
    Attach,
    Bring,
    Copy,
    Detach,
    Map,
    Pin,
    Reply,
    Request,
    Unmap,
    Unpin,
)
from tierd.device.host import HostDevice
from tierd.limits import pinning_limits
from tierd.shared_memory.exports import HOST_UUID, Export, ExportKind, PageLayout, Part, unpack_runs
from tierd.shared_memory.mapping import SharedMapping

LOST: Final = 3
"""Exit status of a process whose device is lost."""

log = logging.getLogger("tierd.copies")
_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)


class Process:
    """The device, the mapped segments, one thread for attachments and one for pinning."""

    def __init__(
        self, sock: socket.socket, uuid: bytes, bandwidth_max: int, job_limit_s: float
    ) -> None:
        self._uuid = uuid
        self._bandwidth_max = bandwidth_max
        self._job_limit_s = job_limit_s
        self._loop = asyncio.get_running_loop()
        self._opening = ThreadPoolExecutor(1, "tierd-opening")
        self._pinning = ThreadPoolExecutor(1, "tierd-pinning")
        self._device: Device | None = None
        self._copier: Copier | None = None
        self._brought: list[int] = []
        self._mappings: dict[int, SharedMapping] = {}
        # Serials to pin as soon as the device is open; only the pinning thread uses the set.
        self._wanted: set[int] = set()
        # Start address of each mapping, indexed by serial.
        self._addresses = np.zeros(64, np.uint64)
        self._pinned: dict[int, int] = {}
        self._problem = ""
        self._stream = Stream(sock, self._take, leave_at_once)

    def _take(self, payload: bytes | bytearray | memoryview, fds: tuple[int, ...]) -> None:
        """Handle a frame from the daemon."""
        request = _requests.decode(payload)
        match request.ask:
            case Bring():
                self._brought += fds
            case Map(serial, size_bytes):
                self._map(serial, size_bytes, fds[0])
            case Pin(serial):
                self._run(self._pinning, self._pin, serial)
            case Unpin(serial):
                self._run(self._pinning, self._unpin, serial, request.call)
            case Unmap(serial):
                # On the pinning thread, so that it follows earlier work on the segment.
                self._run(self._pinning, self._unmap, serial)
            case Attach():
                brought, self._brought = self._brought, []
                self._run(self._opening, self._attach, request.call, request.ask, brought)
            case Detach(attachment):
                self._run(self._opening, self._detach, request.call, attachment)
            case Copy():
                self._copy(request.call, request.ask)
            case _:
                assert_never(request.ask)

    def _say(self, reply: Reply) -> None:
        self._stream.send(_encoder.encode(reply))

    def _say_soon(self, reply: Reply) -> None:
        """Send a reply; any thread may call this."""
        self._loop.call_soon_threadsafe(self._say, reply)

    def _run(self, pool: ThreadPoolExecutor, work: Callable[..., None], *args: object) -> None:
        pool.submit(work, *args).add_done_callback(self._check)

    def _check(self, done: Future[None]) -> None:
        """End the process after a bug in a thread, so that no call hangs; it is started again."""
        error = done.exception()
        if error is not None:
            log.error("a bug in the copy process", exc_info=error)
            self._leave("a bug in the copy process")

    def on_bug(self, what: threading.ExceptHookArgs) -> None:
        """End the process after a bug in a thread of the copier or the device."""
        log.error("a bug in the copy process", exc_info=what[1])
        self._leave("a bug in the copy process")

    def _leave(self, reason: str) -> None:
        log.error("ending: %s", reason)
        logging.shutdown()
        # Not through the loop: calls to a lost device may never return.
        os._exit(LOST)

    # --- memory, on the pinning thread ------------------------------------------------

    def _map(self, serial: int, size_bytes: int, fd: int) -> None:
        try:
            mapping = SharedMapping(fd, size_bytes)
        finally:
            os.close(fd)
        self._mappings[serial] = mapping
        if serial >= len(self._addresses):
            self._addresses = np.concatenate([self._addresses, np.zeros(serial + 1, np.uint64)])
        self._addresses[serial] = mapping.address
        if self._copier is not None:
            self._copier.know_memory([m.address for m in self._mappings.values()])
        self._run(self._pinning, self._pin, serial)

    def _pin(self, serial: int) -> None:
        """Page-lock one segment: at most 0.25 GiB, so the driver's lock is held for 25 ms."""
        mapping = self._mappings[serial]
        self._wanted.add(serial)
        if serial in self._pinned or self._device is None:
            return
        try:
            # Fault pages in first: under the driver's lock that takes ten times as long.
            while mapping.populate_next():
                pass
            self._device.pin(mapping.address, mapping.size_bytes)
        except (DeviceError, OSError) as error:
            self._problem = f"{error}; {pinning_limits()}"
        else:
            self._pinned[serial] = mapping.size_bytes
        self._report()

    def _pin_all(self) -> None:
        for serial in list(self._wanted):
            self._pin(serial)

    def _unpin(self, serial: int, call: int) -> None:
        self._wanted.discard(serial)
        self._mappings[serial].populated_bytes = 0
        if self._pinned.pop(serial, None) is not None:
            assert self._device is not None
            try:
                self._device.unpin(self._mappings[serial].address)
            except DeviceError as error:
                # The device could write to pages that no longer belong to the segment.
                self._leave(f"cannot unpin host memory: {error}")
        self._report(call)

    def _unmap(self, serial: int) -> None:
        assert serial not in self._pinned
        self._wanted.discard(serial)
        self._loop.call_soon_threadsafe(self._forget, serial)

    def _forget(self, serial: int) -> None:
        """Drop a mapping; on the loop, like `_map`, so that the copier's bounds stay up to date."""
        del self._mappings[serial]
        if self._copier is not None:
            self._copier.know_memory([m.address for m in self._mappings.values()])

    def _report(self, call: int = 0) -> None:
        mapped = sum(mapping.size_bytes for mapping in list(self._mappings.values()))
        report = Reply(0, True, 0, "", sum(self._pinned.values()), mapped, self._problem)
        self._say_soon(report)
        if call:
            self._say_soon(Reply(call))

    # --- attachments, on the opening thread ---------------------------------------------

    def _attach(self, call: int, ask: Attach, brought: list[int]) -> None:
        expected = 1 + sum(len(export.parts) for export in ask.exports)
        # Earlier descriptors belong to an Attach that could not be sent completely.
        for fd in brought[:-expected]:
            os.close(fd)
        brought = brought[-expected:]
        try:
            copier = self._ready()
        except CannotOpenError as error:
            self._say_soon(Reply(call, ok=False, text=str(error)))
            # The process is useless without a device.
            self._loop.call_soon_threadsafe(self._leave, str(error))
            return
        try:
            how = copier.attach(
                ask.attachment,
                _exports(ask, brought[1:]),
                PageLayout(unpack_runs(ask.runs), ask.block_stride, ask.block_count),
                block_bytes=ask.block_bytes,
                events=ask.events,
                gate_fd=brought[0],
                layer_ends=ask.layer_ends,
                probe_block=ask.probe_block,
                probe_digest=ask.probe_digest,
            )
        except DeviceError as error:
            self._say_soon(Reply(call, ok=False, text=str(error)))
            if error.sticky:
                self._loop.call_soon_threadsafe(self._leave, f"the device is lost: {error}")
        else:
            self._say_soon(Reply(call, text=how))
        finally:
            for fd in brought:
                os.close(fd)

    def _ready(self) -> Copier:
        """Return the copier; the first call opens the device. Raises CannotOpenError."""
        if self._copier is None:
            self._device = open_device(self._uuid)
            self._copier = Copier(
                self._device,
                on_done=self._done,
                on_lost=self._leave,
                bandwidth_max=self._bandwidth_max,
                job_limit_s=self._job_limit_s,
            )
            self._copier.know_memory([m.address for m in list(self._mappings.values())])
            self._run(self._pinning, self._pin_all)
        return self._copier

    def _detach(self, call: int, attachment: int) -> None:
        assert self._copier is not None
        try:
            self._copier.detach(attachment)
        except DeviceError as error:
            self._leave(f"cannot end an engine's copies: {error}")
        self._say_soon(Reply(call))

    # --- copies -------------------------------------------------------------------------

    def _copy(self, call: int, ask: Copy) -> None:
        assert self._copier is not None
        serials = np.frombuffer(ask.serials, np.uint32)
        slots = self._addresses[serials] + np.frombuffer(ask.offsets, np.uint64)
        try:
            self._copier.submit(
                call,
                ask.attachment,
                Direction.LOAD if ask.is_load else Direction.STORE,
                np.frombuffer(ask.blocks, np.uint32),
                slots,
                event=ask.event,
                value=ask.value,
                gate_job=ask.job,
            )
        except ValueError as error:
            self._say(Reply(call, ok=False, text=str(error)))

    def _done(self, call: int, blocks: int, reason: str) -> None:
        self._say_soon(Reply(call, not reason, blocks, reason))


def open_device(uuid: bytes) -> Device:
    """Open the device with this UUID. Raises CannotOpenError."""
    if uuid == HOST_UUID:
        return HostDevice()
    # Imported only when needed: the import takes a second, and a host may have no GPU.
    from tierd.device.cuda import CudaDevice

    return CudaDevice.find(uuid)


def _exports(ask: Attach, fds: list[int]) -> list[Export]:
    """Return the exports with their descriptors. Raises CannotOpenError."""
    left = iter(fds)
    exports = []
    try:
        for given in ask.exports:
            parts = tuple([Part(offset, size, next(left)) for offset, size in given.parts])
            kind = ExportKind(given.kind)
            exports.append(Export(kind, given.device, given.size_bytes, given.handle, parts))
    except StopIteration as error:
        count = sum(len(given.parts) for given in ask.exports)
        raise CannotOpenError(
            f"the engine's exports have {count} parts, but only {len(fds)} descriptors came"
        ) from error
    return exports


async def _serve(sock: socket.socket, uuid: bytes, bandwidth_max: int, job_limit_s: float) -> None:
    process = Process(sock, uuid, bandwidth_max, job_limit_s)
    threading.excepthook = process.on_bug
    await asyncio.Event().wait()


def main() -> None:
    """Serve the socket and the device that the command line names."""
    sock = be_child("copier")
    uuid, bandwidth_max, job_limit_ms = sys.argv[2:5]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(sock, bytes.fromhex(uuid), int(bandwidth_max), int(job_limit_ms) / 1000))


if __name__ == "__main__":
    main()
