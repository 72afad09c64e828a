"""Which block goes first: policies behind one small interface (`tierd.eviction.policy`).

`hazard` is the default of L2 and `credit` that of storage tiers; the others are references.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tierd.eviction.arc import Arc
from tierd.eviction.credit import Credit
from tierd.eviction.hazard import Hazard
from tierd.eviction.lfu import Lfu
from tierd.eviction.lru import Lru
from tierd.eviction.policy import Policy
from tierd.eviction.reuse import Reuse
from tierd.eviction.s3fifo import S3Fifo

_REFERENCES: Final[dict[str, Callable[[int], Policy]]] = {
    policy.name: policy for policy in (Credit, Lru, Lfu, S3Fifo, Arc)
}

POLICIES: Final = (Hazard.name, *_REFERENCES)
"""The name of every policy."""

STORAGE_POLICIES: Final = tuple(_REFERENCES)
"""Those of a storage tier, which keeps no book of reuse."""

L2_DEFAULT: Final = Hazard.name
STORAGE_DEFAULT: Final = Credit.name


def make_policy(name: str, capacity: int, reuse: Reuse | None = None) -> Policy:
    """A policy by its name, for an index of at most `capacity` items.

    Those not in STORAGE_POLICIES read `reuse`, which the owner has count each request before the
    index learns of it. KeyError if there is no such policy, or none without `reuse`.
    """
    if name == Hazard.name and reuse is not None:
        return Hazard(capacity, reuse)
    return _REFERENCES[name](capacity)
