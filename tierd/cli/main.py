"""The `tierd` command: finds the subcommand's module, and imports no other.

An engine's environment has no event loop and no storage client; `tierd hash` must run
there all the same.
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
    "bench": "measure the tiers, and from which prefix on each pays",
    "completion": "print a shell's completion of this command",
    "doctor": "check this node, and an engine on it, and say what to do",
    "flush": "drop blocks from host memory and all tiers",
    "config": "check, show or explain the configuration",
    "explain": "say where a prompt's blocks are, or why they are not",
    "fsck": "check file tiers on disk, with tierd stopped",
    "hash": "compute the block hashes of prompts given as token ids",
    "hotset": "write, teach or show the prefixes that are worth having",
    "install-units": "write the systemd units for this installation",
    "replay": "run the eviction policies over a trace of requests",
    "scrub": "verify what the tiers of a running daemon hold",
    "serve": "run the daemon",
    "status": "show what a running daemon holds and does",
    "top": "watch what a running daemon does",
    "warm": "bring prefixes into host memory before they are asked for",
}
"""Subcommand to its line in --help. Each is a module of `tierd.cli` with `add_parser`."""

FOLDERS = frozenset({"bench", "doctor", "explain", "top", "warm"})
"""Subcommands of several modules: these are packages, and `add_parser` is in `command`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status. 2 means that the operator's input is wrong."""
    if argv is None:
        streams.reopen()
    words = list(sys.argv[1:] if argv is None else argv)
    # No option before the command takes a value, so its name is the first word that is one.
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
        # The reader has gone (`| head`). Python flushes once more at exit and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _age_s() -> float:
    """Of this process: a deadline counts from its start, and imports take some of it."""
    with open("/proc/self/stat", "rb") as file:
        # The name before it may have spaces and parentheses.
        fields = file.read().rpartition(b")")[2].split()
    began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began_s


def parser_of(chosen: Collection[str]) -> argparse.ArgumentParser:
    """The command line's parser, with the options of some commands."""
    parser = argparse.ArgumentParser(
        prog="tierd",
        description="A hierarchical KV offload daemon for LLM inference.",
        epilog="`tierd COMMAND --help` tells a command's options. Exit status, unless that says "
        "otherwise: 0 done, 1 could not be done, 2 the command line or configuration is wrong.",
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
