"""Checks of each configured tier, without the daemon: is it reachable and fast enough to pay?"""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import http.client
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from tierd.backend import Backend
from tierd.cli.common.break_even import PrefillDemand, TierSpeed, first_paying
from tierd.cli.common.speed import SPEED_TURN, BenchBlocks, disk_speed, get_all, put_all
from tierd.cli.common.text import latency, number, size
from tierd.cli.doctor.checks.finding import Finding, Level
from tierd.config import StorageConfig
from tierd.daemon.l3.backends import backend_class, options_of
from tierd.errors import BackendError, ConfigError
from tierd.sizes import parse_size, parse_size_of
from tierd.types import SCOPE_BYTES

CALL_S: Final = 5.0
"""Longest wait for a server to open, and for its round trip."""

SPEED_S: Final = 0.5
"""How long a disk is written, and then read."""

SPEED_BYTES: Final = 256 << 20
SPEED_IO_BYTES: Final = 2 << 20
"""Size of the calls of a disk's test: as a tier makes them for blocks of common models."""

PROBE_BYTES: Final = 64 << 10

SKEW_S: Final = 300.0
"""Reported from a third of the 15 min at which S3 refuses a signature: such a clock is not
synchronized."""


def look_at_tier(entry: StorageConfig, load: PrefillDemand | None) -> list[Finding]:
    """Check one tier. The tier's own blocks are not touched."""
    subject = f"tier {entry.name}"
    try:
        cls, options = backend_class(entry), options_of(entry)
        backend = cls.from_options(options)
    except ConfigError as error:
        return [
            Finding(
                Level.FAULT,
                subject,
                "tier_config",
                str(error),
                "tierd does not start with this configuration",
                "correct the key in the configuration",
            )
        ]
    except ImportError as error:
        return [
            Finding(
                Level.FAULT,
                subject,
                "tier_package",
                f"its backend cannot be loaded: {error}",
                "tierd does not start with this tier",
                "install the missing package in tierd's environment",
            )
        ]
    if cls.checks_offline:
        return list(_directory(entry, subject, options, load))
    return [*_round_trip(entry, subject, backend), *_server_clock(subject, options)]


# --- tiers in a directory ----------------------------------------------------------------


def _directory(
    entry: StorageConfig, subject: str, options: msgspec.Struct, load: PrefillDemand | None
) -> Iterator[Finding]:
    path = Path(str(getattr(options, "path", ""))).expanduser()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not there.is_dir():
        yield Finding(
            Level.FAULT,
            subject,
            "tier_path",
            f"{there} is not a directory",
            "the tier cannot be opened",
            "set path to a directory on the intended disk",
        )
        return
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        yield Finding(
            Level.FAULT if there.stat().st_uid == os.geteuid() else Level.NOTE,
            subject,
            "tier_denied",
            f"this user (uid {os.geteuid()}) may not write to {there}",
            "if this is tierd's user, the tier stores no blocks; if not, the tier was not checked",
            "run this as root or as tierd's user; if tierd's user may not write, chown the "
            "directory to it",
        )
        return
    if there != path:
        yield Finding(
            Level.NOTE,
            subject,
            "tier_missing",
            f"{path} does not exist yet; tierd will create it in {there}",
            "if a disk should be mounted there, it is not mounted",
            "findmnt --target " + str(path),
        )
    yield from _free_space(subject, there, path, options)
    yield from _disk_speed(entry, subject, there, load)


def _free_space(
    subject: str, there: Path, path: Path, options: msgspec.Struct
) -> Iterator[Finding]:
    found = os.statvfs(there)
    free_bytes = found.f_bavail * found.f_frsize
    total_bytes = found.f_blocks * found.f_frsize
    try:
        capacity_bytes = parse_size(getattr(options, "capacity", 0))
        reserve_bytes = parse_size_of(getattr(options, "reserve_free", 0), total_bytes)
    except ConfigError:
        return  # The check of the options reports it.
    used_bytes = sum(file.stat().st_blocks * 512 for file in path.glob("*/*.slab"))
    wanted_bytes = capacity_bytes - used_bytes + reserve_bytes
    if total_bytes and wanted_bytes > free_bytes:
        yield Finding(
            Level.WARNING,
            subject,
            "tier_space",
            f"the tier may grow by {size(max(0, capacity_bytes - used_bytes))} and must leave "
            f"{size(reserve_bytes)} free (reserve_free), but {there} has only "
            f"{size(free_bytes)} left",
            "the tier holds less than its capacity",
            "lower the tier's capacity, or free space on that disk",
        )


