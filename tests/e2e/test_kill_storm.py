"""SIGKILL at random moments during stores: no wrong block is served, and no resource leaks."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from tests.support.blocks import chain, namespace, payload
from tests.support.daemon_process import DaemonProcess

ROUNDS = 100
CHAIN_BLOCKS = 24
BLOCK_BYTES = 20_000
"""Not a multiple of the page size, so that the disk has padding too."""

TIER_BYTES = 64 << 20


def storm(daemon: DaemonProcess, tag: int, stop: threading.Event, stored: list[int]) -> None:
    """Store one chain after the other until the daemon is gone."""
    space = namespace(BLOCK_BYTES)
    client = daemon.client("storm")
    handle = client.register(space)
    number = 0
    while not stop.is_set():
        hashes, parents = chain(CHAIN_BLOCKS, (tag, number))
        blocks = [(h, p, payload(space, h)) for h, p in zip(hashes, parents, strict=True)]
        if not all(client.put(handle, blocks)):
            break
        number += 1
    stored.append(number)
    client.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_kills(tmp_path: Path) -> None:
    """A daemon killed during a write would serve torn blocks, or fill its disk."""
    rng = random.Random(5)
    storage = (
        f'[[storage]]\ntype = "file"\npath = "{tmp_path / "store"}"\ncapacity = "64MiB"\n'
        'reserve_free = "0"\n'
    )
    daemon = DaemonProcess(tmp_path / "tierd", capacity="16MiB", storage=storage)
    space = namespace(BLOCK_BYTES)
    right = found = 0
    for number in range(ROUNDS):
        daemon.start()
        found += check_everything(daemon, space, number)
        stop = threading.Event()
        stored: list[int] = []
        thread = threading.Thread(target=storm, args=(daemon, number, stop, stored))
        thread.start()
        # The delay varies the moment of the kill; no result depends on its length.
        stop.wait(rng.uniform(0.0, 0.12))
        daemon.kill()
        stop.set()
        thread.join()
        right += stored[0]
        files = [entry for entry in (tmp_path / "store").rglob("*") if entry.is_file()]
        assert not [entry.name for entry in files if "tmp" in entry.name]
        slabs = [entry for entry in files if entry.suffix in {".slab", ".index"}]
        assert sum(entry.stat().st_blocks * 512 for entry in slabs) <= TIER_BYTES
    assert right > ROUNDS
    assert found > ROUNDS


def check_everything(daemon: DaemonProcess, space: object, rounds: int) -> int:
    """Check that every block of the last rounds that the daemon still has is right."""
    ns = namespace(BLOCK_BYTES)
    client = daemon.client("check")
    handle = client.register(ns)
    found = 0
    for tag in range(max(0, rounds - 3), rounds):
        for number in range(4):
            hashes, _ = chain(CHAIN_BLOCKS, (tag, number))
            for block_hash, got in zip(hashes, client.get(handle, hashes, 5000), strict=False):
                assert bytes(got) == payload(ns, block_hash)
                found += 1
    client.close()
    status = daemon.status()
    counters = status["storage"][0]["counters"]
    assert counters.get("get_corrupt_total", 0) <= 8, counters
    assert status["host"]["writing_blocks"] == 0
    assert status["counters"].get("internal_errors_total", 0) == 0
    return found


def test_killed_clients_leak_no_descriptors(l2_daemon: DaemonProcess) -> None:
    """Killed clients would leave descriptors and slots behind, until the daemon runs out."""
    space = namespace(4096)
    process = l2_daemon.process
    assert process is not None

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{process.pid}/fd"))

    baseline = 0
    for number in range(30):
        pid = os.fork()
        if pid == 0:
            client = l2_daemon.client("dies")
            handle = client.register(space)
            hashes, parents = chain(8, number)
            client.reserve(handle, hashes, parents)
            os.kill(os.getpid(), 9)
        os.waitpid(pid, 0)
        watcher = l2_daemon.client("watch")
        while (status := watcher.status())["host"]["writing_blocks"]:  # type: ignore[index]
            pass
        assert status["counters"].get("internal_errors_total", 0) == 0  # type: ignore[attr-defined]
        watcher.close()
        if number == 4:
            baseline = descriptors()
    assert descriptors() <= baseline + 1
