"""Runs the backend and the connector that the pages show, unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import blocks
from tests.support.daemon_process import DaemonProcess
from tests.support.page_texts import ROOT, files
from tests.support.tiers.scene import table
from tests.support.traffic import wait_until
from tierd.client import Client

pytestmark = pytest.mark.slow

BACKEND, CONNECTOR = "docs/backend.md", "docs/connector.md"

PATIENT = {"policy": "wait_complete"}
"""A busy machine does not load blocks within an operator's usual deadline."""


def extracted(page: str, directory: Path) -> Path:
    """The files that a page shows, written to `directory`."""
    for name, content in files(page).items():
        (directory / name).write_text(content)
    return directory


def ran(*command: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def status(daemon: DaemonProcess) -> dict:
    """The daemon's status, with a longer timeout than the command's."""
    client = Client(daemon.socket, name="status", map_segments=False, call_timeout_ms=30_000)
    try:
        found: dict = client.status()
    finally:
        client.close()
    return found


def written(daemon: DaemonProcess) -> None:
    """Wait until its tier has every block that it is to get."""
    wait_until(lambda: not status(daemon)["host"]["backlog_blocks"], 60, "not backed up")


def restart(daemon: DaemonProcess) -> None:
    """Stop and start the daemon, and wait for its tier, which opens after the start."""
    daemon.stop()
    daemon.start()
    wait_until(lambda: status(daemon)["storage"][0]["state"] == "ready", 60, "no tier")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The backend's package, installed into its folder `site`."""
    directory = extracted(BACKEND, tmp_path_factory.mktemp("sqlite"))
    pip = ("-m", "pip", "install", "-qq", "--no-deps", "--no-build-isolation", "--no-index")
    ran(*pip, "--target", "site", ".", cwd=directory)
    return directory


def test_the_examples_are_typed(tmp_path: Path) -> None:
    """The examples would not pass a type checker in the reader's project."""
    for page in (BACKEND, CONNECTOR):
        extracted(page, tmp_path)
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "typings"))
    strict = ("-m", "mypy", "--strict", "--ignore-missing-imports", "--explicit-package-bases")
    cache = ("--cache-dir", str(ROOT / ".mypy_cache"), "--config-file", "/dev/null")
    ran(*strict, *cache, "tierd_sqlite.py", "toy_engine.py", cwd=tmp_path, env={"MYPYPATH": paths})


def test_the_backend_passes_its_suite(package: Path) -> None:
    """A third party would start from a backend that breaks the contract."""
    (package / "pytest.ini").write_text(
        "[pytest]\nfilterwarnings = error\nasyncio_default_fixture_loop_scope = function\n"
    )
    told = ran(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_sqlite.py",
        cwd=package, env={"PYTHONPATH": str(package / "site")},
    )  # fmt: skip
    assert "passed" in told
    assert "skipped" not in told


def test_a_daemon_uses_the_backend(package: Path, tmp_path: Path) -> None:
    """A separately installed backend would not be found by its entry point."""
    storage = files(BACKEND)["storage"].replace("/var/lib/tierd/blocks.db", f"{tmp_path}/blocks.db")
    storage += "deadline_ms = 60_000\nslow_ms = 60_000\n"
    env = {"PYTHONPATH": str(package / "site")}
    space = blocks.namespace()
    hashes, parents = blocks.chain(8)
    payloads = [blocks.payload(space, each) for each in hashes]
    with DaemonProcess(tmp_path / "tierd", storage=storage, env=env, prefetch=PATIENT) as daemon:
        client = daemon.client()
        handle = client.register(space)
        assert all(client.put(handle, list(zip(hashes, parents, payloads, strict=True))))
        written(daemon)
        restart(daemon)
        client.close()
        client = daemon.client()
        handle = client.register(space)
        assert [bytes(each) for each in client.get(handle, hashes, 30_000)] == payloads
        client.close()
        [tier] = status(daemon)["storage"]
    assert (tier["name"], tier["counters"]["get_hit_total"]) == ("sqlite", 8)


def test_the_connector_over_a_restart(tmp_path: Path) -> None:
    """A reader would start from a connector that loses blocks or loads wrong ones."""
    engine = extracted(CONNECTOR, tmp_path) / "toy_engine.py"
    patient = {**PATIENT, "min_tokens": 256, "break_even": True}
    file = {"path": str(tmp_path / "store"), "capacity": "64MiB", "reserve_free": "0"}
    storage = table("file", {**file, "deadline_ms": 60_000, "slow_ms": 60_000})
    with DaemonProcess(
        tmp_path / "tierd", capacity="64MiB", storage=storage, prefetch=patient
    ) as daemon:

        def answer() -> str:
            return ran(str(engine), daemon.socket, cwd=tmp_path).strip()

        assert answer() == "0 of 100 blocks loaded, all bytes right"
        written(daemon)
        assert answer() == "100 of 100 blocks loaded, all bytes right"
        restart(daemon)
        assert answer() == "100 of 100 blocks loaded, all bytes right"
        found = status(daemon)
    assert found["storage"][0]["counters"]["get_hit_total"] == 100
    assert found["counters"]["saved_tokens_total"] == 1600
