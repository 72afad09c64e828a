"""`tierd fsck`: the damage that it finds on a file tier's disk, and the state after a repair."""

import errno
import json
import os
import shutil

import pytest

from tests.support.tiers import file_tier as disk
from tests.support.tiers.file_check import check, kinds
from tests.support.tiers.file_tier import BLOCK_BYTES, SLOT_BYTES, running
from tierd.backend import Outcome
from tierd.cli.main import main
from tierd.errors import ConfigError
from tierd.testing.suite import NAMESPACE, OTHER_NAMESPACE, get, make_chain, put
from tierd.types import PAGE_BYTES
from tierd_backends.file import directory, fsck
from tierd_backends.file.slab import Slab, data_path, index_path

RECORD_BYTES = PAGE_BYTES + SLOT_BYTES


@pytest.fixture
async def tier(tmp_path):
    """A closed tier of two slabs with 8 blocks each."""
    path = tmp_path / "tier"
    blocks, capacity = await disk.two_slabs(path)
    return path, blocks, capacity


def contents(path):
    """All files of the tier except the lock, which names its last holder."""
    return {p: p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file() and p.name != "LOCK"}


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def load(folder, number, **more):
    slab = Slab.load(folder, number, direct=False, **more)
    assert slab is not None
    return slab


# Damage.


async def test_sound_tier_is_clean(tier):
    """A sound tier would be called damaged, or be changed by the check."""
    path, blocks, _ = tier
    before = contents(path)
    for repair in (False, True):
        for quick in (False, True):
            report = check(path, repair=repair, quick=quick)
            assert (report.blocks, report.found) == (len(blocks), 0)
            assert report.read_bytes == len(blocks) * (PAGE_BYTES if quick else RECORD_BYTES)
    assert contents(path) == before


def _flip_payload(folder):
    flip(folder / "00000002.slab", 3 * RECORD_BYTES + PAGE_BYTES + BLOCK_BYTES - 1)


def _flip_header(folder):
    flip(folder / "00000002.slab", 3 * RECORD_BYTES + 70)


def _swap_records(folder):
    with (folder / "00000002.slab").open("r+b") as file:
        raw = file.read(2 * RECORD_BYTES)
        file.seek(0)
        file.write(raw[RECORD_BYTES:] + raw[:RECORD_BYTES])


def _other_slots(folder):
    other = folder / "made"
    os.makedirs(other / folder.name)
    slab = Slab.create(other / folder.name, 2, slot_bytes=PAGE_BYTES, records=4, direct=False)
    slab.close()
    for made in (data_path, index_path):
        os.replace(made(other / folder.name, 2), made(folder, 2))
    shutil.rmtree(other)


@pytest.mark.parametrize(
    ("harm", "found", "sound"),
    [
        (_flip_payload, {fsck.BAD_PAYLOAD: 1}, 15),
        (_flip_header, {fsck.BAD_HEADER: 1}, 15),
        (_swap_records, {fsck.BAD_HEADER: 2}, 14),
        (_other_slots, {fsck.OTHER_SLOTS: 1}, 8),
        (disk.cut_slab, {fsck.LOST: 5, fsck.WRONG_SIZE: 1}, 11),
        (disk.empty_slab, {fsck.LOST: 8, fsck.WRONG_SIZE: 1}, 8),
        (disk.cut_index, {fsck.BAD_ENTRY: 1, fsck.WRONG_SIZE: 1}, 11),
        (disk.long_index, {fsck.WRONG_SIZE: 1}, 16),
        (disk.no_index, {fsck.UNUSABLE: 1}, 8),
        (disk.no_slab, {fsck.UNUSABLE: 1}, 8),
        (disk.empty_index, {fsck.UNUSABLE: 1}, 8),
        (disk.bad_index_head, {fsck.UNUSABLE: 1}, 8),
        (disk.bad_entries, {fsck.BAD_ENTRY: 5}, 11),
        (disk.other_slab, {fsck.BAD_HEADER: 16}, 0),
    ],
)
async def test_damage_is_found_and_repaired(tier, harm, found, sound):
    """Damage would stay unseen, a repaired tier would not be clean, or sound blocks would be
    dropped."""
    path, blocks, capacity = tier
    harm(path / NAMESPACE.hex())
    before = contents(path)
    report = check(path)
    assert kinds(report) == found
    assert report.left == report.found == sum(found.values())
    assert report.blocks == sound
    assert contents(path) == before

    repaired = check(path, repair=True)
    assert kinds(repaired) == found
    assert (repaired.left, repaired.blocks) == (0, sound)
    again = check(path)
    assert (again.found, again.blocks) == (0, sound)
    async with running(path, capacity=capacity) as backend:
        assert backend.stats().blocks == sound
        assert backend.counters["lost_slabs_total"] == backend.counters["corrupt_total"] == 0
        assert (await get(backend, blocks)).count(Outcome.HIT) == sound
        assert set(await put(backend, blocks)) <= {Outcome.STORED, Outcome.PRESENT}
        assert await get(backend, blocks) == [Outcome.HIT] * 16


