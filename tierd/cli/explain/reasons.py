"""Turns the reasons of an EXPLAINED message into sentences, each with what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from tierd.cli.common.text import ago, printable, size

Reason = Mapping[str, object]
"""A reason with its tier's status and the other namespace's description filled in."""


class Said(NamedTuple):
    """A reason in words; `do` is empty if no action is needed."""

    what: str
    do: str


def said(reason: Reason) -> Said:
    """Return a reason in words. A newer daemon's unknown reason is shown by its name."""
    known = _SAID.get(str(reason["what"]))
    return known(reason) if known else Said(printable(reason["what"]), "")


def _tier(reason: Reason) -> dict[str, object]:
    tier = reason["tier"]
    assert isinstance(tier, dict)
    return tier


def _name(reason: Reason) -> str:
    return f"tier {printable(_tier(reason)['name'])}"


def _never_stored(reason: Reason) -> Said:
    either = "no engine has stored it since tierd started"
    if reason["forgets"]:
        either += ", or it was evicted too long ago for tierd to remember"
    return Said(
        either,
        "the first request with this prompt stores its blocks; if requests had it, check that "
        "tokens, salt, adapter and namespace match theirs",
    )


def _restart(reason: Reason) -> Said:
    began = f"tierd started {ago(reason['ago_s'])} ago and has no earlier history"
    if reason["kept"]:
        return Said(f"{began} except the blocks that host memory kept", "")
    return Said(
        f"{began}; host memory was not kept",
        "load the prefix with tierd warm; tierd install-units makes systemd keep host memory over "
        "restarts",
    )


def _not_admitted(reason: Reason) -> Said:
    name, policy = _name(reason), reason["policy"]
    if "uses_min" in reason:
        return Said(
            f"{name} does not have it yet: {reason['uses']} of {reason['uses_min']} required uses, "
            f"predicted reuse {reason['chance']}, write threshold {reason['chance_min']}",
            "nothing: tierd writes the block once it reaches both; if it is evicted from host "
            "memory earlier, tierd decides again whether to write it",
        )
    if policy == "write_back":
        return Said(f"{name} receives it when host memory evicts it (write_back)", "")
    if policy == "fill_from_lower":
        return Said(f"{name} is not filled from the tiers below it (fill_from_lower)", "")
    return Said(f"{name} does not have it yet", "nothing: tierd offers it again at its next use")


_EVICTED: Final = {
    "room": ("new blocks needed the space", "raise host.capacity"),
    "ahead": ("new blocks needed the space", "raise host.capacity"),
    "lent": (
        "another namespace needed the memory",
        "raise host.capacity, or serve fewer models on this node",
    ),
    "shrunk": (
        "the machine was short of memory, or host.capacity was lowered",
        "find what else uses memory on this machine; tierd always keeps host.min",
    ),
}


def _evicted(reason: Reason) -> Said:
    why, do = _EVICTED.get(str(reason["by"]), (printable(reason["by"]), ""))
    return Said(f"host memory evicted it {ago(reason['ago_s'])} ago: {why}", do)


def _flushed(reason: Reason) -> Said:
    where = _name(reason) if "tier" in reason else "host memory"
    return Said(f"it was flushed from {where} {ago(reason['ago_s'])} ago", "")


def _checksum_failed(reason: Reason) -> Said:
    when = f"{ago(reason['ago_s'])} ago and was dropped"
    if "tier" not in reason:
        return Said(f"its copy in host memory was corrupt {when}", "test this machine's memory")
    name = printable(_tier(reason)["name"])
    return Said(
        f"its copy in {_name(reason)} was corrupt {when}",
        f"check the tier's disk or server; verify its other blocks: tierd scrub --tier {name}",
    )


def _refused_by_budget(reason: Reason) -> Said:
    return Said(
        f"{_name(reason)} did not receive it: the write budget went to blocks more likely to be "
        f"reused (demand {reason['demand']})",
        "to get more hits for more writes, raise the tier's write_share, write_bytes_per_s or "
        "drive_writes_per_day",
    )


_SKIPPED: Final = {
    "full": (
        "its write queue was full",
        "raise the tier's write_queue or write_batches, or use a faster disk or server",
    ),
    "away": (
        "the tier accepted no writes then",
        "tierd status shows the tier's state; tierd writes the block at its next use",
    ),
    "failed": (
        "the write failed",
        "read the tier's errors in tierd's log; the disk may be full or read-only",
    ),
    "flushed": ("a flush removed it from the write queue", ""),
}


