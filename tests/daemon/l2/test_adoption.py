"""Host memory survives restarts of a real daemon, with a fake service manager."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.daemon_process import DaemonProcess
from tests.support.page_engine import PageEngine, chain, content, namespace, parents_of
from tests.support.service_manager import ServiceManager
from tests.support.traffic import wait_until
from tierd.cli.common.operator import Operator
from tierd.client import Client, Handle
from tierd.memory.past import ArenaGuard

BLOCKS = 200


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    with ServiceManager(tmp_path / "manager") as manager:
        yield manager


def daemon_in(tmp_path: Path, manager: ServiceManager, *, capacity: str = "64MiB") -> DaemonProcess:
    return DaemonProcess(tmp_path / "d", capacity=capacity, storage="", manager=manager)


@contextlib.contextmanager
def connected(
    tmp_path: Path, manager: ServiceManager, *, capacity: str = "64MiB"
) -> Iterator[tuple[DaemonProcess, Client, Handle]]:
    """Run a daemon with one registered client, which is closed at the end."""
    with daemon_in(tmp_path, manager, capacity=capacity) as daemon:
        client = daemon.client()
        try:
            yield daemon, client, client.register(namespace())
        finally:
            client.close()


def put(client: Client, handle: Handle, hashes: list[bytes]) -> int:
    blocks = zip(hashes, parents_of(hashes), map(content, hashes), strict=True)
    return sum(client.put(handle, list(blocks)))


def put_after(client: Client, handle: Handle, hashes: list[bytes], start: int) -> list[bool]:
    """Store a chain's blocks from index `start` on."""
    blocks = zip(hashes, parents_of(hashes), map(content, hashes), strict=True)
    return client.put(handle, list(blocks)[start:])


def count_served(client: Client, handle: Handle, hashes: list[bytes]) -> int:
    """Return how many leading blocks of a chain are served; compares all their bytes."""
    views = client.get(handle, hashes, 5000)
    for block_hash, view in zip(hashes, views, strict=False):
        assert view == content(block_hash), "wrong bytes"
    return len(views)


def restart(daemon: DaemonProcess, *clients: tuple[Client, Handle], end: str = "kill") -> None:
    """Restart the daemon and wait until the clients have found it. Before a kill, wait until the
    manager holds every segment: one that reads late would lose the rest."""
    if daemon.manager is not None and end == "kill":
        wait_until(
            partial(_all_segments_kept, daemon, daemon.manager), 20, "the manager does not read"
        )
    before = {client.epoch for client, _ in clients}
    getattr(daemon, end)()
    daemon.start()

    def found() -> bool:
        for client, _ in clients:
            client.poll()
        return all(c.epoch and c.epoch not in before and handle.ready for c, handle in clients)

    wait_until(found, 20, "the clients do not come back")


def _all_segments_kept(daemon: DaemonProcess, manager: ServiceManager) -> bool:
    segments = set()
    for fd in Path(f"/proc/{daemon.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if re.match(r"/memfd:tierd-[0-9a-f]+-[0-9]+ ", os.readlink(fd)):
                segments.add(fd.stat().st_ino)
    return sum("-" not in name for name in manager.names()) >= len(segments)


def wait_verifiable(client: Client, blocks: int) -> None:
    """Wait until the ledgers record `blocks` checksums, which the next incarnation can verify."""
    wait_until(lambda: verifiable_blocks(client) >= blocks, 20, "blocks get no checksum")


def verifiable_blocks(client: Client) -> int:
    host = client.status()["host"]
    assert isinstance(host, dict)
    return int(host["verified_blocks"])


def host_of(client: Client) -> dict:
    status = client.status()
    assert isinstance(status["host"], dict)
    return status["host"]


def counters(client: Client) -> dict:
    status = client.status()
    assert isinstance(status["counters"], dict)
    return status["counters"]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "stop"])
