"""The scheduler's side of the vLLM connector: it decides what to look up, load and store.

It knows requests, block hashes and block tables, and no tensors. `PrefixLookups` asks the daemon
and holds leases, `LeasedLoads` holds them while workers copy, and `BlockContent` knows whose KV the
engine's blocks hold. No method waits: a lookup without an answer is asked for again in the next
step, until its deadline. Every path out of a request releases its lease.

States of a request: looked up on arrival, past the blocks in the engine's own cache (again, if the
engine evicts some of them before its scheduler asks) -> offered (a lease is held) -> loading (the
workers copy; the lease is held until every rank is done) -> computing; each block is stored once it
is full. A preemption starts the sequence again. A failed load never causes another lookup of its
request, so no request can loop.

Which blocks may be stored: KV exists for the positions below `num_computed_tokens` plus this step's
tokens, but both counts include tokens that are not known yet (placeholders of asynchronous
scheduling) or may be rejected (drafts). Block hashes exist for known tokens only, and the KV of the
last known token is computed in this step at the latest. So a block is final when it lies below both
counts.

A prefix hit in the engine's own cache is stored only if `BlockContent` knows the block: another
connector may have filled it. Behind tokens that another connector loaded, no block of the request
is stored, because its KV depends on them.

After an error caught by the boundary, `start_over` discards this state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierd_connectors.common.content import BlockContent
from tierd_connectors.common.counters import DrainedCounters
from tierd_connectors.common.guard import Boundary
from tierd_connectors.common.loads import LeasedLoads
from tierd_connectors.common.lookups import PrefixLookup, PrefixLookups
from tierd_connectors.common.namespaces import NO_ADAPTER, EngineNamespaces
from tierd_connectors.common.savings import Savings
from tierd_connectors.common.speed import PrefillSpeed
from tierd_connectors.common.work import Load, StepWork, StoreItem
from tierd_connectors.vllm.hints import NOTHING, RequestHints
from tierd_connectors.vllm.steps import EngineRequest, Scheduled

if TYPE_CHECKING:
    from tierd.client import Client
    from tierd.types import Namespace

logger = logging.getLogger("vllm.tierd")

IDLE_WAIT_S = 0.002
"""Wait in a step with nothing but pending lookups, in which the engine would spin."""

NO_LIMIT = 1 << 62
"""Value of `_Tracked.limit`: all blocks of the request may be stored."""


@dataclass(slots=True)
class _Tracked:
    request: EngineRequest
    lookup: PrefixLookup
    hints: RequestHints = NOTHING
    adapter: str = NO_ADAPTER
    running: bool = False
    local_blocks: int = 0
    """Blocks in the engine's own cache when the engine last asked about the request."""
    loaded: range = range(0)
    """Blocks that tierd has loaded, or is loading, for the request."""
    sources: bytes = b""
    """The source of each loaded block, as in a lease."""
    table: Sequence[int] = ()
    stored: int = 0
    limit: int = NO_LIMIT
    """Number of leading blocks that may be stored: the content of the next one is not known."""


