"""Clients that die, break the protocol or never read, against a real daemon."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import blocks
from tests.support.daemon_client import (
    SOON_S,
    connected,
    count_served,
    counter,
    eventually,
    host_status,
    store,
)
from tests.support.daemon_process import DaemonProcess
from tierd.wire import messages as m
from tierd.wire.session import encode

pytestmark = pytest.mark.slow

MIB = 1 << 20


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A tierd without storage, shared by tests that leave it unchanged."""
    with DaemonProcess(tmp_path_factory.mktemp("shared") / "tierd", storage="") as process:
        yield process


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


def test_killed_client_frees_its_reserved_slots(l2_daemon: DaemonProcess) -> None:
    """Every engine crash would cost memory, and its half-written blocks might be served."""
    child = subprocess.Popen(
        [sys.executable, "-c", RESERVE_AND_WAIT, l2_daemon.socket],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
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
            assert count_served(client, handle, hashes) == 0
            assert store(client, handle, 5) == hashes
            assert count_served(client, handle, hashes) == 5
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def raw_session(daemon: DaemonProcess) -> socket.socket:
    """Return a socket that has sent HELLO, for tests that violate the protocol."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(SOON_S)
    sock.connect(daemon.socket)
    sock.sendall(encode(m.Hello(m.PROTOCOL_VERSION, "raw")))
    return sock


def read_until_closed(sock: socket.socket) -> bytes:
    """Return all bytes that the daemon sends before it closes the session."""
    said = b""
    while chunk := sock.recv(1 << 16):
        said += chunk
    return said


def test_half_closed_client_frees_its_reserved_slots(shared: DaemonProcess) -> None:
    """A client that shuts down in an orderly way would leave its slots reserved."""
    with connected(shared) as client, raw_session(shared) as sock:
        namespace = blocks.namespace(model="half-closed")
        hashes, parents = blocks.chain(3, "half-closed")
        sock.sendall(encode(m.Register(1, namespace.to_fields(), False)))
        sock.sendall(encode(m.Reserve(2, 0, b"".join(hashes), b"".join(parents))))
        eventually(lambda: host_status(client)["writing_blocks"] == 3, "reserved")
        sock.shutdown(socket.SHUT_WR)
        read_until_closed(sock)
        eventually(lambda: host_status(client)["writing_blocks"] == 0, "slots come back")


def test_session_with_a_protocol_error_keeps_its_slots_until_the_client_closes(
    shared: DaemonProcess,
) -> None:
    """The client's threads may still write to its slots while another client gets them."""
    with connected(shared) as client, raw_session(shared) as sock:
        namespace = blocks.namespace(model="outlaw")
        hashes, parents = blocks.chain(3, "outlaw")
        sock.sendall(encode(m.Register(1, namespace.to_fields(), False)))
        sock.sendall(encode(m.Reserve(2, 0, b"".join(hashes), b"".join(parents))))
        sock.sendall(b"garbage!")
        assert b"not a frame" in read_until_closed(sock)
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
def test_malformed_input_ends_only_its_own_session_with_a_reason(
    shared: DaemonProcess, said: bytes, reason: bytes
) -> None:
    """One broken client would take the node's cache away from all others."""
    with connected(shared) as client:
        handle = client.register(blocks.namespace(model="bystander"))
        hashes = store(client, handle, 3, said)
        with raw_session(shared) as sock:
            sock.sendall(said)
            assert reason in read_until_closed(sock)
        assert count_served(client, handle, hashes) == 3
        assert counter(client, "internal_errors_total") == 0


def resident_bytes(daemon: DaemonProcess) -> int:
    """Memory of the daemon process, without the arena."""
    assert daemon.process is not None
    text = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) << 10


def test_client_that_never_reads_uses_bounded_daemon_memory(shared: DaemonProcess) -> None:
    """One stuck engine would use up the daemon's memory."""
    with connected(shared) as client, raw_session(shared) as sock:
        handle = client.register(blocks.namespace(model="quick"))
        hashes = store(client, handle, 3, "quick")
        before = resident_bytes(shared)
        # An answer takes more than 1 KiB: the daemon would have to keep over 25 MiB.
        questions = encode(m.Status(1)) * 5_000
        for _ in range(5):
            sock.sendall(questions)
            assert count_served(client, handle, hashes) == 3
        assert resident_bytes(shared) - before < 16 * MIB
        said = read_until_closed(sock)
        assert len(said) < 16 * MIB
        assert counter(client, "internal_errors_total") == 0


def test_cancelled_acquires_are_answered_and_free_their_slots_in_flight(
    daemon: DaemonProcess,
) -> None:
    """Aborted requests would use up the acquires in flight, and every later one would miss."""
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
