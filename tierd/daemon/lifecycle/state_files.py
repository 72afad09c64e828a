"""Replaces a file of the state directory without blocking the event loop.

A reader, and a restart after a power cut, finds the old or the new contents, never a mixture.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterable
from pathlib import Path

import aiofiles
import aiofiles.os

MODE = 0o600
"""State has names of models and hashes of prompts: readable by tierd's user only."""


async def replace_file(path: Path, pieces: AsyncIterable[bytes]) -> None:
    """Replace the contents of `path` by `pieces`; creates its folder if it is missing.

    Raises OSError and any error of `pieces`. The old contents stay then, and when cancelled.
    """
    await aiofiles.os.makedirs(path.parent, mode=0o700, exist_ok=True)
    draft = path.with_name(f"{path.name}.new")
    try:
        async with aiofiles.open(draft, "wb", opener=_opener) as file:
            async for piece in pieces:
                await file.write(piece)
            await file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        await aiofiles.os.replace(draft, path)
    except BaseException:
        # Blocking: a task that is being cancelled must not await.
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    await asyncio.to_thread(_sync_folder, path.parent)


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags, MODE)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
