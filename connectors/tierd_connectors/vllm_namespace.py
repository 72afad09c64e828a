"""From a vLLM worker's configuration and tensors to its namespace, or the reason for none.

Everything that decides what a block's bytes mean is read from the engine that runs, not
from what was asked for: the resolved layout, the attention backend and, on CPUs, the
instruction set that packs a page's inside. Whatever the connector cannot copy or name
for certain is refused here, once, with the setting to change.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

from tierd.types import FORMAT_VERSION, Namespace
from tierd_connectors.vllm_layout import Blocks, LayoutError, TensorView, blocks_of
from tierd_connectors.vllm_weights import ModelFacts, UnknownWeightsError, identify

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

HASH_ALGORITHM = "sha256_cbor"

HASH_SCHEME_TAGGED = "vllm-sha256-cbor-tagged"
HASH_SCHEME_UNTAGGED = "vllm-sha256-cbor-untagged"
"""Extra keys as vLLM hashes them from 0.31 on, and before."""

_PLAIN_SPECS = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
"""Specs whose blocks live as long as their request; windows and states drop them earlier."""


class RefusedError(ValueError):
    """This engine cannot use tierd; the message says why, and what to change if anything."""


def check_engine(config: VllmConfig, kv: KVCacheConfig) -> None:
    """Raise RefusedError unless every block is a whole prefix-cached block of one group."""
    cache, parallel = config.cache_config, config.parallel_config
    if not cache.enable_prefix_caching:
        raise RefusedError("prefix caching is off: start vLLM with --enable-prefix-caching")
    if cache.prefix_caching_hash_algo != HASH_ALGORITHM:
        raise RefusedError(
            f"block hashes are made by {cache.prefix_caching_hash_algo!r}, which nothing else "
            f"can reproduce: start vLLM with --prefix-caching-hash-algo {HASH_ALGORITHM}"
        )
    if len(kv.kv_cache_groups) != 1:
        raise RefusedError(
            f"the model has {len(kv.kv_cache_groups)} KV cache groups (hybrid attention); "
            "this connector handles one"
        )
    spec = kv.kv_cache_groups[0].kv_cache_spec
    kind = type(spec).__name__
    if kind not in _PLAIN_SPECS:
        raise RefusedError(f"KV cache of kind {kind}; this connector handles full attention")
    if getattr(spec, "non_causal", False):
        raise RefusedError("the model attends to later tokens, so a prefix has no KV of its own")
    if getattr(config.model_config, "is_diffusion", False):
        raise RefusedError("a diffusion model rewrites the KV of its tokens")
    hash_tokens = getattr(kv, "hash_block_size", None)
    if hash_tokens not in (None, spec.block_size):
        raise RefusedError(f"block hashes cover {hash_tokens} tokens, blocks {spec.block_size}")
    for axis in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, axis, 1) > 1:
            raise RefusedError(f"context parallelism ({axis} > 1) is not supported")
    if getattr(parallel, "nnodes", 1) > 1:
        raise RefusedError("the engine spans several nodes, and the daemon serves one")
    if getattr(cache, "calculate_kv_scales", False):
        raise RefusedError("KV scales are computed while running, so KV differs between runs")


def kv_views(kv_caches: Mapping[str, torch.Tensor], kv: KVCacheConfig) -> list[TensorView]:
    """The registered tensors, by layer; each is its view's owner. Raises RefusedError."""
    views = []
    for name in kv.kv_cache_groups[0].layer_names:
        tensor = kv_caches.get(name)
        if tensor is None or not hasattr(tensor, "data_ptr"):
            raise RefusedError(f"layer {name} has no plain KV tensor")
        if tensor.device.type not in ("cpu", "cuda"):
            raise RefusedError(f"KV tensors are on {tensor.device}: no GPU of NVIDIA's, no CPU")
        size = tensor.element_size()
        strides = tuple(stride * size for stride in tensor.stride())
        allocation = tensor.untyped_storage().data_ptr()
        views.append(
            TensorView(tensor.data_ptr(), allocation, tuple(tensor.shape), strides, size, tensor)
        )
    if len({str(kv_caches[name].device) for name in kv.kv_cache_groups[0].layer_names}) > 1:
        raise RefusedError("the KV tensors of a worker are on several devices")
    return views


def kv_blocks(views: Sequence[TensorView], kv: KVCacheConfig) -> Blocks:
    """Where the blocks lie in these tensors. Raises RefusedError."""
    try:
        return blocks_of(views, kv.num_blocks)
    except LayoutError as error:
        raise RefusedError(str(error)) from error


