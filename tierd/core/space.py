"""What L2 is made of: spaces, slots, reservations, leases, and what is to be done to memory."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tierd.chain import ChainIndex
from tierd.eviction.policy import Ghosts
from tierd.eviction.reuse import Reuse
from tierd.types import Namespace

NO_SLOT: Final = -1


class Refusal(enum.IntEnum):
    """Why a reservation has no slot for a block."""

    PRESENT = -1
    BUSY = -2
    NO_ROOM = -3


class NoRoom(enum.Enum):
    """Why a reservation has no slot for some of its blocks."""

    SHARE = "share"
    """Its owner has reserved all that one owner may, and not committed it."""
    HELD = "held"
    """All that the namespace has is leased, reserved, or being written to a tier."""
    OTHERS = "others"
    """The namespace has no memory, and no other one had any to give."""
    SEGMENT = "segment"
    """The system did not give a memory segment."""


class Evicted(enum.Enum):
    """Why blocks were evicted."""

    ROOM = "room"
    """A reservation needed their slots."""
    AHEAD = "ahead"
    """So that the next reservation finds free slots."""
    LENT = "lent"
    """Another namespace needed the memory."""
    SHRUNK = "shrunk"
    """The machine needed the memory, or the capacity was lowered."""


class Dropped(enum.Enum):
    """Why blocks were dropped for good."""

    FLUSHED = "flushed"
    """Somebody had them dropped, everywhere."""
    DAMAGED = "damaged"
    """Their bytes were not what they had been."""
    ENDED = "ended"
    """Their namespace has ended: nobody will ask for them."""


GONE: Final[tuple[Evicted | Dropped, ...]] = (*Evicted, *Dropped)
WHY_BITS: Final = 3
WHY_MASK: Final = (1 << WHY_BITS) - 1
DROPPED: Final = 4
"""Bit of a ghost's record that an arena of twice the size would not have had either: the record
is the time in seconds above the number of the reason."""
assert [why for at, why in enumerate(GONE) if at & DROPPED] == list(Dropped)
assert len(GONE) <= WHY_MASK + 1


class Adopted(NamedTuple):
    """A block that the ledger of the daemon's life before tells of."""

    slot: int
    block_hash: bytes
    parent: bytes
    checksum: bytes
    generation: int
    backed_up: int


class NewSegment(NamedTuple):
    """Effect: make a segment of `space` usable, by creating it or filling a hollow one."""

    space: Space
    segment: int


class HollowSegment(NamedTuple):
    """Effect: give the memory of a segment of `space` back; its mappings stay valid."""

    space: Space
    segment: int


class Forget(NamedTuple):
    """Effect: READY blocks were evicted from these slots; take them out of the ledger."""

    space: Space
    slots: list[int]


class Move(NamedTuple):
    """Effect: copy READY blocks from slot to slot, `pairs` of (from, to), ledger included."""

    space: Space
    pairs: list[tuple[int, int]]


class EndSpace(NamedTuple):
    """Effect: `space` is gone, with its segments, which are all hollow."""

    space: Space


Effect = NewSegment | HollowSegment | Forget | Move | EndSpace


@dataclass(slots=True, eq=False)
class SlotReservation:
    """Slots that one owner fills. The id is the generation token: it is never used again.

    `held` are the READY slots that the new blocks hang on. They stay until the
    reservation has ended: evicted before, they would leave a hole above the new blocks.
    `refused` says why blocks with Refusal.NO_ROOM have no slot.
    """

    reservation_id: int
    owner: int
    space: Space
    hashes: list[bytes]
    parents: list[bytes]
    slots: list[int]
    held: list[int]
    refused: NoRoom | None = None


@dataclass(slots=True, eq=False)
class SlotLease:
    """The right to use slots until `expires_ns` (CLOCK_MONOTONIC), whatever the owner's fate."""

    lease_id: int
    owner: int
    parts: list[tuple[Space, list[int]]]
    expires_ns: int
    sources: bytes = b""
    """A byte a block: 0 if host memory had it, else 1 + the number of the tier that brought it; no
    bytes if host memory had them all."""


