"""Files of the state directory are whole at any time, however a write ends."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tierd.daemon.lifecycle.state_files import replace_file


async def pieces(*given: bytes) -> AsyncIterator[bytes]:
    for piece in given:
        yield piece


async def test_state_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """A reader would find half of a file."""
    path = tmp_path / "state" / "kept"
    await replace_file(path, pieces(b"old"))
    await replace_file(path, pieces(b"ne", b"w"))
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == [path.name]


async def test_failed_or_cancelled_write_keeps_the_old_contents(tmp_path: Path) -> None:
    """A failed or cancelled write would lose the last good file."""
    path = tmp_path / "kept"
    await replace_file(path, pieces(b"old"))
    half_written = asyncio.Event()

    async def failing() -> AsyncIterator[bytes]:
        yield b"half"
        raise OSError("no space left")

    async def endless() -> AsyncIterator[bytes]:
        yield b"half"
        half_written.set()
        await asyncio.Event().wait()

    with pytest.raises(OSError, match="no space left"):
        await replace_file(path, failing())
    writing = asyncio.create_task(replace_file(path, endless()))
    await half_written.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == [path.name], "no draft is left"


async def test_file_in_the_place_of_the_state_directory_is_an_error(tmp_path: Path) -> None:
    """A start would report a traceback in place of the wrong path."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"):
        await replace_file(tmp_path / "file" / "kept", pieces(b"new"))
