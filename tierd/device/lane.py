"""The copy jobs of one direction: wait for events, cut into batches, issue, report completion.

Each direction has one thread and one stream. A job's copies go on that stream only after its
event has happened; another stream waits for the event. So a peer that never records its event
delays no other job, and a job that has ended never copies afterwards.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from tierd.device.api import Addresses, Device, DeviceError, Direction
from tierd.device.plan import NO_BOUNDS, CopyPlan, Strategy, issue
from tierd.shared_memory.gate import Gate

BATCH_BYTES: Final = 32 << 20
"""Bytes per batch: half a millisecond on PCIe 5, the longest wait for another job's batch."""

_PIECES_MAX: Final = 4096
_FLYING_MAX: Final = 16
"""Maximum batches on the stream: small batches must overlap; _FLYING_BYTES_MAX bounds large
batches."""
_FLYING_BYTES_MAX: Final = 2 * BATCH_BYTES
_PAUSE_MIN_S: Final = 20e-6
_PAUSE_MAX_S: Final = 1e-3
_CAP_STEP_S: Final = 0.02
"""With a bandwidth cap, a batch is at most the bytes allowed in this time, so that loads wait no
longer for it."""

CANCELLED: Final = "cancelled"
CALLED_OFF: Final = "called off"


class Cap:
    """Limit in bytes per second for both directions together; loads go first. Thread-safe."""

    def __init__(self, bandwidth_max: int, clock: Callable[[], float]) -> None:
        """`bandwidth_max` 0 means no cap; `clock` returns seconds."""
        self._rate = bandwidth_max
        self._clock = clock
        self._lock = threading.Lock()
        self._burst = bandwidth_max * _CAP_STEP_S
        self._level = self._burst
        self._at = clock()
        self._loads_want = False

    @property
    def batch_bytes(self) -> int:
        """Maximum bytes of a batch."""
        return min(BATCH_BYTES, int(self._burst)) if self._rate else BATCH_BYTES

    def want(self, direction: Direction, *, wanted: bool) -> None:
        """Set whether a direction has jobs ready to copy."""
        if direction is Direction.LOAD:
            self._loads_want = wanted

    def take(self, size_bytes: int, direction: Direction) -> bool:
        """Take `size_bytes` from the cap; return false if the copy has to wait.

        A batch may overdraw the cap; later batches wait until the debt is paid.
        """
        if not self._rate:
            return True
        with self._lock:
            now = self._clock()
            self._level = min(self._burst, self._level + (now - self._at) * self._rate)
            self._at = now
            if self._level <= 0 or (direction is Direction.STORE and self._loads_want):
                return False
            self._level -= size_bytes
            return True


@dataclass(slots=True, eq=False)
class OpenAttachment:
    """The opened attachment of an engine's worker."""

    number: int
    plans: dict[Direction, list[CopyPlan]]
    """One plan per layer group; stores have one plan."""
    ways: dict[Direction, Strategy]
    staging: dict[Direction, int]
    staging_bytes: int
    block_count: int
    events: list[int]
    gate: Gate
    memory: ExitStack
    """Closes the allocations; call it only when no stream waits for an event in them."""
    rest: ExitStack
    """Closes everything besides `memory`."""
    wait_streams: dict[Direction, int] = field(default_factory=dict)
    cancelled: bool = False
    jobs: int = 0
    """Number of jobs under way in both lanes."""


@dataclass(slots=True, eq=False)
class CopyJob:
    """Blocks to copy, and the progress of their copy."""

    number: int
    attachment: OpenAttachment
    blocks: Addresses
    slots: Addresses
    event: int | None
    """The device's number of the event that must happen first; None if there is none."""
    value: int = 0
    gate_job: int = 0
    until: float = 0.0
    """Time on the lane's clock at which the job is given up."""
    waited: int = 0
    """The lane's own event, which happens after `event`."""
    entered: bool = False
    group: int = 0
    next: int = 0
    """Index of the group's first block that is not on the stream yet."""
    flying: int = 0
    """Number of batches on the stream."""
    copied: int = 0
    """Number of blocks whose groups are all in place."""
    reason: str = ""


@dataclass(slots=True)
class _Batch:
    job: CopyJob
    event: int
    size_bytes: int
    blocks: int
    """Number of blocks that are complete when this batch of the last group is done."""
    groups: int
    """Number of groups complete when this batch is done; 0 if the batch does not end a group."""
    since: float


