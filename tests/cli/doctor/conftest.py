"""A daemon without tiers, and the command `tierd doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon_process import DaemonProcess
from tests.support.doctor_scene import Examine, examiner, running


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with running(tmp_path_factory.mktemp("doctor")) as process:
        yield process


@pytest.fixture
def examine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Examine:
    return examiner(tmp_path, capsys, monkeypatch)
