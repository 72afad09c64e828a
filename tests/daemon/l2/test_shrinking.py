"""Host memory that shrinks and grows: in the arena, in a node, and in a real daemon."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.blocks import chain, namespace
from tests.support.daemon_process import DaemonProcess
from tests.support.traffic import wait_until
from tierd.clock import SystemClock
from tierd.core.hints import PrefixHint
from tierd.core.host import HostTier
from tierd.core.l2.pressure import MemorySample
from tierd.core.l2.space import Space
from tierd.core.reasons import Evicted, Refusal
from tierd.daemon.node import Node
from tierd.daemon.options import NodeOptions
from tierd.limits import memory_cgroups
from tierd.types import PAGE_BYTES

GIB = 1 << 30
MIB = 1 << 20


# --- the arena --------------------------------------------------------------------------


def arena(slots: int, *models: str, segment_slots: int = 4) -> tuple[HostTier, list[Space]]:
    host = HostTier(slots * PAGE_BYTES, segment_slots * PAGE_BYTES)
    spaces = [host.open_space(namespace(PAGE_BYTES, model=model)) for model in models]
    return host, [space for space in spaces if space is not None]


def store(host: HostTier, space: Space, count: int, tag: str) -> list[bytes]:
    """Store a chain; returns the hashes that got a slot."""
    hashes, parents = chain(count, tag)
    stored = []
    for at in range(0, count, 4):
        some = hashes[at : at + 4]
        reservation, _ = host.reserve(1, space, some, parents[at : at + 4])
        host.commit(1, reservation.reservation_id, 4)
        stored += [h for h, slot in zip(some, reservation.slots, strict=True) if slot >= 0]
    return stored


def shrink(host: HostTier, limit_bytes: int) -> int:
    """Shrink as far as possible; returns the number of calls that gave a segment back."""
    host.set_limit(limit_bytes)
    host.check()
    count = 0
    while host.allocated_bytes > limit_bytes:
        before = host.allocated_bytes
        host.shrink()
        host.check()
        if host.allocated_bytes == before:
            break
        count += 1
    return count


def test_shrinking_evicts_idle_namespaces_and_cold_blocks_first() -> None:
    """A busy engine's prefixes would be evicted in favour of an engine that has left."""
    host, (idle, busy) = arena(64, "idle", "busy")
    busy._sessions = 1
    left = store(host, idle, 16, "idle")
    cold = store(host, busy, 16, "cold")
    hot = store(host, busy, 32, "hot")
    host.prefix(busy, hot)
    assert shrink(host, 40 * PAGE_BYTES) == 6
    assert host.allocated_bytes == 40 * PAGE_BYTES
    assert not host.prefix(idle, left)
    assert len(host.prefix(busy, hot)) == 32
    assert len(host.prefix(busy, cold)) == 8, "more was evicted than necessary"
    assert host.evicted[Evicted.SHRUNK] == 24


def test_shrunk_arena_does_not_grow_but_still_lends_memory() -> None:
    """Memory given back would be taken again at once, or other namespaces could not store."""
    host, (one, other) = arena(64, "one", "other")
    store(host, one, 64, "one")
    shrink(host, 32 * PAGE_BYTES)
    store(host, one, 32, "more")
    assert host.allocated_bytes == 32 * PAGE_BYTES
    other._sessions = 1
    assert len(store(host, other, 8, "other")) == 8
    host.check()
    assert host.allocated_bytes == 32 * PAGE_BYTES
    host.set_limit(64 * PAGE_BYTES)
    assert len(store(host, other, 24, "again")) == 24
    assert host.allocated_bytes > 32 * PAGE_BYTES


def test_leased_segments_are_kept_until_released() -> None:
    """A lease would be broken to make room, or shrinking be given up permanently."""
    host, (space,) = arena(16, "m")
    hashes = store(host, space, 16, "leased")
    lease = host.grant(1, [(space, host.prefix(space, hashes))], 10)
    assert shrink(host, 4 * PAGE_BYTES) == 0
    assert len(host.prefix(space, hashes)) == 16
    # Above the limit, nothing is added.
    more, parents = chain(4, "more")
    reservation, effects = host.reserve(2, space, more, parents)
    assert set(reservation.slots) == {Refusal.NO_ROOM}
    assert not effects
    host.release(lease.lease_id, 1)
    assert shrink(host, 4 * PAGE_BYTES) == 3
    assert len(host.prefix(space, hashes)) == 4


def test_memory_pressure_overrides_pins() -> None:
    """Pinned blocks would be kept until the OOM killer comes."""
    host, (space,) = arena(16, "m")
    space._sessions = 1
    hashes = store(host, space, 16, "pinned")
    host.hints.resize(16 * PAGE_BYTES)
    host.hint([space], hashes, PrefixHint(pin_ms=60_000), 0)
    assert host.hints.kept_blocks == 16
    host.set_limit(8 * PAGE_BYTES)
    for _ in range(4):
        host.shrink()
        host.check()
    assert host.allocated_bytes == 8 * PAGE_BYTES
    assert host.hints.counters["pins_overridden_blocks_total"] == 16


