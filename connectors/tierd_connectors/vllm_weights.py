"""A fingerprint of the weights that an engine runs, so that no two weights share KV.

What identifies weights, in order of preference:

1. what the operator says (`weights` in the connector's extra config);
2. the commit of a Hugging Face repository, also when the model is given as the path of
   such a snapshot in the local cache;
3. the files of a local directory: names, sizes, times of change and samples of their
   bytes. The times make it local to one copy of the files, on purpose: sizes are equal
   for any two fine-tunes of a model, and samples alone would miss a small edit. The
   samples are there for images whose times were all set to one value;
4. for vLLM's `dummy` weights, which are a function of the architecture, the seed.

Anything else, such as a third-party load format, is not identified: better no cache than
another model's. The model's configuration (with the engine's overrides), its dtype and
its quantization are part of the fingerprint in every case.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[^/]+)/?$")

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".json"})
"""Files of a model directory that can change what the model computes."""

_FILES_MAX = 10_000
"""A directory with more such files is not a model; scanning it would take minutes."""

_SAMPLES = 16
_SAMPLE_BYTES = 4096
"""64 KiB read a file: under a second for 200 shards, cold."""

_VOLATILE_KEYS = frozenset({"_commit_hash", "_name_or_path", "transformers_version"})
"""Keys of a configuration that say where it came from, not what it means."""


class UnknownWeightsError(ValueError):
    """The weights cannot be identified; the message says what to set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What an engine knows about one model that it runs."""

    model: str
    commit: str | None
    load_format: str
    dtype: str
    quantization: str | None
    seed: int
    config: Mapping[str, object]
    runtime: Mapping[str, object]
    """Whatever else of the engine's settings changes the KV of given weights."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's name, free of paths, and the fingerprint of its weights."""

    model: str
    fingerprint: str


def identify(facts: ModelFacts, override: str | None) -> Weights:
    """Name and fingerprint. Raises UnknownWeightsError; reads the files of a local model."""
    name, source = _source(facts, override)
    settled = {
        "source": source,
        "config": {k: v for k, v in facts.config.items() if k not in _VOLATILE_KEYS},
        "dtype": facts.dtype,
        "quantization": facts.quantization,
        "runtime": dict(facts.runtime),
    }
    text = json.dumps(settled, sort_keys=True, default=str)
    return Weights(name, f"{source}/{hashlib.sha256(text.encode()).hexdigest()[:32]}")


def _source(facts: ModelFacts, override: str | None) -> tuple[str, str]:
    path = Path(facts.model)
    snapshot = _SNAPSHOT.search(str(path))
    if snapshot:
        name = f"{snapshot['owner']}/{snapshot['name']}"
    elif path.exists():
        name = path.resolve().name
    else:
        name = facts.model
    if override is not None:
        return name, f"given:{override}"
    if facts.load_format == "dummy":
        return name, f"dummy:{facts.seed}"
    if facts.load_format not in _KNOWN_LOAD_FORMATS:
        raise UnknownWeightsError(
            f"load format {facts.load_format!r} says nothing about where the weights come from: "
            'name them in --kv-transfer-config, "kv_connector_extra_config": {"weights": "NAME"}'
        )
    if snapshot:
        return name, f"hf:{snapshot['commit']}"
    if path.is_dir():
        return name, f"files:{files_digest(sorted(_weight_files(path)), path)}"
    if path.is_file():
        return name, f"files:{files_digest([path], path.parent)}"
    if facts.commit:
        return name, f"hf:{facts.commit}"
    raise UnknownWeightsError(
        f"model {facts.model!r} is neither a local directory nor a repository with a known "
        'commit: name its weights in --kv-transfer-config, "kv_connector_extra_config": '
        '{"weights": "NAME"}'
    )


_KNOWN_LOAD_FORMATS = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "hf",
        "instanttensor",
        "mistral",
        "npcache",
        "pt",
        "runai_streamer",
        "safetensors",
        "sharded_state",
    }
)
"""vLLM's formats that read what `model` names."""


def _weight_files(directory: Path) -> list[Path]:
    found = []
    for root, folders, names in os.walk(directory, followlinks=True):
        folders[:] = [folder for folder in folders if not folder.startswith(".")]
        found += [Path(root, name) for name in names if Path(name).suffix in _WEIGHT_SUFFIXES]
        if len(found) > _FILES_MAX:
            raise UnknownWeightsError(
                f"{directory} holds more than {_FILES_MAX} weight files: name the weights in "
                '--kv-transfer-config, "kv_connector_extra_config": {"weights": "NAME"}'
            )
    return found


def files_digest(files: list[Path], base: Path) -> str:
    """Digest of names, sizes, times and samples of the files. Raises OSError."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as handle:
            status = os.fstat(handle.fileno())
            entry = (str(file.relative_to(base)), status.st_size, status.st_mtime_ns)
            digest.update(json.dumps(entry).encode())
            step = max(status.st_size // _SAMPLES, _SAMPLE_BYTES)
            for offset in range(0, status.st_size, step):
                digest.update(os.pread(handle.fileno(), _SAMPLE_BYTES, offset))
            tail = max(status.st_size - _SAMPLE_BYTES, 0)
            digest.update(os.pread(handle.fileno(), _SAMPLE_BYTES, tail))
    return digest.hexdigest()[:32]
