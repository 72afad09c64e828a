"""Queued and finished copies: the mover's state, under one lock.

The engine's threads and the mover's thread share only this state. Rules:

- The mover may read a block for a store even after the block has got a new owner. The store is
  published only if no `fence()` named the block before the copy ended. So the engine calls
  `fence()` before it overwrites blocks, and never waits.
- The mover owns a load's blocks from `submit_load` until `take_finished` returns the load, exactly
  once, whatever happens to the daemon. With `worker.layerwise` it owns some of them longer.
- A load changes state by one assignment, so that no error can lose a load or end it twice.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol

from tierd.shared_memory.exports import NO_EVENT
from tierd.types import Namespace
from tierd_connectors.common.counters import DrainedCounters
from tierd_connectors.common.work import Load, StoreItem

CHUNK_BLOCKS_MAX = 32
"""Most blocks per reservation. At 16, the two waits of a store cost under 5 % of its copy."""

STORES_MAX = 32_768
"""Most blocks queued to be stored. The queue holds references; blocks beyond it are dropped."""


class StreamPoint(NamedTuple):
    """A point in the work of the engine's device that a copy must come after."""

    event: int = NO_EVENT
    """For the daemon: the number of the attachment's event; `value` is for `Device.wait`."""
    value: int = 0
    wait: Callable[[], object] = lambda: None
    """For a copy in this process: returns once the device has reached the point."""


class DeviceOrder(Protocol):
    """Marks points in the work of the engine's device."""

    def mark(self) -> StreamPoint:
        """Return the point behind all work that the calling thread has put on its stream."""


class HostOrder:
    """`DeviceOrder` of a CPU engine, whose work is done when its call returns."""

    def mark(self) -> StreamPoint:
        return StreamPoint()


class Submitted:
    """A load from `submit_load` until `take_finished` returns it.

    It is queued, then at work, then ended: `failed` holds the blocks that it did not fill.
    """

    __slots__ = ("at_work", "failed", "load", "mark")

    def __init__(self, load: Load, mark: StreamPoint) -> None:
        self.load = load
        self.mark = mark
        self.at_work = False
        self.failed: list[int] | None = None

    @property
    def queued(self) -> bool:
        """Whether the mover has not begun the load."""
        return not self.at_work and self.failed is None


class FinishedLoad(NamedTuple):
    """An ended load, with the engine's blocks that it did not fill (none: success)."""

    request_id: str
    failed_blocks: list[int]


class Chunk:
    """Blocks of one adapter that are stored together.

    `fenced` belongs to `Queues`, whose lock guards it.
    """

    __slots__ = ("adapter", "fenced", "items", "mark")

    def __init__(self, adapter: str, items: list[StoreItem], mark: StreamPoint) -> None:
        self.adapter = adapter
        self.items = items
        self.mark = mark
        self.fenced: set[int] = set()


