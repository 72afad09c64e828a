"""The directory of a file tier: its owner, its format version, and its contents.

    LOCK                    held by flock while a process owns the directory; holds its pid
    FORMAT                  name and version of this layout
    marks/                  empty files; each name is one of the tier's marks
    <namespace hex>/        one folder per namespace; a namespace is a scope
        00000001.slab       records; see slab.py
        00000001.index

Other entries are left alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tierd.errors import BackendError, ConfigError
from tierd.locks import holder_of
from tierd.types import PAGE_BYTES, SCOPE_BYTES

_UNBOUNDED_BYTES = 1 << 62
"""Free space to assume where a file system, such as ramfs, reports no size."""

LOCK_S = 1.0
"""How long to wait for a directory that another process owns. The worker of a killed daemon
outlives the daemon by the time that unmapping the arena takes."""

_LOCK_TRY_S = 0.01
_FORMAT = "tierd file store 2\n"
_FOLDER = re.compile(rf"[0-9a-f]{{{2 * SCOPE_BYTES}}}", re.ASCII)
_MARKS = "marks"
_SLAB_FILE = re.compile(r"(\d{8,})\.(?:slab|index)", re.ASCII)


class InUseError(ConfigError):
    """Another process owns the directory."""

    def __init__(self, problem: str, holder: str) -> None:
        super().__init__(problem)
        self.holder = holder or "unknown"
        """Process id of the owner, or "unknown"."""


class StoreDirectory:
    """An owned directory. All calls block: make them in a thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read_only = False
        """Whether the file system refuses writes. Set by open()."""
        self.formatted = False
        """Whether the directory has a FORMAT file. Set by open()."""
        self.foreign: list[str] = []
        """Entries that are not tierd's. Set by folders()."""
        self._lock_fd = -1

    def open(self, *, make: bool = True) -> None:
        """Take ownership of the directory, and make it if missing.

        Raises ConfigError if another process owns it or another version wrote it, and OSError
        unchanged. After a raise nothing stays held. With `make=False` the directory must exist,
        and a missing FORMAT file is not written.
        """
        assert self._lock_fd < 0
        if make:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_fd = self._open_lock()
        try:
            self._take_lock()
            self._check_format(make)
            if not self.read_only:
                os.ftruncate(self._lock_fd, 0)
                os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            self.close()
            raise

    def refusals(self, is_own: Callable[[int], bool], *, direct: bool) -> Iterator[str]:
        """Yield why open() would raise ConfigError, or why O_DIRECT fails where `direct` asks for
        it. Changes nothing."""
        there = next(p for p in (self.path, *self.path.absolute().parents) if os.path.lexists(p))
        needed = os.R_OK | os.W_OK | os.X_OK
        try:
            mode = there.stat().st_mode
        except OSError:
            return  # The disk does not answer now; open() tries again.
        if not stat.S_ISDIR(mode):
            yield f"{self.path} cannot be used: {there} is not a directory"
            return
        if not os.access(there, needed) and not os.statvfs(there).f_flag & os.ST_RDONLY:
            yield f"{self.path} cannot be used: this user may not read and write {there}"
            return
        holder = holder_of(self.path / "LOCK")
        if holder and not is_own(holder):
            yield _in_use(self.path, str(holder))
        with contextlib.suppress(OSError):
            found = (self.path / "FORMAT").read_bytes()
            if found != _FORMAT.encode():
                yield _other_format(self.path / "FORMAT", found)
        if direct and not _takes_direct(there):
            yield no_direct(self.path)

    def close(self) -> None:
        """Give up ownership; idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def check_ours(self) -> None:
        """Raise BackendError if the path is gone, leads to another directory, or has lost its lock
        file. Blocks written then would not be found again, or would lie in another directory."""
        try:
            found = os.stat(self.path / "LOCK")
        except (FileNotFoundError, NotADirectoryError):
            what = "was moved or removed, or its disk is not mounted"
        except OSError:
            return  # The next operation there reports the error.
        else:
            if os.path.samestat(found, os.fstat(self._lock_fd)):
                return
            what = "is another directory than the one that tierd opened"
        raise BackendError(
            f"{self.path} {what}: bring it back, or restart tierd to start empty there"
        )

    def folders(self) -> dict[Path, list[int]]:
        """Return the slab numbers by namespace folder, of complete and incomplete slabs."""
        found: dict[Path, list[int]] = {}
        foreign = self.foreign = []
        with os.scandir(self.path) as entries:
            for entry in entries:
                if _FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    found[Path(entry.path)] = []
                elif entry.name not in ("LOCK", "FORMAT", _MARKS):
                    foreign.append(entry.name)
        for folder, numbers in found.items():
            names = os.listdir(folder)
            matches = [_SLAB_FILE.fullmatch(name) for name in names]
            numbers.extend(sorted({int(match[1]) for match in matches if match}))
            foreign.extend(
                f"{folder.name}/{name}"
                for name, match in zip(names, matches, strict=True)
                if not match
            )
        return found

    def folder(self, namespace: bytes) -> Path:
        """Return the folder of a namespace's slabs; it may not exist yet."""
        return self.path / namespace.hex()

    def marks(self) -> list[str]:
        """Return the tier's marks. Raises OSError."""
        try:
            return os.listdir(self.path / _MARKS)
        except FileNotFoundError:
            return []

    def add_mark(self, mark: str) -> None:
        """Keep a mark; it is on disk when this returns. Raises OSError."""
        folder = self.path / _MARKS
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        # Sync every time: the process that made the folder may have died before its sync.
        _sync(self.path)
        fd = os.open(folder / mark, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        _sync(folder)

    def drop_marks(self, marks: Iterable[str]) -> None:
        """Delete marks. Raises OSError."""
        for mark in marks:
            (self.path / _MARKS / mark).unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """Bytes that an unprivileged writer can still allocate on the file system."""
        found = os.statvfs(self.path)
        if not found.f_blocks:
            return _UNBOUNDED_BYTES
        return found.f_bavail * found.f_frsize

    def total_bytes(self) -> int:
        """Size of the file system in bytes."""
        found = os.statvfs(self.path)
        return found.f_blocks * found.f_frsize

    def takes_direct(self) -> bool:
        """Whether O_DIRECT works here. Tried on the FORMAT file: open or read may refuse it."""
        try:
            fd = os.open(self.path / "FORMAT", os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        try:
            with mmap.mmap(-1, PAGE_BYTES) as page:
                os.preadv(fd, [page], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        finally:
            os.close(fd)
        return True

    def _open_lock(self) -> int:
        try:
            return os.open(self.path / "LOCK", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
        self.read_only = True
        return os.open(self.path / "LOCK", os.O_RDONLY)

    def _take_lock(self) -> None:
        end_s = time.monotonic() + LOCK_S
        while not self._try_lock():
            if time.monotonic() >= end_s:
                holder = os.pread(self._lock_fd, 32, 0).decode("ascii", "replace").strip()
                raise InUseError(_in_use(self.path, holder or "unknown"), holder)
            time.sleep(_LOCK_TRY_S)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _check_format(self, make: bool) -> None:
        path = self.path / "FORMAT"
        temporary = self.path / "FORMAT.tmp"
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            if not make:
                return
            # A lost FORMAT file can be written again: each index file has the version as well.
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.write(fd, _FORMAT.encode())
                os.fsync(fd)
            finally:
                os.close(fd)
            temporary.rename(path)
            _sync(self.path)
            self.formatted = True
            return
        if found != _FORMAT.encode():
            raise ConfigError(_other_format(path, found))
        self.formatted = True
        if make and not self.read_only:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()


def no_direct(path: Path) -> str:
    """Error text for `direct = "on"` where O_DIRECT does not work."""
    return f"{path} does not take O_DIRECT; set direct to 'auto'"


def _in_use(path: Path, holder: str) -> str:
    return f"{path} is in use by process {holder}; each tierd needs its own directory"


def _other_format(path: Path, found: bytes) -> str:
    return (
        f"{path} says {found[:64]!r}, this tierd writes {_FORMAT!r}; "
        "name another directory or remove this one"
    )


def _takes_direct(folder: Path) -> bool:
    """Whether O_DIRECT works in a directory. Tried on an unnamed file."""
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
    except OSError as error:
        return error.errno != errno.EINVAL
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.pwritev(fd, [page], 0)
            os.preadv(fd, [page], 0)
    except OSError as error:
        return error.errno != errno.EINVAL
    finally:
        os.close(fd)
    return True


def _sync(folder: Path) -> None:
    """Flush a directory's entries to disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
