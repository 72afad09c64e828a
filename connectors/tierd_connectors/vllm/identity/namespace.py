"""From a vLLM worker's configuration and tensors to its namespace, or the reason for none.

Everything that decides what a block's bytes mean is read from the engine that runs, not
from what was asked for: the weights as they were loaded, every setting of `identity.fields`, the
resolved layout, the attention backend and, on CPUs, the instruction set that packs a page's
inside. Whatever the connector cannot copy or name for certain is refused here, once, with the
setting to change.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

from tierd.types import FORMAT_VERSION, Namespace
from tierd_connectors.vllm.identity.settings import (
    Plain,
    SettingError,
    settings_of,
    text_of,
    variables_of,
)
from tierd_connectors.vllm.identity.weights import ModelFacts, UnknownWeightsError, identify
from tierd_connectors.vllm.worker.layout import BlockPages, LayoutError, TensorView, blocks_of

if TYPE_CHECKING:
    import torch
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from tierd_connectors.vllm.identity.watch import Weights
    from tierd_connectors.vllm.options import Options

logger = logging.getLogger("vllm.tierd")

_COMMIT = re.compile("[0-9a-f]{40}", re.ASCII)

HASH_ALGORITHM = "sha256_cbor"

HASH_SCHEME_TAGGED = "vllm-sha256-cbor-tagged"
HASH_SCHEME_UNTAGGED = "vllm-sha256-cbor-untagged"
"""Extra keys as vLLM hashes them from 0.31 on, and before."""

_PLAIN_SPECS = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
"""Specs whose blocks live as long as their request; windows and states drop them earlier."""


class UnsupportedEngineError(ValueError):
    """This engine cannot use tierd; the message says why, and what to change if anything."""


def check_engine(config: VllmConfig, kv: KVCacheConfig) -> None:
    """Raise RefusedError unless every block is a whole prefix-cached block of one group."""
    cache = config.cache_config
    if not cache.enable_prefix_caching:
        raise UnsupportedEngineError(
            "prefix caching is off: start vLLM with --enable-prefix-caching"
        )
    if cache.prefix_caching_hash_algo != HASH_ALGORITHM:
        raise UnsupportedEngineError(
            f"block hashes are made by {cache.prefix_caching_hash_algo!r}, which nothing else "
            f"can reproduce: start vLLM with --prefix-caching-hash-algo {HASH_ALGORITHM}"
        )
    if len(kv.kv_cache_groups) != 1:
        raise UnsupportedEngineError(
            f"the model has {len(kv.kv_cache_groups)} KV cache groups (hybrid attention); "
            "this connector handles one"
        )
    spec = kv.kv_cache_groups[0].kv_cache_spec
    kind = type(spec).__name__
    if kind not in _PLAIN_SPECS:
        raise UnsupportedEngineError(
            f"KV cache of kind {kind}; this connector handles full attention"
        )
    if getattr(spec, "non_causal", False):
        raise UnsupportedEngineError(
            "the model attends to later tokens, so a prefix has no KV of its own"
        )
    if getattr(config.model_config, "is_diffusion", False):
        raise UnsupportedEngineError("a diffusion model rewrites the KV of its tokens")
    hash_tokens = getattr(kv, "hash_block_size", None)
    if hash_tokens not in (None, spec.block_size):
        raise UnsupportedEngineError(
            f"block hashes cover {hash_tokens} tokens, blocks {spec.block_size}"
        )


def kv_views(kv_caches: Mapping[str, torch.Tensor], kv: KVCacheConfig) -> list[TensorView]:
    """The registered tensors, by layer; each is its view's owner. Raises RefusedError."""
    views = []
    for name in kv.kv_cache_groups[0].layer_names:
        tensor = kv_caches.get(name)
        if tensor is None or not hasattr(tensor, "data_ptr"):
            raise UnsupportedEngineError(f"layer {name} has no plain KV tensor")
        if tensor.device.type not in ("cpu", "cuda"):
            raise UnsupportedEngineError(
                f"KV tensors are on {tensor.device}: no GPU of NVIDIA's, no CPU"
            )
        size = tensor.element_size()
        strides = tuple(stride * size for stride in tensor.stride())
        allocation = tensor.untyped_storage().data_ptr()
        views.append(
            TensorView(tensor.data_ptr(), allocation, tuple(tensor.shape), strides, size, tensor)
        )
    if len({str(kv_caches[name].device) for name in kv.kv_cache_groups[0].layer_names}) > 1:
        raise UnsupportedEngineError("the KV tensors of a worker are on several devices")
    return views


def kv_blocks(views: Sequence[TensorView], kv: KVCacheConfig) -> BlockPages:
    """Where the blocks lie in these tensors. Raises RefusedError."""
    try:
        return blocks_of(views, kv.num_blocks)
    except LayoutError as error:
        raise UnsupportedEngineError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A model's name, and a digest of everything else that the namespace has no field for."""

    model: str
    weights: str
    version: str
    content: dict[str, Plain]
    """What the digest is of."""


