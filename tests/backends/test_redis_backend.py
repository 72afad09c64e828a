"""The Redis tier: the contract on real servers, and faults of servers and networks."""

import asyncio
import contextlib
import itertools
import os
import random
import socket
import subprocess
import sys
import threading
import time

import hiredis
import msgspec
import pytest
from redis.crc import key_slot

from tests.support.servers.proxy import Flow, Proxy
from tests.support.servers.redis import (
    LEAST_RIGHTS,
    PASSWORD,
    USER,
    RedisCluster,
    RedisServer,
)
from tests.support.tiers.redis_tier import made, running
from tests.support.tiers.stack import daemon_stack
from tierd.backend import (
    HEADER_BYTES,
    GetRequest,
    Outcome,
    pack_header,
)
from tierd.errors import BackendError, ConfigError
from tierd.testing.suite import (
    NAMESPACE,
    BackendSuite,
    CanarySlots,
    contains,
    damaged,
    get,
    indexed,
    make_chain,
    put,
    scanned,
)
from tierd.types import slot_bytes_for
from tierd_backends.redis import RedisBackend
from tierd_backends.redis import backend as redis_module
from tierd_backends.redis.connect import Connector
from tierd_backends.redis.options import RedisOptions

BLOCK_BYTES = 5000
SOON_S = 5.0
"""Far less than what is waited for in vain, far more than a slow machine needs."""
NEVER_MS = 60_000

_serials = itertools.count()


