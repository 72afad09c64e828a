"""What a request may say of how its prefix will be used: its `kv_transfer_params`, key "tierd".

A user's mistake costs the hint and a line in the log, never the request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

logger = logging.getLogger("vllm.tierd")

TOLD_MAX: Final = 16
"""Different mistakes that are logged, each once."""

SECONDS_MAX: Final = 10**9
"""Longer times are cut to this one, and by the daemon to what it grants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHints:
    """Each field is a key under "tierd", documented below it. They hold from the request's end."""

    pin_s: float = 0
    """Keep the blocks of the request in host memory for so long, within the daemon's quota."""

    next_use_s: float = 0
    """The prefix is likely to be used again in so many seconds."""

    priority: int = 0
    """-1: the blocks may go before those of others; 1: they had better stay."""

    session_end: bool = False
    """No request will continue this one: the blocks that only it has are the first to go."""


NOTHING: Final = RequestHints()


class HintReader:
    """Reads requests' hints and says once what is wrong with them."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def read(self, params: object) -> RequestHints:
        """The sound hints in a request's `kv_transfer_params`; what is not is left out."""
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
        # NaN is not at least 0 either.
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            self._tell(f"the hint {key} must be a number of seconds, 0 or more")
            return 0
        return min(value, SECONDS_MAX)

    def _tell(self, mistake: str) -> None:
        if mistake not in self._told and len(self._told) < TOLD_MAX:
            self._told.add(mistake)
            logger.warning("tierd: a request's hint is ignored: %s", mistake)
