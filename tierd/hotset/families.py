"""Groups the namespaces of an engine's ranks, and merges the runs of all engines by value.

The ranks of an engine store the same blocks, so they share one `Forest`, and a run stands for its
blocks in all ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from tierd.hotset.forest import Forest, HotRun, worth
from tierd.types import Namespace

RANKS_MAX: Final = 64
"""Maximum namespaces of a run, as in a call to the daemon."""


class Hot(NamedTuple):
    """A run and the namespaces of its ranks."""

    namespaces: tuple[Namespace, ...]
    run: HotRun

    @property
    def tokens(self) -> int:
        """Tokens of the prefix that ends with the run."""
        return self.run.depth * self.namespaces[0].block_tokens

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all ranks."""
        return sum(namespace.block_bytes for namespace in self.namespaces)

    @property
    def size_bytes(self) -> int:
        """Bytes of all blocks in all ranks."""
        return len(self.run.hashes) * self.block_bytes


Family = tuple[Sequence[Namespace], Iterable[HotRun | None]]
"""Namespaces of the ranks of an engine, and runs as `Forest.runs` yields them."""


class Gathered:
    """Blocks of many namespaces; the ranks of an engine share one forest."""

    def __init__(self) -> None:
        self._groups: list[tuple[list[Namespace], Forest]] = []
        self._of: dict[bytes, Forest] = {}

    def forest(self, namespace: Namespace) -> Forest:
        """Return the forest for blocks of a namespace, one for all ranks of its engine."""
        digest = namespace.digest
        forest = self._of.get(digest)
        if forest is None:
            for namespaces, found in self._groups:
                if len(namespaces) < RANKS_MAX and all(
                    _of_one_engine(namespace, other) for other in namespaces
                ):
                    forest = found
                    break
            else:
                namespaces, forest = [], Forest(namespace.hash_root)
                self._groups.append((namespaces, forest))
            namespaces.append(namespace)
            self._of[digest] = forest
        return forest

    def families(self) -> list[Family]:
        """Return the argument of `pieces`; call it once."""
        return [(sorted(spaces, key=_rank), forest.runs()) for spaces, forest in self._groups]


def _of_one_engine(one: Namespace, other: Namespace) -> bool:
    """Whether two namespaces may belong to ranks of one engine.

    A family survives a change of its block layout and then has two namespaces for one rank;
    such namespaces do not belong together.
    """
    alike = one.family == other.family and one.layout == other.layout
    if one.pp_rank == other.pp_rank:
        alike = alike and (one.block_bytes, one.groups) == (other.block_bytes, other.groups)
    return alike and _rank(one) != _rank(other)


def _rank(namespace: Namespace) -> tuple[int, int, int]:
    return namespace.pp_rank, namespace.tp_rank, namespace.cp_rank


def merged(families: Sequence[Family]) -> Iterator[Hot | None]:
    """Yield the runs of all families, the most valuable first, or None as `Forest.runs` does."""
    sources = [iter(runs) for _, runs in families]
    waiting = list(range(len(sources)))
    ready: list[tuple[float, int, HotRun]] = []
    while waiting or ready:
        while waiting:
            number = waiting[-1]
            run = next(sources[number], waiting)
            if isinstance(run, HotRun):
                heapq.heappush(ready, (-worth(run.uses, run.age_s), number, run))
            if run is None:
                yield None
            else:
                waiting.pop()
        if ready:
            _, number, run = heapq.heappop(ready)
            yield Hot(tuple(families[number][0]), run)
            waiting.append(number)
