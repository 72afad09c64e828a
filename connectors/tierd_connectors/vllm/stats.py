"""The connector's counters, reported by vLLM in its log and on its /metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class _Counter(Protocol):
    """A counter of the metrics library that vLLM uses."""

    def inc(self, amount: float) -> None: ...


COUNTERS = {
    "lookups": "Requests whose prefix was looked up in tierd.",
    "lookup_timeouts": "Lookups that tierd did not answer before their deadline.",
    "loaded_tokens": "Prompt tokens that requests took from tierd instead of computing them.",
    "load_blocks": "Blocks copied from tierd, summed over ranks.",
    "load_bytes": "Bytes copied from tierd, summed over ranks.",
    "load_seconds": "Time spent copying from tierd, summed over ranks.",
    "load_early_starts": "Loads reported once their first layers were loaded, summed over ranks.",
    "load_failures": "Loads from tierd that failed and were recomputed, summed over ranks.",
    "store_blocks": "Blocks copied to tierd, summed over ranks.",
    "store_bytes": "Bytes copied to tierd, summed over ranks.",
    "store_seconds": "Time spent storing to tierd, including waits, summed over ranks.",
    "store_blocks_dropped": "Blocks not stored in tierd: queue full, reused early, or no daemon.",
    "errors": "Errors in the tierd connector that were treated as misses.",
}
"""Name and help of each counter; on /metrics its name is vllm:tierd_NAME_total."""


@dataclass
class TierdStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not typed here
    """Sums since the last report, by counter name."""

    def reset(self) -> None:
        """Clear all sums."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: TierdStats) -> TierdStats:
        """Add the sums of another worker or interval to these."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the nonzero sums, as vLLM's log line shows them."""
        shown: dict[str, int | float] = {}
        for name in COUNTERS:
            amount = self.data.get(name, 0)
            if amount:
                shown[f"tierd {name.replace('_', ' ')}"] = round(amount, 4)
        return shown

    def is_empty(self) -> bool:
        """Whether there are no sums to report."""
        return not self.data


class TierdPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM is not typed here
    """Counters on the engine's own metrics endpoint, one set per engine index."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[type, type],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[tuple[int, str], _Counter] = {}
        for name, meaning in COUNTERS.items():
            counter = self._counter_cls(
                name=f"vllm:tierd_{name}", documentation=meaning, labelnames=labelnames
            )
            for engine, labels in per_engine_labelvalues.items():
                self._counters[engine, name] = counter.labels(*labels)

    def observe(self, transfer_stats_data: Mapping[str, float], engine_idx: int = 0) -> None:
        """Add the sums of one TierdStats report."""
        for name, amount in transfer_stats_data.items():
            counter = self._counters.get((engine_idx, name))
            if counter is not None and amount > 0:
                counter.inc(amount)
