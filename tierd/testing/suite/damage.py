"""Checks that a storage tier never returns wrong bytes when its stored data is damaged."""

from __future__ import annotations

import pytest

from tierd.backend import HEADER_BYTES, Backend, Outcome
from tierd.testing.suite.blocks import ROOT, Damage, SelfNamingBlock, contains, get, make_block, put
from tierd.testing.suite.hooks import Hooks
from tierd.types import PAGE_BYTES


class Damaging(Hooks, abstract=True):
    """Damaged blocks are detected, dropped and never returned."""

    async def test_swapped(self, backend: Backend) -> None:
        """Blocks mixed up below the tier would serve one prompt's KV for another prompt."""
        blocks = self.chain("swapped", 4)
        await put(backend, blocks)
        await self.swap(backend, blocks[1].key, blocks[2].key)
        corrupt = Outcome.CORRUPT
        assert await get(backend, blocks) == [Outcome.HIT, corrupt, corrupt, Outcome.HIT]
        await self._check_dropped(backend, blocks[1:3])

    @pytest.mark.parametrize("offset", [0, 7, 8, 10, 12, 15, 16, 31, 32, 63, 64, 95, 96, 112, 127])
    async def test_flipped_header(self, backend: Backend, offset: int) -> None:
        """A damaged header would pass as another block's header, or crash the process."""
        assert offset < HEADER_BYTES
        await self._check_damage(backend, Damage.FLIP_HEADER, offset)

    async def test_flipped_payload(self, backend: Backend) -> None:
        """A flipped bit in a payload would reach the engine."""
        for offset in (0, PAGE_BYTES, self.block_bytes - 1):
            await self._check_damage(backend, Damage.FLIP_PAYLOAD, offset)

    @pytest.mark.parametrize("left", [0, 1, PAGE_BYTES, -1])
    async def test_truncated(self, backend: Backend, left: int) -> None:
        """A truncated block would be served with leftover bytes of the slot as its end."""
        await self._check_damage(backend, Damage.TRUNCATE, left % self.block_bytes)

    @pytest.mark.parametrize("more", [1, PAGE_BYTES, 1 << 20])
    async def test_oversize(self, backend: Backend, more: int) -> None:
        """A stored block longer than its slot would overwrite the next slots."""
        await self._check_damage(backend, Damage.OVERSIZE, more)

    @pytest.mark.parametrize("difference", [-1, 1, -PAGE_BYTES, PAGE_BYTES])
    async def test_other_length(self, backend: Backend, difference: int) -> None:
        """A stored block of another length would be served in part, or with leftover bytes."""
        [block] = self.chain("length", 1)
        await put(backend, [block])
        length = self.block_bytes + difference
        wanted = make_block("length/0", ROOT, length)
        assert await get(backend, [wanted]) == [Outcome.CORRUPT]
        await self._check_dropped(backend, [block])

    async def _check_damage(self, backend: Backend, how: Damage, offset: int) -> None:
        blocks = self.chain(f"{how} {offset}", 3)
        await put(backend, blocks)
        await self.damage(backend, blocks[2].key, how, offset)
        assert await get(backend, blocks) == [Outcome.HIT, Outcome.HIT, Outcome.CORRUPT]
        await self._check_dropped(backend, blocks[2:])

    async def _check_dropped(self, backend: Backend, blocks: list[SelfNamingBlock]) -> None:
        """Assert that damaged blocks are gone and can be stored again."""
        assert await contains(backend, blocks) == [False] * len(blocks)
        assert await get(backend, blocks) == [Outcome.MISS] * len(blocks)
        assert await put(backend, blocks) == [Outcome.STORED] * len(blocks)
        assert await get(backend, blocks) == [Outcome.HIT] * len(blocks)

    async def test_damaged_while_closed(self, backend: Backend) -> None:
        """Blocks damaged while tierd was down would be served after its start."""
        blocks = self.chain("while closed", 4)
        await put(backend, blocks)
        await self.swap(backend, blocks[0].key, blocks[1].key)
        await self.damage(backend, blocks[2].key, Damage.FLIP_PAYLOAD, 0)
        async with self.reopened(backend) as again:
            outcomes = await get(again, blocks)
            assert Outcome.HIT not in outcomes[:3]
            assert outcomes[3] is Outcome.HIT
