"""The boundary between an engine and the connector: a bug of ours is a miss, never a crash.

This is the one broad `except` of the connectors. What it catches is counted, logged at a
bounded rate, and switches the connector off if it soon repeats. Whatever the error may have left
half done is thrown away before the engine goes on.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

logger = logging.getLogger("vllm.tierd")
"""Below vLLM's own logger, so that the engine's log shows what the connector has to say."""

_ERRORS_MAX = 3
_ERRORS_SPAN_S = 600.0
"""So many errors within this time switch the connector off for good: what fails again and again
is not trusted. One now and then costs its requests a recomputation; engines run for months."""

_LOG_INTERVAL_S = 10.0
"""At most one traceback in this time, so that a failing step does not fill the log."""


class Boundary:
    """Counts errors and decides when the connector goes off. `off` is the reason, or empty."""

    def __init__(self) -> None:
        self.errors = 0
        self.off = ""
        self.start_over: Callable[[], None] = nothing
        """Throws away all state that an error may have left half done."""
        self._logged_s = float("-inf")
        self._times_s: deque[float] = deque(maxlen=_ERRORS_MAX)

    def switch_off(self, reason: str) -> None:
        """Take no part from now on; the first reason stays and is logged once."""
        if not self.off:
            self.off = reason
            logger.warning("tierd is off for this engine: %s", reason)

    def caught(self, where: str, error: Exception) -> None:
        """Note an error that the engine must not see."""
        self.errors += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_INTERVAL_S:
            self._logged_s = now_s
            logger.error("tierd connector error in %s, treated as a miss", where, exc_info=error)
        self._times_s.append(now_s)
        if len(self._times_s) == _ERRORS_MAX and now_s - self._times_s[0] < _ERRORS_SPAN_S:
            self.switch_off(
                f"{_ERRORS_MAX} errors within {_ERRORS_SPAN_S / 60:.0f} minutes, the last one in "
                f"{where}: {error!r}"
            )
        try:
            self.start_over()
        except Exception as second:  # noqa: BLE001  # the connector boundary
            self.errors += 1
            self.switch_off(f"what an error in {where} left could not be thrown away: {second!r}")


class HasBoundary(Protocol):
    """Whatever owns guarded methods."""

    boundary: Boundary


_S = TypeVar("_S", bound=HasBoundary)
_P = ParamSpec("_P")
_R = TypeVar("_R")
_F = TypeVar("_F")


def guarded(
    fallback: Callable[[], _F],
) -> Callable[[Callable[Concatenate[_S, _P], _R]], Callable[Concatenate[_S, _P], _R | _F]]:
    """A method that answers `fallback()` where it would have raised."""

    def decorate(
        method: Callable[Concatenate[_S, _P], _R],
    ) -> Callable[Concatenate[_S, _P], _R | _F]:
        @wraps(method)
        def call(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R | _F:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001  # the connector boundary
                self.boundary.caught(method.__name__, error)
                return fallback()

        return call

    return decorate


def nothing() -> None:
    """The fallback of a guarded method that returns None."""
