"""A process that copies between one device's memory and L2, as the daemon sees it.

A device's faults stay in it: it may crash, hang or lose its context, and is killed and started
again while L2 lives on. A call is answered exactly once, by the process or by its end, and until
then the process may touch the slots and pages that the call names.
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
"""How long a process that has closed its socket may take to end."""

PIN_LOG_S: Final = 5.0
"""How often the log tells how much is pinned, while some is yet to be."""

_PROCESS: Final = "tierd.device.process"

log = logging.getLogger("tierd.copies")
_encoder = msgspec.msgpack.Encoder()
_replies = msgspec.msgpack.Decoder(Reply)

OnReply = Callable[[Reply], None]


class CopyProcess:
    """One life of a copy process. All on one event loop, whose thread must outlive it."""

    def __init__(
        self,
        uuid: bytes,
        *,
        bandwidth_max: int,
        job_limit_ms: int,
        on_end: Callable[[CopyProcess], None],
        hold: int | None = None,
    ) -> None:
        """Start a process for a device. Raises OSError if the system has no room for it.

        It has a copy of the descriptor `hold` until it has ended, whatever becomes of the daemon.
        It gives copies up by itself that take over `job_limit_ms`, waiting included. `on_end`
        hears of its end after all calls were answered.
        """
        self.uuid = uuid
        self.name = device_text(uuid)
        self.dying = ""
        """Why no call can be made any more; empty while they can."""
        self.pinned_bytes = 0
        self.mapped_bytes = 0
        self.problem = ""
        self._on_end = on_end
        self._calls: dict[int, OnReply] = {}
        self._numbers = itertools.count(1)
        self._segments: dict[int, Segment] = {}
        self._pinned: set[int] = set()
        # When the log was told last that some memory is yet to be pinned; 0 if there was none.
        self._pin_told_s = 0.0
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
        """The process's id."""
        return self._process.pid

    @property
    def calls(self) -> int:
        """Calls that are not answered yet."""
        return len(self._calls)

    def call(self, ask: Ask, on_reply: OnReply, fds: tuple[int, ...] = ()) -> None:
        """Ask, and hear the answer later, never within this call.

        The descriptors go ahead of it, each in a frame of its own, and stay the caller's.
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
        """The number under which copies name a segment, mapped and being pinned by then.

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

    def unpin(self, segment: Segment) -> None:
        """Have it let go of a segment that is hollow from now on."""
        serial = segment.mapping.serial
        if serial in self._pinned:
            self._pinned.discard(serial)
            self.call(Unpin(serial), partial(_let_go, segment))

    def forget(self, segment: Segment) -> None:
        """Have it forget a segment that is no more, and that it does not have pinned."""
        serial = segment.mapping.serial
        if self._segments.pop(serial, None) is not None:
            assert serial not in self._pinned
            self._say(0, Unmap(serial))

    def kill(self, why: str) -> None:
        """Kill the process, unless it has ended; `on_end` follows."""
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
            self._note_pinned(reply)

    def _note_pinned(self, report: Reply) -> None:
        self.pinned_bytes, self.mapped_bytes = report.pinned_bytes, report.mapped_bytes
        if report.problem and report.problem != self.problem:
            log.warning(
                "%s: cannot pin host memory, copies are slower: %s", self.name, report.problem
            )
        self.problem = report.problem
        whole = self.pinned_bytes == self.mapped_bytes
        if whole and not self._pin_told_s:
            return
        if whole or self._loop.time() >= self._pin_told_s + PIN_LOG_S:
            self._pin_told_s = 0.0 if whole else self._loop.time()
            log.info(
                "%s: %s of %s of host memory pinned",
                self.name,
                about(self.pinned_bytes),
                about(self.mapped_bytes),
            )

    def _answer(self, reply: Reply) -> None:
        on_reply = self._calls.pop(reply.call, None)
        if on_reply is not None:
            on_reply(reply)

    def _lost(self, why: str) -> None:
        """The process ends by itself, or has to be made to."""
        self.dying = self.dying or f"the copy process {why}"
        self._loop.call_later(END_S, self.kill, why)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        status = self._process.wait()
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        why = f": {self.dying}" if self.dying else ""
        self.dying = f"the copy process of {self.name} has ended ({how}){why}"
        # It may have answered before.
        while self._stream.read():
            pass
        self._stream.close()
        # A reply may bring about a call.
        while self._calls:
            number = next(iter(self._calls))
            self._answer(Reply(number, ok=False, text=self.dying))
        pinned, self._pinned = self._pinned, set()
        for serial in pinned:
            _let_go(self._segments[serial])
        log.warning("%s", self.dying)
        self._on_end(self)


def _let_go(segment: Segment, _: Reply | None = None) -> None:
    """A process has a segment pinned no more; the memory of a hollow one is given back in time."""
    segment.pins -= 1
