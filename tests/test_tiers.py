"""Several storage tiers in order: who is asked, who is spared, and what each gets.

Most tests run the Node on virtual time, so what they say about waiting is exact.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import blocks
from tests.daemon_process import DaemonProcess
from tierd.backend import GetRequest, GetResult, Outcome, PutRequest
from tierd.config import TIERS_MAX, Size, StorageConfig
from tierd.core.host import Effect, Lease, Space
from tierd.daemon.backup import PENDING_SHARE_MAX
from tierd.daemon.node import Node
from tierd.daemon.tier import LOG_EVERY_S, OPEN_S_MAX, StorageTier, opened
from tierd.errors import BackendError, ConfigError
from tierd.storage.breaker import PROBE_NAMESPACE
from tierd.testing.backend import MemoryBackend, StoredBlock
from tierd.testing.loop import SimulationLoop, VirtualClock, run_simulation
from tierd.types import BlockKey, Namespace
from tierd.wire import messages as m
from tierd.wire.frames import FRAME_BYTES_MAX
from tierd.wire.session import encode

PAGE = 4096
SPACE = blocks.namespace(PAGE)
DEADLINE_S = 2.0
PROBE_S = 1.0


class Tier(MemoryBackend):
    """A tier that hangs, or is slow, when it is told to, and keeps a log of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs: set[str] = set()
        self.takes_s = 0.0
        self.lingers_s = 0.0
        self.log: list[tuple[str, int]] = []
        self.at_once = 0
        self.open_errors: list[Exception] = []
        self.open_takes_s = 0.0
        self._running = 0

    def calls(self, what: str) -> int:
        """Calls so far, the breaker's probes left out."""
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
    """A node on virtual time with its tiers, and what a session would do."""

    loop: SimulationLoop
    node: Node
    tiers: list[StorageTier]
    raw: list[Tier]
    space: Space
    leases: list[Lease] = field(default_factory=list)

    def store(self, count: int, tag: object = 0, space: Space | None = None) -> list[bytes]:
        """Store a chain; its hashes."""
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
        """Wait until nothing waits for a tier."""
        async with asyncio.timeout(60):
            while self.node.backlog():
                await asyncio.sleep(0.01)

    def forget(self) -> None:
        """Evict all of L2."""
        for space in self.node.host.spaces.values():
            effects: list[Effect] = []
            slots = space.chain.evict(len(space.chain), lambda slot: space.refs[slot] > 0)  # noqa: B023
            self.node.host._evicted(space, slots, effects)
            self.node.memory._apply(effects)

    async def acquire(
        self, hashes: Sequence[bytes], deadline_s: float = 10.0, spaces: list[Space] | None = None
    ) -> int:
        """Length of the prefix that is leased, whose bytes must be right; the lease is ended."""
        clock_ns = self.loop.now_ns
        owners = spaces or [self.space]
        lease = await self.node.acquire(1, owners, hashes, clock_ns + int(deadline_s * 1e9))
        assert self.loop.now_ns <= clock_ns + int(deadline_s * 1e9) + 1000
        self.node.check()
        if lease is None:
            return 0
        for space, slots in lease.parts:
            for block_hash, slot in zip(hashes, slots, strict=False):
                right = blocks.payload(space.namespace, block_hash)
                assert self.node.memory.payload(space, slot) == right
        self.node.host.release(lease.lease_id, 1)
        return len(lease.parts[0][1])

    def check_nothing_is_left(self) -> None:
        """No holds, reservations, tasks or promotions."""
        self.node.check()
        assert not any(sum(space.refs) for space in self.node.host.spaces.values())
        assert not self.node.host.reservations
        assert not self.node.promotions.under_way
        assert all(task.done() for task in self.node._tasks)


def config(name: str, **changes: object) -> StorageConfig:
    keys: dict[str, object] = {
        "deadline_ms": int(DEADLINE_S * 1000),
        "slow_ms": int(DEADLINE_S * 1000),
        "probe_ms": int(PROBE_S * 1000),
    }
    return StorageConfig(type="memory", name=name, **{**keys, **changes})  # type: ignore[arg-type]


