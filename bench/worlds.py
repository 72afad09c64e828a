"""Many further simulated worlds with every adverse condition enabled.

Each seed makes one world: readers whose leases outlive the daemon, engines with block tables beside
another connector and with errors in their own, uploads that land late. A world that breaks a
guarantee is reported with its seed, which is enough to run it again.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from bench.common import write_result
from tests.support.simulation.tables import simulate_everything

FIRST = 1000
"""Lower seeds are the test suite's."""

WORLD_S_MAX = 300
"""Timeout of a world, which takes about two seconds, and longer on a busy machine."""

TOLD = 100
"""Worlds between two progress lines."""

COUNTED = (
    "table_tokens",
    "table_requests",
    "table_loads",
    "table_failed_loads",
    "table_preemptions",
    "table_errors",
    "other_loads",
    "long_leases",
    "outliving_reads",
    "crashes_unrecorded",
    "crashes_flushed",
    "restarts",
    "complete_flushes",
    "late_calls",
    "hidden_blocks",
    "asked_blocks",
    "loaded_blocks",
    "stored_blocks",
    "backed_up_blocks",
    "promoted_blocks",
    "audited_blocks",
)
"""Counts that are reported for all worlds together, to show that each condition occurred."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=FIRST)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.seeds)
    began_s = time.monotonic()
    counts: Counter[str] = Counter()
    failed: dict[str, str] = {}
    for seed, done, why in _run(seeds, given.jobs):
        counts += done
        done_worlds = seed - seeds.start + 1
        if done_worlds % TOLD == 0:
            took_s = time.monotonic() - began_s
            print(f"{done_worlds} of {len(seeds)} worlds, {took_s:.0f} s", flush=True)
        if why:
            failed[str(seed)] = why
            print(
                f"{seed}: {why}\n"
                f"again: TIERD_SIM_SEED={seed} "
                "pytest tests/testing/test_hostile_worlds.py -k test_worlds",
                flush=True,
            )
    write_result(
        "worlds",
        {
            "first_seed": seeds.start,
            "seeds": len(seeds),
            "seconds": round(time.monotonic() - began_s, 1),
            "failed": failed,
            "happened": {name: counts[name] for name in COUNTED},
        },
    )
    sys.exit(1 if failed else 0)


def _run(seeds: range, jobs: int) -> Iterator[tuple[int, Counter[str], str]]:
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(_one, seeds)


def _one(seed: int) -> tuple[int, Counter[str], str]:
    # Virtual time does not advance while threads spin, so the timeout is of real time.
    signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(WORLD_S_MAX)
    try:
        return seed, simulate_everything(seed).counts, ""
    except Exception as error:
        notes = "; ".join(getattr(error, "__notes__", ()))
        return seed, Counter(), f"{type(error).__name__}: {error} ({notes})"
    finally:
        signal.alarm(0)


def _hangs(*_: object) -> None:
    raise TimeoutError(f"the world has not ended after {WORLD_S_MAX} s")


if __name__ == "__main__":
    main()
