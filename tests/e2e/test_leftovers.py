"""Killed engines leave nothing behind, whatever they were doing."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon_process import DaemonProcess
from tests.support.page_engine import BLOCK_BYTES, PageEngine, chain, parents_of
from tests.support.traffic import Footprint, children, footprint, wait_until

ENGINES = 200
BEFORE = 50
"""Engines until a daemon's pools and allocator arenas have reached their size."""

AT_ONCE = 4
CAPACITY = 8 << 20
POOLED = 8
"""Threads that pools may still start: they grow to the number of concurrent tasks."""

GROWTH_BYTES_MAX = 8 << 20
"""Bound on the daemon's anonymous memory: 200 leaked sessions would be several times that."""


def greets_halfway(path: str) -> None:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    sock.send(b"\x40\x00")


def registers(path: str) -> None:
    engine = PageEngine(path, blocks=8)
    engine.client.poll()


def reserves(path: str) -> None:
    engine = PageEngine(path, blocks=8)
    hashes = chain(os.urandom(8), 4)
    reservation = engine.client.reserve(engine.handle, hashes, parents_of(hashes))
    assert reservation is not None
    assert reservation.views[0] is not None
    reservation.views[0][:9] = b"unwritten"


def stored(path: str) -> tuple[PageEngine, list[bytes]]:
    engine = PageEngine(path, blocks=8)
    engine.wait_attached()
    hashes = chain(os.urandom(8), 4)
    engine.compute(hashes, range(4))
    assert engine.store(hashes, range(4)) == 4
    return engine, hashes


def leases(path: str) -> None:
    engine, hashes = stored(path)
    assert engine.client.acquire([engine.handle], hashes, 1000) is not None


def asks(path: str) -> None:
    engine = PageEngine(path, blocks=8)
    engine.wait_attached()
    for number in range(20):
        engine.client.begin_acquire([engine.handle], chain((os.getpid(), number), 8), 5000)


def hints(path: str) -> None:
    engine, hashes = stored(path)
    engine.client.hint([engine.handle], hashes, pin_ms=1000)
    engine.client.poll()


def stores(path: str) -> None:
    engine = PageEngine(path, blocks=8)
    engine.wait_attached()
    hashes = chain(os.urandom(8), 8)
    engine.begin_store(hashes, range(8))


def loads(path: str) -> None:
    engine, hashes = stored(path)
    assert engine.begin_load(hashes, range(4)) is not None


def attaches_halfway(path: str) -> None:
    engine = PageEngine(path, blocks=8)
    engine.client.poll()
    engine.client.wait(random.random() / 100)


STATES: list[Callable[[str], None]] = [
    greets_halfway,
    registers,
    reserves,
    leases,
    asks,
    hints,
    stores,
    loads,
    attaches_halfway,
]


def die_by_the_dozen(path: str, count: int) -> None:
    """Fork engines; each gets into one of the states and is killed."""
    alive: set[int] = set()
    failed = 0
    for number in range(count + AT_ONCE):
        if len(alive) >= AT_ONCE or number >= count:
            pid, status = os.wait()
            alive.discard(pid)
            failed += not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)
        if number < count:
            pid = os.fork()
            if pid == 0:
                STATES[number % len(STATES)](path)
                os.kill(os.getpid(), signal.SIGKILL)
            alive.add(pid)
    assert not alive
    print(failed)


def threads(pid: int) -> int:
    return sum(len(os.listdir(f"/proc/{each}/task")) for each in [pid, *children(pid)])


def memory_files(pid: int) -> int:
    """Open memory files from engines in a daemon and its children: exports and gates. The arena's
    are not counted, since a worker opens as many as it needs."""
    count = 0
    for each in [pid, *children(pid)]:
        for fd in Path(f"/proc/{each}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                count += os.readlink(fd).startswith(("/memfd:tierd-pages", "/memfd:tierd-gate"))
    return count


@pytest.mark.slow
def test_two_hundred_engines_leave_nothing_behind(tmp_path: Path) -> None:
    """Each engine crash would cost descriptors, slots or memory, until tierd runs out."""
    store = f'type = "file"\npath = "{tmp_path}/store"\ncapacity = {CAPACITY // 2}\n'
    policy = 'reserve_free = "0"\nwrite_policy = "write_through"\n'
    storage = f"lease_ttl_ms = 1000\n[[storage]]\n{store}{policy}"
    with (
        DaemonProcess(tmp_path / "tierd", capacity=f"{CAPACITY}", storage=storage) as daemon,
        contextlib.closing(daemon.client("watch")) as client,
    ):

        def status() -> dict[str, Any]:
            found: dict[str, Any] = client.status()
            return found

        def is_idle() -> bool:
            now = status()
            names = ("writing_blocks", "leases", "backlog_blocks", "pinned_bytes")
            spaces = now["namespaces"]
            held = [*(now["host"][name] for name in names), *(s["sessions"] for s in spaces)]
            return not any(held)

        def settled() -> tuple[Footprint, int, int]:
            wait_until(is_idle, 30, "state of a killed engine remains")
            return footprint(daemon.pid), memory_files(daemon.pid), threads(daemon.pid)

        def engines(count: int) -> None:
            words = [sys.executable, "-m", "tests.e2e.test_leftovers", daemon.socket, str(count)]
            done = subprocess.run(words, capture_output=True, text=True, timeout=120)
            assert done.stdout == "0\n", done.stderr[-4000:]

        # L2 and the tier are full, so no segments or slabs are created meanwhile.
        with PageEngine(daemon.socket, blocks=8) as first:
            first.wait_attached()
            for number in range(CAPACITY // BLOCK_BYTES // 8):
                assert first.store(chain(number, 8), range(8)) == 8
        engines(BEFORE)
        before, memfds, tasks = settled()
        engines(ENGINES)
        after, memfds_after, tasks_after = settled()
        assert (after.files, after.processes) == (before.files, before.processes)
        assert memfds_after == memfds == 0
        assert tasks_after <= tasks + POOLED
        assert after.anonymous_bytes <= before.anonymous_bytes + GROWTH_BYTES_MAX
        counters = status()["counters"]
        assert not counters.get("internal_errors_total"), daemon.log.read_text()[-4000:]
        assert counters["reservations_dropped_total"] >= (BEFORE + ENGINES) // len(STATES)


if __name__ == "__main__":
    die_by_the_dozen(sys.argv[1], int(sys.argv[2]))
