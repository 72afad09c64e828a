"""How the chance that a block is used again depends on its class and its age, learned online.

A class's hazard is the rate of reuse, a second, at an age; age is the time since the last
use, in buckets of half an octave. It is learned from samples: each watches one block, which
stands for its neighbours, from a use to the next one, or until SAMPLES_MAX newer samples have
been opened. Sparse classes lean on their group's hazard, groups on that of all blocks, and that
on a prior that falls with age. Pure.

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
"""Upper ends of all age buckets but the last, from 0.5 s to 4.5 h."""

SAMPLES_MAX: Final = 4096
"""Fewer forget what comes back late, more follow a change too slowly: 1,024 cost two points
of hits at 5,000 blocks, 8,192 a quarter of a point at 50,000."""

SHRINK: Final = 10.0
"""Runs watched that weigh as much as the group's hazard. Runs, since the blocks of one live and
die together: a hundred blocks in one run say as much as two in one. 7 to 14 differ by less than
the noise; 200 blocks instead lost half a point with chains of some tens of blocks."""

SHRINK_ALL: Final = 0.5
PRIOR_ODDS: Final = 0.1
"""What is taken for granted before the first sample: a hazard of PRIOR_ODDS / age."""

HALF_LIFE: Final = 512
"""Samples of a class after which what was counted of it weighs half. By class, so that a change
of workload is learned soonest where it shows; 128 forget too much, and one half-life of 4,096
for all lost 0.4 points to LRU after a change."""

_BOUNDS_MS: Final = [0, *EDGES_MS, 2 * EDGES_MS[-1]]
_STARTS_S: Final = np.array([0, *EDGES_MS]) / 1000
_WIDTHS_S: Final = np.diff(np.append(_STARTS_S, 2 * _STARTS_S[-1]))
_ENDS_S: Final = _STARTS_S + _WIDTHS_S
_PRIOR: Final = PRIOR_ODDS / (_STARTS_S + _WIDTHS_S / 2)
_LATER: Final = np.triu(np.ones((BUCKETS, BUCKETS), bool))

Table = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class _Counts(NamedTuple):
    """What was seen by class (or group), a row each."""

    reused: Table
    """Blocks, by bucket."""
    exposed_s: Table
    """Seconds at risk, by bucket."""
    watched: Table
    """Blocks, and the sum of the squares of the runs' lengths."""

    def hazard(self, prior: Table, runs: float) -> Table:
        """Reuses a second, as if so many more runs of the usual length had followed the prior."""
        blocks, squares = self.watched[:, :1], self.watched[:, 1:]
        # The length of the run that a block is in, on average.
        length = np.maximum(squares, 1) / np.maximum(blocks, 1)
        time = runs * length * _WIDTHS_S
        hazard: Table = (self.reused + prior * time) / (self.exposed_s + time)
        return hazard

    def summed(self, sums: Table) -> _Counts:
        """The counts of groups of classes; `sums` has a row of ones and zeros for each."""
        return _Counts(*(sums @ column for column in self))


class Tables:
    """What the counts come to, by class: worth and summed hazard by age. Never changes."""

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
        # Classes without a single sample, most of them, have their group's worth.
        known = np.flatnonzero(counts.watched[:, 0])
        rows = _index(np.concatenate((hazard[known], group))).tolist()
        self.worth: list[list[float]] = [rows[len(known) + number] for number in groups]
        for kind, row in zip(known.tolist(), rows, strict=False):
            self.worth[kind] = row

    def value(self, kind: int, age_ms: int) -> float:
        """What keeping a block of that age can bring at best, in hits a second of residence."""
        bucket = bisect_right(EDGES_MS, age_ms)
        row = self.worth[kind]
        # Of blocks that are worth the same, the older goes first.
        here: float = row[bucket] - age_ms * 1e-15
        if bucket >= BUCKETS - 2:
            return here
        start = EDGES_MS[bucket - 1] if bucket else 0
        part = (age_ms - start) / (EDGES_MS[bucket] - start)
        return here + (row[bucket + 1] - row[bucket]) * part


class _Samples(NamedTuple):
    """Those watched and those that ended since the last rebuild, column by column."""

    kinds: Ints
    opened_ms: Ints
    ends_ms: Ints
    weights: Ints
    used: Flags
    since_ms: int


class Rebuild:
    """The making of tables, for any thread: it shares nothing with the samples."""

    def __init__(self, tables: Tables, samples: _Samples, opened: Ints) -> None:
        self._tables = tables
        self._samples = samples
        self._opened = opened

    def run(self) -> Tables:
        """The new tables; takes 1 ms."""
        old, samples = self._tables, self._samples
        if not len(samples.kinds):
            return old
        shape = len(old.groups), BUCKETS
        reused = np.zeros(shape)
        last = samples.ends_ms - samples.opened_ms
        first = np.maximum(samples.opened_ms, samples.since_ms) - samples.opened_ms
        exposed_s = _survived(last, samples, shape) - _survived(first, samples, shape)
        used = samples.used
        ages_ms = (samples.ends_ms - samples.opened_ms)[used]
        buckets = np.searchsorted(EDGES_MS, ages_ms, side="right")
        np.add.at(reused, (samples.kinds[used], buckets), samples.weights[used])
        keep = 0.5 ** (self._opened[:, :1] / HALF_LIFE)
        counts = _Counts(
            old.counts.reused * keep + reused,
            old.counts.exposed_s * keep + exposed_s,
            old.counts.watched * keep + self._opened[:, 1:],
        )
        return Tables(old.groups, counts)


