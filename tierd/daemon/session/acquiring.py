"""ACQUIRE: what host memory has of a prefix, what tiers can bring by the deadline, one lease."""

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
"""An answer that comes so much after its deadline is counted: tierd's own doing, or a machine
that let it wait, but no tier's, for those are left at the deadline."""


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


class Acquiring:
    """Carries ACQUIREs out."""

    def __init__(
        self,
        memory: HostMemory,
        promotions: Promotions,
        verification: Verification,
        lives: Incarnations,
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
        self._lives = lives
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
            self._lives.leased(taken.lease)
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
        """When an ACQUIRE that came just now is answered at the latest, CLOCK_MONOTONIC."""
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
                self._lives.leased(lease)
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
        """Whether a session may have as many blocks of each space leased; counted if not."""
        if self._host.may_lease(owner, count * len(spaces)):
            return True
        self._refusals.leased(spaces[0], client, self._host.now_s)
        return False

    def _has_unverified(self, spaces: Sequence[Space], hashes: Sequence[bytes]) -> bool:
        """Whether some of the blocks are from a life before, and not verified yet."""
        return any(self._host.unverified(space, hashes) for space in dict.fromkeys(spaces))

    async def _verify(
        self, spaces: Sequence[Space], hashes: Sequence[bytes], deadline_ns: int, patience: Patience
    ) -> None:
        """Have what a request asks for verified, as far as the deadline allows."""
        left_s = (deadline_ns - self._clock.monotonic_ns()) / 1e9
        with contextlib.suppress(TimeoutError):
            async with patience.within(max(0.0, left_s)), asyncio.TaskGroup() as group:
                for space in dict.fromkeys(spaces):
                    slots = self._host.unverified(space, hashes)
                    group.create_task(self._verification.verify(space, slots))

    async def _promote(self, lookup: Lookup, deadline_ns: int, patience: Patience) -> None:
        """Have the tiers asked, and what they have promoted, as far as the deadline allows."""
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
            # Not waited for: a backend may take its time to let go, a deadline does not.
            for ask in asks:
                ask.cancel()

    def _note_unserved(self, why: Why, lookup: Lookup) -> None:
        self._unserveds.note(lookup.unserved(why, self._clock.monotonic_ns() // NS))
