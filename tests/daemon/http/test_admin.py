"""Metrics and health over HTTP: their contents, and protection against slow or hostile clients."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.admin import ADMIN, WAIT_S, fetch, metrics, port_of
from tests.support.blocks import chain, namespace, payload
from tests.support.daemon_process import DaemonProcess
from tests.support.prometheus import Family, read
from tests.support.servers.redis import RedisServer
from tests.support.tiers.scene import table
from tests.support.traffic import wait_until
from tierd.clock import SystemClock
from tierd.config import AdminConfig, parse
from tierd.daemon.http.admin import CONNECTIONS_MAX, REQUEST_BYTES_MAX, Admin, Phase, tcp_listener
from tierd.daemon.http.exposition import Metric, MetricSample, exposition
from tierd.daemon.http.metrics import METRICS, NAMESPACES_SHOWN_MAX, scrape
from tierd.daemon.node import Node
from tierd.daemon.options import NodeOptions
from tierd.errors import ConfigError

BLOCK_BYTES = 4096

# --- the table ------------------------------------------------------------------------


@pytest.fixture
def node() -> Iterator[Node]:
    """A node whose tasks do not run."""
    made = Node(
        NodeOptions(
            capacity_bytes=64 << 20,
            segment_bytes=64 << 10,
            lease_ttl_ms=1000,
            epoch=bytes(8),
        ),
        tiers=[],
        clock=SystemClock(),
    )
    yield made
    made.memory.arena.close()


def test_every_metric_has_a_help_text_and_a_base_unit() -> None:
    """A dashboard's author would have to guess what a number means, and its unit."""
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"tierd_[a-z_]+", metric.name)
        assert metric.help[0].isupper() or metric.help[0].isdigit()
        assert metric.help.endswith(".")
        assert not re.search(r"_(ms|s|mib|kb)(_total)?$", metric.name), "base units only"


def test_metrics_named_in_the_docs_exist() -> None:
    """An alert copied from the page would never fire."""
    text = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    section = text.partition("## What to watch")[2].partition("\n## ")[0]
    named = set(re.findall(r"tierd_[a-z_]+[a-z]", section))
    assert len(named) > 5
    assert {name.removesuffix("_bucket") for name in named} <= {m.name for m in METRICS}


def test_counter_without_a_table_row_is_exported(node: Node) -> None:
    """A counter added to the status last would be missing from the metrics."""
    node.counters["brand_new_total"] = 7
    node.counters["stored_blocks_total"] = 3
    families = read(scrape(node.status()))
    assert families["tierd_events_total"].value(event="brand_new") == 7
    assert families["tierd_stored_blocks_total"].value() == 3
    assert "stored_blocks" not in str(families["tierd_events_total"].samples)
    assert families["tierd_requested_blocks_total"].value() == 0


def test_namespace_labels_are_bounded(node: Node) -> None:
    """Engines that come and go would fill Prometheus with series."""
    spaces = [node.register(namespace(model=f"model {number}")) for number in range(60)]
    for number, space in enumerate(spaces[5:]):
        hashes, parents = chain(1, number)
        done = node.reserve(1, space, hashes, parents)
        node.commit(1, done.reservation_id, 1)
    families = read(scrape(node.status()))
    for name, size in (("tierd_namespace_blocks", 1), ("tierd_namespace_bytes", 4096)):
        samples = families[name].samples
        assert len(samples) == NAMESPACES_SHOWN_MAX + 1
        assert sum(samples.values()) == 55 * size
        assert families[name].value(namespace="other", model="") == 35 * size


@given(st.text(), st.text())
def test_model_name_cannot_inject_a_metric_line(value: str, about: str) -> None:
    """An engine's model name could set any metric."""
    about += "."
    metric = Metric("tierd_x", about, lambda _: [MetricSample((("model", value),), 1.5)])
    text = exposition([metric], {})
    assert read(text)["tierd_x"].value(model=value) == 1.5


