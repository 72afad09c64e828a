"""The messages of the protocol, as typed values. PROTOCOL.md is the specification.

A message travels as a MessagePack array: its number, then its fields in order.
Every field is checked by type on arrival, so that nothing past this file sees
anything but what the annotations say.
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
"""Hashes in one call: 512 KiB, 3 ms of the daemon's loop. A longer prefix is cut by the caller."""

HANDLES_PER_CALL_MAX: Final = 64
"""Ranks of one engine on one node that an ACQUIRE or a HINT may name."""

EVENTS_MAX: Final = 64
"""Events of an attachment; a few in turn are enough, since a later record only waits longer."""

EXPLAINED_MAX: Final = 1024
"""Hashes in one EXPLAIN."""

LOADED_MAX: Final = 1 << 24
"""Blocks in one LOADED; a step of an engine admits a few thousand."""

LOADED_US_MAX: Final = 1 << 40
"""Time of computing in one LOADED: twelve days."""

TAUGHT_MAX: Final = 1024
"""Hashes in one TEACH: 1 ms of the daemon's loop."""

SLOT_PRESENT: Final = 0xFFFF_FFFE
"""RESERVED: the block is there already; nothing to write."""

SLOT_REFUSED: Final = 0xFFFF_FFFF
"""RESERVED: no room, or another session is writing the block just now."""

_UINT_MAX: Final = (1 << 63) - 1


class Warmth(enum.IntEnum):
    """What a WARM came to for a block."""

    HERE = 0
    """It was there already."""
    BROUGHT = 1
    NOWHERE = 2
    """No tier has it."""
    NO_ROOM = 3
    """What is there instead is worth more, leased, or kept."""
    AWAY = 4
    """A tier that may have it took no reads, or failed."""
    CORRUPT = 5
    """What a tier, or L2, had of it was not what it had been."""
    LATE = 6
    """The deadline passed, or it was called off."""
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
    """`own` leading blocks are in the engine's own cache: they are used, and not wanted."""

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
    """What engines did with answers, since they said so last: of the `wanted` blocks that requests
    asked for, `sources` are the ones that they compute on instead of computing them. The first
    number is what host memory had, each further one what a storage tier had brought.
    `prefill_us` is how long computing blocks that were loaded would have taken."""

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
    """What the engine says of a prefix; `priority` is 0 (low), 1 or 2 (high)."""

    handles: list[int]
    hashes: bytes
    pin_ms: int
    next_use_ms: int
    priority: int
    session_ended: bool


class Export(NamedTuple):
    """An allocation of the engine's, under a number of its choice; `device` is its UUID."""

    export: int
    kind: int
    device: bytes
    size_bytes: int
    handle: bytes


class Part(NamedTuple):
    """A stretch of an export that has a descriptor of its own, which comes with it."""

    export: int
    offset: int
    size_bytes: int


class DropExport(NamedTuple):
    export: int


class Attach(NamedTuple):
    """Where the blocks of a handle lie in exports; comes with the gate's memfd."""

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
    """Copy slots into pages."""

    call: int
    attachment: int
    slots: bytes
    blocks: bytes
    expires_ns: int
    job: int
    event: int
    value: int


class Flush(NamedTuple):
    """Drop blocks of the namespaces whose digest, in hex, begins with `prefix`: those of L2, if
    `host`, and those of storage tiers, by their numbers in STATUS."""

    call: int
    prefix: str
    host: bool
    tiers: list[int]


class Scrub(NamedTuple):
    """Read and verify what tiers hold; no tiers: those that are this node's own."""

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
    """Bring blocks of a handle into L2 (`target` 0), or into the storage tier of number
    `target` - 1, behind all requests. Parents come before their children. `bytes_per_s` 0: no
    limit. `verify`: read what is there already, and see its checksums."""

    call: int
    handle: int
    hashes: bytes
    target: int
    deadline_ms: int
    bytes_per_s: int
    pin_ms: int
    verify: bool


class Teach(NamedTuple):
    """What is known of the uses of blocks from elsewhere: how often, and how long ago."""

    handle: int
    hashes: bytes
    uses: bytes
    ages_s: bytes


class Explain(NamedTuple):
    """Ask where blocks of a namespace are, and why not where they are not."""

    call: int
    digest: bytes
    hashes: bytes


class Inventory(NamedTuple):
    """Ask for the next page of all that L2 (`source` 0), or the storage tier of number
    `source` - 1, has of a namespace."""

    call: int
    digest: bytes
    source: int


