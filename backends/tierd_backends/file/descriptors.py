"""The process's limit of open files, and whether a tier's slabs fit into it."""

from __future__ import annotations

import os
import resource

from tierd.errors import ConfigError

FILES_BESIDE = 256
"""Descriptors left for everything else that the process opens."""


def allow_open_files(count: int) -> None:
    """Raise this process's soft limit so that `count` more files can be opened."""
    opened = len(os.listdir("/proc/self/fd"))
    if problem := too_many_files(count, opened):
        raise ConfigError(problem)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = opened + count + FILES_BESIDE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def too_many_files(count: int, opened: int) -> str:
    """Return why `count` more files cannot be opened, or "" if they can."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= opened + count + FILES_BESIDE:
        return ""
    return (
        f"{count} slab files may be open at once but the limit is {hard}: "
        "raise LimitNOFILE, or `slab`"
    )