def run(
    test: Callable[[Bench], Awaitable[None]],
    *configs: StorageConfig,
    blocks_in_l2: int = 256,
    raw: Sequence[Tier] = (),
) -> None:
    """Run a test on a node with these tiers; two of them if none is named."""

    async def scenario(loop: SimulationLoop) -> None:
        backends = list(raw) or [Tier() for _ in configs or (0, 1)]
        named = configs or tuple(config(f"tier{i}") for i in range(len(backends)))
        tiers = [StorageTier(c, backend) for c, backend in zip(named, backends, strict=True)]
        node = Node(
            capacity_bytes=blocks_in_l2 * PAGE,
            lease_ttl_ms=1000,
            tiers=tiers,
            clock=VirtualClock(loop),
            epoch=b"test",
            segment_bytes=blocks_in_l2 // 8 * PAGE,
        )

        async def ready() -> None:
            await test(Bench(loop, node, tiers, backends, node.register(SPACE)))

        try:
            async with opened(tiers):
                await node.run(ready)
        finally:
            node.memory.arena.close()

    run_simulation(0, scenario)


def key(block_hash: bytes, namespace: Namespace = SPACE) -> BlockKey:
    return BlockKey(namespace.digest, block_hash)


def damage(tier: Tier, block_hash: bytes) -> None:
    """Flip a bit of what is stored."""
    header, payload = tier.blocks[key(block_hash)]
    tier.blocks[key(block_hash)] = StoredBlock(header, bytes((payload[0] ^ 1,)) + payload[1:])


# --- who is asked ---------------------------------------------------------------------


def test_what_the_first_tier_lost_comes_from_the_second() -> None:
    """A rotten or too small disk would hide what the object store has."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(12)
        await bench.backed_up()
        first, second = bench.raw
        bench.forget()
        damage(first, hashes[2])
        damage(first, hashes[9])
        # As another process would: the index still says that it is there.
        del first.blocks[key(hashes[5])]
        assert await bench.acquire(hashes) == 12
        assert second.log[-1] == ("get", 3)
        assert second.calls("contains") == 0
        await bench.backed_up()
        assert set(first.blocks) == set(second.blocks)
        bench.forget()
        second.hangs = {"contains", "get"}
        assert await bench.acquire(hashes) == 12
        await bench.backed_up()
        bench.check_nothing_is_left()

    run(test)


def test_a_failing_tier_is_passed_over() -> None:
    """An error of the first tier would be a miss although the second one has the block."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(6)
        await bench.backed_up()
        bench.forget()
        await bench.raw[0].close()  # Every call raises BackendError from now on.
        assert await bench.acquire(hashes) == 6
        bench.forget()
        assert await bench.acquire(hashes) == 6

    run(test)


def test_a_slow_tier_does_not_hold_up_what_a_quick_one_has() -> None:
    """A local hit would be lost because the object store did not answer about the rest."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(10)
        await bench.backed_up()
        bench.forget()
        first, second = bench.raw
        for block_hash in hashes[6:]:
            await first.delete_many(SPACE.digest, [block_hash])
        second.hangs = {"contains"}
        assert await bench.acquire(hashes, 0.5) == 6
        second.hangs.clear()
        await asyncio.sleep(DEADLINE_S + PROBE_S + 0.1)
        bench.forget()
        second.takes_s = 0.2
        assert await bench.acquire(hashes, 1.0) == 10

    run(test)


def test_promotion_begins_before_the_last_tier_has_answered() -> None:
    """A prefix of the file tier would wait for the object store's answer before it is read."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(4)
        await bench.backed_up()
        bench.forget()
        unknown, _ = blocks.chain(2, "unknown")
        bench.raw[0].takes_s = 0.1
        bench.raw[1].takes_s = 0.2
        began_s = bench.loop.time()
        assert await bench.acquire([*hashes, *unknown]) == 4
        # 0.1 to ask the first; then 0.1 to read it, while the second takes 0.2 to answer.
        assert bench.loop.time() - began_s == pytest.approx(0.3)

    run(test)


def test_only_the_prefix_of_all_ranks_is_promoted() -> None:
    """Blocks that another rank lacks would be read for nothing, and push others out of L2."""

    async def test(bench: Bench) -> None:
        ranks = [bench.node.register(blocks.namespace(PAGE, tp_rank=r, tp_size=2)) for r in (0, 1)]
        hashes = bench.store(8, space=ranks[0])
        bench.store(3, space=ranks[1])
        await bench.backed_up()
        bench.forget()
        assert await bench.acquire(hashes, spaces=ranks) == 3
        assert [len(rank.chain) for rank in ranks] == [3, 3]
        assert bench.raw[1].calls("get") == 0
        bench.check_nothing_is_left()

    run(test)


