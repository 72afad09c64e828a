"""A slab: one file of equal records, and the index file beside it.

A record is a header page (the block's header, then zeros) and the slot's bytes. So one vectored
O_DIRECT call moves both, for one record or for a run of neighbours. The index file
(slab_index.py) has a copy of each block's header, and the uses of blocks: a restart reads
152 bytes per block. The index is a hint; the header page decides what a record holds.

Order of a write: zero the index entry, write the record, write the index entry. Each step is one
system call, so a SIGKILL leaves a free record or a whole block. A power loss may leave any
mixture, which fails on identity or checksum at both reads (common/second_read.py). Hits are written
down from time to time, many at once: a read is then one system call, after which its thread has
to get the GIL back.

The index is written by pwrite, not through a mapping. So a full disk, a bad sector or a
truncated file raises OSError for one block instead of SIGBUS for the process. This module does
not know eviction, capacity or threads: calls block, and may run in several threads if no two of
them write one record.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tierd.backend import (
    HEADER_BYTES,
    BlockHeader,
    checksum,
    match_header,
    pack_header,
    verify_block,
)
from tierd.types import PAGE_BYTES, BlockKey, slot_bytes_for
from tierd_backends.common.second_read import DamageSite, judge
from tierd_backends.file.slab_index import (
    EACH_BYTES,
    FIXED_BYTES,
    FREE_ENTRY,
    HEAD_BYTES,
    RECORDS_MAX,
    Entry,
    Survey,
    entry_at,
    index_bytes,
    pack_entry,
    pack_head,
    pack_uses,
    survey,
    unpack_head,
    uses_at,
    uses_bytes,
)

RUN_RECORDS_MAX = 16
"""Records moved by one call: 2 MiB of 128 KiB blocks, which gives a disk's full rate."""


class Reading(NamedTuple):
    """Result of reading the block in a record."""

    header: BlockHeader | None
    """Set if the block was read; if None, the view's bytes are undefined."""
    fault: DamageSite | None = None
    """Where the block was damaged, if a read of it was damaged."""
    error: OSError | None = None
    """The disk's error. If both reads failed, the block is dropped."""

    @property
    def dropped(self) -> bool:
        """Whether the block is cleared, so that no restart finds it again."""
        return self.header is None and self.fault in (None, DamageSite.STORED)


def slab_bytes(records: int, slot_bytes: int) -> int:
    """Bytes that a slab occupies on disk, its index included."""
    return records * (PAGE_BYTES + slot_bytes) + index_bytes(records)


