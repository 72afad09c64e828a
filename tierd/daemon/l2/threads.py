"""The daemon's worker threads: calls off the event loop, such as checksums and page faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from tierd.clock import Clock

_T = TypeVar("_T")


class WorkerThreads:
    """Runs calls in an executor, and knows how long the oldest one has taken."""

    def __init__(self, clock: Clock, executor: Executor | None) -> None:
        """Without an executor, calls run in the loop's default one."""
        self._clock = clock
        self._executor = executor
        self._began_ns: dict[object, int] = {}

    async def run(self, call: Callable[..., _T], *args: object) -> _T:
        """Return what `call` returns, run in a thread."""
        token = object()
        self._began_ns[token] = self._clock.monotonic_ns()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, call, *args)
        finally:
            del self._began_ns[token]

    @property
    def oldest_s(self) -> float:
        """Age of the oldest running call; 0 if none runs."""
        began_ns = next(iter(self._began_ns.values()), None)
        return 0.0 if began_ns is None else (self._clock.monotonic_ns() - began_ns) / 1e9
