"""Engines whose namespaces come and go, since they reset their caches and return to old ones.

Each one unregisters its namespaces within a session and continues in others, new or used before.
It relies only on loaded blocks having the right bytes.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import Final

from tierd.testing.simulation.engine import SimulatedEngine, SimulatedSession
from tierd.testing.simulation.plan import WorldPlan
from tierd.testing.simulation.world import World
from tierd.wire import messages as m

RESET_CHANCE: Final = 0.4
"""Share of worlds in which engines reset their caches."""

GENERATIONS: Final = 6
"""Namespaces that each rank of such an engine chooses from, so that some come back."""

STEPS: Final = 400
"""Steps of all these engines until they slow down, and again each time the world's age grows by a
factor of 2.7: a world that waits for a virtual minute must end within real seconds."""


async def run_resets(world: World, plan: WorldPlan, over: asyncio.Event) -> None:
    """Run engines that reset their caches, in some worlds, until the others have ended."""
    # A separate random stream, so that the seed's other events do not change.
    random = Random(f"resets of {world.seed}")
    if random.random() > RESET_CHANCE:
        return
    async with asyncio.TaskGroup() as group:
        count = random.choice((1, 2, 8))
        for number in range(count):
            engine = Resetting(world, plan, number, STEPS // count)
            group.create_task(engine.live(over))


class Resetting(SimulatedEngine):
    """An engine that resets its caches."""

    def __init__(self, world: World, plan: WorldPlan, number: int, steps: int) -> None:
        self._at_first = steps
        random = Random(f"resetting {number} of {world.seed}")
        self._base = random.choice(plan.engines)
        super().__init__(world, f"resetting-{number}", self._base, plan.habits, random)

    async def live(self, over: asyncio.Event) -> None:
        """Run one session after the other."""
        random, world = self._random, self._world
        while not over.is_set():
            await asyncio.sleep(random.expovariate(1 / 0.05))
            connection = world.connect(self._name, random)
            if connection is None:
                continue
            link = SimulatedSession(connection, world, random)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(link))
                if await self._greet(link):
                    await self._steps(link, over)
                if not link.end.closed:
                    link.close(torn=False)

    async def _steps(self, link: SimulatedSession, over: asyncio.Event) -> None:
        random = self._random
        while not over.is_set() and not link.end.closed and random.random() > 0.02:
            pace_s = max(self._habits.pace_s, self._world.loop.elapsed_s / self._at_first)
            await asyncio.sleep(random.expovariate(1 / pace_s))
            chance = random.random()
            if chance < 0.2:
                if not await self._reset(link):
                    return
            elif chance < 0.6:
                await self._store(link)
            else:
                await self._load(link)

    async def _reset(self, link: SimulatedSession) -> bool:
        """Continue in another generation of namespaces; return whether they are registered."""
        random, generation = self._random, self._random.randrange(GENERATIONS)
        self._world.counts["resets"] += 1
        # The shared base namespace is never worthless.
        worthless = self._ranks != self._base and random.random() < 0.5
        for number in link.numbers:
            link.send(m.Unregister(number, worthless))
        link.numbers.clear()
        self._ranks = [
            replace(rank, weights=f"{rank.weights}+{self._name}-{generation}")
            if generation
            else rank
            for rank in self._base
        ]
        maps = [m.Register(link.next_call(), rank.to_fields(), True) for rank in self._ranks]
        asked = [link.ask(message) for message in maps]
        return None not in [await link.answer(future, m.Registered) for future in asked]
