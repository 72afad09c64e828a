"""A client's part of copies by the daemon: exported memory, attachments and copies in progress.

It has no socket and reads no clock: the client passes it a function that sends, the messages that
arrive, and the time. Used under the client's lock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from tierd.shared_memory.exports import Export, PageLayout, pack_runs
from tierd.wire import messages as m

AGAIN_FIRST_S: Final = 0.1
AGAIN_MAX_S: Final = 5.0
"""First and longest pause before attaching again after the copy process has ended; it doubles."""

REFUSALS_MAX: Final = 8
"""Consecutive refusals of an attachment that was accepted before, until it counts as refused: about
20 s."""

Send = Callable[[m.FromClient, int | None], None]
Probe = Callable[[bool], tuple[int, bytes]]


class RegisteredHandle(Protocol):
    """A client's handle: its number in the present session; None: not registered."""

    number: int | None


class Attachment:
    """Pages of an engine that the daemon copies to and from.

    It outlives disconnects and the end of the daemon's copy process. `ready`: it can be used now.
    `refusal`: why the daemon permanently refuses it; None: not refused. `how`: the way of copying,
    as text.
    """

    __slots__ = (
        "_accepted",
        "_again_s",
        "_gate_fd",
        "_pause_s",
        "_probe",
        "_refusals",
        "events",
        "exports",
        "handle",
        "how",
        "layer_ends",
        "layout",
        "number",
        "refusal",
    )

    def __init__(
        self,
        handle: RegisteredHandle,
        exports: Sequence[Export],
        layout: PageLayout,
        *,
        events: Sequence[bytes],
        gate_fd: int,
        layer_ends: Sequence[int],
        probe: Probe,
    ) -> None:
        self.handle = handle
        self.exports = tuple(exports)
        self.layout = layout
        self.events = tuple(events)
        self.layer_ends = tuple(layer_ends)
        self.number: int | None = None
        self.refusal: str | None = None
        self.how = ""
        self._gate_fd = gate_fd
        self._probe = probe
        self._accepted = False
        self._pause_s = 0.0
        self._refusals = 0
        self._again_s: float | None = None

    @property
    def ready(self) -> bool:
        """Whether the connected daemon copies for this attachment now."""
        return self.number is not None


class PendingCopy:
    """A copy in progress. Once it is `done`, its first `blocks` blocks are in place.

    `reason` says why not all are; empty: all are.
    """

    __slots__ = ("blocks", "done", "reason")

    def __init__(self) -> None:
        self.done = False
        self.blocks = 0
        self.reason = ""

    def end(self, blocks: int, reason: str) -> None:
        """Record the end of the copy."""
        self.blocks, self.reason, self.done = blocks, reason, True


