"""Each configured tier, beside the daemon: can it be reached, and is it fast enough to pay."""

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
"""Longest that a server may take for opening, or for the round trip."""

SPEED_S: Final = 0.5
"""How long a disk is written, and read."""

SPEED_BYTES: Final = 256 << 20
SPEED_IO_BYTES: Final = 2 << 20
"""A disk's probe: calls as a tier makes them for blocks of common models."""

PROBE_BYTES: Final = 64 << 10

SKEW_S: Final = 300.0
"""From here on S3 refuses a signature is 15 min; a third of that is already a clock nobody sets."""


def look_at_tier(entry: StorageConfig, load: PrefillDemand | None) -> list[Finding]:
    """The findings of one tier. Nothing of what it holds is touched."""
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
                "tierd does not start with it",
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
                "tierd does not start with it",
                "install what it needs in tierd's environment",
            )
        ]
    if cls.checks_offline:
        return list(_directory(entry, subject, options, load))
    return [*_round_trip(entry, subject, backend), *_server_clock(subject, options)]


# --- a tier in a directory ---------------------------------------------------------------


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
            f"{there} is no directory",
            "the tier cannot be opened",
            "set path to a directory on the disk that is meant",
        )
        return
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        yield Finding(
            Level.FAULT if there.stat().st_uid == os.geteuid() else Level.NOTE,
            subject,
            "tier_denied",
            f"this user (uid {os.geteuid()}) may not write into {there}",
            "if it is tierd's user, the tier takes no blocks; else nothing can be said",
            "run this as root or as tierd's user; chown the directory to that user",
        )
        return
    if there != path:
        yield Finding(
            Level.NOTE,
            subject,
            "tier_missing",
            f"{path} is not there yet; tierd makes it in {there}",
            "if a disk should be mounted here, it is not",
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
        return  # The backend has said so.
    used_bytes = sum(file.stat().st_blocks * 512 for file in path.glob("*/*.slab"))
    wanted_bytes = capacity_bytes - used_bytes + reserve_bytes
    if total_bytes and wanted_bytes > free_bytes:
        yield Finding(
            Level.WARNING,
            subject,
            "tier_space",
            f"it may grow by {size(max(0, capacity_bytes - used_bytes))}, and "
            f"{size(reserve_bytes)} stay free (reserve_free), but {there} has "
            f"{size(free_bytes)} left",
            "it holds fewer blocks than its capacity says",
            "lower its capacity, or free space on that disk",
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
            f"{there} takes no file: {error}",
            "the tier takes no blocks",
            "df and df -i for space and inodes; mount for read-only; dmesg for the disk",
        )
        return
    if not speed.direct:
        yield Finding(
            Level.NOTE,
            subject,
            "tier_buffered",
            f"the file system of {there} takes no O_DIRECT",
            "blocks go through the page cache, which costs memory and a copy",
            "use ext4 or xfs on a local disk",
        )
    told = (
        f"the disk reads {size(speed.read_bytes_per_s)}/s and writes "
        f"{size(speed.write_bytes_per_s)}/s"
    )
    yield _pays(subject, told, speed.read_bytes_per_s, load)


def _pays(subject: str, told: str, bytes_per_s: float, load: PrefillDemand | None) -> Finding:
    """Whether a load at this speed beats computing."""
    if load is None:
        told += "; whether that beats computing, `tierd bench` tells for a model"
        return Finding(Level.OK, subject, "tier_speed", told)
    paying = first_paying(TierSpeed(0.0, bytes_per_s), load.model, load.prefill_tokens_per_s)
    needed = load.model.bytes_per_token * load.prefill_tokens_per_s
    told += f"; the engine computes as fast as {size(needed)}/s of KV"
    if paying is not None:
        return Finding(Level.OK, subject, "tier_speed", told)
    return Finding(
        Level.WARNING,
        subject,
        "tier_slow",
        told,
        f"its engine computes {number(load.prefill_tokens_per_s)} tokens/s, faster than this tier "
        "brings them: tierd leaves its blocks aside (prefetch.break_even)",
        "use a faster disk, or several; keep the tier only for what L2 gets from it when idle",
    )


# --- a tier behind a server --------------------------------------------------------------


def _round_trip(entry: StorageConfig, subject: str, backend: Backend) -> Iterator[Finding]:
    try:
        took_s = asyncio.run(_trip(backend))
    except (BackendError, ConfigError) as error:
        yield Finding(
            Level.FAULT,
            subject,
            "tier_unreachable",
            str(error),
            "its blocks are computed again, and it gets no new ones",
            "mend what the text names: address, credentials, bucket, region or prefix",
        )
        return
    except TimeoutError:
        yield Finding(
            Level.FAULT,
            subject,
            "tier_hangs",
            f"no answer within {CALL_S:g} s",
            "every batch waits for its deadline until the breaker opens",
            "see whether its server is up and its name resolves; ping, firewall",
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
        "use a server that is nearer, or raise slow_ms and deadline_ms" if slow else "",
    )


async def _trip(backend: Backend) -> dict[str, float]:
    """Seconds of a block's way there and back, under a namespace that nobody else has.

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
                # What is asked of a tier before anything else, and needs rights of its own.
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
    """Whether this clock and that of a server whose requests are signed agree."""
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
            f"that of {subject}",
            "S3 refuses requests whose time is 15 min off",
            "set the clock: timedatectl, chronyc sources",
        )


def _skew_s(endpoint: str) -> float | None:
    """How far this clock is ahead of a server's, by its Date header; None if it says none."""
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
