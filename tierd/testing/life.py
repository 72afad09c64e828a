"""One life of a simulated daemon, and the referees that watch it.

Production's Node and Sessions run here as they are. A referee listens at the daemon's
end of every connection and keeps its own account of who may touch which slot until when;
what contradicts it is a violation.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tierd.backend import GetRequest, GetResult, Outcome, PutRequest, checksum
from tierd.core.host import Space
from tierd.daemon.node import Node
from tierd.daemon.server import Session
from tierd.daemon.tier import StorageTier
from tierd.errors import RemoteProtocolError
from tierd.testing.backend import NO_FAULTS, FaultPlan, MemoryBackend
from tierd.testing.connection import Connection
from tierd.testing.loop import VirtualClock
from tierd.testing.world import Plan, World
from tierd.types import BlockKey, Namespace
from tierd.wire import messages as m
from tierd.wire.frames import HEAD_BYTES, FrameDecoder

REPLY_SLACK_S: Final = 0.001
"""Virtual time past a call's deadline: turns of the loop take none, so this is generous."""

CHECK_EVERY: Final = 8
"""Deliveries per full check of the daemon's invariants, which costs more than a frame."""


@dataclass(slots=True)
class _GrantedLease:
    owner: int
    slots: list[tuple[Space, int, bytes]]
    expires_ns: int


@dataclass(slots=True)
class _GrantedSlots:
    owner: int
    space: Space
    blocks: list[tuple[bytes, int]]


