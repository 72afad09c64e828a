"""What a storage tier does and how long it takes, counted around any backend."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from tierd.backend import Backend, GetRequest, GetResult, Outcome, PutRequest
from tierd.errors import BackendError
from tierd.storage.wrapper import Wrapper

BOUNDS_S: Final = tuple(2.0**exponent for exponent in range(-14, 6))
"""Upper bounds of a histogram's buckets, 61 us to 32 s; one more has what takes longer."""

SPEED_MEMORY_S: Final = 2.0
"""Seconds of busy time after which a measurement counts a third: some tens of batches."""

DOUBTED: Final = 1e-6
"""Weight that is left to a speed in doubt: enough to be known until the next measurement, and
nothing against it. Were it more, a tier that was far too slow would need many trials."""

_LOOKUP, _GET, _PUT, _USE = "lookup", "get", "put", "use"
_ENDINGS: Final = ("calls", "failed", "bugs", "cancelled")
_GET_OUTCOMES: Final = (Outcome.HIT, Outcome.MISS, Outcome.CORRUPT, Outcome.ERROR)
_PUT_OUTCOMES: Final = (Outcome.STORED, Outcome.PRESENT, Outcome.REFUSED, Outcome.ERROR)


class Histogram:
    """Durations in buckets that grow by a factor of two."""

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS_S) + 1)
        """How many durations were at most BOUNDS_S[i] and over the bound before it."""
        self.count = 0
        self.sum_s = 0.0
        self.max_s = 0.0

    def add(self, duration_s: float) -> None:
        """Take in one duration."""
        self.buckets[bisect_left(BOUNDS_S, duration_s)] += 1
        self.count += 1
        self.sum_s += duration_s
        self.max_s = max(self.max_s, duration_s)

    def quantile_s(self, share: float) -> float:
        """The duration that `share` of all do not exceed, to within its bucket; 0 if none."""
        rank = share * self.count
        below = 0
        for i, count in enumerate(self.buckets):
            if count and below + count >= rank:
                lower = BOUNDS_S[i - 1] if i else 0.0
                upper = min(BOUNDS_S[i], self.max_s) if i < len(BOUNDS_S) else self.max_s
                return lower + (upper - lower) * (rank - below) / count
            below += count
        return 0.0


class MeasuredSpeed:
    """Bytes a second while calls are in flight, the recent ones above all.

    Calls that overlap share their time, so it is the tier's speed and not a call's.
    """

    def __init__(self) -> None:
        self._in_flight = 0
        self._last_s = 0.0
        self._busy_s = 0.0
        self._bytes = 0.0

    def begin(self, now_s: float) -> None:
        """A call begins."""
        if not self._in_flight:
            self._last_s = now_s
        self._in_flight += 1

    def end(self, now_s: float, moved_bytes: int) -> None:
        """A call has ended and has moved so many bytes."""
        self._in_flight -= 1
        spent_s = now_s - self._last_s
        self._last_s = now_s
        kept = math.exp(-spent_s / SPEED_MEMORY_S)
        self._busy_s = self._busy_s * kept + spent_s
        self._bytes = self._bytes * kept + moved_bytes

    def doubt(self) -> None:
        """The speed stays what it is, until what is moved from now on says otherwise."""
        self._busy_s *= DOUBTED
        self._bytes *= DOUBTED

    @property
    def bytes_per_s(self) -> float | None:
        """The speed, or None if nothing has been moved yet."""
        return self._bytes / self._busy_s if self._bytes and self._busy_s else None


