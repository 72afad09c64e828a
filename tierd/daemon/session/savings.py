"""Counts the tokens that engines loaded instead of computing, from their LOADED messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tierd.core.l2.space import Space
from tierd.daemon.l3.tier import StorageTier
from tierd.daemon.session.demand import Demand


def count_loaded(
    counters: Counter[str],
    demand: Demand,
    tiers: Sequence[StorageTier],
    spaces: Sequence[Space],
    wanted: int,
    sources: Sequence[int],
    prefill_us: int,
) -> None:
    """Count the blocks of a request that an engine loaded, of `wanted` blocks.

    `sources` are the loaded blocks by source: host memory, then each tier. The time that the engine
    spent waiting and copying is not subtracted from the time saved.
    """
    block_tokens = spaces[0].namespace.block_tokens
    blocks = sum(sources)
    size_bytes = blocks * sum(space.namespace.block_bytes for space in spaces)
    brought = 0
    for tier, count in zip(tiers, sources[1:], strict=False):
        tier.counters["loaded_blocks_total"] += count
        tier.counters["loaded_tokens_total"] += count * block_tokens
        brought += count
    counters["requested_blocks_total"] += wanted
    counters["requested_tokens_total"] += wanted * block_tokens
    counters["loaded_blocks_total"] += blocks
    counters["loaded_bytes_total"] += size_bytes
    counters["host_loaded_blocks_total"] += blocks - brought
    counters["host_loaded_tokens_total"] += (blocks - brought) * block_tokens
    counters["saved_tokens_total"] += blocks * block_tokens
    counters["saved_us_total"] += prefill_us
    tally = demand.of(spaces[0])
    tally.requested_tokens += wanted * block_tokens
    tally.loaded_tokens += blocks * block_tokens
    tally.loaded_bytes += size_bytes
