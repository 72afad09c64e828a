"""Learns online how the chance of a block's reuse depends on its class and its age.

A class's hazard is its rate of reuse per second at an age; age is the time since the last use, in
buckets of half an octave. It is learned from samples: each watches one block, which represents
its neighbours, from one use to the next, or until SAMPLES_MAX newer samples were opened. The
hazard of a sparse class is shrunk towards its group's hazard, a group's hazard towards the hazard
of all blocks, and that towards a prior that falls with age. Pure.

Memory: SAMPLES_MAX samples (about 250 B each), and a few tables of classes x BUCKETS floats;
`rebuild` briefly needs BUCKETS times that.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from math import expm1
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

BUCKETS: Final = 32
FIRST_EDGE_MS: Final = 500
EDGES_MS: Final = [round(FIRST_EDGE_MS * 2 ** (i / 2)) for i in range(BUCKETS - 1)]
"""Upper ends of all age buckets except the last, from 0.5 s to 4.5 h."""

SAMPLES_MAX: Final = 4096
"""Samples watched at once. Fewer miss late reuse, more follow a change too slowly: 1,024 cost two
points of hits at 5,000 blocks, 8,192 a quarter of a point at 50,000."""

RUN_POWER: Final = 0.75
"""A run of n blocks weighs n to this power. Its blocks are used together, so it is less evidence
than n independent blocks, and more than one block. 0.5 and 1 each cost up to half a point."""

SHRINK: Final = 10.0
"""Number of watched runs that weigh as much as the group's hazard. Runs, not blocks, because the
blocks of a run are used together: a hundred blocks in one run are as much evidence as two. 7 to 14
differ by less than the noise; counting 200 blocks instead lost half a point with chains of some
tens of blocks."""

SHRINK_ALL: Final = 0.5
PRIOR_ODDS: Final = 0.1
"""The prior, used before the first sample, is a hazard of PRIOR_ODDS / age."""

HALF_LIFE: Final = 512
"""Samples of a class after which its earlier counts weigh half. Per class, so that classes that a
change of workload affects learn it first. 128 forgets too much, and one half-life of 4,096 for all
classes lost 0.4 points to LRU after a change."""

_BOUNDS_MS: Final = [0, *EDGES_MS, 2 * EDGES_MS[-1]]
_STARTS_S: Final = np.array([0, *EDGES_MS]) / 1000
_WIDTHS_S: Final = np.diff(np.append(_STARTS_S, 2 * _STARTS_S[-1]))
_ENDS_S: Final = _STARTS_S + _WIDTHS_S
_PRIOR: Final = PRIOR_ODDS / (_STARTS_S + _WIDTHS_S / 2)
_LATER: Final = np.triu(np.ones((BUCKETS, BUCKETS), bool))

Table = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class _Counts(NamedTuple):
    """Weighted observations, one row per class or group."""

    reused: Table
    """Weight of reused runs, by bucket of age."""
    exposed_s: Table
    """Seconds at risk times weight, by bucket of age."""
    watched: Table
    """Two columns: the sum of the runs' weights, and the sum of their squares."""

    def hazard(self, prior: Table, runs: float) -> Table:
        """Return reuses per second, with `runs` additional runs that followed the prior."""
        weights, squares = self.watched[:, :1], self.watched[:, 1:]
        # The additional runs have the mean weight over blocks, not over runs.
        usual = np.maximum(squares, 1) / np.maximum(weights, 1)
        time = runs * usual * _WIDTHS_S
        hazard: Table = (self.reused + prior * time) / (self.exposed_s + time)
        return hazard

    def summed(self, sums: Table) -> _Counts:
        """Return the counts of groups of classes; `sums` has one row of ones and zeros each."""
        return _Counts(*(sums @ column for column in self))


