"""Steady traffic of several clients on one daemon, which detects every wrong byte and late answer.

Each client acts as an engine: it requests a prefix with a deadline, compares the blocks with the
right bytes, and stores the missing ones.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.support.blocks import chain, namespace, payload
from tierd.client import Client, Handle

BLOCK_BYTES = 64 << 10
CHAIN_BLOCKS = 6
CHAINS = 32
"""12 MiB of blocks: three times the memory of the daemons that get this traffic."""

FRESH_SHARE = 0.03
"""Share of requests for new chains, so that there is always something to store."""

HOST_CAPACITY = "4MiB"
DEADLINE_MS = 400
PAUSE_S = 0.02
NOISE_S = 0.005
ANSWER_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One acquire as seen by its client; times are of `time.monotonic`."""

    started: float
    seconds: float
    blocks: int

    @property
    def ended(self) -> float:
        return self.started + self.seconds


class Served(Protocol):
    """A daemon that clients can connect to."""

    def client(self, name: str) -> Client: ...


class Traffic:
    """Threads that load and store chains until the end of the context, which checks them.

    `samples` has every acquire since the start. `noise` has the delays with which this process was
    woken every few ms: they delay its clients independently of tierd.
    """

    def __init__(self, daemon: Served, *, threads: int = 3, chains: int = CHAINS) -> None:
        self.samples: list[Sample] = []
        self.noise: list[Sample] = []
        self.faults: list[str] = []
        self.space = namespace(BLOCK_BYTES)
        self._daemon = daemon
        self._chains = [chain(CHAIN_BLOCKS, tag) for tag in range(chains)]
        self._right = {h: payload(self.space, h) for hashes, _ in self._chains for h in hashes}
        self._stop = threading.Event()
        self._running = threading.Event()
        self._idle = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._watch_noise)]
        self._threads += [
            threading.Thread(target=self._client, args=(seed,)) for seed in range(threads)
        ]

    def __enter__(self) -> Traffic:
        self._running.set()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._running.set()
        for thread in self._threads:
            thread.join(ANSWER_S_MAX)
        assert not any(thread.is_alive() for thread in self._threads), "a client hangs"

    def pause(self) -> None:
        """Make the clients wait, still connected; returns once no call is in progress."""
        self._running.clear()
        for _ in self._threads[1:]:
            assert self._idle.acquire(timeout=ANSWER_S_MAX), "a client hangs"

    def resume(self) -> None:
        """Let the clients continue."""
        self._running.set()

    def since(self, started: float, ended: float = float("inf")) -> list[Sample]:
        """Acquires that began at `started` or later and ended by `ended`."""
        return [s for s in list(self.samples) if s.started >= started and s.ended <= ended]

    def stall_ms(self, sample: Sample) -> float:
        """The longest stall of this process during an acquire, as far as it knows."""
        stalls = (
            n.seconds
            for n in list(self.noise)
            if n.ended >= sample.started and n.started <= sample.ended
        )
        return max(stalls, default=0.0) * 1000

    # --- threads --------------------------------------------------------------------

    def _watch_noise(self) -> None:
        while not self._stop.is_set():
            started = time.monotonic()
            time.sleep(NOISE_S)
            self.noise.append(Sample(started, time.monotonic() - started - NOISE_S, 0))

    def _client(self, seed: int) -> None:
        client = self._daemon.client(f"traffic-{seed}")
        try:
            handle = client.register(self.space)
            source = random.Random(seed)
            while not self._stop.is_set():
                if not self._running.is_set():
                    self._idle.release()
                    self._running.wait()
                    continue
                hashes, parents = source.choice(self._chains)
                if source.random() < FRESH_SHARE:
                    hashes, parents = chain(CHAIN_BLOCKS, (seed, source.random()))
                self._load_and_store(client, handle, hashes, parents)
                self._stop.wait(PAUSE_S)
        except Exception as error:
            self.faults.append(f"client {seed}: {error!r}")
        finally:
            client.close()

    def _load_and_store(
        self, client: Client, handle: Handle, hashes: list[bytes], parents: list[bytes]
    ) -> None:
        started = time.monotonic()
        lease = client.acquire([handle], hashes, DEADLINE_MS)
        blocks = lease.blocks if lease is not None else 0
        self.samples.append(Sample(started, time.monotonic() - started, blocks))
        if lease is not None:
            views = client.lease_views(handle, lease.epoch, lease.slots[0]) or []
            for block_hash, view in zip(hashes, views, strict=False):
                if view[:BLOCK_BYTES] != self._right_bytes(block_hash):
                    self.faults.append(f"block {block_hash.hex()} has wrong bytes")
            if time.monotonic_ns() >= lease.expires_ns:
                self.faults.append("a lease ended before it was used: the machine was stalled")
            client.release(lease)
        rest = list(zip(hashes, parents, strict=True))[blocks:]
        client.put(handle, [(h, parent, self._right_bytes(h)) for h, parent in rest])

    def _right_bytes(self, block_hash: bytes) -> bytes:
        return self._right.get(block_hash) or payload(self.space, block_hash)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Resources of a daemon and its worker processes."""

    files: int
    """Open descriptors, except connections, and except the arena's, of which a worker opens as many
    as it needs."""
    connections: int
    """TCP sockets, in any state."""
    anonymous_bytes: int
    processes: int


def footprint(pid: int) -> Footprint:
    """The footprint of process `pid` and its children."""
    pids = [pid, *children(pid)]
    opened = [name for each in pids for name in _opened(each)]
    tcp = _tcp_sockets(pid)
    connections = sum(name in tcp for name in opened)
    files = sum(not name.startswith("/memfd:") for name in opened) - connections
    return Footprint(files, connections, sum(map(_anonymous_bytes, pids)), len(pids))


def children(pid: int) -> list[int]:
    """Child processes of `pid`."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def _opened(pid: int) -> list[str]:
    """The target of each descriptor of a process."""
    names: list[str] = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            names.append(os.readlink(entry))
    return names


def _tcp_sockets(pid: int) -> set[str]:
    """The TCP sockets of a process's network namespace, as /proc/PID/fd names them."""
    lines: list[str] = []
    for family in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):
            lines += Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]
    return {f"socket:[{line.split()[9]}]" for line in lines}


def _anonymous_bytes(pid: int) -> int:
    """Private memory of a process: without the arena, which it shares."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> float:
    """Poll `condition` until it is true; returns the seconds. Fails with `what` at the timeout."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < started + timeout_s, what
        time.sleep(0.01)
    return time.monotonic() - started
