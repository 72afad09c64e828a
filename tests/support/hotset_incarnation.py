"""One incarnation of a daemon's hot set."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from tests.support.blocks import chain, namespace
from tierd.clock import SystemClock
from tierd.config import HotsetConfig
from tierd.daemon.jobs.hotset import Snapshots
from tierd.daemon.node import Node
from tierd.daemon.options import NodeOptions
from tierd.types import Namespace

SPACE = namespace()


NOW_S = 1_000_000.0


class HotsetIncarnation:
    """A node of which only the hot set runs, with a wall clock that the test sets."""

    def __init__(self, directory: Path, capacity_bytes: int = 1 << 20, **keys: object) -> None:
        self.node = Node(
            NodeOptions(
                capacity_bytes=capacity_bytes,
                segment_bytes=capacity_bytes >> 4,
                lease_ttl_ms=1000,
                epoch=bytes(8),
            ),
            tiers=[],
            clock=SystemClock(),
        )
        self.wall_s = NOW_S
        self.counters: Counter[str] = Counter()
        config = HotsetConfig(**keys)  # type: ignore[arg-type]
        self.snapshots = Snapshots(
            directory,
            config,
            self.node.host,
            SystemClock(),
            self.counters,
            lambda: self.wall_s,
        )
        self.snapshots.open()

    def close(self) -> None:
        self.snapshots.close()
        self.node.memory.arena.close()

    def store(
        self, count: int, tag: object, uses: int, age_s: int, space: Namespace = SPACE
    ) -> list[bytes]:
        """Store a chain with the given number and age of uses."""
        hashes, parents = chain(count, tag)
        own = self.node.host.spaces.get(space.digest) or self.node.register(space)
        done = self.node.reserve(1, own, hashes, parents)
        assert min(done.slots) >= 0
        self.node.commit(1, done.reservation_id, count)
        self.node.teach(space, hashes, [uses] * count, [age_s] * count)
        return hashes

    def write(self, pause_s: float = 0.0) -> None:
        asyncio.run(self.snapshots.write(pause_s))
