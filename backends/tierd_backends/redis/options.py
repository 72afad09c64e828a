"""The Redis tier's options, and the check of what an operator may get wrong in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec
from msgspec import Meta

from tierd.errors import ConfigError
from tierd_backends.common.shared_capacity import Capacity, capacity_problems

PORT = 6379

_PREFIX = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
"""Excludes what has a meaning in a cluster's key ({}) or in a pattern (*?[])."""


class RedisOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Keys of a `[[storage]]` table of type "redis"."""

    url: Annotated[
        str,
        Meta(
            description="Address of the server: redis://host:port/db, rediss:// for TLS, or "
            "unix:///path?db=0; user:password@ may precede the host. For a cluster, any "
            "of its nodes."
        ),
    ]
    username: Annotated[str, Meta(description="ACL user, if the url names none.")] = ""
    password: Annotated[
        str, Meta(description="Password of the Redis user; prefer password_file.")
    ] = ""
    password_file: Annotated[
        str, Meta(description="File with the password of the Redis user, read at every connect.")
    ] = ""
    tls_ca: Annotated[
        str,
        Meta(
            description="PEM file of the certificate authorities to trust; empty: the system's "
            "authorities."
        ),
    ] = ""
    tls_cert: Annotated[
        str, Meta(description="PEM file of the client certificate, if the server requires one.")
    ] = ""
    tls_key: Annotated[
        str,
        Meta(
            description="PEM file of the client certificate's key; empty: the key is in tls_cert."
        ),
    ] = ""
    tls_verify_hostname: Annotated[
        bool, Meta(description="Require that the server's certificate names the host of the url.")
    ] = True
    cluster: Annotated[bool, Meta(description="Whether the server is a Redis Cluster.")] = False
    prefix: Annotated[
        str,
        Meta(description="First part of every key; nothing else may write keys with this prefix."),
    ] = "tierd"
    capacity: Capacity = 0
    ttl_s: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 31,
            description="Time after its last use at which the server drops a block; 0: never.",
        ),
    ] = 0
    connections: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Number of threads, and upper bound of the connections to each server.",
        ),
    ] = 8
    timeout_ms: Annotated[
        int,
        Meta(
            ge=10,
            le=60_000,
            description="Longest wait for a server to accept, receive or answer.",
        ),
    ] = 500


class Target(NamedTuple):
    """The server in `url`, and the credentials in `url`. A unix socket has port 0."""

    host: str
    port: int
    db: int
    tls: bool
    username: str
    password: str


def parse_target(options: RedisOptions) -> Target:
    """Return the server to connect to, with credentials. Raises ConfigError with every problem of
    the options; the text never shows a password."""
    target: Target | None = None
    problems: list[str] = []
    try:
        target = _parse_url(options)
    except ConfigError as error:
        problems += error.problems
    problems += [*_problems(options, target)]
    if target is None or problems:
        raise ConfigError(*problems)
    return target._replace(
        username=target.username or options.username,
        password=target.password or options.password,
    )


def _problems(options: RedisOptions, target: Target | None) -> Iterator[str]:
    """Yield the problems of the options; `target` is None if `url` cannot be parsed."""
    if not _PREFIX.fullmatch(options.prefix):
        yield f"prefix is {options.prefix!r}; it must be 1 to 64 letters, digits, or any of _.:/-"
    passwords = [options.password, options.password_file, target.password if target else ""]
    if sum(map(bool, passwords)) > 1:
        yield "set the password once: in url, password or password_file"
    if target and target.username and options.username:
        yield "set the user once: in url or username"
    if target and options.cluster and not target.port:
        yield "a cluster's nodes cannot be reached by a unix socket; url must be TCP"
    if target and options.cluster and target.db:
        yield "a cluster has no databases: remove the number from url"
    if target and not target.tls and (options.tls_ca or options.tls_cert):
        yield "tls_ca and tls_cert need a url that begins with rediss://"
    if options.tls_key and not options.tls_cert:
        yield "tls_key needs tls_cert"
    yield from capacity_problems(options.capacity)


def _parse_url(options: RedisOptions) -> Target:
    known = "it must be like redis://host:6379/0, rediss://host:6379/0 or unix:///path"
    try:
        parts = urlsplit(options.url)
        port, host = parts.port or PORT, parts.hostname or ""
        query = parse_qs(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        # Drop the cause: it may quote a part of the password.
        raise ConfigError(f"url is malformed; {known}") from None
    unix = parts.scheme == "unix"
    number = query.get("db", ["0"])[0] if unix else parts.path.strip("/") or "0"
    problems = []
    if parts.scheme not in ("redis", "rediss", "unix"):
        problems.append(f"url has the scheme {parts.scheme!r}; {known}")
    elif unix and (host or not parts.path.startswith("/")):
        problems.append(f"url lacks the socket's absolute path; {known}")
    elif not unix and not host:
        problems.append(f"url lacks a host; {known}")
    elif not re.fullmatch("[0-9]{1,6}", number):
        # Do not show it: after a password with a slash it is the rest of the password.
        problems.append("url names a database that is not a number")
    if set(query) - {"db"} or parts.fragment or (query and not unix):
        problems.append("url has parameters; set them as options of this table instead")
    if problems:
        raise ConfigError(*problems)
    return Target(
        host=unquote(parts.path) if unix else host,
        port=0 if unix else port,
        db=int(number),
        tls=parts.scheme == "rediss",
        username=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
    )
