"""The objects of a bucket: which requests read, store and delete one, and what a reply means.

requests.py sends the requests. All calls block, and are made on the threads of a batch.
"""

from __future__ import annotations

import logging
import re
import urllib.parse
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from tierd.backend import HEADER_BYTES, BlockHeader, match_header, unpack_header
from tierd.types import HASH_BYTES, SCOPE_BYTES, BlockKey
from tierd_backends.common.failures import Failures
from tierd_backends.s3.failure import (
    ERROR_BYTES_MAX,
    FailureKind,
    S3Error,
    code_of,
    failure,
    is_archived,
    unreadable,
)
from tierd_backends.s3.http import Head, HttpConnection, PeerError
from tierd_backends.s3.listing import Page, parse_page
from tierd_backends.s3.options import S3Options
from tierd_backends.s3.requests import RETRIES_MAX, OnCall, Request, Requests
from tierd_backends.s3.suspects import Suspects

if TYPE_CHECKING:
    from tierd_backends.s3.account import Account

PIECE_BYTES: Final = 256 << 10
"""Bytes of a payload that are received and then hashed while they are in the cache. Hashing it all
at the end costs 0.05 CPU seconds more per GB."""

PAGE_BYTES_MAX: Final = 4 << 20
"""Largest page of a listing: 1,000 names of about 300 bytes each."""

DRAIN_BYTES_MAX: Final = 64 << 10
"""Longest rest of a body that is read to keep the connection; beyond it, a new one is cheaper."""

MARKS: Final = "marks/"
"""Folder of the marks, below the tier's prefix."""

ABSENT: Final = BlockKey(bytes(SCOPE_BYTES), bytes(HASH_BYTES))
"""A block that no node stores. Looking it up shows how the server reports a missing object."""

RANGE_STATUS: Final = 416
"""Status for a range beyond the end: the object is empty."""

_ETAG: Final = re.compile('"[!#-~]{1,128}"', re.ASCII)

_log = logging.getLogger("tierd_backends.s3")


class Read(NamedTuple):
    """An object that was found: its size, and its header if it is the wanted block and whole.

    `seen` stands for the bytes read, to compare reads; `etag` is empty if the reply had none.
    """

    header: BlockHeader | None
    size_bytes: int
    etag: str
    seen: bytes = b""


class Seen(NamedTuple):
    """An object that exists, by its HEAD; `readable` unless the reply says that a GET fails."""

    size_bytes: int
    readable: bool


class Written(NamedTuple):
    """Result of keeping a block: stored now, or present before. `replaced_bytes` is the size of
    the object that it replaced, None if it replaced none."""

    stored: bool
    size_bytes: int
    replaced_bytes: int | None = None


