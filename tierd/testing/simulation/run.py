"""Run the daemon's production code on virtual time, with engines and disks that misbehave.

`simulate(seed)` draws one world, runs it to its end, and raises Violation if the daemon broke a
promise: wrong bytes, slots used twice, leases that end early, calls without an answer, or state
left behind by clients that are gone.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from random import Random
from typing import Final

from tierd.daemon.jobs.warming import WarmOrder
from tierd.daemon.lifecycle.housekeeping import HOUSEKEEPING_S
from tierd.testing.loop import SimulationLoop, run_simulation
from tierd.testing.simulation.audit import audit
from tierd.testing.simulation.engine import SimulatedEngine
from tierd.testing.simulation.incarnation import DaemonIncarnation, current
from tierd.testing.simulation.keeper import Keeper
from tierd.testing.simulation.passing import run_resets
from tierd.testing.simulation.plan import Hostility, TierPlan, WorldPlan, draw_plan
from tierd.testing.simulation.readers import run_readers
from tierd.testing.simulation.succession import next_incarnation
from tierd.testing.simulation.world import RunRecord, Violation, World
from tierd.testing.simulation.worst import (
    make_forgetful,
    make_hostile,
    run_crashes,
    run_flushes,
    run_forgetting,
)

__all__ = ["Violation", "run_world", "simulate"]

Lead = Callable[[World, WorldPlan], Coroutine[object, object, None]]
"""An additional actor of a world; the world waits for its end."""

QUIET_S: Final = 5.0
"""Virtual time, beyond the deadlines of storage calls, until nothing may be pending."""

SHARED_QUIET_S: Final = 20.0
"""The same with shared tiers: nodes may be waiting until others have seen a flush."""

FLUSH_CHANCE: Final = 0.3
"""Share of worlds in which an operator flushes."""

WARM_CHANCE: Final = 0.3
"""Share of worlds in which an operator warms."""


async def run_world(
    loop: SimulationLoop, seed: int, leads: Sequence[Lead] = (), *, hostile: bool = False
) -> RunRecord:
    """Run one world to its end. Raises Violation."""
    random = Random(f"world {seed}")
    world = World(loop, seed, random)
    plan = draw_plan(random, world)
    if hostile:
        plan = make_hostile(plan, seed)
        world.hidden = [{} for _ in plan.tiers]
    plan = make_forgetful(plan, seed)
    world.lossless = bool(plan.tiers) and all(tier.lossless for tier in plan.tiers)
    work = loop.create_task(_history(world, plan, leads), name="world")
    await world.supervise(work)
    return world.account()


async def _history(world: World, plan: WorldPlan, leads: Sequence[Lead]) -> None:
    world.keeper = Keeper() if plan.keeps else None
    try:
        await _incarnations(world, plan, leads)
    finally:
        if world.keeper is not None:
            world.keeper.close()


async def _incarnations(world: World, plan: WorldPlan, leads: Sequence[Lead]) -> None:
    incarnation = world.incarnation = DaemonIncarnation(world, plan, faulty=True)
    while not incarnation.accepting:
        await asyncio.sleep(0.001)
    async with asyncio.TaskGroup() as group:
        over = asyncio.Event()
        if plan.hostility is Hostility.LEASES:
            group.create_task(run_crashes(world, plan, over))
            group.create_task(run_readers(world, plan, over))
        elif plan.hostility is Hostility.NONE:
            group.create_task(_restart(world, plan, over))
        for number, tier in enumerate(plan.tiers):
            group.create_task(_outages(world, number, tier, over))
        if plan.hostility is Hostility.NONE:
            group.create_task(_flushes(world, plan, over))
        group.create_task(_warms(world, plan, over))
        group.create_task(run_resets(world, plan, over))
        group.create_task(run_forgetting(world, plan, over))
        async with asyncio.TaskGroup() as engines:
            for number, ranks in enumerate(plan.engines):
                random = Random(f"engine {number} of {world.seed}")
                engine = SimulatedEngine(world, f"engine-{number}", ranks, plan.habits, random)
                engines.create_task(engine.run(plan.sessions, plan.requests))
            if plan.hostility is Hostility.STORAGE:
                engines.create_task(run_flushes(world, plan))
            for lead in leads:
                engines.create_task(lead(world, plan))
        over.set()
    await _settle(world, plan)
    await audit(world, plan)


async def _restart(world: World, plan: WorldPlan, over: asyncio.Event) -> None:
    """Stop or kill the daemon now and then, and start it again on the same disks."""
    for _ in range(plan.restarts):
        await asyncio.sleep(world.random.expovariate(1 / 0.1))
        # Just after a commit, when checksums and backups are still pending.
        stored = world.counts["stored_blocks"]
        while world.counts["stored_blocks"] == stored and not over.is_set():
            await asyncio.sleep(0.002)
        if over.is_set():
            return
        await next_incarnation(world, plan, faulty=True, kill=plan.kills)


async def _outages(world: World, number: int, plan: TierPlan, over: asyncio.Event) -> None:
    """Run a tier's outages, and check that it is used again after each one."""
    for pause_s, duration_s in plan.outages:
        await _sleep_until(over, pause_s)
        if over.is_set():
            return
        world.counts["outages"] += 1
        world.down.add(number)
        await _sleep_until(over, duration_s)
        world.down.discard(number)
        await asyncio.sleep(plan.back_within_s)
        incarnation = current(world)
        if incarnation is not None:
            incarnation.check_back(number)


