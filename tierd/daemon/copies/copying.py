"""Copies that the daemon makes for engines: who has shown what, and what is under way.

A session shows allocations, attaches layouts of blocks to its namespaces, and asks for copies,
which a process for each device makes. While a copy is under way its slots are held, or its
reservation is kept from ending, whatever becomes of the session: until the process has answered
or is no more, it may touch them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from tierd.clock import Clock
from tierd.core.l2.reservations import SlotReservation
from tierd.core.l2.space import Space
from tierd.daemon.copies.copy_process import CopyProcess
from tierd.daemon.l2.memory import HostMemory
from tierd.device import frames
from tierd.device.frames import Reply
from tierd.errors import RefusedError, RemoteProtocolError
from tierd.memory.arena import Segment
from tierd.shared_memory.exports import ExportKind, PageLayout, layout_error, unpack_runs
from tierd.wire import messages as m

EXPORTS_MAX: Final = 1024
PARTS_MAX: Final = 8192
"""Allocations that a session may show, and their descriptors: 160 GB in chunks of 20 MiB."""

ATTACHMENTS_MAX: Final = 64
"""Of a session: a rank has one, and for a moment two when its namespace changes."""

COPIES_MAX: Final = 256
"""Copies under way of a session; the next one is answered at once, with nothing copied."""

DEVICES_MAX: Final = 32
"""Copy processes of a node."""

HANDLE_BYTES_MAX: Final = 64
"""A CUDA IPC handle has so many."""

LAYERS_MAX: Final = 1024
"""Layer groups of an attachment."""

RESTART_S: Final = 1.0
"""A device's copy process is not started again before this has passed since the last start."""

log = logging.getLogger("tierd.copies")

Send = Callable[[m.FromDaemon], None]


class NotNowError(RefusedError):
    """What has been asked for may well be possible in a moment."""


@dataclass(slots=True)
class _Export:
    kind: ExportKind
    device: bytes
    size_bytes: int
    handle: bytes
    parts: list[tuple[int, int, int]] = field(default_factory=list)
    """Offset, size in bytes, and a descriptor that is ours."""

    def close(self) -> None:
        for _, _, fd in self.parts:
            os.close(fd)
        self.parts.clear()


