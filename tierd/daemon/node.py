"""What one node's daemon does with blocks: acquire, store, back up, promote.

The shell around `HostTier`: it carries out what the core decides, and runs what
takes time (checksums, page faults, storage I/O) off the loop. It knows nothing of
sockets; the server and the simulation drive the same code.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Final, TypeVar, assert_never

from tierd import __version__
from tierd.backend import GetRequest, GetResult, Outcome, PutRequest, checksum
from tierd.clock import Clock
from tierd.core.host import (
    Effect,
    Forget,
    HollowSegment,
    HostTier,
    Lease,
    Move,
    NewSegment,
    Reservation,
    Space,
)
from tierd.daemon.promotion import Promotion, Waiter
from tierd.daemon.tier import CALL_S_MAX, StorageTier, batch_blocks
from tierd.errors import BackendError, RefusedError
from tierd.memory.arena import Arena, Segment
from tierd.memory.ledger import LedgerRecord
from tierd.types import BlockKey, Namespace

log = logging.getLogger("tierd")

INTERNAL: Final = 0
"""Owner of the daemon's own reservations; sessions count from 1."""

PENDING_SHARE_MAX: Final = 0.25
"""Share of the capacity that blocks waiting for checksum and backup may pin in L2."""

CHECKSUM_BATCH: Final = 32
"""Blocks summed by one hop to a thread: 64 MiB of 2 MiB blocks take about 3 ms."""

CHECKSUM_PAUSE_S: Final = 0.005
"""Pause before a round of checksums. A hop to a thread and back costs about 0.1 ms."""

HOUSEKEEPING_S: Final = 1.0
"""How often expired leases are looked for; a lease outlives its time by at most this."""

SPACES_MAX: Final = 1024
"""Namespaces with slots; each costs a few KiB even when empty."""

SHOWN_CHARS_MAX: Final = 100
"""Of a namespace's text in STATUS; a field that differs further on still has another digest."""

_T = TypeVar("_T")
SegmentListener = Callable[[Space, int, Segment], None]


