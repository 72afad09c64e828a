"""What the scheduler side tells the worker side each step, and what both count.

Plain picklable values: they cross process boundaries with the engine's own messages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tierd.types import Namespace

_RESET = "+reset-"

NO_ADAPTER = ""
"""In place of a LoRA adapter's name: the model itself."""


class StoreItem(NamedTuple):
    """One block to store: its hash, its parent's hash, the engine's block id and its adapter."""

    block_hash: bytes
    parent: bytes
    block: int
    adapter: str = NO_ADAPTER


@dataclass(frozen=True, slots=True)
class Load:
    """Copy leased slots into the engine's blocks, for one request.

    `slots` has one list a rank, in the order of the handshake, each as long as `blocks`;
    it is empty for a load that could not be planned and must be reported as failed.
    `expires_ns` is CLOCK_MONOTONIC: a copy that ended later counts as failed.
    """

    request_id: str
    epoch: bytes
    expires_ns: int
    blocks: list[int]
    slots: list[list[int]]
    adapter: str = NO_ADAPTER

    @property
    def expired(self) -> bool:
        """Whether the slots may be others' by now."""
        return time.monotonic_ns() >= self.expires_ns


@dataclass(slots=True)
class StepWork:
    """One step's work for every worker.

    `reused` are the block ids that get a new owner in this step: whatever else they held
    must not be read any more. `reused_unknown` stands for any block. `idle` says that no
    token is computed in this step. `begun` are requests whose loads the engine takes for
    finished from this step on.
    """

    generation: str = ""
    idle: bool = False
    loads: list[Load] = field(default_factory=list)
    stores: list[StoreItem] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    reused_unknown: bool = False
    begun: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A worker's part of the handshake: its namespace, or why it takes no part."""

    namespace: Namespace | None
    refusal: str = ""


def of_generation(namespace: Namespace, generation: str) -> Namespace:
    """The namespace that an engine uses once its caches were reset by hand.

    A reset says that what was stored is no longer what the engine computes (its weights
    may have been replaced in place), so neither side may see the other's blocks again.
    """
    if not generation:
        return namespace
    return _of_weights(namespace, f"{namespace.weights}{_RESET}{generation}")


def is_generation(namespace: Namespace) -> bool:
    """Whether a namespace is one of an engine's own, after a reset: nobody comes back to it."""
    return _RESET in namespace.weights


def of_adapters(namespace: Namespace, revisions: Mapping[str, str]) -> dict[str, Namespace]:
    """The namespace of each LoRA adapter, by name, and the model's own.

    An adapter changes all KV, so its revision is a part of the weights. Raises NamespaceError
    if that makes a name that is too long.
    """
    namespaces = {NO_ADAPTER: namespace}
    for name, revision in revisions.items():
        weights = f"{namespace.weights}+lora:{name}={revision}"
        namespaces[name] = _of_weights(namespace, weights)
    return namespaces


def adapter_of(lora: object, revisions: Mapping[str, str]) -> str | None:
    """The name of a request's adapter; None if what its weights are is not known.

    A block's hash has an adapter's name and path, and both can stay while its weights change:
    its revision must be given, and it not have been replaced in the running engine.
    """
    if lora is None:
        return NO_ADAPTER
    name = getattr(lora, "lora_name", None)
    if name not in revisions or getattr(lora, "load_inplace", False):
        return None
    return str(name)


def names_its_kv(request: object, *, media_trusted: bool) -> bool:
    """Whether a request's block hashes name its KV for certain, and it wants a cache at all.

    A resumable session can take back tokens that it had computed. An image's identifier may be a
    client's, or be made from a client's; nothing tells it from one that was made from the image.
    """
    return not (
        (getattr(request, "mm_features", None) and not media_trusted)
        or getattr(request, "resumable", False)
        or getattr(request, "skip_reading_prefix_cache", False)
    )


def _of_weights(namespace: Namespace, weights: str) -> Namespace:
    changed = replace(namespace, weights=weights)
    changed.validate()
    return changed


class DrainedCounters:
    """Counters that several threads add to and one drains."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}

    def add(self, **amounts: float) -> None:
        """Add to each named counter."""
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] = self._values.get(name, 0) + amount

    def drain(self) -> dict[str, float]:
        """What was counted since the last call."""
        with self._lock:
            values, self._values = self._values, {}
        return values
