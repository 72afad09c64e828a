"""The namespaces of one engine: one for each rank and adapter, and new ones after a reset.

An engine that may compute other KV than before changes to a new generation: namespaces that no
other engine shares. Both sides derive their namespaces from the generation's name.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierd.client import Client, Handle
    from tierd.types import Namespace

logger = logging.getLogger("vllm.tierd")

NO_ADAPTER = ""
"""Stands for the model without a LoRA adapter."""

_RESET = "+reset-"


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


def _of_weights(namespace: Namespace, weights: str) -> Namespace:
    changed = replace(namespace, weights=weights)
    changed.validate()
    return changed


class EngineNamespaces:
    """The namespaces of all ranks, registered with the daemon for the engine's scheduler."""

    def __init__(
        self, client: Client, namespaces: Sequence[Namespace], loras: Mapping[str, str]
    ) -> None:
        """`loras` maps adapters to their revisions."""
        self._client = client
        self._namespaces = list(namespaces)
        self._loras = loras
        self.generation = ""
        """Name of the present generation; empty for the first."""
        self.handles = self._register(namespaces)
        """The handles of all ranks, by adapter."""
        self._refusals: set[str] = set()
        self._connected: bool | None = None

    @property
    def ready(self) -> bool:
        """Whether the daemon has accepted the model's namespace of every rank."""
        return all(handle.ready for handle in self.handles[NO_ADAPTER])

    def change(self) -> None:
        """Change to a new, empty generation. The daemon drops the blocks of a former one."""
        generation = secrets.token_hex(8)
        fresh = [of_generation(namespace, generation) for namespace in self._namespaces]
        former = self.handles
        # Set both or, after an error, neither: workers derive their namespace from the generation.
        self.generation, self.handles = generation, self._register(fresh)
        for handle in itertools.chain(*former.values()):
            self._client.unregister(handle, worthless=is_generation(handle.namespace))
        logger.info(
            "tierd: caches were reset; this engine now uses its own namespace, %s",
            fresh[0].digest.hex(),
        )

    def close(self) -> None:
        """Have the daemon drop the blocks that no other session can use."""
        for handle in itertools.chain(*self.handles.values()):
            if is_generation(handle.namespace):
                self._client.unregister(handle, worthless=True)

    def log_changes(self) -> None:
        """Log each refusal of the daemon once, and each loss and return of the connection."""
        for handle in itertools.chain(*self.handles.values()):
            if handle.refusal is not None and handle.refusal not in self._refusals:
                self._refusals.add(handle.refusal)
                logger.warning("tierd: the daemon refuses this engine: %s", handle.refusal)
        if self._client.connected != self._connected:
            if self._connected is not None:
                state = "is back" if self._client.connected else "is lost: every lookup misses"
                logger.warning("tierd: the connection to the daemon %s", state)
            self._connected = self._client.connected

    def _register(self, namespaces: Iterable[Namespace]) -> dict[str, list[Handle]]:
        handles: dict[str, list[Handle]] = {}
        for namespace in namespaces:
            for adapter, its_own in of_adapters(namespace, self._loras).items():
                handles.setdefault(adapter, []).append(self._client.begin_register(its_own))
        return handles


class RankNamespaces:
    """The namespaces of one rank, registered with the daemon for the engine's worker.

    An adapter's namespace is registered on first use, as it takes the daemon's memory.
    """

    def __init__(self, client: Client, namespace: Namespace, loras: Mapping[str, str]) -> None:
        """`loras` maps adapters to their revisions."""
        self._client = client
        self._loras = loras
        self._namespaces = of_adapters(namespace, loras)
        self._handles = {NO_ADAPTER: client.begin_register(namespace)}

    @property
    def model(self) -> Handle:
        """The handle of the model without an adapter."""
        return self._handles[NO_ADAPTER]

    def of(self, adapter: str) -> Handle | None:
        """Return an adapter's handle; None if it is not registered yet."""
        return self._handles.get(adapter)

    def register(self, adapter: str) -> Handle:
        """Register an adapter's namespace."""
        handle = self._handles[adapter] = self._client.begin_register(self._namespaces[adapter])
        return handle

    @property
    def answered(self) -> bool:
        """Whether the daemon has answered every registration."""
        return all(handle.ready or handle.refusal for handle in self._handles.values())

    def change(self, namespace: Namespace) -> list[Handle]:
        """Change to another generation's namespace. Returns the former handles, to `drop`."""
        former = list(self._handles.values())
        self._namespaces = of_adapters(namespace, self._loras)
        self._handles = {NO_ADAPTER: self._client.begin_register(namespace)}
        return former

    def drop(self, handles: Iterable[Handle]) -> None:
        """End the use of handles. The daemon drops the blocks that no other session can use."""
        for handle in handles:
            self._client.unregister(handle, worthless=is_generation(handle.namespace))

    def close(self) -> None:
        """Have the daemon drop the blocks that no other session can use."""
        for handle in self._handles.values():
            if is_generation(handle.namespace):
                self._client.unregister(handle, worthless=True)
