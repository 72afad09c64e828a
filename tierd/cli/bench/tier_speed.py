"""What one tier does, beside its disk: on scratch data, its backend called as the daemon does."""

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
"""Each of put, get and both raw ways; their median shrugs off one bad round."""

ROUND_BYTES: Final = 128 << 20
"""What a round moves each way: enough for a second of a slow disk, little for a fast one."""

BLOCKS_MAX: Final = 512
"""Blocks of a round: of small ones a server's round trips are what takes the time."""

ALONE: Final = 9
"""Gets of a single block, whose median is what any load takes at least."""

TIER_S: Final = 120.0
"""Longest time for a tier: a server that is so slow does not pay."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one tier did."""

    name: str
    get_bytes_per_s: float
    put_bytes_per_s: float
    one_get_s: float
    raw: DiskSpeed | None
    """What its disk did at the same time; None of a server's tier."""

    def speed(self, block_bytes: int) -> TierSpeed:
        """As the table has it: what one block takes more than its bytes do."""
        return TierSpeed(
            max(0.0, self.one_get_s - block_bytes / self.get_bytes_per_s), self.get_bytes_per_s
        )

    def to_fields(self) -> dict[str, object]:
        """For `--json`."""
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
    """One tier, and a tier's disk in turns with it.

    Raises BackendError, ConfigError and OSError, TimeoutError after TIER_S; nothing is left of
    the scratch data but for what a server that failed has.
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
    """What the disk does with calls of the same size, as many at once as the tier has threads."""
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
    """The directory that a tier's own is, or will be, in, if that is on the same disk."""
    path = path.expanduser()
    parent = next(parent for parent in path.parents if parent.is_dir())
    if path.is_dir() and path.stat().st_dev != parent.stat().st_dev:
        return path  # A mount point; the tier leaves alone what is not its own.
    return parent


@contextlib.asynccontextmanager
async def _scratch(
    entry: StorageConfig, blocks: BenchBlocks
) -> AsyncIterator[tuple[StorageConfig, Path | None]]:
    """The entry to measure: of a tier in a directory, one beside it that is removed afterwards."""
    if not backend_class(entry).checks_offline:
        yield entry, None
        return
    disk = _beside(Path(str(getattr(options_of(entry), "path", ""))))
    needed_bytes = 2 * (ROUNDS + 1) * blocks.size_bytes + (64 << 20)
    found = os.statvfs(disk)
    free_bytes = found.f_bavail * found.f_frsize
    if free_bytes < needed_bytes:
        raise OSError(f"{disk} has {size(free_bytes)} left, and {size(needed_bytes)} are needed")
    with tempfile.TemporaryDirectory(prefix=".tierd-bench-", dir=disk) as scratch:
        own = {"path": scratch, "capacity": needed_bytes, "reserve_free": 0}
        overrides = {key: text for key, text in entry.overrides.items() if key not in own}
        options = {**entry.options, **own}
        yield msgspec.structs.replace(entry, options=options, overrides=overrides), Path(scratch)
