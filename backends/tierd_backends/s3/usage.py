"""Estimate of the blocks in a bucket, as one node sees them.

A listing in the background counts the objects in order of their names. If it has passed the name
of an object that this node changes, the change is counted at once; if not, the listing sees it.
Changes by other nodes show in the next listing. Without a capacity there is only one listing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final

from tierd.backend import BackendStats
from tierd.errors import BackendError
from tierd_backends.common.shared_capacity import SharedCapacity
from tierd_backends.s3.listing import Page

INDEX_RETRY_S: Final = 30.0
"""Wait before a failed listing goes on; only the statistics and the shared capacity need it."""

_log = logging.getLogger("tierd_backends.s3")


@dataclass(slots=True)
class _Held:
    """Number and size of blocks."""

    blocks: int = 0
    size_bytes: int = 0

    def change(self, blocks: int, size_bytes: int) -> None:
        """Add blocks and bytes; negative numbers subtract."""
        self.blocks = max(0, self.blocks + blocks)
        self.size_bytes = max(0, self.size_bytes + size_bytes)


class Usage:
    """Belongs to the event loop. Before the first complete listing, the one in progress shows."""

    def __init__(self) -> None:
        self._complete = False
        self._shown = _Held()
        self._listing: _Held | None = None
        self._listed_to = ""

    def begin(self) -> None:
        """Begin a listing. Discards an unfinished one."""
        self._listing = _Held()
        self._listed_to = ""
        if not self._complete:
            self._shown = self._listing

    def listed(self, sizes_bytes: Iterable[int], last: str, *, complete: bool) -> None:
        """Count a page of the listing; `last` is its last name."""
        assert self._listing is not None
        for size_bytes in sizes_bytes:
            self._listing.change(1, size_bytes)
        self._listed_to = last or self._listed_to
        if complete:
            self._shown, self._listing = self._listing, None
            self._complete = True

    def changed(self, name: str, blocks: int, size_bytes: int) -> None:
        """Count a change by this node; negative numbers for a drop."""
        if self._listing is not None and name <= self._listed_to:
            self._listing.change(blocks, size_bytes)
        if self._shown is not self._listing:
            self._shown.change(blocks, size_bytes)

    def stats(self) -> BackendStats:
        """Return the counts, without the capacity."""
        return BackendStats(
            blocks=self._shown.blocks,
            used_bytes=self._shown.size_bytes,
            index_complete=self._complete,
        )


async def keep_counted(
    usage: Usage, page_of: Callable[[str], Awaitable[Page]], shared_capacity: SharedCapacity
) -> None:
    """Count the bucket's objects; with a capacity, again and again.

    `page_of` returns the page of the listing that a token names, and raises BackendError.
    """
    loop = asyncio.get_running_loop()
    pause_s: float | None = 0.0
    while pause_s is not None:
        await asyncio.sleep(pause_s)
        began_s = loop.time()
        await _count(usage, page_of)
        pause_s = shared_capacity.pause_s(loop.time() - began_s)


async def _count(usage: Usage, page_of: Callable[[str], Awaitable[Page]]) -> None:
    """Count the bucket's objects once, page by page."""
    usage.begin()
    token = ""
    while True:
        try:
            page = await page_of(token)
        except BackendError as error:
            _log.warning("cannot count objects; going on in %.0f s: %s", INDEX_RETRY_S, error)
            await asyncio.sleep(INDEX_RETRY_S)
            continue
        token = page.token
        sizes = [each.size_bytes for each in page.objects]
        usage.listed(sizes, page.last, complete=not token)
        if not token:
            return
