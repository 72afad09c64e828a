"""Checks of a closed file tier, for tests of their findings."""

from __future__ import annotations

from tierd_backends.file.fsck import check_store


def check(path, *, repair=False, quick=False, tell=lambda done, whole: None):
    return check_store(path, threads=2, repair=repair, quick=quick, tell=tell)


def kinds(report):
    return {kind: found.count for kind, found in report.damage.items()}
