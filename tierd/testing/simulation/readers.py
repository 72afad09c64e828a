"""Clients whose leases outlive the daemon, and clients that compete for their memory.

A reader leases blocks, often just as they are stored, and reads its mapped slots repeatedly until
the lease ends, even if the daemon is killed meanwhile: until then no incarnation may reuse them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from tierd.testing.simulation.engine import SimulatedEngine, SimulatedSession
from tierd.testing.simulation.incarnation import DaemonIncarnation
from tierd.testing.simulation.plan import Habits, WorldPlan
from tierd.testing.simulation.world import ROOT, World
from tierd.types import HASH_BYTES, Namespace
from tierd.wire import messages as m

FILL_BATCH: Final = 4
FILL_BATCHES_MAX: Final = 20
"""Blocks that a filler stores at a time, and how often."""

READS: Final = 40
"""Number of times that a lease's slots are read, about evenly until it ends."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A leased block: its valid payload, and its mapped slot."""

    payload: bytes
    view: memoryview


class Reader(SimulatedEngine):
    """Stores blocks, leases them at once, and keeps each lease until it expires."""

    def __init__(self, world: World, name: str, ranks: Sequence[Namespace], random: Random) -> None:
        super().__init__(world, name, ranks, Habits(), random)

    async def read(self, over: asyncio.Event) -> None:
        """Store, lease and read until the engines have ended."""
        random = self._random
        while not over.is_set():
            await asyncio.sleep(random.expovariate(1 / 0.03))
            connection = self._world.connect(self._name, random)
            if connection is None:
                continue
            link = SimulatedSession(connection, self._world, random)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(link))
                if await self._greet(link):
                    for _ in range(random.randint(1, 4)):
                        await self._lease(link, group)
                        await asyncio.sleep(random.expovariate(1 / 0.02))
                stays = random.random() < 0.5
                while stays and not (over.is_set() or link.ended.is_set()):
                    await asyncio.sleep(0.05)
                link.close(torn=False)

    async def _lease(self, link: SimulatedSession, group: asyncio.TaskGroup) -> None:
        """Lease a prefix, after storing its missing blocks with a COMMIT sent just before."""
        random = self._random
        chain = random.choice(self._world.chains)
        hashes = chain[: random.randint(1, len(chain))]
        commit = await self._fill(link, hashes) if random.random() < 0.8 else None
        if commit is not None:
            committed = link.ask(commit)
        acquire = m.Acquire(link.next_call(), [link.numbers[0]], b"".join(hashes), 5, 0, 0, 0)
        acquired = await link.answer(link.ask(acquire), m.Acquired)
        if commit is not None:
            await link.answer(committed, m.Committed)
        if acquired is None or not acquired.blocks:
            return
        held = []
        for block_hash, slot in zip(hashes, m.unpack_slots(acquired.slots), strict=False):
            view = link.view(link.numbers[0], slot)
            if view is None:
                return
            payload = self._world.payload(self._ranks[0], block_hash)
            held.append(_Held(payload, view[: len(payload)]))
        self._world.counts["long_leases"] += 1
        group.create_task(self._hold(held, acquired.expires_ns))

    async def _fill(self, link: SimulatedSession, hashes: Sequence[bytes]) -> m.Commit | None:
        """Reserve and write blocks of the first rank; return the COMMIT to send."""
        rank, handle = self._ranks[0], link.numbers[0]
        parents = [self._world.parents[block_hash] for block_hash in hashes]
        asked = link.ask(m.Reserve(link.next_call(), handle, b"".join(hashes), b"".join(parents)))
        reserved = await link.answer(asked, m.Reserved)
        if reserved is None or link.end.closed:
            return None
        written = 0
        for block_hash, slot in zip(hashes, m.unpack_slots(reserved.slots), strict=True):
            if slot < m.SLOT_PRESENT:
                view = link.view(handle, slot)
                if view is None:
                    return None
                view[: rank.block_bytes] = self._world.payload(rank, block_hash)
                written += 1
        return m.Commit(link.next_call(), reserved.reservation, written)

    async def _hold(self, held: Sequence[_Held], expires_ns: int) -> None:
        """Read leased blocks until the lease expires."""
        world, random = self._world, self._random
        began = world.counts["restarts"]
        pause_s = (expires_ns - world.now_ns()) / 1e9 / READS
        while world.now_ns() < expires_ns:
            for each in held:
                if each.view != each.payload:
                    restarts = world.counts["restarts"] - began
                    world.fail(f"wrong bytes under a lease that has seen {restarts} restarts")
                    return
            world.counts["long_reads"] += len(held)
            if world.counts["restarts"] > began:
                world.counts["outliving_reads"] += len(held)
            await asyncio.sleep(random.expovariate(1 / pause_s))


class Filler(SimulatedEngine):
    """Fills all memory with new blocks."""

    def __init__(self, world: World, name: str, ranks: Sequence[Namespace], random: Random) -> None:
        super().__init__(world, name, ranks, Habits(break_off=0.0), random)

    async def fill(self, lasting_s: float) -> None:
        """Store blocks for `lasting_s`, or until the daemon ends."""
        world, random = self._world, self._random
        until_ns = world.now_ns() + int(lasting_s * 1e9)
        connection = world.connect(self._name, random)
        if connection is None:
            return
        link = SimulatedSession(connection, world, random)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(link))
            greeted = await self._greet(link)
            for _ in range(FILL_BATCHES_MAX):
                if not greeted or link.ended.is_set() or world.now_ns() >= until_ns:
                    break
                hashes = [random.randbytes(HASH_BYTES) for _ in range(FILL_BATCH)]
                world.parents |= zip(hashes, [ROOT, *hashes], strict=False)
                await self._store_rank(link, 0, hashes)
                await asyncio.sleep(random.expovariate(1 / (lasting_s / FILL_BATCHES_MAX)))
            link.close(torn=False)


class Asker(SimulatedEngine):
    """Asks for every block that any engine may have stored."""

    async def ask_all(self, rounds: int, incarnation: DaemonIncarnation | None = None) -> None:
        """Ask the running daemon, or the given `incarnation`, for each chain `rounds` times."""
        world, random = self._world, self._random
        connection = world.connect(self._name, random, incarnation)
        if connection is None:
            return
        link = SimulatedSession(connection, world, random)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(link))
            greeted = await self._greet(link)
            for _ in range(rounds if greeted else 0):
                for chain in world.chains:
                    handle = random.choice(link.numbers)
                    acquire = m.Acquire(link.next_call(), [handle], b"".join(chain), 100, 0, 0, 0)
                    acquired = await link.answer(link.ask(acquire), m.Acquired)
                    if acquired is not None and acquired.lease:
                        world.counts["asked_blocks"] += acquired.blocks
                        link.send(m.Release(acquired.lease))
                await asyncio.sleep(random.expovariate(1 / 0.1))
            link.close(torn=False)


async def run_readers(world: World, plan: WorldPlan, over: asyncio.Event) -> None:
    """Run the readers of a world."""
    random = Random(f"readers of {world.seed}")
    async with asyncio.TaskGroup() as group:
        for number in range(random.randint(1, 3)):
            ranks = random.choice(plan.engines)[:1]
            reader = Reader(world, f"reader-{number}", ranks, Random(random.random()))
            group.create_task(reader.read(over))