def test_a_block_is_read_once_for_all_who_want_it() -> None:
    """A popular prefix would be read from storage once a request."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(8)
        await bench.backed_up()
        bench.forget()
        bench.raw[0].takes_s = 0.1
        damage(bench.raw[0], hashes[4])
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(bench.acquire(hashes)) for _ in range(5)]
        assert [task.result() for task in asked] == [8] * 5
        gets = [[count for what, count in raw.log if what == "get"] for raw in bench.raw]
        assert gets == [[8], [1]]

    run(test)


@pytest.mark.parametrize("after_s", [0.05, 0.15, 0.25, 0.35, 0.45])
def test_a_request_that_is_cancelled_leaves_nothing(after_s: float) -> None:
    """Aborted requests would pin L2, one after the other."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(8)
        await bench.backed_up()
        bench.forget()
        for raw in bench.raw:
            raw.takes_s, raw.lingers_s = 0.1, 0.05
        damage(bench.raw[0], hashes[4])
        task = asyncio.create_task(bench.acquire(hashes))
        await asyncio.sleep(after_s)
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(10)
        bench.check_nothing_is_left()
        assert await bench.acquire(hashes) == 8

    run(test)


# --- who is spared --------------------------------------------------------------------


def test_no_request_outlives_its_deadline() -> None:
    """A backend that takes its time to let go would keep the engine's request waiting."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(8)
        await bench.backed_up()
        bench.forget()
        for raw in bench.raw:
            raw.hangs, raw.lingers_s = {"get"}, 5.0
        for deadline_s in (0.0, 0.01, 0.5):
            # `acquire` checks the time.
            assert await bench.acquire(hashes, deadline_s) == 0
        await asyncio.sleep(30)
        bench.check_nothing_is_left()

    run(test)


def test_a_late_lookup_is_called_off() -> None:
    """Questions that nobody waits for would use up a server's connections."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(8)
        await bench.backed_up()
        bench.forget()
        bench.raw[0].hangs = {"contains"}
        assert await bench.acquire(hashes, 0.1) == 0
        await asyncio.sleep(0.01)
        bench.check_nothing_is_left()
        assert bench.raw[1].calls("contains") == 0

    run(test)


@pytest.mark.parametrize("what", ["contains", "get"])
def test_one_late_request_spares_the_next_ones(what: str) -> None:
    """Each request of a tier's first seconds of silence would lose its own deadline to it."""

    async def test(bench: Bench) -> None:
        hashes, others = bench.store(6), bench.store(6, "others")
        await bench.backed_up()
        bench.forget()
        bench.raw[0].hangs = {what}
        assert await bench.acquire(hashes, 0.2) == 0
        before_s, asked = bench.loop.time(), bench.raw[0].calls(what)
        assert await bench.acquire(others, 0.2) == 6
        assert bench.loop.time() - before_s < 0.1 * DEADLINE_S
        assert bench.raw[0].calls(what) == asked

    run(test)


