"""What the daemon and a copy process tell each other: typed messages in MessagePack.

Both ends are one version of this file, started together; what does not fit it is a bug, and the
process that meets one gives the other up.
"""

from __future__ import annotations

import msgspec


class Map(msgspec.Struct, array_like=True, tag=1):
    """A segment that copies will name, to be pinned; its frame carries the descriptor."""

    serial: int
    size_bytes: int


class Unpin(msgspec.Struct, array_like=True, tag=2):
    """Call: unpin a segment whose memory is to be given back. It stays mapped."""

    serial: int


class Pin(msgspec.Struct, array_like=True, tag=3):
    """Pin a segment again, which is filled again."""

    serial: int


class Unmap(msgspec.Struct, array_like=True, tag=8):
    """Forget a segment that is no more; it is not pinned."""

    serial: int


class Bring(msgspec.Struct, array_like=True, tag=4):
    """A descriptor for the next Attach, in the order of its gate and its exports' parts."""


class Export(msgspec.Struct, array_like=True):
    """An engine's allocation; a part is (offset, size in bytes)."""

    kind: int
    device: bytes
    size_bytes: int
    handle: bytes
    parts: list[tuple[int, int]]


class Attach(msgspec.Struct, array_like=True, tag=5):
    """Call: open allocations, check and verify them; answered by how copies go."""

    attachment: int
    exports: list[Export]
    runs: bytes
    block_stride: int
    block_count: int
    block_bytes: int
    events: list[bytes]
    probe_block: int
    probe_digest: bytes
    layer_ends: list[int]


class Detach(msgspec.Struct, array_like=True, tag=6):
    """Call: copy no more for an attachment, and close what it alone had open."""

    attachment: int


class Copy(msgspec.Struct, array_like=True, tag=7):
    """Call: copy between slots and pages; answered by how many blocks, and why not all.

    `serials` are u32 and `offsets` u64, one a block: where its slot lies. `job` is a load's
    place in the attachment's gate.
    """

    attachment: int
    is_load: bool
    serials: bytes
    offsets: bytes
    blocks: bytes
    job: int
    event: int
    value: int


Ask = Map | Unpin | Pin | Unmap | Bring | Attach | Detach | Copy


class Request(msgspec.Struct, array_like=True):
    """Daemon to process. `call` is 0 for what gets no answer."""

    call: int
    ask: Ask


class Reply(msgspec.Struct, array_like=True):
    """Process to daemon; a `call` of 0 has only the report.

    `pinned_bytes` of `mapped_bytes` are page-locked by now, `problem` says why no more will be.
    """

    call: int
    ok: bool = True
    value: int = 0
    text: str = ""
    pinned_bytes: int = 0
    mapped_bytes: int = 0
    problem: str = ""
