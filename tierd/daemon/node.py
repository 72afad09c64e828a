"""What one node's daemon does with blocks: acquire, store, and what a status shows.

Puts host memory, backup and promotion together, and owns every task. It knows nothing of
sockets; the server and the simulation drive the same code.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, NamedTuple

from tierd import __version__
from tierd.clock import Clock
from tierd.config import CopyConfig, HostConfig, PrefetchConfig
from tierd.core.hints import PIN_MAX_S, PIN_SHARE, Hints, PrefixHint
from tierd.core.host import WRITING_SHARE_MAX, HostTier
from tierd.core.prefetch import MS, BreakEven, Worth, deadline_ns
from tierd.core.pressure import Pressure
from tierd.core.space import Evicted, SlotLease, SlotReservation, Space
from tierd.core.unserved import Unserveds, Why
from tierd.core.writes import WriteMoment
from tierd.daemon.copies.copying import Copies
from tierd.daemon.jobs.explain import Explainer
from tierd.daemon.jobs.flush import Flushes
from tierd.daemon.jobs.hotset import Snapshots
from tierd.daemon.jobs.scrub import Scrubs
from tierd.daemon.jobs.warming import Warmings
from tierd.daemon.l2.ending import SPACES_MAX, Endings
from tierd.daemon.l2.incarnations import Incarnations
from tierd.daemon.l2.memory import HostMemory
from tierd.daemon.l2.pressure import Machine, MemoryWatch
from tierd.daemon.l2.verification import Verification
from tierd.daemon.l3.backup import Backups
from tierd.daemon.l3.learning import Learning
from tierd.daemon.l3.lookup import Lookup
from tierd.daemon.l3.promotion import Promotions, Waiter
from tierd.daemon.l3.tier import StorageTier
from tierd.daemon.lifecycle.service import ServiceManager
from tierd.daemon.session.demand import SHOWN_CHARS_MAX, Demand
from tierd.daemon.session.refusals import Refusals
from tierd.errors import RefusedError
from tierd.eviction import L2_DEFAULT
from tierd.memory.placement import Placement
from tierd.types import Namespace

log = logging.getLogger("tierd")

HOUSEKEEPING_S: Final = 1.0
"""How often expired leases are looked for; a lease outlives its time by at most this."""

NS: Final = 1_000_000_000

LATE_NS: Final = 100_000_000
"""An answer that comes so much after its deadline is counted: tierd's own doing, or a machine
that let it wait, but no tier's, for those are left at the deadline."""

CLIENTS_SHOWN_MAX: Final = 64
"""Names of clients in a status, with how many have each; a node has tens of engine processes."""

KNOWN_MORE_S: Final = 2
"""Added to how long a client may remember what it has mapped: clocks are told every second."""


class Patience:
    """How long one ACQUIRE waits for tiers: until its deadline, or until `end`."""

    def __init__(self) -> None:
        self.ended = False
        self._timeout: asyncio.Timeout | None = None

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """Around the wait: a TimeoutError after so long, or when `end` is called."""
        try:
            async with asyncio.timeout(0.0 if self.ended else seconds) as self._timeout:
                yield
        finally:
            self._timeout = None  # It cannot be ended any more, and READY may still come.

    def end(self) -> None:
        """Wait no longer; idempotent."""
        if not self.ended and self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())
        self.ended = True


