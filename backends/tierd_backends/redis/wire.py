"""One logged-in connection to a Redis server: sends commands, receives values into memory.

A value is received straight into its slot, without a buffer in the client: one scattered read
takes the reply's first bytes, the block header and the payload. Only the expected reply is
received that way. hiredis parses nil and errors, and a value of another length ends the
connection. A connection belongs to one thread at a time. After any exception it must not be used
again: the next read might return the rest of a reply to another caller.
"""

from __future__ import annotations

import enum
import math
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Union

import hiredis
import xxhash

from tierd.backend import HEADER_BYTES, checksum

CHUNK_BYTES = 512 << 10
"""Bytes hashed at a time while a payload arrives: they are still in the core's cache, which saves
a tenth of the CPU of a 2 MiB GET, and the calls stay few."""

UNIX_CHUNK_BYTES = 2 << 20
"""Like CHUNK_BYTES, for a unix socket. It buffers 200 KiB, so the server soon waits for the hashing
client. In one piece, a GET of 2 MiB with 4 in flight is some 4 % faster; over TCP 10 % slower."""

TLS_CHUNK_BYTES = 256 << 10
"""Bytes per TLS send: the timeout covers the whole call, and a slow network must meet it."""

READ_BYTES = 64 << 10
"""Size of the buffer for all replies but wanted values."""

REPLIES_BYTES_MAX = 16 << 20
"""Most bytes of replies to one exchange: far more than a page of keys. No Redis sends more."""

ERROR_CHARS_MAX = 500
"""Longest text kept of an error reply: it ends in logs, and a peer may send megabytes."""

RUN_BLOCKS_MAX = 64
"""Blocks per send: each has three parts, and the kernel takes 1,024."""

_CLOSED = "the server closed the connection"
_CRLF = b"\r\n"
_NOT_YET = object()

WRONG_SERVER = frozenset({"CLUSTERDOWN", "LOADING", "MASTERDOWN", "NOREPLICAS", "READONLY"})
"""Error codes of a server that is not the one to ask, or not now."""

DENIALS = frozenset({"NOAUTH", "NOPERM", "WRONGPASS"})
"""Error codes for a user who lacks the right, or whose login is no longer valid."""

SLOT_WITHOUT_NODE = "Hash slot not served"
"""Text in a CLUSTERDOWN that is about one slot: the node is well."""

MASTER = "master"

Reply = Union[bytes, int, None, list["Reply"], "ErrorReply"]
"""A server's reply (RESP2); an error is a value, since a pipeline may hold several."""


class ErrorReply(Exception):  # noqa: N818  # a reply, not a failure of ours
    """An error reply, such as "OOM command not allowed"."""

    def __init__(self, text: str) -> None:
        # A server repeats the words of an unknown command; with AUTH, the password.
        told = text.partition(", with args beginning with")[0][:ERROR_CHARS_MAX]
        super().__init__(" ".join(told.split()))

    @property
    def code(self) -> str:
        """First word of the reply."""
        return str(self).partition(" ")[0]


class WireError(Exception):
    """The server violates the protocol."""


class _TooMuchError(WireError):
    """Replies are larger than anything that was requested."""


class Value(NamedTuple):
    """A received value: its first HEADER_BYTES and the xxh3-128 of the rest."""

    raw_header: bytes
    digest: bytes


class Odd(enum.Enum):
    """Other outcomes of a GET."""

    FOREIGN = "the value does not have the length of the wanted block"
    UNREAD = "the reply was not reached: the link had to be given up before"


Answer = Value | ErrorReply | Odd | None
"""Outcome of a GET; None: there is no such key."""


class Wanted(NamedTuple):
    """A block to GET: the payload goes to `view[:length]`."""

    key: bytes
    view: memoryview
    length: int


class Given(NamedTuple):
    """A block to SET."""

    key: bytes
    header: bytes
    payload: memoryview


