"""Numbers and names as people read them, for the commands that show a status.

Numbers may come as a status has them, without a type.
"""

from __future__ import annotations

from typing import Final

from tierd.sizes import about, scaled

_DECIMAL: Final = ("", " k", " M", " G", " T")


def size(size_bytes: object) -> str:
    """As in 1.5 GiB."""
    return about(_real(size_bytes))


def number(value: object) -> str:
    """As in 12.3 k."""
    return scaled(_real(value), 1000, _DECIMAL)


def percent(share: object) -> str:
    """As in 12.3 %; a dash for None."""
    return "-" if share is None else f"{round(100 * _real(share), 1):g} %"


def duration(seconds: object) -> str:
    """As in 3h05m09s."""
    minutes, whole = divmod(int(_real(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m{whole:02}s"


def ago(seconds: object) -> str:
    """As in 12 s, 3 min, 5 h or 2 d: enough to know when."""
    value = _real(seconds)
    for unit, most in (("s", 120), ("min", 60), ("h", 48)):
        if value < most:
            return f"{value:.0f} {unit}"
        value /= 24 if unit == "h" else 60
    return f"{value:.0f} d"


def latency(seconds: float | None) -> str:
    """As in 1.2 ms; a dash for None."""
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def printable(text: object) -> str:
    """A name that somebody else has chosen: what it has of control characters is not obeyed."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


def _real(value: object) -> float:
    """What a status has as a number."""
    assert isinstance(value, int | float)
    return value