def redis_key(prefix, key):
    return f"{prefix}:{key.namespace.hex()}:{key.block_hash.hex()}".encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A server that speaks TLS only and grants the tier the least rights."""
    directory = tmp_path_factory.mktemp("redis-tls")
    with RedisServer(directory, tls=True, rights=f"~kv:* {LEAST_RIGHTS}") as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with RedisCluster(tmp_path_factory.mktemp("redis-cluster")) as cluster:
        yield cluster


class RedisSuite(BackendSuite, abstract=True):
    """Hooks that read and write the server with a plain client. Each test has its own prefix."""

    bounded = False
    server: RedisServer

    @pytest.fixture(autouse=True)
    def _servers(self, request):
        self.options = {**self.where(request), "prefix": f"kv:{next(_serials)}"}

    def where(self, request):
        """Options that reach the server."""
        raise NotImplementedError

    def client_for(self, key):
        """A plain client of the server that holds `key`."""
        return self.server.client()

    async def make_backend(self, tmp_path, capacity_bytes):
        backend = made(self.options)
        await backend.open()
        await indexed(backend)
        return backend

    async def reopen(self, backend):
        await backend.close()
        return await self.make_backend(None, None)

    async def damage(self, backend, key, how, offset):
        name = redis_key(self.options["prefix"], key)
        with self.client_for(name) as client:
            client.set(name, damaged(client.get(name), how, offset))

    async def swap(self, backend, first, second):
        names = [redis_key(self.options["prefix"], key) for key in (first, second)]
        values = []
        for name in names:
            with self.client_for(name) as client:
                values.append(client.get(name))
        for name, value in zip(names, reversed(values), strict=True):
            with self.client_for(name) as client:
                client.set(name, value)


class TestTcp(RedisSuite):
    def where(self, request):
        self.server = request.getfixturevalue("server")
        return self.server.options()


class TestUnix(RedisSuite):
    def where(self, request):
        self.server = request.getfixturevalue("server")
        return self.server.options(unix=True)


class TestTlsAndLeastRights(RedisSuite):
    def where(self, request):
        self.server = request.getfixturevalue("guarded")
        return self.server.options()


class TestCluster(RedisSuite):
    def where(self, request):
        self.cluster = request.getfixturevalue("cluster")
        return self.cluster.options()

    def client_for(self, key):
        return self.cluster.node_of(key).client()


@pytest.mark.slow
class TestDaemonStack(RedisSuite):
    def where(self, request):
        self.server = request.getfixturevalue("server")
        return self.server.options()

    async def make_backend(self, tmp_path, capacity_bytes):
        options = msgspec.convert(self.options, RedisOptions)
        backend = daemon_stack(RedisBackend, options)
        await backend.open()
        await indexed(backend)
        return backend


# Unexpected values and keys.


def names(backend, blocks):
    return [redis_key(backend._options.prefix, block.key) for block in blocks]


@pytest.mark.parametrize("length", [100, BLOCK_BYTES, 300 << 10])
async def test_malformed_values(server, length):
    """A value that is too short, too long, empty or a list would spoil its neighbours in a run, or
    be written past its slot. Or it would stay forever and keep the block from being stored."""
    blocks = make_chain(f"odd {length}", 9, length)
    async with running(server.options(), prefix=f"odd{length}") as backend:
        await put(backend, blocks)
        key = names(backend, blocks)
        with server.client() as client:
            client.delete(key[1])
            client.setrange(key[2], HEADER_BYTES + length, b"more")
            client.set(key[4], b"")
            client.set(key[5], client.get(key[5])[: HEADER_BYTES - 1])
            client.delete(key[6])
            client.rpush(key[6], b"a", b"b")
            client.set(key[7], bytes(20 << 20))
        outcomes = await get(backend, blocks)
        hit, miss, corrupt = Outcome.HIT, Outcome.MISS, Outcome.CORRUPT
        assert outcomes == [hit, miss, corrupt, hit, corrupt, corrupt, corrupt, corrupt, hit]
        assert backend.counters["corrupt_total"] == 5
        assert await get(backend, blocks[2:3] + blocks[4:8]) == [miss] * 5
        assert backend.stats().blocks == 9 - 5  # the missing block was not dropped by this tier
        assert set(await put(backend, blocks)) == {Outcome.STORED, Outcome.PRESENT}
        assert await get(backend, blocks) == [hit] * 9


async def test_misses_among_hits(server):
    """Blocks that follow an evicted one in a run would be taken for damaged ones."""
    blocks = make_chain("misses", 60, 700)
    async with running(server.options(), prefix="misses") as backend:
        await put(backend, blocks[::3])
        outcomes = await get(backend, blocks)
        assert outcomes == [Outcome.HIT, Outcome.MISS, Outcome.MISS] * 20
        assert backend.counters["reconnects_total"] == 0


async def test_foreign_keys_are_ignored(server):
    """Keys of other programs would be counted, scanned or deleted as blocks."""
    blocks = make_chain("others", 3, BLOCK_BYTES)
    async with running(server.options(), prefix="ours") as backend:
        await put(backend, blocks)
        with server.client() as client:
            client.set("ours:note", b"x" * 500)
            client.rpush("ours:list", b"x")
            client.set("ours2:" + names(backend, blocks)[0].decode(), b"x")
            client.set(b"ours:%064d" % 0, pack_header(blocks[0].header))
        async with running(server.options(), prefix="ours") as again:
            assert again.stats().blocks == 3
            assert sorted(await scanned(again)) == sorted(b.header for b in blocks)


async def test_ttl_drops_blocks(server):
    """Prompts would be kept for longer than the operator promised."""
    blocks = make_chain("ttl", 2, BLOCK_BYTES)
    async with running(server.options(), prefix="ttl", ttl_s=1000) as backend:
        assert await put(backend, blocks) == [Outcome.STORED] * 2
        with server.client() as client:
            assert all(900_000 < client.pttl(name) <= 1_000_000 for name in names(backend, blocks))
        assert await get(backend, blocks) == [Outcome.HIT] * 2


async def test_uses_reach_the_servers_lru(server):
    """The server would first drop the blocks that host memory serves, because they are never read
    from it."""
    blocks = make_chain("lru", 3, BLOCK_BYTES)
    hashes = [block.key.block_hash for block in blocks]
    async with running(server.options(), prefix="lru") as backend:
        await put(backend, blocks)
        await backend.add_mark("0" * 16)
        with server.client() as client:
            keys = [*names(backend, blocks), "lru:marks"]

            def idle_s():
                return [client.object("idletime", name) for name in keys]

            while min(idle_s()) < 2:
                await asyncio.sleep(0.05)
            assert await backend.use_many(NAMESPACE, hashes) == [True] * 3
            assert max(idle_s()) < 2


async def test_use_renews_the_ttl(server):
    """Blocks that are used all day would expire on every node once a day."""
    blocks = make_chain("renewed", 3, BLOCK_BYTES)
    hashes = [block.key.block_hash for block in blocks]
    async with running(server.options(), prefix="renewed", ttl_s=1000) as backend:
        await put(backend, blocks[:2])
        await backend.add_mark("0" * 16)
        with server.client() as client:
            for name in names(backend, blocks[:2]):
                client.pexpire(name, 60_000)
            assert await backend.use_many(NAMESPACE, hashes) == [True, True, False]
            assert all(client.pttl(name) > 900_000 for name in names(backend, blocks[:2]))
            assert client.pttl("renewed:marks") == -1, "marks stay"


@pytest.mark.parametrize("ttl_s", [0, 1000])
async def test_user_without_touch_can_still_look_up(tmp_path, ttl_s, caplog):
    """After an upgrade a tier whose user lacks a command would fail, or look empty."""
    rights = LEAST_RIGHTS.replace("+touch +pexpire ", "")
    blocks = make_chain("denied", 4, BLOCK_BYTES)
    hashes = [block.key.block_hash for block in blocks]
    with RedisServer(tmp_path / "redis", rights=f"~* {rights}") as server:
        async with running(server.options(), ttl_s=ttl_s) as backend:
            await put(backend, blocks[:3])
            for _ in range(3):
                assert await backend.use_many(NAMESPACE, hashes) == [True, True, True, False]
            assert await get(backend, blocks[:3]) == [Outcome.HIT] * 3
    lines = [line for line in caplog.messages if "may be evicted by the server" in line]
    assert len(lines) == 1
    assert "+touch" in lines[0]


async def test_full_server(tmp_path):
    """A full server would look like a broken one, or accept blocks that it does not keep."""
    with RedisServer(tmp_path, "--maxmemory", "8mb") as server:
        async with running(server.options()) as backend:
            blocks = make_chain("full", 24, 512 << 10)
            outcomes = await put(backend, blocks)
            assert set(outcomes) == {Outcome.STORED, Outcome.REFUSED}
            assert backend.counters["refused_no_space_total"] == outcomes.count(Outcome.REFUSED)
            assert backend.counters["io_errors_total"] == 0
            assert await contains(backend, blocks) == [o is Outcome.STORED for o in outcomes]


# Cancelled calls and servers that stall.


@pytest.mark.slow
async def test_storm_of_cancelled_gets(server):
    """The reply to a cancelled GET would be taken for the answer to the next GET."""
    chance = random.Random(7)
    blocks = make_chain("storm", 24, BLOCK_BYTES)
    with Proxy(("127.0.0.1", server.port)) as proxy:
        options = server.options(port=proxy.port)
        async with running(options, prefix="storm", timeout_ms=NEVER_MS) as backend:
            await put(backend, blocks)
            done = 0

            async def one():
                nonlocal done
                some = chance.sample(blocks, chance.randint(1, 4))
                task = asyncio.create_task(get(backend, some))
                if chance.random() < 0.7:
                    await asyncio.wait([task], timeout=chance.random() * 0.02)
                    task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    assert set(await task) == {Outcome.HIT}
                    done += 1

            async def play():
                for _ in range(50):
                    await one()
                    if chance.random() < 0.1:
                        proxy.spoil(down=Flow(delay_s=chance.random() * 0.005))

            await asyncio.gather(*(play() for _ in range(40)))
            assert done > 100
            assert backend.counters["corrupt_total"] == backend.counters["io_errors_total"] == 0
            assert await get(backend, blocks) == [Outcome.HIT] * len(blocks)


async def cancelled(task):
    """Cancel the task, and check that it ends soon."""
    task.cancel()
    _, pending = await asyncio.wait([task], timeout=SOON_S)
    assert not pending
    assert task.cancelled()


@pytest.mark.parametrize("unix", [True, False])
async def test_cancel_while_the_server_is_silent(tmp_path, unix):
    """A stopped server would hold up cancelled calls, and its late replies would be taken for
    answers to other requests."""
    with RedisServer(tmp_path) as server:
        async with running(server.options(unix=unix), timeout_ms=NEVER_MS) as backend:
            blocks = make_chain("silent", 8, 300 << 10)
            fresh = make_chain("unstored", 8, 2 << 20)
            await put(backend, blocks)
            server.pause()
            for call in (get(backend, blocks), put(backend, fresh), contains(backend, blocks)):
                task = asyncio.create_task(call)
                await asyncio.sleep(0.05)
                await cancelled(task)
            server.resume()
            assert await get(backend, blocks[::-1]) == [Outcome.HIT] * 8
            assert backend.counters["node_down_total"] == 0


async def test_cancel_while_connecting(server, monkeypatch):
    """A name server that does not answer would hold up cancelled calls. Or a thread that connects
    late would write into slots that belong to other blocks by then."""
    release = threading.Event()
    connect = Connector.connect

    def stuck(self, address, **more):
        release.wait(60)
        return connect(self, address, **more)

    async with running(server.options(), prefix="stuck") as backend:
        blocks = make_chain("stuck", 8, 512 << 10)
        slots = CanarySlots(8, slot_bytes_for(512 << 10))
        await put(backend, blocks)
        backend._nodes.of(b"").drop_idle()
        monkeypatch.setattr(Connector, "connect", stuck)
        requests = [
            GetRequest(block.key.block_hash, slots.view(slot), 512 << 10)
            for slot, block in enumerate(blocks)
        ]
        task = asyncio.create_task(backend.get_into(NAMESPACE, requests))
        await asyncio.sleep(0.05)
        await cancelled(task)
        release.set()
        assert await get(backend, blocks) == [Outcome.HIT] * 8
        await backend.close()
        assert all(slots.is_blank(slot) for slot in range(8))


@pytest.mark.slow
async def test_silent_server(tmp_path):
    """A server that hangs would cost a timeout for each block, or never be tried again."""
    with RedisServer(tmp_path) as server:
        async with running(server.options(), timeout_ms=200, connections=2) as backend:
            blocks = make_chain("hang", 40, 300 << 10)
            await put(backend, blocks)
            server.pause()
            assert await get(backend, blocks) == [Outcome.ERROR] * 40
            with pytest.raises(BackendError, match="silent for 200 ms"):
                await contains(backend, blocks)
            assert 1 <= backend.counters["timeouts_total"] <= 4
            assert backend.counters["skipped_total"] >= 30
            server.resume()
            await eventually(lambda: contains(backend, blocks), [True] * 40)
            assert await get(backend, blocks) == [Outcome.HIT] * 40


async def eventually(ask, wanted):
    """Ask until the answer is `wanted`."""
    until = time.monotonic() + 20
    while True:
        with contextlib.suppress(BackendError):
            if await ask() == wanted:
                return
        assert time.monotonic() < until
        await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_server_is_killed_and_restarted(tmp_path):
    """A server that comes back empty would stay unused, or be expected to have its blocks."""
    with RedisServer(tmp_path) as server:
        async with running(server.options()) as backend:
            blocks = make_chain("killed", 6, BLOCK_BYTES)
            await put(backend, blocks)
            server.restart()
            # Idle connections are dead, which costs no block.
            assert await get(backend, blocks) == [Outcome.MISS] * 6
            assert await put(backend, blocks) == [Outcome.STORED] * 6
            server.kill()
            assert await get(backend, blocks) == [Outcome.ERROR] * 6
            assert await put(backend, blocks) == [Outcome.ERROR] * 6
            with pytest.raises(BackendError, match="refuses: is it running"):
                await contains(backend, blocks)
            with pytest.raises(BackendError, match="6 blocks could not be deleted"):
                await backend.delete_many(NAMESPACE, [b.key.block_hash for b in blocks])
            server.start()
            await eventually(lambda: contains(backend, blocks), [False] * 6)
            assert await put(backend, blocks) == [Outcome.STORED] * 6
            assert await get(backend, blocks) == [Outcome.HIT] * 6


async def test_many_calls_share_few_connections(server):
    """More calls than connections would be an error instead of a wait."""
    blocks = make_chain("demand", 50, BLOCK_BYTES)
    async with running(server.options(), prefix="demand", connections=2) as backend:
        await put(backend, blocks)
        every = await asyncio.gather(*(get(backend, [blocks[i % 50]]) for i in range(200)))
        assert every == [[Outcome.HIT]] * 200
        assert backend.counters["connects_total"] <= 2


async def test_close_leaves_nothing_open(server):
    """Each close of a tier would leak descriptors and threads."""
    blocks = make_chain("left", 16, 300 << 10)

    async def open_and_close():
        async with running(server.options(), prefix="left") as backend:
            await put(backend, blocks)
            for wait_s in (0, 0.001, 0.003):
                task = asyncio.create_task(get(backend, blocks))
                await asyncio.wait([task], timeout=wait_s)
                task.cancel()
                await asyncio.wait([task])
        with pytest.raises(BackendError, match="not open"):
            await contains(backend, blocks)

    await open_and_close()
    sockets, threads = open_sockets(), threading.active_count()
    for _ in range(3):
        await open_and_close()
    assert open_sockets() <= sockets
    assert threading.active_count() <= threads


def open_sockets():
    """Return how many of this process's descriptors are sockets."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return count