class Node:
    """L2, its storage tiers, and the work between them."""

    def __init__(
        self,
        *,
        capacity_bytes: int,
        lease_ttl_ms: int,
        tiers: Sequence[StorageTier],
        clock: Clock,
        epoch: bytes,
        executor: Executor | None = None,
        segment_bytes: int | None = None,
    ) -> None:
        self.host = HostTier(capacity_bytes, segment_bytes)
        self.arena = Arena()
        self.tiers = list(tiers)
        self.epoch = epoch
        self.lease_ttl_ns = lease_ttl_ms * 1_000_000
        self.counters: Counter[str] = Counter()
        self.segment_listeners: list[SegmentListener] = []
        self._clock = clock
        self._executor = executor
        self._started_ns = clock.monotonic_ns()
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._promoting: dict[tuple[bytes, bytes], Promotion] = {}
        self._fresh: deque[tuple[Space, int]] = deque()
        self._fresh_ready = asyncio.Event()
        self._summing = 0
        self._pending_bytes = 0
        self._unpopulated: deque[tuple[Space, int]] = deque()
        self._populate_ready = asyncio.Event()

    # --- life -----------------------------------------------------------------------

    async def run(self, ready: Callable[[], Awaitable[None]]) -> None:
        """Run the background work around `ready()`, and end it when `ready` returns."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            workers = [
                group.create_task(self._checksum_loop(), name="checksum"),
                group.create_task(self._populate_loop(), name="populate"),
                group.create_task(self._housekeeping_loop(), name="housekeeping"),
            ]
            for tier in self.tiers:
                workers += [
                    group.create_task(self._backup_loop(tier), name=f"backup-{tier.name}-{i}")
                    for i in range(2)
                ]
            try:
                await ready()
            finally:
                for worker in (*workers, *self._tasks):
                    worker.cancel()
        self._group = None

    def spawn(
        self, work: Callable[[], Coroutine[object, object, None]], name: str
    ) -> asyncio.Task[None]:
        """Run `work` as a task that ends with the daemon; its bugs are counted, not fatal.

        A task that is cancelled before its first step never calls `work`.
        """
        assert self._group is not None
        task = self._group.create_task(self._guarded(work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Callable[[], Coroutine[object, object, None]]) -> None:
        try:
            await work()
        except Exception:  # one request's bug must not end the others
            self.counters["internal_errors_total"] += 1
            log.exception("a task failed by a bug of ours")

    async def drain(self, budget_s: float) -> int:
        """Wait for pending backups at most `budget_s`; the count of those left undone."""
        end = asyncio.get_running_loop().time() + budget_s
        while self.backlog() and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.01)
        return self.backlog()

    def backlog(self) -> int:
        """Blocks that wait for a checksum or a backup, in flight included."""
        queued = sum(len(tier.queue) + tier.writing for tier in self.tiers)
        return len(self._fresh) + self._summing + queued

    # --- namespaces -----------------------------------------------------------------

    def register(self, namespace: Namespace) -> Space:
        """The space of a namespace, with memory ready for its first blocks."""
        if len(self.host.spaces) >= SPACES_MAX and namespace.digest not in self.host.spaces:
            raise RefusedError(f"this tierd holds {SPACES_MAX} namespaces already")
        space = self.host.open_space(namespace)
        if space is None:
            raise RefusedError(
                f"a block of {namespace.block_bytes} bytes exceeds host.capacity "
                f"({self.host.capacity_bytes} bytes)"
            )
        space.sessions += 1
        self.make_room_ahead(space, 0)
        return space

    def unregister(self, space: Space) -> None:
        """One session less uses the space; its blocks stay."""
        assert space.sessions > 0
        space.sessions -= 1

    # --- acquire --------------------------------------------------------------------

    def acquire_now(
        self, owner: int, spaces: list[Space], hashes: Sequence[bytes]
    ) -> tuple[bool, Lease | None]:
        """Lease the resident prefix if no tier is needed; (False, None) says `acquire` must run."""
        self.counters["requested_blocks_total"] += len(hashes)
        parts = [(space, self.host.prefix(space, hashes)) for space in spaces]
        count = min(len(slots) for _, slots in parts)
        if count < len(hashes) and self.tiers:
            return False, None
        if count == 0:
            return True, None
        self.counters["acquired_blocks_total"] += count
        cut = [(space, slots[:count]) for space, slots in parts]
        return True, self.host.grant(owner, cut, self._expiry_ns())

    async def acquire(
        self, owner: int, spaces: list[Space], hashes: Sequence[bytes], deadline_ns: int
    ) -> Lease | None:
        """Promote what tiers have, verify, and lease the longest prefix by the deadline.

        `deadline_ns` is CLOCK_MONOTONIC. Cancelling gives up the wait and leases nothing.
        """
        waiter = Waiter(spaces)
        try:
            waiter.refresh(self.host, hashes)
            resident = min(waiter.length(at, hashes) for at in range(len(spaces)))
            if self.tiers and resident < len(hashes):
                await self._promote(waiter, hashes, deadline_ns)
                waiter.refresh(self.host, hashes)
            lease = waiter.conclude(self.host, owner, hashes, self._expiry_ns())
            if lease is not None:
                count = len(lease.parts[0][1])
                self.counters["acquired_blocks_total"] += count
                self.counters["promoted_blocks_acquired_total"] += max(0, count - resident)
            return lease
        finally:
            waiter.close(self.host)

    async def _promote(self, waiter: Waiter, hashes: Sequence[bytes], deadline_ns: int) -> None:
        plans: list[dict[bytes, StorageTier]] = [{} for _ in waiter.spaces]
        lookups = [
            self.spawn(partial(self._locate, waiter, at, hashes, plan), "lookup")
            for at, plan in enumerate(plans)
        ]
        try:
            if await self._within(asyncio.wait(lookups), deadline_ns) is None:
                return
        finally:
            # Not waited for: a backend may take its time to let go, a deadline does not.
            for lookup in lookups:
                lookup.cancel()
        waiter.refresh(self.host, hashes)
        length = min(
            self._reach(space, hashes, plan)
            for space, plan in zip(waiter.spaces, plans, strict=True)
        )
        futures: set[asyncio.Future[None]] = set()
        for space, plan in zip(waiter.spaces, plans, strict=True):
            futures |= self._plan_batches(waiter, space, hashes[:length], plan)
        if futures:
            await self._within(asyncio.wait(futures), deadline_ns)

    async def _locate(
        self, waiter: Waiter, at: int, hashes: Sequence[bytes], plan: dict[bytes, StorageTier]
    ) -> None:
        """Put into `plan` which tier has which block that is not resident, cheaper tiers first."""
        space, held = waiter.spaces[at], waiter.held[at]
        missing = [h for h in hashes if h not in held]
        for tier in self.tiers:
            if not missing:
                break
            answers = await self._call(
                tier,
                "lookup",
                tier.backend.contains_many(space.digest, missing),
                [False] * len(missing),
            )
            plan.update((h, tier) for h, yes in zip(missing, answers, strict=True) if yes)
            missing = [h for h, yes in zip(missing, answers, strict=True) if not yes]

    def _reach(self, space: Space, hashes: Sequence[bytes], plan: dict[bytes, StorageTier]) -> int:
        """Length of the prefix that L2, promotions under way and tiers have together."""
        items, digest = space.chain.items, space.digest
        for count, block_hash in enumerate(hashes):
            if (
                block_hash not in items
                and block_hash not in plan
                and (digest, block_hash) not in self._promoting
            ):
                return count
        return len(hashes)

    def _plan_batches(
        self,
        waiter: Waiter,
        space: Space,
        hashes: Sequence[bytes],
        plan: dict[bytes, StorageTier],
    ) -> set[asyncio.Future[None]]:
        """Join the promotions under way and start those that are missing."""
        loop = asyncio.get_running_loop()
        batches: dict[Promotion, None] = {}
        current: Promotion | None = None
        limit = batch_blocks(space)
        for block_hash in hashes:
            if block_hash in space.chain.items:
                continue
            key = (space.digest, block_hash)
            batch = self._promoting.get(key)
            if batch is None:
                tier = plan[block_hash]
                if current is None or current.tier is not tier or len(current.hashes) >= limit:
                    current = Promotion(space, tier, [], loop.create_future())
                current.hashes.append(block_hash)
                self._promoting[key] = batch = current
            batches[batch] = None
        for batch in batches:
            batch.join(waiter)
            if not batch.started:
                batch.started = True
                self.spawn(partial(self._run_promotion, batch), "promotion")
        return {batch.done for batch in batches}

    async def _run_promotion(self, batch: Promotion) -> None:
        try:
            async with batch.tier.reads:
                if batch.waiters:
                    await self._fetch(batch)
        finally:
            for block_hash in batch.hashes:
                del self._promoting[batch.space.digest, block_hash]
            batch.done.set_result(None)

    async def _fetch(self, batch: Promotion) -> None:
        """Read a batch into fresh slots; what is sound becomes READY and held by the waiters."""
        space, tier = batch.space, batch.tier
        unknown_parent = space.namespace.hash_root
        reservation, effects = self.host.reserve(
            INTERNAL, space, batch.hashes, [unknown_parent] * len(batch.hashes)
        )
        self._apply(effects)
        granted = [(i, slot) for i, slot in enumerate(reservation.slots) if slot >= 0]
        if len(granted) < len(batch.hashes):
            self.counters["promotion_no_room_total"] += len(batch.hashes) - len(granted)
        if not granted:
            return
        length = space.namespace.block_bytes
        requests = [
            GetRequest(batch.hashes[i], self.arena.view(space, slot), length) for i, slot in granted
        ]
        results = [GetResult(Outcome.ERROR)] * len(requests)
        try:
            results = await self._call(
                tier, "get", tier.backend.get_into(space.digest, requests), results
            )
        finally:
            self._publish(batch, reservation, granted, results)

    def _publish(
        self,
        batch: Promotion,
        reservation: Reservation,
        granted: list[tuple[int, int]],
        results: Sequence[GetResult],
    ) -> None:
        space, tier = batch.space, batch.tier
        good = [False] * len(batch.hashes)
        for (i, slot), result in zip(granted, results, strict=True):
            tier.counters[f"get_{result.outcome.value}_total"] += 1
            if result.outcome is not Outcome.HIT:
                continue
            header, key = result.header, BlockKey(space.digest, batch.hashes[i])
            if header is None or header.key != key or header.length != space.namespace.block_bytes:
                # Not an assert: the backend may be anybody's, and this would be a wrong byte.
                tier.counters["get_bugs_total"] += 1
                log.error("storage tier %s gave another block than it was asked for", tier.name)
                continue
            good[i] = True
            reservation.parents[i] = header.parent
            space.checksums[slot] = header.checksum
            space.backed_up[slot] = True
        ready = self.host.commit_some(INTERNAL, reservation.reservation_id, good)
        hashes = [space.chain.hash_of(slot) for slot in ready]
        for slot in ready:
            self._record(space, slot)
        for waiter in batch.waiters:
            for at, own in enumerate(waiter.spaces):
                if own is space:
                    waiter.take(self.host, at, hashes, ready)

    # --- store ----------------------------------------------------------------------

    def reserve(
        self, owner: int, space: Space, hashes: Sequence[bytes], parents: Sequence[bytes]
    ) -> Reservation:
        """Slots for new blocks. Blocks that are there but not backed up are queued again."""
        reservation, effects = self.host.reserve(owner, space, hashes, parents)
        self._apply(effects)
        if self.tiers:
            self._offer_again(space, hashes, reservation.slots)
        return reservation

    def commit(self, owner: int, reservation_id: int, count: int) -> int | None:
        """Make the first `count` slots readable; how many became so, None if not the owner's."""
        reservation = self.host.reservations.get(reservation_id)
        ready = self.host.commit(owner, reservation_id, count)
        if ready is None or reservation is None:
            return None
        self.counters["stored_blocks_total"] += len(ready)
        if self.tiers:
            # Without a tier no block leaves the arena, and nobody would read its checksum.
            self._queue_fresh(reservation.space, ready)
        return len(ready)

    def drop_owner(self, owner: int) -> None:
        """A session's peer has closed: its reservations are free; its leases end at their time."""
        self.counters["reservations_dropped_total"] += self.host.drop_owner(owner)

    def make_room_ahead(self, space: Space, count: int) -> None:
        """Have slots for the next `count` blocks before they are asked for."""
        self._apply(self.host.make_room_ahead(space, count))

    def _offer_again(self, space: Space, hashes: Sequence[bytes], slots: Sequence[int]) -> None:
        items, backed_up = space.chain.items, space.backed_up
        again = []
        for block_hash, slot in zip(hashes, slots, strict=True):
            if slot < 0:
                resident = items.get(block_hash)
                if resident is not None and not backed_up[resident]:
                    again.append(resident)
        if again:
            self._queue_fresh(space, again)

    def _queue_fresh(self, space: Space, slots: Sequence[int]) -> None:
        """Hold slots and queue them for checksum and backup, as far as the bound allows."""
        room = int(self.host.capacity_bytes * PENDING_SHARE_MAX) - self._pending_bytes
        count = max(0, min(len(slots), room // space.slot_bytes))
        if count == 0 and slots and self._pending_bytes == 0:
            count = 1
        if count < len(slots):
            self.counters["backup_skipped_total"] += len(slots) - count
        taken = slots[:count]
        self.host.hold(space, taken)
        self._pending_bytes += count * space.slot_bytes
        for slot in taken:
            space.backed_up[slot] = True
            self._fresh.append((space, slot))
        if taken:
            self._fresh_ready.set()

    def _let_go(self, space: Space, slots: Sequence[int]) -> None:
        self.host.unhold(space, slots)
        self._pending_bytes -= len(slots) * space.slot_bytes

    # --- background work ------------------------------------------------------------

    async def _checksum_loop(self) -> None:
        while True:
            await self._fresh_ready.wait()
            self._fresh_ready.clear()
            # Nobody waits for a checksum: a pause makes one batch of many small commits.
            await asyncio.sleep(CHECKSUM_PAUSE_S)
            while self._fresh:
                count = min(CHECKSUM_BATCH, len(self._fresh))
                self._summing = count
                await self._sum([self._fresh.popleft() for _ in range(count)])
                self._summing = 0

    async def _sum(self, batch: list[tuple[Space, int]]) -> None:
        """Compute missing checksums and pass the blocks on to the tiers."""
        missing = [(space, slot) for space, slot in batch if space.checksums[slot] is None]
        views = [
            self.arena.view(space, slot)[: space.namespace.block_bytes] for space, slot in missing
        ]
        sums = await self._in_thread(_checksums, views)
        for (space, slot), digest in zip(missing, sums, strict=True):
            space.checksums[slot] = digest
            self._record(space, slot)
        if len(self.tiers) == 1:
            # The hold goes on to the tier as it is.
            for space, slot in batch:
                self.tiers[0].enqueue(space, slot)
            return
        for space, slot in batch:
            for tier in self.tiers:
                self.host.hold(space, [slot])
                self._pending_bytes += space.slot_bytes
                tier.enqueue(space, slot)
            self._let_go(space, [slot])

    async def _backup_loop(self, tier: StorageTier) -> None:
        while True:
            if not tier.queue:
                tier.queued.clear()
                await tier.queued.wait()
                continue
            space, slots = tier.next_batch()
            tier.writing += len(slots)
            try:
                await self._back_up(tier, space, slots)
            finally:
                tier.writing -= len(slots)
                self._let_go(space, slots)

    async def _back_up(self, tier: StorageTier, space: Space, slots: list[int]) -> None:
        requests = []
        for slot in slots:
            digest = space.checksums[slot]
            assert digest is not None
            requests.append(
                PutRequest(
                    space.chain.hash_of(slot),
                    space.chain.parent_of(slot),
                    digest,
                    self.arena.view(space, slot),
                    space.namespace.block_bytes,
                )
            )
        outcomes = await self._call(
            tier,
            "put",
            tier.backend.put_many(space.digest, requests),
            [Outcome.ERROR] * len(requests),
        )
        for slot, outcome in zip(slots, outcomes, strict=True):
            tier.counters[f"put_{outcome.value}_total"] += 1
            if outcome not in (Outcome.STORED, Outcome.PRESENT):
                space.backed_up[slot] = False

    async def _populate_loop(self) -> None:
        while True:
            await self._populate_ready.wait()
            while self._unpopulated:
                space, index = self._unpopulated.popleft()
                mapping = self.arena.segments(space)[index].mapping
                try:
                    more = space.live[index]
                    while more:
                        more = await self._in_thread(mapping.populate_next)
                        if not space.live[index]:
                            # Hollowed while the chunk was being faulted in.
                            mapping.give_back()
                            more = False
                except OSError as error:
                    self.counters["populate_failed_total"] += 1
                    log.warning("cannot fault in memory ahead of use: %s", error)
            self._populate_ready.clear()

    async def _housekeeping_loop(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self.counters["leases_expired_total"] += self.host.expire(self._clock.monotonic_ns())
            for space in self.host.spaces.values():
                self.arena.keep_hollow(space)

    # --- small things ---------------------------------------------------------------

    def _apply(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case NewSegment(space, index):
                    self._new_segment(space, index)
                case HollowSegment(space, index):
                    self.arena.hollow(space, index)
                case Forget(space, slots):
                    self.arena.forget(space, slots)
                case Move(space, pairs):
                    self.arena.move(space, pairs)
                    self.counters["moved_blocks_total"] += len(pairs)
                case _:
                    assert_never(effect)

    def _new_segment(self, space: Space, index: int) -> None:
        try:
            segment = self.arena.create(space, index)
        except OSError as error:
            # Out of descriptors or memory: what was to be stored there is refused.
            self.counters["segments_failed_total"] += 1
            log.error("cannot make a memory segment: %s", error)
            self.host.lose_segment(space, index)
            return
        self._unpopulated.append((space, index))
        self._populate_ready.set()
        # A copy: telling a client that has gone ends its session, and its listening.
        for listener in list(self.segment_listeners):
            listener(space, index, segment)

    def _record(self, space: Space, slot: int) -> None:
        """Write a proven block into the ledger."""
        digest = space.checksums[slot]
        assert digest is not None
        index, place = divmod(slot, space.slots_per_segment)
        self.arena.segments(space)[index].ledger.ready(
            LedgerRecord(
                place,
                space.chain.hash_of(slot),
                space.chain.parent_of(slot),
                space.namespace.block_bytes,
                digest,
                space.generations[slot],
                self._clock.monotonic_ns(),
            )
        )

    def _expiry_ns(self) -> int:
        return self._clock.monotonic_ns() + self.lease_ttl_ns

    async def _in_thread(self, call: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call, *args)

    async def _within(self, work: Awaitable[_T], deadline_ns: int) -> _T | None:
        """The result of `work`, or None once the deadline has come."""
        left_s = (deadline_ns - self._clock.monotonic_ns()) / 1e9
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                return await work
        except TimeoutError:
            self.counters["deadline_missed_total"] += 1
            return None

    async def _call(
        self, tier: StorageTier, what: str, call: Awaitable[list[_T]], failed: list[_T]
    ) -> list[_T]:
        """The answer of a backend, or `failed` if it raised; a tier never ends the daemon."""
        try:
            async with asyncio.timeout(CALL_S_MAX):
                answer = await call
            if len(answer) != len(failed):
                raise BackendError(f"{len(answer)} answers to {len(failed)} requests")
        except BackendError as error:
            tier.counters[f"{what}_failed_total"] += 1
            log.warning("storage tier %s: %s failed: %s", tier.name, what, error)
            return failed
        except TimeoutError:
            tier.counters[f"{what}_timeouts_total"] += 1
            log.warning("storage tier %s: %s took over %d s", tier.name, what, CALL_S_MAX)
            return failed
        except Exception:  # a backend's bug is a counted miss, not an outage
            tier.counters[f"{what}_bugs_total"] += 1
            log.exception("storage tier %s: %s failed unexpectedly", tier.name, what)
            return failed
        return answer

    # --- status ---------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """What `tierd status` shows; plain values only."""
        host = self.host
        spaces = list(host.spaces.values())
        blocks = sum(len(space.chain) for space in spaces)
        counters = Counter(self.counters)
        counters["evicted_blocks_total"] = host.evicted_blocks
        return {
            "version": __version__,
            "epoch": self.epoch.hex(),
            "uptime_s": round((self._clock.monotonic_ns() - self._started_ns) / 1e9, 3),
            "host": {
                "capacity_bytes": host.capacity_bytes,
                "allocated_bytes": host.allocated_bytes,
                "populated_bytes": self.arena.populated_bytes,
                "used_bytes": sum(len(s.chain) * s.slot_bytes for s in spaces),
                "blocks": blocks,
                "writing_blocks": sum(len(s.writing) for s in spaces),
                "leases": len(host.leases),
                "backlog_blocks": self.backlog(),
            },
            "storage": [tier.status() for tier in self.tiers],
            "namespaces": [
                {
                    "digest": space.digest.hex(),
                    **_shown(space.namespace),
                    "blocks": len(space.chain),
                    "sessions": space.sessions,
                }
                for space in spaces
            ],
            "counters": dict(sorted(counters.items())),
        }

    def check(self) -> None:
        """Assert the invariants of core, ledger and queues; for tests."""
        self.host.check()
        for space in self.host.spaces.values():
            for index, segment in enumerate(self.arena.segments(space)):
                for record in segment.ledger.records():
                    slot = index * space.slots_per_segment + record.place
                    assert space.chain.items.get(record.block_hash) == slot
                    assert space.checksums[slot] == record.checksum
                    assert space.generations[slot] == record.generation


def _shown(namespace: Namespace) -> dict[str, object]:
    """A namespace's fields for STATUS, cut so that SPACES_MAX of them fit one frame."""
    shown = {**namespace.to_fields(), "hash_root": namespace.hash_root.hex()}
    shown["groups"] = " ".join(namespace.groups)
    return {
        name: value[:SHOWN_CHARS_MAX] if isinstance(value, str) else value
        for name, value in shown.items()
    }


def _checksums(views: Sequence[memoryview]) -> list[bytes]:
    return [checksum(view) for view in views]
