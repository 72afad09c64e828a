"""The copy jobs of one direction: wait for events, put batches on a stream, report completion.

Each direction has one thread and one stream. A job's copies go on that stream only after its
event has happened; another stream waits for the event. So a peer that never records its event
delays no other job, and a job that has ended never copies afterwards.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from tierd.device.api import Device, DeviceError, Direction
from tierd.device.batches import Cap, CopyJob, EventPool, OpenAttachment, StreamBatches

_PAUSE_MIN_S: Final = 20e-6
_PAUSE_MAX_S: Final = 1e-3

CANCELLED: Final = "cancelled"
CALLED_OFF: Final = "called off"


class JobInbox:
    """What other threads ask of a lane's thread. Thread-safe."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._arrived: list[CopyJob] = []
        self._stopping = False
        self._sweeping = False
        self._lost = ""

    def put(self, job: CopyJob) -> str:
        """Hand over a job. Returns why the device is lost, which refuses it; empty: accepted."""
        with self._news:
            if not self._lost:
                self._arrived.append(job)
                self._news.notify()
            return self._lost

    def sweep(self) -> None:
        """Have the thread look for jobs of cancelled attachments."""
        with self._news:
            self._sweeping = True
            self._news.notify()

    def stop(self) -> None:
        """Have the thread end."""
        with self._news:
            self._stopping = True
            self._news.notify()

    def take(self, timeout_s: float | None) -> list[CopyJob] | None:
        """Return the jobs that have arrived, after a wait if there is no news; None: stop."""
        with self._news:
            if not self._arrived and not self._stopping and not self._sweeping:
                self._news.wait(timeout_s)
            arrived, self._arrived = self._arrived, []
            return None if self._stopping else arrived

    def take_sweep(self) -> bool:
        """Return whether `sweep` was called since the last call."""
        # Reset before the sweep: a call that comes during it leads to another one.
        swept = self._sweeping
        if swept:
            self._sweeping = False
        return swept

    def lose(self, reason: str) -> list[CopyJob]:
        """Refuse all later jobs. Returns the jobs that have arrived."""
        with self._news:
            self._lost = reason
            arrived, self._arrived = self._arrived, []
            return arrived


