"""`tierd hotset`: export, import or show the most valuable prefixes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from tierd import __version__
from tierd.cli.common.digests import DIGITS_MIN, of_status, resolve
from tierd.cli.common.operator import Operator, add_socket, tables
from tierd.cli.common.text import duration, printable, size
from tierd.errors import ConfigError, TierdError
from tierd.hotset import Gathered, Hot, HotSet, merged, pieces
from tierd.sizes import parse_size
from tierd.types import NEVER
from tierd.wire import messages as m

SHOWN: Final = 20
"""Default number of runs in a table."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `tierd`."""
    parser = subparsers.add_parser(
        "hotset",
        help="show, export or import the most valuable prefixes",
        description="A hot set lists the prefixes that are worth keeping, the most valuable first, "
        "without their bytes: `tierd warm --hotset FILE` loads them.",
    )
    commands = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    status = "Exit status: 0 done, 1 no daemon answers, 2 wrong usage or a malformed hot set."
    export = commands.add_parser(
        "export",
        help="write the hot set of a daemon to a file",
        description="Write the hot set of host memory or of a tier.",
        epilog=status,
    )
    _add_source(export)
    export.add_argument(
        "--size", metavar="SIZE", help="limit the blocks to this total size, as in 100GiB"
    )
    export.add_argument(
        "-o", "--output", default="-", metavar="FILE", help="output file; default: -, stdout"
    )
    export.set_defaults(run=_export)
    teach = commands.add_parser(
        "import",
        help="teach a daemon the uses in a hot set",
        description="Teach a daemon the use counts and ages in a hot set. Host memory then keeps "
        "these blocks longer. The command loads no block.",
        epilog=status,
    )
    teach.add_argument("file", metavar="FILE", help="a hot set; -: stdin")
    teach.set_defaults(run=_import)
    show = commands.add_parser(
        "show",
        help="show a hot set",
        description="Show a hot set file, or the current hot set of a daemon.",
        epilog=status,
    )
    show.add_argument(
        "file", nargs="?", metavar="FILE", help="a hot set; -: stdin; default: ask the daemon"
    )
    _add_source(show)
    show.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help=f"show at most N runs; default: {SHOWN}, with --json all",
    )
    show.set_defaults(run=_show)
    for command in (teach, show):
        command.add_argument("--json", action="store_true", help="print JSON")
    for command in (export, teach, show):
        add_socket(command)


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--namespace",
        action="append",
        metavar="DIGEST",
        help=f"only this namespace, by the first {DIGITS_MIN} or more digits of its digest; may be "
        "repeated",
    )
    parser.add_argument(
        "--from", dest="tier", metavar="TIER", help="use this tier (default: host memory)"
    )


# --- export -----------------------------------------------------------------------------


def _export(args: argparse.Namespace) -> int:
    """Write the daemon's hot set; return the exit status."""
    size_bytes = None if args.size is None else parse_size(args.size)

    def write(file: BinaryIO) -> None:
        for piece in pieces(
            gathered.families(),
            written_s=int(time.time()),
            version=__version__,
            size_bytes=size_bytes,
        ):
            file.write(piece)

    try:
        gathered = _of_daemon(args)
    except ConfigError:
        raise
    except TierdError as error:
        return _failed(error)
    if args.output == "-":
        write(sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return 0
    path = Path(args.output)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)
    return 0


def _of_daemon(args: argparse.Namespace) -> Gathered:
    """Return the hot set of a daemon. Raises ConfigError and what `Operator` raises."""
    gathered = Gathered()
    with Operator(args.socket, "tierd hotset") as operator:
        status = operator.status()
        source = _source(args.tier, status)
        for digest in _chosen(args.namespace, status):
            forest = gathered.forest(operator.describe(digest))
            for page in operator.inventory(digest, source):
                hashes, parents = m.split_hashes(page.hashes), m.split_hashes(page.parents)
                uses, ages_s = m.unpack_slots(page.uses), m.unpack_slots(page.ages_s)
                forest.add(hashes, parents, uses, ages_s)
    return gathered


def _source(name: str | None, status: dict[str, object]) -> int:
    names = [str(tier["name"]) for tier in tables(status["storage"])]
    if name is not None and name not in names:
        known = ", ".join(map(printable, names)) or "none"
        raise ConfigError(f"no tier is named {name!r}; tiers: {known}")
    return 0 if name is None else names.index(name) + 1


def _chosen(prefixes: Sequence[str] | None, status: dict[str, object]) -> list[bytes]:
    """Return the digests of the daemon's namespaces that begin with `prefixes`; None: all."""
    known = of_status(tables(status["namespaces"]))
    if prefixes is None:
        return [*map(bytes.fromhex, known)]
    return [bytes.fromhex(digest) for digest in {resolve(prefix, known): 0 for prefix in prefixes}]


# --- import -----------------------------------------------------------------------------


@dataclass(slots=True)
class _Taught:
    """Result of an import for one namespace: blocks taught, and those in host memory."""

    blocks: int = 0
    here: int = 0


