"""Restarts of the daemon, on the same disks and with the same kept memory."""

from __future__ import annotations

import asyncio
from random import Random

from tierd.testing.simulation.incarnation import DaemonIncarnation, current
from tierd.testing.simulation.plan import WorldPlan
from tierd.testing.simulation.world import World


def forget_some(
    world: World, plan: WorldPlan, incarnation: DaemonIncarnation, random: Random
) -> None:
    """Drop some or all blocks of the tiers that lose blocks by themselves."""
    for number, tier in enumerate(plan.tiers):
        if tier.forgets and random.random() < 0.5:
            share = random.choice((0.1, 0.5, 1.0))
            keys = [key for key in sorted(world.disks[number]) if random.random() < share]
            incarnation.backends[number].forget(keys)
            world.counts["forgotten_blocks"] += len(keys)


async def next_incarnation(world: World, plan: WorldPlan, *, faulty: bool, kill: bool) -> None:
    """Stop or kill the daemon, and start its next incarnation."""
    incarnation = current(world)
    assert incarnation is not None
    world.incarnation = None
    world.counts["restarts"] += 1
    world.remark("the daemon is killed" if kill else "the daemon is stopped")
    forget_some(world, plan, incarnation, Random(f"forgotten before {world.now_ns()}"))
    if kill:
        await incarnation.kill()
    elif await incarnation.stop(drain_s=1.0) == 0:
        world.check_promises()
    # Blocks not yet written to the disks are lost.
    world.promised = {key: world.kept(key, bits) for key, bits in world.promised.items()}
    world.incarnation = DaemonIncarnation(world, plan, faulty=faulty)
    while not world.incarnation.accepting:
        await asyncio.sleep(0.001)
