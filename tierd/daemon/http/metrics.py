"""What STATUS reports, as the table of metrics that Prometheus scrapes.

A row has a name, where in the status its value stands, and a help text. A counter of a
status that no row reads is not lost: `tierd_events_total` and `tierd_tier_events_total` show
it by its own name. Labels are few: those of a tier, and of namespaces only the largest have
their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Final

from tierd.core.space import Evicted, NoRoom
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
"""Namespaces with labels of their own, the largest by bytes: each ever shown is a time series
that Prometheus keeps, and engines make new ones as they like."""

_SAVED_US: Final = "counters.saved_us_total"

_WAYS: Final = ("load", "store")
"""Directions of copies between engines and host memory."""

_READ_OTHERWISE: Final = (
    _SAVED_US,
    "counters.evicted_blocks_total",
    *(f"counters.copy_{way}_us_total" for way in _WAYS),
)
"""Paths that rows read by themselves, or whose parts they read."""

_OPERATIONS: Final = ("lookup", "get", "put", "use")
_DIRECTIONS: Final = {"reads": "read", "writes": "write"}
"""Of the circuits in a status."""


def scrape(status: Part) -> str:
    """The text for Prometheus."""
    return exposition(METRICS, status)


# --- kinds of rows --------------------------------------------------------------------


def _node(name: str, path: str, about: str) -> Metric:
    """One number of the node."""
    counter = name.endswith("_total")
    return Metric(f"tierd_{name}", about, Fields(_whole, {path: ()}, counter))


def _node_counts(
    name: str, label: str, pattern: str, values: tuple[str, ...], about: str
) -> Metric:
    """Counters of the node, called `pattern` with a value of `label` in the place of *."""
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
    """Counters of each tier, called `pattern` with a value of `label` in the place of *."""
    paths = {value: f"counters.{pattern.replace('*', value)}" for value in values}
    return _tier_by(name, label, paths, about)


# --- readers for what is no plain number ------------------------------------------------


def _build(status: Part) -> Iterator[MetricSample]:
    yield MetricSample((("version", str(status["version"])),), 1)


def _ready(status: Part) -> Iterator[MetricSample]:
    if "phase" in status:  # Admin knows it, and STATUS is answered in one phase only.
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
                told = (("direction", _DIRECTIONS[what]), ("state", state.value))
                yield MetricSample((*labels, *told), _part(circuit)["state"] == state.value)


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
    """Reads `size` of the largest namespaces, and of all others together."""

    def read(status: Part) -> Iterator[MetricSample]:
        spaces = sorted(_parts(status["namespaces"]), key=_bytes_of, reverse=True)
        for space in spaces[:NAMESPACES_SHOWN_MAX]:
            labels = (("namespace", str(space["digest"])), ("model", str(space["model"])))
            yield MetricSample(labels, size(space))
        others = (("namespace", "other"), ("model", ""))
        yield MetricSample(others, sum(size(space) for space in spaces[NAMESPACES_SHOWN_MAX:]))

    return read


def _demand(name: str, field: str, about: str) -> Metric:
    """One number of each namespace that is counted by itself, and of the others."""

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
    Metric("tierd_ready", "1 while engines are served, as /readyz says, else 0.", _ready),
    _node("uptime_seconds", "uptime_s", "Time since the daemon started."),
    # Host memory.
    _node("host_capacity_bytes", "host.capacity_bytes", "Most bytes that host memory may take."),
    _node(
        "host_limit_bytes",
        "host.limit_bytes",
        "Most bytes that it may take now: less than the capacity while the machine is short of "
        "memory.",
    ),
    _node("host_min_bytes", "host.min_bytes", "Bytes that it may take however short that is."),
    _node(
        "pressure_shrinks_total",
        "counters.pressure_shrinks_total",
        "Times that the machine was short of memory, and host memory began to shrink.",
    ),
    _node("host_allocated_bytes", "host.allocated_bytes", "Bytes of host memory's segments."),
    _node("host_populated_bytes", "host.populated_bytes", "Bytes of them that are faulted in."),
    _node("host_used_bytes", "host.used_bytes", "Bytes of the slots with a readable block."),
    _node("host_blocks", "host.blocks", "Readable blocks in host memory."),
    _node("host_writing_blocks", "host.writing_blocks", "Slots reserved and not yet committed."),
    _node("leases", "host.leases", "Leases that have not ended."),
    _node("backlog_blocks", "host.backlog_blocks", "Blocks to sum up or back up, once a tier."),
    # What engines ask for, get and store.
    _node(
        "requested_blocks_total",
        "counters.requested_blocks_total",
        "Blocks that admitted requests lacked in their engine's own cache and looked up here, "
        "counted once for all ranks.",
    ),
    _node(
        "acquired_blocks_total",
        "counters.acquired_blocks_total",
        "Blocks leased to engines, whether they were loaded or not.",
    ),
    _node(
        "loaded_blocks_total",
        "counters.loaded_blocks_total",
        "Blocks that engines loaded and did not compute, counted once for all ranks.",
    ),
    _node(
        "promoted_blocks_acquired_total",
        "counters.promoted_blocks_acquired_total",
        "Blocks leased to engines that were not in host memory when they were asked for.",
    ),
    _node(
        "loaded_bytes_total",
        "counters.loaded_bytes_total",
        "Bytes, of all ranks, of the blocks that engines loaded and did not compute.",
    ),
    _node(
        "requested_tokens_total",
        "counters.requested_tokens_total",
        "Tokens of the whole blocks that admitted requests lacked in their engine's own cache and "
        "looked up here, counted once for all ranks.",
    ),
    _node(
        "saved_tokens_total",
        "counters.saved_tokens_total",
        "Tokens that engines loaded and did not compute, counted once for all ranks. Tokens of "
        "the engine's own cache, and of loads that failed or whose request ended before it began "
        "to compute, are not among them.",
    ),
    _node(
        "host_loaded_tokens_total",
        "counters.host_loaded_tokens_total",
        "Tokens that engines loaded and that were in host memory when they were asked for.",
    ),
    _node("stored_blocks_total", "counters.stored_blocks_total", "Blocks that engines stored."),
    _node("stored_bytes_total", "counters.stored_bytes_total", "Bytes of these blocks."),
    _node(
        "ghost_blocks_total",
        "counters.ghost_blocks_total",
        "Blocks asked for that host memory of twice the size would still have had.",
    ),
    _node(
        "hit_ratio",
        "hit_ratio",
        "Blocks that engines loaded and did not compute, divided by the blocks that admitted "
        "requests lacked in their engine's own cache and looked up here; since the start.",
    ),
    _node(
        "host_hit_ratio",
        "host.hit_ratio",
        "Blocks that engines loaded and that were in host memory when they were asked for, divided "
        "by the blocks that admitted requests lacked in their engine's own cache and looked up "
        "here; since the start.",
    ),
    _node(
        "host_hit_ratio_at_twice",
        "host.hit_ratio_at_twice",
        "What tierd_host_hit_ratio would be with host memory of twice the size, by what was "
        "evicted last.",
    ),
    _node_counts(
        "evicted_blocks_total",
        "reason",
        "evicted_*_blocks_total",
        tuple(why.value for why in Evicted),
        "Blocks evicted from host memory: a store needed room, or the next one will (ahead), or "
        "another namespace needed the memory (lent), or the machine did (shrunk).",
    ),
    _node_counts(
        "store_refused_blocks_total",
        "reason",
        "store_refused_*_blocks_total",
        tuple(why.value for why in NoRoom),
        "Blocks that engines were not given room for: all that the namespace has is in use (held), "
        "it has no memory and other namespaces use all of it (others), one session has reserved "
        "half of host memory (share), or the system did not give a memory segment (segment).",
    ),
    _node(
        "segments_failed_total",
        "counters.segments_failed_total",
        "Memory segments that the system did not give; the log says what to raise.",
    ),
    _node(
        "leases_refused_total",
        "counters.leases_refused_total",
        "Lookups answered as misses because the session does not give its leases back.",
    ),
    _node(
        "namespaces_ended_total",
        "counters.namespaces_ended_total",
        "Namespaces forgotten: no engine has them registered, and they have no blocks left.",
    ),
    _node(
        "revived_blocks_total",
        "counters.revived_blocks_total",
        "Blocks asked for while they were being evicted, which stayed.",
    ),
    Metric(
        "tierd_saved_prefill_seconds_total",
        "Time in which engines would have computed the tokens that they loaded instead, at the "
        "speed of prefill that each measures. Loading took time as well, which is not taken off.",
        _saved_prefill,
    ),
    _node(
        "loads_refused_total",
        "counters.loads_refused_total",
        "Loads from a tier that computing the tokens would have beaten.",
    ),
    _node_counts(
        "reloads_total",
        "outcome",
        "reloads_*_total",
        ("applied", "refused"),
        "Reloads of the configuration: applied, or refused because it was wrong.",
    ),
    # The hot set in the state directory.
    _node_counts(
        "hotset_snapshots_total",
        "outcome",
        "hotset_*_total",
        ("written", "failed"),
        "Snapshots of the hot set: written, or failed, as `tierd status` and the log say why.",
    ),
    _node("hotset_age_seconds", "hotset.age_s", "Time since a snapshot was written last."),
    # What was adopted from the daemon's life before this one.
    _node(
        "adopted_blocks_total",
        "counters.adopted_blocks_total",
        "Blocks of the daemon's life before this one that were there at its start.",
    ),
    _node(
        "adoption_dropped_segments_total",
        "counters.adoption_dropped_segments_total",
        "Segments of that life that could not be kept, and were given back; the log says why.",
    ),
    _node(
        "unproven_blocks",
        "host.unproven_blocks",
        "Adopted blocks whose checksum has not been verified yet; nobody gets one before.",
    ),
    _node(
        "rotten_blocks_total",
        "counters.rotten_blocks_total",
        "Adopted blocks whose checksum was wrong; none was used.",
    ),
    # What operators have it do.
    _node(
        "scrubbed_blocks_total",
        "counters.scrubbed_blocks_total",
        "Blocks of tiers that scrubs have read.",
    ),
    _node(
        "scrub_corrupt_total",
        "counters.scrub_corrupt_total",
        "Those of them that were damaged, and are gone.",
    ),
    _node(
        "scrub_unreadable_total",
        "counters.scrub_unreadable_total",
        "Those of them that could not be read, and stay.",
    ),
    _node(
        "scrub_repaired_total",
        "counters.scrub_repaired_total",
        "Damaged blocks that scrubs wrote again, from host memory or another tier.",
    ),
    _node("flushes_total", "counters.flushes_total", "Flushes that were begun."),
    _node(
        "flushed_blocks_total",
        "counters.flushed_blocks_total",
        "Blocks that flushes took out of host memory and of tiers, each copy counted.",
    ),
    # Copies that the daemon makes for engines.
    _node_counts(
        "copy_blocks_total",
        "direction",
        "copy_*_blocks_total",
        _WAYS,
        "Blocks copied from (store) and to (load) engines' pages.",
    ),
    _node_counts(
        "copy_bytes_total", "direction", "copy_*_bytes_total", _WAYS, "Bytes of these blocks."
    ),
    Metric(
        "tierd_copy_seconds_total",
        "Time from asking for copies to their end, queueing and waiting for events included.",
        _copy_seconds,
    ),
    _node_counts(
        "copy_failed_total",
        "direction",
        "copy_*_failed_total",
        _WAYS,
        "Copies of which not all blocks are in place: called off, failed, or their process died.",
    ),
    _device("attachments", "attachments", "Engine processes' layouts that a device's copies use."),
    _device("under_way", "under_way", "Calls that a device's copy process has not answered."),
    _device("mapped_bytes", "mapped_bytes", "Host memory that a device's copies can use."),
    _device("pinned_bytes", "pinned_bytes", "Bytes of it that are page-locked, at full speed."),
    _node(
        "copy_process_starts_total",
        "counters.copy_process_starts_total",
        "Starts of copy processes: more than devices says that one has died.",
    ),
    _node(
        "copy_process_kills_total",
        "counters.copy_process_kills_total",
        "Copy processes killed because a copy took too long.",
    ),
    _node(
        "copy_attach_refused_total",
        "counters.copy_attach_refused_total",
        "Engines whose pages could not be opened; the log says which setting to change.",
    ),
    # What engines say beforehand.
    _node("pinned_bytes", "host.pinned_bytes", "Bytes that are kept because of hints."),
    _node_counts(
        "pins_blocks_total",
        "outcome",
        "pins_*_blocks_total",
        ("granted", "refused", "expired", "overridden"),
        "Blocks that hints wanted kept, by what came of it.",
    ),
    _node(
        "deadlines_missed_total",
        "counters.deadline_missed_total",
        "ACQUIREs whose deadline came before the tiers had brought everything.",
    ),
    _node(
        "answers_late_total",
        "counters.answers_late_total",
        "ACQUIREs answered 100 ms or more after their deadline, which no tier can cause.",
    ),
    _node(
        "internal_errors_total",
        "counters.internal_errors_total",
        "Bugs of tierd that ended a session or a request; the log tells them.",
    ),
    _rest("events_total", "What else the daemon counts, by its name in `tierd status`."),
    # Namespaces.
    Metric(
        "tierd_namespace_blocks",
        f"Blocks in host memory of the {NAMESPACES_SHOWN_MAX} largest namespaces, and of all "
        'others as namespace="other".',
        _namespaces(lambda space: _number(space["blocks"])),
    ),
    Metric("tierd_namespace_bytes", "Payload bytes of these blocks.", _namespaces(_bytes_of)),
    _demand(
        "requested_tokens_total",
        "requested_tokens",
        "Tokens of the whole blocks that admitted requests lacked in their engine's own cache and "
        f"looked up here, of the first {SEATS_MAX} namespaces to ask, and of all others as "
        'namespace="other"; a request to several ranks counts with the first.',
    ),
    _demand(
        "loaded_tokens_total",
        "loaded_tokens",
        "Tokens that engines loaded and did not compute, by namespace; a load to several ranks "
        "counts with the first.",
    ),
    _demand(
        "loaded_bytes_total",
        "loaded_bytes",
        "Bytes, of all ranks, of the blocks that engines loaded and did not compute, by namespace "
        "of the first rank.",
    ),
    # Storage tiers: whether they are used.
    Metric("tierd_tier_state", "1 for the state that the tier is in, else 0.", _tier_states),
    Metric(
        "tierd_tier_breaker_state",
        "1 for the state that the breaker of reads or writes is in, else 0; calls are made "
        "while it is closed.",
        _breaker_states,
    ),
    _tier_by(
        "breaker_opened_total",
        "direction",
        {value: f"circuits.{what}.opened_total" for what, value in _DIRECTIONS.items()},
        "Times that the breaker opened, failed trials included.",
    ),
    _tier_by(
        "breaker_refused_blocks_total",
        "direction",
        {value: f"counters.breaker_refused_{what}_total" for what, value in _DIRECTIONS.items()},
        "Blocks that the tier was not asked for, or not given, because of its breaker.",
    ),
    _tier_counts(
        "deadlines_missed_total",
        "direction",
        "breaker_*_deadlines_total",
        ("read", "write"),
        "Calls that were given up at deadline_ms.",
    ),
    _tier("probes_total", "counters.breaker_probes_total", "Probes whether the tier is back."),
    _tier("probes_failed_total", "counters.breaker_probes_failed_total", "Probes that failed."),
    _tier("open_failures_total", "counters.open_failed_total", "Attempts to open it that failed."),
    _tier(
        "worker_restarts_total",
        "counters.worker_restarts_total",
        "Times that the process of the tier's client was started again.",
    ),
    _tier(
        "wrong_answers_total",
        "counters.wrong_answers_total",
        "Answers of the tier's client that break its contract; none was used.",
    ),
    # What they hold.
    _tier("blocks", "blocks", "Blocks held; of a shared tier, as far as this node has counted."),
    _tier("used_bytes", "used_bytes", "Bytes that these blocks occupy."),
    _tier("capacity_bytes", "capacity_bytes", "Most bytes held; 0: no limit, or not open."),
    # What they do.
    _tier_counts(
        "calls_total", "operation", "*_calls_total", _OPERATIONS, "Calls of the tier's client."
    ),
    _tier_counts(
        "calls_failed_total", "operation", "*_failed_total", _OPERATIONS, "Calls that failed."
    ),
    _tier_counts(
        "calls_cancelled_total",
        "operation",
        "*_cancelled_total",
        _OPERATIONS,
        "Calls that were called off, at deadline_ms or before.",
    ),
    _tier_counts(
        "calls_bugs_total",
        "operation",
        "*_bugs_total",
        _OPERATIONS,
        "Calls that ended by a bug of the tier's client.",
    ),
    Metric(
        "tierd_tier_call_duration_seconds",
        "How long calls of the tier's client took, failed and cancelled ones included.",
        _durations,
        histogram=True,
    ),
    _tier_counts(
        "read_blocks_total",
        "outcome",
        "get_*_total",
        ("hit", "miss", "corrupt", "error"),
        "Blocks that the tier was asked for, by what came of it.",
    ),
    _tier_counts(
        "written_blocks_total",
        "outcome",
        "put_*_total",
        ("stored", "present", "refused", "error"),
        "Blocks that the tier was given, by what came of it.",
    ),
    _tier_by(
        "moved_bytes_total",
        "direction",
        {"read": "counters.read_bytes_total", "write": "counters.written_bytes_total"},
        "Payload bytes of blocks that the tier brought, or stored.",
    ),
    _tier_by(
        "bytes_per_second",
        "direction",
        {"read": "read_bytes_per_s", "write": "write_bytes_per_s"},
        "Recent speed of the tier while blocks were moving; absent before the first one.",
    ),
    # What they are good for.
    _tier(
        "loaded_blocks_total",
        "counters.loaded_blocks_total",
        "Blocks that engines loaded and did not compute, and that the tier brought for them.",
    ),
    _tier(
        "loaded_tokens_total",
        "counters.loaded_tokens_total",
        "Tokens that engines loaded and did not compute, and that the tier brought for them.",
    ),
    _tier(
        "hit_ratio",
        "hit_ratio",
        "Blocks that engines loaded and that the tier brought for them, divided by the blocks that "
        "admitted requests lacked in their engine's own cache and looked up here; since the start.",
    ),
    _tier(
        "written_unread_share",
        "written_unread_share",
        "Share of the blocks written, since the start, that this node never read.",
    ),
    _tier(
        "refused_hits_total",
        "counters.refused_hits_total",
        "Blocks asked for that the write policy had refused: the hits lost to admission.",
    ),
    _tier("write_demand", "write_demand", "How likely a block must be used again to be written."),
    # What waits for them, and what does not get there.
    _tier("backup_queue_blocks", "backup_queue", "Blocks that wait to be written."),
    _tier("backup_queue_bytes", "backup_queue_bytes", "Bytes of their slots."),
    _tier("backup_queue_max_bytes", "backup_queue_bytes_max", "Most bytes that may wait."),
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
        "Blocks that the tier did not get: its queue was full, or its breaker open (busy), and it "
        "left host memory (dropped), its write policy did not want them (refused), it had reached "
        "its capacity (full), or its disk or server had no room for them (no_space).",
    ),
    _rest("tier_events_total", "What else a tier's client counts, by its name in `tierd status`."),
)

_READ: Final = {
    places: frozenset(
        path
        for metric in METRICS
        if isinstance(metric.read, Fields) and metric.read.places is places
        for path in metric.read.paths
    ).union(_READ_OTHERWISE)
    for places in (_whole, _tiers)
}
"""Paths that rows read, of the node and of each tier."""
