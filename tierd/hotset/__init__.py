"""Hot sets: the most valuable prefixes in order of value, and the file that holds them.

A hot set that is cut anywhere has the parents of all its blocks.
"""

from tierd.hotset.families import Family, Gathered, Hot, merged
from tierd.hotset.forest import RUN_BLOCKS_MAX, Blocks, Forest, HotRun, worth
from tierd.hotset.format import FORMAT, LINE_BYTES_MAX, HotSet, pieces

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
