"""Runs over one trace, each in a process of its own, so many at a time.

A process is forked when its turn comes: it has what has been read, and only its result is sent.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, MutableSequence, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Final, TypeVar

from tierd.errors import ConfigError

PERIOD_S: Final = 0.2
"""Between two calls of the progress callback."""

Tell = Callable[[int], None]
"""Says how far a run has come, in requests."""

_Result = TypeVar("_Result")
_Connection = Connection[_Result, _Result]