class Bucket:
    """A bucket, as one tier uses it. Can be used by several threads."""

    def __init__(self, account: Account, options: S3Options, failures: Failures) -> None:
        self._account = account
        self._requests = Requests(account, failures, timeout_s=options.timeout_ms / 1e3)
        self._put_headers = options.put_headers
        self._prefix = f"{options.prefix}/" if options.prefix else ""
        self._name = re.compile(
            f"{re.escape(self._prefix)}([0-9a-f]{{{2 * SCOPE_BYTES}}})/"
            f"([0-9a-f]{{{2 * HASH_BYTES}}})",
            re.ASCII,
        )
        self._conditional = True
        self._suspects = Suspects()

    @classmethod
    def find(cls, options: S3Options, failures: Failures) -> Bucket:
        """Find the bucket's address, and credentials for it. Blocks. Raises BackendError."""
        # Imported late: the daemon imports this module only to check its options.
        from tierd_backends.s3.account import Account

        return cls(Account(options), options, failures)

    def try_requests(self, turn: OnCall) -> None:
        """Make each kind of request once, so that what would fail each time fails now, explained.
        Raises S3Error."""
        for asked, permission in (
            (lambda: self.page(turn, "", limit=1), "s3:ListBucket"),
            (lambda: self.size_of(turn, self.name(ABSENT)), "s3:GetObject"),
        ):
            try:
                asked()
            except S3Error as error:
                if error.kind is not FailureKind.DENIED or error.code not in ("", "AccessDenied"):
                    raise
                text = f"{error}; they must allow {permission}"
                raise S3Error(FailureKind.DENIED, text) from error

    def name(self, key: BlockKey) -> str:
        """Return the name of a block's object."""
        return f"{self._prefix}{key.namespace.hex()}/{key.block_hash.hex()}"

    def read_keys_again(self) -> None:
        """Sign with the current credentials from now on. Raises BackendError."""
        self._account.read_again()

    def close(self) -> None:
        """Close idle connections now, and connections in use when their threads give them back."""
        self._requests.close()

    def size_of(self, turn: OnCall, name: str) -> int | None:
        """Return an object's size in bytes, None if it is missing or unreadable. Raises S3Error."""
        if self._suspects.avoid(name):
            return None
        seen = self.look(turn, name)
        if seen is not None and not seen.readable:
            self._suspects.add(name, refused=True)
        return seen.size_bytes if seen is not None and seen.readable else None

    def look(self, turn: OnCall, name: str) -> Seen | None:
        """Return whether an object exists, even if it is a suspect. Raises S3Error."""

        def finish(connection: HttpConnection) -> Seen | None:
            head = connection.read_head(body=False)
            if head.status == 200:
                return Seen(head.length or 0, readable=not is_archived(head.headers))
            if head.status == 404:
                return None
            raise failure(head.status, head.headers, b"")

        try:
            return self._requests.ask(turn, Request("HEAD", self._path(name)), finish)
        except S3Error as refusal:
            if refusal.status not in (400, 403):
                raise
            # The reply to a HEAD has no body for the reason, so GET a part of the object.
            try:
                self.read_header(turn, name)
            except S3Error as reason:
                if reason.kind is not FailureKind.UNREADABLE:
                    raise reason from refusal
                return Seen(0, readable=False)
            raise

    def read(
        self,
        turn: OnCall,
        name: str,
        key: BlockKey,
        view: memoryview,
        raw_header: memoryview,
        *,
        fresh: bool = False,
    ) -> Read | None:
        """Read a block into `view`, which it must fill, and verify it; `fresh`: over a new
        connection. Raises S3Error, of kind UNREADABLE if only this object is affected."""
        expected = HEADER_BYTES + len(view)

        def finish(connection: HttpConnection) -> Read | None:
            head = connection.read_head()
            if head.status != 200:
                self._missing(connection, head)
                return None
            size, etag = connection.body_bytes, _etag(head)
            if size is not None and size != expected:
                _drain(connection)
                return Read(None, size, etag)
            got = connection.read_into(raw_header)
            digest = xxhash.xxh3_128()
            for at in range(0, len(view), PIECE_BYTES):
                piece = view[at : at + PIECE_BYTES]
                size_got = connection.read_into(piece)
                digest.update(piece[:size_got])
                got += size_got
            if size is None:
                got += len(connection.read_body(1))
                if got < expected and connection.open_ended:
                    raise PeerError("the connection ended before the block did")
            seen = bytes(raw_header) + digest.digest()
            header = None
            if got == expected:
                header = match_header(raw_header, key, len(view), digest.digest())
            return Read(header, got, etag, seen)

        try:
            found = self._requests.ask(turn, Request("GET", self._path(name)), finish, fresh=fresh)
        except S3Error as refusal:
            if refusal.kind is FailureKind.UNREADABLE:
                self._suspects.add(name, refused=True)
            raise
        if found is None:
            self._suspects.add(name, refused=False)
        elif found.header is not None:
            self._suspects.clear(name)
        return found

    def read_header(self, turn: OnCall, name: str) -> bytes | None:
        """Return an object's first HEADER_BYTES, None if it is missing or empty. Raises S3Error."""

        def finish(connection: HttpConnection) -> bytes | None:
            head = connection.read_head()
            if head.status == RANGE_STATUS:
                _drain(connection)
                return None
            if head.status not in (200, 206):
                self._missing(connection, head)
                return None
            body = connection.read_body(HEADER_BYTES)
            _drain(connection)
            return body

        headers = {"range": f"bytes=0-{HEADER_BYTES - 1}"}
        return self._requests.ask(turn, Request("GET", self._path(name), headers=headers), finish)

    def write(self, turn: OnCall, name: str, raw_header: bytes, view: memoryview) -> Written:
        """Keep a block unless it is present. Raises S3Error; the server then has all or nothing.

        A HEAD goes first, because a server refuses a block only after it was sent whole. A
        condition decides between two writers. Where the server ignores it both store the block,
        which is harmless: a name has only one content.
        """
        size_bytes = len(raw_header) + len(view)
        tries = 0
        while True:
            seen = self.look(turn, name)
            if seen is not None and (not seen.readable or name in self._suspects):
                return self._write_over(turn, name, raw_header, view, seen)
            if seen is not None and seen.size_bytes == size_bytes:
                return Written(False, size_bytes)
            if seen is not None:
                # It is not this block, and would keep the block from ever being stored.
                self.delete(turn, name)
            conditional = self._conditional
            try:
                stored = self._put(turn, name, (raw_header, view), conditional=conditional)
            except S3Error as refusal:
                if conditional and refusal.lacks_condition:
                    self._conditional = False
                    _log.info("the S3 server does not know conditional puts: going on without")
                    continue
                if refusal.status == 409 and tries < RETRIES_MAX:
                    # Another client is storing or deleting it: look again.
                    tries += 1
                    continue
                raise
            return Written(stored, size_bytes)

    def _write_over(
        self, turn: OnCall, name: str, raw_header: bytes, view: memoryview, seen: Seen
    ) -> Written:
        """Replace an object that could not be read, unless a second read succeeds. Nothing is
        deleted: another client that stores it meanwhile stores the same bytes."""
        size_bytes = len(raw_header) + len(view)
        header = unpack_header(raw_header)
        assert header is not None
        scratch, raw = memoryview(bytearray(len(view))), memoryview(bytearray(HEADER_BYTES))
        try:
            found = self.read(turn, name, header.key, scratch, raw, fresh=True)
        except S3Error as refusal:
            if refusal.kind is not FailureKind.UNREADABLE:
                raise
            found = None
        if found is not None and found.header is not None:
            return Written(False, size_bytes)
        self._put(turn, name, (raw_header, view), conditional=False)
        self._suspects.clear(name)
        return Written(True, size_bytes, replaced_bytes=seen.size_bytes)

    def _put(
        self,
        turn: OnCall,
        name: str,
        body: tuple[bytes | memoryview, ...],
        *,
        conditional: bool,
        fresh: bool = False,
    ) -> bool:
        """Store an object. Returns False if it was present."""
        headers = dict(self._put_headers)
        if conditional:
            headers["if-none-match"] = "*"
        tries = 0

        def finish(connection: HttpConnection) -> bool:
            nonlocal tries
            tries += 1
            head = connection.read_head()
            if head.status == 412:
                _drain(connection)
                # After a try with unknown outcome the object is most likely our own.
                return tries > 1
            self._succeed(connection, head)
            return True

        request = Request("PUT", self._path(name), "", headers, body)
        return self._requests.ask(turn, request, finish, fresh=fresh)

    def delete(self, turn: OnCall, name: str) -> None:
        """Delete an object, which may already be missing. Raises S3Error."""

        def finish(connection: HttpConnection) -> None:
            head = connection.read_head()
            if head.status != 404:
                self._succeed(connection, head)
            else:
                self._missing(connection, head)

        self._requests.ask(turn, Request("DELETE", self._path(name)), finish)

    def marks(self, turn: OnCall) -> list[str]:
        """Return all marks. Raises S3Error unless the listing is complete."""
        found: list[str] = []
        token = ""
        while True:
            page = self.page(turn, token, under=MARKS)
            found += [name.removeprefix(f"{self._prefix}{MARKS}") for name in page.names]
            token = page.token
            if not token:
                return found

    def add_mark(self, turn: OnCall, mark: str) -> None:
        """Keep a mark: an object of a few bytes whose name is the mark. Raises S3Error."""
        name = f"{self._prefix}{MARKS}{mark}"
        self._put(turn, name, (b"tierd",), conditional=False, fresh=True)

    def drop_mark(self, turn: OnCall, mark: str) -> None:
        """Delete a mark. Raises S3Error."""
        self.delete(turn, f"{self._prefix}{MARKS}{mark}")

    def delete_read(self, turn: OnCall, name: str, etag: str) -> int | None:
        """Delete the object that was read under this ETag. Returns its size, or None if the object
        is missing or has another ETag by now. Raises S3Error.

        A HEAD goes first, for servers that do not know the condition or ignore it.
        """

        def look(connection: HttpConnection) -> int | None:
            head = connection.read_head(body=False)
            if head.status not in (200, 404):
                raise failure(head.status, head.headers, b"")
            there = head.status == 200 and _etag(head) == etag
            return head.length or 0 if there else None

        def finish(connection: HttpConnection) -> bool:
            head = connection.read_head()
            if head.status == 412:
                _drain(connection)
                return False
            self._succeed(connection, head)
            return True

        size_bytes = self._requests.ask(turn, Request("HEAD", self._path(name)), look)
        if size_bytes is None:
            return None
        condition = Request("DELETE", self._path(name), headers={"if-match": etag})
        try:
            return size_bytes if self._requests.ask(turn, condition, finish) else None
        except S3Error as refusal:
            if not refusal.lacks_condition:
                raise
        self.delete(turn, name)
        return size_bytes

    def page(self, turn: OnCall, token: str, *, limit: int = 1000, under: str = "") -> Page:
        """Return the next objects below the tier's prefix and `under`, in order of their names.
        Marks are listed over a new connection: an old one may lead to a server without the latest.

        Raises S3Error, also if there are more objects and the server does not say how to get them.
        """
        query = {
            **({"continuation-token": token} if token else {}),
            "encoding-type": "url",
            "list-type": "2",
            "max-keys": str(limit),
            "prefix": self._prefix + under,
        }

        def finish(connection: HttpConnection) -> bytes:
            return self._succeed(connection, connection.read_head(), PAGE_BYTES_MAX)

        quoted = urllib.parse.urlencode(query, quote_via=urllib.parse.quote, safe="")
        path = self._account.base_path.rstrip("/") or "/"
        request = Request("GET", path, quoted)
        body = self._requests.ask(turn, request, finish, fresh=under == MARKS)
        page = parse_page(body, self._name)
        if token and page.token == token:
            # Without this the listing would never end, and each of its pages costs money.
            raise S3Error(FailureKind.PEER, "the server repeats the same page of a listing")
        return page

    def _path(self, name: str) -> str:
        return self._account.base_path + name

    def _succeed(
        self, connection: HttpConnection, head: Head, limit: int = ERROR_BYTES_MAX
    ) -> bytes:
        """Return the body of a successful reply. Raises S3Error for any other reply."""
        if not 200 <= head.status < 300:
            raise failure(head.status, head.headers, connection.read_body(ERROR_BYTES_MAX))
        return connection.read_body(limit)

    def _missing(self, connection: HttpConnection, head: Head) -> None:
        """Return if a reply says that the object does not exist. Raises S3Error otherwise."""
        body = connection.read_body(ERROR_BYTES_MAX)
        if (refusal := unreadable(head.status, body)) is not None:
            raise refusal
        if head.status != 404 or code_of(body) not in ("", "NoSuchKey") or b"<html" in body[:256]:
            raise failure(head.status, head.headers, body)


def _etag(head: Head) -> str:
    """Return a reply's strong ETag, which identifies the object's bytes; "" if there is none."""
    etag = head.headers.get("etag", "")
    return etag if _ETAG.fullmatch(etag) else ""


def _drain(connection: HttpConnection) -> None:
    """Read the rest of a body if that is cheaper than a new connection."""
    if connection.body_bytes is not None and connection.body_bytes <= DRAIN_BYTES_MAX:
        connection.read_body(DRAIN_BYTES_MAX)
