"""A node on virtual time with scripted tiers, for tests of several tiers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from tests.support import blocks
from tierd.backend import GetRequest, GetResult, Outcome, PutRequest
from tierd.client import by_source
from tierd.config import PrefetchConfig, StorageConfig, WritePolicy
from tierd.core.effects import Effect
from tierd.core.l2.leases import SlotLease
from tierd.core.l2.space import Space
from tierd.core.l3.epochs import Mark, pack_mark, scope_of
from tierd.core.reasons import Evicted
from tierd.daemon.l3.tier import StorageTier, opened
from tierd.daemon.lifecycle.service import ServiceManager
from tierd.daemon.node import Node
from tierd.daemon.options import NodeOptions
from tierd.storage.breaker import PROBE_NAMESPACE
from tierd.testing.backend import MemoryBackend, StoredBlock
from tierd.testing.loop import SimulationLoop, VirtualClock, run_simulation
from tierd.types import BlockKey, Namespace

PAGE = 4096
SPACE = blocks.namespace(PAGE)
EPOCH = 1
"""The epoch of each namespace in a tier, until a flush."""

SCOPE = scope_of(SPACE.digest, EPOCH)
DEADLINE_S = 2.0
PROBE_S = 1.0


class Tier(MemoryBackend):
    """A tier that can be made to hang or be slow, and logs its calls."""

    def __init__(self) -> None:
        super().__init__(marks={pack_mark(Mark("", EPOCH))})
        self.hangs: set[str] = set()
        self.takes_s = 0.0
        self.lingers_s = 0.0
        self.log: list[tuple[str, int]] = []
        self.at_once = 0
        self.open_errors: list[Exception] = []
        self.open_takes_s = 0.0
        self._running = 0

    def calls(self, what: str) -> int:
        """Calls so far, without the breaker's probes."""
        return sum(1 for name, _ in self.log if name == what)

    async def open(self) -> None:
        await asyncio.sleep(self.open_takes_s)
        if self.open_errors:
            raise self.open_errors.pop(0)
        await super().open()

    async def contains_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        await self._step("probe" if namespace == PROBE_NAMESPACE else "contains", len(hashes))
        return await super().contains_many(namespace, hashes)

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        await self._step("get", len(requests))
        return await super().get_into(namespace, requests)

    async def put_many(self, namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
        await self._step("put", len(requests))
        return await super().put_many(namespace, requests)

    async def _step(self, what: str, count: int) -> None:
        self.log.append((what, count))
        self._running += 1
        self.at_once = max(self.at_once, self._running)
        try:
            await asyncio.sleep(self.takes_s)
            if what in self.hangs or (self.hangs and what == "probe"):
                await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            await asyncio.sleep(self.lingers_s)
            raise
        finally:
            self._running -= 1


@dataclass
class Bench:
    """A node on virtual time with its tiers, and the actions of a session."""

    loop: SimulationLoop
    node: Node
    tiers: list[StorageTier]
    raw: list[Tier]
    space: Space
    leases: list[SlotLease] = field(default_factory=list)

    def store(self, count: int, tag: object = 0, space: Space | None = None) -> list[bytes]:
        """Store a chain; returns its hashes."""
        own = space or self.space
        hashes, parents = blocks.chain(count, tag)
        reservation = self.node.reserve(1, own, hashes, parents)
        for block_hash, slot in zip(hashes, reservation.slots, strict=True):
            if slot >= 0:
                view = self.node.memory.payload(own, slot)
                view[:] = blocks.payload(own.namespace, block_hash)
        self.node.commit(1, reservation.reservation_id, count)
        return hashes

    async def backed_up(self) -> None:
        """Wait until no block is waiting for a tier."""
        await self.learned()
        async with asyncio.timeout(60):
            while self.node.backlog():
                await asyncio.sleep(0.01)

    async def learned(self) -> None:
        """Wait until every noted use is counted."""
        async with asyncio.timeout(60):
            while self.node.learning.busy:
                await asyncio.sleep(0.001)

    def forget(self) -> None:
        """Evict all of L2."""
        for space in self.node.host.spaces.values():
            effects: list[Effect] = []
            host, count = self.node.host, len(space.items)
            host._evictions.evict(space, count, Evicted.ROOM, host.now_s, effects)
            self.node.memory._apply(effects)

    def deadline_ns(self, hashes: Sequence[bytes], *, waited_ms: int, client_ms: int) -> int:
        """The latest time at which a session has an ACQUIRE of these hashes answered."""
        missing = len(hashes) - len(self.node.host.prefix(self.space, hashes))
        return self.node.acquire_deadline_ns(
            self.space, missing, waited_ms=waited_ms, client_ms=client_ms
        )

    def store_at_once(self, count: int, tag: object) -> list[bytes]:
        """Store a chain as a session does, which makes room for the next one; asserts that every
        block gets a slot. Returns its hashes."""
        hashes, parents = blocks.chain(count, tag)
        reservation = self.node.reserve(1, self.space, hashes, parents)
        assert min(reservation.slots) >= 0, "an engine's store was refused"
        self.node.commit(1, reservation.reservation_id, count)
        self.node.memory.make_room_ahead(self.space, count)
        return hashes

    async def acquire(
        self, hashes: Sequence[bytes], deadline_s: float = 10.0, spaces: list[Space] | None = None
    ) -> int:
        """Length of the leased prefix, whose bytes must be right; releases the lease."""
        clock_ns = self.loop.now_ns
        owners = spaces or [self.space]
        lease = await self.node.acquire(1, owners, hashes, clock_ns + int(deadline_s * 1e9))
        assert self.loop.now_ns <= clock_ns + int(deadline_s * 1e9) + 1000
        self.node.check()
        self.load(hashes, lease, owners)
        if lease is None:
            return 0
        for space, slots in lease.parts:
            for block_hash, slot in zip(hashes, slots, strict=False):
                right = blocks.payload(space.namespace, block_hash)
                assert self.node.memory.payload(space, slot) == right
        self.node.host.release(lease.lease_id, 1)
        return len(lease.parts[0][1])

    def load(
        self, hashes: Sequence[bytes], lease: SlotLease | None, spaces: list[Space] | None = None
    ) -> None:
        """Report the use of an engine that computes after loading all of a lease."""
        count = 0 if lease is None else len(lease.parts[0][1])
        sources = by_source(lease.sources or bytes(count)) if lease is not None else []
        self.node.loaded(spaces or [self.space], len(hashes), sources, 0)

    def check_nothing_is_left(self) -> None:
        """Assert that no holds, reservations, tasks or promotions are left."""
        self.node.check()
        assert not any(sum(space.refs) for space in self.node.host.spaces.values())
        assert not self.node.host.reservations
        assert not self.node.promotions.under_way
        assert not len(self.node.tasks)


def config(name: str, **changes: object) -> StorageConfig:
    keys: dict[str, object] = {
        "deadline_ms": int(DEADLINE_S * 1000),
        "slow_ms": int(DEADLINE_S * 1000),
        "probe_ms": int(PROBE_S * 1000),
        "write_policy": WritePolicy.WRITE_THROUGH,
    }
    return StorageConfig(type="memory", name=name, **{**keys, **changes})  # type: ignore[arg-type]


def run(
    test: Callable[[Bench], Awaitable[None]],
    *configs: StorageConfig,
    blocks_in_l2: int = 256,
    raw: Sequence[Tier] = (),
    manager: ServiceManager | None = None,
) -> None:
    """Run a test on a node with these tiers; with two if none is given."""

    async def scenario(loop: SimulationLoop) -> None:
        backends = list(raw) or [Tier() for _ in configs or (0, 1)]
        named = configs or tuple(config(f"tier{i}") for i in range(len(backends)))
        tiers = [StorageTier(c, backend) for c, backend in zip(named, backends, strict=True)]
        node = Node(
            NodeOptions(
                capacity_bytes=blocks_in_l2 * PAGE,
                lease_ttl_ms=1000,
                prefetch=PrefetchConfig(min_tokens=0),
                epoch=os.urandom(8),
                segment_bytes=blocks_in_l2 // 8 * PAGE,
            ),
            tiers=tiers,
            clock=VirtualClock(loop),
            manager=manager,
        )
        node.incarnations.begin()

        async def ready() -> None:
            await test(Bench(loop, node, tiers, backends, node.register(SPACE)))

        try:
            async with opened(tiers):
                await node.run(ready)
        finally:
            node.incarnations.close()
            node.memory.arena.close()

    run_simulation(0, scenario)


def key(block_hash: bytes, namespace: Namespace = SPACE) -> BlockKey:
    return BlockKey(scope_of(namespace.digest, EPOCH), block_hash)


def damage(tier: Tier, block_hash: bytes) -> None:
    """Flip a bit of the stored value."""
    header, payload = tier.blocks[key(block_hash)]
    tier.blocks[key(block_hash)] = StoredBlock(header, bytes((payload[0] ^ 1,)) + payload[1:])
