"""The index file of a slab as bytes: how it is laid out, and how it is read.

    0        head: magic, version, records, slot size, namespace; its xxh3-128
    64       one entry per record: zeros, or the block's header, the use that stored it, and
             the xxh3-64 of both
    behind   one use per record: the last hit of its block; the xxh3-64 of the whole table

Only sealed content is believed. A head without its seal makes the slab unusable, an entry without
its seal is no block, and a table without its seal is ignored, which costs the order of blocks.
"""

from __future__ import annotations

import struct
import sys
from array import array
from typing import Final, NamedTuple

import xxhash

from tierd.backend import HEADER_BYTES, BlockHeader, unpack_header
from tierd.types import PAGE_BYTES, SCOPE_BYTES, slot_bytes_for

RECORDS_MAX: Final = 1 << 14
"""Most records of a slab; dropping a slab costs the event loop about 2 us per record."""

USE_MAX: Final = 1 << 63
"""Uses are below this. They count up from the clock's nanoseconds, so a larger value is damage,
and counting up from it would overflow the field."""

ENTRIES_AT: Final = 64
_MAGIC: Final = b"TIERDIDX"
_VERSION: Final = 2
_HEAD = struct.Struct(f"<8sIIQ{SCOPE_BYTES}s")
_HEAD_SEAL_BYTES: Final = 16
HEAD_BYTES: Final = _HEAD.size + _HEAD_SEAL_BYTES
assert HEAD_BYTES <= ENTRIES_AT
_U64 = struct.Struct("<Q")
ENTRY_BYTES: Final = HEADER_BYTES + 2 * _U64.size
FREE_ENTRY: Final = bytes(ENTRY_BYTES)
EACH_BYTES: Final = ENTRY_BYTES + _U64.size
"""Bytes of an index file per record."""

FIXED_BYTES: Final = ENTRIES_AT + _U64.size
"""Bytes of an index file apart from its records and the padding of its last page."""

assert sys.byteorder == "little", "the table of uses is written as it lies in memory"


class Entry(NamedTuple):
    """One block as listed in the index file; `last_use` is only good for comparisons."""

    record: int
    header: BlockHeader
    last_use: int


class Survey(NamedTuple):
    """Content of an index file, by what can be done with it."""

    entries: list[Entry]
    """Blocks that lie within the data file."""
    unsound: list[int]
    """Records whose entry does not describe a block of this slab."""
    beyond: list[int]
    """Records whose block lay beyond the end of the truncated data file."""
    uses_sound: bool
    """Whether the table of uses is as written, or was never written."""


def index_bytes(records: int) -> int:
    """Size of the index file of a slab with `records` records."""
    return slot_bytes_for(FIXED_BYTES + records * EACH_BYTES)


def entry_at(record: int) -> int:
    """Offset of a record's entry."""
    return ENTRIES_AT + record * ENTRY_BYTES


def uses_at(records: int) -> int:
    """Offset of the table of uses."""
    return entry_at(records)


def uses_bytes(records: int) -> int:
    """Size of the table of uses, its seal included."""
    return (records + 1) * _U64.size


def pack_head(namespace: bytes, records: int, slot_bytes: int) -> bytes:
    """Return the first bytes of an index file."""
    head = _HEAD.pack(_MAGIC, _VERSION, records, slot_bytes, namespace)
    return head + xxhash.xxh3_128_digest(head)


def unpack_head(raw: bytes, namespace: bytes) -> tuple[int, int] | None:
    """Return records and slot size if `raw` is the head of an index file of this namespace."""
    head, seal = raw[: _HEAD.size], raw[_HEAD.size :]
    if len(seal) != _HEAD_SEAL_BYTES or xxhash.xxh3_128_digest(head) != seal:
        return None
    magic, version, records, slot_bytes, whose = _HEAD.unpack(head)
    if (magic, version, whose) != (_MAGIC, _VERSION, namespace):
        return None
    if not 0 < records <= RECORDS_MAX or not slot_bytes or slot_bytes % PAGE_BYTES:
        return None
    return records, slot_bytes


def pack_entry(packed_header: bytes, use: int) -> bytes:
    """Return the entry of a block that was stored at `use`."""
    body = packed_header + _U64.pack(use)
    return body + _seal(body)


def pack_uses(uses: array[int]) -> bytes:
    """Return the sealed table of uses."""
    table = uses.tobytes()
    return table + _seal(table)


def survey(raw: bytes, *, records: int, namespace: bytes, slot_bytes: int, whole: int) -> Survey:
    """Sort the content of the index file `raw` of a slab whose data file has `whole` records."""
    hits, uses_sound = _unpack_uses(raw[uses_at(records) :][: uses_bytes(records)], records)
    found = Survey([], [], [], uses_sound)
    for record in range(records):
        at = entry_at(record)
        entry = raw[at : min(at + ENTRY_BYTES, uses_at(records))]
        if not entry.strip(b"\0"):
            continue
        header, use = _unpack_entry(entry)
        if (
            header is None
            or header.key.namespace != namespace
            or header.length > slot_bytes
            or not use < USE_MAX
        ):
            found.unsound.append(record)
        elif record >= whole:
            found.beyond.append(record)
        else:
            found.entries.append(Entry(record, header, max(use, hits[record])))
    return found


def _unpack_entry(raw: bytes) -> tuple[BlockHeader | None, int]:
    """Return the header in an entry and the use that stored its block; (None, 0) if unsound."""
    body = raw[: -_U64.size]
    if len(raw) != ENTRY_BYTES or raw[len(body) :] != _seal(body):
        return None, 0
    return unpack_header(body), _U64.unpack_from(body, HEADER_BYTES)[0]


def _unpack_uses(raw: bytes, records: int) -> tuple[array[int], bool]:
    """Return the table of uses, all 0 if it is unsound, and whether it is sound."""
    table = raw[: -_U64.size]
    if len(raw) == uses_bytes(records) and raw[len(table) :] == _seal(table):
        hits = array("Q", table)
        if max(hits) < USE_MAX:
            return hits, True
    return array("Q", bytes(records * _U64.size)), not raw.strip(b"\0")


def _seal(raw: bytes) -> bytes:
    return _U64.pack(xxhash.xxh3_64_intdigest(raw))
