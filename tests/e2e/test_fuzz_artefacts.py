"""Every artefact that tierd reads is verified: whatever happens to its bytes, no exception escapes,
no wrong byte is served, undamaged parts are served as before, and the damage is reported.

ARTEFACTS lists all of them with their readers. The daemon's own artefacts are damaged here in every
byte, or in the file that the table names.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support import blocks as named
from tests.support import damages
from tests.support.hotset_incarnation import HotsetIncarnation
from tests.support.one_incarnation import RECORDS as RECORDS_OF_A_LEDGER
from tests.support.one_incarnation import OneIncarnation, ledger_with
from tests.support.page_engine import chain, content
from tests.support.servers import fake_s3
from tests.support.servers.fake_s3 import FakeS3
from tests.support.tiers.redis_tier import running as redis_running
from tierd import backend as backend_module
from tierd.backend import HEADER_BYTES, Backend, CheckReport, Outcome
from tierd.cli.warm.journal import FinishedUnit, WarmJournal
from tierd.daemon.jobs.hotset import FILE
from tierd.errors import ConfigError
from tierd.hotset import HotRun, HotSet, pieces
from tierd.memory.ledger import INCARNATION_BYTES, RECORD_BYTES, is_ledger
from tierd.testing import suite
from tierd.testing.simulation.keeper import Keeper
from tierd.testing.suite import NAMESPACE, get, make_chain, put
from tierd.types import PAGE_BYTES
from tierd_backends.file import FileBackend, FileOptions
from tierd_backends.file.directory import StoreDirectory
from tierd_backends.file.fsck import check_store
from tierd_backends.file.slab import data_path, index_path, slab_bytes
from tierd_backends.file.slab_index import (
    EACH_BYTES,
    ENTRIES_AT,
    FIXED_BYTES,
    HEAD_BYTES,
    entry_at,
    index_bytes,
    uses_at,
)

ARTEFACTS = {
    "*.index": "the file tier's index files: test_index_file",
    "*.slab": "its records: test_record",
    "FORMAT, LOCK": "its directory's: test_directory_files",
    "ledger": "records of host memory between incarnations: test_ledger",
    "life page": "leases: test_incarnations.py, test_leases_over_incarnations.py",
    "segment": "host memory itself: test_segment",
    "hotset.jsonl": "the snapshot of the hot set: test_hot_set, test_snapshot",
    "warm journal": "test_journal",
    "marks": "a tier's flushes, and the state directory's memory of them: test_epochs.py",
    "Redis value": "test_redis_value",
    "S3 object": "test_s3_object; its headers: test_s3_faults.py; no metadata is read",
}

HIT, PRESENT, STORED = Outcome.HIT, Outcome.PRESENT, Outcome.STORED
HEAD_SEALED = HEAD_BYTES
"""Size of an index file's head; padding follows up to ENTRIES_AT."""


# --- the file tier ----------------------------------------------------------------------


def fsck(path: Path, *, repair: bool) -> CheckReport:
    return check_store(path, threads=1, repair=repair, quick=False, tell=lambda *_: None)


class Disk:
    """A closed tier whose slabs are full; each holds `records` blocks of a chain."""

    def __init__(self, path: Path, slabs: int, records: int, length: int) -> None:
        self.path = path
        self.records = records
        self.capacity = (slabs + 8) * slab_bytes(records, PAGE_BYTES)
        self.blocks = make_chain("fuzz", slabs * records, length)
        self.folder = path / NAMESPACE.hex()
        asyncio.run(self._fill())

    def tier(self) -> FileBackend:
        slab = slab_bytes(self.records, PAGE_BYTES)
        options = FileOptions(path=str(self.path), capacity=self.capacity, slab=slab)
        return FileBackend(msgspec.structs.replace(options, reserve_free=0, threads=1))

    async def _fill(self) -> None:
        async with suite.running(self.tier()) as tier:
            assert set(await put(tier, self.blocks)) == {STORED}
            await get(tier, self.blocks)  # So that the table of uses is not empty.
            shelf = tier._shelves.get(NAMESPACE)
            assert shelf is not None
            self.numbers = sorted(shelf.slabs)
            await tier._shelves._save_uses()

    async def serve(self) -> tuple[list[Outcome], Counter[str]]:
        """An incarnation on these files: the first read of each block, and the counters."""
        async with suite.running(self.tier()) as tier:
            outcomes = await get(tier, self.blocks)
            counted = Counter(tier.counters)
            assert set(await put(tier, self.blocks)) <= {STORED, PRESENT}
            assert set(await get(tier, self.blocks)) == {HIT}
            for shelf in tier._shelves:
                assert not any(slab.pins for slab in shelf.slabs.values())
                assert not {*shelf._pins, *shelf._retired, *shelf._needed, *shelf.writing}
                held = len(shelf.index) + shelf.free_records
                assert held == sum(slab.records for slab in shelf.slabs.values())
        async with suite.running(self.tier()) as tier:
            assert set(await get(tier, self.blocks)) == {HIT}
        return outcomes, counted