class EventWaits:
    """Jobs whose events have not happened, in order within each attachment.

    Each attachment with such jobs has one stream that waits for its events.
    """

    def __init__(self, device: Device, direction: Direction, events: EventPool) -> None:
        self._device = device
        self._direction = direction
        self._events = events
        self._idle_streams: list[int] = []
        self._jobs: dict[OpenAttachment, deque[CopyJob]] = {}

    def __bool__(self) -> bool:
        """Whether any job waits."""
        return bool(self._jobs)

    def await_event(self, job: CopyJob, event: int) -> None:
        """Make a stream wait for a job's event. Raises DeviceError."""
        streams, idle = job.attachment.wait_streams, self._idle_streams
        if self._direction not in streams:
            new = idle.pop() if idle else self._device.create_stream(urgent=False)
            streams[self._direction] = new
        self._device.wait(streams[self._direction], event, job.value)
        job.waited = self._events.take()
        self._device.record(job.waited, streams[self._direction])

    def add(self, job: CopyJob) -> None:
        """Add a job after `await_event`."""
        self._jobs.setdefault(job.attachment, deque()).append(job)

    def take_over(self, stopped: Callable[[CopyJob], str]) -> Iterator[tuple[CopyJob, str]]:
        """Take the jobs whose events have happened, or that `stopped` gives a reason to stop.

        Yields each job with its reason; empty: the job may copy.
        """
        for attachment, jobs in list(self._jobs.items()):
            while jobs:
                job = jobs[0]
                reason = stopped(job)
                if not self._device.query(job.waited):
                    if not reason:
                        break
                    reason = f"{reason}, before its event happened"
                jobs.popleft()
                self._events.give_back(job.waited)
                yield job, reason
            if not jobs:
                del self._jobs[attachment]

    def release(self, attachment: OpenAttachment) -> None:
        """Take back the stream that waited for an attachment's events, which is idle."""
        stream = attachment.wait_streams.pop(self._direction, None)
        if stream is not None:
            self._idle_streams.append(stream)

    def jobs(self) -> list[CopyJob]:
        """Return all jobs that wait."""
        return [job for jobs in self._jobs.values() for job in jobs]


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
        self._direction = direction
        self._cap = cap
        self._clock = clock
        self._job_limit_s = job_limit_s
        self._on_end = on_end
        self._on_lost = on_lost
        events = EventPool(device)
        self._inbox = JobInbox()
        self._new: deque[CopyJob] = deque()
        self._waiting = EventWaits(device, direction, events)
        self._ready: deque[CopyJob] = deque()
        self._batches = StreamBatches(device, direction, events, cap=cap, clock=clock)
        self._thread = threading.Thread(
            target=self._run, name=f"tierd-{direction.value}", daemon=True
        )
        self._thread.start()

    def know_memory(self, bounds: npt.NDArray[np.uint64]) -> None:
        """Set the start addresses of pinned memory, ascending. No copy crosses one of them."""
        self._batches.bounds = bounds

    def submit(self, job: CopyJob) -> None:
        """Queue a job. If the device is lost, the job has ended when this returns."""
        job.until = self._clock() + self._job_limit_s
        lost = self._inbox.put(job)
        if lost:
            self._end(job, lost)

    def sweep(self) -> None:
        """End the ready jobs of cancelled attachments at once, wherever they are in the queue."""
        self._inbox.sweep()

    def release(self, attachment: OpenAttachment) -> None:
        """Take back an attachment's stream. Its jobs have ended, and the stream is idle."""
        self._waiting.release(attachment)

    def stop(self) -> None:
        """End the thread. The caller has ended all jobs, or the device is lost."""
        self._inbox.stop()
        self._thread.join()

    def oldest(self) -> float | None:
        """Return when the oldest copy on the stream was put there; None if there is none."""
        return self._batches.oldest()

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
        busy = self._waiting or self._ready or self._batches
        arrived = self._inbox.take(pause if busy else None)
        self._new.extend(arrived or ())
        return arrived is not None

    def _begin(self) -> bool:
        """Make a stream wait for the events of new jobs."""
        moved = bool(self._new)
        while self._new:
            job = self._new[0]
            job.reason = self._stopped(job)
            try:
                if job.event is not None and not job.reason:
                    self._waiting.await_event(job, job.event)
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
                self._waiting.add(job)
        return moved

    def _wake(self) -> bool:
        """Make jobs ready whose events have happened, in order within each attachment."""
        moved = False
        for job, reason in self._waiting.take_over(self._stopped):
            moved = True
            if reason:
                self._end(job, reason)
            else:
                self._ready.append(job)
        return moved

    def _issue(self) -> bool:
        moved = self._inbox.take_sweep()
        if moved:
            for job in [job for job in self._ready if job.attachment.cancelled]:
                self._ready.remove(job)
                self._stop(job, CANCELLED)
        self._cap.want(self._direction, wanted=bool(self._ready))
        while self._ready and not self._batches.full:
            job = self._ready[0]
            reason = self._stopped(job) or self._enter(job)
            if reason:
                self._ready.popleft()
                self._stop(job, reason)
            elif not self._batches.put(job):
                break
            elif job.reason or self._batches.issued(job):
                self._ready.popleft()
            moved = True
        self._cap.want(self._direction, wanted=bool(self._ready))
        return moved

    def _stop(self, job: CopyJob, reason: str) -> None:
        """Put no further batch of a job on the stream. It ends when its batches are done."""
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

    def _finish(self) -> bool:
        """Account for the batches that are done, and end their jobs."""
        moved = False
        for job in self._batches.take_done():
            moved = True
            if not job.flying and (job.reason or self._batches.issued(job)):
                self._end(job, job.reason)
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
        arrived = self._inbox.lose(reason)
        for job in [*arrived, *self._new, *self._ready, *self._waiting.jobs()]:
            if not job.flying:
                self._end(job, reason)
        self._on_lost(reason)
