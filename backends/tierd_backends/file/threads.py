"""The file tier's I/O threads; decides who owns a block's memory during a system call.

There are two small pools, one for reads and one for writes, so that a burst of writes does not
hold up reads. A batch costs one hop per thread, not one per block: each thread takes the batch's
next run of neighbouring records until none is left. A call, cancelled or not, returns only when
no thread works on any of its jobs. After that the memory belongs to the caller again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tierd_backends.file.jobs import FileJob, runs_of

_T = TypeVar("_T")


class DiskThreads:
    """Two pools of `count` threads each, and the calls in flight on them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._in_flight = 0
        self._idle = asyncio.Event()
        self.readers = ThreadPoolExecutor(count, "tierd-file-read")
        self.writers = ThreadPoolExecutor(count, "tierd-file-write")

    async def run(
        self,
        pool: ThreadPoolExecutor,
        work: Callable[[list[FileJob]], None],
        jobs: Sequence[FileJob],
        *,
        abandon: bool,
    ) -> asyncio.CancelledError | None:
        """Do `work` on the jobs, in runs of neighbours. It leaves any OSError in its job.

        Returns a cancellation, which the caller raises once its state is in order. With `abandon`,
        a cancellation leaves the jobs undone that no thread had begun.
        """
        queue = deque(runs_of(jobs))
        loop = asyncio.get_running_loop()
        workers = min(len(queue), self._count)
        futures = [loop.run_in_executor(pool, _work, work, queue) for _ in range(workers)]
        cancelled = await self._settle(futures, queue.clear if abandon else None)
        for future in futures:
            future.result()
        return cancelled

    async def call(
        self, pool: ThreadPoolExecutor, function: Callable[[], _T]
    ) -> tuple[asyncio.Future[_T], asyncio.CancelledError | None]:
        """Return a finished blocking call, and the cancellation that arrived meanwhile."""
        future = asyncio.get_running_loop().run_in_executor(pool, function)
        cancelled = await self._settle([future], None)
        return future, cancelled

    async def result(self, pool: ThreadPoolExecutor, function: Callable[[], _T]) -> _T:
        """Return a blocking call's result. For calls that need no cleanup after a cancellation."""
        future, cancelled = await self.call(pool, function)
        if cancelled is not None:
            raise cancelled
        return future.result()

    async def close(self) -> None:
        """Wait for calls in flight and end the threads. No call may follow."""
        while self._in_flight:
            self._idle.clear()
            await self._idle.wait()
        self.readers.shutdown()
        self.writers.shutdown()

    async def _settle(
        self, futures: Sequence[asyncio.Future[_T]], on_cancel: Callable[[], None] | None
    ) -> asyncio.CancelledError | None:
        cancelled = None
        waiting = set(futures)
        self._in_flight += 1
        while waiting:
            try:
                _, waiting = await asyncio.wait(waiting)
            except asyncio.CancelledError as error:
                cancelled = error
                if on_cancel is not None:
                    on_cancel()
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()
        return cancelled


def _work(work: Callable[[list[FileJob]], None], queue: deque[list[FileJob]]) -> None:
    while True:
        try:
            run = queue.popleft()
        except IndexError:
            return
        work(run)
        for job in run:
            job.done = True
