"""Which weights an engine runs, so that no two weights share KV.

What identifies weights, in order of preference:

1. what the operator says (`weights` and `draft_weights` in the connector's extra config);
2. the commit of a Hugging Face repository, also when the model is given as the path of
   such a snapshot in the local cache;
3. the files of a local directory: names, sizes, times of change and samples of their
   bytes. The times make it local to one copy of the files, on purpose: sizes are equal
   for any two fine-tunes of a model, and samples alone would miss a small edit. The
   samples are there for images whose times were all set to one value;
4. for vLLM's `dummy` weights, which are a function of the architecture, the seed.

Anything else, such as a third-party load format or a bucket, is not identified: better no cache
than another model's. Files count only if nobody touched them since before they were loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_SNAPSHOT = re.compile(r"(?:^|/)models--(?P<name>[^/]+)/snapshots/(?P<commit>[^/]+)/?$")
"""Of the local cache; names of repositories, with an owner or without, have no "--" in them."""

_WEIGHT_SUFFIXES = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".json", ".py"}
)
"""Files of a model directory that can change what the model computes: also code of its own."""

_FILES_MAX = 10_000
"""A directory with more such files is not a model; scanning it would take minutes."""

_SAMPLES = 16
_SAMPLE_BYTES = 4096
"""64 KiB read a file: under a second for 200 shards, cold."""

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


class UnknownWeightsError(ValueError):
    """The weights cannot be identified; the message says what to set."""


class _File(NamedTuple):
    """One file as it is at a time. The change time moves with every write and cannot be set."""

    name: str
    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


FileState = tuple[_File, ...]
"""All files of a model at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What an engine knows about where one model's weights come from.

    `commit` is that of the repository `model`, if it is one. `elsewhere` is a bucket that the
    weights, but not the config, are read from. `setting` names the weights where nothing else
    does. `states` are those of the files before and after each load.
    """

    model: str
    commit: str | None
    load_format: str
    seed: int
    elsewhere: str = ""
    setting: str = "weights"
    states: Sequence[FileState | None] = ()


class Source(NamedTuple):
    """A model's name, free of paths, and which weights it has."""

    model: str
    weights: str


def identify(facts: ModelFacts, given: str | None) -> Source:
    """Name and weights. Raises UnknownWeightsError, OSError; reads files of a local model."""
    path = Path(facts.model)
    snapshot = _SNAPSHOT.search(str(path))
    if snapshot:
        name = snapshot["name"].replace("--", "/")
    elif path.exists():
        name = path.resolve().name
    else:
        name = facts.model
    if given is not None:
        return Source(name, f"given:{given}")
    if facts.load_format == "dummy":
        return Source(name, f"dummy:{facts.seed}")
    if facts.load_format not in _KNOWN_LOAD_FORMATS:
        raise _unknown(
            facts, f"load format {facts.load_format!r} does not say where weights come from"
        )
    if facts.elsewhere:
        raise _unknown(facts, f"the weights are read from {facts.elsewhere!r}, which has no digest")
    if snapshot:
        return Source(name, f"hf:{snapshot['commit']}")
    if path.exists():
        return Source(name, f"files:{_watched_digest(facts, path)}")
    if facts.commit:
        return Source(name, f"hf:{facts.commit}")
    raise _unknown(
        facts,
        f"model {facts.model!r} is neither a local directory nor a repository with a known commit",
    )


def files_state(model: str) -> FileState | None:
    """The state of a local model's files; None if it is not local, or cannot be read."""
    path = Path(model)
    try:
        if not path.exists():
            return None
        base = path if path.is_dir() else path.parent
        return tuple(_state(file, base) for file in _weight_files(path))
    except (OSError, UnknownWeightsError):
        return None


def files_digest(files: Sequence[Path], base: Path) -> str:
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


def _watched_digest(facts: ModelFacts, path: Path) -> str:
    """The digest of files that are the same before they were loaded and after this returns."""
    if not facts.states:
        raise UnknownWeightsError(
            f"nobody saw {facts.model!r} being loaded: have vLLM load tierd's plugin, which "
            "VLLM_PLUGINS can keep out, before its model"
        )
    base = path if path.is_dir() else path.parent
    digest = files_digest(_weight_files(path), base)
    now = files_state(facts.model)
    if now is None or any(state != now for state in facts.states):
        raise UnknownWeightsError(
            f"the files of {facts.model!r} changed while the engine started, so nobody knows which "
            "of them it runs: start it again"
        )
    return digest


def _weight_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = []
    for root, folders, names in os.walk(path, followlinks=True):
        folders[:] = [folder for folder in folders if not folder.startswith(".")]
        found += [Path(root, name) for name in names if Path(name).suffix in _WEIGHT_SUFFIXES]
        if len(found) > _FILES_MAX:
            raise UnknownWeightsError(
                f"{path} holds more than {_FILES_MAX} weight files: name the weights in "
                '--kv-transfer-config, "kv_connector_extra_config": {"weights": "NAME"}'
            )
    return sorted(found)


def _state(file: Path, base: Path) -> _File:
    status = file.stat()
    return _File(
        str(file.relative_to(base)),
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


def _unknown(facts: ModelFacts, why: str) -> UnknownWeightsError:
    return UnknownWeightsError(
        f'{why}: name the weights in --kv-transfer-config, "kv_connector_extra_config": '
        f'{{"{facts.setting}": "NAME"}}'
    )
