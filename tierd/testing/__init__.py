"""Tools for authors of storage tiers: a conformance suite, a backend in memory to start from, and
injected faults."""

import pytest

# Must come before the import, so that a failed assert shows the values that it compared.
pytest.register_assert_rewrite("tierd.testing.suite")

from tierd.testing.backend import MemoryBackend, MemoryOptions, StoredBlock  # noqa: E402
from tierd.testing.faulty import FaultPlan, FaultyBackend, InjectedFault  # noqa: E402
from tierd.testing.suite import (  # noqa: E402
    BackendSuite,
    CanarySlots,
    Damage,
    SelfNamingBlock,
    damaged,
    make_block,
    make_chain,
)

__all__ = [
    "BackendSuite",
    "CanarySlots",
    "Damage",
    "FaultPlan",
    "FaultyBackend",
    "InjectedFault",
    "MemoryBackend",
    "MemoryOptions",
    "SelfNamingBlock",
    "StoredBlock",
    "damaged",
    "make_block",
    "make_chain",
]
