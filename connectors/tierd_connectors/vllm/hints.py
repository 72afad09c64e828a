"""A request's hints on future uses of its prefix: key "tierd" of its `kv_transfer_params`.

A malformed hint is ignored and logged; the request is served.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

logger = logging.getLogger("vllm.tierd")

LOGGED_MAX: Final = 16
"""Largest number of different mistakes that are logged, each once."""

SECONDS_MAX: Final = 10**9
"""Longer times are cut to this one; the daemon may cut them further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHints:
    """A request's hints. Each field is a key under "tierd"; times count from the request's end."""

    pin_s: float = 0
    """Keep the request's blocks in host memory for this time in seconds, within the quota."""

    next_use_s: float = 0
    """Expected time in seconds until the prefix is used again."""

    priority: int = 0
    """-1: evict the request's blocks before others; 1: keep them longer than others."""

    session_end: bool = False
    """No later request continues this one: blocks that only this request uses are evicted first."""


NOTHING: Final = RequestHints()


class HintReader:
    """Reads requests' hints, and logs each kind of mistake once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def read(self, params: object) -> RequestHints:
        """Return the valid hints in a request's `kv_transfer_params`; others keep the default."""
        if not isinstance(params, Mapping) or "tierd" not in params:
            return NOTHING
        given = params["tierd"]
        if not isinstance(given, Mapping):
            self._tell('"tierd" in kv_transfer_params must be an object')
            return NOTHING
        keys = [field.name for field in fields(RequestHints)]
        if any(key not in keys for key in given):
            self._tell(
                f'"tierd" in kv_transfer_params has an unknown key; known: {", ".join(keys)}'
            )
        priority = given.get("priority", 0)
        if type(priority) is not int or priority not in (-1, 0, 1):
            self._tell("the hint priority must be -1, 0 or 1")
            priority = 0
        session_end = given.get("session_end", False)
        if type(session_end) is not bool:
            self._tell("the hint session_end must be true or false")
            session_end = False
        return RequestHints(
            pin_s=self._seconds(given, "pin_s"),
            next_use_s=self._seconds(given, "next_use_s"),
            priority=priority,
            session_end=session_end,
        )

    def _seconds(self, given: Mapping[object, object], key: str) -> float:
        value = given.get(key, 0)
        # `not value >= 0` also rejects NaN.
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            self._tell(f"the hint {key} must be a number of seconds, 0 or more")
            return 0
        return min(value, SECONDS_MAX)

    def _tell(self, mistake: str) -> None:
        if mistake not in self._logged and len(self._logged) < LOGGED_MAX:
            self._logged.add(mistake)
            logger.warning("tierd: a request's hint is ignored: %s", mistake)
