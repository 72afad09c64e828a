"""The options of a node; `Node.configure` changes those that a reload can change."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierd.config import Config, CopyConfig, PrefetchConfig
from tierd.core.hints import PIN_MAX_S, PIN_SHARE
from tierd.eviction import L2_DEFAULT
from tierd.memory.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """The options of one node. Host memory keeps at least `min_bytes` under memory pressure."""

    capacity_bytes: int
    lease_ttl_ms: int
    epoch: bytes
    """Names this incarnation of the daemon."""
    min_bytes: int = 0
    pin_share: float = PIN_SHARE
    pin_max_s: int = PIN_MAX_S
    eviction: str = L2_DEFAULT
    segment_bytes: int | None = None
    """Size of each segment; None: derived from the capacity and the number of namespaces."""
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    copy: CopyConfig = field(default_factory=CopyConfig)
    placement: Placement | None = None

    @classmethod
    def of(cls, config: Config, epoch: bytes, placement: Placement) -> NodeOptions:
        """Take the options from a configuration."""
        host = config.host
        return cls(
            capacity_bytes=host.capacity,
            lease_ttl_ms=host.lease_ttl_ms,
            epoch=epoch,
            min_bytes=host.min_bytes,
            pin_share=host.pin_share,
            pin_max_s=host.pin_max_s,
            eviction=host.eviction.value,
            prefetch=config.prefetch,
            copy=config.copy,
            placement=placement,
        )