class SchedulerSide:
    """Decides each step's loads and stores. Used by the engine's scheduler thread only."""

    def __init__(
        self,
        client: Client,
        namespaces: Sequence[Namespace],
        *,
        deadline_ms: int,
        boundary: Boundary,
        loras: Mapping[str, str] | None = None,
    ) -> None:
        """`loras` maps each adapter whose requests may be added to its revision."""
        self.boundary = boundary
        self.tally = DrainedCounters()
        self.hash_root = namespaces[0].hash_root
        self._client = client
        self._block_tokens = namespaces[0].block_tokens
        self._namespaces = EngineNamespaces(client, namespaces, loras or {})
        self._lookups = PrefixLookups(client, self.tally, deadline_ms=deadline_ms)
        self._loads = LeasedLoads(client)
        self._content = BlockContent()
        self._tracked: dict[str, _Tracked] = {}
        self._speed = PrefillSpeed()
        self._savings = Savings(self._block_tokens)
        self.untouched = False
        """Whether this engine certainly computes the same KV as at its start; see `touched`."""
        self._fresh = False
        """Whether nothing has been computed under this generation yet."""

    # Lookups

    def add(
        self,
        request: EngineRequest,
        hints: RequestHints = NOTHING,
        adapter: str = NO_ADAPTER,
        own: int = 0,
    ) -> None:
        """Start to look up a new request's prefix, past the `own` blocks that the engine has.

        The request's hints are sent to the daemon when it ends.
        """
        self._client.poll()
        waited_ns = max(0, int((time.time() - request.arrival_time) * 1e9))
        lookup = PrefixLookup(request.request_id, time.monotonic_ns() - waited_ns)
        tracked = _Tracked(request, lookup, hints, adapter)
        self._tracked[request.request_id] = tracked
        self._look_up(tracked, own)

    def matched_tokens(self, request_id: str, computed_tokens: int) -> int | None:
        """Return the tokens past `computed_tokens` to load; None: ask again in the next step.

        The engine may ask in every step; asking again does not change the answer.
        """
        tracked = self._tracked.get(request_id)
        if tracked is None or request_id in self._loads:
            return 0
        if tracked.running:
            # The engine asks about a request that was computing: it was preempted.
            self._restart(tracked)
        # Set them even if nothing is offered: another connector may load the blocks after these.
        tracked.local_blocks = computed_tokens // self._block_tokens
        tracked.loaded = range(0)
        lookup = tracked.lookup
        useful = self._useful_blocks(tracked.request)
        if useful <= tracked.local_blocks:
            self._lookups.drop(lookup)
            return 0
        if not lookup.asked or tracked.local_blocks < lookup.own:
            # Fewer local blocks than `own`: the engine has evicted some since the lookup.
            self._lookups.drop(lookup)
            self._look_up(tracked, tracked.local_blocks)
        now_ns = time.monotonic_ns()
        if lookup.pending is not None and self._lookups.is_pending(lookup, now_ns):
            return None
        lease = lookup.lease
        if lease is None:
            return 0
        if now_ns >= lookup.renew_ns or self._lookups.is_stale(lease):
            self._lookups.drop(lookup)
            self._look_up(tracked, tracked.local_blocks)
            return None if lookup.pending is not None else 0
        found = min(lookup.own + lease.blocks, useful)
        if found <= tracked.local_blocks:
            self._lookups.drop(lookup)
            return 0
        return (found - tracked.local_blocks) * self._block_tokens

    def allocated(self, request_id: str, blocks: Sequence[int], external_tokens: int) -> None:
        """Plan the load of `external_tokens` into the blocks that the request was given.

        Called for every request, also for one that tierd does not serve, or that another connector
        loads for. The engine or that connector then writes its blocks.
        """
        tracked = self._tracked.get(request_id)
        kept = 0
        if tracked is not None and not self.boundary.off:
            kept = max(tracked.local_blocks, tracked.loaded.stop)
        self._content.hand_out(blocks[kept:])
        if external_tokens == 0:
            # Either the second call, after a load, or the engine declined the offer.
            if tracked is not None:
                self._lookups.drop(tracked.lookup)
            return
        first = tracked.local_blocks if tracked is not None else 0
        wanted = range(first, first + external_tokens // self._block_tokens)
        into = list(blocks[wanted.start : wanted.stop])
        lease = tracked.lookup.lease if tracked is not None else None
        if tracked is None or lease is None or len(into) != len(wanted):
            self.fail_load(request_id, blocks, external_tokens)
            return
        lookup = tracked.lookup
        leased = slice(wanted.start - lookup.own, wanted.stop - lookup.own)
        slots = [list(rank[leased]) for rank in lease.slots]
        load = Load(request_id, lease.epoch, lease.expires_ns, into, slots, tracked.adapter)
        lookup.lease = None
        tracked.loaded, tracked.sources = wanted, lease.sources[leased]
        self._loads.plan(load, lease)

    def fail_load(self, request_id: str, blocks: Sequence[int], external_tokens: int) -> None:
        """Have the workers report failure: the engine waits for a load that cannot be planned."""
        count = -(-external_tokens // self._block_tokens)
        # Leave out the leading blocks: they are the engine's own hits, and may be shared.
        self._loads.fail(request_id, blocks[max(0, len(blocks) - count) :])

    # Steps

    def build(
        self, scheduled: Iterable[Scheduled], preempted: Iterable[str], *, idle: bool
    ) -> StepWork:
        """Return this step's stores; `hand_over` adds the parts that an error must not lose."""
        for request_id in preempted:
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.running:
                self._restart(tracked)
        work = StepWork()
        prompt_tokens = 0
        for step in scheduled:
            if step.tokens > 1:
                prompt_tokens += step.tokens
            if not step.restarted:
                self._content.hand_out(step.blocks)
            tracked = self._tracked.get(step.request_id)
            if tracked is not None:
                self._track(tracked, step, work)
        self._fresh &= idle
        self._speed.step(time.monotonic_ns(), prompt_tokens)
        self._send_savings()
        self._look_after_client(idle=idle)
        return work

    def hand_over(self, work: StepWork | None, *, idle: bool) -> StepWork:
        """Add this step's loads and fences to the work from `build` (None after an error).

        Raises nothing: the engine would wait forever for a lost load. After an error the workers
        read no block, and wait for all reported loads.
        """
        work = StepWork() if work is None else work
        work.generation, work.idle = self._namespaces.generation, idle
        work.begun = self._loads.take_begun()
        work.reused, work.reused_unknown = self._content.take_handed_out()
        work.loads = self._loads.take_planned()
        return work

    def start_over(self) -> None:
        """Discard all state that an error may have left half done.

        Current requests are no longer looked up or stored, loads not sent to a worker fail, and the
        content of every block is unknown.
        """
        tracked, self._tracked = self._tracked, {}
        self._content.doubt()
        self._loads.start_over()
        for request in tracked.values():
            self._lookups.drop(request.lookup)

    def finished_loads(
        self,
        request_ids: Collection[str],
        invalid_blocks: Iterable[int],
        finishing: Mapping[str, int] | None = None,
    ) -> None:
        """Take loads that every rank has reported; some rank did not fill `invalid_blocks`.

        `finishing` is the sum of the ranks' `Layerwise.take_changes`: the lease of a load that was
        reported early is kept until the last rank has completed it.
        """
        for request_id in self._loads.finished(request_ids, invalid_blocks, finishing or {}):
            # The engine recomputes the blocks, and stores them.
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                self._lookups.drop(tracked.lookup)
                tracked.lookup.own = 0

    def finish(self, request_id: str) -> None:
        """Forget a request that has ended. A load in progress keeps its lease until it is done."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None:
            self._lookups.drop(tracked.lookup)
            if tracked.hints != NOTHING:
                self._send_hints(tracked)

    def touched(self, how: str) -> None:
        """Change to a new namespace: a call to the workers may change the KV that they compute.

        The change is immediate, because other engines use the old namespace, and a reset may not
        follow. It is skipped if nothing was computed since the last change.
        """
        self.untouched = False
        if not self._fresh:
            logger.info("tierd: %s may change the KV that this engine computes", how)
            self.reset()

    def reset(self) -> None:
        """Stop using stored blocks: change to a new, empty namespace.

        An untouched engine keeps its namespace: it would compute the same blocks again.
        """
        for tracked in self._tracked.values():
            self._lookups.drop(tracked.lookup)
        # Old weights may have computed their blocks, so they are not stored either.
        self._tracked.clear()
        self._content.forget()
        self._send_savings()
        if not self.untouched:
            self._fresh = True
            self._namespaces.change()

    def close(self) -> None:
        """Release every lease and disconnect from the daemon."""
        for tracked in self._tracked.values():
            self._lookups.drop(tracked.lookup)
        self._loads.release_all()
        self._namespaces.close()
        self._client.close()

    @property
    def generation(self) -> str:
        """Name of the generation of namespaces that the engine uses; empty before a change."""
        return self._namespaces.generation

    @property
    def epoch(self) -> bytes:
        """The daemon's epoch, once it has accepted every rank's namespace; empty before."""
        return self._client.epoch if self._namespaces.ready else b""

    @property
    def leases_held(self) -> int:
        """Number of leases not released yet, for tests and for status."""
        held = sum(tracked.lookup.lease is not None for tracked in self._tracked.values())
        return held + self._loads.leases_held

    # Inside

    def _useful_blocks(self, request: EngineRequest) -> int:
        """Return the number of blocks to load at most: one token must be left to compute."""
        return min((request.num_tokens - 1) // self._block_tokens, len(request.block_hashes))

    def _look_up(self, tracked: _Tracked, own: int) -> None:
        """Look up the request's blocks; the engine's own cache has the first `own`."""
        count = self._useful_blocks(tracked.request)
        lookup = tracked.lookup
        lookup.asked, lookup.own = True, min(own, max(0, count))
        if count > 0 and not self.boundary.off:
            self._lookups.send(
                lookup,
                self._namespaces.handles[tracked.adapter],
                tracked.request.block_hashes[:count],
                self._speed.tokens_per_s,
            )

    def _send_hints(self, tracked: _Tracked) -> None:
        """Send the daemon an ended request's hints for its prompt and its generated tokens.

        All blocks are known only now. The last ones may not be stored yet; the daemon accepts that.
        """
        hints, hashes = tracked.hints, list(tracked.request.block_hashes)
        self._client.hint(
            self._namespaces.handles[tracked.adapter],
            hashes,
            pin_ms=int(hints.pin_s * 1000),
            next_use_ms=int(hints.next_use_s * 1000),
            priority=hints.priority,
            session_ended=hints.session_end,
        )

    def _send_savings(self) -> None:
        handles, tokens_per_s = self._namespaces.handles, self._speed.tokens_per_s
        self._savings.send(self._client, handles, tokens_per_s)

    def _restart(self, tracked: _Tracked) -> None:
        """Start a preempted request again: its blocks are gone, and stored ones may be loaded."""
        self._lookups.drop(tracked.lookup)
        tracked.lookup.since_ns = time.monotonic_ns()
        tracked.lookup.asked = tracked.running = False
        tracked.loaded = range(0)
        tracked.table = ()
        tracked.stored = 0

    def _track(self, tracked: _Tracked, step: Scheduled, work: StepWork) -> None:
        if step.restarted or not tracked.running:
            self._admit(tracked, step)
        if step.restarted or step.blocks:
            table = step.table()
            assert table is not None
            tracked.table = table
        hashes = tracked.request.block_hashes
        computed = (step.computed + step.tokens) // self._block_tokens
        final = min(computed, len(hashes), tracked.limit)
        if final <= tracked.stored or self.boundary.off:
            return
        assert len(tracked.table) * self._block_tokens >= step.computed + step.tokens
        for index in range(tracked.stored, final):
            block, name = tracked.table[index], hashes[index]
            if index < tracked.local_blocks and not self._content.holds(block, name):
                tracked.limit = index
                break
            self._content.put(block, name)
            if index not in tracked.loaded:
                parent = hashes[index - 1] if index else self.hash_root
                work.stores.append(StoreItem(name, parent, block, tracked.adapter))
        tracked.stored = min(final, tracked.limit)

    def _admit(self, tracked: _Tracked, step: Scheduled) -> None:
        """Note that a request begins to compute behind blocks that were found or loaded."""
        self._lookups.drop(tracked.lookup)
        tracked.running = True
        tracked.stored = 0
        # After a failed load the engine keeps the blocks before the failure, and computes the rest.
        known = min(tracked.loaded.stop, step.computed // self._block_tokens)
        tracked.loaded = range(min(tracked.loaded.start, known), known)
        # Count a block that another connector has loaded in part, too.
        filled = -(-step.computed // self._block_tokens)
        known = max(tracked.local_blocks, known)
        self._count(tracked)
        tracked.limit = tracked.local_blocks if filled > known else NO_LIMIT

    def _count(self, tracked: _Tracked) -> None:
        """Count a lookup's result when its request begins to compute behind loaded blocks."""
        loaded = tracked.sources[: len(tracked.loaded)]
        if tracked.lookup.uncounted:
            wanted = self._useful_blocks(tracked.request) - tracked.local_blocks
            self._savings.add(tracked.adapter, max(wanted, len(loaded)), loaded)
        self.tally.add(loaded_tokens=len(loaded) * self._block_tokens)
        tracked.lookup.uncounted, tracked.sources = False, b""

    def _look_after_client(self, *, idle: bool) -> None:
        if idle and any(each.lookup.pending is not None for each in self._tracked.values()):
            self._client.wait(IDLE_WAIT_S)
        else:
            self._client.poll()
        self._namespaces.log_changes()
