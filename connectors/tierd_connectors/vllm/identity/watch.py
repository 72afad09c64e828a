"""Watches how weights get into an engine's process, and whether they are replaced there later.

A connector is made after its engine has read the weights, so whatever it finds on disk then may
be something else. vLLM runs plugins before: `watch` has vLLM's loaders note the state of a
model's files before and after each load. `Weights` is what one engine of the process has loaded;
from then on it also notes whatever vLLM offers to change weights in a running engine.

Not seen: functions that a caller sends to the workers (`collective_rpc` with a callable) and
that write to parameters by themselves; the scheduler's side hears of the call (`identity.calls`).
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import NamedTuple

from tierd_connectors.vllm.identity.weights import FileState, files_state

_CHANGES = (
    "reload_weights",
    "update_weights",
    "start_weight_update",
    "start_draft_weight_update",
    "update_config",
    "apply_model",
)
"""Methods of vLLM's worker that replace weights, or run code of the caller's on them."""

_OWN_CODE = frozenset({"vllm", "transformers", "torch"}) | sys.stdlib_module_names
"""Packages whose version is in the namespace, or Python's: their code need not be."""

_REMOTE_CODE = "transformers_modules"
"""The package that code of a model repository is imported as."""

_CODE_MAX_BYTES = 1 << 24
"""Of one source file; beyond it it is no code."""


class LoadedModel(NamedTuple):
    """One model as it was loaded: where from, the states of its files, and its own code."""

    model: str
    before: FileState | None
    after: FileState | None
    code: frozenset[str]


@dataclass(eq=False)
class Weights:
    """What one engine of this process loaded. `moved` says why that is no longer what it runs."""

    loads: list[LoadedModel] = field(default_factory=list)
    moved: str = ""
    taken: bool = False

    def move(self, reason: str) -> None:
        """Note that weights are about to change; the first reason stays."""
        if self.loads or self.taken:
            self.moved = self.moved or reason


_current = Weights()
_all: weakref.WeakSet[Weights] = weakref.WeakSet([_current])
_watched: set[type] = set()


def take() -> Weights:
    """What was loaded since the last call: by the engine whose KV is being registered."""
    global _current
    taken, _current = _current, Weights()
    taken.taken = True
    _all.add(_current)
    # Its loader may be one that `watch` does not know.
    _watch_workers()
    return taken


def watch() -> None:
    """Have vLLM's loaders tell `take` what they load. Before the first load; again is harmless."""
    loaders = importlib.import_module("vllm.model_executor.model_loader")
    known = list(getattr(loaders, "_LOAD_FORMAT_TO_MODEL_LOADER", {}).values())
    for loader in (loaders.BaseModelLoader, *known):
        if loader not in _watched and "load_model" in vars(loader):
            _watched.add(loader)
            loader.load_model = _watching(loader.load_model)


def _watch_workers() -> None:
    """Have vLLM's workers, of all platforms, tell when weights are replaced."""
    module = sys.modules.get("vllm.v1.worker.gpu_worker")
    worker = getattr(module, "Worker", None)
    if worker is None or worker in _watched:
        return
    _watched.add(worker)
    for name in _CHANGES:
        method = getattr(worker, name, None)
        if method is not None:
            setattr(worker, name, _moving(method, lambda *_, name=name, **__: name))
    sleep = getattr(worker, "sleep", None)
    if sleep is not None:
        worker.sleep = _moving(sleep, _deep_sleep)


def _watching(load_model: Callable[..., object]) -> Callable[..., object]:
    @wraps(load_model)
    def watched(
        self: object, vllm_config: object, model_config: object, *more: object, **named: object
    ) -> object:
        weights, model = _current, str(getattr(model_config, "model", ""))
        before = files_state(model)
        loaded = load_model(self, vllm_config, model_config, *more, **named)
        weights.loads.append(LoadedModel(model, before, files_state(model), code_of(type(loaded))))
        _watch_model(loaded, weights)
        _watch_workers()
        return loaded

    return watched


def _watch_model(model: object, weights: Weights) -> None:
    """Weights that come later go through the model's own method, by whatever way they come."""
    load_weights = getattr(model, "load_weights", None)
    if load_weights is None:
        return

    @wraps(load_weights)
    def later(*arguments: object, **named: object) -> object:
        weights.move("weights were loaded into the running model")
        return load_weights(*arguments, **named)

    model.load_weights = later  # type: ignore[attr-defined]  # shadows the class's


def _moving(method: Callable[..., object], why: Callable[..., str]) -> Callable[..., object]:
    @wraps(method)
    def moving(*arguments: object, **named: object) -> object:
        reason = why(*arguments, **named)
        if reason:
            for weights in list(_all):
                weights.move(f"the engine was told to {reason}, which can replace its weights")
        return method(*arguments, **named)

    return moving


def _deep_sleep(worker: object, level: int = 1, *_: object, **__: object) -> str:
    return "sleep at level 2" if level >= 2 else ""


def code_of(kind: type) -> frozenset[str]:
    """The code of a model that is no part of vLLM: names of files, and digests of what is in them.

    Without their folders: remote code is copied through folders that are named by a path's hash.
    """
    names = {parent.__module__ for parent in kind.__mro__}
    names |= {name for name in list(sys.modules) if name.split(".")[0] == _REMOTE_CODE}
    found = set()
    for name in names:
        file = getattr(sys.modules.get(name), "__file__", None)
        if name.split(".")[0] not in _OWN_CODE and file is not None:
            found.add(f"{Path(file).name}:{_digest(Path(file))}")
    return frozenset(found)


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as source:
            return hashlib.sha256(source.read(_CODE_MAX_BYTES)).hexdigest()[:32]
    except OSError:
        # Equal to no other load's, so that nothing is shared by mistake.
        return f"unreadable-{os.urandom(16).hex()}"
