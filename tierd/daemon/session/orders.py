"""Operators' orders in one session: flush, scrub, describe a namespace, warm, explain.

A flush or a scrub belongs to the node and continues after the session's end; a session follows one
of them at a time. A WARM or an EXPLAIN ends with its session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from tierd.core.l2.space import Space
from tierd.daemon.jobs.flush import FlushJob
from tierd.daemon.jobs.scrub import ScrubJob
from tierd.daemon.jobs.warming import Pace, Warming, WarmOrder
from tierd.daemon.node import Node
from tierd.errors import RefusedError, RemoteProtocolError
from tierd.types import DIGEST_BYTES
from tierd.wire import messages as m

PROGRESS_S: Final = 0.25
"""Interval of PROGRESS messages."""

WARMINGS_MAX: Final = 16
"""Concurrent WARMs per session."""

RATE_MIN: Final = 1 << 16
"""Lowest rate of a scrub, in bytes per second: a batch of 8 MiB takes two minutes."""

_HEX: Final = frozenset("0123456789abcdef")


class Orders:
    """The orders of one session."""

    def __init__(self, node: Node, send: Callable[[m.FromDaemon], None]) -> None:
        self._node = node
        self._send = send
        self._following: asyncio.Task[None] | None = None
        self._warmings: dict[int, Warming] = {}
        self._pace = Pace()
        self._explaining: asyncio.Task[None] | None = None

    def flush(self, message: m.Flush) -> None:
        """Start a flush and follow it."""
        if not _HEX.issuperset(message.prefix):
            raise RemoteProtocolError("FLUSH has a prefix that is not hexadecimal")
        self._check_numbers(message.tiers)
        try:
            self._check_free()
            flush = self._node.flush(message.prefix, host=message.host, numbers=message.tiers)
        except RefusedError as error:
            self._send(m.Error(message.call, str(error)))
            return
        self._follow(message.call, flush)

    def scrub(self, message: m.Scrub) -> None:
        """Start a scrub and follow it."""
        self._check_numbers(message.tiers)
        try:
            self._check_free()
            scrub = self._node.scrub(message.tiers, max(RATE_MIN, message.bytes_per_s))
        except RefusedError as error:
            self._send(m.Error(message.call, str(error)))
            return
        self._follow(message.call, scrub)

    def stop_scrub(self, message: m.StopScrub) -> None:
        """Stop the running scrub, and follow it to its end."""
        scrub = self._node.current_scrub
        if scrub is None:
            self._send(m.Error(message.call, "no scrub is running"))
            return
        scrub.stop.set()
        if self._following is None:
            self._follow(message.call, scrub)
        else:
            self._send(m.Done(message.call, scrub.status()))

    def describe(self, message: m.Describe) -> None:
        """Send all fields of a namespace."""
        namespace = self._node.namespace_of(message.digest)
        if namespace is None:
            self._send(m.Error(message.call, "this tierd does not know this namespace"))
        else:
            self._send(m.Described(message.call, namespace.to_fields()))

    def warm(self, message: m.Warm, space: Space) -> None:
        """Warm blocks of a namespace of this session, until the session ends."""
        if message.target > self._node.tier_count:
            raise RemoteProtocolError(f"there are {self._node.tier_count} storage tiers")
        if message.call in self._warmings:
            raise RemoteProtocolError(f"call {message.call} is in flight already")
        if len(self._warmings) >= WARMINGS_MAX:
            reason = f"this session has {WARMINGS_MAX} WARMs in progress already"
            self._send(m.Error(message.call, reason))
            return
        order = WarmOrder(message.target, message.bytes_per_s, message.pin_ms, message.verify)
        warming = Warming(space, m.split_hashes(message.hashes), order, self._pace)
        self._warmings[message.call] = warming
        run = partial(self._warm, message.call, warming, message.deadline_ms / 1000)
        task = self._node.spawn(run, "warm order")
        task.add_done_callback(lambda _: self._warmings.pop(message.call))

    async def _warm(self, call: int, warming: Warming, deadline_s: float) -> None:
        await self._node.warm(warming, deadline_s)
        self._send(m.Warmed(call, warming.outcomes, warming.status()))

    def cancel(self, call: int) -> None:
        """Cancel a WARM; nothing if no WARM has that number."""
        if call in self._warmings:
            self._warmings[call].cancel()

    def explain(self, message: m.Explain) -> None:
        """Report where blocks are, and why they are not elsewhere."""
        hashes = m.split_hashes(message.hashes)
        if len(hashes) > m.EXPLAINED_MAX or len(message.digest) != DIGEST_BYTES:
            raise RemoteProtocolError(
                f"EXPLAIN names a digest of {DIGEST_BYTES} bytes and at most {m.EXPLAINED_MAX} "
                "hashes"
            )
        if self._explaining is not None:
            self._send(m.Error(message.call, "this session waits for another EXPLAIN already"))
            return
        ask = partial(self._explain, message.call, message.digest, hashes)
        self._explaining = self._node.spawn(ask, "explain")
        self._explaining.add_done_callback(self._explained)

    async def _explain(self, call: int, digest: bytes, hashes: Sequence[bytes]) -> None:
        body = await self._node.explain(digest, hashes)
        # Before the answer: the client may send the next EXPLAIN before this task is done.
        self._explaining = None
        self._send(m.Explained(call, body))

    def _explained(self, task: asyncio.Task[None]) -> None:
        if self._explaining is task:
            self._explaining = None

    def close(self) -> None:
        """End with the session: flushes and scrubs continue, WARMs and EXPLAINs are cancelled."""
        if self._following is not None:
            self._following.cancel()
        if self._explaining is not None:
            self._explaining.cancel()
        for warming in self._warmings.values():
            warming.cancel()

    def _check_free(self) -> None:
        if self._following is not None:
            raise RefusedError("this session follows another order already")

    def _check_numbers(self, numbers: Sequence[int]) -> None:
        if any(number >= self._node.tier_count for number in numbers):
            raise RemoteProtocolError(f"there are {self._node.tier_count} storage tiers")

    def _follow(self, call: int, work: FlushJob | ScrubJob) -> None:
        task = self._node.spawn(partial(self._tell, call, work), "order")
        self._following = task
        task.add_done_callback(self._followed)

    def _followed(self, _: asyncio.Task[None]) -> None:
        self._following = None

    async def _tell(self, call: int, work: FlushJob | ScrubJob) -> None:
        while not work.done.is_set():
            self._send(m.Progress(call, work.status()))
            with suppress(TimeoutError):
                async with asyncio.timeout(PROGRESS_S):
                    await work.done.wait()
        self._send(m.Done(call, work.status()))
