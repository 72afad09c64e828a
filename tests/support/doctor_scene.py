"""Shared by tests of `tierd doctor`: a daemon, and the command's findings by code."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support import blocks
from tests.support.daemon_process import DaemonProcess
from tests.support.traffic import wait_until
from tierd.cli.doctor.checks import storage
from tierd.cli.doctor.checks.finding import Finding, Level
from tierd.cli.main import main
from tierd.client import Client, Handle
from tierd.hashing import root_hash
from tierd.types import Namespace

ROOT = root_hash()

Examine = Callable[..., dict]


def namespace(**changes: object) -> Namespace:
    """A namespace whose hashes tierd can compute."""
    fields = {"hash_scheme": "vllm-sha256-cbor-tagged", "hash_root": ROOT, **changes}
    return blocks.namespace(4096, **fields)


def codes(findings: Sequence[Finding]) -> dict[str, Level]:
    """The level of each kind of finding."""
    return {finding.code: finding.level for finding in findings}


def register(client: Client, space: Namespace) -> Handle:
    """A handle, once the daemon has accepted it."""
    handle = client.register(space)

    def accepted() -> bool:
        client.wait(0.05)
        return handle.ready

    wait_until(accepted, 10, "the daemon does not accept a namespace")
    return handle


def running(directory: Path) -> DaemonProcess:
    """A daemon without tiers, not started yet."""
    return DaemonProcess(directory, capacity="64MiB", storage="")


def examiner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Examine:
    """Runs the command; returns its findings by code, with the exit status under "rc"."""
    monkeypatch.delenv("TIERD_SOCKET", raising=False)
    monkeypatch.setattr(storage, "SPEED_BYTES", 4 << 20)

    def run(*words: str, socket: str = "", tiers: str = "", config: Path | None = None) -> dict:
        if config is None:
            config = tmp_path / "tierd.toml"
            config.write_text(
                f'socket = "{socket or tmp_path / "none.sock"}"\n[host]\ncapacity = "64MiB"\n'
                f"{tiers}"
            )
        rc = main(["doctor", "--json", "--config", str(config), *words])
        told = json.loads(capsys.readouterr().out)
        return {"rc": rc, **{each["code"]: each for each in told["findings"]}}

    return run
