"""Sizes and times as operators write them: "100GiB", "1.5GB", "5%"; "90", "30m", "1.5h"."""

from __future__ import annotations

import re
from fractions import Fraction

from tierd.errors import ConfigError

_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)", re.ASCII)
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)\s*%", re.ASCII)
_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([smhd]?)", re.ASCII)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
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


def parse_time(value: str) -> float:
    """Seconds in a number, or in one with s, m, h or d. Raises ConfigError that quotes it."""
    match = _TIME.fullmatch(value.strip())
    if match is None:
        raise ConfigError(f"{value!r} is not a time; write seconds, or a number with s, m, h or d")
    return float(Fraction(match[1]) * _SECONDS[match[2]])
