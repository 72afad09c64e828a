"""Engines with block tables in a simulated world: how many, what they are asked, when they die."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from random import Random

from tests.support.engines.fake_vllm import connector_module
from tests.support.simulation.engine import EngineProcess, Ways
from tests.support.simulation.pool import BLOCK_TOKENS, WORDS, Model, Request
from tests.support.simulation.threads import Process, pause, virtual_process
from tierd.testing.simulation.plan import WorldPlan
from tierd.testing.simulation.run import simulate
from tierd.testing.simulation.world import RunRecord, World

STEPS_MAX = 20_000
"""Steps after which the requests of one process count as stuck."""

STUCK_STEPS = 300
"""Steps without a token after which a user gives up: blocks of loaded requests are all taken."""

AT_ONCE_MAX = 5
"""Requests that run at one engine at the same time."""

PROMPTS_MAX = 8
"""Conversations to remember; the next requests continue one of them."""


def simulate_everything(seed: int) -> RunRecord:
    """Run one hostile world with all kinds of engines. Raises as `simulate` does."""
    return simulate(seed, [run_tables], hostile=True)


async def run_tables(world: World, plan: WorldPlan) -> None:
    """Run all engines with block tables of a world; each restarts several times."""
    # A separate random stream, so that the seed's other events do not change.
    random = Random(f"tables of {world.seed}")
    models = [
        Model(world, f"tables-{number}", random.choice((1, 1, 2)))
        for number in range(random.choice((1, 1, 2)))
    ]
    talks: list[list[int]] = []
    log = logging.getLogger("vllm.tierd")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with virtual_process(world.loop, [connector_module()]):
            async with asyncio.TaskGroup() as group:
                for number in range(random.randint(1, 3)):
                    each = Random(f"table engine {number} of {world.seed}")
                    model = random.choice(models)
                    group.create_task(_incarnations(world, model, f"tables-{number}", each, talks))
    finally:
        log.setLevel(level)


async def _incarnations(
    world: World, model: Model, name: str, random: Random, talks: list[list[int]]
) -> None:
    for number in range(random.randint(1, 3)):
        await asyncio.sleep(random.expovariate(1 / 0.02))
        process = Process(world, f"{name}.{number}", Random(random.random()))
        ways = Ways.drawn(random)
        engines: list[EngineProcess] = []
        main = process.spawn(lambda: _work(process, model, ways, engines, talks), "main")  # noqa: B023
        try:
            await asyncio.wait([main], timeout=random.expovariate(1 / 0.3) if ways.dies else None)
        finally:
            await process.kill()
            for engine in engines:
                world.counts["table_errors"] += engine.errors
                world.counts["other_loads"] += engine.other.loads
                _close_descriptors(engine)


def _work(
    process: Process,
    model: Model,
    ways: Ways,
    engines: list[EngineProcess],
    talks: list[list[int]],
) -> None:
    """Send users' requests, some of them in parallel, until all are answered."""
    random, world = process.random, process.world
    engine = EngineProcess(process, model, ways)
    engines.append(engine)
    asked = stuck = 0
    for _ in range(STEPS_MAX):
        while asked < ways.requests and engine.count < AT_ONCE_MAX and random.random() < 0.3:
            asked += 1
            engine.add(_request(process, model, ways, asked, talks))
        if random.random() < 0.01:
            engine.abort()
        stuck = 0 if engine.step() else stuck + 1
        if stuck > STUCK_STEPS:
            engine.abort()
            stuck = 0
        if asked == ways.requests and not engine.count:
            break
        engine.check_errors()
        pause(random.expovariate(1 / ways.step_s))
    else:
        world.fail(f"{process.name} does not get on")
    if random.random() < 0.7:
        engine.close()


def _request(
    process: Process, model: Model, ways: Ways, number: int, talks: list[list[int]]
) -> Request:
    random = process.random
    most = (ways.blocks - 1) * BLOCK_TOKENS
    talk: Sequence[int] = random.choice(talks) if talks and random.random() < 0.85 else ()
    start = talk[: random.randint(0, len(talk))] if random.random() < 0.3 else talk
    prompt = [*start, *(random.randrange(WORDS) for _ in range(random.randint(1, 16)))]
    prompt = prompt[: most - 8]
    tokens_max = min(len(prompt) + random.randint(1, 12), most)
    now_s = process.world.loop.time()
    request = Request(model, f"{process.name}-{number}", prompt, tokens_max, now_s)
    # A later turn of the conversation starts with this answer.
    talks.append(request.tokens)
    del talks[:-PROMPTS_MAX]
    return request


def _close_descriptors(engine: EngineProcess) -> None:
    """Close what the kernel closes when a process has ended."""
    for mover in engine.movers:
        os.close(mover._wakeup)
    for client in engine.clients:
        for guard in client._filling.guards.values():
            os.close(guard)
        client._filling.guards.clear()
