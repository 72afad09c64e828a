"""Acquires in progress, and the leases that the daemon answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tierd.client.connection import DaemonConnection
from tierd.client.known import KnownIncarnations
from tierd.client.values import Handle, Lease, PendingAcquire, check_hashes
from tierd.errors import RemoteProtocolError
from tierd.wire import messages as m


class AskedFor(NamedTuple):
    """The request that an ACQUIRE is for. 0 means unknown."""

    request: int = 0
    waited_ms: int = 0
    prefill_tokens_per_s: int = 0
    own: int = 0


def numbers_of(handles: Sequence[Handle]) -> list[int] | None:
    """Return the handles' numbers in this session; None if a handle is not registered."""
    known = [handle.number for handle in handles if handle.number is not None]
    return known if known and len(known) == len(handles) else None


class Acquires:
    """The acquires of one session. Used under the client's lock."""

    def __init__(self, connection: DaemonConnection, incarnations: KnownIncarnations) -> None:
        self._connection = connection
        self._incarnations = incarnations
        self._pending: dict[int, PendingAcquire] = {}

    def begin(
        self,
        handles: Sequence[Handle],
        hashes: Sequence[bytes],
        deadline_ms: int,
        about: AskedFor,
    ) -> PendingAcquire:
        """Send an ACQUIRE. Without a session it is done at once, without a lease."""
        pending = PendingAcquire(self._connection.next_call(), len(handles))
        known = numbers_of(handles)
        if self._incarnations.now is None or not hashes or known is None:
            pending.done = True
            return pending
        check_hashes(hashes)
        self._pending[pending.call] = pending
        blob = b"".join(hashes[: m.KEYS_PER_CALL_MAX])
        deadline_ms = max(0, deadline_ms)
        self._connection.send(m.Acquire(pending.call, known, blob, deadline_ms, *about))
        return pending

    def ready(self, pending: PendingAcquire) -> None:
        """Tell the daemon that the engine could compute the request now."""
        if pending.call in self._pending:
            self._connection.send(m.Ready(pending.call))

    def cancel(self, pending: PendingAcquire) -> None:
        """Cancel an acquire. Its lease is released, also one that arrives later."""
        pending.done = True
        if pending.lease is not None:
            self.release(pending.lease)
            pending.lease = None
        elif pending.call in self._pending:
            self._connection.send(m.Cancel(pending.call))

    def release(self, lease: Lease) -> None:
        """End a lease; a second release does nothing."""
        now = self._incarnations.now
        if now is not None and lease.epoch == now.epoch:
            self._connection.send(m.Release(lease.lease_id))

    def lost(self) -> None:
        """End all acquires: the session is over."""
        for pending in self._pending.values():
            pending.done = True
        self._pending.clear()

    def acquired(self, message: m.Acquired) -> None:
        """Take the daemon's answer. Raises RemoteProtocolError if it does not fit the call."""
        pending = self._pending.pop(message.call, None)
        incarnation = self._incarnations.now
        if pending is None or incarnation is None or not message.blocks:
            if pending is not None:
                pending.done = True
            return
        raw = m.unpack_slots(message.slots)
        if len(raw) != message.blocks * pending.handles:
            raise RemoteProtocolError(
                f"ACQUIRED has {len(raw)} slots for {message.blocks} blocks of {pending.handles} "
                "namespaces"
            )
        slots = [
            list(raw[start : start + message.blocks])
            for start in range(0, len(raw), message.blocks)
        ]
        if len(message.sources) not in (0, message.blocks):
            raise RemoteProtocolError(
                f"ACQUIRED has {len(message.sources)} sources for {message.blocks} blocks"
            )
        sources = message.sources or bytes(message.blocks)
        lease = Lease(
            message.lease, incarnation.epoch, message.blocks, slots, message.expires_ns, sources
        )
        if pending.done:
            self.release(lease)
            return
        pending.lease = lease
        pending.done = True
