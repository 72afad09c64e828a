"""Injected errors in the connector: each is raised at a random line behind its boundary.

Only lines with a call or an index are chosen, since only these can raise, and only where the
boundary must catch the error: code that recovers from an error gets no second one.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import FrameType
from typing import Any

_GUARD = "common/guard.py"
LINES_MEAN = 12
"""A call of the connector runs between 5 and 100 lines that can raise."""


class InjectedError(Exception):
    """An error that no code expects."""


class Trouble:
    """Raises an error in some calls: with `chance`, at a random line of the call."""

    def __init__(self, random: Random, chance: float, told: Callable[[str], None]) -> None:
        self._random = random
        self._chance = chance
        self._told = told
        self._left = 0
        self.struck: list[str] = []

    @contextmanager
    def around(self) -> Iterator[None]:
        """Inject errors into one call of the connector."""
        if self._random.random() >= self._chance:
            yield
            return
        self._left = int(self._random.expovariate(1 / LINES_MEAN))
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if _behind_guard(frame) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != "line":
            return self._line
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if "(" in text or "[" in text:
            if not self._left:
                place = f"{frame.f_code.co_name}:{frame.f_lineno}"
                self.struck.append(place)
                self._told(f"an error at {place}")
                raise InjectedError(place)
            self._left -= 1
        return self._line


def _behind_guard(frame: FrameType) -> bool:
    """Whether code belongs to the connector and its boundary catches its errors."""
    if "tierd_connectors" not in frame.f_code.co_filename:
        return False
    if frame.f_code.co_filename.endswith(_GUARD):
        return False
    caller: FrameType | None = frame
    while caller is not None:
        code = caller.f_code
        if code.co_name == "call" and code.co_filename.endswith(_GUARD):
            return True
        caller = caller.f_back
    return False
