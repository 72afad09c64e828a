"""The contract between tierd and a storage tier, and the header of a stored block.

A backend keeps blocks by key and gives them back into memory that it is handed.
It refuses to know leases, sessions, deadlines, engines or policies. What it must
do, `tierd.testing.BackendSuite` checks on the real thing.
"""

from __future__ import annotations

import enum
import struct
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
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
    """How one block of a batch fared. Everything but HIT and STORED leaves nothing behind."""

    HIT = "hit"
    """get_into: the slot holds the block, verified."""
    MISS = "miss"
    """get_into: the tier does not have the block."""
    CORRUPT = "corrupt"
    """get_into: identity, length or checksum is wrong, in two reads; the tier has dropped the
    block, unless it could not without risk to one that was stored since."""
    STORED = "stored"
    """put_many: the block will be found, also by a process that starts after a SIGKILL."""
    PRESENT = "present"
    """put_many: the tier has the block already."""
    REFUSED = "refused"
    """put_many: no room can be made for this block."""
    ERROR = "error"
    """Either way: the world failed (I/O error, full or read-only disk, dead peer)."""


class BlockHeader(NamedTuple):
    """What is stored beside each block, so that a mix-up fails on identity."""

    key: BlockKey
    parent: bytes
    length: int
    checksum: bytes


class GetRequest(NamedTuple):
    """One block to bring: `view` is a whole slot, 4 KiB-aligned, of which `length` bytes count.

    The backend may write all of `view`; bytes past `length` mean nothing.
    """

    block_hash: bytes
    view: memoryview
    length: int


class PutRequest(NamedTuple):
    """One block to keep: the first `length` bytes of `view`, a whole slot, 4 KiB-aligned."""

    block_hash: bytes
    parent: bytes
    checksum: bytes
    view: memoryview
    length: int


class GetResult(NamedTuple):
    """Outcome of one GetRequest; `header` is set exactly on a HIT."""

    outcome: Outcome
    header: BlockHeader | None = None


@dataclass(slots=True)
class BackendStats:
    """What a tier holds now. Bytes are what the tier occupies, headers and padding included."""

    blocks: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    index_complete: bool = True
    trouble: str = ""
    """Why blocks last had the outcome ERROR, in one line for operators; empty if none had it."""


SCANNED_MAX = 1024
"""Headers that one step of a scan gives at most: 110 KiB in a worker's frame."""


class Scanned(NamedTuple):
    """One step of a scan: some headers, or none if it has only come on."""

    headers: Sequence[BlockHeader] = ()
    unread: Sequence[str] = ()
    """What could not be looked at, in words: blocks may lie there."""


EXAMPLES_MAX = 3
"""Places that a report names of each kind of finding; the others are counted."""


@dataclass(slots=True)
class Findings:
    """What a check found of one kind: how often, how much of it was repaired, and where."""

    count: int = 0
    repaired: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, place: str, *, repaired: bool) -> None:
        """Take in one finding."""
        self.count += 1
        self.repaired += repaired
        if len(self.examples) < EXAMPLES_MAX:
            self.examples.append(place)


@dataclass(slots=True)
class CheckReport:
    """What an offline check of a tier found. Foreign files are told of, and are no damage."""

    blocks: int = 0
    """Sound blocks, which the tier will serve."""
    read_bytes: int = 0
    damage: dict[str, Findings] = field(default_factory=dict)
    foreign: Findings = field(default_factory=Findings)

    @property
    def found(self) -> int:
        """Damage, repaired or not."""
        return sum(each.count for each in self.damage.values())

    @property
    def left(self) -> int:
        """Damage that is still there."""
        return sum(each.count - each.repaired for each in self.damage.values())


Tell = Callable[[int, int], None]
"""Told now and then how many bytes have been looked at, of how many in all."""


def checksum(payload: memoryview | bytes) -> bytes:
    """xxh3-128 of a block's payload, big-endian, as stored."""
    return xxhash.xxh3_128_digest(payload)


def pack_header(header: BlockHeader) -> bytes:
    """HEADER_BYTES for `header`: fields, then the xxh3-64 of those fields."""
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
    """The header in the first HEADER_BYTES of `raw`, or None if it is not a sound one."""
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
    """The header if it belongs to `key` and to `length` bytes of checksum `digest`, else None."""
    header = unpack_header(raw_header)
    if header is None or header.key != key or header.length != length:
        return None
    return header if header.checksum == digest else None


def verify_block(
    raw_header: bytes | memoryview, key: BlockKey, payload: memoryview, length: int
) -> BlockHeader | None:
    """The header if it belongs to `key` and `payload[:length]` has its checksum, else None."""
    return match_header(raw_header, key, length, checksum(payload[:length]))


