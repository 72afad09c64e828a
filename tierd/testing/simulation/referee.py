"""A referee reads both directions of a connection and records what the daemon has promised."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final, Protocol

from tierd.core.l2.space import Space
from tierd.daemon.node import Node
from tierd.daemon.session.session import Session
from tierd.errors import RemoteProtocolError
from tierd.testing.simulation.connection import SimulatedConnection
from tierd.testing.simulation.world import World
from tierd.types import BlockKey, Namespace
from tierd.wire import messages as m
from tierd.wire.frames import HEAD_BYTES, FrameDecoder

REPLY_SLACK_S: Final = 0.001
"""Virtual time allowed past a call's deadline: generous, since loop iterations take none."""


@dataclass(slots=True)
class GrantedLease:
    """Slots that a client may read, as granted by ACQUIRED."""

    owner: int
    slots: list[tuple[Space, int, bytes]]
    expires_ns: int


@dataclass(slots=True)
class GrantedSlots:
    """Slots that a client may fill, each with its block's hash."""

    owner: int
    space: Space
    blocks: list[tuple[bytes, int]]


class Refereed(Protocol):
    """The daemon of the connection, as its referee sees it."""

    leases: dict[int, GrantedLease]
    """The leases of all clients, over all connections."""
    writers: dict[int, GrantedSlots]

    @property
    def world(self) -> World: ...

    @property
    def node(self) -> Node: ...

    @property
    def dead(self) -> bool: ...

    @property
    def best_effort(self) -> bool: ...

    def served(self, key: BlockKey) -> None:
        """A block has been leased to a client."""

    def delivered(self) -> None:
        """The daemon has received data of a client."""


