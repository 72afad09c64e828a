"""Offline check of a file tier: finds where its files contradict themselves or their index.

Each thread reads one slab after another, in large pieces. Memory: about 48 bytes per block of the
largest namespace, and per thread one piece of CHUNK_BYTES, or one record if that is larger.
Repair frees the records whose blocks would be found damaged later, and removes unusable slabs.
It adds nothing, and touches only tierd's files. A record is read again before it is called
damaged: if only one of two reads is damaged, the record is kept and reported.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tierd.backend import BlockHeader, CheckReport, Findings, Tell, checksum, unpack_header
from tierd.errors import ConfigError
from tierd.types import HASH_BYTES, PAGE_BYTES
from tierd_backends.file.directory import InUseError, StoreDirectory
from tierd_backends.file.slab import Slab, data_path, remove_files
from tierd_backends.file.slab_index import Entry

CHUNK_BYTES: Final = 4 << 20
"""Bytes per read: large enough for a disk's full rate, and the threads' pieces stay in cache."""

TELL_S: Final = 0.2
"""How often progress is reported, in seconds."""

NO_FORMAT: Final = "the FORMAT file is missing"
UNUSABLE: Final = "a slab is not whole"
OTHER_SLOTS: Final = "a slab has other slots than its namespace"
UNREADABLE: Final = "the disk does not give what it has"
WRONG_SIZE: Final = "a file has not the size that it was made with"
BAD_ENTRY: Final = "an index entry is unsound"
BAD_USES: Final = "an index's table of uses is unsound"
LOST: Final = "a block lay in what a slab has lost"
BAD_HEADER: Final = "a record is not the block that the index says"
BAD_PAYLOAD: Final = "a block's payload has another checksum"
TWICE: Final = "a block is held twice"
UNSTEADY: Final = "two reads of a record differ, so the disk or its cable damages reads"
# The kinds are keys of the JSON output, so they must not change. People read these texts instead:
TEXTS: Final = {
    NO_FORMAT: "missing FORMAT file",
    UNUSABLE: "unusable slabs",
    OTHER_SLOTS: "slabs with another slot size than the rest of their namespace",
    UNREADABLE: "slabs or records that the disk cannot read",
    WRONG_SIZE: "files of the wrong size",
    BAD_ENTRY: "damaged index entries",
    BAD_USES: "indexes with a damaged table of uses",
    LOST: "blocks beyond the end of a truncated slab",
    BAD_HEADER: "records that do not hold the block in the index",
    BAD_PAYLOAD: "payloads with a wrong checksum",
    TWICE: "blocks stored twice",
    UNSTEADY: "records whose two reads differ: check the disk and its cable",
}


class _Seen(NamedTuple):
    """The sound blocks of a slab."""

    number: int
    slot_bytes: int
    records: list[int]
    last_uses: npt.NDArray[np.uint64]
    hashes: npt.NDArray[np.uint64]


def check_store(path: Path, *, threads: int, repair: bool, quick: bool, tell: Tell) -> CheckReport:
    """Check the tier at `path`. Raises ConfigError if there is no tier, or another process has it
    open."""
    if not any((path / name).is_file() for name in ("LOCK", "FORMAT")):
        raise ConfigError(f"{path} is not the directory of a file tier")
    directory = StoreDirectory(path)
    missing = [name for name in ("LOCK", "FORMAT") if not (path / name).exists()]
    try:
        directory.open(make=repair)
        if repair and directory.read_only:
            raise ConfigError(f"{path} is on a read-only file system; nothing can be repaired")
        _give_to_owner(path, missing)
        check = _Check(directory, threads, repair, quick, tell)
        return check.run(unformatted="FORMAT" in missing)
    except InUseError as error:
        raise ConfigError(
            f"{path} is in use by process {error.holder}: stop tierd first (systemctl stop tierd), "
            "or have it verify the tier while it runs: tierd scrub"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be checked: {error}") from error
    finally:
        directory.close()


def _give_to_owner(path: Path, names: Iterable[str]) -> None:
    """Give files that root has just made to the directory's owner, so that tierd can start."""
    if os.geteuid() == 0:
        owner = path.stat()
        for name in names:
            if (path / name).exists():
                os.chown(path / name, owner.st_uid, owner.st_gid)


