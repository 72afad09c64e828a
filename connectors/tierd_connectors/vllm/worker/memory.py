"""One rank's KV memory: the namespace of its blocks, where they lie, and how to export them."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tierd.errors import ConfigError
from tierd_connectors.vllm.identity.namespace import (
    UnsupportedEngineError,
    check_engine,
    fingerprint_of,
    kv_blocks,
    kv_views,
    namespace_of,
)
from tierd_connectors.vllm.identity.watch import take
from tierd_connectors.vllm.options import Options, Transfer
from tierd_connectors.vllm.worker.export import HostPool, Shown, show_cuda
from tierd_connectors.vllm.worker.layerwise import Layerwise, layer_groups
from tierd_connectors.vllm.worker.layout import LayoutError, PageMap, Pages
from tierd_connectors.vllm.worker.queues import DeviceOrder, HostOrder
from tierd_connectors.vllm.worker.torch import StreamOrder, TorchPages

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.tierd")


class RankMemory:
    """The KV caches that vLLM registers with a worker."""

    def __init__(
        self,
        config: VllmConfig,
        kv: KVCacheConfig,
        kv_caches: Mapping[str, torch.Tensor],
        options: Options,
    ) -> None:
        """Raises UnsupportedEngineError if the blocks cannot be identified or copied."""
        groups = importlib.import_module("vllm.distributed.parallel_state")
        rank = (groups.get_pp_group().rank_in_group, groups.get_tp_group().rank_in_group)
        self._config = config
        self._options = options
        self.weights = take()
        try:
            _check_memory(config)
            check_engine(config, kv)
            self._views = kv_views(kv_caches, kv)
            self.blocks = kv_blocks(self._views, kv)
            fingerprint = fingerprint_of(config, self.weights, options, os.environ)
            self.namespace = namespace_of(config, kv, self.blocks, fingerprint, rank=rank)
        except (ConfigError, OSError) as error:
            raise UnsupportedEngineError(str(error)) from error
        self._layers = kv.kv_cache_groups[0].layer_names
        self._tensors = [kv_caches[name] for name in self._layers]
        self.index = rank[0] * self.namespace.tp_size + rank[1]
        """The rank's number among all ranks, in the order of the handshake."""
        self.on_gpu = self._tensors[0].device.type == "cuda"

    def order(self) -> DeviceOrder:
        """Return the order of copies after the work of the engine's device."""
        return StreamOrder(None) if self.on_gpu else HostOrder()

    def pages(self) -> Pages:
        """Return the pages, for copies in this process."""
        kind = TorchPages if self.on_gpu else PageMap
        return kind(self.blocks, self._tensors)

    def layerwise(self) -> Layerwise | None:
        """Return the state for early reports of loads; None: not set, or the engine allows none."""
        if not self._options.layerwise:
            return None
        if self._config.speculative_config is not None:
            reason = "a draft model runs after loads are reported"
        else:
            try:
                return Layerwise(layer_groups(self._layers, self._views, self.blocks))
            except LayoutError as error:
                reason = str(error)
        logger.info("tierd: layerwise is off: %s", reason)
        return None

    def ways(self, pool: HostPool) -> Iterator[Shown]:
        """Yield the ways to export the memory that the setting `transfer` allows.

        `pool` holds the memory of a CPU engine.
        """
        match self._options.transfer:
            case Transfer.SHM:
                return
            case Transfer.AUTO if not self.on_gpu:
                return
            case Transfer.AUTO | Transfer.CUDA_IPC if self.on_gpu:
                yield from show_cuda(self._tensors, self.blocks)
            case Transfer.HOST_IPC if not self.on_gpu:
                yield pool.show(self.blocks)
            case transfer:
                raise LayoutError(
                    f"transfer is {transfer.value!r}, but the KV is on {self._tensors[0].device}: "
                    "set it to 'auto' or 'shm'"
                )


def _check_memory(config: VllmConfig) -> None:
    """Raise UnsupportedEngineError if the engine may free its KV memory while blocks are copied.

    vLLM does not notify a worker's connector before that, and on a GPU a read of freed memory ends
    the engine's process.
    """
    for setting in ("enable_sleep_mode", "enable_cumem_allocator"):
        if getattr(config.model_config, setting, False):
            raise UnsupportedEngineError(
                f"{setting} is on: a sleeping engine discards KV memory while it is being copied; "
                "start vLLM without it"
            )
