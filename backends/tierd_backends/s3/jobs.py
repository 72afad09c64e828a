"""The jobs of the S3 tier's threads, one per block, and the state that a batch's jobs share.

The event loop makes the jobs, and reads them when the call is over. In between they belong to
one thread each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from tierd.backend import BlockHeader, Outcome
from tierd.errors import BackendError
from tierd.types import BlockKey
from tierd_backends.common.failures import Failures
from tierd_backends.common.second_read import DamageSite
from tierd_backends.s3.failure import FailureKind, S3Error
from tierd_backends.s3.requests import OnCall


class Batch:
    """Shared state of one call's requests. Used by several threads.

    A server that is down costs one failure per thread, not one per block.
    """

    def __init__(self, patience: int, failures: Failures) -> None:
        self._patience = patience
        self._failures = failures
        self.failure: S3Error | None = None
        """The first failure; a missing bucket replaces it."""

    def note(self, failure: S3Error, turn: OnCall) -> None:
        """Count, log and remember a failure, unless a cancellation caused it."""
        if turn.cancelled:
            return
        denied = failure.kind is FailureKind.DENIED
        self._failures.count("denied_total" if denied else "io_errors_total")
        self._failures.trouble = str(failure)
        self._failures.warn(failure.kind, str(failure))
        if self.failure is None or failure.kind is FailureKind.NO_BUCKET:
            self.failure = failure
        if failure.kind is FailureKind.PEER:
            self._patience -= 1
        elif failure.kind is FailureKind.NO_BUCKET:
            self._patience = 0

    def skip(self) -> None:
        """Count a job that was not tried."""
        self._failures.count("io_errors_total")

    def raise_if_shut_out(self, where: str, outcomes: Sequence[Outcome]) -> None:
        """Raise BackendError with the reason if the failure affects all blocks."""
        if self.failure is None:
            return
        kind = self.failure.kind
        refused = kind in (FailureKind.DENIED, FailureKind.ELSEWHERE) and set(outcomes) == {
            Outcome.ERROR
        }
        if refused or kind is FailureKind.NO_BUCKET:
            raise BackendError(f"{where}: {self.failure}") from self.failure

    @property
    def given_up(self) -> bool:
        """Whether the remaining jobs need not be tried."""
        return self._patience <= 0


@dataclass(slots=True, eq=False)
class Look:
    """A block to look up: its object's size, or with `peek` its header; None if it is missing.

    `failure` explains why neither is known.
    """

    name: str
    size_bytes: int | None = None
    raw_header: bytes | None = None
    failure: S3Error | None = None
    done: bool = False


@dataclass(slots=True, eq=False)
class Fetch:
    """A block to get. `fault` says where it was damaged; `etag` is the damaged object's ETag."""

    name: str
    key: BlockKey
    view: memoryview
    outcome: Outcome = Outcome.ERROR
    header: BlockHeader | None = None
    fault: DamageSite | None = None
    etag: str = ""


@dataclass(slots=True, eq=False)
class ObjectChange:
    """A block to put; or, without `raw_header`, to drop. With `etag` only that object is dropped.

    A thread sets `begun` before and `done` after the change, and the result in between: `blocks`
    and `size_bytes` are the change of the bucket's content.
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