def _disk_speed(
    entry: StorageConfig, subject: str, there: Path, load: PrefillDemand | None
) -> Iterator[Finding]:
    try:
        found = os.statvfs(there)
        free_bytes = found.f_bavail * found.f_frsize
        with SPEED_TURN:
            speed = disk_speed(
                there,
                io_bytes=SPEED_IO_BYTES,
                size_bytes=min(SPEED_BYTES, free_bytes // 8),
                threads=entry.read_batches,
                limit_s=SPEED_S,
            )
    except OSError as error:
        yield Finding(
            Level.FAULT,
            subject,
            "tier_io",
            f"cannot write a file in {there}: {error}",
            "the tier stores no blocks",
            "check space and inodes (df, df -i), a read-only mount (mount) and the disk (dmesg)",
        )
        return
    if not speed.direct:
        yield Finding(
            Level.NOTE,
            subject,
            "tier_buffered",
            f"the file system of {there} does not support O_DIRECT",
            "blocks go through the page cache, which costs memory and a copy",
            "use ext4 or xfs on a local disk",
        )
    told = (
        f"the disk reads {size(speed.read_bytes_per_s)}/s and writes "
        f"{size(speed.write_bytes_per_s)}/s"
    )
    yield _pays(subject, told, speed.read_bytes_per_s, load)


def _pays(subject: str, told: str, bytes_per_s: float, load: PrefillDemand | None) -> Finding:
    """Report whether loading at this speed is faster than computing."""
    if load is None:
        told += "; `tierd bench` shows for a model whether that is faster than recomputing"
        return Finding(Level.OK, subject, "tier_speed", told)
    paying = first_paying(TierSpeed(0.0, bytes_per_s), load.model, load.prefill_tokens_per_s)
    needed = load.model.bytes_per_token * load.prefill_tokens_per_s
    told += f"; the engine computes {size(needed)}/s of KV"
    if paying is not None:
        return Finding(Level.OK, subject, "tier_speed", told)
    return Finding(
        Level.WARNING,
        subject,
        "tier_slow",
        told,
        f"the engine computes {number(load.prefill_tokens_per_s)} tokens/s, faster than this tier "
        "loads them: tierd does not load its blocks for requests (prefetch.break_even)",
        "use a faster disk or several disks; else the tier only helps to fill host memory at idle",
    )


# --- tiers on a server -------------------------------------------------------------------


def _round_trip(entry: StorageConfig, subject: str, backend: Backend) -> Iterator[Finding]:
    try:
        took_s = asyncio.run(_trip(backend))
    except (BackendError, ConfigError) as error:
        yield Finding(
            Level.FAULT,
            subject,
            "tier_unreachable",
            str(error),
            "engines recompute its blocks, and it receives no new ones",
            "correct what the error names: address, credentials, bucket, region or prefix",
        )
        return
    except TimeoutError:
        yield Finding(
            Level.FAULT,
            subject,
            "tier_hangs",
            f"no answer within {CALL_S:g} s",
            "every batch waits until its deadline, until the breaker opens",
            "check that its server is up, its name resolves and no firewall blocks it: ping",
        )
        return
    slow = max(took_s.values()) > entry.slow_ms / 1000
    yield Finding(
        Level.WARNING if slow else Level.OK,
        subject,
        "tier_slow_calls" if slow else "tier_round_trip",
        ", ".join(f"{name} {latency(each)}" for name, each in took_s.items())
        + f" for a block of {size(PROBE_BYTES)}",
        f"a batch that takes longer than slow_ms ({entry.slow_ms}) counts as a failure"
        if slow
        else "",
        "use a nearer server, or raise slow_ms and deadline_ms" if slow else "",
    )


async def _trip(backend: Backend) -> dict[str, float]:
    """Store, read and delete one block in a random namespace; return the seconds of each call.

    Raises BackendError, ConfigError, TimeoutError.
    """
    namespace = hashlib.sha256(b"tierd doctor" + secrets.token_bytes(16)).digest()[:SCOPE_BYTES]
    took_s: dict[str, float] = {}
    blocks = BenchBlocks(1, PROBE_BYTES)
    hashes = blocks.hashes(0)
    try:
        async with asyncio.timeout(CALL_S):
            await backend.open()
        try:
            async with asyncio.timeout(CALL_S):
                # The daemon's first call; it needs permissions that put and get do not.
                await backend.marks()
                began_s = time.perf_counter()
                await put_all(backend, namespace, blocks.puts(hashes), 1)
                took_s["put"] = time.perf_counter() - began_s
                began_s = time.perf_counter()
                await get_all(backend, namespace, blocks.gets(hashes), 1)
                took_s["get"] = time.perf_counter() - began_s
        finally:
            try:
                async with asyncio.timeout(CALL_S):
                    began_s = time.perf_counter()
                    await backend.delete_many(namespace, hashes)
                    took_s["delete"] = time.perf_counter() - began_s
            finally:
                await backend.close()
    finally:
        blocks.close()
    return took_s


def _server_clock(subject: str, options: msgspec.Struct) -> Iterator[Finding]:
    """Report a clock that differs too much from an S3 server's, whose requests are signed."""
    if not hasattr(options, "bucket"):
        return
    endpoint = getattr(options, "endpoint", "") or "https://s3.amazonaws.com"
    skew_s = _skew_s(endpoint)
    if skew_s is not None and abs(skew_s) > SKEW_S:
        yield Finding(
            Level.FAULT,
            "clock",
            "clock_skew",
            f"this machine's clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} "
            f"the clock of {subject}",
            "S3 refuses requests whose time is off by more than 15 min",
            "synchronize the clock: timedatectl, chronyc sources",
        )


def _skew_s(endpoint: str) -> float | None:
    """Return by how many seconds this clock is ahead of a server's Date header; None: no Date."""
    url = urlsplit(endpoint)
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.hostname or "", url.port, timeout=2.0)
    try:
        connection.request("HEAD", "/")
        date = connection.getresponse().getheader("Date")
        return time.time() - email.utils.parsedate_to_datetime(date).timestamp() if date else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
