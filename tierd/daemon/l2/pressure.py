"""The machine's memory, looked at once a second, and L2 made smaller or larger by what it says.

Decided in `tierd.core.l2.pressure`. All that is read is in /proc and /sys, which answer at once: on
the loop, because a thread behind a busy machine's other threads would come too late.
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
"""How often the machine is looked at. What others can take meanwhile is what the reserve is for;
L2 itself takes no more than was there at the last look."""

PAUSE_SHARE: Final = 1.0
"""Pause after a segment that was given back, to the time that it took: what stays of it is copied,
0.6 ms a MiB, and requests need the loop as well."""


class Machine(Protocol):
    """What the memory of L2 comes from."""

    def sample(self) -> MemorySample:
        """How it is now."""


class _Group(NamedTuple):
    """Files of a memory cgroup."""

    folder: Path
    limits: tuple[str, ...]
    usage: str
    files: tuple[bytes, ...]
    """Fields of memory.stat that count files, whose pages can be had again."""


class ThisMachine:
    """The machine that this process runs on, and the cgroups around it."""

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
        # Our own cgroup's stalls if they are told: those of others are at limits of their own.
        self._stalls = [folder / "memory.pressure" for folder, _ in found]
        self._stalls.append(root / "proc/pressure/memory")

    def sample(self) -> MemorySample:
        """How it is now; a few files, 0.1 to 0.3 ms."""
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
        """Microseconds of "some" and of "full"; 0 and 0 from a kernel that does not tell."""
        for file in self._stalls:
            try:
                lines = file.read_bytes().splitlines()
            except OSError:
                continue
            totals = {line[:4]: int(line.rpartition(b"total=")[2]) for line in lines}
            return totals.get(b"some", 0), totals.get(b"full", 0)
        return 0, 0


class MemoryWatch:
    """Keeps L2 within what the machine has for it."""

    def __init__(self, memory: HostMemory, pressure: Pressure, machine: Machine | None) -> None:
        """Without a machine there always is enough."""
        self.pressure = pressure
        self._memory = memory
        self._machine = machine
        self._told = False

    async def run(self, clock: Clock) -> None:
        """Look and act, for ever."""
        while True:
            self.look(clock.monotonic_ns() / 1e9)
            next_ns = clock.monotonic_ns() + int(PERIOD_S * 1e9)
            began_ns = clock.monotonic_ns()
            while began_ns < next_ns and self._memory.shrink():
                await asyncio.sleep(PAUSE_SHARE * (clock.monotonic_ns() - began_ns) / 1e9)
                began_ns = clock.monotonic_ns()
            await asyncio.sleep(max(0.0, (next_ns - clock.monotonic_ns()) / 1e9))

    def look(self, now_s: float) -> None:
        """Set the limit by what the machine says now."""
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
        if pressure.short and not self._told:
            self._told = True
            self._memory.counters["pressure_shrinks_total"] += 1
            log.warning(
                "memory is short (%s of %s available, tasks stalled %.0f %% of the time): %s",
                about(sample.available_bytes),
                about(sample.total_bytes),
                100 * pressure.stalled_share,
                _consequence(host.allocated_bytes, limit, pressure.min_bytes),
            )
        elif self._told and pressure.is_calm(now_s) and limit <= before:
            self._told = False
            log.info(
                "memory is no longer short: host memory may have %s of %s",
                about(limit),
                about(pressure.capacity_bytes),
            )


def _consequence(allocated_bytes: int, limit_bytes: int, min_bytes: int) -> str:
    """What becomes of host memory while the machine is short of it."""
    least = f"host.min ({about(min_bytes)})"
    if limit_bytes < allocated_bytes:
        return f"host memory shrinks {change(allocated_bytes, limit_bytes)}, to {least} at least"
    return f"host memory stays at {about(allocated_bytes)}, as {least} says"


def _fields(file: Path) -> dict[bytes, int]:
    """First word and number of each line."""
    words = (line.split() for line in file.read_bytes().splitlines())
    return {parts[0]: int(parts[1]) for parts in words if len(parts) > 1}


def _number(file: Path, otherwise: int) -> int:
    try:
        return int(file.read_bytes())
    except (OSError, ValueError):
        # Not there, or "max".
        return otherwise
