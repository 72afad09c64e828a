"""One connection to a Redis server past its handshake: commands out, values into memory.

A value is received straight into the slot that it is wanted in, not through a buffer of the
client's: the reply's first bytes, the block header and the payload are one scattered read.
Only the reply that is expected goes this way; nil and errors are parsed by hiredis, and a
value of another length ends the connection. A connection belongs to one thread at a time.
After any exception it must not be used again: what it would read next might be the rest of
a reply to somebody else.
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
"""Bytes hashed at a time while a payload arrives: still in the core's cache, which saves a
tenth of the CPU of a 2 MiB GET, yet few enough calls."""

UNIX_CHUNK_BYTES = 2 << 20
"""The same over a unix socket. It buffers 200 KiB, so the server soon waits for whoever hashes:
a GET of 2 MiB, 4 in flight, is some 4 % faster in one piece; over TCP it is 10 % slower."""

TLS_CHUNK_BYTES = 256 << 10
"""Bytes a TLS call sends: its timeout is for the whole call, which a slow network must meet."""

READ_BYTES = 64 << 10
"""Buffer for replies other than wanted values."""

REPLIES_BYTES_MAX = 16 << 20
"""Most bytes of replies to one exchange: far above a page of keys. More is no Redis server."""

ERROR_CHARS_MAX = 500
"""Of an error reply's text: it ends in logs, and a peer may send megabytes."""

RUN_BLOCKS_MAX = 64
"""Blocks of one send: each has three parts, and the kernel takes 1,024."""

_CLOSED = "the server closed the connection"
_CRLF = b"\r\n"
_NOT_YET = object()

WRONG_SERVER = frozenset({"CLUSTERDOWN", "LOADING", "MASTERDOWN", "NOREPLICAS", "READONLY"})
"""Codes of error replies of a server that is not, or not now, the one to ask."""

DENIALS = frozenset({"NOAUTH", "NOPERM", "WRONGPASS"})
"""Codes of error replies to a user who may not do that, or who is another one by now."""

SLOT_WITHOUT_NODE = "Hash slot not served"
"""In the text of a CLUSTERDOWN that is about one slot: the node is well."""

MASTER = "master"

Reply = Union[bytes, int, None, list["Reply"], "ErrorReply"]
"""What a server says (RESP2); an error is a value, since a pipeline may hold several."""


class ErrorReply(Exception):  # noqa: N818  # a reply, not a failure of ours
    """An error reply, such as "OOM command not allowed"."""

    def __init__(self, text: str) -> None:
        # A server that does not know a command repeats its words: of AUTH the password.
        told = text.partition(", with args beginning with")[0][:ERROR_CHARS_MAX]
        super().__init__(" ".join(told.split()))

    @property
    def code(self) -> str:
        """Its first word."""
        return str(self).partition(" ")[0]


class WireError(Exception):
    """The server does not follow the protocol."""


class _TooMuchError(WireError):
    """Replies are larger than anything that was asked for."""


class Value(NamedTuple):
    """A value that has been received: its first HEADER_BYTES and the xxh3-128 of the rest."""

    raw_header: bytes
    digest: bytes


class Odd(enum.Enum):
    """What else may become of a GET."""

    FOREIGN = "the value has not the length of the block that is wanted"
    UNREAD = "the reply was not reached: the link had to be given up before"


