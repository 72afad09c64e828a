"""The simple API: store and get blocks as bytes."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from tierd.client.calls import EngineCalls
from tierd.client.values import Handle, by_source, copy, flat
from tierd.errors import DisconnectedError
from tierd.wire import messages as m

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger("tierd.client")

_POPULATE_BYTES_MAX: Final = 1 << 62


class Client(EngineCalls):
    """A session with the daemon at `socket_path`. It reconnects by itself after it breaks.

    All methods are thread-safe; a call that waits blocks the calls of other threads.
    `call_timeout_ms` bounds every call that waits for the daemon. `map_segments=False` suits a
    caller that looks blocks up and never touches their bytes. `name` appears in the daemon's
    log. `last_error` says why the last connection or call failed.

    A context manager: leaving the block calls `close`.
    """

    def put(self, handle: Handle, blocks: Sequence[tuple[bytes, bytes, Buffer]]) -> list[bool]:
        """Store blocks given as (hash, parent, buffer). The caller keeps the buffers.

        Returns for each block whether the daemon has it now. False means that the daemon is
        away, that it has no room, or that another session is storing the block. Raises
        ValueError for a buffer that does not hold exactly the namespace's `block_bytes`, and
        RefusedError if the daemon refuses the namespace or this process.
        """
        self._check_allowed(handle)
        size = handle.namespace.block_bytes
        sources = [flat(buffer, size) for _, _, buffer in blocks]
        done: list[bool] = []
        for start in range(0, len(blocks), m.KEYS_PER_CALL_MAX):
            part = blocks[start : start + m.KEYS_PER_CALL_MAX]
            with self._lock:
                reservation = self.reserve(handle, [b[0] for b in part], [b[1] for b in part])
                if reservation is None:
                    return done + [False] * (len(blocks) - len(done))
                try:
                    for view, source in zip(reservation.views, sources[start:], strict=False):
                        if view is not None:
                            copy(view[:size], source)
                except BaseException:
                    self.abort(reservation)
                    raise
                done += self.commit(reservation)
        return done

    def get(
        self,
        handle: Handle,
        hashes: Sequence[bytes],
        deadline_ms: int,
        into: Sequence[Buffer] | None = None,
    ) -> list[memoryview]:
        """Return copies of the longest prefix of `hashes` that arrives before the deadline.

        Each copy has the namespace's `block_bytes`. `into` gives writable buffers of that size
        to fill; without it the client allocates new ones. The caller owns them in both cases. The
        contents of `into` beyond the returned prefix are undefined. Returns [] on a miss and
        while the daemon is away. Raises RefusedError if the daemon refuses the namespace or this
        process, and ValueError for a buffer of a wrong size.

        The daemon does not ask storage tiers for fewer than `prefetch.min_tokens` missing
        tokens; the log and `last_error` say so when that cut the result short.
        """
        self._check_allowed(handle)
        found = self._get(handle, hashes, deadline_ms, into)
        if len(found) < len(hashes):
            self._note_too_short(handle, len(hashes) - len(found))
        return found

    def _get(
        self,
        handle: Handle,
        hashes: Sequence[bytes],
        deadline_ms: int,
        into: Sequence[Buffer] | None,
    ) -> list[memoryview]:
        size = handle.namespace.block_bytes
        targets = [flat(buffer, size) for buffer in into] if into is not None else None
        wanted = min(len(hashes), m.KEYS_PER_CALL_MAX)
        with self._lock:
            lease = self.acquire([handle], hashes, deadline_ms)
            if lease is None:
                self.loaded([handle], wanted, [])
                return []
            try:
                views = self.lease_views(handle, lease.epoch, lease.slots[0])
                if views is None:
                    return []
                if targets is None:
                    targets = [memoryview(bytearray(size)) for _ in views]
                filled = targets[: len(views)]
                for target, view in zip(filled, views, strict=False):
                    copy(target, view[:size])
                if time.monotonic_ns() >= lease.expires_ns:
                    return []
                self.loaded([handle], wanted, by_source(lease.sources[: len(filled)]))
                return filled
            finally:
                self.release(lease)

    def _note_too_short(self, handle: Handle, missing: int) -> None:
        """Log, once per incarnation, that tiers are not asked for so few missing tokens."""
        with self._lock:
            incarnation = self._incarnations.now
            if incarnation is None or incarnation.reported_too_short:
                return
            if incarnation.min_tokens is None:
                incarnation.min_tokens = self._min_tokens()
            tokens = missing * handle.namespace.block_tokens
            if incarnation.min_tokens is not None and tokens < incarnation.min_tokens:
                incarnation.reported_too_short = True
                self._connection.last_error = (
                    f"{tokens} tokens are missing in host memory, and storage tiers are not asked "
                    f"for fewer than {incarnation.min_tokens} (prefetch.min_tokens of the daemon)"
                )
                log.warning("%s: %s", self._connection.path, self.last_error)

    def _min_tokens(self) -> int | None:
        """Return the connected daemon's `prefetch.min_tokens`; 0 if it has no storage tiers."""
        try:
            status = self.status()
        except DisconnectedError:
            return None
        prefetch = status.get("prefetch")
        found = prefetch.get("min_tokens") if isinstance(prefetch, dict) else None
        if not status.get("storage"):
            return 0
        return found if isinstance(found, int) else None

    def populate(self, budget_bytes: int = _POPULATE_BYTES_MAX) -> bool:
        """Fault in at most `budget_bytes` of the mapped segments. Returns whether more remains.

        Runs without the GIL. Without it the first copy to or from each page runs at a tenth of
        memcpy's speed.
        """
        with self._lock:
            segments = (
                list(self._incarnations.now.segments.values())
                if self._incarnations.now is not None
                else []
            )
        for segment in segments:
            while segment.populated_bytes < segment.size_bytes:
                if budget_bytes <= 0:
                    return True
                before = segment.populated_bytes
                with contextlib.suppress(OSError):
                    segment.populate_next()
                if segment.populated_bytes == before:
                    break
                budget_bytes -= segment.populated_bytes - before
        return False

    def status(self) -> dict[str, object]:
        """Return the daemon's status. Raises DisconnectedError with the reason if it is away."""
        with self._lock:
            call = self._connection.next_call()
            self._ensure_ready([])
            reply = self._waiting.call(call, m.Status(call)) if self.connected else None
            if not isinstance(reply, m.StatusReply):
                raise DisconnectedError(
                    f"no answer from {self._connection.path}: {self.last_error}"
                )
            return reply.body
