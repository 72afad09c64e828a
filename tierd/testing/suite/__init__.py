"""The proof that a storage tier keeps the contract of `tierd.backend.Backend`.

Subclass BackendSuite in a test module, implement its hooks on the real thing (a disk, a
server), and pytest runs every check:

    class TestFile(BackendSuite):
        bounded = True
        async def make_backend(self, tmp_path, capacity_bytes): ...

The hooks `damage` and `swap` reach around the code under test, so that what it verifies
is really damaged. Needs pytest and pytest-asyncio.
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
    """Checks of one backend. Hooks that a subclass lacks are refused when it is defined,
    since pytest would skip the class in silence."""


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
