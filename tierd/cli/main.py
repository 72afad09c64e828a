"""The `tierd` command. It imports only the module of the subcommand that runs.

An engine's environment lacks the event loop and the storage clients, and `tierd hash` must run
there.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Collection, Sequence

from tierd import __version__
from tierd.cli.common import streams
from tierd.errors import ConfigError

COMMANDS = {
    "bench": "measure the tiers, and the prefix length from which each pays",
    "completion": "print the shell completion of this command",
    "doctor": "find faults of this node or an engine, and say what to do",
    "flush": "drop blocks from host memory and all tiers",
    "config": "check, show or explain the configuration",
    "explain": "say where a prompt's blocks are, or why they are missing",
    "fsck": "check file tiers on disk while tierd is stopped",
    "hash": "compute the block hashes of prompts given as token ids",
    "hotset": "show, export or import the most valuable prefixes",
    "install-units": "write the systemd units for this installation",
    "replay": "run the eviction policies over a trace of requests",
    "scrub": "verify the blocks in the tiers of a running daemon",
    "serve": "run the daemon",
    "status": "show contents and counters of a running daemon",
    "top": "watch a running daemon live",
    "warm": "load prefixes into host memory before requests need them",
}
"""Subcommands and their lines in --help. Each is a module of `tierd.cli` with `add_parser`."""

FOLDERS = frozenset({"bench", "doctor", "explain", "top", "warm"})
"""Subcommands that are packages; their `add_parser` is in the module `command`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status. Status 2: the user's input is wrong."""
    if argv is None:
        streams.reopen()
    words = list(sys.argv[1:] if argv is None else argv)
    # No option before the command takes a value, so the first word that names a command is it.
    chosen = next((word for word in words if word in COMMANDS), None)
    try:
        args = parser_of([chosen] if chosen else []).parse_args(words)
        args.began_s = time.monotonic() - (_age_s() if argv is None else 0.0)
        status: int = args.run(args)
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "tierd":
            raise
        print(f"tierd {chosen}: needs {error.name}: pip install 'tierd[daemon]'", file=sys.stderr)
        return 2
    except ConfigError as error:
        for problem in error.problems:
            print(f"tierd: {problem}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`). Python flushes at exit and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _age_s() -> float:
    """Return the age of this process in seconds. Deadlines count from its start, with imports."""
    with open("/proc/self/stat", "rb") as file:
        # The process name in front of the fields may contain spaces and parentheses.
        fields = file.read().rpartition(b")")[2].split()
    began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began_s


def parser_of(chosen: Collection[str]) -> argparse.ArgumentParser:
    """Return the parser of the command line, with the options of the `chosen` commands."""
    parser = argparse.ArgumentParser(
        prog="tierd",
        description="A hierarchical KV offload daemon for LLM inference.",
        epilog="`tierd COMMAND --help` shows a command's options and exit status. Common exit "
        "statuses: 0 done, 1 failed, 2 the command line or configuration is wrong.",
    )
    parser.add_argument("--version", action="version", version=f"tierd {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        if name in chosen:
            module = f"tierd.cli.{name.replace('-', '_')}"
            if name in FOLDERS:
                module += ".command"
            importlib.import_module(module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


if __name__ == "__main__":
    sys.exit(main())
