"""`tierd scrub`: let the running daemon verify the blocks in its tiers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Final

from tierd.cli.common.operator import Operator, add_socket, table, tables, whole
from tierd.cli.common.progress import ProgressLine
from tierd.cli.common.text import printable, size
from tierd.errors import ConfigError, RefusedError, TierdError
from tierd.sizes import parse_size

DEFAULT_RATE: Final = "100MB/s"

CLEAN: Final = 0
ROT: Final = 1
STOPPED: Final = 3
"""Exit statuses."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `tierd`."""
    parser = subparsers.add_parser(
        "scrub",
        help="verify the blocks in the tiers of a running daemon",
        description="Read every block of the tiers, behind all requests and at a limited rate, "
        "and verify it. Damaged blocks are dropped, and written again if host memory or another "
        "tier has them. Ctrl-C stops the scrub.",
        epilog="Exit status: 0 no damage, 1 damage was found or a tier could not be read, "
        "2 wrong usage, 3 stopped before the end.",
    )
    parser.add_argument(
        "--tier",
        action="append",
        metavar="NAME",
        help="scrub this tier; may be repeated (default: all tiers that other nodes do not share)",
    )
    parser.add_argument(
        "--rate", default=DEFAULT_RATE, help="read rate limit (default: %(default)s)"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--detach", action="store_true", help="start the scrub and do not wait")
    how.add_argument("--stop", action="store_true", help="stop the running scrub")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_socket(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Scrub and wait; return the exit status."""
    rate = parse_size(args.rate.removesuffix("/s"))
    if rate < 1:
        raise ConfigError(f"--rate must be more than 0, got {args.rate}")
    try:
        with Operator(args.socket, "tierd scrub") as operator:
            if args.stop:
                return _show(args, _last(operator.stop_scrub()), CLEAN)
            numbers = _numbers(args.tier, operator.status())
            try:
                return _scrub(args, operator, numbers, rate)
            except KeyboardInterrupt:
                return _stop(args)
    except ConfigError:
        raise
    except TierdError as error:
        print(f"tierd: {error}", file=sys.stderr)
        return ROT


def _scrub(args: argparse.Namespace, operator: Operator, numbers: list[int], rate: int) -> int:
    progress = ProgressLine()
    result: dict[str, object] = {}
    try:
        for result in operator.scrub(numbers, rate):
            if args.detach:
                return CLEAN
            progress.say(_summary(result))
    finally:
        progress.clear()
    if result["stopped"]:
        return _show(args, result, STOPPED)
    tiers = tables(result["tiers"])
    damaged = any(whole(tier["corrupt"]) + whole(tier["unreadable"]) for tier in tiers)
    return _show(args, result, ROT if damaged or not result["complete"] else CLEAN)


def _stop(args: argparse.Namespace) -> int:
    """Stop the scrub after Ctrl-C, in a new session: the old one still waits for its call."""
    with Operator(args.socket, "tierd scrub") as operator:
        try:
            return _show(args, _last(operator.stop_scrub()), STOPPED)
        except RefusedError:
            return STOPPED  # The scrub has just ended.


def _last(told: Iterator[dict[str, object]]) -> dict[str, object]:
    *_, result = told
    return result


def _numbers(names: list[str] | None, status: dict[str, object]) -> list[int]:
    known = [str(tier["name"]) for tier in tables(status["storage"])]
    for name in names or ():
        if name not in known:
            raise ConfigError(f"no tier is named {name!r}; tiers: {', '.join(known) or 'none'}")
    return [known.index(name) for name in names or ()]


def _show(args: argparse.Namespace, result: dict[str, object], status: int) -> int:
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print("\n".join(_lines(result)))
    return status


def _summary(result: dict[str, object]) -> str:
    for tier in tables(result["tiers"]):
        if not tier["ended"]:
            return (
                f"{printable(tier['name'])}: {tier['blocks']} of {tier['blocks_max']} blocks, "
                f"{size(whole(tier['bytes']))}, {tier['corrupt']} damaged"
            )
    return ""


def _lines(result: dict[str, object]) -> Iterator[str]:
    for entry in tables(result["tiers"]):
        tier = table(entry)
        yield (
            f"{printable(tier['name'])}: {tier['blocks']} blocks read, {size(whole(tier['bytes']))}"
        )
        bad = whole(tier["corrupt"]) + whole(tier["unreadable"])
        if bad:
            again = whole(tier["repaired"])
            yield (
                f"  {tier['corrupt']} damaged, {tier['unreadable']} unreadable; {again} written "
                f"again, {bad - again} lost from this tier"
            )
        if tier["why"]:
            yield f"  incomplete: {printable(tier['why'])}"
