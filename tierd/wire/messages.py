"""The messages of the protocol, as typed values. PROTOCOL.md is the specification.

A message is encoded as a MessagePack array: its number, then its fields in order. `decode` checks
the type of every field, so that all other code gets the annotated types only.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple, get_origin, get_type_hints

import msgpack

from tierd.errors import RemoteProtocolError
from tierd.types import HASH_BYTES
from tierd.types import NEVER as NEVER

PROTOCOL_VERSION: Final = 5

KEYS_PER_CALL_MAX: Final = 16_384
"""Most hashes in one call: 512 KiB, 3 ms of the daemon's loop. Callers cut longer prefixes."""

HANDLES_PER_CALL_MAX: Final = 64
"""Most handles in one ACQUIRE or HINT: one per rank of an engine on one node."""

EVENTS_MAX: Final = 64
"""Most events of an attachment; a few in rotation are enough: a later record only waits longer."""

EXPLAINED_MAX: Final = 1024
"""Most hashes in one EXPLAIN."""

LOADED_MAX: Final = 1 << 24
"""Most blocks in one LOADED; a step of an engine admits a few thousand."""

LOADED_US_MAX: Final = 1 << 40
"""Longest saved computing time in one LOADED: twelve days."""

TAUGHT_MAX: Final = 1024
"""Most hashes in one TEACH: 1 ms of the daemon's loop."""

SLOT_PRESENT: Final = 0xFFFF_FFFE
"""RESERVED: the block is already in L2; do not write it."""

SLOT_REFUSED: Final = 0xFFFF_FFFF
"""RESERVED: no room, or another session is writing the block."""

_UINT_MAX: Final = (1 << 63) - 1


class Warmth(enum.IntEnum):
    """The outcome of a WARM for one block."""

    HERE = 0
    """It was already in the target."""
    BROUGHT = 1
    NOWHERE = 2
    """No tier has it."""
    NO_ROOM = 3
    """The target is full of blocks that are worth more, leased, or kept by hints."""
    AWAY = 4
    """A tier that may have it accepted no reads, or failed."""
    CORRUPT = 5
    """Its bytes in a tier or in L2 were damaged."""
    LATE = 6
    """The deadline passed, or the WARM was cancelled."""
    BARRED = 7
    """It is being flushed."""
    UNWRITTEN = 8
    """The storage tier did not take it."""


class Hello(NamedTuple):
    version: int
    client: str


class Register(NamedTuple):
    call: int
    namespace: dict[str, object]
    want_segments: bool


class Acquire(NamedTuple):
    """`own` leading blocks are in the engine's own cache: they count as used, without a lease."""

    call: int
    handles: list[int]
    hashes: bytes
    deadline_ms: int
    request: int
    waited_ms: int
    prefill_tokens_per_s: int
    own: int = 0


class Ready(NamedTuple):
    """The engine could compute the request of an ACQUIRE now."""

    call: int


class Loaded(NamedTuple):
    """Blocks that requests wanted, and loaded instead of computing them, since the last LOADED.

    `sources` counts the loaded blocks by source: first host memory, then each storage tier.
    `prefill_us` is the estimated time to compute the loaded blocks.
    """

    handles: list[int]
    wanted: int
    sources: list[int]
    prefill_us: int


class Release(NamedTuple):
    lease: int


class Cancel(NamedTuple):
    call: int


class Reserve(NamedTuple):
    call: int
    handle: int
    hashes: bytes
    parents: bytes


class Commit(NamedTuple):
    call: int
    reservation: int
    blocks: int


class Abort(NamedTuple):
    reservation: int


class Status(NamedTuple):
    call: int


class Hint(NamedTuple):
    """The engine's hints for a prefix; `priority` is 0 (low), 1 or 2 (high)."""

    handles: list[int]
    hashes: bytes
    pin_ms: int
    next_use_ms: int
    priority: int
    session_ended: bool


class Export(NamedTuple):
    """An allocation of the engine, under a number that the client chooses; `device` is a UUID."""

    export: int
    kind: int
    device: bytes
    size_bytes: int
    handle: bytes