def test_who_comes_later_does_not_wait_for_blocks_that_hang() -> None:
    """Requests for a popular prefix would lose a deadline each to a read that one has begun."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(6)
        await bench.backed_up()
        bench.forget()
        bench.raw[0].hangs = {"get"}
        assert await bench.acquire(hashes, 0.2) == 0
        before_s = bench.loop.time()
        assert await bench.acquire(hashes, 0.2) == 0
        assert bench.loop.time() - before_s < 0.01

    run(test)


def test_who_comes_later_does_not_wait_behind_reads_that_hang() -> None:
    """Requests for what was queued when a disk hung would lose a deadline each, without end."""

    async def test(bench: Bench) -> None:
        (raw,) = bench.raw
        read, queued = bench.store(6), bench.store(6, "queued")
        await bench.backed_up()
        bench.forget()
        raw.hangs, raw.lingers_s = {"get"}, 1000.0
        async with asyncio.TaskGroup() as group:
            for hashes in (read, queued):
                group.create_task(bench.acquire(hashes, 0.2))
        for hashes in (read, queued):
            before_s = bench.loop.time()
            assert await bench.acquire(hashes, 0.2) == 0
            assert bench.loop.time() - before_s < 0.01
        raw.hangs.clear()
        await asyncio.sleep(1100)
        bench.check_nothing_is_left()
        assert await bench.acquire(queued) == 6

    run(test, config("tier", read_batches=1))


def test_what_was_queued_behind_reads_that_hang_comes_from_the_next_tier() -> None:
    """A disk that hangs would keep what waited for it from being read anywhere else."""

    async def test(bench: Bench) -> None:
        read, queued = bench.store(6), bench.store(6, "queued")
        await bench.backed_up()
        bench.forget()
        first = bench.raw[0]
        first.hangs, first.lingers_s = {"get"}, 1000.0
        async with asyncio.TaskGroup() as group:
            for hashes in (read, queued):
                group.create_task(bench.acquire(hashes, 0.2))
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        assert await bench.acquire(queued, 0.2) == 6

    run(test, config("first", read_batches=1), config("second"))


def test_an_outage_costs_one_deadline_and_ends_by_itself() -> None:
    """A dead server would slow every request, or stay unused after it has come back."""

    async def test(bench: Bench) -> None:
        first, second = bench.raw
        hashes = bench.store(6)
        await bench.backed_up()
        bench.forget()
        first.hangs = {"contains", "get", "put"}
        # The first to meet it waits for its deadline, and then still gets the block.
        began_s = bench.loop.time()
        assert await bench.acquire(hashes) == 6
        assert bench.loop.time() - began_s == pytest.approx(DEADLINE_S, abs=0.1)
        for _ in range(20):
            bench.forget()
            began_s = bench.loop.time()
            assert await bench.acquire(hashes) == 6
            assert bench.loop.time() - began_s < 0.01
            await asyncio.sleep(0.3)
        assert bench.tiers[0].status()["state"] == "failing"
        first.hangs.clear()
        await asyncio.sleep(DEADLINE_S + PROBE_S + 0.1)
        asked = first.calls("get")
        second.hangs = {"contains", "get"}
        bench.forget()
        assert await bench.acquire(hashes, 1.0) == 6
        assert first.calls("get") > asked
        await bench.backed_up()

    run(test)


def test_a_tier_that_is_back_is_used_by_engines_of_several_ranks() -> None:
    """A tensor-parallel engine would lose its tiers to the first outage, until a restart."""

    async def test(bench: Bench) -> None:
        (raw,) = bench.raw
        ranks = [bench.node.register(blocks.namespace(PAGE, tp_rank=r, tp_size=2)) for r in (0, 1)]
        for rank in ranks:
            hashes = bench.store(8, space=rank)
        await bench.backed_up()
        bench.forget()
        raw.takes_s, raw.hangs = 0.01, {"contains", "get"}
        assert await bench.acquire(hashes, 0.5, ranks) == 0
        await asyncio.sleep(DEADLINE_S)
        raw.hangs.clear()
        await asyncio.sleep(DEADLINE_S + PROBE_S)
        # The first request is the trial.
        await bench.acquire(hashes, 0.5, ranks)
        await asyncio.sleep(0.1)
        bench.forget()
        assert await bench.acquire(hashes, 0.5, ranks) == 8
        bench.check_nothing_is_left()

    run(test, config("tier"))


class SlowTailTier(Tier):
    """Takes its time for blocks that are not in `quick`."""

    def __init__(self) -> None:
        super().__init__()
        self.quick: set[bytes] = set()

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        slow = any(request.block_hash not in self.quick for request in requests)
        await asyncio.sleep(1.0 if slow else 0.1)
        return await super().get_into(namespace, requests)


def test_nobody_waits_for_what_lies_behind_a_lost_block() -> None:
    """A request would wait for many blocks, up to its deadline, and be given none of them."""
    raw = SlowTailTier()

    async def test(bench: Bench) -> None:
        ranks = [bench.node.register(blocks.namespace(PAGE, tp_rank=r, tp_size=2)) for r in (0, 1)]
        for rank in ranks:
            for count in (50, 100, 150):  # As many at once as may wait to be written.
                hashes = bench.store(count, space=rank)
                await bench.backed_up()
        bench.forget()
        raw.quick = set(hashes[:64])
        # As another process would: the index still says that it is there.
        del raw.blocks[key(hashes[40], ranks[1].namespace)]
        began_s = bench.loop.time()
        assert await bench.acquire(hashes, spaces=ranks) == 40
        assert bench.loop.time() - began_s < 0.2
        began_s = bench.loop.time()
        assert await bench.acquire(hashes, spaces=ranks[:1]) == 150
        assert bench.loop.time() - began_s > 0.5
        bench.check_nothing_is_left()

    run(test, config("tier", read_batches=64), raw=[raw], blocks_in_l2=1024)


def test_a_request_with_little_time_does_not_shut_a_tier_for_others() -> None:
    """One client that asks for answers in 20 ms would turn the others' hits into misses."""

    async def test(bench: Bench) -> None:
        (raw,) = bench.raw
        chains = []
        for number in range(20):
            chains.append(bench.store(4, number))
            await bench.backed_up()
        bench.forget()
        raw.takes_s = 0.1

        async def impatient() -> None:
            for number in range(1000):
                assert await bench.acquire(chains[10 + number % 10], 0.02) == 0
                await asyncio.sleep(0.013 * (number % 7))

        assert await bench.acquire(chains[0]) == 4
        task = asyncio.create_task(impatient())
        for number in range(1, 10):
            await asyncio.sleep(0.017 * number)
            assert await bench.acquire(chains[number]) == 4, number
        task.cancel()

    run(test, config("tier"))


