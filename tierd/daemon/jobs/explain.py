"""Explains where blocks are, and why they are not in L2 or in a storage tier.

It uses only records that the daemon keeps anyway, and asks each tier once. It changes nothing, and
does not count as a use. The most decisive reasons of a block come first.
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
"""Time for the answers of all tiers together; the content of a slower tier is unknown."""

SLICE: Final = 32
"""Blocks explained before the loop does other work: less than 1 ms with four tiers."""

EVICTING_SLICE: Final = 4096
"""Evicting blocks searched before the loop does other work; they are indexed by slot, not hash."""

SPACES_SLICE: Final = 8
"""Other namespaces searched before the loop does other work, each for up to 1,024 blocks."""

OTHERS_MAX: Final = 16
"""Maximum other namespaces searched, the most similar ones first: each costs a call per tier."""

YOUNG_S: Final = 3600
"""For an unknown block, a daemon that has run at most this long names its restart as a reason."""

SHOWN_CHARS_MAX: Final = 100
"""Maximum characters shown of a field's value; a field that differs only further on is still
named."""

Reason = dict[str, object]
Has = list[list[bool] | None]
"""For each tier, whether it has each block; None if it takes no reads or did not answer."""


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
        """Seconds since the daemon's start."""
        return int(self.now_s - self._started_s)

    async def explain(self, digest: bytes, hashes: Sequence[bytes]) -> dict[str, object]:
        """Return the body of EXPLAINED. A concurrent change may show as before or after it."""
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
        """Ask each tier for blocks of these namespaces; return the answers by `end_s`."""
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
            # Not waited for: a backend may take long to end a call.
            for each in asks:
                each.cancel()


class _Case:
    """Records about the blocks of one EXPLAIN."""

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
        """Other namespaces that have some of the hashes."""
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
        """Search records that are not indexed by block."""
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
        """Return when a request last failed to get each block for this reason."""
        latest: dict[bytes, int] = {}
        for note in self._explainer.unserveds.latest(why, self._digest):
            for block_hash in wanted.intersection(note.hashes):
                latest.setdefault(block_hash, note.at_s)
            await asyncio.sleep(0)
        return latest

    # --- one block ------------------------------------------------------------------

    def block(self, at: int) -> dict[str, object]:
        """Return where a block is, how often it was used, and why it is not elsewhere."""
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
        """Return a block's state in L2 in one word; empty if L2 lacks it."""
        space = self.space
        if space is None:
            return ""
        slot = space.items.get(block_hash)
        if slot is not None:
            return "unverified" if slot in space.unverified else "ready"
        if block_hash in space.writing:
            return "writing"
        return "evicting" if block_hash in self._evicting else ""

    def _is_here(self, block_hash: bytes) -> bool:
        return self._state(block_hash) not in ("", "writing")

    def _holders(self, at: int) -> list[int]:
        """Return the numbers of the tiers that have a block."""
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
        """Yield reasons for tiers that may have a block but did not answer."""
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
            # If it left L2 later, it has been in L2 since that request.
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
        had_s = queue.history.latest_s(key)
        damaged_s = queue.tier.damaged.records.get(key, -1)
        is_damaged = damaged_s >= (had_s or 0)
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
        elif had_s is not None:
            flushed_s = self._explainer.flushes.latest(self._digest, queue.tier)
            if flushed_s is not None and flushed_s >= had_s:
                yield {"what": "flushed", "tier": number, "ago_s": self._ago_s(flushed_s)}
            else:
                yield {"what": "tier_dropped", "tier": number, "had_s": self._ago_s(had_s)}
        elif self.space is not None and (slot := self.space.items.get(block_hash)) is not None:
            yield self._not_admitted(number, self.space, slot)

    def _not_admitted(self, number: int, space: Space, slot: int) -> Reason:
        """Return why a tier has never got a block that L2 has."""
        queue = self._queues[number]
        block_hash, _ = space.identity(slot)
        if slot in space.unverified or (
            space.tiers.of(slot) & queue.bit and space.refs[slot] and queue.pending_blocks
        ):
            return {"what": "waiting", "tier": number}
        if space.tiers.of(slot) & queue.bit:
            if not queue.tier.config.fill_from_lower:
                return {"what": "not_admitted", "tier": number, "policy": "fill_from_lower"}
            # The ledger, or a promotion from a higher tier, recorded that the tier has it.
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
        """Yield reasons for a block that is nowhere and of which there is no record."""
        explainer, space = self._explainer, self.space
        if explainer.uptime_s <= YOUNG_S:
            adopted = self._memory.counters["adopted_blocks_total"]
            yield {"what": "restart", "ago_s": explainer.uptime_s, "kept": adopted > 0}
        yield {"what": "never_stored", "forgets": space is not None and space.forgets}

    def _ago_s(self, then_s: float) -> int:
        return max(0, int(self._explainer.now_s - then_s))

    # --- other namespaces -----------------------------------------------------------

    async def _look_elsewhere(self, nowhere: Sequence[bytes], end_s: float) -> None:
        """Find blocks with the same hashes in other namespaces."""
        spaces = await self._similar_spaces()
        if not spaces:
            return
        held = await self._explainer.ask([s.digest for s in spaces], nowhere, end_s)
        for space in spaces:
            await asyncio.sleep(0)
            self._note_elsewhere(space, nowhere, held[space.digest])

    def _note_elsewhere(self, space: Space, nowhere: Sequence[bytes], has: Has) -> None:
        """Record which of the blocks L2 and tiers have in another namespace."""
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

    async def _similar_spaces(self) -> list[Space]:
        """Return the namespaces that may have the same hashes, the most similar ones first."""
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
        """Return a namespace's digest, model, and fields that differ from the requested one's."""
        own = None if self.space is None else self.space.namespace
        return {
            "digest": other.digest.hex(),
            "model": other.model[:SHOWN_CHARS_MAX],
            "differs": None if own is None else dict(_differences(own, other)),
        }


def _differences(own: Namespace, other: Namespace) -> list[tuple[str, list[str]]]:
    """Return the fields that differ, with both values."""
    mine, theirs = own.to_fields(), other.to_fields()
    return [
        (name, [_shown(mine[name]), _shown(theirs[name])])
        for name in mine
        if mine[name] != theirs[name]
    ]


def _shown(value: object) -> str:
    return (value.hex() if isinstance(value, bytes) else str(value))[:SHOWN_CHARS_MAX]


async def _evicting(space: Space, hashes: Iterable[bytes]) -> set[bytes]:
    """Return the blocks that are evicting and that a request would make readable again."""
    wanted, found = set(hashes), set[bytes]()
    entries = list(space.evicting.items())
    for start in range(0, len(entries), EVICTING_SLICE):
        for slot, (block_hash, _) in entries[start : start + EVICTING_SLICE]:
            if block_hash in wanted and slot not in space.dropped:
                found.add(block_hash)
        await asyncio.sleep(0)
    return found
