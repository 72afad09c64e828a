"""A namespace's documented example is one that a daemon accepts."""

from __future__ import annotations

import doctest

import tierd.types


def test_namespace_example_runs() -> None:
    result = doctest.testmod(tierd.types)
    assert result.attempted >= 4
    assert result.failed == 0
