"""Where blocks are, and why they are not where they are not: for whoever asks why hits do not come.

It looks at what is remembered anyway, and asks each tier once. It decides nothing, brings nothing
and counts as nobody's use. The reasons of a block come with what settles most first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Final

from tierd.clock import Clock
from tierd.core.l2.space import Space
from tierd.core.l3.unserved import Unserveds, Why
from tierd.core.l3.writes import Miss
from tierd.core.reasons import Dropped
from tierd.daemon.jobs.flush import Flushes
from tierd.daemon.l2.memory import HostMemory
from tierd.daemon.l3.backup import Backups
from tierd.daemon.l3.promotion import Spawn
from tierd.types import Namespace

ASK_S: Final = 2.0
"""How long the tiers have for their answers, all at once; one that takes longer is unknown."""

SLICE: Final = 32
"""Blocks looked at between two turns of the loop: less than 1 ms with four tiers."""

EVICTING_SLICE: Final = 4096
"""Blocks under eviction that are looked at between two turns: they are found by slot, not hash."""

SPACES_SLICE: Final = 8
"""Other namespaces looked at between two turns, each for up to 1,024 blocks."""

OTHERS_MAX: Final = 16
"""Other namespaces that are looked at, those first that differ least: tiers are asked for each."""

YOUNG_S: Final = 3600
"""A daemon that has run no longer says so where it knows nothing of a block."""

SHOWN_CHARS_MAX: Final = 100
"""Of a field's value; a field that differs further on is still named."""

Reason = dict[str, object]
Has = list[list[bool] | None]
"""What each tier has of some blocks; None for one that takes no reads, or did not answer."""


class Explainer:
    """Answers EXPLAIN."""

    def __init__(
        self,
        memory: HostMemory,
        backups: Backups,
        flushes: Flushes,
        unserveds: Unserveds,
        clock: Clock,
        spawn: Spawn,
    ) -> None:
        self.memory = memory
        self.backups = backups
        self.flushes = flushes
        self.unserveds = unserveds
        self._clock = clock
        self._spawn = spawn
        self._started_s = self.now_s

    @property
    def now_s(self) -> float:
        """CLOCK_MONOTONIC."""
        return self._clock.monotonic_ns() / 1e9

    @property
    def uptime_s(self) -> int:
        """How long the daemon has run."""
        return int(self.now_s - self._started_s)

    async def explain(self, digest: bytes, hashes: Sequence[bytes]) -> dict[str, object]:
        """The body of an EXPLAINED. What changes meanwhile may show as before or after."""
        end_s = asyncio.get_running_loop().time() + ASK_S
        has = await self.ask([digest], hashes, end_s)
        case = _Case(self, digest, hashes, has[digest])
        await case.look(end_s)
        blocks: list[dict[str, object]] = []
        for at in range(len(hashes)):
            if at and at % SLICE == 0:
                await asyncio.sleep(0)
            blocks.append(case.block(at))
        host = self.memory.host
        return {
            "known": case.space is not None,
            "host": {
                "uptime_s": self.uptime_s,
                "adopted_blocks": self.memory.counters["adopted_blocks_total"],
                "capacity_bytes": host.capacity_bytes,
                "limit_bytes": host.limit_bytes,
            },
            "tiers": case.tiers,
            "others": case.others,
            "blocks": blocks,
        }

    async def ask(
        self, digests: Sequence[bytes], hashes: Sequence[bytes], end_s: float
    ) -> dict[bytes, Has]:
        """What each tier has of these namespaces, as far as they have answered by then."""
        tiers = [queue.tier for queue in self.backups.queues]
        found: dict[bytes, Has] = {digest: [None] * len(tiers) for digest in digests}

        async def ask(number: int) -> None:
            for digest in digests:
                found[digest][number] = await tiers[number].knows(digest, hashes)

        asks = [self._spawn(partial(ask, number), "explain") for number in range(len(tiers))]
        try:
            if asks:
                left_s = end_s - asyncio.get_running_loop().time()
                await asyncio.wait(asks, timeout=max(0.0, left_s))
            return {digest: list(has) for digest, has in found.items()}
        finally:
            # Not waited for: a backend may take its time to let go.
            for each in asks:
                each.cancel()


