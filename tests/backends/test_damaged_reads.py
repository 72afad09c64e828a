"""Reads that are damaged in transit: a sound block is neither deleted nor served wrong.

Against a real Redis and a real S3 server behind a proxy that damages bytes, and against the file
tier on a disk that does.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import msgspec
import pytest

from tests.support import blocks as node_blocks
from tests.support.daemon_process import DaemonProcess
from tests.support.servers import fake_s3
from tests.support.servers.fake_s3 import FakeS3, etag, reply
from tests.support.servers.proxy import Flow, Proxy
from tests.support.servers.redis import LEAST_RIGHTS, RedisServer
from tests.support.servers.s3 import SeaweedFS
from tests.support.tiers import file_check
from tests.support.tiers.scene import table
from tierd.backend import Backend, Outcome
from tierd.testing import suite
from tierd.testing.suite import contains, get, make_chain, put
from tierd.types import PAGE_BYTES
from tierd_backends.file import FileBackend, FileOptions, fsck
from tierd_backends.redis import RedisBackend
from tierd_backends.redis.options import RedisOptions
from tierd_backends.s3 import S3Backend, S3Options

HIT, MISS, ERROR, CORRUPT = Outcome.HIT, Outcome.MISS, Outcome.ERROR, Outcome.CORRUPT
LENGTH = 5000
BUCKET = "damaged"
LARGE_BYTES = 2000
"""A piece of a reply with at least this many bytes carries a payload."""

TRANSIT, STORED, UNKNOWN = (
    "damaged_in_transit_total",
    "corrupt_total",
    "damage_unconfirmed_total",
)
_prefixes = itertools.count()


class Spoiler:
    """Flips a bit near the end of payloads: for each one `places` yields the place, or None for
    none."""

    def __init__(self, places: Iterator[int | None]) -> None:
        self._places = places
        self.seen = 0

    def __call__(self, data: bytes) -> bytes:
        if len(data) < LARGE_BYTES:
            return data
        self.seen += 1
        place = next(self._places)
        if place is None:
            return data
        spoilt = bytearray(data)
        spoilt[-place] ^= 1
        return bytes(spoilt)


def once() -> Iterator[int | None]:
    return itertools.chain([50], itertools.repeat(None))


def each_in_a_different_place() -> Iterator[int | None]:
    return itertools.count(50, 7)


def alike() -> Iterator[int | None]:
    return itertools.repeat(50)


class Tier:
    """A shared tier behind a proxy, and the names of what its server holds."""

    def __init__(self, backend: Backend, proxy: Proxy, names: Callable[[], set[str]]) -> None:
        self.backend = backend
        self.proxy = proxy
        self.names = names

    def counts(self) -> tuple[int, ...]:
        return tuple(self.backend.counters[name] for name in (TRANSIT, STORED, UNKNOWN))

    def spoil(self, places: Iterator[int | None]) -> Spoiler:
        spoiler = Spoiler(places)
        self.proxy.spoil(down=Flow(change=spoiler))
        return spoiler

    def spoil_first_and_silence_second(self) -> Callable[[], Awaitable[None]]:
        """Damage the first reply and silence the second connection. Returns a function that waits
        for that connection."""
        spoiler, before = Spoiler(once()), self.proxy.accepted

        def change(data: bytes) -> bytes:
            return b"" if self.proxy.accepted > before else spoiler(data)

        async def second() -> None:
            while self.proxy.accepted == before:
                await asyncio.sleep(0.001)

        self.proxy.spoil(down=Flow(change=change))
        return second


@contextlib.asynccontextmanager
async def redis_tier(server: RedisServer, **more: object) -> AsyncIterator[Tier]:
    with Proxy(("127.0.0.1", server.port)) as proxy, server.client() as client:
        prefix = f"kv:{next(_prefixes)}"
        options = {**server.options(port=proxy.port), "prefix": prefix, **more}
        backend = RedisBackend.from_options(msgspec.convert(options, RedisOptions))
        async with suite.running(backend):
            yield Tier(backend, proxy, lambda: {k.decode() for k in client.keys(f"{prefix}:*")})


@contextlib.asynccontextmanager
async def s3_tier(server: SeaweedFS, **more: object) -> AsyncIterator[Tier]:
    with Proxy(("127.0.0.1", server.port)) as proxy:
        prefix = f"t{next(_prefixes)}"
        options = {**server.options(BUCKET), "prefix": prefix, "connections": 2, **more}
        options["endpoint"] = f"http://127.0.0.1:{proxy.port}"
        boto = server.client()

        def names() -> set[str]:
            found = boto.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/")
            return {each["Key"] for each in found.get("Contents", [])}

        backend = S3Backend.from_options(msgspec.convert(options, S3Options))
        try:
            async with suite.running(backend):
                yield Tier(backend, proxy, names)
        finally:
            boto.close()


@pytest.fixture(scope="module")
def bucket_server(weed: SeaweedFS) -> SeaweedFS:
    """An S3 server with a bucket."""
    weed.make_bucket(BUCKET)
    return weed


@pytest.fixture(params=["redis", "s3"])
def tier(request: pytest.FixtureRequest) -> Callable[..., object]:
    """Makes a tier on a real server."""
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        return lambda **more: redis_tier(server, **more)
    weed = request.getfixturevalue("bucket_server")
    return lambda **more: s3_tier(weed, **more)


# --- Redis and S3 -----------------------------------------------------------------------


@contextlib.asynccontextmanager
async def holding(
    tier: Callable[[], contextlib.AbstractAsyncContextManager[Tier]], text: str, count: int
) -> AsyncIterator[tuple[Tier, list[suite.SelfNamingBlock]]]:
    """A tier that holds `count` blocks, and holds the same ones at the end."""
    blocks = make_chain(text, count, LENGTH)
    async with tier() as at:
        await put(at.backend, blocks)
        names = at.names()
        assert len(names) == count
        yield at, blocks
        assert at.names() == names


@pytest.mark.slow
async def test_damage_in_transit_loses_no_block(tier) -> None:
    """One flipped bit on one node's link would delete a sound block for the whole fleet."""
    async with holding(tier, "transit", 3) as (at, blocks):
        for count, block in enumerate(blocks, 1):
            spoiler = at.spoil(once())
            assert await get(at.backend, [block]) == [HIT]
            assert spoiler.seen == 2, "the value was read once, so no read was damaged"
            assert at.counts() == (count, 0, 0)


