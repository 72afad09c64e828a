"""Resolves namespace digests that are given by their first digits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from tierd.cli.common.text import printable
from tierd.errors import ConfigError
from tierd.types import DIGEST_BYTES

DIGITS_MIN: Final = 4
"""Least number of digits; exactly one known digest must begin with them."""


def check_digits(given: str, least: int = DIGITS_MIN) -> str:
    """Return the digits in lower case. Raises ConfigError if they cannot begin a digest."""
    digits = given.lower()
    if not re.fullmatch(rf"[0-9a-f]{{{least},{2 * DIGEST_BYTES}}}", digits, re.ASCII):
        raise ConfigError(
            f"{given!r:.80} is not a digest: pass its first {least} to {2 * DIGEST_BYTES} digits"
        )
    return digits


def resolve(given: str, known: Mapping[str, str]) -> str:
    """Return the known digest that begins with `given`; `known` maps digests to descriptions.

    Raises ConfigError if no known digest or more than one begins so, and lists the candidates.
    """
    digits = check_digits(given)
    found = [digest for digest in known if digest.startswith(digits)]
    if not found:
        raise ConfigError(f"tierd knows no namespace {given}; known: {listed(known.values())}")
    if len(found) > 1:
        several = listed(known[digest] for digest in found)
        raise ConfigError(
            f"{given} is the beginning of several namespaces, pass more digits: {several}"
        )
    return found[0]


def of_status(spaces: Iterable[Mapping[str, object]]) -> dict[str, str]:
    """Return the descriptions of a status's namespaces by digest, for `resolve`."""
    return {
        str(space["digest"]): f"{space['digest']} ({printable(space['model'])}, "
        f"rank {space['tp_rank']})"
        for space in spaces
    }


def listed(names: Iterable[str]) -> str:
    """Join names for a message."""
    return ", ".join(names) or "none"
