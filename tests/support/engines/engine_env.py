"""Where the real vLLM engine of the engine tests is installed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

_INSTALL = Path(__file__).parents[3] / "engine" / "install.sh"


def engine_python() -> Path:
    """The engine's python: $TIERD_ENGINE_PYTHON, else what engine/install.sh installed.

    Fails the test, and says what to run, when there is none: an engine test that is
    skipped would hide that nothing was checked.
    """
    given = os.environ.get("TIERD_ENGINE_PYTHON")
    if given:
        if not Path(given).is_file():
            pytest.fail(f"TIERD_ENGINE_PYTHON={given} does not exist", pytrace=False)
        return Path(given)
    where = subprocess.run([_INSTALL, "--where"], check=True, capture_output=True, text=True)
    python = Path(where.stdout.strip())
    if not (python.parent.parent / ".complete").exists():
        pytest.fail("the vLLM engine is not installed; run: engine/install.sh", pytrace=False)
    return python
