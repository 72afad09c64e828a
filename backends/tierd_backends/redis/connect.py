"""Connect to a server and log in; explain failures to an operator.

redis-py makes the connection. Its socket then goes to a Link, which logs in: redis-py would wait
for, and buffer, anything that a server sends as an answer to the login. Every failure becomes
one `ServerUnreachableError`, or `DeniedError`, whose text says what to do.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from tierd.errors import BackendError
from tierd_backends.redis.wire import (
    WRONG_SERVER,
    ErrorReply,
    Link,
    PlainStream,
    TlsStream,
    WireError,
    command,
)

PASSWORD_BYTES_MAX = 4096
"""A longer file is not a password file."""

COMMANDS = (
    "+get +set +exists +unlink +scan +getrange +watch +multi +exec +sadd +srem +smembers "
    "+touch +pexpire"
)


_MISPLACED = {
    "CLUSTERDOWN": "has lost its cluster",
    "LOADING": "is still loading its data",
    "MASTERDOWN": "is a replica, and has lost its master",
    "NOREPLICAS": "has lost its replicas",
    "READONLY": "is a replica",
}
assert _MISPLACED.keys() == WRONG_SERVER


class ServerUnreachableError(BackendError):
    """A connection to a server failed or broke."""


class DeniedError(BackendError):
    """The server answers but refuses this user: nothing works until an operator acts."""

    of_command = False
    """Whether only the command is denied; other commands may be allowed."""


class _Connection(Protocol):
    """The used part of redis-py's connections, whose methods have no types."""

    def connect(self) -> None: ...
    def disconnect(self) -> None: ...
    def _get_socket(self) -> socket.socket | None: ...


_unix: Callable[..., _Connection] = UnixDomainSocketConnection
_tcp: Callable[..., _Connection] = Connection


class Address(NamedTuple):
    """Where a server listens; a unix socket has port 0."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How to log in. Valid for every server of a cluster."""

    db: int
    username: str
    password: str
    password_file: str
    tls: bool
    tls_ca: str
    tls_cert: str
    tls_key: str
    tls_verify_hostname: bool
    silence_s: float
    prefix: str

    def read_password(self) -> str:
        """Return the current password. Its file is read each time, as it may have been rotated."""
        if not self.password_file:
            return self.password
        try:
            with Path(self.password_file).open(encoding="utf-8") as file:
                return file.read(PASSWORD_BYTES_MAX).rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ServerUnreachableError(f"password_file cannot be read: {error}") from error


