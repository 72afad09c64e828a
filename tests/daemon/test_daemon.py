"""A real daemon and its clients: bytes, leases, full memory and moved blocks."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import blocks
from tests.support.daemon_client import (
    connected,
    count_served,
    counter,
    eventually,
    host_status,
    store,
    wait_until_registered,
)
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
from tierd.errors import RefusedError
from tierd.testing.backend import MemoryBackend
from tierd.types import BlockKey
from tierd.wire import messages as m
from tierd.wire.frames import FRAME_BYTES_MAX
from tierd.wire.session import encode

pytestmark = pytest.mark.slow
WAIT_MS = 60_000


# --- bytes ----------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [1, 4096, 5000, 300_001])
def test_blocks_are_read_back_byte_for_byte(l2_daemon: DaemonProcess, block_bytes: int) -> None:
    """An engine would decode from KV that is not its own."""
    with connected(l2_daemon) as client:
        handle = client.register(blocks.namespace(block_bytes))
        hashes = store(client, handle, 50)
        assert count_served(client, handle, hashes) == 50
        assert count_served(client, handle, hashes[:7]) == 7
        assert count_served(client, handle, [*hashes[:3], bytes(32), *hashes[4:]]) == 3
        assert client.get(handle, [bytes(32)], 0) == []
        buffers = [bytearray(block_bytes) for _ in range(3)]
        assert len(client.get(handle, hashes, 0, into=buffers)) == 3
        assert bytes(buffers[2]) == blocks.payload(handle.namespace, hashes[2])


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
def test_namespaces_do_not_share_blocks_with_equal_hashes(
    shared: DaemonProcess, change: dict[str, object]
) -> None:
    """KV of another dtype, model or rank would be served because the tokens are the same."""
    with connected(shared) as client:
        tag = os.urandom(4).hex()
        mine = client.register(blocks.namespace(model=tag))
        other = client.register(blocks.namespace(4096, **{"model": tag, **change}))
        hashes = store(client, mine, 4, tag)
        assert count_served(client, other, hashes) == 0
        store(client, other, 2, tag)
        assert count_served(client, other, hashes) == 2
        assert count_served(client, mine, hashes) == 4


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A tierd without storage, shared by tests that leave it unchanged."""
    with DaemonProcess(tmp_path_factory.mktemp("shared") / "tierd", storage="") as process:
        yield process


def test_acquire_counts_only_blocks_that_every_rank_has(l2_daemon: DaemonProcess) -> None:
    """A rank would compute on blocks that another rank cannot load: a hang or garbage."""
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


def test_concurrent_stores_of_the_same_block_do_not_tear_it(l2_daemon: DaemonProcess) -> None:
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
            assert count_served(client, handle, hashes) == 40
        assert host_status(clients[0])["blocks"] == 40
        assert host_status(clients[0])["writing_blocks"] == 0
    finally:
        for client in clients:
            client.close()


# --- leases and pressure --------------------------------------------------------------

MIB = 1 << 20


@contextmanager
def small_daemon(
    tmp_path: Path, *, extra_host: str = "", capacity: str = "16MiB"
) -> Iterator[DaemonProcess]:
    """A tierd with room for only 16 blocks of 1 MiB."""
    with DaemonProcess(tmp_path / "small", capacity=capacity, storage=extra_host) as process:
        yield process


def test_leased_blocks_are_not_evicted_under_pressure(tmp_path: Path) -> None:
    """A promised block would be evicted before the engine has loaded it."""
    with small_daemon(tmp_path) as process, connected(process) as client:
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
        assert count_served(client, handle, hashes) == 0
        assert host_status(client)["leases"] == 0
        assert counter(client, "evicted_blocks_total") > 0


def test_client_context_manager_ends_the_session_on_exit(l2_daemon: DaemonProcess) -> None:
    """A client's exception would leave its session open, and its namespaces in use."""

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


