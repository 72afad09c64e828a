"""`tierd doctor`: check a node and an engine on it; report what is wrong and what to do."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from tierd.cli.common.break_even import learned_load
from tierd.cli.common.engine import EngineServer
from tierd.cli.doctor.checks import engine, machine, node, storage
from tierd.cli.doctor.checks.finding import Check, Finding, Level, gather
from tierd.client import DEFAULT_SOCKET
from tierd.config import DEFAULT_CONFIG
from tierd.errors import ConfigError

DAEMON_S: Final = 5.0
"""Longest wait for the daemon. After it the other checks run without the daemon's status."""

REST_S: Final = 20.0
"""Time limit for all other checks, which run in parallel."""

WARNED: Final = 3
FAULTY: Final = 1
"""Exit statuses."""

SCHEMA: Final = 1
"""Version of the `--json` output. It changes when a field is removed or changes its meaning."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `tierd`."""
    parser = subparsers.add_parser(
        "doctor",
        help="find faults of this node or an engine, and say what to do",
        description="Check the configuration, the daemon, memory, tiers and clock of this node. "
        "With --engine, also check whether a vLLM stores its blocks under the hashes that tierd "
        "computes. Works with the daemon up or down, and as any user, with fewer checks. Writes a "
        "temporary file into each file tier and a test block into each Redis and S3 tier; an "
        "engine computes and stores one short random prompt.",
        epilog="Exit status: 0 nothing wrong, 3 warnings, 1 faults, 2 the command line is wrong.",
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=Path(DEFAULT_CONFIG),
        help=f"configuration file (default: {DEFAULT_CONFIG})",
    )
    parser.add_argument(
        "--socket",
        help="the daemon's socket (default: $TIERD_SOCKET, the configuration's, or "
        f"{DEFAULT_SOCKET})",
    )
    parser.add_argument(
        "--user", metavar="NAME|UID", help="also check whether this user's engines may connect"
    )
    parser.add_argument("--engine", metavar="URL", help="also check this vLLM, http://HOST:PORT")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run all checks; return the exit status. Raises ConfigError for a wrong command line."""
    if args.user is not None:
        try:
            node.user_of(args.user)
        except KeyError:
            raise ConfigError(f"--user {args.user}: no such user") from None
    if args.engine is not None:
        EngineServer(args.engine)
    findings = list(_examine(args))
    if args.json:
        print(json.dumps(_as_json(findings), indent=2))
    else:
        print("\n".join(_lines(findings)))
    worst = max((finding.level for finding in findings), default=Level.OK)
    return {Level.FAULT: FAULTY, Level.WARNING: WARNED}.get(worst, 0)


def _examine(args: argparse.Namespace) -> Iterator[Finding]:
    scene = node.Scene(args.config, "", args.user)
    error = node.read_config(scene)
    configured = scene.config.socket if scene.config is not None else DEFAULT_SOCKET
    scene.socket = args.socket or os.environ.get("TIERD_SOCKET") or configured
    yield from gather([("daemon", lambda: list(node.look_at_daemon(scene)))], DAEMON_S)
    yield node.look_at_config(scene, error)
    yield from gather(_checks(args, scene), REST_S)


def _checks(args: argparse.Namespace, scene: node.Scene) -> list[tuple[str, Check]]:
    """Return the checks that can run, with or without the daemon's status."""
    status = scene.status
    load = learned_load(status) if status is not None else None
    checks: list[tuple[str, Check]] = [
        ("memory", lambda: list(machine.look_at_machine(scene))),
        ("service", lambda: list(node.look_at_service(node.read_service(), status))),
    ]
    if status is not None:
        checks.append(("tiers", lambda: list(node.look_at_tiers(status))))
        checks.append(("engine", lambda: list(node.look_at_namespaces(status))))
    for entry in scene.config.storage if scene.config is not None else ():
        checks.append((f"tier {entry.name}", partial(storage.look_at_tier, entry, load)))
    if args.engine is not None:
        look = lambda: list(engine.look_at_engine(args.engine, scene.socket, status))  # noqa: E731
        checks.append(("engine", look))
    return checks


def _as_json(findings: Sequence[Finding]) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "counts": {
            level.name.lower(): sum(finding.level is level for finding in findings)
            for level in Level
        },
        "findings": [finding.to_fields() for finding in _worst_first(findings)],
    }


def _worst_first(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: -finding.level)


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    for finding in _worst_first(findings):
        fields = finding.to_fields()
        yield f"{fields['level']:<8}{fields['subject']}: {fields['what']}"
        if finding.why:
            yield f"        why:  {fields['why']}"
        if finding.do:
            yield f"        do:   {fields['do']}"
    faults, warnings = (
        sum(finding.level is level for finding in findings)
        for level in (Level.FAULT, Level.WARNING)
    )
    yield f"{faults} fault{'s' * (faults != 1)}, {warnings} warning{'s' * (warnings != 1)}"
