"""vLLM's connector. `kv_connector_module_path` names this package.

The plugin runs in every vLLM process before vLLM itself is imported. `TierdConnector` needs all of
vLLM, so it is imported on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierd_connectors.vllm.connector import TierdConnector

__all__ = ["TierdConnector"]


def __getattr__(name: str) -> object:
    if name == "TierdConnector":
        from tierd_connectors.vllm.connector import TierdConnector

        return TierdConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
