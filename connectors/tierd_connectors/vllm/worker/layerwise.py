"""Early reports of loads: a load is reported once its first layers are loaded, and must complete.

The engine treats such a load as finished. It puts the blocks into its prefix cache, where other
requests may find them, and computes; each layer waits for its part of the load. A report cannot be
withdrawn: vLLM 0.32 recomputes blocks that are reported as invalid for one running request only,
but the other requests, the step scheduled meanwhile and its prefix cache keep them. So a reported
load never fails. The worker copies the parts that the daemon does not: it has the slots
mapped, and the lease is kept until the load has ended (`take_changes`). No block gets a new owner
before that either.

One case remains: the worker was stopped for longer than the lease while the daemon failed. Then
LostLoadError ends the engine, because its next token would be wrong.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from tierd_connectors.common.work import Load
from tierd_connectors.vllm.worker.layout import BlockPages, LayoutError, TensorView, layer_spans
from tierd_connectors.vllm.worker.queues import StreamPoint

logger = logging.getLogger("vllm.tierd")

POLL_S = 0.0001
"""Interval at which a waiting layer reads the gate."""

LIMIT_S = 30.0
"""Longest wait of a layer. The mover ends or replaces a copy long before that."""

LARGEST_SHARE = 4
"""A layer group has at most 1/4 of all layers, so that copying and computing overlap."""


class LostLoadError(RuntimeError):
    """The engine may have computed with wrong KV, and must end."""


class LayerGroups(NamedTuple):
    """Groups of layers that are copied together. `ends` are their end offsets in a slot."""

    ends: list[int]
    group_of: Mapping[str, int]


def layer_groups(
    names: Sequence[str], views: Sequence[TensorView], blocks: BlockPages
) -> LayerGroups:
    """Split the layers into groups of 1, 1, 2, 4, ... layers, in the order of a slot's bytes.

    Raises LayoutError if a slot does not hold one layer after the other.
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
    """A load that was reported early. Guarded by the lock of its `Layerwise`."""

    __slots__ = ("blocks", "due", "filled", "load", "mark", "progress", "views")

    def __init__(
        self,
        load: Load,
        mark: StreamPoint,
        views: Sequence[memoryview],
        progress: Callable[[], int],
    ) -> None:
        """`progress` returns the number of loaded layer groups, until the load has ended."""
        self.load = load
        self.mark = mark
        self.blocks = frozenset(load.blocks)
        self.views = views
        self.progress = progress
        self.due = False
        """Whether the engine has the report, so that the next forward pass may read the blocks."""
        self.filled = False
        """Whether all blocks are loaded. A copy in progress may still write the same bytes."""


class Layerwise:
    """A worker's reported loads that have not ended, for the layer groups of one attachment.

    The engine's thread calls the methods of the first section, the mover's thread the others.
    """

    def __init__(self, groups: LayerGroups) -> None:
        self.ends = groups.ends
        self._group_of = groups.group_of
        self.active = False
        """Whether loads may be reported early: every forward pass so far waited for every layer."""
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
        """Mark the loads that the engine treats as finished from this step on.

        Raises LostLoadError, as `wait_layer`, `end_step` and `settle` do.
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
        """Wait until the KV of a layer, which is about to be read, is loaded."""
        self._asked.add(name)
        if self._guarding:
            group = self._group_of.get(name, len(self.ends) - 1)
            self._await(lambda f: f.due and not f.filled and f.progress() <= group)

    def end_step(self, *, idle: bool) -> None:
        """Check at the end of a forward pass that it waited for every layer; `idle`: had none."""
        if idle:
            return
        if self._asked >= self._group_of.keys():
            self.active = not self._skipped
            return
        if not self._skipped:
            logger.warning(
                "tierd: layerwise is off: the engine's forward pass does not wait for every layer, "
                "for example because of full CUDA graphs"
            )
        self._skipped, self.active = True, False
        if self._guarding:
            raise LostLoadError("a forward pass did not wait for the layers of a load")

    def settle(self, blocks: Collection[int] | None) -> None:
        """Wait until no load writes any of these blocks; None: all blocks."""
        if blocks is None:
            self._await(lambda finishing: True)
        elif blocks:
            self._await(lambda finishing: not finishing.blocks.isdisjoint(blocks))

    def take_changes(self) -> dict[str, int]:
        """Return, by request, loads reported early since the last call minus loads ended since."""
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
        """Add a load that is about to be reported."""
        with self._cond:
            self._finishing[job] = finishing
            self._change(finishing, 1)

    def find(self, job: int) -> Finishing | None:
        """Return the reported load of this number; None if it has ended."""
        with self._cond:
            return self._finishing.get(job)

    def jobs(self) -> list[int]:
        """Return the numbers of the reported loads that have not ended."""
        with self._cond:
            return list(self._finishing)

    @property
    def count(self) -> int:
        """Number of reported loads that have not ended."""
        with self._cond:
            return len(self._finishing)

    def fill(self, finishing: Finishing) -> None:
        """Mark a load as fully loaded."""
        with self._cond:
            finishing.filled = True
            self._cond.notify_all()

    def end(self, job: int) -> None:
        """Remove a load that is fully loaded and that no process writes any longer."""
        with self._cond:
            self._change(self._finishing.pop(job), -1)
            self._cond.notify_all()

    def lose(self, job: int, reason: str) -> None:
        """Record that a load cannot be completed. The engine ends at its next step or layer."""
        with self._cond:
            self._lost = self._lost or reason
            self._change(self._finishing.pop(job), -1)
            self._cond.notify_all()

    def _change(self, finishing: Finishing, count: int) -> None:
        """The caller holds _cond."""
        request_id = finishing.load.request_id
        self._changes[request_id] = self._changes.get(request_id, 0) + count
