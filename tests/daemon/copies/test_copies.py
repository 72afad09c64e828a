"""Copies between an engine's pages and L2, by a real daemon and its copy process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon_process import DaemonProcess
from tests.support.page_engine import (
    BLOCK_BYTES,
    LAYERS,
    PAGE_BYTES,
    PageEngine,
    chain,
    content,
    mappings,
    namespace,
    parents_of,
)
from tests.support.traffic import wait_until
from tierd.client import Client

pytestmark = [pytest.mark.slow]

SLOW = '[copy]\nbandwidth_max = "1MiB"\n'
"""One block per 30 ms, so that tests can act in the middle of a copy."""

CANARY = b"\xca"
CANARY_S = 0.2
"""Seconds for which pages are watched that must no longer be written."""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon shared by all tests that leave it running."""
    with DaemonProcess(tmp_path_factory.mktemp("node") / "tierd", storage="") as process:
        yield process
        assert "internal_errors_total" not in process.status()["counters"]


@pytest.fixture
def engine(node: DaemonProcess) -> Iterator[PageEngine]:
    with PageEngine(node.socket) as made:
        made.wait_attached()
        yield made


@pytest.fixture(scope="module")
def slow_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A slow-copying daemon shared by all tests that leave it running."""
    with DaemonProcess(
        tmp_path_factory.mktemp("slow") / "tierd", storage="", extra=SLOW
    ) as process:
        yield process
        assert "internal_errors_total" not in process.status()["counters"]


@pytest.fixture
def slow(slow_node: DaemonProcess) -> Iterator[PageEngine]:
    with PageEngine(slow_node.socket) as made:
        made.wait_attached()
        yield made


@pytest.fixture
def small(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon with 256 slots of BLOCK_BYTES, eight per segment."""
    with DaemonProcess(tmp_path / "tierd", storage="", capacity="8MiB") as process:
        yield process
        assert "internal_errors_total" not in process.status()["counters"]


def copy_pid(engine: PageEngine) -> int:
    [process] = engine.status()["copies"]
    return int(process["pid"])


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process with SIGSTOP."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def store_new(engine: PageEngine, count: int, first: int = 1) -> list[bytes]:
    """Store new blocks; returns the hashes that the daemon then holds."""
    hashes = chain(os.urandom(8), count)
    blocks = range(first, first + count)
    engine.compute(hashes, blocks)
    assert engine.store(hashes, blocks) == count
    return hashes


def begin_load(engine: PageEngine, hashes: list[bytes], first: int):
    """Return a lease, a copy into pages filled with a canary, and its job."""
    fill(engine, range(first, first + len(hashes)))
    begun = engine.begin_load(hashes, range(first, first + len(hashes)))
    assert begun is not None
    return begun


def fill(engine: PageEngine, blocks: range) -> None:
    for block in blocks:
        engine.write(block, CANARY * engine.block_bytes)


def assert_untouched(engine: PageEngine, blocks: range) -> None:
    """Fill pages that must no longer be written, and assert that they stay unchanged."""
    fill(engine, blocks)
    time.sleep(CANARY_S)
    for block in blocks:
        assert engine.read(block) == CANARY * engine.block_bytes, f"block {block} was written"


def assert_no_leak(engine: PageEngine) -> None:
    """Assert that nothing is reserved or under way once the daemon has handled all messages."""

    def idle() -> bool:
        status = engine.status()
        copies = sum(process["under_way"] for process in status["copies"])
        return not copies and not status["host"]["writing_blocks"]

    wait_until(idle, 20, "slots or copies have leaked")


def count_served(client: Client, engine: PageEngine, hashes: list[bytes]) -> int:
    """Return how many blocks a reader of the arena is served; compares all bytes."""
    handle = client.register(engine.handle.namespace)
    got = client.get(handle, hashes, 2000)
    assert [bytes(x) for x in got] == [content(h, engine.block_bytes) for h in hashes[: len(got)]]
    return len(got)


# --- stores and loads --------------------------------------------------------------------


