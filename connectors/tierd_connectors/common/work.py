"""One step's work, from the scheduler's side to the workers.

All are plain picklable values: they travel between processes in the engine's own messages.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from tierd.types import Namespace
from tierd_connectors.common.namespaces import NO_ADAPTER


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
