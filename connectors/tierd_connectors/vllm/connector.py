"""TierdConnector: attaches a vLLM engine to the tierd daemon of its node.

Start the engine with

    --prefix-caching-hash-algo sha256_cbor
    --kv-transfer-config '{"kv_connector": "TierdConnector", "kv_role": "kv_both"}'

vLLM makes one object in its scheduler and one in each worker. This module translates vLLM's hooks:
`scheduler` makes the decisions, `worker.side` carries them out, and `worker.memory` knows where the
engine's memory lies.

All loads are asynchronous; they may be reported early (`worker.layerwise`). A store reads the
engine's blocks after their step, possibly after their request has ended. The connector does not
hold the blocks for that: every step names the blocks that get a new owner, and a store that read
such a block is discarded (`Queues.fence`). So a request's end frees its blocks at once, as it does
without a connector.

Run with vLLM 0.29 to 0.32; for 0.33 only its source was read.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from tierd.client import Client
from tierd.errors import ConfigError
from tierd_connectors.common.guard import Boundary, guarded, nothing
from tierd_connectors.common.work import RankInfo, StepWork
from tierd_connectors.vllm.admission import adapter_of, names_its_kv
from tierd_connectors.vllm.hints import HintReader
from tierd_connectors.vllm.identity.calls import Callers
from tierd_connectors.vllm.identity.namespace import (
    HASH_SCHEME_UNTAGGED,
    UnsupportedEngineError,
    hash_root_in_use,
)
from tierd_connectors.vllm.messages import TierdHandshake, TierdMetadata, TierdProgress
from tierd_connectors.vllm.options import Transfer, parse
from tierd_connectors.vllm.scheduler import SchedulerSide
from tierd_connectors.vllm.stats import TierdPromMetrics, TierdStats
from tierd_connectors.vllm.steps import scheduled_requests
from tierd_connectors.vllm.worker.export import HostPool
from tierd_connectors.vllm.worker.memory import RankMemory
from tierd_connectors.vllm.worker.mover import Mover
from tierd_connectors.vllm.worker.side import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from tierd.types import Namespace

logger = logging.getLogger("vllm.tierd")

START_WAIT_S = 0.2
"""Wait at start-up, so that the log can say whether a daemon is running."""

DRAIN_S = 0.5
"""Time for queued stores to finish when the engine ends."""


class TierdConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's hooks in vLLM's order: first the worker's, then the scheduler's."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_role != "kv_both":
            raise ConfigError(f"kv_role is {transfer.kv_role!r}; set it to 'kv_both'")
        self.boundary = Boundary()
        self._options = parse(transfer.kv_connector_extra_config)
        self._errors_reported = 0
        self._scheduler: SchedulerSide | None = None
        self._worker = WorkerSide(self.boundary)
        self._info = RankInfo(None, "its KV caches were never registered")
        self._pool = HostPool()
        self._root_checked = False
        self._untagged = False
        self._own_cache: BlockPool | None = None
        self._hints = HintReader()
        self._callers: Callers | None = None
        if role == KVConnectorRole.SCHEDULER and transfer.kv_load_failure_policy != "recompute":
            # vLLM reads the policy after it has made its connector. With "fail", a failed load
            # would fail the user's request.
            transfer.kv_load_failure_policy = "recompute"
            logger.info('tierd: kv_load_failure_policy set to "recompute"')

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, object]) -> bool:
        """Whether CUDA graphs must leave out attention layers: `layerwise` waits in them."""
        return bool(extra_config.get("layerwise"))

    @property
    def requires_kv_delivery(self) -> bool:
        """False: the engine recomputes a block that the cache does not store."""
        return False

    # Worker

    @guarded(nothing)
    def get_mem_pool_context(self) -> AbstractContextManager[object] | None:
        """Return the context in which the engine allocates its KV; None: the default."""
        on_cpu = importlib.import_module("vllm.platforms").current_platform.is_cpu()
        if self._options.transfer is not Transfer.HOST_IPC or not on_cpu:
            return None
        return self._pool.context()

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Record where the blocks lie, and start the copying thread."""
        self._info = RankInfo(None, "an error, see its log")
        self._start_worker(kv_caches)

    @guarded(nothing)
    def _start_worker(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        options = self._options
        try:
            memory = RankMemory(self._vllm_config, self._kv_cache_config, kv_caches, options)
        except UnsupportedEngineError as error:
            self._info = RankInfo(None, str(error))
            return
        if memory.on_gpu:
            logger.warning(
                "tierd: this release has not been run on a GPU yet: try `make gpu-test`, and see "
                "docs/gpus.md"
            )
        layerwise = memory.layerwise()
        mover = Mover(
            Client(options.socket, name=f"vllm-worker-{memory.index}"),
            memory.namespace,
            memory.pages(),
            memory.index,
            self.boundary,
            memory.order(),
            layerwise,
            options.loras,
        )
        self._worker.start(mover, layerwise, memory.namespace, memory.weights)
        mover.attach(memory.ways(self._pool))
        self._info = RankInfo(memory.namespace)
        if not memory.on_gpu:
            # Calls from other threads would break a graph capture. On a GPU, the first step shows
            # that capturing has ended.
            mover.start()

    def get_handshake_metadata(self) -> TierdHandshake:
        """Return this worker's namespace for the scheduler."""
        return TierdHandshake(self._info)

    def handle_preemptions(self, kv_connector_metadata: TierdMetadata) -> None:
        """Fence the blocks that this step hands out, before they are overwritten."""
        self._worker.fence(kv_connector_metadata.work)

    def bind_connector_metadata(self, connector_metadata: TierdMetadata) -> None:
        """Take the step's work before its forward pass, and fence the blocks that it hands out."""
        super().bind_connector_metadata(connector_metadata)
        # This fences too: not every version calls handle_preemptions in every step.
        self._worker.begin_step(connector_metadata.work)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:
        """Queue this step's loads."""
        self._worker.begin_loads(self._get_connector_metadata().work)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """With the setting `layerwise`, wait for this layer's part of reported loads."""
        if self._worker.layerwise is not None:
            self._worker.layerwise.wait_layer(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: object,
    ) -> None:
        """Do nothing: blocks are stored whole, after the step."""

    def wait_for_save(self) -> None:
        """Queue this step's stores after its forward pass."""
        self._worker.end_step(self._get_connector_metadata().work)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads have ended, each exactly once."""
        idle = self.has_connector_metadata() and self._get_connector_metadata().work.idle
        return None, self._worker.take_finished(idle=idle) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of the loads just reported that hold no KV."""
        return self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> TierdProgress | None:
        """Return changes in early reported loads, and whether weights changed; None: neither."""
        changes, moved = self._worker.take_changes()
        return TierdProgress(changes, moved) if changes or moved else None

    # Scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Keep the engine's block pool, to look up the engine's own cache."""
        self._own_cache = gpu_block_pool

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, TierdHandshake]) -> None:
        """Take the workers' namespaces from a vLLM whose handshake has no pipeline ranks."""
        self.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): handshake for rank, handshake in metadata.items()}
        )

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], TierdHandshake]
    ) -> None:
        """Take the workers' namespaces. The connector is off unless every worker has one."""
        self._start_scheduler(metadata)
        if self._scheduler is None:
            self.boundary.switch_off("the connector's start failed, see the log")

    @guarded(nothing)
    def _start_scheduler(self, metadata: Mapping[tuple[int, int], TierdHandshake]) -> None:
        namespaces: list[Namespace] = []
        for rank, handshake in sorted(metadata.items()):
            if not isinstance(handshake, TierdHandshake):
                # vLLM's MultiConnector passes on the handshake of one connector only.
                self.boundary.switch_off(
                    "MultiConnector passed on another connector's handshake instead of tierd's"
                )
                return
            if handshake.info.namespace is None:
                self.boundary.switch_off(f"worker {rank} (pp, tp): {handshake.info.refusal}")
                return
            namespaces.append(handshake.info.namespace)
        parallel = self._vllm_config.parallel_config
        ranks = parallel.pipeline_parallel_size * parallel.tensor_parallel_size
        backend = getattr(parallel, "distributed_executor_backend", None)
        if backend == "external_launcher" and ranks > 1:
            # Answers arrive at different times, so the schedulers would decide differently.
            self.boundary.switch_off(
                f"distributed_executor_backend is 'external_launcher' with {ranks} workers: each "
                "has its own scheduler, and they could decide differently; use 'mp' or 'ray'"
            )
            return
        if len(namespaces) != ranks:
            self.boundary.switch_off(f"{len(namespaces)} of {ranks} workers gave a namespace")
            return
        self._untagged = namespaces[0].hash_scheme == HASH_SCHEME_UNTAGGED
        client = Client(self._options.socket, name="vllm-scheduler", map_segments=False)
        side = SchedulerSide(
            client,
            namespaces,
            deadline_ms=self._options.prefetch_deadline_ms,
            boundary=self.boundary,
            loras=self._options.loras,
        )
        self.boundary.start_over = side.start_over
        self._scheduler = side
        self._callers = Callers(self._touched)
        executor = getattr(parallel, "distributed_executor_backend", None)
        side.untouched = self._callers.watch(executor)
        client.wait(START_WAIT_S)
        logger.info(
            "tierd: namespace %s, %d rank(s), blocks of %d tokens and %d bytes per rank, %s, %s",
            namespaces[0].digest.hex(),
            ranks,
            namespaces[0].block_tokens,
            namespaces[0].block_bytes,
            self._options.socket,
            "connected" if client.connected else "no daemon yet",
        )

    def _touched(self, how: str) -> None:
        if not self._try_touched(how):
            self.boundary.switch_off(
                "a call to the engine's workers may have changed the KV that it computes"
            )

    @guarded(lambda: False)
    def _try_touched(self, how: str) -> bool:
        if self._scheduler is not None:
            self._scheduler.touched(how)
        return True

    @guarded(nothing)
    def on_new_request(self, request: Request) -> None:
        """Start to look up the request's prefix."""
        adapter = adapter_of(request.lora_request, self._options.loras)
        if self._scheduler is None or self.boundary.off or adapter is None:
            return
        if not self._serves(request):
            return
        if not self._root_checked:
            self._check_root()
        if not self.boundary.off:
            params = getattr(request, "kv_transfer_params", None)
            own = self._blocks_in_own_cache(request)
            self._scheduler.add(request, self._hints.read(params), adapter, own)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens that can be loaded beyond the engine's own hit, and whether the load
        is asynchronous; None tokens: ask again in the next step."""
        if self._scheduler is None or self.boundary.off:
            return 0, False
        tokens = self._scheduler.matched_tokens(request.request_id, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plan the load of the request's external tokens into its newly allocated blocks.

        Under vLLM's MultiConnector another connector may load into these blocks. This call is then
        the only notice of it.
        """
        if self._scheduler is None:
            return
        planned = self._plan_load(request.request_id, blocks, num_external_tokens)
        if num_external_tokens and not planned:
            table = blocks.get_block_ids()[0]
            self._scheduler.fail_load(request.request_id, table, num_external_tokens)

    @guarded(lambda: False)
    def _plan_load(self, request_id: str, blocks: KVCacheBlocks, external_tokens: int) -> bool:
        assert self._scheduler is not None
        self._scheduler.allocated(request_id, blocks.get_block_ids()[0], external_tokens)
        return True

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[str, int]:
        """Return all tokens as host hits: blocks from storage pass through host memory."""
        if num_external_tokens == 0:
            return {}
        sources = importlib.import_module("vllm.v1.metrics.cache_hit_source")
        return {sources.CacheHitSource.HOST: num_external_tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> TierdMetadata:
        """Return this step's work for the workers."""
        if self._scheduler is None:
            return TierdMetadata(StepWork())
        idle = scheduler_output.total_num_scheduled_tokens == 0
        work = self._build(scheduler_output, idle)
        return TierdMetadata(self._scheduler.hand_over(work, idle=idle))

    @guarded(nothing)
    def _build(self, scheduler_output: SchedulerOutput, idle: bool) -> StepWork | None:
        assert self._scheduler is not None
        steps = scheduled_requests(scheduler_output)
        preempted = scheduler_output.preempted_req_ids or ()
        return self._scheduler.build(steps, preempted, idle=idle)

    @guarded(nothing)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the loads that every rank has finished, and reports of changed weights."""
        if self._scheduler is not None:
            progress = connector_output.kv_connector_worker_meta
            reported = isinstance(progress, TierdProgress)
            self._scheduler.finished_loads(
                connector_output.finished_recving or (),
                connector_output.invalid_block_ids,
                progress.finishing if reported else None,
            )
            if reported and progress.moved:
                logger.warning(
                    "tierd: the engine's weights were replaced: until its restart it uses a new "
                    "namespace, which no other engine shares"
                )
                self._scheduler.untouched = False
                self._scheduler.reset()

    def request_finished(
        self, request: Request, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, object] | None]:
        """The request has ended; its blocks may be freed."""
        self._finish(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[Sequence[int], ...]
    ) -> tuple[bool, dict[str, object] | None]:
        """The request has ended; its blocks may be freed."""
        self._finish(request.request_id)
        return False, None

    @guarded(nothing)
    def _finish(self, request_id: str) -> None:
        if self._scheduler is not None:
            self._scheduler.finish(request_id)

    def reset_cache(self) -> bool:
        """Stop using stored KV: the engine resets its own cache. False: the connector is off.

        The daemon keeps its blocks for other engines. This engine changes to a new namespace,
        unless no call can have changed its weights or code (`identity.calls`).
        """
        done = self._reset()
        if not done:
            self.boundary.switch_off("a cache reset failed, so stored blocks may be outdated")
        return done

    @guarded(lambda: False)
    def _reset(self) -> bool:
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    # Both

    @guarded(nothing)
    def shutdown(self) -> None:
        """Disconnect from the daemon, after at most DRAIN_S for queued stores."""
        if self._worker.mover is not None:
            self._worker.mover.stop(DRAIN_S)
        if self._scheduler is not None:
            self._scheduler.close()

    @guarded(nothing)
    def get_kv_connector_stats(self) -> TierdStats | None:
        """Return this side's counts since the last call; None if there are none."""
        counted: dict[str, float] = {}
        for side in (self._worker.mover, self._scheduler):
            if side is not None:
                counted.update(side.tally.drain())
        if self.boundary.errors > self._errors_reported:
            counted["errors"] = self.boundary.errors - self._errors_reported
            self._errors_reported = self.boundary.errors
        return TierdStats(counted) if counted else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, float] | None = None) -> TierdStats:
        """Wrap sums that arrive in the process that logs them."""
        return TierdStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Mapping[type, type],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> TierdPromMetrics:
        """Return the counters for the engine's metrics endpoint."""
        return TierdPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Inside

    def _blocks_in_own_cache(self, request: Request) -> int:
        """Return the number of leading blocks that the engine's scheduler would find now."""
        if self._own_cache is None:
            return 0
        blocks = 0
        for block_hash in request.block_hashes:
            if self._own_cache.get_cached_block(block_hash, [0]) is None:
                break
            blocks += 1
        # With a draft model, the scheduler does not use the last block found.
        return max(0, blocks - (self._vllm_config.speculative_config is not None))

    def _serves(self, request: Request) -> bool:
        """Whether the request's blocks may be looked up and stored.

        vLLM before 0.31 (it uses untagged keys) hashes only the last image of a block that
        generated tokens complete.
        """
        trusted = self._options.trust_media_uuids and not self._untagged
        return names_its_kv(request, media_trusted=trusted)

    def _check_root(self) -> None:
        """Switch off if the engine core's hash root differs from the workers'."""
        assert self._scheduler is not None
        root = hash_root_in_use()
        self._root_checked = root is not None
        if root is not None and root != self._scheduler.hash_root:
            self.boundary.switch_off(
                "the engine core's hash root differs from its workers': set PYTHONHASHSEED to the "
                "same value in all of its processes"
            )