Answer = Value | ErrorReply | Odd | None
"""What becomes of a GET; None: there is no such key."""


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
    """A TCP or unix socket whose every call ends after `silence_s` without a byte."""

    def __init__(self, sock: socket.socket, silence_s: float) -> None:
        self.sock = sock
        self.chunk_bytes = UNIX_CHUNK_BYTES if sock.family == socket.AF_UNIX else CHUNK_BYTES
        # The kernel's timeouts: Python's own would add a poll() to every call.
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
        """Receive what is there into `buffers`, at least a byte."""
        return self._receive(buffers, 0)

    def fill(self, buffers: Sequence[memoryview], have: int) -> None:
        """Receive until `buffers` are full, of which the first `have` bytes are."""
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
    """The same over TLS, which knows no scattered reads, nor the kernel's timeouts."""

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
    """A connection that commands can be sent on. Raises OSError (TimeoutError for silence) and
    WireError; the link is useless then."""

    def __init__(self, stream: PlainStream | TlsStream, close: Callable[[], None]) -> None:
        self.sock: socket.socket = stream.sock
        self.close = close
        self.used = False
        """Whether it has served before: then its server may have closed it while it was idle."""
        self.broken = False
        """Whether a reply was left unread."""
        self.era = 0
        """Links of an earlier era than their node's lead to what may be another server."""
        self.role = ""
        """What the server says that it is, MASTER or a replica; empty if it does not say."""
        self.turned_away: ErrorReply | None = None
        """A reply of WRONG_SERVER or DENIALS: asking again over this link is in vain."""
        self._stream = stream
        self._reader = hiredis.Reader(
            protocolError=WireError, replyError=ErrorReply, errors="replace", notEnoughData=_NOT_YET
        )
        self._buffer = bytearray(READ_BYTES)
        self._expect(0)
        self._tail = memoryview(bytearray(len(_CRLF)))

    def exchange(self, commands: bytes, count: int, until: float = math.inf) -> list[Reply]:
        """Send `count` commands at once and receive their replies.

        Raises TimeoutError for replies that still come in at `until`, by time.monotonic.
        """
        self._stream.send([commands])
        return self._replies(count, until=until)

    def ask_role(self, until: float) -> None:
        """Learn the server's role by HELLO, which needs no right. Raises as `exchange` does."""
        [reply] = self.exchange(command(b"HELLO", b"2"), 1, until)
        if isinstance(reply, list) and b"role" in reply[:-1]:
            role = reply[reply.index(b"role") + 1]
            self.role = role.decode("ascii", "replace") if isinstance(role, bytes) else ""

    def at_master(self, sent: bytes) -> Reply:
        """The reply to a command whose answer only the master knows. Else an error reply."""
        if self.role in ("", MASTER):
            return self.exchange(sent, 1)[0]
        # It may be one that takes writes, which its master never hears of.
        self.turned_away = ErrorReply(f"READONLY it is a {self.role}")
        return self.turned_away

    def members_at_master(self, key: bytes) -> Reply:
        """The members of a set, or an error reply.

        Of a server that takes no writes it is one, too, by a write that changes nothing: what a
        replica has, or a master that has been cut off, may be old.
        """
        members = command(b"SMEMBERS", key)
        begun = self.at_master(command(b"MULTI"))
        if isinstance(begun, ErrorReply):
            return begun
        write = command(b"SREM", key, b"")
        *queued, done = self.exchange(write + members + command(b"EXEC"), 3)
        errors = [reply for reply in (*queued, done) if isinstance(reply, ErrorReply)]
        if errors and errors[0].code == "MISCONF" and self.role == MASTER:
            # It cannot save what it has, so it takes no writes; it is the master all the same.
            return self.exchange(members, 1)[0]
        if errors and errors[0].code == "OOM":
            # A full server takes no transactions, but writes that need no memory.
            written, told = self.exchange(write + members, 2)
            return written if isinstance(written, ErrorReply) else told
        if errors:
            return errors[0]
        return done[-1] if isinstance(done, list) and done else None

    def set_many(self, blocks: Sequence[Given], ttl_ms: int) -> list[Reply]:
        """SET each value, header and payload, whose key does not exist: b"OK", or None if it does.

        RUN_BLOCKS_MAX blocks at most.
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
        """GET values of HEADER_BYTES + `length` bytes each, the payloads into their views.

        May write to `view[:length]` of those that it returns no Value for. Sets `broken` rather
        than read a value of another length, which may be of any size.
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
                # The bytes behind this reply are here already: the rest has to be parsed, too.
                answers += self._parsed(came, blocks[len(answers) :])
                break
        answers += [Odd.UNREAD] * (len(blocks) - len(answers))
        return answers

    def get_watched(self, block: Wanted) -> Answer:
        """GET one value as `get_many` does, and have the server watch its key: `unlink_watched`
        then drops nothing else. The link must serve nobody after that."""
        self.broken = True
        key, size_bytes = block.key, HEADER_BYTES + block.length
        watched, there = self.exchange(command(b"WATCH", key) + command(b"EXISTS", key), 2)
        for reply in (watched, there):
            if isinstance(reply, ErrorReply):
                return reply
        if watched != b"OK" or there not in (0, 1):
            raise WireError("WATCH and EXISTS are answered by something else")
        if not there:
            return None
        # One byte more than is wanted tells a longer value, however long it is.
        self._stream.send([command(b"GETRANGE", key, b"0", b"%d" % size_bytes)])
        came = self._value(block.view, block.length)
        if isinstance(came, Value):
            return came
        self._reader.feed(came)
        [reply] = self._replies(1, most=size_bytes + READ_BYTES)
        return reply if isinstance(reply, ErrorReply) else Odd.FOREIGN

    def unlink_watched(self, key: bytes) -> bool | ErrorReply:
        """Drop the value of a key if nobody has changed it since it is watched; whether it was."""
        [begun] = self.exchange(command(b"MULTI"), 1)
        if begun != b"OK":
            # Without it UNLINK would be done at once, whatever the value is by now.
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
        """The checksum of a payload that arrives meanwhile; `have` bytes of it are here."""
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
        """The replies to `blocks`, of which the bytes `begun` are here, by way of hiredis."""
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
                raise WireError("GET is answered by something else than a value")
            elif len(reply) != HEADER_BYTES + block.length:
                answers.append(Odd.FOREIGN)
            else:
                payload = memoryview(reply)[HEADER_BYTES:]
                block.view[: block.length] = payload
                answers.append(Value(reply[:HEADER_BYTES], checksum(payload)))
        return answers

    def _expect(self, length: int) -> None:
        """Room for what precedes a payload of `length` bytes; lengths rarely change."""
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
        """The next `count` replies, of `most` bytes; they are put into `replies` as they come."""
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
                # hiredis makes room for an array before it comes, and a dict of RESP3's maps.
                raise WireError("the server sends what no command asks for") from error
            if len(replies) == count:
                if self._reader.has_data():
                    raise WireError("the server sent more than it was asked for")
                return replies
            if time.monotonic() > until:
                raise TimeoutError
            received = self._stream.some([memoryview(buffer)])
            budget -= received
            if budget < 0:
                raise _TooMuchError("the server sends without end")
            self._reader.feed(buffer, 0, received)  # type: ignore[arg-type]  # any buffer will do

    def _note(self, reply: ErrorReply) -> None:
        """Remember a reply that is about the server, or about who asks."""
        wrong = reply.code in WRONG_SERVER and SLOT_WITHOUT_NODE not in str(reply)
        if wrong or reply.code in DENIALS:
            self.turned_away = reply


def command(*words: bytes) -> bytes:
    """A command as sent."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)


def commands(verb: bytes, keys: Sequence[bytes], *rest: bytes) -> bytes:
    """The same command for each of `keys`, in one piece."""
    before = b"*%d\r\n$%d\r\n%b\r\n" % (2 + len(rest), len(verb), verb)
    after = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in rest)
    return b"".join(b"%b$%d\r\n%b\r\n%b" % (before, len(key), key, after) for key in keys)


def _after(buffers: Sequence[bytes | memoryview], count: int) -> list[memoryview]:
    """`buffers` without their first `count` bytes."""
    rest = []
    for buffer in buffers:
        if count < len(buffer):
            rest.append(memoryview(buffer)[count:])
        count = max(0, count - len(buffer))
    return rest


def _until(buffers: Sequence[memoryview], count: int) -> bytes:
    """The first `count` bytes of `buffers`."""
    begun = bytearray()
    for buffer in buffers:
        begun += buffer[: count - len(begun)]
    return bytes(begun)
