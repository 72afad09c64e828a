"""Samples the machine's memory once a second, and shrinks or grows host memory accordingly.

`tierd.core.l2.pressure` decides. The samples are read from /proc and /sys, which never block, on
the event loop: on a busy machine a thread would run too late.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from tierd.clock import Clock
from tierd.core.l2.pressure import MemorySample, Pressure
from tierd.daemon.l2.memory import HostMemory
from tierd.limits import memory_cgroups
from tierd.sizes import about, change

log = logging.getLogger("tierd")

PERIOD_S: Final = 1.0
"""Interval of samples. The reserve covers what other processes take meanwhile; host memory grows by
no more than the last sample allows."""

PAUSE_SHARE: Final = 1.0
"""Pause after giving a segment back, relative to the time that took: blocks that stay are copied,
at 0.6 ms per MiB, and requests need the loop as well."""


class Machine(Protocol):
    """The machine that provides host memory."""

    def sample(self) -> MemorySample:
        """Sample the memory now."""


class _Group(NamedTuple):
    """Files of a memory cgroup."""

    folder: Path
    limits: tuple[str, ...]
    usage: str
    files: tuple[bytes, ...]
    """Fields of memory.stat that count file pages, which the kernel can reclaim."""


class ThisMachine:
    """The machine of this process, with the cgroups around it."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        found = memory_cgroups(root)
        self._groups = [
            _Group(
                folder,
                ("memory.limit_in_bytes",),
                "memory.usage_in_bytes",
                (b"total_inactive_file", b"total_active_file"),
            )
            if old
            else _Group(
                folder,
                ("memory.max", "memory.high"),
                "memory.current",
                (b"inactive_file", b"active_file"),
            )
            for folder, old in found
        ]
        # Stalls of this process's own cgroup if the kernel reports them: other cgroups may stall at
        # their own limits.
        self._stalls = [folder / "memory.pressure" for folder, _ in found]
        self._stalls.append(root / "proc/pressure/memory")

    def sample(self) -> MemorySample:
        """Sample the memory now, from a few files in 0.1 to 0.3 ms."""
        memory = _fields(self._root / "proc/meminfo")
        ram, available = memory[b"MemTotal:"] * 1024, memory[b"MemAvailable:"] * 1024
        total = ram
        for group in self._groups:
            bound = min(_number(group.folder / name, ram) for name in group.limits)
            if bound >= ram:
                continue
            try:
                usage = int((group.folder / group.usage).read_bytes())
                counted = _fields(group.folder / "memory.stat")
            except (OSError, ValueError):
                continue
            files = sum(counted.get(name, 0) for name in group.files)
            total = min(total, bound)
            available = min(available, max(0, bound - usage) + files)
        return MemorySample(total, available, *self._stalled())

    def _stalled(self) -> tuple[int, int]:
        """Return microseconds of "some" and "full" stalls; zeros if the kernel reports none."""
        for file in self._stalls:
            try:
                lines = file.read_bytes().splitlines()
            except OSError:
                continue
            totals = {line[:4]: int(line.rpartition(b"total=")[2]) for line in lines}
            return totals.get(b"some", 0), totals.get(b"full", 0)
        return 0, 0


class MemoryWatch:
    """Keeps host memory within the memory that the machine has for it."""

    def __init__(self, memory: HostMemory, pressure: Pressure, machine: Machine | None) -> None:
        """Without a machine, the limit is always the capacity."""
        self.pressure = pressure
        self._memory = memory
        self._machine = machine
        self._reported_short = False

    async def run(self, clock: Clock) -> None:
        """Sample and act until cancelled."""
        while True:
            self.look(clock.monotonic_ns() / 1e9)
            next_ns = clock.monotonic_ns() + int(PERIOD_S * 1e9)
            began_ns = clock.monotonic_ns()
            while began_ns < next_ns and self._memory.shrink():
                await asyncio.sleep(PAUSE_SHARE * (clock.monotonic_ns() - began_ns) / 1e9)
                began_ns = clock.monotonic_ns()
            await asyncio.sleep(max(0.0, (next_ns - clock.monotonic_ns()) / 1e9))

    def look(self, now_s: float) -> None:
        """Set the limit from a sample of now."""
        host, pressure = self._memory.host, self.pressure
        if self._machine is None:
            host.set_limit(pressure.capacity_bytes)
            return
        sample, before = self._machine.sample(), pressure.limit_bytes
        limit = pressure.decide(
            sample,
            now_s,
            allocated_bytes=host.allocated_bytes,
            resident_bytes=self._memory.resident_bytes(),
        )
        host.set_limit(limit)
        if pressure.short and not self._reported_short:
            self._reported_short = True
            self._memory.counters["pressure_shrinks_total"] += 1
            log.warning(
                "memory is short (%s of %s available, tasks stalled %.0f %% of the time): %s",
                about(sample.available_bytes),
                about(sample.total_bytes),
                100 * pressure.stalled_share,
                _consequence(host.allocated_bytes, limit, pressure.min_bytes),
            )
        elif self._reported_short and pressure.is_calm(now_s) and limit <= before:
            self._reported_short = False
            log.info(
                "memory is no longer short: host memory may have %s of %s",
                about(limit),
                about(pressure.capacity_bytes),
            )


def _consequence(allocated_bytes: int, limit_bytes: int, min_bytes: int) -> str:
    """Describe how host memory changes while the machine is short of memory."""
    least = f"host.min ({about(min_bytes)})"
    if limit_bytes < allocated_bytes:
        return f"host memory shrinks {change(allocated_bytes, limit_bytes)}, to {least} at least"
    return f"host memory stays at {about(allocated_bytes)}, because of {least}"


def _fields(file: Path) -> dict[bytes, int]:
    """Return the first word and the number of each line."""
    words = (line.split() for line in file.read_bytes().splitlines())
    return {parts[0]: int(parts[1]) for parts in words if len(parts) > 1}


def _number(file: Path, default: int) -> int:
    try:
        return int(file.read_bytes())
    except (OSError, ValueError):
        # Missing, or "max".
        return default
