"""A slab: one file of equal records, and the index file beside it.

A record is a header page (the block's header, then zeros) and the slot's bytes, so
that one vectored O_DIRECT call moves both, of one record or of a run of neighbours. The
index file holds for each record an entry (zeros, or the block's header once more and the
use that stored it), and after all entries the uses that hit it since: a restart reads 144
bytes a block. It is a hint: what a record holds is what its own header page says.

Order of a write: index entry zeroed, record, index entry. Each is a system call, so a
SIGKILL leaves a free record or a whole block; a power loss may leave any mixture, which
fails on identity or checksum when it is read. Hits are written down now and then, many at
once: a read is then one system call, after which a thread has to get the GIL back.

The index is written by pwrite, not through a mapping: a full disk, a bad sector or a
file cut short by somebody else is then an OSError of one block and not a SIGBUS of the
process. Nothing here knows eviction, capacity or threads: calls are blocking, and may
run in several threads as long as no two of them write one record.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import struct
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from tierd.backend import HEADER_BYTES, BlockHeader, pack_header, unpack_header, verify_block
from tierd.types import PAGE_BYTES, SCOPE_BYTES, BlockKey, slot_bytes_for

RECORDS_MAX = 1 << 14
"""Records in a slab; dropping a whole slab costs the event loop about 2 us for each."""

RUN_RECORDS_MAX = 16
"""Records moved by one call: 2 MiB of 128 KiB blocks, where a disk is at its best."""

_MAGIC = b"TIERDIDX"
_VERSION = 1
_HEAD = struct.Struct(f"<8sIIQ{SCOPE_BYTES}s")
_SEAL_BYTES = 16
_ENTRIES_AT = 64
assert _HEAD.size + _SEAL_BYTES <= _ENTRIES_AT
_USE = struct.Struct("<Q")
_ENTRY_BYTES = HEADER_BYTES + _USE.size
_FREE_ENTRY = bytes(_ENTRY_BYTES)


class Entry(NamedTuple):
    """One block as the index file tells of it; `last_use` only compares."""

    record: int
    header: BlockHeader
    last_use: int


class Survey(NamedTuple):
    """What an index file tells of, by what can be made of it."""

    entries: list[Entry]
    """Blocks that the data file is long enough to hold."""
    unsound: list[int]
    """Records whose entry is not that of a block of this slab."""
    beyond: list[int]
    """Records whose block lay in what the data file has lost."""


def index_bytes(records: int) -> int:
    """Size of the index file of a slab with so many records."""
    return slot_bytes_for(_ENTRIES_AT + records * (_ENTRY_BYTES + _USE.size))


def slab_bytes(records: int, slot_bytes: int) -> int:
    """What a slab occupies on disk, its index included."""
    return records * (PAGE_BYTES + slot_bytes) + index_bytes(records)


def records_within(room_bytes: int, slot_bytes: int) -> int:
    """The most records of a slab that occupies at most `room_bytes`; 0 if not even one."""
    spare = room_bytes - _ENTRIES_AT - PAGE_BYTES
    each = PAGE_BYTES + slot_bytes + _ENTRY_BYTES + _USE.size
    records = max(0, min(spare // each, RECORDS_MAX - 1))
    # The index was taken for up to a page too large: one more may fit.
    return records + (slab_bytes(records + 1, slot_bytes) <= room_bytes)


def data_path(folder: Path, number: int) -> Path:
    """File of the records of slab `number` in a namespace's folder."""
    return folder / f"{number:08d}.slab"


def index_path(folder: Path, number: int) -> Path:
    """Index file of slab `number` in a namespace's folder."""
    return folder / f"{number:08d}.index"


