"""The daemon's production code, on virtual time, among engines and disks that misbehave.

`simulate(seed)` draws one world, runs it to its end, and raises Violation if the daemon
broke a promise on the way: wrong bytes, slots used by two, leases cut short, calls
without an answer, anything left behind by clients that are gone.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from random import Random
from typing import Final

from tierd.backend import verify_block
from tierd.config import PrefetchConfig, PrefetchPolicy, Size, StorageConfig, WritePolicy
from tierd.daemon.jobs.warming import WarmOrder
from tierd.daemon.lifecycle.housekeeping import HOUSEKEEPING_S
from tierd.eviction import POLICIES
from tierd.testing.backend import StoredBlock
from tierd.testing.faulty import FaultPlan, InjectedFault
from tierd.testing.loop import SimulationLoop, run_simulation
from tierd.testing.simulation.engine import SimulatedEngine, SimulatedSession
from tierd.testing.simulation.incarnation import DaemonIncarnation, current
from tierd.testing.simulation.keeper import Keeper
from tierd.testing.simulation.passing import run_resets
from tierd.testing.simulation.plan import Habits, Hostility, TierPlan, WorldPlan
from tierd.testing.simulation.readers import run_readers
from tierd.testing.simulation.succession import next_life
from tierd.testing.simulation.world import ROOT, RunRecord, Violation, World
from tierd.testing.simulation.worst import (
    PATIENT_MS,
    make_forgetful,
    make_hostile,
    run_crashes,
    run_flushes,
    run_forgetting,
)
from tierd.types import FORMAT_VERSION, HASH_BYTES, PAGE_BYTES, BlockKey, Namespace
from tierd.wire import messages as m

__all__ = ["Violation", "run_world", "simulate"]

Lead = Callable[[World, WorldPlan], Coroutine[object, object, None]]
"""Somebody in a world who is waited for."""

QUIET_S: Final = 5.0
"""Virtual time, beyond the deadlines of storage calls, for all that waits to be over."""

SHARED_QUIET_S: Final = 20.0
"""The same where nodes that share a tier may be waiting for each other to have seen a flush."""

ROT_CHANCE: Final = 0.1
"""How much of what the audit has to find is damaged in one tier."""

FLUSH_CHANCE: Final = 0.3
"""Worlds in which an operator flushes."""

WARM_CHANCE: Final = 0.3
"""Worlds in which an operator warms."""

_ROT: Final = (
    InjectedFault.FLIP_PAYLOAD,
    InjectedFault.FLIP_HEADER,
    InjectedFault.SWAP,
    InjectedFault.TRUNCATE,
    InjectedFault.TORN_READ,
    InjectedFault.VANISH,
)
"""What goes wrong on a disk whose calls all answer."""


_KINDS: Final = ("sound", "slow", "away", "away", "faulty", "broken", "rotten", "rotten")


def draw_plan(random: Random, world: World) -> WorldPlan:
    """A world: few slots and short chains, so that everything collides with everything."""
    slots = random.randint(12, 40)
    pages = random.choice((1, 1, 2, 4))
    world.network_s = random.choice((1e-5, 2e-4, 2e-3, 1e-2))
    _draw_chains(random, world)
    models = [
        [
            _namespace(model, rank, ranks, (pages if rank == 0 else 1) * PAGE_BYTES - shorter)
            for rank in range(ranks)
        ]
        for model in range(random.randint(1, 2))
        for ranks in (random.randint(1, 3),)
        for shorter in (random.choice((0, 16, 1000)),)
    ]
    total = slots * pages * PAGE_BYTES
    tiers = _draw_tiers(random, total)
    world.disks = [{} for _ in tiers]
    world.marks = [set() for _ in tiers]
    return WorldPlan(
        capacity_bytes=total,
        segment_bytes=random.choice((1, 4, 8)) * pages * PAGE_BYTES,
        lease_ttl_ms=random.choice((50, 200, 2000)),
        prefetch=_draw_prefetch(random),
        tiers=tiers,
        engines=[random.choice(models) for _ in range(random.randint(1, 4))],
        habits=_draw_habits(random),
        sessions=random.randint(1, 4),
        requests=random.randint(5, 15),
        restarts=random.choice((0, 1, 1, 2)),
        kills=random.random() < 0.5,
        keeps=random.random() < 0.5,
        eviction=random.choice(POLICIES),
    )


def _draw_tiers(random: Random, total_bytes: int) -> list[TierPlan]:
    """None to three tiers; often all of one kind, since one that loses blocks hides much."""
    kinds = [random.choice(_KINDS) for _ in range(random.choice((0, 1, 1, 1, 2, 2, 3)))]
    if random.random() < 0.5:
        kinds = kinds[:1] * len(kinds)
    small = random.random() < 0.3
    return [
        _draw_tier(random, number, kind, total_bytes, small) for number, kind in enumerate(kinds)
    ]


def _draw_tier(random: Random, number: int, kind: str, total_bytes: int, small: bool) -> TierPlan:
    chances: dict[InjectedFault, float] = {}
    if kind in ("faulty", "broken", "rotten"):
        for fault in _ROT if kind == "rotten" else InjectedFault:
            if random.random() < 0.5:
                chances[fault] = random.random() * (0.05 if kind == "faulty" else 0.3)
    elif random.random() < 0.5:
        chances[InjectedFault.LINGER] = 0.5
    latency_s = random.choice((1e-4, 2e-3, 2e-2))
    if kind in ("sound", "away"):
        latency_s = random.choice((0.0, 1e-4))
    outages = [
        (random.expovariate(1 / 0.1), random.choice((0.1, 1.0, 5.0)))
        for _ in range(random.randint(1, 4) if kind == "away" else 0)
    ]
    # Where nothing else goes wrong, nothing may be lost: no deadline may be missed there.
    patient = kind in ("sound", "slow")
    deadline_ms = PATIENT_MS if patient else random.choice((50, 200, 1000))
    config = StorageConfig(
        type="memory",
        name=f"tier{number}",
        deadline_ms=deadline_ms,
        slow_ms=deadline_ms if patient else deadline_ms // 2,
        probe_ms=random.choice((20, 200)),
        read_batches=random.choice((1, 4)),
        write_batches=random.choice((1, 2)),
        write_queue=Size(random.choice((PAGE_BYTES, total_bytes, total_bytes))),
        fill_from_lower=random.random() < 0.7,
        write_policy=random.choice(list(WritePolicy)),
        write_share=random.choice((0.1, 0.5, 1.0)),
    )
    return TierPlan(
        disk_bytes=total_bytes // 2 if small else None,
        faults=FaultPlan(chances, latency_s),
        outages=outages,
        hangs=random.random() < 0.7,
        config=config,
    )


def _draw_prefetch(random: Random) -> PrefetchConfig:
    # The auditor waits long for all that there is.
    return PrefetchConfig(
        policy=random.choice(list(PrefetchPolicy)), timeout_base_ms=PATIENT_MS, min_tokens=0
    )


def _draw_habits(random: Random) -> Habits:
    pace_s = random.choice((0.001, 0.01, 0.1, 0.5))
    if random.random() < 0.7:
        return Habits(pace_s)
    return Habits(pace_s, die=0, garbage=0, meddle=0, cancel=0, pause=0, forget=0.1, break_off=0.1)


def _draw_chains(random: Random, world: World) -> None:
    """Chains of hashes that share prefixes, as conversations do."""
    for number in range(random.randint(4, 8)):
        trunk = random.choice(world.chains) if world.chains and random.random() < 0.6 else []
        chain = trunk[: random.randint(0, len(trunk))]
        parent = chain[-1] if chain else ROOT
        for place in range(len(chain), random.randint(len(chain) + 1, len(chain) + 8)):
            block_hash = hashlib.sha256(parent + f"{number}/{place}".encode()).digest()
            assert len(block_hash) == HASH_BYTES
            world.parents[block_hash] = parent
            chain = [*chain, block_hash]
            parent = block_hash
        world.chains.append(chain)
    if random.random() < 0.3:
        # A client that lies: no sound hash chain bites its own tail.
        ring = [random.randbytes(HASH_BYTES) for _ in range(random.randint(1, 4))]
        world.parents |= zip(ring, [ring[-1], *ring], strict=False)
        world.liars |= set(ring)
        world.chains.append(ring)


def _namespace(model: int, rank: int, ranks: int, block_bytes: int) -> Namespace:
    return Namespace(
        model=f"model-{model}",
        weights="1",
        kv_dtype="bfloat16",
        block_tokens=16,
        block_bytes=block_bytes,
        layout="simulated",
        groups=("full",),
        platform="simulated",
        tp_rank=rank,
        tp_size=ranks,
        pp_rank=0,
        pp_size=1,
        cp_rank=0,
        cp_size=1,
        hash_scheme="opaque-simulated",
        hash_root=ROOT,
        format_version=FORMAT_VERSION,
    )


async def run_world(
    loop: SimulationLoop, seed: int, leads: Sequence[Lead] = (), *, hostile: bool = False
) -> RunRecord:
    """One world to its end. Raises Violation."""
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
        await _lives(world, plan, leads)
    finally:
        if world.keeper is not None:
            world.keeper.close()


async def _lives(world: World, plan: WorldPlan, leads: Sequence[Lead]) -> None:
    life = world.life = DaemonIncarnation(world, plan, faulty=True)
    while not life.accepting:
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
    await _audit(world, plan)


async def _restart(world: World, plan: WorldPlan, over: asyncio.Event) -> None:
    """Stop or kill the daemon now and then, and start another one on the same disks."""
    for _ in range(plan.restarts):
        await asyncio.sleep(world.random.expovariate(1 / 0.1))
        # Just after a commit, when checksums, backups and the index have most to lose.
        stored = world.counts["stored_blocks"]
        while world.counts["stored_blocks"] == stored and not over.is_set():
            await asyncio.sleep(0.002)
        if over.is_set():
            return
        await next_life(world, plan, faulty=True, kill=plan.kills)


async def _outages(world: World, number: int, plan: TierPlan, over: asyncio.Event) -> None:
    """Have a tier go away and come back, and see that it is used again then."""
    for pause_s, duration_s in plan.outages:
        await _sleep_until(over, pause_s)
        if over.is_set():
            return
        world.counts["outages"] += 1
        world.down.add(number)
        await _sleep_until(over, duration_s)
        world.down.discard(number)
        await asyncio.sleep(plan.back_within_s)
        life = current(world)
        if life is not None:
            life.check_back(number)


async def _flushes(world: World, plan: WorldPlan, over: asyncio.Event) -> None:
    """Flush a namespace, or all, now and then, in some of the worlds."""
    # Of its own: what else happens in a world of this seed must not change.
    random = Random(f"flushes of {world.seed}")
    if random.random() > FLUSH_CHANCE:
        return
    for _ in range(random.randint(1, 3)):
        await _sleep_until(over, random.expovariate(1 / 0.2))
        life = current(world)
        if life is not None and life.accepting:
            digest = random.choice(random.choice(plan.engines)).digest
            await life.flush(digest.hex() if random.random() < 0.7 else "")


async def _warms(world: World, plan: WorldPlan, over: asyncio.Event) -> None:
    """Warm what engines have computed, into L2 or a tier, in some of the worlds."""
    random = Random(f"warms of {world.seed}")
    if random.random() > WARM_CHANCE:
        return
    while not over.is_set():
        await _sleep_until(over, random.expovariate(1 / 0.1))
        life = current(world)
        if life is not None and life.accepting and world.chains:
            ranks, chain = random.choice(plan.engines), random.choice(world.chains)
            want = WarmOrder(random.randint(0, len(plan.tiers)), verify=random.random() < 0.3)
            await life.warm(ranks, chain, want, random.expovariate(1 / 0.5))


async def _sleep_until(over: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await over.wait()


async def _settle(world: World, plan: WorldPlan) -> None:
    """With all clients gone and the disks well, nothing may be left of them."""
    while (life := current(world)) is None or not life.accepting:
        await asyncio.sleep(0.01)
    life.calm()
    while world.landing:
        await asyncio.sleep(1.0)
    calls_s = max((tier.config.deadline_ms / 1000 for tier in plan.tiers), default=0.0)
    quiet_s = SHARED_QUIET_S if any(tier.shared for tier in plan.tiers) else QUIET_S
    await asyncio.sleep(plan.lease_ttl_ms / 1000 + 2 * HOUSEKEEPING_S + calls_s + quiet_s)
    life.check_quiet()


async def _audit(world: World, plan: WorldPlan) -> None:
    """What lies sound on the disks is found by the next life, and is right."""
    _rot(world)
    if world.keeper is not None:
        world.counts["kept_descriptors"] += len(world.keeper.names())
        world.keeper.close()
    await next_life(world, plan, faulty=False, kill=False)
    life = current(world)
    assert life is not None
    if world.disks:
        for ranks in {rank.digest: rank for engine in plan.engines for rank in engine}.values():
            await _audit_rank(world, ranks)
    await life.stop(drain_s=1.0)


def _rot(world: World) -> None:
    """Damage some of what lies on the disks, each copy for itself."""
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
    life = current(world)
    assert life is not None
    host = life.node.host
    space = host.spaces[rank.digest]
    room = host.capacity_bytes // space.segment_bytes * space.slots_per_segment
    for chain in world.chains:
        sound = min(_sound_prefix(world, rank, chain), room)
        counters = life.node.counters
        found, refused = 0, -1
        # A damaged copy in one tier does not hide a sound one in the next; only what had no
        # room may come at the next try.
        while found < sound and counters["promotion_no_room_total"] != refused:
            refused = counters["promotion_no_room_total"]
            found = await _audit_chain(world, link, rank, chain)
        # What is asked for may be written to another tier, which then drops something for it.
        if found < min(sound, _sound_prefix(world, rank, chain)):
            world.fail(f"a restarted daemon finds {found} of {sound} stored blocks")
        world.counts["audited_blocks"] += found
    link.close(torn=False)
    # What it held is free for the next rank once the daemon has seen the end.
    await asyncio.sleep(1.0)


async def _audit_chain(
    world: World, link: SimulatedSession, rank: Namespace, chain: Sequence[bytes]
) -> int:
    """How many blocks of a chain the daemon finds; they are verified."""
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
    """Blocks of a chain, from its start, that lie sound on some disk."""
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


class _LogTap(logging.Handler):
    """Keeps what the daemon logs as errors, to be shown with a failure."""

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
    """Run one world. Raises Violation, or whatever else went wrong, noted with the seed.

    A world lasts until its engines and the `leads` have ended. A `hostile` one has readers whose
    leases outlive the daemon, and storage that finishes late what it was no longer waited for.
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