def namespace_of(
    config: VllmConfig,
    kv: KVCacheConfig,
    blocks: Blocks,
    *,
    rank: tuple[int, int],
    weights: str | None,
) -> Namespace:
    """The namespace of a worker of (pp, tp) rank `rank`. Raises RefusedError, OSError."""
    group = kv.kv_cache_groups[0]
    spec, parallel = group.kv_cache_spec, config.parallel_config
    try:
        identity = identify(_facts(config, config.model_config), weights)
        fingerprint = identity.fingerprint
        speculative = config.speculative_config
        draft = getattr(speculative, "draft_model_config", None)
        if draft is not None and draft is not config.model_config:
            # A drafting model's layers are in the same blocks.
            fingerprint += "+" + identify(_facts(config, draft), weights).fingerprint
    except UnknownWeightsError as error:
        raise RefusedError(str(error)) from error
    layout = getattr(kv, "kv_cache_layout", None) or getattr(
        config.cache_config, "kv_cache_layout", None
    )
    if layout is None:
        raise RefusedError("this vLLM does not tell its physical KV layout")
    # Which layers a stage holds follows from neither its rank nor how many it holds.
    layers = hashlib.sha256("\n".join(group.layer_names).encode()).hexdigest()[:16]
    version = ".".join(importlib.import_module("vllm").__version__.split(".")[:2])
    namespace = Namespace(
        model=identity.model,
        weights=fingerprint,
        kv_dtype=f"{config.cache_config.cache_dtype}:{getattr(spec, 'dtype', None)}",
        block_tokens=spec.block_size,
        block_bytes=blocks.block_bytes,
        layout=f"vllm-{version}:{layout}:{len(blocks.runs)}x{blocks.block_bytes}",
        groups=(f"{len(group.layer_names)} layers {layers}: {spec!r}",),
        platform=_platform(config, group.layer_names[0]),
        tp_rank=rank[1],
        tp_size=parallel.tensor_parallel_size,
        pp_rank=rank[0],
        pp_size=parallel.pipeline_parallel_size,
        cp_rank=0,
        cp_size=1,
        hash_scheme=hash_scheme(),
        hash_root=hash_root(),
        format_version=FORMAT_VERSION,
    )
    namespace.validate()
    return namespace


def hash_scheme() -> str:
    """Which of vLLM's two ways to hash extra keys is in use: found out by hashing a salt."""
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    salted = SimpleNamespace(
        mm_features=[], lora_request=None, cache_salt="salt", prompt_embeds=None
    )
    keys, _ = utils.generate_block_hash_extra_keys(salted, 0, 1, 0)
    if keys == (("cache_salt", "salt"),):
        return HASH_SCHEME_TAGGED
    if keys == ("salt",):
        return HASH_SCHEME_UNTAGGED
    raise RefusedError(f"this vLLM hashes extra keys in an unknown way: {keys!r}")


def hash_root() -> bytes:
    """The digest that first blocks are chained to, as the engine's core will compute it.

    The scheduler's side compares it with `hash_root_in_use` before it serves anything.
    """
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    hash_function = importlib.import_module("vllm.utils.hashing").sha256_cbor
    default = getattr(utils, "DEFAULT_NONE_HASH_SEED", "vllm-none-hash")
    root: bytes = hash_function(os.environ.get("PYTHONHASHSEED", default))
    return root


def hash_root_in_use() -> bytes | None:
    """The engine core's own root, None before it has one. Only in the core's process."""
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    root = getattr(utils, "NONE_HASH", None)
    return None if root is None else bytes(root)


def _facts(config: VllmConfig, model: ModelConfig) -> ModelFacts:
    hf_config = model.hf_config
    described: dict[str, object] = hf_config.to_dict()
    runtime: dict[str, object] = {"hf_overrides": str(getattr(model, "hf_overrides", None))}
    if any(word in str(described) for word in ("longrope", "'su'", "dynamic")):
        # Such rotary embeddings depend on the longest context that the engine serves.
        runtime["max_model_len"] = model.max_model_len
    return ModelFacts(
        model=model.model,
        commit=getattr(hf_config, "_commit_hash", None),
        load_format=str(config.load_config.load_format),
        dtype=str(model.dtype),
        quantization=None if model.quantization is None else str(model.quantization),
        seed=model.seed,
        config=described,
        runtime=runtime,
    )


def _platform(config: VllmConfig, layer: str) -> str:
    """Whatever decides what lies inside a page: the attention backend and, on CPUs, the ISA."""
    platforms = importlib.import_module("vllm.platforms")
    machine = importlib.import_module("platform").machine()
    attention = config.compilation_config.static_forward_context[layer]
    backend = attention.attn_backend.get_name()
    if not platforms.current_platform.is_cpu():
        return f"{platforms.current_platform.device_name}-{machine}:{backend}"
    isa = getattr(attention, "isa", None)
    if isa is None:
        raise RefusedError("the CPU attention backend does not tell how it packs a page")
    capability = importlib.import_module("torch").backends.cpu.get_cpu_capability()
    return f"cpu-{machine}-{capability}:{backend}:{isa}"
