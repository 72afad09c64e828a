"""The limit of host memory: how it is decided, and how the machine's memory is read."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tierd.core.l2.pressure import CALM_S, FORGOTTEN_S, MemorySample, Pressure
from tierd.daemon.l2.pressure import ThisMachine

GIB = 1 << 30
MIB = 1 << 20


# --- the decision ---------------------------------------------------------------------


class SimulatedMachine:
    """A machine with its memory, its use by others, and its stalls when little is left.

    L2 takes all that it is allowed at once. With less than `needed` bytes available, tasks stall.
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


def test_idle_machine_keeps_the_full_capacity() -> None:
    """L2 would be smaller than configured on a machine with memory to spare."""
    machine = SimulatedMachine(64 * GIB, 40 * GIB)
    machine.others = 10 * GIB
    machine.run(60)
    assert machine.held == 40 * GIB
    assert not machine.shrinks


def test_host_memory_shrinks_for_others_and_grows_back() -> None:
    """An engine that loads its weights would trigger the machine's OOM killer."""
    machine = SimulatedMachine(64 * GIB, 40 * GIB, floor=10 * GIB)
    machine.run(10)

    def grow() -> None:
        machine.others += 300 * MIB

    machine.run(120, grow)
    assert machine.others > 35 * GIB
    assert machine.available >= GIB
    assert 25 * GIB < machine.held < 30 * GIB
    machine.others = 10 * GIB
    machine.run(CALM_S - 5)
    assert machine.held < 30 * GIB, "it grew before memory was calm"
    machine.run(120)
    assert machine.held == 40 * GIB


def test_shrinking_stops_at_the_floor() -> None:
    """Another program that takes all memory would leave nothing of L2."""
    machine = SimulatedMachine(64 * GIB, 40 * GIB, floor=10 * GIB)
    machine.others = 53 * GIB
    machine.run(30)
    assert machine.held == 10 * GIB


@pytest.mark.parametrize("needed", [0, GIB, 3 * GIB, 4 * GIB])
def test_host_memory_settles_when_its_own_size_causes_stalls(needed: int) -> None:
    """L2 would swing between too much and too little, and evict its blocks each time."""
    machine = SimulatedMachine(64 * GIB, 60 * GIB, needed=needed)
    machine.others = 2 * GIB
    machine.run(300)
    assert machine.available >= needed
    settled, before = machine.held, machine.shrinks
    assert settled > 50 * GIB, "it shrank far more than needed"
    machine.run(3600)
    assert machine.shrinks - before <= 4, "it shrinks again and again"
    assert abs(machine.held - settled) < 4 * GIB


def test_small_fluctuations_of_free_memory_do_not_shrink_host_memory() -> None:
    """Every fluctuation of the page cache would evict blocks."""
    machine = SimulatedMachine(64 * GIB, 60 * GIB)
    chance = random.Random(1)

    def fluctuate() -> None:
        machine.others = 8 * GIB + chance.randrange(900 * MIB)

    machine.run(120, fluctuate)
    before = machine.shrinks
    machine.run(3600, fluctuate)
    assert machine.shrinks == before


def test_stalls_with_plenty_of_available_memory_do_not_shrink_host_memory() -> None:
    """A container that thrashes within its own limit would take L2 from everyone else."""
    machine = SimulatedMachine(64 * GIB, 40 * GIB, needed=64 * GIB)
    machine.others = 10 * GIB
    machine.run(600)
    assert machine.held == 40 * GIB


def test_full_stalls_shrink_host_memory_faster() -> None:
    """On a machine that makes no progress, small steps would take a minute."""
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


def test_limit_learned_from_stalls_is_forgotten() -> None:
    """One bad minute would cost a part of L2 until the next restart."""
    machine = SimulatedMachine(64 * GIB, 60 * GIB, needed=3 * GIB)
    machine.others = 2 * GIB
    machine.run(120)
    assert machine.held < 60 * GIB
    machine.needed = 0
    machine.run(6 * FORGOTTEN_S)
    assert machine.held >= 59 * GIB


def test_allocated_but_untouched_memory_counts_as_used() -> None:
    """L2 would hand out segments for which no memory is left, and be killed as they fill."""
    pressure = Pressure(60 * GIB, GIB)
    sample = MemorySample(64 * GIB, 20 * GIB, 0, 0)
    # Of 30 GiB that are allocated, 10 GiB have been touched: 20 GiB more are to come.
    limit = pressure.decide(sample, 0.0, allocated_bytes=30 * GIB, resident_bytes=10 * GIB)
    assert limit < 30 * GIB
    pressure = Pressure(60 * GIB, GIB)
    limit = pressure.decide(sample, 0.0, allocated_bytes=30 * GIB, resident_bytes=30 * GIB)
    assert 45 * GIB < limit < 50 * GIB


def test_resize_reaches_the_new_capacity() -> None:
    """A reloaded capacity would have no effect, or exceed the machine's memory."""
    machine = SimulatedMachine(64 * GIB, 20 * GIB, floor=5 * GIB)
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


# --- reading the machine's memory -------------------------------------------------------


def put(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(text))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 64 GiB, of which 40 GiB are available."""
    total, available = 64 * GIB // 1024, 40 * GIB // 1024
    put(
        tmp_path,
        "proc/meminfo",
        f"MemTotal:  {total} kB\nMemFree: 5 kB\nMemAvailable:  {available} kB\nHugePages: 0\n",
    )
    return tmp_path


def test_sample_without_pressure_files_reports_no_stalls(root: Path) -> None:
    """tierd would not start on a kernel that is built without PSI."""
    assert ThisMachine(root).sample() == MemorySample(64 * GIB, 40 * GIB, 0, 0)


def test_sample_without_cgroups_reads_the_machines_stalls(root: Path) -> None:
    """Stalls would go unseen on a machine that has no cgroup for tierd."""
    put(
        root,
        "proc/pressure/memory",
        "some avg10=1.00 avg60=0.00 avg300=0.00 total=1234\n"
        "full avg10=0.00 avg60=0.00 avg300=0.00 total=56\n",
    )
    put(root, "proc/self/cgroup", "0::/\n")
    assert ThisMachine(root).sample() == MemorySample(64 * GIB, 40 * GIB, 1234, 56)


def test_sample_in_a_container_respects_its_limits(root: Path) -> None:
    """L2 would fill until the container's limit kills it, though the machine has memory left."""
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
    # An outer cgroup may be tighter still.
    put(root, "sys/fs/cgroup/pod/memory.max", str(12 * GIB))
    put(root, "sys/fs/cgroup/pod/memory.current", str(12 * GIB))
    put(root, "sys/fs/cgroup/pod/memory.stat", f"active_file {3 * GIB}\n")
    assert machine.sample() == MemorySample(10 * GIB, 3 * GIB, 7, 5)


def test_sample_reads_cgroup_v1_limits(root: Path) -> None:
    """A container under cgroup v1 would be killed at its limit."""
    put(root, "proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/ab\n0::/")
    group = "sys/fs/cgroup/memory"
    put(root, f"{group}/memory.limit_in_bytes", str(8 * GIB))
    put(root, f"{group}/memory.usage_in_bytes", str(7 * GIB))
    put(root, f"{group}/memory.stat", f"cache 5\nactive_file 1\ntotal_inactive_file {GIB}\n")
    assert ThisMachine(root).sample() == MemorySample(8 * GIB, 2 * GIB, 0, 0)
