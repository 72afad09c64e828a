"""The contract between tierd and a storage tier, and the header of a stored block.

A backend stores blocks by key and reads them into memory that the caller passes.
It knows no leases, sessions, deadlines, engines or policies.
`tierd.testing.BackendSuite` checks the contract on a real backend.
"""

from __future__ import annotations

import enum
import struct
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import msgspec
import xxhash

from tierd.errors import ConfigError
from tierd.types import CHECKSUM_BYTES, FORMAT_VERSION, HASH_BYTES, SCOPE_BYTES, BlockKey

HEADER_BYTES = 128
_MAGIC = b"TIERDBLK"
_HEADER = struct.Struct(f"<8sHHI{SCOPE_BYTES}s{HASH_BYTES}s{HASH_BYTES}s{CHECKSUM_BYTES}s")
_SEALED_BYTES = _HEADER.size
_SEAL_BYTES = 8
assert _SEALED_BYTES + _SEAL_BYTES == HEADER_BYTES


class Outcome(enum.Enum):
    """Result for one block of a batch. Outcomes except HIT and STORED leave no block behind."""

    HIT = "hit"
    """get_into: the slot holds the block, verified."""
    MISS = "miss"
    """get_into: the tier does not have the block."""
    CORRUPT = "corrupt"
    """get_into: identity, length or checksum is wrong in two reads of what is stored. The tier has
    dropped the block, unless that could have dropped a newer one, and counts it in
    `corrupt_total`."""
    STORED = "stored"
    """put_many: the block will be found, also by a process that starts after a SIGKILL."""
    PRESENT = "present"
    """put_many: the tier has the block already, or stores it for an earlier request of this batch
    or for another call that runs at the same time. A block is stored once."""
    REFUSED = "refused"
    """put_many: no room can be made for this block. A block larger than the whole capacity is
    refused before anything is evicted for it, and so is a block whose parent was refused in this
    batch: no lookup finds a block behind a hole."""
    ERROR = "error"
    """Either way: the world failed (I/O error, full or read-only disk, dead peer)."""


class BlockHeader(NamedTuple):
    """Identity and checksum, stored with each block so that a mix-up is detected."""

    key: BlockKey
    parent: bytes
    length: int
    checksum: bytes


class GetRequest(NamedTuple):
    """One block to read into the first `length` bytes of `view`, a whole slot, 4 KiB-aligned.

    The backend may write all of `view`; bytes past `length` have no meaning.
    """

    block_hash: bytes
    view: memoryview
    length: int


class PutRequest(NamedTuple):
    """One block to store: the first `length` bytes of `view`, a whole slot, 4 KiB-aligned."""

    block_hash: bytes
    parent: bytes
    checksum: bytes
    view: memoryview
    length: int


class GetResult(NamedTuple):
    """Outcome of one GetRequest; `header` is set if and only if the outcome is HIT."""

    outcome: Outcome
    header: BlockHeader | None = None


@dataclass(slots=True)
class BackendStats:
    """The current content of a tier. Bytes include headers and padding."""

    blocks: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    index_complete: bool = True
    trouble: str = ""
    """Why a block last had the outcome ERROR, one line for operators; empty if none had."""


SCANNED_MAX = 1024
"""Maximum headers in one step of a scan: 110 KiB in a worker's frame."""


class Scanned(NamedTuple):
    """One step of a scan: some headers, or none if the step found no block."""

    headers: Sequence[BlockHeader] = ()
    unread: Sequence[str] = ()
    """Descriptions of places that could not be read and may hold blocks."""


EXAMPLES_MAX = 3
"""Places that a report names per kind of finding; further places are only counted."""


@dataclass(slots=True)
class Findings:
    """Findings of one kind of a check: how many, how many repaired, and example places."""

    count: int = 0
    repaired: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, place: str, *, repaired: bool) -> None:
        """Count one finding."""
        self.count += 1
        self.repaired += repaired
        if len(self.examples) < EXAMPLES_MAX:
            self.examples.append(place)


@dataclass(slots=True)
class CheckReport:
    """The result of an offline check of a tier. Foreign files are reported, but not as damage."""

    blocks: int = 0
    """Undamaged blocks, which the tier will serve."""
    read_bytes: int = 0
    damage: dict[str, Findings] = field(default_factory=dict)
    foreign: Findings = field(default_factory=Findings)

    @property
    def found(self) -> int:
        """Number of damaged places, repaired or not."""
        return sum(each.count for each in self.damage.values())

    @property
    def left(self) -> int:
        """Number of damaged places that were not repaired."""
        return sum(each.count - each.repaired for each in self.damage.values())


