"""A slab: one file of equal records, and the index file beside it.

A record is a header page (the block's header, then zeros) and the slot's bytes, so
that one vectored O_DIRECT call moves both, of one record or of a run of neighbours. The
index file (slab_index.py) holds each block's header once more and the uses of blocks: a
restart reads 152 bytes a block. It is a hint: what a record holds is what its own header
page says.

Order of a write: index entry zeroed, record, index entry. Each is a system call, so a
SIGKILL leaves a free record or a whole block; a power loss may leave any mixture, which
fails on identity or checksum when it is read, twice (common/again.py). Hits are written down now
and then, many at once: a read is then one system call, after which a thread has to get the
GIL back.

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
from tierd_backends.common.again import DamageSite, judge
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
"""Records moved by one call: 2 MiB of 128 KiB blocks, where a disk is at its best."""


class Reading(NamedTuple):
    """How the block of a record was read."""

    header: BlockHeader | None
    """Set if it was brought; without it the view holds anything."""
    fault: DamageSite | None = None
    """Where it was damaged, if a read of it was."""
    error: OSError | None = None
    """Why the disk did not give it; if it gave no bytes at either try, the block is dropped."""

    @property
    def dropped(self) -> bool:
        """Whether no restart is to find the block again."""
        return self.header is None and self.fault in (None, DamageSite.STORED)


def slab_bytes(records: int, slot_bytes: int) -> int:
    """What a slab occupies on disk, its index included."""
    return records * (PAGE_BYTES + slot_bytes) + index_bytes(records)


def records_within(room_bytes: int, slot_bytes: int) -> int:
    """The most records of a slab that occupies at most `room_bytes`; 0 if not even one."""
    spare = room_bytes - FIXED_BYTES - PAGE_BYTES
    records = max(0, min(spare // (PAGE_BYTES + slot_bytes + EACH_BYTES), RECORDS_MAX - 1))
    # The index was taken for up to a page too large: one more may fit.
    return records + (slab_bytes(records + 1, slot_bytes) <= room_bytes)


def data_path(folder: Path, number: int) -> Path:
    """File of the records of slab `number` in a namespace's folder."""
    return folder / f"{number:08d}.slab"


def index_path(folder: Path, number: int) -> Path:
    """Index file of slab `number` in a namespace's folder."""
    return folder / f"{number:08d}.index"


class _Got(NamedTuple):
    """What one read of a record gave: the header if it is the block wanted, and what was seen."""

    header: BlockHeader | None
    seen: tuple[int, bytes, bytes]


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
        self.uses = array("Q", bytes(8 * records))
        """Latest use of each record's block; the event loop's, written down by save_uses()."""
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

    def read(self, record: int, key: BlockKey, view: memoryview, length: int) -> Reading:
        """Bring a block of `length` bytes into `view`, verified, at the second try if need be.

        What is damaged on the disk, or what the disk gives at neither try, has its index entry
        zeroed, if the disk lets us, so that no restart finds it again.
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
        """Have the next read of a record come from the disk where there is no O_DIRECT."""
        with contextlib.suppress(OSError):
            at = record * self.record_bytes
            os.posix_fadvise(self._data_fd, at, self.record_bytes, os.POSIX_FADV_DONTNEED)

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
        _write_all(self._index_fd, pack_entry(packed, use), entry_at(record))

    def read_run(
        self,
        record: int,
        keys: Sequence[BlockKey],
        views: Sequence[memoryview],
        lengths: Sequence[int],
    ) -> list[BlockHeader | None] | None:
        """Read consecutive records from `record` on with one call, and verify each.

        None for a block that is not what was wanted, and for all if they cannot be had
        together; their views hold anything then, and read() says what is wrong with each.
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
        """Write consecutive records from `record` on, in the order of write(), three calls in all.

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
        """Zero a record's index entry, so that no restart finds its block; may raise OSError."""
        if self._written[record]:
            _write_all(self._index_fd, FREE_ENTRY, entry_at(record))
            self._written[record] = 0

    def save_uses(self) -> None:
        """Write down which blocks were hit; may raise OSError, which costs only their order."""
        _write_all(self._index_fd, pack_uses(self.uses), uses_at(self.records))

    def forget_uses(self) -> None:
        """Write down that no block was hit; may raise OSError."""
        _write_all(self._index_fd, bytes(uses_bytes(self.records)), uses_at(self.records))

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
        return survey(
            _read_all(self._index_fd, index_bytes(self.records)),
            records=self.records,
            namespace=self.namespace,
            slot_bytes=self.slot_bytes,
            whole=os.fstat(self._data_fd).st_size // self.record_bytes,
        )

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
