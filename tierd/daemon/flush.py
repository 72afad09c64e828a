"""Flush: what was there before is served to nobody afterwards, by L2 and by no tier.

While it goes on, nothing of the namespaces is brought from a tier or written to one, so what
engines store meanwhile stays in L2 and is offered to the tiers at the end. What is being brought
is not published, what is being written is waited for and dropped with the rest. Slots that are
leased keep their bytes until the leases end; nobody finds them any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final

from tierd.backend import BlockHeader
from tierd.core.space import Dropped, Space
from tierd.core.writes import Moment
from tierd.daemon.backup import Backups, nobody
from tierd.daemon.memory import HostMemory
from tierd.daemon.promotion import Promotions
from tierd.daemon.tier import StorageTier
from tierd.errors import RefusedError

SLICE: Final = 256
"""Blocks of L2 dropped, or offered again, between two turns of the loop: about 1 ms."""

DELETE_BATCH: Final = 64
"""Blocks dropped by one call to a tier: well within a deadline, on an object store too."""

PASSES_MAX: Final = 5
"""Scans of a tier until one finds nothing. The first drops what was there, the second finds
nothing, unless other nodes write to the tier, or it fails in between."""

RETRY_S: Final = 1.0
"""Pause after a scan that failed."""

POLL_S: Final = 0.01
"""How often it is looked whether what was being written has been."""

LATEST_MAX: Final = 64
"""Flushes that are remembered."""

NAMESPACES_TOLD_MAX: Final = 1024
"""So that a status fits one frame; a tier may have had more."""

log = logging.getLogger("tierd")


class TierFlush:
    """How it goes in one storage tier."""

    def __init__(self, tier: StorageTier) -> None:
        self.tier = tier
        self.blocks = 0
        """Blocks dropped."""
        self.empty = False
        """A scan has found nothing."""
        self.why = ""
        """Why the tier may still have some."""

    def status(self) -> dict[str, object]:
        """For PROGRESS and DONE."""
        return {
            "name": self.tier.name,
            "shared": self.tier.raw.shared,
            "blocks": self.blocks,
            "empty": self.empty,
            "why": self.why,
        }


class Flush:
    """One flush: of namespaces whose digest begins with `prefix`, in hex."""

    def __init__(self, prefix: str, *, host: bool, tiers: Sequence[StorageTier]) -> None:
        self.prefix = prefix
        self.host = host
        self.host_blocks = 0
        """Blocks that L2 no longer has."""
        self.leased_blocks = 0
        """Those of them that somebody still had when they were dropped."""
        self.tiers = [TierFlush(tier) for tier in tiers]
        self.by_namespace: Counter[str] = Counter()
        self.ended = False
        """It came to its end, which a daemon that stops does not wait for."""
        self.done = asyncio.Event()
        self.began_s = asyncio.get_running_loop().time()

    def covers(self, digest: bytes) -> bool:
        """Whether a namespace is flushed."""
        return digest.hex().startswith(self.prefix)

    def status(self) -> dict[str, object]:
        """For PROGRESS and DONE."""
        return {
            "complete": self.ended and all(tier.empty for tier in self.tiers),
            "host": {
                "flushed": self.host,
                "blocks": self.host_blocks,
                "leased": self.leased_blocks,
            },
            "tiers": [tier.status() for tier in self.tiers],
            "namespaces": dict(self.by_namespace.most_common(NAMESPACES_TOLD_MAX)),
        }


class Flushes:
    """Carries out flushes, one at a time."""

    def __init__(
        self,
        memory: HostMemory,
        backups: Backups,
        promotions: Promotions,
        tiers: Sequence[StorageTier],
    ) -> None:
        self.tiers_alone = asyncio.Lock()
        """Whoever has it is the only one that puts blocks into tiers, but for backups."""
        self._memory = memory
        self._backups = backups
        self._promotions = promotions
        self._tiers = tiers
        self._current: Flush | None = None
        self._latest: deque[Flush] = deque(maxlen=LATEST_MAX)

    def latest(self, digest: bytes, tier: StorageTier) -> float | None:
        """When a flush that covers this last dropped blocks, on the loop's clock; None if none of
        the latest did."""
        for flush in reversed(self._latest):
            if flush.covers(digest) and any(told.tier is tier for told in flush.tiers):
                return flush.began_s
        return None

    def begin(self, prefix: str, *, host: bool, numbers: Sequence[int]) -> Flush:
        """A flush of L2, if `host`, and of tiers by their numbers; `run` carries it out.

        Raises RefusedError while another one is going on.
        """
        if self._current is not None:
            raise RefusedError("a flush is going on already")
        tiers = [self._tiers[number] for number in dict.fromkeys(numbers)]
        self._current = Flush(prefix, host=host, tiers=tiers)
        return self._current

    async def run(self, flush: Flush) -> None:
        """Until nothing that was there can be served again, or a tier will not do it."""
        assert flush is self._current
        self._latest.append(flush)
        self._memory.counters["flushes_total"] += 1
        self._backups.barred = self._promotions.barred = flush.covers
        try:
            self._promotions.void(flush.covers)
            self._backups.give_up(flush.covers)
            if flush.host:
                await self._drop_host(flush)
            async with self.tiers_alone:
                while self._backups.under_way(flush.covers):
                    await asyncio.sleep(POLL_S)
                async with asyncio.TaskGroup() as group:
                    for tier in flush.tiers:
                        group.create_task(_empty(flush, tier))
            await self._in_slices(flush, lambda space, slots: self._lost(flush, space, slots))
            flush.ended = True
            self._memory.counters["flushed_blocks_total"] += flush.by_namespace.total()
            log.info("flushed %s: %s", flush.prefix or "everything", flush.status())
        finally:
            self._backups.barred = self._promotions.barred = nobody
            self._current = None
            flush.done.set()
        if flush.host:
            # What was stored meanwhile, and nobody was to write.
            await self._in_slices(flush, self._offer)

    async def _drop_host(self, flush: Flush) -> None:
        for space in list(self._memory.host.spaces.values()):
            if flush.covers(space.digest):
                # What is leaving L2 is what tiers were to get: all at once, since it may be
                # asked for, and stay, before its turn comes.
                leaving = [slot for slot in space.leaving if slot not in space.dropped]
                self._drop(flush, space, leaving)
        await self._in_slices(flush, lambda space, slots: self._drop(flush, space, slots))

    def _drop(self, flush: Flush, space: Space, slots: Sequence[int]) -> None:
        self._memory.drop(space, slots, Dropped.FLUSHED)
        flush.host_blocks += len(slots)
        flush.leased_blocks += len(space.dropped.intersection(slots))
        flush.by_namespace[space.digest.hex()] += len(slots)

    def _lost(self, flush: Flush, space: Space, slots: Sequence[int]) -> None:
        """Blocks that L2 has are in none of the flushed tiers."""
        bits = sum(1 << self._tiers.index(each.tier) for each in flush.tiers)
        self._backups.lost(space, slots, bits)

    def _offer(self, space: Space, slots: Sequence[int]) -> None:
        self._backups.offer(space, slots, Moment.STORED)

    async def _in_slices(self, flush: Flush, take: Callable[[Space, Sequence[int]], None]) -> None:
        """Give `take` the blocks that L2 has now of the namespaces, as far as they are still
        there when their turn comes."""
        for space in list(self._memory.host.spaces.values()):
            if not flush.covers(space.digest):
                continue
            items = space.chain.items
            hashes = list(items)
            for at in range(0, len(hashes), SLICE):
                found = map(items.get, hashes[at : at + SLICE])
                take(space, [slot for slot in found if slot is not None])
                await asyncio.sleep(0)


async def _empty(flush: Flush, told: TierFlush) -> None:
    """Drop what a tier has until a scan finds nothing."""
    for _ in range(PASSES_MAX):
        found, told.why = await _pass(flush, told)
        if told.why:
            await asyncio.sleep(RETRY_S)
        elif not found:
            told.empty = True
            return
        else:
            told.why = "blocks still come to it from elsewhere"


async def _pass(flush: Flush, told: TierFlush) -> tuple[bool, str]:
    """Scan a tier and drop what is covered; whether anything was, and why not all is gone."""
    batches: dict[bytes, list[bytes]] = {}
    found = False

    async def drop(namespace: bytes) -> None:
        hashes = batches.pop(namespace)
        dropped = await told.tier.delete(namespace, hashes)
        told.blocks += dropped
        flush.by_namespace[namespace.hex()] += dropped

    async def take(header: BlockHeader) -> None:
        nonlocal found
        namespace = header.key.namespace
        if flush.covers(namespace):
            found = True
            batches.setdefault(namespace, []).append(header.key.block_hash)
            if len(batches[namespace]) == DELETE_BATCH:
                await drop(namespace)

    async def rest() -> None:
        for namespace in list(batches):
            await drop(namespace)

    why = await told.tier.each(take, rest)
    return found, why
