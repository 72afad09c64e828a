"""The ceilings: a cache without end, and one that knows the future (Belady's MIN)."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

from tierd.replay.trace import Trace

_DEPTH_BITS: Final = 24


class Hits:
    """Usable hits: blocks from the first of a request on that were there, and their tokens."""

    __slots__ = ("blocks", "tokens")

    def __init__(self) -> None:
        self.blocks = 0
        self.tokens = 0

    def add(self, blocks: int, tokens: int) -> None:
        """Count one request's."""
        self.blocks += blocks
        self.tokens += tokens


def ideal(trace: Trace, block_tokens: int) -> Hits:
    """Usable hits of a cache that never evicts."""
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
    """Usable hits of a cache that drops what is used again last, and may refuse a block.

    Of blocks that the same request uses next, the deepest goes first, so that no prefix gets a
    hole as long as every block has one prefix.
    """
    hits = Hits()
    if capacity < 1:
        return hits
    following = _next_uses(trace)
    resident: dict[bytes, int] = {}
    # Farthest next use first; entries of what was used meanwhile are stale.
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
    """For every reference, in order, the number of the request that uses the block next."""
    following: list[int] = []
    later: dict[bytes, int] = {}
    for number in range(len(trace.requests) - 1, -1, -1):
        for block_hash in reversed(trace.requests[number].hashes):
            following.append(later.get(block_hash, _NEVER))
            later[block_hash] = number
    following.reverse()
    return following
