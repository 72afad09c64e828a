"""The boundary between the engine and the connector: a bug of ours is a miss, never a crash.

This is the only broad `except` in the connectors. It counts each error, logs errors at a bounded
rate, and switches the connector off if errors repeat soon. State that the error may have left half
done is discarded before the engine continues.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

logger = logging.getLogger("vllm.tierd")
"""A child of vLLM's logger, so that the engine's log shows the connector's messages."""

_ERRORS_MAX = 3
_ERRORS_SPAN_S = 600.0
"""_ERRORS_MAX errors within this time switch the connector off permanently: repeated failures show
a persistent fault. Engines run for months, and a rare error costs only a recomputation."""

_LOG_INTERVAL_S = 10.0
"""Shortest time between two logged tracebacks, so that a failing step does not fill the log."""


class Boundary:
    """Counts errors and switches the connector off. `off` is the reason; empty: on."""

    def __init__(self) -> None:
        self.errors = 0
        self.off = ""
        self.start_over: Callable[[], None] = nothing
        """Discards all state that an error may have left half done."""
        self._logged_s = float("-inf")
        self._times_s: deque[float] = deque(maxlen=_ERRORS_MAX)

    def switch_off(self, reason: str) -> None:
        """Switch the connector off permanently. The first reason is kept, and logged once."""
        if not self.off:
            self.off = reason
            logger.warning("tierd is off for this engine: %s", reason)

    def caught(self, where: str, error: Exception) -> None:
        """Record an error that must not reach the engine, and discard half-done state."""
        self.errors += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_INTERVAL_S:
            self._logged_s = now_s
            logger.error("tierd: error in %s, treated as a miss", where, exc_info=error)
        self._times_s.append(now_s)
        if len(self._times_s) == _ERRORS_MAX and now_s - self._times_s[0] < _ERRORS_SPAN_S:
            self.switch_off(
                f"{_ERRORS_MAX} errors within {_ERRORS_SPAN_S / 60:.0f} minutes, the last in "
                f"{where}: {error!r}"
            )
        try:
            self.start_over()
        except Exception as second:  # noqa: BLE001  # the connector boundary
            self.errors += 1
            self.switch_off(f"state left by an error in {where} was not discarded: {second!r}")


class HasBoundary(Protocol):
    """An object with guarded methods."""

    boundary: Boundary


_S = TypeVar("_S", bound=HasBoundary)
_P = ParamSpec("_P")
_R = TypeVar("_R")
_F = TypeVar("_F")


def guarded(
    fallback: Callable[[], _F],
) -> Callable[[Callable[Concatenate[_S, _P], _R]], Callable[Concatenate[_S, _P], _R | _F]]:
    """Decorate a method: it returns `fallback()` instead of raising."""

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
