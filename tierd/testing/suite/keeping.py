"""Checks of deletes, restarts, scans, marks, statistics and closing."""

from __future__ import annotations

import asyncio

from tierd.backend import Backend, GetRequest, Outcome
from tierd.testing.suite.blocks import (
    MARKS_ASKED,
    NAMESPACE,
    OTHER_NAMESPACE,
    ROOT,
    CanarySlots,
    Damage,
    check_result,
    contains,
    get,
    indexed,
    put,
    scanned,
)
from tierd.testing.suite.hooks import Hooks
from tierd.types import slot_bytes_for


class Keeping(Hooks, abstract=True):
    """Deleted blocks are gone, all others stay, and scans and statistics agree with both."""

    async def test_delete(self, backend: Backend) -> None:
        """Blocks that an operator flushed would still be served, or return after a restart."""
        blocks = self.chain("delete", 6)
        await put(backend, blocks)
        gone = [block.key.block_hash for block in blocks[3:]]
        assert await backend.delete_many(NAMESPACE, [*gone, gone[0], ROOT]) == 3
        expected = [Outcome.HIT] * 3 + [Outcome.MISS] * 3
        assert await contains(backend, blocks) == [True] * 3 + [False] * 3
        assert await get(backend, blocks) == expected
        async with self.reopened(backend) as again:
            assert await get(again, blocks) == expected
            assert await put(again, blocks[3:]) == [Outcome.STORED] * 3
            assert await get(again, blocks) == [Outcome.HIT] * 6

    async def test_delete_while_putting(self, backend: Backend) -> None:
        """Deleting a block while it is being stored would half-delete it, or hang a call."""
        blocks = self.chain("delete while putting", 8)
        hashes = [block.key.block_hash for block in blocks]
        outcomes, dropped = await asyncio.gather(
            put(backend, blocks), backend.delete_many(NAMESPACE, hashes)
        )
        assert outcomes == [Outcome.STORED] * 8
        held = await contains(backend, blocks)
        assert sum(held) == 8 - dropped
        assert [o is Outcome.HIT for o in await get(backend, blocks)] == held

    async def test_reopen(self, backend: Backend) -> None:
        """A restart would lose blocks that were reported as stored."""
        blocks = self.chain("reopen", 20)
        theirs = self.chain("reopen", 5, OTHER_NAMESPACE)
        await put(backend, blocks)
        await put(backend, theirs)
        before = backend.stats()
        async with self.reopened(backend) as again:
            assert again.stats() == before
            assert await contains(again, blocks) == [True] * 20
            assert await get(again, blocks) == [Outcome.HIT] * 20
            assert await get(again, theirs) == [Outcome.HIT] * 5
            assert await put(again, blocks) == [Outcome.PRESENT] * 20

    async def test_scan(self, backend: Backend) -> None:
        """fsck, scrub and warm would miss blocks, or see deleted ones."""
        blocks = self.chain("scan", 10) + self.chain("scan", 3, OTHER_NAMESPACE)
        await put(backend, blocks[:10])
        await put(backend, blocks[10:])
        await backend.delete_many(NAMESPACE, [blocks[0].key.block_hash])
        truth = sorted(block.header for block in blocks[1:])
        assert sorted(await scanned(backend)) == truth
        async with self.reopened(backend) as again:
            assert sorted(await scanned(again)) == truth

    async def test_delete_while_scanning(self, backend: Backend) -> None:
        """A job that deletes the blocks that a scan shows would leave blocks behind."""
        blocks = [*self.chain("scanned", 40), *self.chain("scanned", 40, OTHER_NAMESPACE)]
        for namespace in (NAMESPACE, OTHER_NAMESPACE):
            mine = [block for block in blocks if block.key.namespace == namespace]
            assert await put(backend, mine) == [Outcome.STORED] * len(mine)
        await indexed(backend)
        seen = 0
        async for step in backend.scan():
            for header in step.headers:
                seen += 1
                await backend.delete_many(header.key.namespace, [header.key.block_hash])
        assert seen == len(blocks)
        assert await scanned(backend) == []

    async def test_marks(self, backend: Backend) -> None:
        """A flush's mark would be lost, and flushed blocks served again after a restart."""
        assert await backend.marks() == []
        marks = [f"0a1b2c3d-{number:04x}" for number in range(40)]
        for mark in [*marks, marks[0]]:
            await backend.add_mark(mark)
        assert sorted(await backend.marks()) == marks
        await backend.drop_marks([*marks[:30], "never-there"])
        assert sorted(await backend.marks()) == marks[30:]
        async with self.reopened(backend) as again:
            assert sorted(await again.marks()) == marks[30:]

    async def test_marks_are_no_blocks(self, backend: Backend) -> None:
        """A mark would be counted, scanned and deleted like a block."""
        blocks = self.chain("marked", 5)
        await put(backend, blocks)
        before = backend.stats()
        await backend.add_mark("mark-1")
        assert len(await scanned(backend)) == 5
        assert backend.stats() == before
        await backend.delete_many(NAMESPACE, [block.key.block_hash for block in blocks])
        assert await backend.marks() == ["mark-1"]

    async def test_many_marks(self, backend: Backend) -> None:
        """Marks beyond the first page of a server's listing would be missing."""
        marks = [f"mark-{number:04}" for number in range(MARKS_ASKED)]
        for at in range(0, len(marks), 32):
            await asyncio.gather(*(backend.add_mark(mark) for mark in marks[at : at + 32]))
        assert sorted(await backend.marks()) == marks

    async def test_stats(self, backend: Backend) -> None:
        """Status and metrics would show wrong counts for the tier."""
        assert backend.stats().blocks == 0
        blocks = self.chain("stats", 5)
        await put(backend, blocks)
        stats = backend.stats()
        assert stats.blocks == 5
        assert stats.used_bytes >= 5 * self.block_bytes
        assert stats.index_complete
        await backend.delete_many(NAMESPACE, [blocks[0].key.block_hash])
        assert backend.stats().blocks == 4
        for name, value in backend.counters.items():
            assert name.endswith("_total")
            assert value >= 0

    async def test_corrupt_is_counted(self, backend: Backend) -> None:
        """A failing disk would look like a cold cache, since no counter shows its damage."""
        blocks = self.chain("counted", 3)
        await put(backend, blocks)
        before = backend.counters["corrupt_total"]
        await self.damage(backend, blocks[0].key, Damage.FLIP_PAYLOAD, 0)
        await get(backend, blocks)
        assert backend.counters["corrupt_total"] == before + 1

    async def test_close_again(self, backend: Backend) -> None:
        """A second close, as after a failed start, would raise or hang."""
        await put(backend, self.chain("close", 2))
        await backend.close()
        await backend.close()

    async def test_close_in_flight(self, backend: Backend) -> None:
        """Closing would free memory or files that calls in flight still use."""
        blocks = self.chain("close in flight", 20)
        await put(backend, blocks[:10])
        slots = CanarySlots(10, slot_bytes_for(self.block_bytes))
        requests = [
            GetRequest(block.key.block_hash, slots.view(position), self.block_bytes)
            for position, block in enumerate(blocks[:10])
        ]
        reading = asyncio.create_task(backend.get_into(NAMESPACE, requests))
        writing = asyncio.create_task(put(backend, blocks[10:]))
        await asyncio.sleep(0)
        await backend.close()
        results = await reading
        for position, block in enumerate(blocks[:10]):
            check_result(block, results[position], slots.view(position))
        assert await writing == [Outcome.STORED] * 10
        slots.check()
