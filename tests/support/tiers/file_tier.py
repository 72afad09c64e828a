"""A file tier for tests: its suite, and damage to its files."""

from __future__ import annotations

import contextlib
import os

import pytest

from tierd.backend import HEADER_BYTES, BlockHeader, Outcome, checksum, pack_header, unpack_header
from tierd.testing import suite
from tierd.testing.suite import BackendSuite, Damage, make_chain, payload_of, put
from tierd.types import PAGE_BYTES, slot_bytes_for
from tierd_backends.file import FileBackend, FileOptions
from tierd_backends.file.slab import slab_bytes
from tierd_backends.file.slab_index import ENTRY_BYTES, entry_at

BLOCK_BYTES = 3 * PAGE_BYTES + 100


SLOT_BYTES = slot_bytes_for(BLOCK_BYTES)


def options(path, capacity=64 << 20, **more):
    return FileOptions(**{"path": str(path), "capacity": capacity, "reserve_free": 0, **more})


async def opened(path, capacity=64 << 20, **more):
    backend = FileBackend.from_options(options(path, capacity, **more))
    await backend.open()
    return backend


@contextlib.asynccontextmanager
async def running(path, capacity=64 << 20, **more):
    async with suite.running(FileBackend.from_options(options(path, capacity, **more))) as backend:
        yield backend


def check(backend):
    """Assert that every record is in one state, and that counts match the files' sizes."""
    space = backend._space
    slabs = 0
    for shelf in backend._shelves:
        shelf.check()
        slabs += len(shelf.slabs)
    assert space.used_bytes == occupied(backend._directory.path)
    assert space.used_bytes <= space.capacity_bytes
    return slabs


def occupied(path):
    return sum(p.stat().st_size for p in path.glob("*/*") if p.suffix in (".slab", ".index"))


class FileSuite(BackendSuite, abstract=True):
    """Hooks that read and write the slab files directly."""

    bounded = True
    direct = True

    @pytest.fixture
    def folder(self, tmp_path):
        """The tier's directory; a subclass puts it on another file system."""
        return tmp_path / "tier"

    @pytest.fixture(autouse=True)
    def _remember_folder(self, folder):
        self.path = folder

    async def make_backend(self, tmp_path, capacity_bytes):
        self.more = {"capacity": capacity_bytes or 256 << 20}
        return await self._open()

    async def reopen(self, backend):
        await backend.close()
        return await self._open()

    async def _open(self):
        backend = await opened(self.path, **self.more)
        assert backend.direct is self.direct
        return backend

    async def damage(self, backend, key, how, offset):
        path, at, record_bytes = find_record(self.path, key)
        with path.open("r+b") as file:
            file.seek(at)
            raw = bytearray(file.read(record_bytes))
            header = unpack_header(bytes(raw))
            assert header is not None
            match how:
                case Damage.FLIP_HEADER:
                    raw[offset] ^= 1
                case Damage.FLIP_PAYLOAD:
                    raw[PAGE_BYTES + offset] ^= 1
                case Damage.TRUNCATE:
                    file.truncate(at + PAGE_BYTES + offset)
                    return
                case Damage.OVERSIZE:
                    longer = payload_of(key, header.length + offset)
                    header = BlockHeader(key, header.parent, len(longer), checksum(longer))
                    raw[:HEADER_BYTES] = pack_header(header)
                    raw[PAGE_BYTES:] = longer[: record_bytes - PAGE_BYTES].ljust(
                        record_bytes - PAGE_BYTES
                    )
            file.seek(at)
            file.write(raw)

    async def swap(self, backend, first, second):
        path_1, at_1, record_bytes = find_record(self.path, first)
        path_2, at_2, _ = find_record(self.path, second)
        with path_1.open("r+b") as one, path_2.open("r+b") as other:
            one.seek(at_1)
            other.seek(at_2)
            raw_1, raw_2 = one.read(record_bytes), other.read(record_bytes)
            one.seek(at_1)
            other.seek(at_2)
            one.write(raw_2)
            other.write(raw_1)


def find_record(path, key):
    """File, offset and size of the record that holds `key`, by reading every header page."""
    for slab in sorted((path / key.namespace.hex()).glob("*.slab")):
        head = slab.with_suffix(".index").read_bytes()[:64]
        record_bytes = PAGE_BYTES + int.from_bytes(head[16:24], "little")
        with slab.open("rb") as file:
            for at in range(0, slab.stat().st_size, record_bytes):
                file.seek(at)
                header = unpack_header(file.read(HEADER_BYTES))
                if header is not None and header.key == key:
                    return slab, at, record_bytes
    raise AssertionError(f"{key} is in no slab")


async def two_slabs(path):
    """A tier with two slabs of 8 blocks each, and those blocks."""
    capacity = 8 * slab_bytes(8, SLOT_BYTES)
    async with running(path, capacity=capacity) as backend:
        blocks = make_chain("slabs", 16, BLOCK_BYTES)
        assert await put(backend, blocks[:8]) == [Outcome.STORED] * 8
        assert await put(backend, blocks[8:]) == [Outcome.STORED] * 8
        assert check(backend) == 2
    return blocks, capacity


def cut_slab(folder):
    os.truncate(folder / "00000002.slab", 3 * (PAGE_BYTES + SLOT_BYTES) + 5)


def empty_slab(folder):
    os.truncate(folder / "00000002.slab", 0)


def cut_index(folder):
    os.truncate(folder / "00000002.index", entry_at(3) + ENTRY_BYTES - 1)


def long_index(folder):
    os.truncate(folder / "00000002.index", 1 << 20)


def no_index(folder):
    (folder / "00000002.index").unlink()


def no_slab(folder):
    (folder / "00000002.slab").unlink()


def empty_index(folder):
    os.truncate(folder / "00000002.index", 0)


def bad_index_head(folder):
    with (folder / "00000002.index").open("r+b") as file:
        file.seek(12)
        file.write(b"\xff\xff\xff\xff")


def bad_entries(folder):
    with (folder / "00000002.index").open("r+b") as file:
        for record in range(3, 8):
            file.seek(entry_at(record) + 40)
            file.write(b"\xff")


def directory_for_slab(folder):
    (folder / "00000002.slab").unlink()
    (folder / "00000002.slab").mkdir()


def fifo_for_index(folder):
    (folder / "00000002.index").unlink()
    os.mkfifo(folder / "00000002.index")


def other_slab(folder):
    (folder / "00000001.slab").rename(folder / "swap")
    (folder / "00000002.slab").rename(folder / "00000001.slab")
    (folder / "swap").rename(folder / "00000002.slab")