class Tables:
    """Worth and cumulative hazard by class and age, computed from counts; immutable."""

    __slots__ = ("counts", "groups", "risks", "worth")

    def __init__(self, groups: Ints, counts: _Counts) -> None:
        self.groups = groups
        self.counts = counts
        sums = np.zeros((groups.max() + 1, len(groups)))
        sums[groups, np.arange(len(groups))] = 1
        every = counts.summed(np.ones((1, len(groups)))).hazard(_PRIOR, SHRINK_ALL)
        group = counts.summed(sums).hazard(every, SHRINK)
        hazard = counts.hazard(group[groups], SHRINK)
        risks = np.cumsum(hazard * _WIDTHS_S, axis=1)
        self.risks: list[list[float]] = np.pad(risks, ((0, 0), (1, 0))).tolist()
        # Most classes have no sample; they get their group's worth.
        known = np.flatnonzero(counts.watched[:, 0])
        rows = _index(np.concatenate((hazard[known], group))).tolist()
        self.worth: list[list[float]] = [rows[len(known) + number] for number in groups]
        for kind, row in zip(known.tolist(), rows, strict=False):
            self.worth[kind] = row

    def value(self, kind: int, age_ms: int) -> float:
        """Return the best rate of hits, per second of residence, of keeping a block of this age."""
        bucket = bisect_right(EDGES_MS, age_ms)
        row = self.worth[kind]
        # Of blocks with equal worth the older one is evicted first.
        here: float = row[bucket] - age_ms * 1e-15
        if bucket >= BUCKETS - 2:
            return here
        start = EDGES_MS[bucket - 1] if bucket else 0
        part = (age_ms - start) / (EDGES_MS[bucket] - start)
        return here + (row[bucket + 1] - row[bucket]) * part


def _survived(kinds: Ints, ages_ms: Ints, weights: Ints, shape: tuple[int, int]) -> Table:
    """Return seconds times weight that samples spent in each class and bucket up to these ages."""
    buckets = np.searchsorted(EDGES_MS, ages_ms, side="right")
    cells = kinds * BUCKETS + buckets
    size = shape[0] * shape[1]
    here_s = np.minimum(ages_ms / 1000, _ENDS_S[-1]) - _STARTS_S[buckets]
    partly = np.bincount(cells, weights * here_s, size).reshape(shape)
    ended = np.bincount(cells, weights, size).reshape(shape)
    later = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1] - ended
    survived: Table = partly + later * _WIDTHS_S
    return survived