@dataclass(slots=True, eq=False)
class Space:
    """One namespace's segments and slots. Slot numbers run through its segments.

    A slot of a live segment is in exactly one place: `free`, `writing` (by block hash,
    reserved and not yet committed), `chain` (READY), `leaving` (evicted, but not free before
    it is written to a tier; by slot, with hash and parent) or `doubtful` (somebody of the
    daemon's life before may still write to it, or read from it). `generations` holds the
    reservation that filled it last. Of what is leaving, `dropped` is gone for good and cannot be
    revived. `unproven` has what the ledger says of blocks from a life before, by slot: none of
    them is served, or leaves L2, before its checksum has been found to be that one.
    `leased_before` are slots that somebody may be reading under a lease of a life before,
    whatever they hold: each has a ref for it.
    `reuse` is what is known of its blocks, resident or not, and `ghosts` those that left last,
    when and why: as many as it has slots, so that those that were evicted and it are an arena of
    twice the size.
    `refs` counts leases and the daemon's own copies; a slot with one is neither
    evicted nor reused. `checksums` holds None until it has been computed. `backed_up`
    has a bit a storage tier: see `tierd.daemon.l3.backup`.
    `live` says which segments hold memory, and `live_segments` how many, as of the last `resize`.
    `used_s` is when an engine last stored or asked for blocks, `since_s` since when it has had
    memory, both by `HostTier.now_s`. Until `known_until_s` a client that was cut off may come back
    with the segments that it has mapped. `worthless` says, for good, that nobody will ask for its
    blocks once its sessions have ended, `ended` that it is no more.
    """

    namespace: Namespace
    digest: bytes
    slot_bytes: int
    slots_per_segment: int
    reuse: Reuse
    chain: ChainIndex
    ghosts: Ghosts = field(default_factory=lambda: Ghosts(0))
    generations: list[int] = field(default_factory=list)
    refs: list[int] = field(default_factory=list)
    checksums: list[bytes | None] = field(default_factory=list)
    backed_up: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    writing: dict[bytes, int] = field(default_factory=dict)
    leaving: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    doubtful: list[int] = field(default_factory=list)
    unproven: dict[int, bytes] = field(default_factory=dict)
    leased_before: frozenset[int] = frozenset()
    live: list[bool] = field(default_factory=list)
    live_segments: int = 0
    sessions: int = 0
    used_s: int = 0
    since_s: int = 0
    known_until_s: int = 0
    worthless: bool = False
    ended: bool = False

    @property
    def segment_bytes(self) -> int:
        """Bytes of each segment of this space."""
        return self.slots_per_segment * self.slot_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of its segments that hold memory."""
        return self.live_segments * self.segment_bytes

    @property
    def is_free(self) -> bool:
        """Whether nobody uses it, holds or writes a slot, or may be doing so."""
        return not (
            self.sessions
            or self.writing
            or self.leaving
            or self.doubtful
            or self.leased_before
            or any(self.refs)
        )

    @property
    def free_soon(self) -> int:
        """Doubtful slots that nobody can be reading from: they are free before long, as a rule."""
        return 0 if self.leased_before else len(self.doubtful)

    @property
    def proven_blocks(self) -> int:
        """Readable blocks whose checksum is known, so that they can be written, or outlive us."""
        return len(self.checksums) - self.checksums.count(None)

    def resize(self) -> None:
        """Segments have come or gone: tell what orders evictions how many slots there are now."""
        self.live_segments = sum(self.live)
        slots = self.live_segments * self.slots_per_segment
        self.chain.policy.resize(slots)
        self.ghosts.resize(slots)

    def twice(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks are here, or would still be in an arena of twice the size."""
        items, ghosts = self.chain.items, self.ghosts.records
        for count, block_hash in enumerate(hashes):
            if block_hash not in items and ghosts.get(block_hash, DROPPED) & DROPPED:
                return count
        return len(hashes)

    def gone(self, block_hash: bytes) -> tuple[Evicted | Dropped, int] | None:
        """Why a block that is not here left, and when, in seconds; None if that is not known."""
        record = self.ghosts.records.get(block_hash)
        return None if record is None else (GONE[record & WHY_MASK], record >> WHY_BITS)

    def by_segment(self, slots: Iterable[int]) -> dict[int, list[int]]:
        """The places of slots in their segments, by the segments' numbers."""
        found: dict[int, list[int]] = {}
        for slot in slots:
            index, place = divmod(slot, self.slots_per_segment)
            found.setdefault(index, []).append(place)
        return found

    def identity(self, slot: int) -> tuple[bytes, bytes]:
        """Hash and parent of the block in a slot, READY or leaving."""
        return self.leaving.get(slot) or (self.chain.hash_of(slot), self.chain.parent_of(slot))

    def is_readable(self, slot: int) -> bool:
        """Whether a slot holds a block, READY or leaving."""
        try:
            return bool(self.identity(slot))
        except KeyError:
            return False