class PlainStream:
    """A TCP or unix socket. Each call times out after `silence_s` without a byte."""

    def __init__(self, sock: socket.socket, silence_s: float) -> None:
        self.sock = sock
        self.chunk_bytes = UNIX_CHUNK_BYTES if sock.family == socket.AF_UNIX else CHUNK_BYTES
        # Use the kernel's timeouts: Python's own would add a poll() to every call.
        sock.settimeout(None)
        span = struct.pack("ll", int(silence_s), int(silence_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, span)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, span)

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send all of `parts`."""
        size = sum(map(len, parts))
        sent = 0
        while sent < size:
            try:
                sent += self.sock.sendmsg(_after(parts, sent) if sent else parts)
            except BlockingIOError as error:
                raise TimeoutError from error

    def some(self, buffers: Sequence[memoryview]) -> int:
        """Receive available bytes into `buffers`, at least one byte. Returns the count."""
        return self._receive(buffers, 0)

    def fill(self, buffers: Sequence[memoryview], have: int) -> None:
        """Receive until `buffers` are full; their first `have` bytes are already there."""
        size = sum(map(len, buffers))
        while have < size:
            have += self._receive(_after(buffers, have), socket.MSG_WAITALL)

    def _receive(self, buffers: Sequence[memoryview], flags: int) -> int:
        try:
            count = self.sock.recvmsg_into(buffers, 0, flags)[0]
        except BlockingIOError as error:
            raise TimeoutError from error
        if not count:
            raise ConnectionResetError(_CLOSED)
        return count


class TlsStream:
    """Like PlainStream, over TLS, which has neither scattered reads nor the kernel's timeouts."""

    def __init__(self, sock: ssl.SSLSocket, silence_s: float) -> None:
        self.sock = sock
        self.chunk_bytes = CHUNK_BYTES
        sock.settimeout(silence_s)

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        try:
            for part in parts:
                for at in range(0, len(part), TLS_CHUNK_BYTES):
                    self.sock.sendall(part[at : at + TLS_CHUNK_BYTES])
        except ssl.SSLEOFError as error:
            raise ConnectionResetError(_CLOSED) from error

    def some(self, buffers: Sequence[memoryview]) -> int:
        buffer = next(each for each in buffers if len(each))
        try:
            count = self.sock.recv_into(buffer)
        except ssl.SSLEOFError as error:
            raise ConnectionResetError(_CLOSED) from error
        if not count:
            raise ConnectionResetError(_CLOSED)
        return count

    def fill(self, buffers: Sequence[memoryview], have: int) -> None:
        size = sum(map(len, buffers))
        while have < size:
            have += self.some(_after(buffers, have))


