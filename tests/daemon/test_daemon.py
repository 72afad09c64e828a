"""A real daemon and its clients: bytes, restarts, deaths, hostile peers and full memory."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import blocks
from tests.support.daemon_process import DaemonProcess
from tierd.backend import GetRequest, GetResult, Outcome, PutRequest, checksum
from tierd.client import Client, Handle
from tierd.clock import SystemClock
from tierd.config import PrefetchConfig, StorageConfig
from tierd.core.host import HostTier
from tierd.core.l3.epochs import Mark, pack_mark, scope_of
from tierd.daemon.l2.ending import SPACES_MAX
from tierd.daemon.l3.promotion import Waiter
from tierd.daemon.l3.tier import StorageTier, opened
from tierd.daemon.node import Node
from tierd.daemon.options import NodeOptions
from tierd.errors import DisconnectedError, RefusedError
from tierd.testing.backend import MemoryBackend
from tierd.types import BlockKey
from tierd.wire import messages as m
from tierd.wire.frames import FRAME_BYTES_MAX
from tierd.wire.session import encode

pytestmark = pytest.mark.slow

SOON_S = 10.0
WAIT_MS = 60_000


def eventually(condition: Callable[[], object], what: str) -> None:
    """Wait until `condition` holds."""
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end, f"not within {SOON_S} s: {what}"
        time.sleep(0.005)


def registered(client: Client, handle: Handle) -> None:
    """Wait until the client has found the daemon again."""
    end = time.monotonic() + SOON_S
    client.poll()
    while not handle.ready:
        assert time.monotonic() < end, client.last_error
        client.wait(0.05)
        time.sleep(0.005)


@contextmanager
def connected(daemon: DaemonProcess, *, timeout_ms: int = 5000) -> Iterator[Client]:
    with Client(daemon.socket, name="test", call_timeout_ms=timeout_ms) as client:
        yield client


def store(client: Client, handle: Handle, count: int, tag: object = 0) -> list[bytes]:
    """Store a chain of self-naming blocks; its hashes."""
    hashes, parents = blocks.chain(count, tag)
    done = client.put(
        handle,
        [
            (h, parent, blocks.payload(handle.namespace, h))
            for h, parent in zip(hashes, parents, strict=True)
        ],
    )
    assert done == [True] * count
    return hashes


def served(client: Client, handle: Handle, hashes: list[bytes], deadline_ms: int = 5000) -> int:
    """How long the prefix is that the daemon gives; every byte of it must be right."""
    got = client.get(handle, hashes, deadline_ms)
    for view, block_hash in zip(got, hashes, strict=False):
        assert bytes(view) == blocks.payload(handle.namespace, block_hash)
    return len(got)


def host_status(client: Client) -> dict[str, int]:
    host = client.status()["host"]
    assert isinstance(host, dict)
    return host


def counter(client: Client, name: str) -> int:
    counters = client.status()["counters"]
    assert isinstance(counters, dict)
    return int(counters.get(name, 0))


def indexed(client: Client) -> None:
    """Wait until every storage tier knows what it has."""

    def ready() -> bool:
        tiers = client.status()["storage"]
        assert isinstance(tiers, list)
        return all(tier["state"] == "ready" for tier in tiers)

    eventually(ready, "storage tiers indexed")


# --- bytes ----------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [1, 4096, 5000, 300_001])
def test_bytes_come_back_exactly(l2_daemon: DaemonProcess, block_bytes: int) -> None:
    """An engine would decode from KV that is not its own."""
    with connected(l2_daemon) as client:
        handle = client.register(blocks.namespace(block_bytes))
        hashes = store(client, handle, 50)
        assert served(client, handle, hashes) == 50
        assert served(client, handle, hashes[:7]) == 7
        assert served(client, handle, [*hashes[:3], bytes(32), *hashes[4:]]) == 3
        assert client.get(handle, [bytes(32)], 0) == []
        buffers = [bytearray(block_bytes) for _ in range(3)]
        assert len(client.get(handle, hashes, 0, into=buffers)) == 3
        assert bytes(buffers[2]) == blocks.payload(handle.namespace, hashes[2])


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_blocks_outlive_the_daemon(daemon: DaemonProcess, how: str) -> None:
    """A restart would cost every warm prefix of the node."""
    with connected(daemon) as client:
        handle = client.register(blocks.namespace(20_000))
        hashes = store(client, handle, 64)
        if how == "SIGTERM":
            # With backups pending: the drain has to finish them.
            assert daemon.stop() == 0
            assert not Path(daemon.socket).exists()
        else:
            daemon.wait_backed_up()
            daemon.kill()
        daemon.start()
        registered(client, handle)
        indexed(client)
        assert host_status(client)["blocks"] == 0
        assert served(client, handle, hashes) == 64
        assert host_status(client)["blocks"] == 64


@pytest.mark.parametrize(
    "change",
    [
        {"kv_dtype": "bfloat16"},
        {"weights": "rev-2"},
        {"model": "other"},
        {"layout": "NHD"},
        {"groups": ("full:4x2x65",)},
        {"platform": "other"},
        {"tp_rank": 1, "tp_size": 2},
        {"hash_root": bytes(32)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_equal_hashes_of_two_namespaces_are_kept_apart(
    shared: DaemonProcess, change: dict[str, object]
) -> None:
    """KV of another dtype, model or rank would be served because the tokens are the same."""
    with connected(shared) as client:
        tag = os.urandom(4).hex()
        mine = client.register(blocks.namespace(model=tag))
        other = client.register(blocks.namespace(4096, **{"model": tag, **change}))
        hashes = store(client, mine, 4, tag)
        assert served(client, other, hashes) == 0
        store(client, other, 2, tag)
        assert served(client, other, hashes) == 2
        assert served(client, mine, hashes) == 4


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One tierd without storage for the tests that leave it as it was."""
    with DaemonProcess(tmp_path_factory.mktemp("shared") / "tierd", storage="") as process:
        yield process


