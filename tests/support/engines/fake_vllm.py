"""The part of vLLM that the connector's module imports, so that tests can drive its hooks."""

from __future__ import annotations

import enum
import importlib
import sys
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType, SimpleNamespace

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"

_OURS = ("connector", "messages", "stats")
"""Modules of tierd that derive from vLLM's classes."""


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorBase:
    """The state that vLLM's base class keeps for a connector."""

    def __init__(self, vllm_config: object, role: KVConnectorRole, kv_cache_config: object) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._metadata: object | None = None

    def bind_connector_metadata(self, metadata: object) -> None:
        self._metadata = metadata

    def clear_connector_metadata(self) -> None:
        self._metadata = None

    def has_connector_metadata(self) -> bool:
        return self._metadata is not None

    def _get_connector_metadata(self) -> object:
        assert self._metadata is not None
        return self._metadata


@dataclass
class KVConnectorStats:
    data: dict[str, float] = field(default_factory=dict)


def _modules() -> dict[str, ModuleType]:
    made = {}
    for depth in range(1, _V1.count(".") + 2):
        name = ".".join(_V1.split(".")[:depth])
        made[name] = ModuleType(name)
        made[name].__path__ = []
    base, metrics = ModuleType(f"{_V1}.base"), ModuleType(f"{_V1}.metrics")
    vars(base).update(
        KVConnectorBase_V1=KVConnectorBase,
        KVConnectorRole=KVConnectorRole,
        **{
            name: type(name, (), {})
            for name in (
                "SupportsHMA",
                "KVConnectorHandshakeMetadata",
                "KVConnectorMetadata",
                "KVConnectorWorkerMetadata",
            )
        },
    )
    vars(metrics).update(
        KVConnectorPromMetrics=type("KVConnectorPromMetrics", (), {}),
        KVConnectorStats=KVConnectorStats,
    )
    return {**made, base.__name__: base, metrics.__name__: metrics}


@cache
def connector_module() -> ModuleType:
    """The connector's module, with these classes in place of vLLM's.

    The classes, and the modules that hold them, are installed only during the import, so a real
    vLLM is not affected. All other modules of tierd are the ordinary ones.
    """
    stubs = _modules()
    names = [*stubs, *(f"tierd_connectors.vllm.{name}" for name in _OURS)]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    try:
        sys.modules.update(stubs)
        return importlib.import_module("tierd_connectors.vllm.connector")
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def ranks() -> dict[str, ModuleType]:
    """vLLM's module that tells a worker its ranks."""
    state = ModuleType("vllm.distributed.parallel_state")
    first = SimpleNamespace(rank_in_group=0)
    vars(state).update(get_pp_group=lambda: first, get_tp_group=lambda: first)
    return {**_modules(), state.__name__: state}


def config(**extra: object) -> SimpleNamespace:
    """A VllmConfig of one worker; `extra` are the connector's settings."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_role="kv_both",
            kv_connector_extra_config=extra,
            kv_load_failure_policy="recompute",
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=1),
        model_config=SimpleNamespace(enable_sleep_mode=False),
        speculative_config=None,
    )
