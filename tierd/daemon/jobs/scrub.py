"""Scrub: reads all blocks of tiers, slowly and at the lowest priority, to find damage early.

A tier drops a damaged block, as on any read. The scrub writes it again if L2 or another tier has
it. Blocks are read into temporary memory, so a scrub neither evicts blocks from L2 nor adds any.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from tierd.backend import BlockHeader, GetRequest, GetResult, Outcome, PutRequest, checksum
from tierd.daemon.jobs.cleaning import Sweep
from tierd.daemon.jobs.flush import Flushes
from tierd.daemon.jobs.scratch import Scratch, scratch_memory
from tierd.daemon.l2.memory import HostMemory
from tierd.daemon.l3.backup import Backups
from tierd.daemon.l3.read_scheduler import LAST_NS, QueuedRead, ReadScheduler
from tierd.daemon.l3.tier import BATCH_BLOCKS_MAX, BATCH_BYTES_MAX, StorageTier
from tierd.errors import BackendError, RefusedError
from tierd.types import slot_bytes_for

AWAY_S_MAX: Final = 60.0
"""How long a scrub waits for a tier that takes no reads before it gives up."""

AWAY_POLL_S: Final = 0.5
"""How often a scrub checks whether such a tier takes reads again."""

log = logging.getLogger("tierd")


class TierScrub:
    """Progress of a scrub in one storage tier."""

    def __init__(self, tier: StorageTier) -> None:
        self.tier = tier
        self.blocks = 0
        """Blocks that the scrub read or tried to read."""
        self.size_bytes = 0
        self.corrupt = 0
        """Damaged blocks."""
        self.unreadable = 0
        """Blocks that the tier failed to deliver."""
        self.repaired = 0
        """Damaged or unreadable blocks that were written again."""
        self.barred = 0
        """Deleted blocks that flushes had barred."""
        self.ended = False
        self.why = ""
        """Why blocks were not read, or barred blocks not deleted; empty if none."""

    def deleted(self, digest: bytes, count: int) -> None:
        """Count deleted barred blocks of a namespace."""
        self.barred += count

    def status(self) -> dict[str, object]:
        """Return the tier's part of PROGRESS and DONE."""
        return {
            "name": self.tier.name,
            "blocks": self.blocks,
            "blocks_max": self.tier.blocks,
            "bytes": self.size_bytes,
            "corrupt": self.corrupt,
            "unreadable": self.unreadable,
            "repaired": self.repaired,
            "barred": self.barred,
            "ended": self.ended,
            "why": self.why,
        }


class ScrubJob:
    """One scrub of some tiers, one after another."""

    def __init__(self, tiers: Sequence[StorageTier], bytes_per_s: int) -> None:
        self.tiers = [TierScrub(tier) for tier in tiers]
        self.bytes_per_s = bytes_per_s
        self.done = asyncio.Event()
        self.stop = asyncio.Event()

    def status(self) -> dict[str, object]:
        """Return the body of PROGRESS and DONE."""
        return {
            "complete": all(each.ended and not each.why for each in self.tiers),
            "stopped": self.stop.is_set(),
            "bytes_per_s": self.bytes_per_s,
            "tiers": [each.status() for each in self.tiers],
        }


class Scrubs:
    """Carries out scrubs, one at a time."""

    def __init__(
        self,
        memory: HostMemory,
        backups: Backups,
        read_scheduler: ReadScheduler,
        flushes: Flushes,
        tiers: Sequence[StorageTier],
    ) -> None:
        self.current: ScrubJob | None = None
        """The scrub in progress, if any."""
        self.memory = memory
        self.backups = backups
        self.read_scheduler = read_scheduler
        self.flushes = flushes
        self.tiers = list(tiers)

    def begin(self, numbers: Sequence[int], bytes_per_s: int) -> ScrubJob:
        """Begin a scrub of tiers by their numbers, or of all tiers that are not shared.

        `run` carries it out. Raises RefusedError while another scrub is in progress, or without
        a tier.
        """
        if self.current is not None:
            raise RefusedError("another scrub is in progress")
        chosen = [self.tiers[number] for number in dict.fromkeys(numbers)]
        chosen = chosen or [tier for tier in self.tiers if not tier.raw.shared]
        if not chosen:
            raise RefusedError("all tiers are shared with other nodes: name the tiers to scrub")
        self.current = ScrubJob(chosen, bytes_per_s)
        return self.current

    async def run(self, scrub: ScrubJob) -> None:
        """Read all tiers of the scrub; end early when `scrub.stop` is set."""
        assert scrub is self.current
        try:
            for part in scrub.tiers:
                if not scrub.stop.is_set():
                    await self._read(scrub, part)
            log.info("scrubbed: %s", scrub.status())
        finally:
            self.current = None
            scrub.done.set()

    async def _read(self, scrub: ScrubJob, part: TierScrub) -> None:
        with scratch_memory() as scratch:
            reading = _Reading(self, scrub, part, scratch)
            sweep = Sweep(part.tier, part.deleted)

            async def rest() -> None:
                await reading.batch()
                await sweep.rest()

            unread = await part.tier.each(reading.take, rest, sweep.take)
            part.why = unread or sweep.why
        part.ended = True


