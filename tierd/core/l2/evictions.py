"""How blocks leave host memory: by eviction, perhaps after a write to a tier, or by a drop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tierd.core.effects import Effect, Forget
from tierd.core.l2.space import Space
from tierd.core.reasons import Dropped, Evicted, record_of

EVICTING_SHARE_MAX: Final = 1 / 8
"""Upper bound of the share of a space's slots with evicting blocks, which requests cannot use."""

WORTH_LESS: Final = 0.8
"""A warmed block may evict only blocks worth less than this share of it: the blocks of one hot
set, which arrive over some seconds, then do not evict each other."""

Claim = Callable[[Space, Sequence[int], int], None]
"""Called with the slots of evicted blocks and a count. It may hold up to that many verified ones
to write them. A slot becomes free when `settle` finds it no longer held."""


class Evictions:
    """Evicts, drops and revives blocks, and counts evictions."""

    __slots__ = ("_claim", "_claims_all", "_counts", "_revived_blocks")

    def __init__(self) -> None:
        self._claim: Claim | None = None
        self._claims_all = False
        self._counts: Counter[Evicted] = Counter()
        self._revived_blocks = 0

    @property
    def claims_all(self) -> bool:
        """Whether most evicted blocks are claimed, so that slots get free late."""
        return self._claims_all

    @property
    def counts(self) -> Mapping[Evicted, int]:
        """Number of evicted blocks, by reason."""
        return self._counts

    @property
    def revived_blocks(self) -> int:
        """Number of blocks that a request kept by asking for them while they were evicting."""
        return self._revived_blocks

    def set_claim(self, claim: Claim, *, claims_all: bool) -> None:
        """Call `claim` on evictions from now on."""
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
        """Evict up to `count` of the coldest leaves; return how many. Claimed slots get free later.

        With a `worth`, evict only blocks worth less than WORTH_LESS of it.
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
        """Free the slots whose blocks are evicting and no longer held."""
        gone = space._settle(slots)
        return [Forget(space, gone)] if gone else []

    def drop(self, space: Space, slots: Sequence[int], why: Dropped, now_s: int) -> list[Effect]:
        """Drop readable or evicting blocks permanently; lookups no longer find them.

        A held slot becomes free when its last hold ends.
        """
        space._drop(slots, record_of(why, now_s))
        space._release_dropped(slots)
        return [Forget(space, list(slots))] if slots else []

    def revive(self, space: Space, hashes: Sequence[bytes]) -> bool:
        """Make evicting blocks readable again; return whether there were any."""
        again = space._revive(hashes) if space._evicting else 0
        self._revived_blocks += again
        return again > 0
