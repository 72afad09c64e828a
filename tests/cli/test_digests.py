"""Digests that are given by their first digits."""

from __future__ import annotations

import pytest

from tierd.cli.common.digests import resolve
from tierd.errors import ConfigError

ONE, TWO, THREE = "32f2e62d" + "0" * 24, "32f2e62d" + "1" * 24, "7c1e" + "2" * 28
KNOWN = {ONE: f"{ONE} (a, rank 0)", TWO: f"{TWO} (a, rank 1)", THREE: f"{THREE} (b, rank 0)"}


def test_unique_prefix_is_enough() -> None:
    """32 digits would have to be copied from a status."""
    assert resolve("7c1e", KNOWN) == THREE
    assert resolve("7C1E2", KNOWN) == THREE
    assert resolve("32f2e62d1", KNOWN) == TWO
    assert resolve(ONE, KNOWN) == ONE


def test_ambiguous_or_unknown_prefix_is_refused_with_the_choices() -> None:
    """A flush would drop another model's blocks, or nothing, without naming the choices."""
    with pytest.raises(ConfigError) as caught:
        resolve("32f2", KNOWN)
    assert "32f2 is the beginning of several namespaces" in str(caught.value)
    assert KNOWN[ONE] in str(caught.value)
    assert KNOWN[TWO] in str(caught.value)
    assert THREE not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        resolve("9999", KNOWN)
    assert "knows no namespace 9999" in str(caught.value)
    assert all(name in str(caught.value) for name in KNOWN.values())
    with pytest.raises(ConfigError, match="known: none"):
        resolve("9999", {})
    for wrong in ("7c1", "", "7c1e/", "7c1e" * 9, "w7c1e"):
        with pytest.raises(ConfigError, match="4 to 32 digits"):
            resolve(wrong, KNOWN)
