"""Damage done to stored blocks behind tierd's back, on whatever server they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import redis

from tests.support.servers.s3 import S3Server

Damage = Callable[[Sequence[bytes]], list[bytes]]


MARKS = "marks"
"""In the names of what a tier keeps of flushes."""

DELETE_TRIES = 20
"""Of a bucket that something was put into meanwhile."""


class Store(Protocol):
    """Values by name, as a server has them."""

    def names(self) -> list[str]:
        """Of all blocks, in no order."""

    def read(self, name: str) -> bytes | None:
        """A value; None if it has gone."""

    def write(self, name: str, value: bytes) -> None:
        """Put a value under a name."""


class RedisStore:
    """What a Redis tier keeps."""

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
    """What an S3 tier keeps in a bucket."""

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
        """The bucket with all that is in it, whoever is storing more at that time."""
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
    """The first half, header included, is the right one; the rest is another block's."""
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
    """Damage at most `count` blocks of all that there are; how many there were.

    Those of one scope sort together, and it may be one that nobody asks for any more.
    """
    blocks = sorted(name for name in store.names() if MARKS not in name)
    chosen = blocks[:: max(1, len(blocks) // count)][:count]
    found = {name: store.read(name) for name in chosen}
    whole = {name: value for name, value in found.items() if value is not None}
    for name, value in zip(whole, damage(list(whole.values())), strict=True):
        store.write(name, value)
    return len(whole)
