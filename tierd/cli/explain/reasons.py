"""The reasons that an EXPLAINED gives for a block, in a sentence each, with what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from tierd.cli.common.text import ago, printable, size

Reason = Mapping[str, object]
"""A reason as it is shown: tiers by their status, another namespace by what is told of it."""


class Said(NamedTuple):
    """A reason in words; `do` is empty where nothing is to be done."""

    what: str
    do: str


def said(reason: Reason) -> Said:
    """A reason in words. One that only a newer daemon knows is named as it names it."""
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
        either += ", or it left so long ago that this is forgotten"
    return Said(
        either,
        "a prompt that was served once is found by the next one; see that tokens, salt, adapter "
        "and namespace are those of the requests",
    )


def _restart(reason: Reason) -> Said:
    began = f"tierd started {ago(reason['ago_s'])} ago and knows nothing of before"
    if reason["kept"]:
        return Said(f"{began}, but for what host memory kept", "")
    return Said(
        f"{began}; host memory was not kept",
        "warm it (tierd warm), or have systemd keep it over restarts (tierd install-units)",
    )


def _not_admitted(reason: Reason) -> Said:
    name, policy = _name(reason), reason["policy"]
    if "uses_min" in reason:
        return Said(
            f"{name} does not have it yet: {reason['uses']} of {reason['uses_min']} uses, and a "
            f"chance of reuse of {reason['chance']} where {reason['chance_min']} is demanded",
            "nothing: it is written once it has both, or when it leaves host memory, if it is "
            "worth it then",
        )
    if policy == "write_back":
        return Said(f"{name} gets it when it leaves host memory (write_back)", "")
    if policy == "fill_from_lower":
        return Said(f"{name} is not filled from the tiers below it (fill_from_lower)", "")
    return Said(f"{name} does not have it yet", "nothing: it is offered again at its next use")


_EVICTED: Final = {
    "room": ("new blocks needed the room", "raise host.capacity"),
    "ahead": ("new blocks needed the room", "raise host.capacity"),
    "lent": (
        "another namespace needed the memory",
        "raise host.capacity, or serve fewer models on this node",
    ),
    "shrunk": (
        "the machine was short of memory, or host.capacity was lowered",
        "see what else takes memory here; host.min is what tierd keeps",
    ),
}


def _evicted(reason: Reason) -> Said:
    why, do = _EVICTED.get(str(reason["by"]), (printable(reason["by"]), ""))
    return Said(f"it left host memory {ago(reason['ago_s'])} ago: {why}", do)


def _flushed(reason: Reason) -> Said:
    where = _name(reason) if "tier" in reason else "host memory"
    return Said(f"it was flushed from {where} {ago(reason['ago_s'])} ago", "")


def _checksum_failed(reason: Reason) -> Said:
    when = f"{ago(reason['ago_s'])} ago, and dropped it"
    if "tier" not in reason:
        return Said(f"host memory had it damaged {when}", "test this machine's memory")
    name = printable(_tier(reason)["name"])
    return Said(
        f"{_name(reason)} had it damaged {when}",
        f"look at its disk or server, and verify the rest: tierd scrub --tier {name}",
    )


def _refused_by_budget(reason: Reason) -> Said:
    return Said(
        f"{_name(reason)} did not get it: less likely to be used again than what it had room for "
        f"in its write budget (demand {reason['demand']})",
        "if hits are worth more writes, raise the tier's write_share, write_bytes_per_s or "
        "drive_writes_per_day",
    )


_SKIPPED: Final = {
    "full": (
        "too many blocks waited to be written",
        "raise its write_queue or write_batches, or use a faster disk or server",
    ),
    "away": (
        "it took no writes then",
        "tierd status says how it is; blocks come at their next use",
    ),
    "failed": ("it failed to keep it", "see its errors in tierd's log: a full or read-only disk?"),
    "flushed": ("a flush ended the wait", ""),
}


def _skipped(reason: Reason) -> Said:
    why, do = _SKIPPED.get(str(reason["by"]), (printable(reason["by"]), ""))
    return Said(f"{_name(reason)} did not get it: {why}", do)


def _breaker_open(reason: Reason) -> Said:
    circuits = _tier(reason).get("circuits")
    reads = circuits.get("reads") if isinstance(circuits, dict) else None
    since, why = "", "no reason is known"
    if isinstance(reads, dict):
        since = f" for {ago(reads['since_s'])}" if reads.get("since_s") is not None else ""
        why = printable(reads.get("why"))
    return Said(
        f"{_name(reason)} may have it and has taken no reads{since}: {why}",
        "mend its disk or server; tierd asks again by itself",
    )


def _unavailable(reason: Reason) -> Said:
    why = printable(_tier(reason).get("why")) or "it is being opened"
    return Said(
        f"{_name(reason)} may have it and is not open: {why}",
        "mend that; tierd tries again by itself",
    )


def _no_answer(reason: Reason) -> Said:
    return Said(f"{_name(reason)} may have it and did not answer in time", "ask again")


def _deadline_missed(reason: Reason) -> Said:
    return Said(
        f"a request asked for it {ago(reason['ago_s'])} ago and was answered before it came",
        "if that was worth the wait, raise prefetch.timeout_max_ms and timeout_per_ki_ms; "
        "tierd status says how fast the tier is",
    )


def _not_worth(reason: Reason) -> Said:
    return Said(
        f"a request asked for it {ago(reason['ago_s'])} ago, and computing it was faster than "
        "loading it",
        "a faster tier; or prefetch.break_even = false to load it all the same",
    )


def _tier_dropped(reason: Reason) -> Said:
    tier = _tier(reason)
    when = "" if reason["had_s"] is None else f" {ago(reason['had_s'])} ago"
    full = ""
    if tier.get("capacity_bytes"):
        full = f" ({size(tier['used_bytes'])} of {size(tier['capacity_bytes'])} used)"
    return Said(
        f"{_name(reason)} had it{when} and has dropped it by itself since",
        f"raise its capacity{full}; see also what expires or deletes in it",
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
    what, do = "which fields differ is not known here", ""
    if isinstance(differs, dict):
        fields = [
            f"{printable(name)} is {printable(theirs)}, not {printable(mine)}"
            for name, (mine, theirs) in differs.items()
        ]
        what = f"there {'; '.join(fields)}"
        do = "blocks are never served across namespaces: undo that change, or warm this one"
        if differs.keys() <= _RANKS:
            do = "a prefix is of use only where all ranks have it: see why this one stored less"
    named = f"{printable(other['digest'])} ({printable(other['model'])})"
    return Said(f"another namespace, {named}, has this hash in {places}: {what}", do)


_SAID: Final[dict[str, Callable[[Reason], Said]]] = {
    "being_flushed": lambda _: Said("it is being flushed", "wait for tierd flush to end"),
    "waiting": lambda reason: Said(f"it is about to be written to {_name(reason)}", ""),
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
