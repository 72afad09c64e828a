"""Warming: copies blocks that no request waits for yet into L2 or into a storage tier.

Warming has the lowest priority. Its reads start after the reads of all requests, leave one of a
tier's concurrent reads free, and are rare while engines are active. Warmed blocks do not evict
blocks that are leased, kept, or worth as much. Warming leases nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from tierd.backend import GetRequest, Outcome, PutRequest
from tierd.clock import Clock
from tierd.core.hints import PrefixHint, Priority
from tierd.core.l2.space import Space
from tierd.daemon.jobs.flush import Flushes
from tierd.daemon.jobs.scratch import Scratch, scratch_memory
from tierd.daemon.l2.memory import HostMemory
from tierd.daemon.l2.verification import Verification
from tierd.daemon.l3.backup import Backups
from tierd.daemon.l3.promotion import Promotions, Spawn, Waiter
from tierd.daemon.l3.read_scheduler import LAST_NS, QueuedRead
from tierd.daemon.l3.tier import StorageTier, batch_blocks
from tierd.wire.messages import Warmth

QUIET_NS: Final = 250_000_000
"""Engines count as active for this time after the last ACQUIRE, and while any lease exists."""

BUSY_SHARE: Final = 0.02
"""Maximum share of the time that warming reads while engines are active."""

POLL_S: Final = 0.02
"""How often warming checks whether engines are still active."""

ASKED_AT_ONCE: Final = 4096
"""Blocks per lookup in a tier: 1 ms of the loop."""

BATCHES_AHEAD: Final = 16
"""Maximum batches of one order that wait or are being read."""

AGAIN_S: Final = 0.05
"""Pause before the second attempt at blocks that an engine was storing, or that needed the slots
of evicting blocks."""

_FATES: Final = {
    None: Warmth.NO_ROOM,
    Outcome.MISS: Warmth.NOWHERE,
    Outcome.CORRUPT: Warmth.CORRUPT,
}
"""Outcome for a block that a promotion did not deliver; others mean that the tier was away."""


class WarmOrder(NamedTuple):
    """Options of an order to warm."""

    target: int = 0
    """0 for L2; n for storage tier number n - 1."""
    bytes_per_s: int = 0
    """Maximum read speed; 0 for no limit."""
    pin_ms: int = 0
    verify: bool = False


class Pace:
    """Limits the read speed of all orders that share it."""

    def __init__(self) -> None:
        self._due_s = 0.0

    async def wait(self, size_bytes: int, bytes_per_s: int) -> None:
        """Wait until more bytes may be read; return at once if `bytes_per_s` is 0."""
        if not bytes_per_s:
            return
        now_s = asyncio.get_running_loop().time()
        due_s = max(self._due_s, now_s)
        self._due_s = due_s + size_bytes / bytes_per_s
        await asyncio.sleep(due_s - now_s)


class Warming:
    """One order, and the outcome of each of its blocks."""

    def __init__(self, space: Space, hashes: Sequence[bytes], want: WarmOrder, pace: Pace) -> None:
        self.space = space
        self.hashes = hashes
        self.want = want
        self.pace = pace
        self.stop = asyncio.get_running_loop().create_future()
        """Done once the order is cancelled; see `cancel`."""
        self.fates: dict[bytes, Warmth] = dict.fromkeys(hashes, Warmth.LATE)
        self.sources: Counter[str] = Counter()
        """Number of copied blocks by source: a tier's name, or host memory."""
        self.pinned_blocks = 0
        self.unverified_blocks = 0
        """Blocks that could not be verified because they have no checksum yet."""

    def cancel(self) -> None:
        """Have the order end soon, with the blocks copied so far; idempotent."""
        if not self.stop.done():
            self.stop.set_result(None)

    def which(self, *fates: Warmth) -> list[bytes]:
        """Return the blocks with one of these outcomes, parents first."""
        return [block_hash for block_hash, fate in self.fates.items() if fate in fates]

    def all_are(self, hashes: Iterable[bytes], fate: Warmth) -> None:
        """Set the outcome of several blocks."""
        self.fates.update(dict.fromkeys(hashes, fate))

    @property
    def outcomes(self) -> bytes:
        """One outcome byte per block, in the order of the call."""
        return bytes(map(self.fates.__getitem__, self.hashes))

    def status(self) -> dict[str, object]:
        """Return the body of WARMED."""
        return {
            "from": dict(self.sources),
            "pinned": self.pinned_blocks,
            "unverified": self.unverified_blocks,
        }


