"""The daemon copies between an engine's pages and L2: with a real daemon and its copy process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon_process import DaemonProcess
from tests.page_engine import BLOCK_BYTES, PageEngine, chain, content

pytestmark = [pytest.mark.slow]


@pytest.fixture
def engine(l2_daemon: DaemonProcess) -> Iterator[PageEngine]:
    with PageEngine(l2_daemon.socket) as made:
        made.wait_attached()
        yield made


def copy_pid(daemon: DaemonProcess) -> int:
    [process] = daemon.status()["copies"]
    return int(process["pid"])


def test_what_is_stored_is_loaded(engine: PageEngine, l2_daemon: DaemonProcess) -> None:
    """A block would come back with other bytes, or not at all."""
    hashes = chain("a", 20)
    engine.compute(hashes, range(1, 21))
    assert engine.store(hashes, range(1, 21)) == 20
    assert engine.load(hashes, range(30, 50)) == 20
    status = l2_daemon.status()
    assert status["counters"]["copy_store_bytes_total"] == 20 * BLOCK_BYTES
    assert status["counters"]["copy_load_bytes_total"] == 20 * BLOCK_BYTES
    assert status["host"]["writing_blocks"] == 0
    # Others read what the daemon has copied from the arena itself.
    other = l2_daemon.client()
    try:
        handle = other.register(engine.handle.namespace)
        got = other.get(handle, hashes, 2000)
        assert [bytes(view) for view in got] == [content(x) for x in hashes]
    finally:
        other.close()


def test_a_copy_process_that_dies_costs_its_copies_only(
    engine: PageEngine, l2_daemon: DaemonProcess
) -> None:
    """A crash of a device's driver would take L2, or the engine, with it."""
    hashes = chain("b", 20)
    engine.compute(hashes, range(1, 21))
    assert engine.store(hashes, range(1, 21)) == 20
    first = copy_pid(l2_daemon)
    os.kill(first, signal.SIGKILL)
    engine.wait(lambda: not engine.attachment.ready)
    engine.wait(lambda: engine.attachment.ready)
    assert copy_pid(l2_daemon) != first
    assert engine.load(hashes, range(30, 50)) == 20
    assert engine.probes[0] is True and not any(engine.probes[1:])


def test_a_restarted_daemon_is_attached_again(
    engine: PageEngine, l2_daemon: DaemonProcess, tmp_path: Path
) -> None:
    """After an upgrade of tierd the engine would copy nothing until it is restarted itself."""
    l2_daemon.kill()
    l2_daemon.start()
    engine.wait(lambda: engine.attachment.ready)
    hashes = chain("c", 5)
    engine.compute(hashes, range(1, 6))
    assert engine.store(hashes, range(1, 6)) == 5
    assert engine.load(hashes, range(30, 35)) == 5
