"""The audit at the end of a world: a new daemon must find what is intact on the disks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from tierd.backend import verify_block
from tierd.testing.backend import StoredBlock
from tierd.testing.simulation.engine import SimulatedSession
from tierd.testing.simulation.incarnation import current
from tierd.testing.simulation.plan import WorldPlan
from tierd.testing.simulation.succession import next_incarnation
from tierd.testing.simulation.world import World
from tierd.types import BlockKey, Namespace
from tierd.wire import messages as m

ROT_CHANCE: Final = 0.1
"""Share of the blocks on each disk that are damaged before the audit."""


async def audit(world: World, plan: WorldPlan) -> None:
    """Damage some blocks, restart the daemon, and check that it finds the intact ones."""
    _rot(world)
    if world.keeper is not None:
        world.counts["kept_descriptors"] += len(world.keeper.names())
        world.keeper.close()
    await next_incarnation(world, plan, faulty=False, kill=False)
    incarnation = current(world)
    assert incarnation is not None
    if world.disks:
        for ranks in {rank.digest: rank for engine in plan.engines for rank in engine}.values():
            await _audit_rank(world, ranks)
    await incarnation.stop(drain_s=1.0)


def _rot(world: World) -> None:
    """Damage some of the blocks on the disks, each copy independently."""
    random = world.random
    for disk in world.disks:
        for key, (header, payload) in disk.items():
            if random.random() < ROT_CHANCE:
                place = random.randrange(len(payload))
                rotten = bytes((payload[place] ^ 1,))
                payload = payload[:place] + rotten + payload[place + 1 :]
                disk[key] = StoredBlock(header, payload)


async def _audit_rank(world: World, rank: Namespace) -> None:
    connection = world.connect("auditor", world.random)
    assert connection is not None
    link = SimulatedSession(connection, world, world.random)
    link.send(m.Hello(m.PROTOCOL_VERSION, "auditor"))
    registered = await link.answer(
        link.ask(m.Register(link.next_call(), rank.to_fields(), True)), m.Registered
    )
    if registered is None:
        world.fail("the auditor cannot register")
        return
    incarnation = current(world)
    assert incarnation is not None
    host = incarnation.node.host
    space = host.spaces[rank.digest]
    room = host.capacity_bytes // space.segment_bytes * space.slots_per_segment
    for chain in world.chains:
        sound = min(_sound_prefix(world, rank, chain), room)
        counters = incarnation.node.counters
        found, refused = 0, -1
        # A damaged copy in one tier must not hide an intact one in the next. Only blocks that had
        # no room may need another try.
        while found < sound and counters["promotion_no_room_total"] != refused:
            refused = counters["promotion_no_room_total"]
            found = await _audit_chain(world, link, rank, chain)
        # Promoted blocks may be written to another tier, which then evicts others.
        if found < min(sound, _sound_prefix(world, rank, chain)):
            world.fail(f"a restarted daemon finds {found} of {sound} stored blocks")
        world.counts["audited_blocks"] += found
    link.close(torn=False)
    # Its slots are free for the next rank once the daemon has seen the end of the connection.
    await asyncio.sleep(1.0)


async def _audit_chain(
    world: World, link: SimulatedSession, rank: Namespace, chain: Sequence[bytes]
) -> int:
    """Return how many blocks of a chain the daemon finds, and check their bytes."""
    handle = link.numbers[0]
    asked = link.ask(m.Acquire(link.next_call(), [handle], b"".join(chain), 10_000, 0, 0, 0))
    acquired = await link.answer(asked, m.Acquired)
    if acquired is None or not acquired.lease:
        return 0
    for block_hash, slot in zip(chain, m.unpack_slots(acquired.slots), strict=False):
        view = link.view(handle, slot)
        if view is not None and view[: rank.block_bytes] != world.payload(rank, block_hash):
            world.fail("a restarted daemon serves wrong bytes")
    link.send(m.Release(acquired.lease))
    return acquired.blocks


def _sound_prefix(world: World, rank: Namespace, chain: Sequence[bytes]) -> int:
    """Return how many leading blocks of a chain are intact on some disk."""
    for count, block_hash in enumerate(chain):
        for number, disk in enumerate(world.disks):
            key = world.scoped(number, BlockKey(rank.digest, block_hash))
            stored = disk.get(key)
            if stored is not None and verify_block(
                stored.header, key, memoryview(stored.payload), rank.block_bytes
            ):
                break
        else:
            return count
    return len(chain)
