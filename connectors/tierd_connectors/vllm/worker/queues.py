"""What waits to be copied and what has ended: the mover's state, under one lock.

The engine's threads and the mover's meet here and nowhere else. Order of the parties:

- A block may be read while it is stored, also when it has got a new owner meanwhile: what was
  read of it is published only if no `fence()` named it before the copy had ended. So the
  engine calls `fence()` before it overwrites blocks, and never waits.
- The blocks of a load belong to the mover from `submit_load` until the load shows up in
  `take_finished`, exactly once, whatever happened to the daemon; layer by layer
  (`worker.layerwise`) some of them longer.
- Each step of a load's life is one assignment, so that no error can lose a load or end it twice.
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
from tierd_connectors.vllm.work import DrainedCounters, Load, StoreItem

CHUNK_BLOCKS_MAX = 32
"""Blocks a reservation: at 16 the two waits of a store cost under 5 % of the copy."""

STORES_MAX = 32_768
"""Blocks that wait to be stored; the queue holds references, and what overflows is dropped."""


class StreamPoint(NamedTuple):
    """A point in the work of the engine's device that a copy must come after."""

    event: int = NO_EVENT
    """For the daemon: which of the attachment's events, and what `Device.wait` needs of it."""
    value: int = 0
    wait: Callable[[], object] = lambda: None
    """For a copy in this process: returns once the device has come so far."""


class DeviceOrder(Protocol):
    """Marks what the engine's device has been given so far."""

    def mark(self) -> StreamPoint:
        """Everything that the calling thread has put on the stream that runs the model."""


class HostOrder:
    """`DeviceOrder` of an engine on CPUs, whose work is done when its call has returned."""

    def mark(self) -> StreamPoint:
        return StreamPoint()


class Submitted:
    """A load from `submit_load` until the engine has been told of its end.

    It is queued, then at work, and then has `failed`: the blocks that it did not fill.
    """

    __slots__ = ("at_work", "failed", "load", "mark")

    def __init__(self, load: Load, mark: StreamPoint) -> None:
        self.load = load
        self.mark = mark
        self.at_work = False
        self.failed: list[int] | None = None

    @property
    def queued(self) -> bool:
        """Whether the mover has not begun with it."""
        return not self.at_work and self.failed is None


class FinishedLoad(NamedTuple):
    """A load's end: the engine's blocks that it did not fill, none if it went well."""

    request_id: str
    failed_blocks: list[int]


class Chunk:
    """Blocks of one adapter that are stored together.

    `fenced` is the queues' and guarded by their lock.
    """

    __slots__ = ("adapter", "fenced", "items", "mark")

    def __init__(self, adapter: str, items: list[StoreItem], mark: StreamPoint) -> None:
        self.adapter = adapter
        self.items = items
        self.mark = mark
        self.fenced: set[int] = set()


