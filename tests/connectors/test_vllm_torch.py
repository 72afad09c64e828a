"""What of the vLLM connector needs torch, which only the engine's own environment has."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from engine.process import engine_path, engine_python

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_torch_and_numpy_fill_slots_equally() -> None:
    """KV stored by an engine on one device would be garbage for the same engine on another."""
    script = Path(__file__).parents[1] / "support" / "engines" / "torch_pages.py"
    answer = subprocess.run(
        [engine_python(), "-W", "error", script],
        env={**os.environ, "PYTHONPATH": engine_path(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert (answer.returncode, answer.stdout) == (0, "same\n"), answer.stderr
