"""Flushes of a node on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tests.support import blocks
from tests.support.tiers.bench import PAGE, SPACE, Bench, Tier
from tierd.backend import GetRequest, GetResult
from tierd.daemon.jobs.flush import FlushJob
from tierd.errors import BackendError
from tierd.types import BlockKey

OTHER = blocks.namespace(PAGE, model="other")


class SlowTier(Tier):
    """A tier that is slow to keep a mark and to delete, and may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.mark_takes_s = 0.0
        self.marking = False
        self.delete_takes_s = 0.0
        self.delete_fails = 0
        self.deleting = False
        self.late_s = 0.0

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        late_s = self.late_s
        results = await super().get_into(namespace, requests)
        await asyncio.sleep(late_s)
        return results

    async def add_mark(self, mark: str) -> None:
        self.marking = True
        await asyncio.sleep(self.mark_takes_s)
        await super().add_mark(mark)

    async def delete_many(self, namespace: bytes, hashes: Sequence[bytes]) -> int:
        self.deleting = True
        await asyncio.sleep(self.delete_takes_s)
        if self.delete_fails:
            self.delete_fails -= 1
            raise BackendError("the disk is on fire")
        return await super().delete_many(namespace, hashes)


def now(bench: Bench, block_hash: bytes) -> BlockKey:
    """The current key of a block in the first tier."""
    return BlockKey(bench.tiers[0].epochs.now(SPACE.digest), block_hash)


async def flush(
    bench: Bench, prefix: str = "", *, host: bool = True, tiers: list[int] | None = None
) -> FlushJob:
    """Run a flush to its end."""
    work = begin(bench, prefix, host=host, tiers=tiers)
    await work.done.wait()
    return work


def begin(
    bench: Bench, prefix: str = "", *, host: bool = True, tiers: list[int] | None = None
) -> FlushJob:
    flushes = bench.node.flushes
    numbers = list(range(len(bench.tiers))) if tiers is None else tiers
    work = flushes.begin(prefix, host=host, numbers=numbers)
    bench.node.spawn(lambda: flushes.run(work), "flush")
    return work


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(100):
        while not condition():
            await asyncio.sleep(0.001)
