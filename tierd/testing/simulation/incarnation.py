"""One life of a simulated daemon, and what must hold of it.

Production's Node and Sessions run here as they are. A referee listens at the daemon's
end of every connection and keeps its own account of who may touch which slot until when;
what contradicts it is a violation.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Final

from tierd.config import PrefetchPolicy, WritePolicy
from tierd.core.l2.space import Space
from tierd.daemon.jobs.warming import Pace, Warming, WarmOrder
from tierd.daemon.l3.renewal import USED_AGAIN
from tierd.daemon.l3.tier import StorageTier, opened
from tierd.daemon.node import Node
from tierd.daemon.options import NodeOptions
from tierd.daemon.session.server import Session
from tierd.memory.arena import Segment
from tierd.testing.faulty import NO_FAULTS, InjectedFault
from tierd.testing.loop import VirtualClock
from tierd.testing.simulation.connection import SimulatedConnection
from tierd.testing.simulation.keeper import Keeper
from tierd.testing.simulation.late import LateBackend
from tierd.testing.simulation.plan import WorldPlan
from tierd.testing.simulation.referee import GrantedLease, GrantedSlots, Referee
from tierd.testing.simulation.world import World
from tierd.types import BlockKey, Namespace
from tierd.wire import messages as m

SEGMENTS_FAIL_CHANCE: Final = 0.2
SEGMENT_FAIL_CHANCE: Final = 0.3
"""Lives in which segments fail, and how many of them."""

CHECK_EVERY: Final = 8
"""Deliveries per full check of the daemon's invariants, which costs more than a frame."""