def test_unreleased_lease_expires(tmp_path: Path) -> None:
    """Engines that crash while holding leases would fill the arena permanently."""
    text = "lease_ttl_ms = 1000\n"
    with small_daemon(tmp_path, extra_host=text) as process, connected(process) as client:
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
        assert count_served(client, handle, hashes) == 0


def test_put_larger_than_the_free_room_stores_a_prefix(tmp_path: Path) -> None:
    """One block too many would lose the whole step's KV, or exceed the configured memory."""
    with small_daemon(tmp_path) as process, connected(process) as client:
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
        assert count_served(client, handle, hashes) == 3
        client.release(pinned)
        assert client.put(handle, batch) == [True] * 8
        assert host_status(client)["allocated_bytes"] <= 16 * MIB


def test_registration_is_refused_when_a_block_exceeds_the_arena(tmp_path: Path) -> None:
    """The operator would see a 0 % hit rate and no reason."""
    with small_daemon(tmp_path) as process, connected(process) as client:
        good = client.register(blocks.namespace(MIB))
        hashes = store(client, good, 3)
        with pytest.raises(RefusedError, match=rf"the namespace: .*{17 * MIB}.*host\.capacity"):
            client.register(blocks.namespace(17 * MIB))
        # A connector registers without waiting, and never gets an exception.
        large = client.begin_register(blocks.namespace(17 * MIB))

        def refused() -> bool:
            client.poll()
            return large.refusal is not None

        eventually(refused, "it is not refused")
        assert "host.capacity" in (large.refusal or "")
        assert client.acquire([large], hashes, 0) is None
        assert client.reserve(large, hashes[:1], hashes[:1]) is None
        # The simple calls can report the refusal only by raising it.
        with pytest.raises(RefusedError, match=r"host\.capacity"):
            client.put(large, [(h, h, bytes(17 * MIB)) for h in hashes[:1]])
        with pytest.raises(RefusedError, match=r"host\.capacity"):
            client.get(large, hashes[:1], 0)
        assert count_served(client, good, hashes) == 3
        assert "host.capacity" in process.log.read_text()


@pytest.mark.slow
def test_get_below_min_tokens_reports_why_tiers_were_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Short prompts would miss once evicted from host memory, with no reason given."""
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


def test_get_without_storage_tiers_does_not_mention_them(l2_daemon: DaemonProcess) -> None:
    """An operator would lower a limit that has no effect."""
    text = l2_daemon.config.read_text()
    l2_daemon.stop()
    l2_daemon.config.write_text(text.replace("min_tokens = 0", "min_tokens = 100"))
    l2_daemon.start()
    with connected(l2_daemon) as client:
        handle = client.register(blocks.namespace(4096))
        assert client.get(handle, blocks.chain(1)[0], 0) == []
        assert client.last_error == ""


def test_calls_longer_than_the_key_limit_are_split(l2_daemon: DaemonProcess) -> None:
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
        assert count_without_compare(client, handle, hashes[100:]) == m.KEYS_PER_CALL_MAX
        assert counter(client, "protocol_errors_total") == 0


def count_without_compare(client: Client, handle: Handle, hashes: list[bytes]) -> int:
    return len(client.get(handle, hashes, 5000))


def test_largest_acquire_fits_a_frame(l2_daemon: DaemonProcess) -> None:
    """With 64 ranks at the key limit the answer must fit a frame, or the session ends."""
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
    """Bytes that the kernel has allocated to the daemon's memfds, except ledgers."""
    assert daemon.process is not None
    held = {}
    for fd in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # A session ends meanwhile.
            name = os.readlink(fd)
            if "memfd:tierd-" in name and "ledger" not in name:
                held[os.stat(fd).st_ino] = os.stat(fd).st_blocks * 512
    return sum(held.values())


