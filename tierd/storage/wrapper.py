"""Base class of backends that wrap another backend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

import msgspec

from tierd.backend import (
    Backend,
    BackendStats,
    GetRequest,
    GetResult,
    Outcome,
    PutRequest,
    Scanned,
)


class WrapperOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """No options: the daemon builds wrappers; the configuration cannot name them."""


class Wrapper(Backend):
    """Passes every call on to `inner`, which it owns, including open and close.

    A wrapper's own counters are in `own_counters`.
    """

    Options: ClassVar[type[msgspec.Struct]] = WrapperOptions

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.own_counters: dict[str, int] = {}

    @property
    def counters(self) -> dict[str, int]:  # type: ignore[override]  # a sum, so read-only
        """A new dict with the counters of `inner` and of the wrapper."""
        merged = dict(self.inner.counters)
        for name, value in self.own_counters.items():
            merged[name] = merged.get(name, 0) + value
        return merged

    @property
    def shared(self) -> bool:
        return self.inner.shared

    @property
    def use_every_s(self) -> float:
        return self.inner.use_every_s

    @property
    def place(self) -> str:
        return self.inner.place

    @classmethod
    def from_options(cls, options: msgspec.Struct) -> Wrapper:
        raise NotImplementedError("a wrapper is built around a backend, not from options")

    async def open(self) -> None:
        await self.inner.open()

    async def close(self) -> None:
        await self.inner.close()

    async def contains_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        return await self.inner.contains_many(namespace, hashes)

    async def use_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        return await self.inner.use_many(namespace, hashes)

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        return await self.inner.get_into(namespace, requests)

    async def put_many(self, namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
        return await self.inner.put_many(namespace, requests)

    async def delete_many(self, namespace: bytes, hashes: Sequence[bytes]) -> int:
        return await self.inner.delete_many(namespace, hashes)

    def scan(self) -> AsyncIterator[Scanned]:
        return self.inner.scan()

    async def marks(self) -> list[str]:
        return await self.inner.marks()

    async def add_mark(self, mark: str) -> None:
        await self.inner.add_mark(mark)

    async def drop_marks(self, marks: Sequence[str]) -> None:
        await self.inner.drop_marks(marks)

    async def reload(self) -> None:
        await self.inner.reload()

    def stats(self) -> BackendStats:
        return self.inner.stats()
