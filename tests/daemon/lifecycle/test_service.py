"""The daemon and its service manager: notifications, passed sockets, watchdog and signals."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import blocks
from tests.support.daemon_process import DaemonProcess
from tests.support.servers.redis import RedisServer
from tests.support.service_manager import ServiceManager as FakeManager
from tests.support.tiers import bench as tier_bench
from tests.support.tiers.scene import table
from tests.support.traffic import wait_until
from tierd.client import Client
from tierd.clock import Clock, SystemClock
from tierd.daemon.http.admin import Admin, Phase
from tierd.daemon.http.health import Health
from tierd.daemon.jobs.hotset import FILE, STOP_S
from tierd.daemon.lifecycle.listening import engine_socket
from tierd.daemon.lifecycle.notifier import LINE_CHARS_MAX, Notifier, status_line
from tierd.daemon.lifecycle.serve import EXIT_GRACE_S, Signals
from tierd.daemon.lifecycle.service import ServiceManager
from tierd.daemon.node import Node
from tierd.daemon.options import NodeOptions
from tierd.errors import ConfigError

WAIT_S = 20.0


@contextmanager
def notify_socket(directory: Path, **keys: str) -> Iterator[tuple[ServiceManager, socket.socket]]:
    """A manager, and the socket that receives its notifications."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(directory / "notify"))
        ear.settimeout(WAIT_S)
        environ = {"NOTIFY_SOCKET": str(directory / "notify"), **keys}
        manager = ServiceManager.from_environ(environ)
        assert not environ, "a child would notify in our name"
        try:
            yield manager, ear
        finally:
            manager.close()


# --- notifications ----------------------------------------------------------------------


