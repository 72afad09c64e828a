"""What an incarnation of the daemon leaves about itself, beside the arena, for the next one.

Engines outlive the daemon. Until a lease ends its holder may be reading slots, and whoever had
reserved slots may still be writing to them, however long it had been stopped. So an incarnation
writes down until when its leases last, and every process that may write holds its guard. What the
next one reads is sealed: a log that is torn or damaged may have named any slot.
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
"""The log of leases: those of 4 million blocks within the time that a lease lasts."""

LEASE_NS_MAX: Final = LEASE_TTL_MS_MAX * 1_000_000
"""No lease lasts longer, so that is how long anything may be leased if nobody can tell."""

_ENTRY = struct.Struct(f"<QI4x{DIGEST_BYTES}s")
_ENTRY_BYTES: Final = _ENTRY.size + _SEAL.size
_TO_START: Final = 0xFFFFFFFF
_ALIGN: Final = 64
assert _ENTRY_BYTES <= _ALIGN, "else an entry might not fit in front of the log's end"

_FLOCK = struct.Struct("hhqqi4x")


class Leased(NamedTuple):
    """Leases that may still last: of which slots by namespace, and whether these are all."""

    slots: dict[bytes, set[int]]
    complete: bool


class _State(NamedTuple):
    """Which part of the log counts, when the last lease ends, and the last that was lost."""

    start: int = 0
    end: int = 0
    until_ns: int = 0
    lost_until_ns: int = 0


class _Entry(NamedTuple):
    """A lease as it was written: its slots packed, for there may be millions."""

    expires_ns: int
    digest: bytes
    names: bytes


class LifePage:
    """Which blocks are leased until when, and which storage tiers ledgers speak of.

    A page, and a log of leases that goes round. An entry counts once `end` is behind it, and until
    `start` is: whoever reads it later finds whole ones only.
    """

    def __init__(self, fd: int, tiers: bytes) -> None:
        """Owns `fd`, which is empty; `tiers` is a digest of what tiers there are, in order.

        Raises OSError, and `fd` is the caller's then.
        """
        os.ftruncate(fd, _PAGE_BYTES + LOG_BYTES)
        self.fd = fd
        self._mapping = mmap.mmap(fd, _PAGE_BYTES + LOG_BYTES)
        self._state = _State()
        self._store(0, _HEAD.pack(_MAGIC, _VERSION, tiers))
        self._publish(self._state)

    @classmethod
    def create(cls, tiers: bytes) -> LifePage:
        """A new one. Raises OSError."""
        fd = os.memfd_create("tierd-life", os.MFD_CLOEXEC)
        try:
            return cls(fd, tiers)
        except OSError:
            os.close(fd)
            raise

    def lease(self, digest: bytes, slots: Sequence[int], expires_ns: int) -> None:
        """Write down that these slots of a namespace are leased until then."""
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
        """There is none now."""
        if self._state.until_ns:
            self._publish(_State(self._state.end, self._state.end))

    def close(self) -> None:
        """Close the descriptor; the mapping goes with this object."""
        os.close(self.fd)

    def _make_room(self, now: _State, size_bytes: int) -> _State:
        """Have the oldest entries go that the next `size_bytes` would be written over."""
        if now.end + size_bytes - now.start <= LOG_BYTES:
            return now
        while now.end + size_bytes - now.start > LOG_BYTES:
            place = now.start % LOG_BYTES
            expires_ns, count, _ = _ENTRY.unpack_from(self._mapping, _PAGE_BYTES + place)
            size = LOG_BYTES - place if count == _TO_START else _size_of(count)
            lost_ns = max(now.lost_until_ns, expires_ns)
            now = now._replace(start=now.start + size, lost_until_ns=lost_ns)
        # Before a byte of them changes.
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
        # In one go: a process that is killed in between leaves something that is no state at all.
        sealed = body + _SEAL.pack(xxhash.xxh3_64_intdigest(body))
        self._mapping[at : at + len(sealed)] = sealed


class PastPage:
    """The page of a former incarnation, as it was when this one read it.

    Where it cannot be right, anything may have been leased, until the longest lease has ended that
    could have been granted by now.
    """

    def __init__(self, fd: int, now_ns: int) -> None:
        """`fd` stays the caller's."""
        self.tiers = b""
        """What `LifePage.create` was given; empty if that cannot be read."""
        self.until_ns = now_ns + LEASE_NS_MAX
        """When the last lease ends, CLOCK_MONOTONIC; 0 if there is none."""
        self.readable = False
        """Whether it is what has been written."""
        self._lost_until_ns = self.until_ns
        self._entries: list[_Entry] = []
        size_bytes = _PAGE_BYTES + LOG_BYTES
        raw = os.pread(fd, size_bytes + 1, 0)
        if len(raw) == size_bytes:
            self._read(raw)

    def leased(self, now_ns: int) -> Leased:
        """The leases that have not ended by `now_ns`, given back or not."""
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
        # A lease that lasts longer than any may is of another clock.
        if entries is not None and state.until_ns <= self.until_ns:
            self.readable, self._entries = True, entries
            self.until_ns, self._lost_until_ns = state.until_ns, state.lost_until_ns


def _entries(raw: bytes, state: _State) -> list[_Entry] | None:
    """Each entry that counts; None if one is damaged."""
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
    """What `_store` has stored; None if it is not that."""
    body = raw[at : at + form.size]
    sealed = _SEAL.unpack_from(raw, at + form.size)[0]
    return body if sealed == xxhash.xxh3_64_intdigest(body) else None


def _seal_of(head: bytes, names: bytes, at: int) -> int:
    # With its place, so that an entry of a former round is none of this one.
    return xxhash.xxh3_64_intdigest(head + names, at)


def _size_of(count: int) -> int:
    """Bytes of an entry of so many slots."""
    return -(-(_ENTRY_BYTES + 4 * count) // _ALIGN) * _ALIGN


class ArenaGuard:
    """An empty memfd that is locked as long as a process of a life may write to the arena.

    A hold is a descriptor with a shared lock of its own. Wherever copies of it are, in a child,
    in another process, or on the way to one: the lock is there until the last of them is closed.
    Byte 0 stands for writing. Whoever copies out of slots for others, who may go on when the lease
    has ended, locks byte 1 as well.
    """

    def __init__(self, fd: int) -> None:
        """Owns `fd`."""
        self.fd = fd

    @classmethod
    def create(cls) -> ArenaGuard:
        """A new one, held by nobody. Raises OSError."""
        return cls(os.memfd_create("tierd-guard", os.MFD_CLOEXEC))

    def hold(self, *, copies: bool = False) -> int:
        """A new hold, the caller's to close. Raises OSError."""
        # Locks belong to an open file, so each hold is one; to read it is all that one needs.
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
        """Whether there is a hold anywhere."""
        return self._is_locked(0)

    @property
    def copying(self) -> bool:
        """Whether there is a hold of somebody who copies."""
        return self._is_locked(1)

    def _is_locked(self, byte: int) -> bool:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        found = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, asked)
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Close the descriptor; holds stay."""
        os.close(self.fd)
