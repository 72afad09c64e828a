"""The S3 tier on two real servers: the contract, and outages of the server."""

import asyncio
import itertools
import time
from functools import partial

import msgspec
import pytest
import trustme

from tests.support.servers.s3 import Rclone, S3Server, SeaweedFS, Tls
from tests.support.tiers.stack import daemon_stack
from tierd.backend import (
    Outcome,
)
from tierd.errors import BackendError
from tierd.testing.suite import (
    BackendSuite,
    contains,
    damaged,
    get,
    indexed,
    make_chain,
    put,
)
from tierd_backends.s3 import S3Backend, S3Options

pytestmark = pytest.mark.slow

BUCKET = "tierd-test"
LENGTH = 3 * 4096 + 100

_prefixes = itertools.count()


async def opened(server, make=S3Backend.from_options, **more):
    """An open backend that has counted its bucket, with a unique prefix unless one is given."""
    more = {"timeout_ms": 5000, "connections": 4, "prefix": f"t{next(_prefixes)}", **more}
    settings = {**server.options(BUCKET), **more}
    backend = make(msgspec.convert(settings, S3Options))
    await backend.open()
    await indexed(backend)
    return backend


@pytest.fixture(scope="module")
def seaweed(tmp_path_factory):
    with SeaweedFS(tmp_path_factory.mktemp("seaweed")) as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture(scope="module")
def rclone(tmp_path_factory):
    with Rclone(tmp_path_factory.mktemp("rclone")) as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture
def own_server(tmp_path):
    """A server that the test may stop; the kind that starts fastest."""
    with Rclone(tmp_path / "rclone") as server:
        server.make_bucket(BUCKET)
        yield server


class S3Suite(BackendSuite, abstract=True):
    """Hooks that read and write the bucket with boto3."""

    bounded = False
    server: S3Server
    bucket = BUCKET

    @pytest.fixture(autouse=True)
    def _boto(self, _server):
        self.boto = self.server.client()
        yield
        self.boto.close()

    async def make_backend(self, tmp_path, capacity_bytes):
        self.prefix = f"t{next(_prefixes)}"
        return await self._open()

    async def reopen(self, backend):
        await backend.close()
        return await self._open()

    async def _open(self):
        return await opened(self.server, bucket=self.bucket, prefix=self.prefix)

    def _name(self, key):
        return f"{self.prefix}/{key.namespace.hex()}/{key.block_hash.hex()}"

    def _read(self, key):
        with self.boto.get_object(Bucket=self.bucket, Key=self._name(key))["Body"] as body:
            return body.read()

    def _write(self, key, raw):
        self.boto.put_object(Bucket=self.bucket, Key=self._name(key), Body=raw)

    async def damage(self, backend, key, how, offset):
        self._write(key, damaged(self._read(key), how, offset))

    async def swap(self, backend, first, second):
        one, other = self._read(first), self._read(second)
        self._write(first, other)
        self._write(second, one)


class TestSeaweedFS(S3Suite):
    @pytest.fixture(autouse=True)
    def _server(self, seaweed):
        self.server = seaweed


class TestRclone(S3Suite):
    @pytest.fixture(autouse=True)
    def _server(self, rclone):
        self.server = rclone

    async def make_backend(self, tmp_path, capacity_bytes):
        # rclone reads all of a bucket for every listing.
        self.bucket = self.server.make_bucket()
        return await super().make_backend(tmp_path, capacity_bytes)


class TestDaemonStack(S3Suite):
    @pytest.fixture(autouse=True)
    def _server(self, seaweed):
        self.server = seaweed

    async def _open(self):
        make = partial(daemon_stack, S3Backend)
        return await opened(self.server, make, bucket=self.bucket, prefix=self.prefix)


@pytest.mark.parametrize("kind", ["seaweed", "rclone"])
async def test_two_nodes_store_the_same_prefix(kind, request):
    """If two nodes store one prefix at the same time, both would count it, or no copy would
    remain."""
    server = request.getfixturevalue(kind)
    prefix = f"race{kind}"
    one, other = await opened(server, prefix=prefix), await opened(server, prefix=prefix)
    for number in range(5):
        blocks = make_chain(f"race {kind} {number}", 6, LENGTH)
        both = await asyncio.gather(put(one, blocks), put(other, blocks))
        for outcomes in zip(*both, strict=True):
            assert Outcome.STORED in outcomes
            # rclone ignores the condition, so there both may have stored the same bytes.
            if kind == "seaweed":
                assert Outcome.PRESENT in outcomes
        assert await get(one, blocks) == [Outcome.HIT] * 6
        assert await get(other, blocks) == [Outcome.HIT] * 6
    await one.close()
    await other.close()


