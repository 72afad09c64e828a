"""Another connector beside tierd's, as under vLLM's MultiConnector, that loads asynchronously.

It serves some requests: it fills their blocks after a random time, and reports that.
"""

from __future__ import annotations

from functools import partial

from tests.support.simulation.pool import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    BlockPool,
    Memory,
    Model,
    Request,
    nearly,
)
from tests.support.simulation.threads import Process, pause


class OtherConnector:
    """The scheduler's and the worker's side, in one process."""

    def __init__(
        self,
        process: Process,
        model: Model,
        pool: BlockPool,
        memories: list[Memory],
        *,
        share: float,
        lossy: bool,
    ) -> None:
        """It serves a `share` of the requests; a `lossy` one returns inexact KV."""
        random = process.random
        self._process = process
        self._pool = pool
        self._lossy = lossy
        self._model = model
        self._memories = memories
        self._random = random
        self._share = share
        self._asked: set[str] = set()
        self._offered: set[str] = set()
        self._planned: list[tuple[Request, list[int], int]] = []
        self._finished: set[str] = set()
        self._failed: set[int] = set()
        self.loads = 0

    # The scheduler's side

    def matched_tokens(self, request: Request, computed: int) -> int:
        """Return how much of a request's prompt it has; each request is asked for once."""
        request_id = request.request_id
        if request_id not in self._asked:
            self._asked.add(request_id)
            if self._random.random() < self._share:
                self._offered.add(request_id)
        useful = (request.num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        return max(0, useful - computed) if request_id in self._offered else 0

    def allocated(self, request: Request, blocks: list[int], first: int, tokens: int) -> None:
        """Note a request's blocks; this connector must fill those from `first` on."""
        self._offered.discard(request.request_id)
        if tokens:
            self._planned.append((request, blocks, first))

    # The worker's side

    def start(self) -> None:
        """Start the loads planned in this step."""
        planned, self._planned = self._planned, []
        for each in planned:
            self.loads += 1
            self._process.spawn(partial(self._fill, *each), f"fill {self.loads}")

    def _fill(self, request: Request, blocks: list[int], first: int) -> None:
        random = self._random
        pause(random.expovariate(1 / 0.003))
        useful = (request.num_tokens - 1) // BLOCK_TOKENS
        wanted = range(first, useful)
        self._process.remark(f"another connector fills {[blocks[index] for index in wanted]}")
        fails = random.random() < 0.1
        for memory in self._memories:
            for index in wanted:
                memory.view(blocks[index])[:] = random.randbytes(BLOCK_BYTES)
                pause(random.expovariate(1 / 0.002))
        for rank, memory in enumerate(self._memories):
            for index in wanted if not fails else ():
                kv = self._model.block(rank, request.states, index)
                memory.view(blocks[index])[:] = nearly(kv) if self._lossy else kv
        if random.random() < 0.5:
            pause(random.expovariate(1 / 0.01))
        if fails:
            self._failed.update(blocks[index] for index in wanted)
        elif self._lossy:
            self._pool.lossy.update(blocks[index] for index in wanted)
        self._finished.add(request.request_id)

    def take_finished(self) -> tuple[set[str], set[int]]:
        """Return the requests whose loads have ended, and the blocks that were not filled."""
        finished, self._finished = self._finished, set()
        failed, self._failed = self._failed, set()
        return finished, failed
