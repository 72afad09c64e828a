"""L2 outlives its daemon: a real one, killed and started again, and a fake service manager."""

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


def put(client: Client, handle: Handle, hashes: list[bytes]) -> int:
    blocks = zip(hashes, parents_of(hashes), map(content, hashes), strict=True)
    return sum(client.put(handle, list(blocks)))


def put_after(client: Client, handle: Handle, hashes: list[bytes], start: int) -> list[bool]:
    """Store what comes after the first `start` blocks of a chain."""
    blocks = zip(hashes, parents_of(hashes), map(content, hashes), strict=True)
    return client.put(handle, list(blocks)[start:])


def got(client: Client, handle: Handle, hashes: list[bytes]) -> int:
    """How many blocks of a chain are had, all of their bytes compared."""
    views = client.get(handle, hashes, 5000)
    for block_hash, view in zip(hashes, views, strict=False):
        assert view == content(block_hash), "wrong bytes"
    return len(views)


def restart(daemon: DaemonProcess, *clients: tuple[Client, Handle], end: str = "kill") -> None:
    """Another life of the daemon, which these clients have found. All that it takes over is kept
    by then: a manager that reads late would have lost the rest."""
    if daemon.manager is not None and end == "kill":
        wait_until(partial(_is_kept, daemon, daemon.manager), 20, "the manager does not read")
    before = {client.epoch for client, _ in clients}
    getattr(daemon, end)()
    daemon.start()

    def found() -> bool:
        for client, _ in clients:
            client.poll()
        return all(c.epoch and c.epoch not in before and handle.ready for c, handle in clients)

    wait_until(found, 20, "the clients do not come back")


