"""The file tier: the contract on real file systems, and faults of disks and crashes."""

import asyncio
import contextlib
import errno
import fcntl
import gc
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tests.support.tiers.file_tier import (
    BLOCK_BYTES,
    SLOT_BYTES,
    FileSuite,
    bad_entries,
    bad_index_head,
    check,
    cut_index,
    cut_slab,
    directory_for_slab,
    empty_index,
    empty_slab,
    fifo_for_index,
    long_index,
    no_index,
    no_slab,
    opened,
    options,
    other_slab,
    running,
    two_slabs,
)
from tierd.backend import Outcome
from tierd.errors import BackendError, ConfigError
from tierd.eviction import STORAGE_POLICIES
from tierd.testing.suite import (
    NAMESPACE,
    OTHER_NAMESPACE,
    ROOT,
    BackendSuite,
    contains,
    get,
    indexed,
    make_block,
    make_chain,
    put,
)
from tierd.types import PAGE_BYTES
from tierd_backends.file import FileBackend
from tierd_backends.file import health as health_module
from tierd_backends.file import space as space_module
from tierd_backends.file.health import DiskHealth
from tierd_backends.file.shelf import Shelf
from tierd_backends.file.slab import Slab, slab_bytes
from tierd_backends.file.slab_index import ENTRY_BYTES, FREE_ENTRY, entry_at

needs_mount = pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")


def disk_usage(path):
    """Return the bytes that du reports for the tier's files."""
    return sum(p.stat().st_blocks * 512 for p in path.glob("*/*"))


class TestDisk(FileSuite):
    """On the file system of the temporary directory."""


class TestTmpfs(FileSuite):
    @pytest.fixture
    def folder(self):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
            yield Path(path) / "tier"


@contextlib.contextmanager
def mounted(path, *arguments):
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", *arguments, path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


@needs_mount
class TestRamfs(FileSuite):
    """A file system that refuses O_DIRECT."""

    direct = False

    @pytest.fixture
    def folder(self, tmp_path):
        with mounted(tmp_path / "ramfs", "-t", "ramfs", "ramfs") as path:
            yield path / "tier"


# Options, and the content of the directory at start.


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"capacity": "much"}, "much"),
        ({"slab": "8G"}, "8G"),
        ({"reserve_free": "200%"}, "200%"),
        ({"threads": 0}, "threads"),
        ({"threads": 1000}, "threads"),
    ],
)
def test_malformed_options_are_reported(tmp_path, wrong, named):
    """A wrong option would start a tier with other settings than the operator meant."""
    with pytest.raises(ConfigError, match=named):
        FileBackend.from_options(options(tmp_path, **wrong))
    assert list(tmp_path.iterdir()) == []


async def test_path_is_a_file(tmp_path):
    """A wrong path would cause a stack trace instead of an error that names it."""
    (tmp_path / "tier").write_text("not a directory")
    with pytest.raises(ConfigError, match="tier"):
        await opened(tmp_path / "tier")


async def test_direct_off_and_on(tmp_path):
    """Blocks written with O_DIRECT could not be read without it, or the other way round."""
    blocks = make_chain("direct", 4, BLOCK_BYTES)
    for direct in ("on", "off", "auto"):
        async with running(tmp_path, direct=direct) as backend:
            assert backend.direct is (direct != "off")
            await put(backend, blocks)
            assert await get(backend, blocks) == [Outcome.HIT] * 4


@needs_mount
async def test_direct_on_without_support(tmp_path):
    """`direct = "on"` would silently go through the page cache."""
    with mounted(tmp_path / "ramfs", "-t", "ramfs", "ramfs") as path:
        with pytest.raises(ConfigError, match="O_DIRECT"):
            await opened(path, direct="on")
        async with running(path):
            pass


HOLDER = """
import asyncio, sys
from tierd_backends.file import FileBackend, FileOptions
async def main():
    backend = FileBackend(FileOptions(path=sys.argv[1], capacity="64MiB", reserve_free=0))
    await backend.open()
    print("open", flush=True)
    sys.stdin.read()
asyncio.run(main())
"""


def python(code, *arguments, **more):
    """A child that imports what this process imports."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **more
    )


@pytest.mark.slow
async def test_directory_has_one_owner(tmp_path):
    """Two daemons on one directory would overwrite each other's blocks."""
    with python(HOLDER, tmp_path) as holder:
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(ConfigError, match=f"process {holder.pid};"):
            await opened(tmp_path)
        holder.kill()
    async with running(tmp_path):
        with pytest.raises(ConfigError, match=str(os.getpid())):
            await opened(tmp_path)


async def test_open_waits_for_an_owner_that_ends(tmp_path, monkeypatch):
    """A daemon started right after a crash would refuse to start while the old worker ends."""
    with python(HOLDER, tmp_path) as holder:
        assert holder.stdout.readline() == b"open\n"

        def ends(_):
            holder.kill()
            holder.wait()

        monkeypatch.setattr(time, "sleep", ends)
        backend = await opened(tmp_path)
        await backend.close()


