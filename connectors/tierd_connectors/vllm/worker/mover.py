"""The worker's mover: it owns the worker's client and does all waiting, and copies or has copied.

Where the daemon copies for this engine the thread only asks (`worker.jobs`); where it does not,
or not now, the thread copies itself. So a load that the daemon fails is copied here, and
nothing waits for an attachment.
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
from tierd_connectors.vllm.guard import Boundary, guarded, nothing
from tierd_connectors.vllm.work import NO_ADAPTER, Load, is_generation, of_adapters
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
"""How long a copy waits for this client to learn of the namespace, or of the segment."""

POPULATE_BYTES = 32 << 20
"""Mapped memory pre-faulted at a time when there is nothing else to do, about 7 ms."""

CONNECT_S = 0.5
"""Waited at the engine's start for a daemon that is there to answer."""

ATTACH_S = 15.0
"""Waited at the engine's start, which takes longer anyway, for the daemon to attach: the
process that copies is started, and opens a GPU. Later no page is free to be probed with."""

LIFE_MIN_NS = 10_000_000_000
"""Left of a lease, at least, when its load is reported early: as long as the daemon is waited
for, and then time to copy."""

_SETTLE_POLL_S = 0.001
_BUSY_POLL_S = 0.01
_AWAY_POLL_S = 0.1
_IDLE_POLL_S = 0.5


