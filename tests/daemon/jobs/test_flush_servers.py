"""Flush on real servers and a real disk, where old blocks can return in many ways."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import redis

from tests.support import blocks
from tests.support.daemon_process import DaemonProcess
from tests.support.servers.fake_s3 import BUCKET, FakeS3
from tests.support.servers.proxy import Proxy
from tests.support.servers.redis import READY_S, RedisCluster, RedisServer
from tierd.backend import BlockHeader, checksum, pack_header
from tierd.core.l3.epochs import Mark, pack_mark, scope_of
from tierd.types import BlockKey

pytestmark = [pytest.mark.slow, pytest.mark.long]

SPACE = blocks.namespace(4096)
HASHES, PARENTS = blocks.chain(40)
FIRST_SLOTS = 16384 // 3
"""Slots of a cluster's first node."""


def flush(daemon: DaemonProcess, *words: str) -> dict:
    """Run `tierd flush`; returns its JSON and exit status."""
    command = [sys.executable, "-m", "tierd.cli.main", "flush", "--all", "--yes", "--json"]
    done = subprocess.run(
        [*command, "--socket", daemon.socket, *words], capture_output=True, text=True, check=False
    )
    assert done.stdout, done.stderr
    result: dict = json.loads(done.stdout)
    return {**result, "exit": done.returncode}


def fill(daemon: DaemonProcess) -> None:
    client = daemon.client()
    contents = [blocks.payload(SPACE, block_hash) for block_hash in HASHES]
    stored = list(zip(HASHES, PARENTS, contents, strict=True))
    assert all(client.put(client.register(SPACE), stored))
    client.close()
    daemon.wait_backed_up()


def count_served(daemon: DaemonProcess, hashes: Sequence[bytes] = HASHES) -> int:
    """Return how many blocks an engine gets, each requested alone."""
    client = daemon.client()
    try:
        handle = client.register(SPACE)
        return sum(len(client.get(handle, [block_hash], 3000)) for block_hash in hashes)
    finally:
        client.close()


def redis_table(url: str, *more: str) -> str:
    keys = ['type = "redis"', 'name = "r"', f'url = "{url}"', 'write_policy = "write_through"']
    return "\n".join(["[[storage]]", *keys, *more, ""])


class Cluster:
    """A cluster of three nodes, and a fourth that may join it."""

    def __init__(self, directory: Path) -> None:
        self.cluster = RedisCluster(directory / "cluster")
        self.extra = RedisServer(
            directory / "extra",
            *("--cluster-enabled", "yes", "--cluster-node-timeout", "1000"),
            *("--cluster-require-full-coverage", "no"),
        )
        self.clients: list[redis.Redis] = []

    @property
    def nodes(self) -> list[RedisServer]:
        return [*self.cluster.nodes, self.extra]

    def __enter__(self) -> Cluster:
        self.cluster.start()
        self.extra.start()
        self.clients = [node.client() for node in self.nodes]
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.clients:
            client.close()
        self.cluster.stop()
        self.extra.stop()

    def join(self) -> None:
        """Add the fourth node to the cluster."""
        self.clients[3].execute_command("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        end = time.monotonic() + READY_S
        whole = {b"cluster_known_nodes:4", b"cluster_state:ok"}
        while any(
            not whole <= set(client.execute_command("CLUSTER", "INFO").split())
            for client in self.clients
        ):
            assert time.monotonic() < end, "the node does not join"
            time.sleep(0.05)

    def move(self, to: int, slots: Sequence[int], *, finish: bool) -> None:
        """Move slots and their keys from the first node; without `finish` the move stays open."""
        ids = [client.execute_command("CLUSTER", "MYID").decode() for client in self.clients]
        for slot in slots:
            self.clients[to].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
            self.clients[0].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[to])
            keys = self.clients[0].execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1000)
            if keys:
                target = ("127.0.0.1", self.nodes[to].port, "", 0, 5000, "KEYS", *keys)
                self.clients[0].execute_command("MIGRATE", *target)
            if finish:
                for client in (self.clients[to], self.clients[0], *self.clients[1:]):
                    try:
                        client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[to])
                    except redis.ResponseError as error:
                        # A master without slots became a replica before this call.
                        if "only with masters" not in str(error):
                            raise

    def used_slots(self) -> list[int]:
        """Slots of the first node that have keys."""
        keys = self.clients[0].keys("*")
        return sorted({redis.crc.key_slot(key) for key in keys if isinstance(key, bytes)})


