"""Clients whose leases outlive the daemon, and crashes at the moments that are worst for them.

A reader leases blocks, often at the very moment at which they are stored, and reads its mapped
slots again and again until the lease's end, whatever happens to the daemon meanwhile: up to then
nobody may touch them, in no life.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from tierd.errors import RefusedError
from tierd.testing.engine import Engine, Habits, Link
from tierd.testing.life import Life
from tierd.testing.succession import next_life
from tierd.testing.world import ROOT, Plan, World
from tierd.types import HASH_BYTES, Namespace
from tierd.wire import messages as m

LIVES_IN_A_ROW_MAX: Final = 3
"""Lives of the daemon that one lease may see."""

FILL_BATCH: Final = 4
"""Blocks that are stored at a time where all memory is wanted."""

READS: Final = 40
"""Times that a lease's slots are read, about evenly until it ends."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A leased block: what its bytes must be, and where they are mapped."""

    rank: Namespace
    block_hash: bytes
    view: memoryview


class Reader(Engine):
    """Stores some, leases it at once, and keeps every lease to its end."""

    def __init__(self, world: World, name: str, ranks: Sequence[Namespace], random: Random) -> None:
        super().__init__(world, name, ranks, Habits(), random)

    async def read(self, over: asyncio.Event) -> None:
        """Go on until the engines have ended."""
        random = self._random
        while not over.is_set():
            await asyncio.sleep(random.expovariate(1 / 0.03))
            connection = self._world.connect(self._name, random)
            if connection is None:
                continue
            link = Link(connection, self._world, random)
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

    async def _lease(self, link: Link, group: asyncio.TaskGroup) -> None:
        """Lease a prefix; what of it is not there yet is stored in the same breath."""
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
            held.append(_Held(self._ranks[0], block_hash, view))
        self._world.counts["long_leases"] += 1
        group.create_task(self._hold(held, acquired.expires_ns))

    async def _fill(self, link: Link, hashes: Sequence[bytes]) -> m.Commit | None:
        """Reserve and write blocks of the first rank; the COMMIT that is left to send."""
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
        """Read until the end of the lease, which comes at its time and not before."""
        world, random = self._world, self._random
        began = world.counts["restarts"]
        pause_s = (expires_ns - world.now_ns()) / 1e9 / READS
        while world.now_ns() < expires_ns:
            for each in held:
                if each.view[: each.rank.block_bytes] != world.payload(each.rank, each.block_hash):
                    lives = world.counts["restarts"] - began
                    world.fail(f"wrong bytes under a lease that has seen {lives} restarts")
                    return
            world.counts["long_reads"] += len(held)
            if world.counts["restarts"] > began:
                world.counts["outliving_reads"] += len(held)
            await asyncio.sleep(random.expovariate(1 / pause_s))


class Filler(Engine):
    """Wants all the memory that there is, for blocks that nobody has seen before."""

    def __init__(self, world: World, name: str, ranks: Sequence[Namespace], random: Random) -> None:
        super().__init__(world, name, ranks, Habits(break_off=0.0), random)

    async def fill(self, blocks: int) -> None:
        """Store so many, as long as the daemon lives."""
        world, random = self._world, self._random
        connection = world.connect(self._name, random)
        if connection is None:
            return
        link = Link(connection, world, random)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(link))
            greeted = await self._greet(link)
            while greeted and blocks > 0 and not link.ended.is_set():
                hashes = [random.randbytes(HASH_BYTES) for _ in range(min(blocks, FILL_BATCH))]
                world.parents |= zip(hashes, [ROOT, *hashes], strict=False)
                blocks -= len(hashes)
                if not await self._store_rank(link, 0, hashes):
                    break
            link.close(torn=False)


async def run_readers(world: World, plan: Plan, over: asyncio.Event) -> None:
    """The readers of a world."""
    random = Random(f"readers of {world.seed}")
    async with asyncio.TaskGroup() as group:
        for number in range(random.randint(1, 3)):
            ranks = random.choice(plan.engines)[:1]
            reader = Reader(world, f"reader-{number}", ranks, Random(random.random()))
            group.create_task(reader.read(over))


async def run_crashes(world: World, plan: Plan, over: asyncio.Event) -> None:
    """SIGKILL when leases have most to lose, and again while they last."""
    async with asyncio.TaskGroup() as group:
        await _crash(world, plan, over, group)


async def _crash(
    world: World, plan: Plan, over: asyncio.Event, group: asyncio.TaskGroup
) -> None:
    random = Random(f"crashes of {world.seed}")
    for _ in range(random.randint(1, 4)):
        await asyncio.sleep(random.expovariate(1 / 0.1))
        if not await _moment(world, random, over):
            return
        for _ in range(random.randint(1, LIVES_IN_A_ROW_MAX)):
            await next_life(world, plan, faulty=True, kill=True)
            if random.random() < 0.3:
                await _squeeze(world, random)
            # Memory of the life before is wanted by others at once.
            for number in range(random.randint(0, 3)):
                ranks = random.choice(plan.engines)[:1]
                blocks = plan.capacity_bytes // ranks[0].slot_bytes
                filler = Filler(world, f"filler-{number}", ranks, Random(random.random()))
                group.create_task(filler.fill(blocks))
            await asyncio.sleep(random.expovariate(1 / (plan.lease_ttl_ms / 4000)))
            if over.is_set():
                return


async def _moment(world: World, random: Random, over: asyncio.Event) -> bool:
    """Wait for a moment that is worth a crash; False once all is over."""
    kind = random.choice(("unrecorded", "unrecorded", "flushed", "leased"))
    for _ in range(2000):
        life = world.life
        if over.is_set():
            return False
        if life is not None and life.accepting and life.leases:
            if kind == "flushed":
                await _flush_leased(life, random)
                return True
            if kind == "leased" or _unrecorded(life):
                world.counts[f"crashes_{kind}"] += 1
                return True
        await asyncio.sleep(0.0003)
    return True


def _unrecorded(life: Life) -> bool:
    """Whether a block is leased whose checksum is not known yet."""
    return any(
        space.checksums[slot] is None and slot not in space.unproven
        for lease in life.leases.values()
        for space, slot, _ in lease.slots
    )


async def _flush_leased(life: Life, random: Random) -> None:
    """Begin a flush under the leases, and give it a moment."""

    async def flush() -> None:
        try:
            await life.flush("")
        except RefusedError:
            pass  # Another one is going on, which will do.

    life.world.counts["crashes_flushed"] += 1
    task = life.world.loop.create_task(flush(), name="flush before a crash")
    await asyncio.wait([task], timeout=random.expovariate(1 / 0.01))


async def _squeeze(world: World, random: Random) -> None:
    """The system is short of memory for a while, so that the arena shrinks."""
    life = world.life
    if life is None or not life.accepting:
        return
    host = life.node.host
    host.set_limit(int(host.capacity_bytes * random.choice((0.3, 0.6))))
    while life.node.memory.shrink():
        pass
    await asyncio.sleep(random.expovariate(1 / 0.02))
    if life.accepting:
        host.set_limit(host.capacity_bytes)
