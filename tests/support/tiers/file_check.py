"""Checks of a file tier that nobody has open, for tests of what they find."""

from __future__ import annotations

from tierd_backends.file.fsck import check_store


def check(path, *, repair=False, quick=False, tell=lambda done, whole: None):
    return check_store(path, threads=2, repair=repair, quick=quick, tell=tell)


def kinds(report):
    return {kind: found.count for kind, found in report.damage.items()}