@pytest.mark.parametrize("harm", [disk.directory_for_slab, disk.fifo_for_index])
async def test_directories_and_fifos_are_left_alone(tier, harm):
    """Repair would remove what tierd has not made, or report it as repaired."""
    path, _, _ = tier
    harm(path / NAMESPACE.hex())
    report = check(path, repair=True)
    assert kinds(report) == {fsck.UNREADABLE: 1}
    assert (report.left, report.blocks) == (1, 8)
    assert sum(p.is_file() for p in (path / NAMESPACE.hex()).iterdir()) == 3


async def test_quick_check_skips_payloads(tier):
    """A quick check would take as long as a full one, or miss a record that holds a different
    block."""
    path, _, _ = tier
    _flip_payload(path / NAMESPACE.hex())
    flip(path / NAMESPACE.hex() / "00000001.slab", 70)
    assert kinds(check(path, quick=True)) == {fsck.BAD_HEADER: 1}
    assert kinds(check(path)) == {fsck.BAD_HEADER: 1, fsck.BAD_PAYLOAD: 1}


async def test_damaged_copy_of_a_block_is_dropped(tier):
    """Of two copies of a block the damaged one would stay, or both would be dropped."""
    path, blocks, capacity = tier
    folder = path / NAMESPACE.hex()
    for suffix in ("slab", "index"):
        shutil.copy(folder / f"00000001.{suffix}", folder / f"00000003.{suffix}")
    flip(folder / "00000001.slab", PAGE_BYTES)
    flip(folder / "00000003.slab", RECORD_BYTES + PAGE_BYTES)
    report = check(path, repair=True)
    assert kinds(report) == {fsck.BAD_PAYLOAD: 2, fsck.TWICE: 6}
    assert (report.blocks, report.left) == (16, 0)
    assert check(path).found == 0
    async with running(path, capacity=2 * capacity) as backend:
        assert await get(backend, blocks) == [Outcome.HIT] * 16


async def test_newer_of_two_copies_stays(tier):
    """Repair would drop the copy that the tier itself takes at its start."""
    path, _, _ = tier
    folder = path / NAMESPACE.hex()
    for suffix in ("slab", "index"):
        shutil.copy(folder / f"00000001.{suffix}", folder / f"00000003.{suffix}")
    slab = load(folder, 1, read_only=False)
    uses = [entry.last_use for entry in slab.entries()]
    for record, use in enumerate(uses):
        slab.uses[record] = use + (1 << 40)
    slab.save_uses()
    slab.close()
    assert kinds(check(path, repair=True)) == {fsck.TWICE: 8}
    for number, left in ((1, 8), (3, 0)):
        slab = load(folder, number, read_only=True)
        assert len(slab.entries()) == left
        slab.close()


