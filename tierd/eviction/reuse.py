"""The book of uses of blocks, resident or not, from which policies predict reuse.

At each use a block gets a class, from its number of uses and the number of new blocks of that
request, which predict best when, if ever, the block is used again. Per class, the chance of reuse
by age is learned (`tierd.eviction.survival`). One book serves all indexes with the same hashes:
the namespaces of an engine's ranks, and all tiers. It knows no slots or sizes. Pure: each request
carries its time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from tierd.eviction.policy import PrefixRequest
from tierd.eviction.survival import Survival
from tierd.types import NEVER

USES_MAX: Final = 20
_LEVEL: Final = [0, 0, 0, 1, 2, 2, 3, 3, 3, 3, *[4] * 10, 5]
"""Level by number of uses: levels 0 to 5 are up to 2, 3, 4 to 5, 6 to 9, 10 to 19, and 20 uses."""

_LEVELS: Final = 6
_SIZES: Final = 8
_OUTPUTS: Final = 4

# Ranges of classes: partial blocks, first uses, later uses.
_PARTIAL: Final = 0
_FIRST: Final = 1
_AGAIN: Final = _FIRST + _OUTPUTS * 2 * _SIZES
_GROUPS: Final = [
    0,
    *[0] * (_AGAIN - _FIRST),
    *[1 + level for level in range(_LEVELS) for _ in range(3)],
]
KINDS: Final = len(_GROUPS)
"""Number of classes."""

KNOWN_MAX: Final = 1 << 18
"""Default number of blocks to remember; each costs about 250 bytes."""

KNOWN_MIN: Final = 64

TRIM: Final = 64
"""A full book forgets one part in TRIM at once: if it forgot single blocks, the dict would step
over all earlier deletions."""

SLICE: Final = 128
"""Blocks counted between two yields to the caller, less than 0.1 ms of work."""

REBUILD_EVERY: Final = 64
"""Requests between two rebuilds of the tables, which take 1 ms; fewer at first."""

REBUILD_PAUSE_MS: Final = 1000
"""Minimum time between rebuilds, so that of thousands of requests per second few wait for one."""

LEARNED_REQUESTS: Final = 256
"""Number of requests before which recency orders the blocks, because fewer requests teach too
little to beat it. 64 and 128 lost two points to LRU where few agents with long chains came first.
"""

WORTH_S: Final = 3600.0
"""Horizon of `worth`: warming brings blocks for the next hour."""

WORTH_FADES_MS: Final = 60_000
"""Before LEARNED_REQUESTS, `worth` is half after this time and a third after twice this time."""

# Bit fields of a block's record, from the top: last use in ms, class, uses.
_USES_BITS: Final = 5
_USES_MASK: Final = (1 << _USES_BITS) - 1
_KIND_BITS: Final = 7
_KIND_MASK: Final = (1 << _KIND_BITS) - 1
_TIME_SHIFT: Final = _USES_BITS + _KIND_BITS
assert KINDS <= 1 << _KIND_BITS
assert USES_MAX <= _USES_MASK


class Reuse:
    """The last use, the number of uses and the predicted reuse of each block.

    At most `limit` blocks are known; the least recently used is forgotten first. Times may be
    negative, for uses before the clock began.
    """

    def __init__(self, limit: int = KNOWN_MAX) -> None:
        self.limit = max(limit, KNOWN_MIN)
        self.now_ms = 0
        """Latest time seen; it never goes back, even if the requests' clock does."""
        self.requests = 0
        self.survival = Survival(_GROUPS)
        self._records: dict[bytes, int] = {}
        self._rebuild_at = 1
        self._rebuild_from_ms = 0
        # Class of a block that is stored without a request that named it.
        self._unnamed = _FIRST

    @property
    def known(self) -> int:
        """Number of blocks remembered."""
        return len(self._records)

    # --- counting -------------------------------------------------------------------

    def pass_time(self, now_s: float) -> None:
        """Advance the time, at which blocks are stored that no request has named."""
        self.now_ms = max(self.now_ms, int(now_s * 1000))

    def use(self, request: PrefixRequest) -> None:
        """Count one distinct request's use of its blocks and learn, without yielding."""
        for _ in self.use_slices(request):
            pass
        if self.rebuild_due:
            self.rebuild()

    def use_slices(self, request: PrefixRequest) -> Iterator[None]:
        """Count a use in steps of about SLICE blocks, so that the caller can do other work.

        Other requests may be counted between steps. The caller calls `rebuild` when it is due.
        """
        hashes, records = request.hashes, self._records
        self.pass_time(request.now_s)
        now_ms = self.now_ms
        known = 0
        while known < len(hashes) and hashes[known] in records:
            known += 1
            if known % (4 * SLICE) == 0:
                yield
        first, again = _classes(known, len(hashes) - known, request.output_tokens)
        self._unnamed = first
        full = len(hashes) - request.partial
        kinds: list[int] = []
        for start in range(0, len(hashes), SLICE):
            if start:
                yield
            part = hashes[start : start + SLICE]
            self.survival.used(part, now_ms)
            self._count(part, full - start, first, again, now_ms, kinds)
            if len(records) > self.limit:
                self._trim()
        self._watch(hashes, kinds, now_ms)
        self.requests += 1

    def _count(
        self,
        hashes: Sequence[bytes],
        full: int,
        first: int,
        again: int,
        now_ms: int,
        kinds: list[int],
    ) -> None:
        """Write the records of some blocks and append their classes to `kinds`."""
        records = self._records
        stamp = now_ms << _TIME_SHIFT
        fresh = stamp | first << _USES_BITS | 1
        for i, block_hash in enumerate(hashes):
            # Removed first, so that the dict stays in order of use.
            record = records.pop(block_hash, 0)
            if record:
                count = record & _USES_MASK
                if count < USES_MAX:
                    count += 1
                kind = again + 3 * _LEVEL[count]
                records[block_hash] = stamp | kind << _USES_BITS | count
            elif i < full:
                kind = first
                records[block_hash] = fresh
            else:
                kind = _PARTIAL
                records[block_hash] = stamp | kind << _USES_BITS | 1
            kinds.append(kind)

    def teach(
        self, hashes: Sequence[bytes], uses: Sequence[int], ages_s: Sequence[int], now_ms: int
    ) -> None:
        """Merge uses that were counted elsewhere, the last ones `ages_s` seconds before `now_ms`.

        Larger numbers of uses and later last uses replace the known ones; an age of NEVER means
        that no use is known. Tables do not learn from this. A taught block counts as used last
        when the oldest blocks are forgotten.
        """
        self.now_ms = max(self.now_ms, now_ms)
        records = self._records
        for block_hash, count, age_s in zip(hashes, uses, ages_s, strict=True):
            if age_s == NEVER or not count:
                continue
            record = records.pop(block_hash, 0)
            known, kind = record & _USES_MASK, record >> _USES_BITS & _KIND_MASK
            last_ms = now_ms - 1000 * age_s
            if record:
                last_ms = max(last_ms, record >> _TIME_SHIFT)
            if (count := min(count, USES_MAX)) > known:
                # The new blocks of the last use are not known: take it for a conversation's turn.
                kind = _AGAIN + 2 + 3 * _LEVEL[count] if count > 1 else self._unnamed
            records[block_hash] = last_ms << _TIME_SHIFT | kind << _USES_BITS | max(count, known)
        if len(records) > self.limit:
            self._trim()

    def _trim(self) -> None:
        excess = len(self._records) - self.limit + self.limit // TRIM
        for block_hash in list(islice(self._records, excess)):
            del self._records[block_hash]

    def _watch(self, hashes: Sequence[bytes], kinds: list[int], now_ms: int) -> None:
        """Watch the middle block of each run of one class."""
        start = 0
        for end in range(1, len(kinds) + 1):
            if end == len(kinds) or kinds[end] != kinds[start]:
                middle = hashes[(start + end) // 2]
                self.survival.watch(middle, kinds[start], now_ms, end - start)
                start = end

    # --- learning -------------------------------------------------------------------

    @property
    def rebuild_due(self) -> bool:
        """Whether enough requests and time have passed for new tables."""
        return self.requests >= self._rebuild_at and self.now_ms >= self._rebuild_from_ms

    def rebuild(self) -> None:
        """Build new tables from the uses counted so far; takes 1 ms."""
        self._rebuild_at = self.requests + min(REBUILD_EVERY, max(8, self.requests // 4))
        self._rebuild_from_ms = self.now_ms + REBUILD_PAUSE_MS
        self.survival.rebuild(self.now_ms)

    # --- asking ---------------------------------------------------------------------

    def uses(self, block_hash: bytes) -> int:
        """Return how many requests used a block, USES_MAX at most; 0 if it is not known."""
        return self._records.get(block_hash, 0) & _USES_MASK

    def last_use(self, block_hash: bytes) -> tuple[int, int] | None:
        """Return class and time in ms of a block's last use; None if it is not known."""
        record = self._records.get(block_hash)
        return (
            None if record is None else (record >> _USES_BITS & _KIND_MASK, record >> _TIME_SHIFT)
        )

    def told(self, hashes: Sequence[bytes], now_ms: int) -> tuple[list[int], list[int]]:
        """Return the arguments of `teach` for blocks: uses, and ages in seconds at `now_ms`.

        A block without a known use has 0 and NEVER.
        """
        found = [self._records.get(block_hash, 0) for block_hash in hashes]
        return [record & _USES_MASK for record in found], [
            min(max(0, now_ms - (record >> _TIME_SHIFT)) // 1000, NEVER) if record else NEVER
            for record in found
        ]

    def last_use_or_now(self, block_hash: bytes) -> tuple[int, int]:
        """Return class and time in ms of a block's last use, also for an unknown block.

        An unknown block, such as one just generated, counts as a new block of the last request.
        """
        record = self._records.get(block_hash)
        if record is None:
            return self._unnamed, self.now_ms
        return record >> _USES_BITS & _KIND_MASK, record >> _TIME_SHIFT

    def chance(self, block_hash: bytes, horizon_s: float) -> float:
        """Return the chance that a block is used within `horizon_s` after the last request."""
        kind, last_ms = self.last_use_or_now(block_hash)
        return self.survival.reuse_chance(kind, self.now_ms - last_ms, int(horizon_s * 1000))

    def chances(self, hashes: Iterable[bytes], horizon_s: float) -> list[float]:
        """Return the `chance` of many blocks, computed once per group last used together."""
        records, known = self._records, dict[int, float]()
        chances: list[float] = []
        for block_hash in hashes:
            use = records.get(block_hash, 0) >> _USES_BITS
            chance = known.get(use)
            if chance is None:
                chance = known[use] = self.chance(block_hash, horizon_s)
            chances.append(chance)
        return chances

    def worth(self, block_hash: bytes) -> float:
        """Return the relative worth of a block now; 0 if no use of it is known."""
        record = self._records.get(block_hash)
        if record is None:
            return 0.0
        if self.requests < LEARNED_REQUESTS:
            return 1 / (1 + max(0, self.now_ms - (record >> _TIME_SHIFT)) / WORTH_FADES_MS)
        return self.chance(block_hash, WORTH_S)

    def check(self) -> None:
        """Assert every invariant; for tests."""
        self.survival.check()
        assert len(self._records) <= self.limit


def _classes(known: int, new: int, output_tokens: int | None) -> tuple[int, int]:
    """Return the class of a request's first-used blocks, and the lowest class of its others.

    `known` is the number of leading blocks that were known, `new` the number of blocks after.
    """
    size = min(max(new, 1).bit_length(), _SIZES) - 1
    length = 0
    if output_tokens is not None:
        length = 1 if output_tokens < 32 else 2 if output_tokens < 128 else 3
    first = _FIRST + (2 * length + (known >= 2)) * _SIZES + size
    return first, _AGAIN + (0 if new < 2 else 1 if new < 5 else 2)
