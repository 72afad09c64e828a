"""Values that a client returns to its caller, and copies of bytes."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from tierd.types import HASH_BYTES, Namespace

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Handle:
    """One registered namespace. It stays valid when the connection breaks.

    `ready`: it can be used now. `refusal`: why the daemon refused the namespace; None: it did not.
    `slot_bytes` is the size of a slot: the namespace's `block_bytes`, rounded up to whole pages of
    4,096 bytes.
    """

    __slots__ = ("namespace", "number", "refusal", "slot_bytes")

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.number: int | None = None
        self.refusal: str | None = None
        self.slot_bytes = namespace.slot_bytes

    @property
    def ready(self) -> bool:
        """Whether the connected daemon has accepted the namespace."""
        return self.number is not None


class Lease:
    """The right to read the slots of `blocks` blocks until `expires_ns`.

    `expires_ns` is a time of CLOCK_MONOTONIC. The first leased block is number `own` of the
    acquire. `slots[i][k]` is the slot of leased block k for handle i. `sources[k]` is the tier that
    had it: 0 for host memory, n + 1 for storage tier n. The daemon owns the slots: do not write to
    them, and discard a copy that ended after `expires_ns`. `release` ends the lease.
    """

    __slots__ = ("blocks", "epoch", "expires_ns", "lease_id", "slots", "sources")

    def __init__(
        self,
        lease_id: int,
        epoch: bytes,
        blocks: int,
        slots: list[list[int]],
        expires_ns: int,
        sources: bytes,
    ) -> None:
        self.lease_id = lease_id
        self.epoch = epoch
        self.blocks = blocks
        self.slots = slots
        self.expires_ns = expires_ns
        self.sources = sources


class PendingAcquire:
    """An acquire in progress. Once `done`, `lease` is the result; None: nothing was found."""

    __slots__ = ("call", "done", "handles", "lease")

    def __init__(self, call: int, handles: int) -> None:
        self.call = call
        self.handles = handles
        self.done = False
        self.lease: Lease | None = None


class Reservation:
    """Slots to fill, one for each hash of `reserve`.

    `slots[i]` is None if hash i got no slot: the daemon has the block (`present[i]`) or refused it.
    `views[i]` is the whole slot of `slot_bytes` bytes, writable until `commit` or `abort`.
    """

    __slots__ = ("epoch", "present", "reservation_id", "slots", "views")

    def __init__(
        self,
        reservation_id: int,
        epoch: bytes,
        slots: list[int | None],
        present: list[bool],
        views: list[memoryview | None],
    ) -> None:
        self.reservation_id = reservation_id
        self.epoch = epoch
        self.slots = slots
        self.present = present
        self.views = views


COPY_BY_VIEW_MAX: Final = 1 << 20
"""Up to this size a memoryview assignment is fastest. It holds the GIL for at most 50 us."""


def copy(target: memoryview, source: memoryview) -> None:
    """Copy between views of equal size; large ones without the GIL."""
    if len(source) <= COPY_BY_VIEW_MAX:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def by_source(sources: bytes) -> list[int]:
    """Count the blocks of each source in some of a lease's `sources`, for `Client.loaded`."""
    counts = Counter(sources)
    return [counts[number] for number in range(max(sources, default=-1) + 1)]


def request_number(request_id: str) -> int:
    """Return a number for a request's id, equal in every process and never 0."""
    digest = hashlib.sha256(request_id.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1 or 1


def check_hashes(hashes: Sequence[bytes]) -> None:
    """Raise ValueError for a hash of a wrong length: on the wire, hashes are joined."""
    if hashes and set(map(len, hashes)) != {HASH_BYTES}:
        wrong = next(h for h in hashes if len(h) != HASH_BYTES)
        raise ValueError(f"a block hash has {len(wrong)} bytes, not {HASH_BYTES}: {wrong!r:.80}")


def flat(buffer: Buffer, size_bytes: int) -> memoryview:
    """Return the bytes of a buffer that holds one block. Raises ValueError for another size."""
    view = memoryview(buffer).cast("B")
    if len(view) != size_bytes:
        raise ValueError(f"a buffer has {len(view)} bytes: pass one block, {size_bytes} bytes")
    return view
