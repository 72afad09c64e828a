"""Host memory when the machine is short of memory, or the capacity becomes another."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import random
import re
import subprocess
import sys
import textwrap
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
from tierd.core.l2.pressure import CALM_S, FORGOTTEN_S, MemorySample, Pressure
from tierd.core.l2.space import Space
from tierd.core.reasons import Evicted, Refusal
from tierd.daemon.l2.pressure import ThisMachine
from tierd.daemon.node import Node
from tierd.daemon.options import NodeOptions
from tierd.limits import memory_cgroups
from tierd.types import PAGE_BYTES

GIB = 1 << 30
MIB = 1 << 20


# --- the decision ---------------------------------------------------------------------


class MadeUp:
    """A machine: memory, what others of it use, and how it behaves when little is left.

    L2 takes all that it may have at once. With less than `needed` bytes available tasks stall.
    """

    def __init__(self, total: int, capacity: int, *, needed: int = 0, floor: int = GIB) -> None:
        self.total = total
        self.needed = needed
        self.others = 0
        self.pressure = Pressure(capacity, floor)
        self.held = 0
        self.now_s = 0.0
        self.stalled_us = 0.0
        self.stuck_us = 0.0
        self.shrinks = 0

    @property
    def available(self) -> int:
        return self.total - self.others - self.held

    def run(self, seconds: float, each: Callable[[], None] = lambda: None) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 1.0
            each()
            assert self.available > 0, "the machine is out of memory"
            if self.available < self.needed:
                self.stalled_us += 3e5
                self.stuck_us += 1e5 if self.available < self.needed / 2 else 0
            sample = MemorySample(
                self.total, self.available, int(self.stalled_us), int(self.stuck_us)
            )
            limit = self.pressure.decide(
                sample, self.now_s, allocated_bytes=self.held, resident_bytes=self.held
            )
            self.shrinks += limit < self.held
            self.held = limit


def test_an_idle_machine_leaves_the_capacity_alone() -> None:
    """L2 would be smaller than its operator paid for, on a machine with memory to spare."""
    machine = MadeUp(64 * GIB, 40 * GIB)
    machine.others = 10 * GIB
    machine.run(60)
    assert machine.held == 40 * GIB
    assert not machine.shrinks


def test_what_others_need_is_given_back_and_had_again() -> None:
    """An engine that loads its weights would have the machine's OOM killer let loose."""
    machine = MadeUp(64 * GIB, 40 * GIB, floor=10 * GIB)
    machine.run(10)

    def grow() -> None:
        machine.others += 300 * MIB

    machine.run(120, grow)
    assert machine.others > 35 * GIB
    assert machine.available >= GIB
    assert 25 * GIB < machine.held < 30 * GIB
    machine.others = 10 * GIB
    machine.run(CALM_S - 5)
    assert machine.held < 30 * GIB, "it grew before it could be sure"
    machine.run(120)
    assert machine.held == 40 * GIB


def test_the_floor_is_kept() -> None:
    """Nothing of L2 would be left, for the sake of somebody who takes all there is."""
    machine = MadeUp(64 * GIB, 40 * GIB, floor=10 * GIB)
    machine.others = 53 * GIB
    machine.run(30)
    assert machine.held == 10 * GIB


@pytest.mark.parametrize("needed", [0, GIB, 3 * GIB, 4 * GIB])
def test_memory_pressure_of_our_own_making_ends(needed: int) -> None:
    """L2 would swing between too much and too little for ever, and evict all it has each time."""
    machine = MadeUp(64 * GIB, 60 * GIB, needed=needed)
    machine.others = 2 * GIB
    machine.run(300)
    assert machine.available >= needed
    settled, before = machine.held, machine.shrinks
    assert settled > 50 * GIB, "far more was given up than was needed"
    machine.run(3600)
    assert machine.shrinks - before <= 4, "it shrinks again and again"
    assert abs(machine.held - settled) < 4 * GIB


def test_a_fluctuating_machine_is_not_followed() -> None:
    """Each breath of the page cache would evict blocks."""
    machine = MadeUp(64 * GIB, 60 * GIB)
    chance = random.Random(1)

    def breathe() -> None:
        machine.others = 8 * GIB + chance.randrange(900 * MIB)

    machine.run(120, breathe)
    before = machine.shrinks
    machine.run(3600, breathe)
    assert machine.shrinks == before


