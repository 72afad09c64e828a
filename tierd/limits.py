"""Limits of this process: memory of the machine and its container, descriptors, file size."""

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
"""Descriptors per segment: one memfd for blocks, one for the ledger, each duplicated by mmap."""

DESCRIPTORS_ELSE: Final = 256
"""Descriptors that sessions, tiers and logs need besides the segments."""


class MemoryLimit(NamedTuple):
    """A bound in bytes, and its source as a text for messages."""

    size_bytes: int
    by: str


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """Return the tightest memory bound: the machine's RAM or a limit of our cgroup's ancestry."""
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = [MemoryLimit(ram, "this machine's memory")]
    for folder, old in memory_cgroups(root):
        found += _limit_in(folder / ("memory.limit_in_bytes" if old else "memory.max"))
    return min(found)


def memory_cgroups(root: Path = Path("/")) -> list[tuple[Path, bool]]:
    """Return the folders of cgroups that may bound this process, from its own cgroup upwards.

    The flag says whether the folder belongs to cgroup version 1. Some folders may not exist.
    """
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
        # In a container the process often sees its own cgroup as the root.
        folders = [
            folder for folder in (group, *group.parents) if base in (folder, *folder.parents)
        ]
        found += [(folder, bool(controllers)) for folder in folders]
    return found


def _limit_in(file: Path) -> list[MemoryLimit]:
    try:
        return [MemoryLimit(int(file.read_text()), f"the container's limit ({file.name})")]
    except (OSError, ValueError):
        # The file is missing or says "max".
        return []


def descriptors_limit() -> int:
    """Return the number of descriptors that this process may have open."""
    return _soft(resource.RLIMIT_NOFILE)


def _soft(limit: int) -> int:
    soft, _ = resource.getrlimit(limit)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def segment_advice(error: OSError) -> str:
    """Return why a memory segment could not be created, and which limit to change."""
    advice = {
        errno.EMFILE: (
            f"RLIMIT_NOFILE is {descriptors_limit()}, raise it (LimitNOFILE= of the unit, "
            "--ulimit nofile of a container)"
        ),
        errno.ENFILE: "the machine is out of descriptors, raise fs.file-max (sysctl)",
        errno.EFBIG: (
            f"RLIMIT_FSIZE is {_soft(resource.RLIMIT_FSIZE)} bytes, raise it (LimitFSIZE= of the "
            "unit, --ulimit fsize of a container)"
        ),
        errno.ENOMEM: (
            f"RLIMIT_AS is {_soft(resource.RLIMIT_AS)} bytes, raise it (LimitAS= of the unit), or "
            "vm.max_map_count (sysctl), or lower host.capacity"
        ),
    }.get(error.errno or 0, "lower host.capacity if this error persists")
    return f"{error.strerror or error}: {advice}"


def shortfalls(
    capacity_bytes: int, segment_bytes: int, *, missing_bytes: int, available_bytes: int
) -> Iterator[str]:
    """Yield a log line for each limit that keeps host memory below `capacity_bytes`.

    Segments have up to `segment_bytes`; `missing_bytes` of the capacity are not allocated yet;
    `available_bytes` of the machine's memory are available.
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
            f"RLIMIT_FSIZE is {size_bytes} bytes, below the {segment_bytes} bytes of a memory "
            "segment: blocks cannot be stored; raise it (LimitFSIZE= of the unit, --ulimit fsize "
            "of a container)"
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
            "that may stay unpinned, which slows copies; raise it (LimitMEMLOCK= of the unit, "
            "--ulimit memlock of a container)"
        )
    if missing_bytes > available_bytes:
        yield (
            f"{capacity}, of which {missing_bytes / GIB:.2f} GiB are not allocated yet, but "
            f"{available_bytes / GIB:.2f} GiB of memory are available: host memory stays smaller "
            "until more is available; lower host.capacity, or free memory"
        )


def pinning_limits() -> str:
    """Return the limits on page-locked memory as text for the message of a failed pin."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "unlimited" if soft == resource.RLIM_INFINITY else about(soft)
    memory = memory_limit()
    return (
        f"RLIMIT_MEMLOCK is {locked} (LimitMEMLOCK= of the unit, --ulimit memlock of a container), "
        f"{memory.by} is {about(memory.size_bytes)} (host.capacity must fit it)"
    )
