"""A Redis address that leads to another server, or to one that must not be used."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from tests.support.servers.proxy import Proxy
from tests.support.servers.redis import LEAST_RIGHTS, PASSWORD, USER, RedisServer
from tierd.backend import Outcome
from tierd.core.l3.epochs import Mark, pack_mark
from tierd.errors import BackendError
from tierd.testing.suite import contains, get, make_chain, put
from tierd_backends.redis import RedisBackend
from tierd_backends.redis.options import RedisOptions

pytestmark = pytest.mark.slow

BLOCK_BYTES = 4096
WAIT_S = 20.0
"""Longest wait for a change; no test measures it."""

FIRST, SECOND = (pack_mark(Mark("", epoch)) for epoch in (1, 3))


@contextlib.asynccontextmanager
async def running(port: int, **more: object) -> AsyncIterator[RedisBackend]:
    """The tier behind a port, open until the block ends."""
    options = {"url": f"redis://127.0.0.1:{port}", "timeout_ms": 1000, **more}
    backend = RedisBackend(msgspec.convert(options, RedisOptions))
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()


async def until(ask: Callable[[], Awaitable[bool]]) -> None:
    """Ask until the answer is true; an error counts as false."""
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(BackendError):
                if await ask():
                    return
            await asyncio.sleep(0.02)


@contextlib.contextmanager
def pair(directory: Path) -> Iterator[tuple[RedisServer, RedisServer, Proxy]]:
    """A master, its replica, and an address that leads to the master."""
    with (
        RedisServer(directory / "a", "--repl-diskless-sync-delay", "0") as master,
        RedisServer(directory / "b", "--repl-diskless-sync-delay", "0") as replica,
        Proxy(("127.0.0.1", master.port)) as address,
    ):
        with replica.client() as client:
            client.replicaof("127.0.0.1", master.port)
        yield master, replica, address


async def replicated(replica: RedisServer) -> None:
    """Wait until the replica has everything that its master has."""
    with replica.client() as client:

        async def up() -> bool:
            found: Any = client.info("replication")
            if found["master_link_status"] != "up":
                return False
            master = redis.Redis(port=found["master_port"])
            with master:
                # Asked once the link is up: the replica then has all writes before this call.
                return bool(master.execute_command("WAIT", 1, 100))

        await until(up)


def fail_over(old: RedisServer, new: RedisServer) -> None:
    """A failover: the replica becomes the master, and the master its replica."""
    with new.client() as client:
        client.replicaof("NO", "ONE")
    with old.client() as client:
        client.replicaof("127.0.0.1", new.port)


def marks_in(server: RedisServer) -> set[str]:
    with server.client() as client:
        return {mark.decode() for mark in client.smembers("tierd:marks")}


async def test_failover_behind_an_address(tmp_path: Path) -> None:
    """Links to the old master would stay forever, and every write would fail."""
    before, after = make_chain("before", 4, BLOCK_BYTES), make_chain("after", 4, BLOCK_BYTES)
    with pair(tmp_path) as (old, new, address):
        async with running(address.port) as backend:
            await put(backend, before)
            await backend.add_mark(FIRST)
            await replicated(new)
            fail_over(old, new)
            # The address has not moved yet: its server is a replica by now.
            assert await put(backend, after) == [Outcome.ERROR] * 4
            assert "is a replica (READONLY" in backend.stats().trouble
            for asked in (backend.marks(), backend.add_mark(SECOND), backend.drop_marks([FIRST])):
                with pytest.raises(BackendError, match="is a replica"):
                    await asked
            address.target = ("127.0.0.1", new.port)

            async def stored() -> bool:
                outcomes = await put(backend, after)
                return set(outcomes) <= {Outcome.STORED, Outcome.PRESENT}

            await until(stored)
            assert await get(backend, [*before, *after]) == [Outcome.HIT] * 8
            assert await backend.marks() == [FIRST]
            await backend.add_mark(SECOND)
            assert marks_in(new) == {FIRST, SECOND}


async def test_marks_are_read_at_the_current_address(tmp_path: Path) -> None:
    """A flush that another node made at the new server would not be noticed over links to the old
    server, which stay open."""
    with (
        RedisServer(tmp_path / "a") as old,
        RedisServer(tmp_path / "b") as new,
        Proxy(("127.0.0.1", old.port)) as address,
    ):
        async with running(address.port) as backend:
            await backend.add_mark(FIRST)
            with new.client() as other_node:
                other_node.sadd("tierd:marks", SECOND)
            address.target = ("127.0.0.1", new.port)
            assert await backend.marks() == [SECOND]
            # Each read of the marks replaces an old link, so blocks move to the new server as well.
            block = make_chain("followed", 1, BLOCK_BYTES)
            await put(backend, block)
            with new.client() as client:
                assert client.exists(backend._work.key_of(block[0].key))


@pytest.mark.parametrize("kind", ["replica that takes writes", "master without replicas"])
async def test_marks_need_a_master_with_its_replicas(tmp_path: Path, kind: str) -> None:
    """No other node would see a mark that only a replica or a cut-off master has. The marks that it
    lacks would make flushed blocks valid again."""
    with pair(tmp_path) as (master, replica, address), replica.client() as client:
        await replicated(replica)
        if kind == "replica that takes writes":
            client.config_set("replica-read-only", "no")
            address.target = ("127.0.0.1", replica.port)
        else:
            client.replicaof("NO", "ONE")
            with master.client() as other:
                other.config_set("min-replicas-to-write", 1)
        async with running(address.port) as backend:
            for asked in (backend.marks(), backend.add_mark(FIRST)):
                with pytest.raises(BackendError, match=r"a replica|lost its replicas"):
                    await asked
        assert not marks_in(master) | marks_in(replica)


async def test_marks_of_a_master_that_cannot_save(tmp_path: Path) -> None:
    """A server with a full disk, which takes no writes, would no longer be read."""
    with RedisServer(tmp_path / "a") as server, server.client() as client:
        async with running(server.port) as backend:
            await backend.add_mark(FIRST)
            client.config_set("save", "3600 1")
            shutil.rmtree(server.directory)
            client.bgsave()

            async def failed() -> bool:
                found: Any = client.info("persistence")
                return str(found["rdb_last_bgsave_status"]) == "err"

            await until(failed)
            with pytest.raises(BackendError, match="MISCONF"):
                await backend.add_mark(SECOND)
            assert await backend.marks() == [FIRST]


async def test_server_that_lost_its_master_or_is_loading(tmp_path: Path) -> None:
    """The tier would ask it again and again over the same links, wherever the address leads by
    now."""
    blocks = make_chain("lost", 12, BLOCK_BYTES)
    with pair(tmp_path) as (master, replica, address), replica.client() as client:
        async with running(address.port) as backend:
            await put(backend, blocks)
            await replicated(replica)
            client.config_set("replica-serve-stale-data", "no")
            address.target = ("127.0.0.1", replica.port)
            address.cut()
            assert await contains(backend, blocks) == [True] * 12
            with master.client() as other:
                other.save()
            master.kill()
            await until(lambda: fails_with(contains(backend, blocks), "has lost its master"))
            # It loads for longer than the test asks.
            slowly = ("--key-load-delay", "300000", "--loading-process-events-interval-bytes")
            master.arguments += ["--dbfilename", "dump.rdb", *slowly, "1024"]
            master._spawn()
            address.target = ("127.0.0.1", master.port)
            await until(lambda: fails_with(contains(backend, blocks), "is still loading"))

            async def loaded() -> bool:
                return await contains(backend, blocks) == [True] * 12

            await until(loaded)


async def fails_with(asked: Awaitable[object], why: str) -> bool:
    """Whether the call fails with an error that contains `why`."""
    try:
        await asked
    except BackendError as error:
        return why in str(error)
    return False


async def test_links_log_in_again_after_a_denial(tmp_path: Path) -> None:
    """Links whose user lost its rights would stay denied, whatever the password file says by
    now."""
    blocks = make_chain("denied", 2, BLOCK_BYTES)
    with RedisServer(tmp_path / "a", rights=f"~* {LEAST_RIGHTS}") as server:
        password = tmp_path / "password"
        password.write_text(PASSWORD)
        user = {"username": USER, "password_file": str(password)}
        async with running(server.port, **user) as backend:
            await put(backend, blocks)
            with server.client() as client:
                client.execute_command("ACL", "SETUSER", USER, "-get", "resetpass", ">another")
                with pytest.raises(BackendError, match="denies it to this user"):
                    await get(backend, blocks)
                client.execute_command("ACL", "SETUSER", USER, "+get")
                with pytest.raises(BackendError, match="refuses this username or password"):
                    await get(backend, blocks)
                password.write_text("another")
                assert await get(backend, blocks) == [Outcome.HIT] * 2
