"""The node: composes the parts of the daemon, and is the only interface that sessions use.

Each method passes a call to one part. The node is independent of sockets: the server and the
simulation drive the same code.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Final

from tierd.clock import Clock
from tierd.config import HostConfig, PrefetchConfig, PrefetchPolicy
from tierd.core.hints import Hints, PrefixHint
from tierd.core.host import HostTier
from tierd.core.l2.leases import SlotLease
from tierd.core.l2.pressure import Pressure
from tierd.core.l2.reservations import SlotReservation
from tierd.core.l2.space import Space
from tierd.core.l2.storing import WRITING_SHARE_MAX
from tierd.core.l3.prefetch import MS
from tierd.core.l3.unserved import Unserveds
from tierd.core.l3.writes import WriteMoment
from tierd.daemon.copies.copying import Send as SendCopied
from tierd.daemon.copies.copying import SessionCopies
from tierd.daemon.copies.processes import CopyProcesses
from tierd.daemon.jobs.explain import Explainer
from tierd.daemon.jobs.flush import Flushes, FlushJob
from tierd.daemon.jobs.hotset import Snapshots
from tierd.daemon.jobs.inventory import InventoryListings
from tierd.daemon.jobs.scrub import ScrubJob, Scrubs
from tierd.daemon.jobs.warming import Warming, Warmings
from tierd.daemon.l2.ending import SPACES_MAX, Endings
from tierd.daemon.l2.incarnations import Incarnations
from tierd.daemon.l2.memory import HostMemory, SegmentListener
from tierd.daemon.l2.pressure import Machine, MemoryWatch
from tierd.daemon.l2.verification import Verification
from tierd.daemon.l3.backup import Backups
from tierd.daemon.l3.learning import Learning
from tierd.daemon.l3.promotion import Promotions
from tierd.daemon.l3.tier import StorageTier
from tierd.daemon.lifecycle.housekeeping import keep_house
from tierd.daemon.lifecycle.service import ServiceManager
from tierd.daemon.lifecycle.tasks import Tasks, Work
from tierd.daemon.options import NodeOptions
from tierd.daemon.session.acquiring import AcquiredNow, Acquiring, Patience
from tierd.daemon.session.demand import Demand
from tierd.daemon.session.refusals import Refusals
from tierd.daemon.session.savings import count_loaded
from tierd.daemon.status import status_of
from tierd.errors import RefusedError
from tierd.memory.arena import Segment
from tierd.types import Namespace
from tierd.wire import messages as m

NS: Final = 1_000_000_000

KNOWN_MORE_S: Final = 2
"""Margin of the time for which a client may remember its segments: the core's clock advances once a
second."""


class Node:
    """Host memory, the storage tiers, and the work between them."""

    def __init__(
        self,
        options: NodeOptions,
        *,
        tiers: Sequence[StorageTier],
        clock: Clock,
        manager: ServiceManager | None = None,
        executor: Executor | None = None,
        machine: Machine | None = None,
    ) -> None:
        """Host memory shrinks when `machine`, if given, is short of memory."""
        capacity_bytes = options.capacity_bytes
        self.epoch = options.epoch
        self.prefetch = options.prefetch
        self.lease_ttl_ns = options.lease_ttl_ms * 1_000_000
        self._pin_share = options.pin_share
        hints = Hints(int(capacity_bytes * options.pin_share), options.pin_max_s)
        self.host = HostTier(capacity_bytes, options.segment_bytes, hints, options.eviction)
        self.host.pass_time(clock.monotonic_ns() // NS)
        self.tiers = list(tiers)
        self.counters: Counter[str] = Counter()
        self.tasks = Tasks(self.counters)
        self.spawn = self.tasks.spawn
        self.demand = Demand()
        self.clients: dict[int, str] = {}
        """The name that each client gave in HELLO, by the session's owner number."""
        self.memory = HostMemory(
            self.host, clock, self.counters, executor, options.placement, manager
        )
        configs = [tier.config for tier in tiers]
        self.threads = self.memory.threads
        self.incarnations = Incarnations(self.memory, configs, self.epoch, clock)
        self.verification = Verification(self.memory)
        self.endings = Endings(self.memory)
        self.refusals = Refusals(self.counters)
        self.backups = Backups(self.memory, self.tiers, clock)
        self.learning = Learning(self.host, self.backups, clock, self.counters, self.tasks.guarded)
        in_flight = self._in_flight_bytes(capacity_bytes)
        self.promotions = Promotions(self.memory, self.backups, self.tiers, self.spawn, in_flight)
        self.flushes = Flushes(self.memory, self.backups, self.promotions, self.tiers, self.spawn)
        self.scrubs = Scrubs(
            self.memory, self.backups, self.promotions.read_scheduler, self.flushes, self.tiers
        )
        self.unserveds = Unserveds()
        self.explainer = Explainer(
            self.memory, self.backups, self.flushes, self.unserveds, clock, self.spawn
        )
        self.warmings = Warmings(
            self.memory,
            self.backups,
            self.promotions,
            self.verification,
            self.flushes,
            self.tiers,
            clock,
            self.spawn,
        )
        self.watch = MemoryWatch(self.memory, Pressure(capacity_bytes, options.min_bytes), machine)
        self.copies = CopyProcesses(
            self.memory,
            clock,
            self.counters,
            bandwidth_max=options.copy.bandwidth_max,
            job_timeout_ms=options.copy.job_timeout_ms,
            hold=self.incarnations.copying,
        )
        self.snapshots: Snapshots | None = None
        """Writes the hot set; None without a state directory."""
        self._acquiring = Acquiring(
            self.memory,
            self.promotions,
            self.verification,
            self.incarnations,
            self.refusals,
            self.unserveds,
            self.tiers,
            clock,
            self.spawn,
        )
        self._clock = clock
        self._started_ns = clock.monotonic_ns()

    # --- lifecycle ------------------------------------------------------------------

    async def run(self, ready: Callable[[], Awaitable[None]]) -> None:
        """Run the background work until `ready()` returns."""
        await self.tasks.run(self._workers(), ready, self.copies.close)

    def _workers(self) -> dict[str, Work]:
        house = (self.memory, self.incarnations, self.endings, self.copies, self.backups)
        workers: dict[str, Work] = {
            "checksum": self.backups.checksums.run,
            "populate": self.memory.population.run,
            "verify": self.verification.run,
            "learning": self.learning.run,
            "flushes of other nodes": self.flushes.follow,
            "housekeeping": partial(keep_house, *house, self._clock, self.counters),
            "pressure": partial(self.watch.run, self._clock),
        }
        for renewal in self.backups.renewals:
            workers[f"uses-{renewal.tier.name}"] = renewal.tell
            workers[f"evicting-{renewal.tier.name}"] = renewal.check
        for queue in self.backups.queues:
            for number in range(queue.tier.config.write_batches):
                name = f"backup-{queue.tier.name}-{number}"
                workers[name] = partial(self.backups.write, queue)
        return workers

    def close(self) -> None:
        """Release descriptors and memory, after `run`; idempotent."""
        self.incarnations.close()
        self.memory.arena.close()
        if self.snapshots is not None:
            self.snapshots.close()

    def configure(self, host: HostConfig, prefetch: PrefetchConfig) -> None:
        """Apply the live keys of a configuration; leases, and pins within the quota, stay."""
        self.prefetch = prefetch
        self.lease_ttl_ns = host.lease_ttl_ms * 1_000_000
        self.host.set_pin_max(host.pin_max_s)
        self._pin_share = host.pin_share
        self.set_capacity(host.capacity, host.min_bytes)

    def set_capacity(self, capacity_bytes: int, min_bytes: int) -> None:
        """Change the capacity; excess memory is given back within seconds.

        The records of evicted blocks, which are small, keep the size of the first capacity.
        """
        self.watch.pressure.resize(capacity_bytes, min_bytes)
        self.host.set_capacity(capacity_bytes, self._pin_share)
        self.host.set_limit(self.watch.pressure.limit_bytes)
        self.promotions.read_scheduler.resize(self._in_flight_bytes(capacity_bytes))
        self.backups.resize()

    def _in_flight_bytes(self, capacity_bytes: int) -> int:
        # Beyond this a batch would find no slots and shorten the prefix, instead of waiting.
        return min(self.prefetch.bytes_in_flight, int(capacity_bytes * WRITING_SHARE_MAX))

    async def drain(self, budget_s: float, enough: asyncio.Event | None = None) -> int:
        """Write the blocks that tiers still lack, for at most `budget_s` or until `enough` is set.

        Returns the number of blocks left. Does not wait for a tier that accepts no writes, but
        waits for a flush that withholds blocks.
        """
        end_s = asyncio.get_running_loop().time() + budget_s
        if self.tiers:
            await self.verification.finish(budget_s / 2)
        return await self.backups.drain(end_s, enough or asyncio.Event())

    def left(self) -> int:
        """Blocks that a drain still has to write, counted once per tier."""
        return self.backups.left

    def backlog(self) -> int:
        """Blocks that wait for a checksum or a backup, or are in flight, counted once per tier."""
        return self.backups.blocks

    # --- sessions -------------------------------------------------------------------

    def count(self, counter: str) -> None:
        """Count an event of a session."""
        self.counters[counter] += 1

    def name_client(self, owner: int, client: str) -> None:
        """Note the name of a session's client."""
        self.clients[owner] = client

    def forget_client(self, owner: int) -> None:
        """Forget the name of a session's client; see also `drop_owner`."""
        self.clients.pop(owner, None)

    def listen(self, listener: SegmentListener) -> None:
        """Call `listener` for each segment that is created or filled again, until `unlisten`."""
        self.memory.listeners.append(listener)

    def unlisten(self, listener: SegmentListener) -> None:
        """Undo `listen`."""
        self.memory.listeners.remove(listener)

    def writer_guard(self) -> int | None:
        """See `Incarnations.guard`. Raises OSError."""
        return self.incarnations.guard()

    def copies_of(self, owner: int, send: SendCopied) -> SessionCopies:
        """Return the copies of a new session."""
        return SessionCopies(owner, self.copies, send)

    def inventory_of(self, send: Callable[[m.FromDaemon], None]) -> InventoryListings:
        """Return the inventory listings of a new session."""
        return InventoryListings(self.host, self.tiers, self._clock, self.spawn, send)

    @property
    def is_best_effort(self) -> bool:
        """Whether READY ends an ACQUIRE's wait."""
        return self.prefetch.policy is PrefetchPolicy.BEST_EFFORT

    # --- namespaces -----------------------------------------------------------------

    def register(self, namespace: Namespace, *, to_store: bool = True) -> Space:
        """Return the space of a namespace, with room for its first blocks if it will store.

        Raises RefusedError.
        """
        if namespace.digest not in self.host.spaces and not self.endings.make_room():
            raise RefusedError(f"this tierd holds {SPACES_MAX} namespaces already")
        space = self.host.open_space(namespace)
        if space is None:
            raise RefusedError(
                f"a block of {namespace.block_bytes} bytes exceeds host.capacity "
                f"({self.host.capacity_bytes} bytes)"
            )
        self.endings.names.pop(namespace.digest, None)
        worthless = namespace.digest in self.endings.worthless
        self.host.register(space, worthless=worthless)
        if to_store:
            self.memory.make_room_ahead(space, 0)
        return space

    def unregister(self, space: Space, known_s: int = 0, *, worthless: bool = False) -> None:
        """End one session's registration; the blocks stay unless they are `worthless`.

        The client may come back within `known_s` with the segments that it has mapped. `worthless`
        means that no request will ask for the blocks again.
        """
        until_s = self._clock.monotonic_ns() // NS + known_s + KNOWN_MORE_S if known_s else 0
        self.host.unregister(space, until_s, worthless=worthless)

    def namespace_of(self, digest: bytes) -> Namespace | None:
        """The namespace of a digest; None if it is unknown. See `Endings.named`."""
        return self.endings.named(digest)

    def live_segments(self, space: Space) -> Iterator[tuple[int, Segment]]:
        """Return the segments of a space that are not decommitted, with their numbers."""
        segments = self.memory.arena.segments(space)
        return ((index, segments[index]) for index, live in enumerate(space.live) if live)

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
        return self._acquiring.now(
            owner, self.clients.get(owner, ""), spaces, hashes, self.lease_ttl_ns
        )

    def acquire_deadline_ns(
        self, space: Space, missing_blocks: int, *, waited_ms: int, client_ms: int
    ) -> int:
        """Return the deadline of an ACQUIRE that arrives now, in CLOCK_MONOTONIC."""
        return self._acquiring.deadline_ns(
            self.prefetch, space, missing_blocks, waited_ms=waited_ms, client_ms=client_ms
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
        """Verify and promote blocks until the deadline, and lease the longest readable prefix.

        `deadline_ns` is CLOCK_MONOTONIC; `patience` can end the wait sooner. With the engine's
        prefill speed given, blocks that the engine would compute faster are not promoted. A
        cancelled call leases nothing.
        """
        return await self._acquiring.run(
            owner,
            self.clients.get(owner, ""),
            spaces,
            hashes,
            deadline_ns,
            prefetch=self.prefetch,
            lease_ttl_ns=self.lease_ttl_ns,
            patience=patience or Patience(),
            waited_ms=waited_ms,
            prefill_tokens_per_s=prefill_tokens_per_s,
        )

    def release(self, lease_id: int, owner: int) -> None:
        """End a lease before its time; does nothing unless the owner holds it."""
        self.host.release(lease_id, owner)

    def note_request(
        self, spaces: Sequence[Space], hashes: Sequence[bytes], request: int, own: int
    ) -> None:
        """Note a request for a prefix, to count its uses later; see `Learning.note`."""
        self.learning.note(spaces, hashes, request, own)

    def loaded(
        self, spaces: Sequence[Space], wanted: int, sources: Sequence[int], prefill_us: int
    ) -> None:
        """See `count_loaded`."""
        counted = (self.counters, self.demand, self.tiers)
        count_loaded(*counted, spaces, wanted, sources, prefill_us)

    # --- store ----------------------------------------------------------------------

    def reserve(
        self, owner: int, space: Space, hashes: Sequence[bytes], parents: Sequence[bytes]
    ) -> SlotReservation:
        """Reserve slots for new blocks, and offer present blocks again to tiers that lack them."""
        reservation = self.memory.reserve(owner, space, hashes, parents)
        self.refusals.stored(space, reservation, self.host.now_s)
        if self.tiers:
            self.backups.offer_again(space, hashes, reservation.slots)
        return reservation

    def make_room_ahead(self, space: Space, count: int) -> None:
        """Make room for the next `count` blocks before they are reserved."""
        self.memory.make_room_ahead(space, count)

    def commit_count(self, owner: int, reservation_id: int, count: int) -> int:
        """Return how many blocks `commit` with these arguments will make readable."""
        return self.host.commit_count(owner, reservation_id, count)

    def commit(self, owner: int, reservation_id: int, count: int) -> int | None:
        """Make the first `count` slots readable; returns how many became so.

        None if the reservation is not the owner's.
        """
        reservation = self.host.reservations.get(reservation_id)
        now_s = self._clock.monotonic_ns() / NS
        ready = self.host.commit(owner, reservation_id, count, now_s)
        if ready is None or reservation is None:
            return None
        space = reservation.space
        self.counters["stored_blocks_total"] += len(ready)
        self.counters["stored_bytes_total"] += len(ready) * space.namespace.block_bytes
        if self.tiers:
            self.backups.offer(space, ready, WriteMoment.STORED)
        # Only the next incarnation needs checksums in the ledger; a backup computes its own.
        if self.incarnations.kept:
            self.backups.compute_checksums(space, ready)
        return len(ready)

    def abort(self, owner: int, reservation_id: int) -> None:
        """Free the slots of a reservation, which its owner no longer writes."""
        self.host.abort(owner, reservation_id)

    def hint(self, spaces: Sequence[Space], hashes: Sequence[bytes], hint: PrefixHint) -> None:
        """Note an engine's hint about a prefix."""
        self.host.hint(spaces, hashes, hint, self._clock.monotonic_ns())

    def teach(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        uses: Sequence[int],
        ages_s: Sequence[int],
    ) -> None:
        """Add uses that another node has counted; the age NEVER stands for an unknown one."""
        now_ms = self._clock.monotonic_ns() // MS
        self.host.teach(namespace, hashes, uses, ages_s, now_ms)

    def drop_owner(self, owner: int) -> None:
        """Free the reservations of a session that has ended; its leases end at their time."""
        self.counters["reservations_dropped_total"] += self.host.drop_owner(owner)

    # --- operators' orders ----------------------------------------------------------

    def flush(self, prefix: str, *, host: bool, numbers: Sequence[int]) -> FlushJob:
        """Start a flush, which runs until it is done or the daemon stops. Raises RefusedError."""
        flush = self.flushes.begin(prefix, host=host, numbers=numbers)
        self.spawn(partial(self.flushes.run, flush), "flush")
        return flush

    def scrub(self, numbers: Sequence[int], bytes_per_s: int) -> ScrubJob:
        """Start a scrub, which runs until it is done or the daemon stops. Raises RefusedError."""
        scrub = self.scrubs.begin(numbers, bytes_per_s)
        self.spawn(partial(self.scrubs.run, scrub), "scrub")
        return scrub

    @property
    def current_scrub(self) -> ScrubJob | None:
        """The scrub that is running."""
        return self.scrubs.current

    async def warm(self, warming: Warming, deadline_s: float) -> None:
        """See `Warmings.run`."""
        await self.warmings.run(warming, deadline_s)

    async def explain(self, digest: bytes, hashes: Sequence[bytes]) -> dict[str, object]:
        """See `Explainer.explain`."""
        return await self.explainer.explain(digest, hashes)

    # --- status ---------------------------------------------------------------------

    @property
    def tier_count(self) -> int:
        """Number of storage tiers; a tier's number is below it."""
        return len(self.tiers)

    def status(self) -> dict[str, object]:
        """Return the status document; plain values only."""
        return status_of(self, (self._clock.monotonic_ns() - self._started_ns) / 1e9)

    def check(self) -> None:
        """Assert the invariants of core, ledger, masks and queues; for tests."""
        self.memory.check()
        self.backups.check()
