"""Restarts, stops and hangs of the daemon, as its clients see them."""

from __future__ import annotations

import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.support import blocks
from tests.support.daemon_client import (
    SOON_S,
    connected,
    count_served,
    eventually,
    host_status,
    store,
    wait_until_indexed,
    wait_until_registered,
)
from tests.support.daemon_process import DaemonProcess
from tierd.client import Client
from tierd.errors import DisconnectedError
from tierd.wire import messages as m
from tierd.wire.session import encode

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_blocks_survive_a_daemon_restart_in_the_file_tier(daemon: DaemonProcess, how: str) -> None:
    """A restart would cost every warm prefix of the node."""
    with connected(daemon) as client:
        handle = client.register(blocks.namespace(20_000))
        hashes = store(client, handle, 64)
        if how == "SIGTERM":
            # With backups pending: draining must finish them.
            assert daemon.stop() == 0
            assert not Path(daemon.socket).exists()
        else:
            daemon.wait_backed_up()
            daemon.kill()
        daemon.start()
        wait_until_registered(client, handle)
        wait_until_indexed(client)
        assert host_status(client)["blocks"] == 0
        assert count_served(client, handle, hashes) == 64
        assert host_status(client)["blocks"] == 64


# --- restarts as clients see them -------------------------------------------------------


def test_calls_without_a_daemon_miss_at_once(tmp_path: Path) -> None:
    """A node whose tierd is down would answer requests late, or not at all."""
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


def test_stopped_daemon_costs_a_call_at_most_its_timeout(l2_daemon: DaemonProcess) -> None:
    """A hung daemon would hang the engine's worker."""
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
        eventually(lambda: count_served(client, handle, hashes) == 3, "served again")


def test_restart_voids_old_leases_and_reservations(l2_daemon: DaemonProcess) -> None:
    """A commit or lease of the last incarnation would publish or read slots of this one."""
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
        wait_until_registered(client, handle)
        assert client.epoch not in (epoch, b"")
        store(client, handle, 3, "new")
        assert client.commit(reservation) == [False] * 3
        client.abort(reservation)
        client.release(lease)
        # The memory of the last incarnation is still mapped: leased blocks can be loaded.
        views = client.lease_views(handle, lease.epoch, lease.slots[0])
        assert views is not None
        for view, block_hash in zip(views, stored, strict=True):
            assert view[:4096] == blocks.payload(handle.namespace, block_hash)
        assert count_served(client, handle, hashes) == 0
        assert host_status(client)["writing_blocks"] == 0


def test_leased_blocks_stay_readable_after_the_daemon_dies(l2_daemon: DaemonProcess) -> None:
    """vLLM fails a request whose load fails: a crash of tierd would cost users answers."""
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


def test_leased_blocks_stay_readable_while_the_session_reconnects(l2_daemon: DaemonProcess) -> None:
    """Loads of blocks that the daemon still holds would fail after a broken session."""
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


def test_reserved_slots_are_not_reused_after_a_session_breaks(l2_daemon: DaemonProcess) -> None:
    """A copy under way when the session broke would write into another client's block."""
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
        assert count_served(other, handle, hashes) == 6
        assert slow.commit(reservation) == [False] * 3
        eventually(lambda: host_status(other)["writing_blocks"] == 0, "slots come back")


class FakeDaemon:
    """Accepts one client and sends fixed chunks, whatever the client sends."""

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
def test_client_disconnects_from_a_daemon_that_breaks_the_protocol(
    tmp_path: Path, said: bytes
) -> None:
    """A wrong message would be believed, or raise inside an engine."""
    with FakeDaemon(tmp_path / "fake.sock", said) as fake:
        client = Client(fake.path, name="test", call_timeout_ms=2000)
        handle = client.register(blocks.namespace())
        assert client.put(handle, [(bytes(32), blocks.ROOT, bytes(4096))]) == [False]
        assert not client.connected
        assert "protocol" in client.last_error
        client.close()


# --- stopping ---------------------------------------------------------------------------


def test_stop_finishes_pending_backups(daemon: DaemonProcess) -> None:
    """An upgrade would lose what engines stored in the last seconds."""
    with connected(daemon) as client:
        handle = client.register(blocks.namespace(100_000))
        hashes = store(client, handle, 300)
        assert daemon.stop() == 0
        assert not Path(daemon.socket).exists()
        assert "not backed up" not in daemon.log.read_text()
        daemon.start()
        wait_until_registered(client, handle)
        wait_until_indexed(client)
        assert count_served(client, handle, hashes) == 300


def test_stop_ends_sessions_and_removes_the_socket(l2_daemon: DaemonProcess) -> None:
    """Each stop would take systemd's timeout, and each engine's."""
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
