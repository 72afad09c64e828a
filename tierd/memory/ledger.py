"""The ledger: what each slot holds, in memory that outlives the index in the process.

One memfd a segment, never given to a client: a head and one fixed-size record a
slot. A record says READY only once the block's checksum is in it, because a block
without one could not be proven by whoever reads the ledger later.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tierd.types import CHECKSUM_BYTES, DIGEST_BYTES, HASH_BYTES

_MAGIC = b"TIERDLDG"
_VERSION = 1
_HEAD = struct.Struct(f"<8sII{DIGEST_BYTES}sIIQ")
HEAD_BYTES = 64
assert _HEAD.size <= HEAD_BYTES

# The state comes last: a record is written front to back, and says READY at the end.
_RECORD = struct.Struct(f"<QQI4x{HASH_BYTES}s{HASH_BYTES}s{CHECKSUM_BYTES}s16xQ")
RECORD_BYTES = _RECORD.size
assert RECORD_BYTES == 128

_STATE_OFFSET = RECORD_BYTES - 8
_FREE = 0
_READY = 2


class LedgerRecord(NamedTuple):
    """One READY slot as the ledger tells it."""

    place: int
    block_hash: bytes
    parent: bytes
    length: int
    checksum: bytes
    generation: int
    last_use: int


class Ledger:
    """Records of the slots of one segment; `place` is a slot's number within it."""

    __slots__ = ("_mapping", "_slots", "_states", "fd")

    def __init__(self, digest: bytes, index: int, slots: int, slot_bytes: int) -> None:
        self.fd = os.memfd_create(f"tierd-ledger-{digest.hex()[:12]}-{index}", os.MFD_CLOEXEC)
        size = HEAD_BYTES + slots * RECORD_BYTES
        os.ftruncate(self.fd, size)
        self._mapping = mmap.mmap(self.fd, size)
        self._slots = slots
        _HEAD.pack_into(self._mapping, 0, _MAGIC, _VERSION, index, digest, slots, 0, slot_bytes)
        self._states = np.ndarray(
            (slots,), "<u8", self._mapping, HEAD_BYTES + _STATE_OFFSET, (RECORD_BYTES,)
        )

    def forget(self, places: Sequence[int]) -> None:
        """Mark slots that are not READY any more, before their bytes change."""
        self._states[places] = _FREE

    def move(self, place: int, other: Ledger, target: int) -> None:
        """Move a record to a free place of `other`, the state last; a FREE one stays so."""
        start = HEAD_BYTES + place * RECORD_BYTES
        there = HEAD_BYTES + target * RECORD_BYTES
        other._mapping[there : there + _STATE_OFFSET] = self._mapping[start : start + _STATE_OFFSET]
        other._states[target] = self._states[place]
        self._states[place] = _FREE

    def ready(self, record: LedgerRecord) -> None:
        """Record a block that can be proven."""
        _RECORD.pack_into(
            self._mapping,
            HEAD_BYTES + record.place * RECORD_BYTES,
            record.generation,
            record.last_use,
            record.length,
            record.block_hash,
            record.parent,
            record.checksum,
            _READY,
        )

    def records(self) -> Iterator[LedgerRecord]:
        """The READY slots."""
        for place in np.flatnonzero(self._states == _READY).tolist():
            generation, last_use, length, block_hash, parent, digest, _ = _RECORD.unpack_from(
                self._mapping, HEAD_BYTES + place * RECORD_BYTES
            )
            yield LedgerRecord(place, block_hash, parent, length, digest, generation, last_use)
