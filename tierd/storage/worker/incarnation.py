"""The daemon's side of one worker process, from its start until it has been reaped.

Decides when a call's views belong to the caller again: once the process has answered or has been
reaped. A process that does not release the views in time is killed, whatever else it was doing;
memory that a process might still write to would be a wrong byte later.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from tierd.child import Stream, start_child
from tierd.errors import BackendError, ConfigError
from tierd.shared_memory.mapping import ViewPlace, place_of
from tierd.storage.worker.wire import (
    Ask,
    Cancel,
    Close,
    End,
    EndScan,
    Map,
    Reply,
    Report,
    Request,
    Unmap,
)

CALLS_MAX: Final = 256
"""Maximum calls in flight, more than a tier has batches and lookups; further calls wait."""

END_S: Final = 1.0
"""Seconds that a process may take to end after it closed its socket."""

CLOSE_S_MAX: Final = 3.0
"""Seconds that a backend may take to close, less than the daemon's own limit at a stop."""

_PROCESS: Final = "tierd.storage.worker.process"

log = logging.getLogger("tierd.worker")
_encoder = msgspec.msgpack.Encoder()
_replies = msgspec.msgpack.Decoder(Reply)


class BackendBugError(RuntimeError):
    """A backend in a worker raised an exception that its contract does not allow: a bug.

    Not a BackendError, so that the daemon counts it like a bug of a backend in the daemon's
    process. The worker has logged the traceback and goes on.
    """


