"""A simulated storage tier that checks the daemon's calls.

It knows the valid bytes of every block, and which calls the daemon must not make in an outage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tierd.backend import GetRequest, GetResult, Outcome, PutRequest, checksum
from tierd.errors import BackendError
from tierd.storage.breaker import PROBE_NAMESPACE
from tierd.testing.backend import MemoryBackend
from tierd.testing.faulty import NO_FAULTS
from tierd.testing.simulation.plan import TierPlan
from tierd.testing.simulation.world import World
from tierd.types import DIGEST_BYTES, BlockKey


class WatchedBackend(MemoryBackend):
    """A tier that checks that every block to store has the right bytes during the whole call.

    During an outage, calls hang or fail. Once a call has hung for the tier's deadline, the daemon
    must make no further calls of its kind, except the breaker's probes.
    """

    def __init__(self, world: World, number: int, plan: TierPlan, *, faulty: bool) -> None:
        super().__init__(
            plan.disk_bytes,
            plan=plan.faults if faulty else NO_FAULTS,
            seed=world.random.getrandbits(32),
            blocks=world.disks[number],
            marks=world.marks[number],
        )
        self.world = world
        self.kept, self.promoted = world.told.get(number) or (set(), set())
        """Blocks that the tier has reported as stored or read: the daemon may assume no others."""
        if world.keeper is not None:
            # Adopted host memory keeps its tier bits, so this record must last as well.
            world.told[number] = self.kept, self.promoted
        self._number = number
        self._plan = plan
        self._known_down: set[str] = set()
        self._scopes: dict[bytes, bytes] = {}
        """The scope by which the daemon last used each namespace."""

    async def open(self) -> None:
        if self._number in self.world.down:
            raise BackendError("simulated: the server is away")
        await super().open()

    async def contains_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        await self._reach("probe" if namespace == PROBE_NAMESPACE else "read")
        return await super().contains_many(namespace, hashes)

    async def use_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        await self._reach("read")
        return await super().use_many(namespace, hashes)

    async def put_many(self, namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
        await self._reach("write")
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
        for request, outcome in zip(requests, outcomes, strict=True):
            if outcome in (Outcome.STORED, Outcome.PRESENT):
                self.kept.add(self._used(namespace, request.block_hash))
        return outcomes

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        await self._reach("read")
        results = await super().get_into(namespace, requests)
        for request, result in zip(requests, results, strict=True):
            if result.outcome is Outcome.HIT:
                self.promoted.add(self._used(namespace, request.block_hash))
                self.world.counts["promoted_blocks"] += 1
        return results

    async def delete_many(self, namespace: bytes, hashes: Sequence[bytes]) -> int:
        if self._number in self.world.down:
            raise BackendError("simulated: the server is away")
        dropped = await super().delete_many(namespace, hashes)
        digest = namespace[:DIGEST_BYTES]
        if self._scopes.get(digest) == namespace:
            gone = {BlockKey(digest, block_hash) for block_hash in hashes}
            self.kept -= gone
            # Other tiers were left out for blocks read from this tier, and still are if another
            # node's flush has dropped the blocks here.
            if not self._plan.shared:
                self.promoted -= gone
        return dropped

    def _used(self, scope: bytes, block_hash: bytes) -> BlockKey:
        digest = scope[:DIGEST_BYTES]
        self._scopes[digest] = scope
        return BlockKey(digest, block_hash)

    async def _reach(self, what: str) -> None:
        """Simulate the way to the server: hang or fail during an outage."""
        world, loop = self.world, asyncio.get_running_loop()
        if self._number not in world.down:
            # After a successful probe, one call of each kind may find out again at any time.
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
