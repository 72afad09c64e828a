"""Faults at the worst moment: crashes during leases, and flushes during late uploads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Final

import msgspec

from tierd.config import WritePolicy
from tierd.errors import RefusedError
from tierd.testing.faulty import FaultPlan
from tierd.testing.simulation.incarnation import DaemonIncarnation, current
from tierd.testing.simulation.plan import PATIENT_MS, Habits, Hostility, TierPlan, WorldPlan
from tierd.testing.simulation.readers import Asker, Filler
from tierd.testing.simulation.succession import forget_some, next_incarnation
from tierd.testing.simulation.world import World

FORGET_CHANCE: Final = 0.5
"""Share of worlds with tiers that drop blocks by themselves."""

CRASHES_IN_A_ROW_MAX: Final = 3
"""Crashes in a row, within about one lease."""

LOOKS_MAX: Final = 2000
LOOK_S: Final = 0.0003
"""Number of checks for a bad moment, and the pause between them."""


def make_hostile(plan: WorldPlan, seed: int) -> WorldPlan:
    """Return the plan of a smaller world with a Hostility."""
    random = Random(f"hostility of {seed}")
    unit = max(rank.slot_bytes for ranks in plan.engines for rank in ranks)
    storage = bool(plan.tiers) and random.random() < 0.5
    return replace(
        plan,
        hostility=Hostility.STORAGE if storage else Hostility.LEASES,
        capacity_bytes=unit * random.randint(8, 24),
        segment_bytes=unit * random.choice((1, 2, 4)),
        tiers=_hostile_tiers(plan.tiers, random) if storage else plan.tiers,
        kills=True,
        keeps=random.random() < (0.5 if storage else 0.9),
        lease_ttl_ms=random.choice((200, 1000, 2000)),
    )


def _hostile_tiers(tiers: Sequence[TierPlan], random: Random) -> list[TierPlan]:
    shared = random.random() < 0.4
    hostile = []
    for tier in tiers:
        deadline_ms = random.choice((50, 200))
        config = msgspec.structs.replace(
            tier.config,
            deadline_ms=deadline_ms,
            slow_ms=deadline_ms // 2,
            write_policy=random.choice((WritePolicy.WRITE_THROUGH, tier.config.write_policy)),
        )
        changed = replace(
            tier,
            # No other faults, so that flushes are complete.
            faults=FaultPlan({}, 0.0001),
            outages=[],
            late=random.choice((0.0, 0.2, 0.5)),
            hides=random.choice((0.0, 0.7)),
            shared=shared,
            disk_bytes=None if shared else tier.disk_bytes,
            config=config,
        )
        hostile.append(changed)
    return hostile


async def run_crashes(world: World, plan: WorldPlan, over: asyncio.Event) -> None:
    """Kill the daemon at bad moments for leases, and again before they end."""
    async with asyncio.TaskGroup() as group:
        await _crash(world, plan, over, group)


async def _crash(
    world: World, plan: WorldPlan, over: asyncio.Event, group: asyncio.TaskGroup
) -> None:
    random = Random(f"crashes of {world.seed}")
    for _ in range(random.randint(1, 4)):
        await asyncio.sleep(random.expovariate(1 / 0.1))
        if not await _moment(world, random, over):
            return
        for _ in range(random.randint(1, CRASHES_IN_A_ROW_MAX)):
            await next_incarnation(world, plan, faulty=True, kill=True)
            if random.random() < 0.3:
                await _squeeze(world, random)
            # Other clients need the memory of the last incarnation at once.
            for number in range(random.randint(0, 3)):
                ranks = random.choice(plan.engines)[:1]
                filler = Filler(world, f"filler-{number}", ranks, Random(random.random()))
                group.create_task(filler.fill(plan.lease_ttl_ms / 1000))
            await asyncio.sleep(random.expovariate(1 / (plan.lease_ttl_ms / 4000)))
            if over.is_set():
                return


async def _moment(world: World, random: Random, over: asyncio.Event) -> bool:
    """Wait for a bad moment for a crash; return False if the engines have ended."""
    kind = random.choice(("unrecorded", "unrecorded", "flushed", "leased"))
    for _ in range(LOOKS_MAX):
        incarnation = current(world)
        if over.is_set():
            return False
        if incarnation is not None and incarnation.accepting and incarnation.leases:
            if kind == "flushed":
                await _flush_leased(incarnation, random)
                return True
            if kind == "leased" or _unrecorded(incarnation):
                world.counts[f"crashes_{kind}"] += 1
                return True
        await asyncio.sleep(LOOK_S)
    return True


def _unrecorded(incarnation: DaemonIncarnation) -> bool:
    """Whether a leased block has no checksum yet."""
    return any(
        space.checksums[slot] is None and slot not in space.unverified
        for lease in incarnation.leases.values()
        for space, slot, _ in lease.slots
    )


async def _flush_leased(incarnation: DaemonIncarnation, random: Random) -> None:
    """Start a flush during leases, and let it run for a short time."""
    incarnation.world.counts["crashes_flushed"] += 1
    task = incarnation.world.loop.create_task(_flush(incarnation, ""), name="flush before a crash")
    await asyncio.wait([task], timeout=random.expovariate(1 / 0.01))


async def _squeeze(world: World, random: Random) -> None:
    """Shrink the arena for a while, as if the system were short of memory."""
    incarnation = current(world)
    if incarnation is None or not incarnation.accepting:
        return
    host = incarnation.node.host
    host.set_limit(int(host.capacity_bytes * random.choice((0.3, 0.6))))
    while incarnation.node.memory.shrink():
        pass
    await asyncio.sleep(random.expovariate(1 / 0.02))
    if incarnation.accepting:
        host.set_limit(host.capacity_bytes)


def make_forgetful(plan: WorldPlan, seed: int) -> WorldPlan:
    """Return the plan, in some worlds with tiers that drop blocks by themselves.

    Most of these tiers have no other faults.
    """
    random = Random(f"forgetting of {seed}")
    if random.random() > FORGET_CHANCE:
        return plan
    tiers = [replace(tier, forgets=True) for tier in plan.tiers]
    if plan.hostility is Hostility.NONE and random.random() < 0.7:
        tiers = [_sound(tier) for tier in tiers]
    return replace(plan, tiers=tiers)


def _sound(tier: TierPlan) -> TierPlan:
    patient = msgspec.structs.replace(tier.config, deadline_ms=PATIENT_MS, slow_ms=PATIENT_MS)
    calm = FaultPlan({}, min(tier.faults.latency_s, 0.002))
    return replace(tier, disk_bytes=None, faults=calm, outages=[], config=patient)


async def run_forgetting(world: World, plan: WorldPlan, over: asyncio.Event) -> None:
    """Make tiers silently lose some or all of their blocks, but not during a stop: the daemon
    cannot notice losses after its last query."""
    random = Random(f"what is forgotten of {world.seed}")
    while any(tier.forgets for tier in plan.tiers) and not over.is_set():
        await asyncio.sleep(random.expovariate(1 / 0.05))
        incarnation = current(world)
        if incarnation is not None and incarnation.accepting:
            forget_some(world, plan, incarnation, random)


async def run_flushes(world: World, plan: WorldPlan) -> None:
    """Flush while cancelled uploads are pending or a part of a tier is hidden.

    Afterwards all blocks are looked up, also in the next incarnation and by another node.
    """
    random = Random(f"worst flushes of {world.seed}")
    other = None
    if any(tier.shared for tier in plan.tiers):
        other = DaemonIncarnation(world, plan, faulty=False, apart=True)
    for number in range(random.randint(1, 5)):
        await asyncio.sleep(random.expovariate(1 / 0.1))
        if random.random() < 0.5:
            await next_incarnation(world, plan, faulty=True, kill=random.random() < 0.5)
        for _ in range(LOOKS_MAX):
            if world.unheard or any(world.hidden):
                break
            await asyncio.sleep(LOOK_S)
        incarnation = current(world)
        assert incarnation is not None
        digest = random.choice(random.choice(plan.engines)).digest
        await _flush(incarnation, digest.hex() if random.random() < 0.3 else "")
        if random.random() < 0.5:
            await next_incarnation(world, plan, faulty=True, kill=random.random() < 0.5)
        ranks = random.choice(plan.engines)
        asker = Asker(world, f"asker-{number}", ranks, Habits(), Random(random.random()))
        rounds = random.randint(1, 6)
        await asker.ask_all(rounds)
        if other is not None and other.accepting:
            await asker.ask_all(rounds, other)
    if other is not None:
        await other.stop(drain_s=1.0)


async def _flush(incarnation: DaemonIncarnation, prefix: str) -> None:
    # A flush that is already running is good enough.
    with suppress(RefusedError):
        await incarnation.flush(prefix)
