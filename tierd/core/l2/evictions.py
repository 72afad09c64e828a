"""How blocks leave L2: evicted, and perhaps held until a tier has them, or dropped for good."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tierd.core.effects import Effect, Forget
from tierd.core.l2.space import Space
from tierd.core.reasons import Dropped, Evicted, record_of

EVICTING_SHARE_MAX: Final = 1 / 8
"""Share of a space's slots whose blocks may be evicting: what is written late is no longer L2's."""

WORTH_LESS: Final = 0.8
"""A block gives way to one that nobody waits for if it is worth less than so much of it: the blocks
of one hot set, of which the daemon is told over some seconds, do not push each other out."""

Claim = Callable[[Space, Sequence[int], int], None]
"""Told of the slots whose blocks are evicted. It may hold verified ones, at most so many, to write
them: they are free when `settle` finds that nobody holds them any more."""


class Evictions:
    """What left, and who may hold what leaves."""

    __slots__ = ("_claim", "_claims_all", "_counts", "_revived_blocks")

    def __init__(self) -> None:
        self._claim: Claim | None = None
        self._claims_all = False
        self._counts: Counter[Evicted] = Counter()
        self._revived_blocks = 0

    @property
    def claims_all(self) -> bool:
        """Whether blocks usually are claimed, so that slots get free late."""
        return self._claims_all

    @property
    def counts(self) -> Mapping[Evicted, int]:
        """Blocks that were evicted, by reason."""
        return self._counts

    @property
    def revived_blocks(self) -> int:
        """Blocks that were asked for while they were evicting, and stayed."""
        return self._revived_blocks

    def set_claim(self, claim: Claim, *, claims_all: bool) -> None:
        """Tell `claim` of what is evicted from now on."""
        self._claim, self._claims_all = claim, claims_all

    def evict(
        self,
        space: Space,
        count: int,
        why: Evicted,
        now_s: int,
        effects: list[Effect],
        worth: float | None = None,
    ) -> int:
        """Evict up to `count` of the coldest leaves; how many. What is claimed is free later.

        With a `worth` only what is worth less.
        """
        most = max(1, int(space._live_segments * space.slots_per_segment * EVICTING_SHARE_MAX))
        room = max(0, most - len(space._evicting))
        spare = None
        if worth is not None:
            floor = worth * WORTH_LESS
            spare = lambda other: space.reuse.worth(other) >= floor  # noqa: E731
        slots = space._evict(count, record_of(why, now_s), spare)
        self._counts[why] += len(slots)
        if self._claim is not None and slots:
            self._claim(space, slots, room)
        effects += self.settle(space, slots)
        return len(slots)

    def settle(self, space: Space, slots: Sequence[int]) -> list[Effect]:
        """Free those of the slots whose blocks are evicting and that nobody holds any more."""
        gone = space._settle(slots)
        return [Forget(space, gone)] if gone else []

    def drop(self, space: Space, slots: Sequence[int], why: Dropped, now_s: int) -> list[Effect]:
        """Take readable or evicting blocks out for good.

        They are found by nobody from now on. Slots that somebody holds are free once nobody does.
        """
        space._drop(slots, record_of(why, now_s))
        space._release_dropped(slots)
        return [Forget(space, list(slots))] if slots else []

    def revive(self, space: Space, hashes: Sequence[bytes]) -> bool:
        """Make blocks readable again that are evicting; whether any was."""
        again = space._revive(hashes) if space._evicting else 0
        self._revived_blocks += again
        return again > 0