class Warmings:
    """Carries out orders to warm."""

    def __init__(
        self,
        memory: HostMemory,
        backups: Backups,
        promotions: Promotions,
        verification: Verification,
        flushes: Flushes,
        tiers: Sequence[StorageTier],
        clock: Clock,
        spawn: Spawn,
    ) -> None:
        self.asked_ns = clock.monotonic_ns() - QUIET_NS
        """When an engine last sent ACQUIRE, CLOCK_MONOTONIC; set from outside."""
        self._memory = memory
        self._backups = backups
        self._promotions = promotions
        self._verification = verification
        self._flushes = flushes
        self._tiers = list(tiers)
        self._clock = clock
        self._spawn = spawn
        # One concurrent read of each tier is left to requests.
        self._reads = [asyncio.Semaphore(max(1, t.config.read_batches - 1)) for t in self._tiers]
        self._alone = asyncio.Lock()

    async def run(self, warming: Warming, deadline_s: float) -> None:
        """Carry out an order until it is done, cancelled, or at its deadline.

        Reads in progress are not waited for then: a backend may take long to end one.
        """
        work = self._fill_tier if warming.want.target else self._fill_host
        task = self._spawn(partial(work, warming), "warm")
        try:
            await asyncio.wait(
                (task, warming.stop), timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            task.cancel()
            self._memory.counters["warmed_blocks_total"] += len(warming.which(Warmth.BROUGHT))
        if warming.want.pin_ms and not warming.want.target:
            self._pin(warming)

    def _pin(self, warming: Warming) -> None:
        hint = PrefixHint(warming.want.pin_ms, 0, Priority.NORMAL, False)
        hashes = warming.which(Warmth.HERE, Warmth.BROUGHT)
        now_ns = self._clock.monotonic_ns()
        warming.pinned_blocks = self._memory.host.hint([warming.space], hashes, hint, now_ns)

    # --- yielding to engines -----------------------------------------------------------

    @property
    def engines_active(self) -> bool:
        """Whether engines have asked for blocks lately, or hold leases."""
        now_ns = self._clock.monotonic_ns()
        return bool(self._memory.host.leases) or now_ns - self.asked_ns < QUIET_NS

    async def _yielding(
        self, reads: asyncio.Semaphore, work: Callable[[], Awaitable[None]]
    ) -> None:
        """Carry out a batch; while engines are active, alone and with a long pause after it."""
        loop = asyncio.get_running_loop()
        while True:
            if not self.engines_active:
                async with reads:
                    if not self.engines_active:
                        await work()
                        return
                continue
            async with self._alone:
                if self.engines_active:
                    began_s = loop.time()
                    async with reads:
                        await work()
                    end_s = began_s + (loop.time() - began_s) / BUSY_SHARE
                    while self.engines_active and (left_s := end_s - loop.time()) > 0:
                        await asyncio.sleep(min(POLL_S, left_s))
                    return

    # --- into L2 -----------------------------------------------------------------------

    async def _fill_host(self, warming: Warming) -> None:
        space = warming.space
        await self._verification.verify(space, self._memory.host.unverified(space, warming.hashes))
        here = self._memory.host.verified(space, list(warming.fates))
        warming.all_are(here, Warmth.HERE)
        if warming.want.verify:
            await self._verify(warming, here)
        wanted = warming.which(Warmth.LATE, Warmth.CORRUPT)
        if self._promotions.barred(space.digest):
            warming.all_are(wanted, Warmth.BARRED)
            return
        found, missed = await self._find(space, wanted, self._tiers)
        nowhere = [h for h in wanted if h not in found and warming.fates[h] is Warmth.LATE]
        warming.all_are(nowhere, missed)
        await self._promote(warming, found)
        if again := self._worth_another_try(warming):
            await asyncio.sleep(AGAIN_S)
            await self._promote(warming, {h: found[h] for h in again})

    def _worth_another_try(self, warming: Warming) -> list[bytes]:
        """Return blocks without a slot that may get one soon.

        An engine was storing the block itself, or its slot becomes free once a tier has written
        the evicting block in it.
        """
        space = warming.space
        refused = warming.which(Warmth.NO_ROOM)
        if space.evicting:
            return refused
        return [h for h in refused if h in space.writing or h in space.items]

    async def _find(
        self, space: Space, wanted: Sequence[bytes], tiers: Sequence[StorageTier]
    ) -> tuple[dict[bytes, int], Warmth]:
        """Return the number of the first tier that has each block, and the outcome of others."""
        found: dict[bytes, int] = {}
        rest, missed = wanted, Warmth.NOWHERE
        for number, tier in enumerate(tiers):
            for at in range(0, len(rest), ASKED_AT_ONCE):
                part = rest[at : at + ASKED_AT_ONCE]
                answers = await tier.knows(space.digest, part)
                if answers is None:
                    missed = Warmth.AWAY
                    break
                found.update((h, number) for h, yes in zip(part, answers, strict=True) if yes)
            rest = [block_hash for block_hash in rest if block_hash not in found]
        return {h: found[h] for h in wanted if h in found}, missed

    async def _promote(self, warming: Warming, found: Mapping[bytes, int]) -> None:
        room = asyncio.Semaphore(BATCHES_AHEAD)
        async with asyncio.TaskGroup() as group:
            for number, batch in _batches(found, batch_blocks(warming.space)):
                size_bytes = len(batch) * warming.space.namespace.block_bytes
                await warming.pace.wait(size_bytes, warming.want.bytes_per_s)
                await room.acquire()
                work = partial(self._promote_batch, warming, batch, found)
                task = group.create_task(self._yielding(self._reads[number], work))
                task.add_done_callback(lambda _: room.release())

    async def _promote_batch(
        self, warming: Warming, batch: Sequence[bytes], found: Mapping[bytes, int]
    ) -> None:
        space = warming.space
        waiter = Waiter([space], LAST_NS, min(map(space.reuse.worth, batch)))
        try:
            self._promotions.join(waiter, 0, batch, found, 0)
            if waiter.batches:
                await asyncio.wait([promotion.done for promotion in waiter.batches])
            for block_hash in batch:
                self._note(warming, waiter, block_hash)
        finally:
            waiter.close(self._memory.host)

    def _note(self, warming: Warming, waiter: Waiter, block_hash: bytes) -> None:
        space = warming.space
        number = waiter.brought.get(block_hash)
        if number is not None:
            warming.fates[block_hash] = Warmth.BROUGHT
            warming.sources[self._tiers[number].name] += 1
        elif block_hash in space.items:
            warming.fates[block_hash] = Warmth.HERE
        elif self._promotions.barred(space.digest):
            warming.fates[block_hash] = Warmth.BARRED
        else:
            failed = [p.failed[block_hash] for p in waiter.batches if block_hash in p.failed]
            fate = _FATES.get(failed[0] if failed else Outcome.ERROR, Warmth.AWAY)
            if warming.fates[block_hash] is not Warmth.CORRUPT or fate is not Warmth.NOWHERE:
                warming.fates[block_hash] = fate

    async def _verify(self, warming: Warming, hashes: Sequence[bytes]) -> None:
        """Verify blocks in L2 again; drop those with a wrong checksum, as CORRUPT."""
        space, memory = warming.space, self._memory
        for at in range(0, len(hashes), batch_blocks(space)):
            some = hashes[at : at + batch_blocks(space)]
            slots = space.find(some)
            known = [slot for slot in slots if space.checksums[slot] is not None]
            warming.unverified_blocks += len(slots) - len(known)
            await warming.pace.wait(len(known) * space.slot_bytes, warming.want.bytes_per_s)
            memory.host.hold(space, known)
            try:
                sums = await memory.checksums([(space, slot) for slot in known])
                rotten = [s for s, d in zip(known, sums, strict=True) if space.checksums[s] != d]
                warming.all_are((space.identity(s)[0] for s in rotten), Warmth.CORRUPT)
                memory.drop(space, [s for s in rotten if s not in space.dropped])
                memory.counters["rotten_blocks_total"] += len(rotten)
            finally:
                memory.let_go(space, known)

    # --- into a storage tier -------------------------------------------------------------

    async def _fill_tier(self, warming: Warming) -> None:
        """Copy blocks from L2 or another tier to one tier."""
        space, target = warming.space, self._tiers[warming.want.target - 1]
        there, missed = await self._find(space, list(warming.fates), [target])
        warming.all_are(there, Warmth.HERE)
        wanted = warming.which(Warmth.LATE)
        if missed is Warmth.AWAY or not target.writes_allowed:
            warming.all_are(wanted, Warmth.AWAY)
            return
        items = space.items
        await self._verification.verify(space, self._memory.host.unverified(space, wanted))
        in_host = [block_hash for block_hash in wanted if block_hash in items]
        others = [tier for tier in self._tiers if tier is not target]
        rest = [block_hash for block_hash in wanted if block_hash not in items]
        found, missed = await self._find(space, rest, others)
        warming.all_are((h for h in rest if h not in found), missed)
        count = batch_blocks(space)
        with scratch_memory() as scratch:
            for at in range(0, len(in_host), count):
                work = partial(self._put_from_host, warming, target, in_host[at : at + count])
                await self._pass_on(warming, target, count, work)
            for number, batch in _batches(found, count):
                source = others[number]
                work = partial(self._put_from_tier, warming, source, target, batch, scratch)
                await self._pass_on(warming, source, len(batch), work)

    async def _pass_on(
        self,
        warming: Warming,
        tier: StorageTier,
        blocks: int,
        work: Callable[[], Awaitable[None]],
    ) -> None:
        """Carry out a batch while no flush writes its marks."""
        size_bytes = blocks * warming.space.namespace.block_bytes
        await warming.pace.wait(size_bytes, warming.want.bytes_per_s)

        async def guarded() -> None:
            async with self._flushes.tiers_alone:
                await work()

        await self._yielding(self._reads[self._tiers.index(tier)], guarded)

    async def _put_from_host(
        self, warming: Warming, target: StorageTier, batch: Sequence[bytes]
    ) -> None:
        space, memory = warming.space, self._memory
        slots = {h: slot for h in batch if (slot := space.items.get(h)) is not None}
        warming.all_are((h for h in batch if h not in slots), Warmth.NOWHERE)
        held = list(slots.values())
        memory.host.hold(space, held)
        try:
            bare = space.without_checksum(held)
            sums = dict(zip(bare, await memory.checksums([(space, s) for s in bare]), strict=True))
            length = space.namespace.block_bytes
            requests = []
            for block_hash, slot in slots.items():
                digest = space.checksums[slot] or sums[slot]
                view = memory.arena.view(space, slot)
                requests.append(
                    PutRequest(block_hash, space.identity(slot)[1], digest, view, length)
                )
            stored = await self._put(warming, target, requests, "host memory")
            written = [slot for slot in map(slots.__getitem__, stored) if slot not in space.dropped]
            self._backups.note_filled(space, written, self._tiers.index(target))
        finally:
            memory.let_go(space, held)

    async def _put_from_tier(
        self,
        warming: Warming,
        source: StorageTier,
        target: StorageTier,
        batch: Sequence[bytes],
        scratch: Scratch,
    ) -> None:
        space = warming.space
        views = scratch.views([space.slot_bytes] * len(batch))
        length = space.namespace.block_bytes
        read = QueuedRead(source.reads, len(batch) * space.slot_bytes, lambda: (LAST_NS, 0))
        asked = [GetRequest(h, view, length) for h, view in zip(batch, views, strict=True)]
        async with self._promotions.read_scheduler.take(read):
            results = await source.get(space.digest, asked)
        requests = []
        for (block_hash, view, _), (outcome, header) in zip(asked, results, strict=True):
            if outcome is Outcome.HIT and header is not None:
                sound = PutRequest(block_hash, header.parent, header.checksum, view, length)
                requests.append(sound)
            else:
                warming.fates[block_hash] = _FATES.get(outcome, Warmth.AWAY)
        await self._put(warming, target, requests, source.name)

    async def _put(
        self,
        warming: Warming,
        target: StorageTier,
        requests: Sequence[PutRequest],
        source: str,
    ) -> list[bytes]:
        """Write blocks to a tier; return the blocks that it has now."""
        if not requests:
            return []
        outcomes = await target.put(warming.space.digest, requests)
        there = []
        for request, outcome in zip(requests, outcomes, strict=True):
            fate = _PUT_FATES.get(outcome, Warmth.UNWRITTEN)
            warming.fates[request.block_hash] = fate
            if fate is not Warmth.UNWRITTEN:
                there.append(request.block_hash)
        warming.sources[source] += outcomes.count(Outcome.STORED)
        return there


_PUT_FATES: Final = {Outcome.STORED: Warmth.BROUGHT, Outcome.PRESENT: Warmth.HERE}


def _batches(found: Mapping[bytes, int], most: int) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the tier and the blocks of each batch to read, full batches first."""
    open_batches: dict[int, list[bytes]] = {}
    for block_hash, number in found.items():
        batch = open_batches.setdefault(number, [])
        batch.append(block_hash)
        if len(batch) == most:
            yield number, open_batches.pop(number)
    yield from open_batches.items()
