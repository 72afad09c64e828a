"""The worker's copying thread: it owns the worker's client and does all waiting and copying.

The engine's threads only touch queues under one lock. Order of the parties:

- The engine may overwrite a block only after `fence()` returned for it. Until then the
  mover may read it, even if its request has ended: the content of a block dies when the
  block gets a new owner, not when the old one leaves.
- The blocks of a load belong to the mover from `submit_load` until the load shows up in
  `take_finished`, exactly once, whatever happened to the daemon.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple

from tierd_connectors.vllm_guard import Boundary, guarded, nothing
from tierd_connectors.vllm_layout import PageMap
from tierd_connectors.vllm_work import Load, StoreItem, Tally

if TYPE_CHECKING:
    from tierd.client import Client, Handle
    from tierd.types import Namespace

CHUNK_BLOCKS_MAX = 32
"""Blocks a reservation: at 16 the two waits of a store cost under 5 % of the copy."""

STORES_MAX = 32_768
"""Blocks that wait to be stored; the queue holds references, and what overflows is dropped."""

LOAD_MAP_WAIT_S = 0.25
"""How long a load waits for this client to learn of the segment that it is to read."""

POPULATE_BYTES = 32 << 20
"""Mapped memory pre-faulted at a time when there is nothing else to do, about 7 ms."""

_BUSY_POLL_S = 0.01
_AWAY_POLL_S = 0.1
_IDLE_POLL_S = 0.5


class FinishedLoad(NamedTuple):
    """A load's end: the engine's blocks that it did not fill, none if it went well."""

    request_id: str
    failed_blocks: list[int]


class Mover:
    """Queues of loads and stores, and the thread that works them off. Loads go first."""

    def __init__(
        self, client: Client, namespace: Namespace, pages: PageMap, rank: int, boundary: Boundary
    ) -> None:
        self.boundary = boundary
        self.tally = Tally()
        self._client = client
        self._handle: Handle = client.register(namespace)
        self._pages = pages
        self._rank = rank
        self._cond = threading.Condition()
        # All below is guarded by _cond.
        self._namespace: Namespace | None = None
        self._loads: deque[Load] = deque()
        self._loading: set[str] = set()
        self._finished: list[FinishedLoad] = []
        self._stores: dict[int, StoreItem] = {}
        self._chunk: dict[int, StoreItem] = {}
        self._cancelled: set[int] = set()
        self._copying: int | None = None
        self._stop_at_s: float | None = None
        self._populating = True
        self._thread = threading.Thread(target=self._loop, name="tierd-mover", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> bytes:
        """The life of the daemon that has accepted this rank's namespace; empty if none has."""
        return self._client.epoch if self._handle.ready else b""

    # The engine's side

    def use(self, namespace: Namespace) -> None:
        """Store and load under another namespace from now on; what is queued is dropped."""
        with self._cond:
            self._stores.clear()
            while self._loads:
                self._finish_load(self._loads.popleft(), failed=True)
            self._namespace = namespace
            self._cond.notify_all()

    def submit_load(self, load: Load) -> None:
        """Queue a load. Its blocks are the mover's until take_finished() names the request."""
        with self._cond:
            assert load.request_id not in self._loading
            self._loading.add(load.request_id)
            if load.slots and self._stop_at_s is None:
                self._loads.append(load)
            else:
                self._finish_load(load, failed=True)
            self._cond.notify_all()

    def submit_stores(self, items: Iterable[StoreItem]) -> None:
        """Queue blocks to store. What the queue has no room for is dropped and counted."""
        dropped = 0
        with self._cond:
            for item in items:
                if len(self._stores) >= STORES_MAX or self._stop_at_s is not None:
                    dropped += 1
                else:
                    self._stores[item.block] = item
            self._cond.notify_all()
        if dropped:
            self.tally.add(store_blocks_dropped=dropped)

    def fence(self, blocks: Collection[int]) -> None:
        """Return when these blocks will not be read any more. Waits for one block's copy at most.

        Stores of them that have not begun to copy are dropped: a miss later is better
        than a wait now.
        """
        dropped = 0
        with self._cond:
            for block in blocks:
                if self._stores.pop(block, None) is not None:
                    dropped += 1
                if block in self._chunk:
                    self._cancelled.add(block)
            while self._copying is not None and self._copying in blocks:
                self._cond.wait()
        if dropped:
            self.tally.add(store_blocks_dropped=dropped)

    def forget_stores(self) -> None:
        """As fence(), for every block."""
        with self._cond:
            self._cancelled.update(self._chunk)
            dropped = len(self._stores)
            self._stores.clear()
            while self._copying is not None:
                self._cond.wait()
        if dropped:
            self.tally.add(store_blocks_dropped=dropped)

    def take_finished(self) -> list[FinishedLoad]:
        """Loads that ended since the last call."""
        with self._cond:
            now_ns = time.monotonic_ns()
            for load in [load for load in self._loads if load.expires_ns <= now_ns]:
                self._loads.remove(load)
                self._finish_load(load, failed=True)
            finished, self._finished = self._finished, []
        return finished

    def wait_finished(self, timeout_s: float) -> None:
        """Wait until a load has ended, if one is under way."""
        with self._cond:
            if self._loading and not self._finished:
                self._cond.wait_for(lambda: self._finished, timeout_s)

    def stop(self, drain_s: float) -> None:
        """Work off the queues for at most `drain_s`, then end the thread and the client."""
        with self._cond:
            self._stop_at_s = time.monotonic() + drain_s
            self._cond.notify_all()
        self._thread.join(drain_s + 0.2)

    # The thread

    def _loop(self) -> None:
        try:
            self._serve()
        finally:
            self._client.close()

    def _serve(self) -> None:
        while True:
            with self._cond:
                if not self._has_work() and self._stop_at_s is None:
                    self._cond.wait(self._pause_s())
                if self._stop_at_s is not None:
                    late = time.monotonic() >= self._stop_at_s
                    if late or not (self._loads or self._stores):
                        return
                namespace, self._namespace = self._namespace, None
                load = self._loads.popleft() if self._loads else None
                if load is None:
                    self._take_chunk()
            self._work(namespace, load)

    def _has_work(self) -> bool:
        return bool(self._loads or self._stores or self._namespace is not None)

    def _pause_s(self) -> float:
        if not self._client.connected:
            return _AWAY_POLL_S
        if self._populating or not (self._handle.ready or self._handle.refusal):
            return _BUSY_POLL_S
        return _IDLE_POLL_S

    def _take_chunk(self) -> None:
        while self._stores and len(self._chunk) < CHUNK_BLOCKS_MAX:
            block = next(iter(self._stores))
            self._chunk[block] = self._stores.pop(block)

    def _work(self, namespace: Namespace | None, load: Load | None) -> None:
        self._poll(namespace, busy=load is not None or bool(self._chunk))
        if load is not None:
            failed = not self._copy_in(load)
            with self._cond:
                self._finish_load(load, failed)
                self._cond.notify_all()
        elif self._chunk:
            stored = self._copy_out(list(self._chunk.values()))
            with self._cond:
                dropped = len(self._chunk) - stored
                self._chunk.clear()
                self._cancelled.clear()
                self._copying = None
                self._cond.notify_all()
            if dropped:
                self.tally.add(store_blocks_dropped=dropped)

    @guarded(nothing)
    def _poll(self, namespace: Namespace | None, *, busy: bool) -> None:
        if namespace is not None:
            self._handle = self._client.register(namespace)
        self._client.poll()
        # Work may have brought new segments, so after it there may be pages to pre-fault.
        self._populating = busy or (
            self._client.connected and self._client.populate(POPULATE_BYTES)
        )

    @guarded(lambda: False)
    def _copy_in(self, load: Load) -> bool:
        """Fill the load's blocks; False if any byte of them is in doubt."""
        started_s = time.monotonic()
        slots = load.slots[self._rank]
        give_up_s = started_s + LOAD_MAP_WAIT_S
        while True:
            views = self._client.lease_views(self._handle, load.epoch, slots)
            if views is not None:
                break
            if time.monotonic() >= give_up_s or time.monotonic_ns() >= load.expires_ns:
                return False
            self._client.wait(_BUSY_POLL_S)
        self._pages.scatter_many(views, load.blocks)
        # Only now: until it expires, nobody but the leaseholder may reuse the slots.
        if time.monotonic_ns() >= load.expires_ns:
            return False
        self.tally.add(
            load_blocks=len(load.blocks),
            load_bytes=len(load.blocks) * self._pages.block_bytes,
            load_seconds=time.monotonic() - started_s,
        )
        return True

    @guarded(lambda: 0)
    def _copy_out(self, items: list[StoreItem]) -> int:
        """Store a chunk; how many of its blocks the daemon has afterwards."""
        started_s = time.monotonic()
        reservation = self._client.reserve(
            self._handle,
            [item.block_hash for item in items],
            [item.parent for item in items],
        )
        if reservation is None:
            return 0
        copied = 0
        stored: list[bool] | None = None
        try:
            for item, view in zip(items, reservation.views, strict=True):
                if view is None:
                    continue
                if not self._begin_copy(item.block):
                    break
                self._pages.gather(item.block, view)
                self._end_copy()
                copied += 1
            stored = self._client.commit(reservation, copied)
        finally:
            if stored is None:
                self._client.abort(reservation)
        if copied:
            self.tally.add(
                store_blocks=copied,
                store_bytes=copied * self._pages.block_bytes,
                store_seconds=time.monotonic() - started_s,
            )
        return sum(stored)

    def _begin_copy(self, block: int) -> bool:
        with self._cond:
            late = self._stop_at_s is not None and time.monotonic() >= self._stop_at_s
            if late or block in self._cancelled:
                return False
            self._copying = block
            return True

    def _end_copy(self) -> None:
        with self._cond:
            self._copying = None
            self._cond.notify_all()

    def _finish_load(self, load: Load, failed: bool) -> None:
        """Report a load's end; the caller holds _cond."""
        self._loading.discard(load.request_id)
        self._finished.append(FinishedLoad(load.request_id, load.blocks if failed else []))
        if failed:
            self.tally.add(load_failures=1)
