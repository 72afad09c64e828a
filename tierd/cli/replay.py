"""`tierd replay`: compute the hits and writes of a node with given tiers on a trace.

It runs the daemon's own policies and index, so that a node can be sized before it is bought. The
whole trace is in memory (about 100 B per block reference).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Final

from tierd.cli.common.progress import ProgressLine
from tierd.config import StorageConfig, WritePolicy, check_budget, convert
from tierd.errors import ConfigError
from tierd.eviction import L2_DEFAULT, POLICIES, STORAGE_DEFAULT, STORAGE_POLICIES
from tierd.eviction.lru import Lru
from tierd.eviction.policy import ITEM_MASK
from tierd.replay.optimal import Hits, belady, ideal
from tierd.replay.processes import Tell, run_all
from tierd.replay.simulate import ReplayResult, Setup, simulate
from tierd.replay.trace import Trace, open_trace, read_trace

DEFAULT_BLOCK_TOKENS: Final = 512
"""Block size of Mooncake's traces."""

DEFAULT_BLOCK_BYTES: Final = DEFAULT_BLOCK_TOKENS * (128 << 10)
"""KV of one block of an 8B model with grouped-query attention in 16 bits."""

BUDGET: Final[dict[str, Callable[[str], object]]] = {
    "write_policy": str,
    "write_uses": int,
    "write_share": float,
    "write_bytes_per_s": str,
    "drive_writes_per_day": float,
}
"""Keys of a tier's configuration that are also options, with the same meaning and default."""

CEILINGS: Final = 3
"""Short runs per report without progress messages: the theoretical upper bounds."""

_DAY_S: Final = 86_400

Json = dict[str, "Json"] | list["Json"] | str | float | int | None


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `tierd`."""
    parser = subparsers.add_parser(
        "replay",
        help="run the eviction policies over a trace of requests",
        description="Replay a trace with given tier sizes and the daemon's own policies, in time "
        "order. The trace is in Mooncake's format, plain or gzip: one JSON object per line with "
        "timestamp (ms), input_length, output_length and hash_ids. A usable hit is a block that "
        "was there together with all blocks before it in its prompt.",
    )
    parser.add_argument("trace", metavar="TRACE")
    add = parser.add_argument
    add("--l2-blocks", type=int, nargs="+", required=True, metavar="N", help="blocks in L2")
    add(
        "--l3-blocks",
        type=int,
        nargs="+",
        default=[0],
        metavar="N",
        help="blocks in L3 (default: no L3)",
    )
    add(
        "--policy",
        choices=POLICIES,
        default=L2_DEFAULT,
        help="eviction policy of L2 (default: %(default)s)",
    )
    add(
        "--l3-policy",
        choices=STORAGE_POLICIES,
        default=STORAGE_DEFAULT,
        help="eviction policy of L3 (default: %(default)s)",
    )
    for key, kind in BUDGET.items():
        flag = f"--{key.replace('_', '-')}"
        add(flag, type=kind, metavar="X", help=f"storage.{key} of L3 (default: the daemon's)")
    add(
        "--block-tokens",
        type=int,
        default=DEFAULT_BLOCK_TOKENS,
        metavar="N",
        help="tokens per block of the trace (default: %(default)s)",
    )
    add(
        "--block-bytes",
        type=int,
        default=DEFAULT_BLOCK_BYTES,
        metavar="N",
        help="KV bytes of one block on all ranks (default: %(default)s)",
    )
    add(
        "--drive-bytes",
        type=int,
        metavar="N",
        help="total size of L3's drives (default: the size of its blocks)",
    )
    add(
        "--output-hint",
        action="store_true",
        help="show the policies how many tokens each request generated",
    )
    add("--what-if", action="store_true", help="also run other sizes and policies")
    add(
        "--processes",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="number of parallel runs (default: one per core)",
    )
    add("--json", action="store_true", help="print JSON: one object, or a list for several sizes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay the trace; return the exit status."""
    setups = _setups(args)
    progress = ProgressLine()
    # There are millions of objects and no cycles; searching for cycles takes 5 % of the time.
    gc.disable()
    try:
        reports = _reports(args, setups, progress)
    finally:
        gc.enable()
        progress.clear()
    if args.json:
        print(json.dumps(reports[0] if len(reports) == 1 else reports, indent=2))
    else:
        for report in reports:
            print("\n".join(_table(report)))
    return 0