@pytest.mark.slow
async def test_link_that_damages_every_read_deletes_nothing(tier) -> None:
    """A node with a bad NIC would empty the tier, at two reads per block."""
    async with holding(tier, "bad link", 4) as (at, blocks):
        at.spoil(each_in_a_different_place())
        for block in blocks:
            assert await get(at.backend, [block]) == [ERROR]
        assert at.counts() == (4, 0, 0)
        at.proxy.heal()
        assert await get(at.backend, blocks) == [HIT] * 4


@pytest.mark.slow
@pytest.mark.parametrize("how", ["silence", "reset"])
async def test_block_is_kept_if_the_second_read_fails(tier, how) -> None:
    """A block would be deleted after a single damaged read."""
    [block] = make_chain("no second", 1, LENGTH)
    async with tier(timeout_ms=300) as at:
        await put(at.backend, [block])
        second = at.spoil_first_and_silence_second()
        task = asyncio.create_task(get(at.backend, [block]))
        async with asyncio.timeout(10):
            await second()
            if how == "reset":
                at.proxy.refuse()
                at.proxy.cut()
            assert await task == [ERROR]
        assert at.counts() == (0, 0, 1)
        assert len(at.names()) == 1


@pytest.mark.slow
async def test_cancel_between_two_reads(tier) -> None:
    """The second read would outlast the call's deadline, or write to slots that have another owner
    by then, or a block would be deleted without a second read."""
    [block] = make_chain("deadline", 1, LENGTH)
    async with tier(timeout_ms=30_000) as at:
        await put(at.backend, [block])
        second = at.spoil_first_and_silence_second()
        task = asyncio.create_task(get(at.backend, [block]))
        async with asyncio.timeout(10):
            await second()
            task.cancel()
            await asyncio.wait([task])
        assert task.cancelled()
        assert at.counts() == (0, 0, 1)
        at.proxy.heal()
        assert await get(at.backend, [block]) == [HIT]


