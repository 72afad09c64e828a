"""Checks that stored blocks can be loaded again."""

from __future__ import annotations

import asyncio

import pytest

from tierd.backend import Backend, Outcome
from tierd.testing.suite.blocks import (
    NAMESPACE,
    OTHER_NAMESPACE,
    Damage,
    contains,
    get,
    make_chain,
    put,
)
from tierd.testing.suite.hooks import Hooks
from tierd.types import PAGE_BYTES


class StoringTests(Hooks, abstract=True):
    """Stored blocks are found complete, and only under their own keys."""

    @pytest.mark.parametrize(
        "length",
        [1, 100, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES, 128 << 10, 2 << 20],
    )
    async def test_round_trip(self, backend: Backend, length: int) -> None:
        """A block of some size would come back with other bytes, or another header."""
        blocks = make_chain(f"size {length}", 3, length)
        assert await put(backend, blocks) == [Outcome.STORED] * 3
        assert await get(backend, blocks) == [Outcome.HIT] * 3

    async def test_slot_larger_than_block(self, backend: Backend) -> None:
        """A block shorter than its slot would be padded, truncated, or overwrite other slots."""
        blocks = make_chain("short", 4, 10)
        assert await put(backend, blocks, slot_bytes=4 * PAGE_BYTES) == [Outcome.STORED] * 4
        assert await get(backend, blocks, slot_bytes=4 * PAGE_BYTES) == [Outcome.HIT] * 4

    async def test_missing(self, backend: Backend) -> None:
        """An empty tier would report blocks, or raise instead of returning MISS."""
        blocks = self.chain("missing", 3)
        assert await contains(backend, blocks) == [False] * 3
        assert await get(backend, blocks) == [Outcome.MISS] * 3
        assert await backend.delete_many(NAMESPACE, [b.key.block_hash for b in blocks]) == 0

    async def test_empty_batch(self, backend: Backend) -> None:
        """An empty batch would count as a failure of the whole tier."""
        assert await backend.contains_many(NAMESPACE, []) == []
        assert await backend.use_many(NAMESPACE, []) == []
        assert await backend.get_into(NAMESPACE, []) == []
        assert await backend.put_many(NAMESPACE, []) == []
        assert await backend.delete_many(NAMESPACE, []) == 0

    async def test_use(self, backend: Backend) -> None:
        """The daemon would never rewrite blocks that the tier lost, or rewrite blocks it has."""
        blocks = self.chain("used", 40)
        hashes = [block.key.block_hash for block in blocks]
        assert await backend.use_many(NAMESPACE, hashes) == [False] * 40
        await put(backend, blocks)
        gone = hashes[3], hashes[35]
        await backend.delete_many(NAMESPACE, gone)
        assert await backend.use_many(NAMESPACE, hashes) == [h not in gone for h in hashes]
        assert not any(await backend.use_many(OTHER_NAMESPACE, hashes))
        kept = [block for block in blocks if block.key.block_hash not in gone]
        assert await get(backend, kept) == [Outcome.HIT] * 38

    async def test_put_again(self, backend: Backend) -> None:
        """A block stored twice would be written twice, or lost."""
        blocks = self.chain("again", 3)
        assert await put(backend, blocks[:2]) == [Outcome.STORED] * 2
        outcomes = await put(backend, [blocks[0], blocks[2], blocks[1]])
        assert outcomes == [Outcome.PRESENT, Outcome.STORED, Outcome.PRESENT]
        assert await get(backend, blocks) == [Outcome.HIT] * 3
        assert backend.stats().blocks == 3

    async def test_put_twice_in_a_batch(self, backend: Backend) -> None:
        """A batch that names a block twice would hang, or store it twice."""
        [block] = self.chain("twice", 1)
        outcomes = await put(backend, [block, block])
        assert sorted(o.value for o in outcomes) == ["present", "stored"]
        assert await get(backend, [block, block]) == [Outcome.HIT] * 2
        assert backend.stats().blocks == 1

    async def test_put_at_once(self, backend: Backend) -> None:
        """Engines that store one prefix at the same time would leave two copies, or none."""
        blocks = self.chain("at once", 8)
        every = await asyncio.gather(*(put(backend, blocks) for _ in range(4)))
        for outcomes in zip(*every, strict=True):
            assert sorted(o.value for o in outcomes) == ["present"] * 3 + ["stored"]
        assert await get(backend, blocks) == [Outcome.HIT] * 8
        assert backend.stats().blocks == 8

    async def test_mixed_batch(self, backend: Backend) -> None:
        """A block's outcome would be reported for its neighbour in the batch."""
        blocks = self.chain("mixed", 9)
        assert await put(backend, blocks[::2]) == [Outcome.STORED] * 5
        await self.damage(backend, blocks[4].key, Damage.FLIP_PAYLOAD, 7)
        hit, miss = Outcome.HIT, Outcome.MISS
        expected = [hit, miss, hit, miss, Outcome.CORRUPT, miss, hit, miss, hit]
        assert await contains(backend, blocks) == [True, False] * 4 + [True]
        assert await get(backend, blocks) == expected

    async def test_namespaces(self, backend: Backend) -> None:
        """One model would be served another model's KV of the same tokens."""
        ours = self.chain("shared", 2)
        theirs = self.chain("shared", 2, OTHER_NAMESPACE)
        assert ours[0].key.block_hash == theirs[0].key.block_hash
        assert await put(backend, ours) == [Outcome.STORED] * 2
        assert await get(backend, theirs) == [Outcome.MISS] * 2
        assert await put(backend, theirs) == [Outcome.STORED] * 2
        assert await get(backend, ours) == [Outcome.HIT] * 2
        assert await get(backend, theirs) == [Outcome.HIT] * 2
        assert await backend.delete_many(NAMESPACE, [ours[0].key.block_hash]) == 1
        assert await contains(backend, theirs) == [True, True]