def _reports(
    args: argparse.Namespace, setups: list[Setup], progress: ProgressLine
) -> list[dict[str, Json]]:
    progress.say(f"reading {args.trace}")
    with open_trace(args.trace) as source:
        trace = read_trace(source, args.trace, args.block_tokens)
    if not args.output_hint:
        trace.requests = [request._replace(output_tokens=None) for request in trace.requests]
    by_setup = [_runs(trace, setup, args) for setup in setups]
    total = len(trace.requests) * sum(len(runs) - CEILINGS for runs in by_setup)
    rows = iter(
        run_all(
            [run for runs in by_setup for run in runs.values()],
            args.processes,
            lambda done: progress.say(f"replaying: {done} of {total} requests"),
        )
    )
    return [_report(trace, {name: next(rows) for name in runs}, args.what_if) for runs in by_setup]


def _setups(args: argparse.Namespace) -> list[Setup]:
    for name in ("block_tokens", "block_bytes", "drive_bytes", "processes"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    l2, l3 = args.l2_blocks, args.l3_blocks
    if len(l3) == 1:
        l3 = l3 * len(l2)
    if len(l2) != len(l3):
        raise ConfigError(
            f"--l3-blocks: pass one size, or one for each of the {len(l2)} sizes of L2"
        )
    for blocks, least in [*zip(l2, repeat(1)), *zip(l3, repeat(0))]:
        if not least <= blocks <= ITEM_MASK:
            raise ConfigError(f"a tier of {blocks} blocks: pass {least} to {ITEM_MASK}")
    given = {key: value for key in BUDGET if (value := getattr(args, key)) is not None}
    storage = convert({"type": "memory", **given}, StorageConfig, "storage.")
    check_budget(storage)
    return [
        Setup(a, b, args.policy, args.l3_policy, storage, args.block_bytes)
        for a, b in zip(l2, l3, strict=True)
    ]


# --- the report ---------------------------------------------------------------------


def _runs(
    trace: Trace, setup: Setup, args: argparse.Namespace
) -> dict[str, Callable[[Tell], dict[str, Json]]]:
    """Return the runs of one report by name; "" is the run of the setup itself."""
    setups = {"": setup, **(_what_if(setup) if args.what_if else {})}
    runs: dict[str, Callable[[Tell], dict[str, Json]]] = {
        change: partial(_one, trace, other, args) for change, other in setups.items()
    }
    tokens = args.block_tokens
    runs["ideal"] = lambda _: _ratios(ideal(trace, tokens), trace)
    for name, blocks in (("l2", setup.l2_blocks), ("total", setup.l2_blocks + setup.l3_blocks)):
        runs[f"belady {name}"] = partial(_belady, trace, blocks, tokens)
    return runs


def _report(trace: Trace, rows: dict[str, dict[str, Json]], what_if: bool) -> dict[str, Json]:
    report: dict[str, Json] = {
        "trace": {
            "requests": len(trace.requests),
            "seconds": trace.seconds,
            "block_refs": trace.block_refs,
            "unique_blocks": trace.unique_blocks,
        },
        **rows.pop(""),
        "ideal": rows.pop("ideal"),
        "belady": {name: rows.pop(f"belady {name}") for name in ("l2", "total")},
    }
    if what_if:
        report["what_if"] = [{"change": change, **row} for change, row in rows.items()]
    return report


def _what_if(setup: Setup) -> dict[str, Setup]:
    rows = {"L2 twice the size": replace(setup, l2_blocks=2 * setup.l2_blocks)}
    other = Lru.name if setup.l2_policy != Lru.name else L2_DEFAULT
    rows[f"L2 by {other}"] = replace(setup, l2_policy=other)
    if setup.l3_blocks:
        rows["L3 twice the size"] = replace(setup, l3_blocks=2 * setup.l3_blocks)
        other = Lru.name if setup.l3_policy != Lru.name else STORAGE_DEFAULT
        rows[f"L3 by {other}"] = replace(setup, l3_policy=other)
        if setup.storage.write_policy is not WritePolicy.WRITE_THROUGH:
            through = StorageConfig(type="memory", write_policy=WritePolicy.WRITE_THROUGH)
            rows["no admission"] = replace(setup, storage=through)
    return rows


def _belady(trace: Trace, blocks: int, block_tokens: int, _: Tell) -> dict[str, Json]:
    return _ratios(belady(trace, blocks, block_tokens), trace)


def _one(trace: Trace, setup: Setup, args: argparse.Namespace, tell: Tell) -> dict[str, Json]:
    outcome = simulate(trace, setup, args.block_tokens, tell)
    both = Hits()
    both.add(outcome.l2.blocks, outcome.l2.tokens)
    both.add(outcome.l3.blocks, outcome.l3.tokens)
    return {
        "l2": {
            "blocks": setup.l2_blocks,
            "policy": setup.l2_policy,
            **_ratios(outcome.l2, trace),
            "stored_blocks": outcome.l2_stored,
        },
        "l3": _storage(trace, setup, outcome, args) if setup.l3_blocks else None,
        "total": _ratios(both, trace),
    }


def _storage(
    trace: Trace, setup: Setup, outcome: ReplayResult, args: argparse.Namespace
) -> dict[str, Json]:
    written = outcome.l3_written * setup.block_bytes
    drive = args.drive_bytes or setup.l3_blocks * setup.block_bytes
    days = trace.seconds / _DAY_S
    return {
        "blocks": setup.l3_blocks,
        "policy": setup.l3_policy,
        "write_policy": setup.storage.write_policy.value,
        **_ratios(outcome.l3, trace),
        "written_blocks": outcome.l3_written,
        "writes_per_access": outcome.l3_written / max(trace.block_refs, 1),
        "written_bytes": written,
        "drive_writes_a_day": written / drive / days if days else None,
        "refused_blocks": outcome.l3_refused,
        "refused_hits": outcome.refused_hits,
    }


def _ratios(hits: Hits, trace: Trace) -> dict[str, Json]:
    return {
        "usable_hit_ratio": hits.blocks / max(trace.block_refs, 1),
        "usable_token_ratio": hits.tokens / max(sum(trace.input_tokens), 1),
    }


# --- output -------------------------------------------------------------------------


def _table(report: dict[str, Json]) -> list[str]:
    trace = _object(report["trace"])
    lines = [
        f"{trace['requests']} requests in {_number(trace['seconds']):.0f} s, "
        f"{trace['block_refs']} block references, {trace['unique_blocks']} blocks",
        "",
        f"{'':<28} {'blocks':>8} {'hits %':>7} {'tokens %':>9} {'writes/access':>14} "
        f"{'written GB':>11} {'drive writes/day':>17}",
    ]
    lines += _tier_lines("", report)
    for name, row in (("ideal", _object(report["ideal"])), *_ceilings(report)):
        lines.append(f"{name:<28} {'':>8} {_percents(row)}")
    for other in _list(report.get("what_if")):
        row = _object(other)
        lines += ["", f"what if {row['change']}", *_tier_lines("  ", row)]
    return [*lines, ""]


def _ceilings(report: dict[str, Json]) -> list[tuple[str, dict[str, Json]]]:
    rows = _object(report["belady"])
    names = ("l2", "total") if report["l3"] else ("l2",)
    return [(f"belady, {name}", _object(rows[name])) for name in names]


def _tier_lines(indent: str, report: dict[str, Json]) -> list[str]:
    l2 = _object(report["l2"])
    lines = [f"{indent + 'L2, ' + str(l2['policy']):<28} {l2['blocks']:>8} {_percents(l2)}"]
    if report["l3"] is None:
        return lines
    l3 = _object(report["l3"])
    daily = l3["drive_writes_a_day"]
    lines.append(
        f"{indent + 'L3, ' + str(l3['policy']):<28} {l3['blocks']:>8} {_percents(l3)} "
        f"{_number(l3['writes_per_access']):>14.3f} {_number(l3['written_bytes']) / 1e9:>11.1f} "
        f"{'-' if daily is None else format(_number(daily), '.2f'):>17}  {l3['write_policy']}"
    )
    lines.append(f"{indent + 'both':<28} {'':>8} {_percents(_object(report['total']))}")
    return lines


def _percents(row: dict[str, Json]) -> str:
    hits, tokens = row["usable_hit_ratio"], row["usable_token_ratio"]
    return f"{100 * _number(hits):>7.2f} {100 * _number(tokens):>9.2f}"


def _object(value: Json) -> dict[str, Json]:
    assert isinstance(value, dict)
    return value


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []


def _number(value: Json) -> float:
    assert isinstance(value, int | float)
    return value
