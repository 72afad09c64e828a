"""A simulated engine: it speaks the protocol, maps real segments, and may die at any time.

It follows the client's rules of PROTOCOL.md (it writes only to slots that it has reserved and
only until it closes, and discards late copies), but no more: it forgets leases and reservations,
releases those of others, stops reading, and sends garbage.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from random import Random
from typing import TypeVar

from tierd.errors import RemoteProtocolError
from tierd.shared_memory.mapping import SharedMapping
from tierd.testing.simulation.connection import SimulatedConnection
from tierd.testing.simulation.plan import Habits
from tierd.testing.simulation.world import World
from tierd.types import Namespace
from tierd.wire import messages as m
from tierd.wire.session import Role, WireSession, encode

Call = m.Register | m.Acquire | m.Reserve | m.Commit | m.Status
_Reply = TypeVar("_Reply", m.Registered, m.Acquired, m.Reserved, m.Committed, m.StatusReply)

REPLY_S_MAX = 120.0
"""Virtual seconds after which an engine abandons a session; the referee fails the run before."""


class SimulatedSession:
    """One session, from the client's end."""

    def __init__(self, connection: SimulatedConnection, world: World, random: Random) -> None:
        self.end = connection.client
        self.ended = asyncio.Event()
        self.numbers: list[int] = []
        self.slot_bytes: dict[int, int] = {}
        self.leases: set[int] = set()
        self.reservations: set[int] = set()
        self.segments: dict[tuple[int, int], SharedMapping] = {}
        self.slots_per_segment: dict[int, int] = {}
        self.frames_left: int | None = None
        self._guards: list[int] = []
        self._world = world
        self._random = random
        self._calls = 0
        self._replies: dict[int, asyncio.Future[m.Message | None]] = {}
        self._wire = WireSession(Role.CLIENT, self._handle)
        connection.on_data = self._data
        connection.on_end = self._over

    def send(self, message: m.Message) -> None:
        """Send one message; die after the last one if the session has a limit."""
        if self.end.closed:
            return
        self.end.send(encode(message))
        if self.frames_left is not None:
            self.frames_left -= 1
            if self.frames_left <= 0:
                self.close(torn=True)

    def next_call(self) -> int:
        """Return a number that no other call of this session has."""
        self._calls += 1
        return self._calls

    @property
    def waiting(self) -> bool:
        """Whether calls are pending."""
        return bool(self._replies)

    def ask(self, message: Call) -> asyncio.Future[m.Message | None]:
        """Send a call; the future gets its reply, or None when the session has ended."""
        future: asyncio.Future[m.Message | None] = asyncio.get_running_loop().create_future()
        if self.end.closed or self.ended.is_set():
            future.set_result(None)
            return future
        self._replies[message.call] = future
        self.send(message)
        return future

    async def answer(
        self, future: asyncio.Future[m.Message | None], kind: type[_Reply]
    ) -> _Reply | None:
        """Wait for the future of `ask`, and return the reply if it is of this kind."""
        try:
            async with asyncio.timeout(REPLY_S_MAX):
                message = await future
        except TimeoutError:
            # The call may have been lost behind garbage; the referee checks the daemon's end.
            self.close(torn=False)
            return None
        return message if isinstance(message, kind) else None

    def close(self, *, torn: bool) -> None:
        """Stop using slots, then close."""
        self.end.close(torn=torn)
        for fd in (*self._wire.take_fds(), *self._guards):
            os.close(fd)
        self._guards.clear()
        self._over()

    def view(self, handle: int, slot: int) -> memoryview | None:
        """Return the view of a slot, or None if its segment was never announced."""
        index, place = divmod(slot, self.slots_per_segment[handle])
        mapping = self.segments.get((handle, index))
        if mapping is None:
            self._world.fail(f"slot {slot} was named before its SEGMENT came")
            return None
        size = self.slot_bytes[handle]
        return mapping.view[place * size : (place + 1) * size]

    def _data(self, chunk: bytes, fds: list[int]) -> None:
        try:
            self._wire.receive(chunk, fds)
        except RemoteProtocolError as error:
            self._world.fail(f"the daemon broke the protocol: {error}")

    def _over(self) -> None:
        """Note that the daemon has ended the session, or that this end has closed."""
        self.ended.set()
        for future in self._replies.values():
            if not future.done():
                future.set_result(None)
        self._replies.clear()

    def _handle(self, message: m.Message, fds: tuple[int, ...]) -> None:
        if isinstance(message, m.Guard):
            self._guards.append(fds[0])
            return
        if isinstance(message, m.Segment):
            size = self.slots_per_segment[message.handle] * self.slot_bytes[message.handle]
            key = message.handle, message.segment
            try:
                if key not in self.segments:
                    self.segments[key] = SharedMapping(fds[0], size)
            finally:
                os.close(fds[0])
            return
        if isinstance(message, m.Registered):
            # At once: its segments may come in the same read.
            self.numbers.append(message.handle)
            self.slot_bytes[message.handle] = message.slot_bytes
            self.slots_per_segment[message.handle] = message.slots_per_segment
        call = getattr(message, "call", 0)
        future = self._replies.pop(call, None) if call else None
        if future is not None and not future.done():
            future.set_result(message)


