"""The proxy that disturbs connections: missing faults would let other tests pass."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers.proxy import BLACK_HOLE, Flow, Proxy, Then

SILENCE_S = 0.1
"""How long silence is observed where no byte may arrive; other reads wait 5 s."""


class Echo(socketserver.BaseRequestHandler):
    """Sends back what it gets."""

    def handle(self) -> None:
        try:
            while data := self.request.recv(65536):
                self.request.sendall(data)
        except OSError:
            pass  # The proxy resets connections; that is what is tested.


class EchoServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False


class UnixEchoServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False


@pytest.fixture(params=["tcp", "unix"])
def proxy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Proxy]:
    """A proxy in front of a server that echoes."""
    server: socketserver.BaseServer
    if request.param == "tcp":
        tcp = EchoServer(("127.0.0.1", 0), Echo)
        server, made = tcp, Proxy(("127.0.0.1", tcp.server_address[1]))
    else:
        server = UnixEchoServer(str(tmp_path / "server"), Echo)
        made = Proxy(tmp_path / "server", tmp_path / "proxy")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        with made:
            yield made
        assert made.connections == 0
        assert not made._thread.is_alive()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def connect(proxy: Proxy) -> socket.socket:
    where = proxy.address
    if isinstance(where, Path):
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.settimeout(5)
        try:
            client.connect(str(where))
        except OSError:
            client.close()
            raise
        return client
    return socket.create_connection(where, timeout=5)


def read(client: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := client.recv(count - len(data))):
        data += more
    return data


def read_to_the_end(client: socket.socket) -> bytes:
    data = b""
    while more := client.recv(4096):
        data += more
    return data


def silent(client: socket.socket) -> bool:
    """Whether no byte arrives for a while."""
    client.settimeout(SILENCE_S)
    try:
        client.recv(1)
    except TimeoutError:
        return True
    finally:
        client.settimeout(5)
    return False


@pytest.mark.slow
def test_passes_everything_and_ends_as_its_ends_do(proxy: Proxy) -> None:
    """A proxy that changes bytes or keeps connections would make tierd look faulty."""
    data = bytes(range(256)) * 8192
    with connect(proxy) as client, connect(proxy) as other:
        writer = threading.Thread(target=client.sendall, args=(data,))
        writer.start()
        assert read(client, len(data)) == data
        writer.join()
        other.sendall(b"x")
        assert read(other, 1) == b"x"
        assert (proxy.accepted, proxy.connections) == (2, 2)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b"", "a half-closed connection is not closed by the other end"
    assert proxy.accepted == 2


@pytest.mark.slow
def test_stalls_after_good_bytes_and_goes_on(proxy: Proxy) -> None:
    """Silence in the middle of an answer would look like its end, or not occur."""
    with connect(proxy) as client:
        client.sendall(b"before")
        assert read(client, 6) == b"before"
        proxy.spoil(down=Flow(good_bytes=4))
        client.sendall(b"123456")
        assert read(client, 4) == b"1234"
        assert silent(client)
        with connect(proxy) as other:
            other.sendall(b"abcdef")
            assert read(other, 4) == b"abcd", "each connection has its own count of good bytes"
            assert silent(other)
            proxy.heal()
            assert (read(client, 2), read(other, 2)) == (b"56", b"ef")


@pytest.mark.parametrize("then", [Then.RESET, Then.CLOSE])
def test_cuts_after_good_bytes(proxy: Proxy, then: Then) -> None:
    """An answer that breaks off would reach the client whole."""
    with connect(proxy) as client:
        proxy.spoil(down=Flow(good_bytes=3, then=then))
        client.sendall(b"123456")
        if then is Then.RESET and not isinstance(proxy.address, Path):
            # The reset may overtake the bytes before it.
            with pytest.raises(ConnectionResetError):
                read_to_the_end(client)
        else:
            assert read_to_the_end(client) == b"123"
        proxy.heal()
        with connect(proxy) as other:
            other.sendall(b"x")
            assert read(other, 1) == b"x"


@pytest.mark.slow
def test_trickles(proxy: Proxy) -> None:
    """A body that never ends and never stops would arrive at once, or not at all."""
    with connect(proxy) as client:
        proxy.spoil(down=Flow(good_bytes=2, then=Then.TRICKLE, trickle_s=0.03))
        started = time.monotonic()
        client.sendall(b"12345")
        assert read(client, 5) == b"12345"
        assert time.monotonic() - started >= 3 * 0.03


@pytest.mark.slow
def test_delays_and_limits_the_rate(proxy: Proxy) -> None:
    """A slow network would be a fast one."""
    with connect(proxy) as client:
        proxy.spoil(up=Flow(delay_s=0.1), down=Flow(delay_s=0.05))
        started = time.monotonic()
        client.sendall(b"x")
        assert read(client, 1) == b"x"
        assert time.monotonic() - started >= 0.15
        proxy.spoil(down=Flow(bytes_per_s=1e6))
        started = time.monotonic()
        writer = threading.Thread(target=client.sendall, args=(bytes(200_000),))
        writer.start()
        assert len(read(client, 200_000)) == 200_000
        writer.join()
        # The last piece arrives before the time that it should have taken has passed.
        assert time.monotonic() - started >= 0.1


@pytest.mark.slow
def test_black_hole_refusal_and_cut(proxy: Proxy) -> None:
    """Dead hosts and closed ports would answer."""
    with connect(proxy) as client:
        client.sendall(b"x")
        assert read(client, 1) == b"x"
        proxy.refuse()
        with pytest.raises(OSError, match="refused"):
            connect(proxy)
        client.sendall(b"y")
        assert read(client, 1) == b"y", "an open connection is refused"
        proxy.accept()
        proxy.spoil(up=BLACK_HOLE)
        with connect(proxy) as lost:
            lost.sendall(b"z")
            assert silent(lost)
            proxy.cut()
            for end in (client, lost):
                if isinstance(proxy.address, Path):
                    assert read_to_the_end(end) == b""
                else:
                    with pytest.raises(ConnectionResetError):
                        read_to_the_end(end)
    proxy.heal()
    with connect(proxy) as client:
        client.sendall(b"x")
        assert read(client, 1) == b"x"