def test_stalls_of_others_at_their_own_limits_mean_nothing() -> None:
    """A container that thrashes within its own limit would take L2 from everybody else."""
    machine = MadeUp(64 * GIB, 40 * GIB, needed=64 * GIB)
    machine.others = 10 * GIB
    machine.run(600)
    assert machine.held == 40 * GIB


def test_a_machine_that_stands_still_is_helped_faster() -> None:
    """Where nothing gets done any more, small steps would take a minute."""
    held = []
    for stuck in (False, True):
        pressure = Pressure(8 * GIB, GIB)
        limit = 8 * GIB
        for second in range(2):
            sample = MemorySample(64 * GIB, 3 * GIB, second * 500_000, second * stuck * 500_000)
            limit = pressure.decide(
                sample, float(second), allocated_bytes=limit, resident_bytes=limit
            )
        held.append(limit)
    slow, fast = held
    assert fast < slow < 8 * GIB


def test_what_stalls_have_taught_is_forgotten() -> None:
    """One bad minute would cost a part of L2 until the next restart."""
    machine = MadeUp(64 * GIB, 60 * GIB, needed=3 * GIB)
    machine.others = 2 * GIB
    machine.run(120)
    assert machine.held < 60 * GIB
    machine.needed = 0
    machine.run(6 * FORGOTTEN_S)
    assert machine.held >= 59 * GIB


def test_memory_that_is_promised_but_untouched_counts_as_taken() -> None:
    """L2 would hand out segments that no memory is left for, and be killed as they are filled."""
    pressure = Pressure(60 * GIB, GIB)
    sample = MemorySample(64 * GIB, 20 * GIB, 0, 0)
    # Of 30 GiB that are handed out 10 GiB have been touched: 20 GiB more are to come.
    limit = pressure.decide(sample, 0.0, allocated_bytes=30 * GIB, resident_bytes=10 * GIB)
    assert limit < 30 * GIB
    pressure = Pressure(60 * GIB, GIB)
    limit = pressure.decide(sample, 0.0, allocated_bytes=30 * GIB, resident_bytes=30 * GIB)
    assert 45 * GIB < limit < 50 * GIB


def test_another_capacity_is_reached() -> None:
    """A capacity that a reload has changed would stay what it was, or be set beyond the memory."""
    machine = MadeUp(64 * GIB, 20 * GIB, floor=5 * GIB)
    machine.run(5)
    machine.pressure.resize(40 * GIB, 10 * GIB)
    machine.run(5)
    assert machine.held == 40 * GIB
    machine.pressure.resize(8 * GIB, 10 * GIB)
    machine.run(5)
    assert machine.held == 8 * GIB
    machine.others = 58 * GIB
    machine.held = 3 * GIB
    machine.pressure.resize(50 * GIB, 4 * GIB)
    machine.run(5)
    assert machine.held == 4 * GIB


# --- what the machine says --------------------------------------------------------------


def put(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(text))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 64 GiB, of which 40 are available."""
    total, available = 64 * GIB // 1024, 40 * GIB // 1024
    put(
        tmp_path,
        "proc/meminfo",
        f"MemTotal:  {total} kB\nMemFree: 5 kB\nMemAvailable:  {available} kB\nHugePages: 0\n",
    )
    return tmp_path


def test_a_kernel_without_pressure_files_is_read(root: Path) -> None:
    """tierd would not start on a kernel that is built without PSI."""
    assert ThisMachine(root).sample() == MemorySample(64 * GIB, 40 * GIB, 0, 0)


def test_the_machine_without_cgroups(root: Path) -> None:
    """Stalls would not be seen on a machine that has no cgroup for tierd."""
    put(
        root,
        "proc/pressure/memory",
        "some avg10=1.00 avg60=0.00 avg300=0.00 total=1234\n"
        "full avg10=0.00 avg60=0.00 avg300=0.00 total=56\n",
    )
    put(root, "proc/self/cgroup", "0::/\n")
    assert ThisMachine(root).sample() == MemorySample(64 * GIB, 40 * GIB, 1234, 56)


def test_a_container_counts_what_it_may_have(root: Path) -> None:
    """L2 would fill until the container's limit kills it: the machine has memory left."""
    put(root, "proc/self/cgroup", "0::/pod/tierd")
    put(root, "proc/pressure/memory", "some avg10=0 total=9\nfull avg10=0 total=9\n")
    tierd = "sys/fs/cgroup/pod/tierd"
    put(root, f"{tierd}/memory.pressure", "some avg10=0 total=7\nfull avg10=0 total=5\n")
    put(root, f"{tierd}/memory.max", "max")
    put(root, f"{tierd}/memory.high", str(10 * GIB))
    put(root, f"{tierd}/memory.current", str(9 * GIB))
    put(root, f"{tierd}/memory.stat", f"anon 5\nactive_file {GIB}\ninactive_file {2 * GIB}\n")
    machine = ThisMachine(root)
    assert machine.sample() == MemorySample(10 * GIB, 4 * GIB, 7, 5)
    # One further out may be tighter still.
    put(root, "sys/fs/cgroup/pod/memory.max", str(12 * GIB))
    put(root, "sys/fs/cgroup/pod/memory.current", str(12 * GIB))
    put(root, "sys/fs/cgroup/pod/memory.stat", f"active_file {3 * GIB}\n")
    assert machine.sample() == MemorySample(10 * GIB, 3 * GIB, 7, 5)