class SimulatedEngine:
    """Runs sessions one after the other, each with several requests at a time."""

    def __init__(
        self,
        world: World,
        name: str,
        ranks: Sequence[Namespace],
        habits: Habits,
        random: Random,
    ) -> None:
        self._world = world
        self._name = name
        self._ranks = ranks
        self._habits = habits
        self._random = random
        self._own = Random(f"own blocks of {name} in {world.seed}")

    async def run(self, sessions: int, requests: int) -> None:
        """Run a number of `sessions`, with about `requests` in each."""
        random = self._random
        for _ in range(sessions):
            await asyncio.sleep(random.expovariate(1 / 0.02))
            connection = self._world.connect(self._name, random)
            if connection is None:
                await asyncio.sleep(0.05)
                continue
            link = SimulatedSession(connection, self._world, random)
            if self._chance(self._habits.die):
                link.frames_left = random.randint(1, 3 * requests)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(link))
                if await self._greet(link):
                    for _ in range(random.randint(1, 3)):
                        group.create_task(self._work(link, requests))
                else:
                    link.close(torn=False)

    async def _watch(self, link: SimulatedSession) -> None:
        """Close some time after the daemon has ended the session; threads write until then."""
        await link.ended.wait()
        await asyncio.sleep(self._random.expovariate(1 / 0.01))
        link.close(torn=False)

    async def _work(self, link: SimulatedSession, requests: int) -> None:
        random, habits = self._random, self._habits
        while requests > 0 and not link.end.closed:
            requests -= 1
            await asyncio.sleep(random.expovariate(1 / habits.pace_s))
            if self._chance(habits.garbage):
                self._garbage(link)
            elif self._chance(habits.meddle):
                self._meddle(link)
            elif self._chance(habits.pause):
                link.end.pause(True)
                for _ in range(random.randint(0, 40)):
                    link.send(m.Status(link.next_call()))
                await asyncio.sleep(random.expovariate(1 / 0.2))
                link.end.pause(False)
            elif random.random() < 0.45:
                await self._store(link)
            else:
                await self._load(link)
        if not self._chance(0.3):
            link.close(torn=self._chance(habits.die))
        else:
            await asyncio.sleep(random.expovariate(1 / 0.2))
            link.close(torn=False)

    async def _greet(self, link: SimulatedSession) -> bool:
        """Send HELLO and one REGISTER per rank at once; return whether all are registered."""
        link.send(m.Hello(m.PROTOCOL_VERSION, self._name))
        if self._chance(0.1):
            link.ask(m.Register(link.next_call(), {"model": "and no more"}, True))
        asked = [
            link.ask(m.Register(link.next_call(), rank.to_fields(), True)) for rank in self._ranks
        ]
        answers = [await link.answer(future, m.Registered) for future in asked]
        return None not in answers

    # --- loading --------------------------------------------------------------------

    async def _load(self, link: SimulatedSession) -> None:
        """ACQUIRE a prefix, copy it, check the copies made in time, and RELEASE it or forget to."""
        random, world = self._random, self._world
        chain = random.choice(world.chains)
        hashes = chain[: random.randint(1, len(chain))]
        if self._chance(0.05):
            hashes = hashes + hashes[: random.randint(1, len(hashes))]
        places = list(range(len(self._ranks)))
        if self._chance(0.2):
            places = random.choices(places, k=random.randint(1, len(places) + 1))
        handles = [link.numbers[place] for place in places]
        call = link.next_call()
        deadline_ms = random.choice((0, 1, 5, 20, 100, 1000))
        about = (random.randrange(4), random.choice((0, 0, 5, 2000)), random.choice((0, 1, 10**6)))
        own = self._own.randint(0, len(hashes) + 1) if self._own.random() < 0.05 else 0
        asked = link.ask(m.Acquire(call, handles, b"".join(hashes), deadline_ms, *about, own))
        if self._chance(0.1):
            link.send(m.Ready(call))
        if self._chance(0.1):
            pin_ms, next_use_ms = random.choice((0, 1000, 10**9)), random.choice((0, 0, 100))
            about_it = (pin_ms, next_use_ms, random.randrange(3), self._chance(0.3))
            link.send(m.Hint(handles, b"".join(hashes), *about_it))
        if self._chance(self._habits.cancel):
            await asyncio.sleep(random.choice((0, 0.001, 0.01)))
            link.send(m.Cancel(call))
        acquired = await link.answer(asked, m.Acquired)
        if acquired is None or not acquired.blocks:
            return
        link.leases.add(acquired.lease)
        count = acquired.blocks
        slots, hashes = m.unpack_slots(acquired.slots), hashes[own:]
        if count > len(hashes) or len(slots) != count * len(handles):
            world.fail(f"ACQUIRED of {count} blocks, {len(slots)} slots for {len(hashes)} hashes")
            return
        copies: list[tuple[Namespace, bytes, bytes]] = []
        slow = self._chance(0.15)
        for at, slot in enumerate(slots):
            rank, block_hash = self._ranks[places[at // count]], hashes[at % count]
            if self._chance(0.2):
                await asyncio.sleep(random.expovariate(1 / (1.0 if slow else 0.002)))
            view = link.view(handles[at // count], slot)
            if view is None:
                return
            copies.append((rank, block_hash, bytes(view[: rank.block_bytes])))
        if world.now_ns() >= acquired.expires_ns:
            world.counts["late_copies"] += 1
        else:
            world.counts["loaded_blocks"] += len(copies)
            for rank, block_hash, copy in copies:
                if copy != world.payload(rank, block_hash):
                    world.fail(f"{self._name} loaded wrong bytes for {block_hash.hex()[:12]}")
                    return
        if not self._chance(self._habits.forget):
            link.send(m.Release(acquired.lease))
        link.leases.discard(acquired.lease)

    # --- storing --------------------------------------------------------------------

    async def _store(self, link: SimulatedSession) -> None:
        """RESERVE a part of a chain for each rank, write it slowly, and perhaps COMMIT."""
        random = self._random
        chain = random.choice(self._world.chains)
        start = 0 if self._chance(0.7) else random.randrange(len(chain))
        hashes = chain[start : start + random.randint(1, len(chain))]
        for place in range(len(self._ranks)):
            if self._chance(0.05):
                continue
            if not await self._store_rank(link, place, hashes):
                return

    async def _store_rank(
        self, link: SimulatedSession, place: int, hashes: Sequence[bytes]
    ) -> bool:
        rank = self._ranks[place]
        parents = [self._world.parents[block_hash] for block_hash in hashes]
        handle = link.numbers[place]
        asked = link.ask(m.Reserve(link.next_call(), handle, b"".join(hashes), b"".join(parents)))
        reserved = await link.answer(asked, m.Reserved)
        if reserved is None:
            return False
        link.reservations.add(reserved.reservation)
        slots = m.unpack_slots(reserved.slots)
        if len(slots) != len(hashes):
            self._world.fail(f"RESERVED {len(slots)} slots for {len(hashes)} hashes")
            return False
        granted = [(h, s) for h, s in zip(hashes, slots, strict=True) if s < m.SLOT_PRESENT]
        written = 0
        broken_off = self._chance(self._habits.break_off)
        for block_hash, slot in granted:
            if broken_off and self._chance(0.3):
                break
            view = link.view(handle, slot)
            if view is None or not await self._write(link, rank, block_hash, view):
                return False
            written += 1
        if link.end.closed:
            return False
        if broken_off and self._chance(0.3):
            if self._chance(0.5):
                link.send(m.Abort(reserved.reservation))
            return True
        expected = written
        for _ in range(2 if self._chance(0.05) else 1):
            asked = link.ask(m.Commit(link.next_call(), reserved.reservation, written))
            committed = await link.answer(asked, m.Committed)
            if committed is None:
                return False
            if committed.blocks != expected:
                self._world.fail(f"COMMITTED {committed.blocks} blocks instead of {expected}")
            expected = 0
        return True

    async def _write(
        self, link: SimulatedSession, rank: Namespace, block_hash: bytes, view: memoryview
    ) -> bool:
        """Fill a slot in steps, with noise first; return False if this end closed meanwhile."""
        random, payload = self._random, self._world.payload(rank, block_hash)
        half = len(payload) // 2
        for step in range(3):
            if step == 0 or self._chance(0.3):
                await asyncio.sleep(random.expovariate(1 / 0.003))
            if link.end.closed:
                return False
            if step == 0:
                view[:] = random.randbytes(16) * (len(view) // 16)
            elif step == 1:
                view[:half] = payload[:half]
            else:
                view[half : len(payload)] = payload[half:]
        return True

    # --- misbehaviour ---------------------------------------------------------------

    def _meddle(self, link: SimulatedSession) -> None:
        """Send a message with the id of another client's lease or reservation, or an unknown id."""
        random = self._random
        number = random.choice([*self._world.granted(), random.randint(1, 300)])
        if link.waiting or number in link.leases or number in link.reservations:
            return  # This client's own leases or reservations would be affected.
        link.send(
            random.choice(
                (
                    m.Release(number),
                    m.Abort(number),
                    m.Cancel(number),
                    m.Commit(link.next_call(), number, random.randint(0, 9)),
                )
            )
        )

    def _garbage(self, link: SimulatedSession) -> None:
        """End the session by breaking the protocol."""
        random = self._random
        call = link.next_call()
        sound = encode(m.Status(call))
        link.end.send(
            random.choice(
                (
                    random.randbytes(random.randint(8, 64)),
                    b"TK\x00\x00\x03\x00\x00\x00\x93\x09\xc0",
                    sound[:-1] + b"\xc1",
                    encode(m.Hello(m.PROTOCOL_VERSION, "again")),
                    encode(m.Acquire(call, [], b"", 5, 0, 0, 0)),
                    encode(m.Acquire(call, [200], bytes(32), 5, 0, 0, 0)),
                    encode(m.Reserve(call, 0, bytes(64), bytes(32))),
                    encode(m.Reserve(call, 0, bytes(31), bytes(31))),
                    encode(m.Welcome(m.PROTOCOL_VERSION, b"", "", 1)),
                )
            )
        )

    def _chance(self, chance: float) -> bool:
        return self._random.random() < chance
