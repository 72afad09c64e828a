"""Blocks, slots and calls that the conformance suite is built from."""

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
"""Marks that a tier must be able to keep: more than the daemon ever creates."""

_ASK_MAX = 16
"""Hashes per call: a tier may treat a longer list as one prefix and bisect it."""


class Damage(enum.Enum):
    """How a `damage` hook changes a stored block without the tier's knowledge."""

    FLIP_HEADER = "flip header"
    """Flip a bit in byte `offset` of the stored 128-byte header."""
    FLIP_PAYLOAD = "flip payload"
    """Flip a bit in byte `offset` of the stored payload."""
    TRUNCATE = "truncate"
    """Cut the stored block off `offset` bytes into the payload."""
    OVERSIZE = "oversize"
    """Replace the block with a valid block that is `offset` bytes longer."""


class SelfNamingBlock(NamedTuple):
    """A block whose payload is derived from its namespace and hash, so wrong bytes show."""

    key: BlockKey
    parent: bytes
    payload: bytes
    checksum: bytes

    @property
    def header(self) -> BlockHeader:
        """The header that a tier must return with the payload."""
        return BlockHeader(self.key, self.parent, len(self.payload), self.checksum)


def payload_of(key: BlockKey, length: int) -> bytes:
    """Return the only valid payload of a block with this key and length."""
    return hashlib.shake_128(key.namespace + key.block_hash).digest(length)


def make_block(
    name: str, parent: bytes, length: int, namespace: bytes = NAMESPACE
) -> SelfNamingBlock:
    """Return the block of this name; its hash is derived from the name."""
    key = BlockKey(namespace, hashlib.sha256(name.encode()).digest())
    payload = payload_of(key, length)
    return SelfNamingBlock(key, parent, payload, checksum(payload))


def make_chain(
    name: str, count: int, length: int, namespace: bytes = NAMESPACE
) -> list[SelfNamingBlock]:
    """Return `count` blocks, each the parent of the next."""
    blocks: list[SelfNamingBlock] = []
    for position in range(count):
        parent = blocks[-1].key.block_hash if blocks else ROOT
        blocks.append(make_block(f"{name}/{position}", parent, length, namespace))
    return blocks


def damaged(raw: bytes, how: Damage, offset: int) -> bytes:
    """Return the damaged bytes of a block that is stored as its header followed by its payload."""
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
        """Return a writable view of the whole slot."""
        at = PAGE_BYTES + slot * (self.slot_bytes + PAGE_BYTES)
        return self._memory[at : at + self.slot_bytes]

    def blank(self, slot: int) -> None:
        """Fill a slot with the canary."""
        self.view(slot)[:] = bytes([_CANARY]) * self.slot_bytes

    def is_blank(self, slot: int) -> bool:
        """Whether a slot holds only the canary."""
        return self.view(slot) == bytes([_CANARY]) * self.slot_bytes

    def check(self) -> None:
        """Assert that nothing was written outside the slots."""
        canary = bytes([_CANARY]) * PAGE_BYTES
        for at in range(0, len(self._memory), self.slot_bytes + PAGE_BYTES):
            page = self._memory[at : at + PAGE_BYTES]
            assert page == canary, "the backend wrote outside the views that it was given"


async def put(
    backend: Backend, blocks: Sequence[SelfNamingBlock], slot_bytes: int = 0
) -> list[Outcome]:
    """Store blocks of one namespace from new slots, and assert that the slots did not change."""
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
    assert len(outcomes) == len(blocks), "put_many must return one outcome per request"
    for position, block in enumerate(blocks):
        payload = slots.view(position)[: len(block.payload)]
        assert payload == block.payload, "put_many changed the bytes in a view"
    slots.check()
    return outcomes


async def get(
    backend: Backend, blocks: Sequence[SelfNamingBlock], slot_bytes: int = 0
) -> list[Outcome]:
    """Load blocks of one namespace into new slots; asserts that each HIT has the right bytes."""
    slots = _slots_for(blocks, slot_bytes)
    requests = [
        GetRequest(block.key.block_hash, slots.view(position), len(block.payload))
        for position, block in enumerate(blocks)
    ]
    results = await backend.get_into(blocks[0].key.namespace, requests)
    assert len(results) == len(blocks), "get_into must return one result per request"
    for position, (block, result) in enumerate(zip(blocks, results, strict=True)):
        check_result(block, result, slots.view(position))
    slots.check()
    return [result.outcome for result in results]


def check_result(block: SelfNamingBlock, result: GetResult, view: memoryview) -> None:
    """Assert that a HIT is exactly `block`, and that any other outcome has no header."""
    if result.outcome is Outcome.HIT:
        assert result.header == block.header, "a HIT with another header than was stored"
        payload = view[: len(block.payload)]
        assert payload == block.payload, "a HIT with other bytes than were stored"
    else:
        known = (Outcome.MISS, Outcome.CORRUPT, Outcome.ERROR)
        assert result.outcome in known, "get_into must not return this outcome"
        assert result.header is None, "only a HIT may have a header"


async def scanned(backend: Backend) -> list[BlockHeader]:
    """Return all headers of a scan; asserts that each step is small and was read completely."""
    found: list[BlockHeader] = []
    async for step in backend.scan():
        assert len(step.headers) <= SCANNED_MAX, "a step of scan() has too many headers"
        assert not step.unread, "scan() could not read a part of a healthy storage"
        found += step.headers
    return found


async def contains(backend: Backend, blocks: Sequence[SelfNamingBlock]) -> list[bool]:
    """Call contains_many for blocks of one namespace, in lists too short to be bisected."""
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
    """Open a backend, wait until its index is complete, and close it at the end of the block."""
    await backend.open()
    try:
        await indexed(backend)
        yield backend
    finally:
        await backend.close()


async def indexed(backend: Backend) -> None:
    """Wait until the backend's index is complete."""
    while not backend.stats().index_complete:
        await asyncio.sleep(0.001)


async def take_turns(count: int) -> None:
    """Yield to the event loop `count` times, and give threads and servers 0.2 ms each time."""
    for _ in range(count):
        await asyncio.sleep(0.0002)