# --- what each gets -------------------------------------------------------------------


def test_a_hanging_tier_costs_the_others_nothing() -> None:
    """One dead object store would stop all backups, and pin L2 until engines cannot store."""

    async def test(bench: Bench) -> None:
        first, second = bench.raw
        second.hangs = {"put"}
        share = int(256 * PAGE * PENDING_SHARE_MAX) // 2
        stored: list[bytes] = []
        for number in range(40):
            stored += bench.store(4, number)
            bench.node.check()
            queue = bench.node.backups.queues[1]
            assert queue.pending_bytes <= share
            await asyncio.sleep(0.05)
        assert set(first.blocks) == {key(block_hash) for block_hash in stored}
        assert bench.tiers[0].counters["backup_skipped_total"] == 0
        assert bench.tiers[1].counters["backup_skipped_total"] >= 4 * 40 - share // PAGE
        await asyncio.sleep(10)
        # What waited was given up, and nothing of it is held.
        assert bench.node.backlog() == 0
        bench.check_nothing_is_left()
        second.hangs.clear()
        await asyncio.sleep(DEADLINE_S + PROBE_S + 1)
        for number in range(40):
            bench.store(4, number)
            await asyncio.sleep(0.05)
        await bench.backed_up()
        assert set(second.blocks) == set(first.blocks)
        assert first.calls("put") == 40

    run(test)


def test_the_bytes_that_wait_for_a_tier_are_bounded() -> None:
    """A slow tier would pin as much of L2 as engines store meanwhile."""

    async def test(bench: Bench) -> None:
        (raw,) = bench.raw
        raw.takes_s = 0.5
        hashes = bench.store(20)
        queue = bench.node.backups.queues[0]
        assert queue.pending_bytes == 5 * PAGE
        assert bench.tiers[0].counters["backup_skipped_total"] == 15
        assert bench.tiers[0].status()["state"] == "ready"
        await bench.backed_up()
        # From the first on: a tail without its beginning is of no use.
        assert set(raw.blocks) == {key(block_hash) for block_hash in hashes[:5]}
        for _ in range(3):
            bench.store(20)
            await bench.backed_up()
        assert set(raw.blocks) == {key(block_hash) for block_hash in hashes}
        assert queue.pending_bytes == 0

    run(test, config("tier", write_queue=Size(5 * PAGE + 1)))


def test_a_share_smaller_than_a_block_still_backs_up() -> None:
    """A small arena with large blocks would never reach its storage."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(2)
        await bench.backed_up()
        bench.store(2)
        await bench.backed_up()
        for raw in bench.raw:
            assert set(raw.blocks) == {key(block_hash) for block_hash in hashes}

    run(test, config("a", write_queue=Size(1)), config("b", write_queue=Size(1)))


def test_a_short_stall_costs_no_backups() -> None:
    """One slow write would throw everything away that waits behind it."""

    async def test(bench: Bench) -> None:
        (raw,) = bench.raw
        raw.hangs = {"put"}
        first = bench.store(1)
        await asyncio.sleep(0.1)
        hashes = bench.store(40, "behind")
        assert bench.node.backlog() == 41
        await asyncio.sleep(1)
        raw.hangs.clear()
        await bench.backed_up()
        # The write that hung has failed; the others only waited.
        assert set(raw.blocks) == {key(block_hash) for block_hash in hashes}
        bench.store(1)
        await bench.backed_up()
        assert key(first[0]) in raw.blocks

    run(test, config("tier", write_batches=1))


@pytest.mark.parametrize("fill", [True, False])
def test_a_promotion_fills_the_tiers_above(fill: bool) -> None:
    """Each restart would fetch the same blocks from the object store again."""

    async def test(bench: Bench) -> None:
        first, second = bench.raw
        hashes = bench.store(6)
        await bench.backed_up()
        bench.forget()
        await first.delete_many(SPACE.digest, hashes)
        written = first.calls("put"), second.calls("put")
        assert await bench.acquire(hashes) == 6
        await bench.backed_up()
        bench.store(6)
        await bench.backed_up()
        assert (first.calls("put"), second.calls("put")) == (written[0] + fill, written[1])
        assert len(first.blocks) == (6 if fill else 0)

    run(test, config("first", fill_from_lower=fill), config("second"))


def test_a_block_of_the_first_tier_is_not_written_to_those_below() -> None:
    """Each load from the disk would cost a write, or a question, to the object store."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(6)
        await bench.backed_up()
        bench.forget()
        second = bench.raw[1]
        before = list(second.log)
        assert await bench.acquire(hashes) == 6
        bench.store(6)
        await bench.backed_up()
        assert second.log == before

    run(test)


