"""Checks of concurrent calls and of cancellation."""

from __future__ import annotations

import asyncio
import random

import pytest

from tierd.backend import Backend, GetRequest, Outcome, PutRequest
from tierd.testing.suite.blocks import NAMESPACE, CanarySlots, contains, get, put, take_turns
from tierd.testing.suite.hooks import Hooks
from tierd.types import slot_bytes_for


class Concurrency(Hooks, abstract=True):
    """Concurrent calls and cancelled calls leave buffers and blocks intact."""

    @pytest.mark.parametrize("seed", [1, 2, 3])
    async def test_concurrency(self, backend: Backend, seed: int) -> None:
        """Overlapping reads, writes and deletes would mix up blocks."""
        chance = random.Random(seed)
        blocks = self.chain("concurrency", 24) + self.chain("fork", 24)

        async def play(moves: random.Random) -> None:
            for _ in range(12):
                some = moves.sample(blocks, moves.randint(1, 8))
                match moves.randrange(5):
                    case 0 | 1:
                        outcomes = await put(backend, some)
                        assert set(outcomes) <= {Outcome.STORED, Outcome.PRESENT}
                    case 2 | 3:
                        assert Outcome.CORRUPT not in await get(backend, some)
                    case _:
                        hashes = [block.key.block_hash for block in some[:2]]
                        await backend.delete_many(NAMESPACE, hashes)

        await asyncio.gather(*(play(random.Random(chance.random())) for _ in range(8)))
        held = await contains(backend, blocks)
        outcomes = await get(backend, blocks)
        assert [outcome is Outcome.HIT for outcome in outcomes] == held
        assert backend.stats().blocks == sum(held)
        async with self.reopened(backend) as again:
            assert await get(again, blocks) == outcomes

    @pytest.mark.parametrize("seed", [1, 2])
    async def test_cancelled_get(self, backend: Backend, seed: int) -> None:
        """A cancelled load would still write into slots that now hold other blocks."""
        chance = random.Random(seed)
        blocks = self.chain("cancelled get", 16)
        await put(backend, blocks)
        slots = CanarySlots(16, slot_bytes_for(self.block_bytes))
        requests = [
            GetRequest(block.key.block_hash, slots.view(position), self.block_bytes)
            for position, block in enumerate(blocks)
        ]
        for _ in range(30):
            task = asyncio.create_task(backend.get_into(NAMESPACE, requests))
            await take_turns(chance.randrange(6))
            task.cancel()
            await asyncio.wait([task])
            for slot in range(16):
                slots.blank(slot)
            assert await contains(backend, blocks) == [True] * 16
        assert await get(backend, blocks) == [Outcome.HIT] * 16
        assert all(slots.is_blank(slot) for slot in range(16))
        slots.check()

    @pytest.mark.parametrize("seed", [1, 2])
    async def test_cancelled_put(self, backend: Backend, seed: int) -> None:
        """A cancelled backup would store the slot's next content, or leave half a block."""
        chance = random.Random(seed)
        slots = CanarySlots(8, slot_bytes_for(self.block_bytes))
        everything = []
        for turn in range(20):
            blocks = self.chain(f"cancelled put {turn}", 8)
            everything += blocks
            requests = []
            for position, block in enumerate(blocks):
                view = slots.view(position)
                view[: self.block_bytes] = block.payload
                requests.append(
                    PutRequest(
                        block.key.block_hash, block.parent, block.checksum, view, self.block_bytes
                    )
                )
            task = asyncio.create_task(backend.put_many(NAMESPACE, requests))
            await take_turns(chance.randrange(6))
            task.cancel()
            await asyncio.wait([task])
            for slot in range(8):
                slots.blank(slot)
            held = await contains(backend, blocks)
            outcomes = await get(backend, blocks)
            assert [outcome is Outcome.HIT for outcome in outcomes] == held
            assert Outcome.CORRUPT not in outcomes
        assert set(await put(backend, everything)) <= {Outcome.STORED, Outcome.PRESENT}
        assert await get(backend, everything) == [Outcome.HIT] * len(everything)
        async with self.reopened(backend) as again:
            assert await get(again, everything) == [Outcome.HIT] * len(everything)

    async def test_cancelled_by_the_first_of_two(self, backend: Backend) -> None:
        """Of two callers that store one block, cancelling the first would fail the second."""
        for turns in range(5):
            blocks = self.chain(f"first of two {turns}", 12)
            first = asyncio.create_task(put(backend, blocks))
            await take_turns(turns)
            second = asyncio.create_task(put(backend, blocks))
            await take_turns(turns)
            first.cancel()
            assert set(await second) <= {Outcome.STORED, Outcome.PRESENT}
            await asyncio.wait([first])
            assert await get(backend, blocks) == [Outcome.HIT] * 12
