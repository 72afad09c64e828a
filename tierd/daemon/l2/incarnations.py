"""Host memory across incarnations of the daemon: adopts the segments of former incarnations.

An incarnation has the service manager keep its segments, a page that records its leases, and a
guard (`tierd.memory.past`). The next incarnation adopts the segments that it can read, and verifies
their contents. A block is served only after its bytes matched the checksum in the ledger. A slot is
not reused while a lease or a copy of a former incarnation may cover it, even if the ledger has no
block there; a slot without a block is not reused while a client of a former incarnation may write
to it. A segment that is not adopted is closed unchanged: its readers keep the memory until they
unmap it.
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
from tierd.memory.past import ArenaGuard, IncarnationPage, PastPage
from tierd.types import DIGEST_BYTES

log = logging.getLogger("tierd")

_PAGE: Final = "life-"
_GUARD: Final = "guard-"
_ARENA: Final = re.compile("[0-9a-f]{1,8}")


class Incarnations:
    """This incarnation of the daemon, and the remains of former ones."""

    def __init__(
        self, memory: HostMemory, tiers: Sequence[StorageConfig], epoch: bytes, clock: Clock
    ) -> None:
        self._memory = memory
        self._manager = memory.manager
        self._clock = clock
        self._epoch = epoch
        self._tiers = _digest(tiers)
        self._page: IncarnationPage | None = None
        self._guard: ArenaGuard | None = None
        self._hold = -1
        self._pages_before: dict[str, PastPage] = {}
        self._guards_before: dict[str, ArenaGuard] = {}
        self._dropped: Counter[str] = Counter()

    # --- this incarnation -----------------------------------------------------------

    def begin(self) -> None:
        """Adopt the kept segments, and have the segments of this incarnation kept.

        To be called before anything creates segments or starts processes. Does nothing without a
        service manager.
        """
        if not self._manager.present:
            return
        self._adopt()
        # Even if this incarnation cannot have its segments kept: without their last user, a later
        # one cannot tell when their slots may be reused.
        self._memory.use(self._epoch)
        try:
            with contextlib.ExitStack() as undo:
                page = IncarnationPage.create(self._tiers)
                undo.callback(page.close)
                guard = ArenaGuard.create()
                undo.callback(guard.close)
                self._hold = guard.hold()
                undo.pop_all()
        except OSError as error:
            log.error("host memory will be lost when this process ends: %s", error)
            return
        self._page, self._guard = page, guard
        # Child processes may write to slots until they end, which may be after this process.
        child.keep_open(self._hold)
        self._manager.keep(_PAGE + self._epoch.hex(), [page.fd])
        self._manager.keep(_GUARD + self._epoch.hex(), [guard.fd])

    @property
    def kept(self) -> bool:
        """Whether the segments may outlive this process, so that blocks need checksums."""
        return self._page is not None

    def guard(self) -> int | None:
        """Return a hold for a client that may write to slots; the caller closes it.

        None if segments are not kept. Raises OSError.
        """
        return None if self._guard is None else self._guard.hold()

    def copying(self) -> int | None:
        """Return a hold for a copy process, which may still copy when a lease has ended.

        The caller closes it. None if segments are not kept. Raises OSError.
        """
        return None if self._guard is None else self._guard.hold(copies=True)

    def leased(self, lease: SlotLease) -> None:
        """Record a new lease; to be called before the reply to its holder."""
        if self._page is not None:
            for space, slots in lease.parts:
                self._page.lease(space.digest, slots, lease.expires_ns)

    def tick(self) -> None:
        """Free slots that former incarnations no longer use; to be called every second or so."""
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
        """Close the descriptors; the service manager keeps its copies. Idempotent."""
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

    # --- former incarnations --------------------------------------------------------

    def _adopt(self) -> None:
        began_ns = self._clock.monotonic_ns()
        pairs: dict[str, list[int]] = {}
        for name, fd in self._manager.take_kept():
            if _ARENA.fullmatch(name):
                pairs.setdefault(name, []).append(fd)
            else:
                self._take_past(name, fd, began_ns)
        by_space: dict[bytes, dict[int, Segment]] = {}
        # An incarnation has its page and its guard kept before it uses the arena, and those of
        # former ones are dropped one by one. Without both of the last incarnation that used a
        # segment, it is unknown when its slots may be reused.
        known_epochs = {name.removeprefix(_PAGE) for name in self._pages_before}
        known_epochs.intersection_update(name.removeprefix(_GUARD) for name in self._guards_before)
        for name, fds in pairs.items():
            try:
                segment = _segment(name, fds)
                ledger = segment.ledger
                if ledger.incarnation.hex() not in known_epochs:
                    raise LedgerError("its last incarnation is unknown")
                segments = by_space.setdefault(ledger.namespace.digest, {})
                if any(other.ledger.slots != ledger.slots for other in segments.values()):
                    raise LedgerError("other segments of its namespace have another size")
                if ledger.index in segments:
                    raise LedgerError("another segment has its number")
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
                "host memory of the former incarnation: %d blocks in %d segments adopted "
                "in %.3f s%s",
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
                log.warning("the record of leases %s is damaged: all slots count as leased", name)
        else:
            self._manager.forget(name)
            log.warning("the service manager kept an unknown descriptor, which is closed: %s", name)
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
        """Adopt the segments of a namespace; `leased` is None if any slot may be leased."""
        namespace = next(iter(segments.values())).ledger.namespace
        per = next(iter(segments.values())).ledger.slots
        # The bits of tiers in the ledger are valid only if the tiers are still the same.
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
            log.error(
                "%d ledger records of blocks in host memory are damaged; the blocks are dropped",
                damaged,
            )
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
    """Open a segment and its ledger from the two descriptors kept under a name."""
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
    """Return a digest that differs if the bits in a ledger may mean other tiers."""
    known = [(tier.type, tier.name, tier.options, tier.overrides) for tier in tiers]
    return hashlib.sha256(msgspec.json.encode(known)).digest()[:DIGEST_BYTES]
