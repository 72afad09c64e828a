"""The daemon's life: take the socket, open the tiers, serve, drain, leave."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import resource
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import uvloop

from tierd import __version__, logs
from tierd.clock import SystemClock
from tierd.config import Config, StorageConfig
from tierd.core.l2.sharing import segment_bytes
from tierd.daemon.http.admin import Admin, Phase
from tierd.daemon.http.health import STUCK_S, Health
from tierd.daemon.jobs.hotset import Snapshots, state_directory
from tierd.daemon.l2.pressure import ThisMachine
from tierd.daemon.l3.backends import make_backend
from tierd.daemon.l3.epochs import MarksFile, Times
from tierd.daemon.l3.tier import StorageTier, opened
from tierd.daemon.lifecycle.listening import EngineSocket, admin_socket, engine_socket
from tierd.daemon.lifecycle.reload import Reloader
from tierd.daemon.lifecycle.service import ServiceManager
from tierd.daemon.lifecycle.telling import Teller, extension
from tierd.daemon.node import Node
from tierd.daemon.options import NodeOptions
from tierd.daemon.session.server import Server, default_allow_uids
from tierd.errors import ConfigError
from tierd.limits import shortfalls
from tierd.memory.placement import Placement, find_node
from tierd.sizes import about

log = logging.getLogger("tierd")

WORKER_THREADS: Final = 2
"""Threads for checksums and page faults; storage backends have their own."""

WORKER_NICE: Final = 10
"""With both cores full, threads at the loop's own priority push its p99 to 3-10 ms."""

EXIT_GRACE_S: Final = 5.0
"""After drain and snapshot: an I/O that never returns must not keep a stop waiting for ever."""

WATCHDOG_SHARE: Final = 1 / 3
"""Of the watchdog's time, how long a call off the loop may take: then there is time to say so."""


class Signals:
    """What signals ask for, from before the configuration is read to the end."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.stop_now = asyncio.Event()
        """Asked to stop again, while it is being drained."""
        self.reload = asyncio.Event()
        # Else it would end a process that has no loop yet; what it asks for is done later.
        signal.signal(signal.SIGHUP, lambda *_: self.reload.set())

    def take(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take signals on the loop from now on."""
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end)
        loop.add_signal_handler(signal.SIGHUP, self.reload.set)

    def _end(self) -> None:
        (self.stop_now if self.stop.is_set() else self.stop).set()


def serve(load: Callable[[], Config], environ: MutableMapping[str, str]) -> int:
    """Run until SIGTERM or SIGINT; the exit status. Raises ConfigError before it has started.

    `load` reads the configuration and judges it, and again at each SIGHUP. `environ` loses what a
    service manager has put into it for this process alone.
    """
    signals = Signals()
    manager = ServiceManager.from_environ(environ)
    manager.tell("STATUS=starting", extension())
    # The stacks of all threads, should a service manager lose its patience (SIGABRT).
    faulthandler.enable()
    try:
        config = load()
        state = state_directory(config.state_dir, environ)
        return _serve(config, signals, manager, load, state)
    except ConfigError as error:
        manager.tell(f"STATUS=refused to start: {error}")
        raise


