"""`tierd flush`: drop blocks from host memory and all tiers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Final

from tierd.cli.common.digests import check_digits, listed, of_status, resolve
from tierd.cli.common.operator import Operator, add_socket, table, tables, whole
from tierd.cli.common.progress import ProgressLine
from tierd.cli.common.text import printable
from tierd.errors import ConfigError, TierdError

HOST: Final = "host"
"""Name of host memory in --tier."""

UNKNOWN_MIN: Final = 8
"""Digits that are required for a namespace that host memory does not know."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `tierd`."""
    parser = subparsers.add_parser(
        "flush",
        help="drop blocks from host memory and all tiers",
        description="Drop the blocks of one namespace or of all, and wait until neither host "
        "memory nor any tier can serve them; a tier shared with other nodes needs 12 s for this. "
        "Then the blocks are deleted, which only frees space. Blocks that engines store during "
        "the flush stay. Engines may also store blocks from their GPU caches again: if these "
        "blocks are wrong, stop the engines, flush, and start them.",
        epilog="Exit status: 0 no flushed block can be served; 1 a tier may still serve blocks, no "
        "block matched, or no daemon answers; 2 wrong usage.",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--namespace",
        metavar="DIGEST",
        help="flush the namespace whose digest begins with these digits (see tierd status); for a "
        f"namespace that only tiers have, at least {UNKNOWN_MIN} digits",
    )
    which.add_argument("--all", action="store_true", help="flush all namespaces")
    parser.add_argument(
        "--tier",
        action="append",
        metavar="NAME",
        help=f"flush only this tier, or {HOST} for host memory; may be repeated",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="stop waiting after S seconds; the flush continues in the daemon",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_socket(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Flush and wait; return the exit status."""
    prefix = "" if args.all else check_digits(args.namespace)
    try:
        with Operator(args.socket, "tierd flush") as operator:
            status = operator.status()
            known = of_status(tables(status["namespaces"]))
            if any(digest.startswith(prefix) for digest in known) and not args.all:
                prefix = resolve(prefix, known)
            elif not args.all:
                check_digits(prefix, UNKNOWN_MIN)
            host, numbers = _chosen(args.tier, status)
            if not args.yes and not _confirmed(prefix, host, numbers, status):
                return 1
            return _flush(args, operator, prefix, host, numbers, known)
    except ConfigError:
        raise
    except TierdError as error:
        print(f"tierd: {error}", file=sys.stderr)
    return 1


def _flush(
    args: argparse.Namespace,
    operator: Operator,
    prefix: str,
    host: bool,
    numbers: list[int],
    known: Mapping[str, str],
) -> int:
    """Flush and print the result; return the exit status. `known`: the daemon's namespaces."""
    progress = ProgressLine()
    result: dict[str, object] = {}
    late = False
    try:
        for result in operator.flush(prefix, host=host, tiers=numbers, timeout_s=args.timeout):
            progress.say(_summary(result))
    except TimeoutError:
        late = True
    finally:
        progress.clear()
    if late and not (result and result["complete"]):
        print("tierd: the flush goes on; blocks may still be served", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print("\n".join(_lines(result)))
    for tier in tables(result["tiers"]):
        name = printable(tier["name"])
        if not tier["final"]:
            why = printable(tier["why"])
            print(f"tierd: {name} may still serve blocks: {why}; flush again", file=sys.stderr)
        elif tier["garbage"]:
            print(
                f"tierd: {name} cannot serve the flushed blocks, but may still store some: "
                f"{printable(tier['garbage'])}; its next flush or scrub deletes them, or the "
                "tier evicts them",
                file=sys.stderr,
            )
    if late:
        print("tierd: no flushed block can be served; deletion continues", file=sys.stderr)
    if not late and prefix and prefix not in known and _matches_nothing(result):
        print(
            f"tierd: no block matches namespace {prefix}; namespaces that tierd knows: "
            f"{listed(known.values())}",
            file=sys.stderr,
        )
        return 1
    return 0 if result["complete"] else 1


def _matches_nothing(result: dict[str, object]) -> bool:
    """Return whether a flush found no block although it searched everything."""
    tiers = tables(result["tiers"])
    unseen = any(tier["garbage"] or tier["left"] for tier in tiers)
    return not (unseen or any(map(whole, table(result["namespaces"]).values())))


def _chosen(names: list[str] | None, status: dict[str, object]) -> tuple[bool, list[int]]:
    """Return whether to flush host memory, and the numbers of the tiers to flush."""
    known = [str(tier["name"]) for tier in tables(status["storage"])]
    if names is None:
        return True, list(range(len(known)))
    for name in names:
        if name != HOST and name not in known:
            raise ConfigError(f"no tier is named {name!r}; tiers: {', '.join([HOST, *known])}")
    return HOST in names, [number for number, name in enumerate(known) if name in names]


def _confirmed(prefix: str, host: bool, numbers: list[int], status: dict[str, object]) -> bool:
    """Ask on the terminal and return the answer. Raises ConfigError without a terminal."""
    if not sys.stdin.isatty():
        raise ConfigError("not a terminal: pass --yes")
    tiers = [tier for number, tier in enumerate(tables(status["storage"])) if number in numbers]
    spaces = [s for s in tables(status["namespaces"]) if str(s["digest"]).startswith(prefix)]
    where = [HOST] * host + [printable(tier["name"]) for tier in tiers]
    print(f"Flush from {', '.join(where)}:", file=sys.stderr)
    for space in spaces:
        what = f"{space['digest']}: {printable(space['model'])}, rank {space['tp_rank']}"
        print(f"  {what}, {space['blocks']} blocks in host memory", file=sys.stderr)
    if not prefix:
        print("  and all other namespaces in the tiers", file=sys.stderr)
    elif not spaces:
        print(f"  {prefix}..., unknown to host memory", file=sys.stderr)
    for tier in tiers:
        if tier["shared"]:
            print(
                f"{printable(tier['name'])} is shared: other nodes lose its blocks too, but keep "
                "the blocks in their own host memory.",
                file=sys.stderr,
            )
    print("Continue? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _summary(result: dict[str, object]) -> str:
    parts = [f"{HOST} {table(result['host'])['blocks']}"]
    parts += [f"{printable(tier['name'])} {tier['blocks']}" for tier in tables(result["tiers"])]
    waits = [f"{printable(t['name'])}: {t['waits']}" for t in tables(result["tiers"]) if t["waits"]]
    done = "no longer served, deleting" if result["complete"] else "flushing"
    return f"{done}, blocks so far: {', '.join(parts)}{''.join(f'; {each}' for each in waits)}"


def _lines(result: dict[str, object]) -> Iterator[str]:
    host = table(result["host"])
    if host["flushed"]:
        leased = f", {host['leased']} of them still leased to engines" if host["leased"] else ""
        yield f"{HOST}: {host['blocks']} blocks dropped{leased}"
    for tier in tables(result["tiers"]):
        shared = ", also for other nodes" if tier["shared"] else ""
        yield f"{printable(tier['name'])}: {tier['blocks']} blocks dropped{shared}"
    for digest, count in table(result["namespaces"]).items():
        if whole(count):
            yield f"  namespace {digest}: {count} copies"