async def test_unknown_version(tmp_path):
    """An older tierd would destroy the blocks of a newer one."""
    async with running(tmp_path) as backend:
        await put(backend, make_chain("version", 2, BLOCK_BYTES))
    (tmp_path / "FORMAT").write_text("tierd file store 3\n")
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    with pytest.raises(ConfigError, match="FORMAT"):
        await opened(tmp_path)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


async def test_foreign_files_are_left_alone(tmp_path, caplog):
    """Files of other programs in the directory would be removed, or keep tierd from starting."""
    async with running(tmp_path) as backend:
        await put(backend, make_chain("foreign", 2, BLOCK_BYTES))
    folder = tmp_path / NAMESPACE.hex()
    planted = [tmp_path / "lost+found", tmp_path / "notes.txt", folder / "notes.txt"]
    planted[0].mkdir()
    planted[1].write_text("mine")
    planted[2].write_text("mine")
    async with running(tmp_path) as backend:
        assert backend.stats().blocks == 2
        check(backend)
    assert all(path.exists() for path in planted)
    assert "3 entries are not tierd's" in caplog.text


async def test_files_are_private(tmp_path):
    """Other users of the node could read the prompts' KV."""
    old = os.umask(0)
    try:
        async with running(tmp_path / "tier") as backend:
            await put(backend, make_chain("private", 1, BLOCK_BYTES))
    finally:
        os.umask(old)
    for path in [tmp_path / "tier", *(tmp_path / "tier").rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


# Restart.


def _directory_for_index(folder):
    (folder / "00000002.index").unlink()
    (folder / "00000002.index").mkdir()


@pytest.mark.parametrize(
    ("harm", "left"),
    [
        (cut_slab, 3),
        (empty_slab, 0),
        (cut_index, 3),
        (long_index, 8),
        (no_index, 0),
        (no_slab, 0),
        (empty_index, 0),
        (bad_index_head, 0),
        (bad_entries, 3),
        (directory_for_slab, 0),
        (_directory_for_index, 0),
        (fifo_for_index, 0),
        (other_slab, None),
    ],
)
async def test_damage_while_closed(tmp_path, harm, left):
    """One bad file would end the start, or cost other blocks."""
    blocks, capacity = await two_slabs(tmp_path)
    harm(tmp_path / NAMESPACE.hex())
    async with running(tmp_path, capacity=capacity) as backend:
        outcomes = await get(backend, blocks)
        if left is None:
            assert outcomes == [Outcome.CORRUPT] * 16
            assert backend.counters["corrupt_total"] == 16
        else:
            assert outcomes == [Outcome.HIT] * (8 + left) + [Outcome.MISS] * (8 - left)
        again = await put(backend, blocks)
        assert set(again) <= {Outcome.STORED, Outcome.PRESENT}
        assert await get(backend, blocks) == [Outcome.HIT] * 16
        if left == 0 and harm is not empty_slab:
            assert backend.counters["lost_slabs_total"] == 1
    async with running(tmp_path, capacity=capacity) as backend:
        assert await get(backend, blocks) == [Outcome.HIT] * 16


async def test_files_vanish_while_open(tmp_path, caplog):
    """An rm -rf would crash the daemon or make it serve wrong blocks, or no message would explain
    why blocks fail."""
    blocks, capacity = await two_slabs(tmp_path)
    async with running(tmp_path, capacity=capacity) as backend:
        for path in (tmp_path / NAMESPACE.hex()).iterdir():
            path.unlink()
        (tmp_path / NAMESPACE.hex()).rmdir()
        assert set(await get(backend, blocks)) <= {Outcome.HIT, Outcome.MISS}
        await backend.delete_many(NAMESPACE, [block.key.block_hash for block in blocks[1:]])
        more = make_chain("more", 8, BLOCK_BYTES)
        assert Outcome.ERROR in await put(backend, more)
        assert ".slab was removed by another process" in backend.stats().trouble
        assert f"{backend.stats().trouble}: its blocks are lost" in caplog.text
        # Each failing put drops the slabs that it used; there are two.
        for _ in range(2):
            outcomes = await put(backend, more)
        assert Outcome.ERROR not in outcomes
        assert await get(backend, more) == [Outcome.HIT] * 8
        check(backend)
    async with running(tmp_path, capacity=capacity) as backend:
        assert await get(backend, more) == [Outcome.HIT] * 8
        check(backend)


async def test_mark_is_on_the_disk_before_it_counts(tmp_path, monkeypatch):
    """A flush would be reported complete, and a loss of power would take its mark away."""
    calls = []

    def recorded(name):
        real = getattr(os, name)

        def call(what, *rest, **more):
            path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(what)
            calls.append((name, path))
            return real(what, *rest, **more)

        return call

    async with running(tmp_path) as backend:
        for name in ("mkdir", "open", "fsync"):
            monkeypatch.setattr(os, name, recorded(name))
        for mark in ("one", "two"):
            calls.clear()
            await backend.add_mark(mark)
            file = str(tmp_path / "marks" / mark)
            made, synced = calls.index(("open", file)), calls.index(("fsync", file))
            folder = calls.index(("fsync", str(tmp_path / "marks")))
            parent = calls.index(("fsync", str(tmp_path)))
            assert calls.index(("mkdir", str(tmp_path / "marks"))) < parent < made
            assert made < synced < folder
        monkeypatch.undo()
        monkeypatch.setattr(os, "fsync", failing)
        with pytest.raises(BackendError, match="EIO"):
            await backend.add_mark("three")


def failing(_):
    raise OSError(errno.EIO, "EIO")


async def test_emptied_slabs_are_removed(tmp_path):
    """After a flush a tier would stay full of slabs without blocks."""
    blocks, capacity = await two_slabs(tmp_path)
    async with running(tmp_path, capacity=capacity) as backend:
        held = backend.stats().used_bytes
        await backend.delete_many(NAMESPACE, [block.key.block_hash for block in blocks])
        assert backend.stats().used_bytes < held
        assert not (tmp_path / NAMESPACE.hex()).exists()
        assert await put(backend, blocks) == [Outcome.STORED] * 16
        check(backend)


async def test_failure_to_remove_an_empty_slab_is_reported(tmp_path, monkeypatch):
    """Blocks of files that could not be unlinked would be back at the next start without a
    warning."""
    blocks, capacity = await two_slabs(tmp_path)
    async with running(tmp_path, capacity=capacity) as backend:
        monkeypatch.setattr(Path, "unlink", lambda *_, **__: failing(0))
        with pytest.raises(BackendError, match="cannot be removed"):
            await backend.delete_many(NAMESPACE, [block.key.block_hash for block in blocks])
        monkeypatch.undo()


async def test_slab_cut_short_while_open(tmp_path):
    """A slab cut short under load would cause a SIGBUS, or a block would be served in part."""
    blocks, capacity = await two_slabs(tmp_path)
    folder = tmp_path / NAMESPACE.hex()
    async with running(tmp_path, capacity=capacity) as backend:
        os.truncate(folder / "00000001.slab", 0)
        os.truncate(folder / "00000001.index", 0)
        assert await get(backend, blocks) == [Outcome.CORRUPT] * 8 + [Outcome.HIT] * 8
        assert await put(backend, blocks[:8]) == [Outcome.STORED] * 8
        assert await get(backend, blocks) == [Outcome.HIT] * 16


async def test_recency_survives_restart(tmp_path):
    """After a restart the tier would evict the most used blocks."""
    capacity = 9 * slab_bytes(8, SLOT_BYTES)
    chains = [make_chain(f"recency {n}", 8, BLOCK_BYTES) for n in range(8)]
    async with running(tmp_path, capacity=capacity) as backend:
        for chain in chains:
            await put(backend, chain)
        await get(backend, chains[0])
        held = backend.stats().blocks
    async with running(tmp_path, capacity=capacity) as backend:
        assert backend.stats().blocks == held
        for turn in range(3):
            await put(backend, make_chain(f"push {turn}", 8, BLOCK_BYTES))
        assert await contains(backend, chains[0]) == [True] * 8
        assert not all(await contains(backend, chains[1]))
        check(backend)


async def test_start_above_capacity(tmp_path):
    """A lower capacity would be exceeded until the old blocks happen to be replaced."""
    big, small = 16 * slab_bytes(8, SLOT_BYTES), 6 * slab_bytes(8, SLOT_BYTES)
    chains = [make_chain(f"above {n}", 8, BLOCK_BYTES) for n in range(12)]
    async with running(tmp_path, capacity=big, slab=slab_bytes(8, SLOT_BYTES)) as backend:
        for chain in chains:
            await put(backend, chain)
        await get(backend, chains[0])
    async with running(tmp_path, capacity=small) as backend:
        await backend._indexing
        assert backend.stats().used_bytes <= small
        check(backend)
        assert await get(backend, chains[0]) == [Outcome.HIT] * 8
        assert await get(backend, chains[-1]) == [Outcome.HIT] * 8
        assert await get(backend, chains[1]) == [Outcome.MISS] * 8
        assert await put(backend, chains[1]) == [Outcome.STORED] * 8
        check(backend)


async def test_put_before_the_index_is_read(tmp_path):
    """A block stored again during the start would be held twice, and one copy would outlive its
    deletion."""
    blocks, capacity = await two_slabs(tmp_path)
    backend = await opened(tmp_path, capacity=capacity)
    assert not backend.stats().index_complete
    outcomes = await put(backend, blocks)
    assert set(outcomes) <= {Outcome.STORED, Outcome.PRESENT}
    await indexed(backend)
    assert backend.stats().blocks == 16
    check(backend)
    assert await get(backend, blocks) == [Outcome.HIT] * 16
    assert await backend.delete_many(NAMESPACE, [b.key.block_hash for b in blocks]) == 16
    await backend.close()
    async with running(tmp_path, capacity=capacity) as backend:
        assert backend.stats().blocks == 0
        check(backend)


async def test_stale_copy_of_a_slab(tmp_path):
    """A stale index after a power loss would bring a block back twice, or its older copy."""
    blocks, capacity = await two_slabs(tmp_path)
    folder = tmp_path / NAMESPACE.hex()
    (folder / "00000001.slab").rename(folder / "00000003.slab")
    (folder / "00000001.index").rename(folder / "00000003.index")
    for suffix in ("slab", "index"):
        raw = (folder / f"00000003.{suffix}").read_bytes()
        (folder / f"00000001.{suffix}").write_bytes(raw)
    async with running(tmp_path, capacity=capacity) as backend:
        assert backend.stats().blocks == 16
        check(backend)
        assert await get(backend, blocks) == [Outcome.HIT] * 16
        await backend.delete_many(NAMESPACE, [b.key.block_hash for b in blocks])
    async with running(tmp_path, capacity=capacity) as backend:
        assert backend.stats().blocks == 0


async def test_stale_index(tmp_path):
    """After a power loss an index older than its slab would serve other blocks."""
    blocks, capacity = await two_slabs(tmp_path)
    index = tmp_path / NAMESPACE.hex() / "00000001.index"
    old = index.read_bytes()
    newer = make_chain("newer", 8, BLOCK_BYTES)
    async with running(tmp_path, capacity=capacity) as backend:
        await backend.delete_many(NAMESPACE, [b.key.block_hash for b in blocks])
        await put(backend, newer)
        await put(backend, make_chain("newest", 8, BLOCK_BYTES))
    index.write_bytes(old)
    async with running(tmp_path, capacity=capacity) as backend:
        outcomes = await get(backend, blocks)
        assert Outcome.HIT not in outcomes
        assert outcomes.count(Outcome.CORRUPT) == 8
        assert set(await put(backend, newer)) <= {Outcome.STORED, Outcome.PRESENT}
        assert await get(backend, newer) == [Outcome.HIT] * 8
        check(backend)


# Namespaces that share a tier.


async def test_idle_namespace_gives_up_its_slabs(tmp_path):
    """Blocks of a model that is no longer used would hold the disk forever."""
    capacity = 8 * slab_bytes(8, SLOT_BYTES)
    async with running(tmp_path, capacity=capacity) as backend:
        for number in range(8):
            await put(backend, make_chain(f"old {number}", 8, BLOCK_BYTES))
        kept = []
        for number in range(20):
            chain = make_chain(f"new {number}", 8, BLOCK_BYTES, OTHER_NAMESPACE)
            assert await put(backend, chain) == [Outcome.STORED] * 8
            kept.append(chain)
            check(backend)
        held = [sum(await contains(backend, chain)) for chain in kept]
        assert sum(held) >= 40
        assert not (tmp_path / NAMESPACE.hex()).exists()


async def test_busy_namespace_keeps_its_slabs(tmp_path):
    """Two models in use would evict whole slabs of each other, over and over."""
    capacity = 8 * slab_bytes(8, SLOT_BYTES)
    async with running(tmp_path, capacity=capacity) as backend:
        ours = [make_chain(f"ours {n}", 4, BLOCK_BYTES) for n in range(6)]
        for chain in ours:
            await put(backend, chain)
        for number in range(40):
            theirs = make_chain(f"theirs {number}", 4, BLOCK_BYTES, OTHER_NAMESPACE)
            assert await put(backend, theirs) == [Outcome.STORED] * 4
            for chain in ours:
                assert await get(backend, chain) == [Outcome.HIT] * 4
        assert backend.counters["evicted_slabs_total"] == 0
        check(backend)


@pytest.mark.parametrize("eviction", STORAGE_POLICIES)
async def test_reused_blocks_outlive_a_scan(tmp_path, eviction):
    """One long document that is read once would evict the blocks that every request reads."""
    capacity = 8 * slab_bytes(8, SLOT_BYTES)
    async with running(tmp_path, capacity=capacity, eviction=eviction) as backend:
        hot, idle = (make_chain(name, 8, BLOCK_BYTES) for name in ("hot", "idle"))
        await put(backend, idle + hot)
        for _ in range(4):
            await get(backend, hot)
        for number in range(9):
            scan = make_chain(f"scan {number}", 8, BLOCK_BYTES)
            assert await put(backend, scan) == [Outcome.STORED] * 8
        held = await contains(backend, hot)
        assert held == [eviction != "lru"] * 8
        assert not any(await contains(backend, idle))
        check(backend)


async def test_block_put_again_is_recent(tmp_path):
    """A block that an engine has just computed again, because only this tier still had it, would be
    evicted next."""
    capacity = 8 * slab_bytes(8, SLOT_BYTES)
    async with running(tmp_path, capacity=capacity) as backend:
        first, second = (make_chain(name, 8, BLOCK_BYTES) for name in ("first", "second"))
        await put(backend, first + second)
        for number in range(6):
            await put(backend, make_chain(f"more {number}", 8, BLOCK_BYTES))
        assert await put(backend, first) == [Outcome.PRESENT] * 8
        await put(backend, make_chain("last", 8, BLOCK_BYTES))
        assert await contains(backend, first) == [True] * 8
        assert not any(await contains(backend, second))


async def test_eviction_spares_blocks_being_read(tmp_path, monkeypatch):
    """A record would be overwritten while a thread still reads it."""
    capacity = 4 * slab_bytes(8, SLOT_BYTES)
    real = os.preadv
    begun, go_on = threading.Semaphore(0), threading.Event()

    def preadv(fd, buffers, offset):
        begun.release()
        assert go_on.wait(10)
        return real(fd, buffers, offset)

    async with running(tmp_path, capacity=capacity, threads=8) as backend:
        old = make_chain("old", 4, BLOCK_BYTES)
        await put(backend, old)
        for number in range(3):
            await put(backend, make_chain(f"filler {number}", 4, BLOCK_BYTES))
        monkeypatch.setattr(os, "preadv", preadv)
        reading = asyncio.create_task(get(backend, old))
        # Neighbours are read together, so that one call has begun for all four.
        assert await asyncio.to_thread(begun.acquire, timeout=10)
        more = make_chain("more", 40, BLOCK_BYTES)
        assert Outcome.REFUSED in await put(backend, more)
        assert backend.counters["evicted_blocks_total"] == 12
        assert await contains(backend, old) == [True] * 4
        # Deleted, but its record is not reused before the read is over.
        await backend.delete_many(NAMESPACE, [old[3].key.block_hash])
        await put(backend, more)
        go_on.set()
        assert await reading == [Outcome.HIT] * 4
        assert await get(backend, old) == [Outcome.HIT] * 3 + [Outcome.MISS]
        check(backend)


# Faults of disks.


@needs_mount
async def test_disk_full(tmp_path, monkeypatch):
    """A full disk would stop the tier, or leave half a block that is served later."""
    monkeypatch.setattr(space_module, "RETRY_S", 0.0)
    length = 64 << 10
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=4m", "tmpfs") as path:
        filler = path / "filler"
        filler.write_bytes(bytes(2 << 20))
        async with running(path, capacity=64 << 20) as backend:
            chain = make_chain("full", 64, length)
            outcomes = await put(backend, chain)
            stored = outcomes.count(Outcome.STORED)
            assert 10 < stored < 32
            assert set(outcomes) == {Outcome.STORED, Outcome.REFUSED}
            assert backend.counters["refused_no_space_total"] == 64 - stored
            expected = [Outcome.HIT] * stored + [Outcome.MISS] * (64 - stored)
            assert await get(backend, chain) == expected
            check(backend)
            # New blocks replace old ones.
            assert await put(backend, make_chain("next", 4, length)) == [Outcome.STORED] * 4
            filler.unlink()
            more = make_chain("more", 40, length)
            assert await put(backend, more) == [Outcome.STORED] * 40
            check(backend)
        async with running(path, capacity=64 << 20) as backend:
            assert await get(backend, more) == [Outcome.HIT] * 40


@needs_mount
async def test_reserve_is_left_free(tmp_path, monkeypatch):
    """The tier would use up a disk that other programs need too."""
    monkeypatch.setattr(space_module, "RETRY_S", 0.0)
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=8m", "tmpfs") as path:
        async with running(path, capacity=64 << 20, reserve_free="50%") as backend:
            await put(backend, make_chain("reserve", 200, 64 << 10))
            found = os.statvfs(path)
            assert found.f_bavail * found.f_frsize >= 4 << 20
            assert backend.stats().used_bytes > 3 << 20


def free_on(path):
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


@needs_mount
@pytest.mark.slow
async def test_reserve_is_freed_for_other_programs(tmp_path, monkeypatch, caplog):
    """Logs, or an engine's checkpoint, would meet a full disk while the tier holds most of it."""
    monkeypatch.setattr(space_module, "WATCH_S", 0.02)
    monkeypatch.setattr(space_module, "RETRY_S", 0.0)
    length = 64 << 10
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=32m", "tmpfs") as path:
        async with running(path, capacity=16 << 20, reserve_free="8MiB") as backend:
            cold, hot = make_chain("cold", 96, length), make_chain("hot", 96, length)
            await put(backend, cold)
            await put(backend, hot)
            assert await get(backend, hot) == [Outcome.HIT] * 96
            used = backend.stats().used_bytes
            (path / "others").write_bytes(bytes(free_on(path) - (3 << 20)))
            async with asyncio.timeout(10):
                # A slab's file is removed before its bytes are subtracted.
                while free_on(path) < 8 << 20 or used - backend.stats().used_bytes < 5 << 20:
                    await asyncio.sleep(0.01)
            gone = used - backend.stats().used_bytes
            assert 5 << 20 <= gone < 9 << 20, "more was dropped than was needed"
            assert (
                backend.counters["reserve_slabs_total"] == backend.counters["evicted_slabs_total"]
            )
            assert await get(backend, hot) == [Outcome.HIT] * 96
            assert any(outcome is Outcome.MISS for outcome in await get(backend, cold))
            # The tier pauses although the others have made room: they may need it again at once.
            (path / "others").unlink()
            slabs, used = len(list(path.glob("*/*.slab"))), backend.stats().used_bytes
            await put(backend, make_chain("more", 96, length))
            assert backend.stats().used_bytes == used
            assert len(list(path.glob("*/*.slab"))) == slabs
            assert caplog.text.count("reserve_free") == 1
            backend._space._grow_after = 0.0
            await put(backend, make_chain("again", 96, length))
            assert backend.stats().used_bytes > used
            check(backend)


def test_failed_allocation_leaves_no_slab(tmp_path, monkeypatch):
    """A slab that the disk had no room for would stay behind half-made."""

    def no_room(fd, offset, size):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    folder = tmp_path / NAMESPACE.hex()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="no room"):
        Slab.create(folder, 1, slot_bytes=PAGE_BYTES, records=4, direct=True)
    assert list(folder.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


@contextlib.contextmanager
def loop_ext4(tmp_path):
    """A small ext4 file system, mounted for the test."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    with mounted(tmp_path / "disk", "-o", "loop", image) as path:
        yield path


def remount(path, mode):
    subprocess.run(["mount", "-o", f"remount,{mode}", path], check=True)


@needs_mount
@pytest.mark.slow
async def test_read_only_disk(tmp_path):
    """A disk remounted read-only would make its blocks unreadable as well."""
    blocks = make_chain("read-only", 8, BLOCK_BYTES)
    with loop_ext4(tmp_path) as path:
        async with running(path, capacity=16 << 20) as backend:
            await put(backend, blocks)
        remount(path, "ro")
        async with running(path, capacity=16 << 20) as backend:
            assert await get(backend, blocks) == [Outcome.HIT] * 8
            more = make_chain("more", 2, BLOCK_BYTES)
            assert await put(backend, more) == [Outcome.ERROR] * 2
            assert await get(backend, more) == [Outcome.MISS] * 2
            assert await get(backend, blocks) == [Outcome.HIT] * 8
            with pytest.raises(BackendError, match="come back"):
                await backend.delete_many(NAMESPACE, [blocks[7].key.block_hash])
            assert await contains(backend, blocks) == [True] * 7 + [False]
        remount(path, "rw")
        async with running(path, capacity=16 << 20) as backend:
            assert await put(backend, more) == [Outcome.STORED] * 2


EXT4_SHUTDOWN = 0x8004587D
"""ioctl after which an ext4 answers every I/O with EIO, like a disk that was pulled."""


@needs_mount
@pytest.mark.slow
async def test_dead_disk(tmp_path):
    """A disk that fails every call would hang the tier or end the process."""
    blocks = make_chain("dead", 8, BLOCK_BYTES)
    with loop_ext4(tmp_path) as path:
        async with running(path, capacity=16 << 20) as backend:
            await put(backend, blocks)
            fd = os.open(path, os.O_RDONLY)
            fcntl.ioctl(fd, EXT4_SHUTDOWN, (2).to_bytes(4, "little"))
            os.close(fd)
            assert await get(backend, blocks) == [Outcome.ERROR] * 8
            assert await get(backend, blocks) == [Outcome.MISS] * 8
            more = make_chain("more", 2, BLOCK_BYTES)
            assert await put(backend, more) == [Outcome.ERROR] * 2
            assert backend.counters["io_errors_total"] >= 10


def covered(buffers, offset):
    """Return the range of bytes of a file that a vectored call moves."""
    return range(offset, offset + sum(map(len, buffers)))


async def test_neighbouring_records_move_in_one_call(tmp_path, monkeypatch):
    """A prefix of small blocks would be read and written at half of the disk's speed."""
    blocks = make_chain("together", 16, BLOCK_BYTES)
    calls = []

    def counted(name):
        real = getattr(os, name)

        def call(fd, buffers, offset):
            calls.append(name)
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, name, call)

    counted("preadv")
    counted("pwritev")
    async with running(tmp_path, capacity=16 << 20) as backend:
        assert await put(backend, blocks) == [Outcome.STORED] * 16
        assert await get(backend, blocks) == [Outcome.HIT] * 16
        assert calls.count("pwritev") <= 2
        assert calls.count("preadv") <= 2
        # A damaged block of a run costs only that block.
        await backend.delete_many(NAMESPACE, [blocks[15].key.block_hash])
        assert await get(backend, blocks) == [Outcome.HIT] * 15 + [Outcome.MISS]