async def test_close_while_the_server_is_silent(tmp_path):
    """The daemon could not be stopped while a server hangs."""
    with RedisServer(tmp_path) as server:
        backend = made(server.options(), timeout_ms=300)
        await backend.open()
        blocks = make_chain("close", 40, 300 << 10)
        await put(backend, blocks)
        server.pause()
        reading = asyncio.create_task(get(backend, blocks))
        await asyncio.sleep(0.01)
        async with asyncio.timeout(SOON_S):
            await backend.close()
            assert set(await reading) <= {Outcome.ERROR, Outcome.HIT}
        server.resume()
        await backend.open()
        assert await get(backend, blocks) == [Outcome.HIT] * 40
        await backend.close()


# A cluster that loses a node, or moves slots.


@pytest.mark.slow
async def test_cluster_with_a_node_down(tmp_path):
    """One node that is down would make the whole tier unusable, or hold it up for 20 s."""
    with RedisCluster(tmp_path) as cluster:
        async with running(cluster.options(), timeout_ms=300) as backend:
            blocks = make_chain("node down", 60, BLOCK_BYTES)
            assert await put(backend, blocks) == [Outcome.STORED] * 60
            lost = cluster.nodes[1]
            gone = [cluster.node_of(name) is lost for name in names(backend, blocks)]
            assert 5 < sum(gone) < 55
            expected = [Outcome.ERROR if g else Outcome.HIT for g in gone]
            lost.pause()
            for _ in range(3):
                async with asyncio.timeout(SOON_S):
                    assert await get(backend, blocks) == expected
                    assert await contains(backend, blocks) == [not g for g in gone]
            lost.resume()
            await eventually(lambda: contains(backend, blocks), [True] * 60)
            lost.kill()
            async with asyncio.timeout(SOON_S):
                assert await get(backend, blocks) == expected
                expected = [Outcome.ERROR if g else Outcome.PRESENT for g in gone]
                assert await put(backend, blocks) == expected
                assert await contains(backend, blocks) == [not g for g in gone]
            cluster.stop()
            with pytest.raises(BackendError):
                await contains(backend, blocks)


