"""Measures one tier and its disk, on scratch data, calling the backend as the daemon does."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from tierd.cli.common.break_even import TierSpeed
from tierd.cli.common.progress import ProgressLine
from tierd.cli.common.speed import BenchBlocks, DiskSpeed, disk_speed, get_all, put_all
from tierd.cli.common.text import size
from tierd.config import StorageConfig
from tierd.daemon.l3.backends import backend_class, make_backend, options_of
from tierd.types import SCOPE_BYTES, slot_bytes_for

ROUNDS: Final = 3
"""Rounds of put, get, raw write and raw read; the median tolerates one bad round."""

ROUND_BYTES: Final = 128 << 20
"""Bytes written and read per round: about a second of a slow disk, little for a fast one."""

BLOCKS_MAX: Final = 512
"""Limit of blocks per round: small blocks take a server's round-trip time each."""

ALONE: Final = 9
"""Gets of a single block; their median is the minimum time of a load."""

TIER_S: Final = 120.0
"""Time limit per tier: a slower server does not pay."""


@dataclass(frozen=True, slots=True)
class Result:
    """The measured speeds of one tier."""

    name: str
    get_bytes_per_s: float
    put_bytes_per_s: float
    one_get_s: float
    raw: DiskSpeed | None
    """Speed of the tier's disk, measured in turns with the tier; None for a tier on a server."""

    def speed(self, block_bytes: int) -> TierSpeed:
        """Return the speed for the table. The latency is one block's time without its transfer."""
        return TierSpeed(
            max(0.0, self.one_get_s - block_bytes / self.get_bytes_per_s), self.get_bytes_per_s
        )

    def to_fields(self) -> dict[str, object]:
        """Return the result for `--json`."""
        raw = self.raw
        return {
            "tier": self.name,
            "get_bytes_per_s": round(self.get_bytes_per_s),
            "put_bytes_per_s": round(self.put_bytes_per_s),
            "get_one_block_ms": round(1e3 * self.one_get_s, 3),
            "raw_read_bytes_per_s": round(raw.read_bytes_per_s) if raw else None,
            "raw_write_bytes_per_s": round(raw.write_bytes_per_s) if raw else None,
            "get_of_raw": round(self.get_bytes_per_s / raw.read_bytes_per_s, 3) if raw else None,
            "put_of_raw": round(self.put_bytes_per_s / raw.write_bytes_per_s, 3) if raw else None,
            "direct": raw.direct if raw else None,
        }


async def measure(entry: StorageConfig, block_bytes: int, progress: ProgressLine) -> Result:
    """Measure one tier, and its disk in turns with it.

    Raises BackendError, ConfigError and OSError, and TimeoutError after TIER_S. The scratch data
    is removed, except from a server that fails.
    """
    async with asyncio.timeout(TIER_S):
        return await _measure(entry, block_bytes, progress)


async def _measure(entry: StorageConfig, block_bytes: int, progress: ProgressLine) -> Result:
    count = max(1, min(BLOCKS_MAX, ROUND_BYTES // block_bytes))
    blocks = BenchBlocks(count, block_bytes)
    get_speeds, put_speeds, alone, raw = [], [], [], []
    namespace = hashlib.sha256(b"tierd bench" + secrets.token_bytes(16)).digest()[:SCOPE_BYTES]
    try:
        async with _scratch(entry, blocks) as (backend_entry, directory):
            backend = make_backend(backend_entry)
            names: list[list[bytes]] = []
            try:
                await backend.open()
                for turn in range(ROUNDS):
                    progress.say(f"{entry.name}: round {turn + 1} of {ROUNDS}")
                    names.append(blocks.hashes(turn))
                    puts, gets = blocks.puts(names[-1]), blocks.gets(names[-1])
                    began_s = time.perf_counter()
                    await put_all(backend, namespace, puts, entry.write_batches)
                    put_speeds.append(blocks.size_bytes / (time.perf_counter() - began_s))
                    began_s = time.perf_counter()
                    await get_all(backend, namespace, gets, entry.read_batches)
                    get_speeds.append(blocks.size_bytes / (time.perf_counter() - began_s))
                    if directory is not None:
                        raw.append(await asyncio.to_thread(_raw, entry, directory, blocks))
                for _ in range(ALONE):
                    began_s = time.perf_counter()
                    await get_all(backend, namespace, gets[:1], 1)
                    alone.append(time.perf_counter() - began_s)
            finally:
                try:
                    for each in names:
                        await backend.delete_many(namespace, each)
                finally:
                    await backend.close()
    finally:
        blocks.close()
    return Result(
        entry.name,
        statistics.median(get_speeds),
        statistics.median(put_speeds),
        statistics.median(alone),
        _median(raw) if raw else None,
    )


def _raw(entry: StorageConfig, directory: Path, blocks: BenchBlocks) -> DiskSpeed:
    """Measure the disk with calls of a block's slot size, one thread per thread of the tier."""
    threads = getattr(options_of(entry), "threads", entry.read_batches)
    slot_bytes = slot_bytes_for(blocks.block_bytes)
    size_bytes = len(blocks.views) * slot_bytes
    return disk_speed(directory, io_bytes=slot_bytes, size_bytes=size_bytes, threads=threads)


def _median(raw: Sequence[DiskSpeed]) -> DiskSpeed:
    return DiskSpeed(
        statistics.median(each.write_bytes_per_s for each in raw),
        statistics.median(each.read_bytes_per_s for each in raw),
        raw[0].direct,
    )


def _beside(path: Path) -> Path:
    """Return the parent of a tier's directory, or the directory itself if it is a mount point."""
    path = path.expanduser()
    parent = next(parent for parent in path.parents if parent.is_dir())
    if path.is_dir() and path.stat().st_dev != parent.stat().st_dev:
        return path  # The tier ignores files that are not its own.
    return parent


@contextlib.asynccontextmanager
async def _scratch(
    entry: StorageConfig, blocks: BenchBlocks
) -> AsyncIterator[tuple[StorageConfig, Path | None]]:
    """Yield the entry to measure and its directory: for a tier in a directory, a temporary
    directory beside it; for any other tier the entry itself and None."""
    if not backend_class(entry).checks_offline:
        yield entry, None
        return
    disk = _beside(Path(str(getattr(options_of(entry), "path", ""))))
    needed_bytes = 2 * (ROUNDS + 1) * blocks.size_bytes + (64 << 20)
    found = os.statvfs(disk)
    free_bytes = found.f_bavail * found.f_frsize
    if free_bytes < needed_bytes:
        raise OSError(f"{disk} has {size(free_bytes)} free; bench needs {size(needed_bytes)}")
    with tempfile.TemporaryDirectory(prefix=".tierd-bench-", dir=disk) as scratch:
        own = {"path": scratch, "capacity": needed_bytes, "reserve_free": 0}
        overrides = {key: text for key, text in entry.overrides.items() if key not in own}
        options = {**entry.options, **own}
        yield msgspec.structs.replace(entry, options=options, overrides=overrides), Path(scratch)
