"""Copies between engines' pages and slots: the attachments, and one lane per direction.

The copier knows addresses, not slots, and jobs, not sessions. Its owner maps and pins the arena.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tierd.device.api import Addresses, CannotOpenError, Device, DeviceError, Direction
from tierd.device.batches import BATCH_BYTES, Cap, CopyJob, OpenAttachment
from tierd.device.choice import Choice, HostScratch, borrowed, choose, compact, finish
from tierd.device.lane import CANCELLED, CopyLane
from tierd.device.plan import NO_BOUNDS, CopyPlan, Strategy, group_plans, issue
from tierd.shared_memory.exports import NO_EVENT, Export, PageLayout, layout_error
from tierd.shared_memory.gate import Gate

JOB_LIMIT_S: Final = 2.5
"""A job that has waited this long, for its event, other jobs or the bandwidth cap, is given up.
This is well below the time after which the daemon kills a hung process with all its jobs."""

_DRAIN_LIMIT_S: Final = 1.0

log = logging.getLogger(__name__)

Indices = npt.NDArray[np.uint32]
_Shape = tuple[PageLayout, tuple[int, ...], tuple[Strategy, ...]]


class Copier:
    """The copies of one device. One thread calls the methods; any may call `cancel` and `submit`.

    `on_done(job, blocks, reason)` is called once per job, by a thread of the copier or within
    `submit`: the first `blocks` blocks are in place, and nothing more of the job is written.
    `on_lost(reason)` is called when the device is lost: jobs whose copies were under way get no
    answer, and the process has to end.
    """

    def __init__(
        self,
        device: Device,
        *,
        on_done: Callable[[int, int, str], None],
        on_lost: Callable[[str], None],
        bandwidth_max: int = 0,
        job_limit_s: float = JOB_LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bandwidth_max` is in bytes per second for both directions together; 0 is no limit.

        A job that is not done `job_limit_s` after it was submitted is stopped between batches.
        """
        self._device = device
        self._on_done = on_done
        self._on_lost = on_lost
        self._clock = clock
        self._attachments: dict[int, OpenAttachment] = {}
        self._choices: dict[_Shape, Choice] = {}
        self._changed = threading.Condition()
        self._lost = ""
        self._stream = device.create_stream(urgent=False)
        cap = Cap(bandwidth_max, clock)
        self._lanes = {
            direction: CopyLane(
                device,
                direction,
                cap=cap,
                clock=clock,
                job_limit_s=job_limit_s,
                on_end=self._end,
                on_lost=self._lose,
            )
            for direction in Direction
        }

    def know_memory(self, starts: Sequence[int]) -> None:
        """Set the start addresses of all stretches of host memory that are each pinned as a whole.

        No copy crosses one of these addresses, and no slot does.
        """
        bounds = np.array(sorted(starts), np.uint64)
        for lane in self._lanes.values():
            lane.know_memory(bounds)

    # --- attachments ----------------------------------------------------------------

    def attach(
        self,
        number: int,
        exports: Sequence[Export],
        layout: PageLayout,
        *,
        block_bytes: int,
        events: Sequence[bytes],
        gate_fd: int,
        layer_ends: Sequence[int],
        probe_block: int,
        probe_digest: bytes,
    ) -> str:
        """Open an engine's exports; return how they will be copied, as text. May take 0.5 s.

        `layer_ends` are the ends of the layer groups in a slot; empty means one group. The probe
        is the SHA-256 of a block's content: it proves that both sides mean the same pages. Raises
        DeviceError; a CannotOpenError says what to change. Then nothing stays open, unless the
        error is sticky.
        """
        assert number not in self._attachments
        ends = tuple(layer_ends) or (block_bytes,)
        sizes = [export.size_bytes for export in exports]
        error = layout_error(layout, sizes, block_bytes) or _ends_error(ends, block_bytes)
        if not error and not 0 <= probe_block < layout.block_count:
            error = f"the probe is block {probe_block}, but there are {layout.block_count} blocks"
        if error:
            raise CannotOpenError(error)
        with borrowed(self._device, self._stream) as opening:
            memory = opening.enter_context(contextlib.ExitStack())
            rest = opening.enter_context(contextlib.ExitStack())
            bases = []
            for export in exports:
                bases.append(self._device.open(export))
                memory.callback(self._device.close, bases[-1])
            opened = []
            for event in events:
                opened.append(self._device.open_event(event, bases))
                rest.callback(self._device.close_event, opened[-1])
            gate = _open_gate(gate_fd)
            rest.callback(gate.close)
            plan = CopyPlan(layout, bases)
            choice = self._choose(layout, ends, plan)
            self._verify(plan, choice.ways[Direction.STORE], probe_block, probe_digest)
            staging_bytes = max(BATCH_BYTES, block_bytes)
            staging = {}
            for direction, strategy in choice.ways.items():
                if strategy is Strategy.STAGED:
                    staging[direction] = self._device.allocate(staging_bytes)
                    rest.callback(self._device.free, staging[direction])
            attachment = OpenAttachment(
                number,
                {Direction.LOAD: group_plans(layout, bases, ends), Direction.STORE: [plan]},
                choice.ways,
                staging,
                staging_bytes,
                layout.block_count,
                opened,
                gate,
                memory.pop_all(),
                rest.pop_all(),
            )
        with self._changed:
            self._attachments[number] = attachment
        return choice.how

    def cancel(self, number: int) -> None:
        """End the jobs of an attachment and refuse new ones; on return no copy is in flight.

        Raises DeviceError if the device is lost: then copies may still be in flight.
        """
        with self._changed:
            attachment = self._attachments[number]
            attachment.cancelled = True
        for lane in self._lanes.values():
            lane.sweep()
        with self._changed:
            self._changed.wait_for(lambda: self._lost or not attachment.jobs)
            if attachment.jobs:
                raise DeviceError(self._lost, sticky=True)

    def detach(self, number: int) -> None:
        """Cancel the jobs of an attachment and close all that `attach` opened.

        Raises DeviceError as `cancel` does, or if a stream still waits for an event in that
        memory: then only the end of the process releases the memory.
        """
        self.cancel(number)
        with self._changed:
            attachment = self._attachments.pop(number)
        attachment.rest.close()
        for stream in attachment.wait_streams.values():
            finish(self._device, stream, _DRAIN_LIMIT_S)
        for lane in self._lanes.values():
            lane.release(attachment)
        attachment.memory.close()

    def _choose(self, layout: PageLayout, ends: tuple[int, ...], plan: CopyPlan) -> Choice:
        shape = (compact(layout, 1), ends, tuple(plan.strategies))
        if shape not in self._choices:
            self._choices[shape] = choose(self._device, self._stream, layout, ends, plan)
            log.info("%s: %s", self._device.name, self._choices[shape].how)
        return self._choices[shape]

    def _verify(self, plan: CopyPlan, strategy: Strategy, block: int, digest: bytes) -> None:
        with borrowed(self._device, self._stream) as stack:
            host = HostScratch(self._device, plan.block_bytes)
            stack.callback(host.close)
            staging = 0
            if strategy is Strategy.STAGED:
                staging = self._device.allocate(plan.block_bytes)
                stack.callback(self._device.free, staging)
            blocks, slots = np.array([block], np.uint64), np.array([host.address], np.uint64)
            way = (strategy, Direction.STORE)
            issue(self._device, self._stream, plan, way, blocks, slots, NO_BOUNDS, staging)
            finish(self._device, self._stream)
            if hashlib.sha256(host.view).digest() != digest:
                raise CannotOpenError(
                    "the probe block of the engine reads differently in the copy process: the "
                    "engine's pages are not where it says"
                )

    # --- jobs -----------------------------------------------------------------------

    def submit(
        self,
        job: int,
        attachment: int,
        direction: Direction,
        blocks: Indices,
        slots: Addresses,
        *,
        event: int = NO_EVENT,
        value: int = 0,
        gate_job: int = 0,
    ) -> None:
        """Copy blocks to or from as many slots after `event` has happened.

        `gate_job` is the load's number at the gate. Raises ValueError for a block or an event
        that the attachment does not have.
        """
        with self._changed:
            found = self._attachments.get(attachment)
            if found is not None and found.cancelled:
                found = None
            if found is not None:
                new = _job(job, found, blocks, slots, event)
                new.value, new.gate_job = value, gate_job
                found.jobs += 1
        if found is None:
            self._on_done(job, 0, CANCELLED)
        else:
            self._lanes[direction].submit(new)

    def stalled_s(self) -> float:
        """Return for how many seconds the oldest copy has been on the device, 0 if there is none.

        More than a second means that the device hangs.
        """
        oldest = [at for lane in self._lanes.values() if (at := lane.oldest()) is not None]
        return self._clock() - min(oldest) if oldest else 0.0

    def shut(self) -> None:
        """Detach everything and end the threads. Raises DeviceError if the device is lost."""
        for number in list(self._attachments):
            self.detach(number)
        for lane in self._lanes.values():
            lane.stop()

    def _end(self, job: CopyJob) -> None:
        self._on_done(job.number, job.copied, job.reason)
        with self._changed:
            job.attachment.jobs -= 1
            self._changed.notify_all()

    def _lose(self, reason: str) -> None:
        with self._changed:
            self._lost = reason
            self._changed.notify_all()
        self._on_lost(reason)


