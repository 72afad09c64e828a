"""Damages stored blocks without tierd's knowledge, on any kind of server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import redis

from tests.support.servers.s3 import S3Server

Damage = Callable[[Sequence[bytes]], list[bytes]]


MARKS = "marks"
"""Part of the names under which a tier keeps marks of flushes."""

DELETE_TRIES = 20
"""Attempts to delete a bucket into which objects are put meanwhile."""


class Store(Protocol):
    """Values by name, on a server."""

    def names(self) -> list[str]:
        """Names of all blocks, in any order."""

    def read(self, name: str) -> bytes | None:
        """A value; None if it no longer exists."""

    def write(self, name: str, value: bytes) -> None:
        """Put a value under a name."""


class RedisStore:
    """The values of a Redis tier."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def names(self) -> list[str]:
        return [name.decode("latin-1") for name in self._client.scan_iter(count=1000)]

    def read(self, name: str) -> bytes | None:
        value = self._client.get(name.encode("latin-1"))
        assert not isinstance(value, str), "the client decodes"
        return value

    def write(self, name: str, value: bytes) -> None:
        self._client.set(name.encode("latin-1"), value)


class S3Store:
    """The values of an S3 tier's bucket."""

    def __init__(self, server: S3Server, bucket: str) -> None:
        self._client: Any = server.client()
        self._bucket = bucket

    def names(self) -> list[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket)
        return [each["Key"] for page in pages for each in page.get("Contents", [])]

    def read(self, name: str) -> bytes | None:
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=name)
        except self._client.exceptions.NoSuchKey:
            return None
        with answer["Body"] as body:
            value: bytes = body.read()
        return value

    def write(self, name: str, value: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=name, Body=value)

    def delete(self) -> None:
        """Delete the bucket and its objects, even while clients are storing more."""
        for last in (*[False] * (DELETE_TRIES - 1), True):
            for name in self.names():
                self._client.delete_object(Bucket=self._bucket, Key=name)
            try:
                self._client.delete_bucket(Bucket=self._bucket)
            except self._client.exceptions.ClientError as error:
                if last or error.response["Error"]["Code"] != "BucketNotEmpty":
                    raise
            else:
                return


def _swap(values: Sequence[bytes]) -> list[bytes]:
    return [*values[1:], values[0]]


def _mix(values: Sequence[bytes]) -> list[bytes]:
    """The first half, header included, is right; the rest is another block's."""
    return [
        value[: len(value) // 2] + other[len(value) // 2 :]
        for value, other in zip(values, _swap(values), strict=True)
    ]


def _flip(values: Sequence[bytes]) -> list[bytes]:
    at = [len(value) * 2 // 3 for value in values]
    return [v[:i] + bytes([v[i] ^ 4]) + v[i + 1 :] for v, i in zip(values, at, strict=True)]


DAMAGES: dict[str, Damage] = {
    "swapped": _swap,
    "mixed": _mix,
    "flipped": _flip,
    "oversized": lambda values: [value + value for value in values],
    "truncated": lambda values: [value[:-1] for value in values],
    "empty": lambda values: [b""] * len(values),
}


def plant(store: Store, damage: Damage, count: int) -> int:
    """Damage up to `count` of all blocks; returns the number of all blocks.

    The names of one scope sort together, and clients may no longer ask for that scope.
    """
    blocks = sorted(name for name in store.names() if MARKS not in name)
    chosen = blocks[:: max(1, len(blocks) // count)][:count]
    found = {name: store.read(name) for name in chosen}
    whole = {name: value for name, value in found.items() if value is not None}
    for name, value in zip(whole, damage(list(whole.values())), strict=True):
        store.write(name, value)
    return len(whole)