RECORDS = 2
USED_BYTES = FIXED_BYTES + RECORDS * EACH_BYTES
INDEX_EDGES = [ENTRIES_AT, entry_at(1), uses_at(RECORDS), USED_BYTES - 8, USED_BYTES]


@pytest.mark.slow
def test_index_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flipped bit in an index file would disable the tier permanently, or cost more than its
    block; or fsck would miss it, or leave it after a repair."""
    monkeypatch.setattr(backend_module, "EXAMPLES_MAX", 1 << 20)
    every = damages.all_of(index_bytes(RECORDS), INDEX_EDGES, USED_BYTES)
    disk = Disk(tmp_path / "tier", len(every), RECORDS, 100)
    changed = []
    for number, damage in zip(disk.numbers, every, strict=True):
        index = index_path(disk.folder, number)
        raw = index.read_bytes()
        changed.append(damage.spoil(raw) != raw)
        index.write_bytes(damage.spoil(raw))
    shutil.copytree(disk.path, tmp_path / "repaired")
    repaired = fsck(tmp_path / "repaired", repair=True)
    told = " ".join(place for each in repaired.damage.values() for place in each.examples)
    assert fsck(tmp_path / "repaired", repair=False).found == 0

    outcomes, counted = asyncio.run(disk.serve())
    heads = others = 0
    for at, damage in enumerate(every):
        place = damage.first if damage.at is None else damage.at
        if place is None or not changed[at]:
            continue
        lost = RECORDS - outcomes[at * RECORDS :][:RECORDS].count(HIT)
        in_head = place < HEAD_SEALED
        in_entry = ENTRIES_AT <= place < uses_at(RECORDS)
        assert lost == (RECORDS if in_head else int(in_entry)), damage.what
        seen = f"{disk.numbers[at]:08d}." in told
        assert seen == (in_head or place >= ENTRIES_AT), f"fsck on {damage.what}"
        heads += in_head
        others += place >= ENTRIES_AT
    assert counted["lost_slabs_total"] >= heads
    assert counted["index_damage_total"] >= others


@pytest.mark.slow
@pytest.mark.parametrize("judge", ["tier", "fsck"])
def test_record(tmp_path: Path, judge: str) -> None:
    """A wrong byte of a record would be served, or one damaged block would take others along."""
    length = 100
    # A flip in the padding between header and payload, or behind the payload, does no damage.
    places = [*range(HEADER_BYTES), *range(PAGE_BYTES, PAGE_BYTES + length)]
    every = [d for d in damages.all_of(PAGE_BYTES + length) if d.at in places]
    every += damages.fills(HEADER_BYTES)
    disk = Disk(tmp_path / "tier", 1, len(every), length)
    data, size = data_path(disk.folder, disk.numbers[0]), 2 * PAGE_BYTES
    raw = data.read_bytes()
    spoilt = [d.spoil(raw[at * size :][:size]) for at, d in enumerate(every)]
    data.write_bytes(b"".join(spoilt))
    wrong = sum(one != raw[at * size :][:size] for at, one in enumerate(spoilt))
    assert wrong > len(every) * 0.9
    if judge == "fsck":
        assert fsck(disk.path, repair=False).found == wrong
        assert fsck(disk.path, repair=True).left == 0
    outcomes, counted = asyncio.run(disk.serve())
    assert outcomes.count(HIT) == len(every) - wrong
    assert counted["corrupt_total"] == (wrong if judge == "tier" else 0)


@pytest.mark.slow
def test_directory_files(tmp_path: Path) -> None:
    """A tier would accept another format as its own, or stop because of a torn LOCK file."""
    disk = Disk(tmp_path / "tier", 1, 3, 100)
    for name in ("LOCK", "FORMAT"):
        file = disk.path / name
        raw = file.read_bytes()
        for damage in damages.all_of(len(raw)):
            spoilt = damage.spoil(raw)
            file.write_bytes(spoilt)
            directory = StoreDirectory(disk.path)
            refused = pytest.raises(ConfigError, match="name another directory")
            with refused if name == "FORMAT" and spoilt != raw else contextlib.nullcontext():
                directory.open()
            directory.close()
            assert name == "LOCK" or file.read_bytes() == spoilt, "another format was changed"
        file.write_bytes(raw)
    assert set(asyncio.run(disk.serve())[0]) == {HIT}


# --- Redis and S3 -----------------------------------------------------------------------

LENGTH = 100
VALUE_BYTES = HEADER_BYTES + LENGTH


async def spoilt_values(
    tier: Backend, damage_all: Callable[[dict[str, Callable[[bytes], bytes]]], None]
) -> None:
    """Each damage, applied to a separate block: none is served, and each can be stored again."""
    every = damages.all_of(VALUE_BYTES, [HEADER_BYTES])
    blocks = make_chain("fuzz", len(every) + 1, LENGTH)
    assert set(await put(tier, blocks)) == {STORED}
    damage_all({b.key.block_hash.hex(): d.spoil for b, d in zip(blocks[:-1], every, strict=True)})
    outcomes = await get(tier, blocks)
    whole = [d.what for d, outcome in zip(every, outcomes, strict=False) if outcome is HIT]
    assert not [what for what in whole if "are 0x0" not in what], whole
    assert outcomes[-1] is HIT
    assert len(every) - tier.counters["corrupt_total"] == len(whole)
    assert tier.counters["damaged_in_transit_total"] == 0
    assert set(await put(tier, blocks)) <= {STORED, PRESENT}
    assert set(await get(tier, blocks)) == {HIT}


@pytest.mark.slow
async def test_redis_value(redis_server) -> None:
    """A damaged value would be served, fail its neighbours, or block its key permanently."""
    with redis_server.client() as client:

        def damage_all(spoils: dict[str, Callable[[bytes], bytes]]) -> None:
            for key in client.keys("fuzz:*"):
                spoil = spoils.get(key.decode().rpartition(":")[2])
                if spoil is not None:
                    client.set(key, spoil(client.get(key)))

        async with redis_running(redis_server.options(), prefix="fuzz") as tier:
            await spoilt_values(tier, damage_all)


@pytest.mark.slow
async def test_s3_object() -> None:
    """A damaged object would be served, fail its neighbours, or block its name permanently."""
    with FakeS3() as fake:

        def damage_all(spoils: dict[str, Callable[[bytes], bytes]]) -> None:
            for name, body in fake.objects.items():
                spoil = spoils.get(name.rpartition("/")[2])
                fake.objects[name] = body if spoil is None else spoil(body)

        async with fake_s3.running(fake) as tier:
            await spoilt_values(tier, damage_all)


# --- between incarnations ---------------------------------------------------------------


class Kept:
    """The memory that an incarnation left, with damaged bytes in its ledger or its segment."""

    def __init__(self) -> None:
        self._keeper = Keeper()
        incarnation = OneIncarnation(self._keeper)
        self.hashes = chain("fuzz", 3)
        incarnation.store(incarnation.space(), self.hashes)
        incarnation.end()
        named = self._keeper.take_kept()
        [self._arena] = {name for name, _ in named if "-" not in name}
        pair = [fd for name, fd in named if name == self._arena]
        [self._ledger] = [fd for fd in pair if is_ledger(fd)]
        [self._segment] = set(pair) - {self._ledger}
        self._others = [(name, fd) for name, fd in named if name != self._arena]
        self.ledger = os.pread(self._ledger, os.fstat(self._ledger).st_size, 0)
        self.segment = os.pread(self._segment, os.fstat(self._segment).st_size, 0)

    def serve(self, ledger: bytes, segment: bytes) -> tuple[int, Counter[str]]:
        """Number of blocks that a new incarnation serves, all bytes compared, and its counters."""
        keeper = Keeper()
        os.pwrite(self._segment, segment, 0)
        fd = os.memfd_create("ledger")
        os.pwrite(fd, ledger, 0)
        keeper.keep(self._arena, [self._segment, fd])
        os.close(fd)
        for name, other in self._others:
            keeper.keep(name, [other])
        incarnation = OneIncarnation(keeper)
        incarnation.prove()
        space = incarnation.space()
        served = [h for h in self.hashes if h in space.items]
        for block_hash in served:
            slot = space.items[block_hash]
            assert slot not in space.unverified
            assert incarnation.memory.payload(space, slot) == content(block_hash)
            assert space.tiers.of(slot) == 0, "a tier is credited with a block"
        # The next incarnation is not affected.
        incarnation.incarnations.tick()
        more = chain("more", 5)
        assert len(incarnation.store(space, more)) == len(more)
        counted = Counter(incarnation.counters)
        incarnation.end()
        keeper.close()
        return len(served), counted

    def close(self) -> None:
        for _, fd in [*self._others, ("", self._ledger), ("", self._segment)]:
            os.close(fd)
        self._keeper.close()


@pytest.fixture
def kept() -> Iterator[Kept]:
    kept = Kept()
    yield kept
    kept.close()


@pytest.mark.slow
def test_ledger(kept: Kept) -> None:
    """A damaged ledger would abort the start, or cause other bytes to be served."""
    records_at = len(kept.ledger) - 4 * RECORD_BYTES
    life_at = records_at - INCARNATION_BYTES  # Padding lies before it.
    head_end = len(kept.ledger[:life_at].rstrip(b"\0"))
    assert kept.serve(kept.ledger, kept.segment)[0] == 3
    tail = RECORD_BYTES - 28  # The tiers, which are a hint; behind seal and padding, the state.
    free_at = records_at + 3 * RECORD_BYTES
    # All records are alike; one holds a block here, and one does not.
    some = damages.all_of(len(kept.ledger), [records_at, free_at], records_at + RECORD_BYTES)
    some += [d for d in damages.flips(len(kept.ledger)) if d.at is not None and d.at >= free_at]
    for damage in some:
        served, counted = kept.serve(damage.spoil(kept.ledger), kept.segment)
        lost = counted["rotten_blocks_total"] + counted["adoption_dropped_segments_total"]
        if damage.at is None or damage.at >= free_at:
            assert served == 3 or damage.at is None, damage.what
            continue
        place = damage.at - records_at
        if place < 0:
            read = damage.at < head_end or damage.at >= life_at
            assert served == (0 if read else 3), damage.what
            assert lost == read, damage.what
        elif tail <= place < tail + 4 or tail + 12 <= place < tail + 20:
            assert served == 3, damage.what
        else:
            assert (served, lost) == (2, 1), damage.what


def test_cleared_ledger_record_stays_cleared() -> None:
    """One flipped bit would bring back an evicted or flushed block."""
    ledger = ledger_with(RECORDS_OF_A_LEDGER)
    ledger.forget([0])
    state_at = ledger._at(0) + RECORD_BYTES - 8
    for at in range(state_at, state_at + 8):
        for value in range(256):
            ledger._mapping[at] = value
            assert 0 not in [record.place for record in ledger.records()]
        ledger._mapping[at] = 0
    os.close(ledger.fd)


def test_segment(kept: Kept) -> None:
    """A byte that changed while no tierd ran would be served."""
    length = len(content(kept.hashes[0]))
    for at in range(0, 3 * length, 4099):
        spoilt = kept.segment[:at] + bytes([kept.segment[at] ^ 1]) + kept.segment[at + 1 :]
        served, counted = kept.serve(kept.ledger, spoilt)
        assert (served, counted["rotten_blocks_total"]) == (2, 1), at


# --- lines of JSON ----------------------------------------------------------------------


def hot_set() -> bytes:
    hashes, parents = named.chain(3)
    runs = [HotRun(parents[0], hashes, 3, 60, 3)]
    return b"".join(pieces([([named.namespace()], runs)], written_s=1000, version="1"))


@pytest.mark.slow
def test_hot_set() -> None:
    """A damaged hot set would teach, or warm, other blocks."""
    raw = hot_set()
    whole = list(HotSet(io.BytesIO(raw), "a file"))
    for damage in damages.all_of(len(raw), [raw.index(b"\n"), raw.rindex(b"\n", 0, -1)]):
        spoilt = damage.spoil(raw)
        had = []
        refused = pytest.raises(ConfigError, match=r"^a file, line")
        with refused if spoilt != raw else contextlib.nullcontext():
            for hot in HotSet(io.BytesIO(spoilt), "a file"):
                had.append(hot)
        assert had == whole[: len(had)], damage.what


@pytest.mark.slow
def test_snapshot(tmp_path: Path) -> None:
    """A damaged snapshot would abort the start, be taught in part, or block new snapshots."""
    raw = hot_set()
    for number, damage in enumerate(damages.all_of(len(raw))[::17]):
        spoilt = damage.spoil(raw)
        state = tmp_path / str(number)
        state.mkdir()
        (state / FILE).write_bytes(spoilt)
        incarnation = HotsetIncarnation(state)
        asyncio.run(incarnation.snapshots.load())
        assert incarnation.counters["hotset_failed_total"] == (spoilt != raw)
        incarnation.write()
        assert incarnation.snapshots.status()["why"] == ""
        incarnation.close()


@pytest.mark.slow
def test_journal(tmp_path: Path) -> None:
    """A damaged journal would make a warm skip blocks that were never warmed."""
    path = tmp_path / "journal"
    journal = WarmJournal(str(path), "host memory")
    for number in range(3):
        journal.finish(f"unit {number}", FinishedUnit((bytes([number]) * 16,), bytes(32), 7))
    whole = dict(journal.done)
    journal.close()
    raw = path.read_bytes()
    for damage in damages.all_of(len(raw), [raw.index(b"\n")]):
        path.write_bytes(damage.spoil(raw))
        with contextlib.suppress(ConfigError):
            journal = WarmJournal(str(path), "host memory")
            journal.close()
            assert journal.done.items() <= whole.items(), damage.what