class WorkerIncarnation:
    """A running worker process, used from one event loop whose thread must outlive it."""

    def __init__(
        self, target: str, on_report: Callable[[Report], None], *, lets_go_s: float
    ) -> None:
        """Start a process for the backend class `target`, written "module:QualName".

        The process is killed if a cancelled call keeps its views for over `lets_go_s`.
        Raises BackendError if the system cannot start a process.
        """
        self._loop = asyncio.get_running_loop()
        self._on_report = on_report
        self._lets_go_s = lets_go_s
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._numbers = itertools.count(1)
        self._room = asyncio.Semaphore(CALLS_MAX)
        self._shared: dict[int, weakref.ref[object]] = {}
        self._unshared: deque[int] = deque()
        self.killed_for = ""
        """Why the process was killed; empty if it was not killed."""
        self.dying = ""
        """Why calls are refused; empty while they are possible."""
        self.ended = asyncio.Event()
        """Set once the process has been reaped."""
        try:
            near, self._process, self._pidfd = start_child(_PROCESS, target)
        except OSError as error:
            raise BackendError(f"cannot start a worker process: {error}") from error
        self._stream = Stream(near, self._take, self._lost)
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        """The process's id, valid until `ended` is set."""
        return self._process.pid

    async def call(self, ask: Ask) -> bytes | int:
        """Make a call and return its answer.

        When this returns or raises, the process no longer touches the call's views: if a cancelled
        call keeps them, the process is killed after `lets_go_s`. Raises the backend's BackendError
        or ConfigError, BackendError if the process has ended, and BackendBugError.
        """
        async with self._room:
            await self._stream.ready()
            if self.dying:
                raise BackendError(self.dying)
            reply = await self._ask(ask)
        return _value(reply)

    def place(self, views: Sequence[memoryview]) -> list[ViewPlace]:
        """Return the places of views of shared mappings, after sending new mappings to the process.

        The process keeps a mapping until this process has dropped all views of it. Raises
        BackendError if descriptors have run out.
        """
        places = [place_of(view) for view in views]
        for place, view in zip(places, views, strict=True):
            if place.serial not in self._shared:
                self._share(place, view.obj)
        if self._unshared:
            serials = [self._unshared.popleft() for _ in range(len(self._unshared))]
            self._say(0, Unmap(serials))
            for serial in serials:
                del self._shared[serial]
        return places

    def end_scan(self, scan: int) -> None:
        """Tell the process that a scan is over."""
        self._say(0, EndScan(scan))

    async def stop(self) -> None:
        """Close the backend, which finishes the calls in flight, and wait for the process's end."""
        timer = self._loop.call_later(CLOSE_S_MAX, self.kill, f"did not close in {CLOSE_S_MAX:g} s")
        try:
            if not self.dying:
                self.dying = "worker is closing"
                reply = await self._ask(Close())
                if reply.end is not End.OK:
                    log.warning("worker %d: closing failed: %s", self.pid, reply.text)
            await self.ended.wait()
        except asyncio.CancelledError:
            await self.end("was stopped at once")
            raise
        finally:
            timer.cancel()

    async def end(self, why: str) -> None:
        """Kill the process and wait until it has been reaped, even if cancelled meanwhile."""
        self.kill(why)
        cancelled = None
        while not self.ended.is_set():
            try:
                await self.ended.wait()
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def kill(self, why: str) -> None:
        """Kill the process, unless it has ended; `ended` follows."""
        if self.ended.is_set():
            return
        self.dying = self.dying or f"worker {why}"
        self.killed_for = self.killed_for or why
        self._process.kill()

    async def _ask(self, ask: Ask) -> Reply:
        number = next(self._numbers)
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._calls[number] = future
        self._say(number, ask)
        try:
            return await future
        except asyncio.CancelledError:
            await self._cancel(number)
            raise

    async def _cancel(self, number: int) -> None:
        """Cancel a call; return when the process has answered it or has ended."""
        if number not in self._calls:
            return
        answered = self._calls[number] = self._loop.create_future()
        self._say(0, Cancel(number))
        why = f"kept a cancelled call for over {self._lets_go_s:g} s"
        timer = self._loop.call_later(self._lets_go_s, self.kill, why)
        while not answered.done():
            # A second cancellation changes nothing: the views are not free yet.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([answered])
        timer.cancel()

    def _say(self, number: int, ask: Ask, fd: int | None = None) -> None:
        self._stream.send(_encoder.encode(Request(number, ask)), fd)

    def _share(self, place: ViewPlace, owner: object) -> None:
        # The callback runs in the thread that drops the last view.
        gone = partial(_note_gone, self._unshared, place.serial)
        try:
            self._say(0, Map(place.serial, place.size_bytes), place.fd)
        except OSError as error:
            raise BackendError(f"cannot share memory with the worker: {error}") from error
        self._shared[place.serial] = weakref.ref(owner, gone)

    def _take(self, payload: bytes | bytearray | memoryview, _: tuple[int, ...]) -> None:
        reply = _replies.decode(payload)
        if reply.report is not None:
            self._on_report(reply.report)
        if reply.call:
            future = self._calls.pop(reply.call)
            if not future.done():
                future.set_result(reply)

    def _lost(self, why: str) -> None:
        """Handle the end of the socket: the process should end by itself, else it is killed."""
        self.dying = self.dying or f"worker {why}"
        self._loop.call_later(END_S, self.kill, why)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        status = self._process.wait()
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        self.dying = f"worker died ({how})"
        if self.killed_for:
            self.dying += f": it {self.killed_for}"
        # Read the answers that it sent before it ended.
        while self._stream.read():
            pass
        self._stream.close()
        for number, future in self._calls.items():
            if not future.done():
                future.set_result(Reply(number, End.DIED, text=self.dying))
        self._calls.clear()
        self.ended.set()


def _note_gone(unshared: deque[int], serial: int, _: object) -> None:
    unshared.append(serial)


def _value(reply: Reply) -> bytes | int:
    match reply.end:
        case End.OK:
            return reply.value
        case End.CONFIG_ERROR:
            raise ConfigError(reply.text)
        case End.BUG:
            raise BackendBugError(reply.text)
        case End.BACKEND_ERROR | End.DIED:
            raise BackendError(reply.text)
        case End.CANCELLED:
            raise BackendBugError("the backend cancelled a call that the daemon had not cancelled")
