"""Fixtures that several test files share."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.daemon_process import DaemonProcess
from tests.support.servers.fake_s3 import FakeS3
from tests.support.servers.redis import RedisServer
from tests.support.servers.s3 import SeaweedFS

# In the background it may be ignored, and then children would not be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    with contextlib.suppress(ValueError):  # Not in the main thread.
        signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow machine is no failure. In CI the examples are the same each time: new ones are
# looked for where somebody can look at what they find.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


REMEDIES = {
    r"zsh is not|fish is not": ("shells", "apt-get install zsh fish"),
    r"no machine with systemd": (
        "systemd",
        "apt-get install systemd systemd-container dbus, as root where containers can be booted",
    ),
    r"C\+\+ compiler": ("kernels", "apt-get install g++"),
    r"root|mount": ("root's", "run it as root"),
    r"cgroup|memory policies": ("cgroups", "run it outside of a container"),
}
"""What a skipped test's reason means: its kind, and what lets it run."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line which kinds of tests this machine could not run, and what would let it."""
    counts: dict[tuple[str, str], int] = {}
    for report in terminalreporter.getreports("skipped"):
        for reason, kind in REMEDIES.items():
            if re.search(reason, str(report.longrepr)):
                counts[kind] = counts.get(kind, 0) + 1
                break
    told = [f"{kind}: {count} ({remedy})" for (kind, remedy), count in counts.items()]
    if told:
        terminalreporter.write_line("tests that this machine could not run: " + "; ".join(told))


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A redis-server of the test file's own."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """An S3 server of the test file's own."""
    with SeaweedFS(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    """An S3 server that answers as a test has it answer."""
    with FakeS3() as server:
        yield server


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A running tierd with a file tier."""
    with DaemonProcess(tmp_path / "tierd") as process:
        yield process


@pytest.fixture
def l2_daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A running tierd without storage tiers."""
    with DaemonProcess(tmp_path / "tierd", storage="") as process:
        yield process