class Part(NamedTuple):
    """A stretch of an export with its own descriptor, which comes with this message."""

    export: int
    offset: int
    size_bytes: int


class DropExport(NamedTuple):
    export: int


class Attach(NamedTuple):
    """The layout of a handle's blocks in exports; comes with the gate's memfd."""

    call: int
    handle: int
    exports: list[int]
    runs: bytes
    block_stride: int
    block_count: int
    events: bytes
    probe_block: int
    probe_digest: bytes
    layer_ends: list[int]


class Detach(NamedTuple):
    call: int
    attachment: int


class Store(NamedTuple):
    """Copy pages into a reservation's granted slots, in order."""

    call: int
    attachment: int
    reservation: int
    blocks: bytes
    event: int
    value: int


class Load(NamedTuple):
    """Copy a lease's slots into the engine's pages."""

    call: int
    attachment: int
    slots: bytes
    blocks: bytes
    expires_ns: int
    job: int
    event: int
    value: int


class Flush(NamedTuple):
    """Drop the blocks of all namespaces whose digest, in hex, begins with `prefix`: from L2 if
    `host`, and from the storage tiers `tiers`, numbered as in STATUS."""

    call: int
    prefix: str
    host: bool
    tiers: list[int]


class Scrub(NamedTuple):
    """Read and verify all blocks of tiers; no tiers: all tiers that no other node uses."""

    call: int
    tiers: list[int]
    bytes_per_s: int


class StopScrub(NamedTuple):
    call: int


class Describe(NamedTuple):
    """Ask for a namespace by its digest."""

    call: int
    digest: bytes


class Warm(NamedTuple):
    """Bring blocks of a handle into L2 (`target` 0), or into storage tier `target` - 1, at lower
    priority than requests. Parents come before their children. `bytes_per_s` 0: no limit.
    `verify`: also verify the checksums of blocks that are already in the target."""

    call: int
    handle: int
    hashes: bytes
    target: int
    deadline_ms: int
    bytes_per_s: int
    pin_ms: int
    verify: bool


class Teach(NamedTuple):
    """Earlier uses of blocks, known from another source: their number, and the last one's age."""

    handle: int
    hashes: bytes
    uses: bytes
    ages_s: bytes


class Explain(NamedTuple):
    """Ask where blocks of a namespace are, and why they are not elsewhere."""

    call: int
    digest: bytes
    hashes: bytes


class Inventory(NamedTuple):
    """Ask for the next page of a namespace's blocks in L2 (`source` 0), or in storage tier
    `source` - 1."""

    call: int
    digest: bytes
    source: int


class Unregister(NamedTuple):
    """The client no longer uses a handle, and has unmapped its segments. `worthless`: no session
    will ask for the namespace's blocks again."""

    handle: int
    worthless: bool


class Welcome(NamedTuple):
    version: int
    epoch: bytes
    server: str
    lease_ttl_ms: int


class Registered(NamedTuple):
    call: int
    handle: int
    slot_bytes: int
    slots_per_segment: int


class Segment(NamedTuple):
    handle: int
    segment: int


class Guard(NamedTuple):
    """A message without fields, which brings a descriptor."""


class Acquired(NamedTuple):
    """`sources` has one byte per block: 0 for host memory, else the number of the storage tier
    that it was promoted from, plus 1. Empty: all blocks were in host memory."""

    call: int
    lease: int
    blocks: int
    slots: bytes
    expires_ns: int
    sources: bytes = b""


class Reserved(NamedTuple):
    call: int
    reservation: int
    slots: bytes


class Committed(NamedTuple):
    call: int
    blocks: int


class StatusReply(NamedTuple):
    call: int
    body: dict[str, object]


class Attached(NamedTuple):
    """`how` describes the way of copying, for a log."""

    call: int
    attachment: int
    how: str


class Detached(NamedTuple):
    """The daemon no longer copies. `call` 0: the client did not ask, the copy process is gone."""

    call: int
    attachment: int
    reason: str


class Copied(NamedTuple):
    """The first `blocks` blocks of a STORE or LOAD are copied; `reason` says why not all."""

    call: int
    blocks: int
    reason: str