async def test_redis_keeps_a_block_stored_after_the_second_read(redis_server) -> None:
    """A sound block that another node stores after the second read would be deleted instead of the
    damaged one that it replaced."""
    [block] = make_chain("meanwhile", 1, LENGTH)
    async with redis_tier(redis_server) as at:
        await put(at.backend, [block])
        [name] = at.names()
        with redis_server.client() as client:
            sound = client.get(name)
            client.set(name, sound[:-1] + b"\0")

            def replace(data: bytes) -> bytes:
                if b"UNLINK" in data:
                    client.set(name, sound)
                return data

            at.proxy.spoil(up=Flow(change=replace))
            assert await get(at.backend, [block]) == [CORRUPT]
            assert at.counts() == (0, 1, 0)
            assert client.get(name) == sound
        at.proxy.heal()
        assert await get(at.backend, [block]) == [HIT]


async def test_redis_user_without_transaction_commands(tmp_path, caplog) -> None:
    """A user without the commands of a transaction would fail the batch, or delete without a
    watch."""
    rights = LEAST_RIGHTS.replace("+watch +multi +exec ", "")
    for missing in ("watch", "multi"):
        granted = {"watch", "multi", "exec"} - {missing}
        more = " ".join(f"+{each}" for each in sorted(granted))
        directory = tmp_path / missing
        blocks = make_chain(f"rights {missing}", 2, LENGTH)
        with RedisServer(directory, rights=f"~* {rights} {more}") as server:
            async with redis_tier(server) as at:
                await put(at.backend, blocks)
                with server.client() as client:
                    prefix = next(iter(at.names())).partition(":")[0]
                    name = f"{prefix}:*:{blocks[0].key.block_hash.hex()}"
                    [key] = client.keys(name)
                    client.set(key, client.get(key)[:-1] + b"\0")
                first = ERROR if missing == "watch" else CORRUPT
                assert await get(at.backend, blocks) == [first, HIT]
                assert len(at.names()) == 2
        assert f"'{missing}' command" in caplog.text


@pytest.mark.parametrize("conditions", ["kept", "ignored", "refused"])
async def test_s3_keeps_an_object_stored_after_the_second_read(conditions) -> None:
    """A sound object that another node stores after the second read would be deleted instead of the
    damaged one. Or a server that knows no conditions could never delete a damaged one."""
    blocks = make_chain("meanwhile", 2, LENGTH)
    with FakeS3() as fake:
        async with fake_s3.running(fake) as backend:
            await put(backend, blocks)
            sound = dict(fake.objects)
            for name in fake.objects:
                fake.objects[name] = sound[name][:-1] + b"\0"
            victim = blocks[0].key.block_hash.hex()

            def meanwhile(request):
                # With conditions at the last moment, without them just before the lookup.
                late = "DELETE" if conditions == "kept" else "HEAD"
                if request.method == late and victim in request.name:
                    fake.objects[request.name] = sound[request.name]
                if request.method == "DELETE" and "if-match" in request.headers:
                    if conditions == "ignored":
                        del request.headers["if-match"]
                    elif conditions == "refused":
                        return [fake_s3.error(501, "NotImplemented")]
                return None

            fake.script = meanwhile
            assert await get(backend, blocks) == [CORRUPT, CORRUPT]
            fake.script = None
            assert [name for name in fake.objects if victim in name] == list(fake.objects)
            assert await get(backend, blocks) == [HIT, MISS]
            assert backend.counters[STORED] == 2