class Backend(ABC):
    """A storage tier. Methods are called from one event loop, concurrently.

    Per-block trouble is an Outcome of that block and touches no other. BackendError
    is for the tier as a whole. Views lie in a `tierd.shared_memory.mapping.SharedMapping`. A call
    that is cancelled returns only when it no longer touches the views it was given: the caller
    owns them again after that. Deadlines are the caller's, who cancels: a backend that
    talks to a peer must let go soon, however silent the peer is.

    A `namespace` is a scope here, SCOPE_BYTES that mean nothing to a backend. Marks are short
    texts of MARK_CHARS that it keeps beside the blocks, and never drops by itself: they say which
    scopes hold good (`tierd.core.epochs`).
    """

    Options: ClassVar[type[msgspec.Struct]]
    """Keys of this backend's `[[storage]]` table, beside the common ones."""

    in_worker: ClassVar[bool] = False
    """Whether the daemon runs it in a process of its own: for clients that burn Python's CPU,
    whose threads would hold up the daemon's loop."""

    lets_go_s: ClassVar[float] = 1.0
    """How long a cancelled call may take to let go of its views before that process is killed:
    their slots are lost to the daemon meanwhile. More where starting again costs much."""

    checks_offline: ClassVar[bool] = False
    """Whether `check` looks at what lies on this machine's disks."""

    counters: dict[str, int]
    """What happened since the start, by name; each name ends in `_total` and is always there."""

    @property
    def shared(self) -> bool:
        """Whether other nodes have the same blocks in it, and lose what this one drops."""
        return False

    @property
    def use_every_s(self) -> float:
        """How often at most the daemon tells of the same use: what a `use_many` costs. Above a
        minute, nothing is asked when blocks leave host memory or the daemon stops."""
        return 1.0

    @property
    def place(self) -> str:
        """Which storage it is, so that another one is not taken for it; no secret is in it."""
        return ""

    @classmethod
    @abstractmethod
    def from_options(cls, options: msgspec.Struct) -> Backend:
        """A backend for validated options; opens nothing yet. Raises ConfigError."""

    @classmethod
    def at(cls, path: str) -> msgspec.Struct | None:
        """Options to check the tier that lies at `path`; None where tiers lie in no directory."""
        return None

    @classmethod
    def check(
        cls, options: msgspec.Struct, *, repair: bool, quick: bool, tell: Tell
    ) -> CheckReport:
        """Look at all that a tier holds while nobody has it open. Blocking, with threads.

        `quick` leaves payloads out, `repair` drops what is damaged. Raises ConfigError if the
        tier cannot be checked: somebody has it open, or it is none.
        """
        raise ConfigError(
            "such a tier is checked by its server; `tierd scrub` reads all it has and verifies it"
        )

    def refusals(self, is_own: Callable[[int], bool]) -> Iterable[str]:
        """What open() would raise ConfigError for here, found without opening or changing
        anything. Blocking.

        `is_own` says whether a process that has the tier open may be ignored.
        """
        return ()

    @abstractmethod
    async def open(self) -> None:
        """Make ready; long scans go on in the background.

        Raises ConfigError for what only a restart can mend (the daemon does not start), and
        BackendError for all else: the daemon serves without the tier and opens it again later.
        """

    @abstractmethod
    async def close(self) -> None:
        """Finish what is in flight and let go of everything; idempotent."""

    @abstractmethod
    async def contains_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        """For each hash whether get_into would probably hit. Never touches the disk per hash.

        Hashes come in prefix order, parents first; a tier that pays for each question may
        answer a long list by bisecting it. A server that does not answer is a BackendError,
        never a False: that would be a fact about the block.
        """

    async def use_many(self, namespace: bytes, hashes: Sequence[bytes]) -> list[bool]:
        """Requests use these blocks, in host memory: keep them as if they had been read here.

        For each hash False only if the tier certainly lacks the block now, so that the daemon may
        write it again. Hashes come in prefix order, parents first. Reads no block. This default
        only asks, for a tier that orders nothing by use.
        """
        return await self.contains_many(namespace, hashes)

    @abstractmethod
    async def get_into(self, namespace: bytes, requests: Sequence[GetRequest]) -> list[GetResult]:
        """Bring blocks into their slots, verified. One result a request, in order."""

    @abstractmethod
    async def put_many(self, namespace: bytes, requests: Sequence[PutRequest]) -> list[Outcome]:
        """Keep blocks. One outcome a request, in order."""

    @abstractmethod
    async def delete_many(self, namespace: bytes, hashes: Sequence[bytes]) -> int:
        """Drop blocks, so that also a process that starts after a SIGKILL finds none; the count.

        A loss of power may bring them back, and so may what a scan says it could not look at.
        Raises BackendError if some could not be dropped.
        """

    @abstractmethod
    def scan(self) -> AsyncIterator[Scanned]:
        """Headers of all blocks held, in no order; blocks stored or dropped meanwhile may show.

        Each step is little work, well within a call's deadline, whatever lies beside the blocks.
        What cannot be looked at is told in `unread`, and the scan goes on; a scan that ends
        without it, and without a BackendError, has seen everything.
        """

    @abstractmethod
    async def marks(self) -> list[str]:
        """All marks there are now. Raises BackendError unless it is certain that there are no
        others: marks that are taken for absent bring flushed blocks back."""

    @abstractmethod
    async def add_mark(self, mark: str) -> None:
        """Keep a mark. When this returns, it outlasts a loss of power as well as anything in the
        tier does. One that is there already is no error. After a BackendError it may be kept."""

    @abstractmethod
    async def drop_marks(self, marks: Sequence[str]) -> None:
        """Forget marks; some may be gone already."""

    async def reload(self) -> None:
        """Read anew what lies outside of the configuration, such as keys that were rotated: calls
        that begin from now on go by it. Raises BackendError; then all stays as it was."""
        return

    @abstractmethod
    def stats(self) -> BackendStats:
        """What the tier holds now; cheap."""
