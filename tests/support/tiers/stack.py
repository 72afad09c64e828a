"""A network tier as the daemon composes it, for the conformance checks."""

from __future__ import annotations

import msgspec

from tierd.backend import Backend
from tierd.storage.breaker import BreakerBackend
from tierd.storage.measured import MeasuredBackend
from tierd.storage.worker.backend import WorkerBackend


def daemon_stack(cls: type[Backend], options: msgspec.Struct) -> Backend:
    """The backend in a worker process, measured, behind a breaker that no valid call opens."""
    measured = MeasuredBackend(WorkerBackend(cls, options))
    return BreakerBackend(measured, name=cls.__name__, deadline_s=60, slow_s=60, probe_s=60)
