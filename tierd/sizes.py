"""Sizes and times as operators write them: "100GiB", "1.5GB", "5%"; "90", "30m", "1.5h"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from tierd.errors import ConfigError


class Size(int):
    """Bytes, written in the configuration as a number or as text like "8GiB"."""


_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)", re.ASCII)
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)\s*%", re.ASCII)
_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([smhd]?)", re.ASCII)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power


def parse_size(value: int | str) -> int:
    """Return the bytes of `value`: an int, or a number with B, kB, KiB, MB, MiB and so on to PiB.

    Fractions of a byte are cut off. Raises ConfigError that quotes an invalid value. "8G" is
    invalid, because some tools mean units of 1000 by it and others units of 1024.
    """
    if type(value) is int and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        if match is not None and f"{match[2].lower()}ib" in _UNITS:
            number, letter = match[1], match[2].upper()
            power = "kmgtp".index(letter.lower()) + 1
            small = "k" if letter == "K" else letter
            raise ConfigError(
                f"{value!r} is not a size: {letter} alone is ambiguous; write "
                f'"{number}{letter}iB" for units of {1024**power:,} bytes, as used for memory, '
                f'or "{number}{small}B" for units of {1000**power:,} bytes'
            )
        raise ConfigError(
            f'{value!r} is not a size; write bytes, or a number with a unit, as in "8GiB" or "8GB"'
        )
    return int(Fraction(match[1]) * unit)


def parse_size_of(value: int | str, whole_bytes: int) -> int:
    """Return the bytes of a size, or of a percentage of `whole_bytes` such as "5%".

    Raises ConfigError as `parse_size` does, and for more than 100 %.
    """
    match = _PERCENT.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return parse_size(value)
    percent = Fraction(match[1])
    if percent > 100:
        raise ConfigError(f"{value!r} is more than 100 %")
    return int(percent * whole_bytes / 100)


def parse_time(value: str) -> float:
    """Return the seconds of a number, which may have a unit s, m, h or d.

    Raises ConfigError that quotes an invalid value.
    """
    match = _TIME.fullmatch(value.strip())
    if match is None:
        raise ConfigError(f"{value!r} is not a time; write seconds, or a number with s, m, h or d")
    return float(Fraction(match[1]) * _SECONDS[match[2]])


def size_text(size_bytes: int) -> str:
    """Return a size exactly, as the configuration would have it: "8GiB"."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes and size_bytes % (1 << power) == 0:
            return f"{size_bytes >> power}{unit}"
    return str(size_bytes)


def about(size_bytes: float, digits: int = 3) -> str:
    """Return a rounded size for people to read: "1.5 GiB"."""
    return scaled(size_bytes, 1024, (" B", " KiB", " MiB", " GiB", " TiB"), digits)


def change(before_bytes: int, after_bytes: int) -> str:
    """Return a text like "from 512 MiB to 500 MiB", with enough digits to show the difference."""
    for digits in range(3, 20):
        texts = about(before_bytes, digits), about(after_bytes, digits)
        if texts[0] != texts[1] or before_bytes == after_bytes:
            break
    return f"from {texts[0]} to {texts[1]}"


def scaled(value: float, base: int, units: Sequence[str], digits: int = 3) -> str:
    """Return a number scaled to the largest fitting unit, with `digits` significant digits."""
    for unit in units[:-1]:
        if value < base - 0.5:  # From there it would be rounded up to the next unit.
            if value >= 999.5 and digits < 5:
                return f"{value:.0f}{unit}"
            return f"{round(value, digits - 1):.{digits}g}{unit}"
        value /= base
    return f"{value:.{digits}g}{units[-1]}"