@pytest.mark.parametrize("case", ["slots move", "a master joins", "a master leaves"])
def test_flush_of_a_redis_cluster_whose_slots_move(tmp_path: Path, case: str) -> None:
    """A scan that trusts an old slot map would leave blocks that are served again."""
    with Cluster(tmp_path) as cluster:
        table = redis_table(cluster.cluster.url, "cluster = true")
        with DaemonProcess(tmp_path, capacity="64MiB", storage=table) as daemon:
            daemon.wait_tier("r", "ready")
            fill(daemon)
            slots = cluster.used_slots()
            assert len(slots) > 5
            if case == "slots move":
                cluster.move(1, slots, finish=False)
            else:
                cluster.join()
                cluster.move(3, range(FIRST_SLOTS), finish=True)
            if case == "a master leaves":
                cluster.nodes[0].kill()
            result = flush(daemon)
            assert result["complete"], result
            assert result["exit"] == 0
            assert count_served(daemon) == 0
            if case == "slots move":
                assert "moved" in result["tiers"][0]["garbage"]
            # The tier is as useful as before.
            fill(daemon)


@pytest.fixture
def remembering(tmp_path: Path) -> Iterator[tuple[RedisServer, DaemonProcess]]:
    extra = f'state_dir = "{tmp_path}/state"'
    with RedisServer(tmp_path / "redis", "--dbfilename", "dump.rdb") as server:
        daemon = DaemonProcess(
            tmp_path, capacity="64MiB", storage=redis_table(server.url), extra=extra
        )
        with daemon:
            daemon.wait_tier("r", "ready")
            yield server, daemon


@pytest.mark.parametrize("restarted", [False, True])
def test_flushed_blocks_stay_away_after_a_redis_restore_from_an_old_dump(
    remembering: tuple[RedisServer, DaemonProcess], tmp_path: Path, restarted: bool
) -> None:
    """A server that returns with yesterday's blocks and marks would serve flushed blocks."""
    server, daemon = remembering
    fill(daemon)
    client = server.client()
    client.save()
    dump = tmp_path / "redis" / "dump.rdb"
    shutil.copy(dump, tmp_path / "yesterday")
    assert flush(daemon)["exit"] == 0
    assert client.dbsize() == 1  # The marks.
    client.close()
    if restarted:
        daemon.stop()
    server.kill()
    shutil.copy(tmp_path / "yesterday", dump)
    server.start()
    client = server.client()
    assert client.dbsize() == 41
    if restarted:
        daemon.start()
    daemon.wait_tier("r", "ready")
    deadline = time.monotonic() + READY_S
    # Until it reads the restored server's marks, it uses those it has read before.
    while len(client.smembers("tierd:marks")) < 2:
        count_served(daemon, [bytes(32)])
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert count_served(daemon) == 0
    client.close()


def test_flush_of_a_full_redis(tmp_path: Path) -> None:
    """A server without room, which a flush is to free, would refuse every flush."""
    with RedisServer(tmp_path / "redis", "--maxmemory", "3mb") as server:
        table = redis_table(server.url, 'prefix = "tierd"')
        with DaemonProcess(tmp_path, capacity="64MiB", storage=table) as daemon:
            daemon.wait_tier("r", "ready")
            fill(daemon)
            client = server.client()
            client.config_set("maxmemory", client.info("memory")["used_memory"])
            result = flush(daemon)
            assert result["complete"], result
            assert count_served(daemon) == 0
            client.close()