def test_what_an_outage_kept_from_a_lower_tier_is_made_up_for() -> None:
    """The fleet would not find the blocks of an outage until the node's disk had lost them."""

    async def test(bench: Bench) -> None:
        second = bench.raw[1]
        second.hangs = {"put"}
        hashes = bench.store(6)
        await bench.backed_up()
        assert not second.blocks
        second.hangs.clear()
        await asyncio.sleep(DEADLINE_S + PROBE_S + 0.1)
        bench.forget()
        assert await bench.acquire(hashes) == 6
        await bench.backed_up()
        assert len(second.blocks) == 6

    run(test)


def test_batches_in_flight_are_as_configured() -> None:
    """A tier that pays for latency could not be read or written faster."""

    async def test(bench: Bench) -> None:
        (raw,) = bench.raw
        raw.takes_s = 0.1
        chains = [bench.store(4, number) for number in range(12)]
        await bench.backed_up()
        assert raw.at_once == 1
        bench.forget()
        async with asyncio.TaskGroup() as group:
            for hashes in chains:
                group.create_task(bench.acquire(hashes))
        gets = [what for what, _ in raw.log].count("get")
        assert gets == 12
        # All lookups at once, but no more than three reads.
        assert bench.tiers[0].reads._value == 3

    run(test, config("tier", read_batches=3, write_batches=1))


class LyingTier(Tier):
    """Says of a damaged block that it is, and gives it with its header nevertheless."""

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        results = await super().get_into(namespace, requests)
        for request in requests:
            request.view[0] ^= 1
        return [GetResult(Outcome.CORRUPT, result.header) for result in results]


def test_what_is_not_a_hit_is_not_served() -> None:
    """A third party's backend that fills in too much would have wrong bytes served."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(4)
        await bench.backed_up()
        bench.forget()
        assert await bench.acquire(hashes) == 0
        bench.check_nothing_is_left()

    run(test, raw=[LyingTier()])


class FlakyTier(Tier):
    """Every third read fails: too seldom for the breaker."""

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        results = await super().get_into(namespace, requests)
        if self.calls("get") % 3 == 0:
            raise BackendError("connection reset")
        return results


def test_a_tier_that_fails_now_and_then_does_not_flood_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A line for each failed call would fill the disk that the log is on."""

    async def test(bench: Bench) -> None:
        hashes = bench.store(4)
        await bench.backed_up()
        for _ in range(300):
            bench.forget()
            await bench.acquire(hashes)
            await asyncio.sleep(0.1)
        counters = bench.tiers[0].status()["counters"]
        assert isinstance(counters, dict)
        assert counters["get_failed_total"] == 100

    run(test, raw=[FlakyTier()])
    lines = [line for line in caplog.messages if "get failed: connection reset" in line]
    assert 1 < len(lines) <= 300 * 0.1 / LOG_EVERY_S + 1


class SlowToCloseTier(Tier):
    """Takes as long to close as a worker process that hangs."""

    async def close(self) -> None:
        await asyncio.sleep(3.0)
        await super().close()


def test_tiers_that_hang_are_closed_at_once() -> None:
    """Each would add its time to a stop, which then would end with an error."""

    async def scenario(loop: SimulationLoop) -> None:
        tiers = [StorageTier(config(f"tier{i}"), SlowToCloseTier()) for i in range(TIERS_MAX)]
        async with opened(tiers):
            began_s = loop.time()
        assert loop.time() - began_s == pytest.approx(3.0)

    run_simulation(0, scenario)


