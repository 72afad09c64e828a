"""For those who write a storage tier: the checks that it has to pass, and faults to try it with."""

import pytest

# Before the import: the suite's asserts then say what they compared.
pytest.register_assert_rewrite("tierd.testing.suite")

from tierd.testing.faulty import FaultPlan, FaultyBackend, InjectedFault  # noqa: E402
from tierd.testing.suite import (  # noqa: E402
    BackendSuite,
    Damage,
    SelfNamingBlock,
    Slots,
    make_block,
    make_chain,
)

__all__ = [
    "BackendSuite",
    "Damage",
    "FaultPlan",
    "FaultyBackend",
    "InjectedFault",
    "SelfNamingBlock",
    "Slots",
    "make_block",
    "make_chain",
]
