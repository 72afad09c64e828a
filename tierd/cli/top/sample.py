"""Rates, ratios and current values from two statuses of a daemon.

Pure functions, without access to the daemon or the screen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tierd.storage.measured import BOUNDS_S

Status = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class TierSample:
    """One storage tier. Rates and latencies cover the time between the statuses."""

    name: str
    state: str
    why: str
    """Why the tier is unused or only partly used; empty if it is in full use."""
    used_bytes: int
    capacity_bytes: int
    """0: unlimited or unknown."""
    read_bytes_per_s: float
    written_bytes_per_s: float
    read_p99_s: float | None
    """None: no call ended."""
    write_p99_s: float | None
    reads: str
    """State of the read breaker."""
    writes: str
    queue_blocks: int
    queue_bytes: int
    queue_bytes_max: int
    hit_ratio: float | None
    """Tokens loaded from this tier / tokens requested of tierd. None: no token was requested."""


@dataclass(frozen=True, slots=True)
class NamespaceSample:
    """One namespace, or "other"."""

    digest: str
    model: str
    blocks: int
    size_bytes: int
    requested_tokens_per_s: float
    requested_tokens: int
    hit_ratio: float | None


@dataclass(frozen=True, slots=True)
class StatusSample:
    """A daemon. Rates are per second between the statuses; ratios are of tokens."""

    version: str
    uptime_s: float
    seconds: float
    """Time between the statuses, or since the daemon's start if it started in between."""
    restarted: bool
    hit_ratio: float | None
    hit_ratio_since_start: float | None
    host_hit_ratio: float | None
    requested_tokens_per_s: float
    loaded_tokens_per_s: float
    loaded_blocks_per_s: float
    loaded_bytes_per_s: float
    stored_blocks_per_s: float
    stored_bytes_per_s: float
    evicted_blocks_per_s: dict[str, float]
    host_used_bytes: int
    host_capacity_bytes: int
    host_limit_bytes: int
    """Current limit of host memory under memory pressure, up to the capacity."""
    host_blocks: int
    leases: int
    writing_blocks: int
    backlog_blocks: int
    tiers: list[TierSample]
    namespaces: list[NamespaceSample]
    """Ordered by requested tokens, most first."""


def sample(before: Status | None, now: Status) -> StatusSample:
    """Return the sample between two statuses of one daemon. Without `before`, or if the daemon
    has restarted since, it covers the time from the daemon's start."""
    up_s = _number(now["uptime_s"])
    restarted = before is not None and _number(before["uptime_s"]) > up_s
    start: Status = {} if before is None or restarted else before
    seconds = max(up_s - _number(start.get("uptime_s", 0)), 1e-9)
    host, total = _map(now["host"]), _map(now["counters"])
    grown = _growth(start, now)
    asked = grown("requested_tokens_total")
    tiers_before = {str(tier["name"]): tier for tier in _maps(start.get("storage", []))}
    return StatusSample(
        version=str(now["version"]),
        uptime_s=up_s,
        seconds=seconds,
        restarted=restarted,
        hit_ratio=_ratio(grown("saved_tokens_total"), asked),
        hit_ratio_since_start=_ratio(
            _number(total.get("saved_tokens_total", 0)),
            _number(total.get("requested_tokens_total", 0)),
        ),
        host_hit_ratio=_ratio(grown("host_loaded_tokens_total"), asked),
        requested_tokens_per_s=asked / seconds,
        loaded_tokens_per_s=grown("saved_tokens_total") / seconds,
        loaded_blocks_per_s=grown("loaded_blocks_total") / seconds,
        loaded_bytes_per_s=grown("loaded_bytes_total") / seconds,
        stored_blocks_per_s=grown("stored_blocks_total") / seconds,
        stored_bytes_per_s=grown("stored_bytes_total") / seconds,
        evicted_blocks_per_s={
            name.removeprefix("evicted_").removesuffix("_blocks_total"): grown(name) / seconds
            for name in total
            if name.startswith("evicted_") and name != "evicted_blocks_total"
        },
        host_used_bytes=_whole(host["used_bytes"]),
        host_capacity_bytes=_whole(host["capacity_bytes"]),
        host_limit_bytes=_whole(host.get("limit_bytes", host["capacity_bytes"])),
        host_blocks=_whole(host["blocks"]),
        leases=_whole(host["leases"]),
        writing_blocks=_whole(host["writing_blocks"]),
        backlog_blocks=_whole(host["backlog_blocks"]),
        tiers=[
            _tier(tiers_before.get(str(tier["name"]), {}), tier, seconds, asked)
            for tier in _maps(now["storage"])
        ],
        namespaces=_namespaces(start, now, seconds),
    )