@pytest.mark.slow
async def test_cluster_is_resharded(tmp_path):
    """While a cluster is resharded, blocks would be lost, or stored on a node that no lookup
    asks."""
    with RedisCluster(tmp_path) as cluster:
        async with running(cluster.options()) as backend:
            [block, fresh, *others] = make_chain("move", 40, BLOCK_BYTES)
            await put(backend, [block, *others])
            [name] = names(backend, [block])
            source = cluster.node_of(name)
            target = next(node for node in cluster.nodes if node is not source)
            slot = key_slot(name)
            with source.client() as old, target.client() as new:
                ids = [c.execute_command("CLUSTER", "MYID") for c in (old, new)]
                new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
                old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
                old.execute_command("MIGRATE", "127.0.0.1", target.port, name, 0, 5000)
                # Now the old node replies ASK.
                for _ in range(2):
                    assert await get(backend, [block, *others]) == [Outcome.HIT] * 39
                    assert await contains(backend, [block, *others]) == [True] * 39
                moved = backend.counters["moved_total"]
                assert moved >= 4
                assert await backend.delete_many(NAMESPACE, [block.key.block_hash]) == 1
                assert await put(backend, [block]) == [Outcome.STORED]
                for client in (new, old):
                    client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])
                # Now it replies MOVED, once.
                assert await get(backend, [block, fresh]) == [Outcome.HIT, Outcome.MISS]
                assert backend.counters["moved_total"] > moved
                moved = backend.counters["moved_total"]
                assert await get(backend, [block, *others]) == [Outcome.HIT] * 39
                assert backend.counters["moved_total"] == moved


