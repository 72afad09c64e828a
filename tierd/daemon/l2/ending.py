"""Namespaces end once nobody uses them: their memory, descriptors and number are others' then.

A namespace that no session has registered keeps its blocks until others need the memory, or until
there are too many namespaces. Without blocks it ends, but not before a client that was cut off has
forgotten what it had mapped: segments of another namespace of that name have the same numbers. One
that is worthless, such as an engine's between two cache resets, loses its blocks at once.
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
"""Worthless namespaces that have ended and are remembered by digest, the last ones: 0.1 MiB."""

WAITING_MAX: Final = 3 * SPACES_MAX
"""Namespaces beside them that have nothing, and wait for clients to have forgotten them."""

NAMES_MAX: Final = 64
"""Namespaces that are remembered by name when they have ended, the last ones: an operator warms,
flushes or asks about what tiers have of them."""

CLEARED_AT_ONCE: Final = 1024
"""Blocks that are dropped in one go, some 2 ms."""

log = logging.getLogger("tierd")


class Endings:
    """Sees to the namespaces that nobody uses."""

    def __init__(self, memory: HostMemory) -> None:
        self.names: dict[bytes, Namespace] = {}
        """Those that have ended, by digest."""
        self.worthless: dict[bytes, None] = {}
        """Digests of those that were worthless: so is one that is registered only now, by a worker
        that hears late of a cache reset."""
        self._memory = memory
        self._host = memory.host

    def named(self, digest: bytes) -> Namespace | None:
        """The namespace of a digest, if it is known, with memory or without."""
        space = self._host.spaces.get(digest)
        return self.names.get(digest) if space is None else space.namespace

    async def tick(self) -> None:
        """End what can end; to be called now and then."""
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

    def make_way(self) -> bool:
        """Have a number for one namespace more; False if all are in use.

        Of those that nobody uses the one used longest ago loses its blocks.
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
            "there are %d namespaces: the one that was used longest ago, %s of %s, loses its %d "
            "blocks in host memory",
            SPACES_MAX,
            space.digest.hex(),
            space.namespace.model,
            blocks,
        )
        self._memory.clear(space, blocks)
        self._end(space)
