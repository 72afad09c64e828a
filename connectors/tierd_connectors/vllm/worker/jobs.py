"""Copies that the daemon makes for the engine: requests, and their results.

Owns the attachment, its gate and the copies in progress; used by the mover's thread only. Only
`settle` waits for a copy. A store needs no gate: blocks that it read too late are not committed
(`worker.queues`). A load is over only once the daemon has reported it done, or the gate shows that
no process will write its blocks.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from tierd.client.attaching import PendingCopy
from tierd.shared_memory.gate import GATE_JOBS, Gate, make_gate
from tierd_connectors.common.work import Load
from tierd_connectors.vllm.worker.export import Shown
from tierd_connectors.vllm.worker.queues import Chunk, StreamPoint

if TYPE_CHECKING:
    from tierd.client import Attachment, Client, Handle, Reservation
    from tierd.client.attaching import Probe

logger = logging.getLogger("vllm.tierd")

LOADS_MAX = 32
"""Loads in progress at the daemon: enough to fill its batches with loads of one block."""

STORES_MAX = 2
"""Chunks in progress: one is copied while the other is reserved or committed."""

PATIENCE_S = 5.0
"""After this time a load is called off and the worker copies it: the daemon hangs or is overloaded.
By default it equals the copy process's limit per copy (half of `copy.job_timeout_ms`)."""

SETTLE_S = 1.0
"""Wait at the engine's end for loads that are being written at that moment."""


class LoadUnderWay(NamedTuple):
    """A load that was requested from the daemon."""

    load: Load
    mark: StreamPoint
    job: int
    copy: PendingCopy
    began_s: float


class StoreUnderWay(NamedTuple):
    """A chunk whose blocks are being copied into a reservation's slots."""

    chunk: Chunk
    reservation: Reservation
    copy: PendingCopy
    began_s: float


class EndedLoad(NamedTuple):
    """A load that no process writes any longer. `filled`: all its blocks are loaded."""

    load: Load
    mark: StreamPoint
    job: int
    began_s: float
    filled: bool