def _tier(before: Status, now: Status, seconds: float, asked_tokens: float) -> TierSample:
    grown = _growth(before, now)
    circuits = {name: _map(circuit) for name, circuit in _map(now["circuits"]).items()}
    whys = [str(now["why"]), *(str(circuit["why"]) for circuit in circuits.values())]
    return TierSample(
        name=str(now["name"]),
        state=str(now["state"]),
        why="" if now["state"] in ("ready", "indexing") else next(filter(None, whys), ""),
        used_bytes=_whole(now["used_bytes"]),
        capacity_bytes=_whole(now["capacity_bytes"]),
        read_bytes_per_s=grown("read_bytes_total") / seconds,
        written_bytes_per_s=grown("written_bytes_total") / seconds,
        read_p99_s=_p99_s(before, now, "get"),
        write_p99_s=_p99_s(before, now, "put"),
        reads=str(circuits["reads"]["state"]),
        writes=str(circuits["writes"]["state"]),
        queue_blocks=_whole(now["backup_queue"]),
        queue_bytes=_whole(now["backup_queue_bytes"]),
        queue_bytes_max=_whole(now["backup_queue_bytes_max"]),
        hit_ratio=_ratio(grown("loaded_tokens_total"), asked_tokens),
    )


def _p99_s(before: Status, now: Status, operation: str) -> float | None:
    """Return the upper bound of the bucket with the 99th percentile of the calls between the
    statuses, None if there was no call."""
    counts = [_buckets(status, operation) for status in (before, now)]
    calls = [new - old for old, new in zip(*counts, strict=True)]
    rank = 0.99 * sum(calls)
    for bound_s, below in zip((*BOUNDS_S, 2 * BOUNDS_S[-1]), accumulate(calls), strict=True):
        if below and below >= rank:
            return bound_s
    return None


def _buckets(status: Status, operation: str) -> Sequence[int]:
    spread = _map(_map(status.get("latency", {})).get(operation, {}))
    counts = spread.get("buckets", [0] * (len(BOUNDS_S) + 1))
    assert isinstance(counts, list)
    return counts


def _namespaces(start: Status, now: Status, seconds: float) -> list[NamespaceSample]:
    """Return the namespaces that the status counts one by one, and "other"."""
    held = {str(space["digest"]): space for space in _maps(now["namespaces"])}
    before = {str(entry["namespace"]): entry for entry in _maps(start.get("demand", []))}
    found = []
    for entry in _maps(now["demand"]):
        digest = str(entry["namespace"])
        past, space = before.get(digest, {}), held.get(digest, {})
        asked, had = (
            _number(entry[name]) - _number(past.get(name, 0))
            for name in ("requested_tokens", "loaded_tokens")
        )
        blocks = _whole(space.get("blocks", 0))
        if not entry["requested_tokens"]:
            continue  # On most daemons "other" is empty.
        found.append(
            NamespaceSample(
                digest=digest,
                model=str(entry["model"]),
                blocks=blocks,
                size_bytes=blocks * _whole(space.get("block_bytes", 0)),
                requested_tokens_per_s=asked / seconds,
                requested_tokens=_whole(entry["requested_tokens"]),
                hit_ratio=_ratio(had, asked),
            )
        )
    return sorted(found, key=lambda n: (-n.requested_tokens_per_s, -n.requested_tokens))


def _growth(before: Status, now: Status) -> Callable[[str], float]:
    """Return a function: the increase of a counter between the statuses, by its name."""
    old, new = _map(before.get("counters", {})), _map(now["counters"])
    return lambda name: _number(new.get(name, 0)) - _number(old.get(name, 0))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _map(value: object) -> Status:
    assert isinstance(value, Mapping)
    return value


def _maps(value: object) -> list[Status]:
    assert isinstance(value, Sequence)
    return [_map(entry) for entry in value]


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return value


def _whole(value: object) -> int:
    assert isinstance(value, int)
    return value
