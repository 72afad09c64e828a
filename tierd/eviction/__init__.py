"""Eviction policies behind one small interface (`tierd.eviction.policy`).

`hazard` is the default of L2, `credit` the default of storage tiers; the others are references
for comparison.
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
"""Names of all policies."""

STORAGE_POLICIES: Final = tuple(_REFERENCES)
"""Names of the policies for storage tiers, which have no `Reuse` book."""

L2_DEFAULT: Final = Hazard.name
STORAGE_DEFAULT: Final = Credit.name


def make_policy(name: str, capacity: int, reuse: Reuse | None = None) -> Policy:
    """Return the policy with this name, for an index of at most `capacity` items.

    Policies that are not in STORAGE_POLICIES need `reuse`; the owner must count each request in
    it before the request reaches the index. Raises KeyError for an unknown name, or if the policy
    needs `reuse` and gets None.
    """
    if name == Hazard.name and reuse is not None:
        return Hazard(capacity, reuse)
    return _REFERENCES[name](capacity)
