"""`tierd serve`: run the daemon in the foreground."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from tierd.config import DEFAULT_CONFIG
from tierd.daemon.lifecycle.checking import checked
from tierd.daemon.lifecycle.serve import serve
from tierd.errors import ConfigError
from tierd.logs import stderr_is_journal


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `tierd`."""
    parser = subparsers.add_parser(
        "serve",
        help="run the daemon",
        description="Run the daemon in the foreground until SIGTERM. "
        "Exit status 2: the configuration is wrong; each line of output says what to change.",
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=Path(DEFAULT_CONFIG),
        help=f"configuration file (default: {DEFAULT_CONFIG})",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the daemon; return the exit status."""
    try:
        return serve(partial(checked, args.config, os.environ), os.environ)
    except ConfigError as error:
        # The prefix is the priority of sd-daemon(3): the journal shows the line in red.
        priority = "<3>" if stderr_is_journal() else ""
        for problem in error.problems:
            print(f"{priority}tierd: {problem}", file=sys.stderr)
        return 2
