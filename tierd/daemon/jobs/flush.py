"""Flush: drops the blocks of namespaces from L2 and from storage tiers.

In a tier a mark bars the blocks; they need not all be found. Once the mark is there, and every
node that shares the tier has had time to read it, no node asks for the old keys. Deleting the
blocks only frees space, and the status reports what could not be deleted. Until the marks are
written, no block of the namespaces is read from a tier or written to one. Blocks that engines
store meanwhile stay in L2 and are offered to the tiers afterwards. Leased slots keep their bytes
until the leases end, but no lookup finds them.

After a flush by another node, L2 keeps its blocks but no longer writes them to that tier, because
they may be the blocks that the flush was meant to drop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from tierd.core.l2.space import Space
from tierd.core.l3.epochs import EPOCH_VALID_S, Mark
from tierd.core.l3.writes import WriteMoment
from tierd.core.reasons import Dropped
from tierd.daemon.jobs.cleaning import Cleaning
from tierd.daemon.l2.memory import HostMemory
from tierd.daemon.l3.backup import Backups, Covers, no_namespace
from tierd.daemon.l3.epochs import MARGIN_S, News
from tierd.daemon.l3.promotion import Promotions, Spawn
from tierd.daemon.l3.tier import StorageTier
from tierd.errors import BackendError, RefusedError

SLICE: Final = 256
"""Blocks of L2 dropped, or offered again, before the loop does other work: about 1 ms."""

OTHERS_S: Final = EPOCH_VALID_S + MARGIN_S
"""How long a node that sees another node's flush neither reads nor writes the namespaces: the
flush may still be adding marks to other tiers that both nodes use."""

POLL_S: Final = 0.01
"""How often a flush checks whether writes in progress have ended."""

LATEST_MAX: Final = 64
"""Maximum flushes remembered."""

NAMESPACES_TOLD_MAX: Final = 1024
"""Maximum namespaces in a status, so that it fits one frame."""

Take = Callable[[Space, Sequence[int]], None]

log = logging.getLogger("tierd")


class TierFlush:
    """Progress of a flush in one storage tier."""

    def __init__(self, tier: StorageTier) -> None:
        self.tier = tier
        self.final = False
        """Whether no node can read the flushed blocks from the tier any longer."""
        self.waits = ""
        """What the flush waits for in this tier; empty if nothing."""
        self.blocks = 0
        """Blocks deleted."""
        self.why = ""
        """Why the flush failed in this tier; empty if it did not."""
        self.cleaning: Cleaning | None = None
        self.mark: Mark | None = None
        """The flush's mark, once the tier has it."""

    def status(self) -> dict[str, object]:
        """Return the tier's part of PROGRESS and DONE."""
        return {
            "name": self.tier.name,
            "shared": self.tier.raw.shared,
            "final": self.final,
            "waits": self.waits,
            "blocks": self.blocks,
            "left": self.cleaning.left if self.cleaning is not None else 0,
            "garbage": self.cleaning.why if self.cleaning is not None else "",
            "why": self.why,
        }


