"""How namespaces share the memory of L2: how large their segments are, and who gives some up.

Pure, and without a state. A namespace's segments are smaller the more namespaces there are when it
comes, so that each can have one: the first segments of all together are less than the capacity.
Who has none can therefore always have one from somebody with several. Where that is not so, since
a slot is larger, or the machine is short of memory, namespaces have their memory in turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from tierd.core.l2.space import Space

SEGMENT_BYTES_MIN: Final = 64 << 20
SEGMENT_BYTES_MAX: Final = 256 << 20
SEGMENTS_TARGET: Final = 256
"""Segments that a full arena has: few enough to map, enough to lend between namespaces.
Between 64 MiB and 256 MiB each: decommitting one takes about 0.1 ms a MiB of the loop's time.
"""

SEGMENTS_MIN: Final = 32
"""Segments that even a small arena has, so that a few namespaces share it evenly."""

SEGMENTS_EACH: Final = 8
"""Segments that a namespace would have if all had as much as it. The n-th one's are at most the
capacity / (8 n): of 1,024 namespaces the first ones sum up to 15/16 of the capacity, and a full
arena has 8,192 segments at most, as many as the service manager keeps."""

IDLE_S: Final = 600
"""A namespace that no engine has stored in or asked for within it gives its memory to whoever needs
it, also if an engine has it registered: a LoRA adapter that nobody asks for any more."""

TURN_S: Final = 10
"""How long a namespace keeps its last segment, at least, where there are not enough for all: less
would throw blocks away before anybody could ask for them again."""


def segment_bytes(capacity_bytes: int, namespaces: int = 1) -> int:
    """Bytes of the segments of a namespace that comes as the n-th one."""
    most = max(SEGMENT_BYTES_MIN, min(SEGMENT_BYTES_MAX, capacity_bytes // SEGMENTS_TARGET))
    most = min(most, capacity_bytes // SEGMENTS_MIN)
    return max(1, min(most, capacity_bytes // (SEGMENTS_EACH * namespaces)))


def is_idle(space: Space, now_s: int) -> bool:
    """Whether no engine uses a namespace."""
    return not space.sessions or now_s - space.used_s >= IDLE_S


def by_worth(spaces: Iterable[Space], now_s: int) -> list[Space]:
    """Those with memory, in the order in which they give it up: idle ones first, the one used
    longest ago before the others, then those with the most."""

    def rank(space: Space) -> tuple[bool, int, int]:
        idle = is_idle(space, now_s)
        return not idle, space.used_s if idle else 0, -space.memory_bytes

    return sorted((space for space in spaces if space.live_segments), key=rank)


def donors(
    spaces: Iterable[Space], needy: Space, now_s: int, *, only_idle: bool
) -> Iterator[tuple[Space, int]]:
    """Who gives memory to a namespace that needs a segment, and how many segments at most.

    An idle one gives all that it has, another one what leaves it more than the needy has. To one
    that has nothing, and that an engine waits for, others give their last segment in turns.
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
