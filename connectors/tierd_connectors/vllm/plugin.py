"""Makes `"kv_connector": "TierdConnector"` known to vLLM, without importing the connector.

vLLM calls `register` through the entry point group `vllm.general_plugins`, in every
process, possibly more than once, and before it loads a model's weights.
"""

from __future__ import annotations

from tierd_connectors.vllm.identity.watch import watch

NAME = "TierdConnector"
MODULE = "tierd_connectors.vllm"


def register() -> None:
    """Register the connector unless it is registered already, and watch weights being loaded."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # A second registration is a ValueError there, and there is no other way to ask.
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    watch()
