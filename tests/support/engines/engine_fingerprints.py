"""Prints the fingerprint that a real vLLM gets from each of several settings, without running a
model.

Runs in the engine's Python: `engine_fingerprints.py DIRECTORY HOME [CASE...]`. DIRECTORY is a model
with its weights, beside another one named `draft`; HOME is for a cache of repositories. Prints one
JSON object that maps each case to its fingerprint, or to "refused: " and the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HUB = "org/model"
CONFIG_HUB = "org/config"
COMMITS = {name: letter * 40 for name, letter in (("first", "a"), ("second", "b"), ("config", "c"))}

QUANTIZED = {"quantization": "fp8_per_tensor", "dtype": "bfloat16"}

CASES: dict[str, dict[str, object]] = {
    "base": {},
    "dtype": {"dtype": "float32"},
    "online": {
        "quantization": "online",
        "dtype": "bfloat16",
        "quantization_config": {"linear": "fp8_per_tensor"},
    },
    "online, other kind": {
        "quantization": "online",
        "dtype": "bfloat16",
        "quantization_config": {"linear": "fp8_per_block"},
    },
    "quantized": {**QUANTIZED},
    "quantized, ignoring": {**QUANTIZED, "quantization_config": {"ignore": ["re:.*qkv_proj"]}},
    "lora": {"enable_lora": True},
    "lora targets": {"enable_lora": True, "lora_target_modules": ["down_proj"]},
    "lora dtype": {"enable_lora": True, "lora_dtype": "float16"},
    "rope": {"hf_overrides": {"rope_theta": 20000.0}},
    "skipped layers": {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]},
    "fp8": {"kv_cache_dtype": "fp8"},
    "implementation": {"model_impl": "transformers"},
    "moe backend": {"moe_backend": "triton"},
    "loader": {"load_format": "safetensors"},
    "additional": {"additional_config": {"a": 1}},
    # The same KV:
    "memory": {"gpu_memory_utilization": 0.5, "num_gpu_blocks_override": 64},
    "batches": {"max_num_seqs": 3, "max_num_batched_tokens": 64, "max_model_len": 512},
    "names": {"served_model_name": "x", "seed": 5},
    # Refused:
    "worker extension": {"worker_extension_cls": "builtins.object"},
    "weight transfer": {"weight_transfer_config": {"backend": "nccl"}},
    "bucket": {"model_weights": "s3://bucket/model"},
}

CLASS = {"LlamaForCausalLM": "vllm.model_executor.models.llama4:Llama4ForCausalLM"}
"""The last case: vLLM keeps the setting for the rest of the process."""

VARIABLES: dict[str, dict[str, str]] = {
    "variable": {"VLLM_FLOAT32_MATMUL_PRECISION": "medium"},
    "library variable": {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"},
    # The same KV:
    "free variable": {"VLLM_LOG_STATS_INTERVAL": "3", "VLLM_CPU_KVCACHE_SPACE": "9"},
    "service variable": {"VLLM_SERVICE_HOST": "10.0.0.1", "VLLM_PORT_8000_TCP": "tcp://10.0.0.1"},
    # Refused:
    "chance": {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"},
}


def main() -> None:
    """Print all cases."""
    directory = Path(sys.argv[1])
    home = Path(sys.argv[2])
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(home),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    with contextlib.redirect_stdout(sys.stderr):
        wanted = sys.argv[3:]
        found = {
            name: find()
            for name, find in _cases(directory, home).items()
            if not wanted or name in wanted
        }
    json.dump(found, sys.stdout)


def _cases(directory: Path, home: Path) -> dict[str, Callable[[], str]]:
    model = str(directory)
    draft: dict[str, object] = {"speculative_config": _draft(directory)}
    cases: dict[str, Callable[[], str]] = {}
    for name, arguments in CASES.items():
        cases[name] = partial(_try, model, arguments)
    for name, variables in VARIABLES.items():
        cases[name] = partial(_try, model, {}, variables)
    cases |= {
        "function": partial(_try, model, {"hf_overrides": _override(20000.0)}),
        "draft": partial(_try, model, draft),
        "draft, named": partial(_try, model, draft, draft_weights="d1"),
        "draft, model named": partial(_try, model, draft, weights="w1"),
        "not watched": partial(_try, model, {}, watched=False),
    }
    for commit in ("first", "second"):
        cases[f"hub, {commit}"] = partial(_hub, directory, home, commit, {})
        elsewhere: dict[str, object] = {"hf_config_path": CONFIG_HUB}
        cases[f"hub, config elsewhere, {commit}"] = partial(
            _hub, directory, home, commit, elsewhere
        )
    cases |= _named(directory, home)
    cases["class"] = partial(_try, model, {"model_class_overrides": CLASS})
    return cases


def _try(
    model: str,
    arguments: dict[str, object],
    variables: dict[str, str] | None = None,
    *,
    watched: bool = True,
    online: bool = False,
    **extra: object,
) -> str:
    """The fingerprint. Where no hub can be reached vLLM puts a snapshot's path in the place of a
    repository's name, unless the engine is to think that it is `online`."""
    from vllm.engine.arg_utils import EngineArgs

    from tierd_connectors.vllm.identity.namespace import UnsupportedEngineError, fingerprint_of
    from tierd_connectors.vllm.identity.watch import LoadedModel, Weights
    from tierd_connectors.vllm.identity.weights import files_state
    from tierd_connectors.vllm.options import parse

    given: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,
        "block_size": 32,
        **arguments,
    }
    bucket = given.pop("model_weights", "")
    try:
        args = EngineArgs(**given)
        if online:
            args.model = model
        config = args.create_engine_config()
        if online:
            config = pickle.loads(pickle.dumps(config))
    except Exception as error:  # versions differ in what they raise
        return f"unavailable: {type(error).__name__}: {error}"
    config.model_config.model_weights = bucket
    draft = getattr(config.speculative_config, "draft_model_config", None)
    models = [config.model_config.model, *([draft.model] if draft is not None else [])]
    weights = Weights()
    if watched:
        weights.loads += [
            LoadedModel(name, files_state(name), files_state(name), frozenset()) for name in models
        ]
    try:
        found = fingerprint_of(config, weights, parse(extra), os.environ | (variables or {}))
    except UnsupportedEngineError as error:
        return f"refused: {error}"
    return found.weights