class DaemonIncarnation:
    """One life of the daemon: production's Node and Sessions, on simulated connections."""

    def __init__(self, world: World, plan: WorldPlan, *, faulty: bool, apart: bool = False) -> None:
        """`apart` is a node beside the one whose lives follow each other: it shares the tiers."""
        self.world = world
        self._apart = apart
        self._had: set[BlockKey] = set()
        self.plans = plan.tiers
        self.best_effort = plan.prefetch.policy is PrefetchPolicy.BEST_EFFORT
        self.backends = [
            LateBackend(world, number, tier, faulty=faulty, apart=apart)
            for number, tier in enumerate(plan.tiers)
        ]
        for number, disk in enumerate(world.disks):
            world.note("tier", number, len(disk))
        self.clock = VirtualClock(world.loop)
        self.node = Node(
            NodeOptions(
                capacity_bytes=plan.capacity_bytes,
                lease_ttl_ms=plan.lease_ttl_ms,
                eviction=plan.eviction,
                prefetch=plan.prefetch,
                epoch=world.random.randbytes(8),
                segment_bytes=plan.segment_bytes,
            ),
            tiers=[
                StorageTier(tier.config, backend)
                for tier, backend in zip(plan.tiers, self.backends, strict=True)
            ],
            clock=self.clock,
            manager=None if apart else world.keeper,
        )
        # What is kept of host memory says so in the next life, too.
        lasts = world.keeper is not None and not apart
        withheld = [set[BlockKey]() for _ in plan.tiers]
        world.withheld = world.withheld or withheld
        self._withheld = world.withheld if lasts else withheld
        self._note_withheld()
        if faulty:
            self._have_segments_fail()
        self.node.lives.begin()
        self.accepting = False
        self.dead = False
        self.leases: dict[int, GrantedLease] = {}
        self.writers: dict[int, GrantedSlots] = {}
        self._owners = 0
        self._referees: list[Referee] = []
        self._deliveries = 0
        self._stop = asyncio.Event()
        self._drain_s = 0.0
        self._left = 0
        self._task = world.loop.create_task(self._run(), name="daemon")

    def _have_segments_fail(self) -> None:
        """In some lives the system now and then has no memory segment to give."""
        world, arena = self.world, self.node.memory.arena
        random, create = Random(f"segments of {world.seed} at {world.now_ns()}"), arena.create
        if random.random() > SEGMENTS_FAIL_CHANCE:
            return

        def failing(space: Space, index: int) -> Segment:
            if index == len(arena.segments(space)) and random.random() < SEGMENT_FAIL_CHANCE:
                world.counts["failed_segments"] += 1
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return create(space, index)

        arena.create = failing  # type: ignore[method-assign]  # the system in the place of itself

    def _note_withheld(self) -> None:
        """What a tier is not to get, since another node has flushed it, counts as what it has."""
        backups = self.node.backups
        withhold = backups.withhold

        def noting(space: Space, slots: Sequence[int], bit: int) -> None:
            names = space.hashes_of(slots)
            keys = (BlockKey(space.digest, name) for name in names)
            self._withheld[bit.bit_length() - 1].update(keys)
            withhold(space, slots, bit)

        backups.withhold = noting  # type: ignore[method-assign]  # a witness, which changes nothing

    async def _run(self) -> None:
        try:
            async with opened(self.node.tiers):
                await self.node.run(self._serve)
        finally:
            for referee in self._referees:
                referee.forget()
            self.node.lives.close()
            self.node.memory.arena.close()
            self._count()

    def _count(self) -> None:
        """Add what the daemon and its tiers counted to the world's counts."""
        counts = self.world.counts
        counts.update(self.node.counters)
        counts["evicted_blocks_total"] += self.node.host.evicted_blocks
        for tier in self.node.tiers:
            counters = tier.status()["counters"]
            assert isinstance(counters, dict)
            counts.update({f"tier_{name}": number for name, number in counters.items()})

    async def _serve(self) -> None:
        self.accepting = True
        await self._stop.wait()
        self.accepting = False
        if not self.dead:
            often = self._used_often()
            self._left = await self.node.drain(self._drain_s)
            self.check()
            if not self._left:
                self._check_kept(often)
            self.dead = True
            self._check_evictable()
            for referee in self._referees:
                referee.connection.daemon.close()

    async def stop(self, drain_s: float) -> int:
        """Shut down in order; the number of blocks that were not backed up."""
        self._drain_s = drain_s
        self._stop.set()
        await self._task
        return self._left

    async def kill(self) -> None:
        """SIGKILL: clients see the sockets close and keep their mappings, the disks stay."""
        self.dead = True
        self.accepting = False
        for referee in self._referees:
            referee.connection.daemon.kill()
        self._stop.set()
        await self._task

    def adopt(self, connection: SimulatedConnection, name: str) -> None:
        """What `Server.adopt` does, with a referee in between."""
        self._owners += 1
        session = Session(self._owners, self.node, name)
        session.transport = connection.daemon
        self._referees.append(Referee(self, session, connection))

    def served(self, key: BlockKey) -> None:
        """A client gets a block. What another node had before the flush, it may keep."""
        world = self.world
        if key not in world.barred:
            self._had.add(key)
        elif not self._apart or key not in self._had:
            where = "another node serves" if self._apart else "there is served"
            world.fail(
                f"{where} a block that a complete flush has dropped; {world.late_flushed} flushed "
                f"blocks have landed late, {world.hidden_flushed} came back after a start"
            )

    def delivered(self) -> None:
        """A frame or a part of one reached the daemon."""
        self._deliveries += 1
        if self._deliveries % CHECK_EVERY == 0:
            self.check()

    def check(self) -> None:
        """Compare the daemon's state with itself and with the referees' account."""
        if self.dead:
            return
        try:
            self.node.check()
            self._check_leases()
            self._check_writers()
            self._check_bugs()
            self._check_masks()
        except AssertionError as error:
            place = error.__traceback__
            while place is not None and place.tb_next is not None:
                place = place.tb_next
            line = place.tb_lineno if place is not None else 0
            name = place.tb_frame.f_code.co_qualname if place is not None else "?"
            self.world.fail(f"check failed: {name}, line {line}: {error}")

    def _check_leases(self) -> None:
        now = self.world.now_ns()
        for lease_id, lease in list(self.leases.items()):
            if lease.expires_ns <= now:
                del self.leases[lease_id]
                continue
            for space, slot, block_hash in lease.slots:
                in_place = space.items.get(block_hash) == slot or slot in space.dropped
                assert in_place, "a leased slot was reused"
                assert space.refs[slot] > 0, "a leased slot is not held"

    def _check_writers(self) -> None:
        reservations = self.node.host.reservations
        for reservation_id, granted in self.writers.items():
            assert reservation_id in reservations, "slots were freed while a client may write"
            assert reservations[reservation_id].owner == granted.owner
            for block_hash, slot in granted.blocks:
                assert granted.space.writing.get(block_hash) == slot, "a slot was given twice"

    def _check_bugs(self) -> None:
        assert not self.node.counters["internal_errors_total"], "the daemon counted a bug"
        for tier, backend in zip(self.node.tiers, self.backends, strict=True):
            assert not tier.counters["wrong_answers_total"], "the daemon counted a bug of a tier"
            assert not backend.counters["torn_writes_total"], "a slot changed under a backup"

    def _check_masks(self) -> None:
        """A tier that is said to have a block has said so, or is to get it, or was left out
        because another one had it."""
        for space in self.node.host.spaces.values():
            for block_hash, slot in space.items.items():
                key = BlockKey(space.digest, block_hash)
                for number, queue in enumerate(self.node.backups.queues):
                    if space.tiers.of(slot) & queue.bit and not self._is_with(number, key, slot):
                        raise AssertionError(f"tier {number} does not have what it is said to have")

    def _is_with(self, number: int, key: BlockKey, slot: int) -> bool:
        if key in self.backends[number].kept or key in self._withheld[number]:
            return True
        if any(key in backend.promoted for backend in self.backends[: number + 1]):
            return True
        below = any(key in backend.promoted for backend in self.backends[number + 1 :])
        if below and not self.plans[number].config.fill_from_lower:
            return True
        return self.node.backups.waits(number, self.node.host.spaces[key.namespace], slot)

    def _used_often(self) -> list[tuple[Space, bytes]]:
        """Blocks that are resident, and that several requests have used."""
        return [
            (space, block_hash)
            for space in self.node.host.spaces.values()
            for block_hash in space.items
            if space.reuse.uses(block_hash) >= USED_AGAIN
        ]

    def _check_kept(self, often: Sequence[tuple[Space, bytes]]) -> None:
        """After an orderly stop, what was used often and is resident lies in the tiers as well,
        whatever these have dropped by themselves before."""
        for number, (plan, queue) in enumerate(
            zip(self.plans, self.node.backups.queues, strict=True)
        ):
            if not plan.sound or plan.config.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
                continue
            for space, block_hash in often:
                slot = space.items.get(block_hash)
                if slot is None or slot in space.unverified:
                    continue
                # What the tier is kept from has only one of the bits.
                if space.tiers.of(slot) & queue.both == queue.bit:
                    continue
                self.world.counts["used_blocks_kept"] += 1
                if not self.world.on_disk(number, BlockKey(space.digest, block_hash)):
                    self.world.fail("a block that is used often was lost by a stop")

    def _check_evictable(self) -> None:
        """Nothing that clients said may keep a block for ever; this empties the index."""
        if not self.node.host.evict_everything():
            self.world.fail("blocks that can never be evicted")

    def calm(self) -> None:
        """Tiers sound and quick from now on."""
        for backend in self.backends:
            backend.plan = NO_FAULTS
            backend.late_chance = 0.0
        self.world.down.clear()

    async def flush(self, prefix: str) -> None:
        """Flush what begins so, and see that it is gone."""
        world, flushes = self.world, self.node.flushes
        flush = flushes.begin(prefix, host=True, numbers=range(len(self.backends)))
        world.begin_flush(flush.covers)
        before = {key for key in world.ever if flush.covers(key.namespace)}
        await asyncio.wait([self.node.spawn(lambda: flushes.run(flush), "flush")])
        complete = flush.status()["complete"]
        # One that is not complete may leave in one tier what another one then gets from it.
        for number in range(len(flush.tiers)) if complete else ():
            world.check_flushed(number, flush.covers)
        for space in self.node.host.spaces.values():
            for block_hash in space.items:
                key = BlockKey(space.digest, block_hash)
                if complete and flush.covers(space.digest) and key not in world.stored:
                    world.fail("a flushed block is still in L2")
        if complete:
            world.end_flush(before)
        world.remark(f"a flush of {prefix[:8] or 'all'} ended, complete: {complete}")
        world.counts["complete_flushes" if complete else "other_flushes"] += 1

    async def warm(
        self,
        ranks: Sequence[Namespace],
        hashes: Sequence[bytes],
        want: WarmOrder,
        deadline_s: float,
    ) -> None:
        """Warm a chain for those of the ranks that have come, until the deadline at most."""
        world, warmings = self.world, self.node.warmings
        pace = Pace()
        for namespace in ranks:
            space = self.node.host.spaces.get(namespace.digest)
            if space is None or not self.accepting:
                continue
            warming = Warming(space, hashes, want, pace)
            world.counts["warmings"] += 1
            end_ns = world.now_ns() + int(deadline_s * 1e9)
            run = partial(warmings.run, warming, deadline_s)
            await asyncio.wait([self.node.spawn(run, "warm order")])
            if world.now_ns() > end_ns + 1_000_000:
                world.fail("a warm-up did not keep its deadline")
            world.counts["warmed_blocks"] += len(warming.which(m.Warmth.BROUGHT))

    def check_back(self, number: int) -> None:
        """A tier whose outage is over, and that has no other faults, must be in use again."""
        if not self.accepting or self.plans[number].faults.chances.keys() - {InjectedFault.LINGER}:
            return
        tier = self.node.tiers[number]
        circuits = tier.status()["circuits"]
        assert isinstance(circuits, dict)
        # A request that waited for less than the tier takes may have shut it again just now.
        states = [c["state"] for c in circuits.values() if "request" not in str(c["why"])]
        if not tier.is_open or "open" in states:
            self.world.fail(f"a tier that is back is not used: {states}")

    def check_quiet(self) -> None:
        """After all clients have gone and all deadlines have passed: nothing is left behind."""
        self.check()
        node = self.node
        left = {
            "sessions": sum(not r.over for r in self._referees),
            # All but the copies' own.
            "listeners": len(node.memory.listeners) - 1,
            "copying sessions": len(node.copies.sessions),
            "leases": len(node.host.leases),
            "reservations": len(node.host.reservations),
            "writing": sum(len(s.writing) for s in node.host.spaces.values()),
            "refs": sum(sum(s.refs) for s in node.host.spaces.values()),
            "unproven": sum(len(s.unverified) for s in node.host.spaces.values()),
            "doubtful": sum(len(s.quarantined) for s in node.host.spaces.values()),
            "dropped": sum(len(s.dropped) for s in node.host.spaces.values()),
            "lives kept": len(_past(self.world.keeper)) - 2 if self.world.keeper else 0,
            "registered": sum(s.sessions for s in node.host.spaces.values()),
            "backlog": node.backlog(),
            "pending bytes": sum(q.pending_bytes for q in node.backups.queues),
            "promoting": len(node.promotions.under_way),
            "tasks": len(node.tasks),
        }
        left = {what: count for what, count in left.items() if count}
        if left:
            self.world.fail(f"left behind by nobody: {left}")
        memory = sum(
            os.fstat(segment.fd).st_blocks * 512
            for space in node.host.spaces.values()
            for segment in node.memory.arena.segments(space)
        )
        if memory > node.host.capacity_bytes:
            self.world.fail(f"{memory} bytes of memory in {node.host.capacity_bytes}")


def _past(keeper: Keeper) -> list[str]:
    """Of lives, what is kept besides their memory."""
    return [name for name in keeper.names() if "-" in name]


def current(world: World) -> DaemonIncarnation | None:
    """The life that runs in a world now."""
    incarnation = world.incarnation
    assert incarnation is None or isinstance(incarnation, DaemonIncarnation)
    return incarnation
