"""Measures the speed of memory, of a disk and of a tier's backend, on scratch data.

A tier's own blocks are never touched: a disk is measured on an unnamed file that vanishes with the
process, a backend in a directory or a namespace of the caller.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count as count_from
from pathlib import Path
from typing import NamedTuple, TypeVar

from tierd.backend import Backend, GetRequest, Outcome, PutRequest, checksum
from tierd.daemon.l3.tier import BATCH_BLOCKS_MAX, BATCH_BYTES_MAX
from tierd.errors import BackendError
from tierd.shared_memory.mapping import SharedMapping
from tierd.types import HASH_BYTES, PAGE_BYTES, slot_bytes_for


class DiskSpeed(NamedTuple):
    """Write and read speed of a disk; `direct`: measured without the page cache."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    direct: bool


def disk_speed(
    directory: Path, *, io_bytes: int, size_bytes: int, threads: int, limit_s: float = 60.0
) -> DiskSpeed:
    """Measure `threads` threads that write, then read, `io_bytes` per call in an unnamed file of
    at most `size_bytes`. Writing and reading take at most about `limit_s` each. Raises OSError.
    """
    assert io_bytes % PAGE_BYTES == 0
    with (
        tempfile.TemporaryFile(dir=directory, buffering=0) as file,
        ThreadPoolExecutor(threads) as pool,
    ):
        fd = file.fileno()
        ios = max(1, size_bytes // io_bytes)
        os.posix_fallocate(fd, 0, ios * io_bytes)
        direct = _go_direct(fd)
        written, write_s = _timed(pool, threads, ios, io_bytes, limit_s, _writer(fd))
        if not direct:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        read, read_s = _timed(pool, threads, written // io_bytes, io_bytes, limit_s, _reader(fd))
    return DiskSpeed(written / write_s, read / read_s, direct)


def _go_direct(fd: int) -> bool:
    """Try to set O_DIRECT; return whether it works. A file system may refuse the flag or the
    calls."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.pwrite(fd, page, 0)
    except OSError:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return False
    return True


def _writer(fd: int) -> Callable[[mmap.mmap, int], int]:
    return lambda page, at: os.pwrite(fd, page, at)


def _reader(fd: int) -> Callable[[mmap.mmap, int], int]:
    return lambda page, at: os.preadv(fd, [page], at)


def _timed(
    pool: ThreadPoolExecutor,
    threads: int,
    ios: int,
    io_bytes: int,
    limit_s: float,
    move: Callable[[mmap.mmap, int], int],
) -> tuple[int, float]:
    """Return the bytes moved and the seconds that it took."""
    numbers = count_from()
    began_s = time.perf_counter()

    def work() -> int:
        moved = 0
        with mmap.mmap(-1, io_bytes) as page:
            # Random bytes: some disks store zeros without writing them.
            page[:] = os.urandom(PAGE_BYTES) * (io_bytes // PAGE_BYTES)
            for number in numbers:
                if number >= ios or (moved and time.perf_counter() - began_s >= limit_s):
                    return moved
                moved += move(page, number * io_bytes)
        raise AssertionError("numbers do not end")

    moved = sum(pool.map(lambda _: work(), range(threads)))
    return moved, time.perf_counter() - began_s


def copy_bytes_per_s(size_bytes: int = 64 << 20, rounds: int = 5) -> float:
    """Return how fast one thread copies uncached memory, as an engine copies from and to L2."""
    with (
        mmap.mmap(-1, size_bytes) as one,
        mmap.mmap(-1, size_bytes) as other,
        memoryview(one) as source,
        memoryview(other) as target,
    ):
        target[:] = source
        seconds = []
        for _ in range(rounds):
            began_s = time.perf_counter()
            target[:] = source
            seconds.append(time.perf_counter() - began_s)
    return size_bytes / statistics.median(seconds)


class BenchBlocks:
    """Blocks in shared memory, as a backend in another process needs them. Owns the memory."""

    def __init__(self, count: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        stride = slot_bytes_for(block_bytes)
        self._fd = os.memfd_create("tierd-bench", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, count * stride)
        mapping = SharedMapping(self._fd, count * stride)
        while mapping.populate_next():
            pass
        self.views = [mapping.view[at : at + stride] for at in range(0, count * stride, stride)]
        for number, view in enumerate(self.views):
            piece = hashlib.shake_128(b"%d" % number).digest(PAGE_BYTES)
            view[:] = piece * (stride // PAGE_BYTES)
        self.sums = [checksum(view[:block_bytes]) for view in self.views]

    @property
    def size_bytes(self) -> int:
        """Payload of all blocks together."""
        return len(self.views) * self.block_bytes

    def hashes(self, generation: int) -> list[bytes]:
        """Return the hashes of the blocks; each generation has different ones."""
        return [
            hashlib.sha256(b"tierd bench %d/%d" % (generation, i)).digest()
            for i in range(len(self.views))
        ]

    def puts(self, hashes: Sequence[bytes]) -> list[PutRequest]:
        """Return the requests that store the blocks under `hashes`."""
        return [
            PutRequest(name, bytes(HASH_BYTES), digest, view, self.block_bytes)
            for name, digest, view in zip(hashes, self.sums, self.views, strict=True)
        ]

    def gets(self, hashes: Sequence[bytes]) -> list[GetRequest]:
        """Return the requests that read the blocks back."""
        return [
            GetRequest(name, view, self.block_bytes)
            for name, view in zip(hashes, self.views, strict=True)
        ]

    def close(self) -> None:
        """Close the memory's descriptor."""
        os.close(self._fd)


async def put_all(
    backend: Backend, namespace: bytes, requests: Sequence[PutRequest], calls: int
) -> None:
    """Store blocks in batches as the daemon makes them, `calls` at once.

    Raises BackendError, also for a block that was not stored.
    """

    async def put(part: Sequence[PutRequest]) -> None:
        _expect(await backend.put_many(namespace, part), Outcome.STORED)

    await _batches(put, requests, calls)


async def get_all(
    backend: Backend, namespace: bytes, requests: Sequence[GetRequest], calls: int
) -> None:
    """Read blocks, verified, in batches as the daemon makes them, `calls` at once.

    Raises BackendError, also for a block that was not read.
    """

    async def get(part: Sequence[GetRequest]) -> None:
        results = await backend.get_into(namespace, part)
        _expect([result.outcome for result in results], Outcome.HIT)

    await _batches(get, requests, calls)


def _expect(outcomes: Sequence[Outcome], wanted: Outcome) -> None:
    for outcome in outcomes:
        if outcome is not wanted:
            raise BackendError(f"the tier answered {outcome.value!r} instead of {wanted.value!r}")


_Request = TypeVar("_Request", PutRequest, GetRequest)


async def _batches(
    call: Callable[[Sequence[_Request]], Awaitable[None]], requests: Sequence[_Request], calls: int
) -> None:
    batch = max(1, min(BATCH_BLOCKS_MAX, BATCH_BYTES_MAX // len(requests[0].view)))
    starts = iter(range(0, len(requests), batch))

    async def work() -> None:
        for start in starts:
            await call(requests[start : start + batch])

    tasks = [asyncio.create_task(work()) for _ in range(calls)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)  # A call in flight still uses the views.


SPEED_TURN = threading.Lock()
"""Held during a measurement: parallel ones would slow each other down."""
