"""The table of Prometheus metrics, which are read from the status document.

A row has a name, the place of its value in the status, and a help text. A counter that no row reads
appears under its own name in `tierd_events_total` or `tierd_tier_events_total`. Labels are few:
the tier, the device, and the largest namespaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Final

from tierd.core.reasons import Evicted, NoRoom
from tierd.daemon.http.exposition import (
    Fields,
    Labels,
    Metric,
    MetricSample,
    Part,
    exposition,
    number_at,
)
from tierd.daemon.l3.tier import TierState
from tierd.daemon.session.demand import SEATS_MAX
from tierd.storage.circuit import State
from tierd.storage.measured import BOUNDS_S

NAMESPACES_SHOWN_MAX: Final = 20
"""Namespaces with their own labels, the largest by bytes: Prometheus keeps a time series for each
namespace ever shown, and engines create namespaces freely."""

_SAVED_US: Final = "counters.saved_us_total"

_WAYS: Final = ("load", "store")
"""Directions of copies between engines and host memory."""

_READ_BY_CODE: Final = (
    _SAVED_US,
    "counters.evicted_blocks_total",
    *(f"counters.copy_{way}_us_total" for way in _WAYS),
)
"""Paths that rows read by code, or whose parts they read."""

_OPERATIONS: Final = ("lookup", "get", "put", "use")
_DIRECTIONS: Final = {"reads": "read", "writes": "write"}
"""Label of each circuit in a status."""


def scrape(status: Part) -> str:
    """Return the metrics of a status, in the text format."""
    return exposition(METRICS, status)


# --- kinds of rows --------------------------------------------------------------------


def _node(name: str, path: str, about: str) -> Metric:
    """One number of the node."""
    counter = name.endswith("_total")
    return Metric(f"tierd_{name}", about, Fields(_whole, {path: ()}, counter))


def _node_counts(
    name: str, label: str, pattern: str, values: tuple[str, ...], about: str
) -> Metric:
    """Counters of the node, named `pattern` with * replaced by each value of `label`."""
    labelled = {f"counters.{pattern.replace('*', value)}": ((label, value),) for value in values}
    return Metric(f"tierd_{name}", about, Fields(_whole, labelled, True))


def _tier(name: str, path: str, about: str) -> Metric:
    """One number of each tier."""
    counter = name.endswith("_total")
    return Metric(f"tierd_tier_{name}", about, Fields(_tiers, {path: ()}, counter))


def _device(name: str, path: str, about: str) -> Metric:
    """One number of each device that the daemon copies for."""
    return Metric(f"tierd_copy_{name}", about, Fields(_devices, {path: ()}, False))


def _tier_by(name: str, label: str, paths: Mapping[str, str], about: str) -> Metric:
    """Several numbers of each tier; `paths` has the path of each value of `label`."""
    labelled = {path: ((label, value),) for value, path in paths.items()}
    counter = name.endswith("_total")
    return Metric(f"tierd_tier_{name}", about, Fields(_tiers, labelled, counter))


def _tier_counts(
    name: str, label: str, pattern: str, values: tuple[str, ...], about: str
) -> Metric:
    """Counters of each tier, named `pattern` with * replaced by each value of `label`."""
    paths = {value: f"counters.{pattern.replace('*', value)}" for value in values}
    return _tier_by(name, label, paths, about)


# --- readers of values that are not plain numbers ---------------------------------------


def _build(status: Part) -> Iterator[MetricSample]:
    yield MetricSample((("version", str(status["version"])),), 1)


def _ready(status: Part) -> Iterator[MetricSample]:
    if "phase" in status:  # Set by the HTTP server; absent from the answer to STATUS.
        yield MetricSample((), status["phase"] == "serving")


def _saved_prefill(status: Part) -> Iterator[MetricSample]:
    yield MetricSample((), (number_at(status, _SAVED_US) or 0) / 1e6)


def _copy_seconds(status: Part) -> Iterator[MetricSample]:
    for way in _WAYS:
        taken_us = number_at(status, f"counters.copy_{way}_us_total") or 0
        yield MetricSample((("direction", way),), taken_us / 1e6)


def _tier_states(status: Part) -> Iterator[MetricSample]:
    for labels, tier in _tiers(status):
        for state in TierState:
            yield MetricSample((*labels, ("state", state.value)), tier["state"] == state.value)


def _breaker_states(status: Part) -> Iterator[MetricSample]:
    for labels, tier in _tiers(status):
        for what, circuit in _part(tier["circuits"]).items():
            for state in State:
                more = (("direction", _DIRECTIONS[what]), ("state", state.value))
                yield MetricSample((*labels, *more), _part(circuit)["state"] == state.value)


def _durations(status: Part) -> Iterator[MetricSample]:
    bounds = [*map(repr, BOUNDS_S), "+Inf"]
    for tier_labels, tier in _tiers(status):
        for operation, spread in _part(tier["latency"]).items():
            labels = (*tier_labels, ("operation", operation))
            found = _part(spread)
            counts = found["buckets"]
            assert isinstance(counts, list)
            for bound, below in zip(bounds, accumulate(counts), strict=True):
                yield MetricSample((*labels, ("le", bound)), below, "_bucket")
            yield MetricSample(labels, _number(found["sum_s"]), "_sum")
            yield MetricSample(labels, _number(found["count"]), "_count")


def _namespaces(size: Callable[[Part], float]) -> Callable[[Part], Iterator[MetricSample]]:
    """Read `size` of the largest namespaces, and the sum of all others."""

    def read(status: Part) -> Iterator[MetricSample]:
        spaces = sorted(_parts(status["namespaces"]), key=_bytes_of, reverse=True)
        for space in spaces[:NAMESPACES_SHOWN_MAX]:
            labels = (("namespace", str(space["digest"])), ("model", str(space["model"])))
            yield MetricSample(labels, size(space))
        others = (("namespace", "other"), ("model", ""))
        yield MetricSample(others, sum(size(space) for space in spaces[NAMESPACES_SHOWN_MAX:]))

    return read


def _demand(name: str, field: str, about: str) -> Metric:
    """One number of each namespace that is counted separately, and of all others."""

    def read(status: Part) -> Iterator[MetricSample]:
        for entry in _parts(status["demand"]):
            labels = tuple((label, str(entry[label])) for label in ("namespace", "model"))
            yield MetricSample(labels, _number(entry[field]))

    return Metric(f"tierd_namespace_{name}", about, read)


def _rest(name: str, about: str) -> Metric:
    """Counters that no row reads: of each tier, or of the node."""
    places = _tiers if name.startswith("tier_") else _whole

    def read(status: Part) -> Iterator[MetricSample]:
        for labels, part in places(status):
            for counter, value in _part(part["counters"]).items():
                if f"counters.{counter}" not in _READ[places]:
                    event = ("event", counter.removesuffix("_total"))
                    yield MetricSample((*labels, event), _number(value))

    return Metric(f"tierd_{name}", about, read)


# --- parts of a status ------------------------------------------------------------------


def _whole(status: Part) -> list[tuple[Labels, Part]]:
    return [((), status)]


def _tiers(status: Part) -> list[tuple[Labels, Part]]:
    return [((("tier", str(tier["name"])),), tier) for tier in _parts(status["storage"])]


def _devices(status: Part) -> list[tuple[Labels, Part]]:
    return [((("device", str(part["device"])),), part) for part in _parts(status["copies"])]


def _bytes_of(space: Part) -> float:
    return _number(space["blocks"]) * _number(space["block_bytes"])


def _part(value: object) -> Part:
    assert isinstance(value, Mapping)
    return value


def _parts(value: object) -> list[Part]:
    assert isinstance(value, list)
    return [_part(entry) for entry in value]


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return value


# --- the table --------------------------------------------------------------------------

METRICS: Final[tuple[Metric, ...]] = (
    Metric("tierd_build_info", "Always 1; the label has tierd's version.", _build),
    Metric("tierd_ready", "1 while tierd serves engines, as /readyz reports, else 0.", _ready),
    _node("uptime_seconds", "uptime_s", "Time since the daemon started."),
    # Host memory.
    _node("host_capacity_bytes", "host.capacity_bytes", "Configured upper bound of host memory."),
    _node(
        "host_limit_bytes",
        "host.limit_bytes",
        "Current upper bound of host memory: below the capacity while the machine "
        "is short of memory.",
    ),
    _node("host_min_bytes", "host.min_bytes", "Lower bound of host memory under memory pressure."),
    _node(
        "pressure_shrinks_total",
        "counters.pressure_shrinks_total",
        "Times that host memory began to shrink because the machine was short of memory.",
    ),
    _node("host_allocated_bytes", "host.allocated_bytes", "Bytes of the segments of host memory."),
    _node(
        "host_populated_bytes",
        "host.populated_bytes",
        "Bytes of the segments of host memory whose pages are faulted in.",
    ),
    _node(
        "host_used_bytes",
        "host.used_bytes",
        "Bytes of the slots in host memory with a readable block.",
    ),
    _node("host_blocks", "host.blocks", "Readable blocks in host memory."),
    _node(
        "host_writing_blocks",
        "host.writing_blocks",
        "Slots of host memory that are reserved and not yet committed.",
    ),
    _node("leases", "host.leases", "Leases on blocks that engines hold."),
    _node(
        "backlog_blocks",
        "host.backlog_blocks",
        "Blocks that wait for a checksum, or for a backup, counted once per tier.",
    ),
    # What engines ask for, get and store.
    _node(
        "requested_blocks_total",
        "counters.requested_blocks_total",
        "Blocks that admitted requests lacked in their engine's own cache and "
        "looked up in tierd, counted once for all ranks.",
    ),
    _node(
        "acquired_blocks_total",
        "counters.acquired_blocks_total",
        "Blocks leased to engines, loaded or not.",
    ),
    _node(
        "loaded_blocks_total",
        "counters.loaded_blocks_total",
        "Blocks that engines loaded instead of computing, counted once for all ranks.",
    ),
    _node(
        "promoted_blocks_acquired_total",
        "counters.promoted_blocks_acquired_total",
        "Blocks leased to engines that were read from a storage tier for the request.",
    ),
    _node(
        "loaded_bytes_total",
        "counters.loaded_bytes_total",
        "Bytes, of all ranks, of the blocks that engines loaded instead of computing.",
    ),
    _node(
        "requested_tokens_total",
        "counters.requested_tokens_total",
        "Tokens of the whole blocks that admitted requests lacked in their engine's "
        "own cache and looked up in tierd, counted once for all ranks.",
    ),
    _node(
        "saved_tokens_total",
        "counters.saved_tokens_total",
        "Tokens that engines loaded instead of computing, counted once for all "
        "ranks. Excludes tokens of the engine's own cache, and loads that failed or "
        "whose request ended before it began to compute.",
    ),
    _node(
        "host_loaded_tokens_total",
        "counters.host_loaded_tokens_total",
        "Tokens that engines loaded instead of computing and that were in host "
        "memory when asked for.",
    ),
    _node("stored_blocks_total", "counters.stored_blocks_total", "Blocks that engines stored."),
    _node(
        "stored_bytes_total",
        "counters.stored_bytes_total",
        "Bytes of the blocks that engines stored.",
    ),
    _node(
        "ghost_blocks_total",
        "counters.ghost_blocks_total",
        "Blocks asked for that host memory of twice the size would still have had.",
    ),
    _node(
        "hit_ratio",
        "hit_ratio",
        "Blocks that engines loaded instead of computing, divided by the blocks "
        "that admitted requests lacked in their engine's own cache and looked up "
        "here; since the start.",
    ),
    _node(
        "host_hit_ratio",
        "host.hit_ratio",
        "Blocks that engines loaded and that were in host memory when asked for, "
        "divided by the blocks that admitted requests lacked in their engine's own "
        "cache and looked up in tierd; since the start.",
    ),
    _node(
        "host_hit_ratio_at_twice",
        "host.hit_ratio_at_twice",
        "Estimate of tierd_host_hit_ratio with host memory of twice the size, from "
        "the blocks evicted last.",
    ),
    _node_counts(
        "evicted_blocks_total",
        "reason",
        "evicted_*_blocks_total",
        tuple(why.value for why in Evicted),
        "Blocks evicted from host memory, by reason: a store needed room, a coming "
        "store will need it (ahead), another namespace needed the memory (lent), or "
        "the machine did (shrunk).",
    ),
    _node_counts(
        "store_refused_blocks_total",
        "reason",
        "store_refused_*_blocks_total",
        tuple(why.value for why in NoRoom),
        "Blocks that engines could not store, by reason: all slots of the namespace "
        "are in use (held), the namespace has no memory and others use all of it "
        "(others), one session has reserved half of host memory (share), or the "
        "system refused a memory segment (segment).",
    ),
    _node(
        "segments_failed_total",
        "counters.segments_failed_total",
        "Memory segments that the system refused; the log names the limit to raise.",
    ),
    _node(
        "leases_refused_total",
        "counters.leases_refused_total",
        "Lookups answered as misses because the session, or all together, held too many leases.",
    ),
    _node(
        "namespaces_ended_total",
        "counters.namespaces_ended_total",
        "Namespaces removed because no engine has them registered and they have no blocks.",
    ),
    _node(
        "revived_blocks_total",
        "counters.revived_blocks_total",
        "Blocks kept although their eviction had begun, because a request asked for them.",
    ),
    Metric(
        "tierd_saved_prefill_seconds_total",
        "Time that engines would have needed to compute the tokens that they "
        "loaded, at the prefill speed that each engine measures. The time of the "
        "loads is not subtracted.",
        _saved_prefill,
    ),
    _node(
        "loads_refused_total",
        "counters.loads_refused_total",
        "Loads from a storage tier skipped because computing the tokens would have been faster.",
    ),
    _node_counts(
        "reloads_total",
        "outcome",
        "reloads_*_total",
        ("applied", "refused"),
        "Reloads of the configuration, by outcome: applied, or refused because of an error in it.",
    ),
    # The hot set in the state directory.
    _node_counts(
        "hotset_snapshots_total",
        "outcome",
        "hotset_*_total",
        ("written", "failed"),
        "Snapshots of the hot set, by outcome: written or failed. The log and "
        "`tierd status` have the reason.",
    ),
    _node(
        "hotset_age_seconds",
        "hotset.age_s",
        "Time since the last snapshot of the hot set was written.",
    ),
    # Adoption from the previous incarnation of the daemon.
    _node(
        "adopted_blocks_total",
        "counters.adopted_blocks_total",
        "Blocks adopted at the start from the previous incarnation of the daemon.",
    ),
    _node(
        "adoption_dropped_segments_total",
        "counters.adoption_dropped_segments_total",
        "Segments of the previous incarnation that could not be adopted; the log has the reason.",
    ),
    _node(
        "unverified_blocks",
        "host.unverified_blocks",
        "Adopted blocks whose checksum has not been verified yet; none is served before that.",
    ),
    _node(
        "rotten_blocks_total",
        "counters.rotten_blocks_total",
        "Adopted blocks dropped because their checksum was wrong; none was served.",
    ),
    # Scrubs and flushes.
    _node(
        "scrubbed_blocks_total",
        "counters.scrubbed_blocks_total",
        "Blocks of storage tiers that scrubs have read.",
    ),
    _node(
        "scrub_corrupt_total",
        "counters.scrub_corrupt_total",
        "Blocks that scrubs found damaged and dropped.",
    ),
    _node(
        "scrub_unreadable_total",
        "counters.scrub_unreadable_total",
        "Blocks that scrubs could not read and left in place.",
    ),
    _node(
        "scrub_repaired_total",
        "counters.scrub_repaired_total",
        "Damaged blocks that scrubs wrote again, from host memory or another tier.",
    ),
    _node("flushes_total", "counters.flushes_total", "Flushes started."),
    _node(
        "flushed_blocks_total",
        "counters.flushed_blocks_total",
        "Blocks that flushes removed from host memory and from tiers, each copy counted.",
    ),
    # Copies by the daemon for engines.
    _node_counts(
        "copy_blocks_total",
        "direction",
        "copy_*_blocks_total",
        _WAYS,
        "Blocks copied by the daemon from engines' pages (store) and into them (load).",
    ),
    _node_counts(
        "copy_bytes_total",
        "direction",
        "copy_*_bytes_total",
        _WAYS,
        "Bytes of the blocks copied by the daemon from engines' pages (store) and "
        "into them (load).",
    ),
    Metric(
        "tierd_copy_seconds_total",
        "Time from the request for a copy by the daemon to its end, with queueing "
        "and waiting for events.",
        _copy_seconds,
    ),
    _node_counts(
        "copy_failed_total",
        "direction",
        "copy_*_failed_total",
        _WAYS,
        "Copies by the daemon that did not complete: cancelled, failed, or lost "
        "when their process ended.",
    ),
    _device(
        "attachments",
        "attachments",
        "Engine processes whose pages the copy process of a device can use.",
    ),
    _device(
        "under_way", "under_way", "Calls that the copy process of a device has not answered yet."
    ),
    _device("mapped_bytes", "mapped_bytes", "Host memory that the copies of a device can use."),
    _device(
        "pinned_bytes",
        "pinned_bytes",
        "Host memory page-locked for the copies of a device, which copies at full speed.",
    ),
    _node(
        "copy_process_starts_total",
        "counters.copy_process_starts_total",
        "Starts of copy processes; more starts than devices means that one has died.",
    ),
    _node(
        "copy_process_kills_total",
        "counters.copy_process_kills_total",
        "Copy processes killed because a copy took longer than copy.job_timeout_ms.",
    ),
    _node(
        "copy_attach_refused_total",
        "counters.copy_attach_refused_total",
        "Engines whose pages the daemon could not open; the log names the setting to change.",
    ),
    # Hints, deadlines and bugs.
    _node("pinned_bytes", "host.pinned_bytes", "Bytes of host memory kept because of hints."),
    _node_counts(
        "pins_blocks_total",
        "outcome",
        "pins_*_blocks_total",
        ("granted", "refused", "expired", "overridden"),
        "Blocks that hints asked to keep, by outcome: granted, refused, expired or overridden.",
    ),
    _node(
        "deadlines_missed_total",
        "counters.deadline_missed_total",
        "Lookups whose deadline passed before the tiers had delivered everything.",
    ),
    _node(
        "answers_late_total",
        "counters.answers_late_total",
        "Lookups answered 100 ms or more after their deadline, which no tier can cause.",
    ),
    _node(
        "internal_errors_total",
        "counters.internal_errors_total",
        "Bugs of tierd that ended a session or a request; the log has the traceback.",
    ),
    _rest("events_total", "All other counters of the daemon, by their name in `tierd status`."),
    # Namespaces.
    Metric(
        "tierd_namespace_blocks",
        f"Blocks in host memory of the {NAMESPACES_SHOWN_MAX} largest namespaces, and of all "
        'others as namespace="other".',
        _namespaces(lambda space: _number(space["blocks"])),
    ),
    Metric(
        "tierd_namespace_bytes",
        "Payload bytes in host memory of the largest namespaces, and of all others "
        'as namespace="other".',
        _namespaces(_bytes_of),
    ),
    _demand(
        "requested_tokens_total",
        "requested_tokens",
        "Tokens of the whole blocks that admitted requests lacked in their engine's own cache and "
        f"looked up in tierd, of the first {SEATS_MAX} namespaces to ask, and of all others as "
        'namespace="other"; a request to several ranks counts with the first.',
    ),
    _demand(
        "loaded_tokens_total",
        "loaded_tokens",
        "Tokens that engines loaded instead of computing, by namespace; a load to "
        "several ranks counts with the first.",
    ),
    _demand(
        "loaded_bytes_total",
        "loaded_bytes",
        "Bytes, of all ranks, of the blocks that engines loaded instead of "
        "computing, by namespace of the first rank.",
    ),
    # Storage tiers: state and failures.
    Metric("tierd_tier_state", "1 for the current state of the tier, else 0.", _tier_states),
    Metric(
        "tierd_tier_breaker_state",
        "1 for the current state of the tier's breaker for reads or writes, else 0; "
        "calls are made while it is closed.",
        _breaker_states,
    ),
    _tier_by(
        "breaker_opened_total",
        "direction",
        {value: f"circuits.{what}.opened_total" for what, value in _DIRECTIONS.items()},
        "Times that the tier's breaker opened, failed trials included.",
    ),
    _tier_by(
        "breaker_refused_blocks_total",
        "direction",
        {value: f"counters.breaker_refused_{what}_total" for what, value in _DIRECTIONS.items()},
        "Blocks not read from the tier, or not written to it, because its breaker was open.",
    ),
    _tier_counts(
        "deadlines_missed_total",
        "direction",
        "breaker_*_deadlines_total",
        ("read", "write"),
        "Calls to the tier cancelled at deadline_ms.",
    ),
    _tier("probes_total", "counters.breaker_probes_total", "Probes for the tier's recovery."),
    _tier(
        "probes_failed_total",
        "counters.breaker_probes_failed_total",
        "Probes for the tier's recovery that failed.",
    ),
    _tier("open_failures_total", "counters.open_failed_total", "Failed attempts to open the tier."),
    _tier(
        "worker_restarts_total",
        "counters.worker_restarts_total",
        "Times that the tier's process was started again.",
    ),
    _tier(
        "wrong_answers_total",
        "counters.wrong_answers_total",
        "Answers of the tier's backend that break its contract; none was used.",
    ),
    # Storage tiers: contents.
    _tier(
        "blocks",
        "blocks",
        "Blocks held by the tier; for a shared tier, as many as this node has counted.",
    ),
    _tier("used_bytes", "used_bytes", "Bytes that the blocks held by the tier occupy."),
    _tier(
        "capacity_bytes",
        "capacity_bytes",
        "Configured upper bound of the bytes held by the tier; 0: no bound, or not open.",
    ),
    # Storage tiers: calls.
    _tier_counts(
        "calls_total", "operation", "*_calls_total", _OPERATIONS, "Calls to the tier's backend."
    ),
    _tier_counts(
        "calls_failed_total",
        "operation",
        "*_failed_total",
        _OPERATIONS,
        "Calls to the tier's backend that failed.",
    ),
    _tier_counts(
        "calls_cancelled_total",
        "operation",
        "*_cancelled_total",
        _OPERATIONS,
        "Calls to the tier's backend cancelled, at deadline_ms or before.",
    ),
    _tier_counts(
        "calls_bugs_total",
        "operation",
        "*_bugs_total",
        _OPERATIONS,
        "Calls to the tier's backend that raised an unexpected exception.",
    ),
    Metric(
        "tierd_tier_call_duration_seconds",
        "Duration of calls to the tier's backend, failed and cancelled calls included.",
        _durations,
        histogram=True,
    ),
    _tier_counts(
        "read_blocks_total",
        "outcome",
        "get_*_total",
        ("hit", "miss", "corrupt", "error"),
        "Blocks read from the tier, by outcome.",
    ),
    _tier_counts(
        "written_blocks_total",
        "outcome",
        "put_*_total",
        ("stored", "present", "refused", "error"),
        "Blocks written to the tier, by outcome.",
    ),
    _tier_by(
        "moved_bytes_total",
        "direction",
        {"read": "counters.read_bytes_total", "write": "counters.written_bytes_total"},
        "Payload bytes of blocks that the tier delivered or stored.",
    ),
    _tier_by(
        "bytes_per_second",
        "direction",
        {"read": "read_bytes_per_s", "write": "write_bytes_per_s"},
        "Recent speed of the tier while blocks were moving; absent before the first block.",
    ),
    # Storage tiers: hits.
    _tier(
        "loaded_blocks_total",
        "counters.loaded_blocks_total",
        "Blocks read from the tier that engines loaded instead of computing.",
    ),
    _tier(
        "loaded_tokens_total",
        "counters.loaded_tokens_total",
        "Tokens read from the tier that engines loaded instead of computing.",
    ),
    _tier(
        "hit_ratio",
        "hit_ratio",
        "Blocks read from the tier that engines loaded, divided by the blocks that "
        "admitted requests lacked in their engine's own cache and looked up in tierd; "
        "since the start.",
    ),
    _tier(
        "written_unread_share",
        "written_unread_share",
        "Share of the blocks written to the tier since the start that this node never read.",
    ),
    _tier(
        "refused_hits_total",
        "counters.refused_hits_total",
        "Blocks asked for that the tier's write policy had not written: hits lost "
        "to its write budget.",
    ),
    _tier(
        "write_demand",
        "write_demand",
        "Lowest predicted chance of reuse at which a block is written to the tier.",
    ),
    # Storage tiers: backups.
    _tier("backup_queue_blocks", "backup_queue", "Blocks that wait to be written to the tier."),
    _tier(
        "backup_queue_bytes",
        "backup_queue_bytes",
        "Bytes of the slots that wait to be written to the tier.",
    ),
    _tier(
        "backup_queue_max_bytes",
        "backup_queue_bytes_max",
        "Upper bound of the bytes that may wait to be written to the tier.",
    ),
    _tier_by(
        "skipped_blocks_total",
        "reason",
        {
            "busy": "counters.backup_skipped_total",
            "dropped": "counters.backup_dropped_total",
            "refused": "counters.backup_refused_total",
            "full": "counters.skipped_full_total",
            "no_space": "counters.refused_no_space_total",
        },
        "Blocks not written to the tier, by reason: its queue was full or its "
        "breaker open (busy), and the block was then evicted (dropped), its write "
        "policy did not write the block (refused), it had reached its capacity "
        "(full), or its disk or server had no room (no_space).",
    ),
    _rest(
        "tier_events_total",
        "All other counters of a tier, by their name in `tierd status`.",
    ),
)

_READ: Final = {
    places: frozenset(
        path
        for metric in METRICS
        if isinstance(metric.read, Fields) and metric.read.places is places
        for path in metric.read.paths
    ).union(_READ_BY_CODE)
    for places in (_whole, _tiers)
}
"""Paths that rows read, of the node and of each tier."""
