"""Orders the blocks of one family of namespaces by value.

A block's value is its uses weighted by recency, times its bytes. `Forest` orders blocks as runs:
pieces of a chain whose blocks were used alike. A parent's run comes before its children's runs
and is worth at least as much. This module knows neither where blocks are stored nor the time.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from tierd.types import HASH_BYTES

RUN_BLOCKS_MAX: Final = 512
"""Maximum blocks of a run; its line then has 34 KiB."""

HALF_LIFE_S: Final = 3600
"""A use counts half after this time and a third after twice this time. The decay is hyperbolic,
not exponential, because in traces the chance of reuse falls as one over the age. One hour,
because a hot set serves the time after the next restart."""

STEP: Final = 256
"""Blocks processed between two yields to the caller, about 0.2 ms of work."""

SHARDS: Final = 64
"""Parts of the hash index: a single dict of a million entries takes 50 ms to double its size."""

_NONE: Final = -1


class Blocks(NamedTuple):
    """Blocks in columns: hashes, parents, uses and ages of the last use.

    An age is NEVER if no use is known. Uses and ages are at most NEVER.
    """

    hashes: list[bytes]
    parents: list[bytes]
    uses: list[int]
    ages_s: list[int]

    def take(self, others: Blocks) -> None:
        """Append others."""
        self.hashes.extend(others.hashes)
        self.parents.extend(others.parents)
        self.uses.extend(others.uses)
        self.ages_s.extend(others.ages_s)

    def cut(self, count: int) -> Blocks:
        """Take the first `count` blocks out and return them."""
        first = Blocks(
            self.hashes[:count], self.parents[:count], self.uses[:count], self.ages_s[:count]
        )
        for column in self:
            del column[:count]
        return first


class HotRun(NamedTuple):
    """A piece of a chain whose blocks were used alike.

    At least `uses` requests used each block, the last one at most `age_s` seconds ago. `depth`
    is the number of blocks from the root to the run's last block.
    """

    parent: bytes
    hashes: list[bytes]
    uses: int
    age_s: int
    depth: int


def worth(uses: int, age_s: int) -> float:
    """Return the relative value of a byte of a block: uses times recency."""
    return uses / (1 + age_s / HALF_LIFE_S)


class Forest:
    """Blocks of one family of namespaces, ordered by value.

    A block that is added twice keeps the larger number of uses and the smaller age. A block that
    is not connected to the root by added blocks is left out.
    """

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._places: list[dict[bytes, int]] = [{} for _ in range(SHARDS)]
        # Concatenated bytes: a garbage collection would visit each object of a list, for 45 ms.
        self._hashes = bytearray()
        self._parents = bytearray()
        self._uses = array("I")
        self._ages_s = array("I")

    def __len__(self) -> int:
        return len(self._uses)

    def add(
        self,
        hashes: Sequence[bytes],
        parents: Sequence[bytes],
        uses: Sequence[int],
        ages_s: Sequence[int],
    ) -> None:
        """Add blocks, given as the columns of `Blocks`."""
        shards, known_uses, known_ages_s = self._places, self._uses, self._ages_s
        own_hashes, own_parents = self._hashes, self._parents
        free = len(self)
        for block_hash, parent, count, age_s in zip(hashes, parents, uses, ages_s, strict=True):
            place = shards[block_hash[0] % SHARDS].setdefault(block_hash, free)
            if place == free:
                free += 1
                own_hashes += block_hash
                own_parents += parent
                known_uses.append(count)
                known_ages_s.append(age_s)
            else:
                if count > known_uses[place]:
                    known_uses[place] = count
                if age_s < known_ages_s[place]:
                    known_ages_s[place] = age_s

    def runs(self) -> Iterator[HotRun | None]:
        """Yield runs, the most valuable first and parents before children.

        Yields None where the caller may do other work. Add no block during the iteration.
        """
        count = len(self)
        # Each block's parent, first child, and the next child of its parent. The root has the
        # index after the last block.
        above, nexts = array("i"), array("i", [_NONE]) * count
        firsts = array("i", [_NONE]) * (count + 1)
        yield from self._link(above, firsts, nexts)
        order = array("i")
        yield from _downwards(firsts, nexts, order)
        # A request that used a child used its parent too, so a parent is worth at least as much.
        uses, ages_s = self._uses, self._ages_s
        for done, place in enumerate(reversed(order), 1):
            parent = above[place]
            if parent != count:
                if uses[place] > uses[parent]:
                    uses[parent] = uses[place]
                if ages_s[place] < ages_s[parent]:
                    ages_s[parent] = ages_s[place]
            if done % STEP == 0:
                yield None
        yield from self._best_first(firsts, nexts)

    def _link(self, above: array[int], firsts: array[int], nexts: array[int]) -> Iterator[None]:
        root, shards, count = self._root, self._places, len(self)
        for start in range(0, count, STEP):
            # A block whose parent is unknown gets _NONE and is never reached from the root.
            parents = map(partial(_hash_at, self._parents), range(start, min(start + STEP, count)))
            above.extend(
                [
                    count if parent == root else shards[parent[0] % SHARDS].get(parent, _NONE)
                    for parent in parents
                ]
            )
            for place in range(start, len(above)):
                if (parent_place := above[place]) != _NONE:
                    nexts[place], firsts[parent_place] = firsts[parent_place], place
            yield None

    def _best_first(self, firsts: array[int], nexts: array[int]) -> Iterator[HotRun | None]:
        """Yield the most valuable ready run; a run is ready once its parent's run was yielded."""
        # Value and length, negated, then the first and last index and the depth of the parent.
        # Only numbers, which the garbage collector need not follow.
        ready: list[tuple[float, int, int, int, int]] = []
        above, depth, blocks = len(self), 0, 0
        while True:
            head = firsts[above]
            while head != _NONE:
                last, length = self._end(head, firsts, nexts)
                value = worth(self._uses[last], self._ages_s[last])
                # Of runs of equal value per byte the longer one comes first.
                heapq.heappush(ready, (-value, -length, head, last, depth))
                blocks += length
                if blocks > STEP:
                    blocks = 0
                    yield None
                head = nexts[head]
            if not ready:
                return
            _, _, head, above, depth = heapq.heappop(ready)
            hashes = [_hash_at(self._hashes, head)]
            place = head
            while place != above:
                place = firsts[place]
                hashes.append(_hash_at(self._hashes, place))
            depth += len(hashes)
            parent = _hash_at(self._parents, head)
            yield HotRun(parent, hashes, self._uses[above], self._ages_s[above], depth)

    def _end(self, place: int, firsts: array[int], nexts: array[int]) -> tuple[int, int]:
        """Return the index of the last block of the run that begins at `place`, and its length."""
        uses, ages_s = self._uses, self._ages_s
        count, age_s, length = uses[place], ages_s[place], 1
        kind = _kind(count, age_s)
        while length < RUN_BLOCKS_MAX:
            child = firsts[place]
            if child == _NONE or nexts[child] != _NONE:
                break
            if (uses[child] != count or ages_s[child] != age_s) and (
                _kind(uses[child], ages_s[child]) != kind
            ):
                break
            place, length = child, length + 1
        return place, length


def _hash_at(hashes: bytearray, place: int) -> bytes:
    return bytes(hashes[HASH_BYTES * place : HASH_BYTES * (place + 1)])


def _downwards(firsts: array[int], nexts: array[int], order: array[int]) -> Iterator[None]:
    """Append to `order` the blocks connected to the root, each after its parent."""
    head = firsts[-1]
    while head != _NONE:
        todo = [head]
        while todo:
            place = todo.pop()
            order.append(place)
            child = firsts[place]
            while child != _NONE:
                todo.append(child)
                child = nexts[child]
            if len(order) % STEP == 0:
                yield None
        head = nexts[head]


def _kind(uses: int, age_s: int) -> tuple[int, int]:
    """Return the magnitudes of uses and age, which all blocks of a run share."""
    return uses.bit_length(), (age_s // 60).bit_length()
