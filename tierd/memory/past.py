"""Leases and guard that an incarnation of the daemon leaves, besides the arena, for the next one.

Engines outlive the daemon. The holder of a lease may read slots until the lease ends. A client
that reserved slots may write to them later, however long it was stopped. So an incarnation logs
its leases and their ends, and each process that may write holds the incarnation's guard. The log
is sealed: a torn or damaged log counts as a lease of every slot.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import xxhash

from tierd.config import LEASE_TTL_MS_MAX
from tierd.types import DIGEST_BYTES

_MAGIC: Final = b"TIERDLIF"
_VERSION: Final = 3
_HEAD = struct.Struct(f"<8sI4x{DIGEST_BYTES}s")
_SEAL = struct.Struct("<Q")
_PAGE_BYTES: Final = 4096

_STATE = struct.Struct("<QQQQ")
_STATE_AT: Final = 64

LOG_BYTES: Final = 16 << 20
"""Size of the log: room for the leases of 4 million blocks within the duration of a lease."""

LEASE_NS_MAX: Final = LEASE_TTL_MS_MAX * 1_000_000
"""Longest duration of a lease; if the log is unreadable, all slots count as leased so long."""

_ENTRY = struct.Struct(f"<QI4x{DIGEST_BYTES}s")
_ENTRY_BYTES: Final = _ENTRY.size + _SEAL.size
_TO_START: Final = 0xFFFFFFFF
_ALIGN: Final = 64
assert _ENTRY_BYTES <= _ALIGN, "else an entry might not fit in front of the log's end"

_FLOCK = struct.Struct("hhqqi4x")


class Leased(NamedTuple):
    """Slots by namespace whose leases may still last; `complete` if no other slot is leased."""

    slots: dict[bytes, set[int]]
    complete: bool


class _State(NamedTuple):
    """The valid part of the log, the end of the last lease, and the end of the last lost lease."""

    start: int = 0
    end: int = 0
    until_ns: int = 0
    lost_until_ns: int = 0


class _Entry(NamedTuple):
    """A lease as logged; its slots stay packed, because there may be millions."""

    expires_ns: int
    digest: bytes
    names: bytes


class IncarnationPage:
    """The log of this incarnation's leases, and the storage tiers that its ledgers refer to.

    A page of state and a ring log of leases. An entry is valid between `start` and `end`: `end`
    moves behind it after it was written, `start` before it is overwritten. So the next incarnation
    finds only whole entries.
    """

    def __init__(self, fd: int, tiers: bytes) -> None:
        """Owns `fd`, an empty memfd; `tiers` is a digest of the storage tiers in order.

        Raises OSError; then the caller still owns `fd`.
        """
        os.ftruncate(fd, _PAGE_BYTES + LOG_BYTES)
        self.fd = fd
        self._mapping = mmap.mmap(fd, _PAGE_BYTES + LOG_BYTES)
        self._state = _State()
        self._store(0, _HEAD.pack(_MAGIC, _VERSION, tiers))
        self._publish(self._state)

    @classmethod
    def create(cls, tiers: bytes) -> IncarnationPage:
        """Create a page in a new memfd. Raises OSError."""
        fd = os.memfd_create("tierd-life", os.MFD_CLOEXEC)
        try:
            return cls(fd, tiers)
        except OSError:
            os.close(fd)
            raise

    def lease(self, digest: bytes, slots: Sequence[int], expires_ns: int) -> None:
        """Log that these slots of a namespace are leased until `expires_ns`."""
        now = self._state
        now = now._replace(until_ns=max(now.until_ns, expires_ns))
        size = _size_of(len(slots))
        if size > LOG_BYTES // 2:
            self._publish(now._replace(lost_until_ns=max(now.lost_until_ns, expires_ns)))
            return
        left = LOG_BYTES - now.end % LOG_BYTES
        if size > left:
            now = self._make_room(now, left)
            self._write(now.end, _ENTRY.pack(0, _TO_START, bytes(DIGEST_BYTES)), b"")
            now = now._replace(end=now.end + left)
        now = self._make_room(now, size)
        names = struct.pack(f"<{len(slots)}I", *slots)
        self._write(now.end, _ENTRY.pack(expires_ns, len(slots), digest), names)
        self._publish(now._replace(end=now.end + size))

    def no_leases(self) -> None:
        """Clear the log, because no lease exists."""
        if self._state.until_ns:
            self._publish(_State(self._state.end, self._state.end))

    def close(self) -> None:
        """Close the descriptor; the mapping ends with this object."""
        os.close(self.fd)

    def _make_room(self, now: _State, size_bytes: int) -> _State:
        """Drop the oldest entries, which the next `size_bytes` would overwrite, as lost."""
        if now.end + size_bytes - now.start <= LOG_BYTES:
            return now
        while now.end + size_bytes - now.start > LOG_BYTES:
            place = now.start % LOG_BYTES
            expires_ns, count, _ = _ENTRY.unpack_from(self._mapping, _PAGE_BYTES + place)
            size = LOG_BYTES - place if count == _TO_START else _size_of(count)
            lost_ns = max(now.lost_until_ns, expires_ns)
            now = now._replace(start=now.start + size, lost_until_ns=lost_ns)
        # Published before a byte of the dropped entries changes.
        self._publish(now)
        return now

    def _write(self, at: int, head: bytes, names: bytes) -> None:
        sealed = head + _SEAL.pack(_seal_of(head, names, at)) + names
        place = _PAGE_BYTES + at % LOG_BYTES
        self._mapping[place : place + len(sealed)] = sealed

    def _publish(self, state: _State) -> None:
        self._state = state
        self._store(_STATE_AT, _STATE.pack(*state))

    def _store(self, at: int, body: bytes) -> None:
        # Written with its seal: if the process is killed in between, the seal does not match.
        sealed = body + _SEAL.pack(xxhash.xxh3_64_intdigest(body))
        self._mapping[at : at + len(sealed)] = sealed


class PastPage:
    """The page of an earlier incarnation, as read once at construction.

    If the page is not valid, every slot counts as leased until a longest lease that was granted
    now would end.
    """

    def __init__(self, fd: int, now_ns: int) -> None:
        """The caller still owns `fd`."""
        self.tiers = b""
        """The digest given to `IncarnationPage.create`; empty if it cannot be read."""
        self.until_ns = now_ns + LEASE_NS_MAX
        """CLOCK_MONOTONIC time at which the last lease ends; 0 if there is none."""
        self.readable = False
        """Whether the page and its log are valid."""
        self._lost_until_ns = self.until_ns
        self._entries: list[_Entry] = []
        size_bytes = _PAGE_BYTES + LOG_BYTES
        raw = os.pread(fd, size_bytes + 1, 0)
        if len(raw) == size_bytes:
            self._read(raw)

    def leased(self, now_ns: int) -> Leased:
        """Return the leases that have not expired by `now_ns`, released or not."""
        found: dict[bytes, set[int]] = {}
        for expires_ns, digest, names in self._entries:
            if expires_ns > now_ns:
                slots = struct.unpack(f"<{len(names) // 4}I", names)
                found.setdefault(digest, set()).update(slots)
        return Leased(found, self._lost_until_ns <= now_ns)

    def _read(self, raw: bytes) -> None:
        head, body = (_opened(raw, at, form) for at, form in ((0, _HEAD), (_STATE_AT, _STATE)))
        if head is None or body is None:
            return
        magic, version, tiers = _HEAD.unpack(head)
        if (magic, version) != (_MAGIC, _VERSION):
            return
        self.tiers = tiers
        state = _State(*_STATE.unpack(body))
        entries = _entries(raw, state)
        # A lease longer than LEASE_NS_MAX comes from another clock.
        if entries is not None and state.until_ns <= self.until_ns:
            self.readable, self._entries = True, entries
            self.until_ns, self._lost_until_ns = state.until_ns, state.lost_until_ns


def _entries(raw: bytes, state: _State) -> list[_Entry] | None:
    """Return the valid entries; None if one is damaged."""
    found = []
    at, end = state.start, state.end
    while at < end:
        left = LOG_BYTES - at % LOG_BYTES
        place = _PAGE_BYTES + at % LOG_BYTES
        if left < _ENTRY_BYTES:
            return None
        head = raw[place : place + _ENTRY.size]
        expires_ns, count, digest = _ENTRY.unpack(head)
        size = left if count == _TO_START else _size_of(count)
        first = place + _ENTRY_BYTES
        names = b"" if count == _TO_START else raw[first : first + 4 * count]
        sealed = _SEAL.unpack_from(raw, place + _ENTRY.size)[0]
        if size > left or sealed != _seal_of(head, names, at) or expires_ns > state.until_ns:
            return None
        if count != _TO_START:
            found.append(_Entry(expires_ns, digest, names))
        at += size
    return found if at == end else None


def _opened(raw: bytes, at: int, form: struct.Struct) -> bytes | None:
    """Return a body written by `_store`; None if its seal does not match."""
    body = raw[at : at + form.size]
    sealed = _SEAL.unpack_from(raw, at + form.size)[0]
    return body if sealed == xxhash.xxh3_64_intdigest(body) else None


def _seal_of(head: bytes, names: bytes, at: int) -> int:
    # The position is part of the seal, so that an entry of an earlier round does not match.
    return xxhash.xxh3_64_intdigest(head + names, at)


def _size_of(count: int) -> int:
    """Return the bytes of an entry of `count` slots."""
    return -(-(_ENTRY_BYTES + 4 * count) // _ALIGN) * _ALIGN


class ArenaGuard:
    """An empty memfd that is locked while a process of an incarnation may write to the arena.

    A hold is a descriptor with a separate shared lock. The lock lasts until the last duplicate of
    the descriptor is closed, in a child, in another process, or in flight on a socket. Byte 0
    stands for writing. A copy process, which may read slots after their lease has ended, locks
    byte 1 too.
    """

    def __init__(self, fd: int) -> None:
        """Own `fd`."""
        self.fd = fd

    @classmethod
    def create(cls) -> ArenaGuard:
        """Create a guard without holds. Raises OSError."""
        return cls(os.memfd_create("tierd-guard", os.MFD_CLOEXEC))

    def hold(self, *, copies: bool = False) -> int:
        """Return a new hold, which the caller must close. Raises OSError."""
        # OFD locks belong to an open file, so each hold opens the memfd again, for reading only.
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            lock = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 1 + copies, 0)
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
        except OSError:
            os.close(fd)
            raise
        return fd

    @property
    def held(self) -> bool:
        """Whether any process has a hold."""
        return self._is_locked(0)

    @property
    def copying(self) -> bool:
        """Whether any copy process has a hold."""
        return self._is_locked(1)

    def _is_locked(self, byte: int) -> bool:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        found = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, asked)
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Close the descriptor; holds remain."""
        os.close(self.fd)