async def test_foreign_files_are_never_touched(tier):
    """Repair would remove files of other programs, or call them damage."""
    path, _, _ = tier
    planted = [path / "notes.txt", path / NAMESPACE.hex() / "1.slab", path / "FORMAT.old"]
    for each in planted:
        each.write_text("mine")
    (path / "lost+found").mkdir()
    report = check(path, repair=True)
    assert (report.found, report.foreign.count) == (0, 4)
    assert all(each.read_text() == "mine" for each in planted)


async def test_bad_sector(tier, monkeypatch):
    """One unreadable sector would cost its neighbours, or end the check."""
    path, _, _ = tier
    read = Slab.read_raw

    def fails(slab, record, view):
        size = max(1, len(view) // RECORD_BYTES)
        if slab.number == 2 and record <= 4 < record + size:
            raise OSError(errno.EIO, "Input/output error")
        return read(slab, record, view)

    monkeypatch.setattr(Slab, "read_raw", fails)
    report = check(path, repair=True)
    assert kinds(report) == {fsck.UNREADABLE: 1}
    assert (report.blocks, report.left) == (15, 0)
    assert "record 4" in report.damage[fsck.UNREADABLE].examples[0]
    assert check(path).found == 0


async def test_failed_repair_is_reported(tier, monkeypatch):
    """Damage that could not be repaired would be reported as repaired."""
    path, _, _ = tier
    _flip_payload(path / NAMESPACE.hex())

    def fails(slab, record):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Slab, "clear", fails)
    assert check(path, repair=True).left == 1


async def test_progress_is_reported(tier, monkeypatch):
    """An operator would not know whether the check of a large disk goes on, or how far it is."""
    path, _, _ = tier
    disk.bad_entries(path / NAMESPACE.hex())
    check(path, repair=True)  # Empty records are not read.
    steps: list[tuple[int, int]] = []
    monkeypatch.setattr(fsck, "TELL_S", 0.0)
    check(path, tell=lambda done, whole: steps.append((done, whole)))
    whole = 16 * RECORD_BYTES
    assert {size for _, size in steps} == {whole}
    assert steps[-2:] == [(whole, whole)] * 2
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)


# The directory and its owner.


async def test_tier_in_use_is_not_checked(tmp_path, monkeypatch):
    """A check beside a running tierd would take blocks that are being written for damage."""
    monkeypatch.setattr(directory, "LOCK_S", 0.0)
    async with running(tmp_path / "tier"):
        said = f"in use by process {os.getpid()}: stop tierd first"
        with pytest.raises(ConfigError, match=said):
            check(tmp_path / "tier")


async def test_tierd_cannot_start_during_a_check(tier, monkeypatch):
    """A tierd that starts meanwhile would write to slabs that are being repaired."""
    monkeypatch.setattr(directory, "LOCK_S", 0.0)
    path, _, capacity = tier
    tried: list[bool] = []

    def tell(done, whole):
        if not tried:
            with pytest.raises(ConfigError, match="in use"):
                directory.StoreDirectory(path).open()
            tried.append(True)

    check(path, repair=True, tell=tell)
    assert tried
    async with running(path, capacity=capacity):
        pass


