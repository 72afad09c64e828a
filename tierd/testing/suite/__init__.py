"""Conformance suite: checks that a storage tier keeps the contract of `tierd.backend.Backend`.

Subclass BackendSuite in a test module and implement its hooks on the real storage (a disk, a
server). pytest then runs every check:

    class TestFile(BackendSuite):
        bounded = True
        async def make_backend(self, tmp_path, capacity_bytes): ...

The hooks `damage` and `swap` change the stored bytes without using the code under test, so that
it verifies real damage. Requires pytest and pytest-asyncio.
"""

from tierd.testing.suite.blocks import (
    MARKS_ASKED,
    NAMESPACE,
    OTHER_NAMESPACE,
    ROOT,
    CanarySlots,
    Damage,
    SelfNamingBlock,
    check_result,
    contains,
    damaged,
    get,
    indexed,
    make_block,
    make_chain,
    payload_of,
    put,
    running,
    scanned,
)
from tierd.testing.suite.bounds import Bounds
from tierd.testing.suite.concurrency import Concurrency
from tierd.testing.suite.damage import Damaging
from tierd.testing.suite.keeping import Keeping
from tierd.testing.suite.storing import StoringTests


class BackendSuite(StoringTests, Damaging, Keeping, Concurrency, Bounds, abstract=True):
    """All checks of one backend.

    Defining a subclass without a required hook raises TypeError, because pytest would silently
    skip the class.
    """


__all__ = [
    "MARKS_ASKED",
    "NAMESPACE",
    "OTHER_NAMESPACE",
    "ROOT",
    "BackendSuite",
    "CanarySlots",
    "Damage",
    "SelfNamingBlock",
    "check_result",
    "contains",
    "damaged",
    "get",
    "indexed",
    "make_block",
    "make_chain",
    "payload_of",
    "put",
    "running",
    "scanned",
]
