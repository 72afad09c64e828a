"""Upper bounds of hits: an infinite cache, and one that knows the future (Belady's MIN)."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

from tierd.replay.trace import Trace

_DEPTH_BITS: Final = 24


class Hits:
    """Usable hits: the leading blocks of requests that were resident, and their tokens."""

    __slots__ = ("blocks", "tokens")

    def __init__(self) -> None:
        self.blocks = 0
        self.tokens = 0

    def add(self, blocks: int, tokens: int) -> None:
        """Add the usable hits of one request."""
        self.blocks += blocks
        self.tokens += tokens


def ideal(trace: Trace, block_tokens: int) -> Hits:
    """Return the usable hits of a cache that never evicts."""
    seen: set[bytes] = set()
    hits = Hits()
    for request, tokens in zip(trace.requests, trace.input_tokens, strict=True):
        blocks = next(
            (i for i, h in enumerate(request.hashes) if h not in seen), len(request.hashes)
        )
        hits.add(blocks, min(blocks * block_tokens, tokens))
        seen.update(request.hashes)
    return hits


def belady(trace: Trace, capacity: int, block_tokens: int) -> Hits:
    """Return the usable hits of a cache that evicts the block whose next use is farthest away.

    The cache may refuse a new block. Of blocks with the same next request, the deepest is evicted
    first, so that no prefix gets a hole if each block has one prefix.
    """
    hits = Hits()
    if capacity < 1:
        return hits
    following = _next_uses(trace)
    resident: dict[bytes, int] = {}
    # Farthest next use first; the entries of blocks used since then are stale.
    heap: list[tuple[int, bytes]] = []
    position = 0
    for request, tokens in zip(trace.requests, trace.input_tokens, strict=True):
        run = True
        blocks = 0
        for depth, block_hash in enumerate(request.hashes):
            use = following[position] << _DEPTH_BITS | depth
            position += 1
            present = resident.pop(block_hash, None) is not None
            run = run and present
            blocks += run
            if use >> _DEPTH_BITS == _NEVER:
                continue
            if len(resident) >= capacity:
                while resident.get(heap[0][1]) != -heap[0][0]:
                    heappop(heap)
                if -heap[0][0] <= use:
                    continue
                del resident[heappop(heap)[1]]
            resident[block_hash] = use
            heappush(heap, (-use, block_hash))
        hits.add(blocks, min(blocks * block_tokens, tokens))
    return hits


_NEVER: Final = 1 << 40


def _next_uses(trace: Trace) -> list[int]:
    """Return for each reference, in order, the number of the next request with that block."""
    following: list[int] = []
    later: dict[bytes, int] = {}
    for number in range(len(trace.requests) - 1, -1, -1):
        for block_hash in reversed(trace.requests[number].hashes):
            following.append(later.get(block_hash, _NEVER))
            later[block_hash] = number
    following.reverse()
    return following
