"""The short form of the soak works, and its verdict detects growth."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from bench.soak import BOUNDS, HOURS, Day


def day_with(**series: list[float]) -> Day:
    """A finished day in which every count stayed constant, except `series`."""
    day = Day.__new__(Day)
    day.hours, day.steady_from = HOURS, 16
    day.series = {name: series.get(name, [10.0] * HOURS) for name in BOUNDS}
    return day


def test_growth_is_detected() -> None:
    """An operator would discover a leak of one descriptor per restart after a week."""
    assert day_with().judge()["kept_descriptors"]
    with pytest.raises(AssertionError, match="kept_descriptors"):
        day_with(kept_descriptors=[60.0 + hour for hour in range(HOURS)]).judge()
    # Each incarnation starts afresh: only growth during the last one is its leak.
    incarnations = [40.0, 50.0, 60.0, 70.0] * 4
    day_with(daemon_anonymous_mib=[*incarnations, *[60.0] * 8]).judge()
    with pytest.raises(AssertionError, match="daemon_anonymous_mib"):
        day_with(
            daemon_anonymous_mib=[*incarnations, *(60.0 + 2 * hour for hour in range(8))]
        ).judge()


@pytest.mark.slow
def test_short_soak_passes() -> None:
    """An operator would be the first to run a node through a day's faults."""
    words = [sys.executable, "-m", "bench.soak", "--operations", "6000", "--seed", "3"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    results = ast.literal_eval(done.stdout.splitlines()[-1])
    assert results["verified_blocks"] > 3000
    assert len(results["happened"]) >= 7, results["happened"]
    assert results["incarnations"] >= 2
