"""How namespaces share host memory: the size of their segments, and which ones give memory up.

Pure and stateless. The more namespaces exist when one is created, the smaller its segments are:
the first segments of all namespaces together are less than the capacity. A namespace without
memory can therefore always get a segment from one with several. Where that fails, since a slot
is larger than such a segment or the machine is short of memory, namespaces take turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from tierd.core.l2.space import Space

SEGMENT_BYTES_MIN: Final = 64 << 20
SEGMENT_BYTES_MAX: Final = 256 << 20
SEGMENTS_TARGET: Final = 256
"""Segments of a full arena: few enough to map, and enough to lend between namespaces. Each has
64 MiB to 256 MiB: decommitting one blocks the event loop for about 0.1 ms per MiB.
"""

SEGMENTS_MIN: Final = 32
"""Segments of even a small arena, so that a few namespaces can share it evenly."""

SEGMENTS_EACH: Final = 8
"""Segments per namespace if all have equal shares. A segment of the n-th namespace has at most
capacity / (8 n) bytes: the first segments of 1,024 namespaces add up to 15/16 of the capacity, and
a full arena has at most 8,192 segments, as many as the service manager keeps."""

IDLE_S: Final = 600
"""Seconds without stores and requests after which a namespace gives its memory to others, even if
it is registered, like an unused LoRA adapter."""

TURN_S: Final = 10
"""Seconds for which a namespace keeps its last segment if there are not enough for all: earlier,
its blocks would be dropped before an engine could ask for them again."""


def segment_bytes(capacity_bytes: int, namespaces: int = 1) -> int:
    """Return the segment size, in bytes, of the n-th namespace, n being `namespaces`."""
    most = max(SEGMENT_BYTES_MIN, min(SEGMENT_BYTES_MAX, capacity_bytes // SEGMENTS_TARGET))
    most = min(most, capacity_bytes // SEGMENTS_MIN)
    return max(1, min(most, capacity_bytes // (SEGMENTS_EACH * namespaces)))


def is_idle(space: Space, now_s: int) -> bool:
    """Whether a namespace has no sessions, or no engine has used it for IDLE_S."""
    return not space.sessions or now_s - space.used_s >= IDLE_S


def by_worth(spaces: Iterable[Space], now_s: int) -> list[Space]:
    """Return the spaces with memory in the order in which they give it up.

    Idle ones come first, the least recently used one leading; then those with the most memory.
    """

    def rank(space: Space) -> tuple[bool, int, int]:
        idle = is_idle(space, now_s)
        return not idle, space.used_s if idle else 0, -space.memory_bytes

    return sorted((space for space in spaces if space.live_segments), key=rank)


def donors(
    spaces: Iterable[Space], needy: Space, now_s: int, *, only_idle: bool
) -> Iterator[tuple[Space, int]]:
    """Yield the spaces that give memory to one that needs a segment, each with its most segments.

    An idle space gives all its segments. Others give as many as leave them with more memory than
    the needy space has. If the needy one has no memory and an engine waits for it (not
    `only_idle`), others give their last segment, in turns.
    """
    held = needy.memory_bytes
    others = by_worth((space for space in spaces if space is not needy), now_s)
    kept: list[Space] = []
    for space in others:
        if is_idle(space, now_s):
            yield space, space.live_segments
        elif not only_idle and space.memory_bytes - held > space.segment_bytes:
            yield space, (space.memory_bytes - held - 1) // space.segment_bytes
        else:
            kept.append(space)
    if held or only_idle:
        return
    for space in sorted(kept, key=lambda space: space.used_s):
        if now_s - space.since_s >= TURN_S:
            yield space, space.live_segments