class Unregister(NamedTuple):
    """The client uses a handle no more, and has nothing of it mapped; `worthless` says that nobody
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
    """Comes with a descriptor, and says nothing else."""


class Acquired(NamedTuple):
    """`sources` has a byte a block: 0 if host memory had it, else the number of the storage tier
    that brought it + 1. It is empty if host memory had them all."""

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
    """`how` says which way copies go, for a log."""

    call: int
    attachment: int
    how: str


class Detached(NamedTuple):
    """Nothing is copied any more. `call` 0: nobody has asked, the copying process is gone."""

    call: int
    attachment: int
    reason: str


class Copied(NamedTuple):
    """The first so many blocks of a STORE or LOAD are copied; `reason` says why not all."""

    call: int
    blocks: int
    reason: str


class Progress(NamedTuple):
    """How far a FLUSH or SCRUB has got; more of them and DONE follow."""

    call: int
    body: dict[str, object]


class Done(NamedTuple):
    """What a FLUSH or SCRUB came to."""

    call: int
    body: dict[str, object]


class Described(NamedTuple):
    call: int
    namespace: dict[str, object]


class Warmed(NamedTuple):
    """What a WARM came to: a `Warmth` in a byte for each block, and what it took."""

    call: int
    outcomes: bytes
    body: dict[str, object]


class Explained(NamedTuple):
    call: int
    body: dict[str, object]


class Listed(NamedTuple):
    """A page of an INVENTORY; `more` of them follow if asked for."""

    call: int
    more: bool
    hashes: bytes
    parents: bytes
    uses: bytes
    ages_s: bytes


class Error(NamedTuple):
    """`call` 0: the session as a whole, which ends with this message."""

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
"""Messages that come with one descriptor; all others come with none."""


class _Shape(NamedTuple):
    """What a message's array must look like: the types of number and fields, in order."""

    cls: type[Message]
    types: list[type]
    ints: Callable[[list[Any]], tuple[int, ...]]
    lists: tuple[int, ...]


def _shape(cls: type[Message]) -> _Shape:
    types = [int, *(get_origin(kind) or kind for kind in get_type_hints(cls).values())]
    places = [place for place, kind in enumerate(types) if kind is int]
    # Place 0 twice: itemgetter of a single place gives no tuple.
    ints = itemgetter(0, *places)
    return _Shape(cls, types, ints, tuple(i for i, kind in enumerate(types) if kind is list))


_SHAPES: Final = {number: _shape(cls) for cls, number in _NUMBERS.items()}

FROM_CLIENT: Final = frozenset(range(1, 29))
FROM_DAEMON: Final = frozenset(range(64, 82))

_pack: Final[Callable[[object], bytes]] = msgpack.Packer(use_bin_type=True).pack


def encode(message: Message) -> bytes:
    """The payload of a frame for `message`."""
    return _pack((_NUMBERS[type(message)], *message))


def decode(payload: bytes | bytearray | memoryview, accepted: frozenset[int]) -> Message:
    """The message in `payload`, which must be one of the `accepted` numbers.

    Raises RemoteProtocolError with the reason; the payload has no more to say then.
    """
    try:
        value = msgpack.unpackb(payload, raw=False, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException, TypeError) as error:
        raise RemoteProtocolError(f"not MessagePack: {type(error).__name__}") from error
    if type(value) is not list or not value or type(value[0]) is not int:
        raise RemoteProtocolError("a message is an array that starts with its number")
    if value[0] not in accepted:
        raise RemoteProtocolError(f"message number {value[0]} is unknown here")
    cls, types, ints, lists = shape = _SHAPES[value[0]]
    if [*map(type, value)] != types:
        raise RemoteProtocolError(_mismatch(shape, value))
    numbers = ints(value)
    if min(numbers) < 0 or max(numbers) > _UINT_MAX:
        raise RemoteProtocolError(f"an integer of {cls.__name__} is out of range")
    for place in lists:
        if not all(type(x) is int and 0 <= x <= _UINT_MAX for x in value[place]):
            raise RemoteProtocolError(f"{_field(shape, place)} must hold integers")
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
    """The hashes in a blob of them; raises RemoteProtocolError on a wrong or excessive length."""
    count, rest = divmod(len(blob), HASH_BYTES)
    if rest or count > KEYS_PER_CALL_MAX:
        raise RemoteProtocolError(
            f"hashes must be at most {KEYS_PER_CALL_MAX} times {HASH_BYTES} bytes"
        )
    # One unpack of 1,000 hashes takes 11 us; slicing takes 52.
    return struct.unpack(f"{HASH_BYTES}s" * count, blob)


def pack_handles(handles: Sequence[bytes]) -> bytes:
    """Event handles, each after its length as one byte."""
    return b"".join([bytes([len(handle)]) + handle for handle in handles])


def unpack_handles(blob: bytes) -> list[bytes]:
    """Event handles from `pack_handles`; raises RemoteProtocolError on a wrong length."""
    handles: list[bytes] = []
    at = 0
    while at < len(blob):
        end = at + 1 + blob[at]
        if end > len(blob) or len(handles) == EVENTS_MAX:
            raise RemoteProtocolError(f"events must be at most {EVENTS_MAX}, each with its length")
        handles.append(blob[at + 1 : end])
        at = end
    return handles


def pack_slots(slots: Sequence[int]) -> bytes:
    """Slot numbers, or other u32, little-endian."""
    return struct.pack(f"<{len(slots)}I", *slots)


def unpack_slots(blob: bytes) -> tuple[int, ...]:
    """Slot numbers from little-endian u32; raises RemoteProtocolError on a wrong length."""
    count, rest = divmod(len(blob), 4)
    if rest:
        raise RemoteProtocolError("slots must be a multiple of 4 bytes")
    return struct.unpack(f"<{count}I", blob)
