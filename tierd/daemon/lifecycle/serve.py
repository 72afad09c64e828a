"""Runs the daemon: takes the sockets, opens the tiers, serves, drains and stops."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, MutableMapping
from functools import partial
from pathlib import Path
from typing import Final

import uvloop

from tierd import __version__, logs
from tierd.config import Config
from tierd.daemon.http.admin import Admin, Phase
from tierd.daemon.http.health import STUCK_S, Health
from tierd.daemon.jobs.hotset import state_directory
from tierd.daemon.l3.tier import StorageTier, opened
from tierd.daemon.lifecycle.assembly import assembled, make_tiers
from tierd.daemon.lifecycle.listening import EngineSocket, admin_socket, engine_socket
from tierd.daemon.lifecycle.notifier import Notifier, extension
from tierd.daemon.lifecycle.reload import Reloader
from tierd.daemon.lifecycle.service import ServiceManager
from tierd.daemon.node import Node
from tierd.daemon.session.server import Server, default_allow_uids
from tierd.errors import ConfigError
from tierd.sizes import about

log = logging.getLogger("tierd")

EXIT_GRACE_S: Final = 5.0
"""Time to stop after drain and snapshot; then the process exits even if an I/O has not returned."""

WATCHDOG_SHARE: Final = 1 / 3
"""Share of the watchdog's time that a call in a thread may take: the rest is for reporting it."""


class Signals:
    """Requests by signal, from before the configuration is read until the end."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.stop_now = asyncio.Event()
        """A second stop signal, which ends the drain."""
        self.reload = asyncio.Event()
        # SIGHUP would end a process that has no loop yet. The reload happens once it has one.
        signal.signal(signal.SIGHUP, lambda *_: self.reload.set())

    def take(self, loop: asyncio.AbstractEventLoop) -> None:
        """Receive signals on the loop from now on."""
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end)
        loop.add_signal_handler(signal.SIGHUP, self.reload.set)

    def _end(self) -> None:
        (self.stop_now if self.stop.is_set() else self.stop).set()


def serve(load: Callable[[], Config], environ: MutableMapping[str, str]) -> int:
    """Run until SIGTERM or SIGINT; returns the exit status. Raises ConfigError before the start.

    `load` reads and checks the configuration, and does so again at each SIGHUP. The service
    manager's variables for this process are removed from `environ`.
    """
    signals = Signals()
    manager = ServiceManager.from_environ(environ)
    manager.notify("STATUS=starting", extension())
    # Prints the stacks of all threads when the watchdog ends the process with SIGABRT.
    faulthandler.enable()
    try:
        config = load()
        state = state_directory(config.state_dir, environ)
        return _serve(config, signals, manager, load, state)
    except ConfigError as error:
        manager.notify(f"STATUS=refused to start: {error}")
        raise


def _serve(
    config: Config,
    signals: Signals,
    manager: ServiceManager,
    load: Callable[[], Config],
    state: Path | None,
) -> int:
    logs.configure(config.log)
    # A segment takes four descriptors (two files, which Python's mmap duplicates): the usual soft
    # limit of 1,024 would end at 64 GiB.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    tiers = make_tiers(config, state)
    with (
        engine_socket(Path(config.socket), manager) as where,
        admin_socket(config.admin) as admin_listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        incarnation = _Incarnation(config, signals, manager, load, state)
        return runner.run(incarnation.run(tiers, where, admin_listener))


class _Incarnation:
    """The daemon from a checked configuration to its end."""

    def __init__(
        self,
        config: Config,
        signals: Signals,
        manager: ServiceManager,
        load: Callable[[], Config],
        state: Path | None,
    ) -> None:
        self._config = config
        self._state = state
        self._signals = signals
        self._manager = manager
        self._load = load
        self._node: Node
        self._server: Server
        self._admin: Admin
        self._notifier: Notifier

    async def run(
        self,
        tiers: list[StorageTier],
        where: EngineSocket,
        admin_listener: socket.socket | None,
    ) -> int:
        """Open, serve and close; returns the exit status."""
        self._signals.take(asyncio.get_running_loop())
        config = self._config
        with assembled(config, tiers, self._manager, self._state) as node:
            self._node = node
            allowed = frozenset(config.allow_uids) or default_allow_uids()
            self._server = Server(node, allowed)
            where.open_to(allowed)
            health = Health(node.threads, _thread_limit_s(self._manager.watchdog_us))
            self._admin = Admin(node, health)
            self._notifier = Notifier(self._manager, node, self._admin, health)
            try:
                async with (
                    self._notifier.notifying(),
                    self._admin.serving(admin_listener),
                    opened(tiers),
                ):
                    await node.run(lambda: self._serve(where))
            finally:
                node.close()
        return 0

    async def _serve(self, where: EngineSocket) -> None:
        node, config = self._node, self._config
        self._server.listen(where)
        self._admin.phase = Phase.SERVING
        # All objects so far live as long as the process: exempt them from garbage collection.
        gc.collect()
        gc.freeze()
        log.info(
            "tierd %s serves on %s: host capacity %s, storage: %s",
            __version__,
            config.socket,
            about(config.host.capacity),
            ", ".join(tier.name for tier in node.tiers) or "none (L2 only)",
        )
        self._notifier.ready()
        if node.snapshots is not None:
            node.spawn(node.snapshots.run, "hotset")
        reloading = asyncio.create_task(self._reload_on_request(), name="reload")
        try:
            await self._signals.stop.wait()
        finally:
            reloading.cancel()
        await self._stop()

    async def _reload_on_request(self) -> None:
        reloader = Reloader(self._config, self._load, self._node, self._server)
        while True:
            await self._signals.reload.wait()
            self._signals.reload.clear()
            # As a task of the node: a bug is counted, and the next SIGHUP is still served.
            task = self._node.spawn(partial(self._reload, reloader), "reload")
            await asyncio.wait([task])

    async def _reload(self, reloader: Reloader) -> None:
        self._manager.notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            self._notifier.refused = await reloader.reload()
        finally:
            self._notifier.ready()

    async def _stop(self) -> None:
        node, budget_s = self._node, self._config.drain_timeout_ms / 1000
        self._admin.phase = Phase.STOPPING
        snapshots, loop = node.snapshots, asyncio.get_running_loop()
        drained_s = loop.time() + budget_s
        leave_s = max(budget_s, snapshots.stop_s if snapshots else 0.0) + EXIT_GRACE_S
        self._notifier.stopping(leave_s)
        log.info("stopping: %d blocks wait for backup, at most %.1f s", node.backlog(), budget_s)
        _exit_after(leave_s)
        self._server.stop_listening()
        finishing = None if snapshots is None else node.spawn(snapshots.finish, "hotset")
        left = await node.drain(budget_s, self._signals.stop_now)
        if finishing is not None:
            if self._signals.stop_now.is_set():
                finishing.cancel()
            await asyncio.wait([finishing])
        # Time that the snapshot did not need does not extend the wait for a hanging I/O.
        _exit_after(max(0.0, drained_s - loop.time()) + EXIT_GRACE_S)
        if left:
            log.warning("stopping: %d blocks were not backed up", left)
        self._server.close()
        log.info("stopped")


def _thread_limit_s(watchdog_us: int) -> float:
    """How long a call in a thread may take before the daemon counts as hung."""
    return min(STUCK_S, watchdog_us / 1e6 * WATCHDOG_SHARE) if watchdog_us else STUCK_S


def _exit_after(seconds: float) -> None:
    """Exit with status 1 if the process has not ended after `seconds`."""

    def give_up() -> None:
        log.error("an I/O operation did not return within %.0f s: exiting without it", seconds)
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
