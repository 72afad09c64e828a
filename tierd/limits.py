"""What this process may have: memory, of the machine and of its container, and descriptors."""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tierd.sizes import about

GIB: Final = 1 << 30

DESCRIPTORS_A_SEGMENT: Final = 4
"""Blocks and ledger are a memfd each, which Python's mmap duplicates."""

DESCRIPTORS_ELSE: Final = 256
"""What sessions, tiers and logs need beside them."""


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


def descriptors_limit() -> int:
    """How many descriptors this process may have."""
    return _soft(resource.RLIMIT_NOFILE)


def _soft(limit: int) -> int:
    soft, _ = resource.getrlimit(limit)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def segment_advice(error: OSError) -> str:
    """Why a memory segment could not be made, and what to raise."""
    advice = {
        errno.EMFILE: (
            f"RLIMIT_NOFILE is {descriptors_limit()}, raise it (LimitNOFILE= of the unit, "
            "--ulimit nofile of a container)"
        ),
        errno.ENFILE: "the machine has no descriptors left, raise fs.file-max (sysctl)",
        errno.EFBIG: (
            f"RLIMIT_FSIZE is {_soft(resource.RLIMIT_FSIZE)} bytes, raise it (LimitFSIZE= of the "
            "unit, --ulimit fsize of a container)"
        ),
        errno.ENOMEM: (
            f"RLIMIT_AS is {_soft(resource.RLIMIT_AS)} bytes, raise it (LimitAS= of the unit), or "
            "vm.max_map_count (sysctl), or lower host.capacity"
        ),
    }.get(error.errno or 0, "lower host.capacity if it stays so")
    return f"{error.strerror or error}: {advice}"


def shortfalls(
    capacity_bytes: int, segment_bytes: int, *, missing_bytes: int, available_bytes: int
) -> Iterator[str]:
    """What keeps host memory from being as large as `capacity_bytes`, each as a line for the log.

    It has segments of up to `segment_bytes`; `missing_bytes` of it are yet to be allocated, and
    `available_bytes` of memory are free.
    """
    capacity = f"host.capacity is {capacity_bytes / GIB:.2f} GiB"
    files = _soft(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_A_SEGMENT * -(-capacity_bytes // segment_bytes) + DESCRIPTORS_ELSE
    if files < wanted:
        room = max(0, files - DESCRIPTORS_ELSE) // DESCRIPTORS_A_SEGMENT * segment_bytes
        yield (
            f"{capacity} and needs {wanted} descriptors, but RLIMIT_NOFILE is {files}, which is "
            f"enough for {room / GIB:.2f} GiB: raise it (LimitNOFILE= of the unit, --ulimit nofile "
            "of a container)"
        )
    size_bytes = _soft(resource.RLIMIT_FSIZE)
    if size_bytes < segment_bytes:
        yield (
            f"RLIMIT_FSIZE is {size_bytes} bytes, and a memory segment has up to {segment_bytes}: "
            "blocks cannot be stored; raise it (LimitFSIZE= of the unit, --ulimit fsize of a "
            "container)"
        )
    space_bytes = _soft(resource.RLIMIT_AS)
    if space_bytes < capacity_bytes:
        yield (
            f"{capacity}, but RLIMIT_AS is {space_bytes / GIB:.2f} GiB: raise it (LimitAS= of the "
            "unit)"
        )
    locked_bytes = _soft(resource.RLIMIT_MEMLOCK)
    if locked_bytes < capacity_bytes and Path("/proc/driver/nvidia").is_dir():
        yield (
            f"{capacity}, but RLIMIT_MEMLOCK is {locked_bytes / GIB:.2f} GiB: host memory beyond "
            "it may not be pinned, and copies are slower; raise it (LimitMEMLOCK= of the unit, "
            "--ulimit memlock of a container)"
        )
    if missing_bytes > available_bytes:
        yield (
            f"{capacity}, of which {missing_bytes / GIB:.2f} GiB are not allocated yet, but "
            f"{available_bytes / GIB:.2f} GiB of memory are available: host memory stays smaller "
            "until there is more; lower host.capacity, or free memory"
        )


def pinning_limits() -> str:
    """What may stand in the way of page-locking memory, for the message of a failure."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "unlimited" if soft == resource.RLIM_INFINITY else about(soft)
    memory = memory_limit()
    return (
        f"RLIMIT_MEMLOCK is {locked} (LimitMEMLOCK= of the unit, --ulimit memlock of a container), "
        f"{memory.by} is {about(memory.size_bytes)} (host.capacity must fit it)"
    )