class Queues:
    """The queues. The engine's threads call the public methods, the mover's thread the others."""

    def __init__(self, order: DeviceOrder) -> None:
        self.tally = DrainedCounters()
        self._order = order
        # Never closed: an engine may call in until its process ends.
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._cond = threading.Condition()
        # All below is guarded by _cond.
        self._namespace: Namespace | None = None
        self._loads: dict[str, Submitted] = {}
        self._stores: dict[int, tuple[StoreItem, StreamPoint]] = {}
        self._chunks: list[Chunk] = []
        self._stop_at_s: float | None = None

    # The engine's side

    def use(self, namespace: Namespace) -> None:
        """Change to another namespace. Queued stores are dropped, and queued loads fail."""
        with self._cond:
            # Set first: no copy begins from here on, whatever fails below.
            self._namespace = namespace
            self._stores.clear()
            for submitted in self._loads.values():
                if submitted.queued:
                    self._end_load(submitted, failed=True)
        self._wake()

    def submit_load(self, load: Load) -> None:
        """Queue a load. The mover owns its blocks until take_finished() names the request."""
        submitted = Submitted(load, self._order.mark())
        with self._cond:
            assert load.request_id not in self._loads
            if not load.slots or self._stop_at_s is not None:
                self._end_load(submitted, failed=True)
            self._loads[load.request_id] = submitted
        self._wake()

    def has_load(self, load: Load) -> bool:
        """Whether this load was submitted, and take_finished() has not returned it yet."""
        with self._cond:
            submitted = self._loads.get(load.request_id)
            return submitted is not None and submitted.load is load

    def submit_stores(self, items: Iterable[StoreItem]) -> None:
        """Queue blocks to store. Blocks that do not fit into the queue are dropped and counted."""
        mark = self._order.mark()
        dropped = 0
        with self._cond:
            for item in items:
                if len(self._stores) >= STORES_MAX or self._stop_at_s is not None:
                    dropped += 1
                else:
                    # Move it to the end of the queue: a chunk's last block has the newest mark.
                    self._stores.pop(item.block, None)
                    self._stores[item.block] = (item, mark)
        self._wake()
        self._count_dropped(dropped)

    def fence(self, blocks: Collection[int]) -> None:
        """Stop publishing the current content of these blocks. Does not wait.

        Their stores are dropped, even stores in progress: a later miss is better than a wait now.
        """
        dropped = 0
        with self._cond:
            for block in blocks:
                dropped += self._stores.pop(block, None) is not None
            for chunk in self._chunks:
                chunk.fenced.update(blocks)
        self._count_dropped(dropped)

    def forget_stores(self) -> None:
        """Fence every block."""
        with self._cond:
            dropped = len(self._stores)
            self._stores.clear()
            for chunk in self._chunks:
                chunk.fenced.update(item.block for item in chunk.items)
        self._count_dropped(dropped)

    def take_finished(self) -> list[FinishedLoad]:
        """Return the loads that ended since the last call."""
        with self._cond:
            for submitted in self._loads.values():
                if submitted.queued and submitted.load.expired:
                    self._end_load(submitted, failed=True)
            finished = [
                FinishedLoad(request_id, submitted.failed)
                for request_id, submitted in self._loads.items()
                if submitted.failed is not None
            ]
            for load in finished:
                del self._loads[load.request_id]
        return finished

    def wait_finished(self, timeout_s: float) -> None:
        """Wait until a load has ended; return at once if there are none."""
        with self._cond:
            if self._loads:
                self._cond.wait_for(self._any_ended, timeout_s)

    def _any_ended(self) -> bool:
        return any(submitted.failed is not None for submitted in self._loads.values())

    @property
    def settled(self) -> bool:
        """Whether no copy is queued or in progress."""
        with self._cond:
            return not self._busy

    # The mover's side

    @property
    def _busy(self) -> bool:
        """Whether any copy is queued or in progress; the caller holds _cond."""
        open_loads = any(submitted.failed is None for submitted in self._loads.values())
        return bool(self._stores or self._chunks or open_loads)

    def _wake(self) -> None:
        os.eventfd_write(self._wakeup, 1)

    def _take_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)

    def _wanted_namespace(self) -> Namespace | None:
        """Return the namespace to change to. No copy begins before `_in_namespace` confirms it."""
        with self._cond:
            return self._namespace

    def _in_namespace(self, namespace: Namespace) -> None:
        with self._cond:
            if self._namespace is namespace:
                self._namespace = None

    def _next_load(self) -> Submitted | None:
        """Return the first queued load; the caller holds _cond."""
        return next((load for load in self._loads.values() if load.queued), None)

    def _take_load(self) -> Submitted | None:
        """Take the next load, to be ended by `_loaded`; None during a change of namespace."""
        with self._cond:
            submitted = self._next_load() if self._namespace is None else None
            if submitted is not None:
                submitted.at_work = True
            return submitted

    def _take_chunk(self) -> Chunk | None:
        """Take the next stores, to be ended by `_stored`; None while loads are queued."""
        with self._cond:
            if self._namespace is not None or self._next_load() or not self._stores:
                return None
            first, mark = next(iter(self._stores.values()))
            items: list[StoreItem] = []
            for item, its_mark in itertools.islice(self._stores.values(), CHUNK_BLOCKS_MAX):
                if item.adapter != first.adapter:
                    break
                items.append(item)
                mark = its_mark
            chunk = Chunk(first.adapter, items, mark)
            # Added before the stores are removed: a block in neither would not be fenced.
            self._chunks.append(chunk)
            for item in items:
                del self._stores[item.block]
            return chunk

    def _unfenced(self, chunk: Chunk, copied: list[int]) -> int:
        """Return the number of leading blocks that were copied before any fence."""
        with self._cond:
            for count, block in enumerate(copied):
                if block in chunk.fenced:
                    return count
        return len(copied)

    def _stored(self, chunk: Chunk, stored: int) -> None:
        """End a chunk of which the daemon stored `stored` blocks."""
        with self._cond:
            if chunk in self._chunks:
                self._chunks.remove(chunk)
        self._count_dropped(len(chunk.items) - stored)

    def _loaded(self, load: Load, *, failed: bool) -> None:
        """End a load whose blocks no process writes any longer. A second call does nothing."""
        with self._cond:
            submitted = self._loads.get(load.request_id)
            if submitted is not None and submitted.load is load:
                self._end_load(submitted, failed)

    def _reported(self, load: Load) -> None:
        """Report a load as finished. It may still be written; `Layerwise` keeps track of that."""
        self._loaded(load, failed=False)
        self.tally.add(load_early_starts=1)

    def _lose(self, at_work: Collection[Load], copied: Collection[Chunk]) -> None:
        """After an error, fail begun loads that are not in `at_work`, and drop chunks that are not
        in `copied`. No process reads or writes their blocks any longer."""
        with self._cond:
            for submitted in self._loads.values():
                known = any(submitted.load is load for load in at_work)
                if submitted.at_work and not known:
                    self._end_load(submitted, failed=True)
            self._chunks = [chunk for chunk in self._chunks if chunk in copied]

    def _end_load(self, submitted: Submitted, failed: bool) -> None:
        """End a load, unless it has ended; the caller holds _cond."""
        if submitted.failed is not None:
            return
        submitted.failed = submitted.load.blocks if failed else []
        self._cond.notify_all()
        if failed:
            self.tally.add(load_failures=1)

    def _count_dropped(self, blocks: int) -> None:
        if blocks:
            self.tally.add(store_blocks_dropped=blocks)
