"""What the S3 tier's threads are handed, one a block, and what its blocks have in common.

The event loop makes jobs and reads them when the call is over; in between they are a thread's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from tierd.backend import BlockHeader, Outcome
from tierd.errors import BackendError
from tierd.types import BlockKey
from tierd_backends.common.again import DamageSite
from tierd_backends.s3.failure import FailureKind, S3Error


class Batch:
    """How one call's requests fare together; threads share it.

    A server that is down is found out once a thread, not once a block.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self.failure: S3Error | None = None

    def note(self, failure: S3Error) -> None:
        """Remember a failure, the gravest of them if there are several."""
        if self.failure is None or failure.kind is FailureKind.NO_BUCKET:
            self.failure = failure
        if failure.kind is FailureKind.PEER:
            self._patience -= 1
        elif failure.kind is FailureKind.NO_BUCKET:
            self._patience = 0

    def raise_if_shut_out(self, where: str, outcomes: Sequence[Outcome]) -> None:
        """Raise BackendError, which tells the operator why, if it is no single block's trouble."""
        if self.failure is None:
            return
        kind = self.failure.kind
        refused = kind in (FailureKind.DENIED, FailureKind.ELSEWHERE) and set(outcomes) == {
            Outcome.ERROR
        }
        if refused or kind is FailureKind.NO_BUCKET:
            raise BackendError(f"{where}: {self.failure}") from self.failure

    @property
    def hopeless(self) -> bool:
        """Whether the jobs that are left need not be tried."""
        return self._patience <= 0


@dataclass(slots=True, eq=False)
class Look:
    """A block to look for: its object's size, or with `peek` its header; None if not there.

    `failure` says why neither is known.
    """

    name: str
    size_bytes: int | None = None
    raw_header: bytes | None = None
    failure: S3Error | None = None
    done: bool = False


@dataclass(slots=True, eq=False)
class Fetch:
    """A block to bring. `fault` is where it was damaged, and `etag` that of its object then."""

    name: str
    key: BlockKey
    view: memoryview
    outcome: Outcome = Outcome.ERROR
    header: BlockHeader | None = None
    fault: DamageSite | None = None
    etag: str = ""


@dataclass(slots=True, eq=False)
class ObjectChange:
    """A block to put, or to drop if there is nothing to put, whatever it is or under this `etag`.

    A thread sets `begun` before and `done` after it, and between them what came of it:
    `blocks` and `size_bytes` are what the bucket holds more.
    """

    name: str
    raw_header: bytes = b""
    payload: memoryview = memoryview(b"")
    etag: str = ""
    over: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    begun: bool = False
    done: bool = False
    outcome: Outcome = Outcome.ERROR
    blocks: int = 0
    size_bytes: int = 0