def _hub(directory: Path, home: Path, commit: str, arguments: dict[str, object]) -> str:
    """A model named by its repository; offline, vLLM itself would replace the name by a path."""
    from vllm.config import LoadConfig, ModelConfig

    from tierd_connectors.vllm.identity.namespace import _facts
    from tierd_connectors.vllm.identity.watch import Weights
    from tierd_connectors.vllm.identity.weights import UnknownWeightsError, identify

    config = (directory / "config.json").read_bytes()
    _publish(home, HUB, COMMITS[commit], config)
    _publish(home, CONFIG_HUB, COMMITS["config"], config)
    model = ModelConfig(model=HUB, tokenizer=HUB, skip_tokenizer_init=True, **arguments)
    # As transformers before 5.19 set it: the commit of the config's repository.
    model.hf_config._commit_hash = COMMITS["config"]
    try:
        return identify(_facts(model, LoadConfig(), Weights()), None).weights
    except UnknownWeightsError as error:
        return f"refused: {error}"


def _named(directory: Path, home: Path) -> dict[str, Callable[[], str]]:
    """Models, drafts and an engine with adapters by the names of repositories in the cache of the
    hub, in each of the ways that name the same commit. Workers get pickled configs."""
    config = (directory / "config.json").read_bytes()
    named, plain, draft = "org/named", "named", "org/draft"
    commits = {named: "e" * 40, plain: "f" * 40, draft: "d" * 40}
    path = {name: str(_publish(home, name, sha, config)) for name, sha in commits.items()}
    _publish(home, named, commits[named], config, ref="v1")
    lora: dict[str, object] = {"enable_lora": True}

    def drafting(model: str, revision: str | None = None) -> dict[str, object]:
        given = {"method": "draft_model", "model": model, "num_speculative_tokens": 2}
        return {"speculative_config": {**given, "revision": revision}}

    return {
        "named, path": partial(_try, path[named], {}),
        "named": partial(_try, named, {}, online=True),
        "named, offline": partial(_try, named, {}),
        "named, tag": partial(_try, named, {"revision": "v1"}, online=True),
        "named, tag, offline": partial(_try, named, {"revision": "v1"}),
        "named, commit": partial(_try, named, {"revision": commits[named]}, online=True),
        "no owner, path": partial(_try, path[plain], {}),
        "no owner": partial(_try, plain, {}, online=True),
        "named, lora, path": partial(_try, path[named], lora),
        "named, lora": partial(_try, named, lora, online=True),
        "named, draft, path": partial(_try, path[named], drafting(path[draft])),
        "named, draft": partial(_try, named, drafting(draft), online=True),
        "named, draft, offline": partial(_try, named, drafting(draft)),
        "named, draft, commit": partial(_try, named, drafting(draft, commits[draft]), online=True),
    }


def _publish(home: Path, repository: str, commit: str, config: bytes, *, ref: str = "main") -> Path:
    """Make `commit` the newest of a branch in the local cache; returns its snapshot."""
    folder = home / "hub" / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    (snapshot / "config.json").write_bytes(config)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / ref).write_text(commit)
    return snapshot


def _override(theta: float) -> Callable[[object], object]:
    def override(config: object) -> object:
        config.rope_theta = theta  # type: ignore[attr-defined]  # transformers' config
        return config

    return override


def _draft(directory: Path) -> dict[str, object]:
    draft = directory.parent / "draft"
    return {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}


if __name__ == "__main__":
    main()