# Errors that an operator reads.


async def test_password_rotation(tmp_path):
    """A rotated password would need a restart of the daemon."""
    file = tmp_path / "password"
    with RedisServer(tmp_path / "redis", rights=f"~* {LEAST_RIGHTS}") as server:
        options = server.options() | {"password": "", "password_file": str(file)}
        with pytest.raises(BackendError, match="password_file cannot be read"):
            await made(options).open()
        file.write_text(PASSWORD + "\n")
        async with running(options) as backend:
            blocks = make_chain("rotation", 4, BLOCK_BYTES)
            await put(backend, blocks)
            with server.client() as client:
                client.execute_command("ACL", "SETUSER", USER, "resetpass", ">another")
                client.execute_command("CLIENT", "KILL", "USER", USER)
                with pytest.raises(BackendError, match="refuses this username or password") as e:
                    await get(backend, blocks)
                assert PASSWORD not in str(e.value)
                file.write_text("another")
                assert await get(backend, blocks) == [Outcome.HIT] * 4
                client.execute_command("ACL", "SETUSER", USER, "-get")
                with pytest.raises(BackendError, match=r"denies it to this user .*\+get"):
                    await get(backend, blocks)


@pytest.fixture(scope="module")
def fortress(tmp_path_factory):
    """A server that asks for a password."""
    with RedisServer(tmp_path_factory.mktemp("auth"), rights=f"~* {LEAST_RIGHTS}") as server:
        yield server


