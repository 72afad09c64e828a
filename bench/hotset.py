"""The hot set's snapshot of a node with a million resident blocks: during a stop and while serving.

The node has 8,000 chains of 150 blocks. All hang on one of 40 system prompts of 25 blocks, were
used by 1 to 8 requests, and were last used within the past day. The previous snapshot contains all
of them, as it does one interval later, so each must be read and merged. While a snapshot is
written, another task of the loop measures how late its timer fires.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from bench.common import write_result
from tests.support.blocks import ROOT, namespace
from tierd.clock import SystemClock
from tierd.config import HotsetConfig
from tierd.daemon.jobs.hotset import FILE, PAUSE_S, Snapshots
from tierd.daemon.node import Node
from tierd.daemon.options import NodeOptions
from tierd.hotset import HotSet

CHAINS = 8_000
PROMPTS = 40
PROMPT_BLOCKS = 25
CHAIN_BLOCKS = 150
BLOCK_BYTES = 64
SPACE = namespace(BLOCK_BYTES)
ROUNDS = 3
"""Rounds of each case; the median is reported."""

TICK_S = 0.001


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tierd-bench-") as scratch:
        node, blocks = filled()
        state = Path(scratch) / "state"
        snapshots = Snapshots(
            state, HotsetConfig(), node.host, SystemClock(), Counter(), lambda: time.time()
        )
        snapshots.open()
        gc.collect()
        gc.freeze()  # As the daemon does once it serves.
        results: dict[str, object] = {"blocks": blocks}
        for label, pause_s in (("at a stop", 0.0), ("while it serves", PAUSE_S)):
            (state / FILE).unlink(missing_ok=True)
            first = asyncio.run(written(snapshots, pause_s))
            rounds = [asyncio.run(written(snapshots, pause_s)) for _ in range(ROUNDS)]
            rounds.sort()
            seconds, _ = rounds[ROUNDS // 2]
            results[label] = {
                "first_s": round(first[0], 2),
                "with_one_before_s": round(seconds, 2),
                "loop_pause_ms_max": round(max(pause for _, pause in rounds) * 1e3, 1),
            }
            print(label, results[label], flush=True)
        with (state / FILE).open("rb") as file:
            found = sum(len(hot.run.hashes) for hot in HotSet(file, "snapshot"))
        assert found == blocks
        assert not snapshots.status()["why"]
        results["file_bytes"] = os.stat(state / FILE).st_size
        snapshots.close()
        node.memory.arena.close()
    write_result("hotset", results)  # type: ignore[arg-type]


def filled() -> tuple[Node, int]:
    """A node and its number of blocks."""
    blocks = CHAINS * (CHAIN_BLOCKS - PROMPT_BLOCKS) + PROMPTS * PROMPT_BLOCKS
    node = Node(
        NodeOptions(
            capacity_bytes=2 * (CHAINS * CHAIN_BLOCKS) * SPACE.slot_bytes,
            segment_bytes=64 << 20,
            lease_ttl_ms=1000,
            epoch=bytes(8),
        ),
        tiers=[],
        clock=SystemClock(),
    )
    space = node.register(SPACE)
    rng = random.Random("chains")
    for number in range(CHAINS):
        prompt = random.Random(number % PROMPTS)
        hashes = [prompt.randbytes(32) for _ in range(PROMPT_BLOCKS)]
        hashes += [rng.randbytes(32) for _ in range(CHAIN_BLOCKS - PROMPT_BLOCKS)]
        done = node.reserve(1, space, hashes, [ROOT, *hashes[:-1]])
        if done.reservation_id:
            node.commit(1, done.reservation_id, len(hashes))
        uses, age_s = rng.randrange(1, 9), rng.randrange(86_400)
        node.teach(SPACE, hashes, [uses] * len(hashes), [age_s] * len(hashes))
    assert len(space.items) == blocks, (len(space.items), blocks)
    return node, blocks


async def written(snapshots: Snapshots, pause_s: float) -> tuple[float, float]:
    """How long a snapshot takes, and the longest pause of the loop meanwhile."""
    late_s = 0.0

    async def tick() -> None:
        nonlocal late_s
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            late_s = max(late_s, time.perf_counter() - due)

    ticking = asyncio.create_task(tick())
    start = time.perf_counter()
    await snapshots.write(pause_s)
    seconds = time.perf_counter() - start
    ticking.cancel()
    return seconds, late_s


if __name__ == "__main__":
    main()