def _skipped(reason: Reason) -> Said:
    why, do = _SKIPPED.get(str(reason["by"]), (printable(reason["by"]), ""))
    return Said(f"{_name(reason)} did not receive it: {why}", do)


def _breaker_open(reason: Reason) -> Said:
    circuits = _tier(reason).get("circuits")
    reads = circuits.get("reads") if isinstance(circuits, dict) else None
    since, why = "", "no reason is known"
    if isinstance(reads, dict):
        since = f" for {ago(reads['since_s'])}" if reads.get("since_s") is not None else ""
        why = printable(reads.get("why"))
    return Said(
        f"{_name(reason)} may have it but has accepted no reads{since}: {why}",
        "repair its disk or server; tierd retries by itself",
    )


def _unavailable(reason: Reason) -> Said:
    why = printable(_tier(reason).get("why")) or "it is being opened"
    return Said(
        f"{_name(reason)} may have it but is not open: {why}",
        "fix the stated cause; tierd retries by itself",
    )


def _no_answer(reason: Reason) -> Said:
    return Said(f"{_name(reason)} may have it but did not answer in time", "try again")


def _deadline_missed(reason: Reason) -> Said:
    return Said(
        f"a request wanted it {ago(reason['ago_s'])} ago, but the load took longer than the "
        "prefetch timeout",
        "to wait longer, raise prefetch.timeout_max_ms and timeout_per_ki_ms; tierd status shows "
        "the tier's latency",
    )


def _not_worth(reason: Reason) -> Said:
    return Said(
        f"a request wanted it {ago(reason['ago_s'])} ago, but computing it was faster than loading "
        "it",
        "use a faster tier, or set prefetch.break_even = false to load it anyway",
    )


def _tier_dropped(reason: Reason) -> Said:
    tier = _tier(reason)
    when = "" if reason["had_s"] is None else f" {ago(reason['had_s'])} ago"
    full = ""
    if tier.get("capacity_bytes"):
        full = f" ({size(tier['used_bytes'])} of {size(tier['capacity_bytes'])} used)"
    return Said(
        f"{_name(reason)} had it{when} but has evicted or lost it since",
        f"raise the tier's capacity{full}; check whether its server expires or deletes entries",
    )


_RANKS: Final = {"tp_rank", "pp_rank", "cp_rank"}


def _other_namespace(reason: Reason) -> Said:
    other, where = reason["namespace"], reason["in"]
    assert isinstance(other, dict)
    assert isinstance(where, list)
    places = " and ".join(
        "host memory" if place == "host" else f"tier {printable(place)}" for place in where
    )
    differs = other["differs"]
    what, do = "the differing fields are unknown", ""
    if isinstance(differs, dict):
        fields = [
            f"{printable(name)} is {printable(theirs)}, not {printable(mine)}"
            for name, (mine, theirs) in differs.items()
        ]
        what = f"its {'; '.join(fields)}"
        do = "tierd never serves blocks across namespaces: undo the change, or warm this namespace"
        if differs.keys() <= _RANKS:
            do = "a prefix is usable only if all ranks have it: find out why this rank stored less"
    named = f"{printable(other['digest'])} ({printable(other['model'])})"
    return Said(f"another namespace, {named}, has this hash in {places}: {what}", do)


_SAID: Final[dict[str, Callable[[Reason], Said]]] = {
    "being_flushed": lambda _: Said("it is being flushed", "wait until tierd flush ends"),
    "waiting": lambda reason: Said(f"it waits to be written to {_name(reason)}", ""),
    "never_stored": _never_stored,
    "restart": _restart,
    "not_admitted": _not_admitted,
    "evicted": _evicted,
    "flushed": _flushed,
    "checksum_failed": _checksum_failed,
    "refused_by_budget": _refused_by_budget,
    "skipped": _skipped,
    "breaker_open": _breaker_open,
    "unavailable": _unavailable,
    "no_answer": _no_answer,
    "deadline_missed": _deadline_missed,
    "not_worth": _not_worth,
    "tier_dropped": _tier_dropped,
    "other_namespace": _other_namespace,
}
