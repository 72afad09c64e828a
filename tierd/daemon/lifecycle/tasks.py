"""The daemon's tasks: each ends with the daemon, and a bug in one does not end another."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping

log = logging.getLogger("tierd")

Work = Callable[[], Coroutine[object, object, None]]


class Tasks:
    """One task group: workers that run until the end, and tasks started by requests."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._group: asyncio.TaskGroup | None = None
        self._begun: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Number of spawned tasks that have not ended."""
        return sum(not task.done() for task in self._begun)

    async def run(
        self,
        workers: Mapping[str, Work],
        ready: Callable[[], Awaitable[None]],
        close: Callable[[], Awaitable[None]],
    ) -> None:
        """Run the workers, by name, until `ready()` returns; then cancel all tasks and await
        `close()`."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            running = [group.create_task(work(), name=name) for name, work in workers.items()]
            try:
                await ready()
            finally:
                for task in (*running, *self._begun):
                    task.cancel()
                await close()
        self._group = None

    def spawn(self, work: Work, name: str) -> asyncio.Task[None]:
        """Run `work` as a task that ends with the daemon; a bug in it is counted, not fatal.

        A task that is cancelled before its first step never calls `work`.
        """
        assert self._group is not None
        task = self._group.create_task(self.guarded(work), name=name)
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)
        return task

    async def guarded(self, work: Work) -> None:
        """Run `work`; count and log an unexpected exception."""
        try:
            await work()
        except Exception:  # one request's bug must not end other requests
            self._counters["internal_errors_total"] += 1
            log.exception("a task failed by a bug of tierd")