class CopyLane:
    """The copies in one direction, run by the lane's thread."""

    def __init__(
        self,
        device: Device,
        direction: Direction,
        *,
        cap: Cap,
        clock: Callable[[], float],
        job_limit_s: float,
        on_end: Callable[[CopyJob], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """`on_end` and `on_lost` are called from the lane's thread."""
        self._device = device
        self._direction = direction
        self._cap = cap
        self._clock = clock
        self._job_limit_s = job_limit_s
        self._on_end = on_end
        self._on_lost = on_lost
        self._stream = device.create_stream(urgent=direction is Direction.LOAD)
        self._idle_streams: list[int] = []
        self._idle_events: list[int] = []
        self._new: deque[CopyJob] = deque()
        self._waiting: dict[OpenAttachment, deque[CopyJob]] = {}
        self._ready: deque[CopyJob] = deque()
        self._flying: deque[_Batch] = deque()
        self._flying_bytes = 0
        self.bounds = NO_BOUNDS
        """Start addresses of pinned memory, ascending; the array is replaced, never changed."""
        self._news = threading.Condition()
        self._arrived: deque[CopyJob] = deque()
        self._stopping = False
        self._sweeping = False
        self._lost = ""
        self._thread = threading.Thread(
            target=self._run, name=f"tierd-{direction.value}", daemon=True
        )
        self._thread.start()

    def submit(self, job: CopyJob) -> None:
        """Queue a job. If the device is lost, the job has ended when this returns."""
        job.until = self._clock() + self._job_limit_s
        with self._news:
            if not self._lost:
                self._arrived.append(job)
                self._news.notify()
                return
        self._end(job, self._lost)

    def sweep(self) -> None:
        """End the ready jobs of cancelled attachments at once, wherever they are in the queue."""
        with self._news:
            self._sweeping = True
            self._news.notify()

    def release(self, attachment: OpenAttachment) -> None:
        """Take back the stream that waited for an attachment's events.

        The attachment's jobs have ended, and the stream is idle.
        """
        stream = attachment.wait_streams.pop(self._direction, None)
        if stream is not None:
            self._idle_streams.append(stream)

    def stop(self) -> None:
        """End the thread. The caller has ended all jobs, or the device is lost."""
        with self._news:
            self._stopping = True
            self._news.notify()
        self._thread.join()

    def oldest(self) -> float | None:
        """Return when the oldest copy on the stream was put there; None if there is none."""
        try:
            return self._flying[0].since
        except IndexError:
            return None

    def _run(self) -> None:
        pause = _PAUSE_MIN_S
        try:
            while self._take(pause):
                steps = (self._finish(), self._begin(), self._wake(), self._issue())
                pause = _PAUSE_MIN_S if any(steps) else min(2 * pause, _PAUSE_MAX_S)
        except DeviceError as error:
            self._lose(str(error))

    def _take(self, pause: float) -> bool:
        """Wait for a job, at most `pause` seconds if one is under way; return False to stop."""
        with self._news:
            if not self._arrived and not self._stopping and not self._sweeping:
                busy = self._waiting or self._ready or self._flying
                self._news.wait(pause if busy else None)
            self._new.extend(self._arrived)
            self._arrived.clear()
            return not self._stopping

    def _begin(self) -> bool:
        """Make a stream wait for the events of new jobs."""
        moved = bool(self._new)
        while self._new:
            job = self._new[0]
            job.reason = self._stopped(job)
            try:
                if job.event is not None and not job.reason:
                    self._await(job, job.event)
            except DeviceError as error:
                if error.sticky:
                    raise
                job.reason = str(error)
            self._new.popleft()
            if job.reason or not len(job.blocks):
                self._end(job, job.reason)
            elif job.event is None:
                self._ready.append(job)
            else:
                self._waiting.setdefault(job.attachment, deque()).append(job)
        return moved

    def _await(self, job: CopyJob, event: int) -> None:
        streams, idle = job.attachment.wait_streams, self._idle_streams
        if self._direction not in streams:
            new = idle.pop() if idle else self._device.create_stream(urgent=False)
            streams[self._direction] = new
        self._device.wait(streams[self._direction], event, job.value)
        job.waited = self._event()
        self._device.record(job.waited, streams[self._direction])

    def _wake(self) -> bool:
        """Make jobs ready whose events have happened, in order within each attachment."""
        moved = False
        for attachment, jobs in list(self._waiting.items()):
            while jobs:
                job = jobs[0]
                reason = self._stopped(job)
                if not self._device.query(job.waited):
                    if not reason:
                        break
                    reason = f"{reason}, before its event happened"
                jobs.popleft()
                self._idle_events.append(job.waited)
                moved = True
                if reason:
                    self._end(job, reason)
                else:
                    self._ready.append(job)
            if not jobs:
                del self._waiting[attachment]
        return moved

    def _issue(self) -> bool:
        moved = self._sweeping
        if self._sweeping:
            self._sweeping = False
            for job in [job for job in self._ready if job.attachment.cancelled]:
                self._ready.remove(job)
                self._stop(job, CANCELLED)
        self._cap.want(self._direction, wanted=bool(self._ready))
        while (
            self._ready
            and len(self._flying) < _FLYING_MAX
            and self._flying_bytes < _FLYING_BYTES_MAX
        ):
            job = self._ready[0]
            reason = self._stopped(job) or self._enter(job)
            if reason:
                self._ready.popleft()
                self._stop(job, reason)
            elif not self._put(job):
                break
            moved = True
        self._cap.want(self._direction, wanted=bool(self._ready))
        return moved

    def _stop(self, job: CopyJob, reason: str) -> None:
        """Issue no more of a job; it ends when its batches on the stream are done."""
        job.reason = reason
        if not job.flying:
            self._end(job, reason)

    def _stopped(self, job: CopyJob) -> str:
        """Return why a job must stop, or an empty text if it must not."""
        if job.attachment.cancelled:
            return CANCELLED
        if self._direction is Direction.LOAD and job.attachment.gate.unwanted(job.gate_job):
            return CALLED_OFF
        if self._clock() >= job.until:
            return f"given up after {self._job_limit_s:g} s"
        return ""

    def _enter(self, job: CopyJob) -> str:
        if self._direction is Direction.LOAD and not job.entered:
            if not job.attachment.gate.enter(job.gate_job):
                return CALLED_OFF
            job.entered = True
        return ""

    def _put(self, job: CopyJob) -> bool:
        """Put the next batch of a job on the stream; False if the cap forbids it."""
        attachment = job.attachment
        way = (attachment.ways[self._direction], self._direction)
        plans = attachment.plans[self._direction]
        plan = plans[job.group]
        limit = self._cap.batch_bytes
        if way[0] is Strategy.STAGED:
            limit = min(limit, attachment.staging_bytes)
        count = min(limit // plan.block_bytes, _PIECES_MAX // plan.run_count)
        end = min(job.next + max(count, 1), len(job.blocks))
        size_bytes = (end - job.next) * plan.block_bytes
        if not self._cap.take(size_bytes, self._direction):
            return False
        batch = _Batch(job, self._event(), size_bytes, 0, 0, self._clock())
        job.flying += 1
        try:
            issue(
                self._device,
                self._stream,
                plan,
                way,
                job.blocks[job.next : end],
                job.slots[job.next : end],
                self.bounds,
                attachment.staging.get(self._direction, 0),
            )
        except DeviceError as error:
            job.reason = str(error)
            if error.sticky:
                raise
        # Also after a failure: part of the batch may be on the stream and must finish first.
        self._flying.append(batch)
        self._flying_bytes += size_bytes
        self._device.record(batch.event, self._stream)
        if job.reason:
            self._ready.popleft()
            return True
        if job.group == len(plans) - 1:
            batch.blocks = end - job.next
        job.next = end
        if end == len(job.blocks):
            job.group += 1
            job.next = 0
            batch.groups = job.group
            if job.group == len(plans):
                self._ready.popleft()
        return True

    def _finish(self) -> bool:
        """Account for the batches that are done, in order."""
        moved = False
        while self._flying and self._device.query(self._flying[0].event):
            batch = self._flying.popleft()
            job = batch.job
            self._flying_bytes -= batch.size_bytes
            self._idle_events.append(batch.event)
            job.flying -= 1
            job.copied += batch.blocks
            if batch.groups and self._direction is Direction.LOAD:
                job.attachment.gate.advance(job.gate_job, batch.groups)
            done = job.group == len(job.attachment.plans[self._direction])
            if not job.flying and (done or job.reason):
                self._end(job, job.reason)
            moved = True
        return moved

    def _end(self, job: CopyJob, reason: str) -> None:
        job.reason = reason
        if job.entered:
            job.attachment.gate.leave(job.gate_job)
        self._on_end(job)

    def _lose(self, reason: str) -> None:
        """End the jobs that have no copy on the device.

        The gates of the other jobs stay locked until the process dies.
        """
        with self._news:
            self._lost = reason
            jobs = [*self._arrived, *self._new, *self._ready]
            self._arrived.clear()
        for waiting in self._waiting.values():
            jobs += waiting
        for job in jobs:
            if not job.flying:
                self._end(job, reason)
        self._on_lost(reason)

    def _event(self) -> int:
        return self._idle_events.pop() if self._idle_events else self._device.create_event()