def test_the_drain_does_not_wait_for_a_tier_that_takes_no_writes() -> None:
    """A stop during an outage would take its whole budget, and systemd its patience."""

    async def test(bench: Bench) -> None:
        bench.raw[1].hangs = {"put"}
        for number in range(5):
            bench.store(3, number)
            await asyncio.sleep(0.01)
        await asyncio.sleep(DEADLINE_S + 0.1)
        hashes = bench.store(20)
        began_s = bench.loop.time()
        assert await bench.node.drain(60) > 0
        assert bench.loop.time() - began_s < 0.5
        assert all(key(block_hash) in bench.raw[0].blocks for block_hash in hashes)

    run(test)


# --- opening --------------------------------------------------------------------------


def test_a_tier_that_cannot_be_opened_is_left_out_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A server that is down at boot would keep the node's cache down, or be lost for good."""
    caplog.set_level(logging.INFO, "tierd")
    away = Tier()
    away.open_errors = [BackendError("connection refused")] * 5

    async def test(bench: Bench) -> None:
        assert bench.loop.time() - 1000 < 0.1
        status = bench.tiers[1].status()
        assert (status["state"], status["why"]) == ("unavailable", "connection refused")
        hashes = bench.store(6)
        await bench.backed_up()
        bench.forget()
        assert await bench.acquire(hashes) == 6
        assert bench.tiers[1].counters["backup_skipped_total"] == 6
        assert away.log == []
        await asyncio.sleep(5 * PROBE_S)
        assert bench.tiers[1].status()["state"] == "ready"
        bench.store(3, "later")
        await bench.backed_up()
        assert len(away.blocks) == 3

    run(test, raw=[Tier(), away])
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "tier1: unavailable: connection refused" in line]) == 1
    assert "storage tier tier1: open" in lines


def test_a_tier_that_opens_slowly_does_not_delay_the_start() -> None:
    """A server that does not answer would keep the node's engines without their L2."""
    slow = Tier()
    slow.open_takes_s = 20.0

    async def test(bench: Bench) -> None:
        assert bench.loop.time() - 1000 == pytest.approx(OPEN_S_MAX)
        assert bench.tiers[1].status()["state"] == "opening"
        hashes = bench.store(6)
        await bench.backed_up()
        bench.forget()
        assert await bench.acquire(hashes) == 6
        await asyncio.sleep(20)
        assert bench.tiers[1].status()["state"] == "ready"

    run(test, raw=[Tier(), slow])


def test_a_stop_while_a_tier_is_being_opened() -> None:
    """A daemon whose server hangs could only be killed."""
    hung = Tier()
    hung.open_takes_s = 1e6

    async def test(bench: Bench) -> None:
        bench.store(3)

    run(test, raw=[Tier(), hung])


def test_a_tier_that_hangs_while_it_is_opened_is_tried_again() -> None:
    """A server that took the connection and died would never be asked again."""
    hung = Tier()
    hung.open_takes_s = 1e6

    async def test(bench: Bench) -> None:
        hung.open_takes_s = 0.0
        await asyncio.sleep(60)
        assert bench.tiers[0].status()["state"] == "ready"

    run(test, raw=[hung])


def test_a_wrong_configuration_ends_the_start() -> None:
    """tierd would run without the storage that the operator asked for."""
    wrong, other = Tier(), Tier()
    wrong.open_errors = [ConfigError("bucket 'kv' does not exist")]

    async def test(bench: Bench) -> None:
        raise AssertionError("it has started")

    with pytest.raises(ConfigError, match="storage tier tier1: bucket 'kv' does not exist"):
        run(test, raw=[other, wrong])
    assert not other._opened


def test_a_wrong_configuration_that_shows_late_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """The operator would not learn why a tier stays away."""
    wrong = Tier()
    wrong.open_takes_s = 3.0
    wrong.open_errors = [ConfigError("no such bucket")]

    async def test(bench: Bench) -> None:
        await asyncio.sleep(10)
        status = bench.tiers[0].status()
        assert status["state"] == "unavailable"
        assert "no such bucket" in str(status["why"])

    run(test, raw=[wrong])
    assert "storage tier tier0: no such bucket" in caplog.text


class ChattyTier(Tier):
    """A third party's tier with a great deal to say."""

    def __init__(self) -> None:
        super().__init__()
        self.counters |= {f"{number}{'x' * 100}_total": number for number in range(10_000)}
        self.open_errors = [BackendError("y" * 100_000)] * 100