class Link:
    """A connection for commands. Raises OSError (TimeoutError after silence) and WireError; the
    link is then unusable."""

    def __init__(self, stream: PlainStream | TlsStream, close: Callable[[], None]) -> None:
        self.sock: socket.socket = stream.sock
        self.close = close
        self.used = False
        """Whether it was used before: its server may then have closed it while it was idle."""
        self.broken = False
        """Whether a reply was left unread."""
        self.era = 0
        """Links of an earlier era than their node's may lead to another server."""
        self.role = ""
        """Role that the server reports, MASTER or a replica; empty if it reports none."""
        self.turned_away: ErrorReply | None = None
        """A reply of WRONG_SERVER or DENIALS: asking again over this link is useless."""
        self._stream = stream
        self._reader = hiredis.Reader(
            protocolError=WireError, replyError=ErrorReply, errors="replace", notEnoughData=_NOT_YET
        )
        self._buffer = bytearray(READ_BYTES)
        self._expect(0)
        self._tail = memoryview(bytearray(len(_CRLF)))

    def exchange(self, commands: bytes, count: int, until: float = math.inf) -> list[Reply]:
        """Send `count` commands at once and receive their replies.

        Raises TimeoutError if replies are still missing at `until`, by time.monotonic.
        """
        self._stream.send([commands])
        return self._replies(count, until=until)

    def ask_role(self, until: float) -> None:
        """Learn the server's role by HELLO, which needs no right. Raises as `exchange`."""
        [reply] = self.exchange(command(b"HELLO", b"2"), 1, until)
        if isinstance(reply, list) and b"role" in reply[:-1]:
            role = reply[reply.index(b"role") + 1]
            self.role = role.decode("ascii", "replace") if isinstance(role, bytes) else ""

    def at_master(self, sent: bytes) -> Reply:
        """Return the reply to a command that only a master can answer, or else an error reply."""
        if self.role in ("", MASTER):
            return self.exchange(sent, 1)[0]
        # A replica may take writes, but its master never sees them.
        self.turned_away = ErrorReply(f"READONLY it is a {self.role}")
        return self.turned_away

    def members_at_master(self, key: bytes) -> Reply:
        """Return the members of a set, or an error reply.

        A write that changes nothing goes first, so a server that takes no writes gives an error
        reply: the data of a replica, or of a master that is cut off, may be old.
        """
        members = command(b"SMEMBERS", key)
        begun = self.at_master(command(b"MULTI"))
        if isinstance(begun, ErrorReply):
            return begun
        write = command(b"SREM", key, b"")
        *queued, done = self.exchange(write + members + command(b"EXEC"), 3)
        errors = [reply for reply in (*queued, done) if isinstance(reply, ErrorReply)]
        if errors and errors[0].code == "MISCONF" and self.role == MASTER:
            # It takes no writes because it cannot save its data; it is still the master.
            return self.exchange(members, 1)[0]
        if errors and errors[0].code == "OOM":
            # A full server takes no transactions, but it takes writes that need no memory.
            written, told = self.exchange(write + members, 2)
            return written if isinstance(written, ErrorReply) else told
        if errors:
            return errors[0]
        return done[-1] if isinstance(done, list) and done else None

    def set_many(self, blocks: Sequence[Given], ttl_ms: int) -> list[Reply]:
        """SET each value (header and payload) if its key does not exist: b"OK", or None if it does.

        At most RUN_BLOCKS_MAX blocks.
        """
        options = (b"NX", b"PX", b"%d" % ttl_ms) if ttl_ms else (b"NX",)
        start = b"*%d\r\n$3\r\nSET\r\n" % (3 + len(options))
        after = _CRLF + b"".join(b"$%d\r\n%b\r\n" % (len(option), option) for option in options)
        parts: list[bytes | memoryview] = []
        for key, header, payload in blocks:
            size = len(header) + len(payload)
            parts.append(b"%b$%d\r\n%b\r\n$%d\r\n%b" % (start, len(key), key, size, header))
            parts.append(payload)
            parts.append(after)
        self._stream.send(parts)
        return self._replies(len(blocks))

    def get_many(self, blocks: Sequence[Wanted]) -> list[Answer]:
        """GET values of HEADER_BYTES + `length` bytes each, with the payloads into their views.

        May also write to the `view[:length]` of a block for which it returns no Value. Sets
        `broken` instead of reading a value of another length, which may be of any size.
        """
        self._stream.send(
            [b"".join([b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(b.key), b.key) for b in blocks])]
        )
        answers: list[Answer] = []
        for block in blocks:
            came = self._value(block.view, block.length)
            if isinstance(came, Value):
                answers.append(came)
            elif came[:1] == b"$" and came[:2] != b"$-":
                self.broken = True
                answers.append(Odd.FOREIGN)
                break
            else:
                # Bytes behind this reply have been received already: parse the rest as well.
                answers += self._parsed(came, blocks[len(answers) :])
                break
        answers += [Odd.UNREAD] * (len(blocks) - len(answers))
        return answers

    def get_watched(self, block: Wanted) -> Answer:
        """GET one value like `get_many`, with WATCH on its key, so that `unlink_watched` drops
        exactly that value. The link must not be used for other calls afterwards."""
        self.broken = True
        key, size_bytes = block.key, HEADER_BYTES + block.length
        watched, there = self.exchange(command(b"WATCH", key) + command(b"EXISTS", key), 2)
        for reply in (watched, there):
            if isinstance(reply, ErrorReply):
                return reply
        if watched != b"OK" or there not in (0, 1):
            raise WireError("the server did not answer WATCH with OK, or EXISTS with 0 or 1")
        if not there:
            return None
        # Ask for `size_bytes` + 1 bytes: that shows a longer value, however long it is.
        self._stream.send([command(b"GETRANGE", key, b"0", b"%d" % size_bytes)])
        came = self._value(block.view, block.length)
        if isinstance(came, Value):
            return came
        self._reader.feed(came)
        [reply] = self._replies(1, most=size_bytes + READ_BYTES)
        return reply if isinstance(reply, ErrorReply) else Odd.FOREIGN

    def unlink_watched(self, key: bytes) -> bool | ErrorReply:
        """Drop a watched key's value unless it was changed meanwhile. Returns whether it was
        dropped."""
        [begun] = self.exchange(command(b"MULTI"), 1)
        if begun != b"OK":
            # Outside a transaction UNLINK would run at once, whatever the value is by now.
            return begun if isinstance(begun, ErrorReply) else False
        *_, done = self.exchange(command(b"UNLINK", key) + command(b"EXEC"), 2)
        return done if isinstance(done, ErrorReply) else done == [1]

    def _value(self, view: memoryview, length: int) -> Value | bytes:
        """Receive a value of HEADER_BYTES + `length` bytes, or return the bytes that came."""
        if length != self._length:
            self._expect(length)
        head, expected, tail = self._head, self._expected, self._tail
        payload = view[:length]
        chunk_bytes = self._stream.chunk_bytes
        small = length <= chunk_bytes
        first = [head, payload, tail] if small else [head, payload[:chunk_bytes]]
        got = self._stream.some(first)
        while got < len(head) and head[: min(got, len(expected))] == expected[:got]:
            got += self._stream.some(_after(first, got))
        if head[: len(expected)] != expected:
            return _until(first, got)
        if small:
            self._stream.fill(first, got)
            digest = xxhash.xxh3_128_digest(payload)
        else:
            digest = self._hashed(payload, got - len(head))
        if tail != _CRLF:
            raise WireError("a value does not end where it should")
        return Value(bytes(head[len(expected) :]), digest)

    def _hashed(self, payload: memoryview, have: int) -> bytes:
        """Return the checksum of a payload, hashed while it arrives. `have` bytes are here."""
        hasher = xxhash.xxh3_128()
        size = self._stream.chunk_bytes
        for start in range(0, len(payload), size):
            chunk = payload[start : start + size]
            last = start + size >= len(payload)
            self._stream.fill([chunk, self._tail] if last else [chunk], have)
            hasher.update(chunk)
            have = 0
        return hasher.digest()

    def _parsed(self, begun: bytes, blocks: Sequence[Wanted]) -> list[Answer]:
        """Return the replies to `blocks`, parsed by hiredis; the bytes `begun` are here already."""
        replies: list[Reply] = []
        self._reader.feed(begun)
        try:
            self._replies(len(blocks), replies)
        except _TooMuchError:
            self.broken = True
        answers: list[Answer] = []
        for reply, block in zip(replies, blocks, strict=False):
            if reply is None or isinstance(reply, ErrorReply):
                answers.append(reply)
            elif not isinstance(reply, bytes):
                raise WireError("the server answered GET with something other than a value")
            elif len(reply) != HEADER_BYTES + block.length:
                answers.append(Odd.FOREIGN)
            else:
                payload = memoryview(reply)[HEADER_BYTES:]
                block.view[: block.length] = payload
                answers.append(Value(reply[:HEADER_BYTES], checksum(payload)))
        return answers

    def _expect(self, length: int) -> None:
        """Allocate the head for a payload of `length` bytes; lengths rarely change."""
        self._length = length
        self._expected = b"$%d\r\n" % (HEADER_BYTES + length)
        self._head = memoryview(bytearray(len(self._expected) + HEADER_BYTES))

    def _replies(
        self,
        count: int,
        replies: list[Reply] | None = None,
        until: float = math.inf,
        *,
        most: int = REPLIES_BYTES_MAX,
    ) -> list[Reply]:
        """Return the next `count` replies, of at most `most` bytes, appended to `replies`."""
        replies = [] if replies is None else replies
        gets, buffer = self._reader.gets, self._buffer
        budget = most
        while True:
            try:
                while len(replies) < count and (reply := gets()) is not _NOT_YET:
                    replies.append(reply)
                    if isinstance(reply, ErrorReply):
                        self._note(reply)
            except (MemoryError, TypeError) as error:
                # hiredis allocates an array before it arrives, and makes dicts of RESP3's maps.
                raise WireError("the server sent data that no command asked for") from error
            if len(replies) == count:
                if self._reader.has_data():
                    raise WireError("the server sent more than it was asked for")
                return replies
            if time.monotonic() > until:
                raise TimeoutError
            received = self._stream.some([memoryview(buffer)])
            budget -= received
            if budget < 0:
                raise _TooMuchError("the server sent more than any command asks for")
            self._reader.feed(buffer, 0, received)  # type: ignore[arg-type]  # any buffer will do

    def _note(self, reply: ErrorReply) -> None:
        """Remember a reply that is about the server or the login, not about the command."""
        wrong = reply.code in WRONG_SERVER and SLOT_WITHOUT_NODE not in str(reply)
        if wrong or reply.code in DENIALS:
            self.turned_away = reply


def command(*words: bytes) -> bytes:
    """Return a command as sent."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)


def commands(verb: bytes, keys: Sequence[bytes], *rest: bytes) -> bytes:
    """Return the same command for each of `keys`, as one piece of bytes."""
    before = b"*%d\r\n$%d\r\n%b\r\n" % (2 + len(rest), len(verb), verb)
    after = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in rest)
    return b"".join(b"%b$%d\r\n%b\r\n%b" % (before, len(key), key, after) for key in keys)


def _after(buffers: Sequence[bytes | memoryview], count: int) -> list[memoryview]:
    """Return `buffers` without their first `count` bytes."""
    rest = []
    for buffer in buffers:
        if count < len(buffer):
            rest.append(memoryview(buffer)[count:])
        count = max(0, count - len(buffer))
    return rest


def _until(buffers: Sequence[memoryview], count: int) -> bytes:
    """Return the first `count` bytes of `buffers`."""
    begun = bytearray()
    for buffer in buffers:
        begun += buffer[: count - len(begun)]
    return bytes(begun)
