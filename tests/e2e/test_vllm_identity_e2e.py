"""Real vLLM engines that must not share KV, and some that must, on one daemon.

The first answer to a prompt in an engine with empty caches is computed, and so is right. Each
engine is asked again with its own cache emptied, so that the answer comes from tierd.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon_process import DaemonProcess
from tests.support.engines.engine_env import engine_python
from tests.support.engines.identities import (
    EQUAL,
    REFUSED,
    ROOT,
    SAME,
    Real,
    compute_and_load,
    make,
)
from tests.support.engines.vllm_engine import prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a draft model, a LoRA adapter, and other weights for the model."""
    folder = tmp_path_factory.mktemp("models")
    make(folder / "model")
    shutil.copytree(folder / "model", folder / "draft")
    make(folder / "adapter", "5")
    other = (
        "import sys; from safetensors.torch import load_file, save_file; "
        "w = load_file(sys.argv[1]); n = 'model.layers.0.self_attn.k_proj.weight'; "
        "w[n] = w[n].flip(0).contiguous(); save_file(w, sys.argv[2], {'format': 'pt'})"
    )
    files = [folder / "model" / "model.safetensors", folder / "other.safetensors"]
    subprocess.run([engine_python(), "-c", other, *files], check=True)
    return folder


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A running daemon without storage tiers."""
    with DaemonProcess(tmp_path / "tierd", storage="", capacity="128MiB") as process:
        yield process


FP8 = {"dtype": "bfloat16", "quantization": "fp8_per_channel"}
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


@pytest.mark.parametrize(
    ("one", "two", "lora"),
    [
        (FP8, {**FP8, "quantization_config": {"ignore": ["*mlp*"]}}, False),
        (LORA, {**LORA, "lora_target_modules": ["down_proj"]}, True),
    ],
    ids=["quantization_config", "lora_target_modules"],
)
def test_engines_that_differ_in_a_setting_do_not_share(
    models: Path,
    daemon: DaemonProcess,
    tmp_path: Path,
    one: dict[str, object],
    two: dict[str, object],
    *,
    lora: bool,
) -> None:
    """One engine would answer from KV that depends on the other's setting."""
    more: dict[str, object] = {}
    if lora:
        more = {"lora": str(models / "adapter"), "extra": {"loras": {"a": "rev1"}}}
    answers = []
    for settings in (one, two):
        with Real(models / "model", daemon, tmp_path / "vllm.log", settings, **more) as engine:
            answers.append(compute_and_load(engine, daemon).computed)
            engine.settled()
    assert answers[0] != answers[1], "the setting changes no answer, so the test shows nothing"


def test_engine_with_draft_model_finds_its_blocks_after_a_restart(
    models: Path, daemon: DaemonProcess, tmp_path: Path
) -> None:
    """A function's address in the fingerprint would make every start another namespace."""
    speculative = {"method": "draft_model", "model": str(models / "draft")}
    settings = {"speculative_config": {**speculative, "num_speculative_tokens": 2}}
    with Real(models / "model", daemon, tmp_path / "vllm.log", settings) as engine:
        first = compute_and_load(engine, daemon)
    with Real(models / "model", daemon, tmp_path / "vllm.log", settings) as engine:
        engine.wait_connected(daemon)
        tokens, cached = engine.ask()
        assert all(cached)
        assert tokens == first.cached


def test_weights_replaced_while_an_engine_starts_or_runs(
    models: Path, daemon: DaemonProcess, tmp_path: Path
) -> None:
    """The old weights' KV would be stored, and served, under the new weights' name."""
    model = shutil.copytree(models / "model", tmp_path / "model")
    weights, old = model / "model.safetensors", models / "model" / "model.safetensors"
    new = shutil.copy(models / "other.safetensors", tmp_path / "new.safetensors")
    with Real(model, daemon, tmp_path / "vllm.log", swap=[str(new), str(weights)]) as engine:
        assert "changed while the engine started" in engine.call("stats")["off"]
        of_old, cached = engine.ask()
        assert cached == [0, 0, 0]
    assert daemon.status()["host"]["blocks"] == 0
    with Real(model, daemon, tmp_path / "vllm.log") as engine:
        of_new = compute_and_load(engine, daemon).computed
        assert of_new != of_old
        shutil.copy(old, weights)
        engine.call("reload_weights")
        engine.reset()
        # The scheduler learns of it with the first step's output; until then nothing is stored.
        engine.generate([prompt(8, "after")], tokens=4)
        assert compute_and_load(engine, daemon).computed == of_old, "KV in another namespace"
        engine.settled()
    shutil.copy(models / "other.safetensors", weights)
    with Real(model, daemon, tmp_path / "vllm.log") as engine:
        engine.wait_connected(daemon)
        # The files have other times; their KV is not that of the previous engine.
        assert engine.ask() == (of_new, [0, 0, 0])


# Without running a model


def fingerprints(models: Path, home: Path, *cases: str) -> dict[str, str]:
    """The fingerprints of the cases in engine_fingerprints.py, from a separate process."""
    script = ROOT / "tests" / "support" / "engines" / "engine_fingerprints.py"
    path = os.pathsep.join(str(ROOT / part) for part in ("", "backends", "connectors"))
    done = subprocess.run(
        [engine_python(), script, models / "model", home, *cases],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_fingerprint_of_each_setting(models: Path, tmp_path: Path) -> None:
    """A setting that changes KV would be left out, or one that does not would prevent reuse."""
    found = fingerprints(models, tmp_path)
    for name, why in REFUSED.items():
        assert found[name].startswith("refused: "), name
        assert why in found.pop(name)
    assert {found[name] for name in SAME} == {found["base"]}
    for one, two in EQUAL:
        assert found[one] == found.pop(two), (one, two)
    found.pop("hub, config elsewhere, second")
    counted = {name: value for name, value in found.items() if name not in SAME[1:]}
    assert len(set(counted.values())) == len(counted), counted
    assert found["hub, first"] == "hf:" + "a" * 40
    assert found["named, path"].startswith("hf:" + "e" * 40)
    assert found["no owner, path"].startswith("hf:" + "f" * 40)
    again = fingerprints(models, tmp_path, "base", "draft", "quantized, ignoring", "function")
    assert again == {name: found[name if name != "function" else "rope"] for name in again}
