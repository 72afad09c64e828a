"""`tierd status`: show the state of the daemon on this node."""

from __future__ import annotations

import argparse
import json
import os
import sys

from tierd.cli.common.text import duration, percent, printable, size
from tierd.client import DEFAULT_SOCKET, Client
from tierd.errors import TierdError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `tierd`."""
    parser = subparsers.add_parser(
        "status",
        help="show the state of the daemon",
        description="Show the daemon's version, tiers, namespaces and counters. "
        "Exit status 1: no daemon answers.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--socket",
        default=os.environ.get("TIERD_SOCKET", DEFAULT_SOCKET),
        help=f"the daemon's socket (default: $TIERD_SOCKET or {DEFAULT_SOCKET})",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the daemon's status; return the exit status."""
    client = Client(args.socket, name="tierd status", map_segments=False)
    try:
        status = client.status()
    except TierdError as error:
        print(f"tierd: {error}", file=sys.stderr)
        return 1
    finally:
        client.close()
    if args.json:
        print(json.dumps(status, indent=2))
    else:
        print("\n".join(_lines(status)))
    return 0


def _lines(status: dict[str, object]) -> list[str]:
    host = _table(status["host"])
    lines = [
        f"tierd {status['version']}, up {duration(status['uptime_s'])}, "
        f"block hit ratio {percent(status['hit_ratio'])}",
        f"host     {size(host['used_bytes'])} used of {size(host['capacity_bytes'])}, "
        f"{host['blocks']} blocks, {host['leases']} leases, {host['backlog_blocks']} to back up",
        f"  hit ratio {percent(host['hit_ratio'])}, {percent(host['hit_ratio_at_twice'])} at twice "
        f"the capacity; eviction policy {host['eviction']}",
    ]
    if _less(host["limit_bytes"], host["capacity_bytes"]):
        lines.append(f"  limited to {size(host['limit_bytes'])} under memory pressure")
    if host["unverified_blocks"]:
        lines.append(f"  {host['unverified_blocks']} blocks kept over a restart are unverified")
    if why := _table(status["hotset"]).get("why"):
        lines.append(f"hot set  no snapshot: {printable(why)}")
    for device in _tables(status["copies"]):
        lines += _device_lines(device)
    for tier in _tables(status["storage"]):
        lines += _tier_lines(tier)
    for space in _tables(status["namespaces"]):
        lines.append(
            f"namespace {space['digest']}: {printable(space['model'])}, rank {space['tp_rank']}, "
            f"{space['blocks']} blocks of {size(space['block_bytes'])}, "
            f"{space['sessions']} sessions"
        )
    lines += [f"{name} {count}" for name, count in _table(status["counters"]).items()]
    return lines


def _device_lines(device: dict[str, object]) -> list[str]:
    why = f": {device['pin_problem']}" if device["pin_problem"] else ""
    return [
        f"copies   {device['device']}, process {device['pid']}, {device['attachments']} engine "
        f"processes, {device['under_way']} calls in flight",
        f"  {size(device['pinned_bytes'])} pinned of {size(device['mapped_bytes'])}{why}",
    ]


def _tier_lines(tier: dict[str, object]) -> list[str]:
    why = f": {printable(tier['why'])}" if tier["why"] else ""
    bound = f" of {size(tier['capacity_bytes'])}" if tier["capacity_bytes"] else ""
    counters = _table(tier["counters"])
    lines = [
        f"{printable(tier['name']):<8} {tier['state']}{why}",
        f"  {size(tier['used_bytes'])} used{bound}, {tier['blocks']} blocks; "
        f"read {size(counters.get('read_bytes_total', 0))}, "
        f"written {size(counters.get('written_bytes_total', 0))}",
        f"  hit ratio {percent(tier['hit_ratio'])}; write policy {tier['write_policy']}, "
        f"{percent(tier['written_unread_share'])} of the written bytes never read",
        f"  write queue {tier['backup_queue']} blocks, {size(tier['backup_queue_bytes'])} of "
        f"{size(tier['backup_queue_bytes_max'])}",
    ]
    for what, circuit in _table(tier["circuits"]).items():
        told = _table(circuit)
        if told["state"] != "closed":
            lines.append(
                f"  {what} {told['state']} for {told['since_s']} s: {printable(told['why'])}"
            )
    for what, spread in _table(tier["latency"]).items():
        times = _table(spread)
        if times["count"]:
            lines.append(f"  {what} p50 {times['p50_ms']:.3g} ms, p99 {times['p99_ms']:.3g} ms")
    return lines + [f"  {name} {count}" for name, count in counters.items() if count]


def _less(one: object, other: object) -> bool:
    assert isinstance(one, int)
    assert isinstance(other, int)
    return one < other


def _table(value: object) -> dict[str, object]:
    assert isinstance(value, dict)
    return value


def _tables(value: object) -> list[dict[str, object]]:
    assert isinstance(value, list)
    return [_table(entry) for entry in value]
