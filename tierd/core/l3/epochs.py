"""Which blocks of a storage tier are valid: the blocks of their namespace's epoch.

A namespace's epoch in a tier is the largest epoch among the tier's marks whose prefix its digest
starts with. A flush adds a mark with a larger epoch. Only that decides: blocks of an older epoch
have other keys, so no lookup finds them, even if they survive or come back later. Marks are only
added, and dropped once another mark makes them idle, so a mark that is written late does no harm.

A known mark that is missing means that the tier has lost data, or was replaced by an older copy.
The mark is not restored, since the tier may have blocks from before it: a fresh mark takes its
place. The same applies to a mark that cannot be read.

Pure: the caller supplies the clock and the random bits of a fresh epoch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import xxhash

from tierd.types import DIGEST_BYTES, EPOCH_BYTES, SCOPE_BYTES

MARKS_MAX: Final = 512
"""Upper bound of a tier's marks in force: one page of any server's listing, 50 us per namespace."""

EPOCH_VALID_S: Final = 10.0
"""How long a node that shares a tier may rely on the marks that it has read, from the start of
the reading. A flush waits this long: then every node has read its mark."""

SALT_BITS: Final = 20
"""Random bits of an epoch: nodes that create one at the same time get different ones. The bits
above are milliseconds since 1970, which last for 500 years."""

EPOCH_MAX: Final = 1 << 63
"""Upper bound of epochs: above it no fresh epoch would fit."""

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
        """Whether a flush made it. Otherwise it replaced marks that the tier had lost, usually
        with its blocks, and does not affect blocks in host memory."""
        return bool(self.epoch & 1)


class Todo(NamedTuple):
    """Changes of a tier's marks that must come before the node relies on them."""

    fresh: list[str]
    """Prefixes that need a fresh mark."""
    unreadable: list[str]
    """Marks to drop after the fresh ones are written."""


def pack_mark(mark: Mark) -> str:
    """Return a mark as tiers store it, with a checksum, since it decides what is served."""
    text = f"{mark.prefix}-{mark.epoch:0{2 * EPOCH_BYTES}x}"
    return f"{text}-{_seal(text)}"


def unpack_mark(text: str) -> Mark | None:
    """Return the mark, or None if the text is not a valid one."""
    match = _MARK.fullmatch(text)
    if match is None or _seal(text.rpartition("-")[0]) != match[3]:
        return None
    epoch = int(match[2], 16)
    return Mark(match[1], epoch) if epoch < EPOCH_MAX else None


def _seal(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


def scope_of(digest: bytes, epoch: int) -> bytes:
    """Return a namespace's scope: its digest and epoch, as a tier sees it."""
    assert len(digest) == DIGEST_BYTES
    return digest + epoch.to_bytes(EPOCH_BYTES, "big")


def split_scope(scope: bytes) -> tuple[bytes, int]:
    """Return the digest and the epoch of a scope."""
    assert len(scope) == SCOPE_BYTES
    return scope[:DIGEST_BYTES], int.from_bytes(scope[DIGEST_BYTES:], "big")


def fresh_epoch(largest: int, wall_ms: int, salt: int, *, flush: bool) -> int:
    """Return an epoch above all known ones, and different from those of other nodes.

    The wall clock keeps it above epochs that were forgotten; the last bit is `Mark.flush`.
    """
    assert 0 <= salt < 1 << SALT_BITS
    above = max((largest >> SALT_BITS) + 1, wall_ms)
    return above << SALT_BITS | salt & ~1 | flush


class Epochs:
    """All marks of a tier that this node has ever seen, except idle ones."""

    def __init__(self, known: Iterable[Mark] = ()) -> None:
        self._known: dict[str, int] = {}
        self.learn(known)

    @property
    def known(self) -> list[Mark]:
        """The marks; none of them makes another one idle."""
        return [Mark(*each) for each in self._known.items()]

    @property
    def largest(self) -> int:
        """The largest epoch; 0 if there is no mark."""
        return max(self._known.values(), default=0)

    def of(self, digest: bytes) -> int:
        """Return the epoch of a namespace; 0, which no block has, if no mark covers it."""
        return _in_force(self._known, digest.hex())

    def learn(self, marks: Iterable[Mark]) -> list[Mark]:
        """Add marks; return those that raise an epoch."""
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
        """Return the changes needed before a reading of the tier's marks is valid.

        It learns no marks.
        """
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
    """Return the marks that other marks of the same tier make idle."""
    marks = {text: mark for text in texts if (mark := unpack_mark(text)) is not None}
    every = _by_prefix(marks.values())
    return [
        text
        for text, (prefix, epoch) in marks.items()
        if every[prefix] > epoch or (prefix and _in_force(every, prefix[:-1]) >= epoch)
    ]


def _by_prefix(marks: Iterable[Mark]) -> dict[str, int]:
    """Return the largest epoch of each prefix."""
    found: dict[str, int] = {}
    for prefix, epoch in marks:
        found[prefix] = max(epoch, found.get(prefix, 0))
    return found


def _in_force(marks: Mapping[str, int], prefix: str) -> int:
    """Return the largest epoch among the marks that cover all of a prefix; 0 if none does."""
    return max(marks.get(prefix[:length], 0) for length in range(len(prefix) + 1))