def _is_kept(daemon: DaemonProcess, manager: ServiceManager) -> bool:
    segments = set()
    for fd in Path(f"/proc/{daemon.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if re.match(r"/memfd:tierd-[0-9a-f]+-[0-9]+ ", os.readlink(fd)):
                segments.add(fd.stat().st_ino)
    return sum("-" not in name for name in manager.names()) >= len(segments)


def wait_summed(client: Client, blocks: int) -> None:
    """Until the ledgers tell of so many blocks: what the next life can prove."""
    wait_until(lambda: ready_records(client) >= blocks, 20, "blocks get no checksum")


def ready_records(client: Client) -> int:
    host = client.status()["host"]
    assert isinstance(host, dict)
    return int(host["proven_blocks"])


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
def test_blocks_outlive_the_daemon(tmp_path: Path, manager: ServiceManager, end: str) -> None:
    """A crash, or an upgrade, would empty the host tier, and every user would pay for it."""
    daemon = daemon_in(tmp_path, manager)
    hashes = chain("a", BLOCKS)
    with daemon:
        client = daemon.client()
        handle = client.register(namespace())
        assert put(client, handle, hashes) == BLOCKS
        wait_summed(client, BLOCKS)
        for _ in range(2):
            restart(daemon, (client, handle), end=end)
            assert got(client, handle, hashes) == BLOCKS
        assert counters(client)["adopted_blocks_total"] == BLOCKS
        wait_until(lambda: not host_of(client)["unproven_blocks"], 20, "blocks stay unproven")
        wait_until(lambda: not host_of(client)["doubtful_blocks"], 20, "slots stay doubtful")
        more = chain("b", BLOCKS)
        assert put(client, handle, more) == BLOCKS
        assert got(client, handle, more) == BLOCKS
        client.close()


@pytest.mark.slow
def test_no_child_of_an_engine_inherits_the_guard(tmp_path: Path, manager: ServiceManager) -> None:
    """A program that an engine has started would keep slots unused for as long as it runs."""
    with daemon_in(tmp_path, manager) as daemon:
        client = daemon.client()
        handle = client.register(namespace())
        assert put(client, handle, chain("a", 1)) == 1
        [guard] = client._guards.values()
        assert not os.get_inheritable(guard)
        client.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(guard)


@pytest.mark.slow
def test_a_client_keeps_its_mappings(tmp_path: Path, manager: ServiceManager) -> None:
    """Each restart would have every engine fault its memory in again, seconds for each GiB."""
    with daemon_in(tmp_path, manager) as daemon:
        client = daemon.client()
        handle = client.register(namespace())
        hashes = chain("a", 4)
        assert put(client, handle, hashes) == 4
        wait_summed(client, 4)

        def address() -> int:
            lease = client.acquire([handle], hashes, 2000)
            assert lease is not None
            views = client.lease_views(handle, lease.epoch, lease.slots[0])
            assert views is not None
            client.release(lease)
            return ctypes.addressof(ctypes.c_char.from_buffer(views[0]))

        before = address()
        restart(daemon, (client, handle))
        assert got(client, handle, hashes) == 4
        assert address() == before
        client.close()


@pytest.mark.slow
def test_damage_between_two_lives_is_not_served(tmp_path: Path, manager: ServiceManager) -> None:
    """Memory that changed while nobody watched would be served as somebody's prompt."""
    with daemon_in(tmp_path, manager) as daemon:
        client = daemon.client()
        handle = client.register(namespace())
        hashes = chain("a", BLOCKS)
        assert put(client, handle, hashes) == BLOCKS
        wait_summed(client, BLOCKS)
        lease = client.acquire([handle], hashes, 2000)
        assert lease is not None
        views = client.lease_views(handle, lease.epoch, lease.slots[0])
        assert views is not None
        views[7][100] ^= 1
        restart(daemon, (client, handle))
        assert got(client, handle, hashes) == 7
        assert counters(client)["rotten_blocks_total"] == 1
        assert put(client, handle, hashes) == BLOCKS
        assert got(client, handle, hashes) == BLOCKS
        client.close()


@pytest.mark.slow
def test_slots_under_an_old_lease_are_not_reused(tmp_path: Path, manager: ServiceManager) -> None:
    """An engine that still copies from a block when the daemon dies would copy another's bytes."""
    with daemon_in(tmp_path, manager, capacity="4MiB") as daemon:
        client, other = daemon.client(), daemon.client()
        handle, its = client.register(namespace()), other.register(namespace())
        hashes = chain("a", 100)
        put(client, handle, hashes)
        count = got(client, handle, hashes)
        assert count > 50
        wait_summed(client, count)
        lease = client.acquire([handle], hashes[:count], 2000)
        assert lease is not None
        views = client.lease_views(handle, lease.epoch, lease.slots[0])
        assert views is not None
        restart(daemon, (other, its))
        # A full arena: whatever is stored now would take these very slots.
        for tag in range(5):
            put(other, its, chain(f"b{tag}", 60))
            for block_hash, view in zip(hashes, views, strict=False):
                assert view[: len(content(block_hash))] == content(block_hash)
        assert time.monotonic_ns() < lease.expires_ns
        client.close()
        other.close()


@pytest.mark.slow
@pytest.mark.parametrize("flushed", [False, True])
def test_leased_slots_without_a_record_are_not_reused(
    tmp_path: Path, manager: ServiceManager, flushed: bool
) -> None:
    """A request that resumes at once, or whose blocks are flushed, would copy another's bytes if
    the daemon dies then: the ledger knows nothing of its blocks."""
    count = 1000
    with daemon_in(tmp_path, manager) as daemon:
        client, other = daemon.client(), daemon.client()
        handle, its = client.register(namespace()), other.register(namespace())
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
        for life in range(2):
            restart(daemon, (client, handle), (other, its))
            # Until nobody of the life before can be writing.
            wait_until(
                lambda: host_of(other)["doubtful_blocks"] <= count, 20, "slots stay doubtful"
            )
            assert not flushed or host_of(other)["doubtful_blocks"] == count
            for tag in range(3):
                put(other, its, chain(f"{life}/{tag}", 700))
            for block_hash, view in zip(hashes, views, strict=True):
                assert view == content(block_hash), "wrong bytes under a valid lease"
        assert time.monotonic_ns() < lease.expires_ns
        client.close()
        other.close()


@pytest.mark.slow
def test_a_copy_process_is_known_while_it_lasts(tmp_path: Path, manager: ServiceManager) -> None:
    """Slots that it still copies from would be written to once their lease has ended; or all slots
    be kept for ever."""
    with daemon_in(tmp_path, manager) as daemon, PageEngine(daemon.socket) as engine:
        [kept] = [fd for name, fd in manager.kept if name.startswith("guard-")]
        guard = ArenaGuard(os.dup(kept))
        assert guard.held
        assert not guard.copying
        engine.wait_attached()
        assert guard.copying
        daemon.kill()
        wait_until(lambda: not guard.copying, 20, "the copy process goes on")
        guard.close()


@pytest.mark.slow
def test_a_writer_of_an_old_life_spoils_nothing(tmp_path: Path, manager: ServiceManager) -> None:
    """An engine that was stopped in the middle of a store would write into another's block."""
    with daemon_in(tmp_path, manager, capacity="4MiB") as daemon:
        client, other = daemon.client(), daemon.client()
        handle, its = client.register(namespace()), other.register(namespace())
        mine = chain("a", 8)
        reservation = client.reserve(handle, mine, parents_of(mine))
        assert reservation is not None
        assert put(other, its, chain("c", 4)) == 4
        wait_summed(other, 4)
        restart(daemon, (other, its))
        # Everything that there is room for, while the writer is still at it.
        tags = range(40)
        for tag in tags:
            put(other, its, chain(f"b{tag}", 4))
        assert host_of(other)["doubtful_blocks"] >= 8
        had = {tag: got(other, its, chain(f"b{tag}", 4)) for tag in tags}
        for view in reservation.views:
            assert view is not None
            view[:] = b"\xee" * len(view)
        for tag, count in had.items():
            assert got(other, its, chain(f"b{tag}", 4)) == count
        assert client.commit(reservation) == [False] * 8
        wait_until(lambda: not host_of(other)["doubtful_blocks"], 20, "slots stay doubtful")
        client.close()
        other.close()


@pytest.mark.slow
def test_a_lower_capacity_keeps_what_fits(tmp_path: Path, manager: ServiceManager) -> None:
    """To lower host.capacity would cost all of L2, or not lower it at all."""
    daemon = daemon_in(tmp_path, manager)
    with daemon:
        client = daemon.client()
        handle = client.register(namespace())
        hashes = chain("a", 1500)
        assert put(client, handle, hashes[:750]) == 750
        assert sum(put_after(client, handle, hashes, 750)) == 750
        wait_summed(client, 1500)
        text = daemon.config.read_text(encoding="utf-8")
        daemon.config.write_text(text.replace('capacity = "64MiB"', 'capacity = "16MiB"'))
        restart(daemon, (client, handle), end="stop")
        limit = 16 << 20
        wait_until(
            lambda: host_of(client)["allocated_bytes"] <= limit,
            40,
            "the arena stays too large",
        )
        count = got(client, handle, hashes)
        assert 200 <= count <= limit // (32 << 10)
        client.close()


@pytest.mark.slow
def test_what_cannot_be_read_is_dropped_and_told(tmp_path: Path, manager: ServiceManager) -> None:
    """A ledger that another version wrote, or half a segment, would keep tierd from starting."""
    with daemon_in(tmp_path, manager) as daemon:
        client = daemon.client()
        handle = client.register(namespace())
        put(client, handle, chain("a", 300))
        wait_summed(client, 300)
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
        assert got(client, handle, chain("z", 300)) == 300
        client.close()


@pytest.mark.slow
def test_the_manager_keeps_no_more_than_there_is(tmp_path: Path, manager: ServiceManager) -> None:
    """Each restart would leave descriptors behind, until the service manager has no room."""
    with daemon_in(tmp_path, manager) as daemon:
        client = daemon.client()
        handle = client.register(namespace())
        put(client, handle, chain("a", 40))
        wait_summed(client, 40)

        def names(*, lives: bool) -> set[str]:
            return {name for name in manager.names() if ("-" in name) == lives}

        before = names(lives=False)
        for _ in range(3):
            restart(daemon, (client, handle))
            wait_until(lambda: len(names(lives=True)) == 2, 20, "old lives are not forgotten")
        assert names(lives=False) == before
        assert got(client, handle, chain("a", 40)) == 40
        client.close()


@pytest.mark.slow
def test_a_stopped_engine_does_not_hold_up_the_others(
    tmp_path: Path, manager: ServiceManager
) -> None:
    """One frozen engine would take memory from all, for as long as it is frozen."""
    with daemon_in(tmp_path, manager, capacity="4MiB") as daemon:
        client = daemon.client()
        handle = client.register(namespace())
        hashes = chain("a", 100)
        put(client, handle, hashes)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:  # Holds the guard, as a process that was stopped while it stored.
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        os.close(read)
        try:
            wait_summed(client, 50)
            restart(daemon, (client, handle))
            wait_until(lambda: put(client, handle, chain("b", 8)) == 8, 40, "nothing is stored")
        finally:
            os.close(write)
            os.waitpid(child, 0)
        client.close()


@pytest.mark.slow
def test_without_a_manager_nothing_is_kept(tmp_path: Path) -> None:
    """tierd in a terminal or a container would fail for want of systemd."""
    with DaemonProcess(tmp_path / "d", capacity="64MiB", storage="") as daemon:
        client = daemon.client()
        handle = client.register(namespace())
        assert put(client, handle, chain("a", 10)) == 10
        restart(daemon, (client, handle))
        assert got(client, handle, chain("a", 10)) == 0
        client.close()