async def _flushes(world: World, plan: WorldPlan, over: asyncio.Event) -> None:
    """Flush one namespace or all now and then, in some worlds."""
    # A separate random stream, so that the seed's other events do not change.
    random = Random(f"flushes of {world.seed}")
    if random.random() > FLUSH_CHANCE:
        return
    for _ in range(random.randint(1, 3)):
        await _sleep_until(over, random.expovariate(1 / 0.2))
        incarnation = current(world)
        if incarnation is not None and incarnation.accepting:
            digest = random.choice(random.choice(plan.engines)).digest
            await incarnation.flush(digest.hex() if random.random() < 0.7 else "")


async def _warms(world: World, plan: WorldPlan, over: asyncio.Event) -> None:
    """Warm chains of the engines, into L2 or a tier, in some worlds."""
    random = Random(f"warms of {world.seed}")
    if random.random() > WARM_CHANCE:
        return
    while not over.is_set():
        await _sleep_until(over, random.expovariate(1 / 0.1))
        incarnation = current(world)
        if incarnation is not None and incarnation.accepting and world.chains:
            ranks, chain = random.choice(plan.engines), random.choice(world.chains)
            want = WarmOrder(random.randint(0, len(plan.tiers)), verify=random.random() < 0.3)
            await incarnation.warm(ranks, chain, want, random.expovariate(1 / 0.5))


async def _sleep_until(over: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await over.wait()


async def _settle(world: World, plan: WorldPlan) -> None:
    """Check that nothing is left of the clients when all are gone and the disks work."""
    while (incarnation := current(world)) is None or not incarnation.accepting:
        await asyncio.sleep(0.01)
    incarnation.calm()
    while world.landing:
        await asyncio.sleep(1.0)
    calls_s = max((tier.config.deadline_ms / 1000 for tier in plan.tiers), default=0.0)
    quiet_s = SHARED_QUIET_S if any(tier.shared for tier in plan.tiers) else QUIET_S
    await asyncio.sleep(plan.lease_ttl_ms / 1000 + 2 * HOUSEKEEPING_S + calls_s + quiet_s)
    incarnation.check_quiet()


class _LogTap(logging.Handler):
    """Keeps the daemon's error log, to be shown with a failure."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record."""
        self.lines.append(self.format(record))


@contextmanager
def _log_kept() -> Iterator[list[str]]:
    log, tap = logging.getLogger("tierd"), _LogTap()
    level, propagate = log.level, log.propagate
    log.addHandler(tap)
    log.setLevel(logging.ERROR)
    log.propagate = False
    try:
        yield tap.lines
    finally:
        log.removeHandler(tap)
        log.setLevel(level)
        log.propagate = propagate


def simulate(seed: int, leads: Sequence[Lead] = (), *, hostile: bool = False) -> RunRecord:
    """Run one world. Raises Violation or another error, with a note of the seed.

    A world lasts until its engines and the `leads` have ended. A `hostile` one has readers whose
    leases outlive the daemon, or storage whose cancelled calls take effect later.
    """
    with _log_kept() as lines:
        try:
            return run_simulation(seed, lambda loop: run_world(loop, seed, leads, hostile=hostile))
        except BaseException as error:
            for line in lines[-3:]:
                error.add_note(line)
            raise
        finally:
            # Mappings hold descriptors, and what refers to them is full of cycles.
            gc.collect()