def test_flush_of_a_slow_object_store_ends_and_deletes_the_blocks(tmp_path: Path) -> None:
    """At 20 ms per request no flush would ever end."""
    epoch = 7
    with FakeS3() as fake:
        fake.objects[f"tierd/marks/{pack_mark(Mark('', epoch))}"] = b"tierd"
        hashes, parents = blocks.chain(1200)
        for block_hash, parent in zip(hashes, parents, strict=True):
            payload = blocks.payload(SPACE, block_hash)
            key = BlockKey(scope_of(SPACE.digest, epoch), block_hash)
            header = pack_header(BlockHeader(key, parent, len(payload), checksum(payload)))
            name = f"tierd/{key.namespace.hex()}/{block_hash.hex()}"
            fake.objects[name] = header + payload
        odd = sorted(fake.objects)[3]
        fake.script = lambda request: [0.02]
        table = (
            f'[[storage]]\ntype = "s3"\nname = "s"\nbucket = "{BUCKET}"\n'
            f'endpoint = "{fake.endpoint}"\naccess_key = "fake"\nsecret_key = "fake"\n'
        )
        with DaemonProcess(tmp_path, capacity="64MiB", storage=table) as daemon:
            daemon.wait_tier("s", "ready")
            assert count_served(daemon, hashes[:2]) == 2
            result = flush(daemon)
            assert result["complete"], result
            assert result["tiers"][0]["blocks"] == 1200
            assert [name for name in fake.objects if "/marks/" not in name] == []
            assert count_served(daemon, hashes[:2]) == 0
        assert odd not in fake.objects
        fake.script = None


def test_flushed_blocks_of_a_temporarily_unreadable_slab_stay_away(tmp_path: Path) -> None:
    """A slab that cannot be read at one start would be missed by a flush, and return later."""
    store = tmp_path / "store"
    table = (
        f'[[storage]]\ntype = "file"\nname = "disk"\npath = "{store}"\ncapacity = "64MiB"\n'
        'reserve_free = "0"\nwrite_policy = "write_through"\n'
    )
    with DaemonProcess(tmp_path, capacity="64MiB", storage=table) as daemon:
        daemon.wait_tier("disk", "ready")
        fill(daemon)
        daemon.stop()
        (path,) = store.glob("*/*.index")
        aside = tmp_path / "aside"
        path.rename(aside)
        path.symlink_to(aside)  # It cannot be opened, as with EIO, EACCES or too many open files.
        daemon.start()
        daemon.wait_tier("disk", "ready")
        assert count_served(daemon) == 0
        result = flush(daemon)
        assert result["complete"]
        assert "could not be read" in result["tiers"][0]["garbage"]
        daemon.stop()
        path.unlink()
        os.rename(aside, path)
        daemon.start()
        daemon.wait_tier("disk", "ready")
        assert count_served(daemon) == 0
        # The next flush finds it, and frees its room.
        assert flush(daemon)["tiers"][0]["blocks"] == 40
        assert list(store.glob("*/*.slab")) == []


def test_flush_during_a_redis_failover(tmp_path: Path) -> None:
    """A flush whose mark only a replica or the former master has would be undone."""
    quick = ("--repl-diskless-sync-delay", "0")
    with (
        RedisServer(tmp_path / "a", *quick) as old,
        RedisServer(tmp_path / "b", *quick) as new,
        Proxy(("127.0.0.1", old.port)) as address,
        old.client() as old_client,
        new.client() as new_client,
    ):
        new_client.replicaof("127.0.0.1", old.port)
        table = redis_table(f"redis://127.0.0.1:{address.port}", "probe_ms = 200")
        with DaemonProcess(tmp_path, capacity="64MiB", storage=table) as daemon:
            daemon.wait_tier("r", "ready")
            fill(daemon)
            deadline = time.monotonic() + READY_S
            while new_client.dbsize() < 41:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            marks = new_client.smembers("tierd:marks")
            new_client.replicaof("NO", "ONE")
            old_client.replicaof("127.0.0.1", new.port)
            result = flush(daemon)
            assert not result["complete"]
            assert "is a replica" in result["tiers"][0]["why"]
            assert new_client.smembers("tierd:marks") == marks
            address.target = ("127.0.0.1", new.port)
            result = flush(daemon)
            while not result["complete"]:
                # Until its breaker has noticed that the address leads to a master again.
                assert time.monotonic() < deadline + READY_S, result
                result = flush(daemon)
            assert new_client.smembers("tierd:marks") - marks
            assert count_served(daemon) == 0
            fill(daemon)
            assert new_client.dbsize() == 41
            daemon.wait_tier("r", "ready")