class Progress(NamedTuple):
    """The progress of a FLUSH or SCRUB; more PROGRESS, and then DONE, follow."""

    call: int
    body: dict[str, object]


class Done(NamedTuple):
    """The result of a FLUSH or SCRUB."""

    call: int
    body: dict[str, object]


class Described(NamedTuple):
    call: int
    namespace: dict[str, object]


class Warmed(NamedTuple):
    """The result of a WARM: one byte per block, a `Warmth`, and its totals in `body`."""

    call: int
    outcomes: bytes
    body: dict[str, object]


class Explained(NamedTuple):
    call: int
    body: dict[str, object]


class Listed(NamedTuple):
    """A page of an INVENTORY; `more`: another INVENTORY returns the next page."""

    call: int
    more: bool
    hashes: bytes
    parents: bytes
    uses: bytes
    ages_s: bytes


class Error(NamedTuple):
    """A failed call; `call` 0: the session has failed, and ends with this message."""

    call: int
    reason: str


FromClient = (
    Hello
    | Register
    | Acquire
    | Release
    | Cancel
    | Reserve
    | Commit
    | Abort
    | Status
    | Ready
    | Hint
    | Export
    | Part
    | DropExport
    | Attach
    | Detach
    | Store
    | Load
    | Flush
    | Scrub
    | StopScrub
    | Describe
    | Warm
    | Teach
    | Explain
    | Inventory
    | Unregister
    | Loaded
)
FromDaemon = (
    Welcome
    | Registered
    | Segment
    | Guard
    | Acquired
    | Reserved
    | Committed
    | StatusReply
    | Error
    | Attached
    | Detached
    | Copied
    | Progress
    | Done
    | Described
    | Warmed
    | Explained
    | Listed
)
Message = FromClient | FromDaemon

_NUMBERS: Final[dict[type[Message], int]] = {
    Hello: 1,
    Register: 2,
    Acquire: 3,
    Release: 4,
    Cancel: 5,
    Reserve: 6,
    Commit: 7,
    Abort: 8,
    Status: 9,
    Ready: 10,
    Hint: 11,
    Export: 12,
    Part: 13,
    DropExport: 14,
    Attach: 15,
    Detach: 16,
    Store: 17,
    Load: 18,
    Flush: 19,
    Scrub: 20,
    StopScrub: 21,
    Describe: 22,
    Warm: 23,
    Teach: 24,
    Explain: 25,
    Inventory: 26,
    Unregister: 27,
    Loaded: 28,
    Welcome: 64,
    Registered: 65,
    Segment: 66,
    Acquired: 67,
    Reserved: 68,
    Committed: 69,
    StatusReply: 70,
    Error: 71,
    Attached: 72,
    Detached: 73,
    Copied: 74,
    Guard: 75,
    Progress: 76,
    Done: 77,
    Described: 78,
    Warmed: 79,
    Explained: 80,
    Listed: 81,
}

WITH_DESCRIPTOR: Final = frozenset({Segment, Guard, Part, Attach})
"""Messages that bring one descriptor; all other messages bring none."""


class _Shape(NamedTuple):
    """The required shape of a message's array: the types of its number and fields, in order."""

    cls: type[Message]
    types: list[type]
    ints: Callable[[list[Any]], tuple[int, ...]]
    lists: tuple[int, ...]


def _shape(cls: type[Message]) -> _Shape:
    types = [int, *(get_origin(kind) or kind for kind in get_type_hints(cls).values())]
    places = [place for place, kind in enumerate(types) if kind is int]
    # Place 0 appears twice, because itemgetter with a single place returns no tuple.
    ints = itemgetter(0, *places)
    return _Shape(cls, types, ints, tuple(i for i, kind in enumerate(types) if kind is list))


_SHAPES: Final = {number: _shape(cls) for cls, number in _NUMBERS.items()}

FROM_CLIENT: Final = frozenset(range(1, 29))
FROM_DAEMON: Final = frozenset(range(64, 82))

_pack: Final[Callable[[object], bytes]] = msgpack.Packer(use_bin_type=True).pack