class _Reading:
    """Reads the blocks of one tier, batch by batch."""

    def __init__(self, scrubs: Scrubs, scrub: ScrubJob, part: TierScrub, scratch: Scratch) -> None:
        self._scrubs = scrubs
        self._scrub = scrub
        self._part = part
        self._tier = part.tier
        self._scratch = scratch
        self._batch: list[BlockHeader] = []
        self._batch_bytes = 0
        self._due_s = asyncio.get_running_loop().time()

    async def take(self, header: BlockHeader) -> None:
        """Add a block that the tier lists. Raises BackendError to end the scan."""
        if self._scrub.stop.is_set():
            raise BackendError("the scrub was stopped")
        size_bytes = slot_bytes_for(header.length)
        if self._batch and (
            header.key.namespace != self._batch[0].key.namespace
            or len(self._batch) == BATCH_BLOCKS_MAX
            or self._batch_bytes + size_bytes > BATCH_BYTES_MAX
        ):
            await self.batch()
        self._batch.append(header)
        self._batch_bytes += size_bytes

    async def batch(self) -> None:
        """Read the collected blocks, and repair damaged ones. Raises BackendError."""
        headers, self._batch, self._batch_bytes = self._batch, [], 0
        if not headers:
            return
        await self._wait_for_tier()
        views = self._scratch.views([slot_bytes_for(header.length) for header in headers])
        results = await self._get(headers, views)
        lost = []
        for header, view, result in zip(headers, views, results, strict=True):
            if result.outcome is Outcome.MISS:
                continue  # The tier has dropped it since.
            self._part.blocks += 1
            self._part.size_bytes += header.length
            self._part.corrupt += result.outcome is Outcome.CORRUPT
            self._part.unreadable += result.outcome is Outcome.ERROR
            if result.outcome is not Outcome.HIT:
                lost.append((header, view))
        self._count(results)
        if lost:
            await self._repair(lost)
        await self._pace(sum(header.length for header in headers))

    async def _get(
        self, headers: Sequence[BlockHeader], views: Sequence[memoryview]
    ) -> list[GetResult]:
        read = QueuedRead(self._tier.reads, sum(map(len, views)), lambda: (LAST_NS, 0))
        async with self._scrubs.read_scheduler.take(read):
            requests = [
                GetRequest(header.key.block_hash, view, header.length)
                for header, view in zip(headers, views, strict=True)
            ]
            return await self._tier.get(headers[0].key.namespace, requests)

    def _count(self, results: Sequence[GetResult]) -> None:
        outcomes = [result.outcome for result in results]
        counters = self._scrubs.memory.counters
        counters["scrubbed_blocks_total"] += len(outcomes) - outcomes.count(Outcome.MISS)
        counters["scrub_corrupt_total"] += outcomes.count(Outcome.CORRUPT)
        counters["scrub_unreadable_total"] += outcomes.count(Outcome.ERROR)

    async def _wait_for_tier(self) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + AWAY_S_MAX
        while not self._tier.reads_allowed:
            if loop.time() >= end_s:
                raise BackendError(f"the tier has taken no reads for {AWAY_S_MAX:g} s")
            await self._sleep(AWAY_POLL_S)

    async def _pace(self, size_bytes: int) -> None:
        """Wait until the speed limit lets the next batch be read."""
        now_s = asyncio.get_running_loop().time()
        # Time lost to a slow tier is not made up for.
        self._due_s = max(self._due_s, now_s - 1.0) + size_bytes / self._scrub.bytes_per_s
        await self._sleep(max(0.0, self._due_s - now_s))

    async def _sleep(self, seconds: float) -> None:
        """Sleep; raise BackendError as soon as the scrub is stopped."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._scrub.stop.wait()
        if self._scrub.stop.is_set():
            raise BackendError("the scrub was stopped")

    # --- repair ---------------------------------------------------------------------

    async def _repair(self, lost: Sequence[tuple[BlockHeader, memoryview]]) -> None:
        """Write lost blocks again from L2 or another tier."""
        async with self._scrubs.flushes.tiers_alone:
            for header, view in lost:
                if await self._from_host(header) or await self._from_tiers(header, view):
                    self._part.repaired += 1
                    self._scrubs.memory.counters["scrub_repaired_total"] += 1

    async def _from_host(self, header: BlockHeader) -> bool:
        memory = self._scrubs.memory
        namespace, block_hash = header.key
        space = memory.host.spaces.get(namespace)
        slot = space.items.get(block_hash) if space is not None else None
        if space is None or slot is None or slot in space.unverified:
            return False
        memory.host.hold(space, [slot])
        try:
            digest = space.checksums[slot]
            if digest is None:
                digest = await memory.threads.run(checksum, memory.payload(space, slot))
            parent = space.identity(slot)[1]
            view = memory.arena.view(space, slot)
            length = space.namespace.block_bytes
            stored = await self._put(
                namespace, PutRequest(block_hash, parent, digest, view, length)
            )
            if not stored:
                bit = 1 << self._scrubs.tiers.index(self._tier)
                self._scrubs.backups.note_lost(space, [slot], bit)
            return stored
        finally:
            memory.let_go(space, [slot])

    async def _from_tiers(self, header: BlockHeader, view: memoryview) -> bool:
        namespace, block_hash = header.key
        for other in self._scrubs.tiers:
            if other is self._tier or not other.reads_allowed:
                continue
            [result] = await other.get(namespace, [GetRequest(block_hash, view, header.length)])
            sound = result.header
            if sound is not None:
                request = PutRequest(block_hash, sound.parent, sound.checksum, view, sound.length)
                return await self._put(namespace, request)
        return False

    async def _put(self, namespace: bytes, request: PutRequest) -> bool:
        return await self._tier.put(namespace, [request]) == [Outcome.STORED]
