"""Damages to the bytes of an artefact, for tests of the code that reads it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

WORD_BYTES = 8


class Damage(NamedTuple):
    """A change of bytes; `at` is the position of a single changed byte, `first` that of an
    overwritten word."""

    what: str
    spoil: Callable[[bytes], bytes]
    at: int | None = None
    first: int | None = None


def flips(end: int) -> Iterator[Damage]:
    """Each byte before `end` changed; the change differs from byte to byte."""
    chance = random.Random(end)
    for at in range(end):
        change = chance.choice((1, 0x80, 0xFF, chance.randrange(1, 256)))
        yield Damage(f"byte {at} ^ {change:#x}", _flip(at, change), at)


def _flip(at: int, change: int) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:at] + bytes([raw[at] ^ change]) + raw[at + 1 :]


def fills(end: int) -> Iterator[Damage]:
    """Each word before `end`, and all of them, set to zeros and to 0xFF."""
    spans = [(at, min(at + WORD_BYTES, end)) for at in range(0, end, WORD_BYTES)]
    for first, last in [*spans, (0, end)]:
        for byte in (0, 0xFF):
            what = f"bytes {first} to {last} are {byte:#x}"
            word = first if last - first <= WORD_BYTES else None
            yield Damage(what, _fill(first, last, byte), first=word)


def _fill(first: int, last: int, byte: int) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:first] + bytes([byte]) * (last - first) + raw[last:]


def sizes(size: int, edges: Sequence[int] = ()) -> Iterator[Damage]:
    """Cut around each edge, and extended."""
    ends = {0, 1, size // 2, size - 1}
    ends.update(edge + step for edge in edges for step in (-1, 0, 1))
    for end in sorted(end for end in ends if 0 <= end < size):
        yield Damage(f"cut to {end}", _cut(end))
    for more in (b"\0", b"\xff", bytes(4096)):
        yield Damage(f"{len(more)} bytes longer", _extend(more))


def _cut(end: int) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:end]


def _extend(more: bytes) -> Callable[[bytes], bytes]:
    return lambda raw: raw + more


def all_of(size: int, edges: Sequence[int] = (), end: int | None = None) -> list[Damage]:
    """Every damage to `size` bytes; bytes from `end` on are padding."""
    end = size if end is None else end
    return [*flips(end), *fills(end), *sizes(size, edges)]