def _import(args: argparse.Namespace) -> int:
    """Teach the daemon a hot set; return the exit status."""
    with _opened(args.file) as file:
        hot_set = HotSet(file, args.file)
        # Read all runs before teaching any: an error must not leave half a hot set taught.
        runs = list(hot_set)
    passed_s = max(0, int(time.time()) - hot_set.written_s)
    taught: dict[bytes, _Taught] = {}
    try:
        with Operator(args.socket, "tierd hotset") as operator:
            handles: dict[bytes, int] = {}
            # Least valuable runs first: a full use book forgets its oldest entries.
            for spaces, run in reversed(runs):
                for space in spaces:
                    taught.setdefault(space.digest, _Taught()).blocks += len(run.hashes)
                # All ranks share use counts.
                digest = spaces[0].digest
                if digest not in handles:
                    handles[digest] = operator.register(spaces[0])
                count = len(run.hashes)
                age_s = min(NEVER, run.age_s + passed_s)
                operator.teach(handles[digest], run.hashes, [run.uses] * count, [age_s] * count)
            for digest, counts in taught.items():
                here = {
                    block_hash
                    for page in operator.inventory(digest, 0)
                    for block_hash in m.split_hashes(page.hashes)
                }
                for spaces, run in runs:
                    if any(space.digest == digest for space in spaces):
                        counts.here += sum(block_hash in here for block_hash in run.hashes)
    except ConfigError:
        raise
    except TierdError as error:
        return _failed(error)
    _tell_taught(args, hot_set, taught)
    return 0


def _tell_taught(args: argparse.Namespace, hot_set: HotSet, taught: dict[bytes, _Taught]) -> None:
    if args.json:
        told = {
            digest.hex(): {"blocks": counts.blocks, "in_host_memory": counts.here}
            for digest, counts in taught.items()
        }
        print(json.dumps({"namespaces": told}, indent=2))
        return
    for digest, counts in taught.items():
        model = printable(hot_set.namespaces[digest].model)
        print(
            f"namespace {digest.hex()}, {model}: taught {counts.blocks} blocks, {counts.here} of "
            "them in host memory"
        )
    if any(counts.here < counts.blocks for counts in taught.values()):
        print(f"`tierd warm --hotset {args.file}` loads the other blocks that a tier has")


# --- show -------------------------------------------------------------------------------


class _Source(NamedTuple):
    runs: Iterator[Hot]
    written_s: int
    version: str


def _show(args: argparse.Namespace) -> int:
    """Print a hot set; return the exit status."""
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {args.limit}")
    if args.file is not None:
        if args.namespace or args.tier:
            raise ConfigError("--namespace and --from do not apply to FILE: leave one out")
        with _opened(args.file) as file:
            hot_set = HotSet(file, args.file)
            _print(args, _Source(iter(hot_set), hot_set.written_s, hot_set.version))
        return 0
    try:
        gathered = _of_daemon(args)
    except ConfigError:
        raise
    except TierdError as error:
        return _failed(error)
    runs = (hot for hot in merged(gathered.families()) if hot is not None)
    _print(args, _Source(runs, int(time.time()), __version__))
    return 0


def _print(args: argparse.Namespace, source: _Source) -> None:
    limit = args.limit if args.limit is not None else None if args.json else SHOWN
    shown: list[Hot] = []
    runs = blocks = size_bytes = 0
    for hot in source.runs:
        if limit is None or runs < limit:
            shown.append(hot)
        runs += 1
        blocks += len(hot.run.hashes)
        size_bytes += hot.size_bytes
    if args.json:
        whole = {"runs": runs, "blocks": blocks, "bytes": size_bytes}
        head = {"written": source.written_s, "version": source.version, **whole}
        print(json.dumps({**head, "shown": [*map(_object, shown)]}, indent=2))
        return
    table: list[tuple[str, ...]] = [
        ("", "namespace", "tokens", "blocks", "bytes", "uses", "age", "first hash")
    ]
    table += [(str(number), *_row(hot)) for number, hot in enumerate(shown, 1)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [
            cell.ljust(width) if at in (1, 7) else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    age_s = max(0, int(time.time()) - source.written_s)
    more = f" ({len(shown)} shown)" if len(shown) < runs else ""
    print(
        f"{runs} runs{more}, {blocks} blocks, {size(size_bytes)}; written {duration(age_s)} ago "
        f"by tierd {printable(source.version)}"
    )


def _row(hot: Hot) -> tuple[str, ...]:
    run = hot.run
    first = hot.namespaces[0]
    ranks = f" and {len(hot.namespaces) - 1} more" if len(hot.namespaces) > 1 else ""
    return (
        f"{first.digest.hex()[:8]}{ranks} ({printable(first.model)[:40]})",
        str(hot.tokens),
        str(len(run.hashes)),
        size(hot.size_bytes),
        str(run.uses),
        "-" if run.age_s == NEVER else duration(run.age_s),
        run.hashes[0].hex()[:16],
    )


def _object(hot: Hot) -> dict[str, object]:
    run = hot.run
    return {
        "namespaces": [space.digest.hex() for space in hot.namespaces],
        "model": hot.namespaces[0].model,
        "tokens": hot.tokens,
        "blocks": len(run.hashes),
        "bytes": hot.size_bytes,
        "uses": run.uses,
        "age_s": None if run.age_s == NEVER else run.age_s,
        "first_hash": run.hashes[0].hex(),
        "last_hash": run.hashes[-1].hex(),
    }


# --- shared -----------------------------------------------------------------------------


def _opened(name: str) -> contextlib.AbstractContextManager[BinaryIO]:
    """Open a file or stdin. Raises ConfigError."""
    if name == "-":
        return contextlib.nullcontext(sys.stdin.buffer)
    try:
        return Path(name).open("rb")
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from error


def _failed(error: TierdError) -> int:
    print(f"tierd: {error}", file=sys.stderr)
    return 1