def fingerprint_of(
    config: VllmConfig, weights: Weights, options: Options, environ: Mapping[str, str]
) -> Fingerprint:
    """What this engine runs, as it was when it took effect. Raises RefusedError, OSError."""
    model, speculative = config.model_config, config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    envs = importlib.import_module("vllm.envs")
    if weights.moved:
        raise UnsupportedEngineError(f"{weights.moved} while it started: restart it")
    try:
        settings = settings_of(config) | {"max_model_len": _rope_length(model)}
        variables = variables_of(environ, envs.environment_variables)
        source = identify(_facts(model, config.load_config, weights), options.weights)
        sources: list[Plain] = [source.weights]
        if draft is not None and _source(draft) != _source(model):
            # A drafting model's layers are in the same blocks.
            load = getattr(speculative, "draft_load_config", None) or config.load_config
            facts = _facts(draft, load, weights, setting="draft_weights")
            sources.append(identify(facts, options.draft_weights).weights)
    except (UnknownWeightsError, SettingError) as error:
        raise UnsupportedEngineError(str(error)) from error
    software = {
        name: str(importlib.import_module(name).__version__)
        for name in ("vllm", "torch", "transformers")
    }
    code = frozenset[str]().union(*(load.code for load in weights.loads))
    content: dict[str, Plain] = {
        "weights": sources,
        "code": [*sorted(code)],
        "software": {**software},
        "variables": variables,
        "settings": settings,
    }
    digest = hashlib.sha256(text_of(content).encode()).hexdigest()[:32]
    return Fingerprint(source.model, f"{source.weights}/{digest}", software["vllm"], content)


def namespace_of(
    config: VllmConfig,
    kv: KVCacheConfig,
    blocks: BlockPages,
    fingerprint: Fingerprint,
    *,
    rank: tuple[int, int],
) -> Namespace:
    """The namespace of a worker of (pp, tp) rank `rank`. Raises RefusedError, OSError."""
    group = kv.kv_cache_groups[0]
    spec, parallel = group.kv_cache_spec, config.parallel_config
    layout = getattr(kv, "kv_cache_layout", None) or getattr(
        config.cache_config, "kv_cache_layout", None
    )
    if layout is None:
        raise UnsupportedEngineError("this vLLM does not tell its physical KV layout")
    # Which layers a stage holds follows from neither its rank nor how many it holds.
    layers = hashlib.sha256("\n".join(group.layer_names).encode()).hexdigest()[:16]
    namespace = Namespace(
        model=fingerprint.model,
        weights=fingerprint.weights,
        kv_dtype=f"{config.cache_config.cache_dtype}:{getattr(spec, 'dtype', None)}",
        block_tokens=spec.block_size,
        block_bytes=blocks.block_bytes,
        layout=f"vllm-{fingerprint.version}:{layout}:{len(blocks.runs)}x{blocks.block_bytes}",
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
    # The namespace has its digest only: this line tells an operator which setting differs.
    logger.info("tierd: %s is the digest of %s", fingerprint.weights, text_of(fingerprint.content))
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
    raise UnsupportedEngineError(f"this vLLM hashes extra keys in an unknown way: {keys!r}")


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


def _facts(
    model: ModelConfig, load: LoadConfig, weights: Weights, setting: str = "weights"
) -> ModelFacts:
    seen = [done for done in weights.loads if done.model == model.model]
    return ModelFacts(
        model=model.model,
        commit=_commit(model),
        load_format=str(load.load_format),
        seed=model.seed,
        elsewhere=getattr(model, "model_weights", "") or "",
        setting=setting,
        states=[state for done in seen for state in (done.before, done.after)],
    )


def _source(model: ModelConfig) -> tuple[str, str | None, str | None]:
    """Where the weights come from. A branch may have been at another commit a moment before."""
    return model.model, model.revision, _commit(model)


def _commit(model: ModelConfig) -> str | None:
    """The commit of the weights' repository, if the model is one: what vLLM has found its revision
    to be, or the revision, if it is a commit.

    The commit that a model's config may name is that of the repository of the config, which
    can be another one.
    """
    revision: str | None = model.revision
    repository = getattr(revision, "_repo_id", None)
    if repository not in (None, model.model):
        return None
    resolved: str | None = getattr(revision, "resolved", None)
    if resolved is None and _COMMIT.fullmatch(revision or ""):
        return revision
    return resolved


def _rope_length(model: ModelConfig) -> int | None:
    """The longest context that the engine serves, where rotary embeddings depend on it."""
    described = str(model.hf_config.to_dict())
    if any(word in described for word in ("longrope", "'su'", "dynamic")):
        return int(model.max_model_len)
    return None


def _platform(config: VllmConfig, layer: str) -> str:
    """Whatever decides what lies inside a page: the attention backend and, on CPUs, the ISA."""
    platforms = importlib.import_module("vllm.platforms")
    machine = importlib.import_module("platform").machine()
    attention = config.compilation_config.static_forward_context[layer]
    backend = attention.attn_backend.get_name()
    platform = platforms.current_platform
    if platform.is_cuda():
        # Which kernels there are for a quantization, and so how it computes, goes by capability.
        capability = platform.get_device_capability()
        return f"cuda-sm{capability.as_version_str()}-{machine}:{backend}"
    if not platform.is_cpu():
        # AMD's chips, for one, have two kinds of fp8 by the same name.
        raise UnsupportedEngineError(
            f"the platform is {platform.device_name!r}: no GPU of NVIDIA's, no CPU"
        )
    isa = getattr(attention, "isa", None)
    if isa is None:
        raise UnsupportedEngineError("the CPU attention backend does not tell how it packs a page")
    capability = importlib.import_module("torch").backends.cpu.get_cpu_capability()
    return f"cpu-{machine}-{capability}:{backend}:{isa}"