class _Check:
    """One check. `_slab` and its callees run in threads, the other methods in the caller's."""

    def __init__(
        self, directory: StoreDirectory, threads: int, repair: bool, quick: bool, tell: Tell
    ) -> None:
        self._directory = directory
        self._threads = threads
        self._repair = repair
        self._quick = quick
        self._tell = tell
        self._direct = directory.formatted and directory.takes_direct()
        self._report = CheckReport()
        self._lock = threading.Lock()
        self._looked_at = 0
        self._size_bytes = 0
        self._stop = False

    def run(self, *, unformatted: bool) -> CheckReport:
        """Check the whole directory; `unformatted`: it had no FORMAT file. Raises OSError."""
        if unformatted:
            self._found(NO_FORMAT, "FORMAT", repaired=self._directory.formatted)
        folders = self._directory.folders()
        for name in self._directory.foreign:
            self._report.foreign.add(name, repaired=False)
        files = [data_path(folder, n) for folder, numbers in folders.items() for n in numbers]
        self._size_bytes = sum(file.stat().st_size for file in files if file.is_file())
        with ThreadPoolExecutor(self._threads, "tierd-fsck") as pool:
            try:
                for folder, numbers in folders.items():
                    self._namespace(pool, folder, numbers)
            finally:
                self._stop = True
                pool.shutdown(cancel_futures=True)
        self._tell(self._size_bytes, self._size_bytes)
        return self._report

    def _namespace(self, pool: ThreadPoolExecutor, folder: Path, numbers: Sequence[int]) -> None:
        futures = [pool.submit(self._slab, folder, number) for number in numbers]
        pending: set[Future[_Seen | None]] = set(futures)
        while pending:
            _, pending = wait(pending, TELL_S)
            self._tell(min(self._looked_at, self._size_bytes), self._size_bytes)
        seen = [found for future in futures if (found := future.result()) is not None]
        for slab in seen:
            # As in the tier: the first slab decides the slot size of the namespace.
            if slab.slot_bytes != seen[0].slot_bytes:
                self._found(
                    OTHER_SLOTS,
                    _name(folder, slab.number),
                    repaired=self._mend(partial(remove_files, folder, slab.number)),
                )
        seen = [slab for slab in seen if slab.slot_bytes == seen[0].slot_bytes]
        self._report.blocks += sum(len(slab.records) for slab in seen)
        self._twice(folder, seen)

    def _twice(self, folder: Path, seen: Sequence[_Seen]) -> None:
        """Drop all but the last used copy of each block, as the tier does at start."""
        places = [(slab.number, record) for slab in seen for record in slab.records]
        if not places:
            return
        hashes = np.concatenate([slab.hashes for slab in seen])
        last_uses = np.concatenate([slab.last_uses for slab in seen])
        order = np.lexsort((last_uses, *hashes.T))
        same = (hashes[order[1:]] == hashes[order[:-1]]).all(axis=1)
        for at in order[:-1][same].tolist():
            number, record = places[at]
            self._report.blocks -= 1
            self._found(
                TWICE,
                f"{_name(folder, number)}, record {record}",
                repaired=self._mend(partial(self._clear, folder, number, record)),
            )

    def _clear(self, folder: Path, number: int, record: int) -> None:
        slab = Slab.load(folder, number, direct=False, read_only=False)
        if slab is not None:
            try:
                slab.clear(record)
            finally:
                slab.close()

    # --- in threads -----------------------------------------------------------------

    def _slab(self, folder: Path, number: int) -> _Seen | None:
        """Check a slab. Returns its sound blocks, or None if the slab is unusable."""
        where = _name(folder, number)
        slab: Slab | None = None
        try:
            slab = Slab.load(folder, number, direct=self._direct, read_only=not self._repair)
            if slab is None:
                mended = self._mend(partial(remove_files, folder, number))
                self._found(UNUSABLE, where, repaired=mended)
                return None
            return self._open_slab(slab)
        except OSError as error:
            self._found(UNREADABLE, f"{where}: {error.strerror or error}", repaired=False)
            return None
        finally:
            if slab is not None:
                slab.close()

    def _open_slab(self, slab: Slab) -> _Seen:
        survey = slab.survey()
        for kind, records in ((BAD_ENTRY, survey.unsound), (LOST, survey.beyond)):
            for record in records:
                self._damaged(slab, record, kind)
        wrong_sizes = slab.wrong_sizes()
        if not survey.uses_sound:
            where = _name(slab.folder, slab.number)
            self._found(BAD_USES, where, repaired=self._mend(slab.forget_uses))
        for path, (size_bytes, right_bytes) in wrong_sizes.items():
            self._found(
                WRONG_SIZE,
                f"{path.parent.name}/{path.name} has {size_bytes} bytes, not {right_bytes}",
                repaired=self._mend(partial(_resize, path, right_bytes)),
            )
        sound = self._records(slab, survey.entries)
        raw = b"".join(entry.header.key.block_hash for entry in sound)
        return _Seen(
            slab.number,
            slab.slot_bytes,
            [entry.record for entry in sound],
            np.array([entry.last_use for entry in sound], np.uint64),
            np.frombuffer(raw, np.uint64).reshape(len(sound), HASH_BYTES // 8),
        )

    def _records(self, slab: Slab, entries: Sequence[Entry]) -> list[Entry]:
        """Read the records that the index lists. Returns the entries whose record matches."""
        most = 1 if self._quick else max(1, CHUNK_BYTES // slab.record_bytes)
        buffer = memoryview(mmap.mmap(-1, PAGE_BYTES if self._quick else most * slab.record_bytes))
        sound: list[Entry] = []
        looked_at = 0
        for run in _runs(entries, most):
            if self._stop:
                break
            sound += self._run(slab, run, buffer)
            self._advance(len(run) * slab.record_bytes)
            looked_at += len(run) * slab.record_bytes
        self._advance(slab.records * slab.record_bytes - looked_at)
        return sound

    def _run(self, slab: Slab, run: Sequence[Entry], buffer: memoryview) -> list[Entry]:
        each = PAGE_BYTES if self._quick else slab.record_bytes
        try:
            got = slab.read_raw(run[0].record, buffer[: len(run) * each])
        except OSError as error:
            if len(run) > 1:
                # Read the records one by one to find out which ones cannot be read.
                return [entry for one in run for entry in self._run(slab, [one], buffer)]
            return [run[0]] if self._sound_again(slab, run[0], error, buffer[:each]) else []
        with self._lock:
            self._report.read_bytes += got
        sound = []
        suspect = []
        for place, entry in enumerate(run):
            raw = buffer[place * each : (place + 1) * each]
            if self._judge(raw, entry.header) is None:
                sound.append(entry)
            else:
                suspect.append((entry, checksum(raw)))
        for entry, seen in suspect:
            if self._sound_again(slab, entry, seen, buffer[:each]):
                sound.append(entry)
        return sound

    def _sound_again(
        self, slab: Slab, entry: Entry, first: bytes | OSError, buffer: memoryview
    ) -> bool:
        """Read a record again after a read that failed, or gave damaged bytes; `first` is that
        read's error, or the checksum of its bytes. Returns whether the second read is sound."""
        slab.forget_cached(entry.record)
        second: bytes | OSError
        kind: str | None = UNREADABLE
        try:
            slab.read_raw(entry.record, buffer)
            second, kind = checksum(buffer), self._judge(buffer, entry.header)
        except OSError as error:
            second = error
        if isinstance(first, OSError) and isinstance(second, OSError):
            self._damaged(slab, entry.record, UNREADABLE, f": {second.strerror or second}")
        elif kind is not None and first == second:
            self._damaged(slab, entry.record, kind)
        else:
            place = f"{_name(slab.folder, slab.number)}, record {entry.record}"
            self._found(UNSTEADY, place, repaired=False)
        return kind is None

    def _judge(self, raw: memoryview, header: BlockHeader) -> str | None:
        """Return how a record differs from `header`, its index entry; None if it does not."""
        if unpack_header(raw) != header:
            return BAD_HEADER
        if self._quick or checksum(raw[PAGE_BYTES : PAGE_BYTES + header.length]) == header.checksum:
            return None
        return BAD_PAYLOAD

    def _damaged(self, slab: Slab, record: int, kind: str, more: str = "") -> None:
        """Report a record whose block cannot be served. Repair frees the record."""
        mended = self._mend(partial(slab.clear, record))
        place = f"{_name(slab.folder, slab.number)}, record {record}{more}"
        self._found(kind, place, repaired=mended)

    def _mend(self, action: Callable[[], None]) -> bool:
        """Run a repair if repair is wanted. Returns whether it was done."""
        if not self._repair:
            return False
        try:
            action()
        except OSError:
            return False
        return True

    def _found(self, kind: str, place: str, *, repaired: bool) -> None:
        with self._lock:
            self._report.damage.setdefault(kind, Findings()).add(place, repaired=repaired)

    def _advance(self, size_bytes: int) -> None:
        with self._lock:
            self._looked_at += size_bytes


def _runs(entries: Sequence[Entry], most: int) -> Iterable[list[Entry]]:
    """Yield runs of neighbouring entries, in order, of at most `most` entries each."""
    run: list[Entry] = []
    for entry in entries:
        if run and (entry.record != run[-1].record + 1 or len(run) == most):
            yield run
            run = []
        run.append(entry)
    if run:
        yield run


def _resize(path: Path, size_bytes: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        os.ftruncate(fd, size_bytes)
        # Allocate at once: a tier's files own their space, so no later write fails for lack of it.
        os.posix_fallocate(fd, 0, size_bytes)
    finally:
        os.close(fd)


def _name(folder: Path, number: int) -> str:
    return f"{folder.name}/{number:08d}.slab"