class FlushJob:
    """One flush, of the namespaces whose digests begin with `prefix`, in hex."""

    def __init__(self, prefix: str, *, host: bool, tiers: Sequence[StorageTier]) -> None:
        self.prefix = prefix
        self.host = host
        self.host_blocks = 0
        """Blocks dropped from L2."""
        self.leased_blocks = 0
        """Dropped blocks that were still held, such as by a lease."""
        self.tiers = [TierFlush(tier) for tier in tiers]
        self.by_namespace: Counter[str] = Counter()
        self.dropped = False
        """Whether L2 is done with its part."""
        self.yields = asyncio.Event()
        """Set when another flush begins, which continues the deletions."""
        self.done = asyncio.Event()
        self.began_s = asyncio.get_running_loop().time()

    def covers(self, digest: bytes) -> bool:
        """Whether the flush includes a namespace."""
        return digest.hex().startswith(self.prefix)

    @property
    def complete(self) -> bool:
        """Whether no flushed block can be served again; deletions may continue."""
        return self.dropped and all(tier.final for tier in self.tiers)

    def status(self) -> dict[str, object]:
        """Return the body of PROGRESS and DONE."""
        return {
            "complete": self.complete,
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
        spawn: Spawn,
    ) -> None:
        self.tiers_alone = asyncio.Lock()
        """Excludes flushes and all other writers to tiers, except backups, from each other."""
        self._memory = memory
        self._backups = backups
        self._promotions = promotions
        self._tiers = tiers
        self._spawn = spawn
        self._bars: list[Covers] = []
        self._risen: asyncio.Queue[tuple[StorageTier, News, tuple[str, ...]]] = asyncio.Queue()
        for tier in tiers:
            tier.epochs.on_news = partial(self.note_news, tier)
        self._current: FlushJob | None = None
        self._latest: deque[FlushJob] = deque(maxlen=LATEST_MAX)

    def latest(self, digest: bytes, tier: StorageTier) -> float | None:
        """Return when the latest flush of a namespace in a tier began, by the loop's clock.

        None if no remembered flush did that.
        """
        for flush in reversed(self._latest):
            if flush.covers(digest) and any(part.tier is tier for part in flush.tiers):
                return flush.began_s
        return None

    def begin(self, prefix: str, *, host: bool, numbers: Sequence[int]) -> FlushJob:
        """Begin a flush of tiers by their numbers and, if `host`, of L2; `run` carries it out.

        Raises RefusedError while another flush is not complete. A complete flush that still
        deletes blocks ends: the new one deletes all barred blocks.
        """
        if self._current is not None:
            if not self._current.complete:
                raise RefusedError("another flush is in progress")
            self._current.yields.set()
        tiers = [self._tiers[number] for number in dict.fromkeys(numbers)]
        self._current = FlushJob(prefix, host=host, tiers=tiers)
        return self._current

    async def run(self, flush: FlushJob) -> None:
        """Carry out a flush until it is complete or has failed, and the deletions have ended."""
        self._latest.append(flush)
        self._memory.counters["flushes_total"] += 1
        try:
            with self._barred(flush.covers):
                await self._bar(flush)
            if flush.host:
                # Blocks stored during the flush, which were not written to tiers.
                await self._in_slices(flush.covers, self._offer)
            async with asyncio.TaskGroup() as group:
                for part in flush.tiers:
                    if part.mark is not None:
                        group.create_task(_agree(part, part.mark))
                        group.create_task(self._clean(flush, part))
            self._memory.counters["flushed_blocks_total"] += flush.by_namespace.total()
            log.info("flushed %s: %s", flush.prefix or "everything", flush.status())
        finally:
            if self._current is flush:
                self._current = None
            flush.done.set()

    async def _bar(self, flush: FlushJob) -> None:
        """Drop the blocks from L2, and add marks to the tiers."""
        self._promotions.void(flush.covers)
        self._backups.give_up(flush.covers)
        if flush.host:
            await self._drop_host(flush)
        flush.dropped = True
        async with self.tiers_alone:
            # A write that ends after the mark would belong to the new epoch.
            while self._backups.under_way(flush.covers):
                await asyncio.sleep(POLL_S)
            # Before the marks: if the daemon ends in between, the next incarnation must not find
            # in a ledger that a tier has blocks which its mark bars.
            bits = sum(1 << self._tiers.index(part.tier) for part in flush.tiers)
            await self._in_slices(
                flush.covers, lambda space, slots: self._backups.note_lost(space, slots, bits)
            )
            async with asyncio.TaskGroup() as group:
                for part in flush.tiers:
                    group.create_task(_mark(part, flush.prefix))

    async def _clean(self, flush: FlushJob, part: TierFlush) -> None:
        def deleted(digest: bytes, count: int) -> None:
            part.blocks += count
            flush.by_namespace[digest.hex()] += count

        part.cleaning = Cleaning(part.tier, flush.yields, deleted)
        await part.cleaning.run()

    def note_news(self, tier: StorageTier, news: News, prefixes: tuple[str, ...]) -> None:
        """Queue news of a tier's marks for `follow`."""
        self._risen.put_nowait((tier, news, prefixes))

    async def follow(self) -> None:
        """React to flushes by other nodes and to tiers that lost their marks, forever."""
        while True:
            tier, news, prefixes = await self._risen.get()
            self._spawn(partial(self._follow, tier, news, prefixes), "marks that are news")

    async def _follow(self, tier: StorageTier, news: News, prefixes: tuple[str, ...]) -> None:
        """Keep the present blocks of L2 and other tiers out of a tier that was flushed.

        A tier that has only lost its blocks may get them again.
        """

        def covers(digest: bytes) -> bool:
            return digest.hex().startswith(prefixes)

        def lost(space: Space, slots: Sequence[int]) -> None:
            self._backups.note_lost(space, slots, bit)

        def withhold(space: Space, slots: Sequence[int]) -> None:
            self._backups.withhold(space, slots, bit)

        bit = 1 << self._tiers.index(tier)
        log.info("storage tier %s has new flush marks: %s", tier.name, news.value)
        if not tier.raw.shared:
            # The mark of an earlier flush of this node that could not be confirmed then.
            news = News.LOST
        ends_s = asyncio.get_running_loop().time()
        if news is News.FLUSHED:
            # The flush may still be adding marks to other tiers.
            ends_s += OTHERS_S
        with self._barred(covers):
            self._promotions.void(covers)
            self._backups.give_up(covers)
            while self._backups.under_way(covers):
                await asyncio.sleep(POLL_S)
            await self._in_slices(covers, lost if news is News.LOST else withhold)
            tier.epochs.heed(prefixes)
            await asyncio.sleep(ends_s - asyncio.get_running_loop().time())
        await self._in_slices(covers, self._offer)

    @contextmanager
    def _barred(self, covers: Covers) -> Iterator[None]:
        """Keep blocks of these namespaces from being read from tiers or written to them."""
        bars = self._bars
        bars.append(covers)
        try:
            self._backups.barred = self._promotions.barred = lambda digest: any(
                bar(digest) for bar in bars
            )
            yield
        finally:
            bars.remove(covers)
            if not bars:
                self._backups.barred = self._promotions.barred = no_namespace

    async def _drop_host(self, flush: FlushJob) -> None:
        for space in list(self._memory.host.spaces.values()):
            if flush.covers(space.digest):
                # Evicting blocks are dropped all at once: a request could revive one that waits.
                evicting = [slot for slot in space.evicting if slot not in space.dropped]
                self._drop(flush, space, evicting)
        await self._in_slices(flush.covers, lambda space, slots: self._drop(flush, space, slots))

    def _drop(self, flush: FlushJob, space: Space, slots: Sequence[int]) -> None:
        self._memory.drop(space, slots, Dropped.FLUSHED)
        flush.host_blocks += len(slots)
        flush.leased_blocks += len(space.dropped & set(slots))
        flush.by_namespace[space.digest.hex()] += len(slots)

    def _offer(self, space: Space, slots: Sequence[int]) -> None:
        self._backups.offer(space, slots, WriteMoment.STORED)

    async def _in_slices(self, covers: Covers, take: Take) -> None:
        """Call `take` with the namespaces' blocks in L2 that are still there by their slice."""
        for space in list(self._memory.host.spaces.values()):
            if not covers(space.digest):
                continue
            hashes = list(space.items)
            for at in range(0, len(hashes), SLICE):
                take(space, space.find(hashes[at : at + SLICE]))
                await asyncio.sleep(0)


async def _mark(part: TierFlush, prefix: str) -> None:
    """Add the flush's mark to a tier, or note why that failed."""
    if not part.tier.is_open:
        part.why = part.tier.why or "the tier has not been opened yet"
        return
    try:
        part.mark = await part.tier.epochs.bar(prefix)
    except BackendError as error:
        part.why = str(error)
    else:
        part.final = not part.tier.raw.shared


async def _agree(part: TierFlush, mark: Mark) -> None:
    """Wait until other nodes use the mark too."""
    if part.final:
        return
    part.waits = f"other nodes may serve flushed blocks for up to {OTHERS_S:g} s"
    try:
        await part.tier.epochs.agree(mark)
    except BackendError as error:
        part.why = str(error)
    else:
        part.final = True
    finally:
        part.waits = ""
