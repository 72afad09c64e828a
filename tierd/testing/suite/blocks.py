"""Blocks, slots and calls that the checks of a storage tier are made of."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hashlib
import os
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, TypeVar

from tierd.backend import (
    HEADER_BYTES,
    SCANNED_MAX,
    Backend,
    BlockHeader,
    GetRequest,
    GetResult,
    Outcome,
    PutRequest,
    checksum,
    pack_header,
    unpack_header,
)
from tierd.shared_memory.mapping import SharedMapping
from tierd.types import HASH_BYTES, PAGE_BYTES, SCOPE_BYTES, BlockKey, slot_bytes_for

ROOT = bytes(HASH_BYTES)
"""Parent of a chain's first block."""

NAMESPACE = hashlib.sha256(b"suite").digest()[:SCOPE_BYTES]
OTHER_NAMESPACE = hashlib.sha256(b"other suite").digest()[:SCOPE_BYTES]

BackendT = TypeVar("BackendT", bound=Backend)

_CANARY = 0xA5

MARKS_ASKED = 600
"""Marks that a tier has to keep: more than the daemon ever makes."""

_ASK_MAX = 16
"""Hashes asked for at once: a tier may answer a long list as if it were a whole prefix."""


class Damage(enum.Enum):
    """What a `damage` hook does to a stored block behind the tier's back."""

    FLIP_HEADER = "flip header"
    """Flip a bit in byte `offset` of the stored 128-byte header."""
    FLIP_PAYLOAD = "flip payload"
    """Flip a bit in byte `offset` of the stored payload."""
    TRUNCATE = "truncate"
    """End what is stored `offset` bytes into the payload."""
    OVERSIZE = "oversize"
    """Replace the block by one that is sound and `offset` bytes longer than it was."""


class SelfNamingBlock(NamedTuple):
    """A block that names itself: its payload follows from namespace and hash."""

    key: BlockKey
    parent: bytes
    payload: bytes
    checksum: bytes

    @property
    def header(self) -> BlockHeader:
        """What a tier must give back beside the payload."""
        return BlockHeader(self.key, self.parent, len(self.payload), self.checksum)


def payload_of(key: BlockKey, length: int) -> bytes:
    """The only bytes that a block of this key and length may ever be served with."""
    return hashlib.shake_128(key.namespace + key.block_hash).digest(length)


def make_block(
    name: str, parent: bytes, length: int, namespace: bytes = NAMESPACE
) -> SelfNamingBlock:
    """The block of this name."""
    key = BlockKey(namespace, hashlib.sha256(name.encode()).digest())
    payload = payload_of(key, length)
    return SelfNamingBlock(key, parent, payload, checksum(payload))


def make_chain(
    name: str, count: int, length: int, namespace: bytes = NAMESPACE
) -> list[SelfNamingBlock]:
    """`count` blocks, each the parent of the next."""
    blocks: list[SelfNamingBlock] = []
    for position in range(count):
        parent = blocks[-1].key.block_hash if blocks else ROOT
        blocks.append(make_block(f"{name}/{position}", parent, length, namespace))
    return blocks


def damaged(raw: bytes, how: Damage, offset: int) -> bytes:
    """What a `damage` hook makes of a block stored as its header with the payload behind it."""
    changed = bytearray(raw)
    match how:
        case Damage.FLIP_HEADER:
            changed[offset] ^= 1
        case Damage.FLIP_PAYLOAD:
            changed[HEADER_BYTES + offset] ^= 1
        case Damage.TRUNCATE:
            del changed[HEADER_BYTES + offset :]
        case Damage.OVERSIZE:
            before = unpack_header(raw)
            assert before is not None
            longer = payload_of(before.key, before.length + offset)
            after = before._replace(length=len(longer), checksum=checksum(longer))
            return pack_header(after) + longer
    return bytes(changed)


