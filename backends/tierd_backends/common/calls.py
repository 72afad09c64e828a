"""Threads that run batches over a network; decides which thread may touch a caller's memory, and
until when.

A tier handles a batch with a function that takes one job after another on a thread:

    def work(turn: CallTurn[Job]) -> None:
        while (job := turn.take()) is not None:
            connection = self._connect(job)            # may hang; the job's view is not touched
            try:
                with turn.using(connection.sock):      # from here on the view may be touched
                    job.outcome = connection.get(job)
            except OSError:                            # the outcome is not read after a cancel
                connection.close()                     # never reuse a half-read connection
            else:
                keep(connection) if not turn.cancelled else connection.close()

    await threads.run(work, jobs)

A batch costs one hop per thread, not one per block. Cancelling a call shuts down its sockets, so
its threads return at once even if the peer is silent. The call returns when no thread is inside
`using`. A thread that is still connecting is not waited for: `using` raises when it gets there.
Calls share the threads in turns: a lookup waits for one block of a large batch, not for the
whole batch.

This module knows neither protocols nor connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, TypeVar

EXIT_S_MAX = 1.0
"""Longest wait for threads to end: a thread may be in a name lookup that cannot be interrupted."""

_Job = TypeVar("_Job")


class CallCancelledError(Exception):
    """Raised by CallTurn.using: the call was cancelled and its caller has its memory back."""


class _Gate:
    """The threads inside a call. `lock` guards all fields; no thread waits for a peer under it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, workers: int) -> None:
        self.lock = threading.Lock()
        self.sockets: list[socket.socket] = []
        self.cancelled = False
        self.workers = workers
        self.settled: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._is_settled = False

    def settle_if_idle(self) -> None:
        """Notify the coroutine, once, that no thread touches its views; `lock` is held."""
        idle = not self.sockets and (self.cancelled or not self.workers)
        if idle and not self._is_settled:
            self._is_settled = True
            self._loop.call_soon_threadsafe(self.settled.set_result, None)

    def cancel(self) -> None:
        """Wake the threads that block on a socket, and let no thread in from now on."""
        with self.lock:
            self.cancelled = True
            for sock in self.sockets:
                # Not SSLSocket.shutdown: that would turn the thread's next read into a plain one.
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)
            self.settle_if_idle()


class _Use:
    """The context manager that CallTurn.using returns."""

    __slots__ = ("_gate", "_sock")

    def __init__(self, gate: _Gate, sock: socket.socket) -> None:
        self._gate = gate
        self._sock = sock

    def __enter__(self) -> None:
        with self._gate.lock:
            if self._gate.cancelled:
                raise CallCancelledError
            self._gate.sockets.append(self._sock)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._gate.lock:
            self._gate.sockets.remove(self._sock)
            if self._gate.cancelled:
                self._gate.settle_if_idle()


class _Call(_Gate, Generic[_Job]):
    """A batch in flight."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Callable[[CallTurn[_Job]], None],
        jobs: Sequence[_Job],
        workers: int,
    ) -> None:
        super().__init__(loop, workers)
        self.jobs = deque(jobs)
        self.error: BaseException | None = None
        self._work = work

    def serve(self, alone: Callable[[], bool]) -> bool:
        """In a thread: take a turn. Returns True if jobs are left for a later turn."""
        try:
            self._work(CallTurn(self, alone))
        except CallCancelledError:
            pass
        except BaseException as error:  # noqa: BLE001  # not swallowed: `run` raises it
            self.error = error
            self.jobs.clear()
        with self.lock:
            if self.jobs and not self.cancelled:
                return True
            self.workers -= 1
            self.settle_if_idle()
        return False


class CallTurn(Generic[_Job]):
    """One thread's turn at a call. Only that thread uses it."""

    __slots__ = ("_alone", "_call", "_taken")

    def __init__(self, call: _Call[_Job], alone: Callable[[], bool]) -> None:
        self._call = call
        self._alone = alone
        self._taken = False

    @property
    def cancelled(self) -> bool:
        """Whether the call was cancelled; if so, that caused any error, not the peer."""
        return self._call.cancelled

    def take(self) -> _Job | None:
        """Return the next job. None ends the turn: no job is left, or another call is waiting."""
        if self._call.cancelled or (self._taken and not self._alone()):
            return None
        self._taken = True
        try:
            return self._call.jobs.popleft()
        except IndexError:
            return None

    def using(self, sock: socket.socket) -> AbstractContextManager[None]:
        """Return a context in which the thread may touch its jobs' views and use `sock`.

        Entering raises CallCancelledError if the call was cancelled. A later cancellation shuts
        `sock` down, so that a blocked operation on it returns or fails. Close the socket only after
        leaving the context, and always close it if `cancelled` is set by then: it may have been
        shut down after the last byte.
        """
        return _Use(self._call, sock)


class CallThreads:
    """`count` threads, and the calls in flight on them."""

    def __init__(self, name: str, count: int) -> None:
        self._queue: SimpleQueue[Callable[[Callable[[], bool]], bool] | None] = SimpleQueue()
        self._calls: set[_Gate] = set()
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, work: Callable[[CallTurn[_Job]], None], jobs: Sequence[_Job]) -> None:
        """Have `work` do all jobs. `work` leaves its results in the jobs.

        Raises what `work` raises, once no thread works on the call. Raises a cancellation as soon
        as no thread is inside `using`; some jobs are then undone.
        """
        if not jobs:
            return
        workers = min(len(jobs), len(self._threads))
        call = _Call(asyncio.get_running_loop(), work, jobs, workers)
        self._calls.add(call)
        for _ in range(workers):
            self._queue.put(call.serve)
        cancelled: asyncio.CancelledError | None = None
        while not call.settled.done():
            try:
                await asyncio.wait([call.settled])
            except asyncio.CancelledError as error:
                cancelled = error
                call.cancel()
        self._calls.discard(call)
        if cancelled is not None:
            raise cancelled
        if call.error is not None:
            raise call.error

    def interrupt(self) -> None:
        """Cancel every call in flight. Each returns soon, with jobs undone."""
        for call in self._calls:
            call.cancel()

    async def close(self) -> None:
        """End the threads. No call may be in flight, and none may follow."""
        for _ in self._threads:
            self._queue.put(None)
        loop = asyncio.get_running_loop()
        until = loop.time() + EXIT_S_MAX
        while any(thread.is_alive() for thread in self._threads) and loop.time() < until:
            await asyncio.sleep(0.001)

    def _serve(self) -> None:
        while (serve := self._queue.get()) is not None:
            if serve(self._queue.empty):
                self._queue.put(serve)
