"""How much memory this process may have: the machine's, and what a container leaves of it."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import NamedTuple

from tierd.sizes import about


class MemoryLimit(NamedTuple):
    """A bound in bytes, and what sets it, for a message."""

    size_bytes: int
    by: str


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """The tightest bound on memory: the machine's RAM, or a cgroup's on the way up from ours."""
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = [MemoryLimit(ram, "this machine's memory")]
    for folder, old in memory_cgroups(root):
        found += _limit_in(folder / ("memory.limit_in_bytes" if old else "memory.max"))
    return min(found)


def memory_cgroups(root: Path = Path("/")) -> list[tuple[Path, bool]]:
    """Folders of the cgroups that may bound this process, from its own on up, and whether each is
    of the old kind, version 1. Some may not exist."""
    found: list[tuple[Path, bool]] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if not controllers:
            base = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
        else:
            continue
        group = base / place.lstrip("/")
        # In a container its own group often is the root of what it sees.
        folders = [
            folder for folder in (group, *group.parents) if base in (folder, *folder.parents)
        ]
        found += [(folder, bool(controllers)) for folder in folders]
    return found


def _limit_in(file: Path) -> list[MemoryLimit]:
    try:
        return [MemoryLimit(int(file.read_text()), f"the container's limit ({file.name})")]
    except (OSError, ValueError):
        # Not there, or "max".
        return []


def pinning_limits() -> str:
    """What may stand in the way of page-locking memory, for the message of a failure."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "unlimited" if soft == resource.RLIM_INFINITY else about(soft)
    memory = memory_limit()
    return (
        f"RLIMIT_MEMLOCK is {locked} (LimitMEMLOCK= of the unit, --ulimit memlock of a container), "
        f"{memory.by} is {about(memory.size_bytes)} (host.capacity must fit it)"
    )
