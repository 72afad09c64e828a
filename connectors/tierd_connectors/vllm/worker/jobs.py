"""Copies that the daemon makes for the engine: what was asked of it, and what became of that.

Knows the attachment, its gate and the copies under way; only the mover's thread is in here.
Nothing here waits for a copy. A store needs no care: what it reads too late is not committed
(`worker.queues`). A load is over only once the daemon has said that it is done, or the gate that
nobody will write it any more.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from tierd.client.attaching import PendingCopy
from tierd.shared_memory.gate import GATE_JOBS, Gate, make_gate
from tierd_connectors.vllm.work import Load
from tierd_connectors.vllm.worker.export import Shown
from tierd_connectors.vllm.worker.queues import Chunk, StreamPoint

if TYPE_CHECKING:
    from tierd.client import Attachment, Client, Handle, Reservation
    from tierd.client.attaching import Probe

logger = logging.getLogger("vllm.tierd")

LOADS_MAX = 32
"""Loads under way at the daemon: enough to keep its batches full with loads of one block."""

STORES_MAX = 2
"""Chunks under way: one is copied while the other is reserved or committed."""

PATIENCE_S = 5.0
"""After it a load is taken back, and copied here: the daemon hangs, or is buried in work. As
long as it has itself for a copy."""

SETTLE_S = 1.0
"""Waited at the engine's end for a load that is being written at that moment."""


class LoadUnderWay(NamedTuple):
    """A load that the daemon has been asked for."""

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
    """A load that nobody writes any more. `filled` says that its blocks are in place."""

    load: Load
    mark: StreamPoint
    job: int
    began_s: float
    filled: bool


class Jobs:
    """The copies of one worker. Nothing is under way while `attach` is called."""

    def __init__(
        self, client: Client, shown: Shown, probe: Probe, layer_ends: Sequence[int] = ()
    ) -> None:
        """`layer_ends` are where layer groups end in a slot, none if they do not matter."""
        self._client = client
        self._shown = shown
        self._layer_ends = layer_ends
        self._probe = probe
        self._handle: Handle | None = None
        self._attachments: dict[Handle, Attachment] = {}
        self._told = False
        self._refused: set[Handle] = set()
        self._gate: Gate | None = None
        self._gate_fd = -1
        self._next_job = 0
        self.loads: list[LoadUnderWay] = []
        self.stores: list[StoreUnderWay] = []
        self.settling: list[LoadUnderWay] = []
        """Loads that are over and still being written, so that they are to be asked again."""

    # The attachment

    def attach(self, handle: Handle) -> None:
        """Ask the daemon to copy for this namespace from now on. Raises OSError.

        `ready_for` adds others. All share the gate, since no two loads have one number.
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
        """Let the daemon forget the engine's memory. Waits at most a call's timeout for each."""
        assert not self.under_way
        while self._attachments:
            self._client.detach(self._attachments.popitem()[1])
        # First: an error must not close the descriptor twice, which may be another's by then.
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.close()
            os.close(self._gate_fd)

    @property
    def ready(self) -> bool:
        """Whether copies can be asked for now. Logs how, each time that the answer changes."""
        attachment = self._first
        ready = attachment is not None and attachment.ready
        if ready and not self._told:
            assert attachment is not None
            logger.info("tierd: the daemon copies for this engine: %s", attachment.how)
        self._told = ready
        return ready

    def ready_for(self, handle: Handle) -> bool:
        """Whether copies can be asked for in this namespace now. The first time that one is
        asked about it is attached, at pages that are in use by then."""
        attachment = self._attachments.get(handle)
        if attachment is None:
            self._attach(handle)
            return False
        if attachment.refusal and handle not in self._refused:
            self._refused.add(handle)
            logger.warning(
                "tierd: the daemon does not copy for a LoRA adapter, the engine's worker does: %s",
                attachment.refusal,
            )
        return attachment.ready

    @property
    def refusal(self) -> str:
        """Why the daemon will not copy for this engine; empty unless it has said so."""
        attachment = self._first
        return (attachment.refusal or "") if attachment is not None else ""

    @property
    def _first(self) -> Attachment | None:
        return None if self._handle is None else self._attachments.get(self._handle)

    # Asking

    @property
    def under_way(self) -> bool:
        """Whether a copy has not ended yet."""
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
        """Ask for a load; `ended_loads` tells its end. There must be room for it."""
        assert self._gate is not None
        # Never a number again, lest a daemon that was stopped finds the message of a load that
        # was taken back; and not the place in the gate of one that is still under way.
        places = {under_way.job % GATE_JOBS for under_way in self.loads}
        while self._next_job % GATE_JOBS in places:
            self._next_job += 1
        job, self._next_job = self._next_job, self._next_job + 1
        self._gate.prepare(job)
        # Before it is asked for: after an error nobody knows whether the daemon was, and a load
        # without an answer is called off.
        unanswered = PendingCopy()
        unanswered.end(0, "it was not asked for")
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
        """Whether a load is under way."""
        return any(under_way.load is load for under_way in self.loads)

    def begin_store(
        self, handle: Handle, chunk: Chunk, reservation: Reservation, blocks: list[int]
    ) -> None:
        """Ask for the granted blocks of a chunk; `ended_stores` tells their end."""
        copy = self._client.begin_store(
            self._attachments[handle],
            reservation,
            blocks,
            event=chunk.mark.event,
            value=chunk.mark.value,
        )
        self.stores.append(StoreUnderWay(chunk, reservation, copy, time.monotonic()))

    def progress(self, job: int) -> int:
        """How many layer groups of a load under way are in place."""
        assert self._gate is not None
        return self._gate.progress(job)

    # Ends

    def ended_stores(self) -> list[StoreUnderWay]:
        """Stores that have ended since the last call; `copy.blocks` of each are in slots."""
        ended = [store for store in self.stores if store.copy.done]
        self.stores = [store for store in self.stores if not store.copy.done]
        return ended

    def ended_loads(self, *, take_back: bool = False) -> list[EndedLoad]:
        """Loads that have ended since the last call, or are taken back: those that went wrong,
        took too long or, if `take_back`, all."""
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
        """Take every load back, at the engine's end; what is being written may take a moment."""
        end_s = time.monotonic() + SETTLE_S
        ended = self.ended_loads(take_back=True)
        while self.loads and time.monotonic() < end_s:
            time.sleep(0.001)
            ended += self.ended_loads(take_back=True)
        return ended
