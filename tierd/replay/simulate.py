"""Simulates a trace on one node's two tiers, with the daemon's policies, index and budgets. Pure.

A request's blocks are looked up, used and stored at once: no time passes between lookup
and store, and load times do not delay later arrivals. Blocks that L3 has and L2 lacks are
promoted. L3 sees every use, L2's hits included, and accepts all writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tierd.chain import ChainIndex
from tierd.config import StorageConfig
from tierd.core.l3.writes import NS, WriteMoment, Writes
from tierd.eviction import make_policy
from tierd.eviction.policy import Policy, PrefixRequest
from tierd.eviction.reuse import Reuse
from tierd.replay.optimal import Hits
from tierd.replay.trace import Trace

_ROOT: Final = b"\x00" * 32
_DIGEST: Final = b""
"""The digest of the only namespace."""

PROGRESS_EVERY: Final = 256
"""Requests between two calls of the progress callback."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One node. Sizes are in blocks; 0 means that the tier does not exist.

    Only the settings of `storage` for the write policy are used.
    """

    l2_blocks: int
    l3_blocks: int
    l2_policy: str
    l3_policy: str
    storage: StorageConfig
    block_bytes: int


@dataclass(slots=True)
class ReplayResult:
    """The result of one run of a setup, in blocks."""

    l2: Hits = field(default_factory=Hits)
    l3: Hits = field(default_factory=Hits)
    l2_stored: int = 0
    l3_written: int = 0
    l3_refused: int = 0
    """Blocks evicted from L2 that the write policy did not write."""
    refused_hits: int = 0
    """Refused blocks that a later request asked for."""


class Tier:
    """An index of one tier and its free items."""

    def __init__(self, blocks: int, policy: Policy) -> None:
        self.index = ChainIndex(policy)
        self.free = list(range(blocks - 1, -1, -1))


def simulate(
    trace: Trace,
    setup: Setup,
    block_tokens: int,
    progress: Callable[[int], None] = lambda requests: None,
) -> ReplayResult:
    """Run the trace; `progress` gets the number of requests done, every PROGRESS_EVERY requests."""
    node = _Node(setup)
    for number, (request, tokens) in enumerate(
        zip(trace.requests, trace.input_tokens, strict=True)
    ):
        if number % PROGRESS_EVERY == 0:
            progress(number)
        in_l2, usable = node.request(request)
        first = min(in_l2 * block_tokens, tokens)
        node.outcome.l2.add(in_l2, first)
        node.outcome.l3.add(usable - in_l2, min(usable * block_tokens, tokens) - first)
    progress(len(trace.requests))
    return node.outcome


class _Node:
    def __init__(self, setup: Setup) -> None:
        self.block_bytes = setup.block_bytes
        self.outcome = ReplayResult()
        self.reuse = Reuse()
        self.l2, self.l3 = (
            Tier(blocks, make_policy(name, blocks, self.reuse))
            for blocks, name in (
                (setup.l2_blocks, setup.l2_policy),
                (setup.l3_blocks, setup.l3_policy),
            )
        )
        self.writes: Writes | None = None
        if setup.l3_blocks:
            self.writes = Writes(setup.storage, setup.l2_blocks * setup.block_bytes)
            self.writes.budget.resize(setup.l3_blocks * setup.block_bytes)
        self.now_ns = 0
        # Hash and parent of the block in each L2 item.
        self.blocks: list[tuple[bytes, bytes]] = [(b"", b"")] * setup.l2_blocks

    def request(self, request: PrefixRequest) -> tuple[int, int]:
        """Serve one request; return the leading blocks in L2, and in both tiers together."""
        hashes = request.hashes
        self.reuse.use(request)
        in_l2 = usable = self.l2.index.use(request)
        items, below = self.l2.index.items, self.l3.index.items
        absent = [place for place in range(in_l2, len(hashes)) if hashes[place] not in items]
        if self.writes is None:
            if absent:
                self._store(hashes, absent)
            return in_l2, usable
        self.now_ns = int(request.now_s * NS)
        while usable < len(hashes) and (hashes[usable] in below or hashes[usable] in items):
            usable += 1
        self.l3.index.use(request)
        lacking = [place for place, h in enumerate(hashes) if h not in below]
        self.outcome.refused_hits += self.writes.missed.lost(_DIGEST, [hashes[i] for i in absent])
        self._offer(WriteMoment.USED, hashes, [i for i in lacking if hashes[i] in items])
        if absent:
            new = set(self._store(hashes, absent))
            self._offer(WriteMoment.STORED, hashes, [i for i in lacking if i in new])
        return in_l2, usable

    def _store(self, hashes: Sequence[bytes], absent: list[int]) -> list[int]:
        """Store absent blocks in L2, in chain order, while it has room; return their indices."""
        index, free = self.l2.index, self.l2.free
        if len(absent) > len(free):
            own = set(map(index.items.get, hashes))
            gone = index.evict(len(absent) - len(free), own.__contains__)
            if self.writes is not None:
                self._leave(gone)
            free.extend(gone)
        stored = absent[: len(free)]
        self.outcome.l2_stored += len(stored)
        blocks = self.blocks
        for i in stored:
            item = free.pop()
            blocks[item] = block = hashes[i], hashes[i - 1] if i else _ROOT
            index.insert(item, *block)
        return stored

    def _leave(self, gone: list[int]) -> None:
        below = self.l3.index.items
        # `gone` has the deepest blocks first; write in chain order.
        evicting = [self.blocks[item] for item in reversed(gone)]
        evicting = [block for block in evicting if block[0] not in below]
        chosen = self._choose(WriteMoment.EVICTING, [block_hash for block_hash, _ in evicting])
        self._write([evicting[place] for place in chosen])
        self.outcome.l3_refused += len(evicting) - len(chosen)

    def _offer(self, moment: WriteMoment, hashes: Sequence[bytes], places: list[int]) -> None:
        chosen = self._choose(moment, [hashes[i] for i in places])
        self._write(
            [(hashes[i], hashes[i - 1] if i else _ROOT) for i in map(places.__getitem__, chosen)]
        )

    def _choose(self, moment: WriteMoment, hashes: list[bytes]) -> list[int]:
        """Return the indices of the hashes that L3's write policy chooses."""
        if not hashes:
            return []
        assert self.writes is not None
        return self.writes.choose(
            moment, _DIGEST, hashes, self.reuse, self.block_bytes, self.now_ns
        )

    def _write(self, blocks: list[tuple[bytes, bytes]]) -> None:
        """Write blocks to L3 while it has room, after evicting for them."""
        if not blocks:
            return
        assert self.writes is not None
        index, free, missed = self.l3.index, self.l3.free, self.writes.missed
        if len(blocks) > len(free):
            free.extend(index.evict(len(blocks) - len(free), _never))
        for block in blocks[: len(free)]:
            missed.remove(_DIGEST, block[0])
            index.insert(free.pop(), *block)
            self.outcome.l3_written += 1


def _never(item: int) -> bool:
    return False
