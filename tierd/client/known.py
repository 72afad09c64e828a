"""The incarnations of the daemon that a client knows, and their segments mapped in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tierd.client.values import Handle
from tierd.shared_memory.mapping import SharedMapping


class KnownIncarnation:
    """State that is valid for one incarnation of the daemon only."""

    __slots__ = (
        "epoch",
        "lease_ttl_s",
        "min_tokens",
        "reported_too_short",
        "segments",
        "slots_per_segment",
        "usable_until",
    )

    def __init__(self, epoch: bytes, lease_ttl_s: float) -> None:
        self.epoch = epoch
        self.lease_ttl_s = lease_ttl_s
        self.segments: dict[tuple[Handle, int], SharedMapping] = {}
        self.slots_per_segment: dict[Handle, int] = {}
        self.usable_until = float("inf")
        self.min_tokens: int | None = None
        """The daemon's `prefetch.min_tokens`; None: not known yet."""
        self.reported_too_short = False

    def forget(self, handle: Handle) -> None:
        """Unmap the segments of a handle."""
        self.slots_per_segment.pop(handle, None)
        for key in [key for key in self.segments if key[0] is handle]:
            del self.segments[key]


class KnownIncarnations:
    """The incarnation that is connected, and the one before it while its leases last."""

    def __init__(self) -> None:
        self.now: KnownIncarnation | None = None
        self._past: KnownIncarnation | None = None

    def welcome(self, epoch: bytes, lease_ttl_s: float) -> None:
        """Begin a session. Leases and mappings of the same incarnation stay valid."""
        self.now = self.of(epoch) or KnownIncarnation(epoch, lease_ttl_s)
        self.now.usable_until = float("inf")

    def lost(self) -> None:
        """End the session. Leased slots stay readable until the last lease has ended."""
        if self.now is not None:
            self.now.usable_until = time.monotonic() + self.now.lease_ttl_s
            self._past, self.now = self.now, None

    def forget_past(self) -> None:
        """Unmap the segments of the incarnation before."""
        self._past = None

    def of(self, epoch: bytes) -> KnownIncarnation | None:
        """Return the incarnation with this epoch; None: its slots may not be read now."""
        if self.now is not None and self.now.epoch == epoch:
            return self.now
        past = self._past
        if past is not None and past.usable_until <= time.monotonic():
            self._past = past = None
        return past if past is not None and past.epoch == epoch else None

    def forget(self, handle: Handle) -> None:
        """Unmap the segments of a handle."""
        for incarnation in (self.now, self._past):
            if incarnation is not None:
                incarnation.forget(handle)

    def map(self, now: KnownIncarnation, handle: Handle, number: int, fd: int) -> None:
        """Map a segment. The caller keeps the descriptor. Raises OSError and ValueError."""
        key = handle, number
        mapped = now.segments.get(key)
        # If the daemon has forgotten the namespace meanwhile, new segments have the same numbers.
        if mapped is None or not mapped.is_of(fd):
            size = now.slots_per_segment[handle] * handle.slot_bytes
            # Segments outlive the daemon: an existing mapping keeps its faulted-in pages.
            known = self._past.segments.get(key) if self._past is not None else None
            if known is None or not known.is_of(fd) or known.size_bytes != size:
                known = SharedMapping(fd, size)
            now.segments[key] = known


def slot_views(
    incarnation: KnownIncarnation, handle: Handle, slots: Sequence[int]
) -> list[memoryview] | None:
    """Return views of slots; None if one of them is not mapped."""
    per, size = incarnation.slots_per_segment.get(handle), handle.slot_bytes
    if per is None:
        return None
    views = []
    for slot in slots:
        index, place = divmod(slot, per)
        segment = incarnation.segments.get((handle, index))
        if segment is None:
            return None
        views.append(segment.view[place * size : (place + 1) * size])
    return views
