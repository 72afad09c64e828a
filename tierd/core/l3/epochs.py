"""Which blocks of a storage tier hold good: those of their namespace's epoch.

The epoch of a namespace in a tier is the largest among the tier's marks whose prefix its digest
begins with. A flush adds a mark with a larger epoch, and nothing else decides: blocks of an older
epoch have other keys, so nobody asks for them any more, whatever becomes of them and whenever
they come back. Marks are only ever added, and dropped once another one makes them idle, so that
one that lands late does no harm.

A mark that was seen and has gone means that the tier has lost something, or has become an older
copy of itself. It is not put back, since the tier may have blocks from before it: its place takes
a fresh mark. So does that of one that cannot be read.

Pure: it has neither the clock nor the chance that a fresh epoch is made of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import xxhash

from tierd.types import DIGEST_BYTES, EPOCH_BYTES, SCOPE_BYTES

MARKS_MAX: Final = 512
"""Marks in force that a tier may have: a page of any server's listing, and 50 us a namespace."""

EPOCH_VALID_S: Final = 10.0
"""How long a node that shares a tier may go by the marks that it has read, counted from when it
began to read them. A flush waits for so long: then every node has read its mark."""

SALT_BITS: Final = 20
"""Chance in an epoch: two nodes that make one at the same moment make two. Above it are
milliseconds since 1970, which last for 500 years."""

EPOCH_MAX: Final = 1 << 63
"""Beyond it nothing could be fresh."""

_MARK: Final = re.compile(
    rf"([0-9a-f]{{0,{2 * DIGEST_BYTES}}})-([0-9a-f]{{{2 * EPOCH_BYTES}}})-([0-9a-f]{{16}})",
    re.ASCII,
)


class Mark(NamedTuple):
    """Namespaces whose digest begins with `prefix`, in hex, have at least this epoch."""

    prefix: str
    epoch: int

    @property
    def flush(self) -> bool:
        """Whether it is a flush's. Else it took the place of marks that a tier had lost, with its
        blocks as a rule, and says nothing of what nodes have in host memory."""
        return bool(self.epoch & 1)


class Todo(NamedTuple):
    """What a tier's marks need before anybody may go by them."""

    fresh: list[str]
    """Prefixes that are to get a fresh mark."""
    unreadable: list[str]
    """Marks to drop once these are there."""


def pack_mark(mark: Mark) -> str:
    """As a tier keeps it: with a seal, since it decides what is served."""
    text = f"{mark.prefix}-{mark.epoch:0{2 * EPOCH_BYTES}x}"
    return f"{text}-{_seal(text)}"


def unpack_mark(text: str) -> Mark | None:
    """The mark, or None if it is not a sound one."""
    match = _MARK.fullmatch(text)
    if match is None or _seal(text.rpartition("-")[0]) != match[3]:
        return None
    epoch = int(match[2], 16)
    return Mark(match[1], epoch) if epoch < EPOCH_MAX else None


def _seal(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


def scope_of(digest: bytes, epoch: int) -> bytes:
    """What a tier sees of a namespace."""
    assert len(digest) == DIGEST_BYTES
    return digest + epoch.to_bytes(EPOCH_BYTES, "big")


def split_scope(scope: bytes) -> tuple[bytes, int]:
    """A namespace's digest and an epoch."""
    assert len(scope) == SCOPE_BYTES
    return scope[:DIGEST_BYTES], int.from_bytes(scope[DIGEST_BYTES:], "big")


def fresh_epoch(largest: int, wall_ms: int, salt: int, *, flush: bool) -> int:
    """An epoch above all that are known, and unlike any that another node makes.

    The wall clock keeps it above those that nobody knows any more; the last bit is `Mark.flush`.
    """
    assert 0 <= salt < 1 << SALT_BITS
    above = max((largest >> SALT_BITS) + 1, wall_ms)
    return above << SALT_BITS | salt & ~1 | flush


class Epochs:
    """All marks of a tier that this node has ever seen, but for the idle ones."""

    def __init__(self, known: Iterable[Mark] = ()) -> None:
        self._known: dict[str, int] = {}
        self.learn(known)

    @property
    def known(self) -> list[Mark]:
        """The marks, none of which makes another one idle."""
        return [Mark(*each) for each in self._known.items()]

    @property
    def largest(self) -> int:
        """The largest epoch; 0 if there is no mark."""
        return max(self._known.values(), default=0)

    def of(self, digest: bytes) -> int:
        """The epoch of a namespace; 0, which no block has, if there is no mark for it."""
        return _in_force(self._known, digest.hex())

    def learn(self, marks: Iterable[Mark]) -> list[Mark]:
        """Take in what a tier has; which of it is news."""
        news = [mark for mark in marks if _in_force(self._known, mark.prefix) < mark.epoch]
        if news:
            every = _by_prefix([*self.known, *news])
            self._known = {
                prefix: epoch
                for prefix, epoch in every.items()
                if not prefix or _in_force(every, prefix[:-1]) < epoch
            }
        return news

    def todo(self, texts: Iterable[str]) -> Todo:
        """What has to be done before a reading of the tier's marks holds good; none is learned."""
        read = {text: unpack_mark(text) for text in texts}
        unreadable = [text for text, mark in read.items() if mark is None]
        present = _by_prefix(mark for mark in read.values() if mark is not None)
        lost = [
            prefix for prefix, epoch in self._known.items() if _in_force(present, prefix) < epoch
        ]
        if "" not in present or "" in lost or unreadable:
            lost = [""]
        return Todo(lost, unreadable)


def idle_marks(texts: Iterable[str]) -> list[str]:
    """Those of a tier's marks that others of them make idle."""
    marks = {text: mark for text in texts if (mark := unpack_mark(text)) is not None}
    every = _by_prefix(marks.values())
    return [
        text
        for text, (prefix, epoch) in marks.items()
        if every[prefix] > epoch or (prefix and _in_force(every, prefix[:-1]) >= epoch)
    ]


def _by_prefix(marks: Iterable[Mark]) -> dict[str, int]:
    """The largest epoch of each prefix."""
    found: dict[str, int] = {}
    for prefix, epoch in marks:
        found[prefix] = max(epoch, found.get(prefix, 0))
    return found


def _in_force(marks: Mapping[str, int], prefix: str) -> int:
    """The largest epoch among the marks that cover all of a prefix; 0 if none does."""
    return max(marks.get(prefix[:length], 0) for length in range(len(prefix) + 1))
