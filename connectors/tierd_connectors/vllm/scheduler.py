"""The scheduler's side of the vLLM connector: it decides what to look up, load and store.

It knows requests, block hashes and leases, and no tensors. No method waits: a lookup is answered
from the client's memory, and a lookup without an answer is asked for again in the next step, until
its deadline. Every path out of a request releases its lease.

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

Whose KV the blocks hold: `_content` maps an engine block to its hash if a request's own forward
pass computed the block, or tierd loaded it. A block that the engine hands out is removed at once,
before its new owner writes to it. A prefix hit in the engine's own cache is stored only if the
block is in `_content`: another connector may have filled it. Behind tokens that another connector
loaded, no block of the request is stored, because its KV depends on them.

After an error caught by the boundary, `start_over` discards this state.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierd.client import request_number
from tierd_connectors.vllm.guard import Boundary
from tierd_connectors.vllm.hints import NOTHING, RequestHints
from tierd_connectors.vllm.savings import Savings
from tierd_connectors.vllm.speed import PrefillSpeed
from tierd_connectors.vllm.steps import EngineRequest, Scheduled
from tierd_connectors.vllm.work import (
    NO_ADAPTER,
    DrainedCounters,
    Load,
    StepWork,
    StoreItem,
    is_generation,
    of_adapters,
    of_generation,
)

if TYPE_CHECKING:
    from tierd.client import Client, Handle, Lease, PendingAcquire
    from tierd.types import Namespace

logger = logging.getLogger("vllm.tierd")

GRACE_MS = 100
"""Wait beyond a lookup's deadline for an answer that is in transit."""

SILENCE_MS, SILENCE_MS_MAX = 1_000, 30_000
"""First and longest pause in lookups after the daemon did not answer one; it doubles each time.
So a daemon that hangs delays a request now and then, not every request."""

LEASE_RESERVE = 4
"""A lease is replaced in the last 1/4 of its time, so that it outlasts the load."""

IDLE_WAIT_S = 0.002
"""Wait in a step with nothing but pending lookups, in which the engine would spin."""

NO_LIMIT = 1 << 62
"""Value of `_Tracked.limit`: all blocks of the request may be stored."""


@dataclass(slots=True)
class _Tracked:
    request: EngineRequest
    since_ns: int
    """Time of arrival or preemption, from which the daemon's prefetch policy counts."""
    hints: RequestHints = NOTHING
    adapter: str = NO_ADAPTER
    own: int = 0
    """Leading blocks in the engine's own cache at the lookup; the answer begins after them."""
    pending: PendingAcquire | None = None
    give_up_ns: int = 0
    wanted: bool = False
    """The engine has asked for the request's tokens, and READY was sent to the daemon."""
    lease: Lease | None = None
    renew_ns: int = 0
    asked: bool = False
    running: bool = False
    local_blocks: int = 0
    """Blocks in the engine's own cache when the engine last asked about the request."""
    loaded: range = range(0)
    """Blocks that tierd has loaded, or is loading, for the request."""
    sources: bytes = b""
    """The source of each loaded block, as in a lease."""
    uncounted: bool = False
    """A lookup was sent, and its result is not counted yet."""
    table: Sequence[int] = ()
    stored: int = 0
    limit: int = NO_LIMIT
    """Number of leading blocks that may be stored: the content of the next one is not known."""