CASES = {
    "not running": "refuses: is it running, and is url right?",
    "no socket": "no access to /nonexistent/redis.sock",
    "no password": "asks for a password: set password or password_file",
    "wrong password": "refuses this username or password",
    "needless password": "has no password for this user",
    "unknown CA": "is refused: .*; set tls_ca to the CA that signed it",
    "other host": "is refused: .*tls_verify_hostname = false",
    "TLS to a plain port": "was silent for 500 ms; is it a TLS port?",
    "plain to a TLS port": "a TLS port takes rediss://",
    "no database": "has no such database",
    "no cluster": "is no cluster: set cluster = false",
    "node of a cluster": "is a node of a cluster: set cluster = true",
    "no Redis": "does not speak Redis: is url's port right?|closes the connection",
    "silent": "was silent for 200 ms",
    "unknown host": "'nowhere' cannot be resolved: check url",
    "other prefix": r"denies it to this user \(ACL SETUSER needs ~other:\* \+get",
}


@pytest.mark.parametrize("case", CASES)
async def test_failed_open_explains_itself(case, request, monkeypatch):
    """An operator would have to guess the reason, or read a stack trace."""
    fixture = request.getfixturevalue
    more = {}
    with contextlib.ExitStack() as stack:
        match case:
            case "not running":
                options = {"url": "redis://127.0.0.1:1"}
            case "no socket":
                options = {"url": "unix:///nonexistent/redis.sock"}
            case "no password":
                options = {"url": fixture("fortress").url}
            case "wrong password":
                options = fixture("fortress").options() | {"password": "secret"}
            case "needless password":
                options = fixture("server").options() | {"password": "secret"}
            case "unknown CA":
                options = fixture("guarded").options() | {"tls_ca": ""}
            case "other host":
                options = fixture("guarded").options()
                options["url"] = options["url"].replace("127.0.0.1", "localhost")
            case "TLS to a plain port":
                options = {"url": fixture("server").url.replace("redis:", "rediss:")}
            case "plain to a TLS port":
                options = {"url": fixture("guarded").url.replace("rediss:", "redis:")}
            case "no database":
                options = {"url": fixture("server").url + "/99"}
            case "no cluster":
                options = fixture("server").options() | {"cluster": True}
            case "node of a cluster":
                options = fixture("cluster").options() | {"cluster": False}
            case "no Redis":
                port = stack.enter_context(answering(lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n"))
                options = {"url": f"redis://127.0.0.1:{port}"}
            case "silent":
                port = stack.enter_context(answering(lambda _: b""))
                options = {"url": f"redis://127.0.0.1:{port}"}
                more["timeout_ms"] = 200
            case "unknown host":
                monkeypatch.setattr(socket, "getaddrinfo", unknown_host)
                options = {"url": "redis://nowhere"}
            case "other prefix":
                options = fixture("guarded").options() | {"prefix": "other"}
        backend = made(options, **more)
        with pytest.raises(BackendError, match=CASES[case]) as raised:
            await backend.open()
        assert "secret" not in str(raised.value)
        assert "\n" not in str(raised.value)
        await backend.close()


def unknown_host(*_):
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@contextlib.contextmanager
def answering(answer):
    """The port of a server that sends `answer`, whole or in parts, to every command."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections = []

    def serve(connection):
        reader = hiredis.Reader(notEnoughData=listener)
        with contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                reader.feed(data)
                while (command := reader.gets()) is not listener:
                    reply = answer(command)
                    for part in [reply] if isinstance(reply, bytes) else reply:
                        connection.sendall(part)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                thread = threading.Thread(target=serve, args=(connection,))
                threads.append(thread)
                thread.start()

    threads = [threading.Thread(target=accept)]
    threads[0].start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        threads[0].join()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in threads[1:]:
            thread.join()
        for connection in connections:
            connection.close()


@pytest.mark.parametrize(
    "reply",
    [
        b"$5000000000000\r\n" + bytes(1 << 16),
        b"$%d\r\n" % (HEADER_BYTES + BLOCK_BYTES) + bytes(HEADER_BYTES + BLOCK_BYTES) + b"xx",
        b"+OK\r\n",
        b":5\r\n",
        b"$-1\r\n+more\r\n",
        b"\x00\xff\r\n",
        b"*-5\r\n",
        b"*4294967290\r\n",
        b"%1\r\n*0\r\n:1\r\n",
        b"$-7\r\n",
        b"-",
        b"-LOADING Redis is loading the dataset in memory\r\n",
    ],
)
async def test_malformed_replies(reply):
    """Malformed replies would be served as KV, or end the worker."""

    def answer(command):
        return reply if command[0] == b"GET" else b":0\r\n"

    with answering(answer) as port:
        backend = made({"url": f"redis://127.0.0.1:{port}"}, timeout_ms=200)
        await backend.open()
        blocks = make_chain("garbage", 3, BLOCK_BYTES)
        outcomes = await get(backend, blocks)
        assert set(outcomes) <= {Outcome.ERROR, Outcome.CORRUPT}
        await backend.close()


def drips():
    for _ in range(200):
        yield b"x"
        time.sleep(0.02)  # Each byte arrives before the timeout.


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (lambda: b"-ERR unknown command 'AUTH', with args beginning with: 'secret' \r\n", "AUTH"),
        (lambda: b"*4294967290\r\n", "does not speak Redis"),
        (lambda: b"-ERR \xff\xfe\r\n", "says: ERR"),
        (lambda: itertools.chain([b"-ERR "], drips()), "was silent"),
    ],
)
async def test_malformed_replies_to_auth(reply, problem, monkeypatch):
    """The reply to AUTH could hold a thread forever, or bring the password into a log."""
    monkeypatch.setattr(redis_module, "OPEN_S_MAX", 2.0)
    with answering(lambda _: reply()) as port:
        backend = made({"url": f"redis://:secret@127.0.0.1:{port}"}, timeout_ms=100)
        with pytest.raises(BackendError, match=problem) as raised:
            await backend.open()
        assert "secret" not in str(raised.value)
        assert "within" not in str(raised.value)


@pytest.mark.parametrize("where", ["{path}:0", "127.0.0.1:99999999999999999999", "a" * 100 + ":1"])
async def test_redirect_to_an_invalid_address(where, tmp_path):
    """A cluster could have the password sent to a socket of this machine, or break a whole
    batch."""
    path = tmp_path / "socket"
    where = where.format(path=path)

    def answer(command):
        match command[0]:
            case b"CLUSTER":
                return b"*0\r\n"
            case b"EXISTS" if b":probe:" in command[1]:
                return b":0\r\n"
            case b"AUTH":
                return b"+OK\r\n"
        return f"-MOVED 1 {where}\r\n".encode()

    with answering(answer) as port, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
        backend = made({"url": f"redis://:secret@127.0.0.1:{port}"}, cluster=True, timeout_ms=200)
        await backend.open()
        blocks = make_chain("nowhere", 2, BLOCK_BYTES)
        with pytest.raises(BackendError):
            await contains(backend, blocks)
        assert await get(backend, blocks) == [Outcome.ERROR] * 2
        await backend.close()
        with pytest.raises(BlockingIOError):
            listener.accept()


async def test_redirects_in_a_circle():
    """Nodes that redirect to each other would hold a batch forever, or end it with a misleading
    error."""

    def answer(command):
        match command[0]:
            case b"CLUSTER":
                return b"*0\r\n"
            case b"EXISTS" if b":probe:" in command[1]:
                return b":0\r\n"
        return f"-MOVED 1 127.0.0.1:{port}\r\n".encode()

    with answering(answer) as port:
        backend = made({"url": f"redis://127.0.0.1:{port}"}, cluster=True, timeout_ms=200)
        await backend.open()
        blocks = make_chain("circle", 2, BLOCK_BYTES)
        assert await get(backend, blocks) == [Outcome.ERROR] * 2
        await backend.close()


async def test_open_of_a_host_that_drops_packets(monkeypatch):
    """A host that drops packets would keep the daemon from starting."""
    monkeypatch.setattr(redis_module, "OPEN_S_MAX", 0.2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                sock = stack.enter_context(socket.socket())
                sock.setblocking(False)
                sock.connect_ex(listener.getsockname())
            url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
            backend = made({"url": url}, timeout_ms=2000)
            with pytest.raises(BackendError, match=r"no answer from 127\.0\.0\.1:.* within"):
                async with asyncio.timeout(SOON_S):
                    await backend.open()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"url": "localhost:6379"}, "scheme"),
        ({"url": "http://localhost"}, "scheme 'http'"),
        ({"url": "redis://"}, "lacks a host"),
        ({"url": "redis://host:99999"}, "malformed"),
        ({"url": "redis://host:port"}, "malformed"),
        ({"url": "redis://user:1/secret@host"}, "names a database that is not"),
        ({"url": "redis://user:x/secret@host"}, "malformed"),
        ({"url": "redis://host/zero"}, "names a database that is not a number"),
        ({"url": "redis://host?ssl=true"}, "set them as options"),
        ({"url": "unix://host/path"}, "absolute path"),
        ({"url": "unix://"}, "absolute path"),
        ({"url": "redis://u:secret@host", "password": "secret"}, "password once"),
        ({"url": "redis://u:secret@host", "username": "v"}, "user once"),
        ({"url": "redis://host", "password": "secret", "password_file": "f"}, "password once"),
        ({"url": "redis://host", "tls_ca": "ca.pem"}, "rediss://"),
        ({"url": "rediss://host", "tls_key": "key.pem"}, "needs tls_cert"),
        ({"url": "redis://host/1", "cluster": True}, "has no databases"),
        ({"url": "unix:///sock", "cluster": True}, "cannot be reached by a unix socket"),
        ({"url": "redis://host", "prefix": "a{b}"}, "prefix is 'a{b}'"),
        ({"url": "redis://host", "prefix": ""}, "prefix is ''"),
    ],
)
def test_malformed_options_are_reported(options, problem):
    """A wrong option would be found only once blocks are lost."""
    with pytest.raises(ConfigError, match=problem) as raised:
        made(options)
    assert "secret" not in str(raised.value)


def test_options_need_no_redis_py():
    """The daemon would load a client that only its worker needs, or fail without it."""
    code = (
        "import sys, importlib.util as u; from tierd_backends.redis import *;"
        "assert not {'redis', 'hiredis'} & set(sys.modules), 'imported';"
        "found = u.find_spec; u.find_spec = lambda n: None if n == 'hiredis' else found(n);"
        "RedisBackend.from_options(RedisBackend.Options(url='redis://host'))"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False
    )
    assert "ConfigError: hiredis is not installed: pip install 'tierd[redis]'" in done.stderr
