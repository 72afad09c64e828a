"""`tierd config`: check the configuration, show its values, and explain its keys."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from tierd.backend import Backend
from tierd.config import (
    DEFAULT_CONFIG,
    NOT_SCALARS,
    StorageConfig,
    decode,
    load,
    variable,
)
from tierd.daemon.l3.backends import options_of
from tierd.daemon.lifecycle.checking import checked, warnings
from tierd.daemon.lifecycle.reload import LIVE, values
from tierd.errors import ConfigError
from tierd.reference import Key, keys, options, origins, shown

WIDTH: Final = 78


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `tierd`."""
    parser = subparsers.add_parser(
        "config",
        help="check, show or explain the configuration",
        description="Check, show or explain the configuration. It is read as `tierd serve` reads "
        "it, so run this command as the same user and with the same environment.",
    )
    commands = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    check = commands.add_parser(
        "check",
        help="report what is wrong with it",
        description="Check the file as `tierd serve` and a reload do, with tier options, the "
        "environment, and this machine's memory, sockets and directories. The check opens and "
        "changes nothing, and accepts that a running tierd uses the socket. It gives the warnings "
        "of `tierd serve` about process limits, for its own process. Exit status 0: tierd starts "
        "with this file; 2: it does not, and each line says what to change.",
    )
    check.add_argument(
        "--elsewhere",
        action="store_true",
        help="the file is for another machine: skip checks of this machine",
    )
    check.set_defaults(run=_check)
    show = commands.add_parser(
        "show",
        help="show every value and where it comes from",
        description="Show every value and its origin: the default, the file or an environment "
        "variable. Secrets are not shown.",
    )
    show.set_defaults(run=_show)
    docs = commands.add_parser(
        "docs",
        help="explain every key",
        description="Explain every key: its default, its environment variable, and whether a "
        "reload applies it to a running tierd or it needs a restart.",
    )
    docs.set_defaults(run=_docs)
    for command in (check, show):
        command.add_argument(
            "--config",
            type=Path,
            default=Path(DEFAULT_CONFIG),
            help=f"configuration file (default: {DEFAULT_CONFIG})",
        )
    for command in (check, show, docs):
        command.add_argument("--json", action="store_true", help="print JSON")


# --- check ------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> int:
    """Print all problems and warnings; return the exit status."""
    problems: tuple[str, ...] = ()
    warned: list[str] = []
    try:
        config = checked(args.config, os.environ, beside=True, elsewhere=args.elsewhere)
        warned += () if args.elsewhere else warnings(config)
    except ConfigError as error:
        problems = error.problems
    if args.json:
        report = {"ok": not problems, "problems": problems, "warnings": warned}
        print(json.dumps(report, indent=2))
    else:
        for line in (*problems, *(f"warning: {warning}" for warning in warned)):
            print(f"tierd: {line}", file=sys.stderr)
        if not problems:
            print(f"{args.config}: {'tierd starts with this file' if warned else 'no problems'}")
    return 2 if problems else 0


# --- show -------------------------------------------------------------------------------


class _Setting(NamedTuple):
    key: str
    value: object
    origin: str


def _show(args: argparse.Namespace) -> int:
    """Print every value; return the exit status. Raises ConfigError."""
    found = list(_settings(args.config))
    if args.json:
        print(json.dumps([setting._asdict() for setting in found], indent=2))
        return 0
    left = [f"{setting.key} = {json.dumps(setting.value)}" for setting in found]
    width = min(max(map(len, left)), WIDTH - 20)
    for text, setting in zip(left, found, strict=True):
        print(f"{text:<{width}}  # {setting.origin}")
    return 0


def _settings(path: Path) -> Iterator[_Setting]:
    config, found = load(path, os.environ), origins(decode(path), os.environ)
    for key, value in values(config, ()).items():
        yield _setting(key, value, found)
    for tier in config.storage:
        where = f"storage ({tier.name})."
        for field in msgspec.structs.fields(StorageConfig):
            if field.name not in NOT_SCALARS:
                yield _setting(where + field.name, getattr(tier, field.name), found)
        for name, value in msgspec.structs.asdict(options_of(tier)).items():
            yield _setting(where + name, value, found)


def _setting(key: str, value: object, found: Mapping[str, str]) -> _Setting:
    return _Setting(key, shown(key.rpartition(".")[2], value), found.get(key, "default"))


# --- docs -------------------------------------------------------------------------------


def _docs(args: argparse.Namespace) -> int:
    """Print the reference; return the exit status."""
    found = list(keys())
    for entry in sorted(importlib.metadata.entry_points(group="tierd.backends")):
        try:
            cls: type[Backend] = entry.load()
        except ImportError as error:
            print(f"storage.type {entry.name} cannot be loaded: {error}", file=sys.stderr)
        else:
            found += options(entry.name, cls.Options)
    if args.json:
        print(json.dumps([_described(key) for key in found], indent=2))
        return 0
    for key in found:
        told = _described(key)
        live = "live" if told["live"] else "needs a restart"
        default = f"default {key.default}" if key.default else "required"
        print(f"{key.path}  ({default}; {live}; {told['variable']})")
        print(textwrap.indent(textwrap.fill(key.about, WIDTH - 4), "    "))
    return 0


def _described(key: Key) -> dict[str, object]:
    table, _, name = key.path.rpartition(".")
    path = f"storage.NAME.{name}" if table.startswith("storage") else key.path
    return {
        "key": key.path,
        "default": key.default or None,
        "about": key.about,
        "live": key.path in LIVE,
        "variable": variable(path),
    }