def test_host_memory_survives_a_daemon_restart(
    tmp_path: Path, manager: ServiceManager, end: str
) -> None:
    """A crash or an upgrade would empty host memory, and every user would pay for it."""
    hashes = chain("a", BLOCKS)
    with connected(tmp_path, manager) as (daemon, client, handle):
        assert put(client, handle, hashes) == BLOCKS
        wait_verifiable(client, BLOCKS)
        for _ in range(2):
            restart(daemon, (client, handle), end=end)
            assert count_served(client, handle, hashes) == BLOCKS
        assert counters(client)["adopted_blocks_total"] == BLOCKS
        wait_until(lambda: not host_of(client)["unverified_blocks"], 20, "blocks stay unverified")
        wait_until(lambda: not host_of(client)["quarantined_blocks"], 20, "slots stay quarantined")
        more = chain("b", BLOCKS)
        assert put(client, handle, more) == BLOCKS
        assert count_served(client, handle, more) == BLOCKS


@pytest.mark.slow
def test_engine_children_do_not_inherit_the_guard(tmp_path: Path, manager: ServiceManager) -> None:
    """A program started by an engine would keep slots unused for as long as it runs."""
    with daemon_in(tmp_path, manager) as daemon:
        client = daemon.client()
        handle = client.register(namespace())
        assert put(client, handle, chain("a", 1)) == 1
        [guard] = client._filling.guards.values()
        assert not os.get_inheritable(guard)
        client.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(guard)


@pytest.mark.slow
def test_client_keeps_its_mappings_across_a_restart(
    tmp_path: Path, manager: ServiceManager
) -> None:
    """After each restart every engine would fault its memory in again, seconds for each GiB."""
    with connected(tmp_path, manager) as (daemon, client, handle):
        hashes = chain("a", 4)
        assert put(client, handle, hashes) == 4
        wait_verifiable(client, 4)

        def address() -> int:
            lease = client.acquire([handle], hashes, 2000)
            assert lease is not None
            views = client.lease_views(handle, lease.epoch, lease.slots[0])
            assert views is not None
            client.release(lease)
            return ctypes.addressof(ctypes.c_char.from_buffer(views[0]))

        before = address()
        restart(daemon, (client, handle))
        assert count_served(client, handle, hashes) == 4
        assert address() == before


@pytest.mark.slow
def test_blocks_damaged_between_incarnations_are_not_served(
    tmp_path: Path, manager: ServiceManager
) -> None:
    """Memory that changed while no daemon ran would be served as a prompt's KV."""
    with connected(tmp_path, manager) as (daemon, client, handle):
        hashes = chain("a", BLOCKS)
        assert put(client, handle, hashes) == BLOCKS
        wait_verifiable(client, BLOCKS)
        lease = client.acquire([handle], hashes, 2000)
        assert lease is not None
        views = client.lease_views(handle, lease.epoch, lease.slots[0])
        assert views is not None
        views[7][100] ^= 1
        restart(daemon, (client, handle))
        assert count_served(client, handle, hashes) == 7
        assert counters(client)["rotten_blocks_total"] == 1
        assert put(client, handle, hashes) == BLOCKS
        assert count_served(client, handle, hashes) == BLOCKS


@pytest.mark.slow
def test_slots_under_an_old_lease_are_not_reused_after_a_restart(
    tmp_path: Path, manager: ServiceManager
) -> None:
    """An engine that still copies from a block when the daemon dies would copy another's bytes."""
    with connected(tmp_path, manager, capacity="4MiB") as (daemon, client, handle):
        other = daemon.client()
        other_handle = other.register(namespace())
        hashes = chain("a", 100)
        put(client, handle, hashes)
        count = count_served(client, handle, hashes)
        assert count > 50
        wait_verifiable(client, count)
        lease = client.acquire([handle], hashes[:count], 2000)
        assert lease is not None
        views = client.lease_views(handle, lease.epoch, lease.slots[0])
        assert views is not None
        restart(daemon, (other, other_handle))
        # A full arena: stores would take these very slots.
        for tag in range(5):
            put(other, other_handle, chain(f"b{tag}", 60))
            for block_hash, view in zip(hashes, views, strict=False):
                assert view[: len(content(block_hash))] == content(block_hash)
        assert time.monotonic_ns() < lease.expires_ns
        other.close()