class Referee:
    """Reads both directions of one connection at the daemon's end, and checks every message."""

    def __init__(
        self, incarnation: Refereed, session: Session, connection: SimulatedConnection
    ) -> None:
        self.connection = connection
        self.over = False
        self._incarnation = incarnation
        self._world = incarnation.world
        self._session = session
        self._owner = session.owner
        self._decoder = FrameDecoder()
        self._ended = False
        self._open: dict[tuple[type[m.Message], int], asyncio.TimerHandle] = {}
        self._asked: dict[int, m.Message] = {}
        self._committing: dict[int, GrantedSlots | None] = {}
        self._unchecked: list[tuple[m.Committed, int]] = []
        self._spaces: dict[int, bytes] = {}
        self._announced: set[tuple[int, int]] = set()
        self._unmapped: set[int] = set()
        """Handles registered without segments: the client wants slot numbers only."""
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
        # The daemon sends COMMITTED first, and publishes the blocks before it does anything else.
        unchecked, self._unchecked = self._unchecked, []
        for committed, evicted in unchecked:
            self._committed(committed, evicted)
        self._incarnation.delivered()

    def _frame_heard(self, payload: bytes | bytearray | memoryview, fds: tuple[int, ...]) -> None:
        message = m.decode(payload, m.FROM_CLIENT)
        self._world.counts[type(message).__name__] += 1
        incarnation, owner = self._incarnation, self._owner
        match message:
            case m.Acquire():
                self._due(m.Acquired, message.call, message, message.deadline_ms / 1000)
            case m.Cancel():
                if (m.Acquired, message.call) in self._open:
                    self._due(m.Acquired, message.call, self._asked[message.call], 0)
            case m.Ready():
                if incarnation.best_effort and (m.Acquired, message.call) in self._open:
                    self._due(m.Acquired, message.call, self._asked[message.call], 0)
            case m.Register():
                self._due(m.Registered, message.call, message, 0)
            case m.Reserve():
                self._due(m.Reserved, message.call, message, 0)
            case m.Commit():
                self._due(m.Committed, message.call, message, 0)
                granted = self._committing[message.call] = self._let_go(message.reservation)
                if granted is not None:
                    for block_hash, _ in granted.blocks:
                        self._world.committing(BlockKey(granted.space.digest, block_hash))
            case m.Abort():
                self._let_go(message.reservation)
            case m.Status():
                self._due(m.StatusReply, message.call, message, 0)
            case m.Release():
                lease = incarnation.leases.get(message.lease)
                if lease is not None and lease.owner == owner:
                    del incarnation.leases[message.lease]
            case _:
                pass

    def _let_go(self, reservation_id: int) -> GrantedSlots | None:
        granted = self._incarnation.writers.get(reservation_id)
        if granted is None or granted.owner != self._owner:
            return None
        return self._incarnation.writers.pop(reservation_id)

    def _due(self, kind: type[m.Message], call: int, message: m.Message, within_s: float) -> None:
        key = kind, call
        if key in self._open:
            self._open.pop(key).cancel()
        self._asked[call] = message
        self._open[key] = self._world.loop.call_later(within_s + REPLY_SLACK_S, self._overdue, key)

    def _overdue(self, key: tuple[type[m.Message], int]) -> None:
        if not self._incarnation.dead and self._open.pop(key, None) is not None:
            self._world.fail(f"no {key[0].__name__} for call {key[1]} by its deadline")

    def _said(self, data: bytes) -> None:
        self._world.note(self._owner, "said", data)
        if self._incarnation.dead:
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
                if not asked.want_segments:
                    self._unmapped.add(message.handle)
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
                self._unchecked.append((message, self._incarnation.node.host.evicted_blocks))
            case m.StatusReply():
                self._answered(m.StatusReply, message.call)
            case _:
                pass

    def _answered(self, kind: type[m.Message], call: int) -> m.Message | None:
        timer = self._open.pop((kind, call), None)
        if timer is None:
            self._world.fail(f"{kind.__name__} for call {call}, which the client does not wait for")
            return None
        timer.cancel()
        return self._asked.pop(call)

    def _space(self, handle: int) -> Space:
        return self._incarnation.node.host.spaces[self._spaces[handle]]

    def _leased(self, asked: m.Acquire, acquired: m.Acquired) -> None:
        hashes = m.split_hashes(asked.hashes)[asked.own :]
        raw = m.unpack_slots(acquired.slots)
        slots = []
        for at, slot in enumerate(raw):
            handle, block_hash = asked.handles[at // acquired.blocks], hashes[at % acquired.blocks]
            space = self._space(handle)
            segment = handle, slot // space.slots_per_segment
            if segment not in self._announced and handle not in self._unmapped:
                self._world.fail("ACQUIRED names a slot before its SEGMENT")
            if space.items.get(block_hash) != slot:
                self._world.fail("ACQUIRED names a slot that does not hold its block")
            self._incarnation.served(BlockKey(space.digest, block_hash))
            slots.append((space, slot, block_hash))
        self._incarnation.leases[acquired.lease] = GrantedLease(
            self._owner, slots, acquired.expires_ns
        )
        if acquired.expires_ns <= self._world.now_ns():
            self._world.fail("a lease had expired when it was granted")

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
            self._incarnation.writers[reserved.reservation] = GrantedSlots(
                self._owner, space, blocks
            )

    def _committed(self, committed: m.Committed, evicted_before: int) -> None:
        """Record the blocks that the daemon has acknowledged, and the tiers meant to get them."""
        granted = self._committing.pop(committed.call, None)
        if granted is None:
            return
        space = granted.space
        for block_hash, slot in granted.blocks[: committed.blocks]:
            if space.items.get(block_hash) != slot:
                # A later message in the same read may have evicted it.
                if self._incarnation.node.host.evicted_blocks == evicted_before:
                    self._world.fail("COMMITTED counts a block that is not readable")
            else:
                key, promised = BlockKey(space.digest, block_hash), self._world.promised
                promised[key] = promised.get(key, 0) | space.tiers.of(slot)
                payload = self._incarnation.node.memory.payload(space, slot)
                if payload != self._world.payload_of(key, len(payload)):
                    self._world.fail(f"wrong bytes were stored as {block_hash.hex()[:12]}")

    def _end(self) -> None:
        """Note that the daemon ends the session: calls need no answer; the client may write on."""
        self._ended = True
        for timer in self._open.values():
            timer.cancel()
        self._open.clear()

    def forget(self) -> None:
        """Close the session of a process that is gone."""
        if not self.over:
            self.over = True
            self._session.closed()

    def _closed(self) -> None:
        self._world.note(self._owner, "closed")
        self._end()
        self.over = True
        writers = self._incarnation.writers
        for reservation_id in [r for r, w in writers.items() if w.owner == self._owner]:
            del writers[reservation_id]
        if not self._incarnation.dead and not self.connection.client.closed:
            self._world.fail("the daemon closed the session of a client that is still connected")
        self._session.closed()
