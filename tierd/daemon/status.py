"""The status document: the answer to STATUS, and the source of all metrics. Plain values only."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from tierd import __version__
from tierd.core.reasons import Evicted
from tierd.daemon.l2.ending import SPACES_MAX
from tierd.daemon.session.demand import SHOWN_CHARS_MAX
from tierd.types import Namespace

if TYPE_CHECKING:
    from tierd.daemon.node import Node

CLIENTS_SHOWN_MAX: Final = 64
"""Names of clients in a status, each with its count; a node has tens of engine processes."""


def status_of(node: Node, uptime_s: float) -> dict[str, object]:
    """Return the status of a node."""
    counters = _counters(node)
    asked = counters["requested_blocks_total"]
    return {
        "version": __version__,
        "epoch": node.epoch.hex(),
        "uptime_s": round(uptime_s, 3),
        "hit_ratio": _ratio(counters["loaded_blocks_total"], asked),
        "host": _host(node, counters),
        "prefetch": {"min_tokens": node.prefetch.min_tokens},
        "hotset": {} if node.snapshots is None else node.snapshots.status(),
        "copies": node.copies.status(),
        "storage": [
            {
                **queue.tier.status(),
                **queue.status(),
                "hit_ratio": _ratio(queue.tier.counters["loaded_blocks_total"], asked),
            }
            for queue in node.backups.queues
        ],
        "namespaces": _namespaces(node),
        "demand": node.demand.status(),
        "clients": dict(Counter(node.clients.values()).most_common(CLIENTS_SHOWN_MAX)),
        "counters": dict(sorted(counters.items())),
    }


def _counters(node: Node) -> Counter[str]:
    host = node.host
    counters = Counter(node.counters)
    counters["evicted_blocks_total"] = host.evicted_blocks
    for why in Evicted:
        counters[f"evicted_{why.value}_blocks_total"] = host.evicted[why]
    counters["revived_blocks_total"] = host.revived_blocks
    counters.update(host.hints.counters)
    return counters


def _host(node: Node, counters: Counter[str]) -> dict[str, object]:
    host, arena = node.host, node.memory.arena
    spaces = list(host.spaces.values())
    asked = counters["requested_blocks_total"]
    hits = counters["host_loaded_blocks_total"]
    return {
        "capacity_bytes": host.capacity_bytes,
        "limit_bytes": host.limit_bytes,
        "min_bytes": node.watch.pressure.min_bytes,
        "allocated_bytes": host.allocated_bytes,
        "populated_bytes": arena.populated_bytes,
        "used_bytes": sum(len(s.items) * s.slot_bytes for s in spaces),
        "blocks": sum(len(s.items) for s in spaces),
        **arena.placement.status(),
        "eviction": host.eviction,
        "hit_ratio": _ratio(hits, asked),
        "hit_ratio_at_twice": _ratio(min(hits + counters["ghost_blocks_total"], asked), asked),
        "writing_blocks": sum(len(s.writing) for s in spaces),
        "leaving_blocks": sum(len(s.evicting) for s in spaces),
        "verified_blocks": sum(s.verified_blocks for s in spaces),
        "unverified_blocks": sum(len(s.unverified) for s in spaces),
        "quarantined_blocks": sum(len(s.quarantined) for s in spaces),
        "leases": len(host.leases),
        "pinned_bytes": host.hints.kept_bytes,
        "backlog_blocks": node.backlog(),
    }


def _namespaces(node: Node) -> list[dict[str, object]]:
    shown: list[dict[str, object]] = [
        {
            "digest": space.digest.hex(),
            **_fields(space.namespace),
            "blocks": len(space.items),
            "memory_bytes": space.memory_bytes,
            "sessions": space.sessions,
        }
        for space in node.host.spaces.values()
        if not space.worthless
    ]
    nothing = {"blocks": 0, "memory_bytes": 0, "sessions": 0}
    for digest, namespace in node.endings.names.items():
        shown.append({"digest": digest.hex(), **_fields(namespace), **nothing})
    # More would not fit a frame.
    return sorted(shown, key=lambda entry: not entry["sessions"])[:SPACES_MAX]


def _fields(namespace: Namespace) -> dict[str, object]:
    """Return a namespace's fields, shortened so that SPACES_MAX namespaces fit one frame."""
    shown = {**namespace.to_fields(), "hash_root": namespace.hash_root.hex()}
    shown["groups"] = " ".join(namespace.groups)
    return {
        name: value[:SHOWN_CHARS_MAX] if isinstance(value, str) else value
        for name, value in shown.items()
    }


def _ratio(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0