@dataclass(slots=True)
class _Loading:
    lease: Lease
    blocks: frozenset[int]
    failed: bool = False


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
        self._client = client
        self._namespaces = list(namespaces)
        self._block_tokens = namespaces[0].block_tokens
        self.hash_root = namespaces[0].hash_root
        self._deadline_ms = deadline_ms
        self._generation = ""
        self._loras = loras or {}
        self._handles = self._register(namespaces)
        self._tracked: dict[str, _Tracked] = {}
        self._loading: dict[str, _Loading] = {}
        self._begun: list[str] = []
        self._finishing: dict[str, int] = {}
        self._kept: dict[str, list[Lease]] = {}
        self._planned: dict[str, Load] = {}
        self._content: dict[int, bytes] = {}
        self._handed_out: list[int] = []
        self._doubt = False
        self._silent_until_ns = 0
        self._silence_ms = 0
        self._speed = PrefillSpeed()
        self.untouched = False
        """Whether this engine certainly computes the same KV as at its start; see `touched`."""
        self._fresh = False
        """Whether nothing has been computed under this generation yet."""
        self._savings = Savings(self._block_tokens)
        self._connected: bool | None = None
        self._refusals: set[str] = set()

    def _register(self, namespaces: Iterable[Namespace]) -> dict[str, list[Handle]]:
        """Register the namespaces. Returns the handles of all ranks, by adapter."""
        handles: dict[str, list[Handle]] = {}
        for namespace in namespaces:
            for adapter, its_own in of_adapters(namespace, self._loras).items():
                handles.setdefault(adapter, []).append(self._client.begin_register(its_own))
        return handles

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
        tracked = _Tracked(request, time.monotonic_ns() - waited_ns, hints, adapter)
        self._tracked[request.request_id] = tracked
        self._look_up(tracked, own)

    def matched_tokens(self, request_id: str, computed_tokens: int) -> int | None:
        """Return the tokens past `computed_tokens` to load; None: ask again in the next step.

        The engine may ask in every step; asking again does not change the answer.
        """
        tracked = self._tracked.get(request_id)
        if tracked is None or request_id in self._loading:
            return 0
        if tracked.running:
            # The engine asks about a request that was computing: it was preempted.
            self._restart(tracked)
        # Set them even if nothing is offered: another connector may load the blocks after these.
        tracked.local_blocks = computed_tokens // self._block_tokens
        tracked.loaded = range(0)
        if self._useful_blocks(tracked.request) <= tracked.local_blocks:
            self._let_go(tracked)
            return 0
        if not tracked.asked or tracked.local_blocks < tracked.own:
            # Fewer local blocks than `own`: the engine has evicted some since the lookup.
            self._let_go(tracked)
            self._look_up(tracked, tracked.local_blocks)
        now_ns = time.monotonic_ns()
        if tracked.pending is not None:
            self._client.poll()
            if not tracked.pending.done:
                if now_ns < tracked.give_up_ns:
                    if not tracked.wanted:
                        tracked.wanted = True
                        self._client.ready(tracked.pending)
                    return None
                self._let_go(tracked)
                self._note_silence(now_ns)
                return 0
            self._take_answer(tracked, now_ns)
        if tracked.lease is None:
            return 0
        stale = self._client.connected and tracked.lease.epoch != self._client.epoch
        if stale or now_ns >= tracked.renew_ns:
            self._let_go(tracked)
            self._look_up(tracked, tracked.local_blocks)
            return None if tracked.pending is not None else 0
        leased_to = tracked.own + tracked.lease.blocks
        found = min(leased_to, self._useful_blocks(tracked.request))
        if found <= tracked.local_blocks:
            self._let_go(tracked)
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
        self._hand_out(blocks[kept:])
        if external_tokens == 0:
            # Either the second call, after a load, or the engine declined the offer.
            if tracked is not None:
                self._let_go(tracked)
            return
        first = tracked.local_blocks if tracked is not None else 0
        wanted = range(first, first + external_tokens // self._block_tokens)
        into = list(blocks[wanted.start : wanted.stop])
        lease = tracked.lease if tracked is not None else None
        if tracked is None or lease is None or len(into) != len(wanted):
            self.fail_load(request_id, blocks, external_tokens)
            return
        leased = slice(wanted.start - tracked.own, wanted.stop - tracked.own)
        slots = [list(rank[leased]) for rank in lease.slots]
        load = Load(request_id, lease.epoch, lease.expires_ns, into, slots, tracked.adapter)
        self._loading[request_id] = _Loading(lease, frozenset(into))
        tracked.lease = None
        tracked.loaded, tracked.sources = wanted, lease.sources[leased]
        self._planned[request_id] = load

    def fail_load(self, request_id: str, blocks: Sequence[int], external_tokens: int) -> None:
        """Have the workers report failure: the engine waits for a load that cannot be planned."""
        count = -(-external_tokens // self._block_tokens)
        # Leave out the leading blocks: they are the engine's own hits, and may be shared.
        self._planned[request_id] = _doomed(request_id, blocks[max(0, len(blocks) - count) :])

    def _hand_out(self, blocks: Sequence[int]) -> None:
        """Record that these blocks get a new owner, which may write to them from now on."""
        self._handed_out.extend(blocks)
        for block in blocks:
            self._content.pop(block, None)

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
                self._hand_out(step.blocks)
            tracked = self._tracked.get(step.request_id)
            if tracked is not None:
                self._track(tracked, step, work)
        self._fresh &= idle
        self._speed.step(time.monotonic_ns(), prompt_tokens)
        self._savings.tell(self._client, self._handles, self._speed.tokens_per_s)
        self._look_after_client(idle=idle)
        return work

    def hand_over(self, work: StepWork | None, *, idle: bool) -> StepWork:
        """Add this step's loads and fences to the work from `build` (None after an error).

        Raises nothing: the engine would wait forever for a lost load. After an error the workers
        read no block, and wait for all reported loads.
        """
        work = StepWork() if work is None else work
        work.generation, work.idle = self._generation, idle
        work.begun, self._begun = self._begun, []
        work.reused, self._handed_out = self._handed_out, []
        work.reused_unknown, self._doubt = self._doubt, False
        work.loads, self._planned = list(self._planned.values()), {}
        return work

    def start_over(self) -> None:
        """Discard all state that an error may have left half done.

        Current requests are no longer looked up or stored, loads not sent to a worker fail, and the
        content of every block is unknown. Leases of copies in progress are left to expire, not
        released: a worker may be reading their slots.
        """
        tracked, self._tracked = self._tracked, {}
        loading, self._loading = self._loading, {}
        planned = self._planned
        self._planned = {name: _doomed(name, load.blocks) for name, load in planned.items()}
        self._kept, self._finishing = {}, {}
        self._content = {}
        self._doubt = True
        for request_id in planned:
            if request_id in loading:
                self._client.release(loading[request_id].lease)
        for request in tracked.values():
            self._let_go(request)

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
        self._begun.extend(request_ids)
        for request_id, count in (finishing or {}).items():
            left = self._finishing.pop(request_id, 0) + count
            if left:
                self._finishing[request_id] = left
            else:
                for lease in self._kept.pop(request_id, ()):
                    self._client.release(lease)
        invalid = frozenset(invalid_blocks)
        if invalid:
            for request_id, loading in self._loading.items():
                if not invalid.isdisjoint(loading.blocks):
                    loading.failed = True
                    self._load_failed(request_id)
        for request_id in request_ids:
            done = self._loading.pop(request_id, None)
            if done is None:
                # No lease: `fail_load` planned this load as failed.
                self._load_failed(request_id)
                continue
            if request_id in self._finishing:
                self._kept.setdefault(request_id, []).append(done.lease)
            else:
                self._client.release(done.lease)

    def finish(self, request_id: str) -> None:
        """Forget a request that has ended. A load in progress keeps its lease until it is done."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None:
            self._let_go(tracked)
            if tracked.hints != NOTHING:
                self._pass_on(tracked)

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
            self._let_go(tracked)
        # Old weights may have computed their blocks, so they are not stored either.
        self._tracked.clear()
        self._content.clear()
        self._savings.tell(self._client, self._handles, self._speed.tokens_per_s)
        if self.untouched:
            return
        self._fresh = True
        generation = secrets.token_hex(8)
        fresh = [of_generation(namespace, generation) for namespace in self._namespaces]
        left = self._handles
        # Set both or, after an error, neither: workers derive their namespace from the generation.
        self._generation, self._handles = generation, self._register(fresh)
        for handle in itertools.chain(*left.values()):
            self._client.unregister(handle, worthless=is_generation(handle.namespace))
        logger.info(
            "tierd: caches were reset; this engine now uses its own namespace, %s",
            fresh[0].digest.hex(),
        )

    def close(self) -> None:
        """Release every lease and disconnect from the daemon."""
        for tracked in self._tracked.values():
            self._let_go(tracked)
        for loading in self._loading.values():
            self._client.release(loading.lease)
        for leases in self._kept.values():
            for lease in leases:
                self._client.release(lease)
        for handle in itertools.chain(*self._handles.values()):
            if is_generation(handle.namespace):
                self._client.unregister(handle, worthless=True)
        self._client.close()

    @property
    def epoch(self) -> bytes:
        """The daemon's epoch, once it has accepted every rank's namespace; empty before."""
        ready = all(handle.ready for handle in self._handles[NO_ADAPTER])
        return self._client.epoch if ready else b""

    @property
    def leases_held(self) -> int:
        """Number of leases not released yet, for tests and for status."""
        held = sum(tracked.lease is not None for tracked in self._tracked.values())
        return held + len(self._loading) + sum(len(leases) for leases in self._kept.values())

    # Inside

    def _useful_blocks(self, request: EngineRequest) -> int:
        """Return the number of blocks to load at most: one token must be left to compute."""
        return min((request.num_tokens - 1) // self._block_tokens, len(request.block_hashes))

    def _look_up(self, tracked: _Tracked, own: int) -> None:
        """Send a lookup of the blocks past the first `own`, even if none are left: the daemon
        counts the own blocks as used."""
        now_ns = time.monotonic_ns()
        count = self._useful_blocks(tracked.request)
        tracked.asked, tracked.own = True, min(own, max(0, count))
        if count <= 0 or self.boundary.off or not self._client.connected:
            return
        if now_ns < self._silent_until_ns:
            return
        hashes = list(tracked.request.block_hashes[:count])
        tracked.wanted = False
        tracked.pending = self._client.begin_acquire(
            self._handles[tracked.adapter],
            hashes,
            self._deadline_ms,
            request=request_number(tracked.request.request_id),
            waited_ms=(now_ns - tracked.since_ns) // 1_000_000,
            prefill_tokens_per_s=self._speed.tokens_per_s,
            own=tracked.own,
        )
        tracked.uncounted = True
        tracked.give_up_ns = now_ns + (self._deadline_ms + GRACE_MS) * 1_000_000
        self.tally.add(lookups=1)

    def _note_silence(self, now_ns: int) -> None:
        self.tally.add(lookup_timeouts=1)
        if now_ns >= self._silent_until_ns:
            self._silence_ms = min(max(2 * self._silence_ms, SILENCE_MS), SILENCE_MS_MAX)
            self._silent_until_ns = now_ns + self._silence_ms * 1_000_000

    def _take_answer(self, tracked: _Tracked, now_ns: int) -> None:
        assert tracked.pending is not None
        self._silence_ms = 0
        tracked.lease, tracked.pending = tracked.pending.lease, None
        if tracked.lease is not None:
            life_ns = tracked.lease.expires_ns - now_ns
            tracked.renew_ns = tracked.lease.expires_ns - life_ns // LEASE_RESERVE
            if life_ns <= 0:
                self._let_go(tracked)

    def _pass_on(self, tracked: _Tracked) -> None:
        """Send the daemon an ended request's hints for its prompt and its generated tokens.

        All blocks are known only now. The last ones may not be stored yet; the daemon accepts that.
        """
        hints, hashes = tracked.hints, list(tracked.request.block_hashes)
        self._client.hint(
            self._handles[tracked.adapter],
            hashes,
            pin_ms=int(hints.pin_s * 1000),
            next_use_ms=int(hints.next_use_s * 1000),
            priority=hints.priority,
            session_ended=hints.session_end,
        )

    def _let_go(self, tracked: _Tracked) -> None:
        """Release the lease, and cancel a pending lookup."""
        if tracked.lease is not None:
            self._client.release(tracked.lease)
            tracked.lease = None
        if tracked.pending is not None:
            self._client.cancel(tracked.pending)
            tracked.pending = None

    def _load_failed(self, request_id: str) -> None:
        """Drop the lease of a failed load: the engine recomputes the blocks, and stores them."""
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            self._let_go(tracked)
            tracked.own = 0

    def _restart(self, tracked: _Tracked) -> None:
        """Start a preempted request again: its blocks are gone, and stored ones may be loaded."""
        self._let_go(tracked)
        tracked.since_ns = time.monotonic_ns()
        tracked.asked = tracked.running = False
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
            if index < tracked.local_blocks and self._content.get(block) != name:
                tracked.limit = index
                break
            self._content[block] = name
            if index not in tracked.loaded:
                parent = hashes[index - 1] if index else self.hash_root
                work.stores.append(StoreItem(name, parent, block, tracked.adapter))
        tracked.stored = min(final, tracked.limit)

    def _admit(self, tracked: _Tracked, step: Scheduled) -> None:
        """Note that a request begins to compute behind blocks that were found or loaded."""
        self._let_go(tracked)
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
        if tracked.uncounted:
            wanted = self._useful_blocks(tracked.request) - tracked.local_blocks
            self._savings.add(tracked.adapter, max(wanted, len(loaded)), loaded)
        self.tally.add(loaded_tokens=len(loaded) * self._block_tokens)
        tracked.uncounted, tracked.sources = False, b""

    def _look_after_client(self, *, idle: bool) -> None:
        if idle and any(t.pending is not None for t in self._tracked.values()):
            self._client.wait(IDLE_WAIT_S)
        else:
            self._client.poll()
        for handle in itertools.chain(*self._handles.values()):
            if handle.refusal is not None and handle.refusal not in self._refusals:
                self._refusals.add(handle.refusal)
                logger.warning("tierd: the daemon refuses this engine: %s", handle.refusal)
        if self._client.connected != self._connected:
            if self._connected is not None:
                state = "is back" if self._client.connected else "is lost: every lookup misses"
                logger.warning("tierd: the connection to the daemon %s", state)
            self._connected = self._client.connected


def _doomed(request_id: str, blocks: Sequence[int]) -> Load:
    """Return a load that the workers report as failed."""
    return Load(request_id, b"", 0, list(blocks), [])
