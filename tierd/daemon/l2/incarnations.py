"""L2 across lives of the daemon: what the service manager kept of the life before is taken over.

A life has its segments kept, with a page about its leases and a guard (`tierd.memory.past`). The
next one takes over what it can read, and trusts none of it: a block is served once its bytes have
the checksum that the ledger has; a slot stays as it is until no lease and no copy of a life before
can be on it, whether the ledger knows of it or not; one that held no block is used again once
nobody of a life before can be writing to it. A segment that is not taken over is let go as it is:
its memory is its readers' until they let go of it, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
from collections import Counter
from collections.abc import Container, Sequence
from typing import Final

import msgspec

from tierd import child
from tierd.clock import Clock
from tierd.config import StorageConfig
from tierd.core.l2.leases import SlotLease
from tierd.core.l2.slots import Adopted
from tierd.daemon.l2.memory import HostMemory
from tierd.memory.arena import Segment
from tierd.memory.ledger import LedgerError, is_ledger
from tierd.memory.past import ArenaGuard, LifePage, PastPage
from tierd.types import DIGEST_BYTES

log = logging.getLogger("tierd")

_PAGE: Final = "life-"
_GUARD: Final = "guard-"
_ARENA: Final = re.compile("[0-9a-f]{1,8}")


class Incarnations:
    """This life of the daemon, and what is left of those before."""

    def __init__(
        self, memory: HostMemory, tiers: Sequence[StorageConfig], epoch: bytes, clock: Clock
    ) -> None:
        self._memory = memory
        self._manager = memory.manager
        self._clock = clock
        self._epoch = epoch
        self._tiers = _digest(tiers)
        self._page: LifePage | None = None
        self._guard: ArenaGuard | None = None
        self._hold = -1
        self._pages_before: dict[str, PastPage] = {}
        self._guards_before: dict[str, ArenaGuard] = {}
        self._dropped: Counter[str] = Counter()

    # --- this life ------------------------------------------------------------------

    def begin(self) -> None:
        """Take over what was kept, and have this life's segments kept. Before anything else that
        makes segments or starts processes. Without a service manager, nothing."""
        if not self._manager.present:
            return
        self._adopt()
        # Whether or not this life can leave anything: without it the next one can tell nothing.
        self._memory.use(self._epoch)
        try:
            with contextlib.ExitStack() as undo:
                page = LifePage.create(self._tiers)
                undo.callback(page.close)
                guard = ArenaGuard.create()
                undo.callback(guard.close)
                self._hold = guard.hold()
                undo.pop_all()
        except OSError as error:
            log.error("host memory will not outlive this process: %s", error)
            return
        self._page, self._guard = page, guard
        # Children may write to slots until they have ended, which may be after us.
        child.keep_open(self._hold)
        self._manager.keep(_PAGE + self._epoch.hex(), [page.fd])
        self._manager.keep(_GUARD + self._epoch.hex(), [guard.fd])

    @property
    def kept(self) -> bool:
        """Whether the arena may outlive this process, so that blocks are to get checksums."""
        return self._page is not None

    def guard(self) -> int | None:
        """A hold for somebody who may write to slots, the caller's to close; None: no need.

        Raises OSError.
        """
        return None if self._guard is None else self._guard.hold()

    def copying(self) -> int | None:
        """A hold for a process that copies blocks for engines, the caller's to close: it may go on
        when the lease has ended. None: no need. Raises OSError.
        """
        return None if self._guard is None else self._guard.hold(copies=True)

    def leased(self, lease: SlotLease) -> None:
        """A lease is granted. Before its holder hears of it."""
        if self._page is not None:
            for space, slots in lease.parts:
                self._page.lease(space.digest, slots, lease.expires_ns)

    def tick(self) -> None:
        """See what has ended of the lives before; to be called now and then."""
        host = self._memory.host
        if self._page is not None and not host.leases:
            self._page.no_leases()
        now_ns = self._clock.monotonic_ns()
        for name, page in list(self._pages_before.items()):
            if page.until_ns <= now_ns:
                self._manager.forget(name)
                del self._pages_before[name]
        if not self._pages_before and not self._copying_before:
            host.end_leases_before()
        for name, guard in list(self._guards_before.items()):
            if not guard.held:
                self._manager.forget(name)
                self._guards_before.pop(name).close()
        if not self._guards_before:
            host.end_writes_before()

    def close(self) -> None:
        """Close the descriptors; what the manager has stays there. Idempotent."""
        if self._page is not None and self._guard is not None:
            child.keep_no_longer(self._hold)
            os.close(self._hold)
            self._page.close()
            self._guard.close()
            self._page = self._guard = None
        self._close_before()

    @property
    def _copying_before(self) -> bool:
        return any(guard.copying for guard in self._guards_before.values())

    def _close_before(self) -> None:
        for guard in self._guards_before.values():
            guard.close()
        self._pages_before.clear()
        self._guards_before.clear()

    # --- the lives before -----------------------------------------------------------

    def _adopt(self) -> None:
        began_ns = self._clock.monotonic_ns()
        pairs: dict[str, list[int]] = {}
        for name, fd in self._manager.take_kept():
            if _ARENA.fullmatch(name):
                pairs.setdefault(name, []).append(fd)
            else:
                self._take_past(name, fd, began_ns)
        by_space: dict[bytes, dict[int, Segment]] = {}
        # A life has both kept before it uses the arena, and ends those of others one by one. So
        # the last one to use a segment has both, or nobody can tell when its slots may be used
        # again.
        lives = {name.removeprefix(_PAGE) for name in self._pages_before}
        lives.intersection_update(name.removeprefix(_GUARD) for name in self._guards_before)
        for name, fds in pairs.items():
            try:
                segment = _segment(name, fds)
                ledger = segment.ledger
                if ledger.life.hex() not in lives:
                    raise LedgerError("it is not known who used it")
                segments = by_space.setdefault(ledger.namespace.digest, {})
                if any(other.ledger.slots != ledger.slots for other in segments.values()):
                    raise LedgerError("other segments of its namespace have another size")
                if ledger.index in segments:
                    raise LedgerError("there are two of it")
                segments[ledger.index] = segment
            except (LedgerError, OSError, ValueError) as error:
                self._drop(name, fds, str(error))
        leased = [page.leased(began_ns) for page in self._pages_before.values()]
        known = all(past.complete for past in leased) and not self._copying_before
        for segments in by_space.values():
            self._adopt_space(segments, [past.slots for past in leased] if known else None)
        adopted = sum(len(space.unverified) for space in self._memory.host.spaces.values())
        self._memory.counters["adopted_blocks_total"] += adopted
        if pairs:
            why = "; ".join(f"{count}: {why}" for why, count in self._dropped.items())
            log.info(
                "host memory of the life before: %d blocks in %d segments taken over in %.3f s%s",
                adopted,
                sum(map(len, by_space.values())),
                (self._clock.monotonic_ns() - began_ns) / 1e9,
                f", segments dropped: {why}" if why else "",
            )
        if not by_space:
            for name in [*self._pages_before, *self._guards_before]:
                self._manager.forget(name)
            self._close_before()

    def _take_past(self, name: str, fd: int, now_ns: int) -> None:
        if name.startswith(_GUARD):
            self._guards_before[name] = ArenaGuard(fd)
            return
        if name.startswith(_PAGE):
            page = self._pages_before[name] = PastPage(fd, now_ns)
            if not page.readable:
                log.warning("the log of leases %s is damaged: all slots count as leased", name)
        else:
            self._manager.forget(name)
            log.warning("what the service manager kept as %s is not used", name)
        os.close(fd)

    def _drop(self, name: str, fds: Sequence[int], why: str) -> None:
        for fd in fds:
            os.close(fd)
        self._manager.forget(name)
        self._dropped[why] += 1
        self._memory.counters["adoption_dropped_segments_total"] += 1

    def _adopt_space(
        self, segments: dict[int, Segment], leased: list[dict[bytes, set[int]]] | None
    ) -> None:
        """Take the segments of a namespace over; `leased` is None if any slot may be."""
        namespace = next(iter(segments.values())).ledger.namespace
        per = next(iter(segments.values())).ledger.slots
        # The masks are worth something only if their bits still mean the same tiers.
        if any(page.tiers != self._tiers for page in self._pages_before.values()):
            for segment in segments.values():
                segment.ledger.forget_tiers()
        found = [
            (record.last_use, index * per + record.place, record)
            for index, segment in segments.items()
            for record in segment.ledger.records()
            if record.length == namespace.block_bytes
        ]
        damaged = sum(segment.ledger.damaged for segment in segments.values())
        if damaged:
            self._memory.counters["rotten_blocks_total"] += damaged
            log.error("%d records of blocks in host memory are damaged; they are gone", damaged)
        found.sort()
        blocks = [
            Adopted(
                slot,
                record.block_hash,
                record.parent,
                record.checksum,
                record.generation,
                record.tiers,
            )
            for _, slot, record in found
        ]
        live = [index in segments for index in range(max(segments) + 1)]
        held: Container[int] = range(len(live) * per)
        if leased is not None:
            held = {slot for past in leased for slot in past.get(namespace.digest, ())}
        try:
            whole = [
                segments[index] if here else Segment.create(namespace, index, per)
                for index, here in enumerate(live)
            ]
            space = self._memory.host.adopt(namespace, per, live, blocks, held)
            why = "no block fits host.capacity"
        except OSError as error:
            space, why = None, str(error)
        if space is not None:
            self._memory.adopt(space, whole)
            return
        for segment in segments.values():
            self._drop(segment.kept_as, [segment.fd, segment.ledger.fd], why)
        segments.clear()


def _segment(name: str, fds: Sequence[int]) -> Segment:
    """The segment and its ledger, of the two descriptors kept under a name."""
    if len(fds) != 2:
        raise LedgerError("a descriptor is missing")
    ledgers = [fd for fd in fds if is_ledger(fd)]
    if len(ledgers) != 1:
        raise LedgerError("it has no ledger")
    [fd] = set(fds).difference(ledgers)
    segment = Segment.adopt(fd, ledgers[0])
    segment.kept_as = name
    return segment


def _digest(tiers: Sequence[StorageConfig]) -> bytes:
    """What tells tiers apart that a ledger's bits may stand for."""
    known = [(tier.type, tier.name, tier.options, tier.overrides) for tier in tiers]
    return hashlib.sha256(msgspec.json.encode(known)).digest()[:DIGEST_BYTES]