def test_a_status_of_many_chatty_tiers_is_bounded() -> None:
    """One backend with a long error would end every `tierd status`."""

    async def test(bench: Bench) -> None:
        frame = encode(m.StatusReply(1, bench.node.status()))
        assert len(frame) < FRAME_BYTES_MAX // 8

    run(test, raw=[ChattyTier() for _ in range(TIERS_MAX)])


# --- a real daemon --------------------------------------------------------------------


def two_files(directory: Path, **more: str) -> str:
    """TOML of two file tiers below `directory`; `more` replaces a tier's path by name."""
    tables = []
    for name in ("near", "far"):
        path = more.get(name, str(directory / name))
        tables.append(
            f'[[storage]]\ntype = "file"\nname = "{name}"\npath = "{path}"\n'
            'capacity = "64MiB"\nreserve_free = "0"\nprobe_ms = 100\n'
        )
    return "".join(tables)


def store_and_stop(process: DaemonProcess, count: int) -> list[bytes]:
    client = process.client()
    handle = client.register(blocks.namespace(20_000))
    hashes, parents = blocks.chain(count)
    done = client.put(
        handle,
        [(h, p, blocks.payload(handle.namespace, h)) for h, p in zip(hashes, parents, strict=True)],
    )
    assert done == [True] * count
    client.close()
    assert process.stop() == 0
    return hashes


def served(process: DaemonProcess, hashes: list[bytes]) -> int:
    """How long the prefix is that a daemon serves once it knows what its tiers have."""
    for name in process.tiers():
        process.wait_tier(name, "ready")
    client = process.client()
    handle = client.register(blocks.namespace(20_000))
    got = client.get(handle, hashes, 10_000)
    for view, block_hash in zip(got, hashes, strict=False):
        assert bytes(view) == blocks.payload(handle.namespace, block_hash)
    client.close()
    return len(got)


def status_text(process: DaemonProcess) -> str:
    return subprocess.run(
        [sys.executable, "-m", "tierd.cli.main", "status", "--socket", process.socket],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.slow
@pytest.mark.parametrize("how", ["damaged", "emptied"])
def test_the_second_directory_serves_what_the_first_lost(tmp_path: Path, how: str) -> None:
    """A replaced or dying disk would cost what a second tier still has."""
    process = DaemonProcess(tmp_path / "tierd", capacity="64MiB", storage=two_files(tmp_path))
    with process:
        hashes = store_and_stop(process, 40)
        for path in (tmp_path / "near").rglob("*.slab"):
            if how == "emptied":
                path.unlink()
                continue
            # Every 20 kB, so that each record is hit.
            raw = bytearray(path.read_bytes())
            for place in range(5_000, len(raw), 16_384):
                raw[place] ^= 0xFF
            path.write_bytes(raw)
        process.start()
        assert served(process, hashes) == 40
        process.wait_backed_up()
        tiers = process.tiers()
        assert tiers["far"]["counters"]["get_hit_total"] == 40
        assert tiers["near"]["counters"]["put_stored_total"] == 40
        assert tiers["near"]["blocks"] == 40
        if how == "damaged":
            assert tiers["near"]["counters"]["get_corrupt_total"] == 40
        # What was filled is sound.
        process.stop()
        process.start()
        assert served(process, hashes) == 40
        assert process.tiers()["near"]["counters"]["get_hit_total"] == 40


@pytest.mark.slow
def test_a_directory_that_is_away_costs_only_its_tier(tmp_path: Path) -> None:
    """A node whose mount is missing would serve no engine."""
    mount = tmp_path / "mount"
    mount.symlink_to(mount)  # Whoever looks for something there gets an I/O error (ELOOP).
    storage = two_files(tmp_path, near=str(mount / "near"))
    with DaemonProcess(tmp_path / "tierd", capacity="64MiB", storage=storage) as process:
        log = process.log.read_text()
        near = process.tiers()["near"]
        assert near["state"] == "unavailable"
        assert "symbolic links" in near["why"]
        assert "near     unavailable: " in status_text(process)
        assert "storage tier near: unavailable" in log
        assert "probe_ms" in log
        mount.unlink()
        mount.mkdir()
        process.wait_tier("near", "ready")
        hashes = store_and_stop(process, 10)
        process.start()
        assert served(process, hashes) == 10
        assert process.tiers()["near"]["counters"]["get_hit_total"] == 10