async def test_one_bad_sector(tmp_path, monkeypatch):
    """One bad sector would fail the whole batch, or be tried forever."""
    blocks, capacity = await two_slabs(tmp_path)
    real = os.preadv
    bad = 3 * (PAGE_BYTES + SLOT_BYTES)
    reads = []

    def preadv(fd, buffers, offset):
        reads.append(covered(buffers, offset))
        if bad in reads[-1]:
            raise OSError(errno.EIO, "bad sector")
        return real(fd, buffers, offset)

    async with running(tmp_path, capacity=capacity) as backend:
        await backend.delete_many(NAMESPACE, [blocks[15].key.block_hash])
        monkeypatch.setattr(os, "preadv", preadv)
        hit = Outcome.HIT
        assert await get(backend, blocks[:8]) == [hit] * 3 + [Outcome.ERROR] + [hit] * 4
        reads.clear()
        assert await get(backend, blocks[:8]) == [hit] * 3 + [Outcome.MISS] + [hit] * 4
        assert not any(bad in read for read in reads)
        assert await put(backend, [blocks[3]]) == [Outcome.STORED]
        assert await get(backend, blocks[:8]) == [hit] * 8


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Slab, "read"),
        (Slab, "read_run"),
        (Slab, "mark_used"),
        (Slab, "find_unlinked"),
        (Slab, "write_run"),
        (Slab, "clear"),
        (Shelf, "use"),
        (Shelf, "store"),
        (DiskHealth, "note_errors"),
    ],
)
async def test_bug_leaks_no_records(tmp_path, monkeypatch, owner, name):
    """One call that raises would keep its records pinned and its blocks marked as being written:
    the tier would no longer serve or store them, and a close would hang."""
    blocks, capacity = await two_slabs(tmp_path)
    more = make_chain("more", 4, BLOCK_BYTES)
    hashes = [block.key.block_hash for block in blocks]

    def bug(*_, **__):
        raise OverflowError("int too big to convert")

    async with running(tmp_path, capacity=capacity) as backend:
        raised = 0
        for call in (
            lambda: get(backend, blocks[:4]),
            lambda: get(backend, blocks[:1]),
            lambda: put(backend, more),
            lambda: asyncio.gather(put(backend, more), put(backend, more)),
            lambda: backend.delete_many(NAMESPACE, hashes[12:]),
        ):
            with monkeypatch.context() as broken, contextlib.suppress(OverflowError):
                broken.setattr(owner, name, bug)
                raised += 1
                async with asyncio.timeout(10):
                    await call()
                raised -= 1
            # Two concurrent calls may both raise, the second one later.
            while any(shelf.writing for shelf in backend._shelves):
                await asyncio.sleep(0)
            check(backend)
        assert raised
        assert set(await put(backend, blocks + more)) <= {Outcome.STORED, Outcome.PRESENT}
        assert await get(backend, blocks + more) == [Outcome.HIT] * 20
        check(backend)


