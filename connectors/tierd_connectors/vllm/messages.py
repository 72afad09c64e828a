"""Messages between the scheduler's and the workers' side, in the classes that vLLM transports."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tierd_connectors.common.work import RankInfo, StepWork


@dataclass
class TierdHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """A worker's namespace, sent to the scheduler."""

    info: RankInfo


@dataclass
class TierdProgress(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """A rank's report: `Layerwise.take_changes`, and whether its weights were replaced."""

    finishing: dict[str, int]
    moved: bool = False

    def aggregate(self, other: TierdProgress) -> TierdProgress:
        """Add another rank's report to this one."""
        for request_id, count in other.finishing.items():
            self.finishing[request_id] = self.finishing.get(request_id, 0) + count
        self.moved |= other.moved
        return self


@dataclass
class TierdMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """A step's work, sent to the workers."""

    work: StepWork
