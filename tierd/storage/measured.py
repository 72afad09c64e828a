"""A wrapper that counts and times the calls of any backend."""

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
"""Upper bounds of a histogram's buckets, 61 us to 32 s; a last bucket has longer durations."""

SPEED_MEMORY_S: Final = 2.0
"""Busy time in seconds, some tens of batches, after which a measurement's weight is 1/e."""

DOUBTED: Final = 1e-6
"""Factor for the weight of a doubted speed: the speed stays known until the next measurement, which
then replaces it. A larger factor would need many trials to correct a speed that was far too low."""

_LOOKUP, _GET, _PUT, _USE = "lookup", "get", "put", "use"
_ENDINGS: Final = ("calls", "failed", "bugs", "cancelled")
_GET_OUTCOMES: Final = (Outcome.HIT, Outcome.MISS, Outcome.CORRUPT, Outcome.ERROR)
_PUT_OUTCOMES: Final = (Outcome.STORED, Outcome.PRESENT, Outcome.REFUSED, Outcome.ERROR)


class Histogram:
    """Durations in buckets that grow by a factor of two."""

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS_S) + 1)
        """buckets[i] is the number of durations over BOUNDS_S[i - 1] and at most BOUNDS_S[i]."""
        self.count = 0
        self.sum_s = 0.0
        self.max_s = 0.0

    def add(self, duration_s: float) -> None:
        """Count one duration."""
        self.buckets[bisect_left(BOUNDS_S, duration_s)] += 1
        self.count += 1
        self.sum_s += duration_s
        self.max_s = max(self.max_s, duration_s)

    def quantile_s(self, share: float) -> float:
        """Return the quantile `share`, interpolated within its bucket; 0 if nothing was counted."""
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
    """Bytes per second while calls are in flight, weighted towards recent calls.

    The time of overlapping calls counts once, so this is the speed of the tier, not of a call.
    """

    def __init__(self) -> None:
        self._in_flight = 0
        self._last_s = 0.0
        self._busy_s = 0.0
        self._bytes = 0.0

    def begin(self, now_s: float) -> None:
        """Record that a call begins."""
        if not self._in_flight:
            self._last_s = now_s
        self._in_flight += 1

    def end(self, now_s: float, moved_bytes: int) -> None:
        """Record that a call ended after moving `moved_bytes`."""
        self._in_flight -= 1
        spent_s = now_s - self._last_s
        self._last_s = now_s
        kept = math.exp(-spent_s / SPEED_MEMORY_S)
        self._busy_s = self._busy_s * kept + spent_s
        self._bytes = self._bytes * kept + moved_bytes

    def doubt(self) -> None:
        """Keep the speed, but let the next measurement replace it."""
        self._busy_s *= DOUBTED
        self._bytes *= DOUBTED

    @property
    def bytes_per_s(self) -> float | None:
        """The speed, or None before the first byte was moved."""
        return self._bytes / self._busy_s if self._bytes and self._busy_s else None


class MeasuredBackend(Wrapper):
    """Counts calls, blocks and bytes of lookups, uses, gets and puts, and times the calls.

    Failed and cancelled calls are timed too, until they have ended: without them latencies would
    look best during an outage. `OP_failed_total` counts BackendErrors, `OP_bugs_total` other
    exceptions. Bytes count blocks that were HIT or STORED.
    """

    def __init__(self, inner: Backend, *, now_s: Callable[[], float] | None = None) -> None:
        """`now_s` may be a finer clock than the loop's: uvloop's time is in whole milliseconds."""
        super().__init__(inner)
        self._now_s = now_s or _loop_time
        self.histograms = {op: Histogram() for op in (_LOOKUP, _GET, _PUT, _USE)}
        self._read, self._written = MeasuredSpeed(), MeasuredSpeed()
        names = [f"{op}_{how}" for op in self.histograms for how in _ENDINGS]
        names += [f"{_GET}_{outcome.value}" for outcome in _GET_OUTCOMES]
        names += [f"{_PUT}_{outcome.value}" for outcome in _PUT_OUTCOMES]
        self.own_counters = {f"{name}_total": 0 for name in (*names, "read_bytes", "written_bytes")}

    def latency(self) -> dict[str, dict[str, object]]:
        """Return the durations of calls since the start, by operation.

        Buckets follow BOUNDS_S, plus one for longer durations; they are not cumulative.
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
        """Read speed of the tier, or None before the first block was read."""
        return self._read.bytes_per_s

    @property
    def write_bytes_per_s(self) -> float | None:
        """Write speed of the tier, or None before the first block was written."""
        return self._written.bytes_per_s

    def doubt_read_speed(self) -> None:
        """Let the next blocks read replace the measured read speed."""
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
        """Count and time one call of `inner`, and count its failure, bug or cancellation."""
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
        # list.count compares identities, so four passes are faster than hashing each outcome.
        for outcome in possible:
            self.own_counters[f"{op}_{outcome.value}_total"] += outcomes.count(outcome)


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


def _bytes_of(lengths: list[int], outcomes: list[Outcome], done: Outcome) -> int:
    # Not strict: the caller rejects a wrong number of answers.
    return sum(n for n, outcome in zip(lengths, outcomes, strict=False) if outcome is done)
