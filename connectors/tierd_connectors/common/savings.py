"""Counts of blocks loaded instead of computed, kept until they are sent to the daemon.

A request is counted when it is admitted: its wanted blocks and its loaded blocks. So a load that
failed, or whose request ended before, saves nothing. A repeated load after a preemption counts
again. This module does not know requests or leases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierd.client import by_source

if TYPE_CHECKING:
    from tierd.client import Client, Handle


@dataclass(slots=True)
class _Unsent:
    wanted: int = 0
    sources: bytes = b""
    untimed: int = 0
    """Blocks loaded before the engine's prefill speed was known."""


class Savings:
    """Counts that have not been sent yet, by adapter."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._unsent: dict[str, _Unsent] = {}

    def add(self, adapter: str, wanted: int, sources: bytes) -> None:
        """Count a request's wanted blocks, and its loaded ones by a lease's `sources` byte each."""
        unsent = self._unsent.setdefault(adapter, _Unsent())
        unsent.wanted += wanted
        unsent.sources += sources
        unsent.untimed += len(sources)

    def send(
        self, client: Client, handles: Mapping[str, Sequence[Handle]], tokens_per_s: int
    ) -> None:
        """Send the counts if the daemon is connected, with the time saved once speed is known."""
        for adapter, unsent in list(self._unsent.items()):
            timed = unsent.untimed if tokens_per_s else 0
            if not unsent.wanted and not timed:
                continue
            saved_us = timed * self._block_tokens * 1_000_000 // max(1, tokens_per_s)
            counts = by_source(unsent.sources)
            # Reset the counts before sending: after an error they must not be sent twice.
            self._unsent[adapter] = _Unsent(untimed=unsent.untimed - timed)
            if not client.loaded(handles[adapter], unsent.wanted, counts, prefill_us=saved_us):
                self._unsent[adapter] = unsent