def test_faulting_in_old_mappings_does_not_exceed_the_capacity(tmp_path: Path) -> None:
    """Engines that fault their segments in would take more of the node's memory than configured."""
    with (
        small_daemon(tmp_path) as process,
        connected(process) as first,
        connected(process) as second,
    ):
        one = first.register(blocks.namespace(MIB, model="one"))
        for n in range(4):
            store(first, one, 6, n)
        two = second.register(blocks.namespace(MIB, model="two"))
        for n in range(4):
            store(second, two, 6, n)
        with connected(process) as late:
            own = late.register(blocks.namespace(MIB, model="one"))
            wait_until_registered(late, own)
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
        assert count_served(first, one, stored) == 3
        stored = store(second, two, 3, "again")
        assert count_served(second, two, stored) == 3


def test_namespace_takes_no_memory_before_a_client_can_store(tmp_path: Path) -> None:
    """Each LoRA adapter known to an engine's scheduler would take a segment, even unused."""
    with small_daemon(tmp_path) as process, contextlib.ExitStack() as stack:
        client = Client(process.socket, name="scheduler", map_segments=False)
        stack.callback(client.close)
        wait_until_registered(client, client.register(blocks.namespace(MIB, model="one")))
        assert host_status(client)["allocated_bytes"] == 0
        worker = stack.enter_context(connected(process))
        wait_until_registered(worker, worker.register(blocks.namespace(MIB, model="one")))
        assert host_status(client)["allocated_bytes"] > 0


def test_moved_blocks_keep_their_bytes(tmp_path: Path) -> None:
    """Lending memory to another engine moves blocks: a mistake serves wrong bytes."""
    storage = f'[[storage]]\ntype = "file"\npath = "{tmp_path}/f"\ncapacity = "64MiB"\n'
    storage += 'reserve_free = "0"\nwrite_policy = "write_through"\n'
    with (
        DaemonProcess(
            tmp_path / "small",
            capacity="16MiB",
            storage=storage,
            # Generous timeouts for a busy machine.
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
            # One by one: pending backups are bounded, and further ones are skipped.
            eventually(lambda: host_status(first)["backlog_blocks"] == 0, "backed up")
        for n in range(0, 40, 3):
            count_served(first, one, chains[n])
        two = second.register(blocks.namespace(30_000, model="two"))
        others = []
        for n in range(20):
            others.append(store(second, two, 7, n))
            eventually(lambda: host_status(first)["backlog_blocks"] == 0, "backed up")
        assert counter(first, "moved_blocks_total") > 0
        assert host_status(first)["allocated_bytes"] <= 16 * MIB
        # From L2 or the file tier: backups made after a move must be right as well.
        found = [count_served(first, one, chain, WAIT_MS) for chain in chains]
        assert found == [len(chain) for chain in chains]
        assert [count_served(second, two, chain, WAIT_MS) for chain in others] == [7] * 20
        assert counter(first, "internal_errors_total") == 0


def test_acquire_of_a_repeated_hash_holds_its_slot_once() -> None:
    """A client that repeats a hash would pin a slot that could never be freed."""
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


class LyingBackend(MemoryBackend):
    """A third party's backend with a bug: its hits are another block, or no block."""

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
async def test_wrong_answers_of_a_backend_are_misses(lie: str) -> None:
    """A bug in a third party's backend would serve wrong KV, or leave slots pinned."""
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


def test_status_of_many_long_namespaces_fits_a_frame() -> None:
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


def test_get_discards_a_copy_that_took_longer_than_its_lease(
    l2_daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot may hold another block by then, whose bytes would be served as this one's."""
    space = blocks.namespace()
    client = l2_daemon.client()
    handle = client.register(space)
    hashes, parents = blocks.chain(2)
    stored = [(h, p, blocks.payload(space, h)) for h, p in zip(hashes, parents, strict=True)]
    assert all(client.put(handle, stored))
    assert len(client.get(handle, hashes, 1000)) == 2
    # A copy that takes longer than any lease: the clock has advanced when it is done.
    expired_ns = time.monotonic_ns() + 3_600_000_000_000
    monkeypatch.setattr("tierd.client.client.time.monotonic_ns", lambda: expired_ns)
    assert client.get(handle, hashes, 1000) == []
    monkeypatch.undo()
    assert len(client.get(handle, hashes, 1000)) == 2
    client.close()
