"""An engine with block tables of its own, around the real connector, in virtual time.

It does what vLLM's scheduler and worker do as far as a connector can tell: a prefix cache, chunked
prefill, preemption, blocks that are free as soon as their request ends, asynchronous loads and
their failures. It computes KV that names all tokens before it, and each time that it uses a block
it looks at every byte.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from tests.support.engines.fake_vllm import KVConnectorRole, connector_module
from tests.support.simulation.connector import started_with
from tests.support.simulation.other_connector import OtherConnector
from tests.support.simulation.pool import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    TOKEN_BYTES,
    BlockPool,
    Memory,
    Model,
    Request,
    nearly,
)
from tests.support.simulation.threads import Process, pause
from tests.support.simulation.trouble import Trouble
from tierd.client import Client
from tierd_connectors.common.namespaces import of_generation
from tierd_connectors.vllm.worker.mover import Mover

T = TypeVar("T")

LOAD_S_MAX = 60.0
"""Virtual time after which a load counts as one that never ends."""

RESETS_PER_TOUCH = 5
"""Resets per call of the workers from outside. Such a call begins another namespace, in which
nothing can be loaded yet: with many of them no world would load anything."""


@dataclass
class Ways:
    """How one engine's process behaves, drawn before it starts."""

    blocks: int
    step_tokens: int
    running_max: int
    step_s: float
    requests: int
    error_chance: float
    other_share: float
    other_first: bool
    other_lossy: bool
    dies: bool

    @classmethod
    def drawn(cls, random: Random) -> Ways:
        """Small caches, so that blocks change hands all the time."""
        return cls(
            blocks=random.randint(10, 26),
            step_tokens=random.choice((6, 16, 40)),
            running_max=random.randint(1, 4),
            step_s=random.choice((0.0005, 0.002, 0.01)),
            requests=random.randint(4, 12),
            error_chance=random.choice((0.0, 0.0, 0.004, 0.02)),
            other_share=random.choice((0.0, 0.0, 0.2, 0.5)),
            other_first=random.random() < 0.5,
            other_lossy=random.random() < 0.3,
            dies=random.random() < 0.2,
        )


class SimulatedMover(Mover):
    """The mover with its thread in virtual time."""

    process: Process
    trouble: Trouble

    def start(self) -> None:
        self._in_use = True
        if self._thread is None:
            self._thread = cast(Any, self.process.spawn(self._loop, "mover"))

    def stop(self, drain_s: float) -> None:
        with self._cond:
            self._stop_at_s = self.process.world.loop.time() + drain_s
        while self._thread is not None and not cast(Any, self._thread).done():
            pause(0.001)

    def wait_finished(self, timeout_s: float) -> None:
        pause(self.process.random.random() * timeout_s)

    def _turn(self) -> Any:
        with self.trouble.around():
            return super()._turn()

    def _sleep(self) -> None:
        # A thread that has been woken comes round sooner or later.
        pause(min(self._pause_s(), self.process.random.expovariate(1 / 0.001)))


@dataclass
class Step:
    """What is computed in one step: requests with their first token and how many."""

    parts: list[tuple[Request, int, int]] = field(default_factory=list)
    new: list[Any] = field(default_factory=list)
    cached: list[tuple[str, list[int] | None, int]] = field(default_factory=list)
    resumed: set[str] = field(default_factory=set)
    preempted: set[str] = field(default_factory=set)

    def output(self, tables: Mapping[str, list[int]], *, resolves: bool) -> Any:
        """As vLLM's SchedulerOutput, from which the connector may get whole block tables: those of
        all requests that compute where it `resolves` them, as from vLLM 0.30 on, else of those that
        have got blocks."""
        got_blocks = [new.req_id for new in self.new] + [name for name, b, _ in self.cached if b]
        tokens = {request.request_id: count for request, _, count in self.parts}
        return SimpleNamespace(
            scheduled_new_reqs=self.new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[request_id for request_id, _, _ in self.cached],
                resumed_req_ids=self.resumed,
                new_block_ids=[None if b is None else (b,) for _, b, _ in self.cached],
                num_computed_tokens=[computed for _, _, computed in self.cached],
            ),
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            preempted_req_ids=self.preempted,
            finished_req_ids=set(),
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda name: (list(tables[name]),) if name in tokens else None
            )
            if resolves
            else SimpleNamespace(block_ids={name: (list(tables[name]),) for name in got_blocks}),
        )


