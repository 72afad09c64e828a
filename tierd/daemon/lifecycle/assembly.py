"""Builds a node and its storage tiers from a configuration, for this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tierd.clock import SystemClock
from tierd.config import Config, StorageConfig
from tierd.core.l2.sharing import segment_bytes
from tierd.daemon.jobs.hotset import Snapshots
from tierd.daemon.l2.pressure import ThisMachine
from tierd.daemon.l3.backends import make_backend
from tierd.daemon.l3.epochs import MarksFile, Times
from tierd.daemon.l3.tier import StorageTier
from tierd.daemon.lifecycle.service import ServiceManager
from tierd.daemon.node import Node
from tierd.daemon.options import NodeOptions
from tierd.limits import shortfalls
from tierd.memory.placement import Placement, find_node

log = logging.getLogger("tierd")

WORKER_THREADS: Final = 2
"""Threads for checksums and page faults; storage backends have their own."""

WORKER_NICE: Final = 10
"""With both cores full, threads at the loop's own priority push its p99 to 3-10 ms."""


def make_tiers(config: Config, state: Path | None) -> list[StorageTier]:
    """Make the storage tiers, not yet opened; marks of shared tiers are kept in `state`."""
    return [_make_tier(entry, state) for entry in config.storage]


@contextlib.contextmanager
def assembled(
    config: Config,
    tiers: list[StorageTier],
    manager: ServiceManager,
    state: Path | None,
) -> Iterator[Node]:
    """Make a node, with the memory that a former incarnation left and the hot set in `state`.

    The node's threads end after the block. Logs the limits of this process that keep host memory
    below the configured capacity. Raises ConfigError.
    """
    placement = Placement(huge_pages=config.host.huge_pages, node=find_node(config.host.numa_node))
    clock, machine = SystemClock(), ThisMachine()
    with ThreadPoolExecutor(WORKER_THREADS, "tierd-worker", initializer=_yield_cpu) as executor:
        options = NodeOptions.of(config, secrets.token_bytes(8), placement)
        node = Node(
            options, tiers=tiers, clock=clock, manager=manager, executor=executor, machine=machine
        )
        node.incarnations.begin()
        for shortfall in shortfalls(
            config.host.capacity,
            segment_bytes(config.host.capacity),
            missing_bytes=config.host.capacity - node.host.allocated_bytes,
            available_bytes=machine.sample().available_bytes,
        ):
            log.warning("%s", shortfall)
        if state is not None:
            node.snapshots = Snapshots(state, config.hotset, node.host, clock, node.counters)
            node.snapshots.open()
        yield node


def _make_tier(entry: StorageConfig, state: Path | None) -> StorageTier:
    backend = make_backend(entry)
    tier = StorageTier(entry, backend, now_s=time.perf_counter, times=Times.real())
    if state is not None and backend.shared:
        tier.epochs.remember(MarksFile(state, f"{entry.type} {backend.place}"))
    return tier


def _yield_cpu() -> None:
    """Put the calling thread behind the loop and the engine when cores are short."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WORKER_NICE)