def test_an_old_cgroup_counts(root: Path) -> None:
    """A container under cgroup v1 would be killed at its limit."""
    put(root, "proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/ab\n0::/")
    group = "sys/fs/cgroup/memory"
    put(root, f"{group}/memory.limit_in_bytes", str(8 * GIB))
    put(root, f"{group}/memory.usage_in_bytes", str(7 * GIB))
    put(root, f"{group}/memory.stat", f"cache 5\nactive_file 1\ntotal_inactive_file {GIB}\n")
    assert ThisMachine(root).sample() == MemorySample(8 * GIB, 2 * GIB, 0, 0)


# --- the arena --------------------------------------------------------------------------


def arena(slots: int, *models: str, segment_slots: int = 4) -> tuple[HostTier, list[Space]]:
    host = HostTier(slots * PAGE_BYTES, segment_slots * PAGE_BYTES)
    spaces = [host.open_space(namespace(PAGE_BYTES, model=model)) for model in models]
    return host, [space for space in spaces if space is not None]


def store(host: HostTier, space: Space, count: int, tag: str) -> list[bytes]:
    """Store a chain; how much of it got room."""
    hashes, parents = chain(count, tag)
    stored = []
    for at in range(0, count, 4):
        some = hashes[at : at + 4]
        reservation, _ = host.reserve(1, space, some, parents[at : at + 4])
        host.commit(1, reservation.reservation_id, 4)
        stored += [h for h, slot in zip(some, reservation.slots, strict=True) if slot >= 0]
    return stored


def shrink(host: HostTier, limit_bytes: int) -> int:
    """Shrink as far as it goes; calls that gave a segment back."""
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


def test_shrinking_takes_the_coldest_and_idle_ones_first() -> None:
    """A busy engine's prefixes would go for the sake of one that has left."""
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
    assert len(host.prefix(busy, cold)) == 8, "more went than had to"
    assert host.evicted[Evicted.SHRUNK] == 24


def test_a_smaller_arena_does_not_grow_but_still_takes_turns() -> None:
    """Memory that was given back would be taken again at once; or nobody could store any more."""
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


def test_what_is_held_keeps_its_segments_until_it_is_not() -> None:
    """A lease would be broken to make room, or the shrinking given up for good."""
    host, (space,) = arena(16, "m")
    hashes = store(host, space, 16, "leased")
    lease = host.grant(1, [(space, host.prefix(space, hashes))], 10)
    assert shrink(host, 4 * PAGE_BYTES) == 0
    assert len(host.prefix(space, hashes)) == 16
    # While there still is more than the limit, nothing is added to it.
    more, parents = chain(4, "more")
    reservation, effects = host.reserve(2, space, more, parents)
    assert set(reservation.slots) == {Refusal.NO_ROOM}
    assert not effects
    host.release(lease.lease_id, 1)
    assert shrink(host, 4 * PAGE_BYTES) == 3
    assert len(host.prefix(space, hashes)) == 4


def test_pins_give_way_to_the_machine() -> None:
    """Blocks that an engine wants kept would be kept until the OOM killer comes."""
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


def test_another_capacity_takes_its_budgets_along() -> None:
    """After a reload engines could pin, or reserve, more than there is."""
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


class Given:
    """A machine that says what it is told to."""

    def __init__(self, available_bytes: int) -> None:
        self.available_bytes = available_bytes

    def sample(self) -> MemorySample:
        return MemorySample(64 * GIB, self.available_bytes, 0, 0)