@pytest.mark.parametrize("repair", [False, True])
def test_directory_without_a_tier(tmp_path, repair):
    """A wrong path would be made into a tier, or be called clean."""
    (tmp_path / "notes.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "notes.txt"):
        with pytest.raises(ConfigError, match="not the directory of a file tier"):
            check(path, repair=repair)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


async def test_fsck_of_an_unknown_version(tier):
    """An older tierd would take all slabs of a newer one for damage."""
    path, _, _ = tier
    (path / "FORMAT").write_text("tierd file store 3\n")
    before = contents(path)
    with pytest.raises(ConfigError, match="FORMAT"):
        check(path, repair=True)
    assert contents(path) == before


async def test_missing_format_file_is_found_and_repaired(tier):
    """A directory without its FORMAT file would be called clean, or would not be recognised as a
    tier."""
    path, blocks, _ = tier
    (path / "FORMAT").unlink()
    report = check(path)
    assert (kinds(report), report.left) == ({fsck.NO_FORMAT: 1}, 1)
    assert report.blocks == len(blocks)
    assert not (path / "FORMAT").exists()
    assert check(path, repair=True).left == 0
    assert check(path).found == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away takes root")
async def test_repair_by_root_keeps_the_owner(tier):
    """After a repair by root, tierd's own user could no longer open its tier."""
    path, _, _ = tier
    for each in (path, *path.rglob("*")):
        os.chown(each, 1234, 1234)
    for lost in ("FORMAT", "LOCK"):
        (path / lost).unlink()
        check(path, repair=True)
    assert {each.stat().st_uid for each in (path, *path.rglob("*"))} == {1234}


# The command.


def configured(tmp_path, path):
    config = tmp_path / "tierd.toml"
    config.write_text(
        f'[host]\ncapacity = "64MiB"\n[[storage]]\ntype = "file"\nname = "nvme"\npath = "{path}"\n'
        'capacity = "1GiB"\n[[storage]]\ntype = "redis"\nurl = "redis://localhost"\n'
    )
    return config


@pytest.mark.slow
async def test_exit_codes_and_output_of_the_command(tier, tmp_path, capsys):
    """A script would take damage for none, or none for damage."""
    path, _, _ = tier
    config = str(configured(tmp_path, path))
    for words in (["fsck", "--config", config], ["fsck", str(path)]):
        assert main(words) == 0
        assert "16 sound blocks" in capsys.readouterr().out
    _flip_payload(path / NAMESPACE.hex())
    assert main(["fsck", str(path), "--quick"]) == 0
    assert main(["fsck", str(path)]) == 4
    out = capsys.readouterr().out
    assert "payloads with a wrong checksum: 1, repaired 0" in out
    assert f"{NAMESPACE.hex()}/00000002.slab, record 3" in out
    assert main(["fsck", "--config", config, "--tier", "nvme", "--json", "--repair"]) == 1
    (result,) = json.loads(capsys.readouterr().out)
    assert (result["tier"], result["blocks"], result["left"]) == ("nvme", 15, 0)
    assert result["damage"][fsck.BAD_PAYLOAD]["repaired"] == 1
    assert main(["fsck", str(path)]) == 0


@pytest.mark.slow
async def test_wrong_arguments_of_the_command(tier, tmp_path, capsys):
    """With a wrong name the command would check nothing and report that all is well."""
    path, _, _ = tier
    config = str(configured(tmp_path, path))
    for words, named in (
        (["--config", config, "--tier", "disk"], "nvme, redis"),
        (["--config", config, "--tier", "redis"], "tierd scrub"),
        ([str(tmp_path)], "not the directory"),
        ([str(path), "--tier", "nvme"], "pass PATH or --tier NAME, not both"),
    ):
        assert main(["fsck", *words]) == 2
        assert named in capsys.readouterr().err


async def test_all_namespaces_are_checked(tmp_path):
    """Only the first namespace of a tier that several engines share would be checked."""
    async with running(tmp_path / "tier", capacity=64 << 20) as backend:
        for namespace in (NAMESPACE, OTHER_NAMESPACE):
            await put(backend, make_chain("many", 40, BLOCK_BYTES, namespace))
    flip(tmp_path / "tier" / OTHER_NAMESPACE.hex() / "00000001.slab", PAGE_BYTES)
    report = check(tmp_path / "tier", repair=True)
    assert (report.blocks, kinds(report)) == (79, {fsck.BAD_PAYLOAD: 1})


def test_every_kind_of_damage_has_a_text():
    """An operator would read the key of the JSON output."""
    kinds = {value for name, value in vars(fsck).items() if name.isupper() and type(value) is str}
    assert set(fsck.TEXTS) == kinds
