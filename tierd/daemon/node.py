"""One node's daemon, as sessions see it: what they may ask for, and who carries it out.

Composes the parts, and hands each call on to one of them. It knows nothing of sockets; the
server and the simulation drive the same code.
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
from tierd.daemon.copies.copying import Copies, SessionCopies
from tierd.daemon.copies.copying import Send as SendCopied
from tierd.daemon.jobs.explain import Explainer
from tierd.daemon.jobs.flush import Flushes
from tierd.daemon.jobs.hotset import Snapshots
from tierd.daemon.jobs.inventory import InventoryListings
from tierd.daemon.jobs.scrub import Scrubs
from tierd.daemon.jobs.warming import Warmings
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
"""Added to how long a client may remember what it has mapped: clocks are told every second."""


class Node:
    """L2, its storage tiers, and the work between them."""

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
        """L2 keeps within what `machine` has for it, if that is given."""
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
        """What each session's client calls itself, by its owner."""
        self.memory = HostMemory(
            self.host, clock, self.counters, executor, options.placement, manager
        )
        self.lives = Incarnations(self.memory, [tier.config for tier in tiers], self.epoch, clock)
        self.verification = Verification(self.memory)
        self.endings = Endings(self.memory)
        self.refusals = Refusals(self.counters)
        self.backups = Backups(self.memory, self.tiers, clock)
        self.learning = Learning(self.host, self.backups, clock, self.counters, self.tasks.guarded)
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
            self.verification,
            self.flushes,
            self.tiers,
            clock,
            self.spawn,
        )
        self.watch = MemoryWatch(self.memory, Pressure(capacity_bytes, options.min_bytes), machine)
        self.copies = Copies(
            self.memory,
            clock,
            self.counters,
            bandwidth_max=options.copy.bandwidth_max,
            job_timeout_ms=options.copy.job_timeout_ms,
            hold=self.lives.copying,
        )
        self.snapshots: Snapshots | None = None
        """What keeps the hot set, where there is a directory for it."""
        self._acquiring = Acquiring(
            self.memory,
            self.promotions,
            self.verification,
            self.lives,
            self.refusals,
            self.unserveds,
            self.tiers,
            clock,
            self.spawn,
        )
        self._clock = clock
        self._started_ns = clock.monotonic_ns()

    # --- life -----------------------------------------------------------------------

    async def run(self, ready: Callable[[], Awaitable[None]]) -> None:
        """Run the background work around `ready()`, and end it when `ready` returns."""
        await self.tasks.run(self._workers(), ready, self.copies.close)

    def _workers(self) -> dict[str, Work]:
        house = (self.memory, self.lives, self.endings, self.copies, self.backups)
        workers: dict[str, Work] = {
            "checksum": self.backups.compute_checksums,
            "populate": self.memory.populate,
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
        """Give back descriptors and memory, once `run` has ended; idempotent."""
        self.lives.close()
        self.memory.arena.close()
        if self.snapshots is not None:
            self.snapshots.close()

    def configure(self, host: HostConfig, prefetch: PrefetchConfig) -> None:
        """Go by these from now on, but for what only a new daemon reads. Leases, and what is kept
        for engines within the quota, end when they were to."""
        self.prefetch = prefetch
        self.lease_ttl_ns = host.lease_ttl_ms * 1_000_000
        self.host.set_pin_max(host.pin_max_s)
        self._pin_share = host.pin_share
        self.set_capacity(host.capacity, host.min_bytes)

    def set_capacity(self, capacity_bytes: int, min_bytes: int) -> None:
        """Have another capacity from now on; what is too much is given back within seconds.

        Not followed: the sizes of what is remembered of blocks, which cost little.
        """
        self.watch.pressure.resize(capacity_bytes, min_bytes)
        self.host.set_capacity(capacity_bytes, self._pin_share)
        self.host.set_limit(self.watch.pressure.limit_bytes)
        self.promotions.turns.resize(self._in_flight_bytes(capacity_bytes))
        self.backups.resize()

    def _in_flight_bytes(self, capacity_bytes: int) -> int:
        # Beyond it a batch would find no slots, and cut the prefix, rather than wait for its turn.
        return min(self.prefetch.bytes_in_flight, int(capacity_bytes * WRITING_SHARE_MAX))

    async def drain(self, budget_s: float, enough: asyncio.Event | None = None) -> int:
        """Write what tiers are to get and lack, at most `budget_s`, and not once there is
        `enough`; the count left undone.

        A tier that takes no writes is not waited for, but a flush that keeps blocks from being
        written is.
        """
        end_s = asyncio.get_running_loop().time() + budget_s
        if self.tiers:
            await self.verification.finish(budget_s / 2)
        return await self.backups.drain(end_s, enough or asyncio.Event())

    def left(self) -> int:
        """Blocks that a drain is still to write, once a tier."""
        return self.backups.left

    def backlog(self) -> int:
        """Blocks that wait for a checksum or a backup, in flight included, once a tier."""
        return self.backups.blocks

    # --- sessions -------------------------------------------------------------------

    def count(self, counter: str) -> None:
        """Count an event of a session."""
        self.counters[counter] += 1

    def name_client(self, owner: int, client: str) -> None:
        """A session's client has said what it calls itself."""
        self.clients[owner] = client

    def forget_client(self, owner: int) -> None:
        """A session's client is gone; see also `drop_owner`."""
        self.clients.pop(owner, None)

    def listen(self, listener: SegmentListener) -> None:
        """Tell `listener` of each segment that is made or filled again, until `unlisten`."""
        self.memory.listeners.append(listener)

    def unlisten(self, listener: SegmentListener) -> None:
        """Undo `listen`."""
        self.memory.listeners.remove(listener)

    def writer_guard(self) -> int | None:
        """See `Incarnations.guard`. Raises OSError."""
        return self.lives.guard()

    def copies_of(self, owner: int, send: SendCopied) -> SessionCopies:
        """What copies the daemon makes for a session."""
        return SessionCopies(owner, self.copies, send)

    def inventory_of(self, send: Callable[[m.FromDaemon], None]) -> InventoryListings:
        """The listings of a session."""
        return InventoryListings(self.host, self.tiers, self._clock, self.spawn, send)

    @property
    def is_best_effort(self) -> bool:
        """Whether READY ends an ACQUIRE's wait."""
        return self.prefetch.policy is PrefetchPolicy.BEST_EFFORT

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
        worthless = namespace.digest in self.endings.worthless
        self.host.register(space, worthless=worthless)
        if to_store:
            self.memory.make_room_ahead(space, 0)
        return space

    def unregister(self, space: Space, known_s: int = 0, *, worthless: bool = False) -> None:
        """One session less uses the space; its blocks stay, unless they are worthless.

        For `known_s` its client may come back with what it has mapped. `worthless` says that
        nobody will ask for its blocks any more.
        """
        until_s = self._clock.monotonic_ns() // NS + known_s + KNOWN_MORE_S if known_s else 0
        self.host.unregister(space, until_s, worthless=worthless)

    def live_segments(self, space: Space) -> Iterator[tuple[int, Segment]]:
        """The segments of a space that hold memory, by number."""
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
        """When an ACQUIRE that came just now is answered at the latest, CLOCK_MONOTONIC."""
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
        """Promote what tiers have, verify, and lease the longest prefix by the deadline.

        `deadline_ns` is CLOCK_MONOTONIC; `patience` can end the wait sooner. With the engine's
        speed of computing prompts, what would be computed sooner is not promoted. Cancelling
        gives up the wait and leases nothing.
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
        """End a lease before its time; nothing if it is not, or no longer, the owner's."""
        self.host.release(lease_id, owner)

    def note_request(
        self, spaces: Sequence[Space], hashes: Sequence[bytes], request: int, own: int
    ) -> None:
        """A request asks for a prefix: its use is counted later; see `Learning.note`."""
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
        """Slots for new blocks. Blocks that are there and that a tier lacks are offered again."""
        reservation = self.memory.reserve(owner, space, hashes, parents)
        self.refusals.stored(space, reservation, self.host.now_s)
        if self.tiers:
            self.backups.offer_again(space, hashes, reservation.slots)
        return reservation

    def make_room_ahead(self, space: Space, count: int) -> None:
        """Have slots for the next `count` blocks before they are asked for."""
        self.memory.make_room_ahead(space, count)

    def commit_count(self, owner: int, reservation_id: int, count: int) -> int:
        """How many blocks a `commit` with these arguments would make readable."""
        return self.host.commit_count(owner, reservation_id, count)

    def commit(self, owner: int, reservation_id: int, count: int) -> int | None:
        """Make the first `count` slots readable; how many became so, None if not the owner's."""
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
        # Else no block leaves the arena without a tier's asking, and nobody reads its checksum.
        if self.lives.kept:
            self.backups.sum_soon(space, ready)
        return len(ready)

    def abort(self, owner: int, reservation_id: int) -> None:
        """Free the slots of a reservation, which its owner no longer touches."""
        self.host.abort(owner, reservation_id)

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

    # --- what is shown --------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """What `tierd status` shows; plain values only."""
        return status_of(self, (self._clock.monotonic_ns() - self._started_ns) / 1e9)

    def check(self) -> None:
        """Assert the invariants of core, ledger, masks and queues; for tests."""
        self.memory.check()
        self.backups.check()