def test_a_prefix_counts_only_where_every_rank_has_it(l2_daemon: DaemonProcess) -> None:
    """One rank would compute on KV of blocks that another rank cannot load: a hang or garbage."""
    ranks = [blocks.namespace(tp_rank=rank, tp_size=4) for rank in range(4)]
    clients = [l2_daemon.client(f"rank {rank}") for rank in range(4)]
    try:
        handles = [c.register(n) for c, n in zip(clients, ranks, strict=True)]
        counts = [7, 5, 9, 6]
        threads = [
            threading.Thread(target=store, args=(c, h, n))
            for c, h, n in zip(clients, handles, counts, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        hashes, _ = blocks.chain(10)
        with connected(l2_daemon) as scheduler:
            own = [scheduler.register(namespace) for namespace in ranks]
            lease = scheduler.acquire(own, hashes, 1000)
            assert lease is not None
            assert lease.blocks == 5
            assert [len(slots) for slots in lease.slots] == [5] * 4
            for client, handle, slots in zip(clients, handles, lease.slots, strict=True):
                views = client.lease_views(handle, lease.epoch, slots)
                assert views is not None
                for view, block_hash in zip(views, hashes, strict=False):
                    assert view[:4096] == blocks.payload(handle.namespace, block_hash)
            scheduler.release(lease)
            missing = scheduler.register(blocks.namespace(model="nobody's"))
            assert scheduler.acquire([*own, missing], hashes, 1000) is None
    finally:
        for client in clients:
            client.close()


def test_several_writers_of_one_block_agree(l2_daemon: DaemonProcess) -> None:
    """Data-parallel engines that store the same prompt at once would tear a block."""
    namespace = blocks.namespace(70_000)
    clients = [l2_daemon.client() for _ in range(4)]
    try:
        hashes, parents = blocks.chain(40)
        wanted = [
            (h, p, blocks.payload(namespace, h)) for h, p in zip(hashes, parents, strict=True)
        ]
        handles = [client.register(namespace) for client in clients]
        threads = [
            threading.Thread(target=client.put, args=(handle, wanted))
            for client, handle in zip(clients, handles, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for client, handle in zip(clients, handles, strict=True):
            assert served(client, handle, hashes) == 40
        assert host_status(clients[0])["blocks"] == 40
        assert host_status(clients[0])["writing_blocks"] == 0
    finally:
        for client in clients:
            client.close()


# --- leases and pressure --------------------------------------------------------------

MIB = 1 << 20


@contextmanager
def small(
    tmp_path: Path, *, extra_host: str = "", capacity: str = "16MiB"
) -> Iterator[DaemonProcess]:
    """A tierd whose memory is soon full: 16 blocks of 1 MiB."""
    with DaemonProcess(tmp_path / "small", capacity=capacity, storage=extra_host) as process:
        yield process


def test_a_lease_keeps_its_blocks_under_pressure(tmp_path: Path) -> None:
    """A promised block would be evicted before the engine has loaded it."""
    with small(tmp_path) as process, connected(process) as client:
        handle = client.register(blocks.namespace(MIB))
        hashes = store(client, handle, 6, "leased")
        lease = client.acquire([handle], hashes, 0)
        assert lease is not None
        assert lease.blocks == 6
        for n in range(10):
            store(client, handle, 5, n)
            host = host_status(client)
            assert host["allocated_bytes"] <= host["capacity_bytes"]
            assert host["used_bytes"] <= host["capacity_bytes"]
        views = client.lease_views(handle, lease.epoch, lease.slots[0])
        assert views is not None
        for view, block_hash in zip(views, hashes, strict=True):
            assert bytes(view) == blocks.payload(handle.namespace, block_hash)
        client.release(lease)
        client.release(lease)
        for n in range(10, 14):
            store(client, handle, 5, n)
        assert served(client, handle, hashes) == 0
        assert host_status(client)["leases"] == 0
        assert counter(client, "evicted_blocks_total") > 0


def test_leaving_a_clients_context_ends_its_session(l2_daemon: DaemonProcess) -> None:
    def sessions(watcher: Client) -> int:
        namespaces = watcher.status()["namespaces"]
        assert isinstance(namespaces, list)
        return sum(entry["sessions"] for entry in namespaces)

    with connected(l2_daemon) as watcher:
        with contextlib.suppress(ZeroDivisionError), Client(l2_daemon.socket) as client:
            store(client, client.register(blocks.namespace()), 1)
            assert sessions(watcher) == 1
            raise ZeroDivisionError
        assert not client.connected
        eventually(lambda: sessions(watcher) == 0, "the session has ended")


def test_a_forgotten_lease_ends(tmp_path: Path) -> None:
    """Engines that crash with leases would fill the arena for ever."""
    text = "lease_ttl_ms = 1000\n"
    with small(tmp_path, extra_host=text) as process, connected(process) as client:
        handle = client.register(blocks.namespace(MIB))
        hashes = store(client, handle, 8, "forgotten")
        with connected(process) as crashing:
            own = crashing.register(handle.namespace)
            lease = crashing.acquire([own], hashes, 0)
            assert lease is not None
            left_ms = (lease.expires_ns - time.monotonic_ns()) / 1e6
            assert 500 < left_ms <= 1000
        # The lease outlives its client: another process may be copying under it.
        assert host_status(client)["leases"] == 1
        eventually(lambda: host_status(client)["leases"] == 0, "lease expired")
        assert time.monotonic_ns() >= lease.expires_ns
        assert counter(client, "leases_expired_total") == 1
        for n in range(4):
            store(client, handle, 5, n)
        assert served(client, handle, hashes) == 0


def test_a_batch_larger_than_the_room_is_stored_in_part(tmp_path: Path) -> None:
    """One block too many would lose the whole step's KV, or take more memory than configured."""
    with small(tmp_path) as process, connected(process) as client:
        handle = client.register(blocks.namespace(MIB))
        pinned = client.acquire([handle], store(client, handle, 8, "a"), 0)
        more = client.acquire([handle], store(client, handle, 5, "b"), 0)
        assert pinned is not None
        assert more is not None
        hashes, parents = blocks.chain(8, "batch")
        batch = [
            (h, p, blocks.payload(handle.namespace, h))
            for h, p in zip(hashes, parents, strict=True)
        ]
        assert client.put(handle, batch) == [True] * 3 + [False] * 5
        assert served(client, handle, hashes) == 3
        client.release(pinned)
        assert client.put(handle, batch) == [True] * 8
        assert host_status(client)["allocated_bytes"] <= 16 * MIB


def test_a_block_larger_than_the_arena_is_refused_at_registration(tmp_path: Path) -> None:
    """The operator would see a 0 % hit rate and no reason."""
    with small(tmp_path) as process, connected(process) as client:
        good = client.register(blocks.namespace(MIB))
        hashes = store(client, good, 3)
        with pytest.raises(RefusedError, match=rf"the namespace: .*{17 * MIB}.*host\.capacity"):
            client.register(blocks.namespace(17 * MIB))
        # A connector asks without waiting, and never gets an error.
        large = client.begin_register(blocks.namespace(17 * MIB))

        def refused() -> bool:
            client.poll()
            return large.refusal is not None

        eventually(refused, "it is not refused")
        assert "host.capacity" in (large.refusal or "")
        assert client.acquire([large], hashes, 0) is None
        assert client.reserve(large, hashes[:1], hashes[:1]) is None
        # The simple calls have no other way to say why they do nothing.
        with pytest.raises(RefusedError, match=r"host\.capacity"):
            client.put(large, [(h, h, bytes(17 * MIB)) for h in hashes[:1]])
        with pytest.raises(RefusedError, match=r"host\.capacity"):
            client.get(large, hashes[:1], 0)
        assert served(client, good, hashes) == 3
        assert "host.capacity" in process.log.read_text()


@pytest.mark.slow
def test_a_get_of_too_few_tokens_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is short would be lost once it has left host memory, and nobody know why."""
    with DaemonProcess(tmp_path / "tierd", prefetch={"min_tokens": 7 * 16}) as process:
        process.wait_tier("file", "ready")
        client = process.client()
        handle = client.register(blocks.namespace(4096))
        hashes, _ = blocks.chain(7)
        assert client.get(handle, hashes, 0) == []
        assert client.last_error == "", "that was long enough"
        assert client.get(handle, hashes[:6], 0) == []
        said = "96 tokens are missing in host memory, and storage tiers are not asked for fewer "
        assert said in client.last_error
        assert client.get(handle, hashes[:1], 0) == []
        assert [said in record.getMessage() for record in caplog.records] == [True], "once"
        client.close()


def test_a_get_without_storage_tiers_names_none(l2_daemon: DaemonProcess) -> None:
    """An operator would lower a bound that is no reason for anything."""
    text = l2_daemon.config.read_text()
    l2_daemon.stop()
    l2_daemon.config.write_text(text.replace("min_tokens = 0", "min_tokens = 100"))
    l2_daemon.start()
    with connected(l2_daemon) as client:
        handle = client.register(blocks.namespace(4096))
        assert client.get(handle, blocks.chain(1)[0], 0) == []
        assert client.last_error == ""


def test_calls_at_and_beyond_the_key_limit(l2_daemon: DaemonProcess) -> None:
    """A long prompt's call would be refused as a whole, or end the engine's session."""
    with connected(l2_daemon) as client:
        handle = client.register(blocks.namespace(64))
        size = handle.namespace.block_bytes
        count = m.KEYS_PER_CALL_MAX + 100
        hashes, parents = blocks.chain(count)
        done = client.put(handle, [(h, p, h + h) for h, p in zip(hashes, parents, strict=True)])
        assert sum(done) == count
        got = client.get(handle, hashes, 5000)
        assert len(got) == m.KEYS_PER_CALL_MAX
        assert bytes(got[-1]) == 2 * hashes[m.KEYS_PER_CALL_MAX - 1]
        assert len(got[-1]) == size
        assert served_fast(client, handle, hashes[100:]) == m.KEYS_PER_CALL_MAX
        assert counter(client, "protocol_errors_total") == 0


def served_fast(client: Client, handle: Handle, hashes: list[bytes]) -> int:
    return len(client.get(handle, hashes, 5000))


def test_the_largest_lookup_is_answered(l2_daemon: DaemonProcess) -> None:
    """64 ranks at the key limit: the answer must fit a frame, or the engine loses its session."""
    with connected(l2_daemon) as client:
        namespace = blocks.namespace(64)
        handle = client.register(namespace)
        hashes, parents = blocks.chain(m.KEYS_PER_CALL_MAX)
        client.put(handle, [(h, p, h + h) for h, p in zip(hashes, parents, strict=True)])
        handles = [handle] * m.HANDLES_PER_CALL_MAX
        lease = client.acquire(handles, hashes, 5000)
        assert lease is not None
        assert lease.blocks == m.KEYS_PER_CALL_MAX
        assert lease.slots[0] == lease.slots[-1]


def memory_of_segments(daemon: DaemonProcess) -> int:
    """Bytes that the kernel has given to the daemon's memfds, ledgers left out."""
    assert daemon.process is not None
    held = {}
    for fd in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # A session ends meanwhile.
            name = os.readlink(fd)
            if "memfd:tierd-" in name and "ledger" not in name:
                held[os.stat(fd).st_ino] = os.stat(fd).st_blocks * 512
    return sum(held.values())


def test_memory_that_was_lent_is_not_taken_back_by_faulting_it_in(tmp_path: Path) -> None:
    """Engines that fault their segments in would take the node's memory beyond the bound."""
    with small(tmp_path) as process, connected(process) as first, connected(process) as second:
        one = first.register(blocks.namespace(MIB, model="one"))
        for n in range(4):
            store(first, one, 6, n)
        two = second.register(blocks.namespace(MIB, model="two"))
        for n in range(4):
            store(second, two, 6, n)
        with connected(process) as late:
            own = late.register(blocks.namespace(MIB, model="one"))
            registered(late, own)
            late.poll()
            late.populate()
        assert memory_of_segments(process) <= 16 * MIB
        # These mappings are older than the loan.
        first.populate()
        second.populate()
        eventually(lambda: memory_of_segments(process) <= 16 * MIB, "the bound holds again")
        assert host_status(first)["allocated_bytes"] == 16 * MIB
        eventually(lambda: host_status(first)["backlog_blocks"] == 0, "checksums done")
        stored = store(first, one, 3, "again")
        assert served(first, one, stored) == 3
        stored = store(second, two, 3, "again")
        assert served(second, two, stored) == 3


def test_who_stores_nothing_takes_no_memory(tmp_path: Path) -> None:
    """Each LoRA adapter that an engine's scheduler knows would take a segment, also unused."""
    with small(tmp_path) as process, contextlib.ExitStack() as stack:
        client = Client(process.socket, name="scheduler", map_segments=False)
        stack.callback(client.close)
        registered(client, client.register(blocks.namespace(MIB, model="one")))
        assert host_status(client)["allocated_bytes"] == 0
        worker = stack.enter_context(connected(process))
        registered(worker, worker.register(blocks.namespace(MIB, model="one")))
        assert host_status(client)["allocated_bytes"] > 0


def test_blocks_that_move_keep_their_bytes(tmp_path: Path) -> None:
    """Memory is lent to another engine by moving blocks: one slip is a wrong byte."""
    storage = f'[[storage]]\ntype = "file"\npath = "{tmp_path}/f"\ncapacity = "64MiB"\n'
    storage += 'reserve_free = "0"\nwrite_policy = "write_through"\n'
    with (
        DaemonProcess(
            tmp_path / "small",
            capacity="16MiB",
            storage=storage,
            # However busy the machine is.
            prefetch={"policy": "wait_complete", "timeout_max_ms": 60_000},
        ) as process,
        connected(process) as first,
        connected(process) as second,
    ):
        process.wait_tier("file", "ready")
        one = first.register(blocks.namespace(60_000, model="one"))
        chains = []
        for n in range(40):
            chains.append(store(first, one, 3 + n % 7, n))
            # One by one: what waits for its backup is bounded, and the rest is skipped.
            eventually(lambda: host_status(first)["backlog_blocks"] == 0, "backed up")
        for n in range(0, 40, 3):
            served(first, one, chains[n])
        two = second.register(blocks.namespace(30_000, model="two"))
        others = []
        for n in range(20):
            others.append(store(second, two, 7, n))
            eventually(lambda: host_status(first)["backlog_blocks"] == 0, "backed up")
        assert counter(first, "moved_blocks_total") > 0
        assert host_status(first)["allocated_bytes"] <= 16 * MIB
        # From L2 or the file tier: what was backed up after a move must be right as well.
        found = [served(first, one, chain, WAIT_MS) for chain in chains]
        assert found == [len(chain) for chain in chains]
        assert [served(second, two, chain, WAIT_MS) for chain in others] == [7] * 20
        assert counter(first, "internal_errors_total") == 0


# --- clients that die or misbehave ----------------------------------------------------

RESERVE_AND_WAIT = """
import sys, time
from tests.support import blocks
from tierd.client import Client
client = Client(sys.argv[1], name="doomed", call_timeout_ms=5000)
handle = client.register(blocks.namespace(1 << 20))
reservation = client.reserve(handle, *blocks.chain(5))
assert reservation is not None
reservation.views[0][:3] = b"abc"
print(sum(slot is not None for slot in reservation.slots), flush=True)
time.sleep(60)
"""


def test_the_slots_of_a_killed_client_come_back(l2_daemon: DaemonProcess) -> None:
    """Every engine crash would cost memory, and its half-written blocks might be served."""
    child = subprocess.Popen(
        [sys.executable, "-c", RESERVE_AND_WAIT, l2_daemon.socket],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"5\n"
        with connected(l2_daemon) as client:
            handle = client.register(blocks.namespace(MIB))
            hashes, parents = blocks.chain(5)
            assert host_status(client)["writing_blocks"] == 5
            other = client.reserve(handle, hashes, parents)
            assert other is not None
            assert other.slots == [None] * 5
            assert not any(other.present)
            child.send_signal(signal.SIGKILL)
            child.wait()
            eventually(lambda: host_status(client)["writing_blocks"] == 0, "slots come back")
            assert served(client, handle, hashes) == 0
            assert store(client, handle, 5) == hashes
            assert served(client, handle, hashes) == 5
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def raw_session(daemon: DaemonProcess) -> socket.socket:
    """A socket that has greeted the daemon, for tests that break the rules."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(SOON_S)
    sock.connect(daemon.socket)
    sock.sendall(encode(m.Hello(m.PROTOCOL_VERSION, "raw")))
    return sock


def everything(sock: socket.socket) -> bytes:
    """All that the daemon says until it ends the session."""
    said = b""
    while chunk := sock.recv(1 << 16):
        said += chunk
    return said


def test_a_client_that_half_closes_has_let_go(shared: DaemonProcess) -> None:
    """A client that ends in an orderly way would leave its slots reserved."""
    with connected(shared) as client, raw_session(shared) as sock:
        namespace = blocks.namespace(model="half-closed")
        hashes, parents = blocks.chain(3, "half-closed")
        sock.sendall(encode(m.Register(1, namespace.to_fields(), False)))
        sock.sendall(encode(m.Reserve(2, 0, b"".join(hashes), b"".join(parents))))
        eventually(lambda: host_status(client)["writing_blocks"] == 3, "reserved")
        sock.shutdown(socket.SHUT_WR)
        everything(sock)
        eventually(lambda: host_status(client)["writing_blocks"] == 0, "slots come back")


def test_a_session_that_broke_the_rules_keeps_its_slots_until_it_closes(
    shared: DaemonProcess,
) -> None:
    """The client's threads may still be writing to slots that another would get."""
    with connected(shared) as client, raw_session(shared) as sock:
        namespace = blocks.namespace(model="outlaw")
        hashes, parents = blocks.chain(3, "outlaw")
        sock.sendall(encode(m.Register(1, namespace.to_fields(), False)))
        sock.sendall(encode(m.Reserve(2, 0, b"".join(hashes), b"".join(parents))))
        sock.sendall(b"garbage!")
        assert b"not a frame" in everything(sock)
        sock.sendall(b"and more of it")
        assert host_status(client)["writing_blocks"] == 3
        sock.close()
        eventually(lambda: host_status(client)["writing_blocks"] == 0, "slots come back")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"not a frame"),
        (os.urandom(4096), b"not a frame"),
        (encode(m.Status(1))[:4] + b"\xff\xff\xff\xff", b"exceeds the limit"),
        (encode(m.Reserve(1, 77, bytes(32), bytes(32))), b"handle 77 is not registered"),
        (encode(m.Acquire(1, [], bytes(32), 0, 0, 0, 0)), b"handles"),
        (encode(m.Acquire(1, [3], bytes(32), 0, 0, 0, 0)), b"handle 3 is not registered"),
        (encode(m.Hello(1, "again")), b"unknown, or out of order"),
        (encode(m.Welcome(1, b"", "", 1)), b"unknown, or out of order"),
    ],
    ids=["http", "random", "huge", "handle", "no handles", "foreign", "hello twice", "mirrored"],
)
def test_garbage_ends_its_own_session_with_a_reason(
    shared: DaemonProcess, said: bytes, reason: bytes
) -> None:
    """One broken client would take the node's cache away from all the others."""
    with connected(shared) as client:
        handle = client.register(blocks.namespace(model="bystander"))
        hashes = store(client, handle, 3, said)
        with raw_session(shared) as sock:
            sock.sendall(said)
            assert reason in everything(sock)
        assert served(client, handle, hashes) == 3
        assert counter(client, "internal_errors_total") == 0


def resident_bytes(daemon: DaemonProcess) -> int:
    """Memory of the daemon itself, without the arena."""
    assert daemon.process is not None
    text = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) << 10


def test_a_client_that_never_reads_costs_a_bounded_amount(shared: DaemonProcess) -> None:
    """One stuck engine would take the daemon's memory, then everybody's."""
    with connected(shared) as client, raw_session(shared) as sock:
        handle = client.register(blocks.namespace(model="quick"))
        hashes = store(client, handle, 3, "quick")
        before = resident_bytes(shared)
        # An answer takes more than 1 KiB: the daemon would have to keep over 25 MiB.
        questions = encode(m.Status(1)) * 5_000
        for _ in range(5):
            sock.sendall(questions)
            assert served(client, handle, hashes) == 3
        assert resident_bytes(shared) - before < 16 * MIB
        said = everything(sock)
        assert len(said) < 16 * MIB
        assert counter(client, "internal_errors_total") == 0


def test_a_cancelled_lookup_is_answered(daemon: DaemonProcess) -> None:
    """Aborted requests would use up the lookups in flight, and every later one would miss."""
    hashes, _ = blocks.chain(4)
    blob = b"".join(hashes)

    def missed(call: int) -> bytes:
        return encode(m.Acquired(call, 0, 0, b"", 0))

    with raw_session(daemon) as sock, connected(daemon) as client:
        sock.sendall(encode(m.Register(1, blocks.namespace().to_fields(), False)))
        calls = range(2, 302)
        sock.sendall(
            b"".join(
                encode(m.Acquire(call, [0], blob, 60_000, 0, 0, 0)) + encode(m.Cancel(call))
                for call in calls
            )
        )
        said = b""
        while not all(missed(call) in said for call in calls):
            said += sock.recv(1 << 16)
        refused = counter(client, "acquires_refused_total")
        sock.sendall(encode(m.Acquire(1000, [0], blob, 60_000, 0, 0, 0)))
        while missed(1000) not in said:
            said += sock.recv(1 << 16)
        assert counter(client, "acquires_refused_total") == refused
        assert counter(client, "internal_errors_total") == 0


def test_a_block_asked_for_twice_is_held_once() -> None:
    """A client that repeats a hash would pin a slot that nobody can ever free."""
    host = HostTier(64 * 4096, 16 * 4096)
    space = host.open_space(blocks.namespace())
    assert space is not None
    hashes, parents = blocks.chain(3)
    reservation, _ = host.reserve(1, space, hashes, parents)
    host.commit(1, reservation.reservation_id, 3)
    waiter = Waiter([space, space])
    asked = [hashes[0], hashes[0], hashes[1], bytes(32)]
    waiter.refresh(host, asked)
    waiter.refresh(host, asked)
    lease = waiter.conclude(host, 1, asked, 1)
    assert lease is not None
    assert [len(slots) for _, slots in lease.parts] == [3, 3]
    assert host.release(lease.lease_id, 1)
    assert not any(space.refs)


# --- what clients see of the daemon's life --------------------------------------------


def test_without_a_daemon_every_call_misses_at_once(tmp_path: Path) -> None:
    """A node whose tierd is down would serve no request, or each one late."""
    client = Client(str(tmp_path / "none.sock"), name="test")
    handle = client.register(blocks.namespace())
    hashes, parents = blocks.chain(3)
    started = time.monotonic()
    for _ in range(20):
        assert client.put(handle, [(hashes[0], parents[0], bytes(4096))]) == [False]
        assert client.get(handle, hashes, 60_000) == []
        assert client.reserve(handle, hashes, parents) is None
        assert client.acquire([handle], hashes, 60_000) is None
        assert client.begin_acquire([handle], hashes, 60_000).done
        assert client.lease_views(handle, b"epoch", [0]) is None
        assert not client.populate(1 << 20)
        client.poll()
        client.wait(0.5)
    assert (time.monotonic() - started) / 20 < 0.05
    with pytest.raises(DisconnectedError, match=r"none\.sock"):
        client.status()
    client.close()


def test_a_stopped_daemon_costs_a_call_its_timeout(l2_daemon: DaemonProcess) -> None:
    """A hung daemon would hang the engine's worker with it."""
    assert l2_daemon.process is not None
    with connected(l2_daemon, timeout_ms=200) as client:
        handle = client.register(blocks.namespace())
        hashes = store(client, handle, 3)
        l2_daemon.process.send_signal(signal.SIGSTOP)
        try:
            started = time.monotonic()
            assert client.get(handle, hashes, 100) == []
            assert time.monotonic() - started < 1.0
            for _ in range(3):
                started = time.monotonic()
                assert client.put(handle, [(hashes[0], hashes[1], bytes(4096))]) == [False]
                assert time.monotonic() - started < 0.6
        finally:
            l2_daemon.process.send_signal(signal.SIGCONT)
        eventually(lambda: served(client, handle, hashes) == 3, "served again")


def test_after_a_restart_old_promises_are_void(l2_daemon: DaemonProcess) -> None:
    """A commit or lease of the last life would publish or read slots of this one."""
    with connected(l2_daemon) as client:
        handle = client.register(blocks.namespace())
        stored = store(client, handle, 3, "old")
        lease = client.acquire([handle], stored, 0)
        assert lease is not None
        hashes, parents = blocks.chain(3, "half")
        reservation = client.reserve(handle, hashes, parents)
        assert reservation is not None
        epoch = client.epoch
        l2_daemon.kill()
        client.wait(SOON_S)
        assert not client.connected
        assert client.epoch == b""
        assert not handle.ready
        assert client.commit(reservation) == [False] * 3
        l2_daemon.start()
        registered(client, handle)
        assert client.epoch not in (epoch, b"")
        store(client, handle, 3, "new")
        assert client.commit(reservation) == [False] * 3
        client.abort(reservation)
        client.release(lease)
        # The memory of the last life is still mapped: what was promised can be loaded.
        views = client.lease_views(handle, lease.epoch, lease.slots[0])
        assert views is not None
        for view, block_hash in zip(views, stored, strict=True):
            assert view[:4096] == blocks.payload(handle.namespace, block_hash)
        assert served(client, handle, hashes) == 0
        assert host_status(client)["writing_blocks"] == 0


def test_a_promise_outlives_the_daemon(l2_daemon: DaemonProcess) -> None:
    """vLLM fails the request when a load fails: a crash of tierd would cost users answers."""
    with connected(l2_daemon) as client:
        handle = client.register(blocks.namespace())
        hashes = store(client, handle, 3)
        lease = client.acquire([handle], hashes, 0)
        assert lease is not None
        l2_daemon.kill()
        for _ in range(3):
            views = client.lease_views(handle, lease.epoch, lease.slots[0])
            assert views is not None
            for view, block_hash in zip(views, hashes, strict=True):
                assert view[:4096] == blocks.payload(handle.namespace, block_hash)
            client.poll()
        assert client.lease_views(handle, b"elsewhen", lease.slots[0]) is None


def test_a_promise_outlives_its_session(l2_daemon: DaemonProcess) -> None:
    """A session that broke and came back would make loads fail that the daemon still keeps."""
    assert l2_daemon.process is not None
    with connected(l2_daemon, timeout_ms=100) as client:
        handle = client.register(blocks.namespace())
        hashes = store(client, handle, 3)
        lease = client.acquire([handle], hashes, 0)
        assert lease is not None
        l2_daemon.process.send_signal(signal.SIGSTOP)
        assert client.reserve(handle, *blocks.chain(1, "lost")) is None
        assert not client.connected
        l2_daemon.process.send_signal(signal.SIGCONT)

        def readable() -> bool:
            views = client.lease_views(handle, lease.epoch, lease.slots[0])
            return views is not None and all(
                view[:4096] == blocks.payload(handle.namespace, block_hash)
                for view, block_hash in zip(views, hashes, strict=True)
            )

        end = time.monotonic() + SOON_S
        while not handle.ready:
            assert readable(), "a lease was unreadable while the session was made again"
            assert time.monotonic() < end
            client.wait(0.001)
        assert readable()


def test_slots_that_are_being_filled_outlive_a_broken_session(l2_daemon: DaemonProcess) -> None:
    """A copy that was under way when the session broke would write into another's block."""
    assert l2_daemon.process is not None
    with connected(l2_daemon, timeout_ms=100) as slow, connected(l2_daemon) as other:
        own = slow.register(blocks.namespace())
        reservation = slow.reserve(own, *blocks.chain(3, "slow"))
        assert reservation is not None
        l2_daemon.process.send_signal(signal.SIGSTOP)
        with pytest.raises(DisconnectedError):
            slow.status()
        l2_daemon.process.send_signal(signal.SIGCONT)
        handle = other.register(blocks.namespace())
        hashes = store(other, handle, 6, "other")
        for view in reservation.views:
            assert view is not None
            view[:] = b"\xee" * len(view)
        assert served(other, handle, hashes) == 6
        assert slow.commit(reservation) == [False] * 3
        eventually(lambda: host_status(other)["writing_blocks"] == 0, "slots come back")


class FakeDaemon:
    """Not a daemon: it says what it was told to, whatever the client says."""

    def __init__(self, path: Path, *said: bytes) -> None:
        self.path = str(path)
        self._said = said
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        sock, _ = self._listener.accept()
        with sock:
            for chunk in self._said:
                sock.recv(1 << 16)
                sock.sendall(chunk)
            while sock.recv(1 << 16):
                pass

    def __enter__(self) -> FakeDaemon:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._listener.close()


WELCOME = encode(m.Welcome(m.PROTOCOL_VERSION, b"fake", "0", 1000))


@pytest.mark.parametrize(
    "said",
    [
        b"garbage from a daemon gone wrong",
        WELCOME + WELCOME,
        WELCOME + encode(m.Registered(1, 0, 8192, 1)),
        WELCOME + encode(m.Registered(1, 0, 4096, 0)),
        WELCOME + encode(m.Registered(99, 0, 4096, 1)),
        WELCOME + encode(m.Registered(1, 0, 4096, 1)) + encode(m.Segment(0, 0)),
        WELCOME + encode(m.Status(1)),
        encode(m.Registered(1, 0, 4096, 1)),
    ],
    ids=[
        "garbage",
        "welcome twice",
        "slot size",
        "no slots",
        "unknown call",
        "segment without memory",
        "mirrored",
        "no welcome",
    ],
)
def test_a_daemon_that_breaks_the_protocol_is_left(tmp_path: Path, said: bytes) -> None:
    """A wrong message would be believed, or raise inside an engine."""
    with FakeDaemon(tmp_path / "fake.sock", said) as fake:
        client = Client(fake.path, name="test", call_timeout_ms=2000)
        handle = client.register(blocks.namespace())
        assert client.put(handle, [(bytes(32), blocks.ROOT, bytes(4096))]) == [False]
        assert not client.connected
        assert "protocol" in client.last_error
        client.close()


# --- leaving --------------------------------------------------------------------------


def test_the_drain_finishes_pending_backups(daemon: DaemonProcess) -> None:
    """An upgrade would lose what engines stored in the last seconds."""
    with connected(daemon) as client:
        handle = client.register(blocks.namespace(100_000))
        hashes = store(client, handle, 300)
        assert daemon.stop() == 0
        assert not Path(daemon.socket).exists()
        assert "not backed up" not in daemon.log.read_text()
        daemon.start()
        registered(client, handle)
        indexed(client)
        assert served(client, handle, hashes) == 300


def test_stop_ends_sessions_and_leaves_no_socket(l2_daemon: DaemonProcess) -> None:
    """systemd would wait for its timeout at each stop, and engines for theirs."""
    with connected(l2_daemon) as client:
        handle = client.register(blocks.namespace())
        store(client, handle, 3)
        reservation = client.reserve(handle, *blocks.chain(2, "open"))
        assert reservation is not None
        started = time.monotonic()
        assert l2_daemon.stop() == 0
        assert time.monotonic() - started < 5.0
        client.poll()
        assert not client.connected
        assert client.commit(reservation) == [False, False]
        assert not Path(l2_daemon.socket).exists()
        assert "Traceback" not in l2_daemon.log.read_text()


class LyingBackend(MemoryBackend):
    """A third party's backend with a bug: what it calls a hit is another block, or no block."""

    lie: str = ""

    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        results = await super().get_into(namespace, requests)
        first = results[0].header
        assert first is not None
        match self.lie:
            case "another hash":
                header = first._replace(key=BlockKey(namespace, bytes(32)))
            case "another namespace":
                header = first._replace(key=BlockKey(bytes(24), requests[0].block_hash))
            case "another length":
                header = first._replace(length=first.length - 1)
            case "too few":
                return results[1:]
            case "no header":
                return [GetResult(Outcome.HIT), *results[1:]]
            case _:
                raise KeyError(self.lie)
        return [GetResult(Outcome.HIT, header), *results[1:]]


@pytest.mark.parametrize(
    "lie",
    ["another hash", "another namespace", "another length", "no header", "too few", "a crash"],
)
async def test_a_backend_that_confuses_blocks_gives_misses(lie: str) -> None:
    """A bug in a third party's backend would be served as somebody's KV, or pin its slots."""
    backend = LyingBackend(marks={pack_mark(Mark("", 1))})
    backend.lie = lie
    tier = StorageTier(StorageConfig(type="lying", name="lying"), backend)
    namespace = blocks.namespace()
    hashes, parents = blocks.chain(3)
    clock = SystemClock()
    node = Node(
        NodeOptions(
            capacity_bytes=64 * 4096,
            lease_ttl_ms=1000,
            epoch=bytes(8),
            prefetch=PrefetchConfig(min_tokens=0),
        ),
        tiers=[tier],
        clock=clock,
    )
    slot = memoryview(bytearray(4096))

    async def ask() -> None:
        for h, parent in zip(hashes, parents, strict=True):
            slot[:] = blocks.payload(namespace, h)
            request = PutRequest(h, parent, checksum(slot), slot, 4096)
            assert await backend.put_many(scope_of(namespace.digest, 1), [request]) == [
                Outcome.STORED
            ]
        space = node.register(namespace)
        deadline_ns = clock.monotonic_ns() + 10_000_000_000
        assert await node.acquire(1, [space], hashes, deadline_ns) is None
        assert not space.writing
        assert hashes[0] not in space.items
        node.check()

    async with opened([tier]):
        await node.run(ask)
        assert tier.counters["wrong_answers_total"] == 1


def test_a_status_of_many_long_namespaces_fits_a_frame() -> None:
    """One engine with long names would end every `tierd status`, when it is needed most."""
    node = Node(
        NodeOptions(
            capacity_bytes=1 << 20,
            lease_ttl_ms=1000,
            prefetch=PrefetchConfig(min_tokens=0),
            epoch=bytes(8),
        ),
        tiers=[],
        clock=SystemClock(),
    )
    long = "\N{GRINNING FACE}" * 4096
    for number in range(SPACES_MAX):
        node.register(
            blocks.namespace(
                model=f"{number}{long[:-4]}",
                groups=(long,) * 64,
                hash_scheme=f"opaque-{long[:-7]}",
                weights=long,
                kv_dtype=long,
                layout=long,
                platform=long,
            )
        )
    frame = encode(m.StatusReply(1, node.status()))
    assert len(frame) <= FRAME_BYTES_MAX
    node.memory.arena.close()


def test_a_copy_that_outlived_its_lease_is_thrown_away(
    l2_daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot may have got another block meanwhile: its bytes would be served as this one."""
    space = blocks.namespace()
    client = l2_daemon.client()
    handle = client.register(space)
    hashes, parents = blocks.chain(2)
    stored = [(h, p, blocks.payload(space, h)) for h, p in zip(hashes, parents, strict=True)]
    assert all(client.put(handle, stored))
    assert len(client.get(handle, hashes, 1000)) == 2
    # A copy that takes longer than any lease: the clock has gone on when it is done.
    late_ns = time.monotonic_ns() + 3_600_000_000_000
    monkeypatch.setattr("tierd.client.client.time.monotonic_ns", lambda: late_ns)
    assert client.get(handle, hashes, 1000) == []
    monkeypatch.undo()
    assert len(client.get(handle, hashes, 1000)) == 2
    client.close()
