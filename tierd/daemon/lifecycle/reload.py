"""Reloads the configuration: which keys changed, which take effect now, which need a restart.

Each key is in exactly one of LIVE and RESTART; options of backends are RESTART. The running
configuration is one object that its readers share: live keys are changed in place, and
`take_effect` updates the parts that keep a copy. RESTART keys keep their running values, so that
the next reload names them again.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Container
from typing import Final, NamedTuple

import msgspec

from tierd import logs
from tierd.config import NOT_SCALARS, Config
from tierd.daemon.node import Node
from tierd.daemon.session.server import Server
from tierd.errors import ConfigError
from tierd.reference import shown

log = logging.getLogger("tierd")

LIVE: Final = frozenset(
    {
        "allow_uids",
        "drain_timeout_ms",
        "host.capacity",
        "host.lease_ttl_ms",
        "host.min",
        "host.pin_max_s",
        "host.pin_share",
        "log.level",
        "prefetch.break_even",
        "prefetch.bytes_in_flight",
        "prefetch.min_tokens",
        "prefetch.policy",
        "prefetch.timeout_base_ms",
        "prefetch.timeout_max_ms",
        "prefetch.timeout_per_ki_ms",
        "storage.deadline_ms",
        "storage.drive_writes_per_day",
        "storage.fill_from_lower",
        "storage.probe_ms",
        "storage.slow_ms",
        "storage.write_bytes_per_s",
        "storage.write_queue",
        "storage.write_share",
        "storage.write_uses",
    }
)
"""Keys that a reload changes; keys of storage apply to each tier."""

RESTART: Final = frozenset(
    {
        "admin.allow_remote",
        "admin.listen",
        "copy.bandwidth_max",
        "copy.job_timeout_ms",
        "host.eviction",
        "host.huge_pages",
        "host.numa_node",
        "hotset.interval_s",
        "hotset.size",
        "log.format",
        "socket",
        "state_dir",
        "storage.name",
        "storage.read_batches",
        "storage.type",
        "storage.write_batches",
        "storage.write_policy",
    }
)
"""Keys that need a restart."""

ABSENT: Final = "absent"


class KeyChange(NamedTuple):
    """A key whose value in the file differs from the running one."""

    key: str
    live: bool
    old: str
    new: str


class Reloader:
    """Applies the configuration file to a running daemon."""

    def __init__(
        self, running: Config, load: Callable[[], Config], node: Node, server: Server
    ) -> None:
        self._running = running
        self._load = load
        self._node = node
        self._server = server

    async def reload(self) -> str:
        """Read the file, apply its live keys and log all changes.

        Returns why the file was refused, an empty text if it was not.
        """
        try:
            new = await asyncio.to_thread(self._load)
        except ConfigError as error:
            self._node.counters["reloads_refused_total"] += 1
            log.error("the configuration is not reloaded, the running one stays: %s", error)
            return str(error)
        changes = differences(self._running, new)
        for change in changes:
            log.info("configuration: %s: %s -> %s", change.key, change.old, change.new)
        take_over(self._running, new)
        take_effect(self._running, self._node, self._server)
        # Concurrently: a tier that does not answer takes its whole deadline.
        await asyncio.gather(*(queue.tier.reload() for queue in self._node.backups.queues))
        self._node.counters["reloads_applied_total"] += 1
        if later := [change.key for change in changes if not change.live]:
            log.warning("reloaded; these keys need a restart of tierd: %s", ", ".join(later))
        else:
            log.info("reloaded; %d keys have changed", len(changes))
        return ""


def differences(running: Config, new: Config) -> list[KeyChange]:
    """Return the keys that differ in `new`, in the order of the reference; tiers match by name."""
    before, after = ([tier.name for tier in config.storage] for config in (running, new))
    changes = []
    if before != after:
        changes.append(KeyChange("storage", False, ", ".join(before), ", ".join(after)))
    both = set(before) & set(after)
    old_values, new_values = values(running, both), values(new, both)
    for key in dict.fromkeys([*old_values, *new_values]):
        old, now = old_values.get(key, ABSENT), new_values.get(key, ABSENT)
        if old != now:
            changes.append(KeyChange(key, kind_of(key) in LIVE, _text(key, old), _text(key, now)))
    return changes


def take_over(running: Config, new: Config) -> None:
    """Set the live keys of `running` to their values in `new`."""
    tables: list[tuple[str, msgspec.Struct, msgspec.Struct]] = [("", running, new)]
    for field in msgspec.structs.fields(Config):
        inner = getattr(running, field.name)
        if isinstance(inner, msgspec.Struct):
            tables.append((f"{field.name}.", inner, getattr(new, field.name)))
    found = {tier.name: tier for tier in new.storage}
    tables += [("storage.", t, found[t.name]) for t in running.storage if t.name in found]
    for prefix, old, now in tables:
        for field in msgspec.structs.fields(old):
            if prefix + field.name in LIVE:
                setattr(old, field.name, getattr(now, field.name))


def take_effect(config: Config, node: Node, server: Server) -> None:
    """Update the parts that keep copies of live keys; all others read `config` each time."""
    logs.set_level(config.log.level)
    server.allow(config.allow_uids)
    node.configure(config.host, config.prefetch)
    for queue in node.backups.queues:
        queue.tier.configure()
        queue.writes.configure()


def values(config: Config, tiers: Container[str]) -> dict[str, object]:
    """Return each key's value by its path: "host.capacity", "storage (file).deadline_ms".

    Includes only the tiers named in `tiers`, and only the backend options that are set.
    """
    found: dict[str, object] = {}
    for field in msgspec.structs.fields(Config):
        inner = getattr(config, field.name)
        if isinstance(inner, msgspec.Struct):
            found.update(_scalars(inner, f"{field.name}."))
    found = {**_scalars(config, ""), **found}
    for tier in config.storage:
        if tier.name not in tiers:
            continue
        where = f"storage ({tier.name})."
        found.update(_scalars(tier, where))
        options = {**tier.options, **tier.overrides}
        found.update({where + key: value for key, value in options.items()})
    return found


def _scalars(table: msgspec.Struct, prefix: str) -> dict[str, object]:
    return {
        prefix + field.name: getattr(table, field.name)
        for field in msgspec.structs.fields(table)
        if field.name not in NOT_SCALARS
    }


def kind_of(key: str) -> str:
    """Return a key's name in the reference, which has no names of tiers."""
    table, dot, name = key.rpartition(".")
    return f"storage.{name}" if dot and table.startswith("storage (") else key


def _text(key: str, value: object) -> str:
    """Format a value for the log."""
    plain = shown(key.rpartition(".")[2], value)
    return ABSENT if plain == ABSENT else json.dumps(plain, default=str)