# --- the server by itself -------------------------------------------------------------


def ask(admin: Admin, path: str, method: str = "GET") -> tuple[int, str]:
    head, _, body = admin.answer(f"{method} {path} HTTP/1.1\r\nHost: x".encode()).partition(
        b"\r\n\r\n"
    )
    return int(head.split()[1]), body.decode()


def test_readyz_and_healthz(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes would send engines to a daemon that does not serve, or kill one that does."""
    admin = Admin(node)
    assert ask(admin, "/readyz") == (503, "starting\n")
    assert ask(admin, "/healthz") == (200, "ok\n")
    admin.phase = Phase.SERVING
    assert ask(admin, "/readyz") == (200, "ok\n")
    admin.phase = Phase.STOPPING
    assert ask(admin, "/readyz") == (503, "stopping\n")
    assert ask(admin, "/healthz") == (200, "ok\n")
    monkeypatch.setattr(type(node.threads), "oldest_s", 31.0)
    status, why = ask(admin, "/healthz")
    assert status == 503
    assert "31 s" in why


def test_pages_are_cached_between_requests(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that requests in a loop would take the event loop's time from the engines."""
    now_s, made = 100.0, 0

    def slow(_: object) -> str:
        nonlocal now_s, made
        now_s += 0.01
        made += 1
        return f"{made}\n"

    monkeypatch.setattr("tierd.daemon.http.admin.time.monotonic", lambda: now_s)
    monkeypatch.setattr("tierd.daemon.http.admin.scrape", slow)
    admin = Admin(node)
    for _ in range(100):
        assert ask(admin, "/metrics") == (200, "1\n")
        now_s += 0.001
    now_s += 0.1
    assert ask(admin, "/metrics") == (200, "2\n")


@pytest.mark.parametrize(
    ("listen", "says"),
    [
        ("9464", "it must be like 127.0.0.1:9464"),
        ("127.0.0.1", "it must be like"),
        ("127.0.0.1:http", "it must be like"),
        ("127.0.0.1:65536", "it must be like"),
        ("localhost:9464", "it must be like"),
        ("::1:9464", "it must be like"),
        ("[127.0.0.1]:9464", "it must be like"),
        ("admin.sock", "it must be like"),
        ("0.0.0.0:9464", "allow_remote = true"),
        ("[::]:9464", "allow_remote = true"),
        ("192.0.2.1:9464", "allow_remote = true"),
    ],
)
def test_wrong_or_public_admin_address_is_refused(listen: str, says: str) -> None:
    """A typo would let the whole network read what the node does."""
    with pytest.raises(ConfigError, match=re.escape(says)):
        tcp_listener(AdminConfig(listen=listen))


def test_allowed_admin_addresses() -> None:
    """An operator could not use an address that is safe."""
    for listen, remote in (("127.0.0.1:0", False), ("0.0.0.0:0", True)):
        with tcp_listener(AdminConfig(listen=listen, allow_remote=remote)) as listener:
            taken = f"127.0.0.1:{listener.getsockname()[1]}"
            with pytest.raises(ConfigError, match="cannot listen on"):
                tcp_listener(AdminConfig(listen=taken))


def test_admin_configuration() -> None:
    """A misspelt key would leave the node without metrics, unnoticed."""
    raw = {"host": {"capacity": "1GiB"}}
    assert parse({**raw}, {}).admin.listen == ""
    environ = {"TIERD_ADMIN_LISTEN": "[::1]:1", "TIERD_ADMIN_ALLOW_REMOTE": "true"}
    config = parse({**raw, "admin": {"listen": "127.0.0.1:2"}}, environ).admin
    assert (config.listen, config.allow_remote) == ("[::1]:1", True)
    with pytest.raises(ConfigError, match=r"admin\.listn is not a key; did you mean admin\.listen"):
        parse({**raw, "admin": {"listn": "x"}}, {})
    with pytest.raises(ConfigError, match=r"\[admin\] must be a table"):
        parse({**raw, "admin": "127.0.0.1:2"}, {})


# --- the daemon ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon with a file tier, shared by tests that leave it unchanged."""
    directory = tmp_path_factory.mktemp("tierd")
    file = {"path": str(directory / "store"), "capacity": "64MiB", "reserve_free": "0"}
    storage = table("file", file) + ADMIN
    with DaemonProcess(directory, capacity="16MiB", storage=storage) as daemon:
        yield daemon


def exchange(port: int, sent: bytes) -> bytes:
    """Send bytes; returns all that comes back until the daemon closes the connection."""
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(sent)
        return read_until_closed(sock)


def read_until_closed(sock: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.slow
def test_admin_pages(shared: DaemonProcess) -> None:
    """Prometheus, Kubernetes and operators would not find the paths that they expect."""
    port = port_of(shared)
    assert fetch(port, "/readyz")[1] == fetch(port, "/healthz?verbose=1")[1] == "ok\n"
    response, body = fetch(port, "/v1/status")
    assert response.headers["content-type"] == "application/json"
    assert json.loads(body).keys() == {*shared.status(), "phase"}
    assert metrics(port)["tierd_ready"].value() == 1
    response, body = fetch(port, "/metrics", "HEAD")
    assert (response.status, body) == (200, "")
    assert int(response.headers["content-length"]) > 1000
    assert response.headers["connection"] == "close"
    for method in ("POST", "PUT", "DELETE"):
        response, _ = fetch(port, "/metrics", method)
        assert (response.status, response.headers["allow"]) == (405, "GET, HEAD")
    assert fetch(port, "/")[0].status == fetch(port, "/metrics/")[0].status == 404


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\r\n\r\n", b"400"),
        (b"GET\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/2.0\r\n\r\n", b"400"),
        (b"GET  /metrics HTTP/1.1\r\n\r\n", b"400"),
        (b"get /metrics HTTP/1.1\r\n\r\n", b"400"),
        (b"GET metrics HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /metr\x00ics HTTP/1.1\r\n\r\n", b"400"),
        (b"GET http://elsewhere/metrics HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /" + b"a" * 1000 + b" HTTP/1.1\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 3 + b"\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * REQUEST_BYTES_MAX, b"431"),
        (b"\xff" * (1 << 20), b"431"),
        (b"GET /healthz HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /healthz HTTP/1.1\r\nContent-Length: 9\r\n\r\nwhatever", b"200"),
        (b"GET /healthz HTTP/1.1\r\n\r\n" * 50, b"200"),
    ],
)
def test_malformed_http_is_answered_once(shared: DaemonProcess, sent: bytes, status: bytes) -> None:
    """A port scan, or a browser, would end the daemon or fill its log."""
    lines = shared.log.read_text().count("\n")
    reply = exchange(port_of(shared), sent)
    assert reply.count(b"HTTP/1.1 ") == 1 or (not reply and len(sent) > REQUEST_BYTES_MAX * 2)
    assert not reply or reply.startswith(b"HTTP/1.1 " + status)
    assert fetch(port_of(shared), "/healthz")[1] == "ok\n"
    assert shared.log.read_text().count("\n") == lines