Tell = Callable[[int, int], None]
"""Progress callback: bytes checked so far, and bytes in total."""


def checksum(payload: memoryview | bytes) -> bytes:
    """Return the xxh3-128 of a block's payload, big-endian, as stored."""
    return xxhash.xxh3_128_digest(payload)


def pack_header(header: BlockHeader) -> bytes:
    """Return the HEADER_BYTES of a header: its fields, then the xxh3-64 of the fields."""
    assert len(header.key.namespace) == SCOPE_BYTES
    assert len(header.key.block_hash) == HASH_BYTES
    assert len(header.parent) == HASH_BYTES
    assert len(header.checksum) == CHECKSUM_BYTES
    sealed = _HEADER.pack(
        _MAGIC,
        FORMAT_VERSION,
        0,
        header.length,
        header.key.namespace,
        header.key.block_hash,
        header.parent,
        header.checksum,
    )
    return sealed + xxhash.xxh3_64_digest(sealed)


def unpack_header(raw: bytes | memoryview) -> BlockHeader | None:
    """Return the header in the first HEADER_BYTES of `raw`, or None if it is not valid."""
    if len(raw) < HEADER_BYTES:
        return None
    sealed = bytes(raw[:_SEALED_BYTES])
    if xxhash.xxh3_64_digest(sealed) != bytes(raw[_SEALED_BYTES:HEADER_BYTES]):
        return None
    magic, version, flags, length, namespace, block_hash, parent, digest = _HEADER.unpack(sealed)
    if magic != _MAGIC or version != FORMAT_VERSION or flags != 0:
        return None
    return BlockHeader(BlockKey(namespace, block_hash), parent, length, digest)


def match_header(
    raw_header: bytes | memoryview, key: BlockKey, length: int, digest: bytes
) -> BlockHeader | None:
    """Return the header if it has this key, length and checksum, else None."""
    header = unpack_header(raw_header)
    if header is None or header.key != key or header.length != length:
        return None
    return header if header.checksum == digest else None


def verify_block(
    raw_header: bytes | memoryview, key: BlockKey, payload: memoryview, length: int
) -> BlockHeader | None:
    """Return the header if it has this key and length and the payload's checksum, else None."""
    return match_header(raw_header, key, length, checksum(payload[:length]))