def encode(message: Message) -> bytes:
    """Return the frame payload for `message`."""
    return _pack((_NUMBERS[type(message)], *message))


def decode(payload: bytes | bytearray | memoryview, accepted: frozenset[int]) -> Message:
    """Return the message in `payload`; its number must be in `accepted`.

    Raises RemoteProtocolError with the reason; the whole payload is then discarded.
    """
    try:
        value = msgpack.unpackb(payload, raw=False, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException, TypeError) as error:
        raise RemoteProtocolError(f"not MessagePack: {type(error).__name__}") from error
    if type(value) is not list or not value or type(value[0]) is not int:
        raise RemoteProtocolError("a message is an array that starts with its number")
    if value[0] not in accepted:
        raise RemoteProtocolError(f"message number {value[0]!r:.40} is unknown, or out of order")
    cls, types, ints, lists = shape = _SHAPES[value[0]]
    if [*map(type, value)] != types:
        raise RemoteProtocolError(_mismatch(shape, value))
    numbers = ints(value)
    if min(numbers) < 0 or max(numbers) > _UINT_MAX:
        wrong = min(numbers) if min(numbers) < 0 else max(numbers)
        raise RemoteProtocolError(
            f"{cls.__name__} has the integer {wrong}: must be 0 to {_UINT_MAX}"
        )
    for place in lists:
        if not all(type(x) is int and 0 <= x <= _UINT_MAX for x in value[place]):
            raise RemoteProtocolError(
                f"{_field(shape, place)} must hold integers of 0 to {_UINT_MAX}"
            )
    del value[0]
    return cls._make(value)


def _field(shape: _Shape, place: int) -> str:
    return f"{shape.cls.__name__}.{shape.cls._fields[place - 1]}"


def _mismatch(shape: _Shape, value: list[object]) -> str:
    if len(value) != len(shape.types):
        return f"{shape.cls.__name__} has {len(shape.types) - 1} fields, not {len(value) - 1}"
    for place, (field, kind) in enumerate(zip(value, shape.types, strict=True)):
        if type(field) is not kind:
            return f"{_field(shape, place)} is {type(field).__name__}, not {kind.__name__}"
    raise AssertionError("the value fits its shape")


def split_hashes(blob: bytes) -> tuple[bytes, ...]:
    """Split joined hashes. Raises RemoteProtocolError on a wrong or excessive length."""
    count, rest = divmod(len(blob), HASH_BYTES)
    if rest or count > KEYS_PER_CALL_MAX:
        raise RemoteProtocolError(
            f"hashes have {len(blob)} bytes: must be {HASH_BYTES} each, at most {KEYS_PER_CALL_MAX}"
        )
    # One unpack of 1,000 hashes takes 11 µs; slicing takes 52 µs.
    return struct.unpack(f"{HASH_BYTES}s" * count, blob)


def pack_handles(handles: Sequence[bytes]) -> bytes:
    """Join event handles, each after its length as one byte."""
    return b"".join([bytes([len(handle)]) + handle for handle in handles])


def unpack_handles(blob: bytes) -> list[bytes]:
    """Undo `pack_handles`. Raises RemoteProtocolError on a wrong length."""
    handles: list[bytes] = []
    at = 0
    while at < len(blob):
        end = at + 1 + blob[at]
        if end > len(blob) or len(handles) == EVENTS_MAX:
            raise RemoteProtocolError(
                f"event handles must be at most {EVENTS_MAX}, each after its length as one byte"
            )
        handles.append(blob[at + 1 : end])
        at = end
    return handles


def pack_slots(slots: Sequence[int]) -> bytes:
    """Join slot numbers, or other u32, as little-endian."""
    return struct.pack(f"<{len(slots)}I", *slots)


def unpack_slots(blob: bytes) -> tuple[int, ...]:
    """Split joined little-endian u32. Raises RemoteProtocolError on a wrong length."""
    count, rest = divmod(len(blob), 4)
    if rest:
        raise RemoteProtocolError(f"slots have {len(blob)} bytes: must be a multiple of 4")
    return struct.unpack(f"<{count}I", blob)
