"""The daemon's life: take the socket, open the tiers, serve, drain, leave."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import gc
import importlib.metadata
import logging
import os
import resource
import secrets
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import uvloop

from tierd import __version__
from tierd.backend import Backend
from tierd.clock import SystemClock
from tierd.config import AdminConfig, Config, StorageConfig, backend_options
from tierd.daemon.admin import Admin, Phase, tcp_listener
from tierd.daemon.node import Node
from tierd.daemon.server import Server, default_allow_uids
from tierd.daemon.tier import StorageTier, opened
from tierd.errors import ConfigError
from tierd.memory.arena import check_capacity
from tierd.memory.placement import Placement, find_node
from tierd.storage.worker import WorkerBackend

log = logging.getLogger("tierd")

WORKER_THREADS: Final = 2
"""Threads for checksums and page faults; storage backends have their own."""

WORKER_NICE: Final = 10
"""With both cores full, threads at the loop's own priority push its p99 to 3-10 ms."""

EXIT_GRACE_S: Final = 5.0
"""After the drain budget: an I/O that never returns must not keep a stop waiting for ever."""


def serve(config: Config) -> int:
    """Run until SIGTERM or SIGINT; the exit status. Raises ConfigError before it has started."""
    check_capacity(config.host.capacity)
    placement = Placement(huge_pages=config.host.huge_pages, node=find_node(config.host.numa_node))
    # Four descriptors a segment (two files, which Python's mmap duplicates): the usual soft
    # limit of 1024 would end at 64 GiB.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    tiers = [_make_tier(entry) for entry in config.storage]
    with (
        listening_socket(Path(config.socket)) as listener,
        _admin_socket(config.admin) as admin_listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_main(config, placement, tiers, listener, admin_listener))


async def _main(
    config: Config,
    placement: Placement,
    tiers: list[StorageTier],
    listener: socket.socket,
    admin_listener: socket.socket | None,
) -> int:
    clock = SystemClock()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with ThreadPoolExecutor(WORKER_THREADS, "tierd-worker", initializer=_yield_cpu) as executor:
        node = Node(
            capacity_bytes=config.host.capacity,
            lease_ttl_ms=config.host.lease_ttl_ms,
            pin_share=config.host.pin_share,
            pin_max_s=config.host.pin_max_s,
            eviction=config.host.eviction.value,
            tiers=tiers,
            clock=clock,
            epoch=secrets.token_bytes(8),
            prefetch=config.prefetch,
            copy=config.copy,
            placement=placement,
            executor=executor,
        )
        allowed = frozenset(config.allow_uids) or default_allow_uids()
        server = Server(node, clock, allowed)
        admin = Admin(node)
        try:
            async with admin.serving(admin_listener), opened(tiers):
                await node.run(lambda: _serve(config, node, server, listener, admin, stop))
        finally:
            node.memory.arena.close()
    return 0


async def _serve(
    config: Config,
    node: Node,
    server: Server,
    listener: socket.socket,
    admin: Admin,
    stop: asyncio.Event,
) -> None:
    server.listen(listener)
    admin.phase = Phase.SERVING
    # What exists now lives as long as the process: the collector need not walk it again.
    gc.collect()
    gc.freeze()
    log.info(
        "tierd %s serves on %s: host capacity %.2f GiB, storage: %s",
        __version__,
        config.socket,
        config.host.capacity / (1 << 30),
        ", ".join(tier.name for tier in node.tiers) or "none (L2 only)",
    )
    await stop.wait()
    admin.phase = Phase.STOPPING
    budget_s = config.drain_timeout_ms / 1000
    log.info("stopping: %d blocks wait for backup, at most %.1f s", node.backlog(), budget_s)
    _exit_after(budget_s + EXIT_GRACE_S)
    server.stop_listening()
    left = await node.drain(budget_s)
    if left:
        log.warning("stopping with %d blocks that were not backed up", left)
    server.close()
    log.info("stopped")


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


def _make_tier(entry: StorageConfig) -> StorageTier:
    found = importlib.metadata.entry_points(group="tierd.backends")
    if entry.type not in found.names:
        raise ConfigError(
            f"storage.type {entry.type!r} is unknown; installed: {', '.join(sorted(found.names))}"
        )
    cls: type[Backend] = found[entry.type].load()
    options = backend_options(entry, cls.Options)
    try:
        raw = WorkerBackend(cls, options) if cls.in_worker else cls.from_options(options)
    except ConfigError as error:
        raise ConfigError(f"storage ({entry.name}): {error}") from error
    return StorageTier(entry, raw, now_s=time.perf_counter)


@contextlib.contextmanager
def _admin_socket(config: AdminConfig) -> Iterator[socket.socket | None]:
    """A listening socket for metrics and health, if one is configured. Raises ConfigError."""
    if not config.listen:
        yield None
    elif config.listen.startswith("/"):
        with listening_socket(Path(config.listen)) as listener:
            yield listener
    else:
        with tcp_listener(config) as listener:
            yield listener


@contextlib.contextmanager
def listening_socket(path: Path) -> Iterator[socket.socket]:
    """A listening socket at `path`, which no other tierd has; removed afterwards.

    A lock file beside it says who is alive, so that the socket that a killed daemon left
    is taken over and a living one's is not touched. Raises ConfigError.
    """
    if len(os.fsencode(path)) > 107:
        raise ConfigError(f"socket path {path} is longer than the 107 bytes that unix allows")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot use socket {path}: {error}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            raise ConfigError(
                f"another tierd (pid {holder}) serves on {path}: stop it or set another socket"
            ) from error
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        _remove_stale(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with listener:
            _bind(listener, path)
            try:
                yield listener
            finally:
                with contextlib.suppress(OSError):
                    path.unlink()
    finally:
        os.close(lock)


def _remove_stale(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{path} exists and is not a socket: remove it or set another socket")
        path.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(f"cannot replace stale socket {path}: {error}") from error


def _bind(listener: socket.socket, path: Path) -> None:
    old = os.umask(0o117)
    try:
        listener.bind(os.fspath(path))
        listener.listen(128)
    except OSError as error:
        why = "its directory is missing" if error.errno == errno.ENOENT else str(error)
        raise ConfigError(f"cannot listen on {path}: {why}") from error
    finally:
        os.umask(old)
