"""Hits and writes of every policy on traces: `make bench-policies ARGS='TRACE ...'`.

The public traces are not in the repository, so their paths are arguments; without arguments a
generated trace is used. Writes the tables (bench/policies.md), the numbers and the frontier of
backups with its plot (bench/results/policies.json, .png).
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path
from typing import NamedTuple

from bench.common import Json, write_result
from bench.plot import write_chart
from tests.support.traces import trace_lines
from tierd.config import StorageConfig, WritePolicy
from tierd.eviction import L2_DEFAULT, POLICIES, STORAGE_DEFAULT
from tierd.replay.optimal import belady, ideal
from tierd.replay.simulate import ReplayResult, Setup, simulate
from tierd.replay.trace import Trace, open_trace, parse_trace, read_trace

BLOCK_TOKENS = 512
BLOCK_BYTES = BLOCK_TOKENS * (128 << 10)
SIZES = (1_000, 5_000, 10_000, 30_000, 50_000)
PAIRS = ((3_000, 30_000), (10_000, 50_000))
ORDERS = ((L2_DEFAULT, STORAGE_DEFAULT), ("lru", "lru"))
"""Eviction policies of L2 and L3: the defaults, and those of the study that set the goal."""

DEFAULT_SHARE = StorageConfig(type="memory").write_share
SHARES = sorted({0.2, 0.4, 0.8, DEFAULT_SHARE})
LONG = (39_000, 3, 10, 100.0)
"""Of the generated trace: as many new blocks as in the conversations, and equally long requests."""

HERE = Path(__file__).parent


class Write(NamedTuple):
    """A write policy, and the share of a selective one."""

    policy: WritePolicy
    share: float = 1.0

    @property
    def label(self) -> str:
        """The name used in the table."""
        selective = self.policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        default = " (default)" if selective and self.share == DEFAULT_SHARE else ""
        return self.policy.value + (f", share {self.share}{default}" if selective else "")


WRITES = [
    Write(WritePolicy.WRITE_THROUGH),
    Write(WritePolicy.WRITE_BACK),
    *(Write(WritePolicy.WRITE_THROUGH_SELECTIVE, share) for share in SHARES),
]


@dataclass(frozen=True)
class Job:
    """One pass of a trace through one node."""

    trace: str
    l2_blocks: int
    l3_blocks: int
    l2_policy: str
    l3_policy: str
    write: Write
    hint: bool = False


traces: dict[str, Trace] = {}


def load(paths: Sequence[str]) -> None:
    """Read the traces; called in each process."""
    for path in paths:
        with open_trace(path) as source:
            traces[Path(path).name.split(".")[0]] = read_trace(source, path, BLOCK_TOKENS)
    if not traces:
        traces["generated"] = parse_trace(trace_lines(1, 4000), "generated", BLOCK_TOKENS)
    # The garbage collector's passes over the traces must not count as a policy's cost.
    gc.freeze()


def run(job: Job) -> tuple[ReplayResult, float]:
    """The result of a job, and core microseconds per block reference."""
    trace = traces[job.trace]
    if not job.hint:
        requests = [request._replace(output_tokens=None) for request in trace.requests]
        trace = Trace(requests, trace.input_tokens, trace.block_refs, trace.unique_blocks)
    storage = StorageConfig(
        type="memory", write_policy=job.write.policy, write_share=job.write.share
    )
    setup = Setup(job.l2_blocks, job.l3_blocks, job.l2_policy, job.l3_policy, storage, BLOCK_BYTES)
    start = time.process_time()
    outcome = simulate(trace, setup, BLOCK_TOKENS)
    return outcome, 1e6 * (time.process_time() - start) / trace.block_refs


def one_tier_jobs(name: str) -> dict[str, list[Job]]:
    """Rows of the table of L2 alone."""
    sizes = [size for size in SIZES if size < traces[name].unique_blocks]
    labels = [(policy, policy, False) for policy in POLICIES]
    labels.insert(1, (f"{L2_DEFAULT}, output hint", L2_DEFAULT, True))
    return {
        label: [Job(name, size, 0, policy, "lru", WRITES[0], hint) for size in sizes]
        for label, policy, hint in labels
    }


def two_tier_jobs(name: str, pair: tuple[int, int], order: tuple[str, str]) -> list[Job]:
    """Rows of one table of two tiers."""
    return [Job(name, *pair, *order, write) for write in WRITES]


Results = dict[Job, tuple[ReplayResult, float]]


def one_tier(name: str, results: Results) -> tuple[list[str], Json]:
    """The table of L2 alone: one row per policy, one column per size."""
    trace = traces[name]
    rows = one_tier_jobs(name)
    sizes = [job.l2_blocks for job in next(iter(rows.values()))]
    lines = [
        f"### {name}",
        "",
        "| policy | " + " | ".join(f"{size // 1000}k" for size in sizes) + " | us/block, most |",
        "|---" * (len(sizes) + 2) + "|",
    ]
    data: dict[str, Json] = {}
    for label, jobs in rows.items():
        hits = [100 * results[job][0].l2.blocks / trace.block_refs for job in jobs]
        most_us = max([results[job][1] for job in jobs], default=0.0)
        lines.append(f"| {label} | {' | '.join(f'{h:.2f}' for h in hits)} | {most_us:.1f} |")
        data[label] = {
            **{str(size): round(hit, 2) for size, hit in zip(sizes, hits, strict=True)},
            "us_per_block_max": round(most_us, 1),
        }
    best = [100 * belady(trace, size, BLOCK_TOKENS).blocks / trace.block_refs for size in sizes]
    lines.append("| Belady's MIN | " + " | ".join(f"{hit:.2f}" for hit in best) + " | |")
    most = 100 * ideal(trace, BLOCK_TOKENS).blocks / trace.block_refs
    return [*lines, "", f"Without end: {most:.2f} %.", ""], data


Points = list[tuple[float, float]]


def two_tiers(jobs: Sequence[Job], results: Results) -> tuple[list[str], list[Json], Points]:
    """L3 hits and writes of each write policy, against write_through with the same orders; and the
    frontier of the selective policy: writes against hits kept."""
    refs = traces[jobs[0].trace].block_refs
    base = results[jobs[0]][0]
    lines = [
        "| write policy | L2 hits % | L3 hits % | writes/access | L3 hits kept % | all hits kept % "
        "| writes % | hits lost to refusals % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    data: list[Json] = []
    frontier: Points = []
    for job in jobs:
        outcome = results[job][0]
        row = {
            "l2_hits": 100 * outcome.l2.blocks / refs,
            "l3_hits": 100 * outcome.l3.blocks / refs,
            "writes_per_access": outcome.l3_written / refs,
            "l3_hits_kept": 100 * outcome.l3.blocks / max(base.l3.blocks, 1),
            "all_hits_kept": 100
            * (outcome.l2.blocks + outcome.l3.blocks)
            / max(base.l2.blocks + base.l3.blocks, 1),
            "writes": 100 * outcome.l3_written / max(base.l3_written, 1),
            "hits_refused": 100 * outcome.refused_hits / refs,
        }
        cells = [f"{n:.3f}" if k == "writes_per_access" else f"{n:.1f}" for k, n in row.items()]
        lines.append(f"| {job.write.label} | {' | '.join(cells)} |")
        data.append({"write": job.write.label, **{k: round(n, 3) for k, n in row.items()}})
        if job.write.policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            frontier.append((row["writes"], row["l3_hits_kept"]))
    return [*lines, ""], data, frontier


def time_replay() -> tuple[str, Json]:
    """How long `tierd replay` takes for a million block references."""
    words = [sys.executable, "-m", "tierd.cli.main", "replay"]
    words += ["--l2-blocks", "1000", "--l3-blocks", "20000", "--json"]
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.writelines(trace_lines(1, *LONG))
        file.flush()
        start = time.perf_counter()
        done = subprocess.run([*words, file.name], stdout=subprocess.PIPE, check=True)
        took_s = time.perf_counter() - start
    refs = json.loads(done.stdout)["trace"]["block_refs"]
    line = f"`tierd replay` of {refs:,} generated block references, L2/L3 1k/20k: {took_s:.1f} s."
    return line, {"block_refs": refs, "seconds": round(took_s, 1)}


def main() -> None:
    """Run everything on each trace."""
    paths = sys.argv[1:]
    load(paths)
    replayed, replay = time_replay()
    tables = {
        (name, pair, order): two_tier_jobs(name, pair, order)
        for name in traces
        for pair in PAIRS
        for order in ORDERS
    }
    timed = [job for name in traces for row in one_tier_jobs(name).values() for job in row]
    others = [job for jobs in tables.values() for job in jobs]
    # One at a time, and the faster of two runs: other processes on the machine cost up to half.
    results = {job: min(run(job), run(job), key=lambda done: done[1]) for job in timed}
    with Pool(None, load, (paths,)) as pool:
        results |= zip(others, pool.map(run, others, chunksize=1), strict=True)
    text = [
        "# Eviction and write policies on traces",
        "",
        "Written by `make bench-policies ARGS='TRACE ...'`; where and with which commit is in",
        "[results/policies.json](results/policies.json). Usable block hits in % of all block",
        "references, one pass each, empty at the start.",
        "",
        replayed,
        "",
        "## L2 alone",
        "",
    ]
    report: dict[str, Json] = {"replay": replay}
    for name in traces:
        lines, report[name] = one_tier(name, results)
        text += lines
    text += [
        "## Two tiers: what is kept of the hits, for which writes",
        "",
        "Against `write_through` with the same orders of eviction. L3's hits depend on what L2",
        "misses, so a better order in L2 leaves fewer, and harder ones.",
        "",
        "![L3 hits kept by writes](results/policies.png)",
        "",
    ]
    chart: dict[str, Points] = {}
    for (name, pair, order), table in tables.items():
        sizes = "/".join(f"{blocks // 1000}k" for blocks in pair)
        lines, rows, points = two_tiers(table, results)
        text += [f"### {name}, L2/L3 {sizes} by {'/'.join(order)}", "", *lines]
        report[f"{name} {sizes} {'/'.join(order)}"] = rows
        if order == ORDERS[-1]:
            short = name.replace("mooncake_", "").replace("_trace", "")
            chart[f"{short} {sizes}"] = points
    # Written first: otherwise the recorded commit would be marked as changed.
    write_result("policies", report)
    (HERE / "policies.md").write_text("\n".join(text))
    axes = ("writes, % of write through", "L3 hits kept, %")
    write_chart(HERE / "results" / "policies.png", "selective", axes, chart)


if __name__ == "__main__":
    main()
