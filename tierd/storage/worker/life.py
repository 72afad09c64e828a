"""One worker process as the daemon sees it, from its start until it has been reaped.

It decides nothing but this: a call's views are the caller's again once the process has
answered, or is no more. A process that does not let go in time is killed, whatever else it
was doing; memory that nobody is certain of would be a wrong byte later.
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
"""Calls in flight: more than a tier's batches and lookups at once; further ones wait."""

END_S: Final = 1.0
"""How long a process that has closed its socket may take to end."""

CLOSE_S_MAX: Final = 3.0
"""How long a backend may take to close: below what the daemon allows itself at its end."""

_PROCESS: Final = "tierd.storage.worker.process"

log = logging.getLogger("tierd.worker")
_encoder = msgspec.msgpack.Encoder()
_replies = msgspec.msgpack.Decoder(Reply)


class BackendBugError(RuntimeError):
    """A backend raised, in its worker, what the contract does not know: a bug of its own.

    Not a BackendError, so that the daemon counts it as it counts a bug of a backend in its
    own process. The worker goes on, and has logged the traceback.
    """


class WorkerIncarnation:
    """A running worker process. All on one event loop, whose thread must outlive it."""

    def __init__(
        self, target: str, on_report: Callable[[Report], None], *, lets_go_s: float
    ) -> None:
        """Start a process for the backend class `target`, written "module:QualName".

        It is killed if a cancelled call keeps its views for over `lets_go_s`.
        Raises BackendError if the system has no room for it.
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
        """What it was killed for; empty if it was not."""
        self.dying = ""
        """Why no call can be made any more; empty while they can."""
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
        """The process's id; until `ended`."""
        return self._process.pid

    async def call(self, ask: Ask) -> bytes | int:
        """The answer to a call.

        However it ends, the process no longer touches the views that it names: cancelling
        kills it after `lets_go_s`. Raises BackendError and ConfigError as the backend did,
        BackendError if the process has ended, and BackendBugError.
        """
        async with self._room:
            await self._stream.ready()
            if self.dying:
                raise BackendError(self.dying)
            reply = await self._ask(ask)
        return _value(reply)

    def place(self, views: Sequence[memoryview]) -> list[ViewPlace]:
        """Where views of shared mappings lie; the process has the mappings by then.

        It keeps them until nobody here has a view of them. Raises BackendError if descriptors
        have run out.
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
        """Let go of a scan."""
        self._say(0, EndScan(scan))

    async def stop(self) -> None:
        """Close the backend, which finishes what is in flight, and see the process end."""
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
        """Kill the process and wait until it is no more, also if cancelled meanwhile."""
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
        """Return when the process has answered a call after all, or has ended."""
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
        # The callback runs in whatever thread drops the last view.
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
        """The process ends by itself, or has to be made to."""
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
        # It may have answered before.
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
            raise BackendBugError("the backend cancelled a call that nobody had cancelled")
