"""A simulated tier whose calls take effect late, and whose blocks are unreadable at times.

A server finishes its calls even if no client waits for them any longer: a call may take effect
long after it was cancelled, in a later incarnation, or after a flush. Blocks that cannot be read
at one start are back at the next. Another node may share the tier.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from tierd.backend import (
    HEADER_BYTES,
    BlockHeader,
    Outcome,
    PutRequest,
    checksum,
    pack_header,
    unpack_header,
)
from tierd.testing.backend import StoredBlock
from tierd.testing.simulation.plan import TierPlan
from tierd.testing.simulation.watched import WatchedBackend
from tierd.testing.simulation.world import World
from tierd.types import BlockKey

LATE_DEADLINES: Final = 2.0
"""Mean time until a late call takes effect, in deadlines: most are cancelled before."""


class LateBackend(WatchedBackend):
    """A tier of the node that is restarted or, if `apart`, of the second node."""

    def __init__(
        self, world: World, number: int, plan: TierPlan, *, faulty: bool, apart: bool
    ) -> None:
        # A random stream for late calls alone, so that the seed's other events do not change.
        self._late = Random(f"late calls of tier {number} of {world.seed} at {world.now_ns()}")
        self.late_chance = plan.late if faulty else 0.0
        if plan.hides and not apart:
            self._hide(world, number, plan.hides if faulty else 0.0)
        told = world.told.get(number)
        super().__init__(world, number, plan, faulty=faulty)
        if apart:
            # The second node does not know which blocks the tier has reported to the first.
            self.kept, self.promoted = set(), set()
            world.told.pop(number, None)
            if told is not None:
                world.told[number] = told

    @property
    def shared(self) -> bool:
        return self._plan.shared

    async def put_many(self, namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
        if self._late.random() >= self.late_chance:
            return await super().put_many(namespace, requests)
        await self._reach("write")
        puts = []
        for request in requests:
            key = BlockKey(namespace, request.block_hash)
            payload = bytes(request.view[: request.length])
            if payload != self.world.payload_of(key, request.length):
                self.world.fail(f"wrong bytes in a late backup of {key.block_hash.hex()[:12]}")
            if request.checksum != checksum(payload):
                self.world.fail("a late backup came with a wrong checksum")
            header = BlockHeader(key, request.parent, request.length, request.checksum)
            puts.append((header, payload))
        await self._land(lambda server: server._store(puts))
        self.kept |= {self._used(namespace, request.block_hash) for request in requests}
        return [Outcome.STORED] * len(requests)

    async def delete_many(self, namespace: bytes, hashes: Sequence[bytes]) -> int:
        self._see_others()
        if self._late.random() < self.late_chance:
            keys = [BlockKey(namespace, block_hash) for block_hash in hashes]
            await self._land(lambda server: server.forget(keys))
        return await super().delete_many(namespace, hashes)

    async def add_mark(self, mark: str) -> None:
        if self._late.random() < self.late_chance:
            self.world.counts["late_marks"] += 1
            await self._land(lambda server: server.kept_marks.add(mark))
        await super().add_mark(mark)

    async def drop_marks(self, marks: Sequence[str]) -> None:
        if self._late.random() < self.late_chance:
            await self._land(lambda server: server.kept_marks.difference_update(marks))
        await super().drop_marks(marks)

    async def _reach(self, what: str) -> None:
        self._see_others()
        await super()._reach(what)

    async def _land(self, effect: Callable[[LateBackend], None]) -> None:
        """Apply a call's effect at a random time, even if the call is cancelled before."""
        world, loop = self.world, asyncio.get_running_loop()
        landed, given_up = asyncio.Event(), False

        def land() -> None:
            world.landing -= 1
            world.unheard -= given_up
            incarnation = world.incarnation
            now = incarnation.backends[self._number] if incarnation is not None else self
            assert isinstance(now, LateBackend)
            effect(now)
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

    def _store(self, puts: Sequence[tuple[BlockHeader, bytes]]) -> None:
        """Store the blocks of an upload that takes effect now."""
        for header, payload in puts:
            self.world.late_flushed += self.world.is_barred(header.key)
            size = HEADER_BYTES + len(payload)
            if header.key not in self.blocks and (not self._opened or self._find_room(size)):
                self.blocks[header.key] = StoredBlock(pack_header(header), payload)
                if self._opened:
                    self._admit(header.key, header.parent, size)

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Drop blocks that the server loses, or that a late deletion removes now."""
        for key in keys:
            if not self._drop(key):
                self.blocks.pop(key, None)

    def _hide(self, world: World, number: int, chance: float) -> None:
        """Bring back the blocks hidden in the last incarnation, and perhaps hide others."""
        disk, hidden = world.disks[number], world.hidden[number]
        world.hidden_flushed += sum(map(world.is_barred, hidden))
        for key in list(hidden):
            disk.setdefault(key, hidden.pop(key))
        if self._late.random() < chance:
            part = self._late.randrange(1, 256)
            for key in [key for key in disk if key.block_hash[0] < part]:
                hidden[key] = disk.pop(key)
            world.counts["hidden_blocks"] += len(hidden)

    def _see_others(self) -> None:
        """Update the index with the blocks that other nodes stored in or dropped from the tier."""
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