class Backend(ABC):
    """A storage tier. Methods are called from one event loop, concurrently.

    Per-block trouble is an Outcome of that block and touches no other. BackendError
    is for the tier as a whole. Views lie in a `tierd.shared_memory.mapping.SharedMapping`. A call
    that is cancelled returns only when it no longer touches the views it was given: the caller
    owns them again after that. Deadlines are the caller's, who cancels: a backend that
    talks to a peer must let go soon, however silent the peer is.

    Batches: a call of get_into or put_many has one namespace, and at most 32 blocks or 8 MiB of
    slots; a larger block comes alone. A call with hashes has at most 16,384 of them. Any list may
    be empty, and may name a block twice.

    Eviction, where a backend keeps a capacity itself, never makes a hole in a prefix: it takes
    only blocks that are no parent of another block held, the least recently used first, and
    neither blocks of a batch in progress nor their parents. Uses are reading a block (get_into),
    storing it again and use_many. `tierd.chain.ChainIndex` keeps such an order. `used_bytes` of
    stats() never exceeds the capacity. A backend whose server evicts only stops storing.

    A `namespace` is a scope here, SCOPE_BYTES that mean nothing to a backend. Marks are short
    texts of MARK_CHARS that it keeps beside the blocks, and never drops by itself: they say which
    scopes hold good (`tierd.core.l3.epochs`).
    """

    Options: ClassVar[type[msgspec.Struct]]
    """Keys of this backend's `[[storage]]` table, besides the common keys."""

    in_worker: ClassVar[bool] = False
    """Whether the daemon runs the backend in a separate process: for backends that burn CPU in
    Python, whose threads would delay the daemon's loop."""

    lets_go_s: ClassVar[float] = 1.0
    """Seconds that a cancelled call may take to release its views before that process is killed.
    Until then the daemon cannot use their slots. Longer if a restart is expensive."""

    checks_offline: ClassVar[bool] = False
    """Whether `check` works, because the tier's data is on this machine's disks."""

    damage_texts: ClassVar[Mapping[str, str]] = {}
    """For each kind of damage in a report of `check`: the text that people read."""

    counters: dict[str, int]
    """Events since the start, counted by name. Each name ends in `_total` and is there from the
    start. Every backend has `corrupt_total`, the blocks that get_into answered with CORRUPT; other
    names are its own, and metrics show them as `tierd_tier_events_total`."""

    @property
    def shared(self) -> bool:
        """Whether other nodes share the tier's blocks, and lose blocks that this node drops."""
        return False

    @property
    def use_every_s(self) -> float:
        """Minimum interval between reports of uses of the same blocks; longer if use_many is
        expensive. Above a minute, use_many is not called when blocks leave host memory or the
        daemon stops."""
        return 1.0

    @property
    def place(self) -> str:
        """Identity of the storage, so that another storage is not taken for it; has no secret."""
        return ""

    @classmethod
    @abstractmethod
    def from_options(cls, options: msgspec.Struct) -> Backend:
        """Return a backend for validated options; opens nothing yet. Raises ConfigError."""

    @classmethod
    def at(cls, path: str) -> msgspec.Struct | None:
        """Return options to check the tier at `path`, or None if tiers have no directory."""
        return None

    @classmethod
    def check(
        cls, options: msgspec.Struct, *, repair: bool, quick: bool, tell: Tell
    ) -> CheckReport:
        """Check all blocks of a tier that no process has open. Blocking, with threads.

        `quick` skips payloads, `repair` drops damaged blocks. Raises ConfigError if the tier
        cannot be checked: a process has it open, or there is no tier.
        """
        raise ConfigError(
            "this type of tier has no offline check; `tierd scrub` reads and verifies all blocks"
        )

    def refusals(self, is_own: Callable[[int], bool]) -> Iterable[str]:
        """Return the reasons for which open() would raise ConfigError; changes nothing. Blocking.

        `is_own(pid)` says whether a process that has the tier open may be ignored.
        """
        return ()

    @abstractmethod
    async def open(self) -> None:
        """Make the tier ready; long scans continue in the background.

        Raises ConfigError for errors that need a restart: the daemon does not start. Raises
        BackendError for other errors: the daemon runs without the tier and opens it again later.
        """

    @abstractmethod
    async def close(self) -> None:
        """Finish calls in flight and release all resources; idempotent."""

    @abstractmethod
    async def contains_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        """Return for each hash whether get_into would probably hit; no disk access per hash.

        Hashes come in prefix order, parents first; a tier with expensive lookups may bisect a
        long list. Raises BackendError if a server does not answer: False would state that the
        tier lacks the block.
        """

    async def use_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        """Count uses of blocks in host memory as if they had been read from the tier.

        Returns False for a hash only if the tier certainly lacks the block now; the daemon may
        then write it again. Hashes come in prefix order, parents first. Reads no block. This
        default only looks the blocks up, for a tier that does not order blocks by use.
        """
        return await self.contains_many(namespace, hashes)

    @abstractmethod
    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        """Read blocks into their slots and verify them (`verify_block`). One result per request, in
        order. A block of another length than asked for is CORRUPT."""

    @abstractmethod
    async def put_many(self, namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
        """Store blocks with their headers (`pack_header`). One outcome per request, in order.

        A request's checksum is given; the bytes need not be checked again. A block may come
        without its parent.
        """

    @abstractmethod
    async def delete_many(self, namespace: bytes, hashes: Sequence[bytes]) -> int:
        """Drop blocks and return how many; a process that starts after a SIGKILL finds none either.

        A power loss may bring blocks back, and so may places that a scan reports as unread.
        Raises BackendError if some blocks could not be dropped.
        """

    @abstractmethod
    def scan(self) -> AsyncIterator[Scanned]:
        """Yield the headers of all blocks, in any order; blocks stored or dropped meanwhile may
        appear.

        Each step takes far less time than a call's deadline, whatever other data the storage
        has. Places that cannot be read are reported in `unread`, and the scan continues. A scan
        that ends without `unread` and without BackendError has seen all blocks.
        """

    @abstractmethod
    async def marks(self) -> list[str]:
        """Return all marks. Raises BackendError if the list may be incomplete: a missing mark
        would bring flushed blocks back."""

    @abstractmethod
    async def add_mark(self, mark: str) -> None:
        """Add a mark. When this returns, the mark survives a power loss as well as anything in the
        tier does. A mark that already exists is no error. After a BackendError it may exist."""

    @abstractmethod
    async def drop_marks(self, marks: Sequence[str]) -> None:
        """Remove marks; missing marks are no error."""

    async def reload(self) -> None:
        """Read data outside of the configuration again, such as rotated keys. It applies to calls
        that begin from now on. Raises BackendError; then nothing has changed."""
        return

    @abstractmethod
    def stats(self) -> BackendStats:
        """Return the current content of the tier; cheap."""