def node_on(machine: Given, min_bytes: int) -> Node:
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
async def test_memory_goes_back_to_the_machine(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number would be smaller, and the machine none the better for it."""
    monkeypatch.setattr("tierd.daemon.l2.pressure.PERIOD_S", 0.02)
    monkeypatch.setattr("tierd.core.l2.pressure.CALM_S", 0.2)
    monkeypatch.setattr("tierd.core.l2.pressure.GROWTH_SHARE_PER_S", 10.0)
    caplog.set_level(logging.INFO, "tierd")
    machine = Given(32 * GIB)
    node = node_on(machine, min_bytes=8 * MIB)
    space = node.register(namespace(MIB // 4))

    def memory_files() -> int:
        """Bytes of memory behind the node's segments, as the kernel has them."""
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
        # A little less is to stay than there is: the rest is L2's to give.
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


def test_a_shortage_that_changes_nothing_is_said_so(caplog: pytest.LogCaptureFixture) -> None:
    """The log would tell of memory that shrinks from 0.50 to 0.50 GiB."""
    caplog.set_level(logging.INFO, "tierd")
    machine = Given(GIB // 2)
    node = node_on(machine, min_bytes=32 * MIB)
    space = node.register(namespace(MIB // 4))
    hashes, parents = chain(8)
    node.reserve(1, space, hashes, parents)
    node.watch.look(0.0)
    assert "(512 MiB of 64 GiB available" in caplog.text
    assert "host memory stays at 2 MiB, as host.min (32 MiB) says" in caplog.text
    node.memory.arena.close()


class Cgroup:
    """A memory cgroup below our own."""

    def __init__(self, limit_bytes: int) -> None:
        """Raises OSError where none can be made, and leaves nothing then."""
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
        """Begins a command that runs in it."""
        return ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh"]

    def room_bytes(self) -> int:
        """What its processes can still take; what is cached of files counts as taken."""
        limit, usage = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if self.old
            else ("memory.max", "memory.current")
        )
        return int((self.folder / limit).read_text()) - int((self.folder / usage).read_text())

    def kills(self) -> int:
        """Processes of it that the kernel has killed for want of memory."""
        name = "memory.oom_control" if self.old else "memory.events"
        return int((self.folder / name).read_text().partition("oom_kill ")[2].split()[0])

    def close(self) -> None:
        """Remove it; its processes have ended."""
        end = time.monotonic() + 10
        while True:
            try:
                return self.folder.rmdir()
            except OSError as error:
                # Those that have ended may still be in it for a moment.
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
def test_a_container_that_fills_up_kills_nobody(tmp_path: Path, cgroup: Cgroup) -> None:
    """The kernel would kill the daemon, or an engine beside it, while L2 has memory to spare."""
    daemon = DaemonProcess(
        tmp_path / "tierd", capacity="320MiB", storage="", launcher=cgroup.launcher
    )
    with daemon:
        pid = daemon.pid
        python = [*cgroup.launcher, sys.executable, "-c"]
        # Pages count for the cgroup of who touches them first, so it must be one in it.
        subprocess.run([*python, FILL, daemon.socket], check=True)
        # It looks once a second: if this took longer, a segment or two have gone back already.
        assert daemon.status()["host"]["allocated_bytes"] >= 290 * MIB
        assert memory_files_of(pid) >= 290 * MIB
        with subprocess.Popen([*python, HOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as hog:
            assert hog.stdout is not None
            assert hog.stdin is not None
            for _ in range(10):
                # Never more at once than what the daemon keeps free for others.
                wait_until(lambda: cgroup.room_bytes() > 32 * MIB, 20, "L2 makes no room")
                hog.stdin.write(b"more\n")
                hog.stdin.flush()
                assert hog.stdout.readline() == b"taken\n"
            assert cgroup.kills() == 0
            assert daemon.pid == pid
            wait_until(
                lambda: daemon.status()["host"]["allocated_bytes"] < 280 * MIB, 20, "L2 is as large"
            )
            status = daemon.status()
            assert status["host"]["allocated_bytes"] >= 80 * MIB
            assert status["counters"]["evicted_shrunk_blocks_total"] > 20
            wait_until(lambda: memory_files_of(pid) < 280 * MIB, 20, "its memory does not go")
            hog.communicate()
        assert "memory is short" in daemon.log.read_text()