async def test_failed_write_leaves_no_block(tmp_path, monkeypatch):
    """A block whose write failed would be found, now or after a restart."""
    blocks, capacity = await two_slabs(tmp_path)
    more = make_chain("failing", 6, BLOCK_BYTES)
    real = os.pwritev
    first = []

    def pwritev(fd, buffers, offset):
        first.append(offset)
        span = covered(buffers, offset)
        if first[0] + PAGE_BYTES + SLOT_BYTES in span:
            raise OSError(errno.EIO, "bad sector")
        if first[0] + 3 * (PAGE_BYTES + SLOT_BYTES) in span:
            return real(fd, buffers[:1], offset)
        return real(fd, buffers, offset)

    async with running(tmp_path, capacity=capacity) as backend:
        monkeypatch.setattr(os, "pwritev", pwritev)
        outcomes = await put(backend, more)
        assert sorted(o.value for o in outcomes) == ["error"] * 2 + ["stored"] * 4
        held = [o is Outcome.STORED for o in outcomes]
        assert await contains(backend, more) == held
        check(backend)
    async with running(tmp_path, capacity=capacity) as backend:
        assert await contains(backend, more) == held
        assert await get(backend, blocks) == [Outcome.HIT] * 16


async def test_data_is_written_before_the_index(tmp_path, monkeypatch):
    """A SIGKILL between two writes would leave an index entry for half a block."""
    capacity = 2 * slab_bytes(8, SLOT_BYTES)
    real = os.pwritev
    free = []

    def pwritev(fd, buffers, offset):
        # The state that a restart would find just before and just after the data is written.
        slab = Path(os.readlink(f"/proc/self/fd/{fd}"))
        at = entry_at(offset // (PAGE_BYTES + SLOT_BYTES))
        index = slab.with_suffix(".index")
        free.append(index.read_bytes()[at : at + ENTRY_BYTES] == FREE_ENTRY)
        put = real(fd, buffers, offset)
        free.append(index.read_bytes()[at : at + ENTRY_BYTES] == FREE_ENTRY)
        return put

    async with running(tmp_path, capacity=capacity) as backend:
        for turn in range(4):
            await put(backend, make_chain(f"order {turn}", 8, BLOCK_BYTES))
        assert backend.counters["evicted_blocks_total"] > 0
        monkeypatch.setattr(os, "pwritev", pwritev)
        more = make_chain("more", 8, BLOCK_BYTES)
        assert await put(backend, more) == [Outcome.STORED] * 8
    assert free == [True] * 16


STORM = """
import asyncio, random, sys
from tierd.testing.suite import NAMESPACE, OTHER_NAMESPACE, make_chain, put, get
from tierd_backends.file import FileBackend, FileOptions
async def main(path, capacity, seed):
    backend = FileBackend(FileOptions(path=path, capacity=int(capacity), reserve_free=0))
    await backend.open()
    print("open", flush=True)
    chance = random.Random(seed)
    async def play():
        while True:
            namespace = chance.choice((NAMESPACE, OTHER_NAMESPACE))
            chain = make_chain(f"storm {chance.randrange(60)}", 8, 12388, namespace)
            await put(backend, chain[:chance.randint(1, 8)])
            await get(backend, chain)
            if not chance.randrange(8):
                await backend.delete_many(namespace, [chain[-1].key.block_hash])
    await asyncio.gather(*(play() for _ in range(4)))
asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.slow
async def test_sigkill(tmp_path):
    """A daemon killed while it stores would serve wrong blocks after its restart."""
    assert BLOCK_BYTES == 12388
    capacity = 16 * slab_bytes(8, SLOT_BYTES)
    chance = random.Random(7)
    chains = [
        make_chain(f"storm {number}", 8, BLOCK_BYTES, namespace)
        for number in range(60)
        for namespace in (NAMESPACE, OTHER_NAMESPACE)
    ]
    hits = 0
    for round_number in range(10):
        with python(STORM, tmp_path, capacity, round_number) as storm:
            assert storm.stdout.readline() == b"open\n"
            await asyncio.sleep(chance.uniform(0.02, 0.3))
            storm.send_signal(signal.SIGKILL)
        async with running(tmp_path, capacity=capacity) as backend:
            for chain in chains:
                outcomes = await get(backend, chain)
                assert set(outcomes) <= {Outcome.HIT, Outcome.MISS}
                hits += outcomes.count(Outcome.HIT)
            check(backend)
            assert abs(disk_usage(tmp_path) - backend.stats().used_bytes) <= 4 * 4096 * 20
        names = {path.suffix or path.name for path in tmp_path.rglob("*") if path.is_file()}
        assert names <= {".slab", ".index", "LOCK", "FORMAT"}
    assert hits > 500


async def test_open_and_close_leak_nothing(tmp_path):
    """Opening and closing the tier, as a reload does, would leave files and threads behind."""
    async with running(tmp_path) as backend:
        await put(backend, make_chain("leak", 4, BLOCK_BYTES))
    gc.collect()  # Garbage of other tests must not be collected in between.
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(10):
        async with running(tmp_path) as backend:
            await get(backend, make_chain("leak", 4, BLOCK_BYTES))
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


async def test_calls_after_close(tmp_path):
    """A call after the close would hang, or fail with an unrelated error."""
    backend = await opened(tmp_path)
    await backend.close()
    with pytest.raises(BackendError, match="not open"):
        await backend.contains_many(NAMESPACE, [ROOT])
    assert backend.stats().blocks == 0


def test_suite_refuses_missing_hooks():
    """A new backend's tests would silently be skipped if one hook is missing."""
    with pytest.raises(TypeError, match=r"Incomplete lacks reopen, damage, swap, bounded"):

        class Incomplete(BackendSuite):
            async def make_backend(self, tmp_path, capacity_bytes):
                raise NotImplementedError


async def test_log_names_the_mode(tmp_path, caplog):
    """The operator could not tell whether O_DIRECT is in use."""
    caplog.set_level(logging.INFO, "tierd_backends.file")
    async with running(tmp_path) as backend:
        assert ("O_DIRECT" if backend.direct else "page cache") in caplog.text
    block = make_block("log", ROOT, BLOCK_BYTES)
    assert block.parent == ROOT


def _removed(path):
    shutil.rmtree(path)


def _emptied(path):
    shutil.rmtree(path)
    path.mkdir()


def _moved(path):
    path.rename(path.with_name("moved"))


def _replaced(path):
    path.rename(path.with_name("moved"))
    (path / "marks").mkdir(parents=True)
    (path / "LOCK").touch()


@pytest.mark.parametrize("lose", [_removed, _emptied, _moved, _replaced])
async def test_lost_directory_is_reported(tmp_path, monkeypatch, lose):
    """Blocks and marks would be written where no restart finds them, or nowhere, without an
    error."""
    monkeypatch.setattr(health_module, "OURS_S", 0.0)
    path = tmp_path / "store"
    capacity = 8 * slab_bytes(8, SLOT_BYTES)
    blocks, more = make_chain("lost", 4, BLOCK_BYTES), make_chain("more", 16, BLOCK_BYTES)
    async with running(path, capacity=capacity) as backend:
        await backend.add_mark("there")
        await put(backend, blocks)
        lose(path)
        why = r"store (was moved or removed|is another directory).*restart tierd"
        for asked in (
            put(backend, more),
            backend.add_mark("new"),
            backend.drop_marks(["there"]),
            backend.marks(),
        ):
            with pytest.raises(BackendError, match=why):
                await asked
        # Open slabs can still be read.
        assert await get(backend, blocks) == [Outcome.HIT] * 4
        assert not list(path.rglob("*.slab"))
        assert not list(path.rglob("new"))
        if path.with_name("moved").exists():
            shutil.rmtree(path, ignore_errors=True)
            path.with_name("moved").rename(path)
            assert await put(backend, more) == [Outcome.STORED] * 16
            assert await backend.marks() == ["there"]


async def test_disk_that_refuses_slabs_is_an_error(tmp_path, monkeypatch):
    """A tier whose every write fails would look full, and be called ready."""
    async with running(tmp_path) as backend:
        failing = [OSError(errno.EACCES, "Permission denied", "a folder")]

        def create(*_, **__):
            raise failing[0]

        monkeypatch.setattr(Slab, "create", create)
        blocks = make_chain("no slab", 4, BLOCK_BYTES)
        assert await put(backend, blocks) == [Outcome.ERROR] * 4
        assert "Permission denied: 'a folder'" in backend.stats().trouble
        assert await put(backend, blocks) == [Outcome.ERROR] * 4
        failing[0] = OSError(errno.ENOSPC, "No space left on device")
        backend._space._grow_after = 0.0
        assert await put(backend, blocks) == [Outcome.REFUSED] * 4
        assert await put(backend, blocks) == [Outcome.REFUSED] * 4
