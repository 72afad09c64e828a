"""What operators have a session do: flush, scrub, tell of a namespace, explain.

The work belongs to the node and goes on when the session that asked for it has ended; a session
follows one piece of work at a time.
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
"""How often whoever follows is told how far it has got."""

WARMINGS_MAX: Final = 16
"""WARMs of one session that go on at once."""

RATE_MIN: Final = 1 << 16
"""Bytes a second of the slowest scrub: a batch of 8 MiB in two minutes."""

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
        """Begin a flush and follow it."""
        if not _HEX.issuperset(message.prefix):
            raise RemoteProtocolError("FLUSH has a prefix that is not in hex")
        self._check_numbers(message.tiers)
        flushes = self._node.flushes
        try:
            self._check_free()
            flush = flushes.begin(message.prefix, host=message.host, numbers=message.tiers)
        except RefusedError as error:
            self._send(m.Error(message.call, str(error)))
            return
        self._node.spawn(partial(flushes.run, flush), "flush")
        self._follow(message.call, flush)

    def scrub(self, message: m.Scrub) -> None:
        """Begin a scrub and follow it."""
        self._check_numbers(message.tiers)
        scrubs = self._node.scrubs
        try:
            self._check_free()
            scrub = scrubs.begin(message.tiers, max(RATE_MIN, message.bytes_per_s))
        except RefusedError as error:
            self._send(m.Error(message.call, str(error)))
            return
        self._node.spawn(partial(scrubs.run, scrub), "scrub")
        self._follow(message.call, scrub)

    def stop_scrub(self, message: m.StopScrub) -> None:
        """Have the scrub that is going on end, and follow it to there."""
        scrub = self._node.scrubs.current
        if scrub is None:
            self._send(m.Error(message.call, "no scrub is going on"))
            return
        scrub.stop.set()
        if self._following is None:
            self._follow(message.call, scrub)
        else:
            self._send(m.Done(message.call, scrub.status()))

    def describe(self, message: m.Describe) -> None:
        """Tell a namespace's fields, whole."""
        namespace = self._node.endings.named(message.digest)
        if namespace is None:
            self._send(m.Error(message.call, "this tierd does not know that namespace"))
        else:
            self._send(m.Described(message.call, namespace.to_fields()))

    def warm(self, message: m.Warm, space: Space) -> None:
        """Warm blocks of a namespace of this session; ends with it."""
        if message.target > len(self._node.tiers):
            raise RemoteProtocolError(f"there are {len(self._node.tiers)} storage tiers")
        if message.call in self._warmings:
            raise RemoteProtocolError(f"call {message.call} is in flight already")
        if len(self._warmings) >= WARMINGS_MAX:
            self._send(m.Error(message.call, f"{WARMINGS_MAX} WARMs of this session go on already"))
            return
        want = WarmOrder(message.target, message.bytes_per_s, message.pin_ms, message.verify)
        warming = Warming(space, m.split_hashes(message.hashes), want, self._pace)
        self._warmings[message.call] = warming
        run = partial(self._warm, message.call, warming, message.deadline_ms / 1000)
        task = self._node.spawn(run, "warm order")
        task.add_done_callback(lambda _: self._warmings.pop(message.call))

    async def _warm(self, call: int, warming: Warming, deadline_s: float) -> None:
        await self._node.warmings.run(warming, deadline_s)
        self._send(m.Warmed(call, warming.outcomes, warming.status()))

    def cancel(self, call: int) -> None:
        """Call a WARM off; nothing if there is none of that number."""
        if call in self._warmings:
            self._warmings[call].call_off()

    def explain(self, message: m.Explain) -> None:
        """Say where blocks are, and why they are not elsewhere."""
        hashes = m.split_hashes(message.hashes)
        if len(hashes) > m.EXPLAINED_MAX or len(message.digest) != DIGEST_BYTES:
            raise RemoteProtocolError(
                f"EXPLAIN names a digest of {DIGEST_BYTES} bytes and at most {m.EXPLAINED_MAX} "
                "hashes"
            )
        if self._explaining is not None:
            self._send(m.Error(message.call, "this session waits for another EXPLAIN"))
            return
        ask = partial(self._explain, message.call, message.digest, hashes)
        self._explaining = self._node.spawn(ask, "explain")
        self._explaining.add_done_callback(self._explained)

    async def _explain(self, call: int, digest: bytes, hashes: Sequence[bytes]) -> None:
        body = await self._node.explainer.explain(digest, hashes)
        # Before the answer: whoever has it may ask again before this task is done.
        self._explaining = None
        self._send(m.Explained(call, body))

    def _explained(self, task: asyncio.Task[None]) -> None:
        if self._explaining is task:
            self._explaining = None

    def close(self) -> None:
        """The session has ended; the work goes on, but for what only it would have been told."""
        if self._following is not None:
            self._following.cancel()
        if self._explaining is not None:
            self._explaining.cancel()
        for warming in self._warmings.values():
            warming.call_off()

    def _check_free(self) -> None:
        if self._following is not None:
            raise RefusedError("this session follows another order already")

    def _check_numbers(self, numbers: Sequence[int]) -> None:
        if any(number >= len(self._node.tiers) for number in numbers):
            raise RemoteProtocolError(f"there are {len(self._node.tiers)} storage tiers")

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
