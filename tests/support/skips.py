"""Which tests a machine skips for what it lacks, and the one command that runs them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

ROOT: Final = "as root"
OUTSIDE: Final = "as root, outside of a container"


class Kind(NamedTuple):
    """Tests that need the same thing of a machine."""

    name: str
    reason: str
    """A pattern that matches their skip reasons."""

    packages: tuple[str, ...] = ()
    """Debian packages to install."""

    where: str = ROOT


KINDS: Final = (
    Kind("shell completion", r"\b(zsh|fish) is not installed", ("fish", "zsh")),
    Kind("C++ kernels", r"C\+\+ compiler", ("g++",)),
    Kind("systemd", r"no machine with systemd: only root"),
    Kind(
        "systemd",
        r"no machine with systemd: [\w, -]+ missing",
        ("dbus", "systemd", "systemd-container"),
    ),
    Kind("systemd", r"no machine with systemd", where=OUTSIDE),
    Kind("memory limits", r"cgroup|memory policies", where=OUTSIDE),
    Kind("root", r"\broot\b|\bmount"),
)
"""The first kind whose pattern matches counts."""


def skip_summary(reasons: Iterable[str], target: str) -> str | None:
    """One line for the skip reasons of a run: the kinds of tests, and the command that runs them
    with make's `target`. None if no other machine or installation would run more tests."""
    counts: Counter[str] = Counter()
    packages: set[str] = set()
    where = ROOT
    for reason in reasons:
        kind = next((kind for kind in KINDS if re.search(kind.reason, reason)), None)
        if kind is None:
            continue
        counts[kind.name] += 1
        packages.update(kind.packages)
        if kind.where == OUTSIDE:
            where = OUTSIDE
    if not counts:
        return None
    names = ", ".join(f"{name} ({count})" for name, count in counts.items())
    install = f"apt-get install -y {' '.join(sorted(packages))} && " if packages else ""
    return f"skipped on this machine: {names}; to run them, {where}: {install}make {target}"
