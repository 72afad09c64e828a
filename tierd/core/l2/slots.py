"""The slots of one namespace: their states, contents and holds.

Only methods with an underscore move slots between states, each by one or two events of the table
in `tierd.core.states`; only the core calls them. The rest of the daemon reads the live state,
under types that do not allow changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Final, NamedTuple

from tierd.chain import ChainIndex
from tierd.core.l2.tier_bits import TierBits
from tierd.core.reasons import DROPPED, GONE, WHY_BITS, WHY_MASK, Dropped, Evicted
from tierd.eviction.policy import Ghosts

NO_SLOT: Final = -1


class Adopted(NamedTuple):
    """A block in the ledger of an earlier incarnation."""

    slot: int
    block_hash: bytes
    parent: bytes
    checksum: bytes
    generation: int
    tiers: int


class Slots:
    """A table of slots, numbered across the namespace's segments.

    A slot of a live segment is in exactly one place: `free`, `writing` (by block hash; reserved
    and not committed), `items` (by block hash; readable), `evicting` (by slot, with hash and
    parent; evicted, and not free before it is written to a tier) or `quarantined` (a client of an
    earlier incarnation may still write to it or read from it). Slots in `dropped` are a part of
    `evicting`; their blocks cannot be revived. `unverified` has the ledger's checksums of blocks
    from an earlier incarnation, by slot: such a block is neither served nor written to a tier
    before it is verified. `leased_before` are slots that may be leased by an earlier incarnation,
    in any state; each has a ref for that.

    `generations` holds the reservation that last filled a slot. `refs` counts leases and the
    daemon's own copies; a slot with refs is neither evicted nor reused. `checksums` holds None
    until the checksum is computed. `live` says which segments have memory. Ghosts are the blocks
    that left last, with time and reason: as many as there are slots, to simulate twice the size.
    """

    __slots__ = (
        "_chain",
        "_checksums",
        "_dropped",
        "_evicting",
        "_free",
        "_generations",
        "_ghosts",
        "_leased_before",
        "_live",
        "_live_segments",
        "_quarantined",
        "_refs",
        "_unverified",
        "_writing",
        "slot_bytes",
        "slots_per_segment",
        "tiers",
    )

    def __init__(self, slot_bytes: int, slots_per_segment: int, chain: ChainIndex) -> None:
        self.slot_bytes: Final = slot_bytes
        self.slots_per_segment: Final = slots_per_segment
        self.tiers: Final = TierBits()
        self._chain = chain
        self._ghosts = Ghosts(0)
        self._generations: list[int] = []
        self._refs: list[int] = []
        self._checksums: list[bytes | None] = []
        self._free: list[int] = []
        self._writing: dict[bytes, int] = {}
        self._evicting: dict[int, tuple[bytes, bytes]] = {}
        self._dropped: set[int] = set()
        self._quarantined: list[int] = []
        self._unverified: dict[int, bytes] = {}
        self._leased_before: frozenset[int] = frozenset()
        self._live: list[bool] = []
        self._live_segments = 0

    # --- read-only state ------------------------------------------------------------

    @property
    def items(self) -> Mapping[bytes, int]:
        """Slots of readable blocks by hash, including unverified ones."""
        return self._chain.items

    @property
    def writing(self) -> Mapping[bytes, int]:
        """Reserved slots, by the hash of the block to be written."""
        return self._writing

    @property
    def evicting(self) -> Mapping[int, tuple[bytes, bytes]]:
        """Hash and parent of evicted blocks that are still held, by slot."""
        return self._evicting

    @property
    def dropped(self) -> AbstractSet[int]:
        """Slots whose blocks were dropped permanently and that are still held."""
        return self._dropped

    @property
    def quarantined(self) -> Sequence[int]:
        """Slots that clients of an earlier incarnation may still use."""
        return self._quarantined

    @property
    def unverified(self) -> Mapping[int, bytes]:
        """The ledger's checksums of unverified blocks, by slot."""
        return self._unverified

    @property
    def leased_before(self) -> frozenset[int]:
        """Slots that may be leased by an earlier incarnation."""
        return self._leased_before

    @property
    def free(self) -> Sequence[int]:
        """Free slots; the last one is reserved first."""
        return self._free

    @property
    def refs(self) -> Sequence[int]:
        """How often each slot is held."""
        return self._refs

    @property
    def generations(self) -> Sequence[int]:
        """The reservation that last filled each slot."""
        return self._generations

    @property
    def checksums(self) -> Sequence[bytes | None]:
        """The checksum of each slot's block; None if it is not known."""
        return self._checksums

    @property
    def live(self) -> Sequence[bool]:
        """Which segments have memory."""
        return self._live

    @property
    def live_segments(self) -> int:
        """Number of segments that have memory."""
        return self._live_segments

    @property
    def segment_bytes(self) -> int:
        """Size of each segment in bytes."""
        return self.slots_per_segment * self.slot_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of all segments that have memory."""
        return self._live_segments * self.segment_bytes

    @property
    def free_soon(self) -> int:
        """Number of quarantined slots that will normally be free soon, since none is leased."""
        return 0 if self._leased_before else len(self._quarantined)

    @property
    def verified_blocks(self) -> int:
        """Number of blocks with a known checksum: they can be written to tiers, or adopted."""
        return len(self._checksums) - self._checksums.count(None)

    @property
    def forgets(self) -> bool:
        """Whether more blocks have left than the ghosts can remember."""
        # Ghosts are forgotten an eighth at a time.
        return len(self._ghosts.records) >= self._ghosts.limit * 7 // 8

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the slots of the readable blocks among `hashes`."""
        return [slot for slot in map(self._chain.items.get, hashes) if slot is not None]

    def hashes_of(self, slots: Iterable[int]) -> list[bytes]:
        """Return the hashes of readable blocks."""
        return list(map(self._chain.hash_of, slots))

    def identities(self, slots: Iterable[int]) -> list[tuple[bytes, bytes]]:
        """Return hash and parent of the readable or evicting blocks in slots."""
        evicting, hash_of, parent_of = self._evicting, self._chain.hash_of, self._chain.parent_of
        return [evicting.get(slot) or (hash_of(slot), parent_of(slot)) for slot in slots]

    def identity(self, slot: int) -> tuple[bytes, bytes]:
        """Return hash and parent of the block in one slot; raises KeyError if there is none."""
        chain = self._chain
        return self._evicting.get(slot) or (chain.hash_of(slot), chain.parent_of(slot))

    def is_readable(self, slot: int) -> bool:
        """Whether a slot holds a block, readable or evicting."""
        try:
            return bool(self.identity(slot))
        except KeyError:
            return False

    def lacking(self, slots: Iterable[int], bit: int) -> list[int]:
        """Return the slots whose blocks a tier lacks and may get."""
        unverified, dropped = self._unverified, self._dropped
        found = self.tiers.lacking(slots, bit)
        if not unverified and not dropped:
            return found
        return [slot for slot in found if slot not in unverified and slot not in dropped]

    def without_checksum(self, slots: Iterable[int]) -> list[int]:
        """Return the slots whose checksum has not been computed."""
        checksums = self._checksums
        return [slot for slot in slots if checksums[slot] is None]

    def part(self, start: int, count: int) -> tuple[list[bytes], list[bytes]] | None:
        """Return hashes and parents of readable blocks in a range of slots; None past the end."""
        return self._chain.part(start, count)

    def twice(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks an arena of twice the size would have."""
        items, ghosts = self._chain.items, self._ghosts.records
        for count, block_hash in enumerate(hashes):
            if block_hash not in items and ghosts.get(block_hash, DROPPED) & DROPPED:
                return count
        return len(hashes)

    def gone(self, block_hash: bytes) -> tuple[Evicted | Dropped, int] | None:
        """Return why and when, in seconds, an absent block left; None if that is not known."""
        record = self._ghosts.records.get(block_hash)
        return None if record is None else (GONE[record & WHY_MASK], record >> WHY_BITS)

    def by_segment(self, slots: Iterable[int]) -> dict[int, list[int]]:
        """Return the positions of slots within their segments, by segment number."""
        found: dict[int, list[int]] = {}
        for slot in slots:
            index, place = divmod(slot, self.slots_per_segment)
            found.setdefault(index, []).append(place)
        return found

    # --- holds ----------------------------------------------------------------------

    def _hold(self, slots: Iterable[int]) -> None:
        refs = self._refs
        for slot in slots:
            refs[slot] += 1

    def _unhold(self, slots: Collection[int]) -> None:
        refs = self._refs
        for slot in slots:
            refs[slot] -= 1
        if self._dropped:
            self._release_dropped(slots)

    # --- events: memory -------------------------------------------------------------

    def _grow(self) -> int:
        """GROW: add a segment; return its number."""
        per = self.slots_per_segment
        try:
            index = self._live.index(False)
        except ValueError:
            index = len(self._live)
            self._live.append(False)
            self._add_columns(per)
        self._live[index] = True
        self._resize()
        # Low slots are reserved first, so that a segment's pages are used in order.
        self._free[:0] = range((index + 1) * per - 1, index * per - 1, -1)
        return index

    def _decommit(self, index: int) -> None:
        """DECOMMIT: remove a segment; all its slots are free."""
        per = self.slots_per_segment
        gone = range(index * per, (index + 1) * per)
        self._free = [slot for slot in self._free if slot not in gone]
        self._live[index] = False
        self._resize()

    def _lose(self, made: int) -> None:
        """LOSE: remove all segments except the first `made`."""
        total = made * self.slots_per_segment
        self._writing = {h: slot for h, slot in self._writing.items() if slot < total}
        del self._live[made:]
        self._free = [slot for slot in self._free if slot < total]
        for by_slot in (self._generations, self._refs, self._checksums):
            del by_slot[total:]
        self.tiers._cut(total)
        self._resize()

    def _adopt(
        self, live: Sequence[bool], blocks: Iterable[Adopted], leased: Container[int]
    ) -> None:
        """ADOPT_BLOCK, ADOPT_SLOT: fill the empty table from an earlier incarnation."""
        per = self.slots_per_segment
        self._live = list(live)
        self._add_columns(len(live) * per)
        self._resize()
        chain, unverified = self._chain, self._unverified
        for slot, block_hash, parent, checksum, generation, tiers in blocks:
            if block_hash in chain:
                continue
            chain.insert(slot, block_hash, parent)
            unverified[slot] = checksum
            self._generations[slot] = generation
            self.tiers._mark((slot,), tiers, 0)
        here = [slot for slot in range(len(live) * per) if live[slot // per]]
        self._leased_before = frozenset(slot for slot in here if slot in leased)
        self._hold(self._leased_before)
        # Low slots come last, as among free slots, where the last one is reserved first.
        self._quarantined = [slot for slot in reversed(here) if slot not in unverified]

    def _end_leases_before(self) -> None:
        held, self._leased_before = self._leased_before, frozenset()
        self._unhold(held)

    def _clear(self) -> None:
        """CLEAR: free quarantined slots that are not leased."""
        quarantined, refs = self._quarantined, self._refs
        self._free[:0] = [slot for slot in quarantined if not refs[slot]]
        self._quarantined = [slot for slot in quarantined if refs[slot]]

    # --- events: blocks -------------------------------------------------------------

    def _reserve(self, hashes: Sequence[bytes], generation: int) -> list[int]:
        """RESERVE: take free slots for the first blocks, as many as there are."""
        count = min(len(hashes), len(self._free))
        taken = self._free[-count:][::-1] if count else []
        del self._free[len(self._free) - count :]
        self._writing.update(zip(hashes, taken, strict=False))
        generations = self._generations
        for slot in taken:
            generations[slot] = generation
        return taken

    def _end_writing(
        self,
        hashes: Sequence[bytes],
        parents: Sequence[bytes],
        slots: Sequence[int],
        good: Iterable[bool],
    ) -> list[int]:
        """COMMIT where `good`, else ABORT; return the new readable slots. A slot may be -1."""
        writing, insert, ghosts = self._writing, self._chain.insert, self._ghosts.records
        ready: list[int] = []
        for block_hash, parent, slot, ok in zip(hashes, parents, slots, good, strict=True):
            if slot < 0:
                continue
            del writing[block_hash]
            if ok:
                insert(slot, block_hash, parent)
                ghosts.pop(block_hash, None)
                ready.append(slot)
            else:
                self._put_free(slot)
        return ready

    def _evict(
        self, count: int, record: int, spare: Callable[[bytes], bool] | None = None
    ) -> list[int]:
        """EVICT: up to `count` leaves that are not held, the coldest first; see ChainIndex.evict.

        Their ghosts get this `record` (`tierd.core.reasons.record_of`).
        """
        chain, refs, evicting = self._chain, self._refs, self._evicting

        def busy(slot: int) -> bool:
            if refs[slot]:
                return True
            evicting[slot] = chain.hash_of(slot), chain.parent_of(slot)
            return False

        slots = chain.evict(count, busy, spare)
        for slot in slots:
            self._ghosts.put(evicting[slot][0], record)
        return slots

    def _settle(self, slots: Iterable[int]) -> list[int]:
        """SETTLE: free evicting slots that are no longer held; return them."""
        evicting, refs = self._evicting, self._refs
        gone = [slot for slot in slots if slot in evicting and not refs[slot]]
        for slot in gone:
            del evicting[slot]
            self._put_free(slot)
        return gone

    def _revive(self, hashes: Iterable[bytes]) -> int:
        """REVIVE: make evicting blocks readable; return how many."""
        evicting, dropped = self._evicting, self._dropped
        by_hash = {h: slot for slot, (h, _) in evicting.items() if slot not in dropped}
        again = [by_hash[h] for h in dict.fromkeys(hashes) if h in by_hash]
        for slot in again:
            block_hash, parent = evicting.pop(slot)
            self._chain.insert(slot, block_hash, parent)
            self._ghosts.records.pop(block_hash, None)
        return len(again)

    def _drop(self, slots: Sequence[int], record: int) -> None:
        """DROP: remove blocks permanently, even from the middle of a prefix."""
        for slot in slots:
            if slot not in self._evicting:
                self._evicting[slot] = self.identity(slot)
                self._chain.remove(slot)
            self._ghosts.put(self._evicting[slot][0], record)
            self._dropped.add(slot)
            self._unverified.pop(slot, None)

    def _release_dropped(self, slots: Collection[int]) -> None:
        """RELEASE: free dropped slots that are no longer held."""
        for slot in self._dropped.intersection(slots):
            if not self._refs[slot]:
                self._dropped.discard(slot)
                del self._evicting[slot]
                self._put_free(slot)

    def _verify(self, sums: Mapping[int, bytes]) -> list[int]:
        """VERIFY: blocks whose checksum is the ledger's; return the slots where it is not.

        Slots that are not unverified, since another check came first, count as matching.
        """
        unverified, checksums = self._unverified, self._checksums
        rotten = [slot for slot, found in sums.items() if unverified.get(slot, found) != found]
        for slot in unverified.keys() & sums.keys() - set(rotten):
            checksums[slot] = unverified.pop(slot)
        return rotten

    def _move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """MOVE_AWAY from the first slot of each pair, MOVE_IN to the second one, which is free."""
        taken = {target for _, target in pairs}
        self._free = [slot for slot in self._free if slot not in taken]
        unverified, bits = self._unverified, self.tiers
        for slot, target in pairs:
            self._chain.move(slot, target)
            self._generations[target] = self._generations[slot]
            self._checksums[target] = self._checksums[slot]
            bits._mark((target,), bits.of(slot), -1)
            if slot in unverified:
                unverified[target] = unverified[slot]
            self._put_free(slot)

    # --- shared parts of the events -------------------------------------------------

    def _put_free(self, slot: int) -> None:
        self._unverified.pop(slot, None)
        self._checksums[slot] = None
        self.tiers._bits[slot] = 0
        self._free.append(slot)

    def _add_columns(self, count: int) -> None:
        self._generations += [0] * count
        self._refs += [0] * count
        self._checksums += [None] * count
        self.tiers._grow(count)

    def _resize(self) -> None:
        """Update the sizes of the eviction policy and of the ghosts after segments changed."""
        self._live_segments = sum(self._live)
        slots = self._live_segments * self.slots_per_segment
        self._chain.policy.resize(slots)
        self._ghosts.resize(slots)

    def _first_unverified(self, count: int) -> list[int]:
        return list(islice(self._unverified, count))

    def check(self, held: Mapping[int, int]) -> None:
        """Assert every invariant; `held` has the number of leases by slot. For tests."""
        self._chain.check()
        assert self._live_segments == sum(self._live)
        total = len(self._live) * self.slots_per_segment
        assert len(self._refs) == len(self._generations) == total
        assert len(self._checksums) == len(self.tiers) == total
        ready = sorted(self._chain.items.values())
        elsewhere = (*self._writing.values(), *self._evicting, *self._quarantined)
        places = sorted([*ready, *self._free, *elsewhere])
        assert places == [s for s in range(total) if self._live[s // self.slots_per_segment]]
        for slot, refs in enumerate(self._refs):
            assert refs >= held.get(slot, 0) + (slot in self._leased_before)
        others = {*range(total)}.difference(ready, self._evicting, self._leased_before)
        assert not any(self._refs[slot] for slot in others)
        assert self._leased_before <= {*ready, *self._evicting, *self._quarantined}, (
            "a slot leased by an earlier incarnation was reused"
        )
        for slot, (block_hash, _) in self._evicting.items():
            assert self._refs[slot], "an evicting block is not held for a write"
            if slot not in self._dropped:
                assert block_hash not in self._chain
                assert block_hash not in self._writing
        assert self._dropped <= self._evicting.keys()
        assert self._unverified.keys() <= set(ready), "an unverified block is not readable"
        for block_hash in self._writing:
            assert block_hash not in self._chain
