"""Checks of capacity and eviction."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tierd.backend import Backend, BackendStats, Outcome
from tierd.testing.suite.blocks import (
    NAMESPACE,
    OTHER_NAMESPACE,
    ROOT,
    contains,
    get,
    make_block,
    put,
)
from tierd.testing.suite.hooks import Hooks
from tierd.types import PAGE_BYTES, slot_bytes_for


class Bounds(Hooks, abstract=True):
    """A tier with a capacity evicts the right blocks, and no more than it must."""

    @property
    def capacity_bytes(self) -> int:
        """Capacity for about `bounded_blocks` blocks, in bytes."""
        return self.bounded_blocks * (slot_bytes_for(self.block_bytes) + 2 * PAGE_BYTES)

    @contextlib.asynccontextmanager
    async def bounded_backend(self, tmp_path: Path) -> AsyncIterator[Backend]:
        """Make a backend of this capacity; skip the test if the tier does not bound itself."""
        if not self.bounded:
            pytest.skip("bounded is False: the storage behind this tier bounds itself")
        made = await self.make_backend(tmp_path, self.capacity_bytes)
        try:
            yield made
        finally:
            await made.close()

    async def test_capacity(self, tmp_path: Path) -> None:
        """The tier would fill the disk, or stop taking blocks once it is full."""
        async with self.bounded_backend(tmp_path) as backend:
            for turn in range(30):
                blocks = self.chain(f"capacity {turn}", 8)
                assert await put(backend, blocks) == [Outcome.STORED] * 8
                self._check_bounds(backend.stats())
                assert await get(backend, blocks) == [Outcome.HIT] * 8
            assert backend.stats().blocks >= self.bounded_blocks // 2
            async with self.reopened(backend) as again:
                self._check_bounds(again.stats())
                assert again.stats().blocks >= self.bounded_blocks // 2
                assert await put(again, self.chain("after", 8)) == [Outcome.STORED] * 8
                self._check_bounds(again.stats())

    async def test_what_is_used_stays(self, tmp_path: Path) -> None:
        """Blocks that host memory serves would look unused in the tier and be evicted first."""
        async with self.bounded_backend(tmp_path) as backend:
            used = self.chain("in host memory", 4)
            await put(backend, used)
            for turn in range(30):
                assert await put(backend, self.chain(f"once {turn}", 8)) == [Outcome.STORED] * 8
                hashes = [block.key.block_hash for block in used]
                assert await backend.use_many(NAMESPACE, hashes) == [True] * 4
            assert await get(backend, used) == [Outcome.HIT] * 4

    async def test_prefix_stays_whole(self, tmp_path: Path) -> None:
        """Eviction would leave a hole in a prefix and make all blocks behind it useless."""
        async with self.bounded_backend(tmp_path) as backend:
            chance = random.Random(5)
            chains = [self.chain(f"prefix {number}", 6) for number in range(20)]
            # The last chain shares its first blocks with the first one.
            trunk = chains[0][:3]
            branch = make_block("branch", trunk[-1].key.block_hash, self.block_bytes)
            chains.append([*trunk, branch])
            for _ in range(80):
                chain = chance.choice(chains)
                await put(backend, chain[: chance.randint(1, len(chain))])
                await get(backend, chance.choice(chains))
                for each in chains:
                    held = await contains(backend, each)
                    assert held == sorted(held, reverse=True)

    async def test_larger_than_the_tier(self, tmp_path: Path) -> None:
        """A block larger than the capacity would evict all others before it is refused."""
        async with self.bounded_backend(tmp_path) as backend:
            blocks = self.chain("small", 4)
            await put(backend, blocks)
            huge = make_block("huge", ROOT, self.capacity_bytes + 1, OTHER_NAMESPACE)
            assert await put(backend, [huge]) == [Outcome.REFUSED]
            assert await get(backend, [huge]) == [Outcome.MISS]
            assert await get(backend, blocks) == [Outcome.HIT] * 4

    async def test_chain_longer_than_the_tier(self, tmp_path: Path) -> None:
        """A prompt larger than the tier would evict its own first blocks and be useless."""
        async with self.bounded_backend(tmp_path) as backend:
            blocks = self.chain("long", 3 * self.bounded_blocks)
            outcomes = await put(backend, blocks)
            stored = outcomes.count(Outcome.STORED)
            assert stored >= self.bounded_blocks // 2
            assert outcomes == [Outcome.STORED] * stored + [Outcome.REFUSED] * (
                len(blocks) - stored
            )
            assert await get(backend, blocks[:stored]) == [Outcome.HIT] * stored
            assert await put(backend, blocks[stored : stored + 4]) == [Outcome.REFUSED] * 4

    async def test_namespace_finds_room(self, tmp_path: Path) -> None:
        """Blocks of an old model would fill the tier, and a new model could never store any."""
        async with self.bounded_backend(tmp_path) as backend:
            for number in range(8):
                await put(backend, self.chain(f"old {number}", 8))
            for number in range(8):
                blocks = self.chain(f"new {number}", 4, OTHER_NAMESPACE)
                assert await put(backend, blocks) == [Outcome.STORED] * 4
                self._check_bounds(backend.stats())
                assert await get(backend, blocks) == [Outcome.HIT] * 4

    def _check_bounds(self, stats: BackendStats) -> None:
        assert stats.capacity_bytes == self.capacity_bytes
        assert stats.used_bytes <= stats.capacity_bytes
