"""`tierd fsck`: check and repair storage tiers on this machine's disks."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from tierd.backend import Backend, CheckReport, Findings
from tierd.cli.common.progress import ProgressLine
from tierd.cli.common.text import printable, size
from tierd.config import DEFAULT_CONFIG, StorageConfig, load
from tierd.daemon.l3.backends import backend_class, options_of
from tierd.errors import ConfigError

CLEAN: Final = 0
REPAIRED: Final = 1
LEFT: Final = 4
"""Exit statuses, as in fsck(8)."""


class _Target(NamedTuple):
    """A tier to check."""

    name: str
    cls: type[Backend]
    options: msgspec.Struct


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `tierd`."""
    parser = subparsers.add_parser(
        "fsck",
        help="check file tiers on disk while tierd is stopped",
        description="Read and verify a file tier while no tierd has it open: files, index, headers "
        "and payloads. Files of other owners are listed and never changed.",
        epilog="Exit status: 0 clean, 1 damage repaired, 4 damage left, 2 not checked.",
    )
    parser.add_argument(
        "path", nargs="?", metavar="PATH", help="the tier's directory (default: from --config)"
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=Path(DEFAULT_CONFIG),
        help=f"configuration file (default: {DEFAULT_CONFIG})",
    )
    parser.add_argument("--tier", metavar="NAME", help="check this tier (default: all file tiers)")
    parser.add_argument(
        "--repair",
        action="store_true",
        help="drop damaged blocks and remove unusable slabs (default: change nothing)",
    )
    parser.add_argument("--quick", action="store_true", help="do not verify payloads")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check the tiers; return the exit status. Raises ConfigError if one cannot be checked."""
    if args.path is not None and args.tier is not None:
        raise ConfigError("pass PATH or --tier NAME, not both")
    targets = [_at(args.path)] if args.path is not None else list(_configured(args))
    progress = ProgressLine()
    reports: list[tuple[_Target, CheckReport, float]] = []
    for target in targets:
        began_s = time.monotonic()
        try:
            report = target.cls.check(
                target.options,
                repair=args.repair,
                quick=args.quick,
                tell=partial(progress.bytes, target.name),
            )
        except ConfigError as error:
            raise ConfigError(f"{target.name}: {error}") from error
        finally:
            progress.clear()
        reports.append((target, report, time.monotonic() - began_s))
        if not args.json:
            print("\n".join(_lines(*reports[-1], quick=args.quick)), flush=True)
    if args.json:
        print(json.dumps([_as_json(*each) for each in reports], indent=2))
    if any(report.left for _, report, _ in reports):
        return LEFT
    return REPAIRED if any(report.found for _, report, _ in reports) else CLEAN


def _at(path: str) -> _Target:
    """Return the tier in a directory, of the first backend type that accepts the path."""
    for entry in sorted(importlib.metadata.entry_points(group="tierd.backends")):
        try:
            cls: type[Backend] = entry.load()
        except ImportError:
            continue  # A type whose packages are not installed has no tier on this machine.
        options = cls.at(path)
        if options is not None:
            return _Target(path, cls, options)
    raise ConfigError(f"no installed backend can check a directory such as {path}")


def _configured(args: argparse.Namespace) -> Iterator[_Target]:
    config = load(args.config, os.environ)
    tiers = [tier for tier in config.storage if args.tier in (None, tier.name)]
    if not tiers:
        known = ", ".join(tier.name for tier in config.storage) or "none"
        raise ConfigError(f"no tier is named {args.tier!r}; tiers in {args.config}: {known}")
    targets = [_target(tier) for tier in tiers]
    if args.tier is None:
        targets = [target for target in targets if target.cls.checks_offline]
    if not targets:
        raise ConfigError(f"{args.config} has no tier on this machine's disks")
    yield from targets


def _target(tier: StorageConfig) -> _Target:
    return _Target(tier.name, backend_class(tier), options_of(tier))


def _lines(target: _Target, report: CheckReport, seconds: float, *, quick: bool) -> Iterator[str]:
    how = "headers" if quick else "verified"
    yield (
        f"{target.name}: {report.blocks} sound blocks, {size(report.read_bytes)} read in "
        f"{seconds:.1f} s ({how})"
    )
    for kind, found in report.damage.items():
        text = target.cls.damage_texts.get(kind, kind)
        yield f"  {text}: {found.count}, repaired {found.repaired}"
        yield from _places(found)
    if report.foreign.count:
        yield f"  not tierd's, left untouched: {report.foreign.count}"
        yield from _places(report.foreign)
    if report.left:
        yield f"  {report.left} not repaired"


def _places(found: Findings) -> Iterator[str]:
    for place in found.examples:
        yield f"    {printable(place)}"
    if found.count > len(found.examples):
        yield f"    and {found.count - len(found.examples)} more"


def _as_json(target: _Target, report: CheckReport, seconds: float) -> dict[str, object]:
    return {"tier": target.name, **asdict(report), "left": report.left, "seconds": seconds}