@pytest.mark.slow
@pytest.mark.parametrize("flushed", [False, True])
def test_leased_slots_without_a_ledger_record_are_not_reused_after_a_restart(
    tmp_path: Path, manager: ServiceManager, flushed: bool
) -> None:
    """Blocks that were leased before their checksum, or flushed, have no record in the ledger: a
    reader would copy another block's bytes after a crash."""
    count = 1000
    with connected(tmp_path, manager) as (daemon, client, handle):
        other = daemon.client()
        other_handle = other.register(namespace())
        hashes = chain("a", count)
        assert put(client, handle, hashes) == count
        lease = client.acquire([handle], hashes, 2000)
        assert lease is not None
        assert lease.blocks == count
        views = client.lease_views(handle, lease.epoch, lease.slots[0])
        assert views is not None
        if flushed:
            with Operator(daemon.socket, "test") as operator:
                [*_, result] = operator.flush("", host=True, tiers=[], timeout_s=10)
            assert result["complete"]
        for incarnation in range(2):
            restart(daemon, (client, handle), (other, other_handle))
            # Until no client of the former incarnation can be writing.
            wait_until(
                lambda: host_of(other)["quarantined_blocks"] <= count, 20, "slots stay quarantined"
            )
            assert not flushed or host_of(other)["quarantined_blocks"] == count
            for tag in range(3):
                put(other, other_handle, chain(f"{incarnation}/{tag}", 700))
            for block_hash, view in zip(hashes, views, strict=True):
                assert view == content(block_hash), "wrong bytes under a valid lease"
        assert time.monotonic_ns() < lease.expires_ns
        other.close()


@pytest.mark.slow
def test_guard_reports_a_copy_process_while_it_runs(
    tmp_path: Path, manager: ServiceManager
) -> None:
    """Slots that it still copies from would be overwritten once their lease has ended, or all slots
    would be kept permanently."""
    with daemon_in(tmp_path, manager) as daemon, PageEngine(daemon.socket) as engine:
        [kept] = [fd for name, fd in manager.kept if name.startswith("guard-")]
        guard = ArenaGuard(os.dup(kept))
        assert guard.held
        assert not guard.copying
        engine.wait_attached()
        assert guard.copying
        daemon.kill()
        wait_until(lambda: not guard.copying, 20, "the copy process does not end")
        guard.close()


@pytest.mark.slow
def test_writer_of_a_former_incarnation_damages_no_block(
    tmp_path: Path, manager: ServiceManager
) -> None:
    """An engine that was stopped in the middle of a store would write into another's block."""
    with connected(tmp_path, manager, capacity="4MiB") as (daemon, client, handle):
        other = daemon.client()
        other_handle = other.register(namespace())
        mine = chain("a", 8)
        reservation = client.reserve(handle, mine, parents_of(mine))
        assert reservation is not None
        assert put(other, other_handle, chain("c", 4)) == 4
        wait_verifiable(other, 4)
        restart(daemon, (other, other_handle))
        # Fill all free memory while the writer still holds its slots.
        tags = range(40)
        for tag in tags:
            put(other, other_handle, chain(f"b{tag}", 4))
        assert host_of(other)["quarantined_blocks"] >= 8
        served = {tag: count_served(other, other_handle, chain(f"b{tag}", 4)) for tag in tags}
        for view in reservation.views:
            assert view is not None
            view[:] = b"\xee" * len(view)
        for tag, count in served.items():
            assert count_served(other, other_handle, chain(f"b{tag}", 4)) == count
        assert client.commit(reservation) == [False] * 8
        wait_until(lambda: not host_of(other)["quarantined_blocks"], 20, "slots stay quarantined")
        other.close()


