"""What the engine did not compute because tierd had it, kept until the daemon has been told.

A request counts when it is admitted: what it wanted, and what it goes on from. So a load that
failed, or whose request ended before, saves nothing, and one that a preempted request needs again
saves it again. It refuses to know requests and leases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierd.client import by_source

if TYPE_CHECKING:
    from tierd.client import Client, Handle


@dataclass(slots=True)
class _Untold:
    wanted: int = 0
    sources: bytes = b""
    untimed: int = 0
    """Blocks that were loaded before it was known how fast the engine computes."""


class Savings:
    """What has not been told yet, by adapter."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._untold: dict[str, _Untold] = {}

    def add(self, adapter: str, wanted: int, sources: bytes) -> None:
        """A request that wanted so many blocks goes on from loaded ones, a byte of a lease's
        `sources` each."""
        untold = self._untold.setdefault(adapter, _Untold())
        untold.wanted += wanted
        untold.sources += sources
        untold.untimed += len(sources)

    def tell(
        self, client: Client, handles: Mapping[str, Sequence[Handle]], tokens_per_s: int
    ) -> None:
        """Tell the daemon, if it is there; the time saved, once the speed is known."""
        for adapter, untold in list(self._untold.items()):
            timed = untold.untimed if tokens_per_s else 0
            if not untold.wanted and not timed:
                continue
            saved_us = timed * self._block_tokens * 1_000_000 // max(1, tokens_per_s)
            counts = by_source(untold.sources)
            # Forgotten before it is told: after an error in between it must not be told again.
            self._untold[adapter] = _Untold(untimed=untold.untimed - timed)
            if not client.loaded(handles[adapter], untold.wanted, counts, prefill_us=saved_us):
                self._untold[adapter] = untold
