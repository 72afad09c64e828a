"""The test suite's own reports: failed asserts of its helpers, and skipped tests."""

from __future__ import annotations

import pytest

from tests.support import prometheus
from tests.support.skips import skip_summary


def test_a_failed_assert_in_a_helper_shows_the_values() -> None:
    """A failed check in tests/support would be an AssertionError without a text."""
    with pytest.raises(AssertionError, match="assert 'b' == 'a'"):
        prometheus.read("# HELP a Text.\n# TYPE b counter\n")


def test_skip_summary_names_one_command() -> None:
    """A developer would have to find the missing packages in a list of skip reasons."""
    line = skip_summary(
        [
            "Skipped: zsh is not installed",
            "Skipped: fish is not installed",
            "Skipped: no machine with systemd: dbus-daemon missing (Debian: dbus)",
            "Skipped: mounting takes root",
        ],
        "test",
    )
    assert line == (
        "skipped on this machine: shell completion (2), systemd (1), root (1); to run them, "
        "as root: apt-get install -y dbus fish systemd systemd-container zsh && make test"
    )


def test_skip_summary_says_when_a_container_is_the_reason() -> None:
    """The command would skip the same tests again."""
    line = skip_summary(["Skipped: this container may not set memory policies"], "test-slow")
    assert line == (
        "skipped on this machine: memory limits (1); to run them, "
        "as root, outside of a container: make test-slow"
    )


def test_no_skip_summary_without_a_remedy() -> None:
    """A full run would seem incomplete."""
    assert skip_summary(["Skipped: this machine has an NVIDIA driver"], "test") is None
