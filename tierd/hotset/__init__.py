"""Hot sets: the most valuable prefixes in order of value, and the file that holds them."""

from tierd.hotset.format import (
    FORMAT,
    LINE_BYTES_MAX,
    RUN_BLOCKS_MAX,
    Blocks,
    Family,
    Forest,
    Gathered,
    Hot,
    HotRun,
    HotSet,
    merged,
    pieces,
    worth,
)

__all__ = [
    "FORMAT",
    "LINE_BYTES_MAX",
    "RUN_BLOCKS_MAX",
    "Blocks",
    "Family",
    "Forest",
    "Gathered",
    "Hot",
    "HotRun",
    "HotSet",
    "merged",
    "pieces",
    "worth",
]
