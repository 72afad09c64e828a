"""Lists the blocks of a namespace in L2 or in a storage tier, one page per request.

Nothing is locked: a block that comes or goes meanwhile may be listed or not. A tier's scan waits
until the session asks for the next page, and ends with the session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from tierd.backend import BlockHeader
from tierd.clock import Clock
from tierd.core.host import HostTier
from tierd.core.l2.space import Space
from tierd.daemon.l3.promotion import Spawn
from tierd.daemon.l3.tier import StorageTier
from tierd.errors import RemoteProtocolError
from tierd.eviction.reuse import Reuse
from tierd.hotset import Blocks
from tierd.types import DIGEST_BYTES, NEVER
from tierd.wire import messages as m

PAGE_BLOCKS: Final = 8192
"""Blocks of a page: 576 KiB on the wire."""

SLICE: Final = 256
"""Blocks listed before the loop does other work: 0.3 ms."""


def known_of(book: Reuse | None, hashes: list[bytes], parents: list[bytes], now_ms: int) -> Blocks:
    """Return blocks with their known uses."""
    if book is None:
        return Blocks(hashes, parents, [0] * len(hashes), [NEVER] * len(hashes))
    return Blocks(hashes, parents, *book.told(hashes, now_ms))


def resident(space: Space, now_ms: Callable[[], int]) -> Iterator[Blocks]:
    """Yield the blocks of a namespace in L2, in slices.

    A block that moves between slots meanwhile may be left out, or yielded twice.
    """
    start = 0
    while (part := space.part(start, SLICE)) is not None:
        yield known_of(space.reuse, *part, now_ms())
        start += SLICE


class InventoryListings:
    """The listings of one session, one at a time."""

    def __init__(
        self,
        host: HostTier,
        tiers: Sequence[StorageTier],
        clock: Clock,
        spawn: Spawn,
        send: Callable[[m.FromDaemon], None],
    ) -> None:
        self._host = host
        self._tiers = tiers
        self._clock = clock
        self._spawn = spawn
        self._send = send
        self._listed: tuple[bytes, int] | None = None
        self._listing: asyncio.Task[None] | None = None
        self._pages: asyncio.Queue[Blocks | str] = asyncio.Queue(1)
        self._answering: asyncio.Task[None] | None = None

    def ask(self, message: m.Inventory) -> None:
        """Answer with the next page; another namespace or source begins a new listing."""
        if len(message.digest) != DIGEST_BYTES or message.source > len(self._tiers):
            raise RemoteProtocolError(
                f"INVENTORY names a digest of {DIGEST_BYTES} bytes and one of "
                f"{len(self._tiers)} storage tiers"
            )
        if self._answering is not None:
            self._send(m.Error(message.call, "this session waits for another INVENTORY"))
            return
        listed = message.digest, message.source
        if self._listed != listed:
            self._end()
            self._listed, self._pages = listed, asyncio.Queue(1)
            self._listing = self._spawn(partial(self._list, *listed, self._pages), "inventory")
        self._answering = self._spawn(partial(self._answer, message.call), "inventory")
        self._answering.add_done_callback(self._answered)

    def close(self) -> None:
        """End the listing, because the session has ended."""
        self._end()
        if self._answering is not None:
            self._answering.cancel()

    def _end(self) -> None:
        self._listed = None
        if self._listing is not None:
            self._listing.cancel()

    def _answered(self, task: asyncio.Task[None]) -> None:
        if self._answering is task:
            self._answering = None

    async def _answer(self, call: int) -> None:
        page = await self._pages.get()
        # Before the answer: the client may ask again before this task is done.
        self._answering = None
        more = not isinstance(page, str) and len(page.hashes) == PAGE_BLOCKS
        if not more:
            self._end()
        if isinstance(page, str):
            self._send(m.Error(call, page))
            return
        self._send(
            m.Listed(
                call,
                more,
                b"".join(page.hashes),
                b"".join(page.parents),
                m.pack_slots(page.uses),
                m.pack_slots(page.ages_s),
            )
        )

    async def _list(self, digest: bytes, source: int, pages: asyncio.Queue[Blocks | str]) -> None:
        """Queue pages, all full except the last one; or a text that says why the scan failed."""
        space = self._host.spaces.get(digest)
        page = Blocks([], [], [], [])
        if source == 0:
            for blocks in resident(space, self._now_ms) if space is not None else ():
                page.take(blocks)
                if len(page.hashes) >= PAGE_BLOCKS:
                    await pages.put(page.cut(PAGE_BLOCKS))
                await asyncio.sleep(0)
            await pages.put(page)
            return
        book = None if space is None else space.reuse
        scanned = 0

        async def take(header: BlockHeader) -> None:
            nonlocal scanned
            scanned += 1
            if scanned % SLICE == 0:
                await asyncio.sleep(0)
            if header.key.namespace == digest:
                block_hash = header.key.block_hash
                page.take(known_of(book, [block_hash], [header.parent], self._now_ms()))
                if len(page.hashes) == PAGE_BLOCKS:
                    await pages.put(page.cut(PAGE_BLOCKS))

        async def finish() -> None:
            await pages.put(page)

        tier = self._tiers[source - 1]
        if why := await tier.each(take, finish):
            await pages.put(f"{tier.name}: {why}")

    def _now_ms(self) -> int:
        return self._clock.monotonic_ns() // 1_000_000