def _survived(ages_ms: Ints, samples: _Samples, shape: tuple[int, int]) -> Table:
    """By class and bucket, the seconds that the samples spent there up to these ages."""
    buckets = np.searchsorted(EDGES_MS, ages_ms, side="right")
    cells = samples.kinds * BUCKETS + buckets
    size = shape[0] * shape[1]
    here_s = np.minimum(ages_ms / 1000, _ENDS_S[-1]) - _STARTS_S[buckets]
    partly = np.bincount(cells, samples.weights * here_s, size).reshape(shape)
    ended = np.bincount(cells, samples.weights, size).reshape(shape)
    later = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1] - ended
    survived: Table = partly + later * _WIDTHS_S
    return survived


class Survival:
    """Samples, counts, and the tables made of them.

    `groups` has the group of each class.
    """

    def __init__(self, groups: Sequence[int]) -> None:
        # Samples are in a ring of columns: `_open` has the places of those still watched.
        self._open: dict[bytes, int] = {}
        self._hash = [b""] * SAMPLES_MAX
        self._watched = bytearray(SAMPLES_MAX)
        self._kind, self._opened_ms, self._weight = (
            array("q", bytes(8 * SAMPLES_MAX)) for _ in range(3)
        )
        self._next = 0
        # Those that ended since the last rebuild: class, start, end, weight, and if by a use.
        self._ended: list[tuple[int, int, int, int, bool]] = []
        # By class, since the last rebuild: runs, their blocks, and the squares of those.
        self._opened = [(0, 0, 0)] * len(groups)
        self._rebuilt_ms = 0
        self._rebuilding = False
        none = _Counts(*(np.zeros((len(groups), width)) for width in (BUCKETS, BUCKETS, 2)))
        self.tables = Tables(np.array(groups), none)

    def used(self, hashes: Sequence[bytes], now_ms: int) -> None:
        """Blocks are used: whichever of them is watched came back at its age."""
        for block_hash in self._open.keys() & hashes:
            self._end(self._open[block_hash], now_ms, used=True)

    def _end(self, place: int, now_ms: int, *, used: bool) -> None:
        del self._open[self._hash[place]]
        self._watched[place] = False
        self._ended.append(
            (self._kind[place], self._opened_ms[place], now_ms, self._weight[place], used)
        )

    def watch(self, block_hash: bytes, kind: int, now_ms: int, weight: int) -> None:
        """Watch a block that has just been used, on behalf of `weight` blocks."""
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
        runs, blocks, squares = self._opened[kind]
        self._opened[kind] = runs + 1, blocks + weight, squares + weight * weight

    @property
    def rebuilding(self) -> bool:
        """Whether a rebuild has begun whose tables have not come yet."""
        return self._rebuilding

    def begin_rebuild(self, now_ms: int) -> Rebuild:
        """Take what happened since the last time; AssertionError if a rebuild is under way."""
        assert not self._rebuilding
        self._rebuilding = True
        watched = np.flatnonzero(np.frombuffer(self._watched, np.uint8))
        ended = np.array(self._ended, np.int64).reshape(-1, 5)
        kinds, opened_ms, weights = (
            np.concatenate((np.frombuffer(column, np.int64)[watched], ended[:, i]))
            for column, i in ((self._kind, 0), (self._opened_ms, 1), (self._weight, 3))
        )
        samples = _Samples(
            kinds,
            opened_ms,
            np.concatenate((np.full(len(watched), now_ms), ended[:, 2])),
            weights,
            np.concatenate((np.zeros(len(watched), bool), ended[:, 4] == 1)),
            self._rebuilt_ms,
        )
        job = Rebuild(self.tables, samples, np.array(self._opened))
        self._ended = []
        self._opened = [(0, 0, 0)] * len(self._opened)
        self._rebuilt_ms = now_ms
        return job

    def install(self, tables: Tables) -> None:
        """Use these tables from now on."""
        self._rebuilding = False
        self.tables = tables

    def reuse_chance(self, kind: int, age_ms: int, horizon_ms: int) -> float:
        """The chance that a block of that age is used within the horizon."""
        return -expm1(self._risk(kind, age_ms) - self._risk(kind, age_ms + horizon_ms))

    def _risk(self, kind: int, age_ms: int) -> float:
        """The hazard summed up to an age."""
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
    """Per class and bucket, the best rate of hits: over all times to give up at from there on.

    Chance of reuse until then, by the time of residence until reuse or then (the Gittins index
    of keeping the block). Where it rises with age, which is the dead time right after a use, it
    is what comes later that counts; after its maximum it is made to fall.
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
