"""Sizes as operators write them: "100GiB", "1.5GB", "5%" or a number of bytes."""

from __future__ import annotations

import re
from fractions import Fraction

from tierd.errors import ConfigError

_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)", re.ASCII)
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)\s*%", re.ASCII)
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power


def parse_size(value: int | str) -> int:
    """Bytes in `value`: an int, or a number with B, kB, KiB, MB, MiB and so on up to PiB.

    Fractions of a byte are cut off. Raises ConfigError that quotes the value; "8G" is
    one such, because half of all tools mean 1000 and the other half 1024 by it.
    """
    if type(value) is int and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{value!r} is not a size; write bytes, or a number with MiB, GiB, GB")
    return int(Fraction(match[1]) * unit)


def parse_size_of(value: int | str, whole_bytes: int) -> int:
    """Like parse_size, and "5%" is that part of `whole_bytes`."""
    match = _PERCENT.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return parse_size(value)
    percent = Fraction(match[1])
    if percent > 100:
        raise ConfigError(f"{value!r} is more than the whole")
    return int(percent * whole_bytes / 100)
