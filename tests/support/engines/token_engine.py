"""vLLM's scheduler in miniature, with both halves of the real connector.

The KV of a token is a function of all tokens up to it. It lies in pages that are allocated and
evicted as in vLLM, and the next token is computed from the bytes of the pages: one wrong byte gives
another answer. A second connector loads for some requests, as under vLLM's MultiConnector. Nothing
runs in the background: the mover works when `step` lets it.
"""

from __future__ import annotations

import functools
import hashlib
import random
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np

from tests.support.engines import fake_vllm
from tests.support.engines.connector_bench import BLOCK_TOKENS, ROOT, namespace
from tests.support.engines.fake_client import FakeClient, FakeDaemon
from tests.support.engines.jobs_rig import close_descriptors
from tests.support.engines.layers import SteppedCondition
from tierd.device.engine_host import HostExport
from tierd_connectors.vllm.worker import memory
from tierd_connectors.vllm.worker.layout import TensorView, blocks_of

LAYERS = 2
TOKEN_BYTES = 16
PAGE_BYTES = BLOCK_TOKENS * TOKEN_BYTES
BLOCK_BYTES = LAYERS * PAGE_BYTES
STEPS_MAX = 600
"""Steps after which an unfinished request counts as hanging."""

SYNC, ASYNC = "sync", "async"

OWN, THEIRS = b"\0", b"\1"
"""The last byte of a token's KV: whether it depends on anything that another connector has loaded.
The next token loses it, as it loses the small differences of another engine's KV."""

module = fake_vllm.connector_module()


class HandMover(module.Mover):  # type: ignore[misc,name-defined]  # the module is imported late
    """A mover without a thread: it works only in `TokenEngine.turn`."""

    def start(self) -> None:
        self._in_use = True


def kv_of(tokens: Sequence[int], weights: int = 0) -> list[bytes]:
    """Each token's KV in each layer, one after the other."""
    return _kv_of(tuple(tokens), weights)


@functools.lru_cache(maxsize=1 << 14)
def _kv_of(tokens: tuple[int, ...], weights: int) -> list[bytes]:
    state, found = bytes(weights), []
    for token in tokens:
        state = hashlib.sha256(state + token.to_bytes(4, "little")).digest()
        found.append(state)
    return [kv[: LAYERS * TOKEN_BYTES - 1] + OWN for kv in found]


def hashes_of(tokens: Sequence[int]) -> list[bytes]:
    return _hashes_of(tuple(tokens[: len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS]))


@functools.lru_cache(maxsize=1 << 14)
def _hashes_of(tokens: tuple[int, ...]) -> list[bytes]:
    parent, found = ROOT, []
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        parent = hashlib.sha256(
            parent + repr(tokens[start : start + BLOCK_TOKENS]).encode()
        ).digest()
        found.append(parent)
    return found


def answer(kv: Sequence[bytes]) -> int:
    """The token that follows from KV."""
    read = b"".join(one[:-1] for one in kv)
    return int.from_bytes(hashlib.sha256(read).digest()[:2], "little")


def truth(prompt: Sequence[int], count: int, weights: int = 0) -> list[int]:
    """The answer of an engine without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(answer(kv_of(tokens, weights)))
    return tokens[len(prompt) :]


@dataclass(eq=False)
class Request:
    request_id: str
    prompt: list[int]
    count: int
    others: str = ""
    """Whether the second connector has this prompt, and how it loads."""
    spoilt: bool = False
    """Whether the load is wrong; it reports that if it loads within the step."""
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    table: list[int] = field(default_factory=list)
    status: str = "waiting"
    preempted: bool = False
    own: int = 0
    """Tokens that the engine had in its cache when it asked tierd to load the following ones."""
    by_tierd: bool = False
    arrival_time: float = 0.0
    lora_request: None = None
    kv_transfer_params: None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        return hashes_of(self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]


class Blocks:
    """A request's blocks in the form that vLLM passes to connectors."""

    def __init__(self, table: list[int]) -> None:
        self._table = list(table)

    def get_block_ids(self) -> tuple[list[int]]:
        return (list(self._table),)


