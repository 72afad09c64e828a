"""The ACQUIREs of one session: each is answered exactly once, unless the session ends before.

A prefix that needs no storage tier is answered at once. The others wait in tasks, which CANCEL ends
and READY may hurry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from tierd.core.l2.leases import SlotLease
from tierd.daemon.node import Node
from tierd.daemon.session.acquiring import Patience
from tierd.daemon.session.handles import Handles
from tierd.errors import RemoteProtocolError
from tierd.wire import messages as m

ACQUIRES_IN_FLIGHT_MAX: Final = 256
"""Waiting ACQUIREs per session; further ones are answered as misses at once."""


class SessionAcquires:
    """Answers the ACQUIREs of one session."""

    def __init__(
        self, owner: int, node: Node, handles: Handles, send: Callable[[m.FromDaemon], None]
    ) -> None:
        self._owner = owner
        self._node = node
        self._handles = handles
        self._send = send
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._patience: dict[int, Patience] = {}
        self._over = False

    def ask(self, message: m.Acquire) -> None:
        """Answer an ACQUIRE, or start a task that will. Raises RemoteProtocolError."""
        if message.call in self._tasks:
            raise RemoteProtocolError(f"call {message.call} is in flight already")
        spaces = self._handles.spaces(message.handles)
        asked = m.split_hashes(message.hashes)
        hashes = asked[message.own :]
        settled, lease, resident = self._node.acquire_now(
            self._owner, spaces, hashes, message.prefill_tokens_per_s
        )
        if not settled and len(self._tasks) >= ACQUIRES_IN_FLIGHT_MAX:
            self._node.count("acquires_refused_total")
            settled = True
        if settled:
            self._answer(message.call, lease)
        self._node.note_request(spaces, asked, message.request, message.own)
        if settled:
            return
        call, node = message.call, self._node
        deadline_ns = node.acquire_deadline_ns(
            spaces[0],
            len(hashes) - resident,
            waited_ms=message.waited_ms,
            client_ms=message.deadline_ms,
        )
        self._patience[call] = patience = Patience()
        acquire = partial(
            node.acquire,
            self._owner,
            spaces,
            hashes,
            deadline_ns,
            patience=patience,
            waited_ms=message.waited_ms,
            prefill_tokens_per_s=message.prefill_tokens_per_s,
        )
        self._tasks[call] = task = node.spawn(partial(self._wait, call, acquire), "acquire")
        task.add_done_callback(partial(self._done, call))

    def cancel(self, call: int) -> None:
        """Answer a waiting ACQUIRE as a miss; nothing if no ACQUIRE has that number."""
        task = self._tasks.get(call)
        if task is not None:
            task.cancel()

    def ready(self, message: m.Ready) -> None:
        """The engine could start now: with the best-effort policy this ends the ACQUIRE's wait."""
        patience = self._patience.get(message.call)
        if patience is not None and self._node.is_best_effort:
            patience.end()

    def stop(self) -> None:
        """Answer nothing from now on; a lease granted later is released at once."""
        self._over = True

    def close(self) -> None:
        """Stop, and end all waits."""
        self.stop()
        for task in self._tasks.values():
            task.cancel()

    async def _wait(self, call: int, acquire: Callable[[], Awaitable[SlotLease | None]]) -> None:
        lease = await acquire()
        if not self._over:
            self._answer(call, lease)
        elif lease is not None:
            self._node.release(lease.lease_id, self._owner)

    def _done(self, call: int, task: asyncio.Task[None]) -> None:
        """Answer a miss if the task has not: it may have been cancelled before its first step."""
        if self._tasks.get(call) is not task:
            return
        self._node.count("acquires_cancelled_total")
        if not self._over:
            self._answer(call, None)

    def _answer(self, call: int, lease: SlotLease | None) -> None:
        self._tasks.pop(call, None)
        self._patience.pop(call, None)
        if lease is None:
            self._send(m.Acquired(call, 0, 0, b"", 0, b""))
            return
        blob = b"".join(m.pack_slots(slots) for _, slots in lease.parts)
        count = len(lease.parts[0][1])
        self._send(m.Acquired(call, lease.lease_id, count, blob, lease.expires_ns, lease.sources))