@dataclass(slots=True, eq=False)
class _Attachment:
    number: int
    space: Space
    block_count: int
    process: CopyProcess


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A copy, for whoever looks whether it takes too long."""

    began_ns: int
    process: CopyProcess
    over: bool = False


class Copies:
    """The copy processes of a node, and what they need of its memory."""

    def __init__(
        self,
        memory: HostMemory,
        clock: Clock,
        counters: Counter[str],
        *,
        bandwidth_max: int,
        job_timeout_ms: int,
        hold: Callable[[], int | None],
    ) -> None:
        """`hold` makes a descriptor that tells the daemon after this one that a process copies."""
        self.memory = memory
        self.clock = clock
        self.counters = counters
        self.numbers = itertools.count(1)
        self.sessions: list[SessionCopies] = []
        self._bandwidth_max = bandwidth_max
        self._timeout_ns = job_timeout_ms * 1_000_000
        self._hold = hold
        self._processes: dict[bytes, CopyProcess] = {}
        self._started_ns: dict[bytes, int] = {}
        # In the order in which they began; those that are over go when they are the oldest.
        self._under_way: deque[_UnderWay] = deque()
        memory.listeners.append(self._segment_made)
        memory.decommitted = self._segment_decommitted
        memory.closed = self._segment_closed

    def process(self, uuid: bytes) -> CopyProcess:
        """The process of a device, started if there is none.

        Raises NotNowError while it ends, or cannot be started; RefusedError for one too many.
        """
        process = self._processes.get(uuid)
        if process is not None and not process.dying:
            return process
        if process is not None:
            raise NotNowError("the copy process of this device is ending")
        if len(self._processes) >= DEVICES_MAX:
            raise RefusedError(f"a daemon copies for at most {DEVICES_MAX} devices")
        now_ns = self.clock.monotonic_ns()
        if uuid in self._started_ns and now_ns < self._started_ns[uuid] + int(RESTART_S * 1e9):
            raise NotNowError("the copy process of this device has ended as soon as it was started")
        try:
            with contextlib.ExitStack() as ours:
                hold = self._hold()
                if hold is not None:
                    ours.callback(os.close, hold)
                process = CopyProcess(
                    uuid,
                    bandwidth_max=self._bandwidth_max,
                    # Well before it is killed for it.
                    job_limit_ms=self._timeout_ns // 2_000_000,
                    on_end=self._process_ended,
                    hold=hold,
                )
        except OSError as error:
            raise NotNowError(f"cannot start a copy process: {error}") from error
        self._processes[uuid] = process
        self._started_ns[uuid] = now_ns
        self.counters["copy_process_starts_total"] += 1
        return process

    def began(self, process: CopyProcess) -> _UnderWay:
        """A copy is under way until the caller says that it is over."""
        copy = _UnderWay(self.clock.monotonic_ns(), process)
        self._under_way.append(copy)
        return copy

    def watch(self) -> None:
        """Kill processes that do not get a copy done in time; called every now and then."""
        now_ns = self.clock.monotonic_ns()
        while self._under_way and self._under_way[0].over:
            self._under_way.popleft()
        for copy in self._under_way:
            if copy.began_ns + self._timeout_ns > now_ns:
                break
            if not copy.over and not copy.process.dying:
                self.counters["copy_process_kills_total"] += 1
                copy.process.kill(f"a copy took over {self._timeout_ns / 1e9:g} s")

    async def close(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.kill("the daemon stops")
        while self._processes:
            await asyncio.sleep(0.001)

    def status(self) -> list[dict[str, object]]:
        """A device each, for STATUS."""
        return [
            {
                "device": process.name,
                "pid": process.pid,
                "attachments": sum(
                    attachment.process is process
                    for session in self.sessions
                    for attachment in session.attachments.values()
                ),
                "under_way": process.calls,
                "pinned_bytes": process.pinned_bytes,
                "mapped_bytes": process.mapped_bytes,
                "pin_problem": process.problem,
            }
            for process in self._processes.values()
        ]

    def place(self, process: CopyProcess, space: Space, slots: np.ndarray) -> tuple[bytes, bytes]:
        """Where slots lie, for a Copy: serials and offsets. Raises OSError."""
        per = space.slots_per_segment
        index = slots // per
        segments = self.memory.arena.segments(space)
        serials = np.zeros(len(segments), np.uint32)
        for number in np.unique(index):
            serials[number] = process.share(segments[number])
        offsets = (slots - index * per).astype(np.uint64) * np.uint64(space.slot_bytes)
        return serials[index].tobytes(), offsets.tobytes()

    def _process_ended(self, process: CopyProcess) -> None:
        del self._processes[process.uuid]
        for session in list(self.sessions):
            session.process_ended(process)

    def _segment_made(self, space: Space, index: int, segment: Segment) -> None:
        """Have it mapped and pinned before anybody waits for that."""
        for process in {
            attachment.process
            for session in self.sessions
            for attachment in session.attachments.values()
            if attachment.space is space
        }:
            _share(process, segment)

    def _segment_decommitted(self, segment: Segment) -> None:
        for process in self._processes.values():
            process.unpin(segment)

    def _segment_closed(self, segment: Segment) -> None:
        for process in self._processes.values():
            process.forget(segment)


class SessionCopies:
    """What one session has shown and asked for."""

    def __init__(self, owner: int, copies: Copies, send: Send) -> None:
        self.attachments: dict[int, _Attachment] = {}
        self._owner = owner
        self._copies = copies
        self._send = send
        self._exports: dict[int, _Export] = {}
        self._parts = 0
        self._attaching = 0
        # Reservations that are being filled, and what is to happen to them afterwards.
        self._filling: dict[int, list[Callable[[], object]]] = {}
        self._under_way = 0
        self._over = False
        self._when_still: Callable[[], None] | None = None
        copies.sessions.append(self)

    # --- what is shown --------------------------------------------------------------

    def export(self, message: m.Export) -> None:
        """An allocation."""
        number, kind, device, size_bytes, handle = message
        if number in self._exports or len(self._exports) >= EXPORTS_MAX:
            raise RemoteProtocolError(f"EXPORT {number} is known already, or one too many")
        try:
            known = ExportKind(kind)
        except ValueError as error:
            raise RemoteProtocolError(f"EXPORT of kind {kind}") from error
        if len(device) != 16 or len(handle) > HANDLE_BYTES_MAX:
            raise RemoteProtocolError("EXPORT has a device or a handle of a wrong length")
        self._exports[number] = _Export(known, device, size_bytes, handle)

    def part(self, message: m.Part, fd: int) -> None:
        """A stretch of an allocation, whose descriptor is this object's from now on."""
        export = self._exports.get(message.export)
        if export is None or self._parts >= PARTS_MAX:
            os.close(fd)
            raise RemoteProtocolError(f"PART of EXPORT {message.export}, or one too many")
        export.parts.append((message.offset, message.size_bytes, fd))
        self._parts += 1

    def drop_export(self, message: m.DropExport) -> None:
        """An allocation that no attachment will be made of any more."""
        export = self._exports.pop(message.export, None)
        if export is None:
            raise RemoteProtocolError(f"DROP_EXPORT of {message.export}, which is not known")
        self._parts -= len(export.parts)
        export.close()

    # --- attachments ----------------------------------------------------------------

    def attach(self, message: m.Attach, space: Space, gate_fd: int) -> None:
        """Blocks lie where the message says; answered once they have been verified."""
        try:
            process = self._begin_attach(message, space, gate_fd)
        except NotNowError as error:
            self._send(m.Detached(message.call, 0, str(error)))
            return
        except RefusedError as error:
            self._refuse(message.call, str(error))
            return
        finally:
            os.close(gate_fd)
        for index, segment in enumerate(self._copies.memory.arena.segments(space)):
            if space.live[index]:
                _share(process, segment)

    def _begin_attach(self, message: m.Attach, space: Space, gate_fd: int) -> CopyProcess:
        exports = [self._exports.get(number) for number in message.exports]
        known = [export for export in exports if export is not None]
        if len(known) < len(exports) or not known or len(message.probe_digest) != 32:
            raise RemoteProtocolError("ATTACH names what was not exported, or no probe")
        if len(set(message.exports)) < len(exports):
            raise RemoteProtocolError("ATTACH names an export twice")
        try:
            layout = PageLayout(
                unpack_runs(message.runs), message.block_stride, message.block_count
            )
        except ValueError as error:
            raise RemoteProtocolError(f"ATTACH: {error}") from error
        events = m.unpack_handles(message.events)
        if len(self.attachments) + self._attaching >= ATTACHMENTS_MAX:
            raise RefusedError(f"a session attaches at most {ATTACHMENTS_MAX} times")
        devices = {export.device for export in known}
        if len(devices) > 1:
            raise RefusedError("the blocks lie on several devices: one each attachment")
        block_bytes = space.namespace.block_bytes
        fault = layout_error(layout, [export.size_bytes for export in known], block_bytes)
        if message.probe_block >= layout.block_count:
            fault = f"probe block {message.probe_block} is none of its blocks"
        if len(message.layer_ends) > LAYERS_MAX:
            fault = f"a block has at most {LAYERS_MAX} layer groups"
        if fault:
            raise RefusedError(fault)
        process = self._copies.process(devices.pop())
        number = next(self._copies.numbers)
        ask = frames.Attach(
            number,
            [
                frames.Export(
                    export.kind,
                    export.device,
                    export.size_bytes,
                    export.handle,
                    [(offset, size_bytes) for offset, size_bytes, _ in export.parts],
                )
                for export in known
            ],
            message.runs,
            layout.block_stride,
            layout.block_count,
            block_bytes,
            events,
            message.probe_block,
            message.probe_digest,
            message.layer_ends,
        )
        attachment = _Attachment(number, space, layout.block_count, process)
        fds = (gate_fd, *(fd for export in known for _, _, fd in export.parts))
        self._attaching += 1
        process.call(ask, partial(self._attached, message.call, attachment), fds)
        return process

    def _attached(self, call: int, attachment: _Attachment, reply: Reply) -> None:
        self._attaching -= 1
        process = attachment.process
        if self._over and not reply.ok:
            return
        if process.dying:
            self._send(m.Detached(call, 0, process.dying))
        elif not reply.ok:
            self._refuse(call, reply.text)
        elif self._over:
            process.call(frames.Detach(attachment.number), _ignore)
        else:
            log.info(
                "%s: blocks of %s: %s", process.name, attachment.space.namespace.model, reply.text
            )
            self.attachments[attachment.number] = attachment
            self._copies.counters["copy_attached_total"] += 1
            self._send(m.Attached(call, attachment.number, reply.text))

    def _refuse(self, call: int, reason: str) -> None:
        self._copies.counters["copy_attach_refused_total"] += 1
        log.warning("an engine's blocks are not copied for it: %s", reason)
        self._send(m.Error(call, reason))

    def detach(self, message: m.Detach) -> None:
        """Copy no more for an attachment; answered when that is so."""
        attachment = self.attachments.pop(message.attachment, None)
        answer = m.Detached(message.call, message.attachment, "")
        if attachment is None:
            # Its process has ended, and the client does not know yet.
            self._send(answer)
        else:
            attachment.process.call(frames.Detach(attachment.number), lambda _: self._send(answer))

    def process_ended(self, process: CopyProcess) -> None:
        """A copy process is no more, and all of its calls have been answered."""
        gone = [a.number for a in self.attachments.values() if a.process is process]
        for number in gone:
            del self.attachments[number]
        # Not before: telling a client that has gone ends its session, and all of these.
        for number in gone:
            self._send(m.Detached(0, number, process.dying))

    # --- copies ---------------------------------------------------------------------

    def store(self, message: m.Store) -> None:
        """Fill a reservation's slots from pages."""
        blocks = m.unpack_slots(message.blocks)
        attachment = self.attachments.get(message.attachment)
        reservation = self._copies.memory.host.reservations.get(message.reservation)
        if attachment is None or reservation is None or reservation.owner != self._owner:
            # Of a copy process that has ended, or a reservation that was lost with its segment.
            self._send(m.Copied(message.call, 0, "nothing is reserved or attached"))
            return
        granted = [slot for slot in reservation.slots if slot >= 0]
        if (
            reservation.space is not attachment.space
            or reservation.reservation_id in self._filling
            or len(blocks) != len(granted)
        ):
            raise RemoteProtocolError("STORE does not fit its reservation")
        self._check_blocks(attachment, blocks)
        self._filling[reservation.reservation_id] = []
        self._copy(message, attachment, granted, partial(self._stored, reservation, message.call))

    def _stored(self, reservation: SlotReservation, call: int, reply: Reply) -> None:
        self._copies.counters["copy_store_blocks_total"] += reply.value
        waiting = self._filling.pop(reservation.reservation_id)
        self._send(m.Copied(call, reply.value, reply.text))
        for then in waiting:
            then()

    def is_filling(self, reservation_id: int) -> bool:
        """Whether a copy fills the slots of a reservation, which cannot end before."""
        return reservation_id in self._filling

    def after_filling(self, reservation_id: int, then: Callable[[], object]) -> None:
        """Call `then` when no copy fills the slots of a reservation, maybe at once."""
        if reservation_id in self._filling:
            self._filling[reservation_id].append(then)
        else:
            then()

    def load(self, message: m.Load) -> None:
        """Fill pages from slots that somebody has leased."""
        slots, blocks = m.unpack_slots(message.slots), m.unpack_slots(message.blocks)
        if len(slots) != len(blocks) or len(slots) > m.KEYS_PER_CALL_MAX:
            raise RemoteProtocolError(
                f"LOAD needs a block a slot, and at most {m.KEYS_PER_CALL_MAX} of them"
            )
        attachment = self.attachments.get(message.attachment)
        if attachment is None:
            self._send(m.Copied(message.call, 0, "nothing is attached"))
            return
        self._check_blocks(attachment, blocks)
        memory, space = self._copies.memory, attachment.space
        if self._copies.clock.monotonic_ns() >= message.expires_ns:
            self._send(m.Copied(message.call, 0, "its lease is over"))
            return
        if not all(space.is_readable(slot) for slot in slots):
            self._send(m.Copied(message.call, 0, "a slot is not readable"))
            return
        memory.host.hold(space, slots)
        self._copy(
            message, attachment, list(slots), partial(self._loaded, space, slots, message.call)
        )

    def _loaded(self, space: Space, slots: tuple[int, ...], call: int, reply: Reply) -> None:
        self._copies.counters["copy_load_blocks_total"] += reply.value
        self._copies.memory.let_go(space, slots)
        self._send(m.Copied(call, reply.value, reply.text))

    def _check_blocks(self, attachment: _Attachment, blocks: tuple[int, ...]) -> None:
        if blocks and max(blocks) >= attachment.block_count:
            raise RemoteProtocolError(f"block {max(blocks)} of {attachment.block_count}")

    def _copy(
        self,
        message: m.Store | m.Load,
        attachment: _Attachment,
        slots: list[int],
        on_reply: Callable[[Reply], None],
    ) -> None:
        process = attachment.process
        copies = self._copies
        if not slots or self._under_way >= COPIES_MAX:
            on_reply(Reply(0, ok=False, text="" if not slots else "too many copies at once"))
            return
        try:
            places = copies.place(process, attachment.space, np.array(slots, np.int64))
        except OSError as error:
            on_reply(Reply(0, ok=False, text=f"cannot share memory: {error}"))
            return
        is_load = isinstance(message, m.Load)
        ask = frames.Copy(
            attachment.number,
            is_load,
            *places,
            message.blocks,
            message.job if isinstance(message, m.Load) else 0,
            message.event,
            message.value,
        )
        copy = copies.began(process)
        self._under_way += 1

        def ended(reply: Reply) -> None:
            copy.over = True
            self._under_way -= 1
            way = "load" if is_load else "store"
            size_bytes = reply.value * attachment.space.namespace.block_bytes
            copies.counters[f"copy_{way}_bytes_total"] += size_bytes
            copies.counters[f"copy_{way}_us_total"] += (
                copies.clock.monotonic_ns() - copy.began_ns
            ) // 1000
            if reply.value < len(slots):
                copies.counters[f"copy_{way}_failed_total"] += 1
            on_reply(reply)
            self._tell_if_still()

        process.call(ask, ended)

    # --- end ------------------------------------------------------------------------

    def close(self, when_still: Callable[[], None]) -> None:
        """The peer is gone; `when_still` is called when nothing of it is copied any more."""
        self._over = True
        self._copies.sessions.remove(self)
        self._send = _ignore
        for attachment in self.attachments.values():
            attachment.process.call(frames.Detach(attachment.number), _ignore)
        self.attachments.clear()
        for export in self._exports.values():
            export.close()
        self._exports.clear()
        self._when_still = when_still
        self._tell_if_still()

    def _tell_if_still(self) -> None:
        if self._when_still is not None and not self._under_way:
            then, self._when_still = self._when_still, None
            then()


def _share(process: CopyProcess, segment: Segment) -> None:
    try:
        process.share(segment)
    except OSError as error:
        log.warning("%s: cannot share memory ahead of use: %s", process.name, error)


def _ignore(_: object) -> None:
    pass
