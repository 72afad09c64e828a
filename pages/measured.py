"""Tables of benchmark results, from bench/results."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).parent.parent / "bench" / "results"

Table = tuple[tuple[str, ...], list[tuple[object, ...]]]
"""The column titles, and the rows."""


def report(name: str) -> dict[str, Any]:
    """The result file of one benchmark, with its machine and commit."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def results(name: str) -> dict[str, Any]:
    """The results of one benchmark."""
    found: dict[str, Any] = report(name)["results"]
    return found


def percent(share: float) -> str:
    """A ratio as a percentage."""
    return f"{share:.0%}"


def _machines() -> Table:
    body: list[tuple[object, ...]] = []
    for path in sorted(RESULTS.glob("*.json")):
        found = report(path.stem)
        machine = found["machine"]
        body.append(
            (
                f"`{path.stem}`",
                machine["cpu"],
                machine["cores"],
                found["load_average_1m"],
                machine["kernel"],
                f"`{found['commit']}`",
            )
        )
    return ("benchmark", "processor", "cores", "load average", "kernel", "commit"), body


def _restart() -> Table:
    passes = results("demo")
    cold = passes["cold"]["first_turn_ttft_s"]
    body: list[tuple[object, ...]] = [
        (
            name,
            f"{found['prompt_tokens']:,}",
            f"{found['tokens_from_tierd']:,}",
            f"{found['first_turn_ttft_s']:.3f} s",
            f"{cold / found['first_turn_ttft_s']:.1f}x",
        )
        for name, found in passes.items()
    ]
    return ("engine", "prompt tokens", "loaded from tierd", "time to first token", "speed-up"), body


def _hits(trace: str) -> Callable[[], Table]:
    def make() -> Table:
        policies = results("policies")[trace]
        sizes = [size for size in policies["hazard"] if size.isdigit()]
        body: list[tuple[object, ...]] = [
            (f"`{name}`", *(f"{found[size]:.1f} %" for size in sizes))
            for name, found in policies.items()
            if "," not in name
        ]
        return ("policy", *(f"{int(size):,} blocks" for size in sizes)), body

    return make


def _writes() -> Table:
    body: list[tuple[object, ...]] = []
    for name, policies in results("policies").items():
        if not name.endswith("hazard/credit"):
            continue
        trace, sizes, _ = name.removeprefix("mooncake_").replace("_trace", "").split()
        for found in policies:
            policy, comma, share = found["write"].partition(",")
            written, kept = f"{found['writes']:.0f} %", f"{found['all_hits_kept']:.1f} %"
            body.append((trace, sizes, f"`{policy}`{comma}{share}", written, kept))
    return ("trace", "L2/L3 blocks", "write policy", "blocks written", "hits kept"), body


def _host() -> Table:
    body: list[tuple[object, ...]] = [
        (name, f"{found['gb_s']:.1f} GB/s", percent(found["ratio_to_memcpy"]))
        for name, found in results("host").items()
        if "ratio_to_memcpy" in found
    ]
    return ("operation, block size x blocks", "speed", "of memcpy"), body


def _copies() -> Table:
    body: list[tuple[object, ...]] = [
        (
            name,
            f"{found['gb_per_s']:.1f} GB/s",
            percent(found["ratio_to_strided_copy"]),
            percent(found["engine_cpu_ratio_to_strided_copy"]),
        )
        for name, found in results("copies").items()
    ]
    head = ("operation", "speed", "of the engine's own copy", "engine CPU time, of its own copy")
    return head, body


def _file() -> Table:
    body: list[tuple[object, ...]] = []
    for size, operations in results("file").items():
        for name, found in operations.items():
            body.append(
                (size, name, f"{found['gb_s']:.2f} GB/s", percent(found["ratio_to_fio_median"]))
            )
    return ("block", "operation", "speed", "of fio"), body


def _redis() -> Table:
    body: list[tuple[object, ...]] = [
        (
            name,
            f"{found['gb_s']['tier get']:.2f} GB/s",
            percent(found["get"]["ratio_to_raw"]),
            f"{found['get']['ratio_to_redis_py']:.1f}x",
        )
        for name, found in results("redis").items()
    ]
    return ("reads", "speed", "of a raw socket loop", "against redis-py"), body


