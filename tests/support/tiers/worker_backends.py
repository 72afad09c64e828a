"""Backends that misbehave on demand, importable by a worker process."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from tierd.backend import (
    SCANNED_MAX,
    Backend,
    BackendStats,
    BlockHeader,
    GetRequest,
    GetResult,
    Outcome,
    PutRequest,
    Scanned,
)
from tierd.errors import BackendError, ConfigError
from tierd.types import BlockKey

SCRIBBLE = 0x77


class OddOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`open_does` names a file that says how open() fails; without the file it opens."""

    secret: str = ""
    open_does: str = ""
    close_hangs: bool = False
    headers: int = 0


class OddBackend(Backend):
    """Does what the namespace of a call says: b"hang", b"crash" and so on."""

    Options: ClassVar[type[msgspec.Struct]] = OddOptions

    def __init__(self, options: OddOptions) -> None:
        self._options = options
        self._growing: asyncio.Task[None] | None = None
        self._stats = BackendStats(capacity_bytes=7)
        self.counters = {"calls_total": 0, "scans_ended_total": 0}

    @classmethod
    def from_options(cls, options: msgspec.Struct) -> OddBackend:
        assert isinstance(options, OddOptions)
        if options.secret == "refused":
            raise ConfigError("secret is refused")
        return cls(options)

    async def open(self) -> None:
        if self._follow_plan():
            await asyncio.sleep(3600)

    def _follow_plan(self) -> bool:
        """Fail as the file says, or return whether to hang."""
        plan = Path(self._options.open_does)
        if not plan.is_file():
            return False
        with plan.with_suffix(".tries").open("a") as tries:
            tries.write(".")
        match plan.read_text():
            case "config":
                raise ConfigError("key is wrong")
            case "backend":
                raise BackendError("server is away")
            case "bug":
                raise KeyError("open")
            case "exit":
                os._exit(3)
            case _:
                return True

    async def close(self) -> None:
        if self._options.close_hangs:
            await asyncio.sleep(3600)

    async def contains_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        self.counters["calls_total"] += 1
        match namespace:
            case b"crash":
                os.abort()
            case b"hang":
                await asyncio.sleep(3600)
            case b"block":
                Path("/proc/self/comm").write_text("blocked")  # noqa: ASYNC240  # to be seen
                time.sleep(3600)  # noqa: ASYNC251  # as a client that blocks the loop does
            case b"bug":
                raise KeyError("contains_many")
            case b"error":
                raise BackendError("server says no")
            case b"no utf-8":
                raise BackendError("no such file: \udcff")
            case b"cancel":
                raise asyncio.CancelledError
            case b"grow":
                self._growing = asyncio.create_task(self._grow())
        return [block_hash[0] % 2 == 1 for block_hash in hashes]

    async def use_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        return [block_hash[0] % 2 == 0 for block_hash in hashes]

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        match namespace:
            case b"linger":
                try:
                    await asyncio.sleep(3600)
                finally:
                    await asyncio.sleep(0.05)
                    requests[0].view[:1] = bytes([SCRIBBLE])
            case b"stubborn":
                threading.Thread(target=_scribble, args=(requests[0].view,), daemon=True).start()
                while True:
                    try:
                        await asyncio.sleep(3600)
                    except asyncio.CancelledError:
                        continue
            case b"odd header":
                header = BlockHeader(BlockKey(b"short", b"short"), b"", 1, b"")
                return [GetResult(Outcome.HIT, header)] * len(requests)
        for request in requests:
            request.view[: request.length] = request.block_hash[:1] * request.length
        return [GetResult(Outcome.MISS)] * len(requests)

    async def put_many(self, namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
        outcomes = list(Outcome)
        return [outcomes[request.view[0] % len(outcomes)] for request in requests]

    async def delete_many(self, namespace: bytes, hashes: Sequence[bytes]) -> int:
        return len(hashes)

    async def scan(self) -> AsyncIterator[Scanned]:
        names = [number.to_bytes(32, "big") for number in range(self._options.headers)]
        headers = [
            BlockHeader(BlockKey(name[-24:], name), name, number, name[-16:])
            for number, name in enumerate(names)
        ]
        try:
            for at in range(0, len(headers), SCANNED_MAX):
                yield Scanned(headers[at : at + SCANNED_MAX])
        finally:
            self.counters["scans_ended_total"] += 1

    async def marks(self) -> list[str]:
        return ["no utf-8: \udcff"]

    async def add_mark(self, mark: str) -> None:
        pass

    async def drop_marks(self, marks: Sequence[str]) -> None:
        pass

    def stats(self) -> BackendStats:
        return self._stats

    async def _grow(self) -> None:
        self._stats = BackendStats(index_complete=False)
        for blocks in range(1, 6):
            await asyncio.sleep(0.01)
            self._stats = BackendStats(blocks=blocks, index_complete=blocks == 5)


def _scribble(view: memoryview) -> None:
    while True:
        view[:] = bytes([SCRIBBLE]) * len(view)
        time.sleep(0)
