"""Messages between the daemon and a copy process, typed structs in MessagePack.

Both ends run the same version of this file. A message that does not decode is a bug; the process
that receives one ends the connection.
"""

from __future__ import annotations

import msgspec


class Map(msgspec.Struct, array_like=True, tag=1):
    """Map and pin a segment for later copies; its frame carries the descriptor."""

    serial: int
    size_bytes: int


class Unpin(msgspec.Struct, array_like=True, tag=2):
    """Call: unpin a segment before it is decommitted. It stays mapped."""

    serial: int


class Pin(msgspec.Struct, array_like=True, tag=3):
    """Pin a segment again after a decommit, when it is in use again."""

    serial: int


class Unmap(msgspec.Struct, array_like=True, tag=8):
    """Unmap a segment that no longer exists; it must not be pinned."""

    serial: int


class Bring(msgspec.Struct, array_like=True, tag=4):
    """A descriptor for the next Attach: first the gate, then the exports' parts in order."""


class Export(msgspec.Struct, array_like=True):
    """An engine's allocation; a part is (offset, size in bytes)."""

    kind: int
    device: bytes
    size_bytes: int
    handle: bytes
    parts: list[tuple[int, int]]


class Attach(msgspec.Struct, array_like=True, tag=5):
    """Call: open and verify allocations; the reply's text says how they are copied."""

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
    """Call: end the copies of an attachment, and close what no other attachment uses."""

    attachment: int


class Copy(msgspec.Struct, array_like=True, tag=7):
    """Call: copy between slots and pages; the reply has the blocks copied, and why not all.

    `serials` (u32) and `offsets` (u64) give the segment and offset of each block's slot. `job`
    is the load's number at the attachment's gate.
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
    """Daemon to process. `call` is 0 for a message without a reply."""

    call: int
    ask: Ask


class Reply(msgspec.Struct, array_like=True):
    """Process to daemon; a reply with `call` 0 only reports pinning.

    `pinned_bytes` of `mapped_bytes` are page-locked; `problem` says why the rest is not.
    """

    call: int
    ok: bool = True
    value: int = 0
    text: str = ""
    pinned_bytes: int = 0
    mapped_bytes: int = 0
    problem: str = ""