class Connector:
    """Makes links. Can be used on any thread."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._tls: tuple[tuple[int, ...], ssl.SSLContext] | None = None

    def connect(self, address: Address, *, ask_role: bool = False) -> Link:
        """Return a link that is logged in; with `ask_role` it knows its server's role.

        Takes a few `silence_s` at most, plus the name lookup, which is made each time. Raises
        ServerUnreachableError or DeniedError.
        """
        # Read the password file first: if that fails, nothing is open yet.
        log_in = self._log_in()
        connection = self._connection(address)
        try:
            connection.connect()
        except (RedisError, OSError, UnicodeError) as error:
            connection.disconnect()
            raise self._explain(address, error) from error
        sock = connection._get_socket()
        assert sock is not None
        silence_s = self.access.silence_s
        if isinstance(sock, ssl.SSLSocket):
            link = Link(TlsStream(sock, silence_s), connection.disconnect)
        else:
            link = Link(PlainStream(sock, silence_s), connection.disconnect)
        try:
            for sent in log_in:
                [reply] = link.exchange(sent, 1, time.monotonic() + silence_s)
                if isinstance(reply, ErrorReply):
                    raise self.refusal(address, str(reply))
            if ask_role:
                link.ask_role(time.monotonic() + silence_s)
        except (OSError, WireError) as error:
            link.close()
            raise self.broken(address, error, fresh=True) from error
        except BackendError:
            link.close()
            raise
        return link

    def _log_in(self) -> list[bytes]:
        """Return the commands that precede all others."""
        access, sent = self.access, []
        if password := access.read_password():
            words = [access.username, password] if access.username else [password]
            sent.append(command(b"AUTH", *(word.encode() for word in words)))
        if access.db:
            sent.append(command(b"SELECT", b"%d" % access.db))
        return sent

    def _connection(self, address: Address) -> _Connection:
        access = self.access
        common = {
            "socket_timeout": access.silence_s,
            "socket_connect_timeout": access.silence_s,
            "redis_connect_func": _say_nothing,
            # With RESP2 the server sends nothing without a request.
            "protocol": 2,
        }
        if not address.port:
            return _unix(path=address.host, **common)
        if not access.tls:
            return _tcp(host=address.host, port=address.port, **common)
        return _tls(self._tls_context(), host=address.host, port=address.port, **common)

    def _tls_context(self) -> ssl.SSLContext:
        """Return the TLS context. It is cached, since loading takes milliseconds, until a file
        changes."""
        access = self.access
        files = [name for name in (access.tls_ca, access.tls_cert, access.tls_key) if name]
        try:
            stamp = tuple(os.stat(name).st_mtime_ns for name in files)
            if self._tls is None or self._tls[0] != stamp:
                context = ssl.create_default_context(cafile=access.tls_ca or None)
                context.check_hostname = access.tls_verify_hostname
                if access.tls_cert:
                    context.load_cert_chain(access.tls_cert, access.tls_key or None)
                self._tls = stamp, context
            return self._tls[1]
        except OSError as error:
            raise ServerUnreachableError(
                f"tls_ca, tls_cert or tls_key cannot be used: {error}"
            ) from error

    def _explain(
        self, address: Address, error: RedisError | OSError | UnicodeError
    ) -> BackendError:
        # redis-py wraps the system's errors; its own errors about replies have no cause.
        wrapped = type(error) in (RedisConnectionError, RedisTimeoutError)
        cause = error.__context__ if wrapped else error
        where = f"the server at {address}"
        match cause, error:
            case ssl.SSLCertVerificationError(), _:
                hint = "set tls_ca to the CA that signed it"
                if "ostname" in str(cause) or "IP address" in str(cause):
                    hint = "put a name that it has into url, or set tls_verify_hostname = false"
                return ServerUnreachableError(
                    f"the certificate of {where} is refused: {cause.verify_message}; {hint}"
                )
            case ssl.SSLError(), _:
                return ServerUnreachableError(
                    f"{where} fails the TLS handshake ({cause.reason or cause}): is it a TLS "
                    "port, and does it want a client certificate (tls_cert)?"
                )
            case ((socket.gaierror() | UnicodeError()), _):
                return ServerUnreachableError(f"{address.host!r} cannot be resolved: check url")
            case ConnectionRefusedError(), _:
                return ServerUnreachableError(f"{where} refuses: is it running, and is url right?")
            case ((FileNotFoundError() | PermissionError()), _):
                return ServerUnreachableError(f"no access to {address.host}: {cause.strerror}")
            case (TimeoutError(), _) | (_, RedisTimeoutError()):
                failure = self.broken(address, TimeoutError(), fresh=True)
                return ServerUnreachableError(f"{failure}{'; is it a TLS port?' * self.access.tls}")
            case _, InvalidResponse():
                return self.broken(address, WireError(str(error)), fresh=True)
            case ConnectionError(), _:
                return self.broken(address, cause, fresh=True)
            case _, RedisError():
                return self.refusal(address, str(error))
        return ServerUnreachableError(f"{where} cannot be reached: {cause}")

    def broken(self, address: Address, error: Exception, *, fresh: bool) -> ServerUnreachableError:
        """Explain why a link broke; `fresh`: at its first use."""
        where = f"the server at {address}"
        if isinstance(error, TimeoutError):
            return ServerUnreachableError(
                f"{where} was silent for {self.access.silence_s * 1000:.0f} ms"
            )
        if isinstance(error, WireError):
            return ServerUnreachableError(
                f"{where} does not speak Redis: is url's port right? ({error})"
            )
        if fresh and isinstance(error, ConnectionError):
            return ServerUnreachableError(
                f"{where} closes the connection; a TLS port takes rediss://"
            )
        return ServerUnreachableError(f"the connection to {where} broke: {error}")

    def refusal(self, address: Address, text: str) -> BackendError:
        """Explain an error that is not about one block. Returns a DeniedError if only an operator
        can fix it."""
        where = f"the server at {address}"
        rules = f"~{self.access.prefix}:* {COMMANDS}"
        for part, told in (
            ("Authentication required", "asks for a password: set password or password_file"),
            ("invalid username-password", "refuses this username or password"),
            ("invalid password", "refuses this password"),
            ("without any password", "has no password for this user: set username, or no password"),
            ("no permissions", f"denies it to this user (ACL SETUSER needs {rules}): {text}"),
            ("cluster support disabled", "is no cluster: set cluster = false"),
            ("MOVED ", "is a node of a cluster: set cluster = true"),
            ("SELECT is not allowed in cluster", "is a node of a cluster, which has no databases"),
            ("DB index is out of range", "has no such database: check the number in url"),
        ):
            if part in text:
                denied = DeniedError(f"{where} {told}")
                denied.of_command = part == "no permissions"
                return denied
        if "closed" in text.lower() or "reset by peer" in text:
            return ServerUnreachableError(
                f"{where} closes the connection; a TLS port takes rediss://"
            )
        return ServerUnreachableError(f"{where} says: {text}")

    def misplaced(self, address: Address, reply: ErrorReply) -> ServerUnreachableError:
        """Explain a reply with a code of WRONG_SERVER."""
        assert reply.code in WRONG_SERVER
        return ServerUnreachableError(
            f"the server at {address} {_MISPLACED[reply.code]} ({reply}); tierd reconnects "
            "until the address leads to a master that takes writes"
        )

    def check(self, address: Address, reply: ErrorReply) -> None:
        """Raise DeniedError if the same error would meet every block."""
        error = self.refusal(address, str(reply))
        if isinstance(error, DeniedError):
            raise error


def _say_nothing(connection: _Connection) -> None:
    """Replaces redis-py's greeting: CLIENT SETINFO may be forbidden, and tells little."""


class _TlsConnection(SSLConnection):
    """redis-py's connection with another context: its own trusts all system CAs beside tls_ca."""

    def __init__(self, context: ssl.SSLContext, **common: object) -> None:
        super().__init__(**common)  # type: ignore[arg-type]  # of many types, none of them SSL's
        self._context = context

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> ssl.SSLSocket:
        return self._context.wrap_socket(sock, server_hostname=self.host)


_tls: Callable[..., _Connection] = _TlsConnection
