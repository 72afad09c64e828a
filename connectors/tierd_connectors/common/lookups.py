"""Lookups of prefixes: sends them, takes the answers until a deadline, and holds the leases.

It knows block hashes and leases, and no requests of an engine. No method waits: an answer is read
from the client's memory. A daemon that does not answer is not asked again for a while.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierd.client import request_number
from tierd_connectors.common.counters import DrainedCounters

if TYPE_CHECKING:
    from tierd.client import Client, Handle, Lease, PendingAcquire

GRACE_MS = 100
"""Wait beyond a lookup's deadline for an answer that is in transit."""

SILENCE_MS, SILENCE_MS_MAX = 1_000, 30_000
"""First and longest pause in lookups after the daemon did not answer one; it doubles each time.
So a daemon that hangs delays a request now and then, not every request."""

LEASE_RESERVE = 4
"""A lease is replaced in the last 1/4 of its time, so that it outlasts the load."""


@dataclass(slots=True)
class PrefixLookup:
    """A request's lookup: pending, then answered with a lease or without one."""

    request_id: str
    since_ns: int
    """Time of arrival or preemption, from which the daemon's prefetch policy counts."""
    asked: bool = False
    own: int = 0
    """Leading blocks in the engine's own cache at the lookup; the answer begins after them."""
    pending: PendingAcquire | None = None
    give_up_ns: int = 0
    wanted: bool = False
    """The engine has asked for the request's tokens, and READY was sent to the daemon."""
    lease: Lease | None = None
    renew_ns: int = 0
    uncounted: bool = False
    """A lookup was sent, and its result is not counted yet."""


class PrefixLookups:
    """Sends lookups and takes their answers. Used by the engine's scheduler thread only."""

    def __init__(self, client: Client, tally: DrainedCounters, *, deadline_ms: int) -> None:
        self._client = client
        self._tally = tally
        self._deadline_ms = deadline_ms
        self._silent_until_ns = 0
        self._silence_ms = 0

    def send(
        self,
        lookup: PrefixLookup,
        handles: Sequence[Handle],
        hashes: Sequence[bytes],
        prefill_tokens_per_s: int,
    ) -> None:
        """Send a lookup of the hashes past the first `own`, even if none are left: the daemon
        counts the own blocks as used. Sends nothing to a daemon that is away or silent."""
        now_ns = time.monotonic_ns()
        if not self._client.connected or now_ns < self._silent_until_ns:
            return
        lookup.wanted = False
        lookup.pending = self._client.begin_acquire(
            handles,
            hashes,
            self._deadline_ms,
            request=request_number(lookup.request_id),
            waited_ms=(now_ns - lookup.since_ns) // 1_000_000,
            prefill_tokens_per_s=prefill_tokens_per_s,
            own=lookup.own,
        )
        lookup.uncounted = True
        lookup.give_up_ns = now_ns + (self._deadline_ms + GRACE_MS) * 1_000_000
        self._tally.add(lookups=1)

    def is_pending(self, lookup: PrefixLookup, now_ns: int) -> bool:
        """Whether a sent lookup has no answer yet: takes an answer, or gives up at the deadline."""
        pending = lookup.pending
        assert pending is not None
        self._client.poll()
        if pending.done:
            self._take_answer(lookup, pending, now_ns)
            return False
        if now_ns >= lookup.give_up_ns:
            self.drop(lookup)
            self._note_silence(now_ns)
            return False
        if not lookup.wanted:
            lookup.wanted = True
            self._client.ready(pending)
        return True

    def is_stale(self, lease: Lease) -> bool:
        """Whether a lease is another incarnation's."""
        return self._client.connected and lease.epoch != self._client.epoch

    def drop(self, lookup: PrefixLookup) -> None:
        """Release the lease, and cancel a pending lookup."""
        if lookup.lease is not None:
            self._client.release(lookup.lease)
            lookup.lease = None
        if lookup.pending is not None:
            self._client.cancel(lookup.pending)
            lookup.pending = None

    def _take_answer(self, lookup: PrefixLookup, pending: PendingAcquire, now_ns: int) -> None:
        self._silence_ms = 0
        lookup.lease, lookup.pending = pending.lease, None
        if lookup.lease is not None:
            left_ns = lookup.lease.expires_ns - now_ns
            lookup.renew_ns = lookup.lease.expires_ns - left_ns // LEASE_RESERVE
            if left_ns <= 0:
                self.drop(lookup)

    def _note_silence(self, now_ns: int) -> None:
        self._tally.add(lookup_timeouts=1)
        if now_ns >= self._silent_until_ns:
            self._silence_ms = min(max(2 * self._silence_ms, SILENCE_MS), SILENCE_MS_MAX)
            self._silent_until_ns = now_ns + self._silence_ms * 1_000_000