def _serve(
    config: Config,
    signals: Signals,
    manager: ServiceManager,
    load: Callable[[], Config],
    state: Path | None,
) -> int:
    logs.configure(config.log)
    placement = Placement(huge_pages=config.host.huge_pages, node=find_node(config.host.numa_node))
    # Four descriptors a segment (two files, which Python's mmap duplicates): the usual soft
    # limit of 1024 would end at 64 GiB.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    tiers = [_make_tier(entry, state) for entry in config.storage]
    with (
        engine_socket(Path(config.socket), manager) as where,
        admin_socket(config.admin) as admin_listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        life = _Life(config, signals, manager, load, state)
        return runner.run(life.run(placement, tiers, where, admin_listener))


class _Life:
    """From a configuration that is sound to the end."""

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
        self._teller: Teller

    async def run(
        self,
        placement: Placement,
        tiers: list[StorageTier],
        where: EngineSocket,
        admin_listener: socket.socket | None,
    ) -> int:
        """Open, serve and close; the exit status."""
        self._signals.take(asyncio.get_running_loop())
        config, clock, machine = self._config, SystemClock(), ThisMachine()
        with ThreadPoolExecutor(WORKER_THREADS, "tierd-worker", initializer=_yield_cpu) as executor:
            options = NodeOptions.of(config, secrets.token_bytes(8), placement)
            self._node = node = Node(
                options,
                tiers=tiers,
                clock=clock,
                manager=self._manager,
                executor=executor,
                machine=machine,
            )
            node.lives.begin()
            for shortfall in shortfalls(
                config.host.capacity,
                segment_bytes(config.host.capacity),
                missing_bytes=config.host.capacity - node.host.allocated_bytes,
                available_bytes=machine.sample().available_bytes,
            ):
                log.warning("%s", shortfall)
            if self._state is not None:
                node.snapshots = Snapshots(
                    self._state, config.hotset, node.host, clock, node.counters
                )
                node.snapshots.open()
            allowed = frozenset(config.allow_uids) or default_allow_uids()
            self._server = Server(node, allowed)
            where.open_to(allowed)
            health = Health(node.memory, _patience_s(self._manager.watchdog_us))
            self._admin = Admin(node, health)
            self._teller = Teller(self._manager, node, self._admin, health)
            try:
                async with (
                    self._teller.telling(),
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
        # What exists now lives as long as the process: the collector need not walk it again.
        gc.collect()
        gc.freeze()
        log.info(
            "tierd %s serves on %s: host capacity %s, storage: %s",
            __version__,
            config.socket,
            about(config.host.capacity),
            ", ".join(tier.name for tier in node.tiers) or "none (L2 only)",
        )
        self._teller.ready()
        if node.snapshots is not None:
            node.spawn(node.snapshots.run, "hotset")
        reloading = asyncio.create_task(self._reload_for_ever(), name="reload")
        try:
            await self._signals.stop.wait()
        finally:
            reloading.cancel()
        await self._stop()

    async def _reload_for_ever(self) -> None:
        reloader = Reloader(self._config, self._load, self._node, self._server)
        while True:
            await self._signals.reload.wait()
            self._signals.reload.clear()
            # A bug in it is counted, and must not keep the next one from being tried.
            task = self._node.spawn(partial(self._reload, reloader), "reload")
            await asyncio.wait([task])

    async def _reload(self, reloader: Reloader) -> None:
        self._manager.tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            self._teller.refused = await reloader.reload()
        finally:
            self._teller.ready()

    async def _stop(self) -> None:
        node, budget_s = self._node, self._config.drain_timeout_ms / 1000
        self._admin.phase = Phase.STOPPING
        snapshots, loop = node.snapshots, asyncio.get_running_loop()
        drained_s = loop.time() + budget_s
        leave_s = max(budget_s, snapshots.stop_s if snapshots else 0.0) + EXIT_GRACE_S
        self._teller.stopping(leave_s)
        log.info("stopping: %d blocks wait for backup, at most %.1f s", node.backlog(), budget_s)
        _exit_after(leave_s)
        self._server.stop_listening()
        finishing = None if snapshots is None else node.spawn(snapshots.finish, "hotset")
        left = await node.drain(budget_s, self._signals.stop_now)
        if finishing is not None:
            if self._signals.stop_now.is_set():
                finishing.cancel()
            await asyncio.wait([finishing])
        # A snapshot that was soon written gives what hangs no more time.
        _exit_after(max(0.0, drained_s - loop.time()) + EXIT_GRACE_S)
        if left:
            log.warning("stopping with %d blocks that were not backed up", left)
        self._server.close()
        log.info("stopped")


def _patience_s(watchdog_us: int) -> float:
    """How long a call off the loop may take before the daemon counts as hung."""
    return min(STUCK_S, watchdog_us / 1e6 * WATCHDOG_SHARE) if watchdog_us else STUCK_S


def _yield_cpu() -> None:
    """Put the calling thread behind the loop and the engine when cores are short."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WORKER_NICE)


def _exit_after(seconds: float) -> None:
    """End the process if it has not ended by itself by then."""

    def give_up() -> None:
        log.error("an I/O operation did not return; leaving without it")
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()


def _make_tier(entry: StorageConfig, state: Path | None) -> StorageTier:
    backend = make_backend(entry)
    tier = StorageTier(entry, backend, now_s=time.perf_counter, times=Times.real())
    if state is not None and backend.shared:
        tier.epochs.remember(MarksFile(state, f"{entry.type} {backend.place}"))
    return tier
