"""`tierd bench`: measure this node's tiers, and the prefix length from which each one pays."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tierd.cli.bench.tier_speed import Result, measure
from tierd.cli.common.break_even import (
    LENGTHS,
    Model,
    PrefillDemand,
    TierSpeed,
    first_paying,
    learned_load,
    model_of,
    only_model,
)
from tierd.cli.common.digests import listed, of_status, resolve
from tierd.cli.common.engine import EngineServer
from tierd.cli.common.operator import Operator, tables
from tierd.cli.common.progress import ProgressLine
from tierd.cli.common.speed import copy_bytes_per_s
from tierd.cli.common.text import latency, number, printable, size
from tierd.cli.doctor.checks.engine import noise
from tierd.config import DEFAULT_CONFIG, DEFAULT_SOCKET, Config, StorageConfig, load
from tierd.errors import BackendError, ConfigError, TierdError
from tierd.sizes import parse_size
from tierd.types import BLOCK_BYTES_MAX

BLOCK_BYTES: Final = 2 << 20
"""Default block size: 16 tokens of a model with 128 KiB per token."""

PART_FAILED: Final = 3
"""Exit status: some tiers could not be measured."""

SCHEMA: Final = 1
"""Version of the `--json` output. It changes when a field is removed or changes its meaning."""

_DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}
PROMPT_ROUNDS: Final = 4
"""Prompts of each length. The first one is a warm-up: it compiles kernels and captures graphs."""

_PROMPTS: Final = (512, 2048)
"""Tokens of the prompts that measure an engine's speed. The difference of their times excludes
the fixed cost of a request."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `tierd`."""
    parser = subparsers.add_parser(
        "bench",
        help="measure the tiers, and the prefix length from which each pays",
        description="Measure memory and each configured tier on scratch data: a file tier in a "
        "directory beside it, Redis and S3 in a temporary namespace, all deleted afterwards. Then "
        "print, for a model and an engine's prefill speed, from which prefix length a tier is "
        "faster than computing, as the daemon decides it (prefetch.break_even). Each disk and "
        "server is busy for some seconds.",
        epilog="Exit status: 0 all tiers measured, 3 some not, 1 none, 2 the command line or "
        "configuration is wrong.",
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
        "--tier", nargs="+", metavar="NAME", default=[], help="measure these tiers (default: all)"
    )
    parser.add_argument(
        "--block-bytes", metavar="SIZE", help="block size (default: the model's, else 2MiB)"
    )
    model = parser.add_argument_group("model of the table (default: the model that tierd serves)")
    model.add_argument(
        "--namespace", metavar="DIGEST", help="a model that tierd knows, by its first digits"
    )
    model.add_argument(
        "--kv-bytes-per-token", type=int, metavar="N", help="KV size of one token on all ranks"
    )
    model.add_argument(
        "--layers", type=int, metavar="N", help="number of layers; needs --kv-heads and --head-dim"
    )
    model.add_argument("--kv-heads", type=int, metavar="N", help="number of KV heads on all ranks")
    model.add_argument("--head-dim", type=int, metavar="N", help="dimension of one head")
    model.add_argument(
        "--dtype",
        choices=sorted(_DTYPE_BYTES),
        default="bfloat16",
        help="data type of the KV (default: %(default)s)",
    )
    model.add_argument(
        "--block-tokens", type=int, default=16, metavar="N", help="tokens per block (default: 16)"
    )
    speed = parser.add_argument_group(
        "prefill speed of the table (default: the speed that engines reported to tierd)"
    )
    speed.add_argument("--prefill", type=float, metavar="TOKENS/S", help="use this speed")
    speed.add_argument(
        "--engine", metavar="URL", help="measure it on this vLLM with a few random prompts"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print the results; return the exit status. Raises ConfigError."""
    config = load(args.config, os.environ)
    entries = _chosen(config, args.tier)
    status = _status(args.socket or os.environ.get("TIERD_SOCKET") or config.socket)
    model = _model(args, status)
    progress = ProgressLine()
    prefill = _prefill(args, status, progress)
    block_bytes = _block_bytes(args, model)
    progress.say("memory")
    copy = copy_bytes_per_s()
    results: list[Result] = []
    failed: dict[str, str] = {}
    for entry in entries:
        try:
            results.append(asyncio.run(measure(entry, block_bytes, progress)))
        except (BackendError, OSError, TimeoutError) as error:
            failed[entry.name] = str(error) or "no answer in time"
        finally:
            progress.clear()
    progress.clear()
    for name, why in failed.items():
        print(f"tierd: tier {name}: {printable(why)}", file=sys.stderr)
    table = None
    if model is not None and prefill is not None:
        speeds = {"host memory": TierSpeed(0.0, copy)}
        speeds |= {result.name: result.speed(block_bytes) for result in results}
        table = _table(speeds, PrefillDemand(model, prefill), config.prefetch.min_tokens)
    if args.json:
        print(json.dumps(_as_json(copy, block_bytes, results, failed, table), indent=2))
    else:
        print("\n".join(_lines(copy, block_bytes, results, table)))
    if failed:
        return PART_FAILED if results else 1
    return 0


# --- options -----------------------------------------------------------------------------


def _chosen(config: Config, names: Sequence[str]) -> list[StorageConfig]:
    known = {entry.name: entry for entry in config.storage}
    for name in names:
        if name not in known:
            raise ConfigError(f"no tier is named {name!r}; tiers: {', '.join(known) or 'none'}")
    return [known[name] for name in dict.fromkeys(names)] or list(known.values())


def _status(socket: str) -> dict[str, object] | None:
    """Return the daemon's status, a source of defaults; None if no daemon answers."""
    try:
        with Operator(socket, "tierd bench") as operator:
            return operator.status()
    except TierdError:
        return None


def _model(args: argparse.Namespace, status: Mapping[str, object] | None) -> Model | None:
    """Return the model of the table, None if neither options nor tierd give one. Raises
    ConfigError."""
    shape = (args.layers, args.kv_heads, args.head_dim)
    given = [args.namespace is not None, args.kv_bytes_per_token is not None, any(shape)]
    if sum(given) > 1:
        raise ConfigError(
            "the model is given twice: pass one of --namespace, --kv-bytes-per-token and --layers"
        )
    numbers = [args.block_tokens, args.kv_bytes_per_token, *shape]
    if any(each is not None and each < 1 for each in numbers):
        raise ConfigError(
            "--block-tokens, --kv-bytes-per-token, --layers, --kv-heads and --head-dim must be at "
            f"least 1, got {min(each for each in numbers if each is not None)}"
        )
    if args.namespace is not None:
        if status is None:
            raise ConfigError(f"--namespace {args.namespace}: needs a running tierd, none answers")
        spaces = of_status(tables(status["namespaces"]))
        return model_of(status, resolve(args.namespace, spaces))
    if args.kv_bytes_per_token is not None:
        return Model(args.kv_bytes_per_token, args.block_tokens)
    if any(shape):
        if None in shape:
            raise ConfigError("pass --layers, --kv-heads and --head-dim together")
        layers, heads, dim = shape
        # The factor 2: a key and a value.
        return Model(2 * layers * heads * dim * _DTYPE_BYTES[args.dtype], args.block_tokens)
    if status is None:
        return None
    learned = learned_load(status)
    found = only_model(status) if learned is None else learned.model
    known = tables(status["namespaces"])
    if found is None and known and (args.engine or args.prefill):
        names = listed(of_status(known).values())
        raise ConfigError(f"tierd knows several models: pass --namespace, one of: {names}")
    return found


def _prefill(
    args: argparse.Namespace, status: Mapping[str, object] | None, progress: ProgressLine
) -> float | None:
    """Return the prefill speed in tokens per second, None if unknown. Raises ConfigError."""
    if args.prefill is not None and args.engine is not None:
        raise ConfigError("--prefill and --engine exclude each other")
    if args.prefill is not None:
        if not args.prefill > 0:
            raise ConfigError(f"--prefill must be more than 0, got {args.prefill}")
        return float(args.prefill)
    if args.engine is not None:
        engine = EngineServer(args.engine)
        progress.say(f"measuring prefill at {args.engine}")
        try:
            return prefill_tokens_per_s(engine)
        except TierdError as error:
            raise ConfigError(f"--engine: {error}") from error
    learned = learned_load(status) if status is not None else None
    return learned.prefill_tokens_per_s if learned is not None else None


def prefill_tokens_per_s(
    engine: EngineServer, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Measure an engine's prefill speed in tokens per second, with random prompts of two lengths.

    Raises EngineAwayError, EngineRefusedError, and ConfigError if longer prompts take no longer.
    """
    found = engine.models()
    base = next((each for each in found if not each.get("parent")), found[0])
    model, longest = str(base["id"]), base.get("max_model_len")
    most = min(_PROMPTS[1], longest - 2) if isinstance(longest, int) else _PROMPTS[1]
    lengths = (max(1, min(_PROMPTS[0], most // 4)), most)
    took_s: dict[int, list[float]] = {length: [] for length in lengths}
    for _ in range(PROMPT_ROUNDS):
        for length in lengths:
            tokens = noise(length)
            began_s = clock()
            engine.compute(tokens, model=model, salt=None)
            took_s[length].append(clock() - began_s)
    short_s, long_s = (statistics.median(took_s[length][1:]) for length in lengths)
    if long_s <= short_s:
        raise ConfigError(
            "longer prompts took no longer than short ones: retry when the engine is idle, or pass "
            "--prefill"
        )
    return (lengths[1] - lengths[0]) / (long_s - short_s)


def _block_bytes(args: argparse.Namespace, model: Model | None) -> int:
    if args.block_bytes is not None:
        given = parse_size(args.block_bytes)
    elif model is not None:
        given = int(model.bytes_per_token * model.block_tokens / model.ranks)
    else:
        given = BLOCK_BYTES
    if not 0 < given <= BLOCK_BYTES_MAX:
        raise ConfigError(f"--block-bytes must be 1 to {BLOCK_BYTES_MAX} bytes, got {given}")
    return given


# --- output ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Table:
    """Milliseconds by prefix length: to load from each tier, and to recompute."""

    load: PrefillDemand
    rows: Mapping[int, Mapping[str, float]]
    recompute_ms: Mapping[int, float]
    pays_from: Mapping[str, int | None]
    """Tokens from which each tier is faster than recomputing; None: never."""


def _table(speeds: Mapping[str, TierSpeed], load: PrefillDemand, min_tokens: int) -> Table:
    return Table(
        load,
        {
            tokens: {name: 1e3 * speed.load_s(load.model, tokens) for name, speed in speeds.items()}
            for tokens in LENGTHS
        },
        {tokens: 1e3 * tokens / load.prefill_tokens_per_s for tokens in LENGTHS},
        {
            # The daemon loads prefixes of any length from host memory.
            name: first_paying(
                speed,
                load.model,
                load.prefill_tokens_per_s,
                0 if name == "host memory" else min_tokens,
            )
            for name, speed in speeds.items()
        },
    )


def _as_json(
    copy: float,
    block_bytes: int,
    results: Sequence[Result],
    failed: Mapping[str, str],
    table: Table | None,
) -> dict[str, object]:
    told: dict[str, object] = {
        "schema": SCHEMA,
        "block_bytes": block_bytes,
        "memory_copy_bytes_per_s": round(copy),
        "tiers": [result.to_fields() for result in results],
        "failed": dict(failed),
        "break_even": None,
    }
    if table is not None:
        told["break_even"] = {
            "kv_bytes_per_token": table.load.model.bytes_per_token,
            "prefill_tokens_per_s": table.load.prefill_tokens_per_s,
            "pays_from_tokens": dict(table.pays_from),
            "lengths": [
                {
                    "tokens": tokens,
                    "recompute_ms": round(table.recompute_ms[tokens], 3),
                    "load_ms": {name: round(each, 3) for name, each in row.items()},
                }
                for tokens, row in table.rows.items()
            ],
        }
    return told


def _lines(
    copy: float, block_bytes: int, results: Sequence[Result], table: Table | None
) -> Iterator[str]:
    yield f"host memory  copy {_gb(copy)} with one thread"
    for result in results:
        raw = result.raw
        get, put = _gb(result.get_bytes_per_s), _gb(result.put_bytes_per_s)
        if raw is not None:
            get += f" ({result.get_bytes_per_s / raw.read_bytes_per_s:.2f} of disk speed)"
            put += f" ({result.put_bytes_per_s / raw.write_bytes_per_s:.2f} of disk speed)"
            put += "" if raw.direct else ", through the page cache"
        else:
            put += "; the server's own speed is unknown"
        yield (
            f"{result.name:<12} get {get}, put {put}; get of one block of {size(block_bytes)} "
            f"{latency(result.one_get_s)}"
        )
    if table is None:
        yield (
            "no table: pass the model (--namespace, --kv-bytes-per-token, or --layers, --kv-heads "
            "and --head-dim) and the prefill speed (--prefill or --engine)"
        )
        return
    yield ""
    yield (
        f"{size(table.load.model.bytes_per_token)} of KV per token, prefill "
        f"{number(table.load.prefill_tokens_per_s)} tokens/s; times in ms:"
    )
    names = list(table.pays_from)
    wide = [max(11, len(name)) for name in names]
    yield "  ".join(
        [f"{'tokens':>7}", f"{'recompute':>10}"]
        + [f"{name:>{width}}" for name, width in zip(names, wide, strict=True)]
    )
    for tokens, row in table.rows.items():
        yield "  ".join(
            [f"{tokens:>7}", f"{table.recompute_ms[tokens]:>10.1f}"]
            + [f"{row[name]:>{width}.1f}" for name, width in zip(names, wide, strict=True)]
        )
    yield ""
    for name, shortest in table.pays_from.items():
        if shortest is None:
            yield f"{name}: offload does not pay for this model: recomputing is always faster"
        else:
            yield f"{name}: offload pays from {shortest} tokens"


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
