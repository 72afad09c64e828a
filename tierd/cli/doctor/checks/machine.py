"""Checks of the machine: memory, huge pages, memlock, clock. All files lie below `Scene.root`."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tierd.cli.common.operator import table, whole
from tierd.cli.common.text import size
from tierd.cli.doctor.checks.finding import Finding, Level
from tierd.cli.doctor.checks.node import Scene
from tierd.limits import memory_limit

CAPACITY_SHARE_MAX: Final = 0.95
"""Largest share of memory with which tierd starts (memory.arena.check_capacity)."""

SHM_BYTES_MIN: Final = 1 << 30
"""What vLLM's processes and NCCL need in /dev/shm. A container's default is 64 MiB."""

_SLOW_CLOCKS: Final = frozenset({"hpet", "acpi_pm", "jiffies", "refined-jiffies"})
_MEMLOCK: Final = re.compile(r"^Max locked memory\s+(\S+)", re.MULTILINE)


def look_at_machine(scene: Scene) -> Iterator[Finding]:
    """Check that host memory fits the machine, and that it is set up for speed."""
    host = table(scene.status["host"]) if scene.status is not None else None
    if host is not None:
        capacity_bytes = whole(host["capacity_bytes"])
        allocated_bytes = whole(host["allocated_bytes"])
        yield from _pressure(host)
    elif scene.config is not None:
        capacity_bytes, allocated_bytes = scene.config.host.capacity, 0
    else:
        return
    yield from _room(scene, capacity_bytes, allocated_bytes)
    yield from _huge_pages(scene, host)
    yield from _device(scene, capacity_bytes)
    yield from _shm(scene)
    clock = _text(scene.root / "sys/devices/system/clocksource/clocksource0/current_clocksource")
    if clock in _SLOW_CLOCKS:
        yield Finding(
            Level.WARNING,
            "clock",
            "slow_clock",
            f"the kernel's clock source is {clock}",
            "reading the clock takes a microsecond or more, and tierd reads it at every call",
            "dmesg says why the kernel rejected tsc; on a virtual machine use the paravirtual "
            "clock",
        )


def _pressure(host: dict[str, object]) -> Iterator[Finding]:
    limit_bytes = whole(host["limit_bytes"])
    if limit_bytes < whole(host["capacity_bytes"]):
        yield Finding(
            Level.WARNING,
            "memory",
            "pressure",
            f"memory pressure: tierd limits host memory to {size(limit_bytes)} of "
            f"{size(host['capacity_bytes'])}",
            "host memory keeps fewer prefixes",
            "find the process that uses the memory (ps, systemd-cgtop), or lower host.capacity",
        )


def _room(scene: Scene, capacity_bytes: int, allocated_bytes: int) -> Iterator[Finding]:
    limit = memory_limit(scene.root)
    free_bytes = _available_bytes(scene.root)
    missing_bytes = capacity_bytes - allocated_bytes
    if capacity_bytes > CAPACITY_SHARE_MAX * limit.size_bytes:
        yield Finding(
            Level.FAULT,
            "memory",
            "capacity",
            f"host.capacity is {size(capacity_bytes)}, and {limit.by} is {size(limit.size_bytes)}",
            "tierd does not start, or the kernel kills it",
            "lower host.capacity and leave memory for the engine",
        )
    elif free_bytes is not None and missing_bytes > free_bytes:
        yield Finding(
            Level.WARNING,
            "memory",
            "free_memory",
            f"host memory may grow by {size(missing_bytes)}, but only {size(free_bytes)} are "
            "available",
            "the machine runs out of memory before host memory is full",
            "lower host.capacity, or free memory",
        )
    else:
        yield Finding(
            Level.OK,
            "memory",
            "capacity",
            f"{size(capacity_bytes)} of host memory, {size(allocated_bytes)} of it allocated; "
            f"{limit.by} is {size(limit.size_bytes)}",
        )


def _available_bytes(root: Path) -> int | None:
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) << 10 if found else None


def _huge_pages(scene: Scene, host: dict[str, object] | None) -> Iterator[Finding]:
    wanted = scene.config.host.huge_pages if scene.config is not None else True
    switch = scene.root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    mode = _text(switch).partition("[")[2].partition("]")[0]
    has = bool(host["huge_pages"]) if host is not None else mode not in ("never", "deny", "")
    if wanted and not has:
        yield Finding(
            Level.NOTE,
            "memory",
            "huge_pages",
            "host memory has 4 KiB pages: the kernel's shmem_enabled is " + (mode or "unreadable"),
            "with huge pages, pinning is faster and copies are slightly faster",
            f"echo advise > /{switch.relative_to(scene.root)}, and restart tierd",
        )


def _device(scene: Scene, capacity_bytes: int) -> Iterator[Finding]:
    """Check what matters only on a machine with a GPU."""
    if not (scene.root / "proc/driver/nvidia").is_dir():
        return
    yield Finding(
        Level.NOTE,
        "gpu",
        "gpu",
        "this machine has an NVIDIA driver",
        "for copies by the daemon (cuda_ipc), engine and tierd must share /dev/shm and process ids",
        "in containers, start the engine and tierd with --ipc=host and --pid=host",
    )
    limit_bytes = _memlock_bytes(scene)
    if limit_bytes is not None and limit_bytes < capacity_bytes:
        yield Finding(
            Level.WARNING,
            "gpu",
            "memlock",
            f"RLIMIT_MEMLOCK is {size(limit_bytes)}, below host.capacity {size(capacity_bytes)}",
            "host memory beyond the limit cannot be pinned, so copies to and from it are slower",
            "set LimitMEMLOCK=infinity in the unit (the GPU drop-in does), or --ulimit memlock=-1 "
            "for a container",
        )


def _memlock_bytes(scene: Scene) -> int | None:
    """Return the daemon's limit, or this process's if that is unreadable; None: unlimited."""
    found = _MEMLOCK.search(_text(scene.root / f"proc/{scene.pid}/limits")) if scene.pid else None
    if found is not None:
        return None if found[1] == "unlimited" else int(found[1])
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _shm(scene: Scene) -> Iterator[Finding]:
    try:
        found = os.statvfs(scene.root / "dev/shm")
    except OSError:
        found_bytes = 0
    else:
        found_bytes = found.f_blocks * found.f_frsize
    if found_bytes < SHM_BYTES_MIN:
        yield Finding(
            Level.NOTE,
            "memory",
            "dev_shm",
            f"/dev/shm has only {size(found_bytes)}",
            "tierd does not use it, but a vLLM with several ranks does",
            "start the engine's container with --shm-size or --ipc=host",
        )


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
