"""Identifies the weights that an engine runs, so that different weights never share KV.

Weights are identified, in order of preference, by:

1. the operator's name for them (`weights` and `draft_weights` in the connector's extra config);
2. the commit of a Hugging Face repository, also if the model is given as the path of a snapshot in
   the local cache;
3. the files of a local directory: names, sizes, modification times and samples of their bytes. The
   times limit the identity to one copy of the files, on purpose: all fine-tunes of a model have
   equal sizes, and samples alone would miss a small edit. The samples distinguish files in images
   whose times were all set to one value;
4. the seed, for vLLM's `dummy` weights, which are a function of the architecture.

Other weights, for example from a third-party load format or a bucket, are not identified: no cache
is better than another model's KV. Files are used only if they are unchanged since before the load.
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
"""A snapshot in the local cache. Names of repositories and owners contain no "--"."""

_WEIGHT_SUFFIXES = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".json", ".py"}
)
"""Suffixes of files that can change the model's results, including its own code."""

_FILES_MAX = 10_000
"""Most such files in a model's directory. Scanning more would take minutes."""

_SAMPLES = 16
_SAMPLE_BYTES = 4096
"""64 KiB are read per file: under a second for 200 shards with a cold page cache."""

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
"""vLLM's load formats that read the weights from the path or repository in `model`."""


class UnknownWeightsError(ValueError):
    """The weights cannot be identified; the message says what to set."""


class _File(NamedTuple):
    """A file's state at one time. Every write updates the change time, which cannot be set."""

    name: str
    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


FileState = tuple[_File, ...]
"""The states of all files of a model at one time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What an engine knows about the origin of one model's weights.

    `commit` is the commit of the repository `model`, if it is one. `elsewhere` is a bucket that
    holds the weights, but not the config. `setting` is the setting with which the operator can name
    the weights. `states` are the states of the files before and after each load.
    """

    model: str
    commit: str | None
    load_format: str
    seed: int
    elsewhere: str = ""
    setting: str = "weights"
    states: Sequence[FileState | None] = ()


class Source(NamedTuple):
    """A model's name without a path, and the identity of its weights."""

    model: str
    weights: str


def identify(facts: ModelFacts, given: str | None) -> Source:
    """Return the model's name and weights. Reads the files of a local model.

    Raises UnknownWeightsError, OSError.
    """
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
            facts, f"load format {facts.load_format!r} does not identify the weights' origin"
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
    """Return the state of a local model's files; None if it is not local, or not readable."""
    path = Path(model)
    try:
        if not path.exists():
            return None
        base = path if path.is_dir() else path.parent
        return tuple(_state(file, base) for file in _weight_files(path))
    except (OSError, UnknownWeightsError):
        return None


def files_digest(files: Sequence[Path], base: Path) -> str:
    """Return a digest of the files' names, sizes, times and samples. Raises OSError."""
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
    """Return the files' digest. Raises UnknownWeightsError if they changed since the load began."""
    if not facts.states:
        raise UnknownWeightsError(
            f"tierd's plugin did not see the loading of {facts.model!r}: vLLM must load the plugin "
            "before the model, so do not exclude it by VLLM_PLUGINS"
        )
    base = path if path.is_dir() else path.parent
    digest = files_digest(_weight_files(path), base)
    now = files_state(facts.model)
    if now is None or any(state != now for state in facts.states):
        raise UnknownWeightsError(
            f"the files of {facts.model!r} changed while the engine started, so its weights are "
            "not known: start it again"
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
