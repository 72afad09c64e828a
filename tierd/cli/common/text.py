"""Formats numbers and names for people.

Numbers may come from a status, where they are of type `object`.
"""

from __future__ import annotations

from typing import Final

from tierd.sizes import about, scaled

_DECIMAL: Final = ("", " k", " M", " G", " T")


def size(size_bytes: object) -> str:
    """Format bytes, as in 1.5 GiB."""
    return about(_real(size_bytes))


def number(value: object) -> str:
    """Format a number, as in 12.3 k."""
    return scaled(_real(value), 1000, _DECIMAL)


def percent(share: object) -> str:
    """Format a share of 1, as in 12.3 %; a dash for None."""
    return "-" if share is None else f"{round(100 * _real(share), 1):g} %"


def duration(seconds: object) -> str:
    """Format seconds, as in 3h05m09s."""
    minutes, whole = divmod(int(_real(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m{whole:02}s"


def ago(seconds: object) -> str:
    """Format seconds roughly, as in 12 s, 3 min, 5 h or 2 d."""
    value = _real(seconds)
    for unit, most in (("s", 120), ("min", 60), ("h", 48)):
        if value < most:
            return f"{value:.0f} {unit}"
        value /= 24 if unit == "h" else 60
    return f"{value:.0f} d"


def latency(seconds: float | None) -> str:
    """Format seconds, as in 1.2 ms; a dash for None."""
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def printable(text: object) -> str:
    """Return untrusted text with its control characters replaced, so that no terminal obeys
    them."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


def _real(value: object) -> float:
    """Return a status's value as a number."""
    assert isinstance(value, int | float)
    return value
