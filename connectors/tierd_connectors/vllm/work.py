"""One step's work, from the scheduler's side to the workers, and the counters of both sides.

All are plain picklable values: they travel between processes in the engine's own messages.
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
"""Stands for the model without a LoRA adapter."""


class StoreItem(NamedTuple):
    """One block to store: its hash, its parent's hash, the engine's block id and its adapter."""

    block_hash: bytes
    parent: bytes
    block: int
    adapter: str = NO_ADAPTER


@dataclass(frozen=True, slots=True)
class Load:
    """Copy leased slots into the engine's blocks, for one request.

    `slots` has one list per rank, in the order of the handshake, each as long as `blocks`.
    It is empty for a load that could not be planned and must be reported as failed.
    `expires_ns` is CLOCK_MONOTONIC; a copy that ends later counts as failed.
    """

    request_id: str
    epoch: bytes
    expires_ns: int
    blocks: list[int]
    slots: list[list[int]]
    adapter: str = NO_ADAPTER

    @property
    def expired(self) -> bool:
        """Whether the slots may hold other blocks now."""
        return time.monotonic_ns() >= self.expires_ns


@dataclass(slots=True)
class StepWork:
    """One step's work for every worker.

    `reused` are the block ids that get a new owner in this step: their previous content must no
    longer be read. `reused_unknown`: any block may have a new owner. `idle`: this step computes no
    token. `begun` are requests whose loads the engine treats as finished from this step on.
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
    """A worker's part of the handshake: its namespace, or why it has none."""

    namespace: Namespace | None
    refusal: str = ""


def of_generation(namespace: Namespace, generation: str) -> Namespace:
    """Return the namespace that an engine uses after a reset of its caches.

    After a reset the engine may compute other KV than the stored blocks (its weights may have been
    replaced in place), so the old and the new namespace must not share blocks.
    """
    if not generation:
        return namespace
    return _of_weights(namespace, f"{namespace.weights}{_RESET}{generation}")


def is_generation(namespace: Namespace) -> bool:
    """Whether a namespace belongs to one engine after a reset; no session uses it again later."""
    return _RESET in namespace.weights


def of_adapters(namespace: Namespace, revisions: Mapping[str, str]) -> dict[str, Namespace]:
    """Return the namespaces of the LoRA adapters by name, and the model's under NO_ADAPTER.

    An adapter changes all KV, so its revision is part of the weights. Raises NamespaceError if the
    name of the weights becomes too long.
    """
    namespaces = {NO_ADAPTER: namespace}
    for name, revision in revisions.items():
        weights = f"{namespace.weights}+lora:{name}={revision}"
        namespaces[name] = _of_weights(namespace, weights)
    return namespaces


def adapter_of(lora: object, revisions: Mapping[str, str]) -> str | None:
    """Return the name of a request's adapter; None if its weights are not known.

    A block hash covers an adapter's name and path, and both can stay while the weights change. So
    the settings must name its revision, and the running engine must not have replaced it in place.
    """
    if lora is None:
        return NO_ADAPTER
    name = getattr(lora, "lora_name", None)
    if name not in revisions or getattr(lora, "load_inplace", False):
        return None
    return str(name)


def names_its_kv(request: object, *, media_trusted: bool) -> bool:
    """Whether the request allows caching, and its block hashes identify its KV with certainty.

    A resumable session can take back computed tokens. A client may choose an image's identifier, or
    a part of it; it looks like an identifier that was computed from the image.
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
    """Counters that several threads add to and one thread drains."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}

    def add(self, **amounts: float) -> None:
        """Add to each named counter."""
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] = self._values.get(name, 0) + amount

    def drain(self) -> dict[str, float]:
        """Return the sums since the last call, by name."""
        with self._lock:
            values, self._values = self._values, {}
        return values