class Attachments:
    """All attachments of a client, and their state in the present session."""

    def __init__(self, send: Send, next_call: Callable[[], int]) -> None:
        self._send = send
        self._next_call = next_call
        self._all: list[Attachment] = []
        self._attaching: dict[int, Attachment] = {}
        self._queued: list[Attachment] = []
        self._detaching: dict[int, Attachment] = {}
        self._pending: dict[int, PendingCopy] = {}
        self._exported: dict[Export, tuple[int, set[Attachment]]] = {}
        self._numbers = itertools.count(1)

    def add(self, attachment: Attachment) -> None:
        """Add an attachment, and send it now if its handle is registered."""
        self._all.append(attachment)
        self._attach(attachment)

    def offer(self, handle: RegisteredHandle) -> None:
        """Attach the attachments of a handle that has been registered in this session."""
        for attachment in self._all:
            if attachment.handle is handle:
                self._attach(attachment)

    def try_again(self, now_s: float) -> None:
        """Attach again what ended with the copy process, once the pause is over."""
        for attachment in self._all:
            again_s = attachment._again_s
            if again_s is not None and now_s >= again_s:
                self._attach(attachment)

    def remove(self, attachment: Attachment) -> None:
        """Request the end of an attachment. `is_known` is true until the daemon confirms it."""
        self._all.remove(attachment)
        if attachment in self._queued:
            self._queued.remove(attachment)
        if attachment.number is not None:
            self._detach(attachment, attachment.number)
        elif attachment not in self._attaching.values():
            self._drop_exports(attachment)

    def is_known(self, attachment: Attachment) -> bool:
        """Whether the daemon may still have the exports of a removed attachment open."""
        return attachment in self._attaching.values() or attachment in self._detaching.values()

    def begin(self, make: Callable[[int], m.FromClient]) -> PendingCopy:
        """Send the copy that `make` returns for a call number."""
        call = self._next_call()
        pending = self._pending[call] = PendingCopy()
        self._send(make(call), None)
        return pending

    def lost(self) -> None:
        """End all copies: the session is over."""
        for attachment in self._all:
            attachment.number = None
            attachment._again_s = None
        for pending in self._pending.values():
            pending.end(0, "the session with the daemon has ended")
        self._pending.clear()
        self._attaching.clear()
        self._queued.clear()
        self._detaching.clear()
        self._exported.clear()

    def take(self, message: m.Attached | m.Detached | m.Copied, now_s: float) -> bool:
        """Take a message. Returns False if it answers nothing."""
        match message:
            case m.Attached(call, number, how):
                attachment = self._attaching.pop(call, None)
                if attachment is None:
                    return False
                if attachment in self._all:
                    attachment.number, attachment.how = number, how
                    attachment.refusal = None
                    attachment._accepted = True
                    attachment._pause_s = 0.0
                    attachment._refusals = 0
                else:
                    # It was removed meanwhile.
                    self._detach(attachment, number)
                self._attach_next()
            case m.Detached(0, number, _):
                for attachment in self._all:
                    if attachment.number == number:
                        attachment.number = None
                        self._retry_later(attachment, now_s)
                        self._drop_exports(attachment)
            case m.Detached(call, _, reason) if call in self._attaching:
                self._not_attached(call, reason, now_s, permanent=False)
            case m.Detached(call):
                gone = self._detaching.pop(call, None)
                if gone is not None:
                    self._drop_exports(gone)
            case m.Copied(call, blocks, reason):
                pending = self._pending.pop(call, None)
                if pending is None:
                    return False
                pending.end(blocks, reason)
        return True

    def refused(self, call: int, reason: str, now_s: float) -> bool:
        """Take an ERROR. Returns whether it answers an ATTACH."""
        if call not in self._attaching:
            return False
        # An attachment that was accepted before may be accepted again.
        self._not_attached(call, reason, now_s, permanent=not self._attaching[call]._accepted)
        return True

    def _not_attached(self, call: int, reason: str, now_s: float, *, permanent: bool) -> None:
        attachment = self._attaching.pop(call)
        self._drop_exports(attachment)
        if permanent or attachment._refusals >= REFUSALS_MAX:
            attachment.refusal = reason
        else:
            attachment._refusals += 1
            self._retry_later(attachment, now_s)
        self._attach_next()

    def _attach_next(self) -> None:
        while self._queued and not self._attaching:
            self._attach(self._queued.pop(0))

    def _retry_later(self, attachment: Attachment, now_s: float) -> None:
        pause_s = min(max(2 * attachment._pause_s, AGAIN_FIRST_S), AGAIN_MAX_S)
        attachment._pause_s = pause_s
        attachment._again_s = now_s + pause_s

    def _attach(self, attachment: Attachment) -> None:
        """Send an attachment. If its handle is not registered, `offer` sends it later.

        Only one is sent at a time, because the probe of the next one may use the same block.
        """
        handle = attachment.handle.number
        if handle is None:
            return
        attachment._again_s = None
        if self._attaching:
            if attachment not in self._queued:
                self._queued.append(attachment)
            return
        block, digest = attachment._probe(not attachment._accepted)
        numbers = []
        for export in attachment.exports:
            numbers.append(self._export(export, attachment))
            if attachment.handle.number is None:
                # The session ended during the sends.
                self._exported.clear()
                return
        call = self._next_call()
        self._attaching[call] = attachment
        layout = attachment.layout
        self._send(
            m.Attach(
                call,
                handle,
                numbers,
                pack_runs(layout.runs),
                layout.block_stride,
                layout.block_count,
                m.pack_handles(attachment.events),
                block,
                digest,
                list(attachment.layer_ends),
            ),
            attachment._gate_fd,
        )

    def _export(self, export: Export, user: Attachment) -> int:
        if export not in self._exported:
            number = next(self._numbers)
            self._send(
                m.Export(number, export.kind, export.device, export.size_bytes, export.handle),
                None,
            )
            for offset, size_bytes, fd in export.parts:
                self._send(m.Part(number, offset, size_bytes), fd)
            self._exported[export] = number, set()
        number, users = self._exported[export]
        users.add(user)
        return number

    def _detach(self, attachment: Attachment, number: int) -> None:
        call = self._next_call()
        self._detaching[call] = attachment
        attachment.number = None
        self._send(m.Detach(call, number), None)

    def _drop_exports(self, user: Attachment) -> None:
        """Have the daemon close the allocations that no other attachment uses."""
        for export in user.exports:
            number, users = self._exported.get(export, (0, set()))
            users.discard(user)
            if number and not users:
                del self._exported[export]
                self._send(m.DropExport(number), None)
