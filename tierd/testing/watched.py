"""A simulated storage tier that watches the daemon from below.

It knows what every block must be, and which calls an outage should have spared it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from tierd.backend import (
    HEADER_BYTES,
    BlockHeader,
    GetRequest,
    GetResult,
    Outcome,
    PutRequest,
    checksum,
    pack_header,
    unpack_header,
)
from tierd.errors import BackendError
from tierd.storage.breaker import PROBE_NAMESPACE
from tierd.testing.backend import MemoryBackend, StoredBlock
from tierd.testing.faulty import NO_FAULTS
from tierd.testing.world import TierPlan, World
from tierd.types import BlockKey

LATE_DEADLINES: Final = 2.0
"""Mean time after which a late call takes effect, in deadlines: most have been given up by then."""


class WatchedBackend(MemoryBackend):
    """A tier that checks what it is handed: every block must be the right one, and keep still.

    While its outage lasts, calls hang or fail. Once one has hung for the tier's deadline, all
    of its kind must be spared: only the breaker's probe may ask.
    """

    def __init__(
        self, world: World, number: int, plan: TierPlan, *, faulty: bool, apart: bool = False
    ) -> None:
        # Of its own: what else happens in a world of this seed must not change.
        self._late = Random(f"late calls of tier {number} of {world.seed} at {world.now_ns()}")
        self.late_chance = plan.late if faulty else 0.0
        if plan.hides and not apart:
            self._hide(world, number, plan.hides if faulty else 0.0)
        super().__init__(
            plan.disk_bytes,
            plan=plan.faults if faulty else NO_FAULTS,
            seed=world.random.getrandbits(32),
            blocks=world.disks[number],
        )
        self.world = world
        told = None if apart else world.told.get(number)
        self.kept, self.promoted = told or (set(), set())
        """What the daemon has been told that the tier has: only that may it believe."""
        if world.keeper is not None and not apart:
            # What is kept of host memory says so in the next life, too.
            world.told[number] = self.kept, self.promoted
        self._number = number
        self._plan = plan
        self._known_down: set[str] = set()

    def _hide(self, world: World, number: int, chance: float) -> None:
        """What could not be read in the life before is back, and something else may be away."""
        disk, hidden = world.disks[number], world.hidden[number]
        world.counts["hidden_flushed"] += sum(key in world.barred for key in hidden)
        for key in list(hidden):
            disk.setdefault(key, hidden.pop(key))
        if self._late.random() < chance:
            part = self._late.randrange(1, 256)
            for key in [key for key in disk if key.block_hash[0] < part]:
                hidden[key] = disk.pop(key)
            world.counts["hidden_blocks"] += len(hidden)

    async def _land(self, effect: Callable[[WatchedBackend], None]) -> None:
        """Have a call take effect at some time. Who gives it up before hears nothing of that."""
        world, loop = self.world, asyncio.get_running_loop()
        landed, given_up = asyncio.Event(), False

        def land() -> None:
            world.landing -= 1
            world.unheard -= given_up
            life = world.life
            effect(life.backends[self._number] if life is not None else self)
            landed.set()

        world.landing += 1
        world.counts["late_calls"] += 1
        mean_s = LATE_DEADLINES * self._plan.config.deadline_ms / 1000
        loop.call_later(self._late.expovariate(1 / mean_s), land)
        try:
            await landed.wait()
        except asyncio.CancelledError:
            given_up = not landed.is_set()
            world.unheard += given_up
            raise

    def _store_late(self, puts: Sequence[tuple[BlockHeader, bytes]]) -> None:
        for header, payload in puts:
            self.world.counts["late_flushed"] += header.key in self.world.barred
            size = HEADER_BYTES + len(payload)
            if header.key not in self.blocks and (not self._opened or self._find_room(size)):
                self.blocks[header.key] = StoredBlock(pack_header(header), payload)
                if self._opened:
                    self._admit(header.key, header.parent, size)

    def _drop_late(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            if not self._drop(key):
                self.blocks.pop(key, None)

    async def open(self) -> None:
        if self._number in self.world.down:
            raise BackendError("simulated: the server is away")
        await super().open()

    async def contains_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        await self._reach("probe" if namespace == PROBE_NAMESPACE else "read")
        return await super().contains_many(namespace, hashes)

    async def put_many(self, namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
        await self._reach("write")
        late = self._late.random() < self.late_chance
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
            if when == "before" and late:
                outcomes = await self._put_late(namespace, requests)
            elif when == "before":
                outcomes = await super().put_many(namespace, requests)
        self.world.counts["backed_up_blocks"] += outcomes.count(Outcome.STORED)
        for request, outcome in zip(requests, outcomes, strict=True):
            if outcome in (Outcome.STORED, Outcome.PRESENT):
                self.kept.add(BlockKey(namespace, request.block_hash))
        return outcomes

    async def _put_late(self, namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
        """The server has all of it, and says nothing until it is through."""
        puts = [
            (
                BlockHeader(BlockKey(namespace, r.block_hash), r.parent, r.length, r.checksum),
                bytes(r.view[: r.length]),
            )
            for r in requests
        ]
        await self._land(lambda server: server._store_late(puts))
        return [Outcome.STORED] * len(requests)

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        await self._reach("read")
        results = await super().get_into(namespace, requests)
        for request, result in zip(requests, results, strict=True):
            if result.outcome is Outcome.HIT:
                self.promoted.add(BlockKey(namespace, request.block_hash))
                self.world.counts["promoted_blocks"] += 1
        return results

    async def delete_many(self, namespace: bytes, hashes: Sequence[bytes]) -> int:
        if self._number in self.world.down:
            raise BackendError("simulated: the server is away")
        if self._late.random() < self.late_chance:
            keys = [BlockKey(namespace, block_hash) for block_hash in hashes]
            await self._land(lambda server: server._drop_late(keys))
        self._see_others()
        dropped = await super().delete_many(namespace, hashes)
        gone = {BlockKey(namespace, block_hash) for block_hash in hashes}
        self.kept -= gone
        self.promoted -= gone
        return dropped

    @property
    def shared(self) -> bool:
        return self._plan.shared

    def _see_others(self) -> None:
        """What other nodes have stored in the shared tier or dropped from it."""
        if not self._plan.shared or not self._opened:
            return
        mine = {self._held[item].key for item in self._index.items.values()}
        for key in sorted(self.blocks.keys() - mine):
            stored = self.blocks[key]
            header = unpack_header(stored.header)
            if header is not None:
                self._admit(key, header.parent, HEADER_BYTES + len(stored.payload))
        for key in sorted(mine - self.blocks.keys()):
            self._drop(key)

    async def _reach(self, what: str) -> None:
        """Reach the server, which may be away."""
        self._see_others()
        world, loop = self.world, asyncio.get_running_loop()
        if self._number not in world.down:
            # A probe that is answered lets one of each kind find out anew, whenever that comes.
            self._known_down -= {"read", "write"} if what == "probe" else {what}
            return
        world.counts[f"outage_{what}s"] += 1
        if not self._plan.hangs:
            raise BackendError("simulated: the server is away")
        if what in self._known_down and what != "probe":
            world.fail(f"a {what} of a tier that is known to be away")
        began_s = loop.time()
        try:
            await loop.create_future()
        finally:
            if loop.time() - began_s >= self._plan.config.deadline_ms / 1000:
                self._known_down.add(what)