class MeasuredBackend(Wrapper):
    """Counts calls, blocks and bytes of lookups, uses, gets and puts, and times the calls.

    Calls that fail or are cancelled are timed like others, until they have let go: a
    histogram without them would look best in an outage. `OP_failed_total` counts BackendErrors,
    `OP_bugs_total` other exceptions. Bytes are those of blocks that were HIT or STORED.
    """

    def __init__(self, inner: Backend, *, now_s: Callable[[], float] | None = None) -> None:
        """`now_s` is a clock finer than the loop's, whose time uvloop gives in whole ms."""
        super().__init__(inner)
        self._now_s = now_s or _loop_time
        self.histograms = {op: Histogram() for op in (_LOOKUP, _GET, _PUT, _USE)}
        self._read, self._written = MeasuredSpeed(), MeasuredSpeed()
        names = [f"{op}_{how}" for op in self.histograms for how in _ENDINGS]
        names += [f"{_GET}_{outcome.value}" for outcome in _GET_OUTCOMES]
        names += [f"{_PUT}_{outcome.value}" for outcome in _PUT_OUTCOMES]
        self.own_counters = {f"{name}_total": 0 for name in (*names, "read_bytes", "written_bytes")}

    def latency(self) -> dict[str, dict[str, object]]:
        """Durations of calls since the start, by operation. Buckets are those of BOUNDS_S, and
        the last one of all that took longer; none includes another.
        """
        return {
            op: {
                "count": histogram.count,
                "sum_s": histogram.sum_s,
                "p50_ms": 1e3 * histogram.quantile_s(0.5),
                "p99_ms": 1e3 * histogram.quantile_s(0.99),
                "max_ms": 1e3 * histogram.max_s,
                "buckets": list(histogram.buckets),
            }
            for op, histogram in self.histograms.items()
        }

    @property
    def read_bytes_per_s(self) -> float | None:
        """How fast blocks come from the tier, or None before the first one."""
        return self._read.bytes_per_s

    @property
    def write_bytes_per_s(self) -> float | None:
        """How fast the tier takes blocks, or None before the first one."""
        return self._written.bytes_per_s

    def doubt_read_speed(self) -> None:
        """Have the next blocks that come from the tier say how fast it is."""
        self._read.doubt()

    async def contains_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        with self._timed(_LOOKUP):
            return await self.inner.contains_many(namespace, hashes)

    async def use_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        with self._timed(_USE):
            return await self.inner.use_many(namespace, hashes)

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        moved_bytes = 0
        self._read.begin(self._now_s())
        try:
            with self._timed(_GET):
                results = await self.inner.get_into(namespace, requests)
            outcomes = [result.outcome for result in results]
            self._count(_GET, _GET_OUTCOMES, outcomes)
            lengths = [request.length for request in requests]
            moved_bytes = _bytes_of(lengths, outcomes, Outcome.HIT)
            self.own_counters["read_bytes_total"] += moved_bytes
        finally:
            self._read.end(self._now_s(), moved_bytes)
        return results

    async def put_many(self, namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
        moved_bytes = 0
        self._written.begin(self._now_s())
        try:
            with self._timed(_PUT):
                outcomes = await self.inner.put_many(namespace, requests)
            self._count(_PUT, _PUT_OUTCOMES, outcomes)
            lengths = [request.length for request in requests]
            moved_bytes = _bytes_of(lengths, outcomes, Outcome.STORED)
            self.own_counters["written_bytes_total"] += moved_bytes
        finally:
            self._written.end(self._now_s(), moved_bytes)
        return outcomes

    @contextmanager
    def _timed(self, op: str) -> Iterator[None]:
        """Around one call of `inner`: count it, time it, and count how it ended if not well."""
        began_s = self._now_s()
        self.own_counters[f"{op}_calls_total"] += 1
        try:
            yield
        except BackendError:
            self.own_counters[f"{op}_failed_total"] += 1
            raise
        except asyncio.CancelledError:
            self.own_counters[f"{op}_cancelled_total"] += 1
            raise
        except Exception:
            self.own_counters[f"{op}_bugs_total"] += 1
            raise
        finally:
            self.histograms[op].add(self._now_s() - began_s)

    def _count(self, op: str, possible: Sequence[Outcome], outcomes: list[Outcome]) -> None:
        # list.count compares identities: four passes are faster than hashing each outcome once.
        for outcome in possible:
            self.own_counters[f"{op}_{outcome.value}_total"] += outcomes.count(outcome)


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


def _bytes_of(lengths: list[int], outcomes: list[Outcome], done: Outcome) -> int:
    # Not strict: too few or too many answers are for the caller to refuse.
    return sum(n for n, outcome in zip(lengths, outcomes, strict=False) if outcome is done)
