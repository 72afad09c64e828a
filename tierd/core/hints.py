"""Hints of engines about prefixes, and how far they are granted.

A hint names a prefix, from its first block on. It keeps the blocks until a time (a pin, a likely
next use, a high priority), or has them evicted before all others (the session has ended, a low
priority) until a request uses them again. Kept blocks have a quota and expire, so that no engine
can occupy host memory alone. Where the quota ends, the kept part of the prefix ends, without
holes. This module knows no slots and no clients: a hint outlives its client.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple

PIN_SHARE: Final = 0.25
PIN_MAX_S: Final = 3600

SOFT_SHARE: Final = 0.5
"""Share of the quota up to which a likely next use or a high priority is granted: the rest is
reserved for pins, which are explicit requests."""

NEXT_USE_FACTOR: Final = 2
"""Blocks are kept for this multiple of the announced time to the next use."""

HIGH_PRIORITY_S: Final = 600
"""How long blocks of high priority are kept after a hint."""

KEPT_MAX: Final = 1 << 20
"""Upper bound of kept blocks in all namespaces; each takes about 250 bytes."""

EXPIRED_AT_ONCE: Final = 2048
"""Blocks checked in one call of `expire`, which takes 1 ms."""

MS: Final = 1_000_000
_S: Final = 1_000_000_000


class Priority(enum.IntEnum):
    """How much a prefix is worth to its engine, compared with other prefixes."""

    LOW = 0
    NORMAL = 1
    HIGH = 2


class PrefixHint(NamedTuple):
    """A hint about a prefix; 0, False and NORMAL mean no statement."""

    pin_ms: int = 0
    next_use_ms: int = 0
    priority: Priority = Priority.NORMAL
    session_ended: bool = False

    @property
    def demotes(self) -> bool:
        """Whether the blocks should be evicted before others."""
        return self.session_ended or self.priority is Priority.LOW


class HintedNamespace(NamedTuple):
    """A namespace of a hint; at most `limit_bytes` of its blocks may be kept."""

    digest: bytes
    slot_bytes: int
    limit_bytes: int


class _Book:
    """The kept blocks of one namespace: their last second by hash, and the hashes by second.

    A hash whose time was extended is still listed under its earlier second.
    """

    def __init__(self) -> None:
        self.until_s: dict[bytes, int] = {}
        self.due: dict[int, list[bytes]] = {}
        self.seconds: list[int] = []
        self.slot_bytes = 0

    def keep(self, hashes: Sequence[bytes], until_s: int) -> None:
        """Keep blocks until `until_s`, or longer if they already are."""
        known = self.until_s
        new = [block_hash for block_hash in hashes if block_hash not in known]
        if len(new) < len(hashes):
            for block_hash in hashes:
                if known.get(block_hash, until_s) < until_s:
                    known[block_hash] = until_s
        if new:
            known.update(dict.fromkeys(new, until_s))
            self._enter(new, until_s)

    def expire(self, now_s: int, most: int) -> list[bytes]:
        """Remove and return blocks whose time is over, checking at most `most` hashes."""
        gone: list[bytes] = []
        known = self.until_s
        while most > 0 and self.seconds and self.seconds[0] <= now_s:
            due = self.due[self.seconds[0]]
            some = due[-most:]
            del due[-most:]
            most -= len(some)
            for block_hash in some:
                until_s = known[block_hash]
                if until_s > now_s:
                    self._enter([block_hash], until_s)
                else:
                    del known[block_hash]
                    gone.append(block_hash)
            if not due:
                del self.due[heappop(self.seconds)]
        return gone

    def clear(self) -> None:
        """Keep nothing."""
        self.until_s.clear()
        self.due.clear()
        self.seconds.clear()

    def _enter(self, hashes: list[bytes], until_s: int) -> None:
        if until_s not in self.due:
            self.due[until_s] = []
            heappush(self.seconds, until_s)
        self.due[until_s] += hashes

    def check(self) -> None:
        """Assert every invariant; for tests."""
        assert sorted(self.seconds) == sorted(self.due)
        found = [block_hash for hashes in self.due.values() for block_hash in hashes]
        assert len(found) == len(self.until_s)
        for second, hashes in self.due.items():
            assert all(self.until_s[block_hash] >= second for block_hash in hashes)


class Hints:
    """The kept blocks of all namespaces, resident or not, within `quota_bytes` of slots.

    Times are CLOCK_MONOTONIC in ns. A hint keeps blocks for at most `pin_max_s`, rounded up to
    a full second of the clock.
    """

    def __init__(self, quota_bytes: int, pin_max_s: int = PIN_MAX_S) -> None:
        self._quota_bytes = quota_bytes
        self._kept_bytes = 0
        self._kept_blocks = 0
        self._counters: Counter[str] = Counter(
            dict.fromkeys(
                (
                    "hints_total",
                    "pins_granted_blocks_total",
                    "pins_refused_blocks_total",
                    "pins_expired_blocks_total",
                    "pins_overridden_blocks_total",
                    "demoted_blocks_total",
                ),
                0,
            )
        )
        self._pin_max_s = pin_max_s
        self._books: dict[bytes, _Book] = {}

    @property
    def quota_bytes(self) -> int:
        """Upper bound of kept slots, in bytes."""
        return self._quota_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of the slots of all kept blocks, resident or not."""
        return self._kept_bytes

    @property
    def kept_blocks(self) -> int:
        """Number of kept blocks, resident or not."""
        return self._kept_blocks

    @property
    def counters(self) -> Mapping[str, int]:
        """Counters, by their names in a status."""
        return self._counters

    def resize(self, quota_bytes: int) -> None:
        """Change the quota; the caller frees what exceeds it by `override`."""
        self._quota_bytes = quota_bytes

    def set_pin_max(self, pin_max_s: int) -> None:
        """Set how long a hint can keep blocks; it applies to new hints."""
        self._pin_max_s = pin_max_s

    def kept(self, digest: bytes) -> dict[bytes, int]:
        """Return the kept hashes of a namespace: always the same object, not to be changed."""
        return self._books.setdefault(digest, _Book()).until_s

    def take(
        self,
        parts: Sequence[HintedNamespace],
        hashes: Sequence[bytes],
        hint: PrefixHint,
        now_ns: int,
        demoted_blocks: int = 0,
    ) -> int:
        """Keep the blocks of a hint within the quota; return how many in all parts together.

        The parts are different namespaces, and the same prefix is kept in each. `demoted_blocks`
        is how many blocks the caller has demoted for this hint.
        """
        self._counters["demoted_blocks_total"] += demoted_blocks
        self._counters["hints_total"] += 1
        hashes = list(dict.fromkeys(hashes))
        granted = 0
        if hint.pin_ms:
            granted = self._keep(parts, hashes, now_ns, hint.pin_ms * MS, 1.0)
        soft_ns = NEXT_USE_FACTOR * hint.next_use_ms * MS
        if hint.priority is Priority.HIGH:
            soft_ns = max(soft_ns, HIGH_PRIORITY_S * _S)
        if soft_ns:
            granted = max(granted, self._keep(parts, hashes, now_ns, soft_ns, SOFT_SHARE))
        if hint.pin_ms or soft_ns:
            refused = len(hashes) - granted
            self._counters["pins_granted_blocks_total"] += granted * len(parts)
            self._counters["pins_refused_blocks_total"] += refused * len(parts)
        return granted * len(parts)

    def _keep(
        self,
        parts: Sequence[HintedNamespace],
        hashes: Sequence[bytes],
        now_ns: int,
        time_ns: int,
        share: float,
    ) -> int:
        """Keep the first blocks for `time_ns`; return how many blocks of each part."""
        until_s = -(-(now_ns + min(time_ns, self._pin_max_s * _S)) // _S)
        # The rest of the quota is shared equally by the parts: the ranks of an engine keep the
        # same blocks, since a prefix that one rank lacks is useless.
        bytes_left = int(self.quota_bytes * share) - self.kept_bytes
        together = min(
            bytes_left // sum(part.slot_bytes for part in parts),
            (KEPT_MAX - self.kept_blocks) // len(parts),
        )
        count = len(hashes)
        for part in parts:
            times = self.kept(part.digest)
            alone = int(part.limit_bytes * share) // part.slot_bytes - len(times)
            count = _affordable(times, hashes[:count], min(together, alone))
        for part in parts:
            book = self._books[part.digest]
            book.slot_bytes, before = part.slot_bytes, len(book.until_s)
            book.keep(hashes[:count], until_s)
            self._add(book, len(book.until_s) - before)
        return count

    def expire(self, now_ns: int) -> list[tuple[bytes, list[bytes]]]:
        """End hints that have expired; return the hashes by namespace.

        It checks at most EXPIRED_AT_ONCE blocks, so that the caller can do other work in between.
        """
        over, left = [], EXPIRED_AT_ONCE
        for digest, book in self._books.items():
            if gone := book.expire(now_ns // _S, left):
                left -= len(gone)
                self._add(book, -len(gone))
                self._counters["pins_expired_blocks_total"] += len(gone)
                over.append((digest, gone))
        return over

    def override(self, digest: bytes) -> list[bytes]:
        """Stop keeping blocks of a namespace, for instance if only kept blocks could be evicted."""
        book = self._books[digest]
        gone = list(book.until_s)
        book.clear()
        self._add(book, -len(gone))
        self._counters["pins_overridden_blocks_total"] += len(gone)
        return gone

    def forget(self, digest: bytes) -> None:
        """Forget a namespace that has ended."""
        if digest in self._books:
            self.override(digest)
            del self._books[digest]

    def _add(self, book: _Book, blocks: int) -> None:
        self._kept_blocks += blocks
        self._kept_bytes += blocks * book.slot_bytes

    def check(self) -> None:
        """Assert every invariant; for tests."""
        books = self._books.values()
        assert self.kept_blocks == sum(len(book.until_s) for book in books) <= KEPT_MAX
        assert self.kept_bytes == sum(len(book.until_s) * book.slot_bytes for book in books)
        assert self.kept_bytes <= self.quota_bytes
        for book in books:
            book.check()


def _affordable(kept: dict[bytes, int], hashes: Sequence[bytes], left: int) -> int:
    """Return the length of the longest prefix with at most `left` hashes that are not kept yet."""
    if len(hashes) <= left:
        return len(hashes)
    for count, block_hash in enumerate(hashes):
        if block_hash not in kept:
            if left <= 0:
                return count
            left -= 1
    return len(hashes)
