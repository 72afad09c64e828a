"""Real engines that must share KV, and engines that must not."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

from engine.process import EngineProcess
from tests.support.daemon_process import DaemonProcess
from tests.support.engines.engine_env import engine_python
from tests.support.engines.vllm_engine import BLOCK_TOKENS, Engine, prompt, whole_blocks

ROOT = Path(__file__).parents[3]


PROMPTS = [prompt(length, ("identity", length)) for length in (200, 333, 460)]


BLOCKS = sum(whole_blocks(len(tokens)) for tokens in PROMPTS) // BLOCK_TOKENS


def make(directory: Path, seed: str = "") -> Path:
    """A tiny model with its weights, or an adapter for it."""
    script = ROOT / "engine" / "model.py"
    arguments = [str(part) for part in (engine_python(), script, directory, "tiny")]
    subprocess.run([*arguments, *seed.split()], check=True, capture_output=True)
    return directory


class Real(Engine):
    """An engine that reads a model's weights from files and identifies them itself."""

    def __init__(
        self, model: Path, daemon: DaemonProcess, log: Path, llm: object = None, **settings: object
    ) -> None:
        extra = {"weights": None, **settings.pop("extra", {})}  # type: ignore[dict-item]  # a dict
        given = {
            "model": str(model),
            "socket": str(daemon.socket),
            "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
            "extra": extra,
            "llm": {"load_format": "auto", "max_model_len": 4096, **(llm or {})},  # type: ignore[dict-item]  # a dict
            **settings,
        }
        self._daemon_copies = False
        EngineProcess.__init__(self, given, log)

    def ask(self) -> tuple[list[list[int]], list[int]]:
        """Tokens, and how many of each prompt were cached."""
        answer = self.generate(PROMPTS, tokens=12)
        return answer["tokens"], answer["cached"]


class Answers(NamedTuple):
    """Tokens that were computed, and tokens with the prompts' KV from the engine's own cache.

    Those can differ in half precision: the last block is then computed by itself.
    """

    computed: list[list[int]]
    cached: list[list[int]]


def compute_and_load(engine: Real, daemon: DaemonProcess) -> Answers:
    """An engine's answers; fails unless KV from tierd gives the same tokens as the engine's own
    cache."""
    engine.wait_connected(daemon)
    before = daemon.status()["host"]["blocks"]
    computed, cached = engine.ask()
    assert cached == [0, 0, 0], "another engine's KV"
    engine.wait_stored(daemon, before + BLOCKS)
    own, cached = engine.ask()
    assert all(cached)
    engine.reset()
    loaded, cached = engine.ask()
    assert all(cached)
    assert loaded == own
    return Answers(computed, own)


SAME = ("base", "memory", "batches", "names", "free variable", "service variable")


REFUSED = {
    "worker extension": "worker_extension_cls",
    "weight transfer": "weight_transfer_config",
    "bucket": "s3://bucket/model",
    "chance": "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "not watched": "VLLM_PLUGINS",
}


EQUAL = (
    ("rope", "function"),
    ("hub, first", "hub, config elsewhere, first"),
    *(("named, path", f"named{how}") for how in ("", ", offline", ", tag", ", commit")),
    ("named, path", "named, tag, offline"),
    ("no owner, path", "no owner"),
    ("named, lora, path", "named, lora"),
    *(("named, draft, path", f"named, draft{how}") for how in ("", ", offline", ", commit")),
)