def records_within(room_bytes: int, slot_bytes: int) -> int:
    """Most records of a slab that occupies at most `room_bytes`; 0 if not even one fits."""
    spare = room_bytes - FIXED_BYTES - PAGE_BYTES
    records = max(0, min(spare // (PAGE_BYTES + slot_bytes + EACH_BYTES), RECORDS_MAX - 1))
    # The index size above may be up to a page too large: one more record may fit.
    return records + (slab_bytes(records + 1, slot_bytes) <= room_bytes)


def data_path(folder: Path, number: int) -> Path:
    """Return the data file of slab `number` in a namespace's folder."""
    return folder / f"{number:08d}.slab"


def index_path(folder: Path, number: int) -> Path:
    """Return the index file of slab `number` in a namespace's folder."""
    return folder / f"{number:08d}.index"


class _Got(NamedTuple):
    """Result of one read of a record: the header if it is the wanted block, and the bytes seen."""

    header: BlockHeader | None
    seen: tuple[int, bytes, bytes]


class Slab:
    """An open slab. Callers of read, write, clear and use protect the record from reuse."""

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
        """Latest use of any of its blocks. Belongs to the event loop."""
        self.pins = 0
        """Operations in flight; a pinned slab is not dropped. Belongs to the event loop."""
        self.uses = array("Q", bytes(8 * records))
        """Latest use of each record's block, saved by save_uses(). Belongs to the event loop."""
        # Whether a record's index entry may be other than zeros.
        self._written = bytearray(records)
        self.unlinked = False
        """Whether another process removed its files. Set by find_unlinked()."""
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
            _write_all(index_fd, pack_head(namespace, records, slot_bytes), 0)
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
        """Open a slab on disk. Returns None if the folder has no complete slab by that number.

        Raises OSError if the files cannot be opened; they may still be sound.
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
            raw = os.pread(index_fd, HEAD_BYTES, 0)
            head = unpack_head(raw, bytes.fromhex(folder.name))
            if head is None:
                return None
            records, slot_bytes = head
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
        """Return a record's number across all slabs of the namespace."""
        return self.number * RECORDS_MAX + record

    def record(self, item: int) -> int:
        """Return the record of an item in this slab."""
        record = item - self.number * RECORDS_MAX
        assert 0 <= record < self.records
        return record

    def mark_used(self, item: int, use: int) -> None:
        """Note that an item's block was stored or hit."""
        self.uses[self.record(item)] = use
        self.last_use = max(self.last_use, use)

    def read(self, record: int, key: BlockKey, view: memoryview, length: int) -> Reading:
        """Read a block of `length` bytes into `view` and verify it; try twice if needed.

        If the block is damaged on disk, or neither read succeeds, its index entry is zeroed
        where the disk allows it, so that no restart finds the block again.
        """
        first = self._try_read(record, key, view, length)
        if isinstance(first, _Got) and first.header is not None:
            return Reading(first.header)
        self.forget_cached(record)
        second = self._try_read(record, key, view, length)
        if isinstance(second, OSError):
            fault = None if isinstance(first, OSError) else DamageSite.UNKNOWN
            reading = Reading(None, fault, second)
        elif isinstance(first, OSError):
            fault = DamageSite.UNKNOWN if second.header is None else DamageSite.TRANSIT
            reading = Reading(second.header, fault)
        else:
            reading = Reading(second.header, judge(first.seen, second.seen, second.header))
        if reading.dropped:
            self._try_clear(record)
        return reading

    def _try_read(
        self, record: int, key: BlockKey, view: memoryview, length: int
    ) -> _Got | OSError:
        page = _header_page()
        payload = view[: min(slot_bytes_for(length), self.slot_bytes)]
        try:
            got = os.preadv(self._data_fd, [page, payload], record * self.record_bytes)
        except OSError as error:
            return error
        raw_header, digest = bytes(page[:HEADER_BYTES]), checksum(view[:length])
        header = None
        if got == PAGE_BYTES + len(payload):
            header = match_header(raw_header, key, length, digest)
        return _Got(header, (got, raw_header, digest))

    def forget_cached(self, record: int) -> None:
        """Drop a record from the page cache: without O_DIRECT the next read then uses the disk."""
        with contextlib.suppress(OSError):
            at = record * self.record_bytes
            os.posix_fadvise(self._data_fd, at, self.record_bytes, os.POSIX_FADV_DONTNEED)

    def write(self, record: int, header: BlockHeader, view: memoryview, use: int) -> None:
        """Write a block into a record that is not being read; OSError leaves the record free."""
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
        _write_all(self._index_fd, pack_entry(packed, use), entry_at(record))

    def read_run(
        self,
        record: int,
        keys: Sequence[BlockKey],
        views: Sequence[memoryview],
        lengths: Sequence[int],
    ) -> list[BlockHeader | None] | None:
        """Read consecutive records, from `record` on, with one call, and verify each.

        Returns None for a block that is not the wanted one, and None alone if one call cannot read
        them all. Views without a block hold undefined bytes; read() finds out what is wrong.
        """
        pages = _header_pages(len(keys))
        pieces = [piece for pair in zip(pages, views, strict=True) for piece in pair]
        try:
            got = os.preadv(self._data_fd, pieces, record * self.record_bytes)
        except OSError:
            return None
        if got != len(keys) * self.record_bytes:
            return None
        return [
            verify_block(page, key, view, length)
            for page, key, view, length in zip(pages, keys, views, lengths, strict=True)
        ]

    def write_run(
        self,
        record: int,
        headers: Sequence[BlockHeader],
        views: Sequence[memoryview],
        uses: Sequence[int],
    ) -> None:
        """Write consecutive records, from `record` on, in write()'s order, with three calls.

        OSError leaves all of them free.
        """
        pages = _header_pages(len(headers))
        packed = [pack_header(header) for header in headers]
        for page, raw in zip(pages, packed, strict=True):
            page[:HEADER_BYTES] = raw
        end = record + len(headers)
        if any(self._written[record:end]):
            _write_all(self._index_fd, FREE_ENTRY * len(headers), entry_at(record))
            self._written[record:end] = bytes(len(headers))
        pieces = [piece for pair in zip(pages, views, strict=True) for piece in pair]
        put = os.pwritev(self._data_fd, pieces, record * self.record_bytes)
        if put != len(headers) * self.record_bytes:
            raise OSError(errno.ENOSPC, "short write of records")
        self._written[record:end] = b"\x01" * len(headers)
        entries = b"".join(map(pack_entry, packed, uses))
        _write_all(self._index_fd, entries, entry_at(record))

    def clear(self, record: int) -> None:
        """Zero a record's index entry, so that no restart finds its block. Raises OSError."""
        if self._written[record]:
            _write_all(self._index_fd, FREE_ENTRY, entry_at(record))
            self._written[record] = 0

    def save_uses(self) -> None:
        """Save the latest uses of all blocks. Raises OSError; a failure costs only their order."""
        _write_all(self._index_fd, pack_uses(self.uses), uses_at(self.records))

    def forget_uses(self) -> None:
        """Save an empty table of uses. Raises OSError."""
        _write_all(self._index_fd, bytes(uses_bytes(self.records)), uses_at(self.records))

    def find_unlinked(self) -> None:
        """Set `unlinked` if the files were removed: no restart would find the blocks in them."""
        links = os.fstat(self._data_fd).st_nlink, os.fstat(self._index_fd).st_nlink
        self.unlinked = self.unlinked or 0 in links

    def entries(self) -> list[Entry]:
        """Return the blocks that the index lists and that lie within the data file.

        Raises OSError. Truncating the data file loses the blocks beyond its end.
        """
        return self.survey().entries

    def survey(self) -> Survey:
        """Return what the index file says about each record. Raises OSError."""
        return survey(
            _read_all(self._index_fd, index_bytes(self.records)),
            records=self.records,
            namespace=self.namespace,
            slot_bytes=self.slot_bytes,
            whole=os.fstat(self._data_fd).st_size // self.record_bytes,
        )

    def read_raw(self, record: int, view: memoryview) -> int:
        """Read from a record's header page on into `view`, page-aligned, without verification.

        Returns the bytes read: fewer than asked for at the file's end. Raises OSError.
        """
        return os.preadv(self._data_fd, [view], record * self.record_bytes)

    def wrong_sizes(self) -> dict[Path, tuple[int, int]]:
        """Return the files whose size has changed since they were made: actual and right size in
        bytes. Raises OSError."""
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
        """Close the files. Called once, with nothing in flight."""
        os.close(self._data_fd)
        os.close(self._index_fd)

    def _try_clear(self, record: int) -> None:
        # If this fails, as on a read-only disk, a restart finds the damage once more.
        with contextlib.suppress(OSError):
            self.clear(record)


def remove_files(folder: Path, number: int) -> None:
    """Unlink a slab's files, index first: data without an index is never adopted.

    Missing files are fine. Raises OSError if a file cannot be removed.
    """
    index_path(folder, number).unlink(missing_ok=True)
    data_path(folder, number).unlink(missing_ok=True)


def allocated_bytes(folder: Path, number: int) -> int:
    """Bytes that a slab's files occupy now, whatever their content."""
    total = 0
    for path in (data_path(folder, number), index_path(folder, number)):
        with contextlib.suppress(OSError):
            found = path.lstat()
            total += found.st_blocks * 512 if stat.S_ISREG(found.st_mode) else 0
    return total


class _Pages(threading.local):
    """Page-aligned buffers for header pages, one set per thread, as O_DIRECT requires."""

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