class AcquiredNow(NamedTuple):
    """What an ACQUIRE comes to without a tier: if it is not settled, `Node.acquire` must run."""

    settled: bool
    lease: SlotLease | None
    resident: int
    """Leading blocks that every space has."""


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
        prefetch: PrefetchConfig | None = None,
        copy: CopyConfig | None = None,
        placement: Placement | None = None,
        manager: ServiceManager | None = None,
        executor: Executor | None = None,
        segment_bytes: int | None = None,
        pin_share: float = PIN_SHARE,
        pin_max_s: int = PIN_MAX_S,
        eviction: str = L2_DEFAULT,
        min_bytes: int = 0,
        machine: Machine | None = None,
    ) -> None:
        """L2 keeps within what `machine` has for it, if that is given, but for `min_bytes`."""
        self._pin_share = pin_share
        hints = Hints(int(capacity_bytes * pin_share), pin_max_s)
        self.host = HostTier(capacity_bytes, segment_bytes, hints, eviction)
        self.host.now_s = clock.monotonic_ns() // NS
        self.tiers = list(tiers)
        self.epoch = epoch
        self.prefetch = prefetch if prefetch is not None else PrefetchConfig()
        self.lease_ttl_ns = lease_ttl_ms * 1_000_000
        self.counters: Counter[str] = Counter()
        self.demand = Demand()
        self.clients: dict[int, str] = {}
        """What each session's client calls itself, by its owner."""
        self.memory = HostMemory(self.host, clock, self.counters, executor, placement, manager)
        self.lives = Incarnations(self.memory, [tier.config for tier in tiers], epoch, clock)
        self.proofs = Verification(self.memory)
        self.endings = Endings(self.memory)
        self.refusals = Refusals(self.counters)
        self.backups = Backups(self.memory, self.tiers, clock)
        self.learning = Learning(self.host, self.backups, clock, self.counters, self._guarded)
        in_flight = self._in_flight_bytes(capacity_bytes)
        self.promotions = Promotions(self.memory, self.backups, self.tiers, self.spawn, in_flight)
        self.flushes = Flushes(self.memory, self.backups, self.promotions, self.tiers, self.spawn)
        self.scrubs = Scrubs(
            self.memory, self.backups, self.promotions.turns, self.flushes, self.tiers
        )
        self.unserveds = Unserveds()
        self.explainer = Explainer(
            self.memory, self.backups, self.flushes, self.unserveds, clock, self.spawn
        )
        self.warmings = Warmings(
            self.memory,
            self.backups,
            self.promotions,
            self.proofs,
            self.flushes,
            self.tiers,
            clock,
            self.spawn,
        )
        self.watch = MemoryWatch(self.memory, Pressure(capacity_bytes, min_bytes), machine)
        copy = copy or CopyConfig()
        self.copies = Copies(
            self.memory,
            clock,
            self.counters,
            bandwidth_max=copy.bandwidth_max,
            job_timeout_ms=copy.job_timeout_ms,
            hold=self.lives.copying,
        )
        self.snapshots: Snapshots | None = None
        """What keeps the hot set, where there is a directory for it."""
        self._clock = clock
        self._break_even = BreakEven()
        self._started_ns = clock.monotonic_ns()
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # --- life -----------------------------------------------------------------------

    async def run(self, ready: Callable[[], Awaitable[None]]) -> None:
        """Run the background work around `ready()`, and end it when `ready` returns."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            workers = [
                group.create_task(self.backups.sum_up(), name="checksum"),
                group.create_task(self.memory.populate(), name="populate"),
                group.create_task(self.proofs.run(), name="prove"),
                group.create_task(self.learning.run(), name="learning"),
                group.create_task(self.flushes.follow(), name="flushes of other nodes"),
                group.create_task(self._housekeeping_loop(), name="housekeeping"),
                group.create_task(self.watch.run(self._clock), name="pressure"),
            ]
            for renewal in self.backups.renewals:
                name = renewal.tier.name
                workers.append(group.create_task(renewal.tell(), name=f"uses-{name}"))
                workers.append(group.create_task(renewal.check(), name=f"leaving-{name}"))
            for queue in self.backups.queues:
                workers += [
                    group.create_task(
                        self.backups.write(queue), name=f"backup-{queue.tier.name}-{i}"
                    )
                    for i in range(queue.tier.config.write_batches)
                ]
            try:
                await ready()
            finally:
                for worker in (*workers, *self._tasks):
                    worker.cancel()
                await self.copies.close()
        self._group = None

    def set_capacity(self, capacity_bytes: int, min_bytes: int) -> None:
        """Have another capacity from now on; what is too much is given back within seconds.

        Not followed: the sizes of what is remembered of blocks, which cost little.
        """
        self.watch.pressure.resize(capacity_bytes, min_bytes)
        self.host.set_capacity(capacity_bytes, self._pin_share)
        self.host.set_limit(self.watch.pressure.limit_bytes)
        self.promotions.turns.resize(self._in_flight_bytes(capacity_bytes))
        self.backups.resize()

    def configure(self, host: HostConfig, prefetch: PrefetchConfig) -> None:
        """Go by these from now on, but for what only a new daemon reads. Leases, and what is kept
        for engines within the quota, end when they were to."""
        self.prefetch = prefetch
        self.lease_ttl_ns = host.lease_ttl_ms * 1_000_000
        self.host.hints.pin_max_s = host.pin_max_s
        self._pin_share = host.pin_share
        self.set_capacity(host.capacity, host.min_bytes)

    def _in_flight_bytes(self, capacity_bytes: int) -> int:
        # Beyond it a batch would find no slots, and cut the prefix, rather than wait for its turn.
        return min(self.prefetch.bytes_in_flight, int(capacity_bytes * WRITING_SHARE_MAX))

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

    async def drain(self, budget_s: float, enough: asyncio.Event | None = None) -> int:
        """Write what tiers are to get and lack, at most `budget_s`, and not once there is
        `enough`; the count left undone.

        A tier that takes no writes is not waited for, but a flush that keeps blocks from being
        written is.
        """
        enough = enough or asyncio.Event()
        end = asyncio.get_running_loop().time() + budget_s
        if self.tiers:
            await self.proofs.finish(budget_s / 2)
        left = self.backups.flush()
        while self.backups.drainable and asyncio.get_running_loop().time() < end:
            if enough.is_set():
                break
            await asyncio.sleep(0.01)
            left = self.backups.flush()
        return self.backlog() + left

    def left(self) -> int:
        """Blocks that a drain is still to write, once a tier."""
        return self.backlog() + sum(queue.undone for queue in self.backups.queues)

    def backlog(self) -> int:
        """Blocks that wait for a checksum or a backup, in flight included, once a tier."""
        return self.backups.blocks

    # --- namespaces -----------------------------------------------------------------

    def register(self, namespace: Namespace, *, to_store: bool = True) -> Space:
        """The space of a namespace, with memory ready for its first blocks if it is to store."""
        if namespace.digest not in self.host.spaces and not self.endings.make_way():
            raise RefusedError(f"this tierd holds {SPACES_MAX} namespaces already")
        space = self.host.open_space(namespace)
        if space is None:
            raise RefusedError(
                f"a block of {namespace.block_bytes} bytes exceeds host.capacity "
                f"({self.host.capacity_bytes} bytes)"
            )
        self.endings.names.pop(namespace.digest, None)
        space.sessions += 1
        space.worthless = space.worthless or namespace.digest in self.endings.worthless
        space.used_s = self.host.now_s
        if to_store:
            self.memory.make_room_ahead(space, 0)
        return space

    def unregister(self, space: Space, known_s: int = 0) -> None:
        """One session less uses the space; its blocks stay, unless they are worthless.

        For `known_s` its client may come back with what it has mapped.
        """
        assert space.sessions > 0
        space.sessions -= 1
        if known_s:
            until_s = self._clock.monotonic_ns() // NS + known_s + KNOWN_MORE_S
            space.known_until_s = max(space.known_until_s, until_s)

    # --- acquire --------------------------------------------------------------------

    def acquire_now(
        self,
        owner: int,
        spaces: list[Space],
        hashes: Sequence[bytes],
        prefill_tokens_per_s: int = 0,
    ) -> AcquiredNow:
        """Lease the resident prefix if no tier is needed."""
        self.warmings.asked_ns = self._clock.monotonic_ns()
        if prefill_tokens_per_s:
            self.demand.of(spaces[0]).prefill_tokens_per_s = prefill_tokens_per_s
        parts = [(space, self.host.prefix(space, hashes)) for space in spaces]
        count = min(len(slots) for _, slots in parts)
        if count < len(hashes) and (self.tiers or self._unproven(spaces, hashes)):
            return AcquiredNow(False, None, count)
        if count == 0 or not self._may_lease(owner, spaces, count):
            return AcquiredNow(True, None, 0)
        self.counters["acquired_blocks_total"] += count
        cut = [(space, slots[:count]) for space, slots in parts]
        lease = self.host.grant(owner, cut, self._expiry_ns())
        self.lives.leased(lease)
        return AcquiredNow(True, lease, count)

    def acquire_deadline_ns(
        self, space: Space, missing_blocks: int, *, waited_ms: int, client_ms: int
    ) -> int:
        """When an ACQUIRE that came just now is answered at the latest, CLOCK_MONOTONIC."""
        return deadline_ns(
            self.prefetch,
            now_ns=self._clock.monotonic_ns(),
            waited_ms=waited_ms,
            client_ms=client_ms,
            missing_tokens=missing_blocks * space.namespace.block_tokens,
        )

    async def acquire(
        self,
        owner: int,
        spaces: list[Space],
        hashes: Sequence[bytes],
        deadline_ns: int,
        *,
        patience: Patience | None = None,
        waited_ms: int = 0,
        prefill_tokens_per_s: int = 0,
    ) -> SlotLease | None:
        """Promote what tiers have, verify, and lease the longest prefix by the deadline.

        `deadline_ns` is CLOCK_MONOTONIC; `patience` can end the wait sooner. With the engine's
        speed of computing prompts, what would be computed sooner is not promoted. Cancelling
        gives up the wait and leases nothing.
        """
        began_ns = self._clock.monotonic_ns()
        waiter = Waiter(spaces, began_ns - waited_ms * MS)
        tokens = spaces[0].namespace.block_tokens
        patience = patience or Patience()
        try:
            if self._unproven(spaces, hashes):
                await self._prove(spaces, hashes, deadline_ns, patience)
            waiter.refresh(self.host, hashes)
            resident = min(waiter.length(at, hashes) for at in range(len(spaces)))
            if resident and not self._may_lease(owner, spaces, resident):
                return None
            worth = Worth(
                self.prefetch,
                self._break_even,
                resident_tokens=resident * tokens,
                prefill_tokens_per_s=prefill_tokens_per_s,
            )
            if self.tiers and worth.asking(len(hashes) * tokens):
                lookup = Lookup(waiter, hashes, self.tiers, self.promotions, worth)
                await self._promote(lookup, deadline_ns, patience)
                self.counters["loads_refused_total"] += worth.refused
                if worth.refused:
                    self._note_unserved(Why.NOT_WORTH, lookup)
                waiter.refresh(self.host, hashes)
            lease = waiter.conclude(self.host, owner, hashes, self._expiry_ns())
            if lease is not None:
                self.lives.leased(lease)
                count = len(lease.parts[0][1])
                self.counters["promoted_blocks_acquired_total"] += max(0, count - resident)
                self.counters["acquired_blocks_total"] += count
                if waiter.brought:
                    brought = waiter.brought
                    lease.sources = bytes(1 + brought.get(h, -1) for h in hashes[:count])
            if self._clock.monotonic_ns() > deadline_ns + LATE_NS:
                self.counters["answers_late_total"] += 1
            return lease
        finally:
            waiter.close(self.host)
            self.counters["waited_us_total"] += (self._clock.monotonic_ns() - began_ns) // 1000

    def _may_lease(self, owner: int, spaces: Sequence[Space], count: int) -> bool:
        """Whether a session may have as many blocks of each space leased; counted if not."""
        if self.host.may_lease(owner, count * len(spaces)):
            return True
        self.refusals.leased(spaces[0], self.clients.get(owner, ""), self.host.now_s)
        return False

    def loaded(
        self, spaces: Sequence[Space], wanted: int, sources: Sequence[int], prefill_us: int
    ) -> None:
        """Count what engines did not compute because they had loaded it, of `wanted` blocks.

        `sources` are the blocks by what had them: host memory, then each tier. What waiting and
        copying cost the engines is not taken off.
        """
        block_tokens = spaces[0].namespace.block_tokens
        blocks = sum(sources)
        size_bytes = blocks * sum(space.namespace.block_bytes for space in spaces)
        brought = 0
        for tier, count in zip(self.tiers, sources[1:], strict=False):
            tier.counters["loaded_blocks_total"] += count
            tier.counters["loaded_tokens_total"] += count * block_tokens
            brought += count
        self.counters["requested_blocks_total"] += wanted
        self.counters["requested_tokens_total"] += wanted * block_tokens
        self.counters["loaded_blocks_total"] += blocks
        self.counters["loaded_bytes_total"] += size_bytes
        self.counters["host_loaded_blocks_total"] += blocks - brought
        self.counters["host_loaded_tokens_total"] += (blocks - brought) * block_tokens
        self.counters["saved_tokens_total"] += blocks * block_tokens
        self.counters["saved_us_total"] += prefill_us
        tally = self.demand.of(spaces[0])
        tally.requested_tokens += wanted * block_tokens
        tally.loaded_tokens += blocks * block_tokens
        tally.loaded_bytes += size_bytes

    def _unproven(self, spaces: Sequence[Space], hashes: Sequence[bytes]) -> bool:
        """Whether some of the blocks are from a life before, and not verified yet."""
        return any(self.host.unproven(space, hashes) for space in dict.fromkeys(spaces))

    async def _prove(
        self, spaces: Sequence[Space], hashes: Sequence[bytes], deadline_ns: int, patience: Patience
    ) -> None:
        """Have what a request asks for verified, as far as the deadline allows."""
        left_s = (deadline_ns - self._clock.monotonic_ns()) / 1e9
        with contextlib.suppress(TimeoutError):
            async with patience.within(max(0.0, left_s)), asyncio.TaskGroup() as group:
                for space in dict.fromkeys(spaces):
                    slots = self.host.unproven(space, hashes)
                    group.create_task(self.proofs.prove(space, slots))

    async def _promote(self, lookup: Lookup, deadline_ns: int, patience: Patience) -> None:
        """Have the tiers asked, and what they have promoted, as far as the deadline allows."""
        asks = [self.spawn(partial(lookup.ask, at), "lookup") for at in range(lookup.ranks)]
        left_s = (deadline_ns - self._clock.monotonic_ns()) / 1e9
        try:
            async with patience.within(max(0.0, left_s)):
                await lookup.finish(asks)
        except TimeoutError:
            self._note_unserved(Why.LATE, lookup)
            if patience.ended:
                self.counters["best_effort_ended_total"] += 1
            else:
                self.counters["deadline_missed_total"] += 1
                lookup.blame()
        finally:
            # Not waited for: a backend may take its time to let go, a deadline does not.
            for ask in asks:
                ask.cancel()

    def _note_unserved(self, why: Why, lookup: Lookup) -> None:
        self.unserveds.note(lookup.unserved(why, self._clock.monotonic_ns() // NS))

    # --- store ----------------------------------------------------------------------

    def reserve(
        self, owner: int, space: Space, hashes: Sequence[bytes], parents: Sequence[bytes]
    ) -> SlotReservation:
        """Slots for new blocks. Blocks that are there and that a tier lacks are offered again."""
        reservation = self.memory.reserve(owner, space, hashes, parents)
        self.refusals.stored(space, reservation, self.host.now_s)
        if self.tiers:
            self.backups.offer_again(space, hashes, reservation.slots)
        return reservation

    def commit(self, owner: int, reservation_id: int, count: int) -> int | None:
        """Make the first `count` slots readable; how many became so, None if not the owner's."""
        reservation = self.host.reservations.get(reservation_id)
        if reservation is not None:
            reservation.space.reuse.pass_time(self._clock.monotonic_ns() / NS)
        ready = self.host.commit(owner, reservation_id, count)
        if ready is None or reservation is None:
            return None
        self.counters["stored_blocks_total"] += len(ready)
        self.counters["stored_bytes_total"] += len(ready) * reservation.space.namespace.block_bytes
        if self.tiers:
            self.backups.offer(reservation.space, ready, WriteMoment.STORED)
        # Else no block leaves the arena without a tier's asking, and nobody reads its checksum.
        if self.lives.kept:
            self.backups.sum_soon(reservation.space, ready)
        return len(ready)

    def hint(self, spaces: Sequence[Space], hashes: Sequence[bytes], hint: PrefixHint) -> None:
        """An engine says how a prefix will be used."""
        self.host.hint(spaces, hashes, hint, self._clock.monotonic_ns())

    def teach(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        uses: Sequence[int],
        ages_s: Sequence[int],
    ) -> None:
        """Learn of uses that somebody else has counted; NEVER is the age where none is known."""
        now_ms = self._clock.monotonic_ns() // MS
        self.host.teach(namespace, hashes, uses, ages_s, now_ms)

    def drop_owner(self, owner: int) -> None:
        """A session's peer has closed: its reservations are free; its leases end at their time."""
        self.counters["reservations_dropped_total"] += self.host.drop_owner(owner)

    async def _housekeeping_loop(self) -> None:
        while True:
            self.host.now_s = self._clock.monotonic_ns() // NS
            await asyncio.sleep(HOUSEKEEPING_S)
            self.counters["leases_expired_total"] += self.host.expire(self._clock.monotonic_ns())
            while self.host.expire_hints(self._clock.monotonic_ns()):
                await asyncio.sleep(0)
            self.memory.keep_hollow()
            self.lives.tick()
            await self.endings.tick()
            self.memory.manager.flush()
            self.copies.watch()
            self.backups.note_capacities()

    def _expiry_ns(self) -> int:
        return self._clock.monotonic_ns() + self.lease_ttl_ns

    # --- status ---------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """What `tierd status` shows; plain values only."""
        host = self.host
        spaces = list(host.spaces.values())
        blocks = sum(len(space.chain) for space in spaces)
        counters = Counter(self.counters)
        counters["evicted_blocks_total"] = host.evicted_blocks
        for why in Evicted:
            counters[f"evicted_{why.value}_blocks_total"] = host.evicted[why]
        counters["revived_blocks_total"] = host.revived_blocks
        counters.update(host.hints.counters)
        asked = counters["requested_blocks_total"]
        here = counters["host_loaded_blocks_total"]
        return {
            "version": __version__,
            "epoch": self.epoch.hex(),
            "uptime_s": round((self._clock.monotonic_ns() - self._started_ns) / 1e9, 3),
            "hit_ratio": _ratio(counters["loaded_blocks_total"], asked),
            "host": {
                "capacity_bytes": host.capacity_bytes,
                "limit_bytes": host.limit_bytes,
                "min_bytes": self.watch.pressure.min_bytes,
                "allocated_bytes": host.allocated_bytes,
                "populated_bytes": self.memory.arena.populated_bytes,
                "used_bytes": sum(len(s.chain) * s.slot_bytes for s in spaces),
                "blocks": blocks,
                **self.memory.arena.placement.status(),
                "eviction": host.eviction,
                "hit_ratio": _ratio(here, asked),
                "hit_ratio_at_twice": _ratio(
                    min(here + counters["ghost_blocks_total"], asked), asked
                ),
                "writing_blocks": sum(len(s.writing) for s in spaces),
                "leaving_blocks": sum(len(s.leaving) for s in spaces),
                "proven_blocks": sum(s.proven_blocks for s in spaces),
                "unproven_blocks": sum(len(s.unproven) for s in spaces),
                "doubtful_blocks": sum(len(s.doubtful) for s in spaces),
                "leases": len(host.leases),
                "pinned_bytes": host.hints.kept_bytes,
                "backlog_blocks": self.backlog(),
            },
            "prefetch": {"min_tokens": self.prefetch.min_tokens},
            "hotset": {} if self.snapshots is None else self.snapshots.status(),
            "copies": self.copies.status(),
            "storage": [
                {
                    **queue.tier.status(),
                    **queue.status(),
                    "hit_ratio": _ratio(queue.tier.counters["loaded_blocks_total"], asked),
                }
                for queue in self.backups.queues
            ],
            "namespaces": self._shown_spaces(),
            "demand": self.demand.status(),
            "clients": dict(Counter(self.clients.values()).most_common(CLIENTS_SHOWN_MAX)),
            "counters": dict(sorted(counters.items())),
        }

    def _shown_spaces(self) -> list[dict[str, object]]:
        shown: list[dict[str, object]] = [
            {
                "digest": space.digest.hex(),
                **_shown(space.namespace),
                "blocks": len(space.chain),
                "memory_bytes": space.memory_bytes,
                "sessions": space.sessions,
            }
            for space in self.host.spaces.values()
            if not space.worthless
        ]
        nothing = {"blocks": 0, "memory_bytes": 0, "sessions": 0}
        for digest, namespace in self.endings.names.items():
            shown.append({"digest": digest.hex(), **_shown(namespace), **nothing})
        # The frame has room for as many.
        return sorted(shown, key=lambda entry: not entry["sessions"])[:SPACES_MAX]

    def check(self) -> None:
        """Assert the invariants of core, ledger, masks and queues; for tests."""
        self.memory.check()
        self.backups.check()


def _ratio(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def _shown(namespace: Namespace) -> dict[str, object]:
    """A namespace's fields for STATUS, cut so that SPACES_MAX of them fit one frame."""
    shown = {**namespace.to_fields(), "hash_root": namespace.hash_root.hex()}
    shown["groups"] = " ".join(namespace.groups)
    return {
        name: value[:SHOWN_CHARS_MAX] if isinstance(value, str) else value
        for name, value in shown.items()
    }
