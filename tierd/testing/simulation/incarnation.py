"""One incarnation of a simulated daemon, and its invariants.

It runs production's Node and Sessions unchanged. A referee listens at the daemon's end of each
connection and keeps its own record of which client may use which slot until when. Any
contradiction is a violation.
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
from tierd.daemon.session.session import Session
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
"""Chance that an incarnation has failing segments, and chance that one of them fails."""

CHECK_EVERY: Final = 8
"""Deliveries per full check of the daemon's invariants, which costs more than a frame."""


class DaemonIncarnation:
    """One incarnation of the daemon: production's Node and Sessions on simulated connections."""

    def __init__(self, world: World, plan: WorldPlan, *, faulty: bool, apart: bool = False) -> None:
        """`apart`: a second node, which shares the tiers and is not restarted."""
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
        # Adopted host memory keeps its tier bits, so the checks' record must last as well.
        lasts = world.keeper is not None and not apart
        withheld = [set[BlockKey]() for _ in plan.tiers]
        world.withheld = world.withheld or withheld
        self._withheld = world.withheld if lasts else withheld
        self._note_withheld()
        if faulty:
            self._have_segments_fail()
        self.node.incarnations.begin()
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
        """In some incarnations, make the system refuse memory segments now and then."""
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
        """Record blocks withheld from a tier after another node's flush: they count as present."""
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
            self.node.incarnations.close()
            self.node.memory.arena.close()
            self._count()

    def _count(self) -> None:
        """Add the counters of the daemon and its tiers to the world's counts."""
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
        """Shut down in order; return the number of blocks that were not backed up."""
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
        """Start a session as `Server.adopt` does, with a referee in between."""
        self._owners += 1
        session = Session(self._owners, self.node, name)
        session.transport = connection.daemon
        self._referees.append(Referee(self, session, connection))

    def served(self, key: BlockKey) -> None:
        """Check a block leased to a client; another node may keep blocks from before a flush."""
        world = self.world
        if key not in world.barred:
            self._had.add(key)
        elif not self._apart or key not in self._had:
            who = "another node" if self._apart else "the daemon"
            world.fail(
                f"{who} serves a block that a complete flush has dropped; {world.late_flushed} "
                f"flushed blocks were written late, {world.hidden_flushed} came back after a start"
            )

    def delivered(self) -> None:
        """Note that data reached the daemon, and check the invariants now and then."""
        self._deliveries += 1
        if self._deliveries % CHECK_EVERY == 0:
            self.check()

    def check(self) -> None:
        """Check the daemon's invariants, and compare its state with the referees' record."""
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
        """Check that a tier marked as having a block has reported it, waits for it, or was left
        out because another tier had it."""
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
        """Return resident blocks that several requests have used."""
        return [
            (space, block_hash)
            for space in self.node.host.spaces.values()
            for block_hash in space.items
            if space.reuse.uses(block_hash) >= USED_AGAIN
        ]

    def _check_kept(self, often: Sequence[tuple[Space, bytes]]) -> None:
        """Check that after an orderly stop the tiers have all resident blocks that are used often,
        even if they had dropped some before."""
        for number, (plan, queue) in enumerate(
            zip(self.plans, self.node.backups.queues, strict=True)
        ):
            if not plan.sound or plan.config.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
                continue
            for space, block_hash in often:
                slot = space.items.get(block_hash)
                if slot is None or slot in space.unverified:
                    continue
                # A block withheld from the tier has only one of the tier's two bits.
                if space.tiers.of(slot) & queue.both == queue.bit:
                    continue
                self.world.counts["used_blocks_kept"] += 1
                if not self.world.on_disk(number, BlockKey(space.digest, block_hash)):
                    self.world.fail("a block that is used often was lost by a stop")

    def _check_evictable(self) -> None:
        """Empty the index to check that no message of a client keeps a block forever."""
        if not self.node.host.evict_everything():
            self.world.fail("blocks that can never be evicted")

    def calm(self) -> None:
        """Remove all faults and delays of the tiers."""
        for backend in self.backends:
            backend.plan = NO_FAULTS
            backend.late_chance = 0.0
        self.world.down.clear()

    async def flush(self, prefix: str) -> None:
        """Flush the namespaces whose digest starts with `prefix`, and check the result."""
        world, flushes = self.world, self.node.flushes
        flush = flushes.begin(prefix, host=True, numbers=range(len(self.backends)))
        world.begin_flush(flush.covers)
        before = {key for key in world.ever if flush.covers(key.namespace)}
        await asyncio.wait([self.node.spawn(lambda: flushes.run(flush), "flush")])
        complete = flush.status()["complete"]
        # After an incomplete flush a tier may still have blocks, which others then get from it.
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
        """Warm a chain for the ranks that are registered, until the deadline at most."""
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
        """Check that a tier without other faults is used again after its outage."""
        if not self.accepting or self.plans[number].faults.chances.keys() - {InjectedFault.LINGER}:
            return
        tier = self.node.tiers[number]
        circuits = tier.status()["circuits"]
        assert isinstance(circuits, dict)
        # A request with a deadline shorter than the latency may have opened the circuit again.
        states = [c["state"] for c in circuits.values() if "request" not in str(c["why"])]
        if not tier.is_open or "open" in states:
            self.world.fail(f"a tier that is back is not used: {states}")

    def check_quiet(self) -> None:
        """Check that nothing is left when all clients are gone and all deadlines have passed."""
        self.check()
        node = self.node
        left = {
            "sessions": sum(not r.over for r in self._referees),
            # Except the listener of the copies.
            "listeners": len(node.memory.listeners) - 1,
            "copying sessions": len(node.copies.sessions),
            "leases": len(node.host.leases),
            "reservations": len(node.host.reservations),
            "writing": sum(len(s.writing) for s in node.host.spaces.values()),
            "refs": sum(sum(s.refs) for s in node.host.spaces.values()),
            "unverified": sum(len(s.unverified) for s in node.host.spaces.values()),
            "quarantined": sum(len(s.quarantined) for s in node.host.spaces.values()),
            "dropped": sum(len(s.dropped) for s in node.host.spaces.values()),
            "incarnations kept": len(_past(self.world.keeper)) - 2 if self.world.keeper else 0,
            "registered": sum(s.sessions for s in node.host.spaces.values()),
            "backlog": node.backlog(),
            "pending bytes": sum(q.pending_bytes for q in node.backups.queues),
            "promoting": len(node.promotions.under_way),
            "tasks": len(node.tasks),
        }
        left = {what: count for what, count in left.items() if count}
        if left:
            self.world.fail(f"left behind after all clients are gone: {left}")
        memory = sum(
            os.fstat(segment.fd).st_blocks * 512
            for space in node.host.spaces.values()
            for segment in node.memory.arena.segments(space)
        )
        if memory > node.host.capacity_bytes:
            capacity = node.host.capacity_bytes
            self.world.fail(f"{memory} bytes of memory exceed the capacity of {capacity}")


def _past(keeper: Keeper) -> list[str]:
    """Return the names of descriptors kept for incarnations, without their memory segments."""
    return [name for name in keeper.names() if "-" in name]


def current(world: World) -> DaemonIncarnation | None:
    """Return the incarnation that runs in a world now, if any."""
    incarnation = world.incarnation
    assert incarnation is None or isinstance(incarnation, DaemonIncarnation)
    return incarnation