async def test_nodes_share_a_bucket(rclone):
    """A block stored by one node would be a miss on the next, or be dropped unnoticed."""
    one, other = await opened(rclone, prefix="share"), await opened(rclone, prefix="share")
    blocks = make_chain("share", 4, LENGTH)
    assert await put(one, blocks) == [Outcome.STORED] * 4
    assert await get(other, blocks) == [Outcome.HIT] * 4
    assert await put(other, blocks) == [Outcome.PRESENT] * 4
    dropped = await other.delete_many(
        blocks[0].key.namespace, [block.key.block_hash for block in blocks]
    )
    assert dropped == 4
    assert await contains(one, blocks) == [False] * 4
    assert other.stats().blocks == 0
    await one.close()
    await other.close()


async def test_cancel_while_the_server_is_paused(seaweed):
    """A server that hangs would hold up a cancelled call, or all calls after it."""
    backend = await opened(seaweed, timeout_ms=200, prefix="paused")
    blocks = make_chain("paused", 16, LENGTH)
    await put(backend, blocks)
    seaweed.pause()
    try:
        task = asyncio.create_task(get(backend, blocks))
        await asyncio.sleep(0.02)
        start = time.monotonic()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert time.monotonic() - start < 5
        with pytest.raises(BackendError, match="no progress"):
            await contains(backend, blocks)
        assert await get(backend, blocks) == [Outcome.ERROR] * 16
        assert await put(backend, make_chain("more", 2, LENGTH)) == [Outcome.ERROR] * 2
    finally:
        seaweed.resume()
    await backend.close()
    backend = await opened(seaweed, prefix="paused")
    assert await get(backend, blocks) == [Outcome.HIT] * 16
    await backend.close()


async def test_killed_server_comes_back(own_server):
    """A server's crash and return would need a restart of tierd, or be taken for misses."""
    backend = await opened(own_server)
    blocks = make_chain("killed", 8, LENGTH)
    await put(backend, blocks)
    own_server.kill()
    assert await get(backend, blocks) == [Outcome.ERROR] * 8
    assert await put(backend, blocks) == [Outcome.ERROR] * 8
    with pytest.raises(BackendError, match="cannot be reached: Connection refused"):
        await contains(backend, blocks)
    own_server.start()
    assert await get(backend, blocks) == [Outcome.HIT] * 8
    own_server.restart()
    assert await get(backend, blocks) == [Outcome.HIT] * 8
    own_server.restart(empty=True)
    with pytest.raises(BackendError, match="bucket does not exist"):
        await get(backend, blocks)
    own_server.make_bucket(BUCKET)
    assert await get(backend, blocks) == [Outcome.MISS] * 8
    assert await put(backend, blocks) == [Outcome.STORED] * 8
    await backend.close()


async def test_deleted_bucket_is_an_error(rclone):
    """A deleted bucket would look like a cold cache."""
    name = rclone.make_bucket()
    backend = await opened(rclone, bucket=name)
    blocks = make_chain("bucket", 2, LENGTH)
    client = rclone.client()
    client.delete_bucket(Bucket=name)
    client.close()
    with pytest.raises(BackendError, match="bucket does not exist: create it"):
        await get(backend, blocks)
    with pytest.raises(BackendError, match="bucket does not exist: create it"):
        await put(backend, blocks)
    await backend.close()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"bucket": "no-such-bucket"}, "bucket does not exist: create it"),
        ({"secret_key": "wrong"}, "access denied .*secret key does not belong to the access key"),
        ({"access_key": "wrong"}, "access denied .*does not know this access key"),
    ],
)
async def test_wrong_settings_are_named(seaweed, wrong, words):
    """The operator could not tell from the log which setting is wrong."""
    with pytest.raises(BackendError, match=words):
        await opened(seaweed, **wrong)


async def test_tls(tmp_path):
    """Over TLS blocks would come back wrong, or go to a server without a trusted certificate."""
    tls = Tls(*(tmp_path / name for name in ("server.pem", "server.key", "authority.pem")))
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tls.authority))
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(str(tls.certificate))
    issued.private_key_pem.write_to_path(str(tls.key))
    with Rclone(tmp_path / "rclone", tls=tls) as server:
        server.make_bucket(BUCKET)
        with pytest.raises(BackendError, match="certificate is not trusted"):
            await opened(server)
        backend = await opened(server, tls_ca=str(tls.authority))
        blocks = make_chain("tls", 4, 2 << 20)
        assert await put(backend, blocks) == [Outcome.STORED] * 4
        for _ in range(3):
            assert await get(backend, blocks) == [Outcome.HIT] * 4
        for turn in range(10):
            task = asyncio.create_task(get(backend, blocks))
            await asyncio.sleep(0.001 * turn)
            task.cancel()
            await asyncio.wait([task])
        assert await get(backend, blocks) == [Outcome.HIT] * 4
        assert backend.counters["corrupt_total"] == 0
        await backend.close()