def _job(
    number: int, attachment: OpenAttachment, blocks: Indices, slots: Addresses, event: int
) -> CopyJob:
    if len(blocks) != len(slots):
        raise ValueError(f"a copy names {len(blocks)} blocks and {len(slots)} slots")
    if len(blocks) and blocks.max() >= attachment.block_count:
        raise ValueError(
            f"a copy names block {blocks.max()}; the attachment has {attachment.block_count} blocks"
        )
    if event != NO_EVENT and event >= len(attachment.events):
        raise ValueError(
            f"a copy names event {event}; the attachment has {len(attachment.events)} events"
        )
    first = None if event == NO_EVENT else attachment.events[event]
    return CopyJob(number, attachment, blocks.astype(np.uint64), slots, first)


def _ends_error(ends: Sequence[int], block_bytes: int) -> str:
    starts = [0, *ends[:-1]]
    if ends[-1] != block_bytes or any(s >= e for s, e in zip(starts, ends, strict=True)):
        return (
            f"the layer groups end at {list(ends)}: the ends must ascend, and the last one must be "
            f"{block_bytes}, the end of the block"
        )
    return ""


def _open_gate(fd: int) -> Gate:
    try:
        return Gate(fd)
    except (OSError, ValueError) as error:
        raise CannotOpenError(f"cannot open the engine's gate: {error}") from error