class Slab:
    """An open slab. Whoever calls read, write, clear or use keeps the record from reuse."""

    def __init__(
        self,
        *,
        folder: Path,
        number: int,
        slot_bytes: int,
        records: int,
        data_fd: int,
        index_fd: int,
    ) -> None:
        self.folder = folder
        self.number = number
        self.slot_bytes = slot_bytes
        self.records = records
        self.namespace = bytes.fromhex(folder.name)
        self.record_bytes = PAGE_BYTES + slot_bytes
        self.size_bytes = slab_bytes(records, slot_bytes)
        self.last_use = 0
        """Latest use of any of its blocks; the event loop's."""
        self.pins = 0
        """Operations in flight; the event loop's. A pinned slab is not dropped."""
        self.uses = array("Q", bytes(_USE.size * records))
        """Latest use of each record's block; the event loop's, written down by save_uses()."""
        self._uses_at = _ENTRIES_AT + records * _ENTRY_BYTES
        # Whether the index entry may be other than zeros.
        self._written = bytearray(records)
        self.unlinked = False
        """Somebody removed its files; see find_unlinked()."""
        self._data_fd = data_fd
        self._index_fd = index_fd

    @classmethod
    def create(
        cls, folder: Path, number: int, *, slot_bytes: int, records: int, direct: bool
    ) -> Slab:
        """Allocate a slab on disk and open it; OSError leaves no file behind.

        The index's first bytes come last: a slab that a SIGKILL left half-made has an
        unsound index, and load() refuses it.
        """
        assert 0 < records <= RECORDS_MAX
        assert slot_bytes % PAGE_BYTES == 0
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        folder.mkdir(mode=0o700, exist_ok=True)
        with contextlib.ExitStack() as undo:
            data_fd = os.open(data_path(folder, number), flags | _direct_flag(direct), 0o600)
            undo.callback(data_path(folder, number).unlink)
            undo.callback(os.close, data_fd)
            os.posix_fallocate(data_fd, 0, records * (PAGE_BYTES + slot_bytes))
            index_fd = os.open(index_path(folder, number), flags, 0o600)
            undo.callback(index_path(folder, number).unlink)
            undo.callback(os.close, index_fd)
            os.posix_fallocate(index_fd, 0, index_bytes(records))
            namespace = bytes.fromhex(folder.name)
            head = _HEAD.pack(_MAGIC, _VERSION, records, slot_bytes, namespace)
            _write_all(index_fd, head + xxhash.xxh3_128_digest(head), 0)
            undo.pop_all()
        return cls(
            folder=folder,
            number=number,
            slot_bytes=slot_bytes,
            records=records,
            data_fd=data_fd,
            index_fd=index_fd,
        )

    @classmethod
    def load(cls, folder: Path, number: int, *, direct: bool, read_only: bool) -> Slab | None:
        """Open the slab that lies on disk; None if it is not a whole slab of this folder.

        Raises OSError when the files cannot be opened, which says nothing about them.
        """
        mode = os.O_RDONLY if read_only else os.O_RDWR
        with contextlib.ExitStack() as undo:
            try:
                index_fd = _open_regular(index_path(folder, number), mode)
                undo.callback(os.close, index_fd)
                data_fd = _open_regular(data_path(folder, number), mode | _direct_flag(direct))
                undo.callback(os.close, data_fd)
            except FileNotFoundError:
                return None
            raw = os.pread(index_fd, _HEAD.size + _SEAL_BYTES, 0)
            head, seal = raw[: _HEAD.size], raw[_HEAD.size :]
            if len(seal) != _SEAL_BYTES or xxhash.xxh3_128_digest(head) != seal:
                return None
            magic, version, records, slot_bytes, namespace = _HEAD.unpack(head)
            if (magic, version) != (_MAGIC, _VERSION) or namespace.hex() != folder.name:
                return None
            if not 0 < records <= RECORDS_MAX or not slot_bytes or slot_bytes % PAGE_BYTES:
                return None
            undo.pop_all()
        slab = cls(
            folder=folder,
            number=number,
            slot_bytes=slot_bytes,
            records=records,
            data_fd=data_fd,
            index_fd=index_fd,
        )
        slab._written = bytearray(b"\x01") * records
        return slab

    def item(self, record: int) -> int:
        """Number of a record across all slabs of the namespace."""
        return self.number * RECORDS_MAX + record

    def record(self, item: int) -> int:
        """The record of an item that lies in this slab."""
        record = item - self.number * RECORDS_MAX
        assert 0 <= record < self.records
        return record

    def mark_used(self, item: int, use: int) -> None:
        """Note that an item's block was stored or hit."""
        self.uses[self.record(item)] = use
        self.last_use = max(self.last_use, use)

    def read(self, record: int, key: BlockKey, view: memoryview, length: int) -> BlockHeader | None:
        """Bring a block into `view`, verified; None if it is not `key`'s of `length` bytes.

        A block that fails has its index entry zeroed, so that no restart finds it again.
        Raises OSError, with the entry zeroed as well if the disk lets us; `view` then
        holds anything.
        """
        page = _header_page()
        payload = view[: min(slot_bytes_for(length), self.slot_bytes)]
        try:
            got = os.preadv(self._data_fd, [page, payload], record * self.record_bytes)
        except OSError:
            self._try_clear(record)
            raise
        header = None
        if got == PAGE_BYTES + len(payload):
            header = verify_block(page, key, view, length)
        if header is None:
            self._try_clear(record)
        return header

    def write(self, record: int, header: BlockHeader, view: memoryview, use: int) -> None:
        """Put a block into a record that nobody reads; OSError leaves the record free."""
        assert header.length <= self.slot_bytes
        assert header.key.namespace == self.namespace
        packed = pack_header(header)
        page = _header_page()
        page[:HEADER_BYTES] = packed
        payload = view[: slot_bytes_for(header.length)]
        self.clear(record)
        put = os.pwritev(self._data_fd, [page, payload], record * self.record_bytes)
        if put != PAGE_BYTES + len(payload):
            raise OSError(errno.ENOSPC, "short write of a record")
        self._written[record] = 1
        _write_all(self._index_fd, packed + _USE.pack(use), self._entry_at(record))

    def read_run(
        self,
        record: int,
        keys: Sequence[BlockKey],
        views: Sequence[memoryview],
        lengths: Sequence[int],
    ) -> list[BlockHeader | None] | None:
        """Read consecutive records from `record` on with one call, each verified as by read().

        None if they cannot be had together; the views hold anything then, and read() says
        of each what is wrong with it.
        """
        pages = _header_pages(len(keys))
        pieces = [piece for pair in zip(pages, views, strict=True) for piece in pair]
        try:
            got = os.preadv(self._data_fd, pieces, record * self.record_bytes)
        except OSError:
            return None
        if got != len(keys) * self.record_bytes:
            return None
        headers = [
            verify_block(page, key, view, length)
            for page, key, view, length in zip(pages, keys, views, lengths, strict=True)
        ]
        for place, header in enumerate(headers):
            if header is None:
                self._try_clear(record + place)
        return headers

    def write_run(
        self,
        record: int,
        headers: Sequence[BlockHeader],
        views: Sequence[memoryview],
        uses: Sequence[int],
    ) -> None:
        """Write consecutive records from `record` on, in the order of write(), three calls in all.

        OSError leaves all of them free.
        """
        pages = _header_pages(len(headers))
        packed = [pack_header(header) for header in headers]
        for page, raw in zip(pages, packed, strict=True):
            page[:HEADER_BYTES] = raw
        end = record + len(headers)
        if any(self._written[record:end]):
            _write_all(self._index_fd, _FREE_ENTRY * len(headers), self._entry_at(record))
            self._written[record:end] = bytes(len(headers))
        pieces = [piece for pair in zip(pages, views, strict=True) for piece in pair]
        put = os.pwritev(self._data_fd, pieces, record * self.record_bytes)
        if put != len(headers) * self.record_bytes:
            raise OSError(errno.ENOSPC, "short write of records")
        self._written[record:end] = b"\x01" * len(headers)
        entries = b"".join(raw + _USE.pack(use) for raw, use in zip(packed, uses, strict=True))
        _write_all(self._index_fd, entries, self._entry_at(record))

    def clear(self, record: int) -> None:
        """Zero a record's index entry, so that no restart finds its block; may raise OSError."""
        if self._written[record]:
            _write_all(self._index_fd, _FREE_ENTRY, self._entry_at(record))
            self._written[record] = 0

    def save_uses(self) -> None:
        """Write down which blocks were hit; may raise OSError, which costs only their order."""
        _write_all(self._index_fd, self.uses.tobytes(), self._uses_at)

    def find_unlinked(self) -> None:
        """Set `unlinked` if somebody removed the files: they take blocks that no restart finds."""
        links = os.fstat(self._data_fd).st_nlink, os.fstat(self._index_fd).st_nlink
        self.unlinked = self.unlinked or 0 in links

    def entries(self) -> list[Entry]:
        """The blocks that the index file tells of and the data file is long enough to hold.

        Raises OSError. A file cut short costs the blocks that lay in what is gone.
        """
        return self.survey().entries

    def survey(self) -> Survey:
        """What the index file tells of. Raises OSError."""
        raw = _read_all(self._index_fd, self._uses_at + _USE.size * self.records)
        hits = array("Q", bytes(_USE.size * self.records))
        saved = raw[self._uses_at :]
        if len(saved) == len(hits) * _USE.size:
            hits = array("Q", saved)
        whole = os.fstat(self._data_fd).st_size // self.record_bytes
        found = Survey([], [], [])
        for record in range(self.records):
            at = self._entry_at(record)
            entry = raw[at : min(at + _ENTRY_BYTES, self._uses_at)]
            if not entry or not entry[0]:
                continue
            header = unpack_header(entry) if len(entry) == _ENTRY_BYTES else None
            if (
                header is None
                or header.key.namespace != self.namespace
                or header.length > self.slot_bytes
            ):
                found.unsound.append(record)
            elif record >= whole:
                found.beyond.append(record)
            else:
                stored = _USE.unpack_from(entry, HEADER_BYTES)[0]
                found.entries.append(Entry(record, header, max(stored, hits[record])))
        return found

    def read_raw(self, record: int, view: memoryview) -> int:
        """Bring what lies on disk from a record's header page on into `view`, page-aligned.

        How many bytes came: fewer where the file ends. Nothing is verified. Raises OSError.
        """
        return os.preadv(self._data_fd, [view], record * self.record_bytes)

    def wrong_sizes(self) -> dict[Path, tuple[int, int]]:
        """Those of its files that are longer or shorter than they were made: actual and right
        size in bytes. Raises OSError."""
        right = {
            data_path(self.folder, self.number): (
                os.fstat(self._data_fd).st_size,
                self.records * self.record_bytes,
            ),
            index_path(self.folder, self.number): (
                os.fstat(self._index_fd).st_size,
                index_bytes(self.records),
            ),
        }
        return {path: sizes for path, sizes in right.items() if sizes[0] != sizes[1]}

    def close(self) -> None:
        """Let go of the files; once, with nothing in flight."""
        os.close(self._data_fd)
        os.close(self._index_fd)

    def _entry_at(self, record: int) -> int:
        return _ENTRIES_AT + record * _ENTRY_BYTES

    def _try_clear(self, record: int) -> None:
        # If it fails, say on a read-only disk, a restart finds the damage once more.
        with contextlib.suppress(OSError):
            self.clear(record)


