"""The copy processes of a node: one per device, started on demand and killed when a copy hangs.

Each process maps and pins the segments of the namespaces whose blocks are attached on its device,
and lets go of segments that are decommitted or closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from tierd.clock import Clock
from tierd.core.l2.space import Space
from tierd.daemon.copies.copy_process import CopyProcess
from tierd.daemon.l2.memory import HostMemory
from tierd.errors import RefusedError
from tierd.memory.arena import Segment

DEVICES_MAX: Final = 32
"""Copy processes per node."""

RESTART_S: Final = 1.0
"""Shortest time between two starts of a device's copy process."""


class NotNowError(RefusedError):
    """A refusal that a later request may not meet."""


@dataclass(slots=True, eq=False)
class AttachedLayout:
    """A layout of blocks that a copy process has verified."""

    number: int
    space: Space
    block_count: int
    process: CopyProcess


@dataclass(slots=True, eq=False)
class CopyUnderWay:
    """One copy, from its request to its answer; `watch` kills its process if it takes too long."""

    began_ns: int
    process: CopyProcess
    over: bool = False


class AttachedSession(Protocol):
    """A session, as the copy processes see it."""

    attachments: dict[int, AttachedLayout]

    def process_ended(self, process: CopyProcess) -> None:
        """A copy process has ended, after it or its end has answered all calls."""


class CopyProcesses:
    """The copy processes of a node, by device."""

    def __init__(
        self,
        memory: HostMemory,
        clock: Clock,
        counters: Counter[str],
        *,
        bandwidth_max: int,
        job_timeout_ms: int,
        hold: Callable[[], int | None],
    ) -> None:
        """`hold` makes a descriptor that is open while a process copies, for the next daemon."""
        self.memory = memory
        self.clock = clock
        self.counters = counters
        self.numbers = itertools.count(1)
        """Numbers of attachments."""
        self.sessions: list[AttachedSession] = []
        self._bandwidth_max = bandwidth_max
        self._timeout_ns = job_timeout_ms * 1_000_000
        self._hold = hold
        self._processes: dict[bytes, CopyProcess] = {}
        self._started_ns: dict[bytes, int] = {}
        # Oldest first. A finished copy stays until it is the oldest.
        self._under_way: deque[CopyUnderWay] = deque()
        memory.listeners.append(self._segment_made)
        memory.decommitted = self._segment_decommitted
        memory.closed = self._segment_closed

    def process(self, uuid: bytes) -> CopyProcess:
        """Return a device's process, started if there is none.

        Raises NotNowError while it ends or cannot be started, RefusedError beyond DEVICES_MAX.
        """
        process = self._processes.get(uuid)
        if process is not None and not process.dying:
            return process
        if process is not None:
            raise NotNowError("the copy process of this device is ending")
        if len(self._processes) >= DEVICES_MAX:
            raise RefusedError(f"a daemon copies for at most {DEVICES_MAX} devices")
        now_ns = self.clock.monotonic_ns()
        if uuid in self._started_ns and now_ns < self._started_ns[uuid] + int(RESTART_S * 1e9):
            raise NotNowError(
                f"the copy process of this device ended within {RESTART_S:g} s of its start"
            )
        try:
            with contextlib.ExitStack() as ours:
                hold = self._hold()
                if hold is not None:
                    ours.callback(os.close, hold)
                process = CopyProcess(
                    uuid,
                    bandwidth_max=self._bandwidth_max,
                    # Half the timeout: the process gives a copy up well before it is killed.
                    job_limit_ms=self._timeout_ns // 2_000_000,
                    on_end=self._process_ended,
                    hold=hold,
                )
        except OSError as error:
            raise NotNowError(f"cannot start a copy process: {error}") from error
        self._processes[uuid] = process
        self._started_ns[uuid] = now_ns
        self.counters["copy_process_starts_total"] += 1
        return process

    def began(self, process: CopyProcess) -> CopyUnderWay:
        """Record the start of a copy; the caller sets `over` at its end."""
        copy = CopyUnderWay(self.clock.monotonic_ns(), process)
        self._under_way.append(copy)
        return copy

    def watch(self) -> None:
        """Kill processes whose copies exceed the timeout; to be called every second or so."""
        now_ns = self.clock.monotonic_ns()
        while self._under_way and self._under_way[0].over:
            self._under_way.popleft()
        for copy in self._under_way:
            if copy.began_ns + self._timeout_ns > now_ns:
                break
            if not copy.over and not copy.process.dying:
                self.counters["copy_process_kills_total"] += 1
                copy.process.kill(f"a copy took over {self._timeout_ns / 1e9:g} s")

    async def close(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.kill("the daemon stops")
        while self._processes:
            await asyncio.sleep(0.001)

    def status(self) -> list[dict[str, object]]:
        """One entry per device, for STATUS."""
        attached = Counter(
            attachment.process
            for session in self.sessions
            for attachment in session.attachments.values()
        )
        return [
            {
                "device": process.name,
                "pid": process.pid,
                "attachments": attached[process],
                "under_way": process.calls,
                "pinned_bytes": process.pinning.pinned_bytes,
                "mapped_bytes": process.pinning.mapped_bytes,
                "pin_problem": process.pinning.problem,
            }
            for process in self._processes.values()
        ]

    def place(self, process: CopyProcess, space: Space, slots: np.ndarray) -> tuple[bytes, bytes]:
        """Serials of segments and offsets of slots, for a Copy. Raises OSError."""
        per = space.slots_per_segment
        index = slots // per
        segments = self.memory.arena.segments(space)
        serials = np.zeros(len(segments), np.uint32)
        for number in np.unique(index):
            serials[number] = process.share(segments[number])
        offsets = (slots - index * per).astype(np.uint64) * np.uint64(space.slot_bytes)
        return serials[index].tobytes(), offsets.tobytes()

    def _process_ended(self, process: CopyProcess) -> None:
        del self._processes[process.uuid]
        for session in list(self.sessions):
            session.process_ended(process)

    def _segment_made(self, space: Space, index: int, segment: Segment) -> None:
        """Have a new segment mapped and pinned before a copy needs it."""
        for process in {
            attachment.process
            for session in self.sessions
            for attachment in session.attachments.values()
            if attachment.space is space
        }:
            process.share_ahead(segment)

    def _segment_decommitted(self, segment: Segment) -> None:
        for process in self._processes.values():
            process.unpin(segment)

    def _segment_closed(self, segment: Segment) -> None:
        for process in self._processes.values():
            process.forget(segment)
