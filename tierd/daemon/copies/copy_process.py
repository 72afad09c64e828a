"""One copy process, which copies between one device's memory and host memory, seen by the daemon.

The process isolates the device's faults: it may crash, hang or lose its context, and is killed and
started again while host memory stays. Each call is answered exactly once, by the process or by its
end, and until then the process may access the slots and pages that the call names.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from tierd.child import Stream, start_child
from tierd.device.frames import Ask, Bring, Map, Pin, Reply, Request, Unmap, Unpin
from tierd.memory.arena import Segment
from tierd.shared_memory.exports import device_text
from tierd.sizes import about

END_S: Final = 1.0
"""Time from the close of a process's socket to its kill."""

PIN_LOG_S: Final = 5.0
"""Shortest time between two log lines about pinning in progress."""

_PROCESS: Final = "tierd.device.process"

log = logging.getLogger("tierd.copies")
_encoder = msgspec.msgpack.Encoder()
_replies = msgspec.msgpack.Decoder(Reply)

OnReply = Callable[[Reply], None]


class PinProgress:
    """How much of the mapped host memory a process has pinned, as it reported last."""

    def __init__(self, name: str) -> None:
        self.pinned_bytes = 0
        self.mapped_bytes = 0
        self.problem = ""
        """Why the rest is not pinned; empty if it is about to be."""
        self._name = name
        # Time of the last log line about pinning in progress; 0 if all is pinned.
        self._logged_s = 0.0

    def note(self, report: Reply, now_s: float) -> None:
        """Take over a report, and log it at most every PIN_LOG_S."""
        self.pinned_bytes, self.mapped_bytes = report.pinned_bytes, report.mapped_bytes
        if report.problem and report.problem != self.problem:
            log.warning(
                "%s: cannot pin host memory, copies are slower: %s", self._name, report.problem
            )
        self.problem = report.problem
        complete = self.pinned_bytes == self.mapped_bytes
        if complete and not self._logged_s:
            return
        if complete or now_s >= self._logged_s + PIN_LOG_S:
            self._logged_s = 0.0 if complete else now_s
            log.info(
                "%s: %s of %s of host memory pinned",
                self._name,
                about(self.pinned_bytes),
                about(self.mapped_bytes),
            )


class CopyProcess:
    """One run of a copy process. Used on one event loop, whose thread must outlive it."""

    def __init__(
        self,
        uuid: bytes,
        *,
        bandwidth_max: int,
        job_limit_ms: int,
        on_end: Callable[[CopyProcess], None],
        hold: int | None = None,
    ) -> None:
        """Start a process for a device. Raises OSError if the system cannot start it.

        The process keeps a copy of the descriptor `hold` open until it ends, even if the daemon
        ends first. It abandons copies that take over `job_limit_ms`, waiting included. `on_end` is
        called at its end, after all calls were answered.
        """
        self.uuid = uuid
        self.name = device_text(uuid)
        self.dying = ""
        """Why the process takes no more calls; empty while it takes them."""
        self.pinning = PinProgress(self.name)
        self._on_end = on_end
        self._calls: dict[int, OnReply] = {}
        self._numbers = itertools.count(1)
        self._segments: dict[int, Segment] = {}
        self._pinned: set[int] = set()
        self._loop = asyncio.get_running_loop()
        near, self._process, self._pidfd = start_child(
            _PROCESS,
            uuid.hex(),
            str(bandwidth_max),
            str(job_limit_ms),
            keep=() if hold is None else (hold,),
        )
        self._stream = Stream(near, self._take, self._lost)
        self._loop.add_reader(self._pidfd, self._reap)
        log.info("%s: copy process %d started", self.name, self.pid)

    @property
    def pid(self) -> int:
        """Process ID."""
        return self._process.pid

    @property
    def calls(self) -> int:
        """Number of unanswered calls."""
        return len(self._calls)

    def call(self, ask: Ask, on_reply: OnReply, fds: tuple[int, ...] = ()) -> None:
        """Send a call; `on_reply` gets the answer later, never within this method.

        The descriptors precede the call, one frame each, and stay the caller's.
        """
        number = next(self._numbers)
        self._calls[number] = on_reply
        if self.dying:
            self._loop.call_soon(self._answer, Reply(number, ok=False, text=self.dying))
            return
        try:
            for fd in fds:
                self._say(0, Bring(), fd)
            self._say(number, ask)
        except OSError as error:
            self._loop.call_soon(self._answer, Reply(number, ok=False, text=str(error)))

    def share(self, segment: Segment) -> int:
        """Return the number by which copies name a segment; the process maps and pins it first.

        Raises OSError if descriptors have run out.
        """
        serial = segment.mapping.serial
        if serial not in self._segments:
            self._say(0, Map(serial, segment.mapping.size_bytes), segment.fd)
            self._segments[serial] = segment
        elif serial not in self._pinned:
            self._say(0, Pin(serial))
        if serial not in self._pinned:
            self._pinned.add(serial)
            segment.pins += 1
        return serial

    def share_ahead(self, segment: Segment) -> None:
        """Share a segment before a copy needs it; a failure is logged, and a copy tries again."""
        try:
            self.share(segment)
        except OSError as error:
            log.warning("%s: cannot share memory ahead of use: %s", self.name, error)

    def unpin(self, segment: Segment) -> None:
        """Have the process unpin a segment that is decommitted from now on."""
        serial = segment.mapping.serial
        if serial in self._pinned:
            self._pinned.discard(serial)
            self.call(Unpin(serial), partial(_let_go, segment))

    def forget(self, segment: Segment) -> None:
        """Have the process unmap a closed segment, which must not be pinned."""
        serial = segment.mapping.serial
        if self._segments.pop(serial, None) is not None:
            assert serial not in self._pinned
            self._say(0, Unmap(serial))

    def kill(self, why: str) -> None:
        """Kill the process unless it has ended; `on_end` follows."""
        if self._process.returncode is None:
            self.dying = self.dying or why
            self._process.kill()

    def _say(self, number: int, ask: Ask, fd: int | None = None) -> None:
        self._stream.send(_encoder.encode(Request(number, ask)), fd)

    def _take(self, payload: bytes | bytearray | memoryview, _: tuple[int, ...]) -> None:
        reply = _replies.decode(payload)
        if reply.call:
            self._answer(reply)
        else:
            self.pinning.note(reply, self._loop.time())

    def _answer(self, reply: Reply) -> None:
        on_reply = self._calls.pop(reply.call, None)
        if on_reply is not None:
            on_reply(reply)

    def _lost(self, why: str) -> None:
        """The socket has closed: the process ends within END_S, or is killed."""
        self.dying = self.dying or f"the copy process {why}"
        self._loop.call_later(END_S, self.kill, why)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        status = self._process.wait()
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        why = f": {self.dying}" if self.dying else ""
        self.dying = f"the copy process of {self.name} has ended ({how}){why}"
        # It may have answered before its end.
        while self._stream.read():
            pass
        self._stream.close()
        # A reply may cause another call.
        while self._calls:
            number = next(iter(self._calls))
            self._answer(Reply(number, ok=False, text=self.dying))
        pinned, self._pinned = self._pinned, set()
        for serial in pinned:
            _let_go(self._segments[serial])
        log.warning("%s", self.dying)
        self._on_end(self)


def _let_go(segment: Segment, _: Reply | None = None) -> None:
    """A process has unpinned a segment, whose memory can be given back once none has it pinned."""
    segment.pins -= 1