async def test_damaged_object_without_an_etag_is_kept(caplog) -> None:
    """An unconditional delete could hit a sound object that replaced the damaged one."""
    [block] = make_chain("no etag", 1, LENGTH)
    with FakeS3() as fake:
        async with fake_s3.running(fake) as backend:
            await put(backend, [block])
            [(name, sound)] = fake.objects.items()
            spoilt = sound[:-1] + b"\0"
            for weak in ({}, {"ETag": f"W/{etag(spoilt)}"}, {"ETag": '"a" "b"'}):
                fake.script = fake_s3.on("GET", reply(200, spoilt, **weak))
                assert await get(backend, [block]) == [CORRUPT]
                assert fake.objects == {name: sound}
    assert "no ETag" in caplog.text


@pytest.mark.slow
def test_daemon_serves_blocks_damaged_in_transit(tmp_path) -> None:
    """Requests would be recomputed, on other nodes as well, and the operator would suspect the
    server instead of the link."""
    space = node_blocks.namespace(16384)
    hashes, parents = node_blocks.chain(6)
    payloads = [node_blocks.payload(space, block_hash) for block_hash in hashes]
    with FakeS3() as fake, DaemonProcess(tmp_path, storage=table("s3", fake.options())) as daemon:
        daemon.wait_tier("s3", "ready")
        client = daemon.client()
        handle = client.register(space)
        client.put(handle, list(zip(hashes, parents, payloads, strict=True)))
        daemon.wait_backed_up()
        flush = ["-m", "tierd.cli.main", "flush", "--all", "--tier", "host", "--yes"]
        subprocess.run([sys.executable, *flush, "--socket", daemon.socket], check=True)
        objects, damaged = dict(fake.objects), set()

        def script(request):
            if request.method == "GET" and request.name in objects and request.name not in damaged:
                damaged.add(request.name)
                return [reply(200, objects[request.name][:-1] + b"\0")]
            return None

        fake.script = script
        got = client.get(handle, hashes, 5000)
        assert [bytes(view) for view in got] == payloads
        client.close()
        assert (len(damaged), fake.objects) == (6, objects)
        counters = daemon.tiers()["s3"]["counters"]
        assert (counters[TRANSIT], counters["get_hit_total"], counters[STORED]) == (6, 6, 0)


# --- the file tier ----------------------------------------------------------------------


