"""Changes of a bucket's blocks: a block is changed by one call at a time.

If the caller is cancelled, a change that has begun goes on in the background, and later calls for
that block wait for its end: the outcome of an interrupted change cannot be known.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from tierd.backend import Outcome
from tierd_backends.common.calls import CallThreads, CallTurn
from tierd_backends.s3.bucket import Bucket
from tierd_backends.s3.failure import S3Error
from tierd_backends.s3.jobs import Batch, ObjectChange
from tierd_backends.s3.requests import OnCall
from tierd_backends.s3.usage import Usage


class ObjectChanges:
    """The changes in progress. Belongs to the event loop, apart from the work on threads."""

    def __init__(self, bucket: Bucket, writers: CallThreads, usage: Usage) -> None:
        self._bucket = bucket
        self._writers = writers
        self._usage = usage
        self._loop = asyncio.get_running_loop()
        # Each block's change in progress, and the blocks whose change lost its caller.
        self._changing: dict[str, ObjectChange] = {}
        self._abandoned: set[str] = set()

    async def make(self, changes: Sequence[ObjectChange], batch: Batch) -> None:
        """Make changes, each as soon as no other call changes its block."""
        waiting = list(changes)
        while waiting:
            ready, later = [], []
            for change in waiting:
                if change.name in self._changing:
                    later.append(change)
                else:
                    self._changing[change.name] = change
                    ready.append(change)
            try:
                await self._writers.run(lambda turn: self._work(batch, turn), ready)
            finally:
                for change in ready:
                    if change.begun and not change.done:
                        self._abandoned.add(change.name)
                    else:
                        self._end(change)
            # A batch may name a block twice; then only one of its changes is ready at a time.
            others = [self._changing[c.name].over for c in later if c.name in self._changing]
            if len(others) == len(later) and others:
                await asyncio.wait(set(others), return_when=asyncio.FIRST_COMPLETED)
            waiting = later

    def _work(self, batch: Batch, turn: CallTurn[ObjectChange]) -> None:
        while (change := turn.take()) is not None:
            change.begun = True
            try:
                if batch.given_up:
                    batch.skip()
                elif change.raw_header:
                    self._put(turn, change)
                else:
                    self._drop(turn, change)
            except S3Error as failure:
                batch.note(failure, turn)
            finally:
                change.done = True
                if turn.cancelled:
                    # The loop is closed if the process ends meanwhile.
                    with contextlib.suppress(RuntimeError):
                        self._loop.call_soon_threadsafe(self._end, change)

    def _put(self, turn: OnCall, change: ObjectChange) -> None:
        written = self._bucket.write(turn, change.name, change.raw_header, change.payload)
        if written.stored:
            change.blocks = 1 if written.replaced_bytes is None else 0
            change.size_bytes = written.size_bytes - (written.replaced_bytes or 0)
        change.outcome = Outcome.STORED if written.stored else Outcome.PRESENT

    def _drop(self, turn: OnCall, change: ObjectChange) -> None:
        if change.etag:
            size_bytes = self._bucket.delete_read(turn, change.name, change.etag)
        else:
            seen = self._bucket.look(turn, change.name)
            size_bytes = seen.size_bytes if seen is not None else None
            if seen is not None:
                self._bucket.delete(turn, change.name)
        if size_bytes is not None:
            change.blocks, change.size_bytes = -1, -size_bytes
        change.outcome = Outcome.MISS

    def _end(self, change: ObjectChange) -> None:
        """Let the next call change the block. Later calls for the same change do nothing."""
        if self._changing.get(change.name) is not change:
            return
        del self._changing[change.name]
        self._abandoned.discard(change.name)
        self._usage.changed(change.name, change.blocks, change.size_bytes)
        change.over.set_result(None)

    async def settled(self, names: Sequence[str]) -> None:
        """Wait for changes of these blocks whose callers were cancelled."""
        if self._abandoned:
            changes = [self._changing[name].over for name in names if name in self._abandoned]
            if changes:
                await asyncio.wait(changes)