class EngineProcess:
    """One process of an engine: its scheduler, its workers, and both connectors."""

    def __init__(self, process: Process, model: Model, ways: Ways) -> None:
        random = process.random
        self._process = process
        self._world = process.world
        self._model = model
        self._ways = ways
        self._random = random
        self._pool = BlockPool(ways.blocks)
        self._trouble = Trouble(random, ways.error_chance, process.remark)
        self._memories = [Memory(ways.blocks, random) for _ in model.ranks]
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._received: set[str] = set()
        self._received_by_rank: dict[str, int] = {}
        self._by_other: set[str] = set()
        # What differs between vLLM's versions.
        self._always_fences = random.random() < 0.5
        self._resolves = random.random() < 0.5
        self.other = OtherConnector(
            process,
            model,
            self._pool,
            self._memories,
            share=ways.other_share,
            lossy=ways.other_lossy,
        )
        self.movers: list[SimulatedMover] = []
        self.clients: list[Client] = []
        self._scheduler, self._workers = self._connectors()
        # Of its own: what else happens in a world of this seed must not change.
        self._resets = Random(f"resets of {process.name} in {process.world.seed}")
        self._reset_chance = self._resets.choice((0.0, 0.0, 0.01, 0.05))
        self._scheduler._scheduler.untouched = self._resets.random() < 0.5

    # --- the connector --------------------------------------------------------------

    def _connectors(self) -> tuple[Any, list[Any]]:
        connector = connector_module().TierdConnector
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                kv_role="kv_both",
                kv_connector_extra_config={
                    "socket": "simulated",
                    "transfer": "shm",
                    "prefetch_deadline_ms": 200,
                },
                kv_load_failure_policy="recompute",
            ),
            parallel_config=SimpleNamespace(
                pipeline_parallel_size=1, tensor_parallel_size=len(self._model.ranks)
            ),
            model_config=SimpleNamespace(),
            speculative_config=None,
        )
        kv = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["layer"])])
        caches = {"layer": SimpleNamespace(device=SimpleNamespace(type="cpu"))}
        workers = []
        for namespace, memory in zip(self._model.ranks, self._memories, strict=True):
            worker = connector(config, KVConnectorRole.WORKER, kv)
            with started_with(memory, namespace, self._make_mover):
                worker.register_kv_caches(caches)
            workers.append(worker)
        scheduler = connector(config, KVConnectorRole.SCHEDULER, kv)
        scheduler._root_checked = True
        scheduler.bind_gpu_block_pool(self._pool)
        handshakes = {rank: each.get_handshake_metadata() for rank, each in enumerate(workers)}
        scheduler.set_xfer_handshake_metadata(handshakes)
        self.clients.append(scheduler._scheduler._client)
        return scheduler, workers

    def _make_mover(self, *arguments: Any) -> SimulatedMover:
        mover = SimulatedMover(*arguments)
        mover.process, mover.trouble = self._process, self._trouble
        self.movers.append(mover)
        self.clients.append(mover._client)
        return mover

    def _ask(self, hook: Callable[..., T], *arguments: object) -> T:
        """Call a hook of the connector, with trouble now and then."""
        with self._trouble.around():
            return hook(*arguments)

    def _matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """External tokens of a request, and whether they are the other connector's."""
        tierd, _ = self._ask(self._scheduler.get_num_new_matched_tokens, request, computed)
        other = self.other.matched_tokens(request, computed)
        if tierd is None:
            return None, False
        if other and (self._ways.other_first or not tierd):
            return other, True
        return tierd, False

    def _allocated(self, request: Request, first: int, external: int) -> None:
        blocks = list(request.table)
        by_other = request.request_id in self._by_other
        shown = SimpleNamespace(get_block_ids=lambda: (blocks,))
        mine = 0 if by_other else external
        self._ask(self._scheduler.update_state_after_alloc, request, shown, mine)
        self.other.allocated(request, blocks, first, external if by_other else 0)

    # --- requests -------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Requests that are left."""
        return len(self._requests)

    def add(self, request: Request) -> None:
        """A request has arrived."""
        self._requests[request.request_id] = request
        self._waiting.append(request)
        self._ask(self._scheduler.on_new_request, request)

    def abort(self) -> None:
        """A user has gone away; what is being loaded keeps its blocks until it is loaded."""
        alive = [request for request in self._requests.values() if not request.aborted]
        if alive:
            self._end(self._random.choice(alive))

    def _end(self, request: Request) -> None:
        request.aborted = True
        if request in self._running:
            self._running.remove(request)
        if request in self._waiting:
            self._waiting.remove(request)
        self._ask(self._scheduler.request_finished, request, list(request.table))
        self._world.counts["table_requests"] += 1
        if not request.awaits_load or request.request_id in self._received:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        self._pool.give_back(request.table)
        request.table = []
        self._received.discard(request.request_id)
        del self._requests[request.request_id]

    def reset(self) -> None:
        """Empty all caches, as vLLM does for a pause; not while something is being loaded."""
        if any(request.awaits_load for request in self._requests.values()):
            return
        self._world.counts["table_resets"] += 1
        while self._running:
            self._preempt(self._running.pop(), Step())
        self._pool.forget_all()
        with self._generations():
            if self._resets.random() < 0.2:
                self._ask(self._scheduler._touched, "a call")
            self._ask(self._scheduler.reset_cache)

    def touch(self) -> None:
        """Call the workers from outside, between any two steps."""
        self._world.counts["table_touches"] += 1
        with self._generations():
            self._ask(self._scheduler._touched, "a call")

    @contextmanager
    def _generations(self) -> Iterator[None]:
        """Around what may have the connector go on in other namespaces."""
        side = self._scheduler._scheduler
        before = side.generation
        yield
        if side.generation != before:
            ranks = self._model.ranks
            self._model.use_too([of_generation(rank, side.generation) for rank in ranks])

    # --- scheduling -----------------------------------------------------------------

    def _schedule(self) -> Step:
        step, budget = Step(), self._ways.step_tokens
        for request in list(self._running):
            if request not in self._running:
                continue
            count = min(request.num_tokens - request.computed, budget)
            if count <= 0 or not self._grow(request, count, step):
                continue
            budget -= count
        if not step.preempted:
            self._admit(step, budget)
        return step

    def _grow(self, request: Request, count: int, step: Step) -> bool:
        """Blocks for the next tokens of a running request; others are preempted for them."""
        wanted = _blocks_for(request.computed + count) - len(request.table)
        while not self._pool.room_for(wanted, ()):
            victim = self._running.pop()
            self._preempt(victim, step)
            if victim is request:
                return False
        new = self._pool.take(wanted) if wanted > 0 else []
        request.table += new
        step.cached.append((request.request_id, new or None, request.computed))
        self._scheduled(request, count, step)
        return True

    def _preempt(self, request: Request, step: Step) -> None:
        self._world.counts["table_preemptions"] += 1
        self._pool.give_back(request.table)
        request.table, request.computed, request.preempted = [], 0, True
        step.preempted.add(request.request_id)
        step.parts = [part for part in step.parts if part[0] is not request]
        step.cached = [entry for entry in step.cached if entry[0] != request.request_id]
        self._waiting.appendleft(request)

    def _scheduled(self, request: Request, count: int, step: Step) -> None:
        step.parts.append((request, request.computed, count))
        full = (request.computed + count) // BLOCK_TOKENS
        self._pool.cache(request.table, request.block_hashes, full)

    def _admit(self, step: Step, budget: int) -> None:
        skipped: list[Request] = []
        while self._waiting and budget > 0 and len(self._running) < self._ways.running_max:
            request = self._waiting[0]
            if request.awaits_load and not self._take_loaded(request):
                skipped.append(self._waiting.popleft())
                continue
            hits: list[int] = []
            local, external, by_other = request.computed, 0, False
            if not local:
                hits = self._pool.prefix(request.block_hashes[: _useful(request)])
                local = len(hits) * BLOCK_TOKENS
                matched, by_other = self._matched(request, local)
                if matched is None:
                    skipped.append(self._waiting.popleft())
                    continue
                external = matched
            count = 0 if external else min(request.num_tokens - local, budget)
            wanted = _blocks_for(local + external + count) - len(request.table) - len(hits)
            if not self._pool.room_for(wanted, hits):
                break
            self._waiting.popleft()
            self._start(request, hits, wanted, local, external, by_other)
            if external:
                skipped.append(request)
                continue
            self._join(request, count, step)
            budget -= count
        self._waiting.extendleft(reversed(skipped))

    def _start(
        self,
        request: Request,
        hits: list[int],
        wanted: int,
        local: int,
        external: int,
        by_other: bool,
    ) -> None:
        """Give a request its blocks, and have what is external loaded."""
        self._pool.touch(hits)
        request.table += [*hits, *self._pool.take(max(wanted, 0))]
        if external:
            chosen = self._by_other.add if by_other else self._by_other.discard
            chosen(request.request_id)
        self._allocated(request, local // BLOCK_TOKENS, external)
        request.computed = local + external
        if external:
            if not by_other:
                self._world.counts["table_loads"] += 1
            request.awaits_load, request.by_tierd, request.own = True, not by_other, local
            request.loading_since_s = self._world.loop.time()

    def _join(self, request: Request, count: int, step: Step) -> None:
        self._running.append(request)
        if request.by_tierd:
            self._world.counts["table_saved_tokens"] += max(0, request.computed - request.own)
            request.by_tierd = False
        if request.known and request.preempted:
            step.resumed.add(request.request_id)
            step.cached.append((request.request_id, list(request.table), request.computed))
        else:
            step.new.append(
                SimpleNamespace(
                    req_id=request.request_id,
                    block_ids=(list(request.table),),
                    num_computed_tokens=request.computed,
                )
            )
        request.known, request.preempted = True, False
        self._scheduled(request, count, step)

    def _take_loaded(self, request: Request) -> bool:
        """Whether a load has ended; the request goes on with what it brought."""
        if request.request_id not in self._received:
            if self._world.loop.time() - request.loading_since_s > LOAD_S_MAX:
                self._world.fail("a load never ends")
            return False
        self._received.discard(request.request_id)
        request.awaits_load = False
        if not request.load_failed or request.computed:
            self._pool.cache(request.table, request.block_hashes, request.computed // BLOCK_TOKENS)
        else:
            self._pool.give_back(request.table)
            request.table = []
        request.load_failed = False
        return True

    # --- a step ---------------------------------------------------------------------

    def step(self) -> bool:
        """Schedule, compute, and take what came of it; whether any token was computed."""
        if self._resets.random() < self._reset_chance:
            self.reset()
        if self._resets.random() < self._reset_chance / RESETS_PER_TOUCH:
            self.touch()
        step = self._schedule()
        tables = {name: request.table for name, request in self._requests.items()}
        output = step.output(tables, resolves=self._resolves)
        metadata = self._ask(self._scheduler.build_connector_meta, output)
        for request, _, count in step.parts:
            request.computed += count
        finished, invalid, progress = self._execute(step, metadata)
        failed = self._take_invalid(invalid, step)
        for request, first, count in step.parts:
            if request in failed or request.aborted:
                continue
            if first + count == request.num_tokens:
                request.generate()
                if request.num_tokens >= request.tokens_max:
                    self._end(request)
        self._ask(
            self._scheduler.update_connector_output,
            SimpleNamespace(
                # A set in vLLM, whose order is another one in each process.
                finished_recving=sorted(finished),
                invalid_block_ids=invalid,
                kv_connector_worker_meta=progress,
            ),
        )
        for request_id in sorted(finished):
            request = self._requests[request_id]
            self._received.add(request_id)
            if request.aborted:
                self._forget(request)
        return bool(step.parts)

    def _execute(self, step: Step, metadata: Any) -> tuple[set[str], set[int], Any]:
        for worker in self._workers:
            if self._always_fences or step.preempted:
                self._ask(worker.handle_preemptions, metadata)
            self._ask(worker.bind_connector_metadata, metadata)
            self._ask(worker.start_load_kv, None)
        self.other.start()
        self._forward(step)
        finished, invalid = self.other.take_finished()
        progress: Any = None
        for worker in self._workers:
            if step.parts:
                self._ask(worker.wait_for_save)
            _, received = self._ask(worker.get_finished, set())
            invalid |= worker.get_block_ids_with_load_errors()
            told = worker.build_connector_worker_meta()
            progress = told if progress is None else progress.aggregate(told) if told else progress
            worker.clear_connector_metadata()
            for request_id in received or ():
                count = self._received_by_rank.get(request_id, 0) + 1
                self._received_by_rank[request_id] = count
                if count == len(self._workers):
                    del self._received_by_rank[request_id]
                    finished.add(request_id)
        return finished, invalid, progress

    def _forward(self, step: Step) -> None:
        pause(self._random.expovariate(1 / self._ways.step_s))
        for request, first, count in step.parts:
            for position in range(first, first + count):
                block, place = divmod(position, BLOCK_TOKENS)
                at = request.table[block] * BLOCK_BYTES + place * TOKEN_BYTES
                for rank, memory in enumerate(self._memories):
                    kv = self._model.kv(rank, request.states[position])
                    memory.bytes[at : at + TOKEN_BYTES] = kv
            if self._random.random() < 0.2:
                pause(self._random.expovariate(1 / self._ways.step_s))
        for request, first, count in step.parts:
            self._look(request, first + count)
        self._world.counts["table_tokens"] += sum(count for _, _, count in step.parts)

    def _look(self, request: Request, tokens: int) -> None:
        """Attention reads all KV of a request."""
        full, rest = divmod(tokens, BLOCK_TOKENS)
        for rank, memory in enumerate(self._memories):
            for index in range(full):
                kv = self._model.block(rank, request.states, index)
                if request.table[index] in self._pool.lossy:
                    kv = nearly(kv)
                if memory.view(request.table[index]) != kv:
                    self._wrong(request, rank, index)
            for place in range(rest):
                kv = self._model.kv(rank, request.states[full * BLOCK_TOKENS + place])
                at = place * TOKEN_BYTES
                if memory.view(request.table[full])[at : at + TOKEN_BYTES] != kv:
                    self._wrong(request, rank, full)

    def _wrong(self, request: Request, rank: int, index: int) -> None:
        self._world.fail(
            f"{self._process.name} computes with wrong KV: block {index} of {request.request_id}, "
            f"rank {rank}"
        )

    def _take_invalid(self, invalid: Iterable[int], step: Step) -> list[Request]:
        """Have blocks computed that a load did not fill, as vLLM's policy "recompute" does."""
        bad, failed = set(invalid), []
        for request in self._requests.values():
            held = request.table[: _blocks_for(request.computed)] if request.awaits_load else ()
            first = next((i for i, block in enumerate(held) if block in bad), None)
            if first is not None:
                request.computed = first * BLOCK_TOKENS
                request.load_failed = True
                self._world.counts["table_failed_loads"] += 1
                failed.append(request)
        return failed

    @property
    def errors(self) -> int:
        """What the connector has caught on all sides."""
        return sum(each.boundary.errors for each in (*self._workers, self._scheduler))

    def check_errors(self) -> None:
        """The connector has caught what was injected, and nothing else."""
        caught = self.errors
        if caught > len(self._trouble.struck):
            self._world.fail(f"{self._process.name}: {caught} errors, {self._trouble.struck}")

    def close(self) -> None:
        """The engine ends in order."""
        for each in (*self._workers, self._scheduler):
            each.shutdown()


def _blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def _useful(request: Request) -> int:
    """Blocks of a request that a cache may bring: one token must be left to compute."""
    return (request.num_tokens - 1) // BLOCK_TOKENS
