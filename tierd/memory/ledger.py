"""The ledger: the content of each slot, in memory that outlives the daemon's process.

One memfd per segment, never given to a client: a head with the segment's identity, and one
fixed-size record per slot. A record becomes READY only with the block's checksum, because the
next incarnation could not verify a block without one.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import cbor2
import numpy as np
import xxhash

from tierd.errors import NamespaceError, TierdError
from tierd.types import CHECKSUM_BYTES, DIGEST_BYTES, HASH_BYTES, Namespace

_MAGIC: Final = b"TIERDLDG"
_VERSION: Final = 3
_HEAD = struct.Struct(f"<8sII{DIGEST_BYTES}sIIQQQ")
_SEAL = struct.Struct("<Q")
_PREFIX = struct.Struct("<8sI")

# The state comes last: a record is written front to back and becomes READY at the end. The seal
# covers the fields before the tiers, which change while the block stays. The tiers' bits have
# their inverse next to them in one word, so that both change at once and damage is detected.
_BODY = struct.Struct(f"<QQI{HASH_BYTES}s{HASH_BYTES}s{CHECKSUM_BYTES}s")
_TAIL = struct.Struct("<IQ8xQ")
RECORD_BYTES: Final = _BODY.size + _TAIL.size
assert RECORD_BYTES == 128

INCARNATION_BYTES: Final = 8
"""Bytes of the name of an incarnation, which is stored right before the records."""

_TIERS_OFFSET: Final = _BODY.size
_STATE_OFFSET: Final = RECORD_BYTES - 8
_FREE: Final = 0
_READY: Final = int.from_bytes(b"IS READY", "little")
"""State of a READY record: neither a flipped bit nor a byte of 0xFF turns _FREE into it."""

_TIER_BITS: Final = 16
_TIERS_ALL: Final = (1 << _TIER_BITS) - 1


class LedgerError(TierdError):
    """A ledger cannot be read; the message says why."""


class LedgerRecord(NamedTuple):
    """The record of one READY slot.

    `last_use` is CLOCK_MONOTONIC in ns; `tiers` has a bit for each storage tier that has the
    block.
    """

    place: int
    block_hash: bytes
    parent: bytes
    length: int
    checksum: bytes
    generation: int
    last_use: int
    tiers: int = 0


class Ledger:
    """The records of one segment's slots; `place` is a slot's index in the segment. Owns `fd`."""

    __slots__ = (
        "_mapping",
        "_records_at",
        "_states",
        "_tiers",
        "damaged",
        "fd",
        "index",
        "namespace",
        "slots",
    )

    def __init__(self, fd: int, namespace: Namespace, index: int, slots: int, at: int) -> None:
        """The records begin at byte `at` of `fd`."""
        self.fd = fd
        self.namespace = namespace
        self.index = index
        self.slots = slots
        self.damaged = 0
        """Number of damaged records that `records` left out."""
        self._records_at = at
        self._mapping = mmap.mmap(fd, at + slots * RECORD_BYTES)
        self._states = np.ndarray(
            (slots,), "<u8", self._mapping, at + _STATE_OFFSET, (RECORD_BYTES,)
        )
        self._tiers = np.ndarray(
            (slots,), "<u4", self._mapping, at + _TIERS_OFFSET, (RECORD_BYTES,)
        )

    @classmethod
    def create(cls, namespace: Namespace, index: int, slots: int, segment: int) -> Ledger:
        """Create the ledger of a segment whose memfd has the inode `segment`. Raises OSError."""
        digest = namespace.digest
        fields = cbor2.dumps(namespace.to_fields(), canonical=True)
        head = _HEAD.pack(
            _MAGIC, _VERSION, index, digest, slots, len(fields), namespace.slot_bytes, segment, 0
        )
        sealed = head + fields
        sealed += _SEAL.pack(xxhash.xxh3_64_intdigest(sealed))
        at = _records_at(len(fields))
        fd = os.memfd_create(f"tierd-ledger-{digest.hex()[:12]}-{index}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, at + slots * RECORD_BYTES)
            os.pwrite(fd, sealed, 0)
            return cls(fd, namespace, index, slots, at)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def read(cls, fd: int, segment: int) -> Ledger:
        """Open the ledger that an earlier incarnation left in `fd` for the memfd `segment`.

        `segment` is an inode number. The ledger then owns `fd`. Raises LedgerError; then the
        caller still owns `fd`, and it is unchanged.
        """
        prefix = os.pread(fd, _HEAD.size, 0)
        if len(prefix) < _HEAD.size or not is_ledger(fd):
            raise LedgerError("it is not a ledger")
        _, version = _PREFIX.unpack_from(prefix)
        if version != _VERSION:
            raise LedgerError(f"its format is {version}, but this tierd reads {_VERSION}")
        _, _, index, digest, slots, length, slot_bytes, inode, _ = _HEAD.unpack(prefix)
        at = _records_at(length)
        if os.fstat(fd).st_size != at + slots * RECORD_BYTES:
            raise LedgerError("its size does not match its head")
        sealed = os.pread(fd, _HEAD.size + length + _SEAL.size, 0)
        body = sealed[: -_SEAL.size]
        if _SEAL.unpack(sealed[-_SEAL.size :])[0] != xxhash.xxh3_64_intdigest(body):
            raise LedgerError("its head is damaged")
        if inode != segment:
            raise LedgerError("it belongs to another segment")
        try:
            namespace = Namespace.from_fields(cbor2.loads(body[_HEAD.size :]))
        except (NamespaceError, cbor2.CBORDecodeError, TypeError) as error:
            raise LedgerError(f"its namespace is not valid in this tierd: {error}") from error
        if namespace.digest != digest or namespace.slot_bytes != slot_bytes or not slots:
            raise LedgerError("its namespace does not match its digest and slots")
        return cls(fd, namespace, index, slots, at)

    @property
    def incarnation(self) -> bytes:
        """Name of the incarnation that used the segment last.

        The pages and guards that this and earlier incarnations left show who may still read or
        write slots.
        """
        return self._mapping[self._records_at - INCARNATION_BYTES : self._records_at]

    @incarnation.setter
    def incarnation(self, name: bytes) -> None:
        assert len(name) == INCARNATION_BYTES
        self._mapping[self._records_at - INCARNATION_BYTES : self._records_at] = name

    def forget(self, places: Sequence[int]) -> None:
        """Mark slots as no longer READY, before their bytes change."""
        self._states[places] = _FREE

    def forget_all_but(self, places: Sequence[int]) -> None:
        """Mark all slots except these as not READY."""
        kept = self._states[places].copy()
        self._states[:] = _FREE
        self._states[places] = kept

    def move(self, place: int, other: Ledger, target: int) -> None:
        """Move a record to a free place of `other`, the state last; a FREE record stays FREE."""
        start, there = self._at(place), other._at(target)
        other._mapping[there : there + _STATE_OFFSET] = self._mapping[start : start + _STATE_OFFSET]
        other._states[target] = self._states[place]
        self._states[place] = _FREE

    def ready(self, record: LedgerRecord) -> None:
        """Record a block whose checksum is known, so that it can be verified."""
        body = _BODY.pack(
            record.generation,
            record.last_use,
            record.length,
            record.block_hash,
            record.parent,
            record.checksum,
        )
        at = self._at(record.place)
        self._mapping[at : at + _BODY.size] = body
        tiers = record.tiers | (record.tiers ^ _TIERS_ALL) << _TIER_BITS
        _TAIL.pack_into(
            self._mapping, at + _BODY.size, tiers, xxhash.xxh3_64_intdigest(body), _READY
        )

    def note_tiers(self, places: Sequence[int], add: int, remove: int) -> None:
        """Add and remove storage tiers, by their bits, in the records of these blocks."""
        there = self._tiers[places]
        known = np.where((there >> _TIER_BITS) ^ _TIERS_ALL == there & _TIERS_ALL, there, 0)
        known = (known & ~np.uint32(remove) | np.uint32(add)) & np.uint32(_TIERS_ALL)
        self._tiers[places] = known | (known ^ np.uint32(_TIERS_ALL)) << np.uint32(_TIER_BITS)

    def forget_tiers(self) -> None:
        """Clear the tiers of all records: no storage tier is known to have the blocks."""
        self._tiers[:] = 0

    def records(self) -> Iterator[LedgerRecord]:
        """Yield the undamaged READY records; afterwards `damaged` is the number of the others."""
        ready = self._states == _READY
        self.damaged = int(np.count_nonzero(~ready & (self._states != _FREE)))
        for place in np.flatnonzero(ready).tolist():
            at = self._at(place)
            body = self._mapping[at : at + _BODY.size]
            tiers, seal, _ = _TAIL.unpack_from(self._mapping, at + _BODY.size)
            if seal != xxhash.xxh3_64_intdigest(body):
                self.damaged += 1
            else:
                # Damaged tier bits count as none: the block is looked up or written again.
                low, high = tiers & _TIERS_ALL, tiers >> _TIER_BITS
                tiers = low if low ^ high == _TIERS_ALL else 0
                generation, last_use, length, block_hash, parent, digest = _BODY.unpack(body)
                yield LedgerRecord(
                    place, block_hash, parent, length, digest, generation, last_use, tiers
                )

    def _at(self, place: int) -> int:
        return self._records_at + place * RECORD_BYTES


def is_ledger(fd: int) -> bool:
    """Whether a memfd begins like a ledger of any version."""
    return os.pread(fd, len(_MAGIC), 0) == _MAGIC


def _records_at(namespace_bytes: int) -> int:
    """Return the offset of the records, which follow head, namespace, seal and incarnation.

    It is a multiple of RECORD_BYTES.
    """
    end = _HEAD.size + namespace_bytes + _SEAL.size + INCARNATION_BYTES
    return -(-end // RECORD_BYTES) * RECORD_BYTES
