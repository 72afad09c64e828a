"""A storage tier in memory that can fail in every way that the contract allows.

Without faults it passes BackendSuite. With a plan of faults it fails like disks, servers and
their clients do, drawn from a seed. It never breaks the contract itself: a HIT is verified, and
a cancelled call no longer uses its views when it ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from random import Random
from typing import ClassVar, NamedTuple

import msgspec

from tierd.backend import (
    HEADER_BYTES,
    Backend,
    BackendStats,
    BlockHeader,
    GetRequest,
    GetResult,
    Outcome,
    PutRequest,
    Scanned,
    pack_header,
    unpack_header,
    verify_block,
)
from tierd.chain import ChainIndex
from tierd.errors import BackendError, ConfigError
from tierd.eviction.policy import PrefixRequest
from tierd.testing.faulty import NO_FAULTS, FaultPlan, Faults, InjectedFault
from tierd.types import BlockKey

__all__ = [
    "NO_FAULTS",
    "FaultPlan",
    "InjectedFault",
    "MemoryBackend",
    "MemoryOptions",
    "StoredBlock",
]


_SCAN_STEP = 32
"""Headers per step of a scan; each header may be delayed."""


class StoredBlock(NamedTuple):
    """The stored bytes of a block; a test may change them without the tier's knowledge."""

    header: bytes
    payload: bytes


class _Held(NamedTuple):
    key: BlockKey
    size: int


_NOTHING = _Held(BlockKey(b"", b""), 0)


class MemoryOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Options of MemoryBackend."""

    capacity: int | None = None
    """Upper bound of headers and payloads in bytes; None: no bound."""


class MemoryBackend(Backend):
    """A backend with its blocks in a dict (`blocks`) and its marks in a set (`kept_marks`).

    Both outlive the backend, as a disk does. `plan` may be replaced at any time, for instance to
    let a failed server recover. Its latency is drawn once per call, before each block, and in
    the middle of each block. The counter `torn_writes_total` counts blocks whose bytes did not
    match their checksum while they were stored: the caller reused a slot too early.
    """

    Options: ClassVar[type[msgspec.Struct]] = MemoryOptions

    def __init__(
        self,
        capacity_bytes: int | None = None,
        *,
        plan: FaultPlan = NO_FAULTS,
        seed: int = 0,
        blocks: dict[BlockKey, StoredBlock] | None = None,
        marks: set[str] | None = None,
    ) -> None:
        self.blocks = {} if blocks is None else blocks
        self.kept_marks = set() if marks is None else marks
        self.counters = {"corrupt_total": 0, "evicted_blocks_total": 0}
        self._faults = Faults(self.counters, plan, Random(f"memory backend {seed}"))
        self._capacity_bytes = capacity_bytes
        self._index = ChainIndex()
        self._held: list[_Held] = []
        self._free: list[int] = []
        self._used_bytes = 0
        self._pinned: Counter[bytes] = Counter()
        self._opened = False

    @property
    def plan(self) -> FaultPlan:
        """The faults to inject from now on."""
        return self._faults.plan

    @plan.setter
    def plan(self, plan: FaultPlan) -> None:
        self._faults.plan = plan

    @classmethod
    def from_options(cls, options: msgspec.Struct) -> MemoryBackend:
        assert isinstance(options, MemoryOptions)
        if options.capacity is not None and options.capacity < 1:
            raise ConfigError(f"capacity is {options.capacity}; it must be at least 1 byte")
        return cls(options.capacity)

    async def open(self) -> None:
        assert not self._opened
        for key, stored in list(self.blocks.items()):
            header = unpack_header(stored.header)
            if header is None or header.key != key or not self._find_room(_size(stored)):
                del self.blocks[key]
            else:
                self._admit(key, header.parent, _size(stored))
        self._opened = True

    async def close(self) -> None:
        self._opened = False
        await self._faults.ended()

    async def contains_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        async with self._call():
            return [namespace + block_hash in self._index for block_hash in hashes]

    async def use_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        async with self._call():
            keys = [namespace + block_hash for block_hash in hashes]
            self._index.use(PrefixRequest(keys, 0.0))
            return [key in self._index for key in keys]

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        async with self._call(gets=requests):
            return [await self._get(BlockKey(namespace, r.block_hash), r) for r in requests]

    async def put_many(self, namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
        # Eviction must spare the batch and its parents, or its tail would follow a hole.
        pins = [namespace + r.block_hash for r in requests]
        pins += [namespace + r.parent for r in requests]
        self._pinned.update(pins)
        try:
            async with self._call(puts=requests):
                outcomes: dict[bytes, Outcome] = {}
                answer = []
                for request in requests:
                    orphaned = outcomes.get(request.parent) is Outcome.REFUSED
                    outcome = Outcome.REFUSED
                    if not orphaned:
                        outcome = await self._put(BlockKey(namespace, request.block_hash), request)
                    outcomes[request.block_hash] = outcome
                    answer.append(outcome)
                return answer
        finally:
            self._pinned.subtract(pins)
            self._pinned = +self._pinned

    async def delete_many(self, namespace: bytes, hashes: Sequence[bytes]) -> int:
        dropped = 0
        async with self._call():
            for block_hash in hashes:
                await self._faults.delay()
                dropped += self._drop(BlockKey(namespace, block_hash))
        return dropped

    async def scan(self) -> AsyncIterator[Scanned]:
        keys = list(self.blocks)
        for at in range(0, len(keys), _SCAN_STEP):
            headers = []
            for key in keys[at : at + _SCAN_STEP]:
                await self._faults.delay()
                stored = self.blocks.get(key)
                header = unpack_header(stored.header) if stored is not None else None
                if header is not None and header.key == key:
                    headers.append(header)
            yield Scanned(headers)

    async def marks(self) -> list[str]:
        async with self._call():
            return sorted(self.kept_marks)

    async def add_mark(self, mark: str) -> None:
        async with self._call():
            self.kept_marks.add(mark)

    async def drop_marks(self, marks: Sequence[str]) -> None:
        async with self._call():
            self.kept_marks.difference_update(marks)

    def stats(self) -> BackendStats:
        return BackendStats(
            blocks=len(self._index),
            used_bytes=self._used_bytes,
            capacity_bytes=self._capacity_bytes or 0,
        )

    def _call(
        self, *, gets: Sequence[GetRequest] = (), puts: Sequence[PutRequest] = ()
    ) -> AbstractAsyncContextManager[None]:
        if not self._opened:
            raise BackendError("the memory tier is not open")
        return self._faults.call(gets=gets, puts=puts)

    async def _get(self, key: BlockKey, request: GetRequest) -> GetResult:
        await self._faults.delay()
        if self._faults.strikes(InjectedFault.FAIL_BLOCK):
            return GetResult(Outcome.ERROR)
        item = self._index.items.get(key.namespace + key.block_hash)
        if item is None:
            return GetResult(Outcome.MISS)
        if key not in self.blocks or self._faults.strikes(InjectedFault.VANISH):
            self._drop(key)
            return GetResult(Outcome.MISS)
        self._index.touch([item])
        self._damage(key)
        stored = self.blocks[key]
        # As on a disk, bytes reach the slot before they are verified, and in two parts.
        size = min(len(stored.payload), len(request.view))
        request.view[: size // 2] = stored.payload[: size // 2]
        await self._faults.delay()
        if self._faults.strikes(InjectedFault.TORN_READ):
            self._faults.scribble(request.view)
            return GetResult(Outcome.ERROR)
        request.view[size // 2 : size] = stored.payload[size // 2 : size]
        header = verify_block(stored.header, key, request.view, request.length)
        if header is None or len(stored.payload) != request.length:
            self.counters["corrupt_total"] += 1
            if self.blocks.get(key) is stored:
                self._drop(key)
            return GetResult(Outcome.CORRUPT)
        return GetResult(Outcome.HIT, header)

    async def _put(self, key: BlockKey, request: PutRequest) -> Outcome:
        await self._faults.delay()
        if self._faults.strikes(InjectedFault.FAIL_BLOCK):
            return Outcome.ERROR
        half = request.length // 2
        payload = bytes(request.view[:half])
        await self._faults.delay()
        payload += bytes(request.view[half : request.length])
        self._faults.check_payload(request, payload)
        item = self._index.items.get(key.namespace + key.block_hash)
        if item is not None:
            self._index.touch([item])
            return Outcome.PRESENT
        if self._faults.strikes(InjectedFault.LOSE_WRITE):
            return Outcome.STORED
        header = BlockHeader(key, request.parent, request.length, request.checksum)
        stored = StoredBlock(pack_header(header), payload)
        if not self._find_room(_size(stored)):
            return Outcome.REFUSED
        self.blocks[key] = stored
        self._admit(key, request.parent, _size(stored))
        return Outcome.STORED

    def _admit(self, key: BlockKey, parent: bytes, size: int) -> None:
        if not self._free:
            self._free.append(len(self._held))
            self._held.append(_NOTHING)
        item = self._free.pop()
        self._held[item] = _Held(key, size)
        self._used_bytes += size
        self._index.insert(item, key.namespace + key.block_hash, key.namespace + parent)

    def _drop(self, key: BlockKey) -> bool:
        item = self._index.items.get(key.namespace + key.block_hash)
        if item is None:
            return False
        self._index.remove(item)
        self._release(item)
        return True

    def _find_room(self, size: int) -> bool:
        """Evict until `size` more bytes fit; return False if they cannot."""
        if self._capacity_bytes is None:
            return True
        if size > self._capacity_bytes:
            return False
        while self._used_bytes + size > self._capacity_bytes:
            evicted = self._index.evict(1, self._is_pinned)
            if not evicted:
                return False
            self._release(evicted[0])
            self.counters["evicted_blocks_total"] += 1
        return True

    def _release(self, item: int) -> None:
        """Delete a block that was removed from the index, and free its item number."""
        key, size = self._held[item]
        self.blocks.pop(key, None)
        self._used_bytes -= size
        self._free.append(item)

    def _is_pinned(self, item: int) -> bool:
        key = self._held[item].key
        return key.namespace + key.block_hash in self._pinned

    def _damage(self, key: BlockKey) -> None:
        """Damage a stored block as the plan says."""
        header, payload = self.blocks[key]
        if payload and self._faults.strikes(InjectedFault.TRUNCATE):
            payload = payload[: self._faults.random.randrange(len(payload))]
        if payload and self._faults.strikes(InjectedFault.FLIP_PAYLOAD):
            payload = self._flip(payload)
        if self._faults.strikes(InjectedFault.FLIP_HEADER):
            header = self._flip(header)
        self.blocks[key] = StoredBlock(header, payload)
        others = [other for other in self.blocks if other != key]
        if others and self._faults.strikes(InjectedFault.SWAP):
            other = self._faults.random.choice(others)
            self.blocks[key], self.blocks[other] = self.blocks[other], self.blocks[key]

    def _flip(self, data: bytes) -> bytes:
        changed = bytearray(data)
        changed[self._faults.random.randrange(len(data))] ^= 1 << self._faults.random.randrange(8)
        return bytes(changed)


def _size(stored: StoredBlock) -> int:
    return HEADER_BYTES + len(stored.payload)