class CanarySlots:
    """Page-aligned slots with a canary page before, between and after them."""

    def __init__(self, count: int, slot_bytes: int) -> None:
        assert slot_bytes % PAGE_BYTES == 0
        self.count = count
        self.slot_bytes = slot_bytes
        size_bytes = count * (slot_bytes + PAGE_BYTES) + PAGE_BYTES
        fd = os.memfd_create("tierd-suite", os.MFD_CLOEXEC)
        os.ftruncate(fd, size_bytes)
        self._memory = SharedMapping(fd, size_bytes).view
        weakref.finalize(self, os.close, fd)
        self._memory[:] = bytes([_CANARY]) * len(self._memory)

    def view(self, slot: int) -> memoryview:
        """The whole slot, writable."""
        at = PAGE_BYTES + slot * (self.slot_bytes + PAGE_BYTES)
        return self._memory[at : at + self.slot_bytes]

    def blank(self, slot: int) -> None:
        """Fill a slot with the canary."""
        self.view(slot)[:] = bytes([_CANARY]) * self.slot_bytes

    def is_blank(self, slot: int) -> bool:
        """Whether a slot holds nothing but the canary."""
        return self.view(slot) == bytes([_CANARY]) * self.slot_bytes

    def check(self) -> None:
        """Assert that nothing was written outside the slots."""
        canary = bytes([_CANARY]) * PAGE_BYTES
        for at in range(0, len(self._memory), self.slot_bytes + PAGE_BYTES):
            assert self._memory[at : at + PAGE_BYTES] == canary


async def put(
    backend: Backend, blocks: Sequence[SelfNamingBlock], slot_bytes: int = 0
) -> list[Outcome]:
    """Store blocks of one namespace from slots of their own."""
    slots = _slots_for(blocks, slot_bytes)
    requests = []
    for position, block in enumerate(blocks):
        view = slots.view(position)
        view[: len(block.payload)] = block.payload
        length = len(block.payload)
        requests.append(
            PutRequest(block.key.block_hash, block.parent, block.checksum, view, length)
        )
    outcomes = await backend.put_many(blocks[0].key.namespace, requests)
    assert len(outcomes) == len(blocks)
    for position, block in enumerate(blocks):
        assert slots.view(position)[: len(block.payload)] == block.payload
    slots.check()
    return outcomes


async def get(
    backend: Backend, blocks: Sequence[SelfNamingBlock], slot_bytes: int = 0
) -> list[Outcome]:
    """Bring blocks of one namespace; asserts that each HIT is right and nothing else was hit."""
    slots = _slots_for(blocks, slot_bytes)
    requests = [
        GetRequest(block.key.block_hash, slots.view(position), len(block.payload))
        for position, block in enumerate(blocks)
    ]
    results = await backend.get_into(blocks[0].key.namespace, requests)
    assert len(results) == len(blocks)
    for position, (block, result) in enumerate(zip(blocks, results, strict=True)):
        check_result(block, result, slots.view(position))
    slots.check()
    return [result.outcome for result in results]


def check_result(block: SelfNamingBlock, result: GetResult, view: memoryview) -> None:
    """Assert that a HIT is exactly `block`, and that anything else claims nothing."""
    if result.outcome is Outcome.HIT:
        assert result.header == block.header
        assert view[: len(block.payload)] == block.payload
    else:
        assert result.outcome in (Outcome.MISS, Outcome.CORRUPT, Outcome.ERROR)
        assert result.header is None


async def scanned(backend: Backend) -> list[BlockHeader]:
    """All headers that a scan shows, of which each step must be a small one, and whole."""
    found: list[BlockHeader] = []
    async for step in backend.scan():
        assert len(step.headers) <= SCANNED_MAX
        assert not step.unread
        found += step.headers
    return found


async def contains(backend: Backend, blocks: Sequence[SelfNamingBlock]) -> list[bool]:
    """contains_many for blocks of one namespace, in lists that no tier bisects."""
    namespace = blocks[0].key.namespace
    hashes = [block.key.block_hash for block in blocks]
    held: list[bool] = []
    for at in range(0, len(hashes), _ASK_MAX):
        held += await backend.contains_many(namespace, hashes[at : at + _ASK_MAX])
    return held


def _slots_for(blocks: Sequence[SelfNamingBlock], slot_bytes: int) -> CanarySlots:
    longest = max(len(block.payload) for block in blocks)
    return CanarySlots(len(blocks), slot_bytes or slot_bytes_for(longest))


@contextlib.asynccontextmanager
async def running(backend: BackendT) -> AsyncIterator[BackendT]:
    """A backend open, and knowing all that it holds, until the block ends."""
    await backend.open()
    try:
        await indexed(backend)
        yield backend
    finally:
        await backend.close()


async def indexed(backend: Backend) -> None:
    """Return when the backend knows all that it holds."""
    while not backend.stats().index_complete:
        await asyncio.sleep(0.001)


async def take_turns(count: int) -> None:
    """Let the event loop turn so many times, giving threads and peers a moment each."""
    for _ in range(count):
        await asyncio.sleep(0.0002)
