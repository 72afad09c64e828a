"""What a client gives to its caller, and how bytes are copied."""

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

    `ready` says whether it can be used now. `refusal` is the daemon's reason once it has
    refused the namespace, else None. `slot_bytes` is the size of a slot: `block_bytes` of the
    namespace, rounded up to whole pages of 4,096 bytes.
    """

    __slots__ = ("namespace", "number", "refusal", "slot_bytes")

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.number: int | None = None
        self.refusal: str | None = None
        self.slot_bytes = namespace.slot_bytes

    @property
    def ready(self) -> bool:
        """Whether the daemon that is connected now has accepted the namespace."""
        return self.number is not None


class Lease:
    """The right to read the slots of `blocks` readable blocks until `expires_ns`.

    `expires_ns` is a time of CLOCK_MONOTONIC. The first leased block is number `own` of the
    acquire. `slots[i][k]` is the slot of leased block k for handle i. `sources[k]` says which
    tier had it: 0 for host memory, n + 1 for storage tier n. The daemon owns the slots: read
    them only, and throw away a copy that ended after `expires_ns`. `release` ends the lease.
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
    """An acquire under way. Once `done`, `lease` is the result, or None if nothing was found."""

    __slots__ = ("call", "done", "handles", "lease")

    def __init__(self, call: int, handles: int) -> None:
        self.call = call
        self.handles = handles
        self.done = False
        self.lease: Lease | None = None


class Reservation:
    """Slots to fill, one for each hash of `reserve`.

    `slots[i]` is None where hash i got no slot: `present[i]` then says whether the daemon has
    the block already; if not, the daemon refused it. `views[i]` is the whole slot, `slot_bytes`
    long, and writable until `commit` or `abort`.
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
"""Below it a memoryview assignment is fastest; it holds the GIL, 50 us at most here."""


def copy(target: memoryview, source: memoryview) -> None:
    """Copy equal numbers of bytes; large ones without the GIL."""
    if len(source) <= COPY_BY_VIEW_MAX:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def by_source(sources: bytes) -> list[int]:
    """How many blocks each source had, for `Client.loaded`, of some of a lease's `sources`."""
    counts = Counter(sources)
    return [counts[number] for number in range(max(sources, default=-1) + 1)]


def request_number(request_id: str) -> int:
    """A number for a request that has an id, the same wherever it is asked for; never 0."""
    digest = hashlib.sha256(request_id.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1 or 1


def check_hashes(hashes: Sequence[bytes]) -> None:
    """Joined on the wire, hashes of other lengths would be cut at the wrong places."""
    if hashes and set(map(len, hashes)) != {HASH_BYTES}:
        wrong = next(h for h in hashes if len(h) != HASH_BYTES)
        raise ValueError(f"a block hash has {len(wrong)} bytes, not {HASH_BYTES}: {wrong!r:.80}")


def flat(buffer: Buffer, size_bytes: int) -> memoryview:
    """The bytes of a buffer that holds one block. Raises ValueError for another size."""
    view = memoryview(buffer).cast("B")
    if len(view) != size_bytes:
        raise ValueError(f"a buffer has {len(view)} bytes: pass one block, {size_bytes} bytes")
    return view
