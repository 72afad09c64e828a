"""The worker's mover thread: it owns the worker's client, waits, and makes or requests copies.

If the daemon copies for this engine, the thread only requests copies (`worker.jobs`). Otherwise, or
while the daemon cannot, the thread copies itself. So a load that the daemon fails is copied here,
and no copy waits for an attachment.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import secrets
import select
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tierd.device.api import CannotOpenError
from tierd_connectors.common.guard import Boundary, guarded, nothing
from tierd_connectors.common.namespaces import RankNamespaces
from tierd_connectors.common.work import Load
from tierd_connectors.vllm.worker.export import Shown
from tierd_connectors.vllm.worker.jobs import SETTLE_S, EndedLoad, Jobs
from tierd_connectors.vllm.worker.layerwise import Finishing, Layerwise
from tierd_connectors.vllm.worker.layout import LayoutError, Pages
from tierd_connectors.vllm.worker.queues import Chunk, DeviceOrder, Queues, StreamPoint

if TYPE_CHECKING:
    from tierd.client import Client, Handle, Reservation
    from tierd.types import Namespace

logger = logging.getLogger("vllm.tierd")

LOAD_MAP_WAIT_S = 0.25
"""Longest wait of a copy until this client has the namespace's handle or the segment."""

POPULATE_BYTES = 32 << 20
"""Mapped memory pre-faulted at a time while the thread is idle; takes about 7 ms."""

CONNECT_S = 0.5
"""Longest wait at the engine's start for a connection to the daemon."""

ATTACH_S = 15.0
"""Longest wait at the engine's start (which takes longer anyway) for the daemon to attach: it
starts the copy process, which opens a GPU. Later no page is free for a probe."""

LEASE_MIN_NS = 10_000_000_000
"""Least remaining time of a lease when its load is reported early: the wait for the daemon, and
then time for the worker to copy."""

_SETTLE_POLL_S = 0.001
_BUSY_POLL_S = 0.01
_AWAY_POLL_S = 0.1
_IDLE_POLL_S = 0.5


