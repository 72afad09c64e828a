"""Digests of namespaces as people give them: the first digits, if only one begins so."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from tierd.cli.common.text import printable
from tierd.errors import ConfigError
from tierd.types import DIGEST_BYTES

DIGITS_MIN: Final = 4
"""Digits that are enough, if only one known digest begins with them."""


def check_digits(given: str, least: int = DIGITS_MIN) -> str:
    """The digits in lower case. Raises ConfigError if no digest begins so."""
    digits = given.lower()
    if not re.fullmatch(rf"[0-9a-f]{{{least},{2 * DIGEST_BYTES}}}", digits, re.ASCII):
        raise ConfigError(
            f"{given!r:.80} is no digest, of which {least} to {2 * DIGEST_BYTES} digits are needed"
        )
    return digits


def resolve(given: str, known: Mapping[str, str]) -> str:
    """The digest that begins with `given`; `known` has what to say of each, by its digits.

    Raises ConfigError, which lists the known ones if it is none of them, and those that begin so
    if it is several.
    """
    digits = check_digits(given)
    found = [digest for digest in known if digest.startswith(digits)]
    if not found:
        raise ConfigError(f"tierd knows no namespace {given}; it knows {listed(known.values())}")
    if len(found) > 1:
        several = listed(known[digest] for digest in found)
        raise ConfigError(
            f"{given} is the beginning of several namespaces, give more of: {several}"
        )
    return found[0]


def of_status(spaces: Iterable[Mapping[str, object]]) -> dict[str, str]:
    """The namespaces of a status, as `resolve` wants them."""
    return {
        str(space["digest"]): f"{space['digest']} ({printable(space['model'])}, "
        f"rank {space['tp_rank']})"
        for space in spaces
    }


def listed(names: Iterable[str]) -> str:
    """Names in a message."""
    return ", ".join(names) or "none"