def test_notify_socket_of_another_process_is_ignored(tmp_path: Path) -> None:
    """A tierd started by hand from a service's shell would take over that service's watchdog, or
    close descriptors that it does not own."""
    other = str(os.getpid() + 1)
    with notify_socket(tmp_path, WATCHDOG_USEC="2000000", WATCHDOG_PID=other) as (manager, _):
        assert manager.watchdog_us == 0
    passed = {"LISTEN_PID": other, "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x"}
    assert not ServiceManager.from_environ(passed).take_kept()
    ours = {"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}
    assert ServiceManager.from_environ(ours).watchdog_us == 2_000_000
    assert not ServiceManager.from_environ({}).present


def test_notifications_are_retried_when_the_manager_is_busy(tmp_path: Path) -> None:
    """A manager busy starting a machine's services would never learn that tierd is ready, and end
    it; or the loop would wait for the manager, and engines for the loop."""
    with notify_socket(tmp_path) as (manager, ear):
        count = 2000
        for number in range(count):
            manager.notify(f"STATUS={number}")
        got: list[bytes] = []
        while len(got) < count:
            got.append(ear.recv(4096))
            manager.flush()
        assert got == [f"STATUS={number}".encode() for number in range(count)]


# --- sockets ----------------------------------------------------------------------------


def passed_listener(path: Path) -> tuple[str, int]:
    """Create a listening socket as a manager passes it; returns its name and descriptor."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        return "tierd.socket", os.dup(listener.fileno())


def test_passed_socket_is_used_and_not_removed(tmp_path: Path) -> None:
    """Engines that connect between two incarnations would be refused instead of waiting."""
    path = tmp_path / "tierd.sock"
    other, ours = passed_listener(tmp_path / "other.sock"), passed_listener(path)
    manager = ServiceManager(passed=[other, ours])
    with engine_socket(path, manager) as (listener, own):
        assert own is None, "its mode is the unit's"
        assert listener.getsockname() == str(path)
        with pytest.raises(ConfigError, match="another tierd"), engine_socket(path, manager):
            pass
    assert path.is_socket()


def test_passed_socket_with_another_path_is_refused(tmp_path: Path) -> None:
    """Engines would connect to a socket on which no daemon listens."""
    passed = passed_listener(tmp_path / "passed.sock")
    manager = ServiceManager(passed=[passed])
    with (
        pytest.raises(ConfigError) as caught,
        engine_socket(tmp_path / "tierd.sock", manager),
    ):
        pass
    assert "passed.sock" in str(caught.value)
    assert "tierd.sock" in str(caught.value)


# --- the status line --------------------------------------------------------------------


STATUS: dict[str, object] = {
    "host": {"used_bytes": int(41.2 * (1 << 30)), "capacity_bytes": 64 << 30},
    "counters": {"requested_blocks_total": 400, "loaded_blocks_total": 312},
    "storage": [{"name": "file", "state": "ready"}, {"name": "s3", "state": "failing"}],
}


def test_status_line() -> None:
    """`systemctl status` would lack the facts that an operator looks for first."""
    line = status_line(Phase.SERVING, STATUS, 0, "")
    assert line == (
        "serving: L2 41.2 GiB of 64 GiB (312 hits of 400 blocks = 78 %), file ready, s3 failing"
    )
    assert status_line(Phase.STOPPING, STATUS, 7, "").startswith("stopping: 7 blocks wait")
    quiet = {**STATUS, "counters": {}, "storage": []}
    assert status_line(Phase.STARTING, quiet, 0, "") == "starting: L2 41.2 GiB of 64 GiB"
    refused = status_line(Phase.SERVING, STATUS, 0, "bad\nkey " + "x" * 10_000)
    assert refused.startswith("serving: RELOAD REFUSED (bad key")
    assert "\n" not in refused
    assert len(refused) == LINE_CHARS_MAX


class Watch:
    """A clock set by the test."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_ns(self) -> int:
        return int(self.now_s * 1e9)


def node(executor: ThreadPoolExecutor | None = None, clock: Clock | None = None) -> Node:
    return Node(
        NodeOptions(
            capacity_bytes=64 << 20,
            segment_bytes=64 << 10,
            lease_ttl_ms=1000,
            epoch=bytes(8),
        ),
        tiers=[],
        clock=clock or SystemClock(),
        executor=executor,
    )


def test_looking_for_passed_sockets_keeps_other_descriptors() -> None:
    """Each start would leak a descriptor per kept segment, until none are left."""
    fds = [os.memfd_create("kept") for _ in range(5)]
    manager = ServiceManager(passed=[("kept", fd) for fd in fds])
    before = len(os.listdir("/proc/self/fd"))
    assert manager.take_listeners() == []
    assert len(os.listdir("/proc/self/fd")) == before
    assert [fd for _, fd in manager.take_kept()] == fds
    for fd in fds:
        os.close(fd)


async def test_slow_start_keeps_extending_its_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start longer than TimeoutStartSec would be killed and retried indefinitely."""
    for pause in ("HURRY_S", "STATUS_S"):
        monkeypatch.setattr(f"tierd.daemon.lifecycle.notifier.{pause}", 0.005)
    made = node()
    admin, health = Admin(made), Health(made.threads)
    with notify_socket(tmp_path) as (manager, ear):
        ear.setblocking(False)
        loop = asyncio.get_running_loop()

        async def asked() -> bool:
            return b"EXTEND_TIMEOUT_USEC=" in await loop.sock_recv(ear, 4096)

        async with asyncio.timeout(WAIT_S), Notifier(manager, made, admin, health).notifying():
            assert all([await asked() for _ in range(5)])
            admin.phase = Phase.SERVING
            while await asked():
                pass
    made.memory.arena.close()


# --- watchdog ---------------------------------------------------------------------------


async def test_hung_thread_stops_watchdog_pings_until_it_returns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tierd that can neither verify nor back up a block would count as healthy indefinitely, or
    be ended without a logged reason."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("tierd.daemon.http.health.PROBE_S", 0.005)
    with (
        notify_socket(tmp_path, WATCHDOG_USEC="40000") as (manager, ear),
        ThreadPoolExecutor(2) as executor,
    ):
        ear.setblocking(False)
        watch = Watch()
        made = node(executor, watch)
        health = Health(made.threads, limit_s=30)
        admin = Admin(made, health)
        notifier = Notifier(manager, made, admin, health)
        hung, go_on, loop = threading.Semaphore(0), threading.Event(), asyncio.get_running_loop()

        def hang() -> None:
            hung.release()
            go_on.wait()

        def pings() -> int:
            count = 0
            while True:
                try:
                    count += b"WATCHDOG=1" in ear.recv(4096)
                except BlockingIOError:
                    return count

        async def until(condition: Callable[[], object]) -> None:
            async with asyncio.timeout(WAIT_S):
                while not condition():
                    await asyncio.sleep(0.005)

        try:
            async with notifier.notifying():
                await until(pings)
                assert b" 200 " in admin.answer(b"GET /healthz HTTP/1.1")
                for _ in range(2):
                    loop.run_in_executor(executor, hang)
                for _ in range(2):
                    await until(lambda: hung.acquire(blocking=False))
                await until(lambda: made.threads._began_ns)
                watch.now_s += 30
                assert not health.trouble
                watch.now_s += 1
                assert "is away for 31 s" in health.trouble
                assert b" 503 " in admin.answer(b"GET /healthz HTTP/1.1")
                await until(lambda: caplog.records)
                pings()
                for _ in range(3):
                    notifier.feed()
                assert not pings()
                go_on.set()
                await until(pings)
                assert not health.trouble
        finally:
            go_on.set()
            made.memory.arena.close()
    levels = [record.levelname for record in caplog.records if record.name == "tierd"]
    assert levels == ["ERROR", "WARNING"], "one line when they end, one when they come back"


def test_hanging_tier_does_not_stop_watchdog_pings() -> None:
    """An outage of a storage server would restart the daemon again and again."""

    async def test(bench: tier_bench.Bench) -> None:
        bench.raw[0].hangs = {"get", "put", "contains"}
        bench.store(8, "hangs")
        health = Health(bench.node.threads)
        probing = asyncio.create_task(health.probe())
        for _ in range(100):
            await asyncio.sleep(1)
            assert not health.trouble
        probing.cancel()

    tier_bench.run(test, tier_bench.config("hung"))


# --- signals ----------------------------------------------------------------------------


async def test_signals_are_handled_before_and_during_the_loop() -> None:
    """A reload requested while tierd starts would end it, or a second stop request would not cut
    the drain short."""
    before = signal.getsignal(signal.SIGHUP)
    try:
        signals = Signals()
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.reload.is_set()
        loop = asyncio.get_running_loop()
        signals.take(loop)
        for event in (signals.stop, signals.stop_now):
            assert not event.is_set()
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(WAIT_S):
                await event.wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGHUP, before)


# --- a whole run ------------------------------------------------------------------------


@pytest.mark.slow
def test_service_manager_is_notified_from_start_to_stop(tmp_path: Path) -> None:
    """`systemctl start` would return too early or never, and a unit be restarted for nothing."""
    state = tmp_path / "state"
    daemon = DaemonProcess(tmp_path / "tierd", storage="", extra=f'state_dir = "{state}"')
    with FakeManager(tmp_path / "manager") as manager, daemon.log.open("ab") as log:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(daemon.socket)
        listener.listen()
        manager.listeners.append(("tierd.socket", listener))
        # It connects before the daemon runs, and waits for it.
        client = Client(daemon.socket, name="early", call_timeout_ms=int(WAIT_S * 1000))
        arguments = ["-m", "tierd.cli.main", "serve", "--config", str(daemon.config)]
        process = manager.start(arguments, log=log.fileno(), env={"WATCHDOG_USEC": "2000000"})
        try:
            assert client.status()["uptime_s"] is not None
            manager.wait_for("READY")
            manager.wait_for("WATCHDOG", "1")
            started = [key for state in manager.states for key in state]
            assert started.index("EXTEND_TIMEOUT_USEC") < started.index("READY")
            manager.forget_states()
            process.send_signal(signal.SIGHUP)
            manager.wait_for("READY")
            told = [state for state in manager.states if "WATCHDOG" not in state]
            assert int(told[0]["MONOTONIC_USEC"]) > 0
            assert "RELOADING" in told[0]
            sound = daemon.config.read_text()
            for text, said in (("bogus = 1\n" + sound, True), (sound, False)):
                daemon.config.write_text(text)
                manager.forget_states()
                process.send_signal(signal.SIGHUP)
                manager.wait_for("READY")
                (line,) = [state["STATUS"] for state in manager.states if "READY" in state]
                assert ("RELOAD REFUSED" in line and "bogus is not a key" in line) is said
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
            manager.wait_for("STOPPING")
            (stopping,) = [each for each in manager.states if "STOPPING" in each]
            # Otherwise the manager would end it while it writes the hot set.
            assert int(stopping["EXTEND_TIMEOUT_USEC"]) >= (STOP_S + EXIT_GRACE_S) * 1e6
            assert (state / FILE).exists()
        finally:
            process.kill()
            process.wait()
            client.close()
        assert Path(daemon.socket).is_socket(), "the next daemon's clients would find nothing"


@pytest.mark.slow
def test_second_signal_ends_the_drain(tmp_path: Path) -> None:
    """An operator would wait for a tier that hangs, or have to kill tierd."""
    with RedisServer(tmp_path / "redis") as server:
        options = {
            **server.options(),
            "write_policy": "write_back",
            "deadline_ms": 60_000,
            "slow_ms": 60_000,
            "timeout_ms": 60_000,
        }
        daemon = DaemonProcess(
            tmp_path / "tierd",
            storage=table("redis", options),
            extra="drain_timeout_ms = 600000",
        )
        with daemon:
            daemon.wait_tier("redis", "ready")
            with_client = daemon.client()
            handle = with_client.register(blocks.namespace(4096))
            hashes, parents = blocks.chain(4)
            payloads = [blocks.payload(handle.namespace, h) for h in hashes]
            assert all(with_client.put(handle, [*zip(hashes, parents, payloads, strict=True)]))
            server.pause()
            try:
                process = daemon.process
                assert process is not None
                process.send_signal(signal.SIGTERM)
                wait_until(lambda: "stopping:" in daemon.log.read_text(), WAIT_S, "a stop")
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(0.5)
                process.send_signal(signal.SIGTERM)
                process.wait(WAIT_S)
            finally:
                server.resume()
                with_client.close()
        assert "4 blocks were not backed up" in daemon.log.read_text()