@pytest.mark.slow
def test_request_sent_byte_by_byte_is_answered(shared: DaemonProcess) -> None:
    """A request split by the network would not be understood."""
    with socket.create_connection(("127.0.0.1", port_of(shared)), WAIT_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n":
            sock.send(bytes([byte]))
        # A client that has sent everything, and closes its half first.
        sock.shutdown(socket.SHUT_WR)
        assert read_until_closed(sock).endswith(b"\r\n\r\nok\n")


@pytest.mark.slow
def test_client_that_keeps_sending_is_closed_after_the_reply(shared: DaemonProcess) -> None:
    """It would be reset before it has read the reply, or be read from indefinitely."""
    with socket.create_connection(("127.0.0.1", port_of(shared)), WAIT_S) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert read_until_closed(sock).endswith(b"ok\n")
        for _ in range(10):
            sock.sendall(b"more")
        # Socket buffers hold a few MiB, and nothing reads what comes after.
        with pytest.raises(ConnectionError):
            sock.sendall(bytes(64 << 20))


@pytest.mark.slow
def test_slow_http_clients_do_not_block_scrapes_or_engines(shared: DaemonProcess) -> None:
    """A few silent connections would stop scraping, or hold up engines."""
    port = port_of(shared)
    client = shared.client()
    with contextlib.ExitStack() as opened:
        lazy = [
            opened.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
            for _ in range(2 * CONNECTIONS_MAX)
        ]
        for number, sock in enumerate(lazy):
            with contextlib.suppress(ConnectionError):
                # Half send a request and read nothing, half do not finish their request.
                sock.sendall(b"GET /v1/status HTTP/1.1\r\n" + b"\r\n" * (number % 2))
        assert "host" in client.status()

        def can_scrape() -> bool:
            with contextlib.suppress(OSError, http.client.HTTPException):
                return fetch(port, "/healthz")[1] == "ok\n"
            return False

        wait_until(can_scrape, WAIT_S, "lazy clients keep their places")
        for sock in lazy:
            read_until_closed(sock)  # Each has been closed.
    client.close()


@pytest.mark.slow
def test_admin_serves_on_a_unix_socket(tmp_path: Path) -> None:
    """Where loopback is shared, metrics could not be kept from other users."""
    path = tmp_path / "admin.sock"
    storage = f'[admin]\nlisten = "{path}"\n'
    with DaemonProcess(tmp_path / "tierd", capacity="16MiB", storage=storage):
        assert stat.S_IMODE(os.stat(path).st_mode) & 0o007 == 0
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(WAIT_S)
            sock.connect(str(path))
            sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert read(read_until_closed(sock).partition(b"\r\n\r\n")[2].decode())
    assert not path.exists()


def counters(families: dict[str, Family]) -> dict[tuple[object, ...], float]:
    """All series that may only grow."""
    return {
        (name, *key): value
        for name, family in families.items()
        for key, value in family.samples.items()
        if family.kind != "gauge"
    }


@pytest.mark.slow
def test_counters_follow_real_traffic_and_never_decrease(tmp_path: Path) -> None:
    """A rate over a counter that goes down, or does not go up, is a wrong graph."""
    server = RedisServer(tmp_path / "redis")
    # Write through: backups on eviction would come at an unknown time.
    keys = {"write_policy": "write_through", "deadline_ms": 5000, "slow_ms": 5000, "probe_ms": 50}
    file = {"path": str(tmp_path / "store"), "capacity": "64MiB", "reserve_free": "0"}
    redis = {**server.options(), "name": 'a "b"', "timeout_ms": 5000}
    storage = table("file", {**file, **keys}) + table("redis", {**redis, **keys})
    space = namespace(BLOCK_BYTES)
    with (
        server,
        DaemonProcess(tmp_path / "tierd", capacity="4MiB", storage=storage + ADMIN) as daemon,
        contextlib.closing(daemon.client()) as client,
    ):
        handle = client.register(space)
        for name in ("file", 'a "b"'):
            daemon.wait_tier(name, "ready")  # Blocks stored earlier are not backed up to it.
        port = port_of(daemon)
        last: dict[tuple[object, ...], float] = {}

        def fetch_families() -> dict[str, Family]:
            nonlocal last
            families = metrics(port)
            now = counters(families)
            assert now.keys() >= last.keys()
            assert all(now[key] >= value for key, value in last.items())
            last = now
            return families

        for number in range(60):
            hashes, parents = chain(32, number)
            blocks = [(h, p, payload(space, h)) for h, p in zip(hashes, parents, strict=True)]
            client.put(handle, blocks)
            fetch_families()
            daemon.wait_backed_up()
        assert len(client.get(handle, chain(32, 0)[0], 5000)) == 32
        daemon.wait_backed_up()
        status: dict = client.status()

        def caught_up() -> bool:
            return fetch_families()["tierd_uptime_seconds"].value() >= float(status["uptime_s"])

        wait_until(caught_up, WAIT_S, "the scrape stays behind the status")
        families = fetch_families()
        shown = families["tierd_tier_written_blocks_total"]
        for tier in status["storage"]:
            for outcome in ("stored", "present", "refused", "error"):
                counted = tier["counters"][f"put_{outcome}_total"]
                assert shown.value(tier=tier["name"], outcome=outcome) == counted
        assert shown.value(tier='a "b"', outcome="stored") > 0
        durations = families["tierd_tier_call_duration_seconds"].samples
        calls = families["tierd_tier_calls_total"].value(tier="file", operation="put")
        assert calls == durations["_count", (("operation", "put"), ("tier", "file"))] > 0
        moved = families["tierd_tier_moved_bytes_total"].value(tier="file", direction="read")
        assert moved == 32 * BLOCK_BYTES

        # A tier fails and recovers.
        def breaker(state: str) -> float:
            return fetch_families()["tierd_tier_breaker_state"].value(
                tier='a "b"', direction="write", state=state
            )

        assert breaker("closed") == 1
        server.kill()
        more = iter(range(1000, 2000))

        def tripped() -> bool:
            hashes, parents = chain(4, next(more))
            blocks = [(h, p, payload(space, h)) for h, p in zip(hashes, parents, strict=True)]
            client.put(handle, blocks)
            return breaker("open") == 1

        wait_until(tripped, WAIT_S, "the scrape does not show the open breaker")
        families = fetch_families()
        assert breaker("closed") == 0
        assert families["tierd_tier_state"].value(tier='a "b"', state="failing") == 1
        assert families["tierd_tier_state"].value(tier="file", state="ready") == 1
        assert (
            families["tierd_tier_breaker_opened_total"].value(tier='a "b"', direction="write") >= 1
        )
        assert fetch(port, "/readyz")[1] == fetch(port, "/healthz")[1] == "ok\n"
        server.start()
        # Half open until a real batch has succeeded.
        wait_until(lambda: not tripped() and breaker("closed"), WAIT_S, "the tier is not back")


@pytest.mark.slow
def test_readyz_fails_while_stopping(tmp_path: Path) -> None:
    """Engines would be sent to a daemon that is about to end, or the last scrape be lost."""
    with RedisServer(tmp_path / "redis") as server:
        options = {
            **server.options(),
            # The stop lasts until the server continues.
            "deadline_ms": 60_000,
            "slow_ms": 60_000,
            "timeout_ms": 60_000,
        }
        storage = table("redis", options) + ADMIN
        daemon = DaemonProcess(
            tmp_path / "tierd",
            capacity="16MiB",
            storage=storage,
            extra="drain_timeout_ms = 600000",
        )
        with daemon, contextlib.closing(daemon.client()) as client:
            daemon.wait_tier("redis", "ready")  # No block is written to it before.
            server.pause()
            space = namespace(BLOCK_BYTES)
            handle = client.register(space)
            hashes, parents = chain(4)
            client.put(
                handle,
                [(h, p, payload(space, h)) for h, p in zip(hashes, parents, strict=True)],
            )
            port = port_of(daemon)
            assert daemon.process is not None
            daemon.process.terminate()
            wait_until(lambda: fetch(port, "/readyz")[1] == "stopping\n", WAIT_S, "still ready")
            assert read(fetch(port, "/metrics")[1])["tierd_backlog_blocks"].value() == 4
            server.resume()
            assert daemon.process.wait(WAIT_S) == 0