def test_new_capacity_rescales_pin_and_reservation_budgets() -> None:
    """After a reload engines could pin or reserve more than the capacity."""
    host, (space,) = arena(64, "m")
    store(host, space, 64, "m")
    host.hint([space], chain(16, "m")[0], PrefixHint(pin_ms=60_000), 0)
    assert host.hints.kept_blocks == 16
    host.set_capacity(32 * PAGE_BYTES, 0.25)
    assert host.hints.kept_bytes <= host.hints.quota_bytes == 8 * PAGE_BYTES
    while host.allocated_bytes > host.capacity_bytes:
        host.shrink()
        host.check()
    reservation, _ = host.reserve(1, space, *chain(32, "new"))
    assert sum(slot >= 0 for slot in reservation.slots) == 16
    host.abort(1, reservation.reservation_id)
    host.set_capacity(128 * PAGE_BYTES, 0.25)
    assert len(store(host, space, 64, "wide")) == 64
    assert host.allocated_bytes > 64 * PAGE_BYTES
    host.check()


# --- the daemon -------------------------------------------------------------------------


class FixedMachine:
    """A machine that reports a fixed amount of available memory."""

    def __init__(self, available_bytes: int) -> None:
        self.available_bytes = available_bytes

    def sample(self) -> MemorySample:
        return MemorySample(64 * GIB, self.available_bytes, 0, 0)


def node_on(machine: FixedMachine, min_bytes: int) -> Node:
    """A node with 32 MiB of L2 in 16 segments."""
    return Node(
        NodeOptions(
            capacity_bytes=32 * MIB,
            min_bytes=min_bytes,
            lease_ttl_ms=1000,
            epoch=bytes(8),
            segment_bytes=2 * MIB,
        ),
        tiers=[],
        clock=SystemClock(),
        machine=machine,
    )