class Queues:
    """The engine's side has the public methods, the mover's thread the others."""

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
        """Store and load under another namespace from now on; what is queued is dropped."""
        with self._cond:
            # First: nothing begins from here on, whatever fails.
            self._namespace = namespace
            self._stores.clear()
            for submitted in self._loads.values():
                if submitted.queued:
                    self._end_load(submitted, failed=True)
        self._wake()

    def submit_load(self, load: Load) -> None:
        """Queue a load. Its blocks are the mover's until take_finished() names the request."""
        submitted = Submitted(load, self._order.mark())
        with self._cond:
            assert load.request_id not in self._loads
            if not load.slots or self._stop_at_s is not None:
                self._end_load(submitted, failed=True)
            self._loads[load.request_id] = submitted
        self._wake()

    def has_load(self, load: Load) -> bool:
        """Whether a load has been submitted whose end has not been taken."""
        with self._cond:
            submitted = self._loads.get(load.request_id)
            return submitted is not None and submitted.load is load

    def submit_stores(self, items: Iterable[StoreItem]) -> None:
        """Queue blocks to store. What the queue has no room for is dropped and counted."""
        mark = self._order.mark()
        dropped = 0
        with self._cond:
            for item in items:
                if len(self._stores) >= STORES_MAX or self._stop_at_s is not None:
                    dropped += 1
                else:
                    # To the end of the queue: the last of a chunk has the newest mark.
                    self._stores.pop(item.block, None)
                    self._stores[item.block] = (item, mark)
        self._wake()
        self._count_dropped(dropped)

    def fence(self, blocks: Collection[int]) -> None:
        """From now on nothing that these blocks hold is published. Does not wait.

        Their stores are dropped, also those under way: a miss later is better than a wait now.
        """
        dropped = 0
        with self._cond:
            for block in blocks:
                dropped += self._stores.pop(block, None) is not None
            for chunk in self._chunks:
                chunk.fenced.update(blocks)
        self._count_dropped(dropped)

    def forget_stores(self) -> None:
        """As fence(), for every block."""
        with self._cond:
            dropped = len(self._stores)
            self._stores.clear()
            for chunk in self._chunks:
                chunk.fenced.update(item.block for item in chunk.items)
        self._count_dropped(dropped)

    def take_finished(self) -> list[FinishedLoad]:
        """Loads that ended since the last call."""
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
        """Wait until a load has ended, if one is under way."""
        with self._cond:
            if self._loads:
                self._cond.wait_for(self._any_ended, timeout_s)

    def _any_ended(self) -> bool:
        return any(submitted.failed is not None for submitted in self._loads.values())

    @property
    def settled(self) -> bool:
        """Whether nothing is queued or under way."""
        with self._cond:
            return not self._busy

    # The mover's side

    @property
    def _busy(self) -> bool:
        """The opposite; the caller holds _cond."""
        open_loads = any(submitted.failed is None for submitted in self._loads.values())
        return bool(self._stores or self._chunks or open_loads)

    def _wake(self) -> None:
        os.eventfd_write(self._wakeup, 1)

    def _take_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)

    def _wanted_namespace(self) -> Namespace | None:
        """The namespace that is to be used; nothing begins before `_in_namespace` is told so."""
        with self._cond:
            return self._namespace

    def _in_namespace(self, namespace: Namespace) -> None:
        with self._cond:
            if self._namespace is namespace:
                self._namespace = None

    def _next_load(self) -> Submitted | None:
        """The first queued load; the caller holds _cond."""
        return next((load for load in self._loads.values() if load.queued), None)

    def _take_load(self) -> Submitted | None:
        """The next load, which then ends by `_loaded`; none before a new namespace is in use."""
        with self._cond:
            submitted = self._next_load() if self._namespace is None else None
            if submitted is not None:
                submitted.at_work = True
            return submitted

    def _take_chunk(self) -> Chunk | None:
        """The next stores, unless there are loads to begin; they end by `_stored`."""
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
            # First: what is in neither is not fenced.
            self._chunks.append(chunk)
            for item in items:
                del self._stores[item.block]
            return chunk

    def _unfenced(self, chunk: Chunk, copied: list[int]) -> int:
        """How many of these blocks, from the first on, were copied before any fence."""
        with self._cond:
            for count, block in enumerate(copied):
                if block in chunk.fenced:
                    return count
        return len(copied)

    def _stored(self, chunk: Chunk, stored: int) -> None:
        """A chunk has ended with so many of its blocks in the daemon."""
        with self._cond:
            if chunk in self._chunks:
                self._chunks.remove(chunk)
        self._count_dropped(len(chunk.items) - stored)

    def _loaded(self, load: Load, *, failed: bool) -> None:
        """A load has ended, and nobody writes its blocks any more. Again does nothing."""
        with self._cond:
            submitted = self._loads.get(load.request_id)
            if submitted is not None and submitted.load is load:
                self._end_load(submitted, failed)

    def _reported(self, load: Load) -> None:
        """A load counts as finished from now on. It may still be written: `Layerwise` knows."""
        self._loaded(load, failed=False)
        self.tally.add(load_early_starts=1)

    def _lose(self, at_work: Collection[Load], copied: Collection[Chunk]) -> None:
        """After an error: loads that began and are not among `at_work` fail; chunks that are not
        among `copied` are dropped. Nobody writes, or reads, their blocks any more."""
        with self._cond:
            for submitted in self._loads.values():
                known = any(submitted.load is load for load in at_work)
                if submitted.at_work and not known:
                    self._end_load(submitted, failed=True)
            self._chunks = [chunk for chunk in self._chunks if chunk in copied]

    def _end_load(self, submitted: Submitted, failed: bool) -> None:
        """The caller holds _cond."""
        if submitted.failed is not None:
            return
        submitted.failed = submitted.load.blocks if failed else []
        self._cond.notify_all()
        if failed:
            self.tally.add(load_failures=1)

    def _count_dropped(self, blocks: int) -> None:
        if blocks:
            self.tally.add(store_blocks_dropped=blocks)
