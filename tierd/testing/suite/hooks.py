"""What a suite is told of a storage tier, and how its checks come by one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import pytest
import pytest_asyncio

from tierd.backend import Backend
from tierd.testing.suite.blocks import NAMESPACE, Damage, SelfNamingBlock, indexed, make_chain
from tierd.types import PAGE_BYTES, BlockKey

_HOOKS = ("make_backend", "reopen", "damage", "swap")


class Hooks:
    """What checks need to know of a tier. A subclass that is not abstract has all of it."""

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
        missing = [name for name in _HOOKS if getattr(cls, name) is getattr(Hooks, name)]
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