def memory_files_of(pid: int) -> int:
    """Bytes of memory behind the segments that a process has open."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if re.match(r"/memfd:tierd-[0-9a-f]", os.readlink(entry)):
                status = entry.stat()
                found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


async def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_shrinking_returns_memory_to_the_kernel(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reported size would shrink, but the machine would get no memory back."""
    monkeypatch.setattr("tierd.daemon.l2.pressure.PERIOD_S", 0.02)
    monkeypatch.setattr("tierd.core.l2.pressure.CALM_S", 0.2)
    monkeypatch.setattr("tierd.core.l2.pressure.GROWTH_SHARE_PER_S", 10.0)
    caplog.set_level(logging.INFO, "tierd")
    machine = FixedMachine(32 * GIB)
    node = node_on(machine, min_bytes=8 * MIB)
    space = node.register(namespace(MIB // 4))

    def memory_files() -> int:
        """Bytes of memory behind the node's segments, according to the kernel."""
        segments = node.memory.arena.segments(space)
        return sum(os.fstat(segment.fd).st_blocks * 512 for segment in segments)

    async def scene() -> None:
        hashes, parents = chain(128)
        reservation = node.reserve(1, space, hashes[:64], parents[:64])
        node.commit(1, reservation.reservation_id, 64)
        reservation = node.reserve(1, space, hashes[64:], parents[64:])
        for at, slot in enumerate(reservation.slots):
            node.memory.arena.view(space, slot)[:] = bytes([at]) * (MIB // 4)
        node.commit(1, reservation.reservation_id, 64)
        await until(lambda: node.memory.resident_bytes() == 32 * MIB, "it is not faulted in")
        assert memory_files() == 32 * MIB
        # Slightly less available than the floor: L2 must give the rest back.
        machine.available_bytes = GIB - 6 * MIB
        await until(lambda: node.host.allocated_bytes < 32 * MIB, "nothing is given back")
        machine.available_bytes = 0
        await until(lambda: node.host.allocated_bytes == 8 * MIB, "it does not shrink")
        assert memory_files() == node.memory.resident_bytes() == 8 * MIB
        node.check()
        status = node.status()["host"]
        assert isinstance(status, dict)
        assert status["limit_bytes"] == status["min_bytes"] == 8 * MIB
        assert node.counters["pressure_shrinks_total"] == 1
        machine.available_bytes = 32 * GIB
        await until(lambda: "no longer short" in caplog.text, "it does not grow back")
        assert node.host.limit_bytes == 32 * MIB
        node.set_capacity(4 * MIB, 4 * MIB)
        await until(lambda: node.host.allocated_bytes == 4 * MIB, "the capacity is not kept")
        assert memory_files() == 4 * MIB
        assert caplog.text.count("memory is short") == 1
        said = re.search(r"shrinks from 32 MiB to (\S+) MiB, to host\.min \(8 MiB\)", caplog.text)
        assert said is not None
        assert 8 <= float(said[1]) < 32

    await node.run(scene)
    node.memory.arena.close()


def test_shortage_at_the_floor_is_logged_as_no_change(caplog: pytest.LogCaptureFixture) -> None:
    """The log would report memory that shrinks from 0.50 to 0.50 GiB."""
    caplog.set_level(logging.INFO, "tierd")
    machine = FixedMachine(GIB // 2)
    node = node_on(machine, min_bytes=32 * MIB)
    space = node.register(namespace(MIB // 4))
    hashes, parents = chain(8)
    node.reserve(1, space, hashes, parents)
    node.watch.look(0.0)
    assert "(512 MiB of 64 GiB available" in caplog.text
    assert "host memory stays at 2 MiB, because of host.min (32 MiB)" in caplog.text
    node.memory.arena.close()


class Cgroup:
    """A memory cgroup below our own."""

    def __init__(self, limit_bytes: int) -> None:
        """Raise OSError, and leave nothing behind, where no cgroup can be created."""
        parent, self.old = memory_cgroups()[0]
        self.folder = parent / f"tierd-test-{os.getpid()}"
        self.folder.mkdir()
        try:
            name = "memory.limit_in_bytes" if self.old else "memory.max"
            (self.folder / name).write_text(str(limit_bytes))
            swap = "memory.memsw.limit_in_bytes" if self.old else "memory.swap.max"
            with contextlib.suppress(OSError):
                (self.folder / swap).write_text(str(limit_bytes if self.old else 0))
        except OSError:
            self.folder.rmdir()
            raise

    @property
    def launcher(self) -> list[str]:
        """The start of a command line that runs a command in this cgroup."""
        return ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh"]

    def room_bytes(self) -> int:
        """Bytes that its processes can still take; cached file pages count as taken."""
        limit, usage = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if self.old
            else ("memory.max", "memory.current")
        )
        return int((self.folder / limit).read_text()) - int((self.folder / usage).read_text())

    def kills(self) -> int:
        """Number of its processes that the kernel has killed for lack of memory."""
        name = "memory.oom_control" if self.old else "memory.events"
        return int((self.folder / name).read_text().partition("oom_kill ")[2].split()[0])

    def close(self) -> None:
        """Remove the cgroup after its processes have ended."""
        end = time.monotonic() + 10
        while True:
            try:
                return self.folder.rmdir()
            except OSError as error:
                # Ended processes may remain in it for a moment.
                if error.errno != errno.EBUSY or time.monotonic() > end:
                    raise
                time.sleep(0.01)


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    try:
        made = Cgroup(512 * MIB)
    except (OSError, IndexError) as error:
        pytest.skip(f"this container may make no memory cgroup: {error}")
    yield made
    made.close()


FILL = """
import sys
from tests.support.blocks import chain, namespace
from tierd.client import Client
client = Client(sys.argv[1], name="fill")
handle = client.register(namespace(1 << 20))
for number in range(20):
    hashes, parents = chain(16, number)
    blocks = [(h, p, bytes([number]) * (1 << 20)) for h, p in zip(hashes, parents, strict=True)]
    assert all(client.put(handle, blocks))
client.close()
"""

HOG = """
import sys
held = []
for _ in sys.stdin:
    held.append(bytearray(b"x") * (16 << 20))
    print("taken", flush=True)
"""


@pytest.mark.slow
def test_daemon_in_a_full_container_makes_room_before_the_oom_killer(
    tmp_path: Path, cgroup: Cgroup
) -> None:
    """The kernel would kill the daemon, or an engine beside it, while L2 has memory to spare."""
    daemon = DaemonProcess(
        tmp_path / "tierd", capacity="320MiB", storage="", launcher=cgroup.launcher
    )
    with daemon:
        pid = daemon.pid
        python = [*cgroup.launcher, sys.executable, "-c"]
        # Pages are charged to the cgroup of the process that touches them first.
        subprocess.run([*python, FILL, daemon.socket], check=True)
        # Pressure is sampled once a second: a slow fill may have given a segment or two back.
        assert daemon.status()["host"]["allocated_bytes"] >= 290 * MIB
        assert memory_files_of(pid) >= 290 * MIB
        with subprocess.Popen([*python, HOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as hog:
            assert hog.stdout is not None
            assert hog.stdin is not None
            for _ in range(10):
                # Never take more at once than the daemon keeps free for others.
                wait_until(lambda: cgroup.room_bytes() > 32 * MIB, 20, "L2 makes no room")
                hog.stdin.write(b"more\n")
                hog.stdin.flush()
                assert hog.stdout.readline() == b"taken\n"
            assert cgroup.kills() == 0
            assert daemon.pid == pid
            wait_until(
                lambda: daemon.status()["host"]["allocated_bytes"] < 280 * MIB,
                20,
                "L2 does not shrink",
            )
            status = daemon.status()
            assert status["host"]["allocated_bytes"] >= 80 * MIB
            assert status["counters"]["evicted_shrunk_blocks_total"] > 20
            wait_until(lambda: memory_files_of(pid) < 280 * MIB, 20, "its memory is not returned")
            hog.communicate()
        assert "memory is short" in daemon.log.read_text()
