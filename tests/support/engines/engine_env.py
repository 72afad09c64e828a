"""Where the real vLLM engine of the engine tests is installed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

_INSTALL = Path(__file__).parents[3] / "engine" / "install.sh"


def engine_python() -> Path:
    """The engine's Python: $TIERD_ENGINE_PYTHON, else the one that engine/install.sh installed.

    Without one, fails the test and names the command that installs it: a skipped engine test would
    hide that it was not run.
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
