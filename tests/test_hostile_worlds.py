"""Simulated worlds that are out for the worst, and proof that they see what they are made for.

Engines with block tables of their own around the real connector, another connector that writes,
errors in the connector, readers whose leases outlive the daemon, uploads that land late, parts of
storage that come back. One world of a failing run:
`TIERD_SIM_SEED=1234 pytest tests/test_hostile_worlds.py -k test_worlds`.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.sim_tables import simulate_everything

SEEDS = 48
CHUNK = 12

ONLY = os.environ.get("TIERD_SIM_SEED")
"""Run just this one world."""

ROOT = Path(__file__).parents[1]


def run(seed: int) -> Counter[str]:
    """One world; a failure tells how to run it again."""
    try:
        return simulate_everything(seed).counts
    except BaseException as error:
        error.add_note(
            f"again: TIERD_SIM_SEED={seed} pytest tests/test_hostile_worlds.py -k test_worlds"
        )
        raise


@pytest.mark.slow
@pytest.mark.parametrize("first", [int(ONLY)] if ONLY else range(0, SEEDS, CHUNK))
def test_worlds(first: int) -> None:
    """Wrong tokens: a block stored under another's hash, leased bytes that change, a flushed
    block that is back."""
    done: Counter[str] = Counter()
    for seed in range(first, first + (1 if ONLY else CHUNK)):
        done += run(seed)
    if not ONLY:
        # Worlds in which nothing of it happens any more would pass everything.
        assert done["table_tokens"] > 1000
        assert done["table_loads"] > 10
        assert done["table_preemptions"] > 10
        assert done["table_errors"] > 0
        assert done["other_loads"] > 5
        assert done["outliving_reads"] > 100
        assert done["restarts"] > CHUNK
        assert done["complete_flushes"] > 0
        assert done["late_calls"] > 0


@pytest.mark.slow
def test_a_seed_repeats() -> None:
    """A failure found in a soak could not be found again on a desk."""
    program = "from tests.sim_tables import simulate_everything as s; print(s(7).digest)"
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "backends", "connectors"))
    digests = {simulate_everything(7).digest}
    for hash_seed in ("1", "2"):
        environment = dict(os.environ, PYTHONHASHSEED=hash_seed, PYTHONPATH=path)
        out = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, env=environment)
        digests.add(out.decode().strip())
    assert len(digests) == 1


@pytest.mark.slow
def test_no_descriptor_is_left() -> None:
    """A soak would run out of descriptors, and blame the daemon."""
    simulate_everything(0)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for seed in range(1, 5):
        simulate_everything(seed)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
