"""Derives a namespace from a vLLM worker's configuration and tensors, or the reason for none.

All inputs come from the running engine, not from its command line: the loaded weights, every
setting of `identity.fields`, the resolved layout, the attention backend and, on CPUs, the
instruction set that determines a page's internal packing. KV that the connector cannot copy, or
cannot identify with certainty, is refused here, with the setting to change.
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
"""How vLLM hashes extra keys: tagged from 0.31 on, untagged before."""

_PLAIN_SPECS = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
"""Specs whose blocks are kept until their request ends; windows and states drop them earlier."""

_WINDOW_SPECS = frozenset({"SlidingWindowSpec"})
"""Specs that vLLM can treat as full attention, so that all layers form one group."""


class UnsupportedEngineError(ValueError):
    """This engine cannot use tierd; the message says why, and which setting to change, if any."""


def check_engine(config: VllmConfig, kv: KVCacheConfig) -> None:
    """Raise UnsupportedEngineError unless every block is prefix-cached, whole and of one group."""
    cache = config.cache_config
    if not cache.enable_prefix_caching:
        raise UnsupportedEngineError(
            "prefix caching is off: start vLLM with --enable-prefix-caching"
        )
    if cache.prefix_caching_hash_algo != HASH_ALGORITHM:
        raise UnsupportedEngineError(
            f"block hashes are made by {cache.prefix_caching_hash_algo!r}, which other processes "
            f"cannot reproduce: start vLLM with --prefix-caching-hash-algo {HASH_ALGORITHM}"
        )
    if len(kv.kv_cache_groups) != 1:
        raise UnsupportedEngineError(_too_many_groups(kv))
    spec = kv.kv_cache_groups[0].kv_cache_spec
    kind = type(spec).__name__
    if kind not in _PLAIN_SPECS:
        raise UnsupportedEngineError(
            f"the KV cache has the spec {kind}; this connector supports full attention only"
        )
    if getattr(spec, "non_causal", False):
        raise UnsupportedEngineError(
            "the model attends to later tokens, so a prefix's KV depends on the tokens after it"
        )
    if getattr(config.model_config, "is_diffusion", False):
        raise UnsupportedEngineError("a diffusion model rewrites the KV of its tokens")
    hash_tokens = getattr(kv, "hash_block_size", None)
    if hash_tokens not in (None, spec.block_size):
        raise UnsupportedEngineError(
            f"block hashes cover {hash_tokens} tokens, but blocks have {spec.block_size}"
        )


def _too_many_groups(kv: KVCacheConfig) -> str:
    groups = kv.kv_cache_groups
    kinds = {type(group.kv_cache_spec).__name__ for group in groups}
    refused = (
        f"the model has {len(groups)} KV cache groups ({', '.join(sorted(kinds))}); "
        "this connector supports one"
    )
    if kinds <= {*_PLAIN_SPECS, *_WINDOW_SPECS}:
        return (
            f"{refused}: start vLLM with --disable-hybrid-kv-cache-manager, which keeps the KV of "
            "all tokens in every layer and therefore needs more GPU memory per token"
        )
    return refused


def kv_views(kv_caches: Mapping[str, torch.Tensor], kv: KVCacheConfig) -> list[TensorView]:
    """Return a view of each layer's tensor, which it keeps alive. Raises UnsupportedEngineError."""
    views = []
    for name in kv.kv_cache_groups[0].layer_names:
        tensor = kv_caches.get(name)
        if tensor is None or not hasattr(tensor, "data_ptr"):
            raise UnsupportedEngineError(f"layer {name} has no plain KV tensor")
        if tensor.device.type not in ("cpu", "cuda"):
            raise UnsupportedEngineError(
                f"KV tensors are on {tensor.device}; only NVIDIA GPUs and CPUs are supported"
            )
        size = tensor.element_size()
        strides = tuple(stride * size for stride in tensor.stride())
        allocation = tensor.untyped_storage().data_ptr()
        views.append(
            TensorView(tensor.data_ptr(), allocation, tuple(tensor.shape), strides, size, tensor)
        )
    devices = {str(kv_caches[name].device) for name in kv.kv_cache_groups[0].layer_names}
    if len(devices) > 1:
        raise UnsupportedEngineError(
            f"the KV tensors of a worker are on several devices: {', '.join(sorted(devices))}"
        )
    return views