def remove_files(folder: Path, number: int) -> None:
    """Unlink a slab's files, index first: data without an index is never adopted.

    Missing files are fine; raises OSError for what cannot be removed.
    """
    index_path(folder, number).unlink(missing_ok=True)
    data_path(folder, number).unlink(missing_ok=True)


def allocated_bytes(folder: Path, number: int) -> int:
    """What a slab's files occupy now, whatever is in them."""
    total = 0
    for path in (data_path(folder, number), index_path(folder, number)):
        with contextlib.suppress(OSError):
            found = path.lstat()
            total += found.st_blocks * 512 if stat.S_ISREG(found.st_mode) else 0
    return total


class _Pages(threading.local):
    """Page-aligned buffers a thread, as O_DIRECT wants them, for header pages."""

    def __init__(self) -> None:
        memory = memoryview(mmap.mmap(-1, RUN_RECORDS_MAX * PAGE_BYTES))
        self.pages = [memory[at : at + PAGE_BYTES] for at in range(0, len(memory), PAGE_BYTES)]


_pages = _Pages()


def _header_page() -> memoryview:
    return _pages.pages[0]


def _header_pages(count: int) -> list[memoryview]:
    return _pages.pages[:count]


def _direct_flag(direct: bool) -> int:
    return os.O_DIRECT if direct else 0


def _open_regular(path: Path, flags: int) -> int:
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def _write_all(fd: int, raw: bytes, offset: int) -> None:
    if os.pwrite(fd, raw, offset) != len(raw):
        raise OSError(errno.ENOSPC, "short write of an index file")


def _read_all(fd: int, size_bytes: int) -> bytes:
    pieces = []
    at = 0
    while at < size_bytes:
        piece = os.pread(fd, size_bytes - at, at)
        if not piece:
            break
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)