class Pool:
    """Blocks by use and by hash. Block 0 is the null block; freed blocks can still be found."""

    def __init__(self, count: int) -> None:
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count))
        self.uses: dict[int, int] = dict.fromkeys(range(count), 0)
        self.cached: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}

    def hits(self, hashes: Sequence[bytes]) -> list[int]:
        found = []
        for name in hashes:
            if name not in self.cached:
                break
            found.append(self.cached[name])
        return found

    def get_cached_block(self, name: bytes, groups: Sequence[int]) -> list[int] | None:
        assert list(groups) == [0]
        return [self.cached[name]] if name in self.cached else None

    def touch(self, block: int) -> None:
        self.free.pop(block, None)
        self.uses[block] += 1

    def take(self) -> int:
        block, _ = self.free.popitem(last=False)
        name = self.hash_of.pop(block, None)
        if name is not None:
            del self.cached[name]
        self.uses[block] = 1
        return block

    def give(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.uses[block] -= 1
            if not self.uses[block]:
                self.free[block] = None

    def cache(self, block: int, name: bytes) -> None:
        if name not in self.cached and block not in self.hash_of:
            self.cached[name] = block
            self.hash_of[block] = name


class TokenEngine:
    """An engine with a daemon that copies for it, unless `transfer` is "shm"."""

    def __init__(
        self,
        daemon: FakeDaemon,
        *,
        blocks: int = 18,
        transfer: str = "shm",
        layerwise: bool = False,
        seed: int = 0,
    ) -> None:
        self.daemon = daemon
        self.chance = random.Random(seed)
        self.weights = 0
        self.memory = HostExport(LAYERS * blocks * PAGE_BYTES)
        array = np.frombuffer(self.memory.view, np.uint8)
        self.pages = array.reshape(LAYERS, blocks, BLOCK_TOKENS, TOKEN_BYTES)
        self.pool = Pool(blocks)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.arrived: set[str] = set()
        self.failed: set[str] = set()
        self.preempted: list[str] = []
        self.preemptions = 0
        self.counted: dict[str, float] = {}
        self.saved_tokens = 0
        """Tokens that were not computed because tierd had loaded them."""
        self._others: list[tuple[Request, int, int]] = []
        names = [f"layer{i}" for i in range(LAYERS)]
        kv = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=names)])
        config = fake_vllm.config(layerwise=layerwise, transfer=transfer)
        connector: Any = module.TierdConnector
        self.worker = connector(config, fake_vllm.KVConnectorRole.WORKER, kv)
        self.worker._pool.memory = self.memory
        self.scheduler = connector(config, fake_vllm.KVConnectorRole.SCHEDULER, kv)
        self.scheduler.bind_gpu_block_pool(self.pool)
        views = [
            TensorView(
                layer.ctypes.data,
                self.memory.address,
                layer.shape,
                layer.strides,
                1,
                self.memory,
            )
            for layer in self.pages
        ]
        self._start(views, blocks)

    def _start(self, views: list[TensorView], blocks: int) -> None:
        shape = blocks_of(views, blocks)
        owned = SimpleNamespace(device=SimpleNamespace(type="cpu"), numel=lambda: 0)
        caches = {f"layer{i}": owned for i in range(LAYERS)}
        facts: dict[str, Any] = {
            "check_engine": lambda *_: None,
            "kv_views": lambda *_: views,
            "kv_blocks": lambda *_: shape,
            "fingerprint_of": lambda *_: None,
            "namespace_of": lambda *_, **__: namespace(block_bytes=BLOCK_BYTES),
        }
        instead: dict[str, Any] = {
            "Client": lambda *_, **__: FakeClient(self.daemon),
            "Mover": HandMover,
            "hash_root_in_use": lambda: ROOT,
        }
        with (
            mock.patch.dict(sys.modules, fake_vllm.ranks()),
            mock.patch.multiple(memory, **facts),
            mock.patch.multiple(module, **instead),
        ):
            self.worker.register_kv_caches(caches)
            handshake = self.worker.get_handshake_metadata()
            self.scheduler.set_xfer_handshake_metadata({0: handshake})
        if self.worker._worker.layerwise is not None:
            self.worker._worker.layerwise._cond = SteppedCondition(cast(Any, self))

    def close(self) -> None:
        """The engine ends."""
        mover = self.worker._worker.mover
        if mover is not None:
            mover._give_up()
        self.worker.shutdown()
        self.scheduler.shutdown()
        if mover is not None:
            close_descriptors(mover)
        self.memory._close_fd()

    @property
    def errors(self) -> int:
        return int(self.worker.boundary.errors + self.scheduler.boundary.errors)

    # Requests

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        with mock.patch.object(module, "hash_root_in_use", return_value=ROOT):
            self.scheduler.on_new_request(request)

    def run(self) -> None:
        """Make steps until all requests have ended."""
        for _ in range(STEPS_MAX):
            if not self.requests:
                break
            self.step()
        assert not self.requests, f"{sorted(self.requests)} hang"
        assert len(self.pool.free) == len(self.pool.uses) - 1, "blocks are lost"
        for _ in range(50):
            self.step()

    def abort(self, request: Request) -> None:
        """The client has disconnected."""
        if request.status != "aborted" and request.request_id in self.requests:
            self._finish(request)

    def replace_weights(self) -> None:
        """Replace the weights and reset all caches, as a user does. Nothing may be running."""
        assert not self.requests
        self.pool.cached.clear()
        self.pool.hash_of.clear()
        self.scheduler.reset_cache()
        self.weights += 1

    # A step

    def step(self) -> None:
        for side in (self.scheduler, self.worker):
            stats = side.get_kv_connector_stats()
            for name, value in (stats.data if stats is not None else {}).items():
                self.counted[name] = self.counted.get(name, 0) + value
        output, batch = self._schedule()
        meta = self.scheduler.build_connector_meta(output)
        result = self._work(meta, batch)
        self._update(batch, *result)

    def turn(self) -> None:
        """Let the mover do its work, and the daemon a part of what it was asked for."""
        if not self.daemon.copying:
            for job in self.daemon.jobs:
                for _ in range(self.chance.randrange(4)):
                    if not job.over:
                        (job.fail if self.chance.random() < 0.02 else job.advance)()
            self.daemon.jobs = [job for job in self.daemon.jobs if not job.over]
        mover = self.worker._worker.mover
        if mover is not None:
            mover._wake()
            if not mover._turn():
                mover._recover()

    elsewhere = turn

    def _schedule(self) -> tuple[SimpleNamespace, list[tuple[Request, int, int]]]:
        new: list[Request] = []
        cached: list[Request] = []
        given: dict[str, list[int]] = {}
        batch: list[tuple[Request, int, int]] = []
        for request in list(self.running):
            if request not in self.running:
                continue
            count = min(self.chance.randint(3, 9), request.num_tokens - request.computed)
            table = self._allocate(request, count)
            if table is not None:
                given[request.request_id] = table
                cached.append(request)
                batch.append((request, request.computed, count))
        batch = [entry for entry in batch if entry[0] in self.running]
        cached = [request for request in cached if request in self.running]
        resumed: list[Request] = []
        for request in list(self.requests.values()) if not self.preempted else ():
            if request.status in ("waiting", "loading") and len(self.running) < 4:
                count = self._admit(request)
                if count:
                    batch.append((request, request.computed, count))
                    (resumed if request.preempted else new).append(request)
        preempted, self.preempted = self.preempted, []
        data = SimpleNamespace(
            req_ids=[request.request_id for request in cached + resumed],
            resumed_req_ids={request.request_id for request in resumed},
            new_block_ids=[
                ([*given[r.request_id]],) if given.get(r.request_id) else None
                for r in cached + resumed
            ],
            num_computed_tokens=[request.computed for request in cached + resumed],
        )
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=r.request_id, num_computed_tokens=r.computed) for r in new
            ],
            scheduled_cached_reqs=data,
            num_scheduled_tokens={r.request_id: count for r, _, count in batch},
            total_num_scheduled_tokens=sum(count for _, _, count in batch),
            preempted_req_ids=preempted,
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda name: (list(self.requests[name].table),)
            ),
        )
        return output, batch

    def _allocate(self, request: Request, count: int) -> list[int] | None:
        """The new blocks of a running request; None if it was preempted for lack of blocks."""
        need = -(-(request.computed + count) // BLOCK_TOKENS) - len(request.table)
        while need > len(self.pool.free):
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return None
        blocks = [self.pool.take() for _ in range(need)]
        request.table += blocks
        self._cache(request, request.computed + count)
        return blocks

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        self.pool.give(request.table)
        request.table, request.computed = [], 0
        request.status, request.preempted = "waiting", True
        self.preempted.append(request.request_id)

    def _cache(self, request: Request, computed: int) -> None:
        names = request.block_hashes
        for index in range(min(computed // BLOCK_TOKENS, len(names))):
            self.pool.cache(request.table[index], names[index])

    def _admit(self, request: Request) -> int:
        """Tokens that a waiting request computes in this step; 0 if it keeps waiting."""
        if request.status == "loading":
            if request.request_id not in self.arrived:
                return 0
            self.arrived.discard(request.request_id)
            request.status = "waiting"
            if request.request_id in self.failed and not request.computed:
                self.pool.give(request.table)
                request.table = []
            else:
                self._cache(request, request.computed)
            self.failed.discard(request.request_id)
        if request.computed:
            return self._begin(request, [], 0, "")
        hits = self.pool.hits(request.block_hashes[: (request.num_tokens - 1) // BLOCK_TOKENS])
        local = len(hits) * BLOCK_TOKENS
        theirs = request.num_tokens - 1 - local if request.others else 0
        external, _ = self.scheduler.get_num_new_matched_tokens(request, local)
        if external is None:
            return 0
        if theirs > 0:
            return self._begin(request, hits, theirs, request.others)
        return self._begin(request, hits, external, "tierd" if external else "")

    def _begin(self, request: Request, hits: list[int], external: int, loader: str) -> int:
        start = request.computed or len(hits) * BLOCK_TOKENS
        computed = start + external
        count = min(self.chance.randint(3, 9), request.num_tokens - computed)
        if loader in ("tierd", ASYNC):
            count = 0
        table = request.table + hits
        need = -(-(computed + count) // BLOCK_TOKENS) - len(table)
        # As in vLLM: a load holds its blocks without progress, so it must leave room for others.
        reserved = 0 if count else self._reserved() + self._lacks(request) - need
        free = len(self.pool.free) - sum(block in self.pool.free for block in hits)
        if need + reserved > free:
            return 0
        for block in hits:
            self.pool.touch(block)
        request.table = table + [self.pool.take() for _ in range(need)]
        # vLLM's MultiConnector passes these blocks to the other connectors, with zero tokens.
        told = external if loader == "tierd" else 0
        self.scheduler.update_state_after_alloc(request, Blocks(request.table), told)
        request.computed = computed
        if loader == "tierd":
            request.by_tierd, request.own = True, start
        elif loader:
            request.by_tierd = False
        if loader in (SYNC, ASYNC):
            self._others.append((request, start, computed))
        if count == 0:
            request.status = "loading"
            return 0
        request.status = "running"
        self.running.append(request)
        if request.by_tierd:
            self.saved_tokens += max(0, request.computed - request.own)
            request.by_tierd = False
        if loader != SYNC:
            self._cache(request, computed + count)
        return count

    def _lacks(self, request: Request) -> int:
        """Blocks that a request still needs to finish."""
        return -(-(len(request.prompt) + request.count) // BLOCK_TOKENS) - len(request.table)

    def _reserved(self) -> int:
        waiting = [r for r in self.requests.values() if r.table and r not in self.running]
        return sum(self._lacks(request) for request in waiting)

    # The worker

    def _work(
        self, meta: Any, batch: list[tuple[Request, int, int]]
    ) -> tuple[set[str], set[int], dict[str, int]]:
        worker, others, invalid, arrived = self.worker, self._others, set(), set()
        self._others = []
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        for request, start, end in others:
            self._load_others(request, start, end)
            if request.others == ASYNC:
                arrived.add(request.request_id)
            elif request.spoilt:
                invalid |= set(request.table[start // BLOCK_TOKENS :])
        sampled = {}
        for layer in range(LAYERS):
            worker.wait_for_layer_load(f"layer{layer}")
        # The mover works here as it would during the forward pass.
        if self.chance.random() < 0.3:
            self.turn()
        for request, start, count in batch:
            before = self._read(request.table, start)
            origin = THEIRS if any(one[-1:] == THEIRS for one in before) else OWN
            kv = kv_of(request.tokens, self.weights)
            self._write(request.table, kv, start, start + count, origin)
            if start + count == request.num_tokens:
                sampled[request.request_id] = answer(self._read(request.table, start + count))
        worker.start_load_kv(None)
        worker.wait_for_save()
        if self.chance.random() < 0.6:
            self.turn()
        _, finished = worker.get_finished(set())
        invalid |= worker.get_block_ids_with_load_errors()
        progress = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        output = SimpleNamespace(
            finished_recving=arrived | set(finished or ()),
            invalid_block_ids=invalid,
            kv_connector_worker_meta=progress,
        )
        self._connector_output = output
        return output.finished_recving, invalid, sampled

    def _load_others(self, request: Request, start: int, end: int) -> None:
        tokens = [t + 1 for t in request.tokens] if request.spoilt else request.tokens
        self._write(request.table, kv_of(tokens, self.weights), start, end, THEIRS)

    def _write(
        self, table: list[int], kv: list[bytes], start: int, end: int, origin: bytes
    ) -> None:
        for at in range(start, end):
            block, slot = table[at // BLOCK_TOKENS], at % BLOCK_TOKENS
            whole = kv[at][:-1] + origin
            for layer in range(LAYERS):
                part = whole[layer * TOKEN_BYTES : (layer + 1) * TOKEN_BYTES]
                self.pages[layer, block, slot] = np.frombuffer(part, np.uint8)

    def _read(self, table: list[int], end: int) -> list[bytes]:
        return [
            b"".join(
                self.pages[layer, table[at // BLOCK_TOKENS], at % BLOCK_TOKENS].tobytes()
                for layer in range(LAYERS)
            )
            for at in range(end)
        ]

    # Results

    def _update(
        self,
        batch: list[tuple[Request, int, int]],
        finished: set[str],
        invalid: set[int],
        sampled: dict[str, int],
    ) -> None:
        again = self._invalidate(invalid, {request for request, _, _ in batch})
        for request, start, count in batch:
            if request in again or request.request_id not in self.requests:
                continue
            request.computed = start + count
            if request.request_id in sampled:
                request.tokens.append(sampled[request.request_id])
                if len(request.output) == request.count:
                    self._finish(request)
        self.scheduler.update_connector_output(self._connector_output)
        for name in finished:
            request = self.requests[name]
            assert request.status in ("loading", "aborted"), "reported twice, as vLLM asserts"
            if request.status == "loading":
                self.arrived.add(name)
            else:
                self._free(request)

    def _invalidate(self, invalid: set[int], batch: set[Request]) -> set[Request]:
        """Truncate requests before these blocks; returns the running ones among them."""
        hit = set()
        for request in self.requests.values():
            loading = request.status == "loading"
            if not loading and request not in batch:
                continue
            filled = -(-request.computed // BLOCK_TOKENS)
            for index, block in enumerate(request.table[:filled]):
                if block in invalid:
                    request.computed = index * BLOCK_TOKENS
                    if loading:
                        self.failed.add(request.request_id)
                    else:
                        # The second connector no longer has it.
                        request.others = ""
                        hit.add(request)
                    break
        return hit

    def _finish(self, request: Request) -> None:
        self.scheduler.request_finished_all_groups(request, (list(request.table),))
        if request in self.running:
            self.running.remove(request)
        if request.status == "loading" and request.request_id not in self.arrived:
            request.status = "aborted"
        else:
            self.arrived.discard(request.request_id)
            self._free(request)

    def _free(self, request: Request) -> None:
        self.pool.give(request.table)
        del self.requests[request.request_id]


def right_blocks(histories: Iterable[Sequence[int]], weights: int = 0) -> dict[bytes, bytes]:
    """The right slot content for each block of these tokens."""
    known = {}
    for tokens in histories:
        kv = kv_of(tokens, weights)
        for index, name in enumerate(hashes_of(tokens)):
            part = kv[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
            known[name] = b"".join(
                one[layer * TOKEN_BYTES : (layer + 1) * TOKEN_BYTES]
                for layer in range(LAYERS)
                for one in part
            )
    return known
