"""The conformance suite over the faulty in-memory backend, for tests of wrappers."""

from __future__ import annotations

from pathlib import Path

from tierd.backend import HEADER_BYTES, Backend
from tierd.testing.backend import NO_FAULTS, MemoryBackend, StoredBlock
from tierd.testing.suite import BackendSuite, Damage, damaged
from tierd.types import BlockKey


class MemorySuite(BackendSuite, abstract=True):
    """Checks made with the fake would prove nothing if the fake broke the contract."""

    bounded = True
    plan = NO_FAULTS

    async def make_backend(self, tmp_path: Path, capacity_bytes: int | None) -> Backend:
        backend = MemoryBackend(capacity_bytes, plan=self.plan)
        await backend.open()
        return backend

    async def reopen(self, backend: Backend) -> Backend:
        assert isinstance(backend, MemoryBackend)
        await backend.close()
        capacity_bytes = backend.stats().capacity_bytes or None
        again = MemoryBackend(
            capacity_bytes, plan=self.plan, blocks=backend.blocks, marks=backend.kept_marks
        )
        await again.open()
        return again

    async def damage(self, backend: Backend, key: BlockKey, how: Damage, offset: int) -> None:
        assert isinstance(backend, MemoryBackend)
        stored = backend.blocks[key]
        raw = damaged(stored.header + stored.payload, how, offset)
        backend.blocks[key] = StoredBlock(raw[:HEADER_BYTES], raw[HEADER_BYTES:])

    async def swap(self, backend: Backend, first: BlockKey, second: BlockKey) -> None:
        assert isinstance(backend, MemoryBackend)
        blocks = backend.blocks
        blocks[first], blocks[second] = blocks[second], blocks[first]
