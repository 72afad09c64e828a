"""`tierd config`: check the configuration, show what it comes to, and what there is to set."""

from __future__ import annotations

import argparse
import copy
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
    Config,
    StorageConfig,
    decode,
    load,
    parse,
    variable,
)
from tierd.daemon.backends import make_backend, options_of
from tierd.daemon.listening import check_sockets
from tierd.daemon.reload import LIVE, values
from tierd.errors import ConfigError
from tierd.memory.arena import check_capacity
from tierd.memory.placement import find_node
from tierd.reference import Key, keys, options, origins, shown

WIDTH: Final = 78


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `tierd`."""
    parser = subparsers.add_parser(
        "config",
        help="check, show or explain the configuration",
        description="Check, show or explain the configuration. It is read as `tierd serve` reads "
        "it, so run this as the same user, with the same environment.",
    )
    commands = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    check = commands.add_parser(
        "check",
        help="say what is wrong with it",
        description="Check the file as `tierd serve` and a reload do, the options of tiers "
        "included; nothing is opened. Exit status 0: it can be used; 2: it cannot, and the "
        "message says what to change.",
    )
    check.set_defaults(run=_check)
    show = commands.add_parser(
        "show",
        help="show every value and where it comes from",
        description="Show every value and where it comes from: the default, the file or a "
        "variable of the environment. Secrets are not shown.",
    )
    show.set_defaults(run=_show)
    docs = commands.add_parser(
        "docs",
        help="explain every key",
        description="Explain every key: its default, its variable, and whether a reload changes "
        "it in a running tierd. All others need a restart.",
    )
    docs.set_defaults(run=_docs)
    for command in (check, show):
        command.add_argument(
            "--config", type=Path, default=Path(DEFAULT_CONFIG), help=f"default: {DEFAULT_CONFIG}"
        )
    for command in (check, show, docs):
        command.add_argument("--json", action="store_true", help="print JSON")


# --- check ------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> int:
    """Print what is wrong; the exit status."""
    problem = ""
    warnings: list[str] = []
    try:
        config = load(args.config, os.environ)
        check_sockets(config)
        for tier in config.storage:
            make_backend(tier)
        warnings = _warnings(config)
    except ConfigError as error:
        problem = str(error)
    if args.json:
        print(json.dumps({"ok": not problem, "problem": problem, "warnings": warnings}, indent=2))
    else:
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        if problem:
            print(f"tierd: {problem}", file=sys.stderr)
        else:
            print(f"{args.config}: all is well")
    return 2 if problem else 0


def _warnings(config: Config) -> list[str]:
    """What would keep tierd from starting here, and may be right on another machine."""
    found = []
    try:
        check_capacity(config.host.capacity)
    except ConfigError as error:
        found.append(str(error))
    try:
        find_node(config.host.numa_node)
    except ConfigError as error:
        found.append(str(error))
    return found


# --- show -------------------------------------------------------------------------------


class _Setting(NamedTuple):
    key: str
    value: object
    origin: str


def _show(args: argparse.Namespace) -> int:
    """Print every value; the exit status. Raises ConfigError."""
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
    raw = decode(path)
    try:
        config = parse(copy.deepcopy(raw), os.environ)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    found = origins(raw, os.environ)
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
    """Print the reference; the exit status."""
    found = list(keys())
    for entry in sorted(importlib.metadata.entry_points(group="tierd.backends")):
        try:
            cls: type[Backend] = entry.load()
        except ImportError as error:
            print(f"storage.type {entry.name} cannot be used here: {error}", file=sys.stderr)
        else:
            found += options(entry.name, cls.Options)
    if args.json:
        print(json.dumps([_described(key) for key in found], indent=2))
        return 0
    for key in found:
        told = _described(key)
        live = "live" if told["live"] else "at a restart"
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