class _Case:
    """What is known of the blocks of one EXPLAIN."""

    def __init__(
        self, explainer: Explainer, digest: bytes, hashes: Sequence[bytes], has: Has
    ) -> None:
        self._explainer = explainer
        self._memory = explainer.memory
        self._queues = explainer.backups.queues
        self._digest = digest
        self._hashes = hashes
        self._has = has
        self.space = self._memory.host.spaces.get(digest)
        self.tiers = [self._tier(number) for number in range(len(has))]
        self.others: list[dict[str, object]] = []
        """Namespaces that have some of the same hashes."""
        self._barred = explainer.backups.barred(digest)
        self._evicting: set[bytes] = set()
        self._unserved: dict[Why, dict[bytes, int]] = {}
        self._elsewhere: dict[bytes, list[Reason]] = {}

    def _tier(self, number: int) -> dict[str, object]:
        tier = self._queues[number].tier
        status = tier.status()
        names = ("name", "state", "why", "circuits", "blocks", "used_bytes", "capacity_bytes")
        reads = self._has[number] is not None
        return {**{name: status[name] for name in names}, "reads": reads}

    async def look(self, end_s: float) -> None:
        """Find what takes a look at more than the block itself."""
        if self.space is not None and self.space.evicting:
            self._evicting = await _evicting(self.space, self._hashes)
        missing = [h for h in self._hashes if not self._is_here(h)]
        if missing and self.space is not None:
            for why in Why:
                self._unserved[why] = await self._not_served(why, set(missing))
        nowhere = [h for at, h in enumerate(self._hashes) if not self._is_anywhere(at)]
        if nowhere:
            await self._look_elsewhere(nowhere, end_s)

    async def _not_served(self, why: Why, wanted: set[bytes]) -> dict[bytes, int]:
        """When a request last did not get a block for this reason."""
        latest: dict[bytes, int] = {}
        for note in self._explainer.unserveds.latest(why, self._digest):
            for block_hash in wanted.intersection(note.hashes):
                latest.setdefault(block_hash, note.at_s)
            await asyncio.sleep(0)
        return latest

    # --- one block ------------------------------------------------------------------

    def block(self, at: int) -> dict[str, object]:
        """Where a block is, how often it was used, and why it is not elsewhere."""
        block_hash = self._hashes[at]
        uses, last_use_s = 0, None
        if self.space is not None and (last := self.space.reuse.last_use(block_hash)) is not None:
            uses = self.space.reuse.uses(block_hash)
            last_use_s = max(0, int(self._explainer.now_s - last[1] / 1e3))
        return {
            "host": self._state(block_hash),
            "tiers": self._holders(at),
            "uses": uses,
            "last_use_s": last_use_s,
            "why": list(self._why(at)),
        }

    def _state(self, block_hash: bytes) -> str:
        """In one word whether L2 has a block; empty if it has not."""
        space = self.space
        if space is None:
            return ""
        slot = space.items.get(block_hash)
        if slot is not None:
            return "unproven" if slot in space.unverified else "ready"
        if block_hash in space.writing:
            return "writing"
        return "leaving" if block_hash in self._evicting else ""

    def _is_here(self, block_hash: bytes) -> bool:
        return self._state(block_hash) not in ("", "writing")

    def _holders(self, at: int) -> list[int]:
        """The tiers that have a block."""
        return [number for number, found in enumerate(self._has) if found and found[at]]

    def _is_anywhere(self, at: int) -> bool:
        return bool(self._state(self._hashes[at]) or self._holders(at))

    def _why(self, at: int) -> Iterator[Reason]:
        block_hash = self._hashes[at]
        here = self._is_here(block_hash)
        if self._barred:
            yield {"what": "being_flushed"}
        if not here:
            yield from self._why_not_read(block_hash)
            yield from self._why_not_in_memory(at)
        known = False
        for number, found in enumerate(self._has):
            if found is not None and not found[at]:
                for reason in self._why_not_in_tier(number, at):
                    known = True
                    yield reason
        if self._is_anywhere(at):
            return
        yield from self._elsewhere.get(block_hash, ())
        gone = None if self.space is None else self.space.gone(block_hash)
        if not known and gone is None:
            yield from self._why_unknown()

    def _why_not_read(self, block_hash: bytes) -> Iterator[Reason]:
        """Tiers that may have it and cannot be asked."""
        for number, found in enumerate(self._has):
            queue = self._queues[number]
            if found is None and queue.writes.missed.why(self._digest, block_hash) is None:
                if not queue.tier.is_open:
                    yield {"what": "unavailable", "tier": number}
                elif queue.tier.reads_allowed:
                    yield {"what": "no_answer", "tier": number}
                else:
                    yield {"what": "breaker_open", "tier": number}

    def _why_not_in_memory(self, at: int) -> Iterator[Reason]:
        block_hash = self._hashes[at]
        if self.space is None:
            return
        gone = self.space.gone(block_hash)
        may_come = bool(self._holders(at)) or None in self._has
        for why, latest in self._unserved.items():
            asked_s = latest.get(block_hash)
            # It has been in L2 since if it left L2 later.
            if asked_s is not None and may_come and (gone is None or gone[1] <= asked_s):
                yield {"what": why.value, "ago_s": self._ago_s(asked_s)}
        if gone is None:
            return
        why_gone, gone_s = gone
        if why_gone in (Dropped.FLUSHED, Dropped.ENDED):
            yield {"what": "flushed", "ago_s": self._ago_s(gone_s)}
        elif why_gone is Dropped.DAMAGED:
            yield {"what": "checksum_failed", "ago_s": self._ago_s(gone_s)}
        else:
            yield {"what": "evicted", "by": why_gone.value, "ago_s": self._ago_s(gone_s)}

    def _why_not_in_tier(self, number: int, at: int) -> Iterator[Reason]:
        queue, block_hash = self._queues[number], self._hashes[at]
        key = self._digest + block_hash
        had_s = queue.had.records.get(key, -1) >> 1
        damaged_s = queue.tier.damaged.records.get(key, -1)
        is_damaged = damaged_s >= max(0, had_s)
        miss = queue.writes.missed.why(self._digest, block_hash)
        if is_damaged:
            yield {"what": "checksum_failed", "tier": number, "ago_s": self._ago_s(damaged_s)}
        if miss in (Miss.REFUSED, Miss.MISSED):
            demand = round(queue.writes.budget.demand, 3)
            yield {"what": "refused_by_budget", "tier": number, "demand": demand}
        elif miss is not None:
            yield {"what": "skipped", "tier": number, "by": miss.value}
        elif is_damaged:
            return
        elif had_s >= 0:
            flushed_s = self._explainer.flushes.latest(self._digest, queue.tier)
            if flushed_s is not None and flushed_s >= had_s:
                yield {"what": "flushed", "tier": number, "ago_s": self._ago_s(flushed_s)}
            else:
                yield {"what": "tier_dropped", "tier": number, "had_s": self._ago_s(had_s)}
        elif self.space is not None and (slot := self.space.items.get(block_hash)) is not None:
            yield self._not_admitted(number, self.space, slot)

    def _not_admitted(self, number: int, space: Space, slot: int) -> Reason:
        """L2 has a block, and a tier that has never had it has not."""
        queue = self._queues[number]
        block_hash, _ = space.identity(slot)
        if slot in space.unverified or (
            space.tiers.of(slot) & queue.bit and space.refs[slot] and queue.pending_blocks
        ):
            return {"what": "waiting", "tier": number}
        if space.tiers.of(slot) & queue.bit:
            if not queue.tier.config.fill_from_lower:
                return {"what": "not_admitted", "tier": number, "policy": "fill_from_lower"}
            # A tier that is said to have it, by the ledger or by a tier above.
            return {"what": "tier_dropped", "tier": number, "had_s": None}
        reason: Reason = {
            "what": "not_admitted",
            "tier": number,
            "policy": queue.writes.policy.value,
        }
        demands = queue.writes.demands(block_hash, space.reuse)
        if demands is not None:
            reason |= {
                "uses": demands.uses,
                "uses_min": demands.uses_min,
                "chance": round(demands.chance, 3),
                "chance_min": round(demands.chance_min, 3),
            }
        return reason

    def _why_unknown(self) -> Iterator[Reason]:
        """Nothing is remembered of a block that is nowhere."""
        explainer, space = self._explainer, self.space
        if explainer.uptime_s <= YOUNG_S:
            adopted = self._memory.counters["adopted_blocks_total"]
            yield {"what": "restart", "ago_s": explainer.uptime_s, "kept": adopted > 0}
        yield {"what": "never_stored", "forgets": space is not None and space.forgets}

    def _ago_s(self, then_s: float) -> int:
        return max(0, int(self._explainer.now_s - then_s))

    # --- other namespaces -----------------------------------------------------------

    async def _look_elsewhere(self, nowhere: Sequence[bytes], end_s: float) -> None:
        """Find blocks of the same hashes under other digests."""
        spaces = await self._likest()
        if not spaces:
            return
        held = await self._explainer.ask([s.digest for s in spaces], nowhere, end_s)
        for space in spaces:
            await asyncio.sleep(0)
            self._note_elsewhere(space, nowhere, held[space.digest])

    def _note_elsewhere(self, space: Space, nowhere: Sequence[bytes], has: Has) -> None:
        """Note which of the blocks L2 and tiers have of another namespace."""
        in_memory = space.items.keys() & set(nowhere)
        in_tiers = [(n, found) for n, found in enumerate(has) if found and True in found]
        if not in_memory and not in_tiers:
            return
        reasons: dict[tuple[object, ...], Reason] = {}
        for at, block_hash in enumerate(nowhere):
            where: list[object] = ["host"] if block_hash in in_memory else []
            where += [number for number, found in in_tiers if found[at]]
            if where:
                other = len(self.others)
                new: Reason = {"what": "other_namespace", "other": other, "in": where}
                reason = reasons.setdefault(tuple(where), new)
                self._elsewhere.setdefault(block_hash, []).append(reason)
        self.others.append(self._differing(space.namespace))

    async def _likest(self) -> list[Space]:
        """The namespaces that may have the same hashes, those first that differ least."""
        found: list[tuple[int, int, Space]] = []
        own = None if self.space is None else self.space.namespace
        for number, space in enumerate(list(self._memory.host.spaces.values())):
            if number % SPACES_SLICE == 0:
                await asyncio.sleep(0)
            other = space.namespace
            if space is self.space or (own is not None and other.hash_root != own.hash_root):
                continue
            found.append((0 if own is None else len(_differences(own, other)), -number, space))
        return [space for *_, space in sorted(found, key=lambda entry: entry[:2])[:OTHERS_MAX]]

    def _differing(self, other: Namespace) -> dict[str, object]:
        """A namespace, and those of its fields that are not those that were asked for."""
        own = None if self.space is None else self.space.namespace
        return {
            "digest": other.digest.hex(),
            "model": other.model[:SHOWN_CHARS_MAX],
            "differs": None if own is None else dict(_differences(own, other)),
        }


def _differences(own: Namespace, other: Namespace) -> list[tuple[str, list[str]]]:
    """The fields that differ, with both values."""
    mine, theirs = own.to_fields(), other.to_fields()
    return [
        (name, [_shown(mine[name]), _shown(theirs[name])])
        for name in mine
        if mine[name] != theirs[name]
    ]


def _shown(value: object) -> str:
    return (value.hex() if isinstance(value, bytes) else str(value))[:SHOWN_CHARS_MAX]


async def _evicting(space: Space, hashes: Iterable[bytes]) -> set[bytes]:
    """Those of the blocks that are being evicted and would stay if they were asked for."""
    wanted, found = set(hashes), set[bytes]()
    entries = list(space.evicting.items())
    for start in range(0, len(entries), EVICTING_SLICE):
        for slot, (block_hash, _) in entries[start : start + EVICTING_SLICE]:
            if block_hash in wanted and slot not in space.dropped:
                found.add(block_hash)
        await asyncio.sleep(0)
    return found