def _s3() -> Table:
    body: list[tuple[object, ...]] = []
    for name, found in results("s3").items():
        get = found["get"]
        body.append(
            (
                name,
                f"{get['tierd']['gb_s']:.2f} GB/s",
                percent(get["ratio_to_raw"]),
                f"{get['ratio_to_boto3']:.1f}x",
                percent(get["cpu_ratio_to_boto3"]),
            )
        )
    return ("reads", "speed", "of a raw socket", "against boto3", "CPU time of boto3's"), body


def _calls() -> Table:
    rpc = results("rpc")
    body: list[tuple[object, ...]] = [
        ("echo between two processes", "idle", _us(rpc["raw"])[0], _us(rpc["raw"])[1]),
        ("smallest call", "idle", *_us(rpc["small"])),
        ("acquire of 1,000 resident blocks", "idle", *_us(rpc["acquire 1000"])),
    ]
    for load in ("file reads", "file and S3 reads"):
        found = results("under_load")[load]
        for kind in ("bare ping-pong", "small call", "acquire 1000"):
            body.append((kind, load, *_us(found[kind])))
    return ("call", "meanwhile", "median", "p99"), body


def _us(found: Mapping[str, float]) -> tuple[str, str]:
    return f"{found['p50_us'] / 1000:.2f} ms", f"{found['p99_us'] / 1000:.2f} ms"


def _adoption() -> Table:
    body: list[tuple[object, ...]] = [
        (
            name,
            f"{found['blocks']:,}",
            f"{found['taken over, s']:.2f} s",
            f"{found['verified, s']:.1f} s",
            f"{found['taken over per 100 GB, s']:.1f} s",
        )
        for name, found in results("adoption").items()
    ]
    return ("4 GiB in", "blocks", "taken over", "all verified", "taken over, 100 GB"), body


def _soak() -> Table:
    found = results("soak")
    worlds = results("worlds")
    return (
        ("run", "what happened", "result"),
        [
            (
                "soak, real processes",
                f"{found['calls']:,} calls of {found['clients']} clients, "
                f"{found['incarnations']} incarnations, {sum(found['happened'].values())} faults",
                f"{found['verified_blocks']:,} blocks compared, {found['wrong_blocks']} wrong",
            ),
            (
                "simulated worlds",
                f"{worlds['seeds']:,} seeds, {worlds['happened']['restarts']:,} restarts",
                f"{len(worlds['failed'])} failed",
            ),
        ],
    )


def _overhead() -> Table:
    found = results("vllm_overhead")
    return (
        ("vLLM, no hits, every block stored", "output tokens/s", "of without tierd"),
        [
            ("without tierd", f"{found['tokens_per_s']['without']:.1f}", ""),
            (
                "with tierd",
                f"{found['tokens_per_s']['attached']:.1f}",
                f"{found['median_of_pair_ratios']:.3f} (median of {found['turns']} pairs, "
                f"{found['pair_ratios'][0]:.2f} to {found['pair_ratios'][-1]:.2f})",
            ),
        ],
    )


def _warm() -> Table:
    found = results("warm")
    whole = found["10,000 blocks of 1 MiB"]
    body: list[tuple[object, ...]] = [
        (f"10,000 blocks of 1 MiB from a file tier, {name}", percent(whole[name]["ratio_to_raw"]))
        for name in ("host memory already there", "a daemon just started")
    ]
    meanwhile = found["loads of an engine meanwhile"]
    for name in ("from the tier", "from host memory"):
        body.append((f"loads of an engine {name} meanwhile", f"{meanwhile[name]['slower']:.2f}"))
    head = ("warming", "of a bare read loop; loads: time, of a quiet daemon's")
    return head, body


TABLES: Final[Mapping[str, Callable[[], Table]]] = {
    "bench-machines": _machines,
    "bench-restart": _restart,
    "bench-hits-conversation": _hits("mooncake_conversation_trace"),
    "bench-hits-synthetic": _hits("mooncake_synthetic_trace"),
    "bench-writes": _writes,
    "bench-host": _host,
    "bench-copies": _copies,
    "bench-file": _file,
    "bench-redis": _redis,
    "bench-s3": _s3,
    "bench-calls": _calls,
    "bench-adoption": _adoption,
    "bench-soak": _soak,
    "bench-overhead": _overhead,
    "bench-warm": _warm,
}