def kv_blocks(views: Sequence[TensorView], kv: KVCacheConfig) -> BlockPages:
    """Return where the blocks lie in these tensors. Raises UnsupportedEngineError."""
    try:
        return blocks_of(views, kv.num_blocks)
    except LayoutError as error:
        raise UnsupportedEngineError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A model's name, and its weights with a digest of all that has no field in the namespace."""

    model: str
    weights: str
    version: str
    content: dict[str, Plain]
    """The values that the digest in `weights` covers."""


def fingerprint_of(
    config: VllmConfig, weights: Weights, options: Options, environ: Mapping[str, str]
) -> Fingerprint:
    """Return the fingerprint of the running engine. Raises UnsupportedEngineError, OSError."""
    model, speculative = config.model_config, config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    envs = importlib.import_module("vllm.envs")
    if weights.moved:
        raise UnsupportedEngineError(f"{weights.moved}, while the engine started: restart it")
    try:
        settings = settings_of(config) | {"max_model_len": _rope_length(model)}
        variables = variables_of(environ, envs.environment_variables)
        source = identify(_facts(model, config.load_config, weights), options.weights)
        sources: list[Plain] = [source.weights]
        if draft is not None and _source(draft) != _source(model):
            # A draft model's layers are in the same blocks.
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
    """Return the namespace of (pp, tp) rank `rank`. Raises UnsupportedEngineError, OSError."""
    group = kv.kv_cache_groups[0]
    spec, parallel = group.kv_cache_spec, config.parallel_config
    layout = getattr(kv, "kv_cache_layout", None) or getattr(
        config.cache_config, "kv_cache_layout", None
    )
    if layout is None:
        raise UnsupportedEngineError("this vLLM does not report its physical KV layout")
    # A stage's rank and its number of layers do not determine which layers it holds.
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
    # The namespace has only the digest: this line lets an operator find the setting that differs.
    logger.info("tierd: %s is the digest of %s", fingerprint.weights, text_of(fingerprint.content))
    return namespace


def hash_scheme() -> str:
    """Find out which of vLLM's two ways to hash extra keys is in use, by hashing a salt."""
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
    """Return the parent digest of all first blocks, as the engine's core will compute it.

    The scheduler's side compares it with `hash_root_in_use` before it serves anything.
    """
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    hash_function = importlib.import_module("vllm.utils.hashing").sha256_cbor
    default = getattr(utils, "DEFAULT_NONE_HASH_SEED", "vllm-none-hash")
    root: bytes = hash_function(os.environ.get("PYTHONHASHSEED", default))
    return root


def hash_root_in_use() -> bytes | None:
    """Return the engine core's own root; None before it has one. Only in the core's process."""
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
    """Return the weights' origin, with the commit: a branch's commit may change between loads."""
    return model.model, model.revision, _commit(model)


def _commit(model: ModelConfig) -> str | None:
    """Return the commit of the weights' repository: the one that vLLM resolved the revision to, or
    the revision itself, if it is a commit. None if the model is not a repository.

    The commit in a model's config belongs to the config's repository, which may be another one.
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
    """Return the longest context that the engine serves; None unless RoPE depends on it."""
    described = str(model.hf_config.to_dict())
    if any(word in described for word in ("longrope", "'su'", "dynamic")):
        return int(model.max_model_len)
    return None


def _platform(config: VllmConfig, layer: str) -> str:
    """Return the parts of a page's internal format: machine, attention backend and CPU ISA."""
    platforms = importlib.import_module("vllm.platforms")
    machine = importlib.import_module("platform").machine()
    attention = config.compilation_config.static_forward_context[layer]
    backend = attention.attn_backend.get_name()
    platform = platforms.current_platform
    if platform.is_cuda():
        # The capability decides which quantization kernels exist, and so the computed values.
        capability = platform.get_device_capability()
        return f"cuda-sm{capability.as_version_str()}-{machine}:{backend}"
    if not platform.is_cpu():
        # Refused, because values may differ: AMD, for example, has two fp8 formats of one name.
        raise UnsupportedEngineError(
            f"the platform is {platform.device_name!r}; only NVIDIA GPUs and CPUs are supported"
        )
    isa = getattr(attention, "isa", None)
    if isa is None:
        raise UnsupportedEngineError(
            "the CPU attention backend does not report its page format (attribute `isa`)"
        )
    capability = importlib.import_module("torch").backends.cpu.get_cpu_capability()
    return f"cpu-{machine}-{capability}:{backend}:{isa}"
