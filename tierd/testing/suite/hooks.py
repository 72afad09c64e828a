"""The hooks that a subclass of the suite implements, and the fixtures built on them."""

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
    """Hooks and constants of one storage tier; a subclass that is not abstract defines all."""

    pytestmark = pytest.mark.asyncio

    bounded: ClassVar[bool]
    """Whether the tier enforces a capacity itself; required."""
    block_bytes: ClassVar[int] = 3 * PAGE_BYTES + 100
    """Length of most blocks in the suite; slots are padded to whole pages."""
    bounded_blocks: ClassVar[int] = 40
    """Capacity used by the eviction checks, in blocks of `block_bytes`."""

    def __init_subclass__(cls, *, abstract: bool = False) -> None:
        super().__init_subclass__()
        if abstract:
            return
        missing = [name for name in _HOOKS if getattr(cls, name) is getattr(Hooks, name)]
        if not hasattr(cls, "bounded"):
            missing.append("bounded")
        if missing:
            raise TypeError(
                f"{cls.__name__} lacks {', '.join(missing)}: define them in the subclass"
            )

    async def make_backend(self, tmp_path: Path, capacity_bytes: int | None) -> Backend:
        """Return an open, empty backend; it keeps `capacity_bytes`, which is None if not
        `bounded`."""
        raise TypeError("make_backend is not implemented: a subclass of BackendSuite must do so")

    async def reopen(self, backend: Backend) -> Backend:
        """Close `backend` and return another open one on the same storage."""
        raise TypeError("reopen is not implemented: a subclass of BackendSuite must do so")

    async def damage(self, backend: Backend, key: BlockKey, how: Damage, offset: int) -> None:
        """Damage a stored block without the backend's knowledge. TRUNCATE may also destroy
        blocks stored later."""
        raise TypeError("damage is not implemented: a subclass of BackendSuite must do so")

    async def swap(self, backend: Backend, first: BlockKey, second: BlockKey) -> None:
        """Exchange the stored bytes of two blocks, headers included."""
        raise TypeError("swap is not implemented: a subclass of BackendSuite must do so")

    @pytest_asyncio.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[Backend]:
        """An open, empty backend without a capacity."""
        made = await self.make_backend(tmp_path, None)
        yield made
        await made.close()

    @contextlib.asynccontextmanager
    async def reopened(self, backend: Backend) -> AsyncIterator[Backend]:
        """Reopen the storage, as after a restart, and wait until its index is complete."""
        made = await self.reopen(backend)
        try:
            await indexed(made)
            yield made
        finally:
            await made.close()

    def chain(self, name: str, count: int, namespace: bytes = NAMESPACE) -> list[SelfNamingBlock]:
        """Return a chain of `count` blocks of `block_bytes`."""
        return make_chain(name, count, self.block_bytes, namespace)