class Disk:
    """os.preadv, with `faults` for the reads of one record, in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, record: int, record_bytes: int) -> None:
        self.faults: Iterator[int | OSError | None] = iter(())
        self.reads = 0
        self._at = record * record_bytes
        self._preadv = os.preadv
        monkeypatch.setattr(os, "preadv", self.preadv)

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        got = self._preadv(fd, buffers, offset)
        place = self._at - offset
        if 0 <= place < got and os.readlink(f"/proc/self/fd/{fd}").endswith(".slab"):
            self.reads += 1
            fault = next(self.faults, None)
            if isinstance(fault, OSError):
                raise fault
            if fault is not None:
                self._flip(buffers, place + PAGE_BYTES + fault)
        return got

    def _flip(self, buffers: list[memoryview], place: int) -> None:
        for buffer in buffers:
            if place < len(buffer):
                buffer[place] ^= 1
                return
            place -= len(buffer)


EIO = OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize(
    ("faults", "outcome", "counted", "kept"),
    [
        ([7], HIT, TRANSIT, True),
        ([EIO], HIT, None, True),
        ([7, 7, 7], CORRUPT, STORED, False),
        ([7, 8, 9], ERROR, TRANSIT, True),
        ([7, EIO, 7], ERROR, UNKNOWN, True),
        ([7, 8, EIO], ERROR, UNKNOWN, True),
        ([EIO, EIO, EIO], ERROR, None, False),
    ],
    ids=["flip", "eio", "flips alike", "flips", "flip and eio", "flips, eio", "eios"],
)
async def test_disk_that_returns_wrong_bytes(
    tmp_path, monkeypatch, count, faults, outcome, counted, kept
) -> None:
    """A cable or controller that damages reads would cost sound blocks permanently, or a bad sector
    would be tried forever."""
    options = FileOptions(path=str(tmp_path), capacity="64MiB", reserve_free=0)
    blocks = make_chain("disk", 8, 2 * PAGE_BYTES)
    async with suite.running(FileBackend(options)) as backend:
        await put(backend, blocks)
        disk = Disk(monkeypatch, 3, 3 * PAGE_BYTES)
        # A run is read in one call, and then each damaged record alone.
        disk.faults = iter(faults[-2:] if count == 1 and len(faults) > 1 else faults)
        wanted = blocks if count == 8 else blocks[3:4]
        outcomes = await get(backend, wanted)
        assert outcomes == [outcome if block is blocks[3] else HIT for block in wanted]
        seen = {name: backend.counters[name] for name in (TRANSIT, STORED, UNKNOWN)}
        if counted is not None or outcome is ERROR:
            assert seen == {name: int(name == counted) for name in seen}
        assert await contains(backend, blocks[3:4]) == [kept]
        assert await get(backend, blocks) == [HIT] * 3 + [HIT if kept else MISS] + [HIT] * 4
    async with suite.running(FileBackend(options)) as backend:
        assert await contains(backend, blocks[3:4]) == [kept]


async def test_second_read_bypasses_the_page_cache(tmp_path, monkeypatch) -> None:
    """Without O_DIRECT the second read would return the same damaged page of memory."""
    options = FileOptions(path=str(tmp_path), capacity="64MiB", reserve_free=0, direct="off")
    [block] = make_chain("cache", 1, PAGE_BYTES)
    dropped = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *what: dropped.append(what))
    async with suite.running(FileBackend(options)) as backend:
        await put(backend, [block])
        disk = Disk(monkeypatch, 0, 2 * PAGE_BYTES)
        disk.faults = iter([7])
        assert await get(backend, [block]) == [HIT]
    assert dropped == [(0, 2 * PAGE_BYTES, os.POSIX_FADV_DONTNEED)]


@pytest.mark.parametrize(
    ("faults", "sound", "damage"),
    [
        ([7], 8, {fsck.UNSTEADY: 1}),
        ([EIO], 8, {fsck.UNSTEADY: 1}),
        ([7, 8], 7, {fsck.UNSTEADY: 1}),
        ([7, EIO], 7, {fsck.UNSTEADY: 1}),
        ([7, 7], 7, {fsck.BAD_PAYLOAD: 1}),
        ([EIO, EIO], 7, {fsck.UNREADABLE: 1}),
    ],
    ids=["flip", "eio", "flips", "flip and eio", "flips alike", "eios"],
)
async def test_repair_on_a_disk_that_returns_wrong_bytes(
    tmp_path, monkeypatch, faults, sound, damage
) -> None:
    """`fsck --repair` would drop sound blocks because of a bad cable, or report that all is
    well."""
    options = FileOptions(path=str(tmp_path), capacity="64MiB", reserve_free=0)
    async with suite.running(FileBackend(options)) as backend:
        await put(backend, make_chain("fsck", 8, 2 * PAGE_BYTES))
    monkeypatch.setattr(fsck, "CHUNK_BYTES", 1)  # Read records one by one.
    disk = Disk(monkeypatch, 3, 3 * PAGE_BYTES)
    disk.faults = iter(faults)
    report = file_check.check(tmp_path, repair=True)
    assert (report.blocks, file_check.kinds(report)) == (sound, damage)
    assert report.left == (fsck.UNSTEADY in damage)
    kept = sound == 8 or fsck.UNSTEADY in damage
    again = file_check.check(tmp_path)
    assert (again.blocks, again.found) == (8 if kept else 7, 0)
