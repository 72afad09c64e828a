"""Batches of copy jobs on one stream: cut jobs into batches, issue them, see which are done."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
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
_CAP_STEP_S: Final = 0.02
"""With a bandwidth cap, a batch is at most the bytes allowed in this time, so that loads wait no
longer for it."""


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


class EventPool:
    """A lane's own events, used again once they have happened."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._idle: list[int] = []

    def take(self) -> int:
        """Return an event that is not in use."""
        return self._idle.pop() if self._idle else self._device.create_event()

    def give_back(self, event: int) -> None:
        """Take back an event that has happened."""
        self._idle.append(event)


class StreamBatches:
    """The batches on a lane's stream. Used by the lane's thread, except `bounds` and `oldest`."""

    def __init__(
        self,
        device: Device,
        direction: Direction,
        events: EventPool,
        *,
        cap: Cap,
        clock: Callable[[], float],
    ) -> None:
        self._device = device
        self._direction = direction
        self._events = events
        self._cap = cap
        self._clock = clock
        self._stream = device.create_stream(urgent=direction is Direction.LOAD)
        self._flying: deque[_Batch] = deque()
        self._flying_bytes = 0
        self.bounds = NO_BOUNDS
        """Start addresses of pinned memory, ascending; the array is replaced, never changed."""

    def __bool__(self) -> bool:
        """Whether any batch is on the stream."""
        return bool(self._flying)

    @property
    def full(self) -> bool:
        """Whether no other batch may be put on the stream now."""
        return len(self._flying) >= _FLYING_MAX or self._flying_bytes >= _FLYING_BYTES_MAX

    def oldest(self) -> float | None:
        """Return when the oldest copy on the stream was put there; None if there is none."""
        try:
            return self._flying[0].since
        except IndexError:
            return None

    def issued(self, job: CopyJob) -> bool:
        """Whether all of a job has been put on the stream."""
        return job.group == len(job.attachment.plans[self._direction])

    def put(self, job: CopyJob) -> bool:
        """Put the next batch of a job on the stream; False if the cap forbids it.

        If the copy fails, the job has a reason afterwards. Raises a sticky DeviceError.
        """
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
        batch = _Batch(job, self._events.take(), size_bytes, 0, 0, self._clock())
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
            return True
        if job.group == len(plans) - 1:
            batch.blocks = end - job.next
        job.next = end
        if end == len(job.blocks):
            job.group += 1
            job.next = 0
            batch.groups = job.group
        return True

    def take_done(self) -> Iterator[CopyJob]:
        """Account for the batches that are done, in order; yield the job of each."""
        while self._flying and self._device.query(self._flying[0].event):
            batch = self._flying.popleft()
            job = batch.job
            self._flying_bytes -= batch.size_bytes
            self._events.give_back(batch.event)
            job.flying -= 1
            job.copied += batch.blocks
            if batch.groups and self._direction is Direction.LOAD:
                job.attachment.gate.advance(job.gate_job, batch.groups)
            yield job
