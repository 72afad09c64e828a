"""Requests to a bucket's server, made on one thread each: signed, sent, retried.

A request takes the turn of its batch. It touches views only inside `CallTurn.using`, so a
cancelled call gets them back at once. A change runs to its end outside of that, in the background,
because the outcome of an interrupted change cannot be known.
"""

from __future__ import annotations

import hashlib
import math
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from tierd.errors import BackendError
from tierd_backends.common.failures import Failures
from tierd_backends.s3.failure import FailureKind, S3Error
from tierd_backends.s3.http import (
    EndpointUnreachableError,
    HttpConnection,
    PeerError,
    StalledError,
)
from tierd_backends.s3.sign import EMPTY_SHA256, UNSIGNED_PAYLOAD, Credentials, Signer

if TYPE_CHECKING:
    from tierd_backends.s3.account import Account

RETRIES_MAX: Final = 1
"""Retries of a request that a busy server refused. An error costs the engine only a recomputation,
and more retries would feed the overload."""

RETRY_S: Final = (0.02, 0.08)
"""Bounds of the random wait before a retry: random, so that threads do not return together."""

CHANGE_S_MAX: Final = 30.0
"""Longest put or delete: nothing else ends one whose answer arrives byte by byte."""

_T = TypeVar("_T")


class OnCall(Protocol):
    """The part of `CallTurn` that a request needs."""

    @property
    def cancelled(self) -> bool: ...

    def using(self, sock: socket.socket) -> AbstractContextManager[None]: ...


@dataclass(slots=True)
class Request:
    """A request that is not signed yet."""

    method: str
    path: str
    query: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: tuple[bytes | memoryview, ...] = ()


class Requests:
    """The idle connections to a server, and requests on them. Can be used by several threads."""

    def __init__(self, account: Account, failures: Failures, *, timeout_s: float) -> None:
        self._account = account
        self._signer = Signer(account.host, account.region)
        self._timeout_s = timeout_s
        self._failures = failures
        self._idle: list[HttpConnection] = []
        self._closed = False
        self._idle_lock = threading.Lock()

    def close(self) -> None:
        """Close idle connections now, and connections in use when their threads give them back."""
        with self._idle_lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def ask(
        self,
        turn: OnCall,
        request: Request,
        finish: Callable[[HttpConnection], _T],
        *,
        fresh: bool = False,
    ) -> _T:
        """Send a request and let `finish` read the reply. Retry where a retry may help."""
        tries, denied = 0, False
        while True:
            try:
                credentials = self._account.credentials()
            except BackendError as error:
                raise S3Error(FailureKind.DENIED, str(error)) from error
            try:
                connection = self._take(fresh)
            except EndpointUnreachableError as error:
                raise S3Error(FailureKind.PEER, f"it cannot be reached: {error}") from error
            reused = connection.used
            try:
                return self._ask_once(connection, turn, request, credentials, finish)
            except StalledError as error:
                self._failures.count("timeouts_total")
                raise S3Error(FailureKind.PEER, str(error)) from error
            except PeerError as error:
                # A server may close an idle connection at any time: it is not about the request.
                if fresh or not reused or turn.cancelled:
                    raise S3Error(FailureKind.PEER, str(error)) from error
                fresh = True
            except S3Error as refusal:
                if refusal.kind is FailureKind.THROTTLED:
                    self._failures.count("throttled_total")
                if refusal.keys_denied and not denied and not turn.cancelled:
                    denied = True
                    if self._account.others_than(credentials):
                        continue
                if not refusal.may_pass or tries == RETRIES_MAX or turn.cancelled:
                    raise
                tries += 1
                time.sleep(random.uniform(*RETRY_S))
            finally:
                self._give(connection)
            self._failures.count("retries_total")

    def _ask_once(
        self,
        connection: HttpConnection,
        turn: OnCall,
        request: Request,
        credentials: Credentials,
        finish: Callable[[HttpConnection], _T],
    ) -> _T:
        method, path, query, headers = request.method, request.path, request.query, request.headers
        connection.until = math.inf
        if method in ("PUT", "DELETE"):
            connection.until = time.monotonic() + CHANGE_S_MAX
        if method == "DELETE":
            head = self._signer.head(method, path, query, headers, EMPTY_SHA256, credentials)
            connection.send(head)
            return finish(connection)
        with turn.using(connection.sock):
            if not request.body:
                head = self._signer.head(method, path, query, headers, EMPTY_SHA256, credentials)
                connection.send(head)
                return finish(connection)
            digest = UNSIGNED_PAYLOAD if self._account.address.tls else _sha256(request.body)
            length = sum(len(part) for part in request.body)
            head = self._signer.head(
                method, path, query, headers, digest, credentials, length=length
            )
            *most, tail = request.body
            last = bytes(tail[-1:])
            connection.send(head, *most, tail[:-1], more=True)
        # A put that is interrupted in there lacks its last byte, so the server drops it. From here
        # on the caller owns the views again, and need not wait for the end.
        connection.send(last)
        return finish(connection)

    def _take(self, fresh: bool) -> HttpConnection:
        """Take a connection for this thread alone. Raises EndpointUnreachableError.

        A `fresh` one replaces the connection that was idle longest. Without that, connections
        would add up, and old ones may lead to a former address of the server's name.
        """
        while True:
            with self._idle_lock:
                if not self._idle:
                    break
                connection = self._idle.pop(0 if fresh else -1)
            if fresh:
                connection.close()
                break
            if not connection.is_stale():
                return connection
            connection.close()
        return HttpConnection(self._account.address, self._timeout_s)

    def _give(self, connection: HttpConnection) -> None:
        with self._idle_lock:
            if connection.reusable and not self._closed:
                self._idle.append(connection)
                return
        connection.close()


def _sha256(parts: tuple[bytes | memoryview, ...]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
