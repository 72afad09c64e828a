"""Ends unused namespaces, which frees their memory, descriptors and numbers.

A namespace without sessions keeps its blocks until other namespaces need the memory, or until there
are too many namespaces. Without blocks it ends, but only after a disconnected client has forgotten
the segments that it had mapped: a new namespace with the same digest numbers its segments alike. A
worthless namespace, such as an engine's between two cache resets, loses its blocks at once.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from tierd.core.l2.space import Space
from tierd.daemon.l2.memory import HostMemory
from tierd.types import Namespace

SPACES_MAX: Final = 1024
"""Namespaces that are registered or have blocks; each costs a few KiB even when empty."""

WORTHLESS_MAX: Final = SPACES_MAX
"""Remembered digests of worthless namespaces that have ended, the latest ones: 0.1 MiB."""

WAITING_MAX: Final = 3 * SPACES_MAX
"""Further namespaces without sessions and blocks, until clients have forgotten them."""

NAMES_MAX: Final = 64
"""Remembered namespaces that have ended, the latest ones: operators warm, flush or explain their
blocks in tiers."""

CLEARED_AT_ONCE: Final = 1024
"""Blocks dropped without a pause, about 2 ms."""

log = logging.getLogger("tierd")


class Endings:
    """Ends namespaces without sessions."""

    def __init__(self, memory: HostMemory) -> None:
        self.names: dict[bytes, Namespace] = {}
        """Namespaces that have ended, by digest."""
        self.worthless: dict[bytes, None] = {}
        """Digests of worthless namespaces that have ended. A later registration is worthless as
        well: its worker has not noticed the cache reset yet."""
        self._memory = memory
        self._host = memory.host

    def named(self, digest: bytes) -> Namespace | None:
        """Return the namespace of a digest, live or ended; None if it is unknown."""
        space = self._host.spaces.get(digest)
        return self.names.get(digest) if space is None else space.namespace

    async def tick(self) -> None:
        """End the namespaces that can end; to be called every second or so."""
        for space in list(self._host.spaces.values()):
            while space.worthless and not space.sessions and space.items:
                self._memory.clear(space, CLEARED_AT_ONCE)
                await asyncio.sleep(0)
            if not space.sessions:
                self._end(space)

    def _end(self, space: Space) -> None:
        if not self._memory.end(space):
            return
        if space.worthless:
            self.worthless[space.digest] = None
            if len(self.worthless) > WORTHLESS_MAX:
                del self.worthless[next(iter(self.worthless))]
        else:
            self.names[space.digest] = space.namespace
            if len(self.names) > NAMES_MAX:
                del self.names[next(iter(self.names))]

    def make_room(self) -> bool:
        """Make room for one more namespace; returns False if all namespaces are in use.

        At SPACES_MAX, the least recently used namespace without sessions loses its blocks.
        """
        spaces = self._host.spaces.values()
        counted = [space for space in spaces if space.sessions or space.items]
        if len(counted) >= SPACES_MAX:
            unused = [space for space in counted if not space.sessions]
            if not unused:
                return False
            self._clear(min(unused, key=lambda space: space.used_s))
        return len(spaces) < SPACES_MAX + WAITING_MAX

    def _clear(self, space: Space) -> None:
        blocks = len(space.items)
        log.info(
            "there are %d namespaces: the least recently used one, %s of %s, loses its %d "
            "blocks in host memory",
            SPACES_MAX,
            space.digest.hex(),
            space.namespace.model,
            blocks,
        )
        self._memory.clear(space, blocks)
        self._end(space)