class Mover(Queues):
    """Queues of loads and stores, and the thread that processes them. Loads go first."""

    def __init__(
        self,
        client: Client,
        namespace: Namespace,
        pages: Pages,
        rank: int,
        boundary: Boundary,
        order: DeviceOrder,
        layerwise: Layerwise | None = None,
        loras: Mapping[str, str] | None = None,
    ) -> None:
        """Call `start` afterwards, and `attach` before it to have the daemon copy.

        With `layerwise`, loads are reported early. `loras` maps adapters to their revisions.
        """
        super().__init__(order)
        self._layerwise = layerwise
        self.boundary = boundary
        self._client = client
        self._namespaces = RankNamespaces(client, namespace, loras or {})
        self._pages = pages
        self._block_bytes = pages.blocks.block_bytes
        self._rank = rank
        self._jobs: Jobs | None = None
        self._in_use = False
        self._probed = 0
        self._populating = True
        self._thread: threading.Thread | None = None

    @property
    def epoch(self) -> bytes:
        """The daemon's epoch, once it has accepted this rank's namespace; empty before."""
        return self._client.epoch if self._namespaces.model.ready else b""

    @property
    def _busy(self) -> bool:
        return super()._busy or (self._layerwise is not None and self._layerwise.count > 0)

    @property
    def attached(self) -> bool:
        """Whether the daemon copies for this engine now."""
        jobs = self._jobs
        return jobs is not None and jobs.ready

    # The engine's side

    def attach(self, ways: Iterable[Shown]) -> None:
        """Have the daemon copy in the first of these ways that it accepts. Call before `start`.

        Waits for the answer of a connected daemon. A daemon that connects later is asked for the
        first way only.
        """
        try:
            for shown in ways:
                ends = self._layerwise.ends if self._layerwise is not None else ()
                jobs = Jobs(self._client, shown, self._probe, ends)
                jobs.attach(self._namespaces.model)
                refusal = self._await_attached(jobs)
                if not refusal:
                    self._jobs, self._order = jobs, shown.order
                    return
                jobs.detach()
                self._log_refusal(refusal)
        except (CannotOpenError, LayoutError, OSError) as error:
            self._log_refusal(str(error))
        if self._layerwise is not None:
            logger.info("tierd: layerwise has no effect while the worker copies")

    def _log_refusal(self, reason: str) -> None:
        logger.warning(
            "tierd: the daemon does not copy for this engine, so its worker copies (shm): %s",
            reason,
        )

    def _await_attached(self, jobs: Jobs) -> str:
        """Wait for the daemon's answer. Returns why it refuses; empty: accepted, or no answer."""
        began_s = time.monotonic()
        while not (jobs.ready or jobs.refusal or self._namespaces.model.refusal):
            waited_s = time.monotonic() - began_s
            if self._client.fileno() < 0:
                break
            if waited_s > (ATTACH_S if self._client.connected else CONNECT_S):
                # A later answer would be about a page that is in use by then.
                self._client.close()
                break
            self._client.wait(_BUSY_POLL_S)
        if jobs.ready:
            zeros = memoryview(bytearray(self._block_bytes))
            self._pages.scatter_many([zeros], [self._probed])
        return jobs.refusal

    def _probe(self, first: bool) -> tuple[int, bytes]:
        """Fill an unused block with random bytes. Returns its number and the digest of its bytes.

        Before the engine uses its pages any block will do; a random one also verifies the stride.
        Later only vLLM's null block, number 0, is unused. The bytes are new each time, because
        memory that the engine has freed may hold the bytes of an earlier probe.
        """
        count = self._pages.blocks.count
        self._probed = 0 if self._in_use or not first else secrets.randbelow(count)
        # Without its two topmost bits, a number is finite in every format.
        random = np.frombuffer(secrets.token_bytes(self._block_bytes), np.uint8)
        content = bytearray((random & 0x3F).tobytes())
        self._pages.scatter_many([memoryview(content)], [self._probed])
        return self._probed, hashlib.sha256(content).digest()

    def start(self) -> None:
        """Start the thread; from now on the engine may use its pages. Again: no effect."""
        self._in_use = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="tierd-mover", daemon=True)
            self._thread.start()

    def stop(self, drain_s: float) -> None:
        """Process the queues for at most `drain_s`, then end the thread and the client."""
        with self._cond:
            self._stop_at_s = time.monotonic() + drain_s
        self._wake()
        if self._thread is None:
            self._leave()
        else:
            self._thread.join(drain_s + 2 * SETTLE_S)

    # The thread

    def _loop(self) -> None:
        try:
            while not self._over():
                if not self._turn():
                    self._recover()
                    time.sleep(_AWAY_POLL_S)
            self._give_up()
        finally:
            self._leave()

    def _over(self) -> bool:
        with self._cond:
            if self._stop_at_s is None:
                return False
            return not self._busy or time.monotonic() >= self._stop_at_s

    @guarded(lambda: False)
    def _turn(self) -> bool:
        if not self._work():
            self._populating = self._populate()
            self._sleep()
        return True

    @guarded(nothing)
    def _recover(self) -> None:
        """After an error in a turn, end the copies that it had begun and no longer tracks."""
        jobs, layerwise = self._jobs, self._layerwise
        under_way = jobs.loads if jobs is not None else []
        stores = jobs.stores if jobs is not None else []
        self._lose([load.load for load in under_way], [store.chunk for store in stores])
        if layerwise is not None:
            for job in set(layerwise.jobs()) - {load.job for load in under_way}:
                self._see_through(layerwise, job)

    def _work(self) -> bool:
        """Do all work that is ready, without waiting. Returns False if there was none."""
        self._client.poll()
        self._change_namespace()
        ended = self._collect()
        return self._begin() or ended

    def _change_namespace(self) -> None:
        """Change to a new namespace, once copies in progress have ended in the old one."""
        namespace = self._wanted_namespace()
        if namespace is None or (self._jobs is not None and self._jobs.under_way):
            return
        former = self._namespaces.change(namespace)
        if self._jobs is not None:
            self._jobs.attach(self._namespaces.model)
        self._namespaces.drop(former)
        self._in_namespace(namespace)

    def _handle(self, adapter: str) -> Handle:
        """Return an adapter's handle. After the first use, wait for the daemon to accept it."""
        handle = self._namespaces.of(adapter)
        if handle is None:
            handle = self._namespaces.register(adapter)
            # No block can be stored before the daemon has answered.
            give_up_s = time.monotonic() + LOAD_MAP_WAIT_S
            while not (handle.ready or handle.refusal) and time.monotonic() < give_up_s:
                if not self._client.connected:
                    break
                self._client.wait(_BUSY_POLL_S)
        return handle

    def _collect(self) -> bool:
        """End the copies that the daemon has finished. Returns False if there were none."""
        jobs = self._jobs
        if jobs is None:
            return False
        stores, loads = jobs.ended_stores(), jobs.ended_loads()
        for store in stores:
            self._publish(store.chunk, store.reservation, store.copy.blocks, store.began_s)
        for ended in loads:
            self._end(ended)
        if self._layerwise is not None:
            self._report_early(jobs, self._layerwise)
        if jobs.refusal and not jobs.under_way:
            self._log_refusal(jobs.refusal)
            jobs.detach()
            self._jobs = None
        return bool(stores or loads)

    def _end(self, ended: EndedLoad) -> None:
        """End a load that the daemon no longer writes; copy it here if it is not filled."""
        load, mark, job, began_s, filled = ended
        layerwise = self._layerwise
        finishing = layerwise.find(job) if layerwise is not None else None
        if filled:
            self._count_loaded(load, began_s)
        if layerwise is not None and finishing is not None:
            if filled:
                layerwise.fill(finishing)
            self._see_through(layerwise, job)
            filled = True
        # No effect if the load was reported before.
        self._loaded(load, failed=not (filled or self._copy_in(load, mark)))

    def _see_through(self, layerwise: Layerwise, job: int) -> None:
        """Complete a reported load that the daemon no longer writes."""
        finishing = layerwise.find(job)
        if finishing is None:
            return
        if finishing.filled or self._scatter(finishing.load, finishing.mark, finishing.views):
            layerwise.end(job)
        else:
            layerwise.lose(job, "a reported load could not be completed within its lease")

    @guarded(nothing)
    def _report_early(self, jobs: Jobs, layerwise: Layerwise) -> None:
        """Report loads whose first layers are loaded, if the worker can complete them."""
        for stuck in jobs.settling:
            finishing = layerwise.find(stuck.job)
            # The daemon may still write, but the same bytes: it holds the slots until it ends.
            if finishing is None or finishing.filled or stuck.load.expired:
                continue
            if self._scatter(stuck.load, stuck.mark, finishing.views):
                layerwise.fill(finishing)
        for load, mark, job, copy, _ in jobs.loads if layerwise.active else ():
            begun = not copy.done and jobs.progress(job) > 0 and layerwise.find(job) is None
            if not begun or load.expires_ns - time.monotonic_ns() < LEASE_MIN_NS:
                continue
            # Take the views now: the client drops an epoch's mappings after later epochs.
            handle = self._handle(load.adapter)
            views = self._client.lease_views(handle, load.epoch, load.slots[self._rank])
            if views is not None:
                progress = functools.partial(jobs.progress, job)
                layerwise.add(job, Finishing(load, mark, views, progress))
                self._reported(load)

    def _begin(self) -> bool:
        """Request or make the next copy. Returns False if none can begin."""
        jobs = self._jobs
        if jobs is None or not jobs.ready:
            return self._load(None) or self._store(None)
        return (jobs.room_for_load and self._load(jobs)) or (
            jobs.room_for_store and self._store(jobs)
        )

    def _load(self, jobs: Jobs | None) -> bool:
        taken = self._take_load()
        if taken is None:
            return False
        filled = self._ask_load(jobs, taken.load, taken.mark)
        # In spite of an error it may be in progress in `jobs`, which then ends it.
        if filled is not None and not (jobs is not None and jobs.has(taken.load)):
            self._loaded(taken.load, failed=not filled)
        return True

    def _store(self, jobs: Jobs | None) -> bool:
        chunk = self._take_chunk()
        if chunk is None:
            return False
        if not self._copy_out(jobs, chunk):
            self._stored(chunk, 0)
        return True

    @guarded(lambda: False)
    def _ask_load(self, jobs: Jobs | None, load: Load, mark: StreamPoint) -> bool | None:
        """Request a load (returns None), or copy it here (returns whether its blocks are full)."""
        handle = self._handle(load.adapter)
        if jobs is None or not jobs.ready_for(handle):
            return self._copy_in(load, mark)
        jobs.begin_load(handle, load, load.slots[self._rank], mark)
        return None

    @guarded(lambda: False)
    def _copy_in(self, load: Load, mark: StreamPoint) -> bool:
        """Copy a load here. Returns False if any byte of its blocks may be wrong."""
        slots = load.slots[self._rank]
        give_up_s = time.monotonic() + LOAD_MAP_WAIT_S
        while True:
            views = self._client.lease_views(self._handle(load.adapter), load.epoch, slots)
            if views is not None:
                break
            # A lost daemon sends nothing, and `wait` would return at once.
            if time.monotonic() >= give_up_s or load.expired or not self._client.connected:
                return False
            self._client.wait(_BUSY_POLL_S)
        return self._scatter(load, mark, views)

    @guarded(lambda: False)
    def _scatter(self, load: Load, mark: StreamPoint, views: Sequence[memoryview]) -> bool:
        """Fill the load's blocks from its slots. Returns False if any byte may be wrong."""
        began_s = time.monotonic()
        mark.wait()
        self._pages.scatter_many(views, load.blocks)
        # Check after the copy: until the lease expires, the daemon reuses no slot.
        if load.expired:
            return False
        self._count_loaded(load, began_s)
        return True

    @guarded(lambda: False)
    def _copy_out(self, jobs: Jobs | None, chunk: Chunk) -> bool:
        """Copy or request the store of a chunk. Returns False if no block is or will be stored."""
        began_s = time.monotonic()
        handle = self._handle(chunk.adapter)
        if jobs is not None and not jobs.ready_for(handle):
            jobs = None
        reservation = self._client.reserve(
            handle,
            [item.block_hash for item in chunk.items],
            [item.parent for item in chunk.items],
        )
        if reservation is None:
            return False
        with contextlib.ExitStack() as undo:
            undo.callback(self._client.abort, reservation)
            blocks, views = [], []
            for item, view in zip(chunk.items, reservation.views, strict=True):
                if view is not None:
                    blocks.append(item.block)
                    views.append(view)
            if blocks and jobs is not None:
                jobs.begin_store(handle, chunk, reservation, blocks)
                undo.pop_all()
                return True
            chunk.mark.wait()
            self._pages.gather_many(blocks, views)
            undo.pop_all()
        self._publish(chunk, reservation, len(blocks), began_s)
        return True

    def _publish(self, chunk: Chunk, reservation: Reservation, copied: int, began_s: float) -> None:
        """Commit and end a chunk whose first `copied` granted blocks are in their slots."""
        self._stored(chunk, self._commit(chunk, reservation, copied, began_s))

    @guarded(lambda: 0)
    def _commit(self, chunk: Chunk, reservation: Reservation, copied: int, began_s: float) -> int:
        """Commit a chunk's blocks. Returns how many of them the daemon has afterwards."""
        with contextlib.ExitStack() as undo:
            undo.callback(self._client.abort, reservation)
            granted = [
                item.block
                for item, slot in zip(chunk.items, reservation.slots, strict=True)
                if slot is not None
            ]
            # Check after the copy: a block fenced meanwhile may not match its hash.
            count = self._unfenced(chunk, granted[:copied])
            undo.pop_all()
        stored = self._client.commit(reservation, count)
        if count:
            self.tally.add(
                store_blocks=count,
                store_bytes=count * self._block_bytes,
                store_seconds=time.monotonic() - began_s,
            )
        return sum(stored)

    def _count_loaded(self, load: Load, began_s: float) -> None:
        self.tally.add(
            load_blocks=len(load.blocks),
            load_bytes=len(load.blocks) * self._block_bytes,
            load_seconds=time.monotonic() - began_s,
        )

    def _populate(self) -> bool:
        """Fault in some memory that this thread will copy to. Returns whether more remains."""
        if self._jobs is not None or not self._client.connected:
            return False
        return self._client.populate(POPULATE_BYTES)

    def _sleep(self) -> None:
        """Sleep until the engine has work, the daemon sends a message, or the pause ends."""
        poller = select.poll()
        poller.register(self._wakeup, select.POLLIN)
        socket = self._client.fileno()
        if socket >= 0:
            poller.register(socket, select.POLLIN)
        poller.poll(self._pause_s() * 1000)
        self._take_wakeup()

    def _pause_s(self) -> float:
        if self._jobs is not None and self._jobs.under_way:
            layerwise = self._layerwise is not None and self._layerwise.active
            soon = self._jobs.settling or (layerwise and self._jobs.loads)
            return _SETTLE_POLL_S if soon else _BUSY_POLL_S
        if not self._client.connected:
            return _AWAY_POLL_S
        if self._populating or not self._namespaces.answered:
            return _BUSY_POLL_S
        return _IDLE_POLL_S

    def _leave(self) -> None:
        """End the session."""
        self._namespaces.close()
        self._client.close()

    @guarded(nothing)
    def _give_up(self) -> None:
        """End all copies at the engine's end, so that none writes its pages after this."""
        if self._jobs is not None:
            for ended in self._jobs.settle():
                if self._layerwise is None or self._layerwise.find(ended.job) is None:
                    self._loaded(ended.load, failed=not ended.filled)
            for store in self._jobs.stores:
                self._client.abort(store.reservation)
