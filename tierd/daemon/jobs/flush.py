"""Flush: what was there before is served to nobody afterwards, by L2 and by no tier.

A tier's mark does it, not finding every block: once it is there, and every node of a shared tier
has had the time to see it, blocks of before have keys that nobody asks for. Deleting them only
makes room, and what it could not do is told. Until the marks are there nothing of the namespaces
is brought from a tier or written to one, so what engines store meanwhile stays in L2 and is
offered to the tiers afterwards. Slots that are leased keep their bytes until the leases end;
nobody finds them any more.

Of a flush by another node, L2 keeps what it has, but writes none of it to that tier any more:
it may be what the flush was for.
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
from tierd.daemon.l3.backup import Backups, Covers, nobody
from tierd.daemon.l3.epochs import MARGIN_S, News
from tierd.daemon.l3.promotion import Promotions, Spawn
from tierd.daemon.l3.tier import StorageTier
from tierd.errors import BackendError, RefusedError

SLICE: Final = 256
"""Blocks of L2 dropped, or offered again, between two turns of the loop: about 1 ms."""

OTHERS_S: Final = EPOCH_VALID_S + MARGIN_S
"""How long a node that has seen another one's flush brings and writes nothing of its namespaces:
the flush may still be adding marks to other tiers that both have."""

POLL_S: Final = 0.01
"""How often it is looked whether what was being written has been."""

LATEST_MAX: Final = 64
"""Flushes that are remembered."""

NAMESPACES_TOLD_MAX: Final = 1024
"""So that a status fits one frame; a tier may have had more."""

Take = Callable[[Space, Sequence[int]], None]

log = logging.getLogger("tierd")


class TierFlush:
    """How it goes in one storage tier."""

    def __init__(self, tier: StorageTier) -> None:
        self.tier = tier
        self.final = False
        """No node can be served from it what was there before."""
        self.waits = ""
        """What it waits for."""
        self.blocks = 0
        """Blocks deleted."""
        self.why = ""
        """Why it is not final."""
        self.cleaning: Cleaning | None = None
        self.mark: Mark | None = None
        """Its mark, once that is in the tier."""

    def status(self) -> dict[str, object]:
        """For PROGRESS and DONE."""
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
        self.dropped = False
        """L2 has none of it any more, if it was to be dropped."""
        self.yields = asyncio.Event()
        """Another flush is to begin, which goes on with deleting."""
        self.done = asyncio.Event()
        self.began_s = asyncio.get_running_loop().time()

    def covers(self, digest: bytes) -> bool:
        """Whether a namespace is flushed."""
        return digest.hex().startswith(self.prefix)

    @property
    def complete(self) -> bool:
        """Nothing of before can be served again; deleting may go on."""
        return self.dropped and all(tier.final for tier in self.tiers)

    def status(self) -> dict[str, object]:
        """For PROGRESS and DONE."""
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
        """Whoever has it is the only one that puts blocks into tiers, but for backups."""
        self._memory = memory
        self._backups = backups
        self._promotions = promotions
        self._tiers = tiers
        self._spawn = spawn
        self._bars: list[Covers] = []
        self._risen: asyncio.Queue[tuple[StorageTier, News, tuple[str, ...]]] = asyncio.Queue()
        for tier in tiers:
            tier.epochs.on_news = partial(self.risen, tier)
        self._current: FlushJob | None = None
        self._latest: deque[FlushJob] = deque(maxlen=LATEST_MAX)

    def latest(self, digest: bytes, tier: StorageTier) -> float | None:
        """When a flush that covers this last dropped blocks, on the loop's clock; None if none of
        the latest did."""
        for flush in reversed(self._latest):
            if flush.covers(digest) and any(told.tier is tier for told in flush.tiers):
                return flush.began_s
        return None

    def begin(self, prefix: str, *, host: bool, numbers: Sequence[int]) -> FlushJob:
        """A flush of L2, if `host`, and of tiers by their numbers; `run` carries it out.

        Raises RefusedError while another one is going on that is not complete yet. One that only
        deletes gives way: the new one deletes whatever is barred.
        """
        if self._current is not None:
            if not self._current.complete:
                raise RefusedError("a flush is going on already")
            self._current.yields.set()
        tiers = [self._tiers[number] for number in dict.fromkeys(numbers)]
        self._current = FlushJob(prefix, host=host, tiers=tiers)
        return self._current

    async def run(self, flush: FlushJob) -> None:
        """Until nothing that was there can be served again, or a tier will not have it so, and
        what can be deleted is."""
        self._latest.append(flush)
        self._memory.counters["flushes_total"] += 1
        try:
            with self._barred(flush.covers):
                await self._bar(flush)
            if flush.host:
                # What was stored meanwhile, and nobody was to write.
                await self._in_slices(flush.covers, self._offer)
            async with asyncio.TaskGroup() as group:
                for told in flush.tiers:
                    if told.mark is not None:
                        group.create_task(_agree(told, told.mark))
                        group.create_task(self._clean(flush, told))
            self._memory.counters["flushed_blocks_total"] += flush.by_namespace.total()
            log.info("flushed %s: %s", flush.prefix or "everything", flush.status())
        finally:
            if self._current is flush:
                self._current = None
            flush.done.set()

    async def _bar(self, flush: FlushJob) -> None:
        """Empty L2, and have marks in the tiers."""
        self._promotions.void(flush.covers)
        self._backups.give_up(flush.covers)
        if flush.host:
            await self._drop_host(flush)
        flush.dropped = True
        async with self.tiers_alone:
            # What began to be written after the mark would be of the new epoch.
            while self._backups.under_way(flush.covers):
                await asyncio.sleep(POLL_S)
            # Before the marks: a daemon that ends in between must not leave to the next one that
            # a tier has what its mark bars.
            bits = sum(1 << self._tiers.index(told.tier) for told in flush.tiers)
            await self._in_slices(
                flush.covers, lambda space, slots: self._backups.lost(space, slots, bits)
            )
            async with asyncio.TaskGroup() as group:
                for told in flush.tiers:
                    group.create_task(_mark(told, flush.prefix))

    async def _clean(self, flush: FlushJob, told: TierFlush) -> None:
        def deleted(digest: bytes, count: int) -> None:
            told.blocks += count
            flush.by_namespace[digest.hex()] += count

        told.cleaning = Cleaning(told.tier, flush.yields, deleted)
        await told.cleaning.run()

    def risen(self, tier: StorageTier, news: News, prefixes: tuple[str, ...]) -> None:
        """A tier has been flushed, by another node as a rule, or has lost what it had; `follow`
        sees to it."""
        self._risen.put_nowait((tier, news, prefixes))

    async def follow(self) -> None:
        """Do what flushes by other nodes and tiers that forget ask for, for ever."""
        while True:
            tier, news, prefixes = await self._risen.get()
            self._spawn(partial(self._follow, tier, news, prefixes), "marks that are news")

    async def _follow(self, tier: StorageTier, news: News, prefixes: tuple[str, ...]) -> None:
        """Have nothing that L2 has now, and nothing that another tier has, get into a tier that
        another node has flushed. One that has only lost its blocks may get them again."""

        def covers(digest: bytes) -> bool:
            return digest.hex().startswith(prefixes)

        def lost(space: Space, slots: Sequence[int]) -> None:
            self._backups.lost(space, slots, bit)

        def withhold(space: Space, slots: Sequence[int]) -> None:
            self._backups.withhold(space, slots, bit)

        bit = 1 << self._tiers.index(tier)
        log.info("storage tier %s: it has new marks: %s", tier.name, news.value)
        if not tier.raw.shared:
            # A flush of before, whose mark it was not certain of.
            news = News.LOST
        ends_s = asyncio.get_running_loop().time()
        if news is News.FLUSHED:
            # It may still be adding marks to other tiers.
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
        """Meanwhile nothing of these namespaces is brought from a tier, or written to one."""
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
                self._backups.barred = self._promotions.barred = nobody

    async def _drop_host(self, flush: FlushJob) -> None:
        for space in list(self._memory.host.spaces.values()):
            if flush.covers(space.digest):
                # Tiers were to get what is being evicted: it goes all at once, since a request
                # could revive it before its turn comes.
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
        """Give `take` the blocks that L2 has now of the namespaces, as far as they are still
        there when their turn comes."""
        for space in list(self._memory.host.spaces.values()):
            if not covers(space.digest):
                continue
            hashes = list(space.items)
            for at in range(0, len(hashes), SLICE):
                take(space, space.find(hashes[at : at + SLICE]))
                await asyncio.sleep(0)


async def _mark(told: TierFlush, prefix: str) -> None:
    """Have the flush's mark in a tier, or say why not."""
    if not told.tier.is_open:
        told.why = told.tier.why or "it has not been opened yet"
        return
    try:
        told.mark = await told.tier.epochs.bar(prefix)
    except BackendError as error:
        told.why = str(error)
    else:
        told.final = not told.tier.raw.shared


async def _agree(told: TierFlush, mark: Mark) -> None:
    """Wait until other nodes go by the mark as well."""
    if told.final:
        return
    told.waits = f"other nodes may go by what they knew for up to {OTHERS_S:g} s"
    try:
        await told.tier.epochs.agree(mark)
    except BackendError as error:
        told.why = str(error)
    else:
        told.final = True
    finally:
        told.waits = ""
