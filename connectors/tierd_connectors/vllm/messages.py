"""What the connector's sides tell each other through the engine, in vLLM's classes."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tierd_connectors.vllm.work import RankInfo, StepWork


@dataclass
class TierdHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """A worker's namespace on its way to the scheduler."""

    info: RankInfo


@dataclass
class TierdProgress(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """What the ranks tell the scheduler: `Layerwise.take_changes`, and whether weights moved."""

    finishing: dict[str, int]
    moved: bool = False

    def aggregate(self, other: TierdProgress) -> TierdProgress:
        """Add another rank's."""
        for request_id, count in other.finishing.items():
            self.finishing[request_id] = self.finishing.get(request_id, 0) + count
        self.moved |= other.moved
        return self


@dataclass
class TierdMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """A step's work on its way to the workers."""

    work: StepWork
