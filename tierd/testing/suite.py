"""The proof that a storage tier keeps the contract of `tierd.backend.Backend`.

Subclass BackendSuite in a test module, implement its hooks on the real thing (a disk, a
server), and pytest runs every check:

    class TestFile(BackendSuite):
        bounded = True
        async def make_backend(self, tmp_path, capacity_bytes): ...

The hooks `damage` and `swap` reach around the code under test, so that what it verifies
is really damaged. Needs pytest and pytest-asyncio.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hashlib
import os
import random
import weakref
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

import pytest
import pytest_asyncio

from tierd.backend import (
    HEADER_BYTES,
    SCANNED_MAX,
    Backend,
    BackendStats,
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


class Slots:
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


def _slots_for(blocks: Sequence[SelfNamingBlock], slot_bytes: int) -> Slots:
    longest = max(len(block.payload) for block in blocks)
    return Slots(len(blocks), slot_bytes or slot_bytes_for(longest))


_HOOKS = ("make_backend", "reopen", "damage", "swap")


class BackendSuite:
    """Checks of one backend. Hooks that a subclass lacks are refused when it is defined,
    since pytest would skip the class in silence."""

    pytestmark = pytest.mark.asyncio

    bounded: ClassVar[bool]
    """Whether the tier itself keeps a capacity; required."""
    block_bytes: ClassVar[int] = 3 * PAGE_BYTES + 100
    """Length of most blocks here; slots are padded to whole pages."""
    bounded_blocks: ClassVar[int] = 40
    """How many blocks of `block_bytes` the capacity of the eviction checks is made for."""

    def __init_subclass__(cls, *, abstract: bool = False) -> None:
        super().__init_subclass__()
        if abstract:
            return
        missing = [name for name in _HOOKS if getattr(cls, name) is getattr(BackendSuite, name)]
        if not hasattr(cls, "bounded"):
            missing.append("bounded")
        if missing:
            raise TypeError(f"{cls.__name__} lacks {', '.join(missing)}")

    async def make_backend(self, tmp_path: Path, capacity_bytes: int | None) -> Backend:
        """An open, empty backend; `capacity_bytes` is None or, if `bounded`, to be kept."""
        raise TypeError("a BackendSuite implements make_backend")

    async def reopen(self, backend: Backend) -> Backend:
        """Close `backend` and open another one on the same storage."""
        raise TypeError("a BackendSuite implements reopen")

    async def damage(self, backend: Backend, key: BlockKey, how: Damage, offset: int) -> None:
        """Damage a stored block without the backend's knowledge. TRUNCATE may also cost
        blocks stored later."""
        raise TypeError("a BackendSuite implements damage")

    async def swap(self, backend: Backend, first: BlockKey, second: BlockKey) -> None:
        """Exchange all that is stored of two blocks, headers included."""
        raise TypeError("a BackendSuite implements swap")

    @pytest_asyncio.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[Backend]:
        """An empty backend without a capacity worth mentioning."""
        made = await self.make_backend(tmp_path, None)
        yield made
        await made.close()

    @contextlib.asynccontextmanager
    async def reopened(self, backend: Backend) -> AsyncIterator[Backend]:
        """The same storage after a restart, its index complete."""
        made = await self.reopen(backend)
        try:
            await indexed(made)
            yield made
        finally:
            await made.close()

    def chain(self, name: str, count: int, namespace: bytes = NAMESPACE) -> list[SelfNamingBlock]:
        """A chain of blocks of this suite's size."""
        return make_chain(name, count, self.block_bytes, namespace)

    # What goes in comes out.

    @pytest.mark.parametrize(
        "length",
        [1, 100, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES, 128 << 10, 2 << 20],
    )
    async def test_round_trip(self, backend: Backend, length: int) -> None:
        """A block of any size would come back with other bytes, or another header."""
        blocks = make_chain(f"size {length}", 3, length)
        assert await put(backend, blocks) == [Outcome.STORED] * 3
        assert await get(backend, blocks) == [Outcome.HIT] * 3

    async def test_slot_larger_than_block(self, backend: Backend) -> None:
        """A block shorter than its slot would be padded, cut, or spill into the next slot."""
        blocks = make_chain("short", 4, 10)
        assert await put(backend, blocks, slot_bytes=4 * PAGE_BYTES) == [Outcome.STORED] * 4
        assert await get(backend, blocks, slot_bytes=4 * PAGE_BYTES) == [Outcome.HIT] * 4

    async def test_missing(self, backend: Backend) -> None:
        """A tier that has nothing would claim something, or fail instead of missing."""
        blocks = self.chain("missing", 3)
        assert await contains(backend, blocks) == [False] * 3
        assert await get(backend, blocks) == [Outcome.MISS] * 3
        assert await backend.delete_many(NAMESPACE, [b.key.block_hash for b in blocks]) == 0

    async def test_empty_batch(self, backend: Backend) -> None:
        """An empty batch would be an error of the whole tier."""
        assert await backend.contains_many(NAMESPACE, []) == []
        assert await backend.use_many(NAMESPACE, []) == []
        assert await backend.get_into(NAMESPACE, []) == []
        assert await backend.put_many(NAMESPACE, []) == []
        assert await backend.delete_many(NAMESPACE, []) == 0

    async def test_use(self, backend: Backend) -> None:
        """What the tier has lost would never be written again, or all the time what it has."""
        blocks = self.chain("used", 40)
        hashes = [block.key.block_hash for block in blocks]
        assert await backend.use_many(NAMESPACE, hashes) == [False] * 40
        await put(backend, blocks)
        gone = hashes[3], hashes[35]
        await backend.delete_many(NAMESPACE, gone)
        assert await backend.use_many(NAMESPACE, hashes) == [h not in gone for h in hashes]
        assert not any(await backend.use_many(OTHER_NAMESPACE, hashes))
        kept = [block for block in blocks if block.key.block_hash not in gone]
        assert await get(backend, kept) == [Outcome.HIT] * 38

    async def test_put_again(self, backend: Backend) -> None:
        """A block stored twice would be written twice, or lost."""
        blocks = self.chain("again", 3)
        assert await put(backend, blocks[:2]) == [Outcome.STORED] * 2
        outcomes = await put(backend, [blocks[0], blocks[2], blocks[1]])
        assert outcomes == [Outcome.PRESENT, Outcome.STORED, Outcome.PRESENT]
        assert await get(backend, blocks) == [Outcome.HIT] * 3
        assert backend.stats().blocks == 3

    async def test_put_twice_in_a_batch(self, backend: Backend) -> None:
        """A batch that names a block twice would hang, or hold it twice."""
        [block] = self.chain("twice", 1)
        outcomes = await put(backend, [block, block])
        assert sorted(o.value for o in outcomes) == ["present", "stored"]
        assert await get(backend, [block, block]) == [Outcome.HIT] * 2
        assert backend.stats().blocks == 1

    async def test_put_at_once(self, backend: Backend) -> None:
        """Two engines that store one prefix together would leave two copies or none."""
        blocks = self.chain("at once", 8)
        every = await asyncio.gather(*(put(backend, blocks) for _ in range(4)))
        for outcomes in zip(*every, strict=True):
            assert sorted(o.value for o in outcomes) == ["present"] * 3 + ["stored"]
        assert await get(backend, blocks) == [Outcome.HIT] * 8
        assert backend.stats().blocks == 8

    async def test_mixed_batch(self, backend: Backend) -> None:
        """One block's outcome would be reported for its neighbour."""
        blocks = self.chain("mixed", 9)
        assert await put(backend, blocks[::2]) == [Outcome.STORED] * 5
        await self.damage(backend, blocks[4].key, Damage.FLIP_PAYLOAD, 7)
        hit, miss = Outcome.HIT, Outcome.MISS
        expected = [hit, miss, hit, miss, Outcome.CORRUPT, miss, hit, miss, hit]
        assert await contains(backend, blocks) == [True, False] * 4 + [True]
        assert await get(backend, blocks) == expected

    async def test_namespaces(self, backend: Backend) -> None:
        """One model would be served another model's KV for the same tokens."""
        ours = self.chain("shared", 2)
        theirs = self.chain("shared", 2, OTHER_NAMESPACE)
        assert ours[0].key.block_hash == theirs[0].key.block_hash
        assert await put(backend, ours) == [Outcome.STORED] * 2
        assert await get(backend, theirs) == [Outcome.MISS] * 2
        assert await put(backend, theirs) == [Outcome.STORED] * 2
        assert await get(backend, ours) == [Outcome.HIT] * 2
        assert await get(backend, theirs) == [Outcome.HIT] * 2
        assert await backend.delete_many(NAMESPACE, [ours[0].key.block_hash]) == 1
        assert await contains(backend, theirs) == [True, True]

    # Never a wrong byte.

    async def test_swapped(self, backend: Backend) -> None:
        """A mix-up below the tier would serve one prompt's KV for another's."""
        blocks = self.chain("swapped", 4)
        await put(backend, blocks)
        await self.swap(backend, blocks[1].key, blocks[2].key)
        corrupt = Outcome.CORRUPT
        assert await get(backend, blocks) == [Outcome.HIT, corrupt, corrupt, Outcome.HIT]
        await self._check_dropped(backend, blocks[1:3])

    @pytest.mark.parametrize("offset", [0, 7, 8, 10, 12, 15, 16, 31, 32, 63, 64, 95, 96, 112, 127])
    async def test_flipped_header(self, backend: Backend, offset: int) -> None:
        """A damaged header would pass for another block's, or end the process."""
        assert offset < HEADER_BYTES
        await self._check_damage(backend, Damage.FLIP_HEADER, offset)

    async def test_flipped_payload(self, backend: Backend) -> None:
        """Bit rot would reach the engine."""
        for offset in (0, PAGE_BYTES, self.block_bytes - 1):
            await self._check_damage(backend, Damage.FLIP_PAYLOAD, offset)

    @pytest.mark.parametrize("left", [0, 1, PAGE_BYTES, -1])
    async def test_truncated(self, backend: Backend, left: int) -> None:
        """A block cut short would be served with whatever was in the slot before."""
        await self._check_damage(backend, Damage.TRUNCATE, left % self.block_bytes)

    @pytest.mark.parametrize("more", [1, PAGE_BYTES, 1 << 20])
    async def test_oversize(self, backend: Backend, more: int) -> None:
        """A stored block longer than the slot would overwrite the slots beside it."""
        await self._check_damage(backend, Damage.OVERSIZE, more)

    @pytest.mark.parametrize("difference", [-1, 1, -PAGE_BYTES, PAGE_BYTES])
    async def test_other_length(self, backend: Backend, difference: int) -> None:
        """A block of another length would be served in part, or with a tail of something else."""
        [block] = self.chain("length", 1)
        await put(backend, [block])
        length = self.block_bytes + difference
        wanted = make_block("length/0", ROOT, length)
        assert await get(backend, [wanted]) == [Outcome.CORRUPT]
        await self._check_dropped(backend, [block])

    async def _check_damage(self, backend: Backend, how: Damage, offset: int) -> None:
        blocks = self.chain(f"{how} {offset}", 3)
        await put(backend, blocks)
        await self.damage(backend, blocks[2].key, how, offset)
        assert await get(backend, blocks) == [Outcome.HIT, Outcome.HIT, Outcome.CORRUPT]
        await self._check_dropped(backend, blocks[2:])

    async def _check_dropped(self, backend: Backend, blocks: list[SelfNamingBlock]) -> None:
        """A damaged block would be tried for ever, or could never be stored again."""
        assert await contains(backend, blocks) == [False] * len(blocks)
        assert await get(backend, blocks) == [Outcome.MISS] * len(blocks)
        assert await put(backend, blocks) == [Outcome.STORED] * len(blocks)
        assert await get(backend, blocks) == [Outcome.HIT] * len(blocks)

    async def test_damaged_while_closed(self, backend: Backend) -> None:
        """Damage done while tierd was down would be served after the start."""
        blocks = self.chain("while closed", 4)
        await put(backend, blocks)
        await self.swap(backend, blocks[0].key, blocks[1].key)
        await self.damage(backend, blocks[2].key, Damage.FLIP_PAYLOAD, 0)
        async with self.reopened(backend) as again:
            outcomes = await get(again, blocks)
            assert Outcome.HIT not in outcomes[:3]
            assert outcomes[3] is Outcome.HIT

    # Deleting, restarting, telling what there is.

    async def test_delete(self, backend: Backend) -> None:
        """What the operator flushed would still be served, or come back after a restart."""
        blocks = self.chain("delete", 6)
        await put(backend, blocks)
        gone = [block.key.block_hash for block in blocks[3:]]
        assert await backend.delete_many(NAMESPACE, [*gone, gone[0], ROOT]) == 3
        expected = [Outcome.HIT] * 3 + [Outcome.MISS] * 3
        assert await contains(backend, blocks) == [True] * 3 + [False] * 3
        assert await get(backend, blocks) == expected
        async with self.reopened(backend) as again:
            assert await get(again, blocks) == expected
            assert await put(again, blocks[3:]) == [Outcome.STORED] * 3
            assert await get(again, blocks) == [Outcome.HIT] * 6

    async def test_delete_while_putting(self, backend: Backend) -> None:
        """A block deleted while it is stored would be both, or hang one of the two calls."""
        blocks = self.chain("delete while putting", 8)
        hashes = [block.key.block_hash for block in blocks]
        outcomes, dropped = await asyncio.gather(
            put(backend, blocks), backend.delete_many(NAMESPACE, hashes)
        )
        assert outcomes == [Outcome.STORED] * 8
        held = await contains(backend, blocks)
        assert sum(held) == 8 - dropped
        assert [o is Outcome.HIT for o in await get(backend, blocks)] == held

    async def test_reopen(self, backend: Backend) -> None:
        """A restart would forget blocks that were reported as stored."""
        blocks = self.chain("reopen", 20)
        theirs = self.chain("reopen", 5, OTHER_NAMESPACE)
        await put(backend, blocks)
        await put(backend, theirs)
        before = backend.stats()
        async with self.reopened(backend) as again:
            assert again.stats() == before
            assert await contains(again, blocks) == [True] * 20
            assert await get(again, blocks) == [Outcome.HIT] * 20
            assert await get(again, theirs) == [Outcome.HIT] * 5
            assert await put(again, blocks) == [Outcome.PRESENT] * 20

    async def test_scan(self, backend: Backend) -> None:
        """fsck, scrub and warm would overlook blocks, or be told of ones that are gone."""
        blocks = self.chain("scan", 10) + self.chain("scan", 3, OTHER_NAMESPACE)
        await put(backend, blocks[:10])
        await put(backend, blocks[10:])
        await backend.delete_many(NAMESPACE, [blocks[0].key.block_hash])
        truth = sorted(block.header for block in blocks[1:])
        assert sorted(await scanned(backend)) == truth
        async with self.reopened(backend) as again:
            assert sorted(await scanned(again)) == truth

    async def test_delete_while_scanning(self, backend: Backend) -> None:
        """A flush, which drops what a scan shows, would leave blocks behind."""
        blocks = [*self.chain("scanned", 40), *self.chain("scanned", 40, OTHER_NAMESPACE)]
        for namespace in (NAMESPACE, OTHER_NAMESPACE):
            mine = [block for block in blocks if block.key.namespace == namespace]
            assert await put(backend, mine) == [Outcome.STORED] * len(mine)
        await indexed(backend)
        seen = 0
        async for step in backend.scan():
            for header in step.headers:
                seen += 1
                await backend.delete_many(header.key.namespace, [header.key.block_hash])
        assert seen == len(blocks)
        assert await scanned(backend) == []

    async def test_marks(self, backend: Backend) -> None:
        """A flush would end with its mark, and its blocks be served again after a restart."""
        assert await backend.marks() == []
        marks = [f"0a1b2c3d-{number:04x}" for number in range(40)]
        for mark in [*marks, marks[0]]:
            await backend.add_mark(mark)
        assert sorted(await backend.marks()) == marks
        await backend.drop_marks([*marks[:30], "never-there"])
        assert sorted(await backend.marks()) == marks[30:]
        async with self.reopened(backend) as again:
            assert sorted(await again.marks()) == marks[30:]

    async def test_marks_are_no_blocks(self, backend: Backend) -> None:
        """A mark would be counted, listed and dropped as a block, or a block as a mark."""
        blocks = self.chain("marked", 5)
        await put(backend, blocks)
        before = backend.stats()
        await backend.add_mark("mark-1")
        assert len(await scanned(backend)) == 5
        assert backend.stats() == before
        await backend.delete_many(NAMESPACE, [block.key.block_hash for block in blocks])
        assert await backend.marks() == ["mark-1"]

    async def test_many_marks(self, backend: Backend) -> None:
        """Marks beyond a server's page of a listing would be taken for absent."""
        marks = [f"mark-{number:04}" for number in range(MARKS_ASKED)]
        for at in range(0, len(marks), 32):
            await asyncio.gather(*(backend.add_mark(mark) for mark in marks[at : at + 32]))
        assert sorted(await backend.marks()) == marks

    async def test_stats(self, backend: Backend) -> None:
        """The operator would be told of a tier that is not the one he has."""
        assert backend.stats().blocks == 0
        blocks = self.chain("stats", 5)
        await put(backend, blocks)
        stats = backend.stats()
        assert stats.blocks == 5
        assert stats.used_bytes >= 5 * self.block_bytes
        assert stats.index_complete
        await backend.delete_many(NAMESPACE, [blocks[0].key.block_hash])
        assert backend.stats().blocks == 4
        for name, value in backend.counters.items():
            assert name.endswith("_total")
            assert value >= 0

    async def test_corrupt_is_counted(self, backend: Backend) -> None:
        """A dying disk would look like a cold cache."""
        blocks = self.chain("counted", 3)
        await put(backend, blocks)
        before = backend.counters["corrupt_total"]
        await self.damage(backend, blocks[0].key, Damage.FLIP_PAYLOAD, 0)
        await get(backend, blocks)
        assert backend.counters["corrupt_total"] == before + 1

    async def test_close_again(self, backend: Backend) -> None:
        """A second close, as after a failed start, would raise or hang."""
        await put(backend, self.chain("close", 2))
        await backend.close()
        await backend.close()

    async def test_close_in_flight(self, backend: Backend) -> None:
        """Closing would tear memory or files away from calls in flight."""
        blocks = self.chain("close in flight", 20)
        await put(backend, blocks[:10])
        slots = Slots(10, slot_bytes_for(self.block_bytes))
        requests = [
            GetRequest(block.key.block_hash, slots.view(position), self.block_bytes)
            for position, block in enumerate(blocks[:10])
        ]
        reading = asyncio.create_task(backend.get_into(NAMESPACE, requests))
        writing = asyncio.create_task(put(backend, blocks[10:]))
        await asyncio.sleep(0)
        await backend.close()
        results = await reading
        for position, block in enumerate(blocks[:10]):
            check_result(block, results[position], slots.view(position))
        assert await writing == [Outcome.STORED] * 10
        slots.check()

    # Many at once, and callers that give up.

    @pytest.mark.parametrize("seed", [1, 2, 3])
    async def test_concurrency(self, backend: Backend, seed: int) -> None:
        """Overlapping reads, writes and deletes would mix up blocks."""
        chance = random.Random(seed)
        blocks = self.chain("concurrency", 24) + self.chain("fork", 24)

        async def play(moves: random.Random) -> None:
            for _ in range(12):
                some = moves.sample(blocks, moves.randint(1, 8))
                match moves.randrange(5):
                    case 0 | 1:
                        outcomes = await put(backend, some)
                        assert set(outcomes) <= {Outcome.STORED, Outcome.PRESENT}
                    case 2 | 3:
                        assert Outcome.CORRUPT not in await get(backend, some)
                    case _:
                        hashes = [block.key.block_hash for block in some[:2]]
                        await backend.delete_many(NAMESPACE, hashes)

        await asyncio.gather(*(play(random.Random(chance.random())) for _ in range(8)))
        held = await contains(backend, blocks)
        outcomes = await get(backend, blocks)
        assert [outcome is Outcome.HIT for outcome in outcomes] == held
        assert backend.stats().blocks == sum(held)
        async with self.reopened(backend) as again:
            assert await get(again, blocks) == outcomes

    @pytest.mark.parametrize("seed", [1, 2])
    async def test_cancelled_get(self, backend: Backend, seed: int) -> None:
        """A load called off would go on to write into slots that belong to someone else now."""
        chance = random.Random(seed)
        blocks = self.chain("cancelled get", 16)
        await put(backend, blocks)
        slots = Slots(16, slot_bytes_for(self.block_bytes))
        requests = [
            GetRequest(block.key.block_hash, slots.view(position), self.block_bytes)
            for position, block in enumerate(blocks)
        ]
        for _ in range(30):
            task = asyncio.create_task(backend.get_into(NAMESPACE, requests))
            await _turns(chance.randrange(6))
            task.cancel()
            await asyncio.wait([task])
            for slot in range(16):
                slots.blank(slot)
            assert await contains(backend, blocks) == [True] * 16
        assert await get(backend, blocks) == [Outcome.HIT] * 16
        assert all(slots.is_blank(slot) for slot in range(16))
        slots.check()

    @pytest.mark.parametrize("seed", [1, 2])
    async def test_cancelled_put(self, backend: Backend, seed: int) -> None:
        """A backup called off would store what the slot holds next, or leave half a block."""
        chance = random.Random(seed)
        slots = Slots(8, slot_bytes_for(self.block_bytes))
        everything = []
        for turn in range(20):
            blocks = self.chain(f"cancelled put {turn}", 8)
            everything += blocks
            requests = []
            for position, block in enumerate(blocks):
                view = slots.view(position)
                view[: self.block_bytes] = block.payload
                requests.append(
                    PutRequest(
                        block.key.block_hash, block.parent, block.checksum, view, self.block_bytes
                    )
                )
            task = asyncio.create_task(backend.put_many(NAMESPACE, requests))
            await _turns(chance.randrange(6))
            task.cancel()
            await asyncio.wait([task])
            for slot in range(8):
                slots.blank(slot)
            held = await contains(backend, blocks)
            outcomes = await get(backend, blocks)
            assert [outcome is Outcome.HIT for outcome in outcomes] == held
            assert Outcome.CORRUPT not in outcomes
        assert set(await put(backend, everything)) <= {Outcome.STORED, Outcome.PRESENT}
        assert await get(backend, everything) == [Outcome.HIT] * len(everything)
        async with self.reopened(backend) as again:
            assert await get(again, everything) == [Outcome.HIT] * len(everything)

    async def test_cancelled_by_the_first_of_two(self, backend: Backend) -> None:
        """The second of two that store one block would fail because the first gave up."""
        for turns in range(5):
            blocks = self.chain(f"first of two {turns}", 12)
            first = asyncio.create_task(put(backend, blocks))
            await _turns(turns)
            second = asyncio.create_task(put(backend, blocks))
            await _turns(turns)
            first.cancel()
            assert set(await second) <= {Outcome.STORED, Outcome.PRESENT}
            await asyncio.wait([first])
            assert await get(backend, blocks) == [Outcome.HIT] * 12

    # Capacity.

    @property
    def capacity_bytes(self) -> int:
        """Room for about `bounded_blocks` blocks."""
        return self.bounded_blocks * (slot_bytes_for(self.block_bytes) + 2 * PAGE_BYTES)

    @contextlib.asynccontextmanager
    async def bounded_backend(self, tmp_path: Path) -> AsyncIterator[Backend]:
        """A backend that holds few blocks; skips where the storage keeps its own bounds."""
        if not self.bounded:
            pytest.skip("this tier leaves its bounds to its server")
        made = await self.make_backend(tmp_path, self.capacity_bytes)
        try:
            yield made
        finally:
            await made.close()

    async def test_capacity(self, tmp_path: Path) -> None:
        """The tier would fill the disk, or stop taking blocks once it is full."""
        async with self.bounded_backend(tmp_path) as backend:
            for turn in range(30):
                blocks = self.chain(f"capacity {turn}", 8)
                assert await put(backend, blocks) == [Outcome.STORED] * 8
                self._check_bounds(backend.stats())
                assert await get(backend, blocks) == [Outcome.HIT] * 8
            assert backend.stats().blocks >= self.bounded_blocks // 2
            async with self.reopened(backend) as again:
                self._check_bounds(again.stats())
                assert again.stats().blocks >= self.bounded_blocks // 2
                assert await put(again, self.chain("after", 8)) == [Outcome.STORED] * 8
                self._check_bounds(again.stats())

    async def test_what_is_used_stays(self, tmp_path: Path) -> None:
        """What host memory answers for would be the first to go, as if nobody wanted it."""
        async with self.bounded_backend(tmp_path) as backend:
            used = self.chain("in host memory", 4)
            await put(backend, used)
            for turn in range(30):
                assert await put(backend, self.chain(f"once {turn}", 8)) == [Outcome.STORED] * 8
                hashes = [block.key.block_hash for block in used]
                assert await backend.use_many(NAMESPACE, hashes) == [True] * 4
            assert await get(backend, used) == [Outcome.HIT] * 4

    async def test_prefix_stays_whole(self, tmp_path: Path) -> None:
        """Eviction would tear a hole into a prefix and make all behind it useless."""
        async with self.bounded_backend(tmp_path) as backend:
            chance = random.Random(5)
            chains = [self.chain(f"prefix {number}", 6) for number in range(20)]
            # Two that share their first blocks.
            trunk = chains[0][:3]
            branch = make_block("branch", trunk[-1].key.block_hash, self.block_bytes)
            chains.append([*trunk, branch])
            for _ in range(80):
                chain = chance.choice(chains)
                await put(backend, chain[: chance.randint(1, len(chain))])
                await get(backend, chance.choice(chains))
                for each in chains:
                    held = await contains(backend, each)
                    assert held == sorted(held, reverse=True)

    async def test_larger_than_the_tier(self, tmp_path: Path) -> None:
        """A block that can never fit would evict everything else first."""
        async with self.bounded_backend(tmp_path) as backend:
            blocks = self.chain("small", 4)
            await put(backend, blocks)
            huge = make_block("huge", ROOT, self.capacity_bytes + 1, OTHER_NAMESPACE)
            assert await put(backend, [huge]) == [Outcome.REFUSED]
            assert await get(backend, [huge]) == [Outcome.MISS]
            assert await get(backend, blocks) == [Outcome.HIT] * 4

    async def test_chain_longer_than_the_tier(self, tmp_path: Path) -> None:
        """A prompt larger than the tier would evict its own beginning, and be of no use."""
        async with self.bounded_backend(tmp_path) as backend:
            blocks = self.chain("long", 3 * self.bounded_blocks)
            outcomes = await put(backend, blocks)
            stored = outcomes.count(Outcome.STORED)
            assert stored >= self.bounded_blocks // 2
            assert outcomes == [Outcome.STORED] * stored + [Outcome.REFUSED] * (
                len(blocks) - stored
            )
            assert await get(backend, blocks[:stored]) == [Outcome.HIT] * stored
            assert await put(backend, blocks[stored : stored + 4]) == [Outcome.REFUSED] * 4

    async def test_namespace_finds_room(self, tmp_path: Path) -> None:
        """A new model would be shut out for ever by what an old one left behind."""
        async with self.bounded_backend(tmp_path) as backend:
            for number in range(8):
                await put(backend, self.chain(f"old {number}", 8))
            for number in range(8):
                blocks = self.chain(f"new {number}", 4, OTHER_NAMESPACE)
                assert await put(backend, blocks) == [Outcome.STORED] * 4
                self._check_bounds(backend.stats())
                assert await get(backend, blocks) == [Outcome.HIT] * 4

    def _check_bounds(self, stats: BackendStats) -> None:
        assert stats.capacity_bytes == self.capacity_bytes
        assert stats.used_bytes <= stats.capacity_bytes


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


async def _turns(count: int) -> None:
    """Let the event loop turn so many times, giving threads and peers a moment each."""
    for _ in range(count):
        await asyncio.sleep(0.0002)
