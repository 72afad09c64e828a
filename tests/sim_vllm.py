"""TierdConnector without vLLM: the real class on the few names of vLLM's that it is made of.

The stand-ins last only as long as the import; whoever has a real vLLM is not disturbed.
"""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.sim_pool import Memory
from tierd.types import Namespace
from tierd_connectors.vllm_mover import Mover

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1"
_OURS = ("vllm", "vllm_messages", "vllm_stats")


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class _Base:
    """What the real base class keeps for its children."""

    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any = None) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._role = role
        self._metadata: Any = None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._metadata = None

    def has_connector_metadata(self) -> bool:
        return self._metadata is not None

    def _get_connector_metadata(self) -> Any:
        assert self._metadata is not None
        return self._metadata


class _Plain:
    """A class of vLLM's that is only inherited from."""


@contextmanager
def started_with(
    memory: Memory, namespace: Namespace, mover: Callable[..., Mover]
) -> Iterator[None]:
    """While this lasts, a worker of the connector that learns of its caches has this memory."""
    module = connector_module()
    group = SimpleNamespace(rank_in_group=0)
    groups = SimpleNamespace(
        get_pp_group=lambda: group,
        get_tp_group=lambda: SimpleNamespace(rank_in_group=namespace.tp_rank),
    )
    instead: dict[str, object] = {
        "importlib": SimpleNamespace(import_module=lambda name: groups),
        "check_engine": lambda *_: None,
        "kv_views": lambda *_: [],
        "kv_blocks": lambda *_: memory.blocks,
        "fingerprint_of": lambda *_: None,
        "namespace_of": lambda *_, **__: namespace,
        "PageMap": lambda *_: memory,
        "Mover": mover,
    }
    real = {name: getattr(module, name) for name in instead}
    try:
        vars(module).update(instead)
        yield
    finally:
        vars(module).update(real)


@cache
def connector_module() -> ModuleType:
    """`tierd_connectors.vllm`, and so its TierdConnector."""
    names = [f"tierd_connectors.{name}" for name in _OURS]
    kept = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    parts = _BASE.split(".")
    packages = [".".join(parts[: count + 1]) for count in range(len(parts))]
    stubs = {name: ModuleType(name) for name in [*packages, f"{_BASE}.base", f"{_BASE}.metrics"]}
    base, metrics = stubs[f"{_BASE}.base"], stubs[f"{_BASE}.metrics"]
    base.__dict__.update(KVConnectorBase_V1=_Base, KVConnectorRole=Role, SupportsHMA=_Plain)
    for name in ("HandshakeMetadata", "Metadata", "WorkerMetadata"):
        setattr(base, f"KVConnector{name}", type(f"KVConnector{name}", (), {}))
    for name in ("PromMetrics", "Stats"):
        setattr(metrics, f"KVConnector{name}", type(f"KVConnector{name}", (), {}))
    kept |= {name: sys.modules[name] for name in stubs if name in sys.modules}
    try:
        sys.modules.update(stubs)
        return importlib.import_module("tierd_connectors.vllm")
    finally:
        for name in [*stubs, *names]:
            sys.modules.pop(name, None)
        sys.modules.update(kept)
