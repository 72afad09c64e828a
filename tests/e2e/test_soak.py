"""The soak's short form: what it runs for a day works, and growth would be seen."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from bench.soak import BOUNDS, HOURS, Day


def day_with(**series: list[float]) -> Day:
    """One that is over: everything stayed as it was, but for `series`."""
    day = Day.__new__(Day)
    day.hours, day.steady_from = HOURS, 16
    day.series = {name: series.get(name, [10.0] * HOURS) for name in BOUNDS}
    return day


def test_growth_is_seen() -> None:
    """A descriptor lost with each restart would be found by an operator, after a week."""
    assert day_with().judge()["kept_descriptors"]
    with pytest.raises(AssertionError, match="kept_descriptors"):
        day_with(kept_descriptors=[60.0 + hour for hour in range(HOURS)]).judge()
    # Each life begins anew: only what the last one gains is its leak.
    lives = [40.0, 50.0, 60.0, 70.0] * 4
    day_with(daemon_anonymous_mib=[*lives, *[60.0] * 8]).judge()
    with pytest.raises(AssertionError, match="daemon_anonymous_mib"):
        day_with(daemon_anonymous_mib=[*lives, *(60.0 + 2 * hour for hour in range(8))]).judge()


@pytest.mark.slow
def test_a_short_day_is_survived() -> None:
    """What happens to a node in a day would be tried for the first time by an operator."""
    words = [sys.executable, "-m", "bench.soak", "--operations", "6000", "--seed", "3"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    results = ast.literal_eval(done.stdout.splitlines()[-1])
    assert results["proven_blocks"] > 3000
    assert len(results["happened"]) >= 7, results["happened"]
    assert results["lives"] >= 2