def test_stored_blocks_are_loaded_with_equal_bytes(engine: PageEngine, node: DaemonProcess) -> None:
    """A block would be loaded with other bytes, or not at all."""
    before = Counter(engine.status()["counters"])
    hashes = store_new(engine, 20)
    assert engine.load(hashes, range(30, 50)) == 20
    status = node.status()
    counted = Counter(status["counters"]) - before
    assert counted["copy_store_bytes_total"] == counted["copy_load_bytes_total"] == 20 * BLOCK_BYTES
    assert counted["copy_store_blocks_total"] == counted["copy_load_blocks_total"] == 20
    assert status["host"]["writing_blocks"] == 0
    # Other clients read the copied blocks from the arena.
    with contextlib.closing(node.client()) as other:
        assert count_served(other, engine, hashes) == 20


def test_status_shows_the_copy_device(engine: PageEngine, node: DaemonProcess) -> None:
    """Only JSON would show whether a GPU's copies run, and at full speed."""
    told = subprocess.run(
        [sys.executable, "-m", "tierd.cli.main", "status", "--socket", node.socket],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "copies   host, process" in told.stdout
    assert "pinned of" in told.stdout


def test_store_waits_for_its_event_before_reading_pages(engine: PageEngine) -> None:
    """A block would be stored before the GPU has computed it."""
    hashes = chain("late", 8)
    fill(engine, range(1, 9))
    reservation, pending = engine.begin_store(hashes, range(1, 9), 0, engine.event.promise())
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        engine.client.wait(0.01)
        assert not pending.done
    engine.compute(hashes, range(1, 9))
    engine.event.record()
    assert engine.done(pending) == 8
    assert sum(engine.client.commit(reservation)) == 8
    assert engine.load(hashes, range(20, 28)) == 8


def test_copy_waiting_for_an_event_does_not_block_others(
    engine: PageEngine, node: DaemonProcess
) -> None:
    """One engine that hangs would stop the copies of all others on its device."""
    hashes = chain("never", 4)
    reservation, store = engine.begin_store(hashes, range(1, 5), 0, engine.event.promise())
    with PageEngine(node.socket, name="other", model="other") as other:
        other.wait_attached()
        assert other.load(store_new(other, 8), range(20, 28)) == 8
        assert not store.done
        # Nor its own copies that wait for nothing.
        assert engine.load(store_new(engine, 8, 10), range(20, 28)) == 8
        assert not store.done
    assert engine.done(store) == 0
    assert "event" in store.reason
    engine.client.abort(reservation)
    assert_no_leak(engine)
    # Nor the next waiting copy, whose event occurs.
    reservation, store = engine.begin_store(hashes, range(1, 5), 0, engine.event.record())
    assert engine.done(store) == 4
    engine.client.abort(reservation)
    assert "copy_process_kills_total" not in engine.status()["counters"]


def test_layers_are_loaded_one_after_the_other(slow_node: DaemonProcess) -> None:
    """An engine would compute with layers that have not arrived, or wait for the last one."""
    ends = [PAGE_BYTES * (layer + 1) for layer in range(LAYERS)]
    with PageEngine(slow_node.socket, layer_ends=ends) as engine:
        engine.wait_attached()
        hashes = store_new(engine, 6)
        lease, pending, job = begin_load(engine, hashes, 20)
        seen = [0]
        half_way = False
        while not pending.done:
            engine.client.wait(0.001)
            groups = engine.gate.progress(job)
            last = bytes(engine.view(25, LAYERS - 1))
            seen.append(groups)
            for layer in range(groups):
                for at, block_hash in enumerate(hashes):
                    right = content(block_hash)[layer * PAGE_BYTES : (layer + 1) * PAGE_BYTES]
                    assert engine.view(20 + at, layer) == right
            half_way |= 0 < groups < LAYERS and last == CANARY * PAGE_BYTES
        assert seen == sorted(seen)
        assert half_way, "all layers came at once"
        assert pending.blocks == 6
        assert engine.gate.progress(job) == LAYERS
        engine.client.release(lease)


# --- ends -------------------------------------------------------------------------------


def test_detach_stops_all_copies(node: DaemonProcess) -> None:
    """An engine would free or reuse pages that are still written."""
    with PageEngine(node.socket, blocks=12, page_bytes=2 << 20) as engine:
        engine.wait_attached()
        hashes = store_new(engine, 6)
        cut = 0
        for _ in range(8):
            lease = engine.client.acquire([engine.handle], hashes, 2000)
            assert lease is not None
            loads = []
            for _ in range(4):
                engine.jobs += 1
                loads.append(
                    engine.client.begin_load(
                        engine.attachment,
                        lease.epoch,
                        lease.slots[0],
                        range(6, 12),
                        lease.expires_ns,
                        job=engine.jobs,
                    )
                )
            # Until the first page has arrived.
            assert engine.client.detach(engine.attachment)
            # From this answer on, according to the gate and to the pages.
            for job in range(engine.jobs - 3, engine.jobs + 1):
                assert engine.gate.call_off(job)
            assert all(load.done for load in loads)
            for block in range(6, 12):
                engine.view(block, 0)[:8] = CANARY * 8
            cut += any(load.blocks < 6 for load in loads)
            time.sleep(0.02)
            for block in range(6, 12):
                assert engine.view(block, 0)[:8] == CANARY * 8
            engine.client.release(lease)
            engine.attachment = engine.attach()
            engine.wait_attached()
        assert cut, "every load was done before the detach"


def test_second_namespace_reuses_exported_memory(slow: PageEngine) -> None:
    """New weights would have all KV memory opened a second time, or none of it."""
    copier = copy_pid(slow)
    old, old_hashes = slow.attachment, store_new(slow, 4)
    slow.handle = slow.client.register(namespace("m2"))
    slow.attachment = slow.attach(slow.handle)
    slow.wait_attached()
    assert mappings(copier, slow.memory) == 1
    assert slow.client.detach(old)
    assert mappings(copier, slow.memory) == 1
    assert slow.load(old_hashes, range(30, 34)) == 0
    assert slow.load(store_new(slow, 4), range(30, 34)) == 4
    assert slow.probes == [True, True]


def test_cancelled_load_stops_soon(slow: PageEngine) -> None:
    """An aborted request would keep its pages until all of its blocks have arrived."""
    hashes = store_new(slow, 20)
    lease, pending, job = begin_load(slow, hashes, 30)
    wait_until(lambda: slow.view(31, 0)[:1] != CANARY, 20, "nothing is loaded")
    slow.settle(job)
    assert slow.read(49) == CANARY * BLOCK_BYTES, "the load was completed"
    assert_untouched(slow, range(30, 50))
    assert 0 < slow.done(pending) < 20
    assert pending.reason == "called off"
    slow.client.release(lease)


def test_abort_waits_for_the_copy_into_its_slots(slow: PageEngine) -> None:
    """Slots would be filled with two engines' blocks at once."""
    copier = copy_pid(slow)
    with stopped(copier):
        reservation, pending = slow.begin_store(chain(os.urandom(8), 10), range(1, 11))
        slow.client.abort(reservation)
        time.sleep(0.1)
        assert slow.status()["host"]["writing_blocks"] == 10
    assert slow.done(pending) == 10
    assert_no_leak(slow)


def test_slots_being_filled_outlive_their_session(
    slow: PageEngine, slow_node: DaemonProcess
) -> None:
    """A departed engine's copy would write into other blocks."""
    with PageEngine(slow_node.socket, name="gone") as gone:
        gone.wait_attached()
        with stopped(copy_pid(slow)):
            reservation, _ = gone.begin_store(chain(os.urandom(8), 10), range(1, 11))
            gone.client.close()
            # The client keeps its socket until the daemon confirms that no copy fills the slots.
            gone.client.abort(reservation)
            wait_until(
                lambda: slow.status()["namespaces"][0]["sessions"] == 1, 10, "it does not end"
            )
            assert slow.status()["host"]["writing_blocks"] == 10
        assert_no_leak(slow)


def test_slots_being_loaded_outlive_their_lease(small: DaemonProcess) -> None:
    """An engine would get other blocks' bytes once the daemon is short of memory."""
    with PageEngine(small.socket) as engine, contextlib.closing(small.client()) as other:
        engine.wait_attached()
        hashes = store_new(engine, 8)
        handle = other.register(engine.handle.namespace)
        with stopped(copy_pid(engine)):
            lease, pending, _ = begin_load(engine, hashes, 20)
            engine.client.release(lease)
            # Store more than the arena holds, until only held slots remain of the old blocks.
            for _ in range(3):
                new = chain(os.urandom(8), 120)
                blocks = zip(new, parents_of(new), map(content, new), strict=True)
                assert all(other.put(handle, list(blocks)))
        assert engine.done(pending) == 8
        for at, block_hash in enumerate(hashes):
            assert engine.read(20 + at) == content(block_hash)
        assert_no_leak(engine)


def test_memory_is_returned_only_after_the_device_has_unpinned_it(small: DaemonProcess) -> None:
    """A device would keep writing to pages that no longer belong to the arena."""
    with (
        PageEngine(small.socket) as engine,
        PageEngine(small.socket, name="other", model="other") as other,
    ):
        engine.wait_attached()
        other.wait_attached()
        hashes = [store_new(engine, 50) for _ in range(6)][-1]
        arena = Arena(small.pid, engine.handle.namespace.digest)
        engine.wait(lambda: engine.status()["copies"][0]["pinned_bytes"] >= 8 << 20)
        assert arena.held_bytes() > 7 << 20
        new = chain("new", 100)
        with stopped(copy_pid(engine)):
            blocks = zip(new, parents_of(new), map(content, new), strict=True)
            assert all(other.client.put(other.handle, list(blocks)))
            # Longer than the daemon's interval between attempts to return memory.
            time.sleep(1.5)
            assert arena.held_bytes() > 7 << 20
        wait_until(lambda: arena.held_bytes() < 6 << 20, 10, "memory is not given back")
        both = arena.held_bytes() + Arena(small.pid, other.handle.namespace.digest).held_bytes()
        assert both <= 8 << 20
        assert other.load(new[:50], range(1, 51)) == 50
        # The reverse: decommitted memory is filled and pinned again.
        other.client.close()
        hashes = store_new(engine, 50)
        wider = [store_new(engine, 50) for _ in range(4)]
        for each in (hashes, *wider):
            assert engine.load(each, range(1, 51)) == 50
        assert_no_leak(engine)


class Arena:
    """A namespace's segments in a daemon, found through its descriptors."""

    def __init__(self, pid: int, digest: bytes) -> None:
        self._folder = Path(f"/proc/{pid}/fd")
        self._name = f"/memfd:tierd-{digest.hex()[:12]}-"

    def held_bytes(self) -> int:
        """Bytes of memory behind the segments, as counted by the kernel."""
        held = {}
        for path in self._folder.iterdir():
            if os.readlink(path).startswith(self._name):
                status = path.stat()
                held[status.st_ino] = status.st_blocks * 512
        return sum(held.values())


# --- crashes ----------------------------------------------------------------------------


def test_killed_engine_is_detached_though_its_child_holds_the_socket(
    slow: PageEngine, slow_node: DaemonProcess
) -> None:
    """A new engine would not start: the memory of the dead one would still be open."""
    copier = copy_pid(slow)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.page_engine", slow_node.socket],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        inode, child = map(int, process.stdout.readline().split())
        try:
            assert mappings(copier, inode) == 1
            # In the middle of a store.
            wait_until(lambda: slow.status()["host"]["writing_blocks"], 20, "nothing is stored")
            process.kill()
            process.wait()
            wait_until(lambda: mappings(copier, inode) == 0, 10, "its memory stays open")
            assert_no_leak(slow)
            assert Path(f"/proc/{child}/fd").exists(), "the child has ended as well"
        finally:
            os.kill(child, signal.SIGKILL)
    assert copy_pid(slow) == copier


def test_crashed_copy_process_costs_only_its_copies(
    slow: PageEngine, slow_node: DaemonProcess
) -> None:
    """A crash of a device's driver would end the daemon, or the engine."""
    loaded, stored = store_new(slow, 20), chain(os.urandom(8), 20)
    slow.compute(stored, range(1, 21))
    lease, load, job = begin_load(slow, loaded, 30)
    reservation, store = slow.begin_store(stored, range(1, 21))
    wait_until(lambda: slow.view(31, 0)[:1] != CANARY, 20, "nothing is loaded")
    first = copy_pid(slow)
    os.kill(first, signal.SIGKILL)
    slow.wait(lambda: load.done and store.done)
    assert (load.blocks, store.blocks) == (0, 0)
    assert "signal 9" in load.reason
    assert slow.gate.call_off(job)
    assert_untouched(slow, range(30, 50))
    assert not any(slow.client.commit(reservation, store.blocks))
    slow.client.release(lease)
    assert_no_leak(slow)
    slow.wait(lambda: slow.attachment.ready)
    assert copy_pid(slow) != first
    assert slow.probes == [True] + [False] * (len(slow.probes) - 1)
    assert slow.load(stored, range(30, 50)) == 0
    assert slow.load(loaded, range(30, 50)) == 20
    assert slow.store(stored, range(1, 21)) == 20


def test_engine_attaching_while_the_copy_process_crashes_is_attached(
    slow: PageEngine, slow_node: DaemonProcess
) -> None:
    """It would copy by itself until its end, for a crash that another engine caused."""
    with stopped(copy_pid(slow)), PageEngine(slow_node.socket, name="new") as new:
        new.wait(lambda: new.client.connected and new.probes)
        new.status()
        os.kill(copy_pid(slow), signal.SIGKILL)
        new.wait_attached()
        assert new.load(store_new(new, 3), range(10, 13)) == 3


def test_hanging_copy_process_is_killed(tmp_path: Path) -> None:
    """A hanging device would keep slots, and the engine's copies, indefinitely."""
    with (
        DaemonProcess(
            tmp_path / "tierd", storage="", extra="[copy]\njob_timeout_ms = 500\n"
        ) as daemon,
        PageEngine(daemon.socket) as engine,
        contextlib.closing(daemon.client()) as other,
    ):
        engine.wait_attached()
        hashes = store_new(engine, 20)
        hung = copy_pid(engine)
        os.kill(hung, signal.SIGSTOP)
        lease, load, job = begin_load(engine, hashes, 30)
        reservation, store = engine.begin_store(chain("x", 5), range(1, 6))
        assert count_served(other, engine, hashes) == 20
        assert engine.done(load) == 0
        assert "took over 0.5 s" in load.reason
        assert engine.done(store) == 0
        engine.settle(job)
        assert_untouched(engine, range(30, 50))
        engine.client.abort(reservation)
        engine.client.release(lease)
        assert_no_leak(engine)
        engine.wait(lambda: engine.attachment.ready)
        assert engine.load(hashes, range(30, 50)) == 20
        assert engine.status()["counters"]["copy_process_kills_total"] == 1


def test_load_that_a_stopped_daemon_has_not_read_is_cancelled(
    engine: PageEngine, node: DaemonProcess
) -> None:
    """A daemon that resumes would write into pages that the engine uses for other requests."""
    hashes = store_new(engine, 20)
    lease = engine.client.acquire([engine.handle], hashes, 2000)
    assert lease is not None
    with stopped(node.pid):
        engine.gate.prepare(7)
        pending = engine.client.begin_load(
            engine.attachment, lease.epoch, lease.slots[0], range(30, 50), lease.expires_ns, job=7
        )
        assert engine.gate.call_off(7)
        fill(engine, range(30, 50))
    assert engine.done(pending) == 0
    assert pending.reason == "called off"
    assert_untouched(engine, range(30, 50))
    engine.client.release(lease)
    assert engine.load(hashes, range(30, 50)) == 20


def test_copies_stop_when_the_daemon_is_killed(tmp_path: Path) -> None:
    """An engine would wait for a dead daemon, or reuse pages that are still written."""
    with (
        DaemonProcess(tmp_path / "tierd", storage="", extra=SLOW) as daemon,
        PageEngine(daemon.socket) as engine,
    ):
        engine.wait_attached()
        hashes = store_new(engine, 20)
        _, pending, job = begin_load(engine, hashes, 30)
        wait_until(lambda: engine.view(31, 0)[:1] != CANARY, 20, "nothing is loaded")
        copier = copy_pid(engine)
        daemon.kill()
        engine.settle(job, 5.0)
        assert engine.read(49) == CANARY * BLOCK_BYTES, "the load was complete before the kill"
        assert_untouched(engine, range(30, 50))
        assert engine.done(pending) == 0
        wait_until(lambda: not Path(f"/proc/{copier}").exists(), 10, "its copy process stays")
        # As after an upgrade: the engine attaches again by itself.
        daemon.start()
        engine.wait(lambda: engine.attachment.ready)
        assert engine.load(store_new(engine, 5), range(30, 35)) == 5