class WatchedBackend(MemoryBackend):
    """A tier that checks what it is handed: every block must be the right one, and keep still."""

    world: World

    async def put_many(self, namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
        for when in ("before", "after"):
            for request in requests:
                key = BlockKey(namespace, request.block_hash)
                right = self.world.payload_of(key, request.length)
                if bytes(request.view[: request.length]) != right:
                    self.world.fail(f"wrong bytes {when} a backup of {key.block_hash.hex()[:12]}")
                if request.checksum != checksum(right):
                    self.world.fail("a backup came with a wrong checksum")
                world, block_hash = self.world, request.block_hash
                if request.parent != world.parents[block_hash] and block_hash not in world.liars:
                    self.world.fail("a backup came with a wrong parent")
            if when == "before":
                outcomes = await super().put_many(namespace, requests)
        self.world.counts["backed_up_blocks"] += outcomes.count(Outcome.STORED)
        return outcomes

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        results = await super().get_into(namespace, requests)
        self.world.counts["promoted_blocks"] += sum(r.outcome is Outcome.HIT for r in results)
        return results


class Life:
    """One life of the daemon: production's Node and Sessions, on simulated connections."""

    def __init__(self, world: World, plan: Plan, faults: FaultPlan) -> None:
        self.world = world
        self.backends: list[WatchedBackend] = []
        for number, disk in enumerate(world.disks):
            backend = WatchedBackend(
                plan.disk_bytes, plan=faults, seed=world.random.getrandbits(32), blocks=disk
            )
            backend.world = world
            self.backends.append(backend)
            world.note("tier", number, len(disk))
        self.clock = VirtualClock(world.loop)
        self.node = Node(
            capacity_bytes=plan.capacity_bytes,
            lease_ttl_ms=plan.lease_ttl_ms,
            tiers=[StorageTier(f"tier{i}", "memory", b) for i, b in enumerate(self.backends)],
            clock=self.clock,
            epoch=world.random.randbytes(8),
            segment_bytes=plan.segment_bytes,
        )
        self.accepting = False
        self.dead = False
        self.leases: dict[int, _GrantedLease] = {}
        self.writers: dict[int, _GrantedSlots] = {}
        self._owners = 0
        self._referees: list[Referee] = []
        self._deliveries = 0
        self._stop = asyncio.Event()
        self._drain_s = 0.0
        self._task = world.loop.create_task(self._run(), name="daemon")

    async def _run(self) -> None:
        for backend in self.backends:
            await backend.open()
        try:
            await self.node.run(self._serve)
        finally:
            for backend in self.backends:
                await backend.close()
            self.node.arena.close()
            self._count()

    def _count(self) -> None:
        """Add what the daemon and its tiers counted to the world's counts."""
        counts = self.world.counts
        counts.update(self.node.counters)
        counts["evicted_blocks_total"] += self.node.host.evicted_blocks
        for tier, backend in zip(self.node.tiers, self.backends, strict=True):
            counts.update(tier.counters)
            counts.update({f"tier_{name}": number for name, number in backend.counters.items()})

    async def _serve(self) -> None:
        self.accepting = True
        await self._stop.wait()
        self.accepting = False
        if not self.dead:
            await self.node.drain(self._drain_s)
            self.check()
            self.dead = True
            self._check_evictable()
            for referee in self._referees:
                referee.connection.daemon.hang_up()

    async def stop(self, drain_s: float) -> int:
        """Shut down in order; the number of blocks that were not backed up."""
        self._drain_s = drain_s
        self._stop.set()
        await self._task
        return self.node.backlog()

    async def kill(self) -> None:
        """SIGKILL: clients see the sockets close and keep their mappings, the disks stay."""
        self.dead = True
        self.accepting = False
        for referee in self._referees:
            referee.connection.daemon.kill()
        self._stop.set()
        await self._task

    def adopt(self, connection: Connection, name: str) -> None:
        """What `Server.adopt` does, with a referee in between."""
        self._owners += 1
        session = Session(self._owners, self.node, self.clock, name)
        session.transport = connection.daemon
        self._referees.append(Referee(self, session, connection))

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
                assert space.chain.items.get(block_hash) == slot, "a leased slot was reused"
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
            bugs = {k: n for k, n in tier.counters.items() if k.endswith("_bugs_total") and n}
            assert not bugs, f"storage bugs: {bugs}"
            assert not backend.counters["torn_writes_total"], "a slot changed under a backup"

    def _check_evictable(self) -> None:
        """Nothing that clients said may keep a block for ever; this empties the index."""
        for space in self.node.host.spaces.values():
            count = len(space.chain)
            if len(space.chain.evict(count, lambda slot: False)) < count:
                self.world.fail("blocks that can never be evicted")

    def calm(self) -> None:
        """Tiers sound and quick from now on."""
        for backend in self.backends:
            backend.plan = NO_FAULTS

    def check_quiet(self) -> None:
        """After all clients have gone and all deadlines have passed: nothing is left behind."""
        self.check()
        node = self.node
        left = {
            "sessions": sum(not r.over for r in self._referees),
            "listeners": len(node.segment_listeners),
            "leases": len(node.host.leases),
            "reservations": len(node.host.reservations),
            "writing": sum(len(s.writing) for s in node.host.spaces.values()),
            "refs": sum(sum(s.refs) for s in node.host.spaces.values()),
            "registered": sum(s.sessions for s in node.host.spaces.values()),
            "backlog": node.backlog(),
            "pending bytes": node._pending_bytes,
            "promoting": len(node._promoting),
            "tasks": len(node._tasks),
        }
        left = {what: count for what, count in left.items() if count}
        if left:
            self.world.fail(f"left behind by nobody: {left}")
        memory = sum(
            os.fstat(segment.fd).st_blocks * 512
            for space in node.host.spaces.values()
            for segment in node.arena.segments(space)
        )
        if memory > node.host.capacity_bytes:
            self.world.fail(f"{memory} bytes of memory in {node.host.capacity_bytes}")


class Referee:
    """Hears both sides of one connection at the daemon's end, and keeps account."""

    def __init__(self, life: Life, session: Session, connection: Connection) -> None:
        self.connection = connection
        self.over = False
        self._life = life
        self._world = life.world
        self._session = session
        self._owner = session.owner
        self._decoder = FrameDecoder()
        self._ended = False
        self._open: dict[tuple[type[m.Message], int], asyncio.TimerHandle] = {}
        self._asked: dict[int, m.Message] = {}
        self._committing: dict[int, _GrantedSlots | None] = {}
        self._unproven: list[tuple[m.Committed, int]] = []
        self._spaces: dict[int, bytes] = {}
        self._announced: set[tuple[int, int]] = set()
        connection.on_heard = self._heard
        connection.on_said = self._said
        connection.on_finished = self._end
        connection.on_closed = self._closed

    def _heard(self, chunk: bytes) -> None:
        self._world.note(self._owner, "heard", chunk)
        if not self._ended:
            try:
                self._decoder.feed(chunk, (), self._frame_heard)
            except RemoteProtocolError:
                self._ended = True
        with memoryview(chunk) as view:
            self._session.data(view)
        # The daemon says COMMITTED first and makes it true before it looks at anything else.
        unproven, self._unproven = self._unproven, []
        for committed, evicted in unproven:
            self._committed(committed, evicted)
        self._life.delivered()

    def _frame_heard(self, payload: bytes | bytearray | memoryview, fds: tuple[int, ...]) -> None:
        message = m.decode(payload, m.FROM_CLIENT)
        self._world.counts[type(message).__name__] += 1
        life, owner = self._life, self._owner
        match message:
            case m.Acquire():
                self._due(m.Acquired, message.call, message, message.deadline_ms / 1000)
            case m.Cancel():
                if (m.Acquired, message.call) in self._open:
                    self._due(m.Acquired, message.call, self._asked[message.call], 0)
            case m.Register():
                self._due(m.Registered, message.call, message, 0)
            case m.Reserve():
                self._due(m.Reserved, message.call, message, 0)
            case m.Commit():
                self._due(m.Committed, message.call, message, 0)
                self._committing[message.call] = self._let_go(message.reservation)
            case m.Abort():
                self._let_go(message.reservation)
            case m.Status():
                self._due(m.StatusReply, message.call, message, 0)
            case m.Release():
                lease = life.leases.get(message.lease)
                if lease is not None and lease.owner == owner:
                    del life.leases[message.lease]
            case _:
                pass

    def _let_go(self, reservation_id: int) -> _GrantedSlots | None:
        granted = self._life.writers.get(reservation_id)
        if granted is None or granted.owner != self._owner:
            return None
        return self._life.writers.pop(reservation_id)

    def _due(self, kind: type[m.Message], call: int, message: m.Message, within_s: float) -> None:
        key = kind, call
        if key in self._open:
            self._open.pop(key).cancel()
        self._asked[call] = message
        self._open[key] = self._world.loop.call_later(within_s + REPLY_SLACK_S, self._overdue, key)

    def _overdue(self, key: tuple[type[m.Message], int]) -> None:
        if not self._life.dead and self._open.pop(key, None) is not None:
            self._world.fail(f"no {key[0].__name__} for call {key[1]} by its deadline")

    def _said(self, data: bytes) -> None:
        self._world.note(self._owner, "said", data)
        if self._life.dead:
            return
        message = m.decode(data[HEAD_BYTES:], m.FROM_DAEMON)
        match message:
            case m.Error(call=0):
                self._end()
            case m.Error():
                self._answered(m.Registered, message.call)
            case m.Registered():
                asked = self._answered(m.Registered, message.call)
                assert isinstance(asked, m.Register)
                namespace = Namespace.from_fields(asked.namespace)
                self._spaces[message.handle] = namespace.digest
            case m.Segment():
                self._announced.add((message.handle, message.segment))
            case m.Acquired():
                asked = self._answered(m.Acquired, message.call)
                if message.lease and isinstance(asked, m.Acquire):
                    self._leased(asked, message)
            case m.Reserved():
                asked = self._answered(m.Reserved, message.call)
                if isinstance(asked, m.Reserve):
                    self._reserved(asked, message)
            case m.Committed():
                self._answered(m.Committed, message.call)
                self._world.counts["stored_blocks"] += message.blocks
                self._unproven.append((message, self._life.node.host.evicted_blocks))
            case m.StatusReply():
                self._answered(m.StatusReply, message.call)
            case _:
                pass

    def _answered(self, kind: type[m.Message], call: int) -> m.Message | None:
        timer = self._open.pop((kind, call), None)
        if timer is None:
            self._world.fail(f"{kind.__name__} for call {call}, which nobody waits for")
            return None
        timer.cancel()
        return self._asked.pop(call)

    def _space(self, handle: int) -> Space:
        return self._life.node.host.spaces[self._spaces[handle]]

    def _leased(self, asked: m.Acquire, acquired: m.Acquired) -> None:
        hashes = m.split_hashes(asked.hashes)
        raw = m.unpack_slots(acquired.slots)
        slots = []
        for at, slot in enumerate(raw):
            handle, block_hash = asked.handles[at // acquired.blocks], hashes[at % acquired.blocks]
            space = self._space(handle)
            if (handle, slot // space.slots_per_segment) not in self._announced:
                self._world.fail("ACQUIRED names a slot before its SEGMENT")
            if space.chain.items.get(block_hash) != slot:
                self._world.fail("ACQUIRED names a slot that does not hold its block")
            slots.append((space, slot, block_hash))
        self._life.leases[acquired.lease] = _GrantedLease(self._owner, slots, acquired.expires_ns)
        if acquired.expires_ns <= self._world.now_ns():
            self._world.fail("a lease was over when it was granted")

    def _reserved(self, asked: m.Reserve, reserved: m.Reserved) -> None:
        space = self._space(asked.handle)
        blocks = []
        for block_hash, slot in zip(
            m.split_hashes(asked.hashes), m.unpack_slots(reserved.slots), strict=True
        ):
            if slot < m.SLOT_PRESENT:
                blocks.append((block_hash, slot))
                if (asked.handle, slot // space.slots_per_segment) not in self._announced:
                    self._world.fail("RESERVED names a slot before its SEGMENT")
        if blocks:
            self._life.writers[reserved.reservation] = _GrantedSlots(self._owner, space, blocks)

    def _committed(self, committed: m.Committed, evicted_before: int) -> None:
        """Note which blocks the daemon has taken on to back up."""
        granted = self._committing.pop(committed.call, None)
        if granted is None or self.over:
            return
        space = granted.space
        for block_hash, slot in granted.blocks[: committed.blocks]:
            if space.chain.items.get(block_hash) != slot:
                # What came in the same read may have evicted it since.
                if self._life.node.host.evicted_blocks == evicted_before:
                    self._world.fail("COMMITTED counts a block that is not readable")
            elif space.backed_up[slot]:
                self._world.promised.add(BlockKey(space.digest, block_hash))

    def _end(self) -> None:
        """The daemon ends the session: calls need no answer, but the client may still write."""
        self._ended = True
        for timer in self._open.values():
            timer.cancel()
        self._open.clear()

    def _closed(self) -> None:
        self._world.note(self._owner, "closed")
        self._end()
        self.over = True
        writers = self._life.writers
        for reservation_id in [r for r, w in writers.items() if w.owner == self._owner]:
            del writers[reservation_id]
        if not self._life.dead and not self.connection.client.closed:
            self._world.fail("the daemon took a client for closed that was not")
        self._session.closed()
