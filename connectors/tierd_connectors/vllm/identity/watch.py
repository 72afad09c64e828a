"""Watches the loading of weights into an engine's process, and their later replacement.

A connector is made after its engine has read the weights, so the files on disk may have changed
since. vLLM runs plugins before that: `watch` makes vLLM's loaders record the state of a model's
files before and after each load. `Weights` records the loads of one engine of the process, and
later calls of the methods with which vLLM changes weights in a running engine.

Not detected here: a function that a caller sends to the workers (`collective_rpc` with a callable)
and that writes to parameters itself. The scheduler's side detects the call (`identity.calls`).
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
"""Methods of vLLM's worker that replace weights, or run a caller's code on them."""

_OWN_CODE = frozenset({"vllm", "transformers", "torch"}) | sys.stdlib_module_names
"""Packages whose version is in the namespace, and Python's own; their code is not digested."""

_REMOTE_CODE = "transformers_modules"
"""The package under which transformers imports code of a model repository."""

_CODE_MAX_BYTES = 1 << 24
"""Bytes of one source file that are digested; longer files are not code."""


class LoadedModel(NamedTuple):
    """One loaded model: its name, its files' states before and after the load, and its code."""

    model: str
    before: FileState | None
    after: FileState | None
    code: frozenset[str]


@dataclass(eq=False)
class Weights:
    """The loads of one engine of this process. `moved`: why its weights may differ from them."""

    loads: list[LoadedModel] = field(default_factory=list)
    moved: str = ""
    taken: bool = False

    def move(self, reason: str) -> None:
        """Record that weights are about to change. The first reason is kept."""
        if self.loads or self.taken:
            self.moved = self.moved or reason


_current = Weights()
_all: weakref.WeakSet[Weights] = weakref.WeakSet([_current])
_watched: set[type] = set()


def take() -> Weights:
    """Return the loads since the last call, by the engine that is registering its KV."""
    global _current
    taken, _current = _current, Weights()
    taken.taken = True
    _all.add(_current)
    # `watch` may not know the engine's loader.
    _watch_workers()
    return taken


def watch() -> None:
    """Make vLLM's loaders record loads for `take`. Call before the first load; may be repeated."""
    loaders = importlib.import_module("vllm.model_executor.model_loader")
    known = list(getattr(loaders, "_LOAD_FORMAT_TO_MODEL_LOADER", {}).values())
    for loader in (loaders.BaseModelLoader, *known):
        if loader not in _watched and "load_model" in vars(loader):
            _watched.add(loader)
            loader.load_model = _watching(loader.load_model)


def _watch_workers() -> None:
    """Make vLLM's workers, on all platforms, record replacements of weights."""
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
    """Record later loads into the model: all of them call the model's own `load_weights`."""
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
                weights.move(f"a call asked the engine to {reason}, which can replace its weights")
        return method(*arguments, **named)

    return moving


def _deep_sleep(worker: object, level: int = 1, *_: object, **__: object) -> str:
    return "sleep at level 2" if level >= 2 else ""


def code_of(kind: type) -> frozenset[str]:
    """Return a model's code outside of vLLM, as names of files with digests of their content.

    Names have no folders: remote code is copied through folders that are named by a path's hash.
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
        # Differs from every other load, so that no KV is shared by mistake.
        return f"unreadable-{os.urandom(16).hex()}"
