"""Makes `"kv_connector": "TierdConnector"` known to vLLM, without importing the connector.

vLLM calls `register` through the entry point group `vllm.general_plugins` in every process,
possibly more than once, before it loads a model's weights.
"""

from __future__ import annotations

from tierd_connectors.vllm.identity.watch import watch

NAME = "TierdConnector"
MODULE = "tierd_connectors.vllm"


def register() -> None:
    """Register the connector if it is not registered yet, and watch the loading of weights."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # A second registration raises ValueError, and vLLM has no public way to check.
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    watch()
