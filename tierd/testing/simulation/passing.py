"""Engines whose namespaces come and go: they reset their caches, go back, and share with many.

Each has a session in which it unregisters what it uses, and goes on in other namespaces, new ones
or such as it had before. It counts on nothing but that what it loads is what it says.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import Final

from tierd.testing.simulation.engine import SimulatedEngine, SimulatedSession
from tierd.testing.simulation.world import World, WorldPlan
from tierd.wire import messages as m

RESET_CHANCE: Final = 0.4
"""Worlds in which engines reset their caches."""

GENERATIONS: Final = 6
"""Different namespaces that a rank of one of them uses, so that some come back."""

STEPS: Final = 400
"""What all of them do until they have to slow down, and again each time that the world has got 2.7
times as old: one that waits for a minute of its time is to end in seconds of ours."""


async def run_resets(world: World, plan: WorldPlan, over: asyncio.Event) -> None:
    """Have engines that reset, in some of the worlds, as long as others live."""
    # Of its own: what else happens in a world of this seed must not change.
    random = Random(f"resets of {world.seed}")
    if random.random() > RESET_CHANCE:
        return
    async with asyncio.TaskGroup() as group:
        count = random.choice((1, 2, 8))
        for number in range(count):
            engine = Resetting(world, plan, number, STEPS // count)
            group.create_task(engine.live(over))


class Resetting(SimulatedEngine):
    """One of them."""

    def __init__(self, world: World, plan: WorldPlan, number: int, steps: int) -> None:
        self._at_first = steps
        random = Random(f"resetting {number} of {world.seed}")
        self._base = random.choice(plan.engines)
        super().__init__(world, f"resetting-{number}", self._base, plan.habits, random)

    async def live(self, over: asyncio.Event) -> None:
        """Sessions one after the other."""
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
        """Go on in another generation; whether that could be registered."""
        random, generation = self._random, self._random.randrange(GENERATIONS)
        self._world.counts["resets"] += 1
        # The namespace that all have is never worthless.
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