class Survival:
    """Samples, and the tables computed from them; `groups[kind]` is the group of a class."""

    def __init__(self, groups: Sequence[int]) -> None:
        # Samples are in a ring of columns; `_open` maps the watched hashes to their places.
        self._open: dict[bytes, int] = {}
        self._hash = [b""] * SAMPLES_MAX
        self._watched = bytearray(SAMPLES_MAX)
        self._kind, self._opened_ms, self._weight = (
            array("q", bytes(8 * SAMPLES_MAX)) for _ in range(3)
        )
        self._next = 0
        # Samples that ended since the last rebuild: class, start, end, weight, ended by a use.
        self._ended: list[tuple[int, int, int, int, bool]] = []
        # By class since the last rebuild: number of runs, sum of weights, sum of squares.
        self._opened = [(0, 0, 0)] * len(groups)
        self._rebuilt_ms = 0
        none = _Counts(*(np.zeros((len(groups), width)) for width in (BUCKETS, BUCKETS, 2)))
        self.tables = Tables(np.array(groups), none)

    def used(self, hashes: Sequence[bytes], now_ms: int) -> None:
        """End the samples of the blocks in `hashes` that are watched, as reused now."""
        for block_hash in self._open.keys() & hashes:
            self._end(self._open[block_hash], now_ms, used=True)

    def _end(self, place: int, now_ms: int, *, used: bool) -> None:
        del self._open[self._hash[place]]
        self._watched[place] = False
        self._ended.append(
            (self._kind[place], self._opened_ms[place], now_ms, self._weight[place], used)
        )

    def watch(self, block_hash: bytes, kind: int, now_ms: int, blocks: int) -> None:
        """Watch a block that was just used, as the sample of a run of `blocks` blocks."""
        weight = round(blocks**RUN_POWER)
        place = self._next
        self._next = (place + 1) % len(self._hash)
        if self._watched[place]:
            self._end(place, now_ms, used=False)
        self._open[block_hash] = place
        self._hash[place] = block_hash
        self._watched[place] = True
        self._kind[place] = kind
        self._opened_ms[place] = now_ms
        self._weight[place] = weight
        runs, weights, squares = self._opened[kind]
        self._opened[kind] = runs + 1, weights + weight, squares + weight * weight

    def rebuild(self, now_ms: int) -> None:
        """Build new tables with the observations since the last rebuild; takes 1 ms."""
        old, since_ms = self.tables, self._rebuilt_ms
        watched = np.flatnonzero(np.frombuffer(self._watched, np.uint8))
        ended = np.array(self._ended, np.int64).reshape(-1, 5)
        kinds, opened_ms, weights = (
            np.concatenate((np.frombuffer(column, np.int64)[watched], ended[:, i]))
            for column, i in ((self._kind, 0), (self._opened_ms, 1), (self._weight, 3))
        )
        ages_ms = np.concatenate((np.full(len(watched), now_ms), ended[:, 2])) - opened_ms
        known_ms = np.maximum(since_ms - opened_ms, 0)
        shape = len(old.groups), BUCKETS
        exposed_s = _survived(kinds, ages_ms, weights, shape)
        exposed_s -= _survived(kinds, known_ms, weights, shape)
        came_back = ended[:, 4] == 1
        buckets = np.searchsorted(EDGES_MS, ages_ms[len(watched) :][came_back], side="right")
        reused = np.zeros(shape)
        np.add.at(reused, (ended[came_back, 0], buckets), ended[came_back, 3])
        opened = np.array(self._opened)
        keep = 0.5 ** (opened[:, :1] / HALF_LIFE)
        counts = _Counts(
            old.counts.reused * keep + reused,
            old.counts.exposed_s * keep + exposed_s,
            old.counts.watched * keep + opened[:, 1:],
        )
        self.tables = Tables(old.groups, counts)
        self._ended = []
        self._opened = [(0, 0, 0)] * len(self._opened)
        self._rebuilt_ms = now_ms

    def reuse_chance(self, kind: int, age_ms: int, horizon_ms: int) -> float:
        """Return the chance that a block of this age is used within the horizon."""
        return -expm1(self._risk(kind, age_ms) - self._risk(kind, age_ms + horizon_ms))

    def _risk(self, kind: int, age_ms: int) -> float:
        """Return the cumulative hazard up to an age."""
        bucket = min(bisect_right(EDGES_MS, age_ms), BUCKETS - 1)
        row = self.tables.risks[kind]
        start, end = _BOUNDS_MS[bucket], _BOUNDS_MS[bucket + 1]
        part = min((age_ms - start) / (end - start), 1.0)
        return row[bucket] + (row[bucket + 1] - row[bucket]) * part

    def check(self) -> None:
        """Assert every invariant; for tests."""
        assert len(self._open) == sum(self._watched) <= len(self._hash)
        for block_hash, place in self._open.items():
            assert self._watched[place]
            assert self._hash[place] == block_hash


def _index(hazard: Table) -> Table:
    """Return the best rate of hits per class and bucket, the Gittins index of keeping a block.

    For each later time of giving up, the rate is the chance of reuse before that time, divided by
    the expected residence until reuse or that time; the index is the maximum over these times.
    It may rise with age in the dead time right after a use. After its maximum it is forced to
    fall.
    """
    alive = np.exp(-np.cumsum(np.pad(hazard * _WIDTHS_S, ((0, 0), (1, 0))), axis=1))
    died = alive[:, :-1] - alive[:, 1:]
    spent = np.cumsum(np.pad(died / hazard, ((0, 0), (1, 0))), axis=1)
    hits = alive[:, :-1, None] - alive[:, None, 1:]
    cost = spent[:, None, 1:] - spent[:, :-1, None]
    possible = _LATER & (cost > 0)
    rate: Table = np.where(possible, hits / np.where(possible, cost, 1), 0).max(axis=2)
    for row, top in zip(rate, rate.argmax(axis=1), strict=True):
        np.minimum.accumulate(row[top:], out=row[top:])
    return rate