class Mover(Queues):
    """Queues of loads and stores, and the thread that works them off. Loads go first."""

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
        """`attach` may follow, and `start` must. With `layerwise` loads are reported early.

        `loras` are the revisions of adapters by name.
        """
        super().__init__(order)
        self._layerwise = layerwise
        self.boundary = boundary
        self._client = client
        self._loras = loras or {}
        self._namespaces = of_adapters(namespace, self._loras)
        self._handles = {NO_ADAPTER: client.begin_register(namespace)}
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
        """The life of the daemon that has accepted this rank's namespace; empty if none has."""
        return self._client.epoch if self._handles[NO_ADAPTER].ready else b""

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
        """Before `start`: have the daemon copy, in the first of these ways that it accepts.

        Waits for its answer, but not for a daemon that is not there: it is asked when it comes,
        for the first way.
        """
        try:
            for shown in ways:
                ends = self._layerwise.ends if self._layerwise is not None else ()
                jobs = Jobs(self._client, shown, self._probe, ends)
                jobs.attach(self._handles[NO_ADAPTER])
                refusal = self._await_attached(jobs)
                if not refusal:
                    self._jobs, self._order = jobs, shown.order
                    return
                jobs.detach()
                self._tell_refusal(refusal)
        except (CannotOpenError, LayoutError, OSError) as error:
            self._tell_refusal(str(error))
        if self._layerwise is not None:
            logger.info("tierd: layerwise does nothing where the worker copies")

    def _tell_refusal(self, reason: str) -> None:
        logger.warning(
            "tierd: the daemon does not copy for this engine, its worker does (shm): %s", reason
        )

    def _await_attached(self, jobs: Jobs) -> str:
        """Why the daemon refuses; empty if it does not, or has not answered."""
        began_s = time.monotonic()
        while not (jobs.ready or jobs.refusal or self._handles[NO_ADAPTER].refusal):
            waited_s = time.monotonic() - began_s
            if self._client.fileno() < 0:
                break
            if waited_s > (ATTACH_S if self._client.connected else CONNECT_S):
                # Whatever it answers later is about a page that is in use by then.
                self._client.close()
                break
            self._client.wait(_BUSY_POLL_S)
        if jobs.ready:
            zeros = memoryview(bytearray(self._block_bytes))
            self._pages.scatter_many([zeros], [self._probed])
        return jobs.refusal

    def _probe(self, first: bool) -> tuple[int, bytes]:
        """Fill a block that nobody uses, and say which, and the digest of its bytes.

        Later than at the start that is only vLLM's null block, number 0, whose KV is never
        used; before it is any, so that the stride between blocks is proved as well. The bytes
        are new each time: memory that the engine has left may hold those of an earlier probe.
        """
        count = self._pages.blocks.count
        self._probed = 0 if self._in_use or not first else secrets.randbelow(count)
        # Without a number's topmost bits it is finite in every format.
        random = np.frombuffer(secrets.token_bytes(self._block_bytes), np.uint8)
        content = bytearray((random & 0x3F).tobytes())
        self._pages.scatter_many([memoryview(content)], [self._probed])
        return self._probed, hashlib.sha256(content).digest()

    def start(self) -> None:
        """Begin to work; from now on the engine may be using its pages. Again does nothing."""
        self._in_use = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="tierd-mover", daemon=True)
            self._thread.start()

    def stop(self, drain_s: float) -> None:
        """Work off the queues for at most `drain_s`, then end the thread and the client."""
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
                    self._put_right()
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
    def _put_right(self) -> None:
        """After an error in a turn: what the turn had in hand is nobody's any more, and ends."""
        jobs, layerwise = self._jobs, self._layerwise
        under_way = jobs.loads if jobs is not None else []
        stores = jobs.stores if jobs is not None else []
        self._lose([load.load for load in under_way], [store.chunk for store in stores])
        if layerwise is not None:
            for job in set(layerwise.jobs()) - {load.job for load in under_way}:
                self._see_through(layerwise, job)

    def _work(self) -> bool:
        """Do, without waiting for more, what there is to do; False if that was nothing."""
        self._client.poll()
        self._change_namespace()
        ended = self._collect()
        return self._begin() or ended

    def _change_namespace(self) -> None:
        """What is under way ends in the namespace that it began in."""
        namespace = self._wanted_namespace()
        if namespace is None or (self._jobs is not None and self._jobs.under_way):
            return
        left = self._handles
        self._namespaces = of_adapters(namespace, self._loras)
        self._handles = {NO_ADAPTER: self._client.begin_register(namespace)}
        if self._jobs is not None:
            self._jobs.attach(self._handles[NO_ADAPTER])
        for handle in left.values():
            self._client.unregister(handle, worthless=is_generation(handle.namespace))
        self._in_namespace(namespace)

    def _handle(self, adapter: str) -> Handle:
        """An adapter's, registered when it is first used: that takes memory of the daemon's."""
        handle = self._handles.get(adapter)
        if handle is None:
            handle = self._handles[adapter] = self._client.begin_register(self._namespaces[adapter])
            # Nothing can be stored before the daemon has answered.
            give_up_s = time.monotonic() + LOAD_MAP_WAIT_S
            while not (handle.ready or handle.refusal) and time.monotonic() < give_up_s:
                if not self._client.connected:
                    break
                self._client.wait(_BUSY_POLL_S)
        return handle

    def _collect(self) -> bool:
        """End what the daemon has done; whether that was anything."""
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
            self._tell_refusal(jobs.refusal)
            jobs.detach()
            self._jobs = None
        return bool(stores or loads)

    def _end(self, ended: EndedLoad) -> None:
        """The daemon writes the load no more: it is in place, or to be copied here."""
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
        # Does nothing if it has been reported before.
        self._loaded(load, failed=not (filled or self._copy_in(load, mark)))

    def _see_through(self, layerwise: Layerwise, job: int) -> None:
        """The daemon writes a reported load no more: bring it to its end here."""
        finishing = layerwise.find(job)
        if finishing is None:
            return
        if finishing.filled or self._scatter(finishing.load, finishing.mark, finishing.views):
            layerwise.end(job)
        else:
            layerwise.lose(job, "a load could not be brought to its end within its lease")

    @guarded(nothing)
    def _report_early(self, jobs: Jobs, layerwise: Layerwise) -> None:
        """Report loads whose first layers are in place, if they can be seen through."""
        for stuck in jobs.settling:
            finishing = layerwise.find(stuck.job)
            # Whoever is writing writes the same: the daemon holds the slots as long.
            if finishing is None or finishing.filled or stuck.load.expired:
                continue
            if self._scatter(stuck.load, stuck.mark, finishing.views):
                layerwise.fill(finishing)
        for load, mark, job, copy, _ in jobs.loads if layerwise.active else ():
            begun = not copy.done and jobs.progress(job) > 0 and layerwise.find(job) is None
            if not begun or load.expires_ns - time.monotonic_ns() < LIFE_MIN_NS:
                continue
            # Held from now on: the client forgets a daemon's life when there have been others.
            handle = self._handle(load.adapter)
            views = self._client.lease_views(handle, load.epoch, load.slots[self._rank])
            if views is not None:
                progress = functools.partial(jobs.progress, job)
                layerwise.add(job, Finishing(load, mark, views, progress))
                self._reported(load)

    def _begin(self) -> bool:
        """Begin a copy, or make one here; False if there is none that could begin."""
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
        # After an error it may be under way all the same, and is ended there.
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
        """Ask for a load, or else make it here; then whether its blocks are filled."""
        handle = self._handle(load.adapter)
        if jobs is None or not jobs.ready_for(handle):
            return self._copy_in(load, mark)
        jobs.begin_load(handle, load, load.slots[self._rank], mark)
        return None

    @guarded(lambda: False)
    def _copy_in(self, load: Load, mark: StreamPoint) -> bool:
        """Fill the load's blocks here; False if any byte of them is in doubt."""
        slots = load.slots[self._rank]
        give_up_s = time.monotonic() + LOAD_MAP_WAIT_S
        while True:
            views = self._client.lease_views(self._handle(load.adapter), load.epoch, slots)
            if views is not None:
                break
            # Nothing comes from a daemon that is away, and waiting for it would not take time.
            if time.monotonic() >= give_up_s or load.expired or not self._client.connected:
                return False
            self._client.wait(_BUSY_POLL_S)
        return self._scatter(load, mark, views)

    @guarded(lambda: False)
    def _scatter(self, load: Load, mark: StreamPoint, views: Sequence[memoryview]) -> bool:
        """Fill the load's blocks from its slots; False if any byte of them is in doubt."""
        began_s = time.monotonic()
        mark.wait()
        self._pages.scatter_many(views, load.blocks)
        # Only now: until it expires, nobody but the leaseholder may reuse the slots.
        if load.expired:
            return False
        self._count_loaded(load, began_s)
        return True

    @guarded(lambda: False)
    def _copy_out(self, jobs: Jobs | None, chunk: Chunk) -> bool:
        """Store a chunk, or have it stored; False if none of it was or will be."""
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
        """End a chunk of which so many granted blocks, from the first on, are in their slots."""
        self._stored(chunk, self._commit(chunk, reservation, copied, began_s))

    @guarded(lambda: 0)
    def _commit(self, chunk: Chunk, reservation: Reservation, copied: int, began_s: float) -> int:
        """How many of the chunk's blocks the daemon has afterwards."""
        with contextlib.ExitStack() as undo:
            undo.callback(self._client.abort, reservation)
            granted = [
                item.block
                for item, slot in zip(chunk.items, reservation.slots, strict=True)
                if slot is not None
            ]
            # Only now: what has been fenced meanwhile may not be what its hash says.
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
        """Fault in some of what this thread is to copy to; whether there is more."""
        if self._jobs is not None or not self._client.connected:
            return False
        return self._client.populate(POPULATE_BYTES)

    def _sleep(self) -> None:
        """Until the engine has work, the daemon has said something, or it is time to look."""
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
        if self._populating or not all(h.ready or h.refusal for h in self._handles.values()):
            return _BUSY_POLL_S
        return _IDLE_POLL_S

    def _leave(self) -> None:
        """End the session; nobody comes back to the namespace of a reset."""
        for handle in self._handles.values():
            if is_generation(handle.namespace):
                self._client.unregister(handle, worthless=True)
        self._client.close()

    @guarded(nothing)
    def _give_up(self) -> None:
        """The engine ends: nothing of ours may write its pages after this."""
        if self._jobs is not None:
            for ended in self._jobs.settle():
                if self._layerwise is None or self._layerwise.find(ended.job) is None:
                    self._loaded(ended.load, failed=not ended.filled)
            for store in self._jobs.stores:
                self._client.abort(store.reservation)
