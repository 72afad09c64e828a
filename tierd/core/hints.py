"""What engines say of blocks beforehand, and how far it is believed.

A hint names a prefix, from its first block on. It can have the blocks kept until a time (a
pin, a likely next use, a high priority), or have them go before all others (its session has
ended, a low priority), until somebody uses them again. What is kept has a quota and expires,
so no engine can take L2 for itself; where the quota ends, so does the part of the prefix that
is kept, and never with a hole. It refuses to know slots and clients: who said it may be gone.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple

PIN_SHARE: Final = 0.25
PIN_MAX_S: Final = 3600

SOFT_SHARE: Final = 0.5
"""Of the quota, what may be in use for a likely next use or a high priority to be granted more:
the rest is for pins, which somebody has asked for by name."""

NEXT_USE_FACTOR: Final = 2
"""A next use is waited for so many times as long as it was said to take."""

HIGH_PRIORITY_S: Final = 600
"""How long blocks of high priority are kept after a hint."""

KEPT_MAX: Final = 1 << 20
"""Blocks kept, of all namespaces; each costs about 250 bytes."""

EXPIRED_AT_ONCE: Final = 2048
"""Blocks looked at in one call of `expire`: 1 ms."""

MS: Final = 1_000_000
_S: Final = 1_000_000_000


class Priority(enum.IntEnum):
    """How much a prefix is worth to its engine, against others."""

    LOW = 0
    NORMAL = 1
    HIGH = 2


class PrefixHint(NamedTuple):
    """What is said of a prefix; 0 and False say nothing."""

    pin_ms: int = 0
    next_use_ms: int = 0
    priority: Priority = Priority.NORMAL
    session_ended: bool = False

    @property
    def demotes(self) -> bool:
        """Whether the blocks are to go before others."""
        return self.session_ended or self.priority is Priority.LOW


class HintedNamespace(NamedTuple):
    """A namespace that a hint is for; of its blocks at most `limit_bytes` may be kept."""

    digest: bytes
    slot_bytes: int
    limit_bytes: int


class _Book:
    """What is kept of one namespace: until which second, by hash, and the hashes by second.

    A hash that is kept longer than was said at first is found in the earlier second still.
    """

    def __init__(self) -> None:
        self.until_s: dict[bytes, int] = {}
        self.due: dict[int, list[bytes]] = {}
        self.seconds: list[int] = []
        self.slot_bytes = 0

    def keep(self, hashes: Sequence[bytes], until_s: int) -> None:
        """Keep these until then, or as long as they were to be kept already."""
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
        """Take out what is kept until then, looking at `most` hashes at most."""
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
    """The blocks that are to be kept, resident or not, within `quota_bytes` of slots.

    Times are CLOCK_MONOTONIC in ns. Nothing is kept longer than `pin_max_s` from its hint on, and
    everything to the end of a second.
    """

    def __init__(self, quota_bytes: int, pin_max_s: int = PIN_MAX_S) -> None:
        self.quota_bytes = quota_bytes
        self.kept_bytes = 0
        self.kept_blocks = 0
        self.counters: Counter[str] = Counter(
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
        self.pin_max_s = pin_max_s
        self._books: dict[bytes, _Book] = {}

    def kept(self, digest: bytes) -> dict[bytes, int]:
        """The hashes of a namespace that are kept, the same object for ever, not to be changed."""
        return self._books.setdefault(digest, _Book()).until_s

    def take(
        self,
        parts: Sequence[HintedNamespace],
        hashes: Sequence[bytes],
        hint: PrefixHint,
        now_ns: int,
    ) -> None:
        """Keep what a hint wants kept, of all parts the same prefix, as far as the quota goes.

        The parts are different namespaces.
        """
        self.counters["hints_total"] += 1
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
            self.counters["pins_granted_blocks_total"] += granted * len(parts)
            self.counters["pins_refused_blocks_total"] += refused * len(parts)

    def _keep(
        self,
        parts: Sequence[HintedNamespace],
        hashes: Sequence[bytes],
        now_ns: int,
        time_ns: int,
        share: float,
    ) -> int:
        """How many of the blocks, from the first on, are kept so long now."""
        until_s = -(-(now_ns + min(time_ns, self.pin_max_s * _S)) // _S)
        # What is left of the quota is each part's alike: the ranks of an engine have the same
        # blocks kept, and a prefix that not every rank has is of no use.
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
        """Let go of what has been kept long enough: by namespace, the hashes.

        At most EXPIRED_AT_ONCE, so that the caller can do other work in between.
        """
        over, left = [], EXPIRED_AT_ONCE
        for digest, book in self._books.items():
            if gone := book.expire(now_ns // _S, left):
                left -= len(gone)
                self._add(book, -len(gone))
                self.counters["pins_expired_blocks_total"] += len(gone)
                over.append((digest, gone))
        return over

    def override(self, digest: bytes) -> list[bytes]:
        """Keep nothing of a namespace any more: it has no room left but what is kept."""
        book = self._books[digest]
        gone = list(book.until_s)
        book.clear()
        self._add(book, -len(gone))
        self.counters["pins_overridden_blocks_total"] += len(gone)
        return gone

    def forget(self, digest: bytes) -> None:
        """A namespace is no more."""
        if digest in self._books:
            self.override(digest)
            del self._books[digest]

    def _add(self, book: _Book, blocks: int) -> None:
        self.kept_blocks += blocks
        self.kept_bytes += blocks * book.slot_bytes

    def check(self) -> None:
        """Assert every invariant; for tests."""
        books = self._books.values()
        assert self.kept_blocks == sum(len(book.until_s) for book in books) <= KEPT_MAX
        assert self.kept_bytes == sum(len(book.until_s) * book.slot_bytes for book in books)
        assert self.kept_bytes <= self.quota_bytes
        for book in books:
            book.check()


def _affordable(kept: dict[bytes, int], hashes: Sequence[bytes], left: int) -> int:
    """The longest prefix of `hashes` with at most `left` that are not kept yet."""
    if len(hashes) <= left:
        return len(hashes)
    for count, block_hash in enumerate(hashes):
        if block_hash not in kept:
            if left <= 0:
                return count
            left -= 1
    return len(hashes)
