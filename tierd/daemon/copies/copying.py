"""Copies that the daemon makes for one session's engine, between its memory and host memory.

A session exports allocations, attaches a layout of blocks to each of its namespaces, and asks for
copies, which the copy process of the device makes. A copy under way holds its slots and keeps its
reservation from ending, even after the session's end: until the process has answered or ended, it
may read and write them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from tierd.core.l2.reservations import SlotReservation
from tierd.core.l2.space import Space
from tierd.daemon.copies.copy_process import CopyProcess
from tierd.daemon.copies.exports import SessionExports
from tierd.daemon.copies.processes import AttachedLayout, CopyProcesses, NotNowError
from tierd.device import frames
from tierd.device.frames import Reply
from tierd.errors import RefusedError, RemoteProtocolError
from tierd.wire import messages as m

ATTACHMENTS_MAX: Final = 64
"""Attachments per session: a rank has one, and two for a moment when its namespace changes."""

COPIES_MAX: Final = 256
"""Copies under way per session; the daemon answers further ones at once, with nothing copied."""

log = logging.getLogger("tierd.copies")

Send = Callable[[m.FromDaemon], None]


class SessionCopies:
    """The exports, attachments and copies of one session."""

    def __init__(self, owner: int, processes: CopyProcesses, send: Send) -> None:
        self.exports = SessionExports()
        self.attachments: dict[int, AttachedLayout] = {}
        self._owner = owner
        self._processes = processes
        self._send = send
        self._attaching = 0
        # Reservations that a copy is filling, with the calls to make afterwards.
        self._filling: dict[int, list[Callable[[], object]]] = {}
        self._under_way = 0
        self._over = False
        self._when_idle: Callable[[], None] | None = None
        processes.sessions.append(self)

    # --- attachments ----------------------------------------------------------------

    def attach(self, message: m.Attach, space: Space, gate_fd: int) -> None:
        """Attach a layout of blocks; answered once the copy process has verified its probe block.

        Closes `gate_fd`.
        """
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
        for index, segment in enumerate(self._processes.memory.arena.segments(space)):
            if space.live[index]:
                process.share_ahead(segment)

    def _begin_attach(self, message: m.Attach, space: Space, gate_fd: int) -> CopyProcess:
        number = next(self._processes.numbers)
        request = self.exports.request(number, message, space.namespace.block_bytes)
        if len(self.attachments) + self._attaching >= ATTACHMENTS_MAX:
            raise RefusedError(f"a session attaches at most {ATTACHMENTS_MAX} times")
        process = self._processes.process(request.device)
        attachment = AttachedLayout(number, space, request.ask.block_count, process)
        self._attaching += 1
        process.call(
            request.ask, partial(self._attached, message.call, attachment), (gate_fd, *request.fds)
        )
        return process

    def _attached(self, call: int, attachment: AttachedLayout, reply: Reply) -> None:
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
            self._processes.counters["copy_attached_total"] += 1
            self._send(m.Attached(call, attachment.number, reply.text))

    def _refuse(self, call: int, reason: str) -> None:
        self._processes.counters["copy_attach_refused_total"] += 1
        log.warning("attachment refused, the engine copies its blocks itself: %s", reason)
        self._send(m.Error(call, reason))

    def detach(self, message: m.Detach) -> None:
        """End an attachment; answered once its process has ended the copies."""
        attachment = self.attachments.pop(message.attachment, None)
        answer = m.Detached(message.call, message.attachment, "")
        if attachment is None:
            # Its process has ended, and the client has not read that yet.
            self._send(answer)
        else:
            attachment.process.call(frames.Detach(attachment.number), lambda _: self._send(answer))

    def process_ended(self, process: CopyProcess) -> None:
        """Drop the attachments of a process that has ended and has answered all calls."""
        gone = [a.number for a in self.attachments.values() if a.process is process]
        for number in gone:
            del self.attachments[number]
        # After the removal: a send to a closed client ends the session, which detaches the rest.
        for number in gone:
            self._send(m.Detached(0, number, process.dying))

    # --- copies ---------------------------------------------------------------------

    def store(self, message: m.Store) -> None:
        """Fill a reservation's slots from the engine's pages."""
        blocks = m.unpack_slots(message.blocks)
        attachment = self.attachments.get(message.attachment)
        reservation = self._processes.memory.host.reservations.get(message.reservation)
        if attachment is None or reservation is None or reservation.owner != self._owner:
            # The copy process has ended, or the reservation was lost with its segment.
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
        self._processes.counters["copy_store_blocks_total"] += reply.value
        waiting = self._filling.pop(reservation.reservation_id)
        self._send(m.Copied(call, reply.value, reply.text))
        for then in waiting:
            then()

    def is_filling(self, reservation_id: int) -> bool:
        """Whether a copy is filling a reservation, which must not end before the copy."""
        return reservation_id in self._filling

    def after_filling(self, reservation_id: int, then: Callable[[], object]) -> None:
        """Call `then` once no copy fills a reservation, at once if none does."""
        if reservation_id in self._filling:
            self._filling[reservation_id].append(then)
        else:
            then()

    def load(self, message: m.Load) -> None:
        """Fill the engine's pages from leased slots."""
        slots, blocks = m.unpack_slots(message.slots), m.unpack_slots(message.blocks)
        if len(slots) != len(blocks) or len(slots) > m.KEYS_PER_CALL_MAX:
            raise RemoteProtocolError(
                f"LOAD needs one block per slot, and at most {m.KEYS_PER_CALL_MAX} slots"
            )
        attachment = self.attachments.get(message.attachment)
        if attachment is None:
            self._send(m.Copied(message.call, 0, "nothing is attached"))
            return
        self._check_blocks(attachment, blocks)
        memory, space = self._processes.memory, attachment.space
        if self._processes.clock.monotonic_ns() >= message.expires_ns:
            self._send(m.Copied(message.call, 0, "the lease has expired"))
            return
        if not all(space.is_readable(slot) for slot in slots):
            self._send(m.Copied(message.call, 0, "a slot is not readable"))
            return
        memory.host.hold(space, slots)
        self._copy(
            message, attachment, list(slots), partial(self._loaded, space, slots, message.call)
        )

    def _loaded(self, space: Space, slots: tuple[int, ...], call: int, reply: Reply) -> None:
        self._processes.counters["copy_load_blocks_total"] += reply.value
        self._processes.memory.let_go(space, slots)
        self._send(m.Copied(call, reply.value, reply.text))

    def _check_blocks(self, attachment: AttachedLayout, blocks: tuple[int, ...]) -> None:
        if blocks and max(blocks) >= attachment.block_count:
            raise RemoteProtocolError(f"block {max(blocks)} is not below {attachment.block_count}")

    def _copy(
        self,
        message: m.Store | m.Load,
        attachment: AttachedLayout,
        slots: list[int],
        on_reply: Callable[[Reply], None],
    ) -> None:
        process = attachment.process
        processes = self._processes
        if not slots or self._under_way >= COPIES_MAX:
            on_reply(Reply(0, ok=False, text="" if not slots else "too many copies at once"))
            return
        try:
            places = processes.place(process, attachment.space, np.array(slots, np.int64))
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
        copy = processes.began(process)
        self._under_way += 1

        def ended(reply: Reply) -> None:
            copy.over = True
            self._under_way -= 1
            way = "load" if is_load else "store"
            size_bytes = reply.value * attachment.space.namespace.block_bytes
            processes.counters[f"copy_{way}_bytes_total"] += size_bytes
            processes.counters[f"copy_{way}_us_total"] += (
                processes.clock.monotonic_ns() - copy.began_ns
            ) // 1000
            if reply.value < len(slots):
                processes.counters[f"copy_{way}_failed_total"] += 1
            on_reply(reply)
            self._end_if_idle()

        process.call(ask, ended)

    # --- end ------------------------------------------------------------------------

    def close(self, when_idle: Callable[[], None]) -> None:
        """End the session's copies; `when_idle` is called once none is under way."""
        self._over = True
        self._processes.sessions.remove(self)
        self._send = _ignore
        for attachment in self.attachments.values():
            attachment.process.call(frames.Detach(attachment.number), _ignore)
        self.attachments.clear()
        self.exports.close()
        self._when_idle = when_idle
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._when_idle is not None and not self._under_way:
            then, self._when_idle = self._when_idle, None
            then()


def _ignore(_: object) -> None:
    pass