@pytest.mark.slow
def test_lower_capacity_keeps_as_many_blocks_as_fit(
    tmp_path: Path, manager: ServiceManager
) -> None:
    """Lowering host.capacity would cost all of L2, or have no effect."""
    with connected(tmp_path, manager) as (daemon, client, handle):
        hashes = chain("a", 1500)
        assert put(client, handle, hashes[:750]) == 750
        assert sum(put_after(client, handle, hashes, 750)) == 750
        wait_verifiable(client, 1500)
        text = daemon.config.read_text(encoding="utf-8")
        daemon.config.write_text(text.replace('capacity = "64MiB"', 'capacity = "16MiB"'))
        restart(daemon, (client, handle), end="stop")
        limit = 16 << 20
        wait_until(
            lambda: host_of(client)["allocated_bytes"] <= limit,
            40,
            "the arena stays too large",
        )
        count = count_served(client, handle, hashes)
        assert 200 <= count <= limit // (32 << 10)


@pytest.mark.slow
def test_unreadable_segments_are_dropped_and_logged(
    tmp_path: Path, manager: ServiceManager
) -> None:
    """A ledger of another version, or half a segment, would keep tierd from starting."""
    with connected(tmp_path, manager) as (daemon, client, handle):
        put(client, handle, chain("a", 300))
        wait_verifiable(client, 300)
        arena = sorted({name for name, _ in manager.kept if "-" not in name})
        assert len(arena) >= 3
        ledgers = [
            fd for name, fd in manager.kept if "-" not in name and os.pread(fd, 8, 0) == b"TIERDLDG"
        ]
        os.pwrite(ledgers[0], (99).to_bytes(4, "little"), 8)
        os.pwrite(ledgers[1], b"\xff", 40)
        gone = next(
            entry for entry in manager.kept if entry[0] == arena[-1] and entry[1] not in ledgers
        )
        manager.kept.remove(gone)
        os.close(gone[1])
        restart(daemon, (client, handle))
        assert counters(client)["adoption_dropped_segments_total"] == 3
        text = daemon.log.read_text(encoding="utf-8")
        assert "its format is 99" in text
        assert "a descriptor is missing" in text
        assert "its head is damaged" in text
        assert host_of(client)["blocks"] == counters(client)["adopted_blocks_total"]
        assert put(client, handle, chain("z", 300)) == 300
        assert count_served(client, handle, chain("z", 300)) == 300


@pytest.mark.slow
def test_restarts_leave_no_descriptors_in_the_service_manager(
    tmp_path: Path, manager: ServiceManager
) -> None:
    """Each restart would leave descriptors behind, until the service manager has no room."""
    with connected(tmp_path, manager) as (daemon, client, handle):
        put(client, handle, chain("a", 40))
        wait_verifiable(client, 40)

        def names(*, incarnations: bool) -> set[str]:
            return {name for name in manager.names() if ("-" in name) == incarnations}

        before = names(incarnations=False)
        for _ in range(3):
            restart(daemon, (client, handle))
            wait_until(
                lambda: len(names(incarnations=True)) == 2, 20, "old incarnations are not removed"
            )
        assert names(incarnations=False) == before
        assert count_served(client, handle, chain("a", 40)) == 40


@pytest.mark.slow
def test_stopped_engine_does_not_block_stores_of_others(
    tmp_path: Path, manager: ServiceManager
) -> None:
    """One frozen engine would take memory from all others, for as long as it is frozen."""
    with connected(tmp_path, manager, capacity="4MiB") as (daemon, client, handle):
        hashes = chain("a", 100)
        put(client, handle, hashes)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:  # Holds the guard like a process that was stopped during a store.
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        os.close(read)
        try:
            wait_verifiable(client, 50)
            restart(daemon, (client, handle))
            wait_until(lambda: put(client, handle, chain("b", 8)) == 8, 40, "nothing is stored")
        finally:
            os.close(write)
            os.waitpid(child, 0)


@pytest.mark.slow
def test_restart_without_a_service_manager_starts_empty(tmp_path: Path) -> None:
    """tierd in a terminal or a container would fail for lack of systemd."""
    with DaemonProcess(tmp_path / "d", capacity="64MiB", storage="") as daemon:
        client = daemon.client()
        handle = client.register(namespace())
        assert put(client, handle, chain("a", 10)) == 10
        restart(daemon, (client, handle))
        assert count_served(client, handle, chain("a", 10)) == 0
        client.close()
