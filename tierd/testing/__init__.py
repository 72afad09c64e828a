"""For authors of storage tiers: the checks that a backend must pass, a backend in memory to start
from, and faults to try it with."""

import pytest

# Before the import: the suite's asserts then say what they compared.
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
