"""The worker's side of the connector: carries out each step's work, and reports how it ended.

It gives loads and stores to the mover, fences blocks before their new owners write them, and
reports each load exactly once. Used by the engine's thread only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierd_connectors.common.guard import Boundary, guarded, nothing
from tierd_connectors.common.namespaces import of_generation
from tierd_connectors.common.work import Load, StepWork, StoreItem
from tierd_connectors.vllm.identity.watch import Weights
from tierd_connectors.vllm.worker.layerwise import Layerwise
from tierd_connectors.vllm.worker.mover import Mover
from tierd_connectors.vllm.worker.queues import FinishedLoad

if TYPE_CHECKING:
    from tierd.types import Namespace

IDLE_WAIT_S = 0.005
"""Wait for a load in a step that computes nothing. Without it the engine spins and takes the GIL
in every iteration, and a load of 10 ms lasts seconds."""


class WorkerSide:
    """One rank's work. Until `start`, and if that never happens, every load fails."""

    def __init__(self, boundary: Boundary) -> None:
        self.boundary = boundary
        self.mover: Mover | None = None
        self.layerwise: Layerwise | None = None
        self._namespace: Namespace | None = None
        self._weights = Weights()
        self._moved_reported = False
        self._generation = ""
        self._unfit: list[FinishedLoad] = []
        self._failed_blocks: set[int] = set()

    def start(
        self, mover: Mover, layerwise: Layerwise | None, namespace: Namespace, weights: Weights
    ) -> None:
        """Copy with this mover, in this namespace until the first reset of the engine's caches."""
        self.mover, self.layerwise = mover, layerwise
        self._namespace, self._weights = namespace, weights
        self.boundary.start_over = mover.forget_stores

    def begin_step(self, work: StepWork) -> None:
        """Fence the blocks that the step hands out, and wait for parts of reported loads."""
        self.fence(work)
        if self.layerwise is not None:
            self.layerwise.begin_step(work.begun)

    def fence(self, work: StepWork) -> None:
        """Stop stores of the blocks that the step hands out, before they are overwritten."""
        if self.layerwise is not None:
            self.layerwise.settle(None if work.reused_unknown else work.reused)
        if not self._try_fence(work) and self.mover is not None:
            self.mover.forget_stores()

    def begin_loads(self, work: StepWork) -> None:
        """Queue the step's loads, in the namespace of its generation."""
        if not self._enter_generation(work.generation):
            self.boundary.switch_off("the new namespace after a cache reset could not be entered")
        for load in work.loads:
            # The mover may have the load in spite of an error, and then it reports the load.
            if not (self._submit_load(load) or self._has_load(load)):
                self._unfit.append(FinishedLoad(load.request_id, load.blocks))

    def end_step(self, work: StepWork) -> None:
        """Queue the step's stores after its forward pass."""
        if self.layerwise is not None:
            self.layerwise.end_step(idle=work.idle)
        self._queue_stores(work.stores)

    def take_finished(self, *, idle: bool) -> set[str]:
        """Return the requests whose loads have ended, each exactly once. An idle step waits."""
        finished, self._unfit = self._unfit, []
        if self.mover is not None:
            if idle:
                self.mover.wait_finished(IDLE_WAIT_S)
            finished += self.mover.take_finished()
        for load in finished:
            self._failed_blocks.update(load.failed_blocks)
        return {load.request_id for load in finished}

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks of the loads just reported that hold no KV."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_changes(self) -> tuple[dict[str, int], bool]:
        """Return changes in early reported loads, and whether weights were replaced since."""
        changes = self.layerwise.take_changes() if self.layerwise is not None else {}
        moved = bool(self._weights.moved) and not self._moved_reported
        self._moved_reported |= moved
        return changes, moved

    @guarded(nothing)
    def _queue_stores(self, stores: list[StoreItem]) -> None:
        if stores and self.mover is not None and not self.boundary.off and not self._weights.moved:
            self.mover.submit_stores(stores)

    @guarded(lambda: False)
    def _submit_load(self, load: Load) -> bool:
        if self.mover is None or self.boundary.off or self._weights.moved:
            return False
        self.mover.submit_load(load)
        return True

    def _has_load(self, load: Load) -> bool:
        return self.mover is not None and self.mover.has_load(load)

    @guarded(lambda: False)
    def _try_fence(self, work: StepWork) -> bool:
        if self.mover is not None:
            self.mover.start()
            self.mover.fence(frozenset(work.reused))
        return not work.reused_unknown

    @guarded(lambda: False)
    def _enter_generation(self, generation: str) -> bool:
        if generation != self._generation and self.mover is not None:
            assert self._namespace is not None
            self.mover.use(of_generation(self._namespace, generation))
            self._generation = generation
            # No other engine shares the new namespace.
            self._weights.moved, self._moved_reported = "", False
        return True