class Jobs:
    """The copies of one worker. `attach` may be called only while none is in progress."""

    def __init__(
        self, client: Client, shown: Shown, probe: Probe, layer_ends: Sequence[int] = ()
    ) -> None:
        """`layer_ends` are the offsets in a slot where layer groups end; none: no layer groups."""
        self._client = client
        self._shown = shown
        self._layer_ends = layer_ends
        self._probe = probe
        self._handle: Handle | None = None
        self._attachments: dict[Handle, Attachment] = {}
        self._logged_ready = False
        self._refused: set[Handle] = set()
        self._gate: Gate | None = None
        self._gate_fd = -1
        self._next_job = 0
        self.loads: list[LoadUnderWay] = []
        self.stores: list[StoreUnderWay] = []
        self.settling: list[LoadUnderWay] = []
        """Loads called off while being written; `ended_loads` calls them off again."""

    # The attachment

    def attach(self, handle: Handle) -> None:
        """Ask the daemon to copy for this namespace from now on. Raises OSError.

        `ready_for` attaches more namespaces. All share the gate, since loads have distinct numbers.
        """
        assert not self.under_way
        self.detach()
        self._gate_fd = make_gate()
        self._gate = Gate(self._gate_fd)
        self._next_job = 0
        self._handle = handle
        self._attach(handle)

    def _attach(self, handle: Handle) -> None:
        self._attachments[handle] = self._client.attach(
            handle,
            self._shown.exports,
            self._shown.layout,
            events=self._shown.events,
            gate_fd=self._gate_fd,
            layer_ends=self._layer_ends,
            probe=self._probe,
        )

    def detach(self) -> None:
        """Detach every attachment. Waits at most one call's timeout for each."""
        assert not self.under_way
        while self._attachments:
            self._client.detach(self._attachments.popitem()[1])
        # Cleared first: after an error the descriptor must not be closed twice, because its number
        # may have been reused.
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.close()
            os.close(self._gate_fd)

    @property
    def ready(self) -> bool:
        """Whether the daemon accepts copies now. Logs the way of copying when it becomes ready."""
        attachment = self._first
        ready = attachment is not None and attachment.ready
        if ready and not self._logged_ready:
            assert attachment is not None
            logger.info("tierd: the daemon copies for this engine: %s", attachment.how)
        self._logged_ready = ready
        return ready

    def ready_for(self, handle: Handle) -> bool:
        """Whether the daemon accepts copies in this namespace now. The first call for a namespace
        attaches it, with pages that are in use."""
        attachment = self._attachments.get(handle)
        if attachment is None:
            self._attach(handle)
            return False
        if attachment.refusal and handle not in self._refused:
            self._refused.add(handle)
            logger.warning(
                "tierd: the daemon does not copy for a LoRA adapter, so the worker copies: %s",
                attachment.refusal,
            )
        return attachment.ready

    @property
    def refusal(self) -> str:
        """The reason why the daemon refuses to copy for this engine; empty: it has not refused."""
        attachment = self._first
        return (attachment.refusal or "") if attachment is not None else ""

    @property
    def _first(self) -> Attachment | None:
        return None if self._handle is None else self._attachments.get(self._handle)

    # Asking

    @property
    def under_way(self) -> bool:
        """Whether any copy is in progress."""
        return bool(self.loads or self.stores)

    @property
    def room_for_load(self) -> bool:
        return len(self.loads) < LOADS_MAX

    @property
    def room_for_store(self) -> bool:
        return len(self.stores) < STORES_MAX

    def begin_load(
        self, handle: Handle, load: Load, slots: Sequence[int], mark: StreamPoint
    ) -> None:
        """Request a load; `ended_loads` returns it at its end. `room_for_load` must be true."""
        assert self._gate is not None
        # Numbers are never reused: a stopped daemon may still have the message of a load that was
        # called off. The gate's place must not be that of a load in progress.
        places = {under_way.job % GATE_JOBS for under_way in self.loads}
        while self._next_job % GATE_JOBS in places:
            self._next_job += 1
        job, self._next_job = self._next_job, self._next_job + 1
        self._gate.prepare(job)
        # Added before the request is sent: after an error it is not known whether the daemon has
        # the request, and a load without an answer is called off.
        unanswered = PendingCopy()
        unanswered.end(0, "the copy was not requested")
        began_s = time.monotonic()
        self.loads.append(LoadUnderWay(load, mark, job, unanswered, began_s))
        copy = self._client.begin_load(
            self._attachments[handle],
            load.epoch,
            slots,
            load.blocks,
            load.expires_ns,
            job=job,
            event=mark.event,
            value=mark.value,
        )
        self.loads[-1] = LoadUnderWay(load, mark, job, copy, began_s)

    def has(self, load: Load) -> bool:
        """Whether a load is in progress."""
        return any(under_way.load is load for under_way in self.loads)

    def begin_store(
        self, handle: Handle, chunk: Chunk, reservation: Reservation, blocks: list[int]
    ) -> None:
        """Request a store of a chunk's granted blocks; `ended_stores` returns it at its end."""
        copy = self._client.begin_store(
            self._attachments[handle],
            reservation,
            blocks,
            event=chunk.mark.event,
            value=chunk.mark.value,
        )
        self.stores.append(StoreUnderWay(chunk, reservation, copy, time.monotonic()))

    def progress(self, job: int) -> int:
        """Return the number of layer groups of a load in progress that are loaded."""
        assert self._gate is not None
        return self._gate.progress(job)

    # Ends

    def ended_stores(self) -> list[StoreUnderWay]:
        """Return the stores that ended since the last call; `copy.blocks` of each are in slots."""
        ended = [store for store in self.stores if store.copy.done]
        self.stores = [store for store in self.stores if not store.copy.done]
        return ended

    def ended_loads(self, *, take_back: bool = False) -> list[EndedLoad]:
        """Return the loads that ended since the last call, and call off failed and late loads; with
        `take_back`, all loads."""
        now_s, now_ns = time.monotonic(), time.monotonic_ns()
        ended: list[EndedLoad] = []
        left: list[LoadUnderWay] = []
        self.settling = []
        for under_way in self.loads:
            load, mark, job, copy, began_s = under_way
            if copy.done and copy.blocks == len(load.blocks):
                ended.append(EndedLoad(load, mark, job, began_s, True))
                continue
            late = now_s - began_s >= PATIENCE_S or now_ns >= load.expires_ns
            over = take_back or late or copy.done
            assert self._gate is not None
            if over and self._gate.call_off(job):
                ended.append(EndedLoad(load, mark, job, began_s, False))
                continue
            if over:
                self.settling.append(under_way)
            left.append(under_way)
        self.loads = left
        return ended

    def settle(self) -> list[EndedLoad]:
        """Call off every load at the engine's end. Waits up to SETTLE_S for writes in progress."""
        end_s = time.monotonic() + SETTLE_S
        ended = self.ended_loads(take_back=True)
        while self.loads and time.monotonic() < end_s:
            time.sleep(0.001)
            ended += self.ended_loads(take_back=True)
        return ended
