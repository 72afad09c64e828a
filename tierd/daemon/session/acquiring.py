"""Carries out ACQUIRE: finds a prefix in host memory, promotes more of it from tiers until the
deadline, and leases the result."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, NamedTuple

from tierd.clock import Clock
from tierd.config import PrefetchConfig
from tierd.core.l2.leases import SlotLease
from tierd.core.l2.space import Space
from tierd.core.l3.prefetch import MS, BreakEven, Worth, deadline_ns
from tierd.core.l3.unserved import Unserveds, Why
from tierd.daemon.l2.incarnations import Incarnations
from tierd.daemon.l2.memory import HostMemory
from tierd.daemon.l2.verification import Verification
from tierd.daemon.l3.lookup import Lookup
from tierd.daemon.l3.promotion import Promotions, Spawn, Waiter
from tierd.daemon.l3.tier import StorageTier
from tierd.daemon.session.refusals import Refusals

NS: Final = 1_000_000_000

LATE_NS: Final = 100_000_000
"""Delay after the deadline from which an answer counts as late. Tiers are abandoned at the
deadline, so the cause is tierd or an overloaded machine."""


class Patience:
    """How long one ACQUIRE waits for tiers: until its deadline, or until `end`."""

    def __init__(self) -> None:
        self.ended = False
        self._timeout: asyncio.Timeout | None = None

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """Raise TimeoutError in the block after `seconds`, or when `end` is called."""
        try:
            async with asyncio.timeout(0.0 if self.ended else seconds) as self._timeout:
                yield
        finally:
            self._timeout = None  # READY may still come, and must not reschedule it.

    def end(self) -> None:
        """End the wait; idempotent."""
        if not self.ended and self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())
        self.ended = True


class AcquiredNow(NamedTuple):
    """The result of an ACQUIRE without tiers; unless it is settled, `Node.acquire` must run."""

    settled: bool
    lease: SlotLease | None
    resident: int
    """Leading blocks that are readable in every space."""


class Acquiring:
    """Carries out ACQUIREs."""

    def __init__(
        self,
        memory: HostMemory,
        promotions: Promotions,
        verification: Verification,
        incarnations: Incarnations,
        refusals: Refusals,
        unserveds: Unserveds,
        tiers: Sequence[StorageTier],
        clock: Clock,
        spawn: Spawn,
    ) -> None:
        self._host = memory.host
        self._counters: Counter[str] = memory.counters
        self._promotions = promotions
        self._verification = verification
        self._incarnations = incarnations
        self._refusals = refusals
        self._unserveds = unserveds
        self._tiers = tiers
        self._clock = clock
        self._spawn = spawn
        self._break_even = BreakEven()

    def now(
        self,
        owner: int,
        client: str,
        spaces: list[Space],
        hashes: Sequence[bytes],
        lease_ttl_ns: int,
    ) -> AcquiredNow:
        """Lease the resident prefix if no tier is needed."""
        expires_ns = self._clock.monotonic_ns() + lease_ttl_ns
        taken = self._host.take_prefix(
            owner, spaces, hashes, expires_ns, more_elsewhere=bool(self._tiers)
        )
        if taken.refused:
            self._refusals.leased(spaces[0], client, self._host.now_s)
        if taken.lease is not None:
            self._counters["acquired_blocks_total"] += taken.resident
            self._incarnations.leased(taken.lease)
        return AcquiredNow(taken.settled, taken.lease, 0 if taken.refused else taken.resident)

    def deadline_ns(
        self,
        prefetch: PrefetchConfig,
        space: Space,
        missing_blocks: int,
        *,
        waited_ms: int,
        client_ms: int,
    ) -> int:
        """Return the deadline of an ACQUIRE that arrives now, in CLOCK_MONOTONIC."""
        return deadline_ns(
            prefetch,
            now_ns=self._clock.monotonic_ns(),
            waited_ms=waited_ms,
            client_ms=client_ms,
            missing_tokens=missing_blocks * space.namespace.block_tokens,
        )

    async def run(
        self,
        owner: int,
        client: str,
        spaces: list[Space],
        hashes: Sequence[bytes],
        deadline_ns: int,
        *,
        prefetch: PrefetchConfig,
        lease_ttl_ns: int,
        patience: Patience,
        waited_ms: int,
        prefill_tokens_per_s: int,
    ) -> SlotLease | None:
        """See `Node.acquire`."""
        began_ns = self._clock.monotonic_ns()
        waiter = Waiter(spaces, began_ns - waited_ms * MS)
        tokens = spaces[0].namespace.block_tokens
        try:
            if self._has_unverified(spaces, hashes):
                await self._verify(spaces, hashes, deadline_ns, patience)
            waiter.refresh(self._host, hashes)
            resident = min(waiter.length(at, hashes) for at in range(len(spaces)))
            if resident and not self._may_lease(owner, client, spaces, resident):
                return None
            worth = Worth(
                prefetch,
                self._break_even,
                resident_tokens=resident * tokens,
                prefill_tokens_per_s=prefill_tokens_per_s,
            )
            if self._tiers and worth.asking(len(hashes) * tokens):
                lookup = Lookup(waiter, hashes, self._tiers, self._promotions, worth)
                await self._promote(lookup, deadline_ns, patience)
                self._counters["loads_refused_total"] += worth.refused
                if worth.refused:
                    self._note_unserved(Why.NOT_WORTH, lookup)
                waiter.refresh(self._host, hashes)
            expires_ns = self._clock.monotonic_ns() + lease_ttl_ns
            lease = waiter.conclude(self._host, owner, hashes, expires_ns)
            if lease is not None:
                self._incarnations.leased(lease)
                count = len(lease.parts[0][1])
                self._counters["promoted_blocks_acquired_total"] += max(0, count - resident)
                self._counters["acquired_blocks_total"] += count
            if self._clock.monotonic_ns() > deadline_ns + LATE_NS:
                self._counters["answers_late_total"] += 1
            return lease
        finally:
            waiter.close(self._host)
            self._counters["waited_us_total"] += (self._clock.monotonic_ns() - began_ns) // 1000

    def _may_lease(self, owner: int, client: str, spaces: Sequence[Space], count: int) -> bool:
        """Return whether a session may lease `count` blocks of each space; count a refusal."""
        if self._host.may_lease(owner, count * len(spaces)):
            return True
        self._refusals.leased(spaces[0], client, self._host.now_s)
        return False

    def _has_unverified(self, spaces: Sequence[Space], hashes: Sequence[bytes]) -> bool:
        """Whether some of the blocks are adopted and still unverified."""
        return any(self._host.unverified(space, hashes) for space in dict.fromkeys(spaces))

    async def _verify(
        self, spaces: Sequence[Space], hashes: Sequence[bytes], deadline_ns: int, patience: Patience
    ) -> None:
        """Verify the unverified blocks of a request, until the deadline."""
        left_s = (deadline_ns - self._clock.monotonic_ns()) / 1e9
        with contextlib.suppress(TimeoutError):
            async with patience.within(max(0.0, left_s)), asyncio.TaskGroup() as group:
                for space in dict.fromkeys(spaces):
                    slots = self._host.unverified(space, hashes)
                    group.create_task(self._verification.verify(space, slots))

    async def _promote(self, lookup: Lookup, deadline_ns: int, patience: Patience) -> None:
        """Look the blocks up in the tiers and promote them, until the deadline."""
        asks = [self._spawn(partial(lookup.ask, at), "lookup") for at in range(lookup.ranks)]
        left_s = (deadline_ns - self._clock.monotonic_ns()) / 1e9
        try:
            async with patience.within(max(0.0, left_s)):
                await lookup.finish(asks)
        except TimeoutError:
            self._note_unserved(Why.LATE, lookup)
            if patience.ended:
                self._counters["best_effort_ended_total"] += 1
            else:
                self._counters["deadline_missed_total"] += 1
                lookup.blame()
        finally:
            # Not awaited: a backend may be slow to cancel, and the deadline has passed.
            for ask in asks:
                ask.cancel()

    def _note_unserved(self, why: Why, lookup: Lookup) -> None:
        self._unserveds.note(lookup.unserved(why, self._clock.monotonic_ns() // NS))
