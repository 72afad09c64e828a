"""Fixtures that several test files share."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Before the imports: a failed assert in these modules then shows the values that it compared.
pytest.register_assert_rewrite("tests.support", "tests.gpu")

from tests.support.daemon_process import DaemonProcess  # noqa: E402
from tests.support.servers.fake_s3 import FakeS3  # noqa: E402
from tests.support.servers.redis import RedisServer  # noqa: E402
from tests.support.servers.s3 import SeaweedFS  # noqa: E402
from tests.support.skips import skip_summary  # noqa: E402

# A background job may inherit an ignored SIGINT; child processes could then not be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    with contextlib.suppress(ValueError):  # Not in the main thread.
        signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: a slow machine is not a failure. CI runs the same examples each time; developers'
# runs draw new ones, since a developer can look at a failure at once.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Iterator[None]:
    """Close with one line: which kinds of tests were skipped here, and how to run them."""
    yield
    target = "test-slow" if config.option.markexpr == "long" else "test"
    reasons = [str(report.longrepr) for report in terminalreporter.getreports("skipped")]
    if line := skip_summary(reasons, target):
        terminalreporter.write_line(line)


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A redis-server that the tests of one file share."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """An S3 server that the tests of one file share."""
    with SeaweedFS(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    """An S3 server whose answers a test scripts."""
    with FakeS3() as server:
        yield server


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A running daemon with a file tier."""
    with DaemonProcess(tmp_path / "tierd") as process:
        yield process


@pytest.fixture
def l2_daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A running daemon without storage tiers."""
    with DaemonProcess(tmp_path / "tierd", storage="") as process:
        yield process
