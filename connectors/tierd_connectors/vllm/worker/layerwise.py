"""Layer by layer: a load is reported once its first layers are in place, and seen through.

The engine takes such a load for finished. It puts the blocks into its prefix cache, where other
requests may find them, and computes; each layer waits for its part of the load. From the report
on there is no way back: vLLM 0.32 answers blocks that turn out to be invalid by computing them
again for one of the requests that it is running, but lets the others, the step that it has
scheduled meanwhile, and its prefix cache, have them. So a load that is reported never fails. The
worker copies itself what the daemon does not, for which it has the slots mapped and the lease is
kept until the very end (`take_changes`). A block gets no new owner before that either.

What is left is a worker that was stopped for longer than the lease while the daemon failed: then
LostLoadError ends the engine, for its next token would be wrong.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from tierd_connectors.vllm.work import Load
from tierd_connectors.vllm.worker.layout import BlockPages, LayoutError, TensorView, layer_spans
from tierd_connectors.vllm.worker.queues import StreamPoint

logger = logging.getLogger("vllm.tierd")

POLL_S = 0.0001
"""How often a layer that waits looks at the gate."""

LIMIT_S = 30.0
"""Of one wait. The mover ends or replaces a copy long before."""

LARGEST_SHARE = 4
"""No group of layers is larger than this part of all: the rest of a load goes on meanwhile."""


class LostLoadError(RuntimeError):
    """The engine may have computed with KV that is not what it takes it for, and must end."""


class LayerGroups(NamedTuple):
    """Layers that are copied together. `ends` are where groups end in a slot."""

    ends: list[int]
    group_of: Mapping[str, int]


def layer_groups(
    names: Sequence[str], views: Sequence[TensorView], blocks: BlockPages
) -> LayerGroups:
    """Groups of 1, 1, 2, 4, ... layers in the order of a slot's bytes, of all these layers.

    Raises LayoutError if a slot does not have one layer after the other.
    """
    spans = layer_spans(views, blocks)
    distinct = sorted(set(spans))
    starts = [0, *(span.end for span in distinct)]
    if [span.start for span in distinct] != starts[:-1]:
        raise LayoutError("layers are not copied one after the other in this KV layout")
    largest = -(-len(distinct) // LARGEST_SHARE)
    ends: list[int] = []
    group_of_span = {}
    at, size = 0, 1
    while at < len(distinct):
        members = distinct[at : at + size]
        group_of_span.update(dict.fromkeys(members, len(ends)))
        ends.append(members[-1].end)
        at += size
        size = min(at, largest)
    return LayerGroups(
        ends, {name: group_of_span[span] for name, span in zip(names, spans, strict=True)}
    )


class Finishing:
    """A load that the engine takes for finished. Guarded by the lock of its `Layerwise`."""

    __slots__ = ("blocks", "due", "filled", "load", "mark", "progress", "views")

    def __init__(
        self,
        load: Load,
        mark: StreamPoint,
        views: Sequence[memoryview],
        progress: Callable[[], int],
    ) -> None:
        """`progress` says how many layer groups are in place, until the load has ended."""
        self.load = load
        self.mark = mark
        self.blocks = frozenset(load.blocks)
        self.views = views
        self.progress = progress
        self.due = False
        """Whether the engine knows, so that the next forward pass may read the blocks."""
        self.filled = False
        """Whether all is in place, though somebody may write the same once more."""


class Layerwise:
    """A worker's reported loads that have not ended. Made for one attachment's layer groups.

    The engine's thread has the first methods, the mover's thread those below.
    """

    def __init__(self, groups: LayerGroups) -> None:
        self.ends = groups.ends
        self._group_of = groups.group_of
        self.active = False
        """Whether loads may be reported early: each forward pass so far asked for every layer."""
        self._skipped = False
        self._asked: set[str] = set()
        self._guarding = False
        self._cond = threading.Condition()
        # All below is guarded by _cond.
        self._finishing: dict[int, Finishing] = {}
        self._changes: dict[str, int] = {}
        self._lost = ""

    # The engine's side

    def begin_step(self, begun: Collection[str]) -> None:
        """The engine has been told that these requests' loads have finished.

        Raises LostLoadError, as all of these methods do.
        """
        self._asked.clear()
        with self._cond:
            if self._lost:
                raise LostLoadError(self._lost)
            for finishing in self._finishing.values():
                finishing.due |= finishing.load.request_id in begun
            self._guarding = any(finishing.due for finishing in self._finishing.values())
        if not self.active:
            self._await(lambda finishing: finishing.due and not finishing.filled)
            self._guarding = False

    def wait_layer(self, name: str) -> None:
        """A layer is about to read its KV: wait for it to be in place."""
        self._asked.add(name)
        if self._guarding:
            group = self._group_of.get(name, len(self.ends) - 1)
            self._await(lambda f: f.due and not f.filled and f.progress() <= group)

    def end_step(self, *, idle: bool) -> None:
        """The forward pass is over, if the step had one."""
        if idle:
            return
        if self._asked >= self._group_of.keys():
            self.active = not self._skipped
            return
        if not self._skipped:
            logger.warning(
                "tierd: layerwise is off: this engine does not ask for every layer, as in full "
                "CUDA graphs"
            )
        self._skipped, self.active = True, False
        if self._guarding:
            raise LostLoadError("a forward pass did not wait for the layers of a load")

    def settle(self, blocks: Collection[int] | None) -> None:
        """Wait until no load writes any of these blocks any more; None stands for all blocks."""
        if blocks is None:
            self._await(lambda finishing: True)
        elif blocks:
            self._await(lambda finishing: not finishing.blocks.isdisjoint(blocks))

    def take_changes(self) -> dict[str, int]:
        """By request: loads that were reported early since the last call, less those that ended."""
        with self._cond:
            changes, self._changes = self._changes, {}
        return changes

    def _await(self, pending: Callable[[Finishing], bool]) -> None:
        with self._cond:
            end_s = time.monotonic() + LIMIT_S
            while True:
                if self._lost:
                    raise LostLoadError(self._lost)
                if not any(pending(finishing) for finishing in self._finishing.values()):
                    return
                if time.monotonic() >= end_s:
                    raise LostLoadError(f"a load is still being written after {LIMIT_S:.0f} s")
                self._cond.wait(POLL_S)

    # The mover's side

    def add(self, job: int, finishing: Finishing) -> None:
        """A load is about to be reported."""
        with self._cond:
            self._finishing[job] = finishing
            self._change(finishing, 1)

    def find(self, job: int) -> Finishing | None:
        """The reported load of this number, if it has not ended."""
        with self._cond:
            return self._finishing.get(job)

    def jobs(self) -> list[int]:
        """Numbers of the reported loads that have not ended."""
        with self._cond:
            return list(self._finishing)

    @property
    def count(self) -> int:
        """Reported loads that have not ended."""
        with self._cond:
            return len(self._finishing)

    def fill(self, finishing: Finishing) -> None:
        """All of a load is in place."""
        with self._cond:
            finishing.filled = True
            self._cond.notify_all()

    def end(self, job: int) -> None:
        """A load is in place, and nobody writes it any more."""
        with self._cond:
            self._change(self._finishing.pop(job), -1)
            self._cond.notify_all()

    def lose(self, job: int, reason: str) -> None:
        """A load can not be seen through. The engine ends at its next step, or layer."""
        with self._cond:
            self._lost = self._lost or reason
            self._change(self._finishing.pop(job), -1)
            self._cond.notify_all()

    def _change(self, finishing: Finishing, count: int) -> None:
        """The caller holds _cond."""
        request_id = finishing.load.request_id
        self._changes[request_id] = self._changes.get(request_id, 0) + count
